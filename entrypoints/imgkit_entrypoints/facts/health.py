"""Read the health of GPUs, ports and PCIe links.

Only dist-doctor uses this module, because a launch has no time for commands such as nvidia-smi.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from imgkit_entrypoints.facts.host_facts import CxiDevice, HostFacts, RdmaDevice
from imgkit_entrypoints.facts.reader import Reader

# Time limit of each command, in seconds.
COMMAND_S = 30.0
NVIDIA_SMI = "/commands/nvidia-smi.xml"
XIDS = "/commands/xid.txt"
"""Files in a tree of files (``IMGKIT_ROOT``) that hold the output of the commands."""
ERRORS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
"""Counters that bad cables and switches increase (Documentation/ABI/stable/sysfs-class-infiniband)."""
GTps_Gbps = ((64.0, 242 / 256), (8.0, 128 / 130), (0.0, 8 / 10))
"""Lowest GT/s of a lane, and the share of it that is data, by PCIe's coding.

PCIe has had a new coding in generation 6 (242 of 256 bytes), 3 (128b/130b) and 1 (8b/10b).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """The link between a GPU or NIC and its slot, as sysfs shows it."""

    device: str
    path: str
    width: int
    most_width: int
    speed: str
    """Content of the file ``current_link_speed``: ``32.0 GT/s PCIe``."""

    @property
    def rate_Gbps(self) -> float | None:
        """Return the rate of the link in one direction in Gbit/s, or None if the speed is unknown.

        The kernel gives a speed such as ``16.0 GT/s`` for each lane. A part of these transfers carries no
        data.
        """
        match = re.match(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) GT/s", self.speed)
        if match is None:
            return None
        lane_GTps = float(match[1])
        for least_GTps, share in GTps_Gbps:
            if lane_GTps >= least_GTps:
                return lane_GTps * share * self.width or None  # 0 lanes: unknown
        return None


def read_links(reader: Reader, facts: HostFacts) -> tuple[PcieLink, ...]:
    """Return the PCIe links of all GPUs and NICs that sysfs shows.

    A virtual function, which is a share of a card, has no link of its own.
    """
    # The PCI address by the name of the device. A GPU has no other name.
    addresses = {gpu.address: gpu.address for gpu in facts.gpu_devices}
    nics: list[RdmaDevice | CxiDevice] = [*facts.rdma, *facts.cxi]
    for nic in nics:
        _, _, address = nic.pci.rpartition("/")
        if address:
            addresses[nic.name] = address
    links = []
    for name, address in addresses.items():
        path = f"/sys/bus/pci/devices/{address}"
        width = reader.number(f"{path}/current_link_width")
        most_width = reader.number(f"{path}/max_link_width")
        speed = reader.text(f"{path}/current_link_speed") or ""
        if width and most_width:
            links.append(PcieLink(device=name, path=path, width=width, most_width=most_width, speed=speed))
    return tuple(links)


def read_port_errors(reader: Reader, facts: HostFacts) -> dict[str, dict[str, int]]:
    """Return the error counters of RDMA ports that are not zero: ``{"mlx5_0:1": {"symbol_error": 4}}``."""
    errors: dict[str, dict[str, int]] = {}
    for device in facts.rdma:
        for port in device.ports:
            for name in ERRORS:
                count = reader.number(f"{port.path}/counters/{name}")
                if count:
                    errors.setdefault(port.name, {})[name] = count
    return errors


def run_nvidia_smi(reader: Reader) -> str:
    """Return the report of nvidia-smi as XML, or an empty text if the program is absent or fails."""
    if not reader.live:
        return reader.text(NVIDIA_SMI) or ""
    return _output("nvidia-smi", "-q", "-x")


def read_xids(reader: Reader) -> str:
    """Return the lines of the kernel log with Xid errors of GPUs, or an empty text.

    The text is also empty if this process may not read the log.
    """
    if not reader.live:
        return reader.text(XIDS) or ""
    return "\n".join(line for line in _output("dmesg").splitlines() if "NVRM: Xid" in line)


def _run(*command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command for at most `COMMAND_S` seconds, and return its output and exit code.

    It gets no input, so that it cannot wait for a user.
    """
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
    """Return what a command prints, or an empty text if it is absent, fails, or takes too long."""
    try:
        result = _run(*command)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout if result.returncode == 0 else ""


def load_problem(path: str, library_path: str | None = None) -> str:
    """Return why the dynamic linker cannot load a library, or "" if it can.

    Another process loads the library, because its constructors may do anything, such as end the process.

    Parameters
    ----------
    library_path : value of LD_LIBRARY_PATH for the load. With None, it stays as in this process.
    """
    env = None if library_path is None else {**os.environ, "LD_LIBRARY_PATH": library_path}
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    try:
        result = _run(sys.executable, "-I", "-c", code, path, env=env)
    except subprocess.TimeoutExpired:
        return f"loading it takes more than {COMMAND_S:g} s"
    if result.returncode == 0:
        return ""
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {result.returncode}"
