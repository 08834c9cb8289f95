"""The architectures whose programs this machine can run.

These are its own, and those for which its kernel has a handler in binfmt_misc, which starts an emulator
(qemu).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

# The folder of the handlers, relative to the root folder.
BINFMT = Path("proc/sys/fs/binfmt_misc")

_KERNEL_NAMES: Mapping[str, tuple[str, ...]] = {
    "amd64": ("x86_64", "amd64"),
    "arm64": ("aarch64", "arm64"),
    "ppc64le": ("ppc64le",),
    "riscv64": ("riscv64",),
}
"""The name of an architecture in OCI, and its names in ``uname -m``. The first of these is that of Linux."""


def kernel_names(arch: str) -> tuple[str, ...]:
    """Return what ``uname -m`` may print on a machine of the OCI architecture `arch`."""
    return _KERNEL_NAMES.get(arch, (arch,))


def arch_of(machine: str) -> str:
    """Return the name in OCI of `machine`, which ``uname -m`` prints.

    An unknown name is returned unchanged.
    """
    for arch, names in _KERNEL_NAMES.items():
        if machine in names:
            return arch
    return machine


def host_arch() -> str:
    """Return the architecture of this machine, as `arch_of` names it: ``amd64`` or ``arm64``."""
    return arch_of(platform.machine().lower())


def host_platform() -> str:
    """Return the platform of images that run here without an emulator, for example ``linux/amd64``."""
    return f"linux/{host_arch()}"


def runs_here(arch: str, *, root: Path = Path("/")) -> bool:
    """Return whether programs of `arch` run in containers here, natively or emulated."""
    return arch == host_arch() or not emulator_problem(arch, root=root)


def emulator_problem(arch: str, *, root: Path = Path("/")) -> str:
    """Return why the kernel cannot emulate `arch` inside containers, or "" if it can.

    `root` replaces / in tests.
    """
    linux_name, *_ = kernel_names(arch)
    handler = root / BINFMT / f"qemu-{linux_name}"
    try:
        lines = handler.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return f"there is no emulator: {handler} is missing"
    # The first line of a handler's file is "enabled" or "disabled", and a later one such as "flags: OCF".
    if lines[:1] != ["enabled"]:
        return f"the emulator is switched off: {handler} begins with {lines[:1]}"
    flags = ""
    for line in lines:
        if line.startswith("flags:"):
            flags = line.removeprefix("flags:").strip()
    # With the flag F, the kernel opens the emulator when the handler is registered. Without it, the kernel
    # looks for the emulator inside the container, where it is not.
    if "F" not in flags:
        return f"the emulator does not work in containers: {handler} has flags {flags!r}, without F"
    return ""
