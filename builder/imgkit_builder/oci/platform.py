"""Determine the architectures whose programs this machine can run.

These are its own architecture, and those for which the kernel has an emulator (qemu). The kernel starts the
emulator by a handler in binfmt_misc.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

# The folder with the handlers, relative to the root folder.
BINFMT = Path("proc/sys/fs/binfmt_misc")

_KERNEL_NAMES: Mapping[str, tuple[str, ...]] = {
    "amd64": ("x86_64", "amd64"),
    "arm64": ("aarch64", "arm64"),
    "ppc64le": ("ppc64le",),
    "riscv64": ("riscv64",),
}
"""Name of an architecture in OCI -> its names in the output of ``uname -m``. Linux uses the first of these
names."""


def kernel_names(arch: str) -> tuple[str, ...]:
    """Return the texts that ``uname -m`` may print on a machine with the OCI architecture `arch`."""
    return _KERNEL_NAMES.get(arch, (arch,))


def arch_of(machine: str) -> str:
    """Return the OCI architecture for `machine`, the output of ``uname -m``.

    An unknown name is returned unchanged.
    """
    for arch, names in _KERNEL_NAMES.items():
        if machine in names:
            return arch
    return machine


def host_arch() -> str:
    """Return the OCI architecture of this machine, such as ``amd64`` or ``arm64``."""
    return arch_of(platform.machine().lower())


def host_platform() -> str:
    """Return the platform of images that run on this machine without an emulator, such as ``linux/amd64``."""
    return f"linux/{host_arch()}"


def runs_here(arch: str, *, root: Path = Path("/")) -> bool:
    """Return whether programs for `arch` run in containers on this machine, natively or emulated."""
    return arch == host_arch() or not emulator_problem(arch, root=root)


def emulator_problem(arch: str, *, root: Path = Path("/")) -> str:
    """Return why the kernel cannot emulate `arch` inside containers, or "" if it can.

    `root` replaces ``/`` in tests.
    """
    # qemu's handlers have the first of the names, the one that Linux uses: qemu-aarch64 for arm64.
    linux_name, *_ = kernel_names(arch)
    handler = root / BINFMT / f"qemu-{linux_name}"
    try:
        lines = handler.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return f"there is no emulator: {handler} is missing"
    # The first line of a handler's file is "enabled" or "disabled". A later line is "flags: OCF", for
    # example.
    if lines[:1] != ["enabled"]:
        return f"the emulator is switched off: {handler} begins with {lines[:1]}"
    flags = ""
    for line in lines:
        if line.startswith("flags:"):
            flags = line.removeprefix("flags:").strip()
    # With the flag F, the kernel opens the emulator when the handler is registered. Without F, the kernel
    # looks for the emulator inside the container, where it does not exist.
    if "F" not in flags:
        return f"the emulator does not work in containers: {handler} has flags {flags!r}, without F"
    return ""
