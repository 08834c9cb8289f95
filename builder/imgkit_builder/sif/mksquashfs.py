"""The mksquashfs of this machine: find it, and limit the processors and memory that it uses.

mksquashfs looks at the machine, not at the job. Inside a Slurm or PBS job, or a container, it starts a thread
per processor of the whole node and takes a quarter of the node's memory. The job is then killed (apptainer
issue 2601, singularity issues 5434 and 4397).
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import process
from imgkit_builder.base.process import run
from imgkit_entrypoints import files
from imgkit_entrypoints.arguments import parse_digits

# Where distributions put it and an ordinary user's PATH does not look.
_SBIN_FOLDERS = ("/usr/sbin", "/sbin", "/usr/local/sbin")
_RUNTIMES = ("apptainer", "singularity")
_CONFIGURED_PATH = re.compile(r"^\s*mksquashfs path\s*=\s*(\S.*?)\s*$", re.MULTILINE)
_MAX_CONFIG_BYTES = 1 << 20

# "0::/user.slice" of v2, "4:cpu,cpuacct:/slurm/job_1" of v1
_GROUP = re.compile(r"[^:]*:(?P<controllers>[^:]*):(?P<path>.*)")
# cgroup v1 writes a huge page-rounded number where there is no limit.
_UNLIMITED_V1 = 1 << 60
_MIN_MEMORY_BYTES = 128 << 20
# With more memory, mksquashfs is no faster. With this, imgkit and mksquashfs together stay below 1 GiB.
_MAX_MEMORY_BYTES = 512 << 20


def find_tar_reader() -> Path | None:
    """Return the mksquashfs that reads a tar from standard input (4.5 and later), or None."""
    for program in find_programs():
        if has_option(program, r"-tar\b"):
            return program
    return None


def describe_obstacle() -> str:
    """Return why no mksquashfs here reads a tar. The text is empty if one does."""
    programs = find_programs()
    if not programs:
        return "mksquashfs is not on this machine"
    if find_tar_reader():
        return ""
    return f"{programs[0]} cannot read a tar (no -tar in its -help)"


def find_any() -> Path | None:
    """Return the program that `find_tar_reader` chooses, or else any other. None if there is none."""
    return find_tar_reader() or next(iter(find_programs()), None)


def zstd_error(program: Path | None) -> str:
    """Return a sentence for the user if the mksquashfs `program` cannot compress with zstd, else ``""``.

    ``None`` stands for a machine without mksquashfs, where nothing is known, and gives ``""``.
    """
    if program is None or has_option(program, r"zstd\b"):
        return ""
    return f"{program} was built without zstd"


def find_programs() -> tuple[Path, ...]:
    """Return every mksquashfs of this machine, without repetition.

    It may be on PATH, in a folder for administrators such as /usr/sbin, or be brought along by a container
    runtime or named in its configuration.
    """
    sbin = os.pathsep.join(_SBIN_FOLDERS)
    programs = [shutil.which("mksquashfs") or shutil.which("mksquashfs", path=sbin)]
    for name in _RUNTIMES:
        runtime = shutil.which(name)
        if runtime is not None:
            prefix = Path(runtime).resolve().parents[1]  # "/usr" of "/usr/bin/apptainer"
            programs += _find_bundled(prefix)
            programs += _find_configured(prefix)
    existing = [Path(program) for program in programs if program]
    return tuple(dict.fromkeys(existing))


def _find_bundled(prefix: Path) -> Iterator[str | None]:
    """Yield the mksquashfs that a runtime brings along, or None for each possible folder that has none.

    `prefix` is where the runtime is installed, such as ``/usr``. An unprivileged installation has a folder
    for each architecture below it. Folders of both runtimes are tried, since an Apptainer may be installed
    under the name ``singularity`` only.
    """
    folders = [prefix / f"libexec/{flavour}/bin" for flavour in _RUNTIMES]
    folders += [prefix / "utils/bin", *prefix.glob("*/utils/bin")]
    for folder in folders:
        yield shutil.which("mksquashfs", path=str(folder))


def _find_configured(prefix: Path) -> Iterator[str | None]:
    """Yield the mksquashfs that the configuration file of a runtime names: ``mksquashfs path = /opt/bin``.

    `prefix` is where the runtime is installed. The file is below it, or in /etc if it is ``/usr``. The value
    may be the program or its folder. None is yielded if there is no program.
    """
    folders = [prefix / "etc", *prefix.glob("*/etc")]
    if prefix == Path("/usr"):
        folders.append(Path("/etc"))
    for folder, flavour in itertools.product(folders, _RUNTIMES):
        try:
            with files.open_regular(folder / flavour / f"{flavour}.conf") as stream:
                text = stream.read(_MAX_CONFIG_BYTES).decode("utf-8", "replace")
        except OSError:
            continue
        values = _CONFIGURED_PATH.findall(text)
        if values:
            path = values[-1]  # the last of several lines counts
            yield shutil.which(path) or shutil.which("mksquashfs", path=path)


def read_version(program: Path) -> str:
    """Return its version, as its ``-version`` says."""
    output = run([program, "-version"], check=False).output
    match = re.search(r" version (\S+)", output)  # "mksquashfs version 4.5.1 (2022/03/17)"
    if match is None:
        return "unknown"
    return match[1]


def has_option(program: Path, option: str) -> bool:
    """Return whether a line of its help begins with the regular expression `option`."""
    return re.search(rf"^\s*{option}", _help(program, program.stat().st_mtime_ns), re.MULTILINE) is not None


@functools.cache
def _help(program: Path, _changed_ns: int) -> str:
    # Versions differ in the exit code of -help: 0 or 1. From 4.7 on it is short, and -help-all is long.
    return "".join(run([program, option], check=False).output for option in ("-help", "-help-all"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resources that this process may use."""

    processors: int
    memory_bytes: int | None
    """Limit of the control group; None if it sets none."""

    @property
    def mksquashfs_memory_mib(self) -> int:
        """Memory that its buffers may take, in MiB: a quarter of the limit, and no more than is of use."""
        share = _MAX_MEMORY_BYTES
        if self.memory_bytes is not None:
            share = min(share, self.memory_bytes // 4)
        return max(share, _MIN_MEMORY_BYTES) >> 20

    def mksquashfs_options(self) -> tuple[str, ...]:
        """Return ``-processors N -mem MM``."""
        return ("-processors", str(self.processors), "-mem", f"{self.mksquashfs_memory_mib}M")


def gather_limits(root: Path = Path("/")) -> Limits:
    """Return how many processors and how much memory this process may use.

    Linux control groups limit a batch job or a container, and mksquashfs does not look at them. Both versions
    of them are read, v1 and v2. `root` replaces / in tests.
    """
    processors = process.count_processors()
    memory_limits = []
    for folder in _group_folders(root):
        quota = _read_cpu_quota(folder)
        if quota is not None:
            processors = min(processors, max(1, int(quota)))
        limit = _read_memory_limit(folder)
        if limit is not None:
            memory_limits.append(limit)
    return Limits(processors=processors, memory_bytes=min(memory_limits, default=None))


def _group_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups that this process is in, and of all groups around them.

    The folders hold the limits, and any level may set one: ``/sys/fs/cgroup/slurm/job_1``, then
    ``/sys/fs/cgroup/slurm``.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        match = _GROUP.fullmatch(line)
        if match is None:
            continue
        controllers = match["controllers"]
        is_v2 = not controllers
        has_limits = not {"cpu", "memory"}.isdisjoint(controllers.split(","))
        if not is_v2 and not has_limits:
            continue
        mount = mounts / controllers
        group = mount / match["path"].lstrip("/")
        # In a container, the path may lead out of what is mounted here, as "/../..": only the top is visible.
        if ".." in group.parts:
            group = mount
        for folder in (group, *group.parents):
            if folder.is_dir():
                yield folder
            if folder == mount:
                break


def _read_cpu_quota(folder: Path) -> float | None:
    """Return the number of processors that a group may use, or None without a limit.

    The kernel states it as a quota of CPU time in a period: ``200000 100000`` are 2 processors.
    """
    v2_fields = _read_text(folder / "cpu.max").split()
    v1_fields = [_read_text(folder / "cpu.cfs_quota_us"), _read_text(folder / "cpu.cfs_period_us")]
    for fields in (v2_fields, v1_fields):
        if len(fields) != 2:
            continue
        quota_us, period_us = map(parse_digits, fields)
        if quota_us is not None and period_us:
            return quota_us / period_us
    return None


def _read_memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        value = parse_digits(_read_text(folder / name))
        if value is not None and value < _UNLIMITED_V1:
            return value
    return None


def _read_text(path: Path) -> str:
    """Return the text of a file of the kernel. It is empty where the file cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
