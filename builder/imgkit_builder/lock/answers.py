"""What a base's apt and pip answered, as packages of a lock. Pure functions.

A base may be a stranger's: whatever its answer is, it becomes packages or an error of imgkit.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit, urlunsplit

from imgkit_builder.lock.failures import Failure, Unresolved
from imgkit_builder.recipe.model import UV_STEP, LockedDeb, LockedWheel
from imgkit_builder.recipe.requirements import canonical
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import ToolFailed

_PRINTED = re.compile(r"'(?P<url>[^']+)' (?P<file>\S+_\S+_\S+\.deb) (?P<size>\d+) (?P<hash>\S*)")
_MOST_PARTS = 32
"""Folders of a package's path in its archive; Debian's have four."""
_FIELD = re.compile(r"^(Package|Filename|SHA256): *(\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Apt:
    """What ``inside_apt`` writes."""

    uris: str
    records: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Archive:
    hash: str | None = None
    hashes: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Download:
    url: str
    archive_info: _Archive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metadata:
    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    metadata: _Metadata
    download_info: _Download
    is_direct: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """What pip reports (pip.pypa.io, Installation Report)."""

    install: tuple[_Item, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFile:
    """A file that the base handed out."""

    name: str
    sha256: str


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Raise ToolFailed where an answer is wrong."""
    try:
        yield
    except ValueError as error:
        raise ToolFailed(f"an answer of the base cannot be read: {error}") from error


@readable()
def debs(text: str | bytes) -> tuple[LockedDeb, ...]:
    """The packages in `text`, which ``inside_apt`` wrote, sorted by name.

    Raises
    ------
    Unresolved : apt names no sha256 for a package, or a URL that is none of http.
    ToolFailed : `text` is none of ``inside_apt``.
    """
    data: _Apt = json_text.read(_Apt, json_text.parse(text), "apt")
    digests = dict(_records(data.records))
    found = []
    for line in data.uris.splitlines():
        printed = _PRINTED.match(line)
        if printed is None:
            continue
        name, version, architecture = printed["file"].removesuffix(".deb").split("_")
        url = without_credentials(printed["url"])
        kind, _, value = printed["hash"].partition(":")
        # Debian 12 prints MD5 sums where its index has no other; the package's record has more.
        sha256 = value if kind == "SHA256" else _digest_at(digests, url)
        if not url.startswith(("http://", "https://")):
            raise Unresolved(Failure(step="apt", kind="no url", about=name, output=url))
        if not sha256:
            raise Unresolved(Failure(step="apt", kind="no sha256", about=name, output=line))
        found.append(
            LockedDeb(
                name=name,
                version=unquote(version),
                architecture=architecture,
                file=printed["file"],
                url=url,
                sha256=sha256,
                size_bytes=int(printed["size"]),
            )
        )
    return tuple(sorted(found, key=lambda one: (one.name, one.architecture)))


def _records(text: str) -> Iterator[tuple[str, str]]:
    """Yield path in its archive and sha256 of each record of ``apt-cache show``."""
    for record in text.split("\n\n"):
        fields = dict(_FIELD.findall(record))
        if "Filename" in fields and "SHA256" in fields:
            yield fields["Filename"].removeprefix("./"), fields["SHA256"]


def _digest_at(digests: Mapping[str, str], url: str) -> str:
    # The same version in two archives has two records; a path in an archive is the end of its URL.
    parts = unquote(urlsplit(url).path).split("/")[-_MOST_PARTS:]
    ends = ("/".join(parts[first:]) for first in range(len(parts)))
    return next((digests[end] for end in ends if end in digests), "")


@readable()
def uv_wheels(text: str | bytes) -> tuple[LockedWheel, ...]:
    """The wheels of a uv project in `text`, which ``image/uv_inside`` wrote, sorted by name.

    Raises
    ------
    ToolFailed : `text` is none of it.
    """
    stated = json_text.parse(text)
    if not isinstance(stated, list) or not all(isinstance(one, dict) for one in stated):
        raise ValueError("it is no list of wheels")
    stepped = [{**one, "step": UV_STEP} for one in stated]
    found: tuple[LockedWheel, ...] = json_text.read(tuple[LockedWheel, ...], stepped, "uv")
    return tuple(sorted(found, key=lambda one: canonical(one.name)))


@readable()
def wheels(text: str | bytes, step: int, files: Mapping[str, BaseFile]) -> tuple[LockedWheel, ...]:
    """The wheels in `text`, the report of pip for `step`, sorted by name.

    Parameters
    ----------
    files : what the base handed out, by name; empty for a lock without files.

    Raises
    ------
    Unresolved : a package has no wheel, or one that only the base has, and `files` lacks it; names all such.
    ToolFailed : `text` is no report.
    """
    report: _Report = json_text.read(_Report, json_text.parse(text), "pip")
    built = {_name_and_version(one.name): one for one in files.values() if one.name.endswith(".whl")}
    found = []
    sources: list[str] = []
    local: list[str] = []
    for item in report.install:
        name, version = item.metadata.name, item.metadata.version
        archive = item.download_info.archive_info
        url = without_credentials(item.download_info.url)
        file = unquote(urlsplit(url).path.rpartition("/")[2])
        is_wheel = file.endswith(".whl") and archive is not None
        if archive and is_wheel and url.startswith(("http://", "https://")):
            sha256 = _sha256(archive) or (files[file].sha256 if file in files else "")
            if not sha256 or (file in files and files[file].sha256 != sha256):
                raise Unresolved(Failure(step=step, kind="no sha256", about=f"{name}=={version}", output=url))
            direct = bool(item.is_direct)
            found.append(
                LockedWheel(
                    step=step, name=name, version=version, file=file, url=url, sha256=sha256, direct=direct
                )
            )
            continue
        kept = files.get(file) if is_wheel else built.get((canonical(name), version))
        if kept is None:
            (local if is_wheel else sources).append(f"{name}=={version}")
            continue
        found.append(
            LockedWheel(step=step, name=name, version=version, file=kept.name, sha256=kept.sha256, kept=True)
        )
    for kind, names in (("source", sources), ("local", local)):
        if names:
            raise Unresolved(Failure(step=step, kind=kind, about=", ".join(names), output=""))
    return tuple(sorted(found, key=lambda one: canonical(one.name)))


def _name_and_version(file: str) -> tuple[str, str]:
    """Name and version in the name of a wheel's file, which writes ``-`` as ``_``."""
    name, _, rest = file.partition("-")
    return canonical(name), rest.partition("-")[0]


def _sha256(archive: _Archive) -> str:
    """The digest that a report states; pip before 23.0 has only ``hash``."""
    stated = (archive.hashes or {}).get("sha256") or archive.hash or ""
    return stated.removeprefix("sha256=") if re.fullmatch(r"(sha256=)?[0-9a-f]{64}", stated) else ""


def without_credentials(url: str) -> str:
    """`url` without a user, a password and a fragment."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))
