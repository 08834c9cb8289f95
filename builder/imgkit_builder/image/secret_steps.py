"""The text of a step that uses secrets: what mounts them, and the script around the command."""

from __future__ import annotations

from collections.abc import Sequence

from imgkit_builder.image.instructions import NEXT
from imgkit_builder.recipe.model import Recipe

WITH_SECRETS = "imgkit/with-secrets"
"""The script around a step that uses secrets, in the build context and below ``/run``."""


def mounts(names: Sequence[str]) -> str:
    """The options of RUN for a step with secrets, in BuildKit's dialect, which podman knows too."""
    if not names:
        return ""
    script = f"--mount=type=bind,source={WITH_SECRETS},target=/run/{WITH_SECRETS}"
    return "".join(
        f"{option}{NEXT}" for option in (*(f"--mount=type=secret,id={name}" for name in names), script)
    )


def wrapped(recipe: Recipe, names: Sequence[str], before: str) -> str:
    """What comes before a command that uses secrets: it gets them, and must not write them to a file."""
    if not names:
        return ""
    variables = {secret.id: secret.env for secret in recipe.image.secrets}
    words = [f"{name}={variables[name]}" if variables.get(name) else name for name in names]
    return f"sh /run/{WITH_SECRETS} {' '.join(words)} --{NEXT}{before}"
