"""Health of GPUs, ports and PCIe links: read for dist-doctor only, because a launch has no time for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from imgkit_entrypoints.facts.host_facts import HostFacts
from imgkit_entrypoints.facts.reader import Reader

COMMAND_S = 30.0
NVIDIA_SMI = "/commands/nvidia-smi.xml"
XIDS = "/commands/xid.txt"
"""Files of a tree (``IMGKIT_ROOT``) with what the commands printed."""
ERRORS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
"""Counters of bad cables and switches (Documentation/ABI/stable/sysfs-class-infiniband)."""
GTps_Gbps = ((64.0, 242 / 256), (8.0, 128 / 130), (0.0, 8 / 10))
"""Least GT/s per lane, and the share that is data: PCIe's codings since generations 6, 3 and 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """Link of a GPU or a NIC to its slot."""

    device: str
    path: str
    width: int
    most_width: int
    speed: str
    """Content of the file: ``32.0 GT/s PCIe``."""

    @property
    def rate_Gbps(self) -> float | None:
        """Rate in one direction, in 1e9 bit/s."""
        match = re.match(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) GT/s", self.speed)
        lane = float(match[1]) if match else 0.0
        return next(lane * share * self.width for least, share in GTps_Gbps if lane >= least) or None


def links(reader: Reader, facts: HostFacts) -> tuple[PcieLink, ...]:
    """Return the PCIe links of all GPUs and NICs, where sysfs shows them; a virtual function has none."""
    addresses = {gpu.address: gpu.address for gpu in facts.gpu_devices}
    paths = {nic.name: nic.pci for nic in facts.rdma} | {nic.name: nic.pci for nic in facts.cxi}
    addresses |= {name: path.rsplit("/", 1)[-1] for name, path in paths.items() if path}
    links = []
    for name, address in addresses.items():
        path = f"/sys/bus/pci/devices/{address}"
        width, most = (reader.number(f"{path}/{which}_link_width") for which in ("current", "max"))
        speed = reader.text(f"{path}/current_link_speed") or ""
        if width and most:
            links.append(PcieLink(device=name, path=path, width=width, most_width=most, speed=speed))
    return tuple(links)


def port_errors(reader: Reader, facts: HostFacts) -> dict[str, dict[str, int]]:
    """Return the error counters that are not zero, by the name of their port."""
    errors: dict[str, dict[str, int]] = {}
    for port in (port for device in facts.rdma for port in device.ports):
        for name in ERRORS:
            if count := reader.number(f"{port.path}/counters/{name}"):
                errors.setdefault(port.name, {})[name] = count
    return errors


def nvidia_smi(reader: Reader) -> str:
    """Return nvidia-smi's report as XML; empty where it is not available."""
    if not reader.live:
        return reader.text(NVIDIA_SMI) or ""
    return _output("nvidia-smi", "-q", "-x")


def xids(reader: Reader) -> str:
    """Return the kernel log's lines with errors of GPUs; empty where it cannot be read."""
    if not reader.live:
        return reader.text(XIDS) or ""
    return "\n".join(line for line in _output("dmesg").splitlines() if "NVRM: Xid" in line)


def _run(*command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=COMMAND_S,
        env=env,
        check=False,
    )


def _output(*command: str) -> str:
    try:
        result = _run(*command)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout if result.returncode == 0 else ""


def load_fault(path: str, library_path: str | None = None) -> str:
    """Return why the dynamic linker cannot load a library here; empty if it can.

    Parameters
    ----------
    library_path : replaces LD_LIBRARY_PATH.
    """
    env = None if library_path is None else {**os.environ, "LD_LIBRARY_PATH": library_path}
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    try:
        result = _run(sys.executable, "-I", "-c", code, path, env=env)
    except subprocess.TimeoutExpired:
        return f"loading it takes more than {COMMAND_S:g} s"
    if result.returncode == 0:
        return ""
    return (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
