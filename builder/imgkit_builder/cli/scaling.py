"""``imgkit run --scaling``: submit one job for each number of nodes, wait, and print the report."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.base import process
from imgkit_builder.cli.common import columns, show, terminable
from imgkit_builder.cli.job_flags import read_code
from imgkit_builder.cli.progress import reporter
from imgkit_builder.cli.remote import connected
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import EXIT_NO, UsageError

if TYPE_CHECKING:
    from imgkit_builder.base.process import Finished
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.job.request import ImageFlags, Job, Request, Script
    from imgkit_builder.project.toml_file import ProjectFile
    from imgkit_builder.workflow.jobs import JobHandle
    from imgkit_builder.workflow.scaling import ScalingRun

SCHEMA = 1
_EXCLUDED = ("--nodes", "--interactive", "--sif", "--build", "--base-from")
"""Flags of another kind of job, and the one that ``--scaling`` replaces."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOptions:
    """The options of ``imgkit run`` that are not those of a job."""

    text: str
    """The value of ``--scaling``."""
    recipe: str
    remote: str
    """Name of the remote; empty: this machine."""
    base: str
    detach: bool
    dry_run: bool
    as_json: bool
    excluded: Mapping[str, object]
    """Options that do not go with ``--scaling``, and their values."""


def run_sizes(
    options: ScalingOptions, run: Request, image_flags: ImageFlags, project: ProjectFile | None
) -> int:
    """Submit the jobs of ``--scaling``, or find those of the folder that it names; return the exit code."""
    from imgkit_builder.job.request import flags_in
    from imgkit_builder.workflow import scaling

    folder = Path(options.text)
    is_report = folder.is_dir()
    excess = [name for name in (*flags_in(run), *flags_in(image_flags)) if is_report or name in _EXCLUDED]
    used = dict(options.excluded)
    if is_report:
        used |= {"RECIPE": options.recipe, "COMMAND": run.command}
        used |= {"--detach": options.detach, "--dry-run": options.dry_run}
    excess += [name for name, value in used.items() if value]
    if excess:
        message = f"{excess[0]} cannot be combined with --scaling {options.text}"
        raise UsageError(message, where=excess[0], hint="leave it out")
    scaled: ScalingRun | None = None
    with terminable(), reporter(as_json=options.as_json) as report:
        try:
            if not is_report:
                for created, scaled in _submit(options, run, project, report):
                    folder, size = created, scaled.sizes[0]
                    report.note(f"{scaling.nodes_text(size.nodes)}: {size.job or size.state}")
            if options.dry_run:
                return 0
            if not options.detach:
                report.note(
                    f"Ctrl-C leaves the jobs; imgkit run --scaling {shlex.quote(str(folder))} goes on"
                )
            result = scaled if options.detach and scaled else scaling.finish(folder, report)
        except KeyboardInterrupt:
            if scaled or is_report:
                ids = " ".join(size.job for size in scaled.sizes if size.job) if scaled else ""
                terminal.err(f"imgkit: the jobs continue: {ids}")
            return process.INTERRUPTED
    return _show(folder, result, options)


def _submit(
    options: ScalingOptions, run: Request, project: ProjectFile | None, report: Reporter
) -> Iterator[tuple[Path, ScalingRun]]:
    """Check the jobs of all sizes, then submit them; a dry run prints their scripts."""
    from imgkit_builder.project import origins
    from imgkit_builder.remote import jobs as remote_jobs
    from imgkit_builder.workflow import jobs, scaling

    remote = options.remote
    recipe = options.recipe or (project.recipe if project and not remote else "")
    if not recipe and not remote:
        raise UsageError(
            "no recipe given", where="RECIPE", hint="imgkit run RECIPE --scaling 1,2,4 -- COMMAND"
        )
    # On a remote, the plan of each job reads imgkit.toml itself, since it may name the recipe.
    request = run if remote else origins.under(run, project)
    code = read_code(origins.under(run, project), as_json=options.as_json)
    sizes = scaling.parse_sizes(options.text)
    planned = scaling.plan(recipe, request, sizes, on=remote, project=project, code=code)
    for warning in planned[-1][0].warnings:
        report.note(warning)
    if options.dry_run:
        if remote:
            report.note(f"{planned[0][0].directory} stands for the folder on {remote}")
        _show_scripts(planned, as_json=options.as_json)
        return

    run_there: Callable[[Sequence[str]], Finished] = functools.partial(process.run, check=False)
    if remote:
        far = connected(remote)
        far.login()  # may ask for a second factor, once
        run_there = functools.partial(remote_jobs.finished, far)
    scaling.refuse_unstartable(*planned[-1], run_there)

    def start(nodes: int) -> JobHandle:
        sized = dataclasses.replace(request, nodes=str(nodes), yes=True)  # a person has agreed to the code
        stages = report if remote else None  # the warnings of a job here stand above
        return jobs.run(recipe, sized, on=remote, base=options.base, project=project, report=stages)

    yield from scaling.submit(planned, start)


def _show_scripts(planned: Sequence[tuple[Job, Script]], *, as_json: bool) -> None:
    from imgkit_builder.workflow.scaling import nodes_text

    rows = [{"nodes": job.nodes, "submit": script.submit, "script": script.text} for job, script in planned]
    if as_json:
        show({"schema": SCHEMA, "jobs": rows}, as_json=True)
        return
    for job, script in planned:
        terminal.err(f"imgkit: {nodes_text(job.nodes)}:")
        terminal.document(script.text)


def _show(folder: Path, scaled: ScalingRun, options: ScalingOptions) -> int:
    """Print the report, or where it will be; return the exit code."""
    from imgkit_builder.workflow import scaling

    data = {**dataclasses.asdict(scaled), "folder": str(folder)}
    if options.detach:
        show(data, str(folder), as_json=options.as_json)
        terminal.err(f"imgkit: once the jobs have ended: imgkit run --scaling {folder}")
        return 0
    show(data, *columns(scaling.table(scaled)), *scaling.verdict(scaled), as_json=options.as_json)
    terminal.err(f"imgkit: {folder / scaling.PAGE_FILE}, {folder / scaling.CHART_FILE}")
    return 0 if all(size.is_complete for size in scaled.sizes) else EXIT_NO
