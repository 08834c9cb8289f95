"""Programs on the run library, on real ranks in the stand-in image: killed, stopped, resumed, misused."""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path

import pytest
from labkit import ROOT, in_image, run

pytestmark = pytest.mark.docker
HERE = Path(__file__).parent


def many(standin: str, runs: Path, script: str, *options: str) -> str:
    """Run the Python `script`, in which ``start(RANKS, PROGRAM, FOLDER)`` is a run without a launcher.

    `options` are those of the container.
    """
    mounted = ("--volume", f"{HERE}:/test:ro", "--volume", f"{ROOT}/examples:/examples:ro")
    here = (*mounted, "--volume", f"{runs}:/runs", "--workdir", "/runs", *options)
    done = in_image(standin, "python3", "/test/run_many.py", options=here, given=script)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    return told


def test_plain_loop_needs_eight_lines() -> None:
    texts = [
        (ROOT / f"examples/{name}.py").read_text().splitlines()[1:] for name in ("plain_ddp", "plain_ddp_run")
    ]
    new = [line for line in difflib.ndiff(*texts) if line.startswith("+ ") and line.strip() != "+"]
    assert len(new) <= 8, new


@pytest.mark.parametrize(
    "ranks", [3, pytest.param(2, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)]
)
def test_killed_and_stopped_loop_resumes_bitwise(standin: str, tmp_path: Path, ranks: int) -> None:
    # A kill and a stop in the middle of two epochs; dropout needs the random numbers.
    script = """
own = "/examples/plain_ddp_run.py"
each = 4000 // 20 // RANKS + 1
assert start(RANKS, own, "whole") == [0] * RANKS
assert -9 in start(RANKS, own, "cut", at=each + 20, rank=1, pause=0.01)  # the checkpoint has to be whole
assert start(RANKS, own, "cut", at=2 * each + 5, how=signal.SIGUSR1, pause=0.01) == [85] * RANKS
assert start(RANKS, own, "cut") == [0] * RANKS
whole, cut = weights("whole"), weights("cut")
assert sorted(whole) == sorted(cut) == ["model.pt", "optimizer.pt", "pass.ranks.pt", "random.ranks.pt"]
for key, value in whole["model.pt"].items():
    assert torch.equal(value, cut["model.pt"][key]), key
for key, state in whole["optimizer.pt"]["state"].items():
    assert all(torch.equal(one, cut["optimizer.pt"]["state"][key][name]) for name, one in state.items())
for one, other in zip(whole["random.ranks.pt"], cut["random.ranks.pt"]):
    assert torch.equal(one["torch"], other["torch"])
"""
    told = many(standin, tmp_path, script.replace("RANKS", str(ranks)))
    assert told.count("run: resumes after step ") == 2, told
    assert told.count("; the state of step ") == 1, told


@pytest.mark.soak
def test_program_to_copy_resumes_with_its_evaluation(standin: str, tmp_path: Path) -> None:
    # Killed between the last step of an epoch and its evaluation, and stopped in the next epoch.
    script = """
def own(folder, **more):
    words = "--samples 600 --batch-size 20 --epochs 3 --save-every 5".split()
    return start(2, "/examples/train.py", folder, words=words, **more)
assert own("whole") == [0, 0]
assert -9 in own("cut", at=15, pause=0.05)
assert own("cut", at=20, how=signal.SIGTERM, pause=0.05) == [85, 85]
assert own("cut") == [0, 0]
whole, cut = weights("whole"), weights("cut")
assert all(torch.equal(value, cut["model.pt"][key]) for key, value in whole["model.pt"].items())
assert whole["schedule.pt"] == cut["schedule.pt"]
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


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_shuffled_loader_resumes_at_its_sample(standin: str, tmp_path: Path, workers: int) -> None:
    # Without a DistributedSampler the order comes from the random numbers at the start of the pass.
    script = """
def random_order():
    torch.manual_seed(7)
    return DataLoader(data, batch_size=2, shuffle=True, num_workers=WORKERS)
loop = lambda: training(random_order, save_every=1)
assert start(1, loop, "whole") == [0]
assert start(1, loop, "cut", at=5) == [-9]
assert start(1, loop, "cut", at=9) == [-9]
assert start(1, loop, "cut") == [0]
one, other = weights("whole"), weights("cut")
assert torch.equal(one["model.pt"]["weight"], other["model.pt"]["weight"])
assert torch.equal(one["random.ranks.pt"][0]["torch"], other["random.ranks.pt"][0]["torch"])
"""
    told = many(standin, tmp_path, PROGRAMS + script.replace("WORKERS", str(workers)))
    assert told.count("run: resumes after step ") == 2, told


SAME = """
def same(one, other):
    one, other = weights(one), weights(other)
    assert sorted(one) == sorted(other)
    assert all(torch.equal(value, other["model.pt"][key]) for key, value in one["model.pt"].items())
    for mine, others in zip(one["random.ranks.pt"], other["random.ranks.pt"], strict=True):
        assert torch.equal(mine["torch"], others["torch"])
"""


@pytest.mark.soak  # tests/lab/run/test_loops_real.py cuts loops of all kinds
def test_loops_of_every_kind_resume_bitwise(standin: str, tmp_path: Path) -> None:
    # Without `steps`, and with a stop that has to wait for the update of the weights.
    script = """
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

def free(until):
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with Run.start() as run:
        run.track(model=net, optimizer=optimizer)
        run.restore()
        while run.step < until:
            run.begins()
            optimizer.zero_grad()
            loss = net(torch.randn(16, 4)).square().mean()
            loss.backward()
            for one in net.parameters():
                dist.all_reduce(one.grad)
            optimizer.step()
            run.log(loss=loss)
            if run.due(save_every=7):
                run.save()
                run.wait()  # the kill comes later

assert start(2, lambda: free(40), "whole") == [0, 0]
assert -9 in start(2, lambda: free(40), "cut", at=10, rank=1, pause=0.01)
assert start(2, lambda: free(40), "cut", at=20, how=signal.SIGUSR1, pause=0.01) == [85, 85]
assert start(2, lambda: free(40), "cut") == [0, 0]
same("whole", "cut")

def accumulating():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.arange(22.0)[:, None]))  # five updates of 4, and one of 2
    with Run.start() as run:
        run.track(model=model, optimizer=optimizer)
        run.restore()
        for epoch in range(run.epoch, 2):
            for step, (values,) in run.steps(loader, save_every=3, accumulate=4):
                model(values).square().mean().backward()
                number = step - 22 * epoch
                if number % 4 == 0 or number == 22:
                    optimizer.step()
                    optimizer.zero_grad()
                if step == 10:
                    run.wait()  # the kill comes later

assert start(1, accumulating, "updates") == [0]
assert start(1, accumulating, "parts", at=11, pause=0.02) == [-9]
kept = sorted(path.name[-2:] for path in Path("parts/checkpoints").iterdir())
assert kept == ["04", "08"], kept
assert start(1, accumulating, "parts", at=30, how=signal.SIGTERM, pause=0.01) == [85]
stopped = int(max(Path("parts/checkpoints").iterdir()).name[-2:])
assert (stopped - 22) % 4 == 0, stopped
assert start(1, accumulating, "parts") == [0]
same("updates", "parts")
"""
    told = many(standin, tmp_path, SAME + script)
    assert told.count("run: resumes after step ") == 4, told
    assert "run: resumes after step 7: cut" in told
    assert "run: resumes after step 8: parts" in told
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 40
    assert len(lines) < 10  # the ranks do not meet in every step


@pytest.mark.soak  # it fetches a package
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_of_torchdata_resumes_bitwise(standin: str, tmp_path: Path, workers: int) -> None:
    fetch = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp_path, "torchdata==0.11.0")
    done = run(*fetch)
    assert done.returncode == 0, done.stderr
    # A kill and two stops, one of them at the last batch of a pass.
    script = """
import subprocess, sys
words = "install -q --no-index --no-deps --find-links . --root-user-action ignore torchdata".split()
subprocess.run([sys.executable, "-m", "pip", *words], check=True)
from torchdata.stateful_dataloader import StatefulDataLoader

def stateful():
    torch.manual_seed(7)
    data = TensorDataset(torch.arange(24.0)[:, None])
    loader = StatefulDataLoader(data, batch_size=2, shuffle=True, num_workers=WORKERS)
    model = torch.nn.Linear(1, 1)
    with Run.start() as run:
        run.track(model=model, loader=loader)
        run.restore()
        for epoch in range(run.epoch, 3):
            for step, (values,) in run.steps(loader, save_every=1):
                with torch.no_grad():
                    model.weight.mul_(1.01).add_(values.sum() * 0.001 * torch.rand(()))

assert start(1, stateful, "whole") == [0]
assert start(1, stateful, "cut", at=5) == [-9]
assert start(1, stateful, "cut", at=17, how=signal.SIGTERM) == [85]
assert start(1, stateful, "cut", at=24, how=signal.SIGTERM) == [85]
assert start(1, stateful, "cut") == [0]
same("whole", "cut")
"""
    told = many(standin, tmp_path, SAME + script.replace("WORKERS", str(workers)))
    assert told.count("run: resumes after step ") == 3, told


def test_requests_to_stop_end_with_their_codes(standin: str, tmp_path: Path) -> None:
    script = """
loop = lambda: training(range(400))
more = {"at": 3, "how": signal.SIGTERM, "pause": 0.01}
assert start(2, loop, "alone", **more) == [85, 85]
assert start(2, loop, "torchrun", **more, TORCHELASTIC_RUN_ID="none") == [0, 0]
print("mark:", open("torchrun/state-saved").read())
assert start(2, loop, "torchrun", TORCHELASTIC_RUN_ID="none") == [0, 0]
assert not os.path.exists("torchrun/state-saved")
os.mkdir("node"), open("node/stop", "w").close()
launched = {"IMGKIT_STOP_DIR": "node", "IMGKIT_JOB_ID": "4711", "pause": 0.01}
assert start(2, loop, "launched", **launched) == [0, 0]
print("mark:", open("node/state-saved").read())
assert start(2, loop, "asked", at=2, how=signal.SIGUSR2, pause=0.01) == [85, 85]
open("asked/stop", "w").close()
assert start(1, loop, "asked") == [2]
def limited():
    with Run.start(stop_after_s=50) as run:
        run.track(model=torch.nn.Linear(1, 1))
        while run.step < 20:
            if run.due():
                run.save()
# The second attempt of a run, and a new one in its folder.
assert start(1, limited, "late", IMGKIT_FIRST_ATTEMPT=time.monotonic() - 60) == [85]
assert start(1, limited, "anew") == [0]
"""
    told = many(standin, tmp_path, PROGRAMS + script)
    assert "mark: local " in told, told
    assert "mark: 4711 " in told
    assert "asked/stop: this file prevents the run from starting" in told
    assert '"weight":' in (tmp_path / "alone/metrics.jsonl").read_text()


def test_misuse_is_refused_with_names(standin: str, tmp_path: Path) -> None:
    script = """
class Endless(IterableDataset):
    def __iter__(self):
        return iter([])
assert start(1, lambda: training(DataLoader(Endless())), "endless") == [2]
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
held = Run.start("held")
assert start(1, lambda: training(range(3)), "held") == [2]
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
    told = many(standin, tmp_path, PROGRAMS + script)
    assert "a used folder counts as new" not in told
    for text in (
        "this loader cannot resume at its sample: a DataLoader over the IterableDataset Endless",
        "the loaders of the ranks have different lengths: rank 0: 3, rank 1: 4",
        "the ranks have taken different numbers of steps: rank 0: 3, rank 1: 4",
        "run.track: loss is a int without a state",
        "run.track: the state of loader, a Broken, cannot be read: no inner loader",
        "run.track: shared is sharded over the ranks",
        "the ranks have different values of save_every: rank 0: 1, rank 1: 2",
        "this run would replace the checkpoints of another run",
        "the checkpoint contains model, and this program tracks model, other",
        "held: another run writes into this folder (process ",
        "the ranks are at different calls: rank 1: run.steps, rank 0: the end of the run",
        "the ranks are at different calls: rank 0: run.restore, rank 1: run.steps",
        "the ranks track different objects: rank 0: model0, rank 1: model1",
    ):
        assert text in told, (text, told)


def test_damaged_and_hostile_checkpoints_do_no_harm(standin: str, tmp_path: Path) -> None:
    script = """
import io, json, pickle, shutil
from imgkit_entrypoints.run import disk
assert start(2, lambda: training(range(4), save_every=2), "damaged") == [0, 0]
with open("damaged/checkpoints/step-0000000004/model.pt", "ab") as file:
    file.write(b"more")
assert start(2, lambda: training(range(4), save_every=2), "damaged") == [0, 0]

class Runs:
    def __reduce__(self):
        return print, ("the pickle ran code",)
part = lambda data: lambda sink: sink.write(data)
position = {"step": 9, "loops": {}, "batch": 1, "at_start": False}
state = json.dumps({"run": position, "program": {"options": {}, "built": {}}}).encode()
parts = {"state.json": state, "model.pt": pickle.dumps(Runs()), "random.ranks.pt": b"", "pass.ranks.pt": b""}
def write(folder):
    os.makedirs(f"{folder}/checkpoints", exist_ok=True)
    content = {name: part(data) for name, data in parts.items()}
    disk.write_checkpoint(Path(folder) / "checkpoints", 9, content, keep=3)
write("hostile")
assert start(2, lambda: training(range(4)), "hostile") == [2, 2]
write("damaged")  # above good ones, which the refusal leaves in their place
assert start(2, lambda: training(range(4)), "damaged") == [2, 2]
shutil.move("damaged/checkpoints/step-0000000009", "elsewhere")
os.truncate("damaged/checkpoints/step-0000000004/model.pt", 100)
assert start(2, lambda: training(range(4), save_every=2), "damaged") == [0, 0]
def saved(value):
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()
parts["model.pt"] = saved({"weight": torch.zeros(1, 1), "bias": torch.zeros(1)})
for rows in (
    [torch.tensor(list(pickle.dumps(Runs())), dtype=torch.uint8)] * 2,
    [torch.tensor(list(saved({"torch": 7, "python": 7})), dtype=torch.uint8)] * 2,
    [torch.zeros(3)] * 2,
    {},
):
    parts["random.ranks.pt"] = parts["pass.ranks.pt"] = saved(rows)
    shutil.rmtree("hostile")
    write("hostile")
    assert start(2, lambda: training(range(4)), "hostile") == [2, 2]
parts["state.json"] = b"{}"
write("foreign")
assert start(2, lambda: training(range(4)), "foreign") == [2, 2]
def wider():
    with Run.start() as run:
        run.track(model=torch.nn.Linear(2, 1))
        run.restore()
assert start(1, wider, "damaged") == [2]
assert sorted(os.listdir("damaged/checkpoints")) == ["step-0000000002", "step-0000000004"]
"""
    told = many(standin, tmp_path, PROGRAMS + script)
    assert "checkpoint skipped: damaged/checkpoints/step-0000000004/model.pt has" in told
    assert told.count("run: resumes after step 2: ") == 2
    assert "checkpoint skipped: damaged/checkpoints/step-0000000004/model.pt has 100 bytes, not " in told
    assert (
        "the checkpoint contains a different model: weight is (1, 1) in the checkpoint and (1, 2) in the "
        "model" in told
    )
    assert "model.pt: this part of the checkpoint cannot be read" in told
    assert "this checkpoint was written by another program" in told
    for text in (
        "random.ranks.pt: this part of the checkpoint cannot be read: ",
        "random.ranks.pt: the random state of rank 0 in the checkpoint is invalid",
        "random.ranks.pt: this part of the checkpoint cannot be read: its rows are no bytes",
        "random.ranks.pt: this part of the checkpoint cannot be read: it has no rows",
    ):
        assert text in told, (text, told)
    assert "the pickle ran code" not in told


@pytest.mark.soak
def test_other_number_of_ranks_takes_the_rest_of_the_samples(standin: str, tmp_path: Path) -> None:
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


GPT = ("gpt_loop_run", [], {"GPT_ITERS": "100", "GPT_DATA": "/examples/train.py"}, 55)
MULTINODE = ("multinode_run", ["3", "1", "--batch-size", "64"], {}, 26)
"""Program, its arguments, its variables, and a step behind its first checkpoint."""

EQUAL = """
def assert_equal(one, other, where=""):
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other)):
            assert_equal(*pair, f"{where}[{number}]")
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, where

def assert_equal_state():
    states = weights("whole"), weights("cut")
    for state in states:
        for part in ("random.ranks.pt", "pass.ranks.pt"):  # Python's and NumPy's generators have no seed here
            state[part] = [one["torch"] for one in state.get(part, ())]
    assert_equal(*states)
"""

KILLED_AND_STOPPED = """
def run(folder, **more):
    return start(ranks, f"/examples/{name}.py", folder, words=argv, **env, **more)

assert run("whole") == [0] * ranks
assert -9 in run("cut", at=step, rank=ranks - 1, pause=0.02)
assert run("cut", at=step + 2, how=signal.SIGUSR1, pause=0.02) == [85] * ranks
assert run("cut") == [0] * ranks
assert_equal_state()
"""

# Nothing can end a launcher that is killed, so its guard ends the workers.
LAUNCHER_KILLED = """
import subprocess

LAUNCHER = ("python3", "-I", "-m", "imgkit_entrypoints", "dist-run")

def run(folder, kill=False):
    program = [*LAUNCHER, "--nproc", str(ranks), f"/examples/{name}.py", *argv]
    launcher = subprocess.Popen(program, env={**os.environ, **env, "IMGKIT_RUN_DIR": folder})
    while kill and not any(Path(folder, "checkpoints").glob("step-*")):
        assert launcher.poll() is None
        time.sleep(0.01)
    if kill:
        launcher.kill()
    return launcher.wait()

assert run("whole") == 0
assert run("cut", kill=True) == -9
assert run("cut") == 0
assert_equal_state()
"""


@pytest.mark.parametrize(
    ("script", "ranks", "program"),
    [
        *(
            pytest.param(script, ranks, program, marks=pytest.mark.soak)
            for script in (KILLED_AND_STOPPED, LAUNCHER_KILLED)
            for ranks in (2, 3)
            for program in (GPT, MULTINODE)
        ),
    ],
    ids=lambda value: (
        {KILLED_AND_STOPPED: "worker", LAUNCHER_KILLED: "launcher"}.get(value)
        if isinstance(value, str)
        else value[0]
        if isinstance(value, tuple)
        else None
    ),
)
def test_ported_loop_ends_with_the_same_state(
    standin: str, tmp_path: Path, script: str, ranks: int, program: tuple[str, list[str], dict[str, str], int]
) -> None:
    name, argv, env, step = program
    values = f"name, argv, env, step, ranks = {name!r}, {argv!r}, {env!r}, {step}, {ranks}\n"
    told = many(standin, tmp_path, EQUAL + values + script)
    assert told.count("run: resumes after step ") == (2 if script == KILLED_AND_STOPPED else 1), told
