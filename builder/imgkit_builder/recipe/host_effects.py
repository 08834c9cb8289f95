"""Find what a recipe does outside of its container, on the machine that builds it or starts its jobs.

A recipe of unknown origin must be treated like a program. Its commands and packages run inside the build
container. Everything that takes effect outside of the container is listed here. Shipped recipes are part of
imgkit, so they are not listed.
"""

from __future__ import annotations

from collections.abc import Iterator

from imgkit_builder.recipe.model import Recipe
from imgkit_builder.recipe.problems import KeyPath, Problem, key_text, nearest_position
from imgkit_recipes import FOLDER as SHIPPED_FOLDER

PROGRAMS = ("singularity", "apptainer", "docker", "podman", "kubectl", "runai")
_HARMLESS_OPTIONS = ("--nv", "--rocm", "--cleanenv", "--contain", "--containall", "--no-home", "--gpus=all")
"""Options that give the container no access to the machine, apart from its GPUs."""
_EXECUTING_VARIABLES = (
    *("PATH", "LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"),
    *("BASH_ENV", "ENV", "IFS", "PROMPT_COMMAND", "PERL5OPT", "PERL5LIB"),
)
"""Variables that determine what other programs execute."""
_TRUST_HINT = "read it, and use the recipe only if you trust its author"

Effects = Iterator[tuple[KeyPath, str]]


def find_host_effects(recipe: Recipe) -> tuple[Problem, ...]:
    """Return a warning for each value of `recipe` that takes effect outside of the image."""
    effects = [
        *_find_runtime_effects(recipe),
        *_find_option_effects(recipe),
        *_find_variable_effects(recipe),
        *_find_secret_effects(recipe),
    ]
    warnings = []
    for path, message in effects:
        position = nearest_position(recipe.positions, path)
        # A default has no position. A value in a shipped recipe is part of imgkit.
        if position is None or position.file.is_relative_to(SHIPPED_FOLDER):
            continue
        warnings.append(Problem(position=position, key=key_text(path), what=message, hint=_TRUST_HINT))
    return tuple(warnings)


def _find_runtime_effects(recipe: Recipe) -> Effects:
    """Yield programs that run when a job starts, and folders of the machine that the job can access.

    Each item is the key of the recipe that causes the effect, and a message.
    """
    runtime = recipe.system.runtime
    path = ("system", "runtime")
    if runtime.command not in PROGRAMS:
        # Any other command may be a program that the author of the recipe provides.
        yield (*path, "command"), f"runs the program {runtime.command} on the machine that starts a job"
    for key, modules in (("modules", runtime.modules), ("host_modules", runtime.host_modules)):
        for index, module in enumerate(modules):
            if module.startswith(("/", ".", "~")):
                yield (*path, key, index), f"loads the module file {module}, which is a program"
    for index, folder in enumerate(runtime.host_libs):
        yield (*path, "host_libs", index), f"the job's programs load libraries from {folder}"
    if recipe.system.fabric.host_libs == "auto":
        message = "programs of the image see /usr and /opt of the machine, and may load its network libraries"
        yield ("system", "fabric", "host_libs"), message
    for index, bind in enumerate(runtime.binds):
        yield (*path, "binds", index), f"programs of the image see {bind} of the machine"


def _find_option_effects(recipe: Recipe) -> Effects:
    """Yield the options that are passed to the container runtime, to the scheduler or mpirun, or to srun.

    Such an option can name a program or a folder of the machine.
    """
    queue = recipe.system.queue
    # An option is harmless only if it is in the list. Any other one must be looked at by the user.
    for path, options in (
        (("runtime", "options"), recipe.system.runtime.options),
        (("queue", "options"), queue.options),
        (("queue", "srun"), queue.srun),
    ):
        for index, option in enumerate(options):
            if option not in _HARMLESS_OPTIONS:
                yield ("system", *path, index), f"passes the option {option} to a program here"


def _find_variable_effects(recipe: Recipe) -> Effects:
    """Yield the variables of jobs that determine what other programs execute."""
    for name in recipe.system.env:
        if name in _EXECUTING_VARIABLES:
            yield ("system", "env", name), f"sets {name}, which decides what programs of a job execute"


def _find_secret_effects(recipe: Recipe) -> Effects:
    """Yield the variables and files of this machine that build steps can read."""
    for index, secret in enumerate(recipe.image.secrets):
        source = f"the variable {secret.env}" if secret.env else f"the file {secret.file}"
        yield ("image", "secrets", index), f"gives {source} of this machine to steps of the build"
