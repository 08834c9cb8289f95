"""The preflight of several nodes over real connections, with a stub in place of each measuring process."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollcall_nodes import close, head_placement, meet

from imgkit_entrypoints import json_text
from imgkit_entrypoints.cli.commands import PREFLIGHT
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, NoPlan
from imgkit_entrypoints.launch import user_program
from imgkit_entrypoints.launch.preflight import run
from imgkit_entrypoints.launch.preflight.run import STORE, PreflightConfig
from imgkit_entrypoints.launch.stop_protocol import CollectedSignals
from imgkit_entrypoints.rollcall import session
from imgkit_entrypoints.rollcall.messages import MeasureRequest, MeasureResult
from imgkit_entrypoints.rollcall.session import HeadSession, Session

Answers = Callable[[int, MeasureRequest], MeasureResult]
GOOD = {1: (("matmul", 2.0),), 2: (("bandwidth", 10.0),)}
"""Figures by the nodes that measure together."""


def good(_: int, order: MeasureRequest) -> MeasureResult:
    return MeasureResult(stage=order.stage, figures=GOOD[len(order.group)])


class StubProcess:
    """Stands for the measuring process, which needs torch: `answers` decides what it has measured."""

    answers: Answers = staticmethod(good)
    orders: list[tuple[int, MeasureRequest]] = []  # noqa: RUF012 - one list for all nodes of a test

    def __init__(self, _: object, env: Mapping[str, str], arguments: tuple[str, ...] = ()) -> None:
        self.rank, self.serves = int(env.get("GROUP_RANK", -1)), STORE in arguments
        self.sources: list[Any] = [self] if self.serves else []
        self._result: MeasureResult | None = None

    def fileno(self) -> int:
        return -1

    def start(self) -> None:
        if self.serves:
            self._result = MeasureResult(stage=0, figures=((STORE, 40001.0),))

    def request(self, order: MeasureRequest) -> None:
        self.orders.append((self.rank, order))
        self._result = self.answers(self.rank, order)

    def take_answer(self) -> MeasureResult | None:
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _stubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MeasuringProcess", StubProcess)
    monkeypatch.setattr(StubProcess, "orders", [])
    monkeypatch.setattr(run, "TICK_S", 0.01)
    monkeypatch.setattr(session, "LINGER_S", 0.05)  # nobody reads any more when the rolls close


@pytest.fixture
def signals() -> Iterator[CollectedSignals]:
    handlers = {number: signal.getsignal(number) for number in user_program.STOP_SIGNALS}
    with CollectedSignals().collect() as collected:
        yield collected
    for number, handler in handlers.items():
        signal.signal(number, handler)


class NodeThread(threading.Thread):
    """One node's preflight, and what came of it."""

    def __init__(self, roll: Session, **config: Any) -> None:
        super().__init__(daemon=True)
        self.roll, self.output = roll, ""
        self.config = PreflightConfig(module=PREFLIGHT, env={}, open_files=1024, log=self.say, **config)
        self.left_out: tuple[int, ...] | None = None
        self.error: ImgkitError | None = None
        self.start()

    def say(self, *lines: str) -> None:
        self.output += "".join(f"{line}\n" for line in lines)

    def run(self) -> None:
        try:
            self.left_out = run.run_preflight(self.roll, self.config)
        except ImgkitError as error:
            self.error = error


def preflight(
    nodes: int,
    signals: CollectedSignals,
    answers: Answers = good,
    *,
    spares: int = 0,
    absent: tuple[int, ...] = (),
    folder: Path | None = None,
) -> list[NodeThread]:
    """All nodes but those in `absent`, whose launchers are frozen, go through the preflight."""
    StubProcess.answers = staticmethod(answers)  # type: ignore[method-assign]
    hosts = tuple(f"n{rank}" for rank in range(nodes))
    rolls = meet(replace(head_placement(nodes), hosts=hosts))
    threads = []
    for rank, roll in enumerate(rolls):
        if rank not in absent:
            folder = None if rank else folder
            threads.append(NodeThread(roll, signals=signals, spares=spares, folder=folder))
    for thread in threads:
        thread.join(timeout=30)
    close(rolls)
    return threads


def hangs(rank: int, order: MeasureRequest) -> MeasureResult:
    return MeasureResult(stage=order.stage, error="it hangs", mute=True) if rank == 2 else good(rank, order)


def test_good_nodes_all_start(signals, tmp_path):
    threads = preflight(3, signals, folder=tmp_path)
    assert [(thread.left_out, thread.error) for thread in threads] == [((), None)] * 3
    saved = json_text.load(tmp_path / run.FILE)
    assert (saved["passed"], len(saved["nodes"]), len(saved["links"])) == (True, 3, 3)
    stores = {order.store for _, order in StubProcess.orders if len(order.group) > 1}
    assert stores == {40001}


def test_single_node_is_measured_alone(signals):
    thread = NodeThread(HeadSession(head_placement(1), 1), signals=signals, folder=None)
    thread.join(timeout=30)
    assert thread.left_out == ()
    assert [order.group for _, order in StubProcess.orders] == [(0,)]


def test_spare_replaces_a_node_that_hangs(signals):
    threads = preflight(4, signals, hangs, spares=1)
    assert [thread.left_out for thread in threads] == [(2,)] * 4
    assert "OUTLIER n2: it hangs" in threads[0].output
    later = [order for _, order in StubProcess.orders if len(order.group) > 1]
    assert later
    assert not [order for order in later if 2 in order.group], "nobody waits for it again"


def test_without_spare_all_nodes_refuse(signals, tmp_path):
    for thread in preflight(4, signals, hangs, folder=tmp_path):
        assert isinstance(thread.error, CheckFailed)
        assert thread.error.what == "n2 is an outlier: it hangs"
        assert "start again with other hosts than n2, " in str(thread.error)
    assert json_text.load(tmp_path / run.FILE)["passed"] is False


def test_frozen_launcher_does_not_end_the_preflight(signals, monkeypatch):
    monkeypatch.setattr(run, "ALONE_S", 1)
    monkeypatch.setattr(run, "ANSWER_S", 0.0)
    threads = preflight(4, signals, spares=1, absent=(3,))
    assert [thread.left_out for thread in threads] == [(3,)] * 3
    assert "OUTLIER n3: its node agent hangs: no answer within 1 s" in threads[0].output


def test_head_that_is_slow_stops_the_job_even_with_a_spare(signals):
    def slow_head(rank: int, order: MeasureRequest) -> MeasureResult:
        figures = (("matmul", 0.5),) if rank == 0 and len(order.group) == 1 else GOOD[len(order.group)]
        return MeasureResult(stage=order.stage, figures=figures)

    for thread in preflight(5, signals, slow_head, spares=1):
        assert isinstance(thread.error, CheckFailed)
        assert thread.error.what.startswith("n0 is an outlier: matmul 0.5 TFLOP/s, 75 % below")


@pytest.mark.parametrize(
    ("hanging", "slow_link"),
    [
        ({(0, 2): 2, (1, 2): 2, (2, 3): 2}, None),
        ({(0, 3): 3, (0, 2): 2, (0, 1): None}, "n0 - n1: no partner, no partner"),
    ],
    ids=["one hangs", "two hang, and one link is broken"],
)
def test_partner_of_a_node_that_hangs_is_not_blamed(signals, hanging, slow_link):
    def fails(rank: int, order: MeasureRequest) -> MeasureResult:
        if order.group not in hanging:
            return good(rank, order)
        return MeasureResult(stage=order.stage, error="no partner", mute=rank == hanging[order.group])

    threads = preflight(4, signals, fails, spares=2)
    left_out = tuple(sorted({*hanging.values()} - {None}))
    assert [thread.left_out for thread in threads] == [left_out] * 4
    slow_links = re.findall(r"SLOW LINK (.*)", threads[0].output)
    assert slow_links == ([slow_link] if slow_link else [])


def test_signal_ends_the_preflight_everywhere(signals):
    def stopped(rank: int, order: MeasureRequest) -> MeasureResult:
        if rank == 0:
            signals.record(signal.SIGTERM, None)
            os.write(signals._writer, b"x")
        return good(rank, order)

    for thread in preflight(2, signals, stopped):
        assert isinstance(thread.error, NoPlan)
        assert "stopped during the preflight" in thread.error.what
