"""The lines, metrics and curves of a training run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from imgkit_entrypoints.apps.train import curves, options, run_log
from imgkit_entrypoints.apps.train.config import LINE_EVERY_S
from imgkit_entrypoints.apps.train.run_log import LatestSteps, RunLog, Workload
from imgkit_entrypoints.apps.train.stragglers import RankOnNode
from imgkit_entrypoints.launch.start_up import StartUp

SVG = "{http://www.w3.org/2000/svg}"


class Log(RunLog):
    """A log of two ranks with 64 samples a step, for 20 steps."""

    def __init__(
        self,
        run_dir: Path | None = None,
        *argv: str,
        started: StartUp | None = None,
        say: Any = print,
        **values: Any,
    ) -> None:
        config = options.read_config(argv, {})
        config = dataclasses.replace(config, run_dir=run_dir, global_batch=64, log_every=10)
        waited_s = itertools.count(5.0, 0.25)  # some of it before the first step
        defaults: dict[str, Any] = {"start": 0, "steps": 20, "steps_per_epoch": 8}
        workload = Workload(
            placements=[RankOnNode(node=f"node{rank}", local_rank=0) for rank in range(2)],
            waited_s=lambda: next(waited_s),
            memory_MiB=lambda: 512.0,
            **{**defaults, **values},
        )
        super().__init__(config, workload, started or StartUp(0.0), say)

    def note(self, *rows: tuple[int, int, float], numbers: Sequence[float] = (), **values: Any) -> None:
        """Pass on rows of step, number of steps and mean loss, with means of other numbers."""
        for step, steps, loss in rows:
            counted = steps - values.get("skipped", 0)
            sums = tuple(mean * counted for mean in (loss, *numbers))
            defaults = {"step": step, "steps": steps, "skipped": 0, "seconds": 1.0, "sums": sums}
            self.add(LatestSteps(**{**defaults, **values}))

    def end(self, step: int, *, saving_s: float = 0.0) -> None:
        self.close(step=step, reason="all steps are done", saved_step=-1, stall_s=0.0, saving_s=saving_s)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_summary(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def test_lines_come_at_round_steps_and_between_slow_ones(capsys):
    log = Log()
    log.note((1, 1, 9.0), (5, 4, 3.0), (10, 5, 1.2))
    log.note((11, 1, 2.0), (12, 1, 2.0), (13, 1, 2.0), seconds=LINE_EVERY_S / 2)
    log.end(12)
    first, tenth, slow, unfinished, last = capsys.readouterr().out.splitlines()
    assert first.startswith("step  1/20  loss 9.000000  64 samples/s (32 per rank)  data 25%  512 MiB")
    # The mean of 4 steps at 3.0 and 5 at 1.2, in 2 s.
    assert tenth.startswith("step 10/20  loss 2.000000  288 samples/s")
    assert slow.startswith("step 12/20  loss 2.000000")
    assert unfinished.startswith("step 13/20")
    assert last.startswith("loss 9.000000 -> 2.000000, 2 ranks, ")


def test_last_rate_counts_training_alone(tmp_path, capsys):
    log = Log(tmp_path)
    log.note((1, 1, 9.0), (20, 19, 3.0))  # 20 steps of 64 samples in 2 s
    log.report_evaluation(20, 1.0, 60.0)
    log.end(20, saving_s=5.25)
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line.endswith("640 samples/s while training; 2.0 s training, 60.0 s evaluation, 5.2 s saving")
    summary = read_summary(tmp_path)
    assert (summary["samples_per_s"], summary["training_s"], summary["evaluation_s"]) == (640.0, 2.0, 60.0)


def test_summary_has_the_parts_of_the_start(tmp_path, capsys):
    started = StartUp(10.0)
    for name, at_s in (("imports", 12.5), ("model", 12.75), ("data", 13.0), ("model", 13.75)):
        started.record(name, at_s)
    Log(tmp_path, started=started).end(0)
    assert read_summary(tmp_path)["start_s"] == {"imports": 2.5, "model": 1.0, "data": 0.25}
    assert "0 samples/s while training; 3.8 s starting (imports 2.5 s)" in capsys.readouterr().out


def test_metrics_have_what_a_study_needs(tmp_path, capsys):
    argv = ("--schedule", "linear", "--lr", "0.5", "--warmup-steps", "0")
    log = Log(tmp_path, *argv, tokens_per_sample=16, names=("accuracy",))
    log.note((9, 9, 3.0), numbers=(0.25,), skipped=1)
    log.note((10, 1, 1.0), numbers=(1.0,), grad_norm=2.5)
    log.report_evaluation(10, 4.0, 0.5)
    row, held_out = read_metrics(tmp_path)
    assert row["numbers"] == {"accuracy": pytest.approx((8 * 0.25 + 1) / 9)}
    assert (row["epoch"], row["lr"], row["grad_norm"]) == (1.25, pytest.approx(0.275), 2.5)
    assert row["tokens_per_s"] == 16 * row["samples_per_s"]
    assert datetime.fromisoformat(row["time"]).tzinfo is not None
    assert (held_out["epoch"], held_out["eval_loss"]) == (1.25, 4.0)
    assert "accuracy 0.333333" in capsys.readouterr().out


def test_slow_rank_stands_in_every_file(tmp_path, capsys):
    log = Log(tmp_path)
    log.note(*((step, 1, 1.0) for step in (1, 2, 3, 10)), own_s=(0.1, 0.3), wait_s=0.25)
    log.end(10)
    first, last = read_metrics(tmp_path)
    assert (first["own_work_s"], first["wait_s"], first["slow"]) == (0.1, 0.25, [])
    row = {"rank": 1, "node": "node1", "local_rank": 0, "own_work_s": 0.3, "usual_s": 0.1}
    assert last["slow"] == [{**row, "from_step": 1, "to_step": 10, "times": 1}]
    assert read_summary(tmp_path)["stragglers"] == last["slow"]
    assert "rank 1 on node1 (local rank 0) is a straggler" in capsys.readouterr().out


def test_unknown_numbers_are_null(tmp_path):
    log = Log(tmp_path, names=("accuracy",))
    log.note((1, 1, 0.0), skipped=1, numbers=(0.0,))
    log.note((10, 9, math.inf), numbers=(math.nan,))
    log.end(10)
    row, infinite = read_metrics(tmp_path)
    assert (row["grad_norm"], row["tokens_per_s"], row["numbers"]) == (None, None, {"accuracy": None})
    assert (row["loss"], row["own_work_s"], row["wait_s"], row["slow"]) == (None, None, None, [])
    assert infinite["loss"] is None
    assert read_summary(tmp_path)["last_loss"] is None


def test_skipped_steps_do_not_count(capsys):
    log = Log()
    log.note((1, 1, 9.0))
    log.note((5, 4, 3.0), skipped=2)
    log.note((6, 1, 6.0))
    log.note((10, 4, 0.0), skipped=4)
    line = capsys.readouterr().out.splitlines()[1]
    assert "loss 4.000000" in line
    assert "6 skipped" in line


def test_metrics_of_repeated_steps_are_dropped(tmp_path):
    Log(tmp_path).note((1, 1, 1.0), (10, 1, 1.0), (20, 1, 1.0))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')  # killed in the middle of a line
    resumed = Log(tmp_path, start=10)
    resumed.note((11, 1, 0.5), (20, 9, 0.25))
    resumed.end(20)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 10, 11, 20]
    summary = read_summary(tmp_path)
    assert (summary["step"], summary["started_after_step"], summary["saved_step"]) == (20, 10, None)
    assert summary["last_loss"] == 0.25


def test_full_disk_is_reported_once(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").mkdir()  # nobody can write there, not even root
    log = Log(tmp_path)
    log.note((1, 1, 1.0), (10, 9, 0.5))
    log.end(10)
    output = capsys.readouterr().out
    assert output.count("metrics are incomplete") == 1
    assert "Is a directory" in output
    assert "loss 1.000000 -> 0.500000" in output


@pytest.mark.parametrize(("seconds", "text"), [(5.4, "5s"), (59.6, "1m00s"), (200, "3m20s"), (7500, "2h05m")])
def test_durations_are_short(seconds, text):
    assert run_log.format_duration(seconds) == text


def test_drawing_of_a_run_shows_both_losses(tmp_path):
    log = Log(tmp_path)
    log.note((1, 1, 9.0), (10, 9, 3.0))
    log.report_evaluation(10, 4.0, 0.5)
    log.end(10)
    root = ElementTree.parse(tmp_path / "curves.svg").getroot()  # noqa: S314 - our own
    heights = {text.text: float(text.get("y", "0")) for text in root.iter(f"{SVG}text")}
    assert {"loss", "samples/s"} <= set(heights)
    assert max(heights["trained on"], heights["held out"]) < curves.TOP  # the legend lies above the plot
    lines = [line.get("points", "").split() for line in root.iter(f"{SVG}polyline")]
    assert [len(line) for line in lines] == [2, 1, 2]


@pytest.mark.parametrize(
    ("values", "from_zero", "ticks", "absent"),
    [
        ((2.3, 2.1), False, {"2.1", "2.2", "2.3"}, {"0"}),
        ((2.3, 2.1), True, {"0", "0.5", "2"}, {"2.1"}),
        ((9.0, 0.01), False, {"0.01", "0.1", "1"}, {"0", "5"}),
        ((9.0, 0.5), False, {"2", "4"}, {"0.1"}),
        ((9.0, 0.0), False, {"0", "2", "8"}, {"0.1"}),
        ((-1.0, 900.0), False, {"0", "200"}, {"1"}),
        ((3.0, 3.0), False, {"0", "3"}, set()),
        ((), False, set(), set()),
    ],
)
def test_axis_of_losses_fits_them(values, from_zero, ticks, absent):
    text = curves.draw_charts([curves.Chart("loss", {"trained on": tuple(enumerate(values))}, from_zero)])
    root = ElementTree.fromstring(text)  # noqa: S314 - our own
    labels = {text.text for text in root.iter(f"{SVG}text") if text.get("text-anchor") == "end"}
    assert ticks <= labels
    assert not absent & labels
    assert ("No data." in text) == (not values)


OWN_LOGGERS = """
class Kept:
    def log(self, step, values):
        with open("kept", "a") as file:
            print(step, sorted(values.items()), file=file)
    def close(self):
        with open("kept", "a") as file:
            print("closed", file=file)

class Broken(Kept):
    def log(self, step, values):
        raise OSError("the disk is full")

def kept(config):
    return Kept()

def broken(config):
    return Broken()

def absent(config):
    raise RuntimeError("no server")
"""


def test_own_logger_gets_every_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the current folder joins it
    (tmp_path / "own.py").write_text(OWN_LOGGERS)
    names = "own.py:broken,own.py:absent,own.py:kept"
    messages: list[str] = []
    argv = ("--log-to", names, "--run-dir", "run")
    log = Log(tmp_path / "run", *argv, say=messages.append, names=("accuracy",))
    log.note((10, 10, math.nan), (20, 10, 2.0), numbers=(0.5,))
    log.report_evaluation(20, 1.5, 0.5)
    log.end(20)
    first, second, held_out, last = (tmp_path / "kept").read_text().splitlines()
    assert first.startswith("10 [('accuracy', 0.5), ")
    assert "loss" not in first  # not a number
    assert second.startswith("20 ")
    assert "('loss', 2.0)" in second
    assert (held_out, last) == ("20 [('eval_loss', 1.5)]", "closed")
    assert messages == [
        "--log-to own.py:absent is disabled: RuntimeError: no server",
        "--log-to own.py:broken is disabled: OSError: the disk is full",
    ]
