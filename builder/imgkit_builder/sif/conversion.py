"""The values of a conversion: source, options, compression, the program that squashes, the work in progress.

Every step of `convert` gets one `ConversionJob`. `SquashOrder` and `Squasher` are what the programs of
`squashers` have in common.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, Literal, Protocol, TextIO, runtime_checkable

from imgkit_builder.archive import compressed
from imgkit_builder.base.progress import Reporter
from imgkit_builder.oci.config import ImageConfig
from imgkit_builder.sif.image import ImgkitRecord
from imgkit_builder.sif.mksquashfs import Limits
from imgkit_builder.sif.runtime import Capabilities, RuntimeTool, find_runtime, run, scratch_env
from imgkit_builder.sif.workspace import Workspace
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import CompressionChoice

WriterChoice = Literal["auto", "imgkit", "runtime"]
Format = Literal["sif", "sqsh"]
"""What is written: a .sif, or the .sqsh that enroot, pyxis and ch-run start."""

PACKED_SHARE = 0.5
"""Size of a squashfs per image byte, with a margin: measured 0.26 to 0.4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An image archive: docker's two layouts or OCI, plain, gzip or zstd."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class OciFolder:
    """An OCI image layout folder."""

    path: Path


@runtime_checkable
class EngineImage(Protocol):
    """An image of a Docker engine; ``engine.LocalImage`` is one."""

    @property
    def name(self) -> str:
        """A name for messages: tag or id."""

    @property
    def config(self) -> ImageConfig:
        """Its OCI configuration."""

    @property
    def size_bytes(self) -> int:
        """Size of its layers, uncompressed."""

    def save(self) -> AbstractContextManager[Iterator[bytes]]:
        """Stream ``docker save``."""

    def export(self) -> AbstractContextManager[Iterator[bytes]]:
        """Stream ``docker export`` of a container made of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piped:
    """An image archive that comes through a pipe."""

    stream: BinaryIO
    name: str = "-"

    @property
    def path(self) -> Path:
        """Its name as a path, for messages."""
        return Path(self.name)

    def chunks(self) -> Generator[bytes, None, None]:
        """The plain bytes; a compressed archive is decompressed on the way."""
        start = self.stream.read(compressed.CHUNK_BYTES)
        raw = itertools.chain([start], iter(lambda: self.stream.read(compressed.CHUNK_BYTES), b""))
        return compressed.unpacked(raw, compressed.kind_of(start), name="standard input")


Source = Archive | OciFolder | EngineImage | Piped


def name_of(source: Source, tags: Sequence[str] = ()) -> str:
    """The name of the image for people; `tags` are those that an archive states."""
    if isinstance(source, EngineImage):
        return source.name
    return tags[0] if tags else source.path.name.split(".tar", 1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to convert."""

    runtime: str | None = None
    """Command name or path; None means singularity, else apptainer."""
    module_hint: str | None = None
    """The line that provides the runtime on the system."""
    format: Format = "sif"
    compression: CompressionChoice = "auto"
    writer: WriterChoice = "auto"
    """Who writes the file; ``auto``: imgkit where something squashes a tar, else the runtime."""
    direct: bool | None = None
    """Convert an `EngineImage` from its export stream, not from its layers; None: where that works."""
    tmpdir: Path | None = None
    unpack_limit_bytes: int | None = None
    """Most bytes that an archive may unpack to; None: 100 times its size, and at least 1 GB."""
    force: bool = False
    """Convert even if the target is up to date; replace a target of another format."""
    test: bool = True
    """Run ``true`` in the new .sif."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a conversion."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A whole and checked .sif or .sqsh."""

    path: Path
    format: Format = "sif"
    size_bytes: int
    arch: str
    record: ImgkitRecord
    up_to_date: bool
    """Nothing was done: the existing file has the same image, runtime and compression."""
    stages: tuple[Stage, ...]
    log: Path | None


@dataclass(slots=True)
class Clock:
    """A reporter that passes everything on and records the seconds of each stage."""

    report: Reporter
    stages: list[Stage] = field(default_factory=list)
    _name: str = ""
    _began: float = 0.0

    def stage(self, text: str) -> None:
        """A new stage begins; the one before is over."""
        self.finish()
        self._name, self._began = text, time.monotonic()
        self.report.stage(text)

    def finish(self) -> None:
        """The last stage is over."""
        if self._name:
            self.stages.append(Stage(name=self._name, seconds=time.monotonic() - self._began))
        self._name = ""

    def advance(self, done_bytes: int, total_bytes: int | None = None) -> None:
        """Pass on."""
        self.report.advance(done_bytes, total_bytes)

    def line(self, text: str) -> None:
        """Pass on."""
        self.report.line(text)

    def note(self, text: str) -> None:
        """Pass on."""
        self.report.note(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionJob:
    """One conversion."""

    tool: RuntimeTool | None
    """None: there is no runtime here, and nothing so far needs one."""
    options: Options
    compression: Compression
    work: Workspace
    clock: Clock
    log: TextIO
    squasher: Squasher | None = None
    """None: the first of `squashers` that works here."""

    def run(
        self,
        *arguments: str | Path,
        folder: Path | None = None,
        on_line: Callable[[str], None] | None = None,
        namespace: bool = False,
    ) -> str:
        """Run the runtime in the workspace; returns its output. `namespace` is as in `runtime.run`."""
        tool = self.tool or find_runtime(self.options.runtime, module_hint=self.options.module_hint)
        self.log.write(f"$ {tool.path} {' '.join(map(str, arguments))}\n")
        return run(
            tool,
            [str(one) for one in arguments],
            folder=folder or self.work.folder,
            env=scratch_env(self.work.folder),
            on_line=on_line or self.clock.line,
            log=self.log,
            namespace=namespace,
        ).output


def cache_flags(tool: RuntimeTool) -> tuple[str, ...]:
    """Flags that switch the runtime's cache off: it would keep a second copy of every layer."""
    return ("--disable-cache",) if tool.capabilities.disable_cache else ()


def folder_name(image: str) -> str:
    """A folder name for `image`; the runtime writes it into the label that names the source of the .sif."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", image).strip("._-")[:100] or "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class SquashOrder:
    """A squashfs to be written."""

    target: Path
    offset: int
    """Byte of `target` at which it begins."""
    created_s: int
    """Time of the squashfs and of its root folder."""
    compression: Compression
    folder: Path
    """Folder of temporary files."""
    log: TextIO
    on_line: Callable[[str], None]
    """Receives the lines of the program."""
    note: Callable[[str], None]
    """Receives a sentence for the user about what is lost."""


class Squasher(Protocol):
    """A program that writes a squashfs from a tar."""

    @property
    def note(self) -> str:
        """A sentence for the user: what is done, and why not by the best program; empty for the best."""

    @property
    def lacks_zstd(self) -> str:
        """Why it cannot compress with zstd; empty if it can."""

    @property
    def disk_share(self) -> float:
        """Bytes of its temporary files per byte of the image."""

    def __str__(self) -> str:
        """Name it for people, with its version."""

    def shown(self, order: SquashOrder) -> str:
        """The command that reads the tar, for people."""

    def feed(self, order: SquashOrder) -> AbstractContextManager[IO[bytes]]:
        """Take a whole tar; on leaving, the squashfs is written.

        Raises
        ------
        ToolFailed : a program failed, or said something that is not known to be harmless.
        """


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


def choose_compression(
    capabilities: Capabilities | None, wanted: CompressionChoice, *, lacks_zstd: str
) -> Compression:
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
