"""Build contexts of recipes made by hand, and what is in them."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path
from typing import Any

from imgkit_builder.image import context
from imgkit_builder.image.context import BuildContext
from imgkit_builder.oci.manifest import BaseImage
from imgkit_builder.recipe.model import Recipe


def pack(recipe: Recipe, **options: Any) -> BuildContext:
    """Pack `recipe` for linux/amd64 on a base without known values; `options` are those of `pack_context`."""
    values = {"base": BaseImage(name="b:1"), "platform": "linux/amd64", "revision": "", **options}
    return context.pack_context(recipe, **values)


def tar_members(packed: BuildContext) -> list[tarfile.TarInfo]:
    with packed.open() as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        return archive.getmembers()


def own_file(packed: BuildContext, name: str) -> bytes:
    """Return the content of a file that imgkit has made."""
    (member,) = (member for member in packed.members if member.name == name)
    return member.data


def git(folder: Path, *args: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", folder, *identity, *args], check=True, capture_output=True)
