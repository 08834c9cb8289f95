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

MIN_CHARACTERS = 8
"""Length of the shortest line that imgkit searches for. Shorter ones are in many texts by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretValues:
    """What a build needs of its secrets. The default has none."""

    options: tuple[str, ...] = ()
    """Options of ``docker buildx build`` and ``podman build``, which name the sources and hold no value."""
    lines: tuple[str, ...] = field(default=(), repr=False)

    def mask(self, text: str) -> str:
        """Return `text` with stars for these values, and for what else looks like a secret."""
        for line in self.lines:
            text = text.replace(line, "***")
        return secret_patterns.mask_secrets(text)


def read_secrets(recipe: Recipe) -> SecretValues:
    """Read the secrets that steps of `recipe` use.

    Raises
    ------
    UsageError : a variable is not set, a file cannot be read, or a value is too short to search for.
    """
    options: list[str] = []
    values: set[str] = set()
    used_secrets = recipe.image.used_secrets
    for number, secret in enumerate(recipe.image.secrets):
        if secret.id not in used_secrets:
            continue
        where = recipe.where("image", "secrets", number)
        value = _read_value(secret, where)
        lines = [line for line in value.splitlines() if len(line) >= MIN_CHARACTERS]
        # The first and last line of a key are the same in all keys.
        lines = [line for line in lines if not line.startswith("-----")]
        if not lines:
            raise UsageError(
                f"the secret {secret.id} has no line of {MIN_CHARACTERS} characters",
                where=where,
                hint="imgkit searches for it in the files of the build; shorter values also occur by chance",
            )
        values.update(lines)
        source = f"env={secret.env}" if secret.env else f"src={secret.file}"
        options += ["--secret", f"id={secret.id},{source}"]
    # The longest first: a value may be a part of another one.
    return SecretValues(options=tuple(options), lines=tuple(sorted(values, key=len, reverse=True)))


def _read_value(secret: BuildSecret, where: str) -> str:
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


def refuse_secrets_in(context: BuildContext, values: SecretValues) -> None:
    """Search the build context for the values.

    Raises
    ------
    UsageError : a file holds one; its content would be in the image.
    """
    if not values.lines:
        return
    needles = [line.encode("utf-8", "surrogateescape") for line in values.lines]
    member = members.find_text(context.members, needles)
    if member is None:
        return
    name = member
    if member.startswith(("copy/", "project/")):
        name = member.split("/", 2)[-1]  # without the number of the step: "copy/0/a.py"
    raise UsageError(
        f"{name} holds the value of a build secret, and would be in the image",
        where=member,
        hint=f"list {name} under `ignore` or in .dockerignore, or take the value out of the recipe",
    )
