"""How the root partition is compressed."""

from __future__ import annotations

import os
from dataclasses import dataclass

from imgkit_builder.sif.limits import Limits
from imgkit_builder.sif.options import CompressionChoice
from imgkit_builder.sif.runtime import Capabilities
from imgkit_entrypoints.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The chosen compressor."""

    name: str
    """``zstd``, ``gzip``, or ``runtime``, which takes no options and compresses as it is configured."""
    level: int = 0
    options: tuple[str, ...] = ()
    """Options of mksquashfs."""
    block_bytes: int = 128 << 10
    note: str = ""
    """A sentence for the user."""

    def __str__(self) -> str:
        return f"{self.name} {self.level}" if self.level else self.name


# Of a 754 MB torch folder, in CPU seconds and MB: gzip 9 (the runtimes' default) 50, 196; gzip 6 18, 197;
# zstd 3 2.9, 198; zstd 15 (the default level) 57, 171. A start reads small pieces, each from a block that is
# decompressed for it: `import torch` takes 3.6 CPU seconds from blocks of 1 MiB (228 MB), 2.8 from 256 KiB
# (239 MB), and 2.7 from 128 KiB (251 MB).
ZSTD = Compression(
    name="zstd",
    level=3,
    options=("-comp", "zstd", "-Xcompression-level", "3", "-b", "256K"),
    block_bytes=256 << 10,
)
GZIP = Compression(name="gzip", level=6, options=("-comp", "gzip", "-Xcompression-level", "6"))

_OLD_KERNEL = "this kernel ({}) cannot mount zstd squashfs; 4.14 can"


def choose(capabilities: Capabilities | None, wanted: CompressionChoice, *, lacks_zstd: str) -> Compression:
    """zstd if this machine can write and mount it, else gzip.

    `capabilities` are those of the runtime that compresses; None where imgkit squashes. `lacks_zstd` says
    why the program that squashes cannot compress with zstd; empty where it can.

    Raises
    ------
    UsageError : zstd was requested and is not possible.
    """
    if capabilities is not None and not capabilities.mksquashfs_args:
        if wanted == "zstd":
            raise UsageError(
                "this runtime has no --mksquashfs-args (Apptainer from 1.4 has it), so it cannot use zstd",
                where="--compression zstd",
                hint="leave --compression out, or convert on the build host with --from daemon",
            )
        return Compression(
            name="runtime",
            note="this runtime compresses as it is configured (gzip 9 by default: slow), a thread for each "
            "processor of the node; an admin sets `mksquashfs procs` and `mksquashfs mem` in its conf file",
        )
    if wanted == "gzip":
        return GZIP
    obstacle = lacks_zstd if kernel_reads_zstd() else _OLD_KERNEL.format(os.uname().release)
    if obstacle and wanted == "zstd":
        raise UsageError(obstacle, where="--compression zstd", hint="--compression gzip")
    return GZIP if obstacle else ZSTD


def arguments_for_runtime(compression: Compression, limits: Limits) -> str:
    """The value of ``--mksquashfs-args``, one word."""
    return " ".join((*compression.options, *limits.mksquashfs_options()))


def kernel_reads_zstd(release: str | None = None) -> bool:
    """Whether this kernel (4.14 and later) can mount zstd squashfs; True if the release cannot be parsed."""
    words = (release or os.uname().release).split(".")
    try:
        return (int(words[0]), int(words[1])) >= (4, 14)
    except (ValueError, IndexError):
        return True
