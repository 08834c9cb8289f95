"""What a recipe does on the machine that builds it or starts its jobs.

A stranger's recipe is a program: commands and packages run in the build container, the rest of these lists
outside of it. Shipped recipes are part of imgkit and not listed. `warnings` is for ``imgkit check --strict``;
`reach` is for the confirmation of a folder, and also has values that are harmless as long as they stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from imgkit_builder.recipe import system_files, targets
from imgkit_builder.recipe.model import BuildSecret, Recipe
from imgkit_builder.recipe.problems import KeyPath, Position, Problem, key_text
from imgkit_entrypoints.system import SystemFacts
from imgkit_recipes import FOLDER

PROGRAMS = ("singularity", "apptainer", "docker", "podman", "kubectl", "runai")
_OPTIONS = ("--nv", "--rocm", "--cleanenv", "--contain", "--containall", "--no-home", "--gpus=all")
"""Options that open nothing of the machine."""
_VARIABLES = (
    *("PATH", "LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"),
    *("BASH_ENV", "ENV", "IFS", "PROMPT_COMMAND", "PERL5OPT", "PERL5LIB"),
)
"""Variables that choose what other programs execute."""
_HINT = "read it, and use the recipe only if you trust its author"

_REACH: tuple[KeyPath, ...] = (
    ("system", "scheduler"),
    ("system", "runtime"),
    ("system", "env"),
    ("system", "fabric", "host_libs"),
    *(("system", "queue", name) for name in ("options", "srun", "chunk", "sif")),
)
"""Keys whose values choose what starts on a machine, and what of the machine that can reach."""

Found = Iterator[tuple[KeyPath, str]]


def warnings(recipe: Recipe) -> tuple[Problem, ...]:
    """One warning for each value with which `recipe` reaches beyond the image."""
    found = []
    for rule in (_runtime, _options, _variables, _secrets):
        for path, what in rule(recipe):
            position = _position(recipe.positions, path)
            if position is not None and not position.file.is_relative_to(FOLDER):
                found.append(Problem(position=position, key=key_text(path), what=what, hint=_HINT))
    return tuple(found)


def reach(
    system: SystemFacts,
    stated: Mapping[KeyPath, Position],
    secrets: Sequence[BuildSecret] = (),
    *,
    of_site: bool = False,
) -> Iterator[tuple[str, str]]:
    """Yield key and value of all by which a recipe chooses what starts on a machine and what that can reach.

    Parameters
    ----------
    stated : positions of the values; those in shipped recipes are left out. Empty: nobody knows who stated
        them, and all count that are no defaults.
    of_site : yield those of the site's systems; otherwise, those of all other files.
    """
    usual = dict(targets.values_of(SystemFacts(), ("system",)))
    for path, value in targets.values_of(system, ("system",)):
        is_default = path not in stated and value == usual.get(path)
        if is_default or not any(path[: len(key)] == key for key in _REACH):
            continue
        position = _position(stated, path)
        is_shipped = position is not None and position.file.is_relative_to(FOLDER)
        is_site = position is not None and system_files.is_site(position.file)
        if is_site == of_site and not is_shipped:
            yield key_text(path), str(value)
    for number, secret in enumerate(secrets):
        yield key_text(("image", "secrets", number)), _source(secret)


def _source(secret: BuildSecret) -> str:
    return f"the variable {secret.env}" if secret.env else f"the file {secret.file}"


def _position(stated: Mapping[KeyPath, Position], path: KeyPath) -> Position | None:
    """The position of the value, or of what contains it; None where the recipe states neither."""
    while len(path) > 1 and path not in stated:
        path = path[:-1]
    return stated.get(path)


def _runtime(recipe: Recipe) -> Found:
    runtime, path = recipe.system.runtime, ("system", "runtime")
    if runtime.command not in PROGRAMS:
        yield (*path, "command"), f"runs the program {runtime.command} on the machine that starts a job"
    for key, modules in (("modules", runtime.modules), ("host_modules", runtime.host_modules)):
        for number, module in enumerate(modules):
            if module.startswith(("/", ".", "~")):
                yield (*path, key, number), f"loads the module file {module}, which is a program"
    for number, folder in enumerate(runtime.host_libs):
        yield (*path, "host_libs", number), f"the job's programs load libraries from {folder}"
    if recipe.system.fabric.host_libs == "auto":
        what = "programs of the image see /usr and /opt of the machine, and may load its network libraries"
        yield ("system", "fabric", "host_libs"), what
    for number, bind in enumerate(runtime.binds):
        yield (*path, "binds", number), f"programs of the image see {bind} of the machine"


def _options(recipe: Recipe) -> Found:
    """Options of a runtime, of mpirun or of a scheduler can name programs and folders of the machine."""
    queue = recipe.system.queue
    for path, words in (
        (("runtime", "options"), recipe.system.runtime.options),
        (("queue", "options"), queue.options),
        (("queue", "srun"), queue.srun),
    ):
        for number, word in enumerate(words):
            if word not in _OPTIONS:
                yield ("system", *path, number), f"passes the option {word} to a program here"


def _variables(recipe: Recipe) -> Found:
    for name in recipe.system.env:
        if name in _VARIABLES:
            yield ("system", "env", name), f"sets {name}, which decides what programs of a job execute"


def _secrets(recipe: Recipe) -> Found:
    for number, secret in enumerate(recipe.image.secrets):
        yield ("image", "secrets", number), f"gives {_source(secret)} of this machine to steps of the build"
