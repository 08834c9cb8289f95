"""The files of ``imgkit init``: ``imgkit.toml``, a recipe, ``examples/train.py``, ``.gitignore``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.job import systems
from imgkit_builder.project import toml_file
from imgkit_builder.recipe import rules
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints.errors import UsageError

PROGRAM = "train.py"
GITIGNORE = ".gitignore"
_TIME = "30m"
_OUTPUTS = ("runs/", "*.sif", "*.imgdelta")


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
    nodes: str = ""

    @property
    def name(self) -> str:
        """The name of the image and its jobs: that of the folder, where an image can have it."""
        text = self.folder.name.lower()
        name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text)
        name = "-".join(part for part in name.split("-") if part)[:40]
        return "project" if not name or [*rules.recipe_name(name)] else name


def texts(wanted: NewFolder, parent: Target) -> Mapping[str, str]:
    """The content of each file by its name; `parent` is what the word for the recipe means."""
    from imgkit_builder.image.render import environment
    from imgkit_builder.recipe import load

    templates = environment("templates/project", None)
    name = wanted.name
    facts = parent.system.queue
    uses = systems.named(parent.system.scheduler).uses
    required = {"queue" if key == "name" else key for key in facts.required}
    time = wanted.time or ("" if facts.time or "time" not in uses else _TIME)
    by_hosts = parent.system.scheduler == "mpi"  # the list of hosts is the number of nodes
    nodes = wanted.nodes or ("" if by_hosts else "1")
    given = {"account": wanted.account, "queue": wanted.queue, "qos": wanted.qos, "time": time}
    values = {
        "name": name,
        "remote": wanted.remote,
        "parent": _from(wanted.folder, parent.file) if load.is_path(wanted.recipe) else wanted.recipe,
        "description": f"{name}, on {parent.system.title or parent.name}",
        "queue": [(key, value) for key, value in given.items() if value or key in required],
        "unused": [key for key, value in given.items() if not value and key not in required and key in uses],
        "required": required,
        "nodes": int(nodes) if nodes.isdecimal() else nodes,
        # Only the program that imgkit writes has the option.
        "own_program": os.path.lexists(wanted.folder / PROGRAM),
    }
    sources = {
        toml_file.NAME: toml_file.NAME,
        f"{name}.yaml": "recipe.yaml",
        PROGRAM: "train.py",
        GITIGNORE: "gitignore",
    }
    return {file: templates.get_template(f"{source}.j2").render(values) for file, source in sources.items()}


def missing(wanted: NewFolder, parent: Target) -> tuple[str, ...]:
    """Keys that the system needs and that nobody has stated."""
    facts = parent.system.queue
    keys = ["queue" if key == "name" else key for key in facts.required if not getattr(facts, key)]
    return tuple(key for key in keys if key != "time" and not getattr(wanted, key))


def _from(folder: Path, file: Path) -> str:
    """`file` as a path that starts at `folder`: both can move together, or be cloned."""
    path = os.path.relpath(file.resolve(), folder.resolve())
    return path if path.startswith("../") else f"./{path}"


def next_steps(wanted: NewFolder, parent: Target, shown_folder: Path) -> Iterator[str]:
    """What the user does now: commands as they are typed, with what only the user knows in capitals."""
    cd = "" if shown_folder == Path() else f"cd {shlex.quote(str(shown_folder))} && "
    recipe, ref = f"./{wanted.name}.yaml", f"REGISTRY/{wanted.name}:1"
    kind, scheduler = parent.system.runtime.kind, parent.system.scheduler
    needed = [f"{key} in imgkit.toml, which {parent.name} needs" for key in missing(wanted, parent)]
    if kind == "kubernetes":
        yield from needed
        yield f"{cd}imgkit build {recipe} && imgkit push {recipe} {ref}"
        yield f"imgkit submit --image {ref} --pvc CLAIM:/PATH"
    elif kind == "docker":
        yield from needed
        yield f"{cd}imgkit build {recipe} && imgkit submit"
        if scheduler == "mpi":
            yield f"imgkit push {recipe} {ref} && imgkit submit --hosts HOST1,HOST2 --image {ref}"
    elif kind == "pyxis":
        yield from needed
        yield f"{cd}imgkit build {recipe} && imgkit sif {recipe} --format sqsh && imgkit submit"
    else:
        if not wanted.remote:
            yield "imgkit remote add NAME USER@HOST:DIR, and its name in imgkit.toml"
        yield from needed
        yield f"{cd}imgkit run --dry-run && imgkit run"


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


def complete_gitignore(folder: Path) -> tuple[str, ...]:
    """Add the lines about imgkit's outputs that a .gitignore of the user lacks; returns them.

    Else git would take images of gigabytes. Other lines of the template could hide files of the user.
    """
    path = folder / GITIGNORE
    if path.is_symlink() or not path.is_file():
        return ()
    text = files.read_text(path)
    lines = tuple(line for line in _OUTPUTS if line not in text.splitlines())
    if lines:
        between = "" if not text or text.endswith("\n") else "\n"
        files.put(path, text + between + "\n".join(lines) + "\n")
    return lines
