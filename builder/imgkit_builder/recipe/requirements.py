"""What a recipe's requirements are: the lines of its files, and the dependencies of its projects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from imgkit_builder.recipe import toml_text

PYPROJECT = "pyproject.toml"
_MOST_CHARACTERS = 1 << 20

_OTHER_FILE = re.compile(r"-[rce]\b|--(?:requirement|constraint|editable)\b|\.{0,2}/|file:")


def names_other_file(line: str) -> bool:
    """Whether a line of a requirements file reads another file, which the image would not have.

    The image gets only this file, and the recipe's sha256 covers only its bytes.
    """
    return bool(_OTHER_FILE.match(line.strip()))


def of_file(file: Path) -> tuple[str, ...]:
    """The requirements and options that `file` states, one per line, without comments.

    A line that ends in a backslash continues on the next one, as pip reads it.

    Raises
    ------
    OSError : it cannot be read.
    """
    whole = re.sub(r"\\\r?\n", "", file.read_text(encoding="utf-8", errors="replace"))
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in whole.splitlines())
    return tuple(line for line in lines if line)


def of_project(folder: Path) -> tuple[str, ...]:
    """The dependencies that the project's pyproject.toml states; none where its build backend computes them.

    Raises
    ------
    OSError : there is no pyproject.toml, or it cannot be read.
    ValueError : it is not TOML, or its dependencies are not a list of texts.
    ToolMissing : this Python cannot read TOML.
    """
    with (folder / PYPROJECT).open(encoding="utf-8") as stream:
        text = stream.read(_MOST_CHARACTERS + 1)
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"it has more than {_MOST_CHARACTERS} characters")
    try:
        content: dict[str, Any] = toml_text.parse(text)
    except RecursionError:
        raise ValueError("its brackets lie too deep within each other") from None
    project = content.get("project", {})
    stated = project.get("dependencies", []) if isinstance(project, dict) else None
    if not isinstance(stated, list) or not all(isinstance(one, str) and "\n" not in one for one in stated):
        raise ValueError("project.dependencies is not a list of texts")
    return tuple(stated)
