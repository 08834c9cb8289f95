"""What ``ci/check`` removes from an engine that others use too, what it reports, and what it runs again."""

from __future__ import annotations

import leftovers
import pytest
from leftovers import EngineState, Process
from steady_tests import select_reruns

BEFORE = EngineState(
    containers=["c0 debian mine"], image_ids=["old", "renamed"], dangling_ids=["old"], cache_ids=["k1"]
)
AFTER = EngineState(
    containers=["c0 debian mine", "c1 debian test"],
    image_names=["imgkit-test:1"],
    image_ids=["old", "renamed", "made", "others", "named"],
    dangling_ids=["old", "renamed", "made", "others"],
    standin_ids=["renamed", "made", "named"],
    cache_ids=["k3", "k2", "k1"],
)


@pytest.mark.parametrize(("is_alone", "removed"), [(False, ["made"]), (True, ["made", "others"])])
def test_only_the_runs_own_dangling_images_are_removed(is_alone, removed):
    assert leftovers.removable_images(BEFORE, AFTER, is_alone=is_alone) == removed


def test_new_build_cache_is_removed_before_what_it_needs():
    assert leftovers.removable_cache(BEFORE, AFTER) == ["k3", "k2"]


def test_everything_new_on_the_engine_is_named():
    assert leftovers.engine_leftovers(BEFORE, AFTER) == [
        "container c1 debian test",
        "image imgkit-test:1",
        "dangling image made",
        "dangling image others",
        "build cache k3",
        "build cache k2",
    ]


def test_engine_that_does_not_answer_is_not_empty(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    with pytest.raises((OSError, leftovers.subprocess.CalledProcessError)):
        leftovers.read_engine()


def test_processes_of_the_run_are_told_from_others():
    environ = "A=1\0RUN=/checkout\0"
    processes = {
        1: Process(parent=0, argv="init", environ=""),
        20: Process(parent=1, argv="ci/check", environ=environ),
        21: Process(parent=20, argv="leftovers", environ=environ),
        30: Process(parent=1, argv="dockerd", environ=environ),
        31: Process(parent=30, argv="containerd", environ=environ),
        40: Process(parent=1, argv="sleep 100", environ=environ),
        41: Process(parent=1, argv="sleep 200", environ="RUN=/checkout2\0"),
    }
    lines = leftovers.left_processes(processes, "RUN=/checkout", own_pid=21, engine_pid=30)
    assert lines == ["process 40 sleep 100"]


@pytest.mark.parametrize(
    ("failed", "reruns"),
    [
        (["a.py::test_b[x@y]@wires", "a.py::test_c"], ["a.py::test_b[x@y]", "a.py::test_c"]),
        ([f"a.py::test_{number}" for number in range(4)], []),
    ],
    ids=["few", "too many"],
)
def test_few_failed_tests_run_again_without_their_group(failed, reruns):
    assert list(select_reruns(dict.fromkeys(failed, True))) == reruns
