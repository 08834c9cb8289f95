"""Read the Python requirements of a recipe: lines of requirements files, and dependencies of projects."""

from __future__ import annotations

import re
from pathlib import Path

from imgkit_builder.recipe import problems
from imgkit_entrypoints import files

PYPROJECT = "pyproject.toml"
UV_LOCK = "uv.lock"
# A larger pyproject.toml is not read, because a hostile one could fill the memory.
_MOST_BYTES = 1 << 20

# A pip step must never replace these distributions of the base image. Their names are the same in every
# release.
PROTECTED = r"torch|torchvision|torchaudio|triton|pytorch[-_.]triton|nvidia[-_.]nccl[-_.]cu[0-9]+"

# "-r other.txt", "--constraint=c.txt", "./package", "/package", "file:///package"
_OTHER_FILE = re.compile(r"-[rce]\b|--(?:requirement|constraint|editable)\b|\.{0,2}/|file:")
# Matches "2.3.0", but no pre-release such as "2.3.0a0" and no local version such as "2.3.0+cu121".
_RELEASED_VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)*")


def find_protected_pin(line: str) -> str:
    """Return the name of the protected package that `line` pins to a released version, or an empty text.

    `PROTECTED` is a regular expression for the names of these packages. For example, ``torch==2.3.0 # as on
    mn5`` gives ``torch``. The result for ``torch==2.3.0a0`` and for ``numpy==1.26`` is empty.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        # In a requirements file, options and a comment may follow the requirement.
        requirement = Requirement(re.sub(r"\s(?:--|#).*", "", line.strip()))
    except InvalidRequirement:
        return ""
    is_protected = re.fullmatch(PROTECTED, requirement.name, re.IGNORECASE)
    if not is_protected:
        return ""
    for clause in requirement.specifier:
        if clause.operator in ("==", "===") and _RELEASED_VERSION.fullmatch(clause.version):
            return requirement.name
    return ""


def names_other_file(line: str) -> bool:
    """Return whether a line of a requirements file refers to another file.

    That file would be missing, because only the requirements file itself is copied into the image. The
    recipe's sha256 does not cover it, either.
    """
    return bool(_OTHER_FILE.match(line.strip()))


def read_requirements(file: Path) -> tuple[str, ...]:
    """Return the requirements and options in a requirements file, without comments.

    As in pip, a line that ends in a backslash continues on the next line.

    Raises
    ------
    OSError : the file cannot be read.
    """
    joined_text = re.sub(r"\\\r?\n", "", files.read_text(file, errors="replace"))
    lines = []
    for line in joined_text.splitlines():
        requirement = re.sub(r"(^|\s)#.*", "", line).strip()
        if requirement:
            lines.append(requirement)
    return tuple(lines)


def read_dependencies(folder: Path) -> tuple[str, ...]:
    """Return the dependencies that the pyproject.toml in `folder` lists.

    The result is empty if the build backend computes them (``dynamic``).

    Raises
    ------
    OSError : the folder has no pyproject.toml, or the file cannot be read.
    ValueError : the file is not TOML, or its dependencies are not a list of strings.
    """
    text = files.read_text(folder / PYPROJECT, most_bytes=_MOST_BYTES)
    content = problems.parse_toml(text)
    project = content.get("project", {})
    # None, which is no list, leads to the error below if `project` is not a table.
    dependencies = None
    if isinstance(project, dict):
        dependencies = project.get("dependencies", [])
    if not isinstance(dependencies, list) or not all(map(_is_line, dependencies)):
        raise ValueError("project.dependencies is not a list of strings")
    return tuple(dependencies)


def _is_line(value: object) -> bool:
    """Return whether `value` is a text of one line. A line break would add a line to a requirements file."""
    return isinstance(value, str) and "\n" not in value


def project_name(file: Path) -> str:
    """Return the canonical name of the project in a pyproject.toml, or an empty text if it has none.

    The result is also empty if the file cannot be read.
    """
    try:
        content = problems.parse_toml(files.read_text(file, most_bytes=_MOST_BYTES))
        # Poetry before version 2 writes the name to its own table.
        table = {**content.get("tool", {}).get("poetry", {}), **content.get("project", {})}
        return canonical_name(table["name"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""


def requirement_name(requirement: str) -> str:
    """Return the name at the beginning of a requirement: ``flash-attn`` of ``Flash_Attn[extra]>=2``.

    If the text does not begin with a name, the result is empty. Names of Debian packages may contain ``+``.
    """
    match = re.match(r"\s*([A-Za-z0-9](?:[A-Za-z0-9.+_-]*[A-Za-z0-9+])?)", requirement)
    if match is None:
        return ""
    return canonical_name(match[1])


def canonical_name(name: str) -> str:
    """Return the name of a distribution as PyPA's specification normalises it: ``flash-attn``."""
    return re.sub(r"[-_.]+", "-", name).lower()
