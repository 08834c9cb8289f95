"""NVIDIA's drivers: which version of CUDA each branch of them supports.

There are two questions, with different answers. A driver *supports* every CUDA up to that of its own
release. A driver also *runs* the later minor versions of the same major version ("minor-version
compatibility"): driver 535 supports CUDA 12.2, and runs a program that was built with CUDA 12.9.
"""

from __future__ import annotations

import re

_DATA_CENTRE = re.compile(
    r"\b(Tesla|P4|P40|P100|V100S?|T4|A2|A10G?|A16|A30|A40|A100X?|A800|L4|L20|L40S?|H20|H100|H200|H800|GH200|"
    r"B100|B200|B300|GB200|GB300)\b"
)
"""GPUs for data centres, by the names that the driver gives them."""
_WORKSTATION = re.compile(r"\b(RTX|GTX|GeForce|Quadro|TITAN|Active)\b")

CudaVersion = tuple[int, int]
"""Major and minor version of CUDA."""

_RELEASES: tuple[tuple[int, CudaVersion], ...] = (
    *((450, (11, 0)), (455, (11, 1)), (460, (11, 2)), (465, (11, 3)), (470, (11, 4)), (495, (11, 5))),
    *((510, (11, 6)), (515, (11, 7)), (520, (11, 8)), (525, (12, 0)), (530, (12, 1)), (535, (12, 2))),
    *((545, (12, 3)), (550, (12, 4)), (555, (12, 5)), (560, (12, 6)), (565, (12, 7)), (570, (12, 8))),
    *((575, (12, 9)), (580, (13, 0)), (590, (13, 1))),
)
"""First driver branch that supports each version of CUDA, oldest first.

Source: NVIDIA, release notes of the CUDA Toolkit, table of drivers.
"""
NEWEST_BRANCH = _RELEASES[-1][0]
"""The newest driver branch of the table; nothing is known about later ones."""
SOURCE = "NVIDIA, CUDA Compatibility, minor version compatibility, table 1"
"""Where the first driver of a major version is stated."""


def parse_cuda(text: str) -> CudaVersion | None:
    """Return the version in ``12.9`` or ``12.9.1``; None for any other text."""
    match = re.match(r"([0-9]{1,5})\.([0-9]{1,5})", text)
    if match is None:
        return None
    return int(match[1]), int(match[2])


def supported_cuda(branch: int) -> CudaVersion:
    """Return the newest CUDA that a driver of `branch` supports; (0, 0) if it is older than the table."""
    supported = (0, 0)
    for first_branch, cuda in _RELEASES:
        if first_branch <= branch:
            supported = cuda
    return supported


def first_driver(cuda: str) -> int | None:
    """Return the first driver branch that runs a version of CUDA, such as ``12.9`` or ``13``.

    That is the branch of the first release of the major version. Return None for a major version that is not
    in the table.
    """
    major = cuda.partition(".")[0]
    for branch, (released_major, _) in _RELEASES:
        if str(released_major) == major:
            return branch
    return None


def is_data_centre_gpu(model: str) -> bool:
    """Return whether a GPU, by the name that the driver gives it, is one for data centres.

    NVIDIA supports forward compatibility, a newer libcuda than the driver's, on these alone.
    """
    return _DATA_CENTRE.search(model) is not None and _WORKSTATION.search(model) is None
