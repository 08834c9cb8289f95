"""``imgkit show``: show the values of a recipe, or the facts about an image or a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.base.suffixes import RECIPE_SUFFIXES
from imgkit_builder.cli.common import JSON, name_argument, print_result
from imgkit_builder.cli.recipes import load_recipe
from imgkit_builder.engine.images import image_facts
from imgkit_builder.examine import file_facts
from imgkit_builder.recipe import targets
from imgkit_entrypoints import terminal

if TYPE_CHECKING:
    from imgkit_builder.engine.images import ImageFacts
    from imgkit_builder.examine.file_facts import FileFacts, PackagesFacts


def verb_show(
    name: str = name_argument("RECIPE|IMAGE|FILE", "A recipe, an image, or a .sif or .sqsh file."),
    as_json: bool = JSON,
) -> None:
    """Show a recipe, an image, a .sif or a .sqsh.

    For a recipe, show each value and the file and line that it comes from. A name
    without a colon or slash is a recipe; write NAME:TAG for an image.

    \b
    Examples:
      imgkit show mn5
      imgkit show ./mine.yaml --json
      imgkit show mn5:latest
      imgkit show mn5.sif
    """
    facts: FileFacts | PackagesFacts | ImageFacts
    if file_facts.is_image_file(name):
        facts = file_facts.read_file_facts(name)
    elif _is_image(name):
        facts = image_facts(name)
    else:
        _show_recipe(name, as_json=as_json)
        return
    print_result(facts.to_dict(), *facts.lines(), as_json=as_json)


def _show_recipe(recipe: str, *, as_json: bool) -> None:
    """Print each value of the recipe, with the file and line that it comes from."""
    values_json = targets.describe_as_json(load_recipe(recipe))
    if as_json:
        terminal.print_document(values_json.rstrip() + "\n")
    else:
        terminal.print_results(*targets.format_table(values_json))


def _is_image(name: str) -> bool:
    """Return whether `name` must be an image, because it has a tag, digest or slash and is not a file.

    For example, ``mn5:latest`` and ``ghcr.io/group/mn5`` must be images, and ``mn5`` is a recipe.
    """
    if name.endswith(RECIPE_SUFFIXES) or name.startswith((".", "/", "~")):
        return False
    if ":" not in name and "/" not in name:
        return False
    try:
        return not Path(name).exists()
    except OSError:  # the name is too long for a file, but not for an image
        return True
