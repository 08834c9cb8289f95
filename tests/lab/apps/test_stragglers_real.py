"""dist-train names the straggler, and no other: real ranks that sleep, and a fake of a GPU's events."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from labkit import ROOT, in_image
from runkit import assert_same_state

pytestmark = pytest.mark.docker

# One container: an import of torch costs as much as these runs.
SCRIPT = """
own = "--data own.py:rows --model own.py:plain --batch-size 2 --log-every 4 --steps 20 --step own.py:"
print(train(4, own + "lagging --run-dir slow"))
print(train(4, own + "even --run-dir even"))
own = own.replace("rows", "fetched").replace("plain", "model")
# Without a share for BatchNorm's copying, rank 1 would look slow: it waits for rank 0 in its forward pass.
print(train(2, own + "even --run-dir data"))

from imgkit_entrypoints.apps.train import profiling
own = "--data own.py:rows --model own.py:model --batch-size 2 --global-batch 12 --steps 9 --run-dir "
print(train(3, own + "timed"))
begin = profiling.WorkClock.__init__
def untimed(self, here):
    begin(self, here)
    self._is_on = False
profiling.WorkClock.__init__ = untimed
print(train(3, own + "untimed"))
"""

# Its clock is the number of marks; an event can be read once the device has passed it.
FAKE_GPU = """
import torch
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.apps.train.profiling import WorkClock

class FakeEvent:
    now = passed = 0
    def __init__(self, enable_timing):
        assert enable_timing
    def record(self):
        FakeEvent.now += 1
        self.at = FakeEvent.now
    def elapsed_time(self, end):
        assert self.at <= end.at <= FakeEvent.passed, "a read that would wait for the device"
        return 1e3 * (end.at - self.at)

torch.cuda.Event = FakeEvent
clock = WorkClock(Ranks(rank=0, local_rank=0, world_size=2, device=torch.device("cuda", 0)))
weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
clock.run_first_backward(weights, lambda: sum(one.sum() for one in weights).backward())
found = []
for look in range(5):
    for step in range(2):
        clock.start_step()
        for _ in range(3):  # micro-batches; the last gradient of the last one counts
            sum(one.sum() for one in weights).backward()
        clock.end_step()
    found.append(tuple(clock.take_times()))
    FakeEvent.passed = FakeEvent.now
print(found)
"""


@pytest.fixture(scope="module")
def runs(standin: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, with their output in ``output``."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copy(Path(__file__).with_name("train_plugins.py"), folder / "own.py")
    shutil.copy(Path(__file__).with_name("train_many.py"), folder)
    shutil.copy(ROOT / "tests/lab/saved_states.py", folder)
    options = ("--volume", f"{folder}:/runs", "--workdir", "/runs", "--hostname", "n7")
    result = in_image(standin, "python3", "train_many.py", options=options, stdin=SCRIPT)
    (folder / "output").write_text(result.stdout + result.stderr)
    assert result.stdout.splitlines().count("0") == 5, result.stdout + result.stderr
    return folder


def summary(run: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((run / "summary.json").read_text())["stragglers"]
    return rows


def test_slow_rank_is_named_with_its_node(runs):
    rows = [json.loads(text) for text in (runs / "slow/metrics.jsonl").read_text().splitlines()]
    (straggler,) = summary(runs / "slow")
    assert (straggler["rank"], straggler["node"], straggler["local_rank"]) == (1, "n7", 1)
    assert straggler["own_work_s"] > 1.2 * straggler["usual_s"]  # the limit of the rule
    assert rows[-1]["slow"] == [straggler]
    assert (
        "dist-train: rank 1 on n7 (local rank 1) is a straggler: its own work takes "
        in (runs / "output").read_text()
    )
    assert rows[-1]["wait_s"] > 0


def test_nobody_is_slow_among_equals(runs):
    assert summary(runs / "even") == []


def test_rank_without_samples_is_not_slow(runs):
    assert summary(runs / "data") == []


def test_clock_leaves_every_bit_of_the_weights(standin, runs):
    assert_same_state(standin, runs / "timed", runs / "untimed", "weights", "optimizer", "ranks")
    rates = [
        json.loads((runs / name / "metrics.jsonl").read_text().splitlines()[-1])
        for name in ("timed", "untimed")
    ]
    assert [row["own_work_s"] is None for row in rates] == [False, True]


def test_events_of_a_gpu_are_read_one_look_later(standin):
    result = in_image(standin, "python3", "-c", FAKE_GPU)
    assert result.returncode == 0, result.stderr
    # From the first mark to that of the third gradient, and one to the end; nothing at the first look.
    assert result.stdout.splitlines()[-1] == f"{[(0.0, 0.0), *[(3.0, 1.0)] * 4]}"
