"""The record at the end of a squashfs with packages. It lists the packages and the image that they are for.

Everything that follows a squashfs in a file is ignored when the file is mounted. The .sqsh of an image has a
record in the same place (`sif.sqsh`), which ends with other bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.recipe.requirements import canonical_name
from imgkit_builder.sif import image as sif_image
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, UsageError

MOUNT_FOLDER = "/run/imgkit/packages"
"""The folder in a container that has a subfolder for each file with packages, where the file is mounted.

No folder of this path is called site-packages, because the node agent removes such folders from PYTHONPATH if
it comes from the host.
"""
# The last bytes of a file with packages. They identify it.
_MAGIC = b"IMGKPACK"
_SCHEMA = 1
_HINT = "imgkit add PACKAGE --image X.sif, with another name by -o if the file is not one of packages"
END_BYTES = 1 << 20
"""The number of bytes at the end of a file in which `files.read_trailer` looks for its record."""
EDGE_BYTES = 65536
"""The number of bytes at each end of an image file whose digest stands for the whole content.

A .sif begins with its table of objects and the superblock of its squashfs. It ends with the tables of the
squashfs, which have the position, size and time of every file. To read the whole file would take a minute on
each node.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedPackage:
    """A package in a file of `imgkit add`."""

    name: str
    version: str
    sha256: str
    """The digest of the wheel or source archive that pip read. It is empty for a folder or a repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagesRecord:
    """The packages in a file of `imgkit add`, and the image that they are for."""

    imgkit: str
    """Version of imgkit."""
    image: str
    """Name of the image's file."""
    image_digest: str
    """The digest of the image's file, as the function `image_digest` returns it."""
    image_id: str
    """The digest of the image's configuration. It is empty if imgkit did not write the image's file."""
    arch: str
    """Architecture of the image, such as ``amd64``."""
    python: str
    """Version of the image's Python, such as ``3.12.3``."""
    arguments: tuple[str, ...]
    """The arguments of `imgkit add` that decide what is installed, as in `AddRequest.arguments`."""
    packages: tuple[AddedPackage, ...]
    modules: tuple[str, ...]
    """The names that a program can import, such as ``einops``."""
    squashfs_sha256: str
    """The digest of the squashfs, without the record that follows it."""

    def command(self, image: str, file: str) -> str:
        """Return the `imgkit add` command that would make `file` with the same packages for `image`."""
        return shlex.join(("imgkit", "add", *self.arguments, "--image", image, "-o", file))


def image_digest(path: Path) -> str:
    """Return a SHA-256 digest, in hex, that stands for the content of the image file `path`.

    It covers the size of the file, and its first and last `EDGE_BYTES`, so that a large file is not read as a
    whole. `digest_command` computes the same digest on machines without imgkit.
    """
    with files.open_regular(path) as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        start = stream.read(EDGE_BYTES)
        stream.seek(max(0, size_bytes - EDGE_BYTES))  # in a small file, both parts overlap
        end = stream.read(EDGE_BYTES)
    return hashlib.sha256(start + end + f"{size_bytes}\n".encode()).hexdigest()


def read_image_id(image: Path) -> str:
    """Return the id of the image in a .sif on this machine, or "" if the file has none.

    `refuse_unfit` compares this id as well as the digest of the file. If imgkit converts the same image
    again, the new .sif has another digest but the same id, so packages made for the old one still fit.
    """
    if not sif_image.is_sif(image):
        return ""
    sif = sif_image.read(image)
    return sif.record.image_id if sif.record else ""


def digest_command(variable: str) -> str:
    """Return the shell command that prints the ``image_digest`` of a file, followed by ``  -``.

    Parameters
    ----------
    variable : the shell variable with the path of the file, such as ``$image``.
    """
    ends = f'head -c {EDGE_BYTES} "{variable}"; tail -c {EDGE_BYTES} "{variable}"'
    return f'{{ {ends}; stat -L -c %s "{variable}"; }} | sha256sum'


def to_bytes(record: PackagesRecord) -> bytes:
    """Return the bytes that store `record` when they are appended to its squashfs."""
    values = json_text.seal({"schema": _SCHEMA, **dataclasses.asdict(record)})
    return files.make_trailer(json.dumps(values, indent=1).encode(), _MAGIC)


def is_packages(path: Path) -> bool:
    """Return whether `imgkit add` wrote the file `path`. Return False if the file cannot be read."""
    try:
        with files.open_regular(path) as stream:
            return files.has_trailer(stream, _MAGIC)
    except OSError:
        return False


def read_record(path: Path) -> PackagesRecord:
    """Return the record at the end of the file `path`.

    Raises
    ------
    UsageError : there is no such file, or `imgkit add` did not write it.
    CheckFailed : the record is damaged.
    """
    if not path.exists():
        raise UsageError("there is no such file", where=str(path), hint=_HINT)
    with files.open_regular(path) as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        # The record is within the last `END_BYTES` bytes. A smaller file is read as a whole.
        stream.seek(max(0, size_bytes - END_BYTES))
        return parse_end(stream.read(), str(path))


def squashfs_sha256(path: Path) -> str:
    """Compute the digest of the squashfs in `path`, without the record that follows it.

    If the digest differs from `PackagesRecord.squashfs_sha256`, the file is damaged.

    Raises
    ------
    UsageError : there is no such file, or `imgkit add` did not write it.
    CheckFailed : the record is damaged.
    """
    read_record(path)  # only for its errors: the record must not be missing or damaged
    with files.open_regular(path) as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        record_json = files.read_trailer(stream, 0, size_bytes, _MAGIC) or b""
        # In the file, a few more bytes follow the JSON. Make them again, only to know how many there are.
        trailer = files.make_trailer(record_json, _MAGIC)
        return files.sha256(stream, 0, size_bytes - len(trailer))


def parse_end(end: bytes, path: str) -> PackagesRecord:
    """Return the record in `end`, the last `END_BYTES` of a file. The file may be on another machine.

    The record describes the packages in the file and the image for which they were made. `path` is the path
    of the file, for messages.

    Raises
    ------
    UsageError : `imgkit add` did not write the file.
    CheckFailed : the record is damaged, or another version of imgkit wrote it.
    """
    if not end.endswith(_MAGIC):
        raise UsageError("imgkit add did not write this file", where=path, hint=_HINT)
    try:
        record_json = files.read_trailer(io.BytesIO(end), 0, len(end), _MAGIC) or b""
        record_values = json_text.parse(record_json)
        # Check the digest that `to_bytes` has added, and remove it. An error is raised if it does not match.
        json_text.unseal(record_values)
        # This key is removed, too, because it is no field of the record.
        if record_values.pop("schema") != _SCHEMA:
            raise ValueError("another version of imgkit wrote it")
        # In errors, the record is called "it". With `closed`, any other key is an error.
        record: PackagesRecord = json_text.build_value(PackagesRecord, record_values, "it", closed=True)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckFailed(f"its record cannot be read: {error}", where=path, hint="copy it again") from error
    return record


def refuse_unfit(
    records: Iterable[tuple[str, PackagesRecord]], *, image: str, digests: Iterable[str]
) -> None:
    """Refuse files with packages that were made for another image, or that contradict each other.

    pip chose the packages to fit the versions in one image. In another image they may fail.

    Parameters
    ----------
    records : the path and the record of each file.
    image : the path of the image, for messages.
    digests : the digests of the image's file and of its configuration. An empty digest is unknown and
        ignored. A file fits if it was made for one of the digests.

    Raises
    ------
    UsageError : a file was made for another image, or two files have different versions of a package.
    """
    image_digests = set(digests) - {""}
    # The first file that has a package and the version there, by the normalized name of the package.
    first_versions: dict[str, tuple[str, str]] = {}
    for path, record in records:
        if image_digests.isdisjoint((record.image_digest, record.image_id)):
            raise UsageError(
                f"{Path(path).name} was made for another image, {record.image}, and not for this {image}",
                where="--packages",
                hint=record.command(image, path),
            )
        for package in record.packages:
            name = canonical_name(package.name)
            # If an earlier file has the package, its version is returned. Otherwise this one is stored.
            first_path, first_version = first_versions.setdefault(name, (path, package.version))
            if first_version != package.version:
                raise UsageError(
                    f"{name} is {first_version} in {first_path}, and {package.version} in {path}",
                    where="--packages",
                    hint=f"make one file of both: imgkit add ... {name} --image {image}",
                )


def read_records_for(paths: Iterable[str], image: Path) -> tuple[PackagesRecord, ...]:
    """Return the records of the files `paths`, after a check that a job can use the files with `image`.

    A record describes the packages in a file and the image for which they were made.

    Raises
    ------
    UsageError : `imgkit add` did not write a file, a file was made for another image, or two files have
        different versions of a package.
    CheckFailed : a record is damaged.
    """
    path_records = [(path, read_record(Path(path))) for path in paths]
    # The file of an image has a digest, and the image in it has an id. The same image in another file has the
    # same id, so packages fit if one of the two is the same.
    digests = [read_image_id(image)]
    if image.is_file():
        digests.append(image_digest(image))
    refuse_unfit(path_records, image=str(image), digests=digests)
    return tuple(record for _, record in path_records)


def mount_path(number: int) -> str:
    """Return the path in a container at which a file with packages is mounted. `number` counts from 1."""
    return f"{MOUNT_FOLDER}/{number}"


def search_path_script(count: int) -> str:
    """Return a line of shell that runs its arguments with the packages of `count` files on Python's path.

    It sets PATH and PYTHONPATH so that Python finds the added packages before those of the image.
    """
    folders = [mount_path(file_number) for file_number in range(1, count + 1)]
    path = ":".join(f"{folder}/bin" for folder in folders)
    python_path = ":".join(folders)
    return f'export PYTHONPATH="{python_path}${{PYTHONPATH:+:$PYTHONPATH}}" PATH="{path}:$PATH"; exec "$@"'


def is_mountable(path: str) -> bool:
    """Return whether a container runtime can mount the file `path`.

    A colon or a comma would end the path in the mount option. The other characters have a meaning in a shell.
    """
    return re.search(r"[:,\x00-\x1f\x7f\"'\\%`$]", path) is None
