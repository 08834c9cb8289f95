"""The definition that the runtime builds: the rendered one, with marks between its steps.

Before each step it prints a line, by which `follow` knows the recipe's line. Its first step looks into the
base, and it has the labels that only a build knows.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from imgkit_builder.apptainer.start import Start
from imgkit_builder.image import inside, render
from imgkit_builder.image.instructions import INSIDE, Additions, ContextFile, Definition, KeyValue, Step
from imgkit_builder.oci.manifest import CREATED_LABEL
from imgkit_builder.recipe.model import Recipe

LOOK = "imgkit/look.py"
LINKS = "imgkit/links.sh"
"""Files beside the build context that only a build has."""
MARK = "imgkit: begin step"

_FILL = """
path = "{manifest}"
with open(path, encoding="utf-8") as stream:
    manifest = json.load(stream)
probe = dict((name, seen[name]) for name in ("python", "torch", "cuda", "nccl"))
probe["pip_conflicts"], probe["skipped"] = seen["pip_conflicts"] or [], ""
manifest["base"]["probe"] = probe
with open(path, "w", encoding="utf-8") as stream:
    stream.write(json.dumps(manifest, indent=2, sort_keys=True) + "\\n")
"""


def look_program() -> str:
    """A program that reports what the base has, and writes it into the manifest of the image."""
    return inside.argv()[-1] + _FILL.format(manifest=f"{INSIDE}/manifest.json")


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
    look, links = (
        ContextFile(member=name, path=f"{INSIDE}/{name.rpartition('/')[2]}") for name in (LOOK, LINKS)
    )
    own = (
        Step(
            origin="imgkit: look into the base",
            command=f"if command -v python3 > /dev/null; then python3 -I -B {look.path} || :; fi",
        ),
        Step(
            origin="imgkit: the links of copied folders",
            command=f"sh {links.path}\nrm {look.path} {links.path}",
        ),
    )
    rows = tuple(KeyValue(key=key, value=" ".join(value.split())) for key, value in labels.items())
    return render.marked_definition(
        recipe,
        base=start.image.name,
        platform=start.image.platform,
        more=Additions(mark=MARK, files=(look, links), steps=own, labels=rows),
        bootstrap=start.bootstrap,
        place=start.place,
    )


def created(text: str) -> str:
    """The time of the build that an older definition states; empty where it states none."""
    found = re.search(rf"^    {re.escape(CREATED_LABEL)} (\S+)$", text, re.MULTILINE)
    return found[1] if found else ""
