"""The files of ``imgkit init``: ``imgkit.toml``, a recipe, ``examples/train.py``, ``.gitignore``."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.job import systems
from imgkit_builder.project import toml_file
from imgkit_builder.recipe import rules
from imgkit_builder.recipe.system_files import is_path
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints.errors import UsageError

PROGRAM = "train.py"
GITIGNORE = ".gitignore"
_TIME = "30m"
_OUTPUTS = ("runs/", "*.sif", "*.imgdelta")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFolder:
    """The options of ``imgkit init``."""

    folder: Path
    recipe: str
    """The recipe that the folder's own extends, as the user names it."""
    remote: str = ""
    values: Mapping[str, str]
    """Values of flags for keys of ``imgkit.toml``: account, queue, qos, time, nodes; empty: not given."""

    @property
    def name(self) -> str:
        """Return the name of the image and its jobs: that of the folder, where an image can have it."""
        name = re.sub(r"[^a-z0-9]+", "-", self.folder.name.lower()).strip("-")[:40]
        return "project" if not name or [*rules.recipe_name(name)] else name


def texts(options: NewFolder, parent: Target) -> Mapping[str, str]:
    """Return the content of each file by its name; `parent` is the recipe that `options` name."""
    from imgkit_builder.image.render import environment

    facts, scheduler = parent.system.queue, parent.system.scheduler
    # imgkit run warns of a key that the scheduler does not use.
    used = systems.named(scheduler).uses
    required = _required_keys(parent)
    # A recipe that is a file is named by a path from the folder, so that both can move or be cloned together.
    path = os.path.relpath(parent.file.resolve(), options.folder.resolve())
    path = path if path.startswith("../") else f"./{path}"
    queue = {key: value for key, value in options.values.items() if key != "nodes"}
    if not queue["time"] and not facts.time and "time" in used:
        queue["time"] = _TIME
    # For mpi, the list of hosts is the number of nodes.
    nodes = options.values["nodes"] or ("" if scheduler == "mpi" else "1")
    values = {
        "name": options.name,
        "remote": options.remote,
        "parent": path if is_path(options.recipe) else options.recipe,
        "description": f"{options.name}, on {parent.system.title or parent.name}",
        "queue": [(key, value) for key, value in queue.items() if value or key in required],
        "unused": [key for key, value in queue.items() if not value and key in used and key not in required],
        "required": required,
        "nodes": int(nodes) if nodes.isdecimal() else nodes,
        # Only the program that imgkit writes has the option --epochs.
        "own_program": os.path.lexists(options.folder / PROGRAM),
    }
    names = (toml_file.NAME, f"{options.name}.yaml", PROGRAM, GITIGNORE)
    sources = zip(names, (toml_file.NAME, "recipe.yaml", PROGRAM, "gitignore"), strict=True)
    templates = environment("templates/project", None)
    return {file: templates.get_template(f"{source}.j2").render(values) for file, source in sources}


def _required_keys(parent: Target) -> Mapping[str, bool]:
    """Return the keys that a job on the system needs, and whether its recipe has a value for each."""
    queue = parent.system.queue
    return {"queue" if key == "name" else key: bool(getattr(queue, key)) for key in queue.required}


def next_steps(options: NewFolder, parent: Target, folder: Path) -> Iterator[str]:
    """Yield the commands to type next, with values that only the user knows in capitals."""
    cd = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    recipe, ref = f"./{options.name}.yaml", f"REGISTRY/{options.name}:1"
    build = f"{cd}imgkit build {recipe}"
    commands = {
        "kubernetes": [
            f"{build} && imgkit push {recipe} {ref}",
            f"imgkit run --image {ref} --pvc CLAIM:/PATH",
        ],
        "docker": [f"{build} && imgkit run"],
        "pyxis": [f"{build} && imgkit sif {recipe} --format sqsh && imgkit run"],
    }.get(parent.system.runtime.kind)
    if commands is None and not options.remote:
        yield "imgkit remote add NAME USER@HOST:DIR, and its name in imgkit.toml"
    for key, has_value in _required_keys(parent).items():
        # imgkit.toml has a time limit already.
        if not has_value and key != "time" and not options.values[key]:
            yield f"{key} in imgkit.toml, which {parent.name} needs"
    yield from commands or [f"{cd}imgkit run --dry-run && imgkit run"]
    if parent.system.runtime.kind == "docker" and parent.system.scheduler == "mpi":
        yield f"imgkit push {recipe} {ref} && imgkit run --hosts HOST1,HOST2 --image {ref}"


def write(folder: Path, contents: Mapping[str, str], *, keep: bool) -> tuple[Path, ...]:
    """Write `contents` by file name, and return the paths; with `keep` only the files that are missing.

    Raises
    ------
    UsageError : a value is wrong or, without `keep`, some are there already; nothing is written.
    """
    # A wrong flag is found before any file is written.
    toml_file.parse(contents[toml_file.NAME], folder / toml_file.NAME)
    existing = [name for name in contents if os.path.lexists(folder / name)]
    if existing and not keep:
        raise UsageError(
            f"these files already exist: {', '.join(existing)}",
            where=str(folder),
            hint="--keep-existing keeps them and writes the others",
        )
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / name for name in contents if name not in existing)
    for path in paths:
        files.put(path, contents[path.name])
    return paths


def complete_gitignore(folder: Path) -> tuple[str, ...]:
    """Add imgkit's outputs to the user's .gitignore, and return the lines that it lacked.

    Else git would take images of gigabytes. Other lines of the template could hide files of the user.
    """
    path = folder / GITIGNORE
    if path.is_symlink() or not path.is_file():
        return ()
    text = files.read_text(path)
    lines = tuple(line for line in _OUTPUTS if line not in text.splitlines())
    if lines:
        line_end = "" if not text or text.endswith("\n") else "\n"
        files.put(path, text + line_end + "\n".join(lines) + "\n")
    return lines
