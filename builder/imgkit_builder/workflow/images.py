"""Run the smoke test in an image of the engine or a .sif, and make the command that opens a shell in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder import engine as engines
from imgkit_builder.base import process
from imgkit_builder.base.progress import SILENT, Reporter
from imgkit_builder.base.suffixes import RECIPE_SUFFIXES
from imgkit_builder.image import smoke
from imgkit_builder.packages import record
from imgkit_builder.recipe import rules
from imgkit_builder.sif import image as sif_image
from imgkit_builder.sif.runtime import choose_isolation, exec_arguments, find_runtime
from imgkit_builder.sif.sqsh import is_sqsh
from imgkit_builder.workflow import baked
from imgkit_builder.workflow.names import image_name
from imgkit_entrypoints.errors import ImgkitError, ToolMissing, UsageError
from imgkit_entrypoints.rules import expand_variables

if TYPE_CHECKING:
    from imgkit_builder.base.checks import Check
    from imgkit_builder.recipe.targets import Target

# Parts of messages that say what a program in the image can see of this machine.
_NOTHING_SHARED = "without folders of this machine and without a network"
_SHARED_DESCRIPTION = "a shell runs in the image, with this machine's network, and for a .sif its home folder"


def smoke_test(
    image: str | Path, *, runtime: str | None = None, report: Reporter = SILENT
) -> tuple[Check, ...]:
    """Run the smoke test in `image`: short programs that check its Python, torch and files.

    `image` is an image of Docker or Podman, a .sif file or a recipe whose image is built.

    Parameters
    ----------
    runtime : the runtime for a .sif, ``singularity`` or ``apptainer``. None means the first of them on PATH.

    Raises
    ------
    UsageError : there is no such image, or the file is not a .sif.
    ToolMissing : there is no engine or no runtime.
    """
    report.stage(f"smoke test of {image}")
    _refuse_missing_sif(str(image))
    if _is_file(str(image)):
        return _test_sif(Path(image), runtime, report)
    report.note(f"python3 runs in the image: {_NOTHING_SHARED}")
    with engines.connect() as engine:
        info = engines.inspect(engine, image_name(str(image)))
        return smoke.check_image(
            lambda argv: engines.run(engine, info.ref, argv, platform=info.platform),
            arch=info.platform.partition("/")[2],
            manifest=None,  # the versions are compared with the manifest in the image itself
        )


def _test_sif(path: Path, runtime: str | None, report: Reporter) -> tuple[Check, ...]:
    """Run the smoke test in the .sif `path`: short programs that check its Python, torch and files.

    `runtime` is ``singularity`` or ``apptainer``. None means the first of them on PATH.

    Raises
    ------
    UsageError : the file is not a .sif.
    ToolMissing : there is no runtime.
    """
    if not sif_image.is_sif(path):
        raise UsageError(f"{path} is not a .sif", hint=f"to check an archive: imgkit verify {path}")
    arch = sif_image.read(path).arch
    # If there is no runtime, the error has the ``module load`` line of the image's cluster.
    tool = find_runtime(runtime, module_hint=_module_hint(_read_target_if_any(path)))
    # Programs in the image must not see this machine's folders. They get no network if the runtime can
    # disable it.
    isolated = choose_isolation(tool)
    report.note(isolated.description("python3"))
    return smoke.check_image(
        lambda argv: process.run([str(tool.path), *exec_arguments(path, argv, isolated)], check=False),
        arch=arch,
        manifest=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellCommand:
    """The command that opens a shell in an image, and a description of what the shell can see."""

    argv: tuple[str, ...]
    description: str
    """A sentence for people about what the shell can see of this machine."""
    image: str = ""
    """The name of the image in the engine. Empty for a .sif."""


def shell_command(
    image: str, *, host: bool = False, workdir: str = "", packages: Sequence[str] = ()
) -> ShellCommand:
    """Return the command that opens a shell in `image`.

    `image` is an image of Docker or Podman, a .sif file, or a recipe whose image is built.

    Parameters
    ----------
    host : share this machine's home folder and network. A .sif also gets the binds and variables of its
        recipe.
    workdir : the folder in which the shell starts. If it is empty, the shell starts in the folder that the
        recipe sets.
    packages : files of ``imgkit add``. They can only be used with a .sif.

    Raises
    ------
    UsageError : there is no such image, the file is not a .sif, or `workdir` or `packages` cannot be used.
    ToolMissing : there is no engine or no runtime.
    """
    if workdir:
        # The loop raises the first fault. A usable path has none.
        for message, hint in rules.find_image_path_faults(workdir):
            raise UsageError(message, where="--workdir", hint=hint)
    _refuse_missing_sif(image)
    if _is_file(image):
        return _sif_shell(image, host=host, workdir=workdir, packages=packages)
    if packages:
        raise UsageError(
            "packages are for a .sif", where="--packages", hint="imgkit shell X.sif --packages FILE"
        )
    try:
        return _docker_shell(image, host=host, workdir=workdir)
    except ToolMissing:
        # Clusters have no engine. There, the name stands for the .sif that was made from the image.
        sif = f"{image}.sif"
        if not Path(sif).is_file():
            raise
        return _sif_shell(sif, host=host, workdir=workdir)


def _docker_shell(target: str, *, host: bool, workdir: str) -> ShellCommand:
    """Return the command of a shell in `target`, an existing image of Docker or Podman.

    With `host`, the shell shares this machine's home folder and network. If `workdir` is empty, it starts in
    the folder that the recipe sets.
    """
    name = image_name(target)
    with engines.connect() as engine:
        engines.inspect(engine, name)  # raises an error if there is no such image
    # The facts about the engine stay known after its connection is closed.
    argv = engines.shell_argv(
        name, gpus=engine.has_nvidia, share_host=host, endpoint=engine.endpoint, workdir=workdir
    )
    description = _SHARED_DESCRIPTION if host else f"a shell runs in the image: {_NOTHING_SHARED}"
    return ShellCommand(argv=tuple(argv), description=description, image=name)


def _sif_shell(path: str, *, host: bool, workdir: str, packages: Sequence[str] = ()) -> ShellCommand:
    """Return the command of a shell in the .sif `path`, which starts in the folder `workdir` of the image.

    With `host`, the shell shares this machine's home folder and network. `packages` are files of ``imgkit
    add``, whose packages Python then finds.

    The runtime options of the image's system are always used. The system's mounts and variables are used only
    with `host`, because they are folders and values of this machine.
    """
    if is_sqsh(Path(path)):
        raise UsageError(
            f"{path} is not a .sif, and a runtime would start it without the variables of its image",
            hint="make a .sif of the image: imgkit sif",
        )
    target = _read_target_if_any(Path(path))
    tool = find_runtime(module_hint=_module_hint(target))
    record.read_records_for(packages, Path(path))  # raises an error if one was made for another image
    description = _SHARED_DESCRIPTION
    options: list[str] = []
    bind_options: list[str] = []
    variables: list[str] = []
    if not host:
        isolated = choose_isolation(tool)
        description = isolated.description("a shell")
        options += isolated.options
    if target is not None:
        options += target.system.runtime.options
        workdir = workdir or target.workdir
    if target is not None and host:
        bind_options = _bind_options(target)
        variables = _list_missing_variables(target)
    command = _make_bash_command(len(packages), variables)
    argv = [str(tool.path), "exec" if command else "shell", "--nv", *_package_bind_options(packages)]
    argv += [option for option in dict.fromkeys(options) if option != "--nv"]  # each option once
    argv += bind_options
    if workdir:
        argv += ["--pwd", workdir]
    argv += [str(Path(path).absolute()), *command]
    return ShellCommand(argv=tuple(argv), description=description)


def _package_bind_options(packages: Sequence[str]) -> list[str]:
    """Return the options that mount the files of ``imgkit add``, each in its own folder of the image."""
    bind_options = []
    for file_number, file in enumerate(packages, 1):
        # A file of packages is a squashfs. The option image-src mounts its content.
        mount = f"{Path(file).absolute()}:{record.mount_path(file_number)}:image-src=/,ro"
        bind_options += ["--bind", mount]
    return bind_options


def _make_bash_command(package_file_count: int, variables: Sequence[str]) -> list[str]:
    """Return the command that starts bash in the image, with packages and variables: ``env NAME=VALUE bash``.

    If there are neither packages nor variables, the result is empty, because the runtime's own ``shell`` is
    enough.

    Parameters
    ----------
    package_file_count : the number of files with packages, which are mounted into the image.
    variables : items of the form ``NAME=VALUE``.
    """
    command = []
    if package_file_count:
        # The last "sh" is the name of the script. The script ends with `exec "$@"`, so it runs what follows.
        command += ["sh", "-c", record.search_path_script(package_file_count), "sh"]
    # env sets the variables inside the container, as in a job (ADR 5). If they were set outside, the image's
    # variables of the same name would override them.
    if variables:
        command += ["env", *variables]
    if command:
        command.append("bash")
    return command


def _list_missing_variables(target: Target) -> list[str]:
    """Return ``NAME=VALUE`` for each variable of the image's system that is not set in this shell."""
    variables = []
    for name, value in target.system.on_node(os.environ).env.items():
        if name not in os.environ:
            variables.append(f"{name}={value}")
    return variables


def _bind_options(target: Target) -> list[str]:
    """Return the runtime options that mount the folders of the image's system: ``--bind /gpfs:/gpfs``.

    Variables in the paths, such as ``$SCRATCH``, are replaced by their values in this shell.

    Raises
    ------
    UsageError : a path contains a variable that is not set here.
    """
    options = []
    for bind in target.system.runtime.binds:
        try:
            options += ["--bind", expand_variables(bind, os.environ)]
        except KeyError as error:
            raise UsageError(
                f"the image's system mounts {bind}, but ${error.args[0]} is not set here",
                where="--host",
                hint=target.module_line or "load the module that sets it",
            ) from None
    return options


def _read_target_if_any(path: Path) -> Target | None:
    """Return the recipe and system that are stored in a .sif, or None if they cannot be read.

    They cannot be read if imgkit did not build the image, for example.
    """
    try:
        return baked.read_target(path)
    except ImgkitError:
        return None


def _module_hint(target: Target | None) -> str:
    """Return the line ``module load ...`` for the runtime of the image's system, or "" if it is unknown."""
    return target.module_line if target else ""


def _is_file(target: str) -> bool:
    """Return whether `target` is an image file, such as a .sif. Recipes and images of the engine are not."""
    return Path(target).is_file() and not target.endswith(RECIPE_SUFFIXES)


def _refuse_missing_sif(target: str) -> None:
    """Raise UsageError if `target` is the name of a .sif that does not exist."""
    if target.endswith(".sif") and not Path(target).is_file():
        raise UsageError(f"there is no file {target}", hint=f"create it: imgkit sif {Path(target).stem}")
