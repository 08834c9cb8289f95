"""Look up which versions of CUDA a branch of NVIDIA's driver supports, and which versions it can run.

A driver *supports* all versions of CUDA up to that of its own release. It can also *run* later minor versions
of the same major version, which NVIDIA calls minor-version compatibility. For example, driver 535 supports
CUDA 12.2, and runs a program that was built with CUDA 12.9.
"""

from __future__ import annotations

import re

_DATA_CENTRE = re.compile(
    r"\b(Tesla|P4|P40|P100|V100S?|T4|A2|A10G?|A16|A30|A40|A100X?|A800|L4|L20|L40S?|H20|H100|H200|H800|GH200|"
    r"B100|B200|B300|GB200|GB300)\b"
)
"""Names of GPUs for data centres. The driver shows them in a text such as ``NVIDIA H100 80GB HBM3``."""
# If a name contains one of these words, the GPU is not for data centres, although the name may match the list
# above.
_WORKSTATION = re.compile(r"\b(RTX|GTX|GeForce|Quadro|TITAN|Active)\b")

CudaVersion = tuple[int, int]
"""Major and minor version of CUDA, such as ``(12, 9)``."""

_RELEASES: tuple[tuple[int, CudaVersion], ...] = (
    *((450, (11, 0)), (455, (11, 1)), (460, (11, 2)), (465, (11, 3)), (470, (11, 4)), (495, (11, 5))),
    *((510, (11, 6)), (515, (11, 7)), (520, (11, 8)), (525, (12, 0)), (530, (12, 1)), (535, (12, 2))),
    *((545, (12, 3)), (550, (12, 4)), (555, (12, 5)), (560, (12, 6)), (565, (12, 7)), (570, (12, 8))),
    *((575, (12, 9)), (580, (13, 0)), (590, (13, 1))),
)
"""The first driver branch that supports each version of CUDA. The oldest branch comes first.

Source: NVIDIA, release notes of the CUDA Toolkit, table of drivers.
"""
NEWEST_BRANCH = _RELEASES[-1][0]
"""The newest driver branch in the table. It is unknown which versions later branches support."""
SOURCE = "NVIDIA, CUDA Compatibility, minor version compatibility, table 1"
"""The document that lists the first driver for each major version of CUDA, for messages."""


def parse_cuda(text: str) -> CudaVersion | None:
    """Return the version at the beginning of a text, such as (12, 9) for ``12.9.1``, or None."""
    match = re.match(r"([0-9]{1,5})\.([0-9]{1,5})", text)
    if match is None:
        return None
    return int(match[1]), int(match[2])


def supported_cuda(branch: int) -> CudaVersion:
    """Return the newest CUDA version that a driver branch supports, such as (12, 2) for 535.

    If the branch is older than the table, return (0, 0).
    """
    supported = (0, 0)
    for first_branch, cuda in _RELEASES:
        if first_branch <= branch:
            supported = cuda
    return supported


def first_driver(cuda: str) -> int | None:
    """Return the first driver branch that can run a version of CUDA: 525 for ``12.9``, or 580 for ``13``.

    That is the branch of the first release of the major version. Return None if the major version is not in
    the table.
    """
    major = cuda.partition(".")[0]
    for branch, (released_major, _) in _RELEASES:
        if str(released_major) == major:
            return branch
    return None


def is_data_centre_gpu(model: str) -> bool:
    """Return whether the driver's name of a GPU is that of a GPU for data centres.

    NVIDIA supports forward compatibility, which is a libcuda that is newer than the driver, only on these
    GPUs.
    """
    return _DATA_CENTRE.search(model) is not None and _WORKSTATION.search(model) is None
