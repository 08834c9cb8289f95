"""The values of build secrets on this machine: options for the builder, stars for its output."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from imgkit_builder.image import members
from imgkit_builder.image.context import BuildContext
from imgkit_builder.recipe.model import BuildSecret, Recipe
from imgkit_entrypoints import files, secret_patterns
from imgkit_entrypoints.errors import UsageError

LEAST = 8
"""Characters of the shortest line that imgkit searches for; shorter ones are in many texts by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretValues:
    """What a build needs of its secrets; the default has none."""

    options: tuple[str, ...] = ()
    """Options of ``docker buildx build`` and ``podman build``, which name the sources and hold no value."""
    lines: tuple[str, ...] = field(default=(), repr=False)

    def masked(self, text: str) -> str:
        """Return `text` with stars for these values, and for what else looks like a secret."""
        for line in self.lines:
            text = text.replace(line, "***")
        return secret_patterns.masked(text)


def read(recipe: Recipe) -> SecretValues:
    """Read the secrets that steps of `recipe` use.

    Raises
    ------
    UsageError : a variable is not set, a file cannot be read, or a value is too short to search for.
    """
    options: list[str] = []
    values: set[str] = set()
    for number, secret in enumerate(recipe.image.secrets):
        if secret.id not in recipe.image.used_secrets:
            continue
        where = recipe.where("image", "secrets", number)
        lines = _value(secret, where).splitlines()
        # The first and last line of a key are the same in all keys.
        lines = [line for line in lines if len(line) >= LEAST and not line.startswith("-----")]
        if not lines:
            raise UsageError(
                f"the secret {secret.id} has no line of {LEAST} characters",
                where=where,
                hint="imgkit searches for it in the files of the build; shorter values also occur by chance",
            )
        values.update(lines)
        source = f"env={secret.env}" if secret.env else f"src={secret.file}"
        options += ["--secret", f"id={secret.id},{source}"]
    return SecretValues(options=tuple(options), lines=tuple(sorted(values, key=len, reverse=True)))


def _value(secret: BuildSecret, where: str) -> str:
    if secret.env is not None:
        value = os.environ.get(secret.env, "")
        if not value:
            problem = f"the variable {secret.env} of the secret {secret.id} is not set"
            raise UsageError(problem, where=where, hint=f"export {secret.env}=..., then build again")
        return value
    file = secret.file or Path()
    try:
        return files.read_text(file, errors="surrogateescape")
    except OSError as error:
        problem = f"the file of the secret {secret.id} cannot be read: {error.strerror}"
        raise UsageError(problem, where=where, hint=f"create {file}, or change image.secrets") from error


def refuse_in(context: BuildContext, values: SecretValues) -> None:
    """Search the build context for the values.

    Raises
    ------
    UsageError : a file holds one; its content would be in the image.
    """
    needles = [line.encode("utf-8", "surrogateescape") for line in values.lines]
    member = next(members.holding(context.members, needles), "") if needles else ""
    if member:
        name = member.split("/", 2)[-1] if member.startswith(("copy/", "project/")) else member
        raise UsageError(
            f"{name} holds the value of a build secret, and would be in the image",
            where=member,
            hint=f"list {name} under `ignore` or in .dockerignore, or take the value out of the recipe",
        )
