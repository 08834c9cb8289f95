"""The memory of a job: sizes as users write them, and the size on each node."""

from __future__ import annotations

import re
from dataclasses import dataclass

from imgkit_entrypoints.errors import UsageError

_SIZE = re.compile(r"([1-9][0-9]{0,6})([MGT])i?B?", re.IGNORECASE)  # "110G", "440GB", "512M", "1TiB"
_MIB_OF_UNIT = {"M": 1, "G": 1 << 10, "T": 1 << 20}
"""Units are powers of 1024, with and without an i: Slurm, PBS and Docker count so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory that a job requests on each node."""

    size_MiB: int
    """On each node, or for each GPU."""
    gpus: int = 0
    """The GPUs of a node, each of which adds `size_MiB`; 0: the size is that of a node."""

    @property
    def node_MiB(self) -> int:
        """The memory on each node."""
        return self.size_MiB * (self.gpus or 1)

    @property
    def flag(self) -> str:
        """The flag that requests this memory."""
        return "--mem-per-gpu" if self.gpus else "--mem"

    @property
    def option(self) -> str:
        """The flag with its value, as a user types them: ``--mem 440G``."""
        return f"{self.flag} {size_text(self.size_MiB)}"


def parse_size(text: str, *, where: str) -> int:
    """Return a size such as ``110G``, ``440GB`` or ``512M`` in MiB.

    Raises
    ------
    UsageError : `text` has another form, for example no unit.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a size of memory", where=where, hint="write 110G, 440GB or 512M")
    number, unit = match.groups()
    return int(number) * _MIB_OF_UNIT[unit.upper()]


def size_text(size_MiB: int) -> str:
    """Return a size in G, or in M if it is no whole number of G: ``440G``, ``1536M``."""
    size_GiB, rest_MiB = divmod(size_MiB, 1 << 10)
    return f"{size_MiB}M" if rest_MiB else f"{size_GiB}G"
