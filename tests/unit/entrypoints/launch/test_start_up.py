"""The parts of a start, handed from the agent to the workers."""

from __future__ import annotations

import time

import pytest

from imgkit_entrypoints.launch import start_up
from imgkit_entrypoints.launch.start_up import StartUp


def test_worker_goes_on_where_the_launcher_stopped() -> None:
    agent = StartUp(time.monotonic() - 100.0)
    agent.record("node_agent", time.monotonic() - 99.0)
    agent.record("roll_call", time.monotonic() - 90.0)
    worker = StartUp.from_env(agent.variables(0.0))
    worker.record("imports")
    assert list(worker.parts) == ["node_agent", "roll_call", "torchrun", "imports"]
    assert worker.parts["roll_call"] == pytest.approx(9.0, abs=0.1)
    assert sum(worker.parts.values()) == pytest.approx(100.0, abs=0.2)


def test_worker_without_a_launcher_begins_with_its_process() -> None:
    worker = StartUp.from_env({})
    worker.record("imports")
    assert list(worker.parts) == ["imports"]
    assert worker.parts["imports"] > 0.05  # this process runs since pytest's start


@pytest.mark.parametrize("value", ["x", "1.0 agent", "1.0 agent=fast", " = "])
def test_damaged_variable_is_ignored(value: str) -> None:
    assert StartUp.from_env({start_up.VARIABLE: value}).parts == {}


def test_time_never_runs_backwards() -> None:
    timings = StartUp(10.0)
    timings.record("container", 9.0)
    timings.record("node_agent", 11.0)
    assert timings.parts == {"container": 0.0, "node_agent": 1.0}
