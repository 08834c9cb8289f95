"""Values that ranks exchange: real ranks over gloo in the stand-in image."""

from __future__ import annotations

import pytest
from labkit import in_image

pytestmark = pytest.mark.docker

# Ranks are forked from one process that has imported torch, as in train_many.py.
RANKS = """
import os, random, socket, sys
import torch
from imgkit_entrypoints.apps import ranks
from imgkit_entrypoints.errors import ImgkitError

def start(count, main):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=count, MASTER_PORT=port)
            os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
            def worker():
                with ranks.opened() as here:
                    main(here)
            ranks.run_worker(worker)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(count, "ranks ended with", codes, flush=True)
"""

GATHERED = """
def main(here):
    texts = ["", "x" * 100_000, "caf\\u00e9 \\U0001f642 \\udc80", "two"]
    assert here.gather(texts[here.rank], str) == texts[: here.world_size]
    assert here.gather([], list[int]) == [[]] * here.world_size
    assert here.gather(1.5 if here.rank else None, float | None) == [None] + [1.5] * (here.world_size - 1)
start(3, main)
"""


def test_every_rank_gets_every_value(standin: str) -> None:
    done = in_image(standin, "python3", "-", given=RANKS + GATHERED)
    told = done.stdout.splitlines()
    assert told == ["3 ranks ended with [0, 0, 0]"], done.stderr


# Rank 1 sends what a stranger might. All ranks must refuse it together, or the others would wait.
REFUSED = """
import torch.distributed as dist
from imgkit_entrypoints.run import ranks as exchange
class Called:
    def __reduce__(self):
        return print, ("the pickle ran code",)
def pickled(here):
    objects = [None, None]
    dist.all_gather_object(objects, Called())
def main(here):
    for sent in (b"[" * 50_000, b"NaN", b'"text"', b"", b" " * (exchange.LONGEST + 1), b"true", b"\\xff"):
        if here.rank == 1:
            exchange.json.dumps = lambda *args, **kwargs: sent.decode("latin-1")
        try:
            here.gather(7, int)
        except ImgkitError as error:
            assert "rank 1 sent a value" in str(error), error
            print("refused", flush=True)
start(2, main)
start(2, pickled)
"""


def test_value_of_another_kind_is_refused_on_every_rank(standin: str) -> None:
    done = in_image(standin, "python3", "-", given=RANKS + REFUSED)
    told = done.stdout.splitlines()
    assert told.count("refused") == 14, done.stderr
    assert "2 ranks ended with [0, 0]" in told
    assert "the pickle ran code" in told, "torch's own collective; the reason for this one"


SENT = """
import io
from imgkit_entrypoints.run import random_state

def read(row):
    return torch.load(io.BytesIO(row), weights_only=True)

def check():
    row = random_state.written(random_state.current())
    random_state.restore(read(row))
    assert random_state.written(random_state.current()) == row
    return sorted(read(row))

draws = random.Random(7)
numpy = sys.modules.pop("numpy")  # as in an image where torch has none
print(check())
sys.modules["numpy"] = numpy
for seed in range(100):
    random_state.seed_everything(seed)
    for _ in range(draws.randrange(5)):  # an odd number of normal ones leaves one in the generator
        random.gauss(0, 1), numpy.random.standard_normal(), torch.randn(draws.randrange(1, 9))
    found = check()
print(found)
"""


def test_random_state_is_kept_bitwise(standin: str) -> None:
    done = in_image(standin, "python3", "-", given=RANKS + SENT)
    assert done.stdout.splitlines() == ["['python', 'torch']", "['numpy', 'python', 'torch']"], done.stderr
