"""Goodput: the parts of the time add up, each second is in the right one, and a damaged file does no harm."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

from imgkit_entrypoints import files
from imgkit_entrypoints.launch import goodput
from imgkit_entrypoints.launch.goodput import Attempt, CountedStart, Goodput, GoodputTimer, Parts, Progress
from imgkit_entrypoints.schedulers.placement import Placement

from .conftest import until

STUB = str(Path(__file__).with_name("stub_torchrun.py"))


def noted(
    first: float, last: float, saving: float = 0.0, *, kept: float = 0.0, till: float = 0.0
) -> Progress:
    return Progress(first_s=first, last_s=last, saving_s=saving, kept_s=kept, kept_saving_s=till)


def attempt(began: float, ended: float | None, made: Progress | None = None, **more: Any) -> Attempt:
    return Attempt(began_s=began, ended_s=ended, progress=made, **{"nodes": 2, "well": False, **more})


def told(*attempts: Attempt, now: float = 100.0, nodes: int = 2) -> dict[str, float]:
    """The parts that are not zero, from 0 to `now`."""
    found = goodput.parts(0.0, now, nodes, attempts)
    assert found.allocated == pytest.approx(now * nodes)
    return {name: value for name, value in dataclasses.asdict(found).items() if value}


def test_run_without_a_fault_starts_trains_saves_and_ends() -> None:
    one = attempt(5, 98, noted(10, 90, 6), well=True)
    assert told(one) == {"starting": 20, "training": 148, "saving": 12, "idle": 20}


def test_steps_after_the_last_saved_one_are_lost_with_the_time_to_the_next_step() -> None:
    first = attempt(5, 60, noted(10, 58, 9, kept=40, till=4))
    second = attempt(61, 98, noted(70, 95, 1), well=True)
    assert told(first, second) == {
        "starting": 20,
        "training": 52 + 48,
        "saving": 8 + 2,
        "lost": 60,
        "idle": 10,
    }


def test_attempt_that_saved_nothing_is_lost_from_its_first_step() -> None:
    assert told(attempt(5, 60, noted(10, 58))) == {"starting": 20, "lost": 180}


def test_attempt_that_fails_before_its_first_step_is_lost_from_its_start() -> None:
    assert told(attempt(5, 60)) == {"starting": 10, "lost": 190}


def test_start_that_makes_no_attempt_is_lost() -> None:
    assert told() == {"lost": 200}


def test_attempt_that_still_runs_counts_as_if_a_fault_ended_it_now() -> None:
    assert told(attempt(5, None, noted(10, 99, kept=80))) == {"starting": 20, "training": 140, "lost": 40}


def test_planned_exchange_is_no_fault() -> None:
    first = attempt(0, 40, noted(10, 40), well=True)
    second = attempt(40, 100, noted(50, 100), well=True)
    assert told(first, second) == {"starting": 40, "training": 160}


def test_spare_is_idle_while_the_others_train() -> None:
    one = attempt(0, 100, noted(10, 100), well=True, nodes=2)
    assert told(one, nodes=3) == {"starting": 30, "training": 180, "idle": 90}


def test_run_that_was_complete_before_only_starts() -> None:
    assert told(attempt(5, 90, well=True)) == {"starting": 180, "idle": 20}


def test_program_that_notes_nothing_never_trains() -> None:
    assert told(attempt(5, 90, well=True)) == {"starting": 180, "idle": 20}
    assert told(attempt(5, 90)) == {"starting": 10, "lost": 190}


TIMES = strategies.floats(-10, 200)
ATTEMPTS = strategies.builds(
    Attempt,
    began_s=TIMES,
    nodes=strategies.integers(0, 9),
    ended_s=strategies.none() | TIMES,
    well=strategies.booleans(),
    progress=strategies.none()
    | strategies.builds(
        Progress, first_s=TIMES, last_s=TIMES, saving_s=TIMES, kept_s=TIMES, kept_saving_s=TIMES
    ),
)


@hypothesis.settings(deadline=None)
@hypothesis.given(
    strategies.lists(ATTEMPTS, max_size=6), strategies.integers(1, 8), strategies.floats(0, 200)
)
def test_parts_of_any_timeline_add_up(attempts: list[Attempt], nodes: int, now: float) -> None:
    found = goodput.parts(0.0, now, nodes, attempts)
    assert found.allocated == pytest.approx(now * nodes, abs=1e-6)
    assert min(dataclasses.astuple(found)) >= 0
    assert found.training <= found.allocated


def start(**changed: Any) -> CountedStart:
    values: dict[str, Any] = {
        **{"job": "7", "began": "2026-03-01T10:00:00.000+00:00", "seconds": 3600.0, "nodes": 2},
        **{"attempts": 1, "code": 0, "source": goodput.BY_PROGRAM},
        "node_s": Parts(starting=24.0, training=6260.0, saving=60.0, lost=780.0, idle=76.0),
    }
    return CountedStart(**{**values, **changed})


def test_line_says_where_the_time_went() -> None:
    assert str(Goodput(starts=(start(),))) == (
        "goodput 87 %: 3600 s on 2 nodes: "
        "starting 12 s, training 3130 s, saving 30 s, lost to faults 390 s, idle 38 s"
    )


def test_line_adds_the_starts_of_a_job() -> None:
    text = str(Goodput(starts=(start(), start(nodes=4, source=goodput.BY_AGENT))))
    assert text.startswith("goodput 87 % over 2 starts: 14400 node-s: starting 48 node-s, ")
    assert text.endswith("idle 152 node-s")


def test_program_without_steps_has_no_goodput() -> None:
    alone = Goodput(starts=(start(source=goodput.BY_AGENT),))
    assert str(alone) == "3600 s on 2 nodes; no goodput: the program reported no steps"
    twice = alone.with_start(start(source=goodput.BY_AGENT))
    assert str(twice) == "7200 s on 2 nodes over 2 starts; no goodput: the program reported no steps"
    assert (json.loads(twice.to_json())["goodput"], twice.share) == (None, None)
    assert goodput.from_json(twice.to_json()) == twice
    assert twice.with_start(start()).share == pytest.approx(0.8694, abs=1e-4)


def test_file_is_read_back_and_holds_the_sums() -> None:
    both = Goodput(starts=(start(), start(code=None)))
    text = both.to_json()
    assert goodput.from_json(text) == both
    found = json.loads(text)
    assert found["goodput"] == 0.8694
    assert found["allocated_node_s"] == 14400.0 == sum(found["node_s"].values())


def test_file_keeps_the_newest_starts() -> None:
    many = Goodput()
    for number in range(goodput.MOST_STARTS + 2):
        many = many.with_start(start(job=str(number)))
    assert [one.job for one in many.starts[:1]] == ["2"]
    assert goodput.from_json(many.to_json()) == many


DAMAGED = (
    "",
    "[]",
    '{"schema": 1}',
    '{"schema": 2, "starts": []}',
    '{"schema": 1, "starts": [{}]}',
    Goodput(starts=(start(),)).to_json().replace("780.0", "-1.0"),
    Goodput(starts=(start(),)).to_json().replace("780.0", "1e300"),
    Goodput(starts=(start(),)).to_json().replace("2026-03", "9999-12"),
    Goodput(starts=(start(),)).to_json().replace("2026-03", "yesterday"),
    Goodput(starts=(start(),)).to_json()[:-9],
)


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        goodput.from_json(text)


# ---- the launcher
def keeper(folder: Path, said: list[str], **env: str) -> GoodputTimer:
    place = Placement(
        **{"scheduler": "manual", "nnodes": 2, "node_rank": 0, "hosts": (), "head": "", "port": None},
        **{"job_id": "7", "source": {}},
    )
    return GoodputTimer({"IMGKIT_RUN_DIR": str(folder), **env}, place, said.append, goodput.BY_PROGRAM)


@pytest.mark.parametrize("text", [*DAMAGED[:3], "\0" * 5000])
def test_damaged_file_does_not_keep_a_run_from_starting(tmp_path: Path, text: str) -> None:
    (tmp_path / goodput.FILE).write_text(text)
    said: list[str] = []
    with keeper(tmp_path, said) as times:
        times.attempt(tmp_path, 2)
        times.ended(0)
    assert said[0].startswith(f"warning: {tmp_path / goodput.FILE} is ignored: ")
    assert said[1].startswith("goodput 0 %: ")
    assert len(goodput.read(tmp_path / goodput.FILE).starts) == 1


def test_link_in_its_place_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("mine")
    (tmp_path / goodput.FILE).symlink_to(tmp_path / "other")
    said: list[str] = []
    with keeper(tmp_path, said):
        pass
    assert "it is a symbolic link" in said[0]
    assert (tmp_path / "other").read_text() == "mine"
    assert len(goodput.read(tmp_path / goodput.FILE).starts) == 1


def test_full_disk_is_told_once_and_the_line_still_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(target: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(files, "put", full)
    said: list[str] = []
    with keeper(tmp_path, said) as times:
        times.attempt(tmp_path, 2)
    assert said[0] == f"warning: {tmp_path / goodput.FILE} cannot be written: No space left on device"
    assert [text[:7] for text in said[1:]] == ["goodput"]


def seconds(folder: Path) -> list[float]:
    return [one.seconds for one in goodput.read(folder / goodput.FILE).starts]


def test_time_counts_from_the_start_of_the_job(tmp_path: Path) -> None:
    began = int(time.time()) - 1000
    with keeper(tmp_path, [], SLURM_JOB_START_TIME=str(began)):
        pass
    assert 1000 <= seconds(tmp_path)[0] < 1100
    with keeper(tmp_path, [], SLURM_JOB_START_TIME=str(began)):  # the second start of one job
        pass
    assert sum(seconds(tmp_path)) < 1100


@pytest.mark.parametrize("wrong", ["", "x", "0", "-5", "99999999999", "1" * 30])
def test_wrong_start_of_the_job_does_not_count(tmp_path: Path, wrong: str) -> None:
    with keeper(tmp_path, [], SLURM_JOB_START_TIME=wrong):
        pass
    assert 0 <= seconds(tmp_path)[0] < 100


WORKER = """
import os, sys, time
from imgkit_entrypoints.launch.goodput import ProgressNotes

rank = int(os.environ["LOCAL_RANK"])
notes = ProgressNotes(os.environ["IMGKIT_STOP_DIR"], rank)
time.sleep(0.2)
notes.trains()
time.sleep(0.3)
notes.moved()
with notes.saving(1):
    time.sleep(0.1)
notes.keeps(1)
time.sleep(0.2)
notes.moved()
if not rank: print("it trains", flush=True)
END
"""


def run(nodes: Any, end: str, **options: Any) -> Any:
    """One node whose two workers end so."""
    command = [sys.executable, STUB, "2", WORKER.replace("END", end)]
    return nodes.start(command, **{"goodput": goodput.BY_PROGRAM, **options})


def test_kill_and_resume_add_up(nodes: Any) -> None:
    folder = nodes.folder / "run"
    launcher = run(nodes, "time.sleep(1000)")
    nodes.said("it trains")
    assert until(lambda: goodput.read(folder / goodput.FILE).node_s.lost > 0.5)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    nodes.processes.clear()
    first = goodput.read(folder / goodput.FILE)  # as the start wrote it
    assert first.starts[0].code is None
    assert min(first.node_s.starting, first.node_s.training, first.node_s.lost) > 0.2
    run(nodes, "")
    assert nodes.codes() == [0]
    assert "<goodput " in nodes.output()
    both = goodput.read(folder / goodput.FILE)
    assert both.starts[0] == first.starts[0]
    assert both.starts[1].code == 0
    spent = both.starts[1].node_s
    assert spent.lost == 0
    assert 0.1 <= spent.saving < spent.training
    assert spent.starting >= 0.2


def test_fault_loses_what_was_not_saved(nodes: Any) -> None:
    run(nodes, "sys.exit(1)")
    assert nodes.codes() == [1]
    spent = goodput.read(nodes.folder / "run" / goodput.FILE).node_s
    assert spent.training >= 0.3
    assert spent.lost >= 0.3
    assert spent.idle == 0


def test_node_lost_while_a_spare_waits_costs_lost_and_idle_time(nodes: Any) -> None:
    work = WORKER.replace("END", "time.sleep(0 if os.environ['IMGKIT_ATTEMPT'] == '2' else 100)")
    words = [sys.executable, STUB, "1", work]
    both = {"nnodes": 3, "size": "2+1", "max_failures": 3, "goodput": goodput.BY_PROGRAM}
    three = [nodes.start(words, rank=rank, **both) for rank in range(3)]
    nodes.said("it trains", 2)
    three[1].kill()
    assert nodes.codes() == [0, -9, 0]
    (found,) = goodput.read(nodes.folder / "run" / goodput.FILE).starts
    assert (found.nodes, found.attempts, found.code) == (3, 2, 0)
    spent = found.node_s
    assert spent.allocated == pytest.approx(3 * found.seconds, abs=0.01)
    assert spent.idle >= spent.training / 2 > 0
    assert spent.lost >= 3 * 0.4


def test_program_of_ones_own_has_steps_only_if_it_notes_them(nodes: Any) -> None:
    nodes.start([sys.executable, STUB, "2", "import time; time.sleep(0.3)"], goodput=goodput.BY_AGENT)
    assert nodes.codes() == [0]
    assert re.search(r"<[\d.]+ s on 1 node; no goodput: the program reported no steps>", nodes.output())
    file = nodes.folder / "run" / goodput.FILE
    assert json.loads(file.read_text())["goodput"] is None
    run(nodes, "", goodput=goodput.BY_AGENT)
    assert nodes.codes() == [0, 0]
    assert json.loads(file.read_text())["goodput"] > 0


def test_apps_that_only_measure_have_no_goodput(nodes: Any) -> None:
    run(nodes, "", goodput="")
    assert nodes.codes() == [0]
    assert "goodput" not in nodes.output()
    assert not (nodes.folder / "run" / goodput.FILE).exists()


def test_head_alone_tells(nodes: Any) -> None:
    nodes.two(WORKER.replace("END", ""), goodput=goodput.BY_PROGRAM)
    assert nodes.codes() == [0, 0]
    assert nodes.output().count("<goodput ") == 1
    assert " on 2 nodes: " in nodes.output()


@pytest.mark.parametrize("data", [b"", b"x", bytes(40), b"\xff" * 40])
def test_notes_that_are_none_are_not_read(tmp_path: Path, data: bytes) -> None:
    (tmp_path / goodput.PROGRESS_FILE).write_bytes(data)
    assert goodput.read_progress(tmp_path) is None
