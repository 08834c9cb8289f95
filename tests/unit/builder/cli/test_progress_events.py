"""Progress of ``--json`` on stderr: JSON lines, not more than a log can bear."""

from __future__ import annotations

import json

import pytest

from imgkit_builder.cli import progress


def events(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, int | str]]:
    lines = map(json.loads, capsys.readouterr().err.splitlines())
    return [(line["event"], line["done"] if "done" in line else line["text"]) for line in lines]


def test_bytes_are_printed_once_a_second(capsys, monkeypatch):
    clock = iter((0.0, 0.4, 0.9, 1.1, 1.5, 2.2))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.reporter(as_json=True) as report:
        report.stage("read")
        for done_bytes in range(6):
            report.advance(done_bytes, 100)
    assert events(capsys) == [("stage", "read"), ("bytes", 0), ("bytes", 3), ("bytes", 5)]


def test_each_stage_begins_with_an_event_of_its_bytes(capsys):
    with progress.reporter(as_json=True) as report:
        for name in ("read", "check"):
            report.stage(name)
            report.advance(1, 2)
            report.advance(2, 2)
    assert events(capsys) == [("stage", "read"), ("bytes", 1), ("stage", "check"), ("bytes", 1)]


@pytest.mark.parametrize("total_bytes", [None, 9000])
def test_stage_that_has_ended_has_a_full_bar(total_bytes):
    live = progress.LiveReporter()
    live.stage("read")
    live.advance(5000, total_bytes)
    live.close()
    assert live._progress is not None
    assert [task.percentage for task in live._progress.tasks] == [100]
