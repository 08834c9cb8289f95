"""Programs on the run library, on real ranks in the stand-in image: killed, stopped, resumed, misused."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

import pytest
from labkit import ROOT, run
from torchkit import run_script

pytestmark = pytest.mark.docker
HERE = Path(__file__).parent


def many(standin: str, runs: Path, script: str) -> str:
    """Run the Python `script`, in which ``start(RANKS, PROGRAM, FOLDER)`` is a run without a launcher."""
    done = run_script(standin, runs, "run_many", script)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


def test_plain_loop_needs_ten_lines():
    texts = [
        (ROOT / f"examples/{name}.py").read_text().splitlines()[1:] for name in ("plain_ddp", "plain_ddp_run")
    ]
    new = [line for line in difflib.ndiff(*texts) if line.startswith("+ ") and line.strip() != "+"]
    assert len(new) <= 10, new


@pytest.mark.parametrize(
    "ranks", [3, pytest.param(2, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)]
)
def test_killed_and_stopped_loop_resumes_bitwise(standin, tmp_path, ranks):
    # A kill and a stop in the middle of two epochs; dropout needs the random numbers.
    script = """
own = "/examples/plain_ddp_run.py"
each = 4000 // 20 // RANKS + 1
assert start(RANKS, own, "whole") == [0] * RANKS
assert -9 in start(RANKS, own, "cut", at=each + 20, rank=1, pause=0.01)  # the checkpoint has to be whole
assert start(RANKS, own, "cut", at=2 * each + 5, how=signal.SIGUSR1, pause=0.01) == [85] * RANKS
assert start(RANKS, own, "cut") == [0] * RANKS
same("whole", "cut")
state = states("whole")
assert sorted(state) == ["model", "optimizer", "ranks", "step"] and len(state["ranks"]) == RANKS
files = sorted(path.name for path in max(Path("whole/checkpoints").iterdir()).iterdir())
assert files == [".metadata", "__0_0.distcp", "manifest.json"], files
"""
    told = many(standin, tmp_path, script.replace("RANKS", str(ranks)))
    assert told.count("run: resumes after step ") == 2, told
    assert told.count("; the state of step ") == 1, told


@pytest.mark.soak
def test_program_to_copy_resumes_with_its_evaluation(standin, tmp_path):
    # Killed between the last step of an epoch and its evaluation, and stopped in the next epoch.
    script = """
def own(folder, **more):
    words = "--samples 600 --batch-size 20 --epochs 3 --save-every 5".split()
    return start(2, "/examples/train.py", folder, args=words, **more)
assert own("whole") == [0, 0]
assert -9 in own("cut", at=15, pause=0.05)
assert own("cut", at=20, how=signal.SIGTERM, pause=0.05) == [85, 85]
assert own("cut") == [0, 0]
same("whole", "cut")
one, other = (torch.load(f"{folder}/weights.pt", weights_only=True) for folder in ("whole", "cut"))
assert one["accuracy"] == other["accuracy"] > 0.3
"""
    told = many(standin, tmp_path, script)
    assert told.count("run: resumes after step ") == 2, told
    assert '"loss":' in (tmp_path / "cut/metrics.jsonl").read_text()


PROGRAMS = """
torch.manual_seed(1)
data = TensorDataset(torch.arange(24.0)[:, None])

def training(loader, sums=False, **options):
    model = torch.nn.Linear(1, 1)
    seen = []
    with Run.start() as run:
        run.track(model=model, **options.pop("track", {}))
        run.restore()
        for step, batch in run.steps(loader() if callable(loader) else loader, **options):
            values = batch[0] if isinstance(batch, list) else torch.tensor([float(batch)])
            seen.append((step, values.flatten().tolist()))
            total = values.sum()
            if sums:
                dist.all_reduce(total)
            with torch.no_grad():
                model.weight += total * 0.001
            run.log(weight=model.weight.sum(), rank=dist.get_rank())
    print("seen", dist.get_rank(), seen, flush=True)
"""


TORCHDATA = """
import shutil, subprocess, sys
words = "install -q --no-index --no-deps --find-links . --root-user-action ignore torchdata".split()
subprocess.run([sys.executable, "-m", "pip", *words], check=True)
from torchdata.stateful_dataloader import StatefulDataLoader

def train(data, options, kill_at=0, save_every=1):
    torch.manual_seed(7)
    loader = StatefulDataLoader(data(), batch_size=4, num_workers=WORKERS, **options)
    model = torch.nn.Linear(1, 1)
    with Run.start() as run:
        run.track(model=model, loader=loader)
        run.restore()
        for epoch in range(run.epoch, 3):
            for step, (values,) in run.steps(loader, save_every=save_every):
                with torch.no_grad():
                    model.weight.mul_(1.01).add_((values + 1).sum() * 0.001 * torch.rand(()))
                if step == kill_at:
                    run.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
            run.save()

def cut_and_compare(data, **options):
    # Two kills in a pass, a stop at its last batch, and one that the ranks see at the end of a pass.
    play = lambda **how: train(data, options, **how)
    name = f"{data.__name__}-{WORKERS}"
    assert start(1, play, f"{name}-whole") == [0]
    assert start(1, lambda: play(kill_at=2), name) == [-9]
    assert start(1, lambda: play(kill_at=4), name) == [-9]
    assert start(1, play, name, at=6, how=signal.SIGTERM) == [85]
    assert start(1, lambda: play(save_every=0), name, at=9, how=signal.SIGTERM) == [85]
    assert start(1, play, name) == [0]
    same(f"{name}-whole", name, "model")
    # A checkpoint between two passes.
    shutil.rmtree(name)
    assert start(1, lambda: play(kill_at=8, save_every=0), name) == [-9]
    assert start(1, play, name) == [0]
    same(f"{name}-whole", name, "model")
"""
STREAMS = """
class Stateless(IterableDataset):
    def __iter__(self):
        return iter([(float(value),) for value in torch.randperm(22)])

class AtTheEnd(IterableDataset):
    # Begins again when a pass has ended.
    place = 0
    def __iter__(self):
        while self.place < 22:
            self.place += 1
            yield (float(self.place),)
        self.place = 0
    def state_dict(self):
        return {"place": self.place}
    def load_state_dict(self, state):
        self.place = state["place"]

class AtTheStart(IterableDataset):
    # Begins again when a pass begins, but for the first one after a resume.
    place, resumed = 0, None
    def __iter__(self):
        self.place, self.resumed = self.resumed or 0, None
        while self.place < 22:
            self.place += 1
            yield (float(self.place),)
    def state_dict(self):
        return {"place": self.place}
    def load_state_dict(self, state):
        self.resumed = state["place"]

for data in (Stateless, AtTheEnd, AtTheStart):
    cut_and_compare(data)
"""
SEQUENCES = """
def mapped():
    return TensorDataset(torch.arange(22.0)[:, None])

cut_and_compare(mapped, shuffle=True)
"""


@pytest.mark.soak  # it fetches a package
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("script", [SEQUENCES, STREAMS], ids=["sequences", "streams"])
def test_loader_of_torchdata_resumes_bitwise(standin, tmp_path, script, workers):
    fetch = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp_path, "torchdata==0.11.0")
    done = run(*fetch)
    assert done.returncode == 0, done.stderr
    many(standin, tmp_path, f"WORKERS = {workers}\n{TORCHDATA}{script}")


def test_requests_to_stop_end_with_their_codes(standin, tmp_path):
    script = """
import shutil
loop = lambda: training(range(400))
more = {"at": 3, "how": signal.SIGTERM, "pause": 0.01}
assert start(2, loop, "alone", **more) == [85, 85]
assert start(2, loop, "torchrun", **more, TORCHELASTIC_RUN_ID="none") == [0, 0]
assert os.path.exists("torchrun/requeue")
print("requeued:", open("torchrun/requeued").read())
assert start(2, loop, "torchrun", TORCHELASTIC_RUN_ID="none") == [0, 0]
assert not os.path.exists("torchrun/requeue")
os.mkdir("node"), open("node/stop", "w").close()
launched = {"IMGKIT_STOP_DIR": "node", "IMGKIT_JOB_ID": "4711", "pause": 0.01}
assert start(2, loop, "launched", **launched) == [0, 0]
print("mark:", open("node/state-saved").read())
assert start(2, loop, "asked", at=2, how=signal.SIGUSR2, pause=0.01) == [85, 85]
open("asked/stop", "w").close()
assert start(1, loop, "asked") == [2]
def limited():
    with Run.start(stop_after_s=float(os.environ.get("STOP_AFTER", "50"))) as run:
        run.track(model=torch.nn.Linear(1, 1))
        while run.step < 20:
            if run.due():
                run.save()
# The second attempt of a run, and a new one in its folder.
assert start(1, limited, "late", IMGKIT_FIRST_ATTEMPT=time.monotonic() - 60) == [85]
assert start(1, limited, "anew") == [0]
no_time = {"TORCHELASTIC_RUN_ID": "none", "STOP_AFTER": 0}
assert start(1, limited, "stuck", **no_time) == [0]
assert os.path.exists("stuck/requeue")
shutil.rmtree("stuck/checkpoints")  # so the next start makes no progress
assert start(1, limited, "stuck", **no_time) == [0]
assert not os.path.exists("stuck/requeue")
assert open("stuck/result").read().split() == ["local", "85"]
"""
    told = many(standin, tmp_path, PROGRAMS + script)
    assert re.search(r"^requeued: local \d+$", told, re.MULTILINE), told
    assert told.count(") where it was at the last start: not requeued") == 1, told
    assert "mark: 4711 " in told
    assert "asked/stop: this file prevents the run from starting" in told
    assert '"weight":' in (tmp_path / "alone/metrics.jsonl").read_text()


def test_misuse_is_refused_with_names(standin, tmp_path):
    script = """
class Endless(IterableDataset):
    def __iter__(self):
        return iter([])
class Scaling(DataLoader):
    def __iter__(self):
        return (batch * 2 for batch in super().__iter__())
class Wrapper:
    def __iter__(self):
        return iter([])
class Static(list):
    def state_dict(self):
        return {"epoch": 0}
    def load_state_dict(self, state):
        pass
static = Static(range(4))
unordered = DataLoader(data, num_workers=1, in_order=False)
for number, loader in enumerate((DataLoader(Endless()), Scaling(data), Wrapper(), static, unordered)):
    assert start(1, lambda: training(loader), f"loader{number}") == [2]
assert start(1, lambda: training(static, save_every=1, track={"loader": static}), "static") == [2]
assert start(2, lambda: training(range(3 + dist.get_rank())), "unequal") == [2, 2]
class Short(list):
    def __iter__(self):
        return iter(range(3 + int(os.environ["RANK"])))
assert start(2, lambda: training(Short([0] * 5)), "short") == [1, 1]
assert start(1, lambda: training(range(3), track={"loss": 3}), "stateless") == [2]
class Broken:
    def state_dict(self):
        raise AttributeError("no inner loader")
    load_state_dict = None.__init__
assert start(1, lambda: training(range(3), track={"loader": Broken()}), "stateless") == [2]
from torch.distributed.fsdp import FullyShardedDataParallel
def sharded():
    shared = FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))
    dist.barrier()
    training(range(3), track={"shared": shared})
assert start(2, sharded, "sharded") == [2, 2]
assert start(2, lambda: training(range(3), save_every=1 + dist.get_rank()), "options") == [2, 2]
assert start(1, lambda: training(range(3)), "kept") == [0]
def forgetful():
    with Run.start() as run:
        run.track(model=torch.nn.Linear(1, 1))
        for step, batch in run.steps(range(3), save_every=1):
            pass
assert start(1, forgetful, "kept") == [2]
def new_run():
    with Run.start() as run:
        run.track(model=torch.nn.Linear(1, 1))
        run.refuse_older()
        print("a used folder counts as new")
assert start(1, new_run, "kept") == [2]
assert start(1, lambda: training(range(3), track={"other": torch.nn.Linear(1, 1)}), "kept") == [2]
def wider():
    with Run.start() as run:
        run.track(model=torch.nn.Linear(2, 1))
        run.restore()
assert start(1, wider, "kept") == [2]
assert start(1, lambda: training(range(3)), "kept") == [2]  # it is done
held = Run.start("held")
assert start(1, lambda: training(range(3)), "held") == [2]
def scheduled():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with Run.start() as run:
        run.track(model=model, optimizer=optimizer)
        run.restore()
assert start(1, scheduled, "scheduled") == [2]
def unlike(passes=lambda: 1, restores=lambda: True, name=lambda: "model"):
    with Run.start() as run:
        run.track(**{name(): torch.nn.Linear(1, 1)})
        if restores():
            run.restore()
        for _ in range(passes()):
            for step, batch in run.steps(range(3), save_every=1):
                pass
assert start(2, lambda: unlike(passes=lambda: 1 + dist.get_rank()), "passes") == [1, 1]
assert start(2, lambda: unlike(restores=lambda: not dist.get_rank()), "restores") == [1, 1]
assert start(2, lambda: unlike(name=lambda: f"model{dist.get_rank()}"), "names") == [2, 2]
"""
    output = many(standin, tmp_path, PROGRAMS + script)
    assert "a used folder counts as new" not in output
    for text in (
        "this loader cannot resume at its sample: a DataLoader over the IterableDataset Endless",
        "this loader cannot resume at its sample: Scaling has an __iter__ of its own",
        "this loader cannot resume at its sample: Wrapper",
        "this loader cannot resume at its sample: DataLoader with in_order=False gives batches as they come\n"
        "  -> DataLoader(..., in_order=True)",
        "the state of this Static is not tracked",
        "the state of this Static is the same as at the start of the pass",
        "the ranks begin different passes: rank 0: 3 batches after step 0, save_every=0, tracking model, ",
        "the ranks have taken different numbers of steps: rank 0: 3, rank 1: 4",
        "run.track: loss is a int without a state",
        "run.track: the state of loader, a Broken, cannot be read: no inner loader",
        "run.track: shared is a FullyShardedDataParallel, whose state no rank has as a whole",
        "after step 0, save_every=2, tracking model",
        "this run would replace the checkpoints of another run",
        "the checkpoint contains model, and this program tracks model, other",
        "a different model: weight is (1, 1) in the checkpoint and (1, 2) in the model",
        "the checkpoint has 1 finished epochs, and the program never read run.epoch",
        "held: another run writes into this folder (process ",
        "run.track: optimizer has a learning rate scheduler that is not tracked: it would start over",
        "the ranks are at different calls: rank 1: run.steps, rank 0: the end of the run",
        "the ranks are at different calls: rank 0: run.restore, rank 1: run.steps",
        "the ranks track different objects: rank 0: model0, rank 1: model1",
    ):
        assert text in output, (text, output)


PASSES = """
def passes(body, epochs=3):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    with Run.start() as run:
        run.track(model=model)
        run.restore()
        for epoch in range(run.epoch, epochs):
            body(run, epoch, model)

def learn(model, values):
    with torch.no_grad():
        model.weight.mul_(1.01).add_(values.float().sum() * 0.001 * torch.rand(()))
"""


def test_passes_that_a_resume_could_not_tell_apart_are_refused(standin, tmp_path):
    script = """
def leaves_early(run, epoch, model):
    for step, _ in run.steps(range(4)):
        if step % 3 == 0:
            break
def catches(run, epoch, model):
    try:
        for step, _ in run.steps(range(4)):
            if step == 3:
                raise KeyError
    except KeyError:
        pass
def two_without_names(run, epoch, model):
    for loader in (DataLoader(data, batch_size=4), DataLoader(data, batch_size=2)):
        for _ in run.steps(loader):
            pass
def within(run, epoch, model):
    for _ in run.steps(range(4), name="a"):
        for _ in run.steps(range(2), name="b"):
            pass
def other_order(run, epoch, model):
    for name in ("ab", "ba")[epoch % 2]:
        for _ in run.steps(range(4), name=name):
            pass
for body in (leaves_early, catches, two_without_names, within, other_order):
    assert start(1, lambda: passes(body), body.__name__) == [2]
def shrinks(run, epoch, model):
    for step, _ in run.steps(range(run.step, 6), save_every=1):
        pass
assert start(1, lambda: passes(shrinks, 1), "shrinks", at=3, how=signal.SIGTERM) == [85]
assert start(1, lambda: passes(shrinks, 1), "shrinks") == [2]
def ends_by_break(run, epoch, model):
    assert run.step < UNTIL
    for step, (values,) in run.steps(DataLoader(data, batch_size=2, shuffle=True), save_every=1):
        learn(model, values)
        if step == UNTIL:
            break
for UNTIL, folder in ((10, "whole"), (5, "cut"), (10, "cut")):
    assert start(1, lambda: passes(ends_by_break, 1), folder) == [0]
same("whole", "cut")
"""
    output = many(standin, tmp_path, PROGRAMS + PASSES + script)
    assert output.count("the pass of the loop without a name was left after 3 of 4 batches, and another") == 2
    for text in (
        " has no name, and goes over several loaders: a resume could not tell their passes from each other",
        "the loop b begins while a pass of the loop a is under way",
        "epoch 1 comes to the loop b before the loop a",
        "the checkpoint was over 6 samples, and this loader has 3",
    ):
        assert text in output, (text, output)


def test_named_loops_resume_wherever_they_are_cut(standin, tmp_path):
    # The second loop has a generator of its own, and the program does something between the two.
    script = """
draw = torch.Generator().manual_seed(3)
second = DataLoader(data, batch_size=4, shuffle=True, generator=draw)
def body(run, epoch, model):
    for step, (values,) in run.steps(DataLoader(data, batch_size=6, shuffle=True), name="a", save_every=3):
        learn(model, values)
    with torch.no_grad():
        model.bias.add_(1)
    run.save()
    assert len(run.steps(second, name="b")) <= 6
    for step, (values,) in run.steps(second, name="b", save_every=3):
        learn(model, values)

assert start(1, lambda: passes(body, 2), "whole") == [0]
for step in CUTS:
    assert start(1, lambda: passes(body, 2), f"cut{step}", at=step, pause=0.02) == [-9]
    assert start(1, lambda: passes(body, 2), f"cut{step}") == [0]
    same("whole", f"cut{step}")
"""
    many(standin, tmp_path, PROGRAMS + PASSES + script.replace("CUTS", "(2, 4, 5, 8, 12, 15)"))


def test_damaged_checkpoints_are_skipped(standin, tmp_path):
    script = """
import random, shutil
newest = Path("damaged/checkpoints/step-0000000004")
assert start(2, lambda: training(range(4), save_every=2), "damaged") == [0, 0]
with open(newest / "__0_0.distcp", "ab") as file:
    file.write(b"more")
assert start(2, lambda: training(range(4), save_every=2), "damaged") == [0, 0]

class Runs:
    def __reduce__(self):
        return print, ("the pickle ran code",)
content = (newest / ".metadata").read_bytes()
(newest / ".metadata").write_bytes(__import__("pickle").dumps(Runs()).ljust(len(content)))
assert start(2, lambda: training(range(4), save_every=2), "damaged") == [0, 0]

numbers = random.Random(7)
def found(folder):
    run = Run.start("other", keep=1)
    checkpoint = run.find(folder)
    run._lock.close()
    return checkpoint.step
for turn in range(FLIPS):
    path = sorted(newest.iterdir())[turn % 3]
    whole = path.read_bytes()
    bit = numbers.randrange(8 * len(whole))
    path.write_bytes(whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :])
    assert found("damaged") == 2, (path, bit)
    path.write_bytes(whole)
assert found("damaged") == 4
"""
    output = many(standin, tmp_path, PROGRAMS + script.replace("FLIPS", "200"))
    assert "checkpoint skipped: damaged/checkpoints/step-0000000004/__0_0.distcp has" in output
    assert ".metadata is damaged: its sha256 differs from the manifest" in output
    assert output.count("run: resumes after step 2: ") == 2
    assert "the pickle ran code" not in output


FOLDERS = """
import json
from imgkit_entrypoints import json_text
from imgkit_entrypoints.run import disk

def training(epochs=1, **options):
    model = torch.nn.Linear(1, 1)
    with Run.start(**options) as run:
        run.track(model=model)
        run.restore()
        for _ in range(run.epoch, epochs):
            for _ in run.steps(range(2), save_every=1):
                run.wait()

def steps(folder):
    return sorted(path.name.partition(".")[0] for path in Path(folder, "checkpoints").iterdir())

def damage(path):
    with open(path / "__0_0.distcp", "ab") as file:
        file.write(b"more")

def rewrite_index(path):
    '''As another release of torch has written it: whole, and no pickle that this one reads.'''
    (path / ".metadata").write_bytes(b"newer")
    manifest = json.loads((path / "manifest.json").read_text())
    json_text.unseal(manifest)
    manifest["files"][".metadata"] = disk.describe_file(path / ".metadata")
    (path / "manifest.json").write_text(json.dumps(json_text.seal(manifest)))
"""


def test_unreadable_checkpoints_are_refused_or_set_aside(standin, tmp_path):
    script = """
first, second = ["step-0000000001", "step-0000000002"], ["step-0000000003", "step-0000000004"]
skipped = ["skipped-step-0000000001", "skipped-step-0000000002"]
assert start(2, training, "run") == [0, 0]
damage(Path("run/checkpoints", first[1]))
rewrite_index(Path("run/checkpoints", first[0]))
assert start(2, training, "run") == [2, 2]
assert start(2, lambda: training(ignore_checkpoints=dist.get_rank() == 1), "run") == [2, 2]
assert steps("run") == first
assert start(2, lambda: training(ignore_checkpoints=True), "run") == [0, 0]
assert steps("run") == [*skipped, *first]
assert start(2, lambda: training(epochs=2, ignore_checkpoints=True), "run") == [0, 0]  # as a requeued job
assert steps("run") == [*skipped, *second]
damage(Path("run/checkpoints", second[1]))
assert start(2, lambda: training(epochs=2), "run") == [0, 0]
assert steps("run") == [*skipped, "skipped-step-0000000004", *second]
"""
    output = many(standin, tmp_path, FOLDERS + script)
    path = "run/checkpoints/step-000000000"
    refusal = (
        rf"run: none of the checkpoints can be read: {path}2/__0_0\.distcp has \d+ bytes, not \d+, "
        rf"torch \S+ cannot read {path}1: UnpicklingError: .*\n"
        r"  -> name another folder, or start anew: Run\.start\(ignore_checkpoints=True\), dist-train "
        "--ignore-checkpoints"
    )
    assert len(re.findall(refusal, output)) == 4, output
    assert [line[-1] for line in re.findall(rf"run: resumes after step \d: {path}\d", output)] == ["2", "3"]


def test_checkpoints_of_another_user_are_refused(standin, tmp_path):
    script = """
os.chmod(".", 0o755)
ALICE, BOB = 2001, 2002

def run_as(user, folder, **options):
    def program():
        os.setgid(user)
        os.setuid(user)
        training(**options)
    codes = start(2, program, folder)
    Path(folder, "run.lock").unlink()
    return codes

for folder in ("of-alice", "of-bob", "hidden"):
    Path(folder).mkdir()
    os.chown(folder, ALICE, ALICE)
    os.chmod(folder, 0o777)
assert run_as(ALICE, "of-alice") == [0, 0]
assert run_as(BOB, "of-alice", ignore_checkpoints=True) == [2, 2]
assert run_as(BOB, "of-bob") == run_as(BOB, "hidden") == [0, 0]
assert run_as(ALICE, "of-bob") == [2, 2]
os.chmod("hidden/checkpoints", 0o700)
assert run_as(ALICE, "hidden") == [2, 2]
assert steps("of-alice") == steps("of-bob") == steps("hidden") == ["step-0000000001", "step-0000000002"]
"""
    output = many(standin, tmp_path, FOLDERS + script)
    for folder, user in (("of-alice", 2001), ("of-bob", 2002)):
        refusal = (
            f"{folder}: none of the checkpoints can be read: "
            f"{folder}/checkpoints/step-0000000002 belongs to user {user}, "
            f"{folder}/checkpoints/step-0000000001 belongs to user {user}\n  -> name another folder"
        )
        assert output.count(refusal) == 2, output
    refusal = "hidden/checkpoints cannot be listed: Permission denied\n  -> name a folder that you can read"
    assert output.count(refusal) == 2, output
    assert "or start anew" not in output


@pytest.mark.soak
def test_other_number_of_ranks_takes_the_rest_of_the_samples(standin, tmp_path):
    script = """
from torch.utils.data import DistributedSampler
def shared():
    sampler = DistributedSampler(data, shuffle=False)
    return DataLoader(data, batch_size=2, sampler=sampler)
loop = lambda: training(shared, sums=True, save_every=1)
assert start(2, loop, "shrinking", at=3, how=signal.SIGUSR1, pause=0.02)[0] == 85
print("below", flush=True)
assert start(1, loop, "shrinking") == [0]
"""
    told = many(standin, tmp_path, PROGRAMS + script)
    (line,) = [line for line in told.splitlines() if line.startswith("seen 0")]
    steps = eval(line.split(" ", 2)[2])  # noqa: S307 - printed by the script above
    assert [value for _, values in steps for value in values] == [
        float(one) for one in range(24 - 2 * len(steps), 24)
    ]
