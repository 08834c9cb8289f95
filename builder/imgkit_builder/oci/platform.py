"""Architectures: the host's own, and those that a binfmt_misc handler of the kernel emulates."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

BINFMT = Path("proc/sys/fs/binfmt_misc")

_KERNEL_NAMES: Mapping[str, tuple[str, ...]] = {
    "amd64": ("x86_64", "amd64"),
    "arm64": ("aarch64", "arm64"),
    "ppc64le": ("ppc64le",),
    "riscv64": ("riscv64",),
}
"""Architecture as OCI names it, and what ``uname -m`` calls it; Linux's word comes first."""


def kernel_names(arch: str) -> tuple[str, ...]:
    """Return what ``uname -m`` may print on a machine of the OCI architecture `arch`."""
    return _KERNEL_NAMES.get(arch, (arch,))


def arch_of(machine: str) -> str:
    """Return the OCI architecture of what ``uname -m`` prints; that word itself if it is unknown."""
    for arch, names in _KERNEL_NAMES.items():
        if machine in names:
            return arch
    return machine


def host_arch() -> str:
    """Return ``amd64``, ``arm64``, or the kernel's own word for another architecture."""
    return arch_of(platform.machine().lower())


def host_platform() -> str:
    """Return ``linux/amd64``: the platform of images that run here without an emulator."""
    return f"linux/{host_arch()}"


def runs_here(arch: str, *, root: Path = Path("/")) -> bool:
    """Return whether programs of `arch` run in containers here, natively or emulated."""
    return arch == host_arch() or not emulator_fault(arch, root=root)


def emulator_fault(arch: str, *, root: Path = Path("/")) -> str:
    """Return why the kernel cannot emulate `arch` inside containers; an empty string where it can."""
    handler = root / BINFMT / f"qemu-{kernel_names(arch)[0]}"
    try:
        lines = handler.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return f"there is no emulator: {handler} is missing"
    if not lines or lines[0] != "enabled":
        return f"the emulator is switched off: {handler} begins with {lines[:1]}"
    flags = next((line.partition(":")[2].strip() for line in lines if line.startswith("flags:")), "")
    if "F" not in flags:
        # F: the kernel keeps the emulator open. Otherwise it looks for it inside the container.
        return f"the emulator does not work in containers: {handler} has flags {flags!r}, without F"
    return ""
