"""Input and result of a conversion."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, Literal, Protocol, runtime_checkable

from imgkit_builder.archive import compressed
from imgkit_builder.archive.tarstream import TarLimits
from imgkit_builder.base.progress import Reporter
from imgkit_builder.oci.config import ImageConfig
from imgkit_builder.sif.image import ImgkitRecord

CompressionChoice = Literal["auto", "zstd", "gzip"]


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

    def folders(self, diff_ids: Sequence[str]) -> tuple[Path, ...] | None:
        """Folders in which the engine keeps the layers `diff_ids`; None where they cannot be read."""

    def why_unreadable(self) -> str:
        """The reason why `folders` gives None."""

    def copied(self, layers: int) -> tuple[str, ...] | None:
        """Targets of the last `layers` layers where they only copy; None where they do more."""

    def fetch(self, paths: Sequence[str], folder: Path) -> tuple[Path | None, ...]:
        """Write a tar of each of `paths` into `folder`; the result has None for a missing path."""

    def other(self, image_id: str, diff_ids: Sequence[str]) -> EngineImage | None:
        """Find another image of the same engine by its id or else by its layers; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """An image in a registry; the runtime pulls it."""

    reference: str


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


Source = Archive | OciFolder | EngineImage | Registry | Piped


def name_of(source: Source, tags: Sequence[str] = ()) -> str:
    """The name of the image for people; `tags` are those that an archive states."""
    if isinstance(source, EngineImage):
        return source.name
    if isinstance(source, Registry):
        return source.reference
    return tags[0] if tags else source.path.name.split(".tar", 1)[0]


class Helper(Protocol):
    """An engine that squashes in a container; ``engine.EngineHelper`` is one."""

    def __str__(self) -> str:
        """Product and version of the engine."""

    def prepare(self, report: Reporter) -> None:
        """Make the image with mksquashfs, unless the engine has it; comes before `feed`."""

    def feed(
        self, options: Sequence[str], target: Path, offset: int, judge: Callable[[int, bool, str], None]
    ) -> AbstractContextManager[IO[bytes]]:
        """Take a whole tar; on leaving, its squashfs lies at byte `offset` of `target`.

        `judge` gets the exit code of mksquashfs, whether it ended early, and what it said.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to convert."""

    runtime: str | None = None
    """Command name or path; None means singularity, else apptainer."""
    module_hint: str | None = None
    """The line that provides the runtime on the system."""
    compression: CompressionChoice = "auto"
    direct: bool | None = None
    """Convert an `EngineImage` from its export stream, not from its layers; None: where that works."""
    tmpdir: Path | None = None
    unpack_limit_bytes: int | None = None
    """Most bytes that an archive may unpack to; None: 100 times its size, and at least 1 GB."""
    limits: TarLimits = field(default_factory=TarLimits)
    """What a layer, or an engine's export, may ask of its reader."""
    force: bool = False
    """Convert even if the target is up to date; replace a target that is no .sif."""
    test: bool = True
    """Run ``true`` in the new .sif."""
    helper: Callable[[], Helper | None] = lambda: None
    """Finds an engine that squashes; asked only where this machine cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a conversion."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A whole and checked .sif."""

    path: Path
    size_bytes: int
    arch: str
    record: ImgkitRecord
    up_to_date: bool
    """Nothing was done: the existing file has the same image, runtime and compression."""
    stages: tuple[Stage, ...]
    log: Path | None
