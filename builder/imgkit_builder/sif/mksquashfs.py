"""The mksquashfs of this machine: find it, run it, and limit the processors and memory that it uses.

mksquashfs looks at the machine, not at the job. Inside a Slurm or PBS job, or a container, it starts a thread
per processor of the whole node and takes a quarter of the node's memory. The job is then killed (apptainer
issue 2601, singularity issues 5434 and 4397).
"""

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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from imgkit_builder.base import process
from imgkit_builder.base.process import bound, run
from imgkit_entrypoints import files
from imgkit_entrypoints.arguments import digits
from imgkit_entrypoints.errors import ToolFailed

_SBIN = ("/usr/sbin", "/sbin", "/usr/local/sbin")
"""Where distributions put it and an ordinary user's PATH does not look."""
_RUNTIMES = ("apptainer", "singularity")
_SETTING = re.compile(r"^\s*mksquashfs path\s*=\s*(\S.*?)\s*$", re.MULTILINE)
_MOST_SETTINGS_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 20
_HARMLESS = re.compile(r"Unrecognised (tar )?xattr prefix ")
"""An attribute that no squashfs holds, as access lists are."""

_UNLIMITED_V1 = 1 << 60
"""cgroup v1 writes a huge page-rounded number where there is no limit."""
_LEAST_MEMORY_BYTES = 128 << 20
_MOST_MEMORY_BYTES = 512 << 20
"""More makes no difference to its speed, and imgkit and mksquashfs together stay below 1 GiB."""


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
    """Report what mksquashfs said, and raise ToolFailed if it failed or printed something unexpected.

    `broken` says that it ended before it had read everything.
    """
    log.write(text + "\n")
    for line in text.splitlines():
        on_line(line)
    unknown = [line for line in text.splitlines() if not _HARMLESS.match(line)]
    if code != 0 or broken or unknown:
        log.flush()
        why = ": file too large, see ulimit -f" if code == -signal.SIGXFSZ else ""
        what = f"failed with exit code {code}{why}" if code != 0 or broken else "printed something unexpected"
        raise ToolFailed(
            f"mksquashfs {what}",
            hint=f"its last lines:\n{chr(10).join(text.splitlines()[-10:])}\nthe full log: {log.name}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resources that this process may use."""

    processors: int
    memory_bytes: int | None
    """Limit of the control group; None if it sets none."""

    @property
    def mksquashfs_memory_mib(self) -> int:
        """What its buffers may take, in MiB: a quarter of the limit, and no more than is of use."""
        share = _MOST_MEMORY_BYTES if self.memory_bytes is None else self.memory_bytes // 4
        return min(max(share, _LEAST_MEMORY_BYTES), _MOST_MEMORY_BYTES) >> 20

    def mksquashfs_options(self) -> tuple[str, ...]:
        """``-processors N -mem MM``."""
        return ("-processors", str(self.processors), "-mem", f"{self.mksquashfs_memory_mib}M")


def gather_limits(root: Path = Path("/")) -> Limits:
    """Read affinity and the control groups (v1 or v2) of this process below `root`."""
    processors = process.processors()
    memory: int | None = None
    for folder in _groups(root):
        quota = _cpu_quota(folder)
        if quota is not None:
            processors = min(processors, max(1, int(quota)))
        limit = _memory_limit(folder)
        if limit is not None:
            memory = limit if memory is None else min(memory, limit)
    return Limits(processors=processors, memory_bytes=memory)


def _groups(root: Path) -> Iterator[Path]:
    """Folders of this process's groups and all their parents: any level may set a limit."""
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        base = mounts if number == "0" and not controllers else mounts / controllers
        if controllers and not ({"cpu", "memory"} & set(controllers.split(","))):
            continue
        # Inside a container the path is the host's, or leads out of the mount: only the root exists.
        group = base if ".." in Path(path).parts else base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_dir():
                yield folder
            if folder == base:
                break


def _cpu_quota(folder: Path) -> float | None:
    v2 = _text(folder / "cpu.max").split()
    v1 = [_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")]
    for words in (v2, v1):
        quota, period = map(digits, words) if len(words) == 2 else (None, None)
        if quota is not None and period:
            return quota / period
    return None


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        value = digits(_text(folder / name))
        if value is not None and value < _UNLIMITED_V1:
            return value
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
