"""Run one command in a session of its own: the source of ``python -c``, standard library only.

``python -I -S -c SOURCE PIDFILE ENCODING FOLDER [NAME=VALUE...] -- ARGV...``. It runs between spython and the
runtime, and adds what ``spython.utils.stream_command`` lacks: a process group that can be ended as a whole
(the runtime starts mksquashfs), output that always decodes (spython decodes strictly, and one stray byte
raises), a working folder, further variables, and an end when the parent was killed with -9. It runs several
times per conversion, so it avoids subprocess and signal, which take longer to import than all the rest.
"""

import codecs
import os
import select
import sys

SIGKILL, SIGPIPE, SIGXFSZ = 9, 13, 25
CHUNK_BYTES = 1 << 16
POLL_S = 1.0  # how soon the death of the parent is seen


def main() -> int:
    """Run and return the exit code, 128 + N for signal N."""
    pid_file, encoding, folder, *arguments = sys.argv[1:]
    separator = arguments.index("--")
    variables = arguments[:separator]
    argv = arguments[separator + 1 :]
    parent = os.getppid()
    os.setsid()
    with open(pid_file, "w") as stream:  # noqa: PTH123 - pathlib costs 10 ms of start-up
        stream.write(str(os.getpid()))
    os.chdir(folder)
    for variable in variables:
        name, _, value = variable.partition("=")
        os.environ[name] = value
    read_end, write_end = os.pipe()
    file_actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, write_end, 1),
        (os.POSIX_SPAWN_DUP2, write_end, 2),
    ]
    # Python ignores these two signals, and a child would inherit that.
    ignored_signals = (SIGPIPE, SIGXFSZ)
    child = os.posix_spawnp(argv[0], argv, os.environ, file_actions=file_actions, setsigdef=ignored_signals)
    os.close(write_end)
    copy_output(read_end, encoding, parent)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # the number of a signal
        return 128 - code
    return code


def copy_output(pipe: int, encoding: str, parent: int) -> None:
    """Copy what comes through `pipe` to standard output, until the other end is closed.

    If the process `parent` has gone or reads nothing more, the whole group of processes is killed.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    while True:
        ready, _, _ = select.select([pipe], [], [], POLL_S)
        if ready:
            chunk = os.read(pipe, CHUNK_BYTES)
            text = decoder.decode(chunk, final=not chunk)
            try:
                sys.stdout.buffer.write(text.encode(encoding, "backslashreplace"))
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                os.killpg(0, SIGKILL)
            if not chunk:
                return
        if os.getppid() != parent:
            os.killpg(0, SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
