"""``imgkit run --scaling``: one command on several numbers of nodes, and a report on its parallel efficiency.

The rate of a run is what its program writes into ``metrics.jsonl`` in its run folder: lines with ``step`` and
``samples_per_s`` of all ranks, as dist-train does. If a size has no rate, all sizes are compared by wall
time, which is right only if each does the same work.

The page has the form that computing centres ask for:

* CSC, docs.csc.fi/accounts/how-to-access-roihu-large-partition (2026): the test case, wall times and GPU
  utilization of at least three numbers of nodes, 75 % parallel efficiency, and a batch script.
* ARCHER2, archer2.ac.uk/support-access/ta: the speed-up over the smallest number, as a table or graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from imgkit_builder.base import files, process
from imgkit_builder.base.process import Finished
from imgkit_builder.base.progress import Reporter, Silent
from imgkit_builder.jobs import measured, records, systems
from imgkit_builder.jobs import submit as submission
from imgkit_builder.jobs.code import CodeFolder
from imgkit_builder.jobs.handle import find_job
from imgkit_builder.jobs.job import Job, Script
from imgkit_builder.jobs.prepared import PreparedJob
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.submitted import SubmittedJob
from imgkit_builder.jobs.transport import Transport
from imgkit_entrypoints import __version__, json_text
from imgkit_entrypoints.apps import drawing
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, UsageError
from imgkit_entrypoints.launch.agent import PLAN_FILE
from imgkit_entrypoints.launch.stop_protocol import RESULT

DATA_FILE, PAGE_FILE, CHART_FILE = "scaling.json", "scaling.md", "scaling.svg"
NEEDED_EFFICIENCY, NEEDED_SIZES = 0.75, 3
"""What CSC asks for."""
FIGURES = (
    ("ranks", "ranks", ".0f"),
    ("samples_per_s", "samples/s", ".4g"),
    ("wall_s", "wall time (s)", ".1f"),
    ("speedup", "speed-up", ".2f"),
    ("efficiency", "efficiency", ".1%"),
    ("memory_MiB", "memory (MiB)", ".0f"),
    ("gpu_percent", "GPU use (%)", ".0f"),
    ("mfu", "MFU", ".1%"),
)
"""Name, title and format of each figure that a size may have; ``wall_s`` is without the time in the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSize:
    """The job on one number of nodes."""

    nodes: int
    job: str = ""
    """Its id; empty: it could not be submitted."""
    state: str = ""
    """How it ended, or why it could not be submitted; empty: not known yet."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What was measured; `FIGURES` has the names."""

    @property
    def is_complete(self) -> bool:
        """Whether the job has run to its end."""
        return self.state in ("succeeded", "ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRun:
    """All sizes, the smallest first, and what they share; the content of `DATA_FILE`."""

    schema: int = 1
    name: str
    facts: Mapping[str, str]
    """System, command, image and versions, by the names that the page prints."""
    script: str
    """The job script of the largest size."""
    sizes: tuple[ScalingSize, ...] = ()
    compared_by: str = ""
    """The figure of which speed-up and efficiency are made; empty before the end."""


def nodes_text(nodes: int) -> str:
    """Return ``1 node`` or ``2 nodes``."""
    return f"{nodes} node{'s' * (nodes > 1)}"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse ``1,2,4,8``.

    Raises
    ------
    UsageError : not at least two ascending numbers of nodes.
    """
    sizes = [int(part) if re.fullmatch("[1-9][0-9]{0,5}", part) else 0 for part in text.split(",")]
    if len(sizes) < 2 or 0 in sizes or sizes != sorted(set(sizes)):
        message = f"{text!r} is neither a list of ascending numbers of nodes nor the folder of a report"
        raise UsageError(message, where="--scaling", hint="--scaling 1,2,4,8")
    return tuple(sizes)


def plan(
    recipe: str,
    request: JobRequest,
    sizes: Sequence[int],
    *,
    code: CodeFolder | None = None,
    remote: Remote | None = None,
    base: str = "",
) -> list[PreparedJob]:
    """Return the job of each size; nothing is written or submitted.

    The parameters are those of `submit.prepare`.

    Raises
    ------
    UsageError : a size that the system cannot satisfy, or jobs whose end and files imgkit cannot see.
    """
    planned = []
    for nodes in sizes:
        sized = request.changed(nodes=str(nodes))
        prepared = submission.prepare(recipe, sized, code, remote=remote, base=base)
        job, script = prepared.job, prepared.script
        is_batch = not (script.foreground or script.remote or script.is_array)
        has_run_folder = is_batch and not runtime_of(job).is_isolated
        if not has_run_folder or not systems.named(job.system).reports_state:
            message = f"--scaling needs batch jobs with a run folder, which {job.system} does not start here"
            raise UsageError(message, where="--scaling", hint="a recipe for Slurm or PBS, without job arrays")
        planned.append(prepared)
    return planned


def refuse_unstartable(job: Job, script: Script, run: Callable[[Sequence[str]], Finished]) -> None:
    """Raise UsageError if Slurm would never start `job`.

    sbatch accepts more nodes than the partition allows to one job, and lets it wait for ever
    (PartitionNodeLimit); with ``--test-only`` it refuses.
    """
    if script.submit[0] != "sbatch":
        return
    directives = "\n".join(re.findall("^#SBATCH (.+)$", script.text, re.MULTILINE))
    answer = run(("sbatch", "--test-only", *shlex.split(directives), "--wrap=true"))
    if answer.returncode != 0:
        message, hint = process.quoted(
            f"no job starts on {nodes_text(job.allocation.nodes)}", answer.output.strip()
        )
        raise UsageError(message, where="--scaling", hint=hint or "fewer nodes, or another --queue")


def submit(
    planned: Sequence[PreparedJob], transport: Transport, report: Reporter
) -> Iterator[tuple[Path, ScalingRun]]:
    """Submit the jobs of `plan`; yield the report's folder and its content after each of them.

    The largest job goes first: if the scheduler refuses it, nothing else waits in the queue. It alone reports
    warnings, and what is sent for all.

    Raises
    ------
    ImgkitError : as `submit.submit`, for the largest job. A smaller one that is refused is a failed size.
    """
    refuse_unstartable(planned[-1].job, planned[-1].script, transport.run)
    run, folder = None, Path()
    for prepared in reversed(planned):
        job = prepared.job
        size = ScalingSize(nodes=job.allocation.nodes)
        try:
            record = submission.submit(prepared, transport, report if run is None else Silent())
            size = dataclasses.replace(size, job=records.need_id(record).job.handle)
        except ToolFailed as error:
            if run is None:
                raise
            size = dataclasses.replace(size, state=error.what)
        if run is None:
            folder = Path(f"{job.name}-scaling-{record.job.id}")
            folder.mkdir(exist_ok=True)
            run = ScalingRun(name=job.name, facts=_facts(job, record), script=prepared.script.text)
        run = dataclasses.replace(run, sizes=(size, *run.sizes))
        _save(folder, run)
        yield folder, run


def _facts(job: Job, record: SubmittedJob) -> dict[str, str]:
    return {
        "system": job.recipe.system.title or job.recipe.name,
        "command": shlex.join(job.command),
        "image": job.container.image,
        "image digest": record.image_id,
        "base image": job.recipe.base,
        "code (sha256)": record.code.sha256 if record.code else "",
        "imgkit": __version__,
    }


def finish(folder: Path, report: Reporter) -> ScalingRun:
    """Wait for the jobs of a report's folder, and write the page and the chart into it.

    Raises
    ------
    UsageError : it is no such folder. ToolFailed : the scheduler or the remote did not answer.
    """
    try:
        run: ScalingRun = json_text.read(ScalingRun, json_text.load(folder / DATA_FILE), "scaling")
    except (OSError, ValueError) as error:
        message, hint = f"it is not the folder of a report: {error}", "--scaling 1,2,4,8 -- COMMAND"
        raise UsageError(message, where=str(folder), hint=hint) from error
    sizes = list(run.sizes)
    for number, size in enumerate(sizes):
        if not size.state:
            report.stage(f"wait for {size.job}, {nodes_text(size.nodes)}")
            handle = find_job(size.job)
            state, figures = handle.wait(), {}
            with contextlib.suppress(CheckFailed):  # it has no run folder
                figures = measure(handle.fetch(folder / f"{size.nodes}-nodes"), size.nodes)
            sizes[number] = dataclasses.replace(size, state=state, figures=figures)
            _save(folder, dataclasses.replace(run, sizes=tuple(sizes)))
    run = compare(dataclasses.replace(run, sizes=tuple(sizes)))
    _save(folder, run)
    files.put(folder / CHART_FILE, chart(run))
    files.put(folder / PAGE_FILE, page(run))
    return run


def _save(folder: Path, run: ScalingRun) -> None:
    files.put(folder / DATA_FILE, json.dumps(dataclasses.asdict(run), indent=2) + "\n")


def measure(run_folder: Path, nodes: int) -> dict[str, float]:
    """Return the figures of a run on `nodes` nodes, as far as its files hold them."""
    figures: dict[str, float] = {}
    with contextlib.suppress(OSError):  # no node agent has started the command
        launch = files.read_text(run_folder / PLAN_FILE, errors="replace")
        if nproc := re.search(r"^nproc +([0-9]+) ", launch, re.MULTILINE):
            figures["ranks"] = int(nproc[1]) * nodes
        # The first is written when the node agents start, the other at the end of the run.
        start_s, end_s = ((run_folder / name).stat().st_mtime for name in (PLAN_FILE, RESULT))
        figures["wall_s"] = end_s - start_s
    rows = measured.rows(run_folder)
    if rate := mean_rate(rows):
        figures["samples_per_s"] = rate
    for name in ("memory_MiB", "gpu_percent", "mfu"):
        if values := [row[name] for row in rows if name in row]:
            figures[name] = max(values) if name == "memory_MiB" else sum(values) / len(values)
    return figures


def mean_rate(rows: Sequence[Mapping[str, float]]) -> float | None:
    """Return the mean ``samples_per_s`` over the steps of `rows`; None without a rate.

    The rate of a line holds for the steps since the line before it. The first line counts only if it is the
    only one: its rate contains the warm-up.
    """
    lines = [row for row in rows if "step" in row and row.get("samples_per_s", 0) > 0]
    steps, seconds = 0.0, 0.0  # the seconds of one sample in each step
    for before, line in itertools.pairwise(lines):
        new_steps = max(0, line["step"] - before["step"])  # a run that resumes repeats some
        steps, seconds = steps + new_steps, seconds + new_steps / line["samples_per_s"]
    if steps:
        return steps / seconds
    return lines[-1]["samples_per_s"] if lines else None


def compare(run: ScalingRun) -> ScalingRun:
    """Add the speed-up and the parallel efficiency over the smallest size that has run to its end."""
    complete = [size for size in run.sizes if size.is_complete]
    figure = "samples_per_s" if all("samples_per_s" in size.figures for size in complete) else "wall_s"
    sizes = []
    for size in run.sizes:
        figures = dict(size.figures)
        if size.is_complete and figure in figures and figure in complete[0].figures:
            growth = figures[figure] / complete[0].figures[figure]
            figures["speedup"] = growth if figure == "samples_per_s" else 1 / growth
            figures["efficiency"] = figures["speedup"] * complete[0].nodes / size.nodes
        sizes.append(dataclasses.replace(size, figures=figures))
    return dataclasses.replace(run, sizes=tuple(sizes), compared_by=figure)


def table(run: ScalingRun) -> list[list[str]]:
    """Return the rows of the table, its header first; a figure that no size has is left out."""
    present = [row for row in FIGURES if any(row[0] in size.figures for size in run.sizes)]
    rows = [["nodes", "job", *(title for _, title, _ in present), "state"]]
    for size in run.sizes:
        values = [
            format(size.figures[name], form) if name in size.figures else "-" for name, _, form in present
        ]
        rows.append([str(size.nodes), size.job or "-", *values, size.state])
    return rows


def verdict(run: ScalingRun) -> list[str]:
    """Return what the figures say about larger jobs, and what they lack."""
    rates = {size.nodes: size.figures["efficiency"] for size in run.sizes if "efficiency" in size.figures}
    lines = [f"{nodes_text(size.nodes)}: {size.state}" for size in run.sizes if not size.is_complete]
    if not rates:
        return [*lines, "No size has both a rate and an end: look at the output of the jobs."]
    basis = {"samples_per_s": "samples/s", "wall_s": "wall time: right if every size does the same work"}
    sufficient = max(nodes for nodes, efficiency in rates.items() if efficiency >= NEEDED_EFFICIENCY)
    lines.append(
        f"Speed-up and efficiency are relative to {nodes_text(min(rates))}, by {basis[run.compared_by]}."
    )
    lines.append(
        f"The parallel efficiency is at least {NEEDED_EFFICIENCY:.0%} on up to {nodes_text(sufficient)}."
    )
    if len(rates) < NEEDED_SIZES:
        lines.append(f"CSC asks for at least {NEEDED_SIZES} numbers of nodes; here are {len(rates)}.")
    return lines


def page(run: ScalingRun) -> str:
    """Return the Markdown page, with the parts of CSC's report in their order."""
    header, *rows = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in table(run))
    has_use = any("gpu_percent" in size.figures for size in run.sizes)
    parts = [
        f"# Scaling of {run.name}",
        "## Software and test case",
        "(Describe what the program computes, on which data, how it is parallelized, and its I/O.)",
        "\n".join(f"* {name}: {_fenced(text)}" for name, text in run.facts.items() if text),
        "## Results",
        "\n".join(f"| {row} |" for row in (header, re.sub("[^|]+", " --- ", header), *rows)),
        f"![Speed-up over the number of nodes]({CHART_FILE})",
        *verdict(run),
        "" if has_use else "(If GPU utilization is asked for, add it here, such as the output of seff.)",
        "## Job script of the largest size",
        _fenced(f"bash\n{run.script}", least=3),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _fenced(text: str, least: int = 1) -> str:
    """Return `text` as code: more backticks around it than in it."""
    ticks = "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if "`" in (text[0], text[-1]) else ""  # Markdown strips it
    return f"{ticks}{pad}{text}{pad}{ticks}"


WIDTH, HEIGHT, LEFT, TOP, SIDE = 540, 440, 60, 50, 360
"""The drawing, and the square plot in it."""


def chart(run: ScalingRun) -> str:
    """Return the speed-up over the nodes as SVG, on logarithmic axes, beside the ideal line."""
    points = [(size.nodes, size.figures["speedup"]) for size in run.sizes if "speedup" in size.figures]
    first = points[0][0] if points else run.sizes[0].nodes
    reach = math.log(max(2.0, run.sizes[-1].nodes / first, *(speedup for _, speedup in points)))
    bottom, right = TOP + SIDE, LEFT + SIDE
    parts = [
        '<rect class="paper" width="100%" height="100%"/>',
        f'<text class="head" x="{LEFT}" y="28">{drawing.escaped(run.name)}: speed-up over nodes</text>',
        f'<text class="quiet" x="{right + 8}" y="{TOP + 4}">ideal</text>',
        f'<path class="s5" stroke-dasharray="5 4" d="M{LEFT} {bottom}L{right} {TOP}"/>',
    ]
    for nodes in (size.nodes for size in run.sizes if size.nodes >= first):
        shift = SIDE * math.log(nodes / first) / reach
        x, y = f"{LEFT + shift:.1f}", f"{bottom - shift:.1f}"
        parts.append(f'<path class="grid" d="M{x} {TOP}V{bottom}M{LEFT} {y}H{right}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{nodes}</text>')
        parts.append(f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">{nodes / first:.3g}</text>')
    corners = []
    for nodes, speedup in points:
        corner = (
            LEFT + SIDE * math.log(nodes / first) / reach,
            bottom - SIDE * math.log(max(1, speedup)) / reach,
        )
        corners.append("{:.1f},{:.1f}".format(*corner))
        label = f"{speedup:.2f} ({speedup * first / nodes:.0%})" if nodes > first else ""
        parts.append('<circle class="f0" cx="{:.1f}" cy="{:.1f}" r="4"/>'.format(*corner))
        parts.append(f'<text x="{corner[0] + 8:.1f}" y="{corner[1] + 16:.1f}">{label}</text>')
    parts.append(f'<polyline class="s0" fill="none" stroke-width="2" points="{" ".join(corners)}"/>')
    return drawing.document("\n".join(parts), WIDTH, HEIGHT)
