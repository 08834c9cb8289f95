"""Parse and print the sizes of memory that users request, for each node or for each GPU of a node."""

from __future__ import annotations

import re
from dataclasses import dataclass

from imgkit_entrypoints.errors import UsageError

_SIZE = re.compile(r"([1-9][0-9]{0,6})([MGT])i?B?", re.IGNORECASE)  # "110G", "440GB", "512M", "1TiB"
# Units are powers of 1024, with and without an "i": 1 GB is 1024 MiB. Slurm, PBS and Docker use them in this
# way.
_MIB_OF_UNIT = {"M": 1, "G": 1024, "T": 1024**2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory that a job requests on each node."""

    size_MiB: int
    """The size that the user requested, for each node or for each GPU. See `gpus`."""
    gpus: int = 0
    """Number of GPUs on a node if `size_MiB` is the size for each GPU.

    0 means that it is the size for the whole node.
    """

    @property
    def node_MiB(self) -> int:
        """The memory on each node in MiB."""
        return self.size_MiB * (self.gpus or 1)

    @property
    def flag(self) -> str:
        """The flag of ``imgkit run`` that requests this memory."""
        return "--mem-per-gpu" if self.gpus else "--mem"

    @property
    def option(self) -> str:
        """The flag with its value, as a user types them: ``--mem 440G``."""
        return f"{self.flag} {size_text(self.size_MiB)}"


def parse_size(text: str, *, where: str) -> int:
    """Convert a size such as ``110G``, ``440GB`` or ``512M`` to MiB: ``2G`` -> 2048.

    Parameters
    ----------
    where : the flag whose value is `text`, for the error.

    Raises
    ------
    UsageError : `text` is not a size, for example because it has no unit.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a size of memory", where=where, hint="write 110G, 440GB or 512M")
    number, unit = match.groups()
    return int(number) * _MIB_OF_UNIT[unit.upper()]


def size_text(size_MiB: int) -> str:
    """Return a size as text, in G if that is a whole number and otherwise in M.

    2048 -> ``2G``, 1536 -> ``1536M``.
    """
    size_GiB, remaining_MiB = divmod(size_MiB, 1024)
    return f"{size_MiB}M" if remaining_MiB else f"{size_GiB}G"
