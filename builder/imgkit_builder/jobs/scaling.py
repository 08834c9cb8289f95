"""``imgkit scaling``: run one command on several numbers of nodes, and report its parallel efficiency.

The program writes its rate to ``metrics.jsonl`` in the run folder, as dist-train does. Each line contains
``step`` and ``samples_per_s``, which is the rate of all ranks together. If one of the jobs has no rate, all
jobs are compared by wall time. That is correct only if each job does the same work. Runs of dist-bench are
not compared, because dist-bench takes equally long on any number of nodes. Their results are the bandwidths
of its collectives.

The report has the form that computing centers ask for:

* CSC, docs.csc.fi/accounts/how-to-access-roihu-large-partition (2026): the test case, wall times and GPU
  utilization of at least three numbers of nodes, 75 % parallel efficiency, and a batch script.
* ARCHER2, archer2.ac.uk/support-access/ta: the speed-up over the smallest number, as a table or graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import shlex
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from imgkit_builder.base import files, process
from imgkit_builder.base.progress import Reporter, Silent
from imgkit_builder.jobs import data_mounts, measured, records, systems
from imgkit_builder.jobs import submit as submission
from imgkit_builder.jobs.code import CodeFolder
from imgkit_builder.jobs.handle import find_job
from imgkit_builder.jobs.job import Job, Runner, Script
from imgkit_builder.jobs.prepared import PreparedJob
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.submitted import SubmittedJob
from imgkit_builder.jobs.transport import Transport
from imgkit_entrypoints import __version__, json_text
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, UsageError
from imgkit_entrypoints.launch.run_files import PLAN_FILE
from imgkit_entrypoints.launch.stop_protocol import RESULT

# Files in the folder of a report. imgkit reads the first one, which contains the measured values. People read
# the second one.
DATA_FILE, PAGE_FILE = "scaling.json", "scaling.md"
# The smallest parallel efficiency for which CSC grants larger jobs.
NEEDED_EFFICIENCY = 0.75
# The smallest number of sizes (numbers of nodes) that CSC asks for.
NEEDED_SIZES = 3


class Column(NamedTuple):
    """The title of a column in the table of results, and the format of its numbers."""

    title: str
    number_format: str


# The columns of the table, by the names of the measured values. "wall_s" does not include the time in the
# queue.
COLUMNS = {
    "ranks": Column("ranks", ".0f"),
    "samples_per_s": Column("samples/s", ".4g"),
    "wall_s": Column("wall time (s)", ".1f"),
    "speedup": Column("speed-up", ".2f"),
    "efficiency": Column("efficiency", ".1%"),
    "memory_MiB": Column("memory (MiB)", ".0f"),
    "gpu_percent": Column("GPU use (%)", ".0f"),
    "mfu": Column("MFU", ".1%"),
}
# The columns for each collective of dist-bench. In the names of measured values, the collective comes first:
# "all_reduce busbw_GBps".
_BANDWIDTH_COLUMNS = {
    "busbw_GBps": Column("busbw (GB/s)", ".4g"),
    "algbw_GBps": Column("algbw (GB/s)", ".4g"),
    "size_bytes": Column("size (B)", ".0f"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSize:
    """The job on one number of nodes, and its measured values."""

    nodes: int
    job: str = ""
    """The job's id, or "" if the job could not be submitted."""
    state: str = ""
    """How the job ended, or why it could not be submitted. It is empty as long as that is not known."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Measured values by name: ``{"wall_s": 61.5, "all_reduce busbw_GBps": 92.1}``.

    `COLUMNS` lists the names. For a bandwidth, the name of the collective comes before a name in
    `_BANDWIDTH_COLUMNS`.
    """

    @property
    def is_complete(self) -> bool:
        """Whether the job has run to its end.

        A job with an unknown outcome (``ended``) counts as complete.
        """
        return self.state in ("succeeded", "ended")

    @property
    def has_bandwidths(self) -> bool:
        """Whether the job has run dist-bench."""
        return any(name.endswith(" busbw_GBps") for name in self.figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRun:
    """The content of `DATA_FILE`: the facts that all sizes share, and the sizes in ascending order.

    A size is the job on one number of nodes.
    """

    schema: int = 1
    name: str
    facts: Mapping[str, str]
    """Facts such as the system, command, image and versions, by the names that the report prints."""
    script: str
    """The job script of the largest size."""
    sizes: tuple[ScalingSize, ...] = ()
    compared_by: str = ""
    """The measured value by which sizes are compared, ``samples_per_s`` or ``wall_s``.

    It is empty until all jobs have ended, and for dist-bench.
    """

    @property
    def pending_jobs(self) -> list[str]:
        """The ids of the jobs that may still be waiting or running, the smallest number of nodes first."""
        return [size.job for size in self.sizes if size.job and not size.state]


def nodes_text(nodes: int) -> str:
    """Return ``1 node`` or ``2 nodes``."""
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse the numbers of nodes in a value of ``--nodes``: ``1,2,4`` -> (1, 2, 4).

    Raises
    ------
    UsageError : `text` is not a list of at least two ascending numbers.
    """
    # The pattern requires at least two numbers, each of up to six digits.
    if re.fullmatch("[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})+", text):
        sizes = [int(part) for part in text.split(",")]
        if sizes == sorted(set(sizes)):
            return tuple(sizes)
    message = f"{text!r} is not a list of at least two ascending numbers of nodes"
    raise UsageError(message, where="--nodes", hint="--nodes 1,2,4,8")


def plan_scaling(
    recipe: str,
    request: JobRequest,
    sizes: Sequence[int],
    *,
    code: CodeFolder | None = None,
    remote: Remote | None = None,
    base: str = "",
) -> list[PreparedJob]:
    """Return one job for each number of nodes. Nothing is written or submitted.

    Parameters
    ----------
    recipe : a shipped name, a recipe's file, or a .sif. For a remote, it can also be an archive.
    sizes : the numbers of nodes, the smallest first. They replace the number in `request`.
    code : the code of the request, as `code.read_code_folder` returns it.
    remote : the remote on which the jobs are submitted. None means this machine.
    base : the base image that replaces the recipe's base image, for jobs on a remote. "" keeps the recipe's.

    Raises
    ------
    UsageError : the system cannot satisfy a size, or imgkit cannot observe the end of its jobs or read their
        files.
    """
    data = data_mounts.list_folders(request)  # read once for all jobs
    prepared_jobs = []
    for nodes in sizes:
        sized_request = request.changed(nodes=str(nodes))
        prepared = submission.prepare(recipe, sized_request, code, remote=remote, base=base, data=data)
        _refuse_unmeasurable(prepared)
        prepared_jobs.append(prepared)
    return prepared_jobs


def _refuse_unmeasurable(prepared: PreparedJob) -> None:
    """Raise UsageError for a job that imgkit could not measure.

    imgkit must be able to see the end of the job and to read its run folder. It cannot read the run folder of
    pods, and an array has one run folder for each task.
    """
    job, script = prepared.job, prepared.script
    has_run_folder = not script.is_array and not runtime_of(job).is_isolated
    is_queued = not script.foreground and systems.get_system(job.system).reports_state
    if not has_run_folder or not is_queued:
        message = f"imgkit scaling needs batch jobs with a run folder, which {job.system} does not start here"
        raise UsageError(message, hint="a recipe for Slurm or PBS, without job arrays")


def refuse_unstartable(job: Job, script: Script, run: Runner) -> None:
    """Raise UsageError if Slurm would never start `job`. Jobs of other schedulers are not checked.

    sbatch accepts a job that needs more nodes than the partition allows. Such a job waits forever, with the
    reason PartitionNodeLimit. With ``--test-only``, sbatch refuses it.

    Parameters
    ----------
    run : runs a command on the machine that submits the job.
    """
    if script.submit[0] != "sbatch":
        return
    directives = re.findall("^#SBATCH (.+)$", script.text, re.MULTILINE)
    options = shlex.split("\n".join(directives))
    # With --test-only, sbatch submits nothing. --wrap stands for the script, because the options come from
    # its directives.
    answer = run(("sbatch", "--test-only", *options, "--wrap=true"))
    if answer.returncode == 0:
        return
    title = f"no job starts on {nodes_text(job.allocation.nodes)}"
    message, hint = process.quote_output(title, answer.output.strip())
    raise UsageError(message, where="--nodes", hint=hint or "fewer nodes, or another --queue")


def submit_sizes(
    planned: Sequence[PreparedJob], transport: Transport, report: Reporter
) -> Iterator[tuple[Path, ScalingRun]]:
    """Submit the jobs of `plan_scaling`. After each one, yield the report's folder and its current content.

    A job is submitted only when the caller asks for the next item. The largest job is submitted first. If the
    scheduler refuses it, no other job is in the queue. The image and the code are brought to the system only
    once, for all jobs.

    Raises
    ------
    ImgkitError : the largest job could not be submitted. For a smaller job, nothing is raised, and the error
        becomes the state of its size.
    """
    *smaller_jobs, largest = planned  # the jobs are in ascending order of their size
    # This comes before the image is built and sent, which takes long.
    refuse_unstartable(largest.job, largest.script, transport.run)
    ready = submission.make_ready(largest, transport, report)
    record = submission.start_job(ready, transport, report)
    records.refuse_unknown_id(record)  # the report could not find such a job again
    folder = Path(f"{largest.job.name}-scaling-{record.job.id}")  # the id makes the name unique
    folder.mkdir(exist_ok=True)
    run = ScalingRun(
        name=largest.job.name,
        facts=_shared_facts(ready.job, record),
        script=ready.script.text,
        sizes=(ScalingSize(nodes=largest.job.allocation.nodes, job=record.job.handle),),
    )
    save_report(folder, run)
    yield folder, run
    for prepared in reversed(smaller_jobs):
        size = _submit_smaller_job(submission.with_files_of(prepared, ready), transport)
        # The largest is submitted first, but the report lists the smallest first.
        run = dataclasses.replace(run, sizes=(size, *run.sizes))
        # Saved after each job, so that a submitted job is never missing after an interruption.
        save_report(folder, run)
        yield folder, run


def _submit_smaller_job(ready: PreparedJob, transport: Transport) -> ScalingSize:
    """Submit one of the jobs that are smaller than the largest, and return its `ScalingSize` with its id.

    The largest job is in the queue by now. If the scheduler refuses this one, nothing is raised. The error
    becomes the state of the result.
    """
    nodes = ready.job.allocation.nodes
    try:
        record = submission.start_job(ready, transport, Silent())
        records.refuse_unknown_id(record)
    except ToolFailed as error:
        return ScalingSize(nodes=nodes, state=error.what)
    return ScalingSize(nodes=nodes, job=record.job.handle)


def _shared_facts(job: Job, record: SubmittedJob) -> dict[str, str]:
    """Return the facts that all jobs share, by the names that the report prints. Unknown facts are empty."""
    return {
        "system": job.recipe.system.title or job.recipe.name,
        "command": shlex.join(job.command),
        "image": job.container.image,
        "image digest": record.image_id,
        "base image": job.recipe.base,
        "code (sha256)": record.code.sha256 if record.code else "",
        "imgkit": __version__,
    }


def finish_report(folder: Path, report: Reporter) -> ScalingRun:
    """Wait for the jobs of a report, and write the page with their results into the report's folder.

    Raises
    ------
    UsageError : `folder` is not the folder of a report.
    ToolFailed : the scheduler or the remote did not answer.
    """
    run = load_report(folder)
    sizes = list(run.sizes)
    for index, size in enumerate(sizes):
        if size.state:  # the job has ended, or was not submitted
            continue
        report.stage(f"wait for {size.job}, {nodes_text(size.nodes)}")
        sizes[index] = _measure_size(size, folder)
        # The data is saved after each job. If the user interrupts the wait, the next call goes on with the
        # next job.
        save_report(folder, dataclasses.replace(run, sizes=tuple(sizes)))
    finished_run = add_speedups(dataclasses.replace(run, sizes=tuple(sizes)))
    save_report(folder, finished_run)
    files.write_file(folder / PAGE_FILE, render_page(finished_run))
    return finished_run


def load_report(folder: Path) -> ScalingRun:
    """Return the content of the data file in a report's folder.

    Raises
    ------
    UsageError : `folder` contains no data file, or a damaged one.
    """
    try:
        run: ScalingRun = json_text.build_value(ScalingRun, json_text.load(folder / DATA_FILE), "scaling")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"it is not the folder of a report: {error}",
            where=str(folder),
            hint="imgkit scaling --nodes 1,2,4,8 -- COMMAND",
        ) from error
    return run


def _measure_size(size: ScalingSize, report_folder: Path) -> ScalingSize:
    """Wait for the end of a job, and return its `ScalingSize` with the final state and the measured values.

    The run folder of a job on a remote is copied to ``N-nodes`` in the report's folder.
    """
    handle = find_job(size.job)
    state = handle.wait()
    try:
        # For a job of this machine, nothing is copied, and the result is the job's own run folder.
        run_folder = handle.fetch(report_folder / f"{size.nodes}-nodes")
    except CheckFailed:  # the job has ended without creating a run folder
        return dataclasses.replace(size, state=state, figures={})
    return dataclasses.replace(size, state=state, figures=measure_run(run_folder, size.nodes))


def save_report(folder: Path, run: ScalingRun) -> None:
    """Write `run` to the data file in a report's folder."""
    files.write_file(folder / DATA_FILE, json.dumps(dataclasses.asdict(run), indent=2) + "\n")


def measure_run(run_folder: Path, nodes: int) -> dict[str, float]:
    """Return the measured values of a run on `nodes` nodes, by the names that `ScalingSize.figures` uses.

    A value is left out if the files of the run do not contain it.
    """
    figures = _figures_from_run_folder(run_folder, nodes)
    use = measured.read_gpu_use(run_folder)
    if use:
        figures["gpu_percent"] = use.gpu_percent
        figures["memory_MiB"] = use.memory_MiB
    # The values that the program writes about itself are more exact. For example, torch measures the memory
    # at each step. So they replace the values from above.
    figures.update(_figures_from_metrics(measured.last_metrics(run_folder)))
    for bandwidth in measured.read_bandwidths(run_folder):
        figures[f"{bandwidth.collective} busbw_GBps"] = bandwidth.busbw_GBps
        figures[f"{bandwidth.collective} algbw_GBps"] = bandwidth.algbw_GBps
        figures[f"{bandwidth.collective} size_bytes"] = bandwidth.size_bytes
    # `load_report` accepts only floats, and JSON would write the integer 4 as "4".
    return {name: float(value) for name, value in figures.items()}


def _figures_from_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the measured values of a run from the lines of its ``metrics.jsonl``.

    They are the mean rate, the mean GPU use, the mean MFU (the used part of the GPU's peak performance), and
    the largest memory. For memory, the largest value counts, because the step that needs most memory decides
    whether the run fits.
    """
    figures = {}  # a value that no line contains is left out
    rate = mean_rate(metrics)
    if rate:
        figures["samples_per_s"] = rate
    for name in ("memory_MiB", "gpu_percent", "mfu"):
        values = [line[name] for line in metrics if name in line]
        if values:
            figures[name] = max(values) if name == "memory_MiB" else statistics.fmean(values)
    return figures


def _figures_from_run_folder(run_folder: Path, nodes: int) -> dict[str, float]:
    """Return the number of ranks and the wall time of a run, from the files of its node agents.

    A node agent is imgkit's process on each node. If a node agent has not started or not ended, its file is
    missing, and the value is left out.
    """
    figures: dict[str, float] = {}
    plan_file = run_folder / PLAN_FILE
    try:
        plan = files.read_text(plan_file, errors="replace")
        # The plan is written when the node agents start, and the result when the run ends. So the wall time
        # is the difference of the two modification times.
        start_s = plan_file.stat().st_mtime
    except OSError:
        return figures
    # The line "nproc   4  ..." is the number of processes per node.
    nproc = re.search(r"^nproc +([0-9]+) ", plan, re.MULTILINE)
    if nproc:
        figures["ranks"] = int(nproc[1]) * nodes
    with contextlib.suppress(OSError):
        end_s = (run_folder / RESULT).stat().st_mtime
        if end_s > start_s:  # on a file system that stores whole seconds, the times can be equal
            figures["wall_s"] = end_s - start_s
    return figures


def mean_rate(metrics: Sequence[Mapping[str, float]]) -> float | None:
    """Return the mean number of samples per second over all steps, or None if no line contains a rate.

    The result is the total number of samples divided by the total time. It is not the mean of the rates,
    because slow steps take more time than fast ones.

    Parameters
    ----------
    metrics : lines of ``metrics.jsonl``. The ``samples_per_s`` of a line is the rate of the steps since the
        previous line. The rate of the first line includes the warm-up, so it is used only if there is no
        other line.
    """
    rated_lines = [line for line in metrics if "step" in line and line.get("samples_per_s", 0) > 0]
    if not rated_lines:
        return None
    total_steps = 0.0
    total_s = 0.0
    for previous, line in itertools.pairwise(rated_lines):
        # A run that resumes from a checkpoint repeats steps, so its step number goes back. Then there are no
        # new steps.
        new_steps = max(0, line["step"] - previous["step"])
        total_steps += new_steps
        # All steps have the same number of samples. This number cancels out, so each step counts as one
        # sample.
        total_s += new_steps / line["samples_per_s"]
    if not total_steps:
        return rated_lines[-1]["samples_per_s"]
    return total_steps / total_s


def add_speedups(run: ScalingRun) -> ScalingRun:
    """Return `run` with the speed-up and the parallel efficiency of each size that has run to its end.

    A size is the job on one number of nodes. Both values are relative to the smallest size. For example, 1.8
    times the samples per second on 2 nodes instead of 1 is a speed-up of 1.8 and an efficiency of 90 %. If
    one size has no samples per second, all sizes are compared by wall time. Runs of dist-bench are returned
    unchanged, because dist-bench takes equally long on any number of nodes.
    """
    if any(size.has_bandwidths for size in run.sizes):
        return run
    # All sizes must be compared by the same value. A job that has not run to its end has no valid wall time.
    has_rates = all("samples_per_s" in size.figures for size in run.sizes if size.is_complete)
    compared_by = "samples_per_s" if has_rates else "wall_s"
    smallest = None  # the first size that has the value to compare; the sizes are in ascending order
    sizes = []
    for size in run.sizes:
        if not size.is_complete or compared_by not in size.figures:
            sizes.append(size)
            continue
        smallest = smallest or size
        sizes.append(_compare_size(size, smallest, compared_by))
    return dataclasses.replace(run, sizes=tuple(sizes), compared_by=compared_by)


def _compare_size(size: ScalingSize, reference: ScalingSize, compared_by: str) -> ScalingSize:
    """Return `size` with its speed-up and parallel efficiency relative to `reference`.

    Parameters
    ----------
    compared_by : the name of the measured value that is compared. Both sizes must have this value.
    """
    speedup = size.figures[compared_by] / reference.figures[compared_by]
    if compared_by == "wall_s":  # half the wall time means twice the speed
        speedup = 1 / speedup
    efficiency = speedup * reference.nodes / size.nodes
    return dataclasses.replace(size, figures={**size.figures, "speedup": speedup, "efficiency": efficiency})


def table_rows(run: ScalingRun) -> list[list[str]]:
    """Return the rows of the table of results. The first row contains the titles.

    Each other row is one number of nodes. A column without any value is left out, and ``-`` stands for a
    missing value.
    """
    columns = _figure_columns(run)
    titles = [column.title for column in columns.values()]
    rows = [["nodes", "job", *titles, "state"]]
    for size in run.sizes:
        row = [str(size.nodes), size.job or "-"]
        for name, column in columns.items():
            value = size.figures.get(name)
            row.append("-" if value is None else format(value, column.number_format))
        rows.append([*row, size.state])
    return rows


def _figure_columns(run: ScalingRun) -> dict[str, Column]:
    """Return the columns of the table of results, by the names of the measured values.

    For example: ``{"mfu": Column("MFU", ".1%")}``. The columns for the collectives of dist-bench come last.
    """
    names: list[str] = []  # a name occurs once for each size that has the value
    for size in run.sizes:
        names += size.figures
    columns = {name: column for name, column in COLUMNS.items() if name in names}
    if not run.compared_by:
        # Dist-bench itself chooses how long it runs, so its wall time says nothing.
        columns.pop("wall_s", None)
    for name in names:
        collective, _, figure = name.partition(" ")  # "all_reduce busbw_GBps"
        if figure in _BANDWIDTH_COLUMNS:
            column = _BANDWIDTH_COLUMNS[figure]
            columns[name] = column._replace(title=f"{collective} {column.title}")
    return columns


# How a sentence of the report expresses each value of `ScalingRun.compared_by`.
_COMPARED_BY_TEXTS = {
    "samples_per_s": "samples/s",
    "wall_s": "wall time: right if every size does the same work",
}


def verdict_sentences(run: ScalingRun) -> list[str]:
    """Return sentences for the report that summarize the results of all sizes.

    They name the sizes that failed, and the largest size with a sufficient efficiency. They also say whether
    the report has enough sizes for CSC.
    """
    failures = [f"{nodes_text(size.nodes)}: {size.state}" for size in run.sizes if not size.is_complete]
    return [*failures, *_efficiency_sentences(run)]


def _efficiency_sentences(run: ScalingRun) -> list[str]:
    """Return sentences about the parallel efficiency, and about a report with too few sizes for CSC.

    CSC is a computing center that asks for such a report before it grants larger jobs.
    """
    if not run.compared_by:
        return ["The bandwidths are those of the largest size that dist-bench measured."]
    compared = [size for size in run.sizes if "efficiency" in size.figures]
    if not compared:
        return ["No size has both a rate and an end: look at the output of the jobs."]
    reference = nodes_text(compared[0].nodes)
    # `compared` is in ascending order of sizes. `efficient` is never empty, because the smallest size is
    # compared with itself and so has 100 %.
    efficient = [size for size in compared if size.figures["efficiency"] >= NEEDED_EFFICIENCY]
    largest = nodes_text(efficient[-1].nodes)
    lines = [
        f"Speed-up and efficiency are relative to {reference}, by {_COMPARED_BY_TEXTS[run.compared_by]}.",
        f"The parallel efficiency is at least {NEEDED_EFFICIENCY:.0%} on up to {largest}.",
    ]
    if len(compared) < NEEDED_SIZES:
        lines.append(f"CSC asks for at least {NEEDED_SIZES} numbers of nodes; here are {len(compared)}.")
    return lines


def render_page(run: ScalingRun) -> str:
    """Return the report as Markdown, with the sections that CSC asks for in their order."""
    facts = "\n".join(f"{name}: {text}" for name, text in run.facts.items() if text)
    sections = [
        f"# Scaling of {run.name}",
        "## Software and test case",
        "(Describe what the program computes, on which data, how it is parallelized, and its I/O.)",
        _code_block(facts),
        "## Results",
        _markdown_table(table_rows(run)),
        *verdict_sentences(run),
    ]
    has_gpu_use = any("gpu_percent" in size.figures for size in run.sizes)
    if not has_gpu_use:
        sections.append("(If GPU utilization is asked for, add it here, such as the output of seff.)")
    sections += ("## Job script of the largest size", _code_block(run.script))
    return "\n\n".join(sections) + "\n"


def _code_block(text: str) -> str:
    """Return `text` as a code block in Markdown.

    The block is indented instead of fenced, because `text` could contain a fence.
    """
    return textwrap.indent(text.rstrip("\n"), "    ")


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return `rows` as a Markdown table. The first row is the header."""
    lines = []
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    rule = "|".join([" --- "] * len(rows[0]))
    return "\n".join((lines[0], f"| {rule} |", *lines[1:]))
