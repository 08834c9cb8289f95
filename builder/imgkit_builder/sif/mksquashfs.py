"""The mksquashfs of this machine: find it, and feed it a tar."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TextIO

from imgkit_builder.base.process import run
from imgkit_builder.image.config import epoch
from imgkit_builder.sif import limits
from imgkit_entrypoints.errors import ToolFailed, ToolMissing

_INSTALL = "apt install squashfs-tools (4.5 or later), or --from layers"
_SBIN = ("/usr/sbin", "/sbin", "/usr/local/sbin")
"""Where distributions put it and an ordinary user's PATH does not look."""
_BUFFER_BYTES = 1 << 20


def tar_reader() -> Path:
    """The mksquashfs that reads a tar from standard input.

    Raises
    ------
    ToolMissing : none, or older than 4.5.
    """
    program = find()
    if program is None:
        raise ToolMissing(
            "mksquashfs is not on this machine, and the engine's export goes straight into it", hint=_INSTALL
        )
    if not knows(program, r"-tar\b"):
        raise ToolMissing(f"{program} cannot read a tar (no -tar in its -help)", hint=_INSTALL)
    return program


def find() -> Path | None:
    """The program, also in the folders that an ordinary user's PATH leaves out; None if it is absent."""
    found = shutil.which("mksquashfs") or shutil.which("mksquashfs", path=os.pathsep.join(_SBIN))
    return Path(found) if found else None


def knows(program: Path, word: str) -> bool:
    """Whether a line of its help begins with the regular expression `word`."""
    # Versions differ in the exit code of -help: 0 or 1.
    return re.search(rf"^\s*{word}", run([program, "-help"], check=False).output, re.MULTILINE) is not None


def squash_argv(root: Path, options: Sequence[str], created: str) -> list[str]:
    """The words of the mksquashfs that reads the stream.

    Raises
    ------
    ToolMissing : no mksquashfs here reads a tar.
    """
    created_s = str(epoch(created))
    return [
        *(str(tar_reader()), "-", str(root), "-tar", "-noappend", "-quiet", "-no-progress"),
        *options,
        *limits.gather().mksquashfs_options(),
        # A tar has no entry for the root itself; by default / would get mode 0777 and the current time.
        *("-root-mode", "0755", "-root-uid", "0", "-root-gid", "0"),
        *("-root-time", created_s, "-mkfs-time", created_s),
        # Uncompressed inodes, for root_inode.set_root; costs 0.3 % of size.
        "-noI",
    ]


@contextlib.contextmanager
def squashing(argv: Sequence[str], *, log: TextIO, on_line: Callable[[str], None]) -> Iterator[IO[bytes]]:
    """Run mksquashfs with its standard input open; on leaving, it has succeeded or was killed.

    Raises
    ------
    ToolFailed : it failed.
    """
    # It refuses -mkfs-time beside this variable.
    env = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    with tempfile.TemporaryFile() as messages:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=messages,
            stderr=messages,
            bufsize=_BUFFER_BYTES,
            env=env,
            start_new_session=True,
        )
        assert process.stdin is not None  # noqa: S101 - for the type checker: stdin=PIPE
        with contextlib.suppress(OSError, AttributeError):  # an unprivileged user's limit; not Linux
            fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, _BUFFER_BYTES)
        broken = False
        try:
            try:
                yield process.stdin
                process.stdin.close()
            except BrokenPipeError:
                broken = True
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            # Closing would try to write the rest of its buffer.
            with contextlib.suppress(OSError):
                process.stdin.close()
            raise
        messages.seek(0)
        text = messages.read().decode("utf-8", "replace").strip()
    log.write(text + "\n")
    for line in text.splitlines():
        on_line(line)
    if code != 0 or broken:
        log.flush()
        why = ": file too large, see ulimit -f" if code == -signal.SIGXFSZ else ""
        raise ToolFailed(
            f"mksquashfs failed with exit code {code}{why}",
            hint=f"its last lines:\n{chr(10).join(text.splitlines()[-10:])}\nthe full log: {log.name}",
        )
