"""The system that a .sif is for, read from the image without a runtime."""

from __future__ import annotations

from pathlib import Path

from imgkit_builder.delta import source, tree
from imgkit_builder.image import manifest
from imgkit_builder.recipe.targets import Target, checked
from imgkit_builder.sif import image
from imgkit_entrypoints import system
from imgkit_entrypoints.errors import CheckFailed


def target(path: Path) -> Target:
    """The recipe's name and system inside the .sif `path`.

    Raises
    ------
    CheckFailed : it is damaged, or imgkit did not build its image.
    ToolMissing : this machine cannot unpack its compression.
    UsageError : its system holds a value that no recipe may have.
    """
    sif = image.read(path)
    layers = source.mounted(sif)
    try:
        made = manifest.from_json(_text(layers, manifest.MANIFEST_JSON))
        facts = system.from_json(_text(layers, str(system.SYSTEM_JSON)))
    except (KeyError, ValueError) as error:
        raise CheckFailed(
            f"it does not say which system it is for: {error}",
            where=str(path),
            hint=f"name the recipe: imgkit job RECIPE --image {path} ...",
        ) from error
    return checked(Target(name=made.recipe, system=facts, platforms=(f"linux/{sif.arch}",), file=path))


def _text(layers: tree.Stack, path: str) -> str:
    found = tree.content(layers, path)
    if found is None:
        raise KeyError(f"it has no {path}")
    return found.decode()
