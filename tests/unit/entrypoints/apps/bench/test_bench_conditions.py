"""What GPUs and ports say before and after, and how NCCL's decisions are read.

No GPU here: the lines are in nvidia-smi's and NCCL's formats, the nvidia-smi that is run is a fake.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from imgkit_entrypoints.apps.bench.judge import conditions, nccl_log
from imgkit_entrypoints.apps.bench.judge.conditions import Condition, Gpu, Node
from imgkit_entrypoints.facts import Reader

CSV = "0, 1755, 1980, 61, 0x0000000000000001\n1, 1110, 1980, 84, 0x0000000000000044\n"
HOT = "heat (hardware)"


def gpu(sm_MHz: int | None = 1980, slowed_by: tuple[str, ...] = ()) -> Gpu:
    return Gpu(index=0, sm_MHz=sm_MHz, most_MHz=1980, temperature_C=84, slowed_by=slowed_by)


def node(before: Condition, after: Condition) -> Node:
    return Node(host="n1", before=before, after=after)


def test_clocks_and_their_brakes_are_read() -> None:
    cool, hot = conditions.parsed(CSV)
    assert (cool.index, cool.sm_MHz, cool.most_MHz, cool.temperature_C, cool.slowed_by) == (
        0,
        1755,
        1980,
        61,
        (),
    )
    assert hot.slowed_by == ("the power cap (software)", HOT)


def test_what_the_driver_does_not_tell_stays_unknown() -> None:
    (found,) = conditions.parsed("0, [N/A], 1980, [Not Supported], [N/A]\n")
    assert (found.sm_MHz, found.temperature_C, found.slowed_by) == (None, None, ())


@pytest.mark.parametrize("text", ["", "No devices were found", "a, b, c, d, e", "0, 1, 2"])
def test_other_output_is_no_gpu(text: str) -> None:
    assert conditions.parsed(text) == ()


@pytest.mark.parametrize("known", conditions.REASONS)
def test_both_spellings_of_the_driver_are_asked(
    known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f'#!/bin/sh\ncase "$1" in *{known}*) printf "{CSV.strip()}" ;; *) exit 2 ;; esac\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = conditions.read(Reader(root=tmp_path), gpus=True)
    assert [one.index for one in found.gpus] == [0, 1]
    assert found.errors == {}


def test_no_nvidia_smi_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    now = conditions.read(Reader(root=tmp_path), gpus=True)
    assert now.gpus == ()
    assert conditions.sentences([node(now, now)]) == ()


def test_slowed_gpu_is_named_with_its_reason() -> None:
    before, after = (Condition(gpus=(one,), errors={}) for one in (gpu(), gpu(1110, (HOT,))))
    assert conditions.sentences([node(before, after)]) == (
        "GPU clocks: 1980 to 1980 MHz before, 1110 to 1110 MHz after, of 1980 MHz.",
        "n1: GPU 0 is slowed down by heat (hardware) at 84 C, after the run.",
    )


def test_errors_that_came_are_told_and_old_ones_not() -> None:
    before = Condition(gpus=(), errors={"mlx5_0:1 symbol_error": 12, "eth0 rx_dropped": 5})
    after = Condition(
        gpus=(), errors={"mlx5_0:1 symbol_error": 19, "eth0 rx_dropped": 5, "eth1 rx_errors": 3}
    )
    assert conditions.sentences([node(before, after)]) == (
        "n1: mlx5_0:1 symbol_error rose from 12 to 19 during the run.",
    )


@pytest.mark.parametrize(
    ("line", "algorithm", "protocol", "channels"),
    [
        ("AllReduce: 4096 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..1}", "TREE", "LL", 2),
        (
            "n1:7:9 [0] NCCL INFO AllGather: 37756928 Bytes -> Algo 1 proto 2 time 2860.208008",
            "Ring",
            "Simple",
            None,
        ),
    ],
)
def test_decision_of_nccl_is_read(line: str, algorithm: str, protocol: str, channels: int | None) -> None:
    found = nccl_log.decision(["8 Bytes -> Algo NVLS proto LL128", line, "unrelated"])
    assert found == nccl_log.Decision(algorithm=algorithm, protocol=protocol, channels=channels)


def test_log_without_decisions_says_nothing() -> None:
    assert nccl_log.decision(["Using network IB"]) is None
    assert nccl_log.decided(None, "decided") is None


def test_without_nccl_nothing_is_switched(tmp_path: Path) -> None:
    env = dict(nccl_log.SETTINGS)
    with nccl_log.deciding(tmp_path, env) as begin:
        assert env == nccl_log.SETTINGS
        assert nccl_log.decided(tmp_path, begin) is None


def test_decisions_go_to_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = dict(nccl_log.SETTINGS)

    told = iter(["8 Bytes -> Algo 0 proto 0", "Using network IB", "no decision on this one", "via NET/IB/0"])

    def fake_nccl_opens_its_log() -> None:
        name = env["NCCL_DEBUG_FILE"].replace("%h", "n1").replace("%p", str(os.getpid()))
        assert not Path(name).exists(), "NCCL would empty it"
        Path(name).write_text(f"{next(told)}\n")

    monkeypatch.setattr(nccl_log, "_reset", lambda: fake_nccl_opens_its_log)
    found = []
    for _ in range(2):
        with nccl_log.deciding(tmp_path, env) as begin:
            assert env["NCCL_DEBUG_SUBSYS"] == "TUNING"
            found.append(nccl_log.decided(tmp_path, begin))
    assert found == [nccl_log.Decision(algorithm="Tree", protocol="LL", channels=None), None]
    assert env["NCCL_DEBUG_SUBSYS"] == nccl_log.SETTINGS["NCCL_DEBUG_SUBSYS"]
    assert "network IB" in nccl_log.found(tmp_path)
