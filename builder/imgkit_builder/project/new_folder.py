"""Write the files of ``imgkit init`` into a folder.

The files are ``imgkit.toml``, a recipe and ``.gitignore``. If the folder has no Python files, an example
program is written as well.
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
# The time limit in a new imgkit.toml if neither the user nor the recipe sets one.
_TIME = "30m"
# The files that imgkit writes into a project folder, in the syntax of .gitignore.
_IGNORED_OUTPUTS = ("runs/", "*.sif", "*.sqsh")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFolder:
    """The options of ``imgkit init``."""

    folder: Path
    recipe: str
    """The recipe that the folder's own recipe will extend: a shipped name or a path, as the user typed it."""
    parent: Target
    """The recipe to extend, as it was loaded."""
    remote: str = ""
    values: Mapping[str, str]
    """The values of the flags for account, queue, qos and time. It is empty for a flag that was not given."""
    nodes: str = ""
    """The value of the flag ``--nodes``."""

    @property
    def name(self) -> str:
        """The name of the image and its jobs, such as ``my-project`` for the folder ``My Project``.

        If no valid name can be made from the folder's name, the result is ``project``.
        """
        name = re.sub(r"[^a-z0-9]+", "-", self.folder.name.lower()).strip("-")[:40]
        has_faults = any(rules.find_recipe_name_faults(name))
        if not name or has_faults:
            return "project"
        return name

    @property
    def recipe_file(self) -> str:
        """The file name of the folder's recipe."""
        return f"{self.name}.yaml"

    @property
    def command(self) -> tuple[str, ...]:
        """The command of jobs. Empty if it is unclear which program of the folder a job should start."""
        if not program.has_code(self.folder):
            return ("dist-run", PROGRAM, "--epochs", "5")
        programs = program.find_start_scripts(self.folder)
        if len(programs) != 1:
            return ()
        return ("dist-run", programs[0])

    @property
    def unfit_reason(self) -> str:
        """Why pip needs all files of the project to install it. Empty if it does not need them."""
        if not program.is_project(self.folder):
            return ""
        return skeleton.unfit_reason(self.folder)

    @property
    def copies_code(self) -> bool:
        """Whether the image has to contain the folder's code, because jobs cannot mount it.

        This is the case if jobs run in pods, which cannot mount a folder of this machine. It is also the case
        if pip needs all files of the project to install it.
        """
        is_isolated = runtimes.get_runtime(self.parent.system.runtime.kind).is_isolated
        return is_isolated or bool(self.unfit_reason)


def file_texts(options: NewFolder) -> Mapping[str, str]:
    """Return the content of each file that ``imgkit init`` writes, by file name.

    If the folder has Python files, there is no example program. Then the files name the packages and the
    command of the folder's own program.
    """
    template_values = _make_template_values(options)
    # The template of each file, by the name of the file.
    template_names = {
        toml_file.NAME: toml_file.NAME,
        options.recipe_file: "recipe.yaml",
        GITIGNORE: "gitignore",
    }
    if not program.has_code(options.folder):
        template_names[PROGRAM] = PROGRAM
    templates = template_environment("templates/project", None)
    text_of_file = {}
    for file, template_name in template_names.items():
        text_of_file[file] = templates.get_template(f"{template_name}.j2").render(template_values)
    return text_of_file


def _make_template_values(options: NewFolder) -> dict[str, Any]:
    """Return the values that the templates of the new files use, by name."""
    return {
        "name": options.name,
        "remote": options.remote,
        "parent": _make_parent_reference(options),
        "description": f"{options.name}, on {options.parent.title}",
        "required": _find_required_keys(options.parent),
        "command": _job_command(options),
        "programs": program.find_start_scripts(options.folder),
        "copies": options.copies_code,
        "unfit_reason": options.unfit_reason,
        "pip": program.pip_steps(options.folder, editable=not options.copies_code),
        **_select_queue_values(options),
    }


def _make_parent_reference(options: NewFolder) -> str:
    """Return the value of ``extends`` in the folder's recipe: a shipped name, or a path.

    A path begins with ``./`` or ``../``.
    """
    if not is_path(options.recipe):
        return options.recipe
    # The path is relative to the folder, so that folder and recipe can be moved or cloned together.
    path = os.path.relpath(options.parent.file.resolve(), options.folder.resolve())
    return path if path.startswith("../") else f"./{path}"


def _select_queue_values(options: NewFolder) -> dict[str, Any]:
    """Return the template values for the keys of imgkit.toml that describe what a job asks the scheduler for.

    The keys under ``queue`` have a value, or are required and empty, so that the user must fill them in. The
    keys under ``unused`` are optional. The template writes them as comments.
    """
    parent = options.parent
    system = systems.get_system(parent.system.scheduler)
    required_keys = _find_required_keys(parent)
    value_of_key = dict(options.values)
    # If the scheduler uses a time limit, and neither the user nor the recipe sets one, a default is written.
    if not value_of_key["time"] and not parent.system.queue.time and "time" in system.uses:
        value_of_key["time"] = _TIME
    shown_keys = {key: value for key, value in value_of_key.items() if value or key in required_keys}
    # imgkit run warns about a key that the scheduler does not use.
    unused_keys = [key for key in value_of_key if key not in shown_keys and key in system.uses]
    nodes = options.nodes
    if not nodes and not system.abilities.takes_hosts:  # a list of hosts (--hosts) sets their number
        nodes = "1"
    return {
        "queue": shown_keys.items(),
        "unused": unused_keys,
        "nodes": int(nodes) if nodes.isdecimal() else nodes,
    }


def _job_command(options: NewFolder) -> tuple[str, ...]:
    """Return the command of jobs. If the code is in the image, the program has its path there."""
    if not options.command or not options.copies_code:
        return options.command
    launcher, name, *arguments = options.command
    return (launcher, f"{skeleton.CODE_FOLDER}/{name}", *arguments)


def _find_required_keys(parent: Target) -> Mapping[str, bool]:
    """Return each key that a job on the parent recipe's system needs, and whether that recipe sets it."""
    queue = parent.system.queue
    is_set_by_recipe: dict[str, bool] = {}
    for field in queue.required:
        key = "queue" if field == "name" else field  # the recipe's system.queue.name
        is_set_by_recipe[key] = bool(getattr(queue, field))
    return is_set_by_recipe


def next_steps(options: NewFolder, folder: Path) -> Iterator[str]:
    """Yield the steps to take after ``imgkit init``, one step per line.

    A step is a command, or a key of imgkit.toml to fill in. Values that only the user knows are in capitals.

    Parameters
    ----------
    folder : the folder in `options`, as the user typed it.
    """
    parent_recipe = options.parent
    if not options.command:
        programs = " or ".join(program.find_start_scripts(options.folder)) or "your program"
        yield f"command in imgkit.toml: the one that starts {programs}"
    # A .sif is for a cluster, so the job needs a remote.
    starts_sif = runtimes.get_runtime(parent_recipe.system.runtime.kind).image_suffix == ".sif"
    if starts_sif and not options.remote:
        yield "imgkit remote add NAME USER@HOST:DIR, and its name in imgkit.toml"
    for key, is_set_by_recipe in _find_required_keys(parent_recipe).items():
        # The new imgkit.toml always has a time limit.
        is_set = is_set_by_recipe or key == "time" or options.values[key]
        if not is_set:
            yield f"{key} in imgkit.toml, which {parent_recipe.name} needs"
    first_command, *other_commands = _list_build_and_run_commands(options)
    # The file names in these commands are relative to the new folder.
    if folder != Path():
        first_command = f"cd {shlex.quote(str(folder))} && {first_command}"
    yield first_command
    yield from other_commands


def _list_build_and_run_commands(options: NewFolder) -> list[str]:
    """Return the commands that the user can type to build the image and run a job.

    They depend on the runtime of the system. For example, pods need a registry, and pyxis needs a .sqsh.
    """
    recipe = f"./{options.recipe_file}"
    image = f"REGISTRY/{options.name}:1"
    build = f"imgkit build {recipe}"
    push = f"imgkit push {recipe} {image}"
    # The kinds of runtime that need other commands than most.
    commands_of_runtime = {
        "kubernetes": [f"{build} && {push}", f"imgkit run --image {image} --pvc CLAIM:/PATH"],
        "docker": [f"{build} && imgkit run"],
        "pyxis": [f"{build} && imgkit sif {recipe} --format sqsh && imgkit run"],
    }
    system = options.parent.system
    kind = system.runtime.kind
    # The other runtimes start a .sif on a cluster. For them, imgkit run builds, converts and copies the
    # image.
    commands = commands_of_runtime.get(kind, ["imgkit run --dry-run && imgkit run"])
    # Without a scheduler, jobs can also run on a list of hosts.
    takes_hosts = systems.get_system(system.scheduler).abilities.takes_hosts
    # A runtime whose images are no files gets them from a registry.
    pulls_from_registry = not runtimes.get_runtime(kind).image_suffix
    if takes_hosts and pulls_from_registry:
        commands.append(f"{push} && imgkit run --hosts HOST1,HOST2 --image {image}")
    return commands


def write_files(folder: Path, contents: Mapping[str, str]) -> tuple[Path, ...]:
    """Write each file of `contents` that does not exist yet, and return the paths of the new files.

    Existing files are never replaced. `contents` has the text of each file by its name.

    Raises
    ------
    UsageError : a value is wrong, or the folder already has an imgkit.toml. In both cases nothing is written.
    """
    # Parsing the content finds a wrong value of a flag before any file is written. The parsed values
    # themselves are not needed.
    toml_file.parse_text(contents[toml_file.NAME], folder / toml_file.NAME)
    if os.path.lexists(folder / toml_file.NAME):
        raise UsageError(
            f"there is an {toml_file.NAME}", where=str(folder), hint="edit it, or remove it for a new one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    # os.path.lexists is also true for a broken link, which must not be replaced either.
    new_paths = tuple(folder / name for name in contents if not os.path.lexists(folder / name))
    for path in new_paths:
        files.write_file(path, contents[path.name])
    return new_paths


def complete_gitignore(folder: Path) -> tuple[str, ...]:
    """Add missing lines for imgkit's outputs, such as ``*.sif``, to the user's .gitignore.

    Return the lines that were added. Without them, git would add image files of many GB. The other lines of
    the template are not added, because they could hide files of the user. If there is no .gitignore, or it is
    a link, nothing is changed.
    """
    path = folder / GITIGNORE
    if path.is_symlink() or not path.is_file():
        return ()
    old_text = files.read_text(path)
    present_lines = old_text.splitlines()
    missing_lines = [line for line in _IGNORED_OUTPUTS if line not in present_lines]
    if not missing_lines:
        return ()
    # Without this, the first new line would become part of the user's last line.
    if old_text and not old_text.endswith("\n"):
        old_text += "\n"
    files.write_file(path, old_text + "\n".join(missing_lines) + "\n")
    return tuple(missing_lines)
