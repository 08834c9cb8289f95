"""Sharded state on the run library: FSDP2 and HSDP on CPUs with gloo."""

from __future__ import annotations

import pytest
from labkit import in_image

from .test_run_real import many

pytestmark = pytest.mark.docker

PROGRAM = """
import shutil
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SGD = lambda weights, lr: torch.optim.SGD(weights, lr=lr, momentum=0.9)

def build(hybrid=False, hidden=30):
    torch.manual_seed(3)
    layer, ranks = torch.nn.Linear, dist.get_world_size()
    norm = torch.nn.BatchNorm1d(hidden)
    net = torch.nn.Sequential(layer(20, hidden), torch.nn.ReLU(), norm, layer(hidden, 7))
    names = {"mesh_dim_names": ("replicas", "shards")} if hybrid else {}
    mesh = init_device_mesh("cpu", (2, ranks // 2) if hybrid else (ranks,), **names)
    for one in (net[0], net[2], net[3], net):
        fully_shard(one, mesh=mesh)
    return net

AdamW = torch.optim.AdamW

def train(steps=8, *, hybrid=False, full="", every=3, name="model", kind=AdamW, hidden=30, prepare=None):
    if prepare:
        prepare()
    net = build(hybrid, hidden)
    optimizer = kind(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    with Run.start() as run:
        run.track(**{name: net}, optimizer=optimizer, scheduler=scheduler)
        run.restore()
        if run.step and full:
            keep(net, optimizer, full + "-restored")
        for step, _ in run.steps(range(steps), save_every=every):
            drawn = torch.Generator().manual_seed(step * 100 + dist.get_rank())
            net(torch.randn(16, 20, generator=drawn)).square().mean().backward()
            optimizer.step(), optimizer.zero_grad(), scheduler.step()
            if step % every == 1:
                run.wait()  # what was saved in the step before is whole
    if full:
        keep(net, optimizer, full)

def keep(net, optimizer, name):
    values = dict(net.state_dict())
    for number, own in optimizer.state_dict()["state"].items():
        values.update({f"{number}.{key}": one for key, one in own.items()})
    def whole_of(one):
        return (one.full_tensor() if hasattr(one, "full_tensor") else one).clone()
    whole = {key: whole_of(one) for key, one in values.items()}
    if dist.get_rank() == 0:
        torch.save(whole, name + ".pt")

def equal(one, other):
    one, other = torch.load(one + ".pt"), torch.load(other + ".pt")
    assert one.keys() == other.keys()
    assert not [key for key in one if not torch.equal(one[key], other[key])]

def end(folder):
    return max(os.listdir(f"{folder}/checkpoints"))
"""


REFUSED = """
from imgkit_entrypoints.errors import ImgkitError

def tracking(folder="new", **parts):
    with Run.start(folder) as run:
        run.track(**parts)
        run.restore()
        raise AssertionError("nothing was refused")

def moved():
    net = build()
    net.add_module("gate", net._modules.pop("3"))
    optimizer = SGD(net.parameters(), 0.1)
    tracking("run", model=net, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))

def part_of_mesh():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    tracking(model=fully_shard(torch.nn.Linear(2, 2), mesh=mesh))

def old_torch():
    torch.__version__ = "2.3.0a0+40ec155e58.nv24.03"
    tracking(model=build())

def on_meta():
    with torch.device("meta"):
        net = torch.nn.Linear(4, 4)
    tracking(model=fully_shard(net))

def apart():
    tracking(f"node{dist.get_rank()}", model=build())

def each():
    cases = [lambda: train(name="net"), lambda: train(hidden=31, kind=SGD), moved, part_of_mesh]
    for case in (*cases, on_meta, apart, old_torch):
        dist.barrier()
        try:
            case()
        except ImgkitError as error:
            print("refused:", error, flush=True)
        else:
            raise AssertionError("nothing was refused")

assert start(2, lambda: train(kind=SGD), "run") == [0, 0]
assert start(2, each, "run") == [0, 0]
"""


def test_unfit_sharded_state_is_refused_by_name(standin, tmp_path):
    output = many(standin, tmp_path, PROGRAM + REFUSED)
    for text in (
        "the checkpoint contains model, optimizer, scheduler, and this program tracks net, optimizer",
        "a different model: 0.weight is (30, 20) in the checkpoint and (31, 20) in the model",
        "a different model: 3.weight, 3.bias only in the checkpoint, gate.weight, gate.bias only in the mod",
        "run.track: model.weight is sharded over 1 of 2 ranks",
        "run.track: model is sharded, and this is torch 2.3.0a0+40ec155e58.nv24.03",
        "run.track: model.weight is on the meta device",
        "sharded state needs a folder that all ranks see, and rank 0 on ",
    ):
        assert output.count(text) == 2, (text, output)


FLIPS = """
import random

def found(run, what):
    checkpoint = run.find("damaged")
    assert checkpoint.step == 3, (what, checkpoint.step)

def flips(count):
    numbers, newest = random.Random(7), Path("damaged/step-0000000006")
    whole = {path: path.read_bytes() for path in sorted(newest.iterdir())}
    dist.barrier()
    with Run.start("other") as run:
        for turn in range(count):
            path = list(whole)[turn % len(whole)]
            bit = numbers.randrange(8 * len(whole[path]))
            if dist.get_rank() == 0:
                data = bytearray(whole[path])
                data[bit // 8] ^= 1 << bit % 8
                path.write_bytes(data)
            dist.barrier()
            found(run, (path, bit))
            if dist.get_rank() == 0:
                path.write_bytes(whole[path])
            dist.barrier()
        assert run.find("damaged").step == 6

assert start(2, lambda: train(6), "run") == [0, 0]
shutil.copytree("run/checkpoints", "damaged")
"""


def test_flipped_bits_in_any_file_are_noticed(standin, tmp_path):
    output = many(standin, tmp_path, PROGRAM + FLIPS + 'assert start(2, lambda: flips(32), "x") == [0, 0]\n')
    assert output.count("checkpoint skipped: ") == 32
    assert "__1_0.distcp is damaged: its sha256 differs from the manifest" in output


@pytest.mark.soak
def test_spare_node_takes_over_sharded_state(standin, tmp_path):
    imports = (
        "import os, sys, time\nfrom pathlib import Path\nimport torch\nimport torch.distributed as dist\n"
    )
    program = f"""{imports}from imgkit_entrypoints.run import Run
from imgkit_entrypoints.run.step_loop import StepLoop
torch.set_num_threads(1)
{PROGRAM}
dist.init_process_group("gloo")
count_step = StepLoop._count_step
StepLoop._count_step = lambda loop: (time.sleep(float(os.environ["PAUSE"])), count_step(loop))[1]
train(12, full=os.environ["IMGKIT_RUN_DIR"] + "-end", every=2)
"""
    (tmp_path / "sharded.py").write_text(program)
    script = """
node() { exec python3 -I -m imgkit_entrypoints dist-run --nproc 1 --head 127.0.0.1 "$@" sharded.py; }
export PAUSE=0 IMGKIT_RUN_DIR=whole
(node --nnodes 2 --node-rank 1) & (node --nnodes 2 --node-rank 0)
wait
export PAUSE=0.5 IMGKIT_RUN_DIR=spare
(node --nnodes 2+1 --node-rank 2) & spare=$!
(node --nnodes 2+1 --node-rank 1) & victim=$!
(node --nnodes 2+1 --node-rank 0) & head=$!
until test -e spare/checkpoints/step-*4; do sleep 0.05; kill -0 $head; done
kill -KILL $victim
wait $head
wait $spare
python3 - <<END
import torch
whole, spare = torch.load("whole-end.pt"), torch.load("spare-end.pt")
assert whole.keys() == spare.keys() and all(torch.equal(whole[key], spare[key]) for key in whole)
END
"""
    mounted = ("--volume", f"{tmp_path}:/runs", "--workdir", "/runs")
    result = in_image(standin, "bash", "-euc", script, options=mounted)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "attempt 2 starts with 2 nodes; node 3 of 3" in output
    assert "run: resumes after step " in output


def test_four_two_three_four_ranks_have_equal_tensors(standin, tmp_path):
    script = """
for at, (ranks, hybrid) in enumerate([(4, True), (2, False), (3, False), (4, False), (4, True)]):
    now = lambda: train(2 * (at + 1), hybrid=hybrid, full=f"end{at}", every=2)
    assert start(ranks, now, "run") == [0] * ranks
    if at:
        equal(f"end{at}-restored", f"end{at - 1}")
"""
    assert "skipped" not in many(standin, tmp_path, PROGRAM + script)


KILLS = """
import random, threading, time
from torch.nn.parallel import DistributedDataParallel as DDP
from imgkit_entrypoints.run import checkpoint

def kill_in_save(rank, delay_s):
    write = checkpoint.CheckpointWriter._write
    def timed(self, step, *words):
        if step == 6 and dist.get_rank() == rank:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif step > 6 and dist.get_rank() == rank:
            time.sleep(60)  # a fast loop is at its next save before the kill
        write(self, step, *words)
    checkpoint.CheckpointWriter._write = timed

def train_ddp(steps=10, every=3, prepare=None):
    if prepare:
        prepare()
    torch.manual_seed(3)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(20, 200), torch.nn.Linear(200, 7)))
    optimizer = AdamW(model.parameters(), lr=0.05)
    with Run.start() as run:
        run.track(model=model, optimizer=optimizer)
        run.restore()
        for step, _ in run.steps(range(steps), save_every=every):
            drawn = torch.Generator().manual_seed(step * 100 + dist.get_rank())
            model(torch.randn(16, 20, generator=drawn)).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
            if step % every == 1:
                run.wait()

def check(kind, turns):
    loop, numbers = {"ddp": train_ddp, "fsdp": lambda **more: train(10, **more)}[kind], random.Random(kind)
    assert start(2, loop, f"whole-{kind}") == [0, 0]
    for turn in range(turns):
        rank, delay_s = (0 if kind == "ddp" else turn % 2), numbers.uniform(0, 0.05)
        folder = f"{kind}-{turn}"
        codes = start(2, lambda: loop(prepare=lambda: kill_in_save(rank, delay_s)), folder)
        assert -9 in codes, codes
        assert states(folder)["step"] in (3, 6)
        assert start(2, loop, folder) == [0, 0]
        same(f"whole-{kind}", folder)
        shutil.rmtree(folder)
        print("survived", kind, turn, f"{delay_s:.4f}", flush=True)
"""


@pytest.mark.parametrize("turns", [3, pytest.param(25, marks=pytest.mark.soak)])
def test_save_killed_at_any_point_leaves_a_whole_checkpoint(standin, tmp_path, turns):
    script = f'check("ddp", {turns})\ncheck("fsdp", {turns})\n'
    output = many(standin, tmp_path, PROGRAM + KILLS + script)
    assert output.count("survived") == 2 * turns
    assert output.count("run: resumes after step ") == 2 * turns


def test_full_disk_loses_nothing_older(standin, tmp_path):
    script = """
assert start(2, lambda: train(6, every=1), "/tiny/run") == [1, 1]
assert end("/tiny/run") == "step-0000000002", os.listdir("/tiny/run/checkpoints")
assert not [name for name in os.listdir("/tiny/run/checkpoints") if name.startswith(".imgkit-")]
assert states("/tiny/run")["step"] == 2
"""
    output = many(standin, tmp_path, PROGRAM + script)
    assert "No space left on device; the newest is of step 2" in output
    assert "the state of step 6 is not saved" in output


EXAMPLE = """
import runpy
from torch.distributed.fsdp import fully_shard

example = runpy.run_path("/examples/fsdp2.py")

def made(sharded):
    torch.set_default_dtype(torch.float64)
    with torch.device("meta"):
        model = example["Model"](width=16, depth=2, heads=2)
    for one in (*model.blocks, model) if sharded else ():
        fully_shard(one)
    model.to_empty(device="cpu")
    example["draw"](model, 0)
    return model

def drawn():
    for (name, whole), part in zip(made(False).named_parameters(), made(True).parameters(), strict=True):
        assert torch.equal(whole, part.full_tensor()), name
        every = [torch.empty_like(part.to_local()) for _ in range(dist.get_world_size())]
        dist.all_gather(every, part.to_local().detach())
        assert whole.dim() == 1 or not torch.equal(every[0], every[1]), name

"""


def test_fsdp2_example_draws_the_whole_weights(standin, tmp_path):
    many(standin, tmp_path, EXAMPLE + 'assert start(2, drawn, "x") == [0, 0]\n')


@pytest.mark.soak
def test_fsdp2_example_resumes_bitwise(standin, tmp_path):
    # USR1 comes where gradients wait, which FSDP2 has not added up yet.
    script = """
def small():
    dist.destroy_process_group()
    example["Sums"].__len__ = lambda data: 1024
    sys.argv = ["fsdp2.py", "--epochs", "1", "--replicas", "2"]
    example["main"]()
assert start(4, small, "whole") == [0] * 4
assert start(4, small, "cut", at=6, how=signal.SIGUSR1) == [85] * 4
assert states("cut")["step"] % 2 == 0
assert start(4, small, "cut") == [0] * 4
same("whole", "cut")
"""
    many(standin, tmp_path, EXAMPLE + script)
