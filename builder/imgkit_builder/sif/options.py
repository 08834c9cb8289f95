"""What a conversion is asked for, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imgkit_builder.archive.config import ImageConfig
from imgkit_builder.sif.image import Record

CompressionChoice = Literal["auto", "zstd", "gzip"]

ChunkStream = Callable[[], AbstractContextManager[Iterator[bytes]]]
LayerFolders = Callable[[Sequence[str]], tuple[Path, ...] | None]
Copied = Callable[[int], tuple[str, ...] | None]
Fetch = Callable[[Sequence[str], Path], tuple[Path | None, ...]]
ImageFinder = Callable[[str], "EngineImage | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An image archive: docker's two layouts or OCI, plain, gzip or zstd."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class OciFolder:
    """An OCI image layout folder."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineImage:
    """An image of a Docker engine; the functions open its streams, so that nothing here imports docker."""

    name: str
    config: ImageConfig
    size_bytes: int
    save: ChunkStream
    """``docker save``."""
    export: ChunkStream
    """``docker export`` of a container made of it."""
    folders: LayerFolders
    """Where the engine keeps the layers of these digests; None where that cannot be read."""
    copied: Copied
    """Targets of its last N layers where those only copy; None where they do more."""
    fetch: Fetch
    """Tars of paths in it, written into a folder; None for each that it has not."""
    other: ImageFinder
    """Another image of the same engine, by its id; None where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """An image in a registry that the runtime pulls by itself."""

    reference: str


Source = Archive | OciFolder | EngineImage | Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to convert."""

    runtime: str | None = None
    """Command name or path; None looks for singularity, then apptainer."""
    module_hint: str | None = None
    """The line that provides the runtime on the system."""
    compression: CompressionChoice = "auto"
    direct: bool = False
    """An `EngineImage` by its export stream (fast) instead of its layers."""
    tmpdir: Path | None = None
    force: bool = False
    """Convert even what is up to date; replace a target that is no .sif."""
    test: bool = True
    """Execute ``true`` in the new .sif."""


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
    record: Record
    up_to_date: bool
    """Nothing was done: the file that is there is of the same image, runtime and compression."""
    stages: tuple[Stage, ...]
    log: Path | None
