"""Read the health of GPUs, ports and PCIe links.

Only dist-doctor uses this module. Commands such as nvidia-smi are too slow for the start of a run.
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
"""Files with the output of the commands, in a saved tree of another machine's files (``IMGKIT_ROOT``)."""
ERRORS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
"""Counters that grow with a bad cable or switch (Linux, Documentation/ABI/stable/sysfs-class-infiniband)."""
_PCIE_ENCODINGS = ((64.0, 242 / 256), (8.0, 128 / 130), (0.0, 8 / 10))
"""Lowest speed of a lane in GT/s (transfers per second), and the share of the transfers that carries data.

The share depends on PCIe's encoding, which changed in generation 6 (242 of 256 bytes) and 3 (128b/130b).
Generation 1 introduced 8b/10b. The fastest generation comes first.
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

        The kernel reports the transfers of one lane, such as ``16.0 GT/s``. Some of these transfers carry no
        data, because PCIe encodes the data with additional bits.
        """
        match = re.match(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) GT/s", self.speed)
        if match is None:
            return None
        lane_GTps = float(match[1])
        for least_GTps, data_share in _PCIE_ENCODINGS:  # the fastest encoding comes first
            if lane_GTps >= least_GTps:
                return lane_GTps * data_share * self.width or None  # 0 lanes: unknown
        return None


def read_links(reader: Reader, facts: HostFacts) -> tuple[PcieLink, ...]:
    """Return the PCIe links of all GPUs and NICs for which sysfs shows a link.

    A virtual function (a share of a card) has no link of its own, so it is left out.
    """
    # The PCI address by the name of the device. The name of a GPU is its address.
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
        # A virtual function shows no width, or 0.
        if width and most_width:
            links.append(PcieLink(device=name, path=path, width=width, most_width=most_width, speed=speed))
    return tuple(links)


def read_port_errors(reader: Reader, facts: HostFacts) -> dict[str, dict[str, int]]:
    """Return the error counters above zero of each RDMA port: ``{"mlx5_0:1": {"symbol_error": 4}}``."""
    errors: dict[str, dict[str, int]] = {}
    for device in facts.rdma:
        for port in device.ports:
            for name in ERRORS:
                count = reader.number(f"{port.path}/counters/{name}")
                if count:
                    errors.setdefault(port.name, {})[name] = count
    return errors


def run_nvidia_smi(reader: Reader) -> str:
    """Return the report of nvidia-smi as XML, or an empty text if the program does not exist or fails."""
    if not reader.live:
        return reader.text(NVIDIA_SMI) or ""
    return _output("nvidia-smi", "-q", "-x")


def read_xids(reader: Reader) -> str:
    """Return the lines of the kernel log with errors of GPUs, which NVIDIA's driver calls Xids.

    If there are no such lines, or this process may not read the log, return an empty text.
    """
    if not reader.live:
        return reader.text(XIDS) or ""
    return "\n".join(line for line in _output("dmesg").splitlines() if "NVRM: Xid" in line)


def _run(*command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command for at most `COMMAND_S` seconds, and return its output and exit code.

    The command's standard input is empty, so that it cannot wait for a user.
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
    """Return what a command prints, or an empty text if it does not exist, fails, or takes too long."""
    try:
        result = _run(*command)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout if result.returncode == 0 else ""


def load_problem(path: str, library_path: str | None = None) -> str:
    """Return why the dynamic linker cannot load the library `path`, or "" if it can.

    The library is loaded in another process, because its constructors may do anything, such as ending the
    process.

    Parameters
    ----------
    library_path : value of LD_LIBRARY_PATH in that process, or None for the value in this process.
    """
    env = None if library_path is None else {**os.environ, "LD_LIBRARY_PATH": library_path}
    # -I isolates Python from the user's PYTHONPATH and site packages.
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    try:
        process = _run(sys.executable, "-I", "-c", code, path, env=env)
    except subprocess.TimeoutExpired:
        return f"loading it takes more than {COMMAND_S:g} s"
    if process.returncode == 0:
        return ""
    lines = process.stderr.strip().splitlines()  # the last line of a traceback is the error
    return lines[-1] if lines else f"exit code {process.returncode}"
