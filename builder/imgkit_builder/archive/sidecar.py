"""Read and write the two small files beside an archive, ``X.tar.sha256`` and ``X.tar.manifest.json``.

An archive and its two files cannot be replaced in one step. So a save first removes the old checksum file,
and writes the new one last. If there is a manifest file but no checksum file, a save was interrupted. The
module needs only the standard library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_builder.archive.compressed import Compress
from imgkit_builder.base import files
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.manifest import Manifest
from imgkit_entrypoints import json_text
from imgkit_entrypoints import system as systems
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import SystemFacts

SCHEMA = 1

# "DIGEST  NAME": sha256sum separates them by two spaces, or by " *" for binary files.
_CHECKSUM_LINE = re.compile(r"(?P<digest>[0-9a-f]{64}) [ *](?P<name>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedImage:
    """The saved image, as the engine describes it."""

    id: str
    """``sha256:...``"""
    tag: str
    platform: str
    """``linux/amd64``"""
    diff_ids: tuple[str, ...]
    """``sha256:...`` of the uncompressed layers, lowest first."""
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedArchive:
    """The archive file that was saved."""

    name: str
    size_bytes: int
    sha256: str
    compress: Compress


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """Content of the manifest file ``X.tar.manifest.json``."""

    image: SavedImage
    archive: SavedArchive
    system: SystemFacts | None
    """Facts about the target system that imgkit wrote into the image. None if imgkit did not build it."""
    manifest: Manifest | None


def sha256_path(archive: Path) -> Path:
    """Return the path of the checksum file of `archive`, which has the format of ``sha256sum``."""
    return archive.with_name(archive.name + ".sha256")


def json_path(archive: Path) -> Path:
    """Return the path of the manifest file of `archive`."""
    return archive.with_name(archive.name + ".manifest.json")


@contextlib.contextmanager
def replace_around(sidecar: Sidecar, archive: Path) -> Iterator[None]:
    """Replace the two files beside `archive`. The ``with`` block must rename the new archive into place.

    Before the block, the old checksum file is removed and the new manifest file is written. After the block,
    the new checksum file is written. If the process dies in between, the missing checksum file shows that the
    save is incomplete.

    Raises
    ------
    OSError : one of the files cannot be written. If something has already changed, `describe_incomplete` says
        how to repair the archive.
    """
    # Remove the checksum first. From now on, the save counts as incomplete.
    files.remove_file(sha256_path(archive))
    files.write_file(json_path(archive), to_json(sidecar))
    yield
    # Write the checksum last. From now on, the save counts as complete.
    files.write_file(sha256_path(archive), f"{sidecar.archive.sha256}  {sidecar.archive.name}\n")


def describe_incomplete(archive: Path, sha256: str, sidecar: Sidecar) -> tuple[str, str]:
    """Return a sentence about what an interrupted save has left, and the command that repairs it.

    There are two cases. If the archive has the digest in the manifest file, it is new, and only its checksum
    file is missing. Otherwise the archive is still the old one, and must be saved again.

    Parameters
    ----------
    archive : the archive, which has no checksum file.
    sha256 : the digest of its current bytes.
    sidecar : the content of its manifest file.
    """
    name = shlex.quote(archive.name)
    checksum_name = sha256_path(archive).name
    if sidecar.archive.sha256 == sha256:
        repair = f"sha256sum {name} > {shlex.quote(checksum_name)}"
        return f"incomplete: {checksum_name} is missing", repair
    problem = f"incomplete: a save has replaced {json_path(archive).name}, and not yet {archive.name}"
    return problem, f"imgkit save {shlex.quote(sidecar.image.tag)} -o {name}"


def to_json(sidecar: Sidecar) -> str:
    """Return the text of the file ``X.tar.manifest.json`` beside an archive. Equal values give equal texts.

    The file contains the manifest of the image, and facts about the image and the archive.
    """
    system = None
    image_manifest = None
    # The image contains both as files. Here, the same JSON objects are stored.
    if sidecar.system:
        system = json_text.parse(systems.to_json(sidecar.system))
    if sidecar.manifest:
        image_manifest = json_text.parse(manifests.to_json(sidecar.manifest))
    document = {
        "schema": SCHEMA,
        "image": dataclasses.asdict(sidecar.image),
        "archive": dataclasses.asdict(sidecar.archive),
        "system": system,
        "manifest": image_manifest,
    }
    # The seal is a digest of the document, by which `from_json` detects changes.
    return json.dumps(json_text.seal(document), indent=2, sort_keys=True) + "\n"


def from_json(text: str, *, where: str) -> Sidecar:
    """Parse the text of a sidecar, the file ``X.tar.manifest.json`` that `to_json` wrote.

    `where` is the path of the file, for messages.

    Raises
    ------
    UsageError : the text is not that of a sidecar, or a later version of imgkit wrote it.
    """
    try:
        document: dict[str, Any] = json_text.parse(text)
        # Before the other checks, because a later version may have other keys.
        if document["schema"] != SCHEMA:
            raise UsageError(  # passes the `except` clauses below, as it is no ValueError
                "a later version of imgkit wrote this sidecar", where=where, hint="use that version"
            )
        return _parse_document(document)
    except ValueError as error:
        raise UsageError(f"not a sidecar of imgkit save: {error}", where=where) from error
    except (KeyError, TypeError, AttributeError) as error:
        # Python's message may be nothing but the name of a key, so `!r` adds the type of the error.
        raise UsageError(f"not a sidecar of imgkit save: {error!r}", where=where) from error


def _parse_document(document: dict[str, Any]) -> Sidecar:
    """Convert `document`, the JSON object in a sidecar, to a `Sidecar`. This removes its seal, a digest.

    Raises
    ------
    ValueError : the document does not match its seal, or has other keys or values than a sidecar.
    UsageError : the manifest in it is not that of an image.
    """
    json_text.unseal(document)
    # Refuse unknown keys: they would be lost when this version of imgkit writes the file again.
    if document.keys() != {"schema", "image", "archive", "system", "manifest"}:
        raise ValueError(f"its keys are {sorted(document)}")
    image = json_text.build_value(SavedImage, document["image"], "image", closed=True)
    archive = json_text.build_value(SavedArchive, document["archive"], "archive", closed=True)
    system = None
    manifest = None
    if document["system"]:
        system = systems.from_json(json.dumps(document["system"]))
    if document["manifest"]:
        manifest = manifests.from_json(json.dumps(document["manifest"]))
    return Sidecar(image=image, archive=archive, system=system, manifest=manifest)


def read_sidecar(archive: Path) -> Sidecar | None:
    """Return the content of the manifest file beside `archive`, or None if there is no such file.

    Raises
    ------
    UsageError : the file exists but cannot be read.
    """
    path = json_path(archive)
    sidecar_text = _read_text(path, "sidecar")
    if sidecar_text is None:
        return None
    return from_json(sidecar_text, where=str(path))


def read_sha256(archive: Path) -> str | None:
    """Return the digest in the checksum file of `archive`, or None if there is no such file.

    Raises
    ------
    UsageError : the file has no line for `archive` in the format of ``sha256sum``.
    """
    path = sha256_path(archive)
    checksum_text = _read_text(path, "checksum")
    if checksum_text is None:
        return None
    for line in checksum_text.split("\n"):
        match = _CHECKSUM_LINE.fullmatch(line)
        # `sha256sum` writes the path that was on its command line, which may include folders.
        if match and Path(match["name"]).name == archive.name:
            return match["digest"]
    raise UsageError(
        f"has no line for {archive.name}", where=str(path), hint=f"expected: <sha256>  {archive.name}"
    )


def _read_text(path: Path, noun: str) -> str | None:
    """Return the text of `path`, or None if it does not exist. Messages call the file `noun`."""
    try:
        return files.read_text(path)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the {noun}: {error}", where=str(path)) from error
