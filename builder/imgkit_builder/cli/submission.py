"""The option ``--submit`` of ``imgkit sif`` and ``imgkit build``, which runs their work as a job.

The job is submitted to the scheduler of this machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from imgkit_builder.base.flags import flags_in, nested_request, option_field
from imgkit_builder.cli.common import exit_on_sigterm, print_message
from imgkit_builder.cli.progress import reporter
from imgkit_builder.jobs.request import SubmitRequest
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_builder.jobs.prepared import PreparedJob

# The heading in --help for options that have an effect only together with --submit.
_GROUP = "With --submit"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """The options of a verb whose work can run as a job."""

    submit: bool = option_field(
        False, help="Let a job of this machine's scheduler do this, and follow its output."
    )
    detach: bool = option_field(
        False, group=_GROUP, help="Submit, print the job's id, and do not follow its output."
    )
    request: SubmitRequest = nested_request(SubmitRequest, group=_GROUP)


def refuse_without_submit(options: SubmitOptions) -> None:
    """Raise UsageError if one of `options` is given.

    The caller has already checked that ``--submit`` is not given, and the options need it.
    """
    for name in flags_in(options):
        # The first option is enough for the error.
        raise UsageError(f"{name} is for a job", where=name, hint="add --submit, or leave it out")


def submit_job(prepared: PreparedJob, options: SubmitOptions, *, dry_run: bool, as_json: bool) -> None:
    """Submit the job `prepared`, print its id and follow its output.

    In a dry run, only print its script. If the output is followed, `show_submitted` ends imgkit with the exit
    code for the job.
    """
    from imgkit_builder.cli.run import show_script, show_submitted
    from imgkit_builder.jobs import conversion

    if dry_run:
        for warning in prepared.job.warnings:
            print_message(warning)
        show_script(prepared.job, prepared.script, (), as_json=as_json)
        return
    with exit_on_sigterm(), reporter(as_json=as_json) as report:
        record = conversion.submit_conversion(prepared, report)
    show_submitted(record, prepared, detach=options.detach, as_json=as_json)
