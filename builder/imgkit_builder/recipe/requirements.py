"""What a recipe's requirements are: the lines of its files, and the dependencies of its projects."""

from __future__ import annotations

import re
from pathlib import Path

from imgkit_builder.recipe import problems
from imgkit_entrypoints import files

PYPROJECT = "pyproject.toml"
UV_LOCK = "uv.lock"
# A larger pyproject.toml is not read: a hostile one could fill the memory.
_MOST_BYTES = 1 << 20

# A pip step must never replace these distributions of the base; their names are the same in every release.
PROTECTED = r"torch|torchvision|torchaudio|triton|pytorch[-_.]triton|nvidia[-_.]nccl[-_.]cu[0-9]+"

# "-r other.txt", "--constraint=c.txt", "./package", "/package", "file:///package"
_OTHER_FILE = re.compile(r"-[rce]\b|--(?:requirement|constraint|editable)\b|\.{0,2}/|file:")
# Neither a pre-release nor a local version.
_RELEASED_VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)*")


def released_pin(line: str) -> str:
    """Return the package of `PROTECTED` that `line` pins to a released version, else an empty text.

    ``torch==2.3.0  # as on mn5`` -> ``torch``; ``torch==2.3.0a0`` and ``numpy==1.26`` -> an empty text.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        # A requirements file may have options and a comment behind the requirement.
        requirement = Requirement(re.sub(r"\s(?:--|#).*", "", line.strip()))
    except InvalidRequirement:
        return ""
    if not re.fullmatch(PROTECTED, requirement.name, re.IGNORECASE):
        return ""
    for clause in requirement.specifier:
        if clause.operator in ("==", "===") and _RELEASED_VERSION.fullmatch(clause.version):
            return requirement.name
    return ""


def names_other_file(line: str) -> bool:
    """Return whether a line of a requirements file reads another file, which the image would not have.

    The image gets only this file, and the recipe's sha256 covers only its bytes.
    """
    return bool(_OTHER_FILE.match(line.strip()))


def read_requirements(file: Path) -> tuple[str, ...]:
    """Return the requirements and options that `file` states, one per line, without comments.

    A line that ends in a backslash continues on the next one, as pip reads it.

    Raises
    ------
    OSError : it cannot be read.
    """
    text = re.sub(r"\\\r?\n", "", files.read_text(file, errors="replace"))
    lines = []
    for line in text.splitlines():
        requirement = re.sub(r"(^|\s)#.*", "", line).strip()
        if requirement:
            lines.append(requirement)
    return tuple(lines)


def read_dependencies(folder: Path) -> tuple[str, ...]:
    """Return the dependencies that the pyproject.toml in `folder` states.

    The result is empty if the build backend computes them (``dynamic``).

    Raises
    ------
    OSError : there is no pyproject.toml, or it cannot be read.
    ValueError : it is not TOML, or its dependencies are not a list of strings.
    """
    text = files.read_text(folder / PYPROJECT, most_bytes=_MOST_BYTES)
    content = problems.parse_toml(text)
    project = content.get("project", {})
    dependencies = None
    if isinstance(project, dict):
        dependencies = project.get("dependencies", [])
    if not isinstance(dependencies, list) or not all(map(_is_line, dependencies)):
        raise ValueError("project.dependencies is not a list of strings")
    return tuple(dependencies)


def _is_line(value: object) -> bool:
    return isinstance(value, str) and "\n" not in value


def project_name(file: Path) -> str:
    """Return the canonical name of the project in a pyproject.toml.

    It is empty where the file states none.
    """
    try:
        content = problems.parse_toml(files.read_text(file, most_bytes=_MOST_BYTES))
        # Poetry before version 2 has a table of its own.
        table = {**content.get("tool", {}).get("poetry", {}), **content.get("project", {})}
        return canonical_name(table["name"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""


def requirement_name(requirement: str) -> str:
    """Return ``flash-attn`` of ``Flash_Attn[extra]>=2``, or an empty text if no name begins it.

    Names of Debian's packages may contain ``+``.
    """
    match = re.match(r"\s*([A-Za-z0-9](?:[A-Za-z0-9.+_-]*[A-Za-z0-9+])?)", requirement)
    if match is None:
        return ""
    return canonical_name(match[1])


def canonical_name(name: str) -> str:
    """Return the name of a distribution as PyPA's specification normalises it."""
    return re.sub(r"[-_.]+", "-", name).lower()
