"""Compare a file with the digests that were recorded for it.

The file is an archive, a .sif, a .sqsh or a file of packages. The digests are in the file itself, or in small
files beside it (sidecars).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from imgkit_builder.archive import read, sidecar
from imgkit_builder.archive.read import Contents, HashedFile, SelectedImage
from imgkit_builder.archive.sidecar import Sidecar
from imgkit_builder.base import files
from imgkit_builder.base.checks import Check
from imgkit_builder.base.progress import SILENT, Reporter
from imgkit_builder.oci import manifest
from imgkit_builder.packages import record
from imgkit_builder.sif import image as sif
from imgkit_builder.sif import sqsh, unsquash
from imgkit_builder.sif.image import ImgkitRecord
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, ToolMissing, UsageError

# The hint for a damaged file. "rsync -P" resumes a copy, so the part that has arrived is not sent again.
_COPY_AGAIN = "copy it again (rsync -P resumes), or save it again"


def verify_file(
    path: Path, *, report: Reporter = SILENT, unpack_limit_bytes: int | None = None
) -> tuple[Check, ...]:
    """Check the archive, .sif, .sqsh or file of packages at `path`, and return the results.

    The file is not changed.

    Parameters
    ----------
    unpack_limit_bytes : the largest size of an archive once it is unpacked. A larger archive fails the check.
        The default limit is that of `compressed.Allowance`.

    Raises
    ------
    UsageError : the file cannot be read, or is of another kind.
    ToolMissing : a zstd archive needs the ``zstd`` program.
    """
    try:
        with files.open_regular(path) as file:
            start = file.read(16)  # the error message quotes these bytes if the kind of file is unknown
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if record.is_packages(path):
        return tuple(_check_packages(path, report))
    if sif.is_sif(path):
        return tuple(_check_sif(path, report))
    if sqsh.is_sqsh(path):
        return tuple(_check_sqsh(path, report))
    compress = read.archive_compression(path)
    if compress is None:
        hint = f"it begins with {start!r}" if start else "it is empty: copy it again"
        raise UsageError(
            "neither an image archive (.tar, .tar.gz, .tar.zst) nor a .sif or .sqsh",
            where=str(path),
            hint=hint,
        )
    report.stage(f"read {path.name}")
    contents = read.digest_archive(
        path, compress=compress, report=report, unpack_limit_bytes=unpack_limit_bytes
    )
    return tuple(_check_archive(path, contents))


def _check_archive(path: Path, contents: Contents) -> Iterator[Check]:
    """Check an archive whose bytes have all been read and hashed (`contents`).

    The archive is compared with its sidecars, the two small files beside it (``.sha256`` and
    ``.manifest.json``). Its layers and image id are compared with the configuration inside the archive.
    """
    yield check_checksum(path, contents.sha256, contents.size_bytes)
    image = contents.image
    if image is None:
        yield Check("archive", "fail", contents.problem, _COPY_AGAIN)
        return
    tags = ", ".join(image.names) or "no tag"
    # Blobs are the files of the archive. Their names are digests, with which their contents were compared.
    damage = f"damaged: {contents.wrong_blobs[0]}" if contents.wrong_blobs else ""
    yield _make_check("archive", damage, f"one image, {_platform_text(image)}, {tags}")
    yield _make_check("image id", image.id_problem, image.config.image_id)
    yield _check_layers(image)
    yield _check_description(path, contents, image)


def _make_check(name: str, problem: str, fact: str) -> Check:
    """Return a check that failed with the text `problem`, or one that is ok if `problem` is empty.

    The check that is ok shows the text `fact`.
    """
    if problem:
        return Check(name, "fail", problem, _COPY_AGAIN)
    return Check(name, "ok", fact)


def check_checksum(path: Path, actual: str, size_bytes: int) -> Check:
    """Compare `actual`, the SHA-256 digest of the file `path`, with the digests in its two sidecars.

    The sidecars of ``X`` are ``X.sha256`` and ``X.manifest.json``. If both are missing, the check warns. If
    only ``X.sha256`` is missing, the check fails, because a save was probably interrupted. It also fails if
    a sidecar is damaged or has another digest.

    `size_bytes` is the size of the file. It appears in messages, and shows whether a copy is incomplete.
    """
    try:
        recorded_sha256 = sidecar.read_sha256(path)
        description = sidecar.read_sidecar(path)
    except UsageError as error:
        return Check("sha256", "fail", error.what, f"{error.where}: {_COPY_AGAIN}")
    summary = f"{actual} ({size_bytes} bytes)"
    if recorded_sha256 is None:
        return _check_without_checksum(path, actual, summary, description)
    differences = ""
    if recorded_sha256 != actual:
        differences += f", {sidecar.sha256_path(path).name} says {recorded_sha256}"
    archive = description.archive if description else None
    if archive and archive.sha256 != actual:
        differences += f", {sidecar.json_path(path).name} says {archive.sha256}"
    if not differences:
        return Check("sha256", "ok", summary)
    mismatch = f"is {actual}{differences}"
    # A different size shows that a copy was interrupted.
    if archive and archive.size_bytes != size_bytes:
        mismatch += f"; the file has {size_bytes} of {archive.size_bytes} bytes"
    return Check("sha256", "fail", mismatch, _COPY_AGAIN)


def _check_without_checksum(path: Path, actual: str, summary: str, description: Sidecar | None) -> Check:
    """Return the check of a file ``X`` whose ``X.sha256`` is missing. The check fails or warns.

    A save writes ``X.sha256`` last, after ``X.manifest.json``. So if only the latter exists, a save was
    interrupted, and the check fails.

    Parameters
    ----------
    actual : the SHA-256 digest of the file.
    summary : the digest and the size of the file, for the message of the warning.
    description : the content of ``X.manifest.json``, or None if that is missing, too.
    """
    if description is None:
        checksum_name = sidecar.sha256_path(path).name
        finding = f"{summary}; {checksum_name} is missing"
        return Check("sha256", "warn", finding, f"copy {checksum_name} as well")
    problem, repair = sidecar.describe_incomplete(path, actual, description)
    return Check("sha256", "fail", problem, repair)


def _check_layers(image: SelectedImage[HashedFile]) -> Check:
    """Compare the digests of the unpacked layers with the list in the image's configuration.

    Layers that are compressed with zstd are not unpacked here. If there are any, the check warns.
    """
    if image.count_problem:
        return Check("layers", "fail", image.count_problem, _COPY_AGAIN)
    # The configuration names the digest of each layer (its diff id) in the order of the layers.
    for (layer, file), diff_id in zip(image.layers, image.config.diff_ids, strict=True):
        # `file.diff_id` is empty if the layer was not unpacked.
        if file.diff_id not in ("", diff_id):
            problem = f"{layer} has {file.diff_id}, the configuration says {diff_id}"
            return Check("layers", "fail", problem, _COPY_AGAIN)
    summary = f"{len(image.layers)}, as the configuration lists them"
    packed_layers = [layer for layer, file in image.layers if not file.diff_id]
    if packed_layers:
        return Check(
            "layers", "warn", f"{summary}; {len(packed_layers)} compressed with zstd were not checked"
        )
    return Check("layers", "ok", summary)


def _check_description(path: Path, contents: Contents, image: SelectedImage[HashedFile]) -> Check:
    """Compare the image in the archive with its description in ``X.manifest.json``, if that file exists.

    This file beside the archive ``X`` is its sidecar. If it is missing, the check is skipped.
    """
    try:
        description = sidecar.read_sidecar(path)
    except UsageError as error:
        return Check("sidecar", "fail", error.what, str(error.where))
    if description is None:
        return Check("sidecar", "skip", f"{sidecar.json_path(path).name} is missing")
    difference = _describe_difference(description, contents, image)
    if difference:
        # The archive itself may be fine.
        hint = "the sidecar belongs to another archive: copy both again"
        return Check("sidecar", "fail", difference, hint)
    recorded = description.image
    return Check("sidecar", "ok", f"{recorded.tag}, {recorded.platform}, {recorded.id}")


def _describe_difference(description: Sidecar, contents: Contents, image: SelectedImage[HashedFile]) -> str:
    """Return a text about the first difference between the sidecar and the archive, or "" if they agree.

    `description` is the content of the sidecar, the file ``X.manifest.json`` beside the archive.
    """
    recorded = description.image
    if recorded.id != image.config.image_id:
        return f"it describes image {recorded.id}, the archive has {image.config.image_id}"
    if recorded.diff_ids != image.config.diff_ids:
        return "its list of layers differs from that in the archive"
    if recorded.platform != _platform_text(image):
        return f"it says {recorded.platform}, the archive has {_platform_text(image)}"
    recorded_bytes = description.archive.size_bytes
    if recorded_bytes != contents.size_bytes:
        return f"it says {recorded_bytes} bytes, the archive has {contents.size_bytes}"
    return ""


def _platform_text(image: SelectedImage[HashedFile]) -> str:
    """Return the platform of an image in the form ``linux/amd64``."""
    return f"{image.config.os}/{image.config.arch}"


def _check_sif(path: Path, report: Reporter) -> Iterator[Check]:
    """Check a .sif: its checksum file, header, root partition, overlays, and the manifest in its image.

    If the header is damaged, nothing after it is checked. The root partition has the files of the image, and
    its digest is compared with imgkit's record in the .sif.
    """
    if sidecar.sha256_path(path).exists():
        report.stage(f"read {path.name}")
        yield check_checksum(path, read.hash_file(path, report=report), path.stat().st_size)
    try:
        image = sif.read(path)
    except CheckFailed as error:
        yield Check("header", "fail", error.what, error.hint or _COPY_AGAIN)
        return
    superblock = sif.root_superblock(image)
    if superblock is None:
        yield Check("header", "fail", "it has no squashfs root partition", _COPY_AGAIN)
        return
    summary = f"{image.arch}, {len(image.descriptors)} objects, squashfs with {superblock.compressor}"
    yield Check("header", "ok", summary)
    report.stage(f"read {path.name}")
    root = _check_content("root partition", image.record, sif.root_sha256(path, advance=report.advance))
    yield root
    # A runtime would show the files of an overlay in place of the files that were checked. If another tool
    # made the .sif (it has no record), an overlay may be intended.
    if image.record is not None and image.overlays:
        overlay_problem = (
            f"{len(image.overlays)} partitions that a runtime lays over the image, and imgkit writes none"
        )
        yield Check("overlays", "fail", overlay_problem, "convert the image again: imgkit sif")
    if root.verdict == "fail":
        yield Check("manifest", "skip", "not checked: the root partition is damaged")
        return
    yield _check_manifest(path, image.arch)


def _check_sqsh(path: Path, report: Reporter) -> Iterator[Check]:
    """Check a .sqsh: its squashfs, checksum file, content, and the manifest in its image.

    The content is compared with imgkit's record, which is at the end of the file. If the squashfs is damaged,
    nothing after it is checked.
    """
    report.stage(f"read {path.name}")
    try:
        superblock = sqsh.check_structure(path)
        record = sqsh.read_record(path)
        root_sha256, file_sha256 = sqsh.hash_sqsh(path, advance=report.advance)
    except CheckFailed as error:
        yield Check("squashfs", "fail", error.what, error.hint or _COPY_AGAIN)
        return
    yield check_checksum(path, file_sha256, path.stat().st_size)
    # Only the record tells the architecture. `_check_manifest` accepts any image for "unknown".
    arch = record.arch if record else "unknown"
    arch_text = record.arch if record else "unknown architecture"
    yield Check("squashfs", "ok", f"{arch_text}, with {superblock.compressor}")
    content = _check_content("content", record, root_sha256)
    yield content
    if content.verdict == "fail":
        yield Check("manifest", "skip", "not checked: the squashfs is damaged")
        return
    yield _check_manifest(path, arch)


def _check_packages(path: Path, report: Reporter) -> Iterator[Check]:
    """Check a file of packages that ``imgkit add`` wrote, and whether it belongs to the image beside it.

    The file is a squashfs with a record of its content at the end. If the record is damaged, nothing else is
    checked.
    """
    report.stage(f"read {path.name}")
    try:
        stored_record = record.read_record(path)
        actual_sha256 = record.squashfs_sha256(path)
    except CheckFailed as error:
        yield Check("record", "fail", error.what, error.hint or "")
        return
    mismatch = ""
    if actual_sha256 != stored_record.squashfs_sha256:
        mismatch = f"has sha256 {actual_sha256}, the record says {stored_record.squashfs_sha256}"
    yield _make_check("content", mismatch, f"{len(stored_record.packages)} packages, sha256 {actual_sha256}")
    # ``imgkit add`` writes the file into the folder of its image.
    yield _check_image_of_packages(path, path.with_name(stored_record.image))


def _check_image_of_packages(path: Path, image: Path) -> Check:
    """Check that the file of packages `path` was made for `image`. If there is no image, skip the check."""
    if not image.exists():
        return Check("image", "skip", f"{image.name} is not beside it")
    try:
        # Only the errors count. An error is raised if the packages were made for another image.
        record.read_records_for([str(path)], image)
    except UsageError as error:
        return Check("image", "fail", error.what, error.hint or "")
    return Check("image", "ok", f"{image.name}, as recorded")


def _check_content(name: str, record: ImgkitRecord | None, actual: str) -> Check:
    """Compare `actual`, the digest of a squashfs, with the digest in the record of its .sif or .sqsh.

    If another tool made the file, there is no record and the check warns. `name` is the name of the check.
    """
    if record is None:
        finding = f"sha256 {actual}; the file has no record of imgkit"
        return Check(name, "warn", finding, "another tool made it: imgkit sif writes a record")
    if record.root_sha256 != actual:
        finding = f"has sha256 {actual}, the record says {record.root_sha256}"
        return Check(name, "fail", finding, "copy it again, or convert it again")
    source = record.source or record.image_id
    return Check(name, "ok", f"sha256 {actual}, as recorded; from {source}, by {record.runtime}")


def _check_manifest(path: Path, arch: str) -> Check:
    """Check that the image has a manifest of imgkit with the same architecture as the file.

    The manifest is a file in the image that names its recipe and base. If it is missing, the check warns. If
    the program that reads the squashfs is missing, the check is skipped.

    `arch` is the architecture of the file, or ``unknown``.
    """
    check_name = "manifest"
    try:
        manifest_json = unsquash.baked_facts(path).manifest
        if not manifest_json:
            return Check(check_name, "warn", f"no {manifest.MANIFEST_JSON}: imgkit did not build this image")
        parsed = manifest.from_json(manifest_json)
    except ToolMissing as error:
        return Check(check_name, "skip", f"not read: {error.what}", error.hint or "")
    except ImgkitError as error:
        return Check(check_name, "fail", error.what, error.hint or "")
    _, _, manifest_arch = parsed.platform.partition("/")
    # A .sqsh of another program does not record its architecture, which is then "unknown".
    if arch not in (manifest_arch, "unknown"):
        problem = f"it says {parsed.platform}, but the file is for {arch}"
        return Check(check_name, "fail", problem, "convert it again")
    base = parsed.base.name
    if parsed.base.standin:
        base += " (a stand-in)"
    return Check(
        check_name, "ok", f"recipe {parsed.recipe} on {base}, {parsed.platform}, imgkit {parsed.imgkit}"
    )
