"""What a base's apt and pip could not do, as an error that names the recipe's line."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from imgkit_builder.image.install import PROTECTED
from imgkit_builder.recipe import lock_follow
from imgkit_builder.recipe.model import PipStep, Recipe
from imgkit_builder.recipe.problems import KeyPath
from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError

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
        raise ValueError("failed.step is no step of a recipe")
    return Failure(step=step, kind=said.kind, about=said.about, output=said.output)


def explained(recipe: Recipe, failure: Failure, *, log: str) -> ImgkitError:
    """The error of `failure`, at the line of `recipe` that asks for the package."""
    unprepared = "metadata-generation-failed" in failure.output
    if unprepared and (collected := re.findall(r"^ *Collecting (\S+)", failure.output, re.MULTILINE)):
        failure = dataclasses.replace(failure, about=collected[-1])
    where = place(recipe, failure)
    said = "\n".join(lines(failure.output))
    quoted = f"its words:\n{said}\nfull log: {log}" if said else f"full log: {log}"
    keep = f"{lock_follow.command(recipe)} --keep"
    match failure.kind:
        case "source":
            return UsageError(
                f"{failure.about} has no wheel for this base, only its source",
                where=where,
                hint=f"build its wheel in the base, and keep it beside the lock: {keep}",
            )
        case "local":
            return UsageError(
                f"{failure.about} comes from a folder of the base and not from an index",
                where=where,
                hint=f"keep the file beside the lock: {keep}",
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
        return ToolFailed(f"{tool} reaches no package in the base's network", where=where, hint=quoted)
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
