"""Make a delta file from an engine's image and the file manifest of a .sif, which may be on a remote."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive.tar_read import REGULAR
from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.delta import descriptor
from imgkit_builder.delta.changes import Changes
from imgkit_builder.delta.descriptor import BaseSif, Delta
from imgkit_builder.sif import convert, entries, file_manifest, image, squash
from imgkit_builder.sif.conversion import Clock, ConversionJob, Options, Stage, choose_compression
from imgkit_builder.sif.entries import EngineImage, ImageEntry
from imgkit_builder.sif.file_manifest import BakedFactsCollector, FileRecord, ManifestWriter
from imgkit_builder.sif.image import SifImage
from imgkit_builder.sif.runtime import log_file
from imgkit_builder.sif.workspace import tmp_base, workspace
from imgkit_entrypoints import __version__
from imgkit_entrypoints.errors import CheckFailed, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaBase:
    """What has to be known of a .sif to make a delta over it."""

    name: str
    """Its name, for messages."""
    identity: BaseSif
    arch: str
    diff_ids: tuple[str, ...]
    compressor: str
    """``zstd`` or ``gzip``: a machine that mounts one mounts the other."""
    records: Mapping[str, FileRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenDelta:
    """A finished delta."""

    path: Path
    size_bytes: int
    delta: Delta
    changed: int
    """Number of new or different entries, without folders."""
    deleted: int
    """Number of whiteouts."""
    stages: tuple[Stage, ...]


def base_from(sif: SifImage, manifest: bytes | None) -> DeltaBase:
    """Return the base that is the .sif `sif`, with its file manifest.

    Raises
    ------
    CheckFailed : imgkit did not write its files, or the manifest or its delta is damaged.
    UsageError : it has a delta already.
    """
    identity, record = descriptor.plain_base_of(sif), sif.record
    if record is None or not manifest:
        raise CheckFailed(
            "it has no file manifest: a runtime wrote its files",
            where=str(sif.path),
            hint="convert the image with mksquashfs: imgkit sif IMAGE --writer imgkit",
        )
    return DeltaBase(
        name=sif.path.name,
        identity=identity,
        arch=sif.arch,
        diff_ids=record.diff_ids,
        compressor=record.compression.partition(" ")[0],
        records=file_manifest.parse_records(manifest, where=str(sif.path)),
    )


def local_base(path: Path) -> DeltaBase:
    """Return the base that is the .sif `path`. Raises as `base_from` does."""
    return base_from(image.read(path), file_manifest.read(path))


def make(new: EngineImage, base: DeltaBase, target: Path, options: Options, report: Reporter) -> WrittenDelta:
    """Write the changes of the image `new` over `base` to the delta `target`, which is whole or absent.

    Raises
    ------
    UsageError : the target is another kind of file, or `base` holds this very image.
    CheckFailed : `base` is for another architecture or has no common layer; the export is damaged.
    ToolMissing, ToolFailed : as in a conversion.
    """
    target, config = target.absolute(), new.config
    check_target(target)
    _check_images(new, base)
    compression = choose_compression(
        None, "zstd" if base.compressor == "zstd" else "gzip", zstd_error=squash.choose().zstd_error
    )
    with workspace(target, tmp_base(target, options.tmpdir)) as work, log_file(target.stem) as log:
        clock = Clock(report)
        job = ConversionJob(
            tool=None, options=options, compression=compression, work=work, clock=clock, log=log
        )
        opened = entries.OpenImage(name=new.name, config=config, size_bytes=new.size_bytes, files=new)
        facts, manifest = BakedFactsCollector(), ManifestWriter(work.folder / "manifest")
        mark = ImageEntry(names=(descriptor.INSIDE,), kind=REGULAR, mode=0o644)
        mark = mark.with_content(descriptor.inside(config.image_id))

        @contextlib.contextmanager
        def reopen() -> Iterator[Iterator[ImageEntry]]:
            with convert.file_entries(opened, job) as stream:
                yield itertools.chain(facts.observed(stream), (mark,))

        changes = Changes(base.records)
        squash.write(manifest.recorded(changes.entries(reopen)), job, work.part)
        data = manifest.finish(facts.facts(config.search_path))
        delta = _described(new, base, work.part, data)
        descriptor.append(work.part, data, delta)
        clock.stage("make durable")
        files.publish(work.part, target)
        clock.finish()
    return WrittenDelta(
        path=target,
        size_bytes=target.stat().st_size,
        delta=delta,
        changed=changes.changed,
        deleted=changes.deleted,
        stages=tuple(clock.stages),
    )


def check_target(target: Path) -> None:
    """Raise UsageError if a delta cannot be written to `target`."""
    if not target.parent.is_dir():
        raise UsageError(
            f"the folder {target.parent} does not exist", where="--output", hint=f"mkdir -p {target.parent}"
        )
    if target.exists() and not descriptor.is_delta(target):
        raise UsageError(
            "target exists and is not a delta; refusing to overwrite it",
            where=str(target),
            hint="choose another name with -o",
        )


def _check_images(new: EngineImage, base: DeltaBase) -> None:
    if new.config.arch != base.arch:
        raise CheckFailed(f"it is for {base.arch}, but {new.name} is for {new.config.arch}", where=base.name)
    if new.config.image_id == base.identity.image_id:
        raise UsageError(
            f"it already holds this image ({new.name}): there is no difference",
            where=base.name,
            hint="build the changed image first: imgkit build RECIPE",
        )
    if new.config.diff_ids[:1] != base.diff_ids[:1]:
        size = f"{new.size_bytes / 1e6:.1f} MB before compression"
        raise CheckFailed(
            f"{new.name} shares no layer with it: a delta would be the whole image",
            where=base.name,
            hint=f"a full transfer, {size}: imgkit sif {new.name}",
        )


def _described(new: EngineImage, base: DeltaBase, path: Path, manifest: bytes) -> Delta:
    size_bytes = path.stat().st_size
    with files.open_regular(path) as stream:
        sha256 = files.sha256(stream, 0, size_bytes)
    return Delta(
        image_id=new.config.image_id,
        diff_ids=new.config.diff_ids,
        arch=new.config.arch,
        created=new.config.created,
        source=new.name,
        base=base.identity,
        sha256=sha256,
        size_bytes=size_bytes,
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        manifest_bytes=len(manifest),
        imgkit=__version__,
    )
