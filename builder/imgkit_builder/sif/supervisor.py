"""Runs one command in a session of its own: the source of ``python -c``, standard library only.

``python -I -S -c SOURCE PIDFILE ENCODING FOLDER ARGV...``. It stands between spython and the runtime for what
``spython.utils.stream_command`` cannot do: a process group that can be ended as a whole (the runtime starts
mksquashfs), output that always decodes (there it is decoded strictly, and one stray byte raises), a working
folder, and an end when the parent was killed with -9.
"""

import codecs
import os
import select
import signal
import subprocess
import sys


def main() -> int:
    """Run and return the exit code, 128 + N for signal N."""
    pid_file, encoding, folder, *argv = sys.argv[1:]
    parent = os.getppid()
    os.setsid()
    with open(pid_file, "w") as stream:  # noqa: PTH123 - pathlib costs 10 ms of start-up
        stream.write(str(os.getpid()))
    child = subprocess.Popen(
        argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert child.stdout is not None  # noqa: S101 - for the type checker: stdout=PIPE
    source, decoder = child.stdout.fileno(), codecs.getincrementaldecoder("utf-8")("backslashreplace")
    while True:
        if select.select([source], [], [], 1.0)[0]:
            chunk = os.read(source, 1 << 16)
            text = decoder.decode(chunk, not chunk)
            try:
                sys.stdout.buffer.write(text.encode(encoding, "backslashreplace"))
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                os.killpg(0, signal.SIGKILL)
            if not chunk:
                break
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)
    code = child.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
