"""The state of programs on the run library: wrapped and sharded models, states of each rank, attempts."""

from __future__ import annotations

from pathlib import Path

import pytest
from labkit import in_image

from .test_run_real import many

pytestmark = pytest.mark.docker

WRAPPED = """
from torch.nn.parallel import DistributedDataParallel as DDP
from imgkit_entrypoints.run import LibraryCheckpoint

class Holder(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.module = DDP(net), torch.nn.Linear(1, 1)

    def forward(self, batch):
        return self.net(batch)

def compiled(net):
    return torch.compile(net, backend="eager")

WRAPS = {  # what computes, and what is tracked
    "plain": lambda net: (DDP(net),) * 2,
    "compiled outside": lambda net: (compiled(DDP(net)),) * 2,
    "compiled inside": lambda net: (DDP(compiled(net)),) * 2,
    "inner": lambda net: (DDP(net), net),
    "holder": lambda net: (Holder(net),) * 2,
    "static": lambda net: (DDP(net, static_graph=True), net),
    "unused": lambda net: (DDP(net, find_unused_parameters=True), net),
}

class Draws:
    '''A program's own random numbers, other ones on each rank.'''
    def __init__(self):
        self.generator = torch.Generator().manual_seed(dist.get_rank())
    def state_dict(self):
        return {"generator": self.generator.get_state()}
    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])

def wrapped(wrap, *, due=False, passes=0, late=False, frozen=False):
    torch.manual_seed(3)
    layer = torch.nn.Linear
    net = torch.nn.Sequential(layer(40, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), layer(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, tracked = (None, net) if late else WRAPS[wrap](net)
    def grow():
        optimizer.zero_grad()
        model(torch.randn(16, 40, generator=draws.generator)).square().mean().backward()
    draws = Draws()
    torch.manual_seed(dist.get_rank())
    with Run.start() as run:
        run.track(model=tracked, optimizer=optimizer)
        run.track_per_rank(draws=draws)
        for _ in range(passes):
            grow()
            optimizer.zero_grad()
        if frozen:
            gc.freeze()
        run.restore()
        if late:
            model, _ = WRAPS[wrap](net)
        for _ in () if due else run.steps(range(8), save_every=3):
            grow()
            optimizer.step()
            if run.step == 3:
                run.wait()  # the kill comes later
        while due and run.step < 8:
            grow()
            optimizer.step()
            if run.due(save_every=3):
                run.save()
                run.wait()

def same(one, other):
    one, other = weights(one)["model.pt"], weights(other)["model.pt"]
    assert list(one) == list(other), (list(one), list(other))
    assert all(torch.equal(value, other[key]) for key, value in one.items())

def cut(folder, first, then, **how):
    assert -9 in start(3, lambda: wrapped(first, **how), folder, at=5, rank=1, pause=0.02)
    assert start(3, lambda: wrapped(then, **how), folder) == [0, 0, 0]
"""


def test_wrapped_model_resumes_bitwise_in_another_wrapper(standin: str, tmp_path: Path) -> None:
    # On three ranks, the buckets of DDP decide about the last bits.
    script = """
assert start(3, lambda: wrapped("plain"), "whole") == [0, 0, 0]
cut("cut", "inner", "compiled outside")
same("whole", "cut")
assert list(weights("whole")["model.pt"]) == ["0.weight", "0.bias", "3.weight", "3.bias"]
assert start(3, lambda: wrapped("inner", due=True), "due") == [2, 2, 2]

def of_a_library():
    model = DDP(torch.nn.Linear(2, 1))
    with Run.start() as run:
        LibraryCheckpoint(run)
        run.restore()
        while run.step < 3:
            model(torch.ones(2)).sum().backward()
            run.due()
assert start(3, of_a_library, "library") == [0, 0, 0]
"""
    told = many(standin, tmp_path, WRAPPED + script)
    assert told.count("run: resumes after step 3: ") == 1, told
    assert "run.due: on 3 ranks or more, DDP adds up the gradients of the first step" in told
    assert told.count("run: warning: run.due: on 3 ranks or more, DDP") == 1  # its state is not the run's
    assert "-> before run.restore(), run a forward and backward pass (two with static_graph) and" in told


@pytest.mark.soak
def test_every_wrapper_resumes_bitwise(standin: str, tmp_path: Path) -> None:
    script = """
import gc
cases = [(wrap, {}) for wrap in WRAPS] + [
    ("plain", {"due": True, "passes": 1}),
    ("compiled outside", {"due": True, "passes": 2}),
    ("unused", {"due": True}),
    ("static", {"due": True, "passes": 2}),
    ("plain", {"passes": 1}),
    ("plain", {"late": True}),
    ("plain", {"frozen": True}),
]
for number, (wrap, how) in enumerate(cases):
    print(number, wrap, how, flush=True)
    assert start(3, lambda: wrapped(wrap, **how), f"whole{number}") == [0, 0, 0]
    cut(f"cut{number}", wrap, wrap, **how)
    same(f"whole{number}", f"cut{number}")
"""
    told = many(standin, tmp_path, WRAPPED + script)
    assert told.count("run: resumes after step 3: ") == 14, told


def test_sharded_state_is_refused_on_all_ranks(standin: str, tmp_path: Path) -> None:
    script = """
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

Adam = torch.optim.Adam
def of_fsdp1():
    net = FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"), use_orig_params=True)
    return {"optimizer": Adam(net.parameters())}
def shard():
    return distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])
def of_fsdp2():
    fully_shard(net := torch.nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,)))
    return {"adam": Adam(net.parameters())}
def of_zero():
    return {"zero": ZeroRedundancyOptimizer(torch.nn.Linear(8, 8).parameters(), Adam)}
def with_buffer():
    net = torch.nn.Linear(8, 8)
    net.register_buffer("mean", shard())
    return {"model": net}
class Holder:
    value = None
    def state_dict(self):
        return {"inner": [{"moment": self.value}]}
    def load_state_dict(self, state):
        pass

def tracking(make):
    objects = make()
    with Run.start() as run:
        run.track(**objects)
        run.restore()
        for step, _ in run.steps(range(4), save_every=2):
            if "holder" in objects and step == 2:
                moment = shard()  # a collective call
                objects["holder"].value = moment if dist.get_rank() else None
for number, make in enumerate((of_fsdp1, of_fsdp2, of_zero, with_buffer, lambda: {"holder": Holder()})):
    assert start(2, lambda: tracking(make), f"{number}") == [2, 2]
"""
    told = many(standin, tmp_path, script)
    for text in (
        "run.track: optimizer.param_groups[0] is sharded over the ranks, and no rank has all of it",
        "run.restore: rank 0: adam updates weights of no tracked model",
        "run.track: zero is sharded",
        "run.track: model['mean'] is sharded",
        "run.save: rank 1: holder['inner'][0]['moment'] is sharded",
    ):
        assert told.count(text) == 2, (text, told)
    assert "-> shard models by fully_shard (FSDP2); or let its library save" in told


CURSOR = """
class Cursor:
    '''Where each rank is in its own file.'''
    def __init__(self, at=0):
        self.at, self.best = at, 0
    def state_dict(self):
        return {"at": self.at, "best": self.best}
    def load_state_dict(self, state):
        self.at, self.best = state["at"], state["best"]

class Shared(Cursor):
    def regroup_state_dicts(self, states, rank, world_size):
        print("regrouped", rank, world_size, [state["at"] for state in states], flush=True)
        return states[rank % len(states)]

def reading(cursor, how, ahead=1, until=8):
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    with Run.start() as run:
        run.track(model=net)
        getattr(run, how)(cursor=cursor)
        run.restore()
        while run.step < until:
            cursor.at += 1 + ahead * dist.get_rank()
            if dist.get_rank() == 0:
                cursor.best = run.step
            read = torch.tensor(float(cursor.at))
            dist.all_reduce(read)
            with torch.no_grad():
                net.weight += read * 0.01
            if run.due(save_every=3):
                run.save()
                run.wait()
"""


def test_each_rank_resumes_from_its_own_state(standin: str, tmp_path: Path) -> None:
    script = """
own = lambda: reading(Cursor(10 * dist.get_rank()), "track_per_rank")
assert start(2, own, "whole") == [0, 0]
assert -9 in start(2, own, "cut", at=5, rank=1, pause=0.02)
assert start(2, own, "cut") == [0, 0]
assert torch.equal(weights("whole")["model.pt"]["weight"], weights("cut")["model.pt"]["weight"])
assert start(1, own, "cut") == [2]
assert start(1, lambda: reading(Shared(), "track_per_rank", until=9), "cut") == [0]
assert start(2, lambda: reading(Cursor(), "track"), "cut") == [2, 2]
assert start(2, lambda: reading(Cursor(10 * dist.get_rank()), "track"), "begins") == [2, 2]
assert start(2, lambda: reading(Cursor(), "track"), "moves") == [2, 2]
# Rank 0's state counts for all where the ranks move together, and rank 0 alone keeps what it has seen.
assert start(2, lambda: reading(Cursor(), "track", ahead=0), "together") == [0, 0]
assert start(2, lambda: reading(Cursor(), "track", ahead=0, until=12), "together") == [0, 0]
"""
    told = many(standin, tmp_path, CURSOR + script)
    for text in (
        "cursor has a state for each of 2 ranks, but there are 1",
        "regrouped 0 1 [8, 26]",
        "contains cursor of each rank, model, and this program tracks cursor, model",
        "run.restore: cursor['at'] differs between the ranks, and a resume would give that of rank 0 to all: "
        "rank 0: 0, rank 1: 10",
        "run.save: cursor['at'] differs between the ranks, and a resume would give that of rank 0 to all: "
        "rank 0: 3, rank 1: 6",
        "-> run.track_per_rank(cursor=cursor) in place of run.track: one for each rank",
        "run: resumes after step 8: together",
    ):
        assert text in told, (text, told)


UNLIKE = """
import copy

class Ahead:
    '''A batch that is fetched ahead, of another size on each rank.'''
    def __init__(self):
        self.batch = torch.zeros(300_000 * (1 + dist.get_rank()))
    def state_dict(self):
        return {"batch": self.batch}
    def load_state_dict(self, state):
        self.batch = state["batch"]

def large(until):
    ahead = Ahead()
    with Run.start() as run:
        run.track(model=torch.nn.Linear(1, 1))
        run.track_per_rank(ahead=ahead)
        if not run.restore():
            ahead.batch += 5 + dist.get_rank()
        while run.step < until:
            if run.due(save_every=1):
                run.save()
    assert ahead.batch.unique().tolist() == [5 + dist.get_rank()]
    assert len(ahead.batch) == 300_000 * (1 + dist.get_rank())

def averaged(how):
    torch.manual_seed(dist.get_rank())
    net = torch.nn.Linear(2, 1)
    average = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters())
    with Run.start() as run:
        run.track(model=net, optimizer=optimizer, average=average)
        run.restore()
        model = net if how == "apart" else torch.nn.parallel.DistributedDataParallel(net)
        for _ in run.steps(range(4), save_every=2):
            optimizer.zero_grad()
            model(torch.full((2,), 1.0 + dist.get_rank())).sum().backward()
            optimizer.step()
            if dist.get_rank() == 0:
                for own, one in zip(average.parameters(), net.parameters()):
                    own.data.lerp_(one.data, 0.1)
"""


def test_large_states_of_ranks_are_kept_and_unlike_weights_refused(standin: str, tmp_path: Path) -> None:
    script = """
assert start(2, lambda: large(2), "large") == [0, 0]
assert start(2, lambda: large(4), "large") == [0, 0]
assert start(2, lambda: averaged("apart"), "apart") == [2, 2]
assert start(2, lambda: averaged("together"), "together") == [0, 0]  # rank 0 alone keeps the average
"""
    told = many(standin, tmp_path, UNLIKE + script)
    assert "run: resumes after step 2: large" in told
    assert (
        told.count("run.save: model.bias differs between the ranks, and a resume would give that of rank 0")
        == 2
    )
    assert "-> wrap the model in DDP; or run.track_per_rank(model=model) in place of run.track" in told


UNREADABLE = """
import collections
import numpy

class Best:
    '''What a program remembers of its evaluations.'''
    def __init__(self, value=0.0):
        self.value = value
    def state_dict(self):
        return {"best": self.value}
    def load_state_dict(self, state):
        self.value = state["best"]

class Named(torch.Tensor):
    pass

Point = collections.namedtuple("Point", "x y")
BAD = [
    numpy.mean([1.0, 2.0]),
    numpy.arange(3),
    [0.5, (numpy.int64(3),)],
    {numpy.str_("key"): 1},
    Point(1, 2),
    torch.ones(2).as_subclass(Named),
    collections.deque([1]),
]
GOOD = [
    [1, 0.5, "text", None, b"bytes", 1j, {2}, {(1, 2): True}, torch.float16, torch.Size([3]), torch.ones(2)],
    collections.defaultdict(list, {"losses": [0.5]}),
    collections.OrderedDict(a=torch.nn.Parameter(torch.ones(1))),
]

def evaluated(how, before, after=None):
    torch.manual_seed(0)
    model, best = torch.nn.Linear(2, 1), Best(before)
    with Run.start() as run:
        run.track(model=model)
        getattr(run, how)(best=best)
        run.restore()
        for step, _ in run.steps(range(4), save_every=2):
            if step == 2 and after is not None:
                best.value = after

def scheduled(sharded):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    with Run.start() as run:
        run.track(model=model, optimizer=optimizer)
        run.restore()
        for step, _ in run.steps(range(4), save_every=2):
            for group in optimizer.param_groups:
                group["lr"] = numpy.cos(0.1 * step) if sharded != "betas" else group["lr"]
                group["betas"] = torch.Size([0, 0]) if sharded == "betas" else group["betas"]
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
"""


def test_value_that_no_resume_could_read_is_refused(standin: str, tmp_path: Path) -> None:
    script = """
for number, value in enumerate(BAD):
    for how in ("track", "track_per_rank"):
        assert start(1, lambda: evaluated(how, value), f"before-{number}-{how}") == [2]
        assert start(1, lambda: evaluated(how, 0.0, value), f"after-{number}-{how}") == [2]
assert start(1, lambda: scheduled(False), "lr") == [2]
assert start(2, lambda: evaluated("track", 0.0, BAD[0]), "ranks") == [2, 2]
assert not list(Path().glob("*/checkpoints/*"))
for number, value in enumerate(GOOD):
    for how in ("track", "track_per_rank"):
        assert start(1, lambda: evaluated(how, value, value), f"good-{number}-{how}") == [0]
        assert start(1, lambda: evaluated(how, value), f"good-{number}-{how}") == [0]
"""
    told = many(standin, tmp_path, UNREADABLE + script)
    for text in (
        "run.track: best['best'] is a numpy.float64, ",
        "run.save: rank 0: best['best'] is a numpy.float64, ",
        "run.save: rank 0: optimizer['param_groups'][0]['lr'] is a numpy.float64, ",
        "-> set it to a plain value: group['lr'] = float(...)",
        "-> set it to a plain value: float(...)",
        "best['best'] is a numpy.ndarray, ",
        "-> set it to a tensor: torch.from_numpy(...)",
        "best['best'][1][0] is a numpy.int64, ",
        "-> set it to a plain value: int(...)",
        "'key') of best['best'] is a numpy.str_, ",
        "best['best'] is a __main__.Point, ",
        "best['best'] is a __main__.Named, ",
        "best['best'] is a collections.deque, ",
    ):
        assert text in told, (text, told)
    assert told.count("run: resumes after step 4: ") == 6, told


def test_sharded_optimizer_refuses_what_no_resume_could_read(standin: str, tmp_path: Path) -> None:
    script = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

for which in ("lr", "betas"):
    assert start(2, lambda: scheduled(which), which) == [2, 2]
assert not list(Path().glob("*/checkpoints/*"))
"""
    told = many(standin, tmp_path, UNREADABLE + script)
    for text in (
        "run.save: rank 0: optimizer['param_groups'][0]['lr'] is a numpy.float64, ",
        "-> set it to a plain value: group['lr'] = float(...)",
        "run.save: rank 0: optimizer['param_groups'][0]['betas'] is a torch.Size, ",
    ):
        assert told.count(text) == 2 or "->" in text, (text, told)
        assert text in told, (text, told)


STOPPED = """
import os, signal, sys, time
if os.environ["IMGKIT_ATTEMPT"] == "1":
    time.sleep(3)  # longer than the run may take
    os.kill(os.getpid(), signal.SIGKILL)
import torch
from imgkit_entrypoints.run import Run
with Run.start(stop_after_s=float(sys.argv[1])) as run:
    run.track(model=torch.nn.Linear(1, 1))
    run.restore()
    while run.step < 1000:
        time.sleep(0.01)
        if run.due():
            print("stops after", run.step, flush=True)
            run.save()
print("done after", run.step, flush=True)
"""


@pytest.mark.soak
def test_time_limit_counts_from_the_first_attempt(standin: str, tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text(STOPPED)
    script = """
run() { python3 -I -m imgkit_entrypoints dist-run --device cpu --nproc 1 --max-failures 1 "$@"; }
export IMGKIT_RUN_DIR=/runs/own
run stopped.py 2; echo "code $?"
run stopped.py 300; echo "code $?"
"""
    options = ("--volume", f"{tmp_path}:/runs", "--workdir", "/runs")
    done = in_image(standin, "bash", "-c", script, options=options)
    told = done.stdout + done.stderr
    (steps,) = [int(line.split()[-1]) for line in told.splitlines() if "stops after" in line]
    assert steps < 10, told  # the time was up before the second attempt; 2 s more would be 200 steps
    assert "attempt 2 starts" in told
    assert [line for line in told.splitlines() if line.startswith("code ")] == ["code 85", "code 0"]
    assert "done after 1000" in told
