"""Reads what pip and apt answer in a base, and explains why they have no answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.model import UV_STEP, LockedDeb, LockedWheel, Recipe
from imgkit_builder.recipe.problems import KeyPath
from imgkit_builder.recipe.requirements import PROTECTED, canonical_name, requirement_name
from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError

APT = "apt"
"""The step of the Debian packages; those of pip have numbers, as in a lock."""
_URI = re.compile(r"'(?P<url>[^']+)' (?P<file>\S+_\S+_\S+\.deb) (?P<size>\d+)(?: SHA256:(?P<sha256>\S+))?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HTTP = ("http://", "https://")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReportItem:
    """A package of pip's report, as ``inside`` writes it."""

    name: str
    version: str
    url: str
    sha256: str
    direct: bool


class Unresolved(Exception):
    """A step has no answer, or one that a lock cannot state; `explain` finds the recipe's line.

    It has either the `problem` and the `packages` to blame, with commas, or the `output` of the program.
    """

    def __init__(self, step: int | str, problem: str = "", packages: str = "", output: str = "") -> None:
        super().__init__(problem)
        self.step, self.problem, self.packages, self.output = step, problem, packages, output


def read_debs(text: str) -> tuple[LockedDeb, ...]:
    """Return the packages that ``apt-get --print-uris`` printed, sorted by name.

    Raises
    ------
    Unresolved : apt names no sha256 for a package, or a URL that is not HTTP.
    ValueError : an answer of apt cannot be read.
    """
    debs = []
    # Other lines are warnings of apt.
    for match in filter(None, map(_URI.match, text.splitlines())):
        name, version, architecture = match["file"].removesuffix(".deb").split("_")
        url, sha256 = without_credentials(match["url"]), match["sha256"] or ""
        if not url.startswith(_HTTP):
            raise Unresolved(APT, f"apt takes {name} from {url}, which no other machine can read", name)
        if not _SHA256.fullmatch(sha256):
            raise Unresolved(APT, f"the archive states no sha256 of {name}: {match[0]}", name)
        deb = LockedDeb(
            name=name,
            version=unquote(version),
            architecture=architecture,
            file=match["file"],
            url=url,
            sha256=sha256,
            size_bytes=int(match["size"]),
        )
        debs.append(deb)
    return tuple(sorted(debs, key=lambda deb: (deb.name, deb.architecture)))


def read_wheels(text: str | bytes, step: int, digests: Mapping[str, str]) -> tuple[LockedWheel, ...]:
    """Return the wheels in `text`, which ``inside`` wrote for `step`, sorted by name.

    Parameters
    ----------
    digests : the sha256 of the files that the base handed out, by name; empty for a lock without files.

    Raises
    ------
    Unresolved : packages have no wheel, or one that only the base has, and `digests` lacks it.
    ValueError : `text` is no report.
    """
    items = json_text.read(tuple[_ReportItem, ...], json_text.parse(text), "pip", closed=True)
    # The name of a wheel's file begins with name and version, and has "_" for "-".
    built = {(canonical_name(file.split("-")[0]), "".join(file.split("-")[1:2])): file for file in digests}
    wheels, missing = [], []
    for item in items:
        package = f"{item.name}=={item.version}"
        url = without_credentials(item.url)
        file = unquote(urlsplit(url).path.rpartition("/")[2])
        is_of_index = file.endswith(".whl") and url.startswith(_HTTP)
        if not file.endswith(".whl"):
            file = built.get((canonical_name(item.name), item.version), "")
        sha256 = item.sha256 if is_of_index else digests.get(file, "")
        if not is_of_index and not sha256:
            missing.append(package)
            continue
        if not _SHA256.fullmatch(sha256) or digests.get(file, sha256) != sha256:
            raise Unresolved(step, f"{package} has no sha256, or another one than its file: {url}", package)
        wheel = LockedWheel(
            step=step,
            name=item.name,
            version=item.version,
            file=file,
            url=url if is_of_index else "",
            sha256=sha256,
            kept=not is_of_index,
            direct=is_of_index and item.direct,
        )
        wheels.append(wheel)
    if missing:
        packages = ", ".join(missing)
        raise Unresolved(step, f"no index has a wheel of {packages} for this base", packages)
    return tuple(sorted(wheels, key=lambda wheel: canonical_name(wheel.name)))


def without_credentials(url: str) -> str:
    """Return `url` without a user, a password and a fragment."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))


def read_failure(text: str) -> Unresolved:
    """Return the failure that the program wrote in the base: the step, then the output.

    Raises
    ------
    ValueError : `text` is none.
    """
    name, _, output = text.partition("\n")
    if name in (APT, "uv"):
        return Unresolved(APT if name == APT else UV_STEP, output=output)
    if not re.fullmatch(r"[0-9]{1,4}", name):
        raise ValueError("the failure names no step of a recipe")
    return Unresolved(int(name), output=output)


_MOST_LINES = 12
_NOISE = re.compile(r"^(WARNING: |\[notice\]|DEPRECATION: |Looking in |  Downloading |Collecting | +━)")
_BLAMED = re.compile(
    r"(?:The user requested|Cannot install|found for|satisfies the requirement|Unable to locate package"
    r"|Failed building wheel for|Version '[^']*' for|Package '?) ?'?([A-Za-z0-9][A-Za-z0-9.+_-]*)"
)
_KEEP_FILES = "if it has only its source, or its file is in the base, keep its wheel next to the lock: {}"


class _Cause(NamedTuple):
    """An error by a pattern of a program's output, whose groups fill in the text."""

    pattern: str
    text: str
    error: type[ToolFailed | UsageError] = ToolFailed
    hint: str = ""


_CAUSES = (
    _Cause(
        "no such option: --report",
        "the base's pip is older than 22.2, and cannot report what it would install",
        UsageError,
        "install a newer one: image: {{run: [{{command: python3 -m pip install 'pip>=23', after: base}}]}}",
    ),
    # pip does not name the package again; it collected it last.
    _Cause(
        r"(?s)Collecting ([A-Za-z0-9][^\s(;]*)(?!.*Collecting ).*metadata-generation-failed",
        "the source of {} cannot be prepared in this base",
    ),
    _Cause(r"Failed building wheel for (\S+)", "the wheel of {} cannot be built in this base"),
    _Cause(
        r"NewConnectionError|Temporary failure (in name resolution|resolving)|ConnectTimeout|ReadTimeoutError"
        r"|Connection (timed out|refused)|Could not (connect to|resolve)|Network is unreachable",
        "a package index cannot be reached from the base's network",
    ),
    _Cause(
        rf"\(constraint\) ({PROTECTED})==(\S+)",
        "the step asks for another {} than the base's {}, which imgkit protects",
        UsageError,
        "remove that version, or choose a base that has it",
    ),
    _Cause(
        r"No matching distribution found for (\S+)",
        "no index has a wheel of {} for this base",
        UsageError,
        _KEEP_FILES,
    ),
    _Cause("", "the packages of this step could not be resolved", UsageError),
)
"""The first whose pattern occurs counts; the last occurs in any output."""


def explain(recipe: Recipe, failure: Unresolved, *, log: str) -> ImgkitError:
    """Return the error at the line of `recipe` that asks for the package to blame."""
    keep_files = f"{lock_file.lock_command(recipe)} --keep-files"
    if failure.problem:
        where = find_line(recipe, failure.step, failure.packages.split(", "))
        archives = "name an archive with HTTP URLs in the base's /etc/apt/sources.list"
        hint = archives if failure.step == APT else _KEEP_FILES.format(keep_files)
        return UsageError(failure.problem, where=where, hint=hint)
    matches = ((cause, re.search(cause.pattern, failure.output, re.IGNORECASE)) for cause in _CAUSES)
    cause, groups = next((cause, match.groups("")) for cause, match in matches if match)
    # The cause's own package first; a resolver names others on the way to it.
    where = find_line(recipe, failure.step, [*groups, *_BLAMED.findall(failure.output)])
    hints = [cause.hint.format(keep_files)] if cause.hint else []
    if lines := last_lines(failure.output):
        hints += ["its output:", *lines]
    return cause.error(cause.text.format(*groups), where=where, hint="\n".join([*hints, f"full log: {log}"]))


def last_lines(output: str) -> list[str]:
    """Return the last lines that explain a failure; pip's own begin with ``ERROR:``."""
    # pip frames the output of a setup.py, and explains less itself.
    framed, end, _ = output.rpartition("[end of output]")
    text = framed if end else output
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not _NOISE.match(line)]
    if not end:
        for number, line in enumerate(lines):
            if line.startswith(("ERROR:", "E: ")):
                return lines[number : number + _MOST_LINES]
    return lines[-_MOST_LINES:]


def find_line(recipe: Recipe, step: int | str, packages: list[str]) -> str:
    """Return the line of `recipe` that asks for one of `packages` in `step`, or the line of the step."""
    if step == UV_STEP:
        return recipe.where("image", "uv")
    path: KeyPath = ("image", APT) if step == APT else ("image", "pip", step)
    lines: dict[str, str] = {}
    if step == APT:
        for number, package in enumerate(recipe.image.apt):
            lines.setdefault(requirement_name(package), recipe.where(*path, number))
    elif int(step) < len(recipe.image.pip):
        pip = recipe.image.pip[int(step)]
        for number, package in enumerate(pip.packages):
            lines.setdefault(requirement_name(package), recipe.where(*path, "packages", number))
        text = files.read_text(pip.requirements, errors="replace") if pip.requirements else ""
        for number, line in enumerate(text.splitlines(), 1):
            file = f"{pip.requirements.name}:{number}" if pip.requirements else ""
            lines.setdefault(requirement_name(line), f"{recipe.where(*path, 'requirements')} ({file})")
    for package in filter(None, map(requirement_name, packages)):
        if package in lines:
            return lines[package]
    return recipe.where(*path)
