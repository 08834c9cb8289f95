"""Read what pip and apt answer in a base image, and explain why they fail."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.model import UV_STEP, LockedDeb, LockedWheel, Recipe
from imgkit_builder.recipe.requirements import PROTECTED, canonical_name, requirement_name
from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError

APT = "apt"
"""The name of the step that installs Debian packages. The steps of pip have numbers, as in a lock file."""
# A line of ``apt-get --print-uris``: 'http://deb.debian.org/debian/pool/main/g/git/git_2.39.2-1_amd64.deb'
# git_1%3a2.39.2-1_amd64.deb 7171212 SHA256:...
_URI_LINE = re.compile(
    r"'(?P<url>[^']+)' (?P<file>\S+_\S+_\S+\.deb) (?P<size>\d+)(?: SHA256:(?P<sha256>\S+))?"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HTTP_PREFIXES = ("http://", "https://")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReportItem:
    """A package from pip's installation report, as the program ``inside`` passes it on."""

    name: str
    version: str
    url: str
    sha256: str
    direct: bool


class Unresolved(Exception):
    """A step of a recipe failed, or its packages cannot be locked.

    `explain_failure` turns this into an error for users. If a program failed, `output` is what it printed.
    Otherwise `problem` is the message, and `packages` are those that cause it, such as ``flash-attn==2.5``.
    """

    def __init__(
        self, step: int | str, problem: str = "", packages: tuple[str, ...] = (), output: str = ""
    ) -> None:
        super().__init__(problem)
        self.step = step
        self.problem = problem
        self.packages = packages
        self.output = output


def read_debs(text: str) -> tuple[LockedDeb, ...]:
    """Return the packages in `text`, the output of ``apt-get --print-uris``, sorted by name.

    Raises
    ------
    Unresolved : apt gives no SHA-256 digest for a package, or a URL that is not HTTP. A build on another
        machine could not download the package or check it.
    ValueError : a line of apt cannot be parsed.
    """
    debs = []
    for line in text.splitlines():
        match = _URI_LINE.match(line)
        if match is None:  # a warning that apt has printed between the packages
            continue
        deb = _parse_deb(match)
        if not deb.url.startswith(_HTTP_PREFIXES):
            problem = f"apt takes {deb.name} from {deb.url}, which no other machine can read"
            raise Unresolved(APT, problem, (deb.name,))
        if not _SHA256.fullmatch(deb.sha256):
            raise Unresolved(APT, f"the archive states no sha256 of {deb.name}: {match[0]}", (deb.name,))
        debs.append(deb)
    return tuple(sorted(debs, key=attrgetter("name", "architecture")))


def _parse_deb(match: re.Match[str]) -> LockedDeb:
    """Return the package in a line of apt that matches `_URI_LINE`. Its digest is empty if apt gives none."""
    # None of the three parts can contain "_" itself.
    name, version, architecture = match["file"].removesuffix(".deb").split("_")
    return LockedDeb(
        name=name,
        # The epoch of a Debian version ends with ":", which file names write as "%3a".
        version=unquote(version),
        architecture=architecture,
        file=match["file"],
        url=without_credentials(match["url"]),
        sha256=match["sha256"] or "",
        size_bytes=int(match["size"]),
    )


def read_wheels(text: str | bytes, step: int, file_digests: Mapping[str, str]) -> tuple[LockedWheel, ...]:
    """Return the wheels that a pip step installs, sorted by name.

    Parameters
    ----------
    text : the JSON that the program ``inside`` wrote in the base for the step.
    step : the number of the step.
    file_digests : the SHA-256 digests of the package files on this machine, by file name. They came out of
        the base, or are stored with the old lock.

    Raises
    ------
    Unresolved : no index has a wheel of a package, and the base has not built a wheel of it, either.
    ValueError : `text` is not JSON of this form.
    """
    report_items = json_text.build_value(tuple[_ReportItem, ...], json_text.parse(text), "pip", closed=True)
    wheels = []
    missing_packages = []
    for item in report_items:
        package = f"{item.name}=={item.version}"
        wheel = _find_wheel(item, step, file_digests)
        if wheel is None:
            # All missing packages are reported together.
            missing_packages.append(package)
            continue
        # If the file is on this machine, its content must have the digest that pip reports.
        if not _SHA256.fullmatch(wheel.sha256) or file_digests.get(wheel.file, wheel.sha256) != wheel.sha256:
            problem = f"{package} has no sha256, or another one than its file: {wheel.url}"
            raise Unresolved(step, problem, (package,))
        wheels.append(wheel)
    if missing_packages:
        problem = f"no index has a wheel of {', '.join(missing_packages)} for this base"
        raise Unresolved(step, problem, tuple(missing_packages))
    return tuple(sorted(wheels, key=lambda wheel: canonical_name(wheel.name)))


def _find_wheel(item: _ReportItem, step: int, file_digests: Mapping[str, str]) -> LockedWheel | None:
    """Return the wheel of a package in pip's report, or None if there is none.

    The wheel is either in an index or among the package files on this machine. `file_digests` has the SHA-256
    digests of these files, by file name.
    """
    name, version = item.name, item.version
    url = without_credentials(item.url)
    url_file = unquote(urlsplit(url).path.rpartition("/")[2])
    is_wheel = url_file.endswith(".whl")
    if is_wheel and url.startswith(_HTTP_PREFIXES):
        return LockedWheel(
            step=step,
            name=name,
            version=version,
            file=url_file,
            url=url,
            sha256=item.sha256,
            direct=item.direct,  # whether the recipe itself names the URL
        )
    file = url_file  # a wheel in a folder of the base
    if not is_wheel:
        # pip found a source distribution or a repository. The base may have built a wheel from it.
        file = _find_built_wheel(name, version, file_digests)
    if file not in file_digests:
        return None
    # `kept` means that the wheel is stored beside the lock, because no index has it.
    return LockedWheel(step=step, name=name, version=version, file=file, sha256=file_digests[file], kept=True)


def _find_built_wheel(name: str, version: str, files: Iterable[str]) -> str:
    """Return the file name of the wheel of a package, such as ``flash_attn-2.5-py3-none-any.whl``.

    `files` are the names of the files that came out of the base. If several match, the last one is returned.
    If none matches, the result is empty.
    """
    wheel = ""
    for file in files:
        file_name, _, version_and_tags = file.partition("-")
        file_version, _, _ = version_and_tags.partition("-")
        if canonical_name(file_name) == canonical_name(name) and file_version == version:
            wheel = file
    return wheel


def without_credentials(url: str) -> str:
    """Return `url` without its user name, password and fragment."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))


def read_failure(text: str) -> Unresolved:
    """Return the failure that the program ``inside`` wrote to ``failed.txt`` in the base.

    The first line of `text` is the step: ``apt``, ``uv`` or a number. The output of the failed program
    follows.

    Raises
    ------
    ValueError : the first line is not a step.
    """
    step, _, output = text.partition("\n")
    if step == APT:
        return Unresolved(APT, output=output)
    if step == "uv":
        return Unresolved(UV_STEP, output=output)
    if not re.fullmatch(r"[0-9]{1,4}", step):
        raise ValueError("the failure names no step of a recipe")
    return Unresolved(int(step), output=output)


_MAX_QUOTED_LINES = 12  # the most lines of a program's output that a hint quotes
# Lines that only report progress. A hint leaves them out.
_NOISE = re.compile(r"^(WARNING: |\[notice\]|DEPRECATION: |Looking in |  Downloading |Collecting | +━)")
# What pip and apt write before the name of a package: "The user requested numpy==1.26".
_BLAMED_PACKAGE = re.compile(
    r"(?:The user requested|Cannot install|found for|satisfies the requirement|Unable to locate package"
    r"|Failed building wheel for|Version '[^']*' for|Package '?) ?'?([A-Za-z0-9][A-Za-z0-9.+_-]*)"
)
_KEEP_FILES_HINT = (
    "if it has only its source, or its file is in the base, keep its wheel next to the lock: {}"
)


class _Cause(NamedTuple):
    """A known cause of a failure, with the error to raise for it.

    The cause is recognized if `pattern` occurs in the program's output. The groups of the pattern fill the
    ``{}`` in `text`.
    """

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
    # The error of pip does not name the package. It is the one that pip collected last.
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
        _KEEP_FILES_HINT,
    ),
)
"""The causes in the order in which they are tried. The first one whose pattern occurs is used."""
_UNKNOWN_CAUSE = _Cause("", "the packages of this step could not be resolved", UsageError)


def explain_failure(recipe: Recipe, failure: Unresolved, *, log: str) -> ImgkitError:
    """Return the error for a failed step. It names the line of `recipe` that asks for the package at fault.

    `log` is the path of the full log, which the hint mentions.
    """
    # The command for a hint. It makes a lock that also stores wheels which no index has.
    keep_files_command = f"{lock_file.lock_command(recipe)} --keep-files"
    if not failure.problem:
        return _explain_output(recipe, failure, keep_files_command, log)
    # No program failed, but its answer cannot be locked.
    hint = _KEEP_FILES_HINT.format(keep_files_command)
    if failure.step == APT:
        hint = "name an archive with HTTP URLs in the base's /etc/apt/sources.list"
    where = find_recipe_line(recipe, failure.step, failure.packages)
    return UsageError(failure.problem, where=where, hint=hint)


def _explain_output(recipe: Recipe, failure: Unresolved, keep_files_command: str, log: str) -> ImgkitError:
    """Return the error for a failed program. Its hint quotes the program's output.

    `keep_files_command` is the command that makes a lock with all files, for the hint. `log` is the path of
    the full log.
    """
    cause, matched_texts = _find_cause(failure.output)
    # Candidates for the package at fault. The package that the cause names is the most probable one, and then
    # come the others in the output. Texts that are no packages do no harm.
    packages = [*matched_texts, *_BLAMED_PACKAGE.findall(failure.output)]
    where = find_recipe_line(recipe, failure.step, packages)
    hints = []
    if cause.hint:
        hints.append(cause.hint.format(keep_files_command))
    output_lines = last_output_lines(failure.output)
    if output_lines:
        hints += ["its output:", *output_lines]
    hints.append(f"full log: {log}")
    return cause.error(cause.text.format(*matched_texts), where=where, hint="\n".join(hints))


def _find_cause(output: str) -> tuple[_Cause, tuple[str, ...]]:
    """Return the cause of a failure, and the texts that the groups of its pattern matched.

    If no known cause fits, the result is `_UNKNOWN_CAUSE` without texts.
    """
    for cause in _CAUSES:
        match = re.search(cause.pattern, output, re.IGNORECASE)
        if match is not None:
            return cause, match.groups("")
    return _UNKNOWN_CAUSE, ()


def last_output_lines(output: str) -> list[str]:
    """Return the lines of a program's output that explain its failure, at most 12.

    They begin at the first error of pip (``ERROR:``) or apt (``E:``). If a setup.py failed, pip quotes its
    output up to the line ``[end of output]``. The last lines of that quoted output explain more, so they are
    returned instead.
    """
    # What follows the marker is only general advice of pip.
    setup_output, end_marker, _ = output.rpartition("[end of output]")
    if end_marker:
        return _remove_noise(setup_output or output)[-_MAX_QUOTED_LINES:]
    relevant_lines = _remove_noise(output)
    for index, line in enumerate(relevant_lines):
        if line.startswith(("ERROR:", "E: ")):
            return relevant_lines[index : index + _MAX_QUOTED_LINES]
    return relevant_lines[-_MAX_QUOTED_LINES:]


def _remove_noise(output: str) -> list[str]:
    """Return the lines of a program's output, without empty lines and reports of progress."""
    return [line.rstrip() for line in output.splitlines() if line.strip() and not _NOISE.match(line)]


def find_recipe_line(recipe: Recipe, step: int | str, packages: Sequence[str]) -> str:
    """Return the line of `recipe` that asks for a package in `step`, to show in an error message.

    The `packages` are tried in order, and the first one that the step asks for decides. If the step asks for
    none of them, the result is the line of the step itself.

    `step` is `APT`, `UV_STEP` or the number of a pip step.
    """
    if step == UV_STEP:  # its packages are in uv.lock and not in the recipe
        return recipe.where("image", "uv")
    requirements_and_lines = list(_list_requirements(recipe, step))
    for package in packages:
        name = requirement_name(package)  # empty if this text from an output is not a package
        for requirement, where in requirements_and_lines:
            if name and requirement_name(requirement) == name:
                return where
    if step == APT:
        return recipe.where("image", APT)
    return recipe.where("image", "pip", step)


def _list_requirements(recipe: Recipe, step: int | str) -> Iterator[tuple[str, str]]:
    """Yield each package that the step `step` (apt or pip) asks for, with the line that asks for it.

    The line is in the recipe, or in a requirements file: ``mn5.yaml:12 (requirements.txt:3)``. If the recipe
    has no such step, nothing is yielded. `step` must not be `UV_STEP`, whose packages are in uv.lock.
    """
    if step == APT:
        for index, package in enumerate(recipe.image.apt):
            yield package, recipe.where("image", APT, index)
        return
    step_number = int(step)
    # The number comes from a file out of the base image, so it may be too large.
    if step_number >= len(recipe.image.pip):
        return
    pip_step = recipe.image.pip[step_number]
    for index, package in enumerate(pip_step.packages):
        yield package, recipe.where("image", "pip", step_number, "packages", index)
    if pip_step.requirements is not None:
        where = recipe.where("image", "pip", step_number, "requirements")
        file_text = files.read_text(pip_step.requirements, errors="replace")
        for line_number, line in enumerate(file_text.splitlines(), 1):
            yield line, f"{where} ({pip_step.requirements.name}:{line_number})"
