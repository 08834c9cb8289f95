"""``imgkit scaling``: run a command on several numbers of nodes, and report how it scales."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from imgkit_builder.base.flags import USUAL, flags_in
from imgkit_builder.cli.common import (
    exit_on_sigterm,
    format_columns,
    name_argument,
    print_message,
    print_result,
)
from imgkit_builder.cli.jobs import may_ask
from imgkit_builder.cli.options import COMMAND, JobCommand, Without
from imgkit_builder.cli.progress import reporter
from imgkit_builder.cli.run import JobOptions, read_inputs, refuse_command_as_recipe, script_data
from imgkit_builder.jobs.request import JobRequest
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import EXIT_NO, UsageError

if TYPE_CHECKING:
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.jobs.prepared import PreparedJob
    from imgkit_builder.jobs.remote.config import Remote
    from imgkit_builder.jobs.scaling import ScalingRun
    from imgkit_builder.jobs.transport import Transport

COMMAND_CLASSES = {"scaling": JobCommand}


def verb_scaling(
    context: typer.Context,
    recipe: str = name_argument(
        "[RECIPE|X.sif|ARCHIVE] -- COMMAND...", "Image to run, as for imgkit run.", ""
    ),
    *,
    nodes: str = typer.Option(
        "", metavar="N,N,...", help="Numbers of nodes, ascending, one job each.", rich_help_panel=USUAL
    ),
    folder: Path | None = typer.Option(
        None,
        "--continue",
        metavar="DIR",
        help="Wait for the jobs of an earlier report, and write it.",
        rich_help_panel=USUAL,
    ),
    request: Annotated[JobRequest, Without("nodes", "interactive")],
    options: JobOptions,
) -> None:
    """Run COMMAND on several numbers of nodes, wait, and report how it scales.

    Writes a table and a page for a proposal into NAME-scaling-ID: the parallel
    efficiency by samples/s or wall time or, for dist-bench, busbw and algbw. Image
    and code are read and sent once. Ctrl-C leaves the jobs; --continue goes on. The
    exit code is 1 if a job failed.

    Other values come from the same places as those of imgkit run.

    \b
    Examples:
      imgkit scaling mn5 --nodes 1,2,4,8 -A bsc98 --qos acc_debug --time 10m -- dist-train
      imgkit scaling --on mn5 --nodes 1,2,4 --time 10m -- dist-bench --size 1G
      imgkit scaling --continue mn5-scaling-4711
    """
    from imgkit_builder.jobs import handle, scaling
    from imgkit_builder.jobs.transport import Transport

    options = dataclasses.replace(options, recipe=recipe)
    flags = request.changed(command=context.meta[COMMAND])
    planned: list[PreparedJob] = []
    transport = Transport()  # only used for new jobs
    if folder is not None:
        _refuse_with_continue(nodes, options, flags)
        scaling.load_report(folder)  # a folder without a report is refused before anything is printed
    else:
        planned, remote = _plan_jobs(nodes, options, flags)
        if options.dry_run:
            _show_scripts(planned, remote, as_json=options.as_json)
            return
        transport = handle.transport_to(remote, planned[-1], may_ask=may_ask())
        transport.login()
    with exit_on_sigterm(), reporter(as_json=options.as_json) as report:
        if folder is None:
            folder = _submit_jobs(planned, transport, report)
        command = f"imgkit scaling --continue {shlex.quote(str(folder))}"
        result = scaling.load_report(folder) if options.detach else _finish_report(folder, command, report)
    data = {**dataclasses.asdict(result), "folder": str(folder)}
    if options.detach:
        print_result(data, str(folder), as_json=options.as_json)
        print_message(f"once the jobs have ended: {command}")
        return
    lines = (*format_columns(scaling.table_rows(result)), *scaling.verdict_sentences(result))
    print_result(data, *lines, as_json=options.as_json)
    print_message(str(folder / scaling.PAGE_FILE))
    # The report is written all the same, but scripts should notice that it has gaps.
    if not all(size.is_complete for size in result.sizes):
        raise typer.Exit(EXIT_NO)


def _submit_jobs(planned: Sequence[PreparedJob], transport: Transport, report: Reporter) -> Path:
    """Submit the jobs, and return the folder of their report.

    After Ctrl-C, jobs that have been submitted continue, and imgkit exits.
    """
    from imgkit_builder.jobs import scaling

    folder: Path | None = None
    try:
        for report_folder, run in scaling.submit_sizes(planned, transport, report):
            folder = report_folder
            size = run.sizes[0]  # the sizes are submitted from the largest to the smallest
            report.note(f"{scaling.nodes_text(size.nodes)}: {size.job or size.state}")
    except KeyboardInterrupt:
        if folder is None:
            raise  # no job was submitted
        _exit_interrupted(folder)
    assert folder is not None  # noqa: S101 - `submit_sizes` yields it, or raises
    return folder


def _finish_report(folder: Path, command: str, report: Reporter) -> ScalingRun:
    """Wait for the jobs of the report in `folder`, and return its content.

    After Ctrl-C, the jobs continue, and imgkit exits. The user can wait for them again by `command`.
    """
    from imgkit_builder.jobs import scaling

    try:
        report.note(f"Ctrl-C leaves the jobs; {command} goes on")
        return scaling.finish_report(folder, report)
    except KeyboardInterrupt:
        _exit_interrupted(folder)


def _exit_interrupted(folder: Path) -> NoReturn:
    """Print which jobs of the report in `folder` continue, and exit with the exit code of Ctrl-C."""
    from imgkit_builder.base.process import INTERRUPTED
    from imgkit_builder.jobs import scaling

    print_message(f"the jobs continue: {' '.join(scaling.load_report(folder).pending_jobs)}")
    raise typer.Exit(INTERRUPTED) from None


def _refuse_with_continue(nodes: str, options: JobOptions, flags: JobRequest) -> None:
    """Raise UsageError if another flag or argument is given together with ``--continue``.

    ``--continue`` only waits for jobs that were already submitted, so other values would have no effect.
    """
    # --json is allowed, because it only changes what is printed.
    conflicting_options = [*flags_in(flags), *flags_in(dataclasses.replace(options, as_json=False))]
    if nodes:
        conflicting_options.append("--nodes")
    if options.recipe:
        conflicting_options.append("RECIPE")
    if flags.launch.command:
        conflicting_options.append("COMMAND")
    if conflicting_options:
        # The first option is enough for the error.
        first_option = conflicting_options[0]
        raise UsageError(
            f"{first_option} cannot be combined with --continue", where=first_option, hint="leave it out"
        )


def _plan_jobs(
    node_counts_text: str, options: JobOptions, flags: JobRequest
) -> tuple[list[PreparedJob], Remote | None]:
    """Plan one job for each number of nodes, and return the jobs and their remote.

    The jobs are in the order of the numbers, which ascend. The remote is None for jobs on this machine.

    Parameters
    ----------
    node_counts_text : the numbers of nodes. For example, ``"1,2,4"`` results in three jobs.
    """
    from imgkit_builder.jobs import scaling

    # Without the "--" before it, the command has been parsed as the argument RECIPE.
    if not flags.launch.command:
        refuse_command_as_recipe(options.recipe, "scaling")
    node_counts = scaling.parse_sizes(node_counts_text)
    inputs = read_inputs(options, flags)
    planned = scaling.plan_scaling(
        inputs.recipe,
        inputs.request,
        node_counts,
        code=inputs.code,
        remote=inputs.remote,
        base=options.base or "",
    )
    return planned, inputs.remote


def _show_scripts(planned: Sequence[PreparedJob], remote: Remote | None, *, as_json: bool) -> None:
    """Print the scripts of all jobs, and their warnings. The warnings are the same for all jobs.

    `remote` is None for jobs on this machine.
    """
    from imgkit_builder.jobs import image_source, scaling

    # All jobs differ only in their size, so the warnings of one job are enough.
    largest = planned[-1]
    for warning in largest.job.warnings:
        print_message(warning)
    # A dry run does not connect to the remote, so the path of imgkit's folder there is unknown.
    if remote is not None:
        print_message(f"{image_source.UNKNOWN_HOME} stands for the folder on {remote.name}")
    if as_json:
        jobs = [script_data(prepared.job, prepared.script) for prepared in planned]
        print_result({"jobs": jobs}, as_json=True)
        return
    for prepared in planned:
        nodes = scaling.nodes_text(prepared.job.allocation.nodes)
        print_message(f"{nodes}, in {prepared.job.directory}:")
        terminal.print_document(prepared.script.text)
