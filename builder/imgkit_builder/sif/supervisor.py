"""Run one command in a session of its own, with only the standard library.

imgkit passes the source of this module to ``python -c``, and starts it between spython and the runtime::

    python -I -S -c SOURCE PIDFILE ENCODING FOLDER [NAME=VALUE...] -- ARGV...

It adds what ``spython.utils.stream_command`` lacks:

* a process group that can be ended as a whole, because the runtime starts mksquashfs
* output that can always be decoded, because spython decodes strictly and one invalid byte raises an error
* a working folder and additional environment variables
* the end of the command when the parent process was killed with ``kill -9``

The module runs several times per conversion. So it does not import subprocess and signal, which take longer
to import than all the rest.
"""

import codecs
import os
import select
import sys

SIGKILL, SIGPIPE, SIGXFSZ = 9, 13, 25
CHUNK_BYTES = 1 << 16
POLL_S = 1.0  # how often the supervisor checks that its parent is alive


def main() -> int:
    """Run the command of `sys.argv`, and return its exit code, or 128 + N if signal N ended it."""
    # `runtime.py` passes the arguments PID_FILE ENCODING FOLDER [NAME=VALUE...] -- COMMAND...
    pid_file, encoding, folder, *arguments = sys.argv[1:]
    separator = arguments.index("--")
    variables = arguments[:separator]
    argv = arguments[separator + 1 :]
    # The process of imgkit. `copy_output` ends everything when it has died.
    parent = os.getppid()
    # From here on, this process leads a new process group, which imgkit ends by the pid in `pid_file`.
    os.setsid()
    with open(pid_file, "w") as stream:  # noqa: PTH123 - pathlib costs 10 ms of start-up
        stream.write(str(os.getpid()))
    os.chdir(folder)
    for variable in variables:
        name, _, value = variable.partition("=")
        os.environ[name] = value
    read_end, write_end = os.pipe()
    # Standard input is empty. Standard output and standard error both go into the pipe.
    file_actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, write_end, 1),
        (os.POSIX_SPAWN_DUP2, write_end, 2),
    ]
    # Python ignores these two signals, and a child would inherit that.
    ignored_signals = (SIGPIPE, SIGXFSZ)
    child = os.posix_spawnp(argv[0], argv, os.environ, file_actions=file_actions, setsigdef=ignored_signals)
    # Otherwise `copy_output` would never see the end of the output.
    os.close(write_end)
    copy_output(read_end, encoding, parent)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # the number of a signal
        return 128 - code
    return code


def copy_output(pipe: int, encoding: str, parent: int) -> None:
    """Copy everything from `pipe` to standard output until the other end of the pipe is closed.

    If the process `parent` has ended or no longer reads the output, kill the whole process group, including
    this process. Otherwise the command would go on without anybody to see it.

    Parameters
    ----------
    encoding : the encoding that the reader of standard output expects.
    """
    # An incremental decoder, because a chunk can end in the middle of a character.
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    while True:
        # With a timeout, so that the death of the parent is noticed even if there is no output.
        ready, _, _ = select.select([pipe], [], [], POLL_S)
        if ready:
            chunk = os.read(pipe, CHUNK_BYTES)
            text = decoder.decode(chunk, final=not chunk)
            try:
                sys.stdout.buffer.write(text.encode(encoding, "backslashreplace"))
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                os.killpg(0, SIGKILL)
            if not chunk:  # the end of the output
                return
        # When the parent dies, the kernel gives this process another parent.
        if os.getppid() != parent:
            os.killpg(0, SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
