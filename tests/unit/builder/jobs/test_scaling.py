"""``imgkit scaling``: what is refused, what is measured, and what the report says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from file_tree import FakeProgram

from imgkit_builder.jobs import scaling
from imgkit_builder.jobs.scaling import ScalingRun, ScalingSize
from imgkit_entrypoints.errors import ToolFailed, UsageError

SITE = ("-A", "bsc98", "--qos", "acc_debug", "--time", "10m")
BANDWIDTHS = ("busbw (GB/s)", "algbw (GB/s)", "size (B)")


def report(*sizes: ScalingSize) -> ScalingRun:
    return scaling.add_speedups(ScalingRun(name="mn5", facts={}, script="#SBATCH\n", sizes=sizes))


def size(nodes: int, state: str = "succeeded", **figures: float) -> ScalingSize:
    return ScalingSize(nodes=nodes, job=f"47{nodes}", state=state, figures=figures)


@pytest.mark.parametrize("text", ["4", "1,2,2", "4,2", "0,1", "1,2+1", "1,,2", "1, 2", "-1,2", "x", ""])
def test_sizes_that_do_not_ascend_are_refused(text):
    with pytest.raises(UsageError, match="ascending"):
        scaling.parse_sizes(text)


def test_dry_run_shows_the_script_of_each_size(call):
    code, out, _ = call("scaling", "mn5", *SITE, "--nodes", "1,3", "--dry-run", "--json", "--", "dist-train")
    assert code == 0
    for nodes, job in zip((1, 3), json.loads(out)["jobs"], strict=True):
        assert job["nodes"] == nodes
        assert f"#SBATCH --nodes={nodes}\n" in job["script"]


@pytest.fixture
def slurm(home: Path, fake_program: FakeProgram) -> Path:
    """A Slurm that counts its jobs, takes none of 2 nodes, and ends none; the jobs' folder."""
    fake_program(
        "sbatch",
        'case "$*" in *--nodes=9*) echo "no nodes"; exit 1;; *--test-only*) exit;; esac\n'
        f"grep -q -- --nodes=2$ && {{ echo no >&2; exit 1; }}; echo x >> {home}/ids\n"
        f"wc -l < {home}/ids",
    )
    fake_program("squeue", 'echo "1  acc RUNNING, 1 nodes"')
    return home


def test_interrupt_leaves_the_jobs_and_names_them(call, slurm, monkeypatch):
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("imgkit_builder.jobs.job_status.time.sleep", interrupt)
    argv = ("scaling", "mn5", *SITE, "--runtime", "host", "--nodes", "1,2,4", "--", "dist-train")
    goes_on = ("scaling", "--continue", "mn5-scaling-1")
    for command in (argv, goes_on):
        code, out, err = call(*command)
        assert (code, out) == (130, "")
        assert "the jobs continue: 2 1\n" in err  # the largest was submitted first
        assert f"imgkit {' '.join(goes_on)} goes on" in err
    sizes = json.loads((slurm / "mn5-scaling-1/scaling.json").read_text())["sizes"]
    assert [(row["nodes"], row["job"]) for row in sizes] == [(1, "2"), (2, ""), (4, "1")]
    assert "sbatch" in sizes[1]["state"]


@pytest.mark.parametrize(
    ("sizes", "code", "reason"),
    [
        ("1,9", UsageError.exit_code, "no job starts on 9 nodes: no nodes"),
        ("1,2", ToolFailed.exit_code, "no"),
    ],
)
def test_refused_largest_size_leaves_no_job(call, slurm, sizes, code, reason):
    argv = ("scaling", "mn5", *SITE, "--runtime", "host", "--nodes", sizes, "--", "dist-train")
    actual, _, err = call(*argv)
    assert actual == code
    assert reason in err
    assert not (slurm / "ids").exists()


def test_figures_come_from_the_files_of_the_run(tmp_path):
    for name, text, time_s in (("launch.txt", "nproc               4    x\n", 100), ("result", "7 0\n", 160)):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (time_s, time_s))
    assert scaling.measure_run(tmp_path, 2) == {"ranks": 8, "wall_s": 60}
    lines: list[Any] = [
        {"step": 1, "samples_per_s": 10, "memory_MiB": 90, "mfu": 0.2},
        {"step": 1, "eval_loss": 1.0},
        {"step": 11, "samples_per_s": 100, "memory_MiB": 70, "mfu": 0.4},
        {"step": 3, "samples_per_s": True, "mfu": None},
        {"step": 41, "samples_per_s": 300, "memory_MiB": 80},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"st')
    figures = scaling.measure_run(tmp_path, 2)
    # 10 steps at 100 and 30 steps at 300 take the same time.
    assert figures["samples_per_s"] == pytest.approx(200)
    assert figures["memory_MiB"] == 90
    assert figures["mfu"] == pytest.approx(0.3)


def test_report_has_the_use_of_gpus_that_was_recorded(tmp_path):
    use = {"readings": 480, "gpu_percent": 87.4, "memory_MiB": 61240.0}
    (tmp_path / "gpu-use.json").write_text(json.dumps(use))
    recorded = scaling.measure_run(tmp_path, 1)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "samples_per_s": 10, "memory_MiB": 9000}\n')
    with_own_memory = scaling.measure_run(tmp_path, 2)
    run = report(size(1, **recorded, wall_s=9), size(2, **with_own_memory, wall_s=6), size(4, wall_s=4))
    titles, *rows = scaling.table_rows(run)
    use_column, memory_column = titles.index("GPU use (%)"), titles.index("memory (MiB)")
    assert [(row[use_column], row[memory_column]) for row in rows] == [
        ("87", "61240"),
        ("87", "9000"),
        ("-", "-"),
    ]
    assert "If GPU utilization is asked for" not in scaling.render_page(run)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[
            ("gpu-use.json", text)
            for text in ("", "[]", '{"readings": 0, "gpu_percent": 1.0, "memory_MiB": 1.0}', "\xff")
        ],
        *[("bench.json", text) for text in ("", "[]", '{"verdict": {"busbw": [{"size_bytes": 1}]}}')],
        ("other.json", ""),
    ],
)
def test_run_without_intact_files_has_no_figures(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="latin-1")
    assert scaling.measure_run(tmp_path, 2) == {}


def test_table_of_dist_bench_has_its_bandwidths(tmp_path):
    verdicts = []
    for name, size_bytes in (("all_reduce", 64), ("broadcast", 16)):
        bandwidths = {"busbw_GBps": size_bytes / 5, "algbw_GBps": size_bytes / 10}
        verdicts.append({"collective": name, "size_bytes": size_bytes, **bandwidths, "percent": None})
    (tmp_path / "bench.json").write_text(json.dumps({"verdict": {"sentences": [], "busbw": verdicts}}))
    figures = scaling.measure_run(tmp_path, 2)
    run = report(size(1, **figures), size(2, wall_s=1))
    titles = [f"{name} {title}" for name in ("all_reduce", "broadcast") for title in BANDWIDTHS]
    assert scaling.table_rows(run) == [
        ["nodes", "job", *titles, "state"],
        ["1", "471", "12.8", "6.4", "64", "3.2", "1.6", "16", "succeeded"],
        ["2", "472", *"------", "succeeded"],
    ]
    assert scaling.verdict_sentences(run) == [
        "The bandwidths are those of the largest size that dist-bench measured."
    ]


def test_measured_figures_are_read_again(tmp_path):
    (tmp_path / "launch.txt").write_text("nproc               4    x\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "samples_per_s": 10, "memory_MiB": 90}\n')
    run = report(size(1, **scaling.measure_run(tmp_path, 1)), size(2))
    scaling.save_report(tmp_path, run)
    assert scaling.load_report(tmp_path) == run


def test_run_that_took_no_time_is_not_compared(tmp_path):
    for name in ("launch.txt", "result"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (100, 100))
    run = report(size(1, **scaling.measure_run(tmp_path, 1)), size(2, wall_s=8), size(4, wall_s=5))
    assert [row.figures.get("efficiency") for row in run.sizes] == [None, 1.0, pytest.approx(0.8)]


def test_one_line_is_better_than_no_rate():
    assert scaling.mean_rate([{"step": 1, "samples_per_s": 5.0}]) == 5.0
    assert scaling.mean_rate([{"step": 1}]) is None


def test_efficiency_is_relative_to_the_smallest_complete_size():
    run = report(
        size(1, "failed", samples_per_s=99), size(2, samples_per_s=100), size(8, samples_per_s=280, wall_s=1)
    )
    assert [row.figures.get("efficiency") for row in run.sizes] == [None, 1.0, pytest.approx(0.7)]
    assert run.sizes[2].figures["speedup"] == pytest.approx(2.8)
    assert scaling.verdict_sentences(run) == [
        "1 node: failed",
        "Speed-up and efficiency are relative to 2 nodes, by samples/s.",
        "The parallel efficiency is at least 75% on up to 2 nodes.",
        "CSC asks for at least 3 numbers of nodes; here are 2.",
    ]


def test_one_size_without_a_rate_makes_all_compare_by_time():
    run = report(size(1, samples_per_s=1, wall_s=90), size(2, wall_s=50), size(4, samples_per_s=1, wall_s=30))
    assert [row.figures["efficiency"] for row in run.sizes] == [1.0, pytest.approx(0.9), pytest.approx(0.75)]
    assert "by wall time: right if every size does the same work" in " ".join(scaling.verdict_sentences(run))


def test_table_has_what_was_measured():
    run = report(size(1, samples_per_s=100, memory_MiB=7), size(2, "failed"))
    assert scaling.table_rows(run) == [
        ["nodes", "job", "samples/s", "speed-up", "efficiency", "memory (MiB)", "state"],
        ["1", "471", "100", "1.00", "100.0%", "7", "succeeded"],
        ["2", "472", "-", "-", "-", "-", "failed"],
    ]


def test_page_shows_texts_that_are_no_markdown():
    script = "a=`b`\n```\n\n# c\n"
    sizes = (ScalingSize(nodes=1, state="no | such"), size(2))
    run = scaling.add_speedups(
        ScalingRun(name="x", facts={"command": "echo `a`"}, script=script, sizes=sizes)
    )
    page = scaling.render_page(run)
    assert "\n\n    command: echo `a`\n\n" in page
    assert page.endswith("\n\n    a=`b`\n    ```\n\n    # c\n")
    assert "no \\| such" in page
    assert "look at the output of the jobs" in page
