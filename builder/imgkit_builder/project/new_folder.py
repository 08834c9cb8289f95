"""The files of ``imgkit init``: ``imgkit.toml``, a recipe, ``examples/train.py``, ``.gitignore``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.project import toml_file
from imgkit_builder.recipe import rules
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints.errors import UsageError

_TIME = "30m"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFolder:
    """What the user said about a folder that is to be written."""

    folder: Path
    recipe: str
    """The user's word for the recipe that the folder's own extends."""
    remote: str = ""
    account: str = ""
    queue: str = ""
    qos: str = ""
    time: str = ""
    nodes: str = "1"


def texts(wanted: NewFolder, parent: Target) -> Mapping[str, str]:
    """The content of each file by its name; `parent` is what the word for the recipe means."""
    from imgkit_builder.image.render import environment
    from imgkit_builder.recipe import load

    templates = environment("templates/project", None)
    name = _name(wanted.folder)
    facts = parent.system.queue
    required = {"queue" if key == "name" else key for key in facts.required}
    time = wanted.time or ("" if facts.time else _TIME)
    given = {"account": wanted.account, "queue": wanted.queue, "qos": wanted.qos, "time": time}
    values = {
        "name": name,
        "remote": wanted.remote,
        "parent": str(parent.file) if load.is_path(wanted.recipe) else wanted.recipe,
        "description": f"{name}, on {parent.system.title or parent.name}",
        "queue": [(key, value) for key, value in given.items() if value or key in required],
        "unused": [key for key, value in given.items() if not value and key not in required],
        "required": required,
        "nodes": int(wanted.nodes) if wanted.nodes.isdecimal() else wanted.nodes,
    }
    sources = {
        toml_file.NAME: toml_file.NAME,
        f"{name}.yaml": "recipe.yaml",
        "train.py": "train.py",
        ".gitignore": "gitignore",
    }
    return {file: templates.get_template(f"{source}.j2").render(values) for file, source in sources.items()}


def missing(wanted: NewFolder, parent: Target) -> tuple[str, ...]:
    """Keys that the system needs and that nobody has stated."""
    facts = parent.system.queue
    keys = ["queue" if key == "name" else key for key in facts.required if not getattr(facts, key)]
    return tuple(key for key in keys if key != "time" and not getattr(wanted, key))


def write(folder: Path, wanted: Mapping[str, str], *, keep: bool) -> tuple[Path, ...]:
    """Write the files of `wanted`, and return their paths; with `keep` those that are missing.

    Raises
    ------
    UsageError : a value is wrong or, without `keep`, some are there already; nothing is written.
    """
    toml_file.parse(wanted[toml_file.NAME], folder / toml_file.NAME)
    taken = [name for name in wanted if (folder / name).is_symlink() or (folder / name).exists()]
    if taken and not keep:
        raise UsageError(
            f"these files already exist: {', '.join(taken)}",
            where=str(folder),
            hint="--keep-existing keeps them and writes the others",
        )
    folder.mkdir(parents=True, exist_ok=True)
    made = [folder / name for name in wanted if name not in taken]
    for path in made:
        files.put(path, wanted[path.name])
    return tuple(made)


def _name(folder: Path) -> str:
    """The name of the image and its jobs: that of the folder, where an image can have it."""
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in folder.name.lower())
    name = "-".join(part for part in name.split("-") if part)[:40]
    return "project" if not name or [*rules.recipe_name(name)] else name
