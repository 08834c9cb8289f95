"""Find mksquashfs on this machine, and limit the processors and memory that it uses.

mksquashfs reads the size of the machine, not the limits of the job. In a Slurm or PBS job, or in a container,
it starts one thread per processor of the whole node and takes a quarter of the node's memory. The job is then
killed (apptainer issue 2601, singularity issues 5434 and 4397).
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

# Distributions install mksquashfs into these folders, which are often not on the PATH of an ordinary user.
_SBIN_FOLDERS = ("/usr/sbin", "/sbin", "/usr/local/sbin")
_RUNTIMES = ("apptainer", "singularity")
_CONFIGURED_PATH = re.compile(r"^\s*mksquashfs path\s*=\s*(\S.*?)\s*$", re.MULTILINE)
_MAX_CONFIG_BYTES = 1 << 20

# A line of /proc/self/cgroup: "0::/user.slice" in cgroup v2, "4:cpu,cpuacct:/slurm/job_1" in v1
_GROUP = re.compile(r"[^:]*:(?P<controllers>[^:]*):(?P<path>.*)")
# cgroup v1 writes a huge number, rounded to a page, if there is no limit.
_UNLIMITED_V1 = 1 << 60
_MIN_MEMORY_BYTES = 128 << 20
# More memory does not make mksquashfs faster. With this value, imgkit and mksquashfs together use below 1
# GiB.
_MAX_MEMORY_BYTES = 512 << 20


def find_tar_reader() -> Path | None:
    """Return a mksquashfs that can read a tar from standard input (4.5 and later), or None."""
    for program in find_programs():
        if has_option(program, r"-tar\b"):
            return program
    return None


def describe_obstacle() -> str:
    """Return why no mksquashfs on this machine can read a tar, or ``""`` if one of them can."""
    programs = find_programs()
    if not programs:
        return "mksquashfs is not on this machine"
    if find_tar_reader():
        return ""
    return f"{programs[0]} cannot read a tar (no -tar in its -help)"


def find_any() -> Path | None:
    """Return a mksquashfs that can read a tar, or else any other mksquashfs, or None if there is none."""
    return find_tar_reader() or next(iter(find_programs()), None)


def zstd_error(program: Path | None) -> str:
    """Return a sentence for the user if the mksquashfs `program` cannot compress with zstd, else ``""``.

    `program` is None if this machine has no mksquashfs. Then nothing is known, and the result is ``""``.
    """
    if program is None or has_option(program, r"zstd\b"):
        return ""
    return f"{program} was built without zstd"


def find_programs() -> tuple[Path, ...]:
    """Return every mksquashfs of this machine, each only once, the preferred one first.

    The search covers PATH, folders for administrators such as /usr/sbin, the installation folders of
    container runtimes, and the paths in the configuration files of the runtimes.
    """
    sbin = os.pathsep.join(_SBIN_FOLDERS)
    # The order is that of preference: the user's PATH first, then the programs of the runtimes.
    programs = [shutil.which("mksquashfs") or shutil.which("mksquashfs", path=sbin)]
    for name in _RUNTIMES:
        runtime = shutil.which(name)
        if runtime is not None:
            prefix = Path(runtime).resolve().parents[1]  # "/usr" of "/usr/bin/apptainer"
            programs += _find_bundled(prefix)
            programs += _find_configured(prefix)
    existing = [Path(program) for program in programs if program]  # without None, for what was not found
    # A dict drops repeated paths but keeps their order, unlike a set.
    return tuple(dict.fromkeys(existing))


def _find_bundled(prefix: Path) -> Iterator[str | None]:
    """Yield each mksquashfs that was installed with a runtime, and None for each folder without one.

    `prefix` is the folder in which the runtime is installed, such as ``/usr``. An unprivileged installation
    has a subfolder for each architecture. The folders of both runtimes are searched, because Apptainer may be
    installed only under the name ``singularity``.
    """
    folders = [prefix / f"libexec/{runtime_name}/bin" for runtime_name in _RUNTIMES]
    folders += [prefix / "utils/bin", *prefix.glob("*/utils/bin")]
    for folder in folders:
        yield shutil.which("mksquashfs", path=str(folder))


def _find_configured(prefix: Path) -> Iterator[str | None]:
    """Yield the mksquashfs from a line like ``mksquashfs path = /opt/bin`` in a runtime's configuration file.

    `prefix` is the folder in which the runtime is installed. The configuration file is below it, or in /etc
    if `prefix` is ``/usr``. The value may be the path of the program or of its folder. For a setting whose
    program does not exist, the function yields None.
    """
    folders = [prefix / "etc", *prefix.glob("*/etc")]
    if prefix == Path("/usr"):
        folders.append(Path("/etc"))
    for folder, runtime_name in itertools.product(folders, _RUNTIMES):
        try:
            with files.open_regular(folder / runtime_name / f"{runtime_name}.conf") as stream:
                config_text = stream.read(_MAX_CONFIG_BYTES).decode("utf-8", "replace")
        except OSError:  # most of these files do not exist
            continue
        configured_paths = _CONFIGURED_PATH.findall(config_text)
        if configured_paths:
            path = configured_paths[-1]  # if the setting is repeated, the last line is valid
            # First take the value as a program, then as a folder.
            yield shutil.which(path) or shutil.which("mksquashfs", path=path)


def read_version(program: Path) -> str:
    """Return the version that ``mksquashfs -version`` prints, or ``"unknown"``."""
    version_output = run([program, "-version"], check=False).output
    match = re.search(r" version (\S+)", version_output)  # "mksquashfs version 4.5.1 (2022/03/17)"
    if match is None:
        return "unknown"
    return match[1]


def has_option(program: Path, option: str) -> bool:
    """Return whether the program's help has a line that begins with the regular expression `option`."""
    return (
        re.search(rf"^\s*{option}", _read_help(program, program.stat().st_mtime_ns), re.MULTILINE) is not None
    )


@functools.cache
def _read_help(program: Path, _changed_ns: int) -> str:
    """Return the help of `program`. `_changed_ns` is the time of its last change."""
    # `_changed_ns` is part of the cache key: an updated program is asked again. The exit code is ignored,
    # since -help exits with 0 or 1, depending on the version. From 4.7 on, only -help-all lists all options.
    return "".join(run([program, option], check=False).output for option in ("-help", "-help-all"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Processors and memory that this process may use."""

    processors: int
    memory_bytes: int | None
    """Memory limit of the Linux control group, or None if there is no limit."""

    @property
    def mksquashfs_memory_mib(self) -> int:
        """Memory for the buffers of mksquashfs in MiB: a quarter of the limit, but from 128 to 512."""
        limit_bytes = _MAX_MEMORY_BYTES
        if self.memory_bytes is not None:
            limit_bytes = min(limit_bytes, self.memory_bytes // 4)
        return max(limit_bytes, _MIN_MEMORY_BYTES) >> 20

    def mksquashfs_options(self) -> tuple[str, ...]:
        """Return the options that pass these limits to mksquashfs: ``-processors N -mem MM``."""
        return ("-processors", str(self.processors), "-mem", f"{self.mksquashfs_memory_mib}M")


def gather_limits(root: Path = Path("/")) -> Limits:
    """Return how many processors and how much memory this process may use.

    Linux control groups limit a batch job or a container, but mksquashfs ignores them. This function reads
    both versions of control groups, v1 and v2. Tests pass another folder than / as `root`.
    """
    processors = process.count_processors()
    memory_limits = []
    for folder in _list_group_folders(root):
        quota = _read_cpu_quota(folder)
        if quota is not None:
            processors = min(processors, max(1, int(quota)))
        limit = _read_memory_limit(folder)
        if limit is not None:
            memory_limits.append(limit)
    return Limits(processors=processors, memory_bytes=min(memory_limits, default=None))


def _list_group_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups and of all their parent groups.

    The folders contain files with the limits. Every level may set a limit, so the folder
    ``/sys/fs/cgroup/slurm/job_1`` is followed by ``/sys/fs/cgroup/slurm``.
    """
    for mount, group in _find_groups(root):
        for folder in (group, *group.parents):
            if folder.is_dir():
                yield folder
            if folder == mount:  # the folders above it belong to no group
                break


def _find_groups(root: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the folders of this process's control groups, each as ``(top folder, folder of the group)``.

    The top folder is the mount of the group's hierarchy: ``/sys/fs/cgroup`` in v2, and a folder named after
    its controllers in v1, such as ``/sys/fs/cgroup/cpu,cpuacct``.
    """
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        match = _GROUP.fullmatch(line)
        if match is None:
            continue
        # In v1, each controller has its own hierarchy, and only two of them limit what is needed here. In v2,
        # there is one hierarchy, and its line in /proc/self/cgroup names no controller.
        controllers = match["controllers"]
        is_v2 = not controllers
        has_limits = not {"cpu", "memory"}.isdisjoint(controllers.split(","))
        if not is_v2 and not has_limits:
            continue
        mount = root / "sys/fs/cgroup" / controllers  # an empty name adds no folder
        group = mount / match["path"].lstrip("/")
        # In a container, the path may lead out of the mounted part, as in "/../..". Then only the top folder
        # of the mount is visible.
        if ".." in group.parts:
            group = mount
        yield mount, group


def _read_cpu_quota(folder: Path) -> float | None:
    """Return the number of processors that a control group may use, or None if it has no limit.

    The kernel expresses the limit as a quota of CPU time per period: ``200000 100000`` means 2 processors.
    """
    v2_fields = _read_text(folder / "cpu.max").split()
    v1_fields = [_read_text(folder / "cpu.cfs_quota_us"), _read_text(folder / "cpu.cfs_period_us")]
    for fields in (v2_fields, v1_fields):
        # A group has the files of one version only. The fields of the other one are missing or empty.
        if len(fields) != 2:
            continue
        quota_us, period_us = map(parse_digits, fields)
        if quota_us is not None and period_us:
            return quota_us / period_us
    return None


def _read_memory_limit(folder: Path) -> int | None:
    """Return the memory limit of a control group in bytes, or None if it has no limit."""
    # The first name is that of cgroup v2, where the value can be "max". The second is that of v1.
    for name in ("memory.max", "memory.limit_in_bytes"):
        value = parse_digits(_read_text(folder / name))
        if value is not None and value < _UNLIMITED_V1:
            return value
    return None


def _read_text(path: Path) -> str:
    """Return the text of a file of the kernel, or ``""`` if the file cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
