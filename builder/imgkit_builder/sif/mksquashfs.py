"""The mksquashfs of this machine: find it, and feed it a tar."""

from __future__ import annotations

import contextlib
import fcntl
import functools
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

_INSTALL = "apt install squashfs-tools (4.5 or later), or a runtime that builds: --from layers"
_SBIN = ("/usr/sbin", "/sbin", "/usr/local/sbin")
"""Where distributions put it and an ordinary user's PATH does not look."""
_RUNTIMES = ("apptainer", "singularity")
_BUFFER_BYTES = 1 << 20
_HARMLESS = re.compile(r"Unrecognised (tar )?xattr prefix ")
"""An attribute that no squashfs holds, as access lists are."""


def tar_reader() -> Path:
    """The mksquashfs that reads a tar from standard input.

    Raises
    ------
    ToolMissing : none, or older than 4.5.
    """
    found = candidates()
    if not found:
        raise ToolMissing("mksquashfs is not on this machine", hint=_INSTALL)
    for program in found:
        if knows(program, r"-tar\b"):
            return program
    raise ToolMissing(f"{found[0]} cannot read a tar (no -tar in its -help)", hint=_INSTALL)


def obstacle() -> str:
    """Why this machine cannot turn a tar into a squashfs; empty if it can."""
    try:
        tar_reader()
    except ToolMissing as error:
        return error.what
    return ""


def find() -> Path | None:
    """The one that `tar_reader` chooses, else any; None if there is none."""
    found = candidates()
    return next((one for one in found if knows(one, r"-tar\b")), found[0] if found else None)


def candidates() -> tuple[Path, ...]:
    """Every mksquashfs here: on PATH, where an ordinary user's PATH does not look, and beside a runtime."""
    found = [shutil.which("mksquashfs"), shutil.which("mksquashfs", path=os.pathsep.join(_SBIN))]
    for name in _RUNTIMES:
        if runtime := shutil.which(name):
            prefix = Path(runtime).resolve().parents[1]
            # Packages bring their own; an unprivileged installation has a folder for each architecture.
            # `singularity` may be the only name of an Apptainer.
            bundles = (prefix / f"libexec/{flavour}/bin" for flavour in _RUNTIMES)
            places = (*bundles, prefix / "utils/bin", *prefix.glob("*/utils/bin"))
            found += [shutil.which("mksquashfs", path=str(place)) for place in places]
    return tuple(dict.fromkeys(Path(one) for one in found if one))


def knows(program: Path, word: str) -> bool:
    """Whether a line of its help begins with the regular expression `word`."""
    return re.search(rf"^\s*{word}", _help(program, program.stat().st_mtime_ns), re.MULTILINE) is not None


@functools.cache
def _help(program: Path, _changed_ns: int) -> str:
    # Versions differ in the exit code of -help: 0 or 1. From 4.7 on it is short, and -help-all is long.
    return "".join(run([program, option], check=False).output for option in ("-help", "-help-all"))


def squash_argv(root: Path, options: Sequence[str], created: str, *, offset: int = 0) -> list[str]:
    """The words of the mksquashfs that reads the stream and writes to byte `offset` of `root`.

    Raises
    ------
    ToolMissing : no mksquashfs here reads a tar.
    """
    created_s = str(epoch(created))
    return [
        *(str(tar_reader()), "-", str(root), "-tar", "-noappend", "-quiet", "-no-progress"),
        *options,
        *limits.gather().mksquashfs_options(),
        *(("-offset", str(offset)) if offset else ()),
        # A tar has no entry for the root itself; by default / would get mode 0777 and the current time.
        *("-root-mode", "0755", "-root-uid", "0", "-root-gid", "0"),
        *("-root-time", created_s, "-mkfs-time", created_s),
        # Uncompressed inodes, for root_inode.set_root; costs 0.3 % of size.
        "-noI",
    ]


@contextlib.contextmanager
def squashing(argv: Sequence[str], *, log: TextIO, on_line: Callable[[str], None]) -> Iterator[IO[bytes]]:
    """Run mksquashfs with its standard input open; on leaving, it has succeeded or was killed.

    A line that is not known to be harmless is a failure: mksquashfs prints one for a file that it leaves
    out, and exits 0.

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
    unknown = [line for line in text.splitlines() if not _HARMLESS.match(line)]
    if code != 0 or broken or unknown:
        log.flush()
        why = ": file too large, see ulimit -f" if code == -signal.SIGXFSZ else ""
        what = f"failed with exit code {code}{why}" if code != 0 or broken else "said something unknown"
        raise ToolFailed(
            f"mksquashfs {what}",
            hint=f"its last lines:\n{chr(10).join(text.splitlines()[-10:])}\nthe full log: {log.name}",
        )
