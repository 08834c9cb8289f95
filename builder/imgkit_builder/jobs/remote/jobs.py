"""Submit a job on a remote, look at it, and follow its output through lost connections."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import PurePosixPath

from imgkit_builder.base import process
from imgkit_builder.base.process import Finished
from imgkit_builder.jobs import systems
from imgkit_builder.jobs.job import Job, Script
from imgkit_builder.jobs.remote.connection import FIND_PROGRAM, Connection, Cut, ScriptFailed
from imgkit_builder.jobs.submitted import SubmittedJob
from imgkit_entrypoints.errors import ToolFailed

ATTEMPTS = 5
"""Connections in a row that show nothing before following gives up."""

# Its first arguments are the system, the job's name, its .sif and its code: the note in jobs/ tells
# `imgkit remote gc` what the job uses. No variable holds them before the submission, since the user's
# variables have any name.
_SUBMIT = (
    FIND_PROGRAM
    + """\
cd -- "$folder" || exit 1
(
    for file in "$3" ${4:+"$4"}; do
        touch -c -- "$file" 2> /dev/null
        if [ ! -e "$file" ]; then
            echo "$file has been removed meanwhile; run the command again to send it" >&2
            exit 1
        fi
    done
) || exit 1
answer=$(shift 4 && exec "$@") || exit
printf '%s\\n' "$answer"
answer=$(printf '%s\\n' "$answer" | tail -n 1)
id=${answer%%;*}
case $id in
    '' | [!A-Za-z0-9]* | *..* | *[!]A-Za-z0-9_.[+-]*) ;;
    *) printf '%s\\n' "$1${answer#"$id"}" "$2" "$3" ${4:+"$4"} > "jobs/$id" ;;
esac 2> /dev/null
exit 0
"""
)
_RUN = FIND_PROGRAM + 'exec "$@" 2>&1 < /dev/null\n'
# The subshell ends tail when the connection ends: its input, which nobody writes to, ends then.
_FOLLOW = (
    FIND_PROGRAM
    + """\
exec 3<&0 < /dev/null
tail -c "+$from" -F -- "$log" 2> /dev/null 3<&- &
tail=$!
(cat <&3 > /dev/null; kill "$tail") > /dev/null 2>&1 &
exec 3<&-
polls=0
while [ $# -gt 0 ] && kill -0 "$tail" 2> /dev/null; do
    if state=$("$@" 2>&1); then
        if [ -z "$state" ]; then break; fi
    elif echo "$state" | grep -qE -- "$unknown_job"; then
        break
    fi
    polls=$((polls + 1)) # often at first, for short jobs
    if [ "$polls" -le 8 ]; then sleep 1; elif [ "$polls" -le 20 ]; then sleep 3; else sleep 10; fi
done
if [ $# -gt 0 ]; then
    late=0 # PBS copies the output when the job has ended
    while [ ! -e "$log" ] && [ "$late" -lt 10 ]; do sleep 1; late=$((late + 1)); done
    sleep 1
    kill "$tail" 2> /dev/null
fi
wait "$tail" 2> /dev/null
exit 0
"""
)
# What came too late for tail, which looks for an absent file once a second.
_REST = 'if [ -e "$log" ]; then exec tail -c "+$from" -- "$log"; fi\n'


def start(connection: Connection, job: Job, script: Script) -> Generator[bytes, None, None]:
    """Submit `script` in the job's folder on the remote; yield what the scheduler prints.

    Raises
    ------
    ToolFailed : the scheduler refused; quotes its message. Or the connection was lost, and the job may wait.
    """
    remote = connection.remote
    folder, used = str(job.directory), (job.container.image, job.container.code_folder)
    # In the script, which goes through standard input: no argument list holds a value.
    values = {name: os.environ[name] for name in job.container.names}
    export = f"export {' '.join(job.container.names)}\n" if job.container.names else ""
    output = connection.stream(
        export + _SUBMIT,
        {**values, "folder": folder, "program": script.submit[0]},
        args=(
            job.system,
            job.title,
            *(path.removeprefix(f"{folder}/") for path in used),
            *script.submit,
        ),
        data=[script.text.encode()] if script.on_stdin else [],
    )
    try:
        yield from output
    except ScriptFailed as error:
        message = f"{script.submit[0]} on {remote.name} failed with exit code {error.code}"
        message, hint = process.quoted(message, error.output)
        raise ToolFailed(message, hint=hint or None) from error
    except Cut as error:
        raise ToolFailed(
            f"the connection was lost while the job was submitted: {error.what}",
            where=remote.name,
            hint=f"it may be in the queue; look before you submit it again: ssh {remote.address}",
        ) from error


def finished(connection: Connection, argv: Sequence[str]) -> Finished:
    """Run a command of the scheduler there, to its end.

    Raises
    ------
    Cut : the remote cannot be reached.
    TooLong : it printed more than an answer can have.
    """
    code = 0

    def output() -> Generator[bytes, None, None]:
        nonlocal code
        try:
            yield from connection.stream(_RUN, {"program": argv[0]}, args=argv)
        except ScriptFailed as error:
            code = error.code

    answer = connection.answer(output()).decode(errors="replace")
    return Finished(argv=tuple(argv), returncode=code, output=answer)


def follow(
    connection: Connection, record: SubmittedJob, write: Callable[[bytes], None], log: Callable[[str], None]
) -> None:
    """Hand the job's output to `write` until the job has ended; a lost connection is made again.

    Raises
    ------
    Cut : the remote cannot be reached for some minutes.
    """
    system = systems.named(record.job.system)
    argv = system.status_commands(record.job)[0] if system.reports_state else ()
    values = {
        "program": argv[0] if argv else "tail",
        "log": str(log_file(record)),
        "unknown_job": system.queue.unknown_job,
    }
    shown_bytes, failures = 0, 0
    while True:
        before = shown_bytes
        try:
            for script in (_FOLLOW, _REST):
                values["from"] = str(shown_bytes + 1)
                for chunk in connection.stream(script, values, args=argv, hold=script is _FOLLOW):
                    write(chunk)
                    shown_bytes += len(chunk)
        except Cut as error:
            failures = 1 if shown_bytes > before else failures + 1
            if failures >= ATTEMPTS:
                raise
            log(f"the connection was lost, and imgkit connects again: {error.what}")
            time.sleep(2**failures)
        else:
            return


def log_file(record: SubmittedJob) -> PurePosixPath:
    """Return the file of the job's output: the last argument of what follows it."""
    return PurePosixPath(systems.named(record.job.system).log_source(record.job)[-1])
