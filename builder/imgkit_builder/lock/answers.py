"""Reads what the programs inside a base have found, and explains what they have not."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit, urlunsplit

from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.model import UV_STEP, LockedDeb, LockedWheel, PipStep, Recipe
from imgkit_builder.recipe.problems import KeyPath
from imgkit_builder.recipe.requirements import PROTECTED, canonical
from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError

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
        raise ValueError("it is not a list of wheels")
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


_MOST_LINES = 12
_NETWORK = re.compile(
    r"NewConnectionError|Temporary failure (?:in name resolution|resolving)|ConnectTimeout"
    r"|Connection timed out|Could not connect to|Could not resolve|Network is unreachable|Connection refused"
    r"|ReadTimeoutError",
    re.IGNORECASE,
)
_NOISE = re.compile(r"^(WARNING: |\[notice\]|DEPRECATION: |Looking in |  Downloading |Collecting | +━)")
_NAMED = re.compile(
    r"(?:The user requested|Cannot install|found for|satisfies the requirement|Unable to locate package"
    r"|Version '[^']*' for|Package '?) ?'?([A-Za-z0-9][A-Za-z0-9.+_-]*)"
)
_KEPT_TORCH = re.compile(rf"\(constraint\) ({PROTECTED})==(\S+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A question without an answer."""

    step: int | str
    """The pip step, from 0, or ``apt``."""
    kind: str
    about: str
    """The package, where one is to blame."""
    output: str
    """What the program said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """A `Failure` as a script writes it, without its step."""

    kind: str
    about: str
    output: str


class Unresolved(Exception):
    """Carries a `Failure` to where the recipe is known."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.kind)
        self.failure = failure


def read(text: str | bytes) -> Failure:
    """The failure that a script wrote in the base.

    Raises
    ------
    ValueError : `text` is none.
    """
    data = json_text.parse(text)
    said: _Said = json_text.read(_Said, data, "failed")
    step = data.get("step")
    if step != "apt" and (type(step) is not int or step < 0):
        raise ValueError("failed.step is not a step of a recipe")
    return Failure(step=step, kind=said.kind, about=said.about, output=said.output)


def explained(recipe: Recipe, failure: Failure, *, log: str) -> ImgkitError:
    """The error of `failure`, at the line of `recipe` that asks for the package."""
    unprepared = "metadata-generation-failed" in failure.output
    if unprepared and (collected := re.findall(r"^ *Collecting (\S+)", failure.output, re.MULTILINE)):
        failure = dataclasses.replace(failure, about=collected[-1])
    where = place(recipe, failure)
    said = "\n".join(lines(failure.output))
    quoted = f"its output:\n{said}\nfull log: {log}" if said else f"full log: {log}"
    keep = f"{lock_file.command(recipe)} --keep-files"
    match failure.kind:
        case "source":
            return UsageError(
                f"{failure.about} has no wheel for this base, only its source",
                where=where,
                hint=f"build its wheel in the base, and keep it next to the lock: {keep}",
            )
        case "local":
            return UsageError(
                f"{failure.about} comes from a folder of the base and not from an index",
                where=where,
                hint=f"keep the file next to the lock: {keep}",
            )
        case "no url":
            return UsageError(
                f"apt takes {failure.about} from {failure.output}, which no other machine can read",
                where=where,
                hint="use an archive with a URL of http or https in the base's /etc/apt/sources.list",
            )
        case "no sha256":
            return ToolFailed(
                f"{failure.about} has no sha256, or another one than its file",
                where=where,
                hint=f"the archive or index says: {failure.output}",
            )
        case "old pip":
            return UsageError(
                f"the base has {failure.about}, which cannot report what it would install (pip 22.2 can)",
                where=where,
                hint='name a newer one in this step: packages: ["pip>=23", ...]; the image then has it too',
            )
        case "wheel":
            return ToolFailed(
                f"the wheel of {failure.about} cannot be built in this base", where=where, hint=quoted
            )
    if unprepared:
        return ToolFailed(
            f"the source of {failure.about or 'a package'} cannot be prepared in this base",
            where=where,
            hint=quoted,
        )
    tool = "apt" if failure.step == "apt" else "pip"
    if _NETWORK.search(failure.output):
        return ToolFailed(
            f"{tool} cannot reach a package index from the base's network", where=where, hint=quoted
        )
    if kept := _KEPT_TORCH.search(failure.output):
        return UsageError(
            f"the step asks for another {kept[1]} than the base's {kept[2]}, which imgkit protects",
            where=where,
            hint=f"remove that version, or choose a base that has it; {quoted}",
        )
    return UsageError(f"{tool} finds no solution for this step", where=where, hint=quoted)


def lines(output: str) -> list[str]:
    """The last lines that say something; pip's own begin with ``ERROR:``."""
    # pip frames what a setup.py said, and says less itself.
    framed, ended, _ = output.rpartition("[end of output]")
    said = framed if ended else output
    found = [line.rstrip() for line in said.splitlines() if line.strip() and not _NOISE.match(line)]
    if ended:
        return found[-_MOST_LINES:]
    first = next((at for at, line in enumerate(found) if line.startswith(("ERROR:", "E: "))), None)
    return found[-_MOST_LINES:] if first is None else found[first:][:_MOST_LINES]


def place(recipe: Recipe, failure: Failure) -> str:
    """The line of `recipe` that asks for the package of `failure`, or its step."""
    names = [_name(one) for one in (*failure.about.split(", "), *_NAMED.findall(failure.output)) if one]
    if failure.step == "apt":
        path: KeyPath = ("image", "apt")
        asked = [(_name(one), (*path, at)) for at, one in enumerate(recipe.image.apt)]
    else:
        path = ("image", "pip", failure.step)
        asked = []
        for step in recipe.image.pip[int(failure.step) :][:1]:
            asked = [(_name(one), (*path, "packages", at)) for at, one in enumerate(step.packages)]
            if line := _line_of_file(step, names):
                return f"{recipe.where(*path, 'requirements')} ({line})"
    found = next((where for name in names for one, where in asked if one == name), path)
    return recipe.where(*found)


def _line_of_file(step: PipStep, names: list[str]) -> str:
    """``requirements.txt:3`` for the line of the step's requirements file that asks for one of `names`."""
    if step.requirements is None:
        return ""
    stated = [
        _name(line.strip()) for line in files.read_text(step.requirements, errors="replace").splitlines()
    ]
    found = next((stated.index(name) for name in names if name in stated), None)
    return "" if found is None else f"{step.requirements.name}:{found + 1}"


def _name(requirement: str) -> str:
    """``flash-attn`` of ``Flash_Attn[extra]>=2``."""
    name = re.match(r"[A-Za-z0-9][A-Za-z0-9.+_-]*", requirement)
    return re.sub(r"[-_.]+", "-", name[0]).lower() if name else ""
