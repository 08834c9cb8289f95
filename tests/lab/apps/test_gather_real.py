"""Values that ranks exchange: real ranks over gloo in the stand-in image."""

from __future__ import annotations

import pytest
from torchkit import run_script

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
                with ranks.join_group() as here:
                    main(here)
            ranks.run_worker(worker)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(count, "ranks ended with", codes, flush=True)
"""

GATHERED = """
def main(here):
    texts = ["", "x" * 100_000, "caf\\u00e9 \\U0001f642 \\udc80", "two"]
    assert here.gather(texts[here.rank]) == texts[: here.world_size]
    assert here.gather([]) == [[]] * here.world_size
    assert here.gather(1.5 if here.rank else None) == [None] + [1.5] * (here.world_size - 1)
start(3, main)
"""


def test_every_rank_gets_every_value(standin, tmp_path):
    result = run_script(standin, tmp_path, "train_many", RANKS + GATHERED)
    lines = result.stdout.splitlines()
    assert lines == ["3 ranks ended with [0, 0, 0]"], result.stderr


UNLIKE = """
def main(here):
    try:
        here.gather(1, call="run.save" if here.rank else "run.steps")
    except ImgkitError as error:
        print(error.what, flush=True)
start(2, main)
"""


def test_ranks_at_different_calls_are_named(standin, tmp_path):
    result = run_script(standin, tmp_path, "train_many", RANKS + UNLIKE)
    message = "the ranks are at different calls: rank 1: run.save, rank 0: run.steps"
    assert result.stdout.splitlines().count(message) == 2, result.stderr


DRAWN = """
from imgkit_entrypoints.run import random_state

def draw():
    numpy = sys.modules.get("numpy")
    more = numpy.random.standard_normal(3).tolist() if numpy else []
    return [torch.randn(3).tolist(), random.random(), random.gauss(0, 1), more]

def check():
    state = random_state.capture()
    first = draw()
    random_state.restore(state)
    assert draw() == first
    return sorted(state)

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


def test_random_state_is_kept_bitwise(standin, tmp_path):
    result = run_script(standin, tmp_path, "train_many", RANKS + DRAWN)
    assert result.stdout.splitlines() == ["['python', 'torch']", "['numpy', 'python', 'torch']"], (
        result.stderr
    )
