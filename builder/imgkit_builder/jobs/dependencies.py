"""Translate job ids in the scheduler's options for dependencies between jobs.

imgkit prints the id of a job on a remote as ``4711@mn5``, and users write this id into an option such as
``--dependency``. The scheduler itself knows the job only as ``4711``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from imgkit_entrypoints.errors import UsageError

# Start of an option that names other jobs: "--dependency=afterok:1" and "-dafterok:1" of Slurm, and
# "depend=afterok:1" after "-W" of PBS.
_DEPENDENCY = re.compile(r"--dependency=|-d|(-W)?depend=")
# A job id as imgkit prints it: "4711@mn5", "4711.pbs01@lab", "4711[3].pbs01@lab".
_HANDLE = re.compile(r"(?P<id>[0-9][A-Za-z0-9_.\[\]-]*)@(?P<remote>[A-Za-z0-9][A-Za-z0-9._-]*)")


def with_scheduler_ids(options: Iterable[str], remote: str) -> tuple[str, ...]:
    """Return `options` with each job id in the form that the scheduler knows.

    A user names a job by its handle, ``ID`` or ``ID@REMOTE``. If `remote` is ``mn5``,
    ``--dependency=afterok:4711@mn5`` becomes ``--dependency=afterok:4711``.

    Parameters
    ----------
    remote : the remote on which the new job is submitted, or "" for this machine.

    Raises
    ------
    UsageError : the new job depends on a job of another remote, which has another scheduler.
    """
    translated = []
    for option in options:
        if not _DEPENDENCY.match(option):
            translated.append(option)
            continue
        _refuse_other_remotes(option, remote)
        translated.append(_HANDLE.sub(r"\g<id>", option))
    return tuple(translated)


def _refuse_other_remotes(option: str, remote: str) -> None:
    """Raise UsageError if `option` names a job that is not on `remote`."""
    for handle in _HANDLE.finditer(option):
        if handle["remote"] != remote:
            destination = f"to {remote}" if remote else "to the scheduler of this machine"
            raise UsageError(
                f"{handle[0]} is a job on {handle['remote']}, but the new job goes {destination}",
                where="--option",
                hint=f"wait for it first: imgkit wait {handle[0]}",
            )
