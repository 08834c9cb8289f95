"""The mksquashfs of this machine: find it, and run it."""

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

from imgkit_builder.base.process import bound, run
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import ToolFailed

_SBIN = ("/usr/sbin", "/sbin", "/usr/local/sbin")
"""Where distributions put it and an ordinary user's PATH does not look."""
_RUNTIMES = ("apptainer", "singularity")
_SETTING = re.compile(r"^\s*mksquashfs path\s*=\s*(\S.*?)\s*$", re.MULTILINE)
_MOST_SETTINGS_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 20
_HARMLESS = re.compile(r"Unrecognised (tar )?xattr prefix ")
"""An attribute that no squashfs holds, as access lists are."""


def tar_reader() -> Path | None:
    """The mksquashfs that reads a tar from standard input (4.5 and later); None if there is none."""
    return next((program for program in candidates() if knows(program, r"-tar\b")), None)


def obstacle() -> str:
    """Why no mksquashfs here reads a tar; empty if one does."""
    found = candidates()
    if not found:
        return "mksquashfs is not on this machine"
    return "" if tar_reader() else f"{found[0]} cannot read a tar (no -tar in its -help)"


def find() -> Path | None:
    """The one that `tar_reader` chooses, else any; None if there is none."""
    return tar_reader() or next(iter(candidates()), None)


def lacks_zstd(program: Path | None) -> str:
    """Why `program` cannot compress with zstd; empty if it can, or if there is none to ask."""
    lacks = program is not None and not knows(program, r"zstd\b")
    return f"{program} was built without zstd" if lacks else ""


def candidates() -> tuple[Path, ...]:
    """Every mksquashfs here: on PATH, where an ordinary user's PATH does not look, and of a runtime."""
    found = [shutil.which("mksquashfs") or shutil.which("mksquashfs", path=os.pathsep.join(_SBIN))]
    for name in _RUNTIMES:
        if runtime := shutil.which(name):
            prefix = Path(runtime).resolve().parents[1]
            # Packages bring their own; an unprivileged installation has a folder for each architecture.
            # `singularity` may be the only name of an Apptainer.
            bundles = (prefix / f"libexec/{flavour}/bin" for flavour in _RUNTIMES)
            places = (*bundles, prefix / "utils/bin", *prefix.glob("*/utils/bin"))
            found += [shutil.which("mksquashfs", path=str(place)) for place in places]
            found += _configured(prefix)
    return tuple(dict.fromkeys(Path(one) for one in found if one))


def _configured(prefix: Path) -> Iterator[str | None]:
    """What ``mksquashfs path`` of a runtime's configuration names: the program, or its folder.

    The file is read where installations have it: below their prefix, or in /etc if that is /usr.
    """
    for folder in (
        prefix / "etc",
        *prefix.glob("*/etc"),
        *((Path("/etc"),) if prefix == Path("/usr") else ()),
    ):
        for flavour in _RUNTIMES:
            try:
                with files.open_regular(folder / flavour / f"{flavour}.conf") as stream:
                    text = stream.read(_MOST_SETTINGS_BYTES).decode("utf-8", "replace")
            except OSError:
                continue
            for value in _SETTING.findall(text)[-1:]:
                yield shutil.which(value) or shutil.which("mksquashfs", path=value)


def version(program: Path) -> str:
    """Its version, as its ``-version`` says."""
    words = run([program, "-version"], check=False).output.split()
    return words[2] if len(words) > 2 else "unknown"


def knows(program: Path, word: str) -> bool:
    """Whether a line of its help begins with the regular expression `word`."""
    return re.search(rf"^\s*{word}", _help(program, program.stat().st_mtime_ns), re.MULTILINE) is not None


@functools.cache
def _help(program: Path, _changed_ns: int) -> str:
    # Versions differ in the exit code of -help: 0 or 1. From 4.7 on it is short, and -help-all is long.
    return "".join(run([program, option], check=False).output for option in ("-help", "-help-all"))


@contextlib.contextmanager
def squashing(
    argv: Sequence[str], *, log: TextIO, on_line: Callable[[str], None], only_errors: bool = False
) -> Iterator[IO[bytes]]:
    """Run mksquashfs with its standard input open; on leaving, it has succeeded or was killed.

    It ends with imgkit, however that ends: left alone, it would write gigabytes that nobody uses.
    A line that is not known to be harmless is a failure: mksquashfs prints one for a file that it leaves
    out, and exits 0. With `only_errors`, the lines of its standard output do not count.

    Raises
    ------
    ToolFailed : it failed.
    """
    # It refuses -mkfs-time beside this variable.
    env = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    with tempfile.TemporaryFile() as messages:
        process = subprocess.Popen(
            bound(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if only_errors else messages,
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
    judge(code, text, broken=broken, log=log, on_line=on_line)


def judge(code: int, text: str, *, broken: bool, log: TextIO, on_line: Callable[[str], None]) -> None:
    """Report what mksquashfs said, and raise ToolFailed if it failed or said something unknown.

    `broken` says that it ended before it had read everything.
    """
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
