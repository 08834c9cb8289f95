"""The definition that the runtime builds: the rendered one, with marks between its steps.

The text is that of ``imgkit render --format def``. Before each step it prints a line, by which `follow` knows
the recipe's line. Its first step looks into the base, and it has the labels that only a build knows.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imgkit_builder.apptainer.start import Start
from imgkit_builder.image import inside, render
from imgkit_builder.image.layers import INSIDE
from imgkit_builder.image.manifest import CREATED_LABEL
from imgkit_builder.recipe.model import Recipe

LOOK = "imgkit/look.py"
LINKS = "imgkit/links.sh"
"""Files beside the build context that only a build has."""
MARK = "imgkit: begin step"
_POST = "%post"
_OWN = "imgkit: "
_FIRST = "umask 022"
"""The line behind which the steps begin."""

_FILL = """
path = "{manifest}"
with open(path, encoding="utf-8") as stream:
    manifest = json.{load}(stream)
probe = dict((name, seen[name]) for name in ("python", "torch", "cuda", "nccl"))
probe["pip_conflicts"], probe["skipped"] = seen["pip_conflicts"] or [], ""
manifest["base"]["probe"] = probe
with open(path, "w", encoding="utf-8") as stream:
    stream.write(json.dumps(manifest, indent=2, sort_keys=True) + "\\n")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of ``%post``."""

    origin: str
    """The recipe's line, or ``imgkit: `` and its purpose."""
    text: str
    """Its command on one line, or the purpose of a step of imgkit's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A definition and its steps, in their order."""

    text: str
    steps: tuple[Step, ...]


def look_program() -> str:
    """A program that reports what the base has, and writes it into the manifest of the image."""
    return inside.argv()[-1] + _FILL.format(manifest=f"{INSIDE}/manifest.json", load="load")


def links_script(links: Mapping[str, str]) -> str:
    """A script that makes the symlinks of the context: the runtime's copy would follow them."""
    made = (f"ln -s -- {shlex.quote(to)} {shlex.quote(f'{INSIDE}/{name}')}" for name, to in links.items())
    return "\n".join(("set -e", *made, ""))


def definition(recipe: Recipe, start: Start, labels: Mapping[str, str]) -> Definition:
    """The definition that builds `recipe` on `start`, with the further `labels`.

    Raises
    ------
    UsageError : a definition cannot express a value of the recipe.
    """
    text = render.definition(
        recipe,
        base=start.image.name,
        platform=start.image.platform,
        bootstrap=start.bootstrap,
        place=start.place,
    )
    head, post, rest = _parts(text.split("\n"), start.bootstrap)
    head += [f"    {name} {INSIDE}/{name.rpartition('/')[2]}" for name in (LOOK, LINKS)]
    marked, steps = _marked([*_own_steps(), *post])
    rows = [f"    {key} {' '.join(value.split())}".rstrip() for key, value in labels.items()]
    lines = [*head, "", *marked, *rest[:-1], *rows, ""]
    return Definition(text="\n".join(lines), steps=steps)


def created(text: str) -> str:
    """The time of the build that an older definition states; empty where it states none."""
    found = re.search(rf"^    {re.escape(CREATED_LABEL)} (\S+)$", text, re.MULTILINE)
    return found[1] if found else ""


def _parts(lines: Sequence[str], bootstrap: str) -> tuple[list[str], list[str], list[str]]:
    """The lines up to ``%post``, the steps, and the sections behind them."""
    begin, first = lines.index(_POST), lines.index(_FIRST)
    end = next(at for at in range(first, len(lines)) if lines[at].startswith("%"))
    # The runtime drops what is above the first line that means something to it.
    files = list(lines[lines.index(f"Bootstrap: {bootstrap}") : begin])
    while not files[-1]:
        files.pop()
    return files, list(lines[first + 1 : end]), list(lines[end:])


def _own_steps() -> list[str]:
    return [
        "",
        "# imgkit: look into the base",
        f"if command -v python3 > /dev/null; then python3 -I -B {INSIDE}/look.py || :; fi",
        "",
        "# imgkit: the links of copied folders",
        f"sh {INSIDE}/links.sh",
        f"rm {INSIDE}/look.py {INSIDE}/links.sh",
    ]


def _marked(lines: Sequence[str]) -> tuple[list[str], tuple[Step, ...]]:
    """``%post`` with a mark below the comment of each step."""
    steps: list[Step] = []
    for number, line in enumerate(lines):
        if found := render.TRACE.fullmatch(line):
            own = found[1].startswith(_OWN)
            text = found[1].removeprefix(_OWN) if own else _command(lines[number + 1 :])
            steps.append(Step(origin=found[1], text=text))
    marked, done = [_POST, "set -e", _FIRST], 0
    for line in lines:
        marked.append(line)
        if render.TRACE.fullmatch(line):
            done += 1
            marked.append(f"echo '{MARK} {done}/{len(steps)}'")
    return marked, tuple(steps)


def _command(lines: Sequence[str]) -> str:
    """The first command of `lines`, on one line."""
    words = []
    for line in lines:
        words.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            break
    return " ".join(words)
