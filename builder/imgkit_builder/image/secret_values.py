"""Read the values of build secrets on this machine, pass them to a builder, and mask them in its output."""

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
"""The length of the shortest line that imgkit searches for. Shorter lines occur in many texts by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretValues:
    """The secrets of a build. By default there are none."""

    options: tuple[str, ...] = ()
    """Options of ``docker buildx build`` and ``podman build``.

    They name the sources of the secrets, not the values.
    """
    lines: tuple[str, ...] = field(default=(), repr=False)

    def mask(self, text: str) -> str:
        """Return `text` with stars in place of these values, and of other texts that look like secrets."""
        for line in self.lines:
            text = text.replace(line, "***")
        return secret_patterns.mask_secrets(text)


def read_secrets(recipe: Recipe) -> SecretValues:
    """Read the secrets that the steps of `recipe` use.

    Raises
    ------
    UsageError : a variable is not set, a file cannot be read, or a value is too short to search for it.
    """
    options = []
    lines = set()
    used_secrets = recipe.image.used_secrets
    for index, secret in enumerate(recipe.image.secrets):
        # Only secrets that a step uses must be set on this machine.
        if secret.id not in used_secrets:
            continue
        lines.update(_read_searchable_lines(secret, recipe.where("image", "secrets", index)))
        source = f"env={secret.env}" if secret.env else f"src={secret.file}"
        options += ["--secret", f"id={secret.id},{source}"]
    # Sort the longest first, because a value may be part of another one and would then hide it from `mask`.
    return SecretValues(options=tuple(options), lines=tuple(sorted(lines, key=len, reverse=True)))


def _read_searchable_lines(secret: BuildSecret, where: str) -> list[str]:
    """Return the lines of a secret that are long enough not to occur in other files by chance.

    If there is none, raise UsageError. `where` is the line of the recipe.
    """
    lines = [line for line in _read_value(secret, where).splitlines() if len(line) >= MIN_CHARACTERS]
    # The first and the last line of a PEM key, "-----BEGIN ...", are the same in all keys.
    searchable_lines = [line for line in lines if not line.startswith("-----")]
    if not searchable_lines:
        raise UsageError(
            f"the secret {secret.id} has no line of {MIN_CHARACTERS} characters",
            where=where,
            hint="imgkit searches for it in the files of the build; shorter values also occur by chance",
        )
    return searchable_lines


def _read_value(secret: BuildSecret, where: str) -> str:
    """Return the value of a secret from its variable or its file. `where` is the line of the recipe."""
    if secret.env is not None:
        value = os.environ.get(secret.env, "")
        if not value:
            problem = f"the variable {secret.env} of the secret {secret.id} is not set"
            raise UsageError(problem, where=where, hint=f"export {secret.env}=..., then build again")
        return value
    # The check of the recipe has made sure that a secret has either a variable or a file.
    file = secret.file or Path()
    try:
        return files.read_text(file, errors="surrogateescape")
    except OSError as error:
        problem = f"the file of the secret {secret.id} cannot be read: {error.strerror}"
        raise UsageError(problem, where=where, hint=f"create {file}, or change image.secrets") from error


def refuse_secrets_in(context: BuildContext, values: SecretValues) -> None:
    """Refuse a build context in which a file contains the value of a build secret.

    Such a file would be copied into the image, where anybody who pulls the image could read the value.

    Raises
    ------
    UsageError : a file contains such a value.
    """
    if not values.lines:
        return
    encoded_lines = [line.encode("utf-8", "surrogateescape") for line in values.lines]
    member_name = members.find_text(context.members, encoded_lines)
    if member_name is None:
        return
    file = member_name
    # The user knows the path below the source, not the one in the context.
    if member_name.startswith(("copy/", "project/")):
        _, _, file = member_name.split("/", 2)  # "copy/0/a.py" -> "a.py"
    raise UsageError(
        f"{file} holds the value of a build secret, and would be in the image",
        where=member_name,
        hint=f"list {file} under `ignore` or in .dockerignore, or take the value out of the recipe",
    )
