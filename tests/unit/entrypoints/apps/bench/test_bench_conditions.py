"""The condition of GPUs and ports before and after a run.

No GPU here: the lines have the form of nvidia-smi's, and the nvidia-smi that runs is a fake.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from imgkit_entrypoints.apps.bench import node_state
from imgkit_entrypoints.apps.bench.node_state import Condition, GpuClocks, NodeConditions
from imgkit_entrypoints.facts import Reader

CSV = "0, 1755, 1980, 61, 0x0000000000000001\n1, 1110, 1980, 84, 0x0000000000000044\n"
HOT = "heat (hardware)"


def gpu(sm_MHz: int | None = 1980, slowed_by: tuple[str, ...] = ()) -> GpuClocks:
    return GpuClocks(index=0, sm_MHz=sm_MHz, most_MHz=1980, temperature_C=84, slowed_by=slowed_by)


def node(before: Condition, after: Condition) -> NodeConditions:
    return NodeConditions(host="n1", before=before, after=after)


def test_clocks_and_their_brakes_are_read() -> None:
    cool, hot = node_state.parsed_clocks(CSV)
    assert (cool.index, cool.sm_MHz, cool.most_MHz, cool.temperature_C, cool.slowed_by) == (
        0,
        1755,
        1980,
        61,
        (),
    )
    assert hot.slowed_by == ("the power cap (software)", HOT)


def test_what_the_driver_does_not_tell_stays_unknown() -> None:
    (found,) = node_state.parsed_clocks("0, [N/A], 1980, [Not Supported], [N/A]\n")
    assert (found.sm_MHz, found.temperature_C, found.slowed_by) == (None, None, ())


@pytest.mark.parametrize("text", ["", "No devices were found", "a, b, c, d, e", "0, 1, 2"])
def test_other_output_is_no_gpu(text: str) -> None:
    assert node_state.parsed_clocks(text) == ()


@pytest.mark.parametrize("known", node_state.REASONS)
def test_both_spellings_of_the_driver_are_asked(
    known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f'#!/bin/sh\ncase "$1" in *{known}*) printf "{CSV.strip()}" ;; *) exit 2 ;; esac\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = node_state.read_condition(Reader(root=tmp_path), gpus=True)
    assert [one.index for one in found.gpus] == [0, 1]
    assert found.errors == {}


def test_no_nvidia_smi_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    now = node_state.read_condition(Reader(root=tmp_path), gpus=True)
    assert now.gpus == ()
    assert node_state.sentences([node(now, now)]) == ()


def test_slowed_gpu_is_named_with_its_reason() -> None:
    before, after = (Condition(gpus=(one,), errors={}) for one in (gpu(), gpu(1110, (HOT,))))
    assert node_state.sentences([node(before, after)]) == (
        "GPU clocks: 1980 to 1980 MHz before, 1110 to 1110 MHz after, of 1980 MHz.",
        "n1: GPU 0 was slowed down by heat (hardware) at 84 C, after the run.",
    )


def test_errors_that_came_are_told_and_old_ones_not() -> None:
    before = Condition(gpus=(), errors={"mlx5_0:1 symbol_error": 12, "eth0 rx_dropped": 5})
    after = Condition(
        gpus=(), errors={"mlx5_0:1 symbol_error": 19, "eth0 rx_dropped": 5, "eth1 rx_errors": 3}
    )
    assert node_state.sentences([node(before, after)]) == (
        "n1: mlx5_0:1 symbol_error rose from 12 to 19 during the run.",
    )
