"""Collective calls of the run on some of the ranks: the run ends, and names them."""

from __future__ import annotations

import pytest

from .test_run_real import many

pytestmark = pytest.mark.docker

TRAINING = """
from torch.nn.parallel import DistributedDataParallel
from imgkit_entrypoints.run import agreement, call_watch

call_watch.LIMIT_S, call_watch.POLL_S = 2.0, 0.1
agreement.LATENCY_S = 1e9  # between two steps, the ranks exchange nothing but gradients
data = TensorDataset(torch.arange(24.0)[:, None])

def pause(run, step):
    if step == 4 and dist.get_rank() == 0:
        with run.pause():
            pass

def stop(run, step):
    return step == 4 and dist.get_rank() == 0

def late(run, step):
    store = dist.distributed_c10d._get_default_store()
    are_stuck = call_watch.are_stuck
    def compare(places):
        result = are_stuck(places)
        store.set("compared", str(result))
        return result
    call_watch.are_stuck = compare
    while step == 4 and dist.get_rank() == 1 and not store.check(["compared"]): time.sleep(0.1)

def train(body, distributed=True):
    model = torch.nn.Linear(1, 1)
    model = DistributedDataParallel(model) if distributed else model
    with Run.start() as run:
        run.track(model=model)
        run.restore()
        for epoch in range(run.epoch, 2):
            for step, (values,) in run.steps(DataLoader(data, batch_size=4), save_every=0):
                model(values).sum().backward()
                if body(run, step):
                    break
"""
HINT = "call run.pause, run.save and the like on all ranks; let no rank leave a loop alone"


def test_ranks_that_wait_in_different_calls_end_the_run(standin, tmp_path):
    script = """
assert start(2, lambda: train(pause), "pause") == [1, 1]
assert start(2, lambda: train(stop), "stop") == [1, 1]
"""
    output = many(standin, tmp_path, TRAINING + script)
    for call in ("run.pause at <string>:11", "run.steps at <string>:34"):
        assert (
            "run: error: the ranks have waited in different calls for 0.0333333 minutes: "
            f"rank 0: {call}, step 4, rank 1: the program at <string>:35, step 5\n"
            f"run:   -> {HINT}\n"
        ) in output


def test_rank_that_is_only_late_ends_nothing(standin, tmp_path):
    script = """
assert start(2, lambda: train(late, distributed=False), "late") == [0, 0]
"""
    assert "waited in different calls" not in many(standin, tmp_path, TRAINING + script)


def test_calls_that_meet_are_refused_at_once(standin, tmp_path):
    script = """
call_watch.LIMIT_S = 600.0
def between(run):
    for epoch in range(2):
        for step, _ in run.steps(range(3)):
            pass
        if dist.get_rank() == 0:
            with run.pause():
                pass
def refused():
    with Run.start() as run:
        run.track(model=torch.nn.Linear(1, 1))
        run.restore()
        between(run)
assert start(2, refused, "between") == [1, 1]
"""
    output = many(standin, tmp_path, TRAINING + script)
    assert (
        "the ranks are at different calls: rank 0: run.pause, rank 1: run.steps\n"
        "  -> let all ranks take the same number of steps, and call run.restore, run.steps, run.pause and "
        "run.save equally often\n"
    ) in output
