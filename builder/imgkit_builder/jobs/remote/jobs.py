"""Submit a job on a remote, run commands of its scheduler, and follow its output over lost connections."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import PurePosixPath

from imgkit_builder.base import process
from imgkit_builder.base.process import Finished
from imgkit_builder.jobs import systems
from imgkit_builder.jobs.job import Argv, Job, Script
from imgkit_builder.jobs.remote.connection import FIND_PROGRAM, Connection, Cut, ScriptFailed
from imgkit_builder.jobs.remote.store import UsedPaths
from imgkit_builder.jobs.submitted import JobState, SubmittedJob, WaitInfo
from imgkit_entrypoints.errors import ToolFailed

ATTEMPTS = 5
"""The number of connections in a row that may be lost without new output before `follow_output` gives up."""

# The first character of the mark in `_FOLLOW`: "record separator", which is rare in text. Output from this
# character on is held back until the next bytes show whether it is a mark.
_MARK_START = "\x1e"

# The script that submits a job. Its arguments are the first line of the note jobs/ID, the other lines of the
# note, the paths of the job's .sif, code and data (one on each line), and then the submit command. Until the
# job is submitted, the script keeps these values in arguments and not in variables. The environment of the
# submission contains the user's variables, which may have any name and could overwrite them.
_SUBMIT = (
    FIND_PROGRAM
    + """\
cd -- "$folder" || exit 1
(
    printf '%s\\n' "$3" | while IFS= read -r file; do
        touch -c -- "$file" 2> /dev/null
        if [ ! -e "$file" ]; then
            echo "$file has been removed meanwhile; run the command again to send it" >&2
            exit 1
        fi
    done
) || exit 1
answer=$(shift 3 && exec "$@") || exit
printf '%s\\n' "$answer"
answer=$(printf '%s\\n' "$answer" | tail -n 1)
id=${answer%%;*}
case $id in
    '' | [!A-Za-z0-9]* | *..* | *[!]A-Za-z0-9_.[+-]*) ;;
    *) printf '%s\\n' "$1${answer#"$id"}" "$2" > "jobs/$id" ;;
esac 2> /dev/null
exit 0
"""
)
# The script that runs a command of the scheduler. After the output of the command, it prints a zero byte and
# the content of $file.
_RUN = (
    FIND_PROGRAM
    + """\
("$@") 2>&1 < /dev/null
code=$?
if [ -n "$file" ]; then printf '\\0'; cat -- "$file" 2> /dev/null; fi
exit "$code"
"""
)
# The script that prints the job's output from the byte $from on, and in between the scheduler's answers about
# the job. Its arguments are the status command.
#
# imgkit keeps the script's standard input open and writes nothing to it. When the connection ends, the input
# ends, and the subshell that reads it ends tail.
#
# Each row of the scheduler's answer is printed between two marks. Two marks without a row end the answer. A
# pipe takes up to 4096 bytes in one piece, so rows are cut at 3000 bytes, and tail cannot print within a row.
_FOLLOW = (
    FIND_PROGRAM
    + """\
exec 3<&0 < /dev/null
(
    looks=0 # for 10 s, while a job starts that did not have to wait
    while [ ! -e "$log" ] && [ "$looks" -lt 100 ]; do sleep 0.1; looks=$((looks + 1)); done
    exec tail -c "+$from" -F -- "$log" 2> /dev/null
) 3<&- &
tail=$!
(cat <&3 > /dev/null; kill "$tail") > /dev/null 2>&1 &
exec 3<&-
polls=0
while [ $# -gt 0 ] && kill -0 "$tail" 2> /dev/null; do
    if state=$("$@" 2>&1); then
        if [ -z "$state" ]; then break; fi
        printf '%s\\n' "$state" | cut -b -3000 | while IFS= read -r row; do
            if [ -n "$row" ]; then printf '%s%s%s' "$mark" "$row" "$mark"; fi
        done
        printf '%s%s' "$mark" "$mark"
    elif [ -n "$unknown_job" ] && echo "$state" | grep -qE -- "$unknown_job"; then
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
# The script that prints the end of the job's output, which tail may have missed. As long as the file does not
# exist, `tail -F` looks for it only once a second. Afterwards, it also reads the file only once a second.
_REST = 'if [ -e "$log" ]; then exec tail -c "+$from" -- "$log"; fi\n'


def submit_script(connection: Connection, job: Job, script: Script) -> Generator[bytes, None, None]:
    """Submit `script` in the job's folder on the remote, and yield what the scheduler prints.

    Nothing is submitted before the caller reads the output. The remote also gets the file ``jobs/ID``, which
    lists the files that the job uses (`store.UsedPaths`), so that `imgkit remote gc` keeps them.

    Raises
    ------
    ToolFailed : the scheduler refused the job, or the connection was lost. After a lost connection, the job
        may be in the queue.
    """
    remote = connection.remote
    program = script.submit[0]
    # The values of --env NAME, which may be secret, are part of the script. In arguments, other users of the
    # remote could see them.
    user_variables = {name: os.environ[name] for name in job.container.names}
    export_line = f"export {' '.join(user_variables)}\n" if user_variables else ""
    output = connection.stream(
        export_line + _SUBMIT,
        # The last two replace variables of the user with the same names, because the script needs its own.
        {**user_variables, "folder": str(job.directory), "program": program},
        args=(*_submission_args(job), *script.submit),  # in the order that `_SUBMIT` expects
        data=[script.text.encode()] if script.on_stdin else [],
    )
    try:
        yield from output
    except ScriptFailed as error:
        message = f"{program} on {remote.name} failed with exit code {error.code}"
        quoted_message, hint = process.quote_output(message, error.output)
        raise ToolFailed(quoted_message, hint=hint or None) from error
    except Cut as error:
        raise ToolFailed(
            f"the connection was lost while the job was submitted: {error.what}",
            where=remote.name,
            hint=f"it may be in the queue; look before you submit it again: ssh {remote.address}",
        ) from error


def _submission_args(job: Job) -> Argv:
    """Return the first three arguments of the script `_SUBMIT`, which submits the job on the remote.

    The script writes the first two to the file ``jobs/ID``. It checks that the paths of the image, code and
    data in the third one still exist, because `imgkit remote gc` may have removed them meanwhile.
    """
    run_name = ""  # a new run folder, which the job creates, is named by the job's id
    if job.request.resumed is not None:
        run_name = job.request.resumed.folder.name
    used = UsedPaths.of_job(job, run_name)
    first_note_line = used.system
    other_note_lines = used.lines_after_system()
    required_paths = "\n".join(used.stored_paths)
    return (first_note_line, other_note_lines, required_paths)


def run_scheduler_command(connection: Connection, argv: Sequence[str], *, file: str = "") -> Finished:
    """Run a command of the scheduler on the remote, and return its exit code and its output.

    The output includes the standard error.

    Parameters
    ----------
    file : the path of a file on the remote, or "". If it is given, a zero byte and the content of the file
        follow the output. If the file does not exist, nothing follows the zero byte.

    Raises
    ------
    Cut : the remote cannot be reached.
    TooLong : the command printed more than `process.MOST_BYTES`.
    """
    exit_code = 0

    def stream_output() -> Generator[bytes, None, None]:
        # If the command fails, `stream` raises an error after the last output. It is caught here and not
        # around `answer`, which would lose the output.
        nonlocal exit_code
        try:
            yield from connection.stream(_RUN, {"program": argv[0], "file": file}, args=argv)
        except ScriptFailed as error:
            exit_code = error.code

    # `answer` reads all output. Only then has `stream_output` ended, and `exit_code` its final value.
    output = connection.answer(stream_output()).decode(errors="replace")
    return Finished(argv=tuple(argv), returncode=exit_code, output=output)


class RunnerWithFile:
    """Run commands of the scheduler on a remote. The first command also reads a file there.

    A later command ``cat -- FILE`` is then answered with the content that was read, which saves a connection.
    """

    def __init__(self, connection: Connection, file: str) -> None:
        self._connection = connection
        self._file = file
        self._read_command = ("cat", "--", file)
        self._file_text: str | None = None
        """The content of the file, or "" if there is no such file. None before the first command."""

    def __call__(self, argv: Sequence[str]) -> Finished:
        """Run the command `argv` on the remote, and return its exit code and its output.

        If another command has run before, ``cat -- FILE`` runs nothing on the remote. It then succeeds even
        if there is no such file.

        Raises
        ------
        Cut : the remote cannot be reached.
        TooLong : the command printed more than `process.MOST_BYTES`.
        """
        if self._file_text is None:
            # The content of the file follows a zero byte. It is stored for a later call.
            finished = run_scheduler_command(self._connection, argv, file=self._file)
            output, _, self._file_text = finished.output.rpartition("\0")
            return dataclasses.replace(finished, output=output)
        if tuple(argv) == self._read_command:
            return Finished(argv=self._read_command, returncode=0, output=self._file_text)
        return run_scheduler_command(self._connection, argv)


def follow_output(
    connection: Connection,
    record: SubmittedJob,
    write: Callable[[bytes], None],
    *,
    on_status: Callable[[JobState, WaitInfo], None],
    log: Callable[[str], None],
) -> None:
    """Pass the job's output to `write` until the job has ended. If the connection is lost, connect again.

    A new connection continues after the last byte that was written, so no output is shown twice.

    Parameters
    ----------
    on_status : is called with the job's state and the reason for its wait, for each answer of the scheduler.
    log : is called with a message for each lost connection.

    Raises
    ------
    Cut : `ATTEMPTS` connections in a row were lost before new output arrived.
    """
    system = systems.get_system(record.job.system)
    written_bytes = 0
    failures = 0
    while True:
        written_before = written_bytes
        try:
            for part in _stream_to_end(connection, record, start=written_bytes):
                if isinstance(part, str):
                    status = system.parse_status(part)
                    on_status(status.state, status.wait)
                else:
                    write(part)
                    written_bytes += len(part)  # the next connection starts from here
            return
        except Cut as error:
            # Only connections in a row that bring no new output count as failures.
            if written_bytes > written_before:
                failures = 0
            failures += 1
            if failures >= ATTEMPTS:
                raise
            log(f"the connection was lost, and imgkit connects again: {error.what}")
            time.sleep(2**failures)  # 2, 4, 8 and 16 seconds


def _stream_to_end(
    connection: Connection, record: SubmittedJob, *, start: int
) -> Generator[bytes | str, None, None]:
    """Yield the job's output as bytes and the scheduler's answers as text, until the job has ended.

    Parameters
    ----------
    start : the number of bytes at the start of the job's output that are skipped.
    """
    position = start
    # The script _FOLLOW ends with the job, but may miss its last output. The script _REST then prints that
    # part.
    for script in (_FOLLOW, _REST):
        for part in _stream_output(connection, record, script, start=position):
            if isinstance(part, bytes):
                position += len(part)
            yield part


def _stream_output(
    connection: Connection, record: SubmittedJob, script: str, *, start: int
) -> Generator[bytes | str, None, None]:
    """Run the script `_FOLLOW` or `_REST` on the remote, and return its output as `split_stream` yields it.

    Parameters
    ----------
    start : the number of bytes at the start of the job's output that are skipped, because they were written
        before.
    """
    system = systems.get_system(record.job.system)
    # Without a status command, the script only follows the output.
    status_argv: Argv = ()
    program = "tail"
    if system.reports_state:
        status_argv = system.status_commands(record.job)[0]
        program = status_argv[0]
    mark = _MARK_START + secrets.token_hex(16)  # random, so that the output of a job cannot contain it
    script_variables = {
        "program": program,
        "log": str(log_file(record)),
        "unknown_job": system.queue.unknown_job,
        "mark": mark,
        "from": str(start + 1),  # tail -c counts bytes from 1
    }
    # The script _FOLLOW ends when its input ends, so the input is held open.
    stream = connection.stream(script, script_variables, args=status_argv, hold=script is _FOLLOW)
    return split_stream(stream, mark.encode())


def split_stream(chunks: Iterable[bytes], mark: bytes) -> Generator[bytes | str, None, None]:
    """Split the stream of `_FOLLOW`. Yield the job's output as bytes, and each scheduler's answer as text.

    In the stream, each row of an answer is between two marks, and an empty row ends the answer. So ``OUTPUT
    MARK ROW MARK OUTPUT MARK MARK`` contains an answer with one row. Output is yielded as soon as it arrives.
    If a lost connection cuts off an answer, the answer is dropped.

    Parameters
    ----------
    mark : the random text before and after each row of an answer.
    """
    rows: list[bytes] = []
    is_row = False  # the stream begins with output
    pending = b""  # the bytes that are not yielded yet, because they may belong to a mark or a row
    for chunk in chunks:
        *parts, pending = (pending + chunk).split(mark)
        # Output and rows alternate, because there is a mark between them.
        for part in parts:
            if not is_row:
                yield part
            elif part:
                rows.append(part)
            else:  # an empty row ends the answer
                yield b"\n".join(rows).decode(errors="replace")
                rows.clear()
            is_row = not is_row
        if not is_row:
            output, pending = _split_before_mark(pending, mark)
            yield output
    if not is_row:  # at the end, this is no mark, so it is output
        yield pending


def _split_before_mark(data: bytes, mark: bytes) -> tuple[bytes, bytes]:
    """Split `data` into a part that is certainly output, and a part that may be the start of `mark`.

    A mark can be split between two chunks. So the second part must wait for the next bytes.
    """
    mark_start = data.rfind(mark[:1], -len(mark))
    if mark_start < 0:
        return data, b""
    return data[:mark_start], data[mark_start:]


def log_file(record: SubmittedJob) -> PurePosixPath:
    """Return the path of the file on the remote that contains the job's output."""
    argv = systems.get_system(record.job.system).log_source(record.job)
    return PurePosixPath(argv[-1])  # the command is "tail ... FILE"
