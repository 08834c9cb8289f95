"""Compares an archive, .sif, .sqsh or delta with its sidecars and records. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import disk_usage

from imgkit_builder.archive import read, sidecar
from imgkit_builder.archive.read import Contents, HashedFile, SelectedImage
from imgkit_builder.archive.sidecar import Sidecar
from imgkit_builder.base import files
from imgkit_builder.base.checks import Check, Verdict
from imgkit_builder.base.progress import Reporter, Silent
from imgkit_builder.base.sizes import size_text
from imgkit_builder.delta import descriptor
from imgkit_builder.delta.descriptor import Delta
from imgkit_builder.oci import manifest
from imgkit_builder.sif import file_manifest, sqsh
from imgkit_builder.sif import image as sif
from imgkit_builder.sif.file_manifest import FileRecord
from imgkit_builder.sif.image import ImgkitRecord, SifImage
from imgkit_builder.sif.unsquash import ListedFile, Squashfs
from imgkit_builder.sif.workspace import scratch
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, ToolFailed, ToolMissing, UsageError

_AGAIN = "copy it again (rsync -P resumes), or save it again"


def verify(
    path: Path,
    *,
    each_file: bool = False,
    report: Reporter | None = None,
    unpack_limit_bytes: int | None = None,
) -> tuple[Check, ...]:
    """Check the archive, .sif, .sqsh or delta at `path`; changes nothing.

    Parameters
    ----------
    each_file : unpack a .sif or .sqsh to a temporary folder, and compare each file with the file manifest.
    unpack_limit_bytes : an archive that unpacks to more fails (default: `compressed.Allowance`).

    Raises
    ------
    UsageError : the file is missing, or is neither an image archive, a .sif, a .sqsh nor a delta; or
        `each_file` of something else than a .sif or .sqsh, or without room for its files.
    ToolMissing : a zstd archive needs the ``zstd`` program.
    """
    report = report or Silent()
    try:
        with files.open_regular(path) as file:
            start = file.read(512)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if sif.is_sif(path):
        return tuple(_sif_checks(path, report, each_file=each_file))
    if sqsh.is_sqsh(path):
        return tuple(_sqsh_checks(path, report, each_file=each_file))
    if each_file:
        message = "only a .sif or .sqsh has a file manifest to compare with"
        raise UsageError(message, where=str(path), hint="leave out --files")
    if descriptor.is_delta(path):
        return tuple(_delta_checks(path, report))
    compress = read.archive_compression(path)
    if compress is None:
        raise UsageError(
            "neither an image archive (.tar, .tar.gz, .tar.zst) nor a .sif, .sqsh or delta",
            where=str(path),
            hint=f"it begins with {start[:16]!r}" if start else "it is empty: copy it again",
        )
    report.stage(f"read {path.name}")
    contents = read.digest_archive(
        path, compress=compress, report=report, unpack_limit_bytes=unpack_limit_bytes
    )
    return _archive_checks(path, contents)


def _archive_checks(path: Path, contents: Contents) -> tuple[Check, ...]:
    first = [checksum(path, contents.sha256, contents.size_bytes)]
    image = contents.image
    if image is None:
        return (*first, Check(name="archive", verdict="fail", found=contents.problem, hint=_AGAIN))
    return (
        *first,
        _structure(contents, image),
        _id(image),
        _layers(image),
        _against_sidecar(path, contents, image),
    )


def checksum(path: Path, actual: str, size_bytes: int) -> Check:
    """Compare the digest of `path` with both sidecars."""
    summary = f"{actual} ({size_bytes} bytes)"
    try:
        listed = sidecar.read_sha256(path)
        described = sidecar.read(path)
    except UsageError as error:
        return Check(name="sha256", verdict="fail", found=str(error.what), hint=f"{error.where}: {_AGAIN}")
    recorded = {
        sidecar.sha256_path(path).name: listed,
        sidecar.json_path(path).name: described.archive.sha256 if described else None,
    }
    if listed is None and described is not None:
        message, mend = sidecar.incomplete(path, actual, described)
        return Check(name="sha256", verdict="fail", found=message, hint=mend)
    wrong = {name: digest for name, digest in recorded.items() if digest not in (None, actual)}
    if wrong:
        expected = ", ".join(f"{name} says {digest}" for name, digest in wrong.items())
        size = described.archive.size_bytes if described else size_bytes
        short = f"; the file has {size_bytes} of {size} bytes" if size != size_bytes else ""
        return Check(name="sha256", verdict="fail", found=f"is {actual}, {expected}{short}", hint=_AGAIN)
    if listed is None and described is None:
        name = sidecar.sha256_path(path).name
        return Check(
            name="sha256", verdict="warn", found=f"{summary}; {name} is missing", hint=f"copy {name} as well"
        )
    return Check(name="sha256", verdict="ok", found=summary)


def _structure(contents: Contents, image: SelectedImage[HashedFile]) -> Check:
    if contents.wrong_blobs:
        return Check(name="archive", verdict="fail", found=f"damaged: {contents.wrong_blobs[0]}", hint=_AGAIN)
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
            text = f"{layer} has {file.diff_id}, the configuration says {diff_id}"
            return Check(name=name, verdict="fail", found=text, hint=_AGAIN)
    unread = sum(not file.diff_id for _, file in image.layers)
    text = f"{len(image.layers)}, as the configuration lists them"
    if unread:
        return Check(
            name=name, verdict="warn", found=f"{text}; {unread} compressed with zstd were not checked"
        )
    return Check(name=name, verdict="ok", found=text)


def _against_sidecar(path: Path, contents: Contents, image: SelectedImage[HashedFile]) -> Check:
    try:
        described = sidecar.read(path)
    except UsageError as error:
        return Check(name="sidecar", verdict="fail", found=error.what, hint=str(error.where))
    if described is None:
        absent = sidecar.json_path(path).name
        return Check(name="sidecar", verdict="skip", found=f"{absent} is missing")
    wrong = _differences(described, contents, image)
    verdict: Verdict = "fail" if wrong else "ok"
    text = wrong or f"{described.image.tag}, {described.image.platform}, {described.image.id}"
    hint = "the sidecar belongs to another archive: copy both again" if wrong else ""
    return Check(name="sidecar", verdict=verdict, found=text, hint=hint)


def _differences(described: Sidecar, contents: Contents, image: SelectedImage[HashedFile]) -> str:
    recorded = described.image
    if recorded.id != image.config.image_id:
        return f"it describes image {recorded.id}, the archive has {image.config.image_id}"
    if recorded.diff_ids != image.config.diff_ids:
        return "its list of layers differs from that in the archive"
    if recorded.platform != _platform(image):
        return f"it says {recorded.platform}, the archive has {_platform(image)}"
    if described.archive.size_bytes != contents.size_bytes:
        return f"it says {described.archive.size_bytes} bytes, the archive has {contents.size_bytes}"
    return ""


def _platform(image: SelectedImage[HashedFile]) -> str:
    return f"{image.config.os}/{image.config.arch}"


def _sif_checks(path: Path, report: Reporter, *, each_file: bool) -> Iterator[Check]:
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
    summary = f"{image.arch}, {len(image.descriptors)} objects, squashfs with {squashed.compressor}"
    yield Check(name="header", verdict="ok", found=summary)
    report.stage(f"read {path.name}")
    root_sha256 = sif.root_sha256(path, advance=report.advance)
    root = _content("root partition", image.record, root_sha256)
    yield root
    yield from _applied_delta(image, report)
    if root.verdict == "fail":
        yield Check(name="manifest", verdict="skip", found="not checked: the root partition is damaged")
    else:
        yield _baked_manifest(path, image.arch)
        yield from _files(Squashfs(path=path, offset=image.root.offset), report, each_file=each_file)


def _sqsh_checks(path: Path, report: Reporter, *, each_file: bool) -> Iterator[Check]:
    report.stage(f"read {path.name}")
    try:
        squashed, record = sqsh.structure(path), sqsh.record(path)
        root_sha256, file_sha256 = sqsh.digests(path, advance=report.advance)
    except CheckFailed as error:
        yield Check(name="squashfs", verdict="fail", found=error.what, hint=error.hint or _AGAIN)
        return
    yield checksum(path, file_sha256, path.stat().st_size)
    arch = record.arch if record else "unknown architecture"
    yield Check(name="squashfs", verdict="ok", found=f"{arch}, with {squashed.compressor}")
    content = _content("content", record, root_sha256)
    yield content
    if content.verdict == "fail":
        yield Check(name="manifest", verdict="skip", found="not checked: the squashfs is damaged")
    else:
        yield _baked_manifest(path, record.arch if record else "unknown")
        yield from _files(Squashfs(path=path), report, each_file=each_file)


def _delta_checks(path: Path, report: Reporter) -> Iterator[Check]:
    try:
        delta = descriptor.read(path)
        descriptor.manifest(path, delta)
    except CheckFailed as error:
        yield Check(name="delta", verdict="fail", found=error.what, hint=error.hint or _AGAIN)
        return
    report.stage(f"read {path.name}")
    yield _delta(delta, descriptor.sha256(path, delta, advance=report.advance))


def _applied_delta(image: SifImage, report: Reporter) -> Iterator[Check]:
    """Compare the delta in a .sif with its recorded digest."""
    if image.record is None or not (image.record.delta_sha256 or image.overlays):
        return
    try:
        delta = descriptor.applied(image)
    except CheckFailed as error:
        yield Check(name="delta", verdict="fail", found=error.what, hint=error.hint or _AGAIN)
        return
    if delta is not None:
        start = image.overlays[0].offset
        yield _delta(delta, descriptor.sha256(image.path, delta, start=start, advance=report.advance))


def _delta(delta: Delta, actual: str) -> Check:
    if actual != delta.sha256:
        text = f"its squashfs has sha256 {actual}, the record says {delta.sha256}"
        return Check(name="delta", verdict="fail", found=text, hint=_AGAIN)
    text = f"sha256 {actual}, as recorded; {delta.source}, {delta.image_id}, over {delta.base}"
    return Check(name="delta", verdict="ok", found=text)


def _files(squashfs: Squashfs, report: Reporter, *, each_file: bool) -> Iterator[Check]:
    """Compare the file manifest with its recorded digest, and with `each_file` each file with it."""
    name, path = "files", squashfs.path
    try:
        data = file_manifest.read(path)
        if data is None:
            if each_file:
                text = "it has no file manifest: imgkit did not write its files"
                yield Check(name=name, verdict="skip", found=text)
            return
        records = file_manifest.parse_records(data, where=str(path))
        wrong = list(_wrong_files(squashfs, records, report)) if each_file else []
    except (CheckFailed, ToolFailed) as error:
        yield Check(name=name, verdict="fail", found=error.what, hint=error.hint or _AGAIN)
        return
    except ToolMissing as error:
        yield Check(name=name, verdict="skip", found=f"not read: {error.what}", hint=error.hint or "")
        return
    if wrong:
        text = f"{len(wrong)} of {len(records)} differ from the file manifest: {', '.join(sorted(wrong)[:5])}"
        yield Check(name=name, verdict="fail", found=text, hint="convert the image again")
        return
    compared = "each is as the file manifest says" if each_file else "--files compares each"
    yield Check(name=name, verdict="ok", found=f"{len(records)} in the file manifest; {compared}")


def _wrong_files(squashfs: Squashfs, records: Mapping[str, FileRecord], report: Reporter) -> Iterator[str]:
    """Yield the names in the squashfs or in the manifest that the other one lacks, or states otherwise."""
    report.stage(f"unpack {squashfs.path.name}")
    expected = {
        f"{name} -> {record.content}" if record.type == "l" else name: (name, record)
        for name, record in records.items()
    }
    # unsquashfs lists a name with a line break on two lines: only its content is compared.
    broken = {text: expected.pop(text) for text in list(expected) if "\n" in text}
    cut = {text.partition("\n")[0] for text in broken}
    with scratch(squashfs.path) as folder:
        needed, free = sum(record.size_bytes for record in records.values()), disk_usage(folder).free
        if free < needed:
            raise UsageError(
                f"{size_text(free)} are free in {folder.parent}, and the files have {size_text(needed)}",
                hint="export IMGKIT_TMPDIR=DIR with a folder on a larger disk",
            )
        squashfs.unpack(folder / "files")
        for file in squashfs.listed():
            if file.path in cut and file.path not in expected:
                continue
            name, record = expected.pop(file.path, (file.path, None))
            if record is None or _differs(file, record) or not _has_content(folder / "files" / name, record):
                yield f"/{name}"
        for name, record in broken.values():
            if not _has_content(folder / "files" / name, record):
                yield f"/{name}"
    yield from (f"/{name}" for name, _ in expected.values())


def _differs(file: ListedFile, record: FileRecord) -> bool:
    size = record.content if record.type in ("c", "b") else str(record.size_bytes)
    return (file.mode, file.uid, file.gid) != (record.mode_text, record.uid, record.gid) or (
        record.type in ("f", "c", "b") and file.size != size
    )


def _has_content(path: Path, record: FileRecord) -> bool:
    if record.type != "f":
        return record.type in ("c", "b") or os.path.lexists(path)  # only root makes devices
    if not path.is_file():
        return False
    # An image has files that nobody but root may read.
    path.chmod(0o600)
    with files.open_regular(path) as stream:
        return files.sha256(stream, 0, record.size_bytes) == record.content


def _content(name: str, record: ImgkitRecord | None, actual: str) -> Check:
    """Compare the digest of a squashfs with the record of its .sif or .sqsh."""
    if record is None:
        text = f"sha256 {actual}; the file has no record of imgkit"
        return Check(
            name=name, verdict="warn", found=text, hint="another tool made it: imgkit sif writes a record"
        )
    if record.root_sha256 != actual:
        text = f"has sha256 {actual}, the record says {record.root_sha256}"
        return Check(name=name, verdict="fail", found=text, hint="copy it again, or convert it again")
    text = f"sha256 {actual}, as recorded; from {record.source or record.image_id}, by {record.runtime}"
    return Check(name=name, verdict="ok", found=text)


def _baked_manifest(path: Path, arch: str) -> Check:
    """Read the manifest of the build, and compare it with the file."""
    name = "manifest"
    try:
        facts = descriptor.baked_facts(path)
        if not facts.manifest:
            absent = f"no {manifest.MANIFEST_JSON}: imgkit did not build this image"
            return Check(name=name, verdict="warn", found=absent)
        built = manifest.from_json(facts.manifest)
    except ToolMissing as error:
        return Check(name=name, verdict="skip", found=f"not read: {error.what}", hint=error.hint or "")
    except ImgkitError as error:
        return Check(name=name, verdict="fail", found=error.what, hint=error.hint or "")
    if arch not in (built.platform.partition("/")[2], "unknown"):
        text = f"it says {built.platform}, but the file is for {arch}"
        return Check(name=name, verdict="fail", found=text, hint="convert it again")
    base = f"{built.base.name}{' (a stand-in)' if built.base.standin else ''}"
    return Check(
        name=name,
        verdict="ok",
        found=f"recipe {built.recipe} on {base}, {built.platform}, imgkit {built.imgkit}",
    )
