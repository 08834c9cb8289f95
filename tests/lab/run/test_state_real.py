"""The state of programs on the run library: wrapped models, states of each rank, attempts."""

from __future__ import annotations

import pytest

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

def wrapped(wrap, *, due=False, passes=1):
    torch.manual_seed(3)
    layer = torch.nn.Linear
    net = torch.nn.Sequential(layer(40, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), layer(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, tracked = WRAPS[wrap](net)
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
        run.restore()
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

def same_model(one, other):
    one, other = states(one)["model"], states(other)["model"]
    assert list(one) == list(other), (list(one), list(other))
    assert all(torch.equal(value, other[key]) for key, value in one.items())

def cut(folder, first, then, **how):
    assert -9 in start(3, lambda: wrapped(first, **how), folder, at=5, rank=1, pause=0.02)
    assert start(3, lambda: wrapped(then, **how), folder) == [0, 0, 0]
"""


def test_wrapped_model_resumes_bitwise_in_another_wrapper(standin, tmp_path):
    # On three ranks, the buckets of DDP decide about the last bits.
    script = """
assert start(3, lambda: wrapped("plain"), "whole") == [0, 0, 0]
cut("cut", "inner", "compiled outside")
same_model("whole", "cut")
assert list(states("whole")["model"]) == ["0.weight", "0.bias", "3.weight", "3.bias"]
"""
    output = many(standin, tmp_path, WRAPPED + script)
    assert output.count("run: resumes after step 3: ") == 1, output
    assert "warning" not in output


@pytest.mark.soak
def test_every_wrapper_resumes_bitwise(standin, tmp_path):
    script = """
cases = [(wrap, {}) for wrap in WRAPS if wrap != "static"] + [
    ("plain", {"due": True}),
    ("compiled outside", {"due": True}),
    ("unused", {"passes": 0}),
    ("static", {"passes": 2}),
]
for number, (wrap, how) in enumerate(cases):
    print(number, wrap, how, flush=True)
    assert start(3, lambda: wrapped(wrap, **how), f"whole{number}") == [0, 0, 0]
    cut(f"cut{number}", wrap, wrap, **how)
    same_model(f"whole{number}", f"cut{number}")
"""
    output = many(standin, tmp_path, WRAPPED + script)
    assert output.count("run: resumes after step 3: ") == 10, output


CURSOR = """
class Cursor:
    '''Where each rank is in its own file.'''
    def __init__(self, at=0):
        self.at, self.best = at, 0
    def state_dict(self):
        return {"at": self.at, "best": self.best}
    def load_state_dict(self, state):
        self.at, self.best = state["at"], state["best"]

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


def test_each_rank_resumes_from_its_own_state(standin, tmp_path):
    script = """
own = lambda: reading(Cursor(10 * dist.get_rank()), "track_per_rank")
assert start(2, own, "whole") == [0, 0]
assert -9 in start(2, own, "cut", at=5, rank=1, pause=0.02)
assert start(2, own, "cut") == [0, 0]
same("whole", "cut")
assert start(1, own, "cut") == [2]
assert start(2, lambda: reading(Cursor(), "track"), "cut") == [2, 2]
assert start(2, lambda: reading(Cursor(10 * dist.get_rank()), "track"), "begins") == [2, 2]
assert start(2, lambda: reading(Cursor(), "track"), "moves") == [2, 2]
# Rank 0's state counts for all where the ranks move together, and rank 0 alone keeps what it has seen.
assert start(2, lambda: reading(Cursor(), "track", ahead=0), "together") == [0, 0]
assert start(2, lambda: reading(Cursor(), "track", ahead=0, until=12), "together") == [0, 0]
"""
    output = many(standin, tmp_path, CURSOR + script)
    for text in (
        "cursor has a state for each of 2 ranks, but there are 1",
        "contains cursor of each rank, model, and this program tracks cursor, model",
        "run.restore: cursor['at'] differs between the ranks, and a resume would give that of rank 0 to all: "
        "rank 0: 0, rank 1: 10",
        "run.save: cursor['at'] differs between the ranks, and a resume would give that of rank 0 to all: "
        "rank 0: 3, rank 1: 6",
        "-> run.track_per_rank(cursor=cursor) in place of run.track: one for each rank",
        "run: resumes after step 8: together",
    ):
        assert text in output, (text, output)


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


def test_large_states_of_ranks_are_kept_and_unlike_weights_refused(standin, tmp_path):
    script = """
assert start(2, lambda: large(2), "large") == [0, 0]
assert start(2, lambda: large(4), "large") == [0, 0]
assert start(2, lambda: averaged("apart"), "apart") == [2, 2]
assert start(2, lambda: averaged("together"), "together") == [0, 0]  # rank 0 alone keeps the average
"""
    output = many(standin, tmp_path, UNLIKE + script)
    assert "run: resumes after step 2: large" in output
    assert (
        output.count("run.save: model.bias differs between the ranks, and a resume would give that of rank 0")
        == 2
    )
    assert "-> wrap the model in DDP; or run.track_per_rank(model=model) in place of run.track" in output


UNLOADABLE = """
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

Point = collections.namedtuple("Point", "x y")

def local():
    class Local:
        pass
    return Local()

BAD = [lambda: 1, [0.5, (local(),)], {"file": sys.stdin}, (number for number in range(3))]
GOOD = [
    [1, 0.5, "text", None, b"bytes", 1j, {2}, {(1, 2): True}, torch.float16, torch.Size([3]), torch.ones(2)],
    [numpy.mean([1.0, 2.0]), numpy.arange(3), {numpy.str_("key"): 1}, collections.deque([1])],
    Point(1, torch.ones(1)),
    {"empty": {}, "none": [], "sparse": torch.eye(2).to_sparse()},
]

def evaluated(how, before, after=None):
    torch.manual_seed(0)
    model, best = torch.nn.Linear(2, 1), Best(before)
    with Run.start() as run:
        run.track(model=model)
        getattr(run, how)(best=best)
        if run.restore():
            print("loaded", best.value, flush=True)
        for step, _ in run.steps(range(4), save_every=2) if run.epoch == 0 else ():
            if step == 2 and after is not None:
                best.value = after
"""


def test_value_that_no_resume_could_load_is_refused(standin, tmp_path):
    script = """
for number, value in enumerate(BAD):
    for how in ("track", "track_per_rank"):
        assert start(1, lambda: evaluated(how, value), f"before-{number}-{how}") == [2]
        assert start(1, lambda: evaluated(how, 0.0, value), f"after-{number}-{how}") == [2]
assert start(2, lambda: evaluated("track", 0.0, BAD[0]), "ranks") == [2, 2]
assert not list(Path().glob("*/checkpoints/*"))
for number, value in enumerate(GOOD):
    for how in ("track", "track_per_rank"):
        assert start(1, lambda: evaluated(how, value, value), f"good-{number}-{how}") == [0]
        assert start(1, lambda: evaluated(how, 0.0), f"good-{number}-{how}") == [0]
"""
    output = many(standin, tmp_path, UNLOADABLE + script)
    for text in (
        "run.track: best['best'] is a function, and no resume could load it again",
        "run.save: rank 0: best['best'] is a function, ",
        "best['best'][1][0] is a Local, ",
        "best['best']['file'] is a TextIOWrapper, ",
        "best['best'] is a generator, ",
        "loaded Point(x=1, y=tensor([1.]))",
        "loaded {'empty': {}, 'none': [], 'sparse': tensor(",
    ):
        assert text in output, (text, output)
    assert output.count("run: resumes after step 4: ") == 8, output


COLLIDING = """
class Holder:
    def __init__(self, *numbers):
        self.numbers = [torch.full((2,), number) for number in numbers]
    def state_dict(self):
        first, second, third, fourth = self.numbers
        return {"a.b": first, "a": {"b": second}, 1: third, "1": fourth}
    def load_state_dict(self, state):
        self.numbers = [state["a.b"], state["a"]["b"], state[1], state["1"]]

def colliding(*numbers):
    first, *others = map(float, numbers)
    inner, outer = torch.nn.Linear(1, 1, bias=False), torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
    holder = Holder(*others[:4])
    for model, number in ((inner, first), (outer, others[4])):
        torch.nn.init.constant_(next(model.parameters()), number)
    objects = {"net.0": inner, "net": outer, "holder": holder}
    if dist.get_rank() == 1:
        objects = dict(reversed(objects.items()))
    with Run.start() as run:
        run.track(**objects)
        run.restore()
        for _ in range(run.epoch, 1):
            for _ in run.steps(range(1)):
                pass
    tensors = [*inner.parameters(), *holder.numbers, *outer.parameters()]
    assert [tensor.flatten()[0].item() for tensor in tensors] == [1, 2, 3, 4, 5, 6], tensors

assert start(2, lambda: colliding(1, 2, 3, 4, 5, 6), "run") == [0, 0]
assert start(2, lambda: colliding(7, 7, 7, 7, 7, 7), "run") == [0, 0]
"""


def test_states_whose_keys_have_the_same_text_stay_apart(standin, tmp_path):
    many(standin, tmp_path, COLLIDING)


PLACED = """
def placed():
    torch.manual_seed(0)
    linear, conv = torch.nn.Linear(64, 8), torch.nn.Conv2d(4, 4, 3)
    if dist.get_rank() == 1:  # the same weights, but in the middle of a word of memory, or in another order
        place = torch.empty(linear.weight.numel() + 1)[1:].view(linear.weight.shape)
        linear.weight.data = place.copy_(linear.weight.data)
        conv = conv.to(memory_format=torch.channels_last)
    with Run.start() as run:
        run.track(linear=linear, conv=conv)
        run.restore()
        for _ in run.steps(range(2), save_every=1):
            pass

assert start(2, placed, "run") == [0, 0]
"""


def test_equal_weights_may_lie_in_memory_in_another_way_on_each_rank(standin, tmp_path):
    many(standin, tmp_path, PLACED)


WAITING = """
def waiting(keep):
    model = torch.nn.Linear(1, 1)
    with Run.start(keep=keep) as run:
        run.track(model=model)
        run.restore()
        for _ in range(run.epoch, 1):
            for _ in run.steps(range(2)):
                pass
        run.wait()

assert start(1, lambda: waiting(0), "nothing-kept") == [0]
assert start(1, lambda: waiting(2), "run") == [0]
assert start(1, lambda: waiting(2), "run") == [0]
"""


def test_wait_for_no_checkpoint_does_not_end_the_run(standin, tmp_path):
    many(standin, tmp_path, WAITING)


LIBRARY = """
from imgkit_entrypoints.run import LibraryCheckpoint

def library(kill_at=0):
    weight = torch.zeros(1)
    with Run.start() as run:
        checkpoint = LibraryCheckpoint(run)
        if run.restore() and checkpoint.path:
            weight = torch.load(checkpoint.path, weights_only=True)
        while run.step < 6:
            weight += 1
            if run.due(save_every=2):
                torch.save(weight, checkpoint.next_path())
                if run.step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                run.save()
                run.wait()
    assert weight == 6, weight

assert start(1, lambda: library(kill_at=4), "run") == [-9]
assert start(1, library, "run") == [0]
"""


def test_unfinished_checkpoint_of_a_library_does_not_count(standin, tmp_path):
    assert "run: resumes after step 2: " in many(standin, tmp_path, LIBRARY)


CONNECTED = """
from imgkit_entrypoints.run.ranks import Ranks

def connected():
    group, rank = dist.new_group(backend="gloo"), dist.get_rank()
    ranks = Ranks(rank=rank, local_rank=rank, world_size=2, device=torch.device("cpu"), group=group)
    with Run.start() as run:
        run.connect(ranks)
        run.track(model=torch.nn.Linear(1, 1))
        run.restore()
        for step, _ in run.steps(range(2)):
            pass
    assert run.wait().saved_step == 2

assert start(2, connected, "run") == [0, 0]
"""


def test_process_group_of_the_program_stays_open(standin, tmp_path):
    # dist-train asks for the saved step behind `with`.
    many(standin, tmp_path, CONNECTED)
