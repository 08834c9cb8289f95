"""Write the files of ``imgkit init`` into a folder.

These are ``imgkit.toml``, a recipe and ``.gitignore``, and an example program if the folder has no Python.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_builder.base import files
from imgkit_builder.image import skeleton
from imgkit_builder.image.render import template_environment
from imgkit_builder.jobs import runtimes, systems
from imgkit_builder.project import program, toml_file
from imgkit_builder.recipe import rules
from imgkit_builder.recipe.system_files import is_path
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints.errors import UsageError

# The example program.
PROGRAM = "train.py"
GITIGNORE = ".gitignore"
# The time limit in a new imgkit.toml, where neither the user nor the recipe sets one.
_TIME = "30m"
# What imgkit writes into a folder, in the syntax of .gitignore.
_OUTPUTS = ("runs/", "*.sif", "*.sqsh")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFolder:
    """The options of ``imgkit init``."""

    folder: Path
    recipe: str
    """The recipe that the folder's own recipe extends: a shipped name or a path, as the user typed it."""
    parent: Target
    """That recipe."""
    remote: str = ""
    values: Mapping[str, str]
    """The values of flags for the keys account, queue, qos and time. Empty: the flag was not given."""
    nodes: str = ""
    """The value of the flag ``--nodes``."""

    @property
    def name(self) -> str:
        """The name of the image and its jobs, made from that of the folder: ``My Project`` -> ``my-project``.

        It is ``project`` if no valid name is left.
        """
        name = re.sub(r"[^a-z0-9]+", "-", self.folder.name.lower()).strip("-")[:40]
        if not name or any(rules.recipe_name(name)):  # the rule yields what is wrong with a name
            return "project"
        return name

    @property
    def recipe_file(self) -> str:
        """The file name of the folder's recipe."""
        return f"{self.name}.yaml"

    @property
    def command(self) -> tuple[str, ...]:
        """The command of jobs. Empty if the folder has several programs that a job may start, or none."""
        if not program.has_code(self.folder):
            return ("dist-run", PROGRAM, "--epochs", "5")
        programs = program.find_start_scripts(self.folder)
        if len(programs) != 1:
            return ()
        return ("dist-run", programs[0])

    @property
    def unfit_reason(self) -> str:
        """Why the image needs all files of the folder's project. Empty if it does not need them."""
        if not program.is_project(self.folder):
            return ""
        return skeleton.unfit_reason(self.folder)

    @property
    def copies_code(self) -> bool:
        """Whether the image has to hold the folder's code, because jobs cannot mount it.

        That is so where jobs run in pods, which get no other code. It is also so for a project of which pip
        needs all files to install it.
        """
        is_isolated = runtimes.get_runtime(self.parent.system.runtime.kind).is_isolated
        return is_isolated or bool(self.unfit_reason)


def file_texts(options: NewFolder) -> Mapping[str, str]:
    """Return the content of each file that ``imgkit init`` writes, by the name of the file.

    For a folder with Python files, there is no example program. The files then name the packages and the
    command of the folder's own program.
    """
    parent = options.parent
    values = {
        "name": options.name,
        "remote": options.remote,
        "parent": _parent_reference(options),
        "description": f"{options.name}, on {parent.title}",
        "required": _required_keys(parent),
        "command": _job_command(options),
        "programs": program.find_start_scripts(options.folder),
        "copies": options.copies_code,
        "unfit_reason": options.unfit_reason,
        "pip": program.pip_steps(options.folder, editable=not options.copies_code),
        **_queue_values(options),
    }
    sources = {toml_file.NAME: toml_file.NAME, options.recipe_file: "recipe.yaml", GITIGNORE: "gitignore"}
    if not program.has_code(options.folder):
        sources[PROGRAM] = PROGRAM
    templates = template_environment("templates/project", None)
    texts = {}
    for file, source in sources.items():
        texts[file] = templates.get_template(f"{source}.j2").render(values)
    return texts


def _parent_reference(options: NewFolder) -> str:
    """Return what the folder's recipe extends: a name, or a path that begins with ``./`` or ``../``."""
    if not is_path(options.recipe):
        return options.recipe
    # A path from the folder, so that the folder and the recipe can move or be cloned together.
    path = os.path.relpath(options.parent.file.resolve(), options.folder.resolve())
    return path if path.startswith("../") else f"./{path}"


def _queue_values(options: NewFolder) -> dict[str, Any]:
    """Return the values of the templates that tell how a job asks the scheduler for nodes.

    Keys of imgkit.toml with a value, and keys that the user has to fill in, are under ``queue``. Keys that
    the user may add are under ``unused``, which the template writes as comments.
    """
    parent = options.parent
    system = systems.get_system(parent.system.scheduler)
    required_keys = _required_keys(parent)
    values = dict(options.values)
    if not values["time"] and not parent.system.queue.time and "time" in system.uses:
        values["time"] = _TIME
    queue = {}
    unused_keys = []
    for key, value in values.items():
        if value or key in required_keys:
            queue[key] = value
        elif key in system.uses:  # imgkit run warns about a key that the scheduler does not use
            unused_keys.append(key)
    nodes = options.nodes
    if not nodes and not system.abilities.takes_hosts:  # a list of hosts (--hosts) sets the nodes
        nodes = "1"
    return {
        "queue": queue.items(),
        "unused": unused_keys,
        "nodes": int(nodes) if nodes.isdecimal() else nodes,
    }


def _job_command(options: NewFolder) -> tuple[str, ...]:
    """Return the command of jobs, with the program's path in the image if the code is there."""
    if not options.command or not options.copies_code:
        return options.command
    launcher, name, *arguments = options.command
    return (launcher, f"{skeleton.CODE_FOLDER}/{name}", *arguments)


def _required_keys(parent: Target) -> Mapping[str, bool]:
    """Return each key that a job on the system of `parent` needs, and whether that recipe sets it."""
    queue = parent.system.queue
    has_value: dict[str, bool] = {}
    for field in queue.required:
        key = "queue" if field == "name" else field  # the recipe's system.queue.name
        has_value[key] = bool(getattr(queue, field))
    return has_value


def next_steps(options: NewFolder, folder: Path) -> Iterator[str]:
    """Yield the steps that follow ``imgkit init``, one a line.

    They are commands, or keys of imgkit.toml to fill in. Values that only the user knows are in capitals.

    Parameters
    ----------
    folder : the folder of `options` as the user typed it.
    """
    parent = options.parent
    if not options.command:
        names = " or ".join(program.find_start_scripts(options.folder)) or "your program"
        yield f"command in imgkit.toml: the one that starts {names}"
    starts_sif = runtimes.get_runtime(parent.system.runtime.kind).image_suffix == ".sif"
    if starts_sif and not options.remote:
        yield "imgkit remote add NAME USER@HOST:DIR, and its name in imgkit.toml"
    for key, has_value in _required_keys(parent).items():
        # imgkit.toml has a time limit already.
        if not has_value and key != "time" and not options.values[key]:
            yield f"{key} in imgkit.toml, which {parent.name} needs"
    commands = _run_commands(options)
    if folder != Path():
        commands[0] = f"cd {shlex.quote(str(folder))} && {commands[0]}"
    yield from commands


def _run_commands(options: NewFolder) -> list[str]:
    """Return the commands that build the image and run a job, for the user to type.

    They depend on the runtime of the system: pods need a registry, and pyxis needs a .sqsh.
    """
    recipe = f"./{options.recipe_file}"
    image = f"REGISTRY/{options.name}:1"
    build = f"imgkit build {recipe}"
    push = f"imgkit push {recipe} {image}"
    commands_of_runtime = {
        "kubernetes": [f"{build} && {push}", f"imgkit run --image {image} --pvc CLAIM:/PATH"],
        "docker": [f"{build} && imgkit run"],
        "pyxis": [f"{build} && imgkit sif {recipe} --format sqsh && imgkit run"],
    }
    system = options.parent.system
    kind = system.runtime.kind
    # The others start a .sif on a cluster, for which imgkit run does all steps.
    commands = commands_of_runtime.get(kind, ["imgkit run --dry-run && imgkit run"])
    takes_hosts = systems.get_system(system.scheduler).abilities.takes_hosts
    if takes_hosts and not runtimes.get_runtime(kind).image_suffix:
        commands.append(f"{push} && imgkit run --hosts HOST1,HOST2 --image {image}")
    return commands


def write_files(folder: Path, contents: Mapping[str, str]) -> tuple[Path, ...]:
    """Write each file of `contents` that does not exist yet, and return the paths of the new files.

    A file of the user is never replaced.

    Raises
    ------
    UsageError : a value is wrong, or the folder has an imgkit.toml. In both cases nothing is written.
    """
    # This finds a wrong value of a flag before any file is written.
    toml_file.parse_text(contents[toml_file.NAME], folder / toml_file.NAME)
    if os.path.lexists(folder / toml_file.NAME):
        raise UsageError(
            f"there is an {toml_file.NAME}", where=str(folder), hint="edit it, or remove it for a new one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / name for name in contents if not os.path.lexists(folder / name))
    for path in paths:
        files.write_file(path, contents[path.name])
    return paths


def complete_gitignore(folder: Path) -> tuple[str, ...]:
    """Add missing lines for imgkit's outputs, such as ``*.sif``, to the user's .gitignore, and return them.

    Without these lines git would add images of gigabytes. The other lines of the template are not added, as
    they could hide files of the user.
    """
    path = folder / GITIGNORE
    if path.is_symlink() or not path.is_file():
        return ()
    text = files.read_text(path)
    present_lines = text.splitlines()
    missing_lines = [line for line in _OUTPUTS if line not in present_lines]
    if not missing_lines:
        return ()
    if text and not text.endswith("\n"):
        text += "\n"
    files.write_file(path, text + "\n".join(missing_lines) + "\n")
    return tuple(missing_lines)
