"""What a build starts from: an archive, an OCI folder, a .sif, or an image in a registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive import oci_folder, stored
from imgkit_builder.base.progress import Reporter
from imgkit_builder.oci.config import ImageConfig
from imgkit_builder.oci.manifest import STANDIN_LABEL, BaseImage
from imgkit_builder.oci.platform import host_platform
from imgkit_builder.recipe.model import Recipe
from imgkit_builder.sif import check, convert, coverage
from imgkit_builder.sif import image as sif_image
from imgkit_builder.sif.conversion import Archive, OciFolder, Registry
from imgkit_entrypoints.errors import CheckFailed, UsageError

REGISTRY = "registry"
"""The value of ``--base-from`` that names no file."""
FOLDER, FILE = "base", "base.sif"
"""Names of the base in the folder in which the runtime builds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SifFile:
    """A .sif on this machine."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The base of a build."""

    source: Archive | OciFolder | SifFile | Registry
    image: BaseImage
    known: bool = True
    """False as long as a compressed archive has not been read, which hides its identity."""

    @property
    def bootstrap(self) -> str:
        """The definition's word for this kind of base."""
        if isinstance(self.source, Registry):
            return "docker"
        return "localimage" if isinstance(self.source, SifFile) else "oci"

    @property
    def place(self) -> str:
        """Where the definition says that the base is."""
        if isinstance(self.source, Registry):
            return self.source.reference
        return FILE if isinstance(self.source, SifFile) else FOLDER


def find(recipe: Recipe, *, name: str | None, place: str | None, report: Reporter) -> Start:
    """Find the base `name` (by default the recipe's) in `place`: a file, an OCI folder, or a registry.

    Raises
    ------
    UsageError : there is no such file, or it is no image.
    CheckFailed : it is damaged, or for another platform than this machine's.
    """
    wanted = name or recipe.image.base
    if place in (None, REGISTRY):
        # A tag may move; only a digest says which image it is.
        digest = wanted if "@sha256:" in wanted else ""
        image = BaseImage(name=wanted, digest=digest, platform=host_platform())
        return Start(source=Registry(reference=wanted), image=image)
    path = Path(str(place)).expanduser()
    if sif_image.is_sif(path):
        start = _of_sif(path)
    elif (path / "oci-layout").is_file():
        selected = stored.open_image(path).selected
        start = Start(
            source=OciFolder(path=path.absolute()), image=_of_config(selected.config, selected.names, path)
        )
    elif path.is_file():
        start = _of_archive(path)
    else:
        raise UsageError(
            "there is no such base" if not path.exists() else "a folder without oci-layout is no image",
            where=f"--base-from {place}",
            hint="an archive (imgkit save, docker save), an OCI folder, a .sif, or the word registry",
        )
    _refuse_platform(start)
    if start.known and start.image.name != wanted:
        report.note(f"the base is {start.image.name}, and not {wanted}, which the recipe names")
    return start


def identified(start: Start, config: ImageConfig, names: tuple[str, ...]) -> Start:
    """`start` once its archive has been read."""
    assert isinstance(start.source, Archive)  # noqa: S101 - for the type checker: all others are known
    found = dataclasses.replace(start, image=_of_config(config, names, start.source.path), known=True)
    _refuse_platform(found)
    return found


def check_space(start: Start, target: Path, temporary: Path) -> None:
    """Look for free space before the work; the size of a base in a registry is unknown.

    Raises
    ------
    CheckFailed : there is too little on the disk of `target`, or on that of `temporary`.
    """
    if isinstance(start.source, SifFile):
        size: int | None = int(start.source.path.stat().st_size * convert.UNPACKED_FACTOR)
        share = 1.0  # its files once, as its layers are merged already
    else:
        size, share = convert.source_bytes(start.source), convert.temporary_share(None)
    if size is not None:
        convert.need_space(size, int(size * share), target, temporary)


def verify(start: Start) -> None:
    """Compare a base that is a .sif with its own digests.

    Raises
    ------
    CheckFailed : it has changed since it was made.
    """
    if not isinstance(start.source, SifFile):
        return
    faults = coverage.check(start.source.path).faults
    if faults:
        raise CheckFailed(
            f"the base is damaged: {faults[0]}", where=str(start.source.path), hint="copy it again"
        )


def _of_archive(path: Path) -> Start:
    config = oci_folder.peek(path)
    image = BaseImage(name=path.name, platform=host_platform())
    start = Start(source=Archive(path=path.absolute()), image=image, known=False)
    # What `peek` cannot read is compressed, or damaged: reading all of it tells.
    return identified(start, config, stored.open_image(path).selected.names) if config else start


def _of_config(config: ImageConfig, names: tuple[str, ...], path: Path) -> BaseImage:
    return BaseImage(
        name=names[0] if names else path.name,
        id=config.image_id,
        platform=f"{config.os or 'linux'}/{config.arch}",
        standin=STANDIN_LABEL in config.labels,
        env={name: value or "" for name, value in config.env},
    )


def _of_sif(path: Path) -> Start:
    sif = sif_image.read(path)
    record = sif.record
    if record and record.deltas:
        raise UsageError(
            "a .sif with deltas cannot be a base: the runtime copies its root partition only",
            where=str(path),
            hint=f"merge them first: imgkit flatten {path} -o base.sif",
        )
    # A .sif of another tool states no image: its root partition is what can be named.
    identity = record.image_id if record else ""
    image = BaseImage(
        name=(record.source if record else "") or path.name,
        id=identity or f"sha256:{record.root_sha256 if record else sif_image.root_sha256(path)}",
        platform=f"linux/{sif.arch}",
        standin=STANDIN_LABEL in labels(sif),
    )
    return Start(source=SifFile(path=path.absolute()), image=image)


def labels(sif: sif_image.SifImage) -> Mapping[str, str]:
    """The labels that the objects of a .sif state, without running it; empty where they state none."""
    return check.stated_labels(sif) or {}


def _refuse_platform(start: Start) -> None:
    found, host = start.image.platform, host_platform()
    if start.known and found != host:
        raise CheckFailed(
            f"the base is for {found}, and a definition builds for {host}, this machine's platform",
            where=start.image.name,
            hint=f"build on a machine of that kind, or with Docker: imgkit build --platform {found}",
        )
