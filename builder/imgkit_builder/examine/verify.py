"""Compares an archive, .sif, .sqsh or delta with its sidecars and records. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from imgkit_builder.archive import read, sidecar
from imgkit_builder.archive.read import Contents, HashedFile, SelectedImage
from imgkit_builder.archive.sidecar import Sidecar
from imgkit_builder.base.checks import Check, Verdict
from imgkit_builder.base.progress import Reporter, Silent
from imgkit_builder.delta import descriptor, source, tree
from imgkit_builder.delta.descriptor import Delta
from imgkit_builder.oci import manifest
from imgkit_builder.sif import image as sif
from imgkit_builder.sif import sqsh
from imgkit_builder.sif.image import ImgkitRecord, SifImage
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, ToolMissing, UsageError

_AGAIN = "copy it again (rsync -P resumes), or save it again"


def verify(
    path: Path, *, report: Reporter | None = None, unpack_limit_bytes: int | None = None
) -> tuple[Check, ...]:
    """Check the archive, .sif, .sqsh or delta at `path`; reads it once, and extracts or changes nothing.

    An archive that unpacks to more than `unpack_limit_bytes` fails (default: `compressed.Allowance`).

    Raises
    ------
    UsageError : the file is missing, or is neither an image archive, a .sif, a .sqsh nor a delta.
    ToolMissing : a zstd archive needs the ``zstd`` program.
    """
    report = report or Silent()
    try:
        with files.open_regular(path) as file:
            start = file.read(512)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if sif.is_sif(path):
        return tuple(_sif_checks(path, report))
    if descriptor.is_delta(path):
        return tuple(_delta_checks(path, report))
    if sqsh.is_sqsh(path):
        return tuple(_sqsh_checks(path, report))
    compress = read.archive_compression(path)
    if compress is None:
        raise UsageError(
            "neither an image archive (.tar, .tar.gz, .tar.zst) nor a .sif, .sqsh or delta",
            where=str(path),
            hint=f"it begins with {start[:16]!r}" if start else "it is empty: copy it again",
        )
    report.stage(f"read {path.name}")
    held = read.digest_archive(path, compress=compress, report=report, unpack_limit_bytes=unpack_limit_bytes)
    return _archive_checks(path, held)


def _archive_checks(path: Path, held: Contents) -> tuple[Check, ...]:
    first = [checksum(path, held.sha256, held.size_bytes)]
    image = held.image
    if image is None:
        return (*first, Check(name="archive", verdict="fail", found=held.problem, hint=_AGAIN))
    return (
        *first,
        _structure(held, image),
        _id(image),
        _layers(image),
        _against_sidecar(path, held, image),
    )


def checksum(path: Path, actual: str, size_bytes: int) -> Check:
    """Compare the digest of `path` with both sidecars."""
    about = f"{actual} ({size_bytes} bytes)"
    try:
        listed = sidecar.read_sha256(path)
        described = sidecar.read(path)
    except UsageError as error:
        return Check(name="sha256", verdict="fail", found=str(error.what), hint=f"{error.where}: {_AGAIN}")
    stated = {
        sidecar.sha256_path(path).name: listed,
        sidecar.json_path(path).name: described.archive.sha256 if described else None,
    }
    if listed is None and described is not None:
        what, mend = sidecar.incomplete(path, actual, described)
        return Check(name="sha256", verdict="fail", found=what, hint=mend)
    wrong = {name: digest for name, digest in stated.items() if digest not in (None, actual)}
    if wrong:
        expected = ", ".join(f"{name} says {digest}" for name, digest in wrong.items())
        size = described.archive.size_bytes if described else size_bytes
        short = f"; the file has {size_bytes} of {size} bytes" if size != size_bytes else ""
        return Check(name="sha256", verdict="fail", found=f"is {actual}, {expected}{short}", hint=_AGAIN)
    if listed is None and described is None:
        name = sidecar.sha256_path(path).name
        return Check(
            name="sha256", verdict="warn", found=f"{about}; {name} is missing", hint=f"copy {name} as well"
        )
    return Check(name="sha256", verdict="ok", found=about)


def _structure(held: Contents, image: SelectedImage[HashedFile]) -> Check:
    if held.wrong_blobs:
        return Check(name="archive", verdict="fail", found=f"damaged: {held.wrong_blobs[0]}", hint=_AGAIN)
    tags = ", ".join(image.names) or "no tag"
    return Check(name="archive", verdict="ok", found=f"one image, {_platform(image)}, {tags}")


def _id(image: SelectedImage[HashedFile]) -> Check:
    if image.id_fault:
        return Check(name="image id", verdict="fail", found=image.id_fault, hint=_AGAIN)
    return Check(name="image id", verdict="ok", found=image.config.image_id)


def _layers(image: SelectedImage[HashedFile]) -> Check:
    name = "layers"
    if image.count_fault:
        return Check(name=name, verdict="fail", found=image.count_fault, hint=_AGAIN)
    for (layer, file), diff_id in zip(image.layers, image.config.diff_ids, strict=True):
        if file.diff_id not in ("", diff_id):
            found = f"{layer} has {file.diff_id}, the configuration says {diff_id}"
            return Check(name=name, verdict="fail", found=found, hint=_AGAIN)
    unread = sum(not file.diff_id for _, file in image.layers)
    found = f"{len(image.layers)}, as the configuration lists them"
    if unread:
        return Check(
            name=name, verdict="warn", found=f"{found}; {unread} compressed with zstd were not checked"
        )
    return Check(name=name, verdict="ok", found=found)


def _against_sidecar(path: Path, held: Contents, image: SelectedImage[HashedFile]) -> Check:
    try:
        described = sidecar.read(path)
    except UsageError as error:
        return Check(name="sidecar", verdict="fail", found=error.what, hint=str(error.where))
    if described is None:
        absent = sidecar.json_path(path).name
        return Check(name="sidecar", verdict="skip", found=f"{absent} is missing")
    wrong = _differences(described, held, image)
    verdict: Verdict = "fail" if wrong else "ok"
    found = wrong or f"{described.image.tag}, {described.image.platform}, {described.image.id}"
    hint = "the sidecar belongs to another archive: copy both again" if wrong else ""
    return Check(name="sidecar", verdict=verdict, found=found, hint=hint)


def _differences(described: Sidecar, held: Contents, image: SelectedImage[HashedFile]) -> str:
    stated = described.image
    if stated.id != image.config.image_id:
        return f"it describes image {stated.id}, the archive has {image.config.image_id}"
    if stated.diff_ids != image.config.diff_ids:
        return "its list of layers differs from that in the archive"
    if stated.platform != _platform(image):
        return f"it says {stated.platform}, the archive has {_platform(image)}"
    if described.archive.size_bytes != held.size_bytes:
        return f"it says {described.archive.size_bytes} bytes, the archive has {held.size_bytes}"
    return ""


def _platform(image: SelectedImage[HashedFile]) -> str:
    return f"{image.config.os}/{image.config.arch}"


def _sif_checks(path: Path, report: Reporter) -> Iterator[Check]:
    if sidecar.sha256_path(path).exists():
        report.stage(f"read {path.name}")
        yield checksum(path, read.sha256(path, report=report), path.stat().st_size)
    try:
        image = sif.read(path)
    except CheckFailed as error:
        yield Check(name="header", verdict="fail", found=error.what, hint=error.hint or _AGAIN)
        return
    squashed = sif.squashfs(image)
    if image.root is None or squashed is None:
        yield Check(name="header", verdict="fail", found="it has no squashfs root partition", hint=_AGAIN)
        return
    about = f"{image.arch}, {len(image.descriptors)} objects, squashfs with {squashed.compressor}"
    yield Check(name="header", verdict="ok", found=about)
    report.stage(f"read {path.name}")
    root_sha256 = sif.root_sha256(path, advance=report.advance)
    root = _content("root partition", image.record, root_sha256)
    yield root
    yield from _deltas(image, report)
    if root.verdict == "fail":
        yield Check(name="manifest", verdict="skip", found="not checked: the root partition is damaged")
    else:
        yield _baked_manifest(path)


def _sqsh_checks(path: Path, report: Reporter) -> Iterator[Check]:
    report.stage(f"read {path.name}")
    try:
        squashed, record = sqsh.structure(path), sqsh.record(path)
        root_sha256, whole = sqsh.digests(path, advance=report.advance)
    except CheckFailed as error:
        yield Check(name="squashfs", verdict="fail", found=error.what, hint=error.hint or _AGAIN)
        return
    yield checksum(path, whole, path.stat().st_size)
    arch = record.arch if record else "unknown architecture"
    yield Check(name="squashfs", verdict="ok", found=f"{arch}, with {squashed.compressor}")
    content = _content("content", record, root_sha256)
    yield content
    if content.verdict == "fail":
        yield Check(name="manifest", verdict="skip", found="not checked: the squashfs is damaged")
    else:
        yield _baked_manifest(path)


def _delta_checks(path: Path, report: Reporter) -> Iterator[Check]:
    try:
        delta = descriptor.read(path)
    except CheckFailed as error:
        yield Check(name="delta", verdict="fail", found=error.what, hint=error.hint or _AGAIN)
        return
    report.stage(f"read {path.name}")
    yield _delta("delta", delta, descriptor.sha256(path, delta, advance=report.advance))


def _deltas(image: SifImage, report: Reporter) -> Iterator[Check]:
    """Compare each delta in a .sif with its recorded digest."""
    if image.record is None or not (image.record.deltas or image.overlays):
        return
    try:
        stack = descriptor.stack(image.path)
    except CheckFailed as error:
        yield Check(name="deltas", verdict="fail", found=error.what, hint=error.hint or _AGAIN)
        return
    for number, (delta, place) in enumerate(zip(stack.deltas, stack.partitions, strict=True), 1):
        digest = descriptor.sha256(image.path, delta, start=place.offset, advance=report.advance)
        yield _delta(f"delta {number}", delta, digest)


def _delta(name: str, delta: Delta, actual: str) -> Check:
    if actual != delta.sha256:
        found = f"its squashfs has sha256 {actual}, the record says {delta.sha256}"
        return Check(name=name, verdict="fail", found=found, hint=_AGAIN)
    found = f"sha256 {actual}, as recorded; {delta.source}, {delta.image_id}, over {delta.base}"
    return Check(name=name, verdict="ok", found=found)


def _content(name: str, record: ImgkitRecord | None, actual: str) -> Check:
    """Compare the digest of a squashfs with the record of its .sif or .sqsh."""
    if record is None:
        found = f"sha256 {actual}; the file has no record of imgkit"
        return Check(
            name=name, verdict="warn", found=found, hint="another tool made it: imgkit sif writes a record"
        )
    if record.root_sha256 != actual:
        found = f"has sha256 {actual}, the record says {record.root_sha256}"
        return Check(name=name, verdict="fail", found=found, hint="copy it again, or convert it again")
    found = f"sha256 {actual}, as recorded; from {record.source or record.image_id}, by {record.runtime}"
    return Check(name=name, verdict="ok", found=found)


def _baked_manifest(path: Path) -> Check:
    """Read the manifest with imgkit's own reader, which runs nothing, and compare it with the file."""
    name = "manifest"
    try:
        found_arch, stack = source.in_file(path)
        text = tree.content(stack, manifest.MANIFEST_JSON)
        if text is None:
            absent = f"no {manifest.MANIFEST_JSON}: imgkit did not build this image"
            return Check(name=name, verdict="warn", found=absent)
        baked = manifest.from_json(text.decode())
    except ToolMissing as error:
        return Check(name=name, verdict="skip", found=f"not read: {error.what}", hint=error.hint or "")
    except UnicodeDecodeError as error:
        return Check(
            name=name, verdict="fail", found=f"{manifest.MANIFEST_JSON} is not text: {error}", hint=_AGAIN
        )
    except ImgkitError as error:
        return Check(name=name, verdict="fail", found=error.what, hint=error.hint or "")
    arch = baked.platform.partition("/")[2]
    if found_arch not in (arch, "unknown"):
        found = f"it says {baked.platform}, but the file is for {found_arch}"
        return Check(name=name, verdict="fail", found=found, hint="convert it again")
    base = f"{baked.base.name}{' (a stand-in)' if baked.base.standin else ''}"
    return Check(
        name=name,
        verdict="ok",
        found=f"recipe {baked.recipe} on {base}, {baked.platform}, imgkit {baked.imgkit}",
    )
