"""Processors and memory that a child may use: mksquashfs looks at the machine, not at the job.

Inside a Slurm or PBS job, or a container, it starts a thread per processor of the whole node and takes a
quarter of the node's memory. The job is then killed (apptainer issue 2601, singularity issues 5434 and 4397).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import process
from imgkit_entrypoints.arguments import digits

_UNLIMITED_V1 = 1 << 60
"""cgroup v1 writes a huge page-rounded number where there is no limit."""
_LEAST_MEMORY_BYTES = 128 << 20
_MOST_MEMORY_BYTES = 512 << 20
"""More makes no difference to its speed, and imgkit and mksquashfs together stay below 1 GiB."""


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


def gather(root: Path = Path("/")) -> Limits:
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
