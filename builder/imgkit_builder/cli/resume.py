"""``imgkit resume``: submit a job again in its run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from imgkit_builder.cli.common import exit_on_sigterm, flag_option, print_message
from imgkit_builder.cli.jobs import may_ask
from imgkit_builder.cli.options import COMMAND, JobCommand, Without
from imgkit_builder.cli.progress import reporter
from imgkit_builder.cli.run import JobOptions, read_code, show_script, show_submitted
from imgkit_builder.jobs.request import JobRequest
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_builder.jobs.code import CodeFolder

COMMAND_CLASSES = {"resume": JobCommand}


def verb_resume(
    context: typer.Context,
    job_id: str = typer.Argument(metavar="ID [-- COMMAND...]", help="Job id (imgkit runs)."),
    *,
    same_code: bool = flag_option("--same-code", "Go on with the run's code as it is."),
    request: Annotated[JobRequest, Without("interactive", "no_code", "directory")],
    options: Annotated[JobOptions, Without("on", "base", "trust_folder")],
) -> None:
    """Submit a job that has ended again, in the same run folder.

    The command and all values are those of the job, unless options replace them; --env
    replaces one variable. Today's code is used: files that the run has changed stay,
    and one that has changed on both sides is refused by name.

    For Slurm, PBS, and pods whose files a remote stores. Refused while the run goes on,
    and after the program ended well, unless COMMAND is given.

    \b
    Examples:
      imgkit resume 4711@mn5
      imgkit resume 4711@mn5 --time 8h
      imgkit resume 4711@mn5 -- dist-run train.py --epochs 90
    """
    from imgkit_builder.jobs import handle, records, submit

    if same_code and request.container.code is not None:
        raise UsageError("--same-code cannot be combined with --code", where="--code", hint="leave it out")
    record = records.find_record(job_id)

    def read(job_request: JobRequest) -> CodeFolder | None:
        return read_code(job_request, as_json=options.as_json)

    changes = request.changed(command=context.meta[COMMAND])
    prepared = handle.prepare_resume(record, changes, read, same_code=same_code, may_ask=may_ask())
    if options.dry_run:
        if not options.as_json:
            for warning in prepared.job.warnings:
                print_message(warning)
        show_script(prepared.job, prepared.script, (), as_json=options.as_json)
        return
    print_message(f"{record.job.handle} goes on in {record.job.run_folder}")
    transport = handle.transport_to(handle.remote_of(record), prepared, may_ask=may_ask())
    with exit_on_sigterm(), reporter(as_json=options.as_json) as report:
        ready = submit.make_ready(prepared, transport, report)
        new_record = submit.start_job(ready, transport, report)
    show_submitted(new_record, ready, detach=options.detach, as_json=options.as_json)
