"""The lines, metrics and curves of a training run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from datetime import datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest

from imgkit_entrypoints.apps.train import curves, options, run_log
from imgkit_entrypoints.apps.train.config import LINE_EVERY_S, Config
from imgkit_entrypoints.apps.train.run_log import Gauges, RunLog, Seen, clock
from imgkit_entrypoints.apps.train.stragglers import RankOnNode, Stragglers
from imgkit_entrypoints.launch.start_up import StartUp


def judge() -> Stragglers:
    return Stragglers([RankOnNode(node=f"node{rank}", local_rank=0) for rank in range(2)], print)


def opened(
    config: Config, gauges: Gauges, *, start: int = 0, steps: int = 20, started: StartUp | None = None
) -> RunLog:
    return RunLog(
        config,
        start=start,
        steps=steps,
        steps_per_epoch=8,
        ranks=2,
        gauges=gauges,
        slow=judge(),
        started=started or StartUp(0.0),
        say=print,
    )


def report(
    run_dir: Path | None = None, *, start: int = 0, steps: int = 20, started: StartUp | None = None
) -> RunLog:
    config = dataclasses.replace(options.read([], {}), run_dir=run_dir, global_batch=64, log_every=10)
    waited_s = itertools.count(5.0, 0.25)  # some of it before the first step
    gauges = Gauges(waited_s=lambda: next(waited_s), memory_MiB=lambda: 512.0)
    return opened(config, gauges, start=start, steps=steps, started=started)


def seen(step: int, steps: int, loss: float, skipped: int = 0) -> Seen:
    return Seen(step=step, steps=steps, loss=loss, skipped=skipped, seconds=1.0)


def end(of: RunLog, step: int, *, saving_s: float = 0.0) -> None:
    of.close(step=step, reason="all steps are done", saved_step=-1, stall_s=0.0, saving_s=saving_s)


def test_lines_come_at_round_steps(capsys: pytest.CaptureFixture[str]) -> None:
    one = report()
    one.note(seen(1, 1, 9.0), seen(5, 4, 3.0))
    one.note(seen(10, 5, 1.2))
    end(one, 10)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step  1/20  loss 9.000000  64 samples/s (32 per rank)  data 25%  512 MiB")
    # The mean of 4 steps at 3.0 and 5 at 1.2, in 2 s.
    assert lines[1].startswith("step 10/20  loss 2.000000  288 samples/s")
    assert lines[2].startswith("loss 9.000000 -> 2.000000, 2 ranks, ")
    assert len(lines) == 3


def test_last_rate_counts_training_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = report(tmp_path)
    one.note(seen(1, 1, 9.0), seen(20, 19, 3.0))  # 20 steps of 64 samples in 2 s
    one.held_out(20, 1.0, 60.0)
    end(one, 20, saving_s=5.25)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("640 samples/s while training; 2.0 s training, 60.0 s evaluation, 5.2 s saving")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["samples_per_s"], summary["training_s"], summary["evaluation_s"]) == (640.0, 2.0, 60.0)


def test_summary_tells_what_the_start_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = StartUp(10.0)
    for name, at_s in (("imports", 12.5), ("model", 12.75), ("data", 13.0), ("model", 13.75)):
        started.ends(name, at_s)
    end(report(tmp_path, started=started), 0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["start_s"] == {"imports": 2.5, "model": 1.0, "data": 0.25}
    assert "; 3.8 s starting (imports 2.5 s)" in capsys.readouterr().out


def test_metrics_tell_what_a_study_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = dataclasses.replace(
        options.read(["--schedule", "linear", "--lr", "0.5", "--warmup-steps", "0"], {}),
        run_dir=tmp_path,
        global_batch=64,
        log_every=10,
    )
    gauges = Gauges(waited_s=lambda: 0.0, memory_MiB=lambda: 1.0, tokens_a_sample=16, names=("accuracy",))
    one = opened(config, gauges)
    one.note(
        dataclasses.replace(seen(9, 9, 3.0, skipped=1), numbers=(0.25,)),
        dataclasses.replace(seen(10, 1, 1.0), numbers=(1.0,), grad_norm=2.5),
    )
    one.held_out(10, 4.0, 0.5)
    told, held_out = (json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert told["numbers"] == {"accuracy": pytest.approx((8 * 0.25 + 1) / 9)}
    assert (told["epoch"], told["lr"], told["grad_norm"]) == (1.25, pytest.approx(0.275), 2.5)
    assert told["tokens_per_s"] == 16 * told["samples_per_s"]
    assert datetime.fromisoformat(told["time"]).tzinfo is not None
    assert (held_out["epoch"], held_out["eval_loss"]) == (1.25, 4.0)
    assert "accuracy 0.333333" in capsys.readouterr().out


def test_slow_rank_stands_in_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = report(tmp_path)
    for step in (1, 2, 3, 10):
        one.note(dataclasses.replace(seen(step, 1, 1.0), own_s=(0.1, 0.3), wait_s=0.25))
    end(one, 10)
    first, last = (json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["own_work_s"], first["wait_s"], first["slow"]) == (0.1, 0.25, [])
    row = {"rank": 1, "node": "node1", "local_rank": 0, "own_work_s": 0.3, "usual_s": 0.1}
    assert last["slow"] == [{**row, "from_step": 1, "to_step": 10, "times": 1}]
    assert json.loads((tmp_path / "summary.json").read_text())["stragglers"] == last["slow"]
    assert "rank 1 on node1 (local rank 0) is a straggler" in capsys.readouterr().out


def test_unknown_metrics_are_null(tmp_path: Path) -> None:
    gauges = Gauges(waited_s=lambda: 0.0, memory_MiB=lambda: 1.0, names=("accuracy",))
    config = dataclasses.replace(options.read([], {}), run_dir=tmp_path, global_batch=64, log_every=10)
    opened(config, gauges).note(dataclasses.replace(seen(1, 1, math.nan, skipped=1), numbers=(math.nan,)))
    told = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (told["grad_norm"], told["tokens_per_s"], told["numbers"]) == (None, None, {"accuracy": None})
    assert (told["own_work_s"], told["wait_s"], told["slow"]) == (None, None, [])


def test_start_without_a_step_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    end(report(), 0)
    assert "0 samples/s while training" in capsys.readouterr().out


def test_slow_steps_have_lines_in_between(capsys: pytest.CaptureFixture[str]) -> None:
    one = report()
    one.note(seen(1, 1, 9.0))
    for step in (2, 3, 4):
        one.note(dataclasses.replace(seen(step, 1, 1.0), seconds=LINE_EVERY_S / 2))
    assert [line.split("/")[0] for line in capsys.readouterr().out.splitlines()] == ["step  1", "step  3"]


def test_utilization_is_told_where_known(capsys: pytest.CaptureFixture[str]) -> None:
    gauges = Gauges(waited_s=lambda: 0.0, memory_MiB=lambda: 1.0, samples_per_s_at_peak=64.0)
    config = dataclasses.replace(options.read([], {}), global_batch=64, log_every=10)
    one = opened(config, gauges)
    one.note(seen(1, 1, 1.0))  # 64 samples in a second, by 2 ranks
    assert "50.0% MFU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "amp", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA GH200 480GB", "fp16", 990e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H100 80GB HBM3", "off", None),
        ("NVIDIA H200 NVL", "bf16", None),
        ("NVIDIA H100 NVL", "bf16", None),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
    ],
)
def test_peak_is_only_told_where_published(device: str, amp: str, flops: float | None) -> None:
    assert run_log.peak(device, amp) == flops


def test_drawing_of_a_run_shows_both_losses(tmp_path: Path) -> None:
    one = report(tmp_path)
    one.note(seen(1, 1, 9.0), seen(10, 9, 3.0))
    one.held_out(10, 4.0, 0.5)
    end(one, 10)
    root = ElementTree.parse(tmp_path / "curves.svg").getroot()  # noqa: S314 - our own
    told = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"loss", "samples/s", "trained on", "held out"} <= set(told)
    lines = [line.get("points", "").split() for line in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(line) for line in lines] == [2, 1, 2]
    assert json.loads((tmp_path / "summary.json").read_text())["eval_loss"] == 4.0


def test_drawing_of_nothing_is_one(tmp_path: Path) -> None:
    one = report(tmp_path)
    one.note(seen(1, 1, math.nan))
    end(one, 1)
    assert "No data." in (tmp_path / "curves.svg").read_text()


def drawn(*values: float, from_zero: bool = False) -> ElementTree.Element:
    points = tuple(enumerate(values))
    lines = tuple(curves.StepCurve(label=label, points=points) for label in ("trained on", "held out"))
    return ElementTree.fromstring(curves.document([curves.StepChart("loss", lines, from_zero)]))  # noqa: S314


def texts(root: ElementTree.Element) -> dict[str | None, float]:
    return {one.text: float(one.get("y", "0")) for one in root.iter("{http://www.w3.org/2000/svg}text")}


def test_legend_lies_above_the_plot() -> None:
    told = texts(drawn(3.0, 2.9))
    assert max(told["trained on"], told["held out"]) < curves.TOP


@pytest.mark.parametrize(
    ("values", "from_zero", "there", "absent"),
    [
        ((2.3, 2.1), False, {"2.1", "2.2", "2.3"}, {"0"}),
        ((2.3, 2.1), True, {"0", "0.5", "2"}, {"2.1"}),
        ((9.0, 0.01), False, {"0.01", "0.1", "1"}, {"0", "5"}),
        ((9.0, 0.5), False, {"2", "4"}, {"0.1"}),
        ((9.0, 0.0), False, {"0", "2", "8"}, {"0.1"}),
        ((-1.0, 900.0), False, {"0", "200"}, {"1"}),
        ((3.0, 3.0), False, {"0", "3"}, set()),
    ],
)
def test_axis_of_losses_fits_them(
    values: tuple[float, ...], from_zero: bool, there: set[str], absent: set[str]
) -> None:
    root = drawn(*values, from_zero=from_zero)
    told = {
        one.text for one in root.iter("{http://www.w3.org/2000/svg}text") if one.get("text-anchor") == "end"
    }
    assert there <= told
    assert not absent & told


@pytest.mark.parametrize(
    ("low", "high", "places"),
    [
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (0, 3, [0, 1, 2, 3]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (2, 2, [2]),
    ],
)
def test_axes_have_round_numbers(low: float, high: float, places: list[float]) -> None:
    assert curves.ticks(low, high) == pytest.approx(places)


def test_skipped_steps_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    one = report()
    one.note(seen(1, 1, 9.0), seen(5, 4, 3.0, skipped=2), seen(6, 1, 6.0), seen(10, 4, math.nan, skipped=4))
    end(one, 10)
    line = capsys.readouterr().out.splitlines()[1]
    assert "loss 4.000000" in line
    assert "6 skipped" in line


def test_metrics_of_lost_steps_are_dropped(tmp_path: Path) -> None:
    first = report(tmp_path)
    for step in (1, 10, 20):
        first.note(seen(step, 1, 1.0))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')  # killed in the middle of a line
    second = report(tmp_path, start=10)
    second.note(seen(11, 1, 0.5), seen(20, 9, 0.25))
    end(second, 20)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 10, 11, 20]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["step"], summary["started_after_step"], summary["saved_step"]) == (20, 10, None)
    assert summary["last_loss"] == 0.25


def test_loss_that_is_no_number_is_no_json(tmp_path: Path) -> None:
    one = report(tmp_path)
    one.note(seen(1, 1, math.inf))
    end(one, 1)
    text = (tmp_path / "summary.json").read_text() + (tmp_path / "metrics.jsonl").read_text()
    assert "Infinity" not in text


def test_full_disk_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").mkdir()  # nobody can write there, not even root
    one = report(tmp_path)
    one.note(seen(1, 1, 1.0), seen(10, 9, 0.5))
    end(one, 10)
    told = capsys.readouterr().out
    assert told.count("metrics are incomplete") == 1
    assert "Is a directory" in told
    assert "loss 1.000000 -> 0.500000" in told


@pytest.mark.parametrize(("seconds", "text"), [(5.4, "5s"), (59.6, "1m00s"), (200, "3m20s"), (7500, "2h05m")])
def test_times_are_short(seconds: float, text: str) -> None:
    assert clock(seconds) == text


OWN_LOGGERS = """
import os

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


def test_own_logger_gets_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the current folder joins it
    (tmp_path / "own.py").write_text(OWN_LOGGERS)
    names = "own.py:broken,own.py:absent,own.py:kept"
    config = options.read(["--log-to", names, "--run-dir", "run", "--log-every", "10"], {})
    said: list[str] = []
    one = RunLog(
        dataclasses.replace(config, global_batch=64),
        start=0,
        steps=20,
        steps_per_epoch=8,
        ranks=2,
        gauges=Gauges(waited_s=lambda: 0.0, memory_MiB=lambda: 1.0, names=("accuracy",)),
        slow=judge(),
        started=StartUp(0.0),
        say=said.append,
    )
    for step in (10, 20):
        one.note(dataclasses.replace(seen(step, 10, math.nan if step == 10 else 2.0), numbers=(0.5,)))
    one.held_out(20, 1.5, 0.5)
    end(one, 20)
    first, second, held_out, last = (tmp_path / "kept").read_text().splitlines()
    assert first.startswith("10 [('accuracy', 0.5), ")
    assert "loss" not in first  # not a number
    assert second.startswith("20 ")
    assert "('loss', 2.0)" in second
    assert (held_out, last) == ("20 [('eval_loss', 1.5)]", "closed")
    assert said == [
        "--log-to own.py:absent is disabled: RuntimeError: no server",
        "--log-to own.py:broken is disabled: OSError: the disk is full",
    ]
