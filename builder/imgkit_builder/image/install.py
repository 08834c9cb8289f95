"""The commands that install packages with apt, pip, uv.lock or a lock, and the options for build secrets."""

from __future__ import annotations

import posixpath
import re
import shlex
import time
from collections.abc import Iterable, Sequence
from html import escape
from urllib.parse import urlsplit

from imgkit_builder.image.instructions import INSIDE, NEXT, ContextFile, Step, imgkit_file
from imgkit_builder.recipe import lock_file, requirements
from imgkit_builder.recipe.model import (
    UV_STEP,
    LockedDeb,
    LockedWheel,
    PipStep,
    Recipe,
)
from imgkit_builder.recipe.requirements import PROTECTED
from imgkit_builder.recipe.rules import quote_inherited
from imgkit_entrypoints.errors import UsageError

CONSTRAINT = f"{INSIDE}/constraint.txt"
BASE_CONSTRAINT = f"{INSIDE}/base-constraint.txt"

# PEP 668 makes pip refuse to install into a system Python. imgkit allows it, because pip cannot break the
# system packages of an image. These settings are variables and not options: an old pip fails with an unknown
# option but ignores an unknown variable. pip does not write byte code, because in a base without any, it
# would add 11 MB to each layer.
PIP_VARIABLES = "PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore"
_PYTHON_PIP = "python3 -m pip"
_NEXT_OPTION = f"{NEXT}    "
"""Continues a command with an option on the next line, which is indented deeper than with `NEXT`."""
# A lock lists all dependencies, so pip need not look for any. Source distributions are refused, because their
# build would run code that no hash in the lock covers.
_LOCKED_OPTIONS = "--require-hashes --no-deps --only-binary=:all:"

UV_JSON = imgkit_file("uv.json")
UV_PROGRAM = imgkit_file("inside_uv.py")
UV_LINKS = imgkit_file("uv.html")
LOCK_TOML = imgkit_file("lock.toml")
LOCKED_APT = imgkit_file("locked-apt", is_folder=True)
"""The folder with the files of the apt step in a build with a lock."""
SCRIPT = "install-locked.sh"
PACKAGES = "packages.txt"


def pip_step_numbers(recipe: Recipe) -> list[int]:
    """Return the numbers of the recipe's pip steps, in the order in which they run.

    A number is the index of the step in the recipe. The step for a uv project has the number `UV_STEP`, and
    comes first.
    """
    step_numbers = list(range(len(recipe.image.pip)))
    if recipe.image.uv:
        step_numbers.insert(0, UV_STEP)
    return step_numbers


def step_name(step_number: int) -> str:
    """Return the name of a pip step in file names: ``0``, ``1``, or ``uv`` for the uv project."""
    return "uv" if step_number == UV_STEP else str(step_number)


def project_folder(step_number: int) -> str:
    """Return the folder in the build context for the project of a pip step."""
    return f"project/{step_number}"


def requirements_file(step_number: int) -> ContextFile:
    """Return the requirements file of a pip step, in the build context and in the image."""
    return imgkit_file(f"requirements-{step_name(step_number)}.txt")


def protection_step() -> Step:
    """Return the step that writes the versions of the base's torch and related packages to `CONSTRAINT`.

    All later steps pass this file to pip as a constraint, so pip never replaces these packages.
    """
    # "pip freeze" would print "torch @ file://..." for a torch that was built in the base, as in NVIDIA's
    # images.
    command = _join_commands(
        f"mkdir -p {INSIDE}",
        f"python3 -m pip list --format=freeze --disable-pip-version-check > {CONSTRAINT}",
        # Keep only the lines of protected packages.
        f"sed -n -i -E '/^({PROTECTED})==/Ip' {CONSTRAINT}",
    )
    return Step(origin="imgkit: every pip step below must keep the base's torch and NCCL", command=command)


def constraint_step(recipe: Recipe) -> Step:
    """Return the step that copies the base's constraint file without the names in ``constraints.drop``.

    NVIDIA's images have such a file. It keeps pip from changing the packages of the image. The recipe must
    drop at least one name.

    Raises
    ------
    UsageError : an item of ``constraints.drop`` is not the name of a distribution.
    """
    constraints = recipe.image.constraints
    where = recipe.where("image", "constraints")
    for name in constraints.drop:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
            raise UsageError(
                f"image.constraints.drop: {name!r} is not the name of a distribution",
                where=where,
                hint="letters, digits, '.', '_' and '-', without a version, for example: drop: [flash-attn]",
            )
    # The commands of sed are I (ignore the case of letters) and d (delete the line).
    delete_lines = f"/{_constraint_pattern(constraints.drop)}/Id"
    # If the base has no constraint file, write an empty one, because pip fails if the file is missing.
    lines = (
        'if [ -n "${PIP_CONSTRAINT:-}" ]; then',
        f"    sed -E '{delete_lines}' \"$PIP_CONSTRAINT\" > {BASE_CONSTRAINT};",
        f"else : > {BASE_CONSTRAINT}; fi",
    )
    return Step(origin=where, command=NEXT.join(lines))


def _constraint_pattern(names: Iterable[str]) -> str:
    """Return a pattern for the lines of a constraint file that are about the distributions `names`.

    For example, ``^(flash[-_.]+attn|numpy)([^A-Za-z0-9._-]|$)``. It matches the line ``flash_attn==2.5``, but
    not ``numpy-financial==1.0``.
    """
    # In the names of distributions, "-", "_" and "." mean the same.
    alternatives = "|".join(re.sub(r"[-_.]+", "[-_.]+", name) for name in names)
    # A name ends at a character that no name contains, or at the end of the line.
    return f"^({alternatives})([^A-Za-z0-9._-]|$)"


def pip_step(recipe: Recipe, step_number: int, *, pip: str = _PYTHON_PIP) -> Step:
    """Return the step that installs the packages of a pip step from an index.

    For a project, this step installs only its dependencies. A later step, `project_step`, installs the
    project itself.

    Parameters
    ----------
    step_number : the index of the pip step in the recipe, or `UV_STEP` for the uv project.
    pip : the command that runs pip. The build that makes a lock runs another program instead.
    """
    # The uv project is installed by a step with default settings, which is not in the recipe's list.
    if step_number == UV_STEP:
        step = PipStep()
        where = recipe.where("image", "uv")
    else:
        step = recipe.image.pip[step_number]
        where = recipe.where("image", "pip", step_number)
    command = _begin_pip_install(recipe, step, pip)
    # A lock has priority, because it also lists the wheels of the uv project.
    if recipe.lock:
        command, files = _complete_locked_install(command, recipe, step_number)
    elif step_number == UV_STEP:
        command, files = _complete_uv_install(command)
    else:
        command, files = _complete_install(command, step, step_number)
    return Step(origin=where, command=command, mounts=secret_mounts(step.secrets), files=tuple(files))


def _complete_locked_install(command: str, recipe: Recipe, step_number: int) -> tuple[str, list[ContextFile]]:
    """Complete `command`, the beginning of a ``pip install``, with the wheels of the lock for a pip step.

    The result has the form ``COMMAND OPTIONS --requirement FILE || { echo ADVICE >&2; exit 1; } && rm -rf
    FOLDER``. Return the command, and the files of the build context that it needs.
    """
    file = requirements_file(step_number)
    files = [file]
    if step_number == UV_STEP:
        files.append(UV_LINKS)
    advice = shlex.quote(_missing_wheel_advice(recipe))
    command += f"{_NEXT_OPTION}{locked_pip_options(recipe, step_number)}"
    command += f"{_NEXT_OPTION}--requirement {file.path}"
    command += f"{NEXT}|| {{ echo {advice} >&2; exit 1; }}"
    # The wheels that are stored on this machine are copied into the image, and removed again after the
    # installation. The shell reads "a || b && c" as "(a || b) && c", so this follows a success of pip.
    wheels_folder = stored_wheels_folder(recipe, step_number)
    if wheels_folder is not None:
        files.append(wheels_folder)
        command += f"{NEXT}&& rm -rf {wheels_folder.path}"
    return command, files


def _complete_uv_install(command: str) -> tuple[str, list[ContextFile]]:
    """Complete `command`, the beginning of a ``pip install``, with the packages of uv.lock.

    Return the command, and the files of the build context that it needs.
    """
    command += f"{_NEXT_OPTION}{_LOCKED_OPTIONS}"
    command += f"{_NEXT_OPTION}--requirement {requirements_file(UV_STEP).path}"
    # This program selects the packages of uv.lock that fit the base, and writes the requirements file and the
    # constraints that pip then reads. So it runs first.
    return f"python3 -I -B {UV_PROGRAM.path} {INSIDE}{NEXT}&& {command}", [UV_JSON, UV_PROGRAM]


def _complete_install(command: str, step: PipStep, step_number: int) -> tuple[str, list[ContextFile]]:
    """Complete `command`, the beginning of a ``pip install``, with the packages that `step` names.

    Return the command, and the files of the build context that it needs.
    """
    files = []
    # For a project, imgkit writes its dependencies to this file, too.
    if step.requirements is not None or step.project is not None:
        file = requirements_file(step_number)
        files.append(file)
        command += f"{_NEXT_OPTION}--requirement {file.path}"
    for package in step.packages:
        command += f"{_NEXT_OPTION}{shlex.quote(package)}"
    return command, files


def _missing_wheel_advice(recipe: Recipe) -> str:
    """Return the message for a build in which an index no longer has a wheel of the lock."""
    return (
        "imgkit: where an index no longer has a wheel of the lock: imgkit lock "
        f"{recipe.reference} --upgrade, or put the wheel into {_lock_name(recipe)}.files/ (imgkit lock "
        f"{recipe.reference} --keep-files stores all of them there)"
    )


def project_step(recipe: Recipe, step_number: int, step: PipStep) -> Step:
    """Return the step that installs the user's own project of a pip step.

    An editable project is copied to its folder in the image, such as ``/workspace``, and stays there. Any
    other project is installed from imgkit's folder, and its files are then removed.
    """
    context_path = project_folder(step_number)
    origin = recipe.where("image", "pip", step_number)
    if step.editable:
        path = posixpath.normpath(step.editable)
        arguments = f"--editable {shlex.quote(path)}"
        cleanup = ""
    else:
        path = f"{INSIDE}/{context_path}"
        arguments = path
        cleanup = f"{NEXT}&& rm -rf {INSIDE}/project"
    if recipe.lock:
        arguments = f"--no-deps {arguments}"  # the steps before have installed the locked dependencies
    command = f"{_begin_pip_install(recipe, step)}{_NEXT_OPTION}{arguments}"
    return Step(
        origin=origin,
        # For a definition file. It removes the files of all projects at once, in a step of its own.
        command=command,
        docker=f"{command}{cleanup}",
        mounts=secret_mounts(step.secrets),
        files=(ContextFile(context_path=context_path, path=path, is_folder=True, origin=origin),),
    )


_PIP_CONSTRAINTS = {"keep": "", "ignore": " PIP_CONSTRAINT=''", "drop": f" PIP_CONSTRAINT={BASE_CONSTRAINT}"}
"""Policy of ``image.constraints`` -> the variable that replaces the base's own constraint file."""


def _begin_pip_install(recipe: Recipe, step: PipStep, pip: str = _PYTHON_PIP) -> str:
    """Return the beginning of the command ``pip install``, to which the caller adds the packages.

    For example, ``PIP_ROOT_USER_ACTION=ignore MAX_JOBS=8 python3 -m pip install --no-cache-dir --constraint
    FILE``. If the step uses secrets, the script for them comes first.
    """
    # imgkit's constraint is an option and not the variable PIP_CONSTRAINT. The variable would also apply in
    # the isolated environments in which pip builds packages, which must be free to choose their torch. The
    # option is used in addition to the base's variable.
    lines = [f"{PIP_VARIABLES}{_PIP_CONSTRAINTS[recipe.image.constraints.policy]}"]
    for name, value in step.env.items():
        lines.append(f"{name}={shell_value(name, value)}")
    lines.append(f"{pip} install --no-cache-dir --constraint {CONSTRAINT}")
    if step.options:
        lines.append(f"    {shlex.join(step.options)}")
    command = NEXT.join(lines)
    if step.secrets:
        # The script runs a program, and only a shell reads "NAME=VALUE" before one. So `env` sets them.
        command = run_with_secrets(recipe, step.secrets, f"env {command}")
    return command


def shell_value(name: str, value: str) -> str:
    """Return the value of the variable `name`, quoted for a shell.

    In a value such as ``/x:$NAME``, the reference stays unquoted, so that the shell inserts the base's value.
    """
    inherited = quote_inherited(name, value, lambda text: re.sub(r'([\\"$`])', r"\\\1", text))
    return inherited or shlex.quote(value)


def apt_step(recipe: Recipe, origin: str) -> Step:
    """Return the step that installs Debian packages with apt.

    If the recipe has a lock, a script downloads and installs exactly the packages of the lock. `origin` is
    the line of the recipe, for the comment above the step.
    """
    if recipe.lock:
        return _make_locked_apt_step(recipe, origin)
    install_command = "DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends"
    for package in recipe.image.apt:
        install_command += f"{_NEXT_OPTION}{shlex.quote(package)}"
    command = _join_commands(
        "apt-get update", install_command, "apt-get clean", "rm -rf /var/lib/apt/lists/*"
    )
    return Step(origin=origin, command=command)


def _make_locked_apt_step(recipe: Recipe, origin: str) -> Step:
    """Return the step that installs exactly the Debian packages of the recipe's lock.

    It runs the script `SCRIPT`, which is copied into the image together with the list of packages. The
    arguments of the script are names of the recipe and the lock for its messages.
    """
    folder = LOCKED_APT.path
    run_script = shlex.join(("sh", f"{folder}/{SCRIPT}", recipe.reference, _lock_name(recipe)))
    command = _join_commands(run_script, "apt-get clean", f"rm -rf /var/lib/apt/lists/* {folder}")
    return Step(origin=origin, command=command, files=(LOCKED_APT,))


def _join_commands(*commands: str) -> str:
    """Return a shell command that runs `commands` one after another, until one of them fails."""
    return f"{NEXT}&& ".join(commands)


# URLs of the snapshot services of Debian and Ubuntu, which provide the archive as it was at any time. They
# still have packages that the archive has dropped since the lock was made.
_SNAPSHOTS = {
    "debian": "https://snapshot.debian.org/archive/debian",
    "debian-security": "https://snapshot.debian.org/archive/debian-security",
    "ubuntu": "https://snapshot.ubuntu.com/ubuntu",
    "ubuntu-ports": "https://snapshot.ubuntu.com/ubuntu",
}
_SNAPSHOT_DELAYS_S = (0, 24 * 3600)


def render_apt_list(recipe: Recipe) -> str:
    """Return the list of Debian packages in the lock, in the form that the script `SCRIPT` reads.

    Each line contains digest, file name, ``manual`` or ``auto``, package and URLs. A ``manual`` package is
    named in the recipe. An ``auto`` package is only a dependency of another package.
    """
    lock = recipe.lock
    assert lock is not None  # noqa: S101 - for the type checker: only a locked recipe has such a step
    # Names without version and architecture: "git=1:2.39" -> "git".
    requested = {re.split(r"[=/:]", package)[0] for package in recipe.image.apt}
    lines = []
    for deb in lock.apt:
        apt_mark = "auto"
        if deb.name in requested:
            apt_mark = "manual"
        urls = " ".join((deb.url, *snapshot_urls(deb, lock.source_date_epoch)))
        lines.append(f"{deb.sha256} {deb.file} {apt_mark} {deb.name}:{deb.architecture} {urls}\n")
    return "".join(lines)


def snapshot_urls(deb: LockedDeb, epoch: int) -> tuple[str, ...]:
    """Return URLs from which a snapshot service provides the package `deb` as of the time `epoch`.

    For a package that is not from Debian or Ubuntu, such as NVIDIA's packages, the result is empty.
    """
    match = re.search(r"/(debian-security|debian|ubuntu-ports|ubuntu)/(pool/.+)", urlsplit(deb.url).path)
    if match is None:
        return ()
    archive, path = match.groups()
    urls = []
    # A package that was only hours old at this time may be missing in its snapshot. So the last of these URLs
    # is that of the next day.
    for delay_s in _SNAPSHOT_DELAYS_S:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(epoch + delay_s))
        urls.append(f"{_SNAPSHOTS[archive]}/{stamp}/{path}")
    return tuple(urls)


def locked_wheels(recipe: Recipe, step_number: int) -> tuple[LockedWheel, ...]:
    """Return the wheels in the lock that belong to a pip step."""
    if recipe.lock is None:
        return ()
    return tuple(wheel for wheel in recipe.lock.pip if wheel.step == step_number)


def _is_stored(recipe: Recipe, wheel: LockedWheel) -> bool:
    """Return whether ``imgkit lock --keep-files`` has stored `wheel` on this machine."""
    return wheel.file in recipe.kept


def stored_wheels_folder(recipe: Recipe, step_number: int) -> ContextFile | None:
    """Return the folder with the wheels of a pip step that are stored on this machine.

    ``imgkit lock --keep-files`` stores them. Return None if none of the wheels is stored.
    """
    if not any(_is_stored(recipe, wheel) for wheel in locked_wheels(recipe, step_number)):
        return None
    return imgkit_file(f"locked-pip-{step_name(step_number)}", is_folder=True)


def locked_pip_options(recipe: Recipe, step_number: int) -> str:
    """Return the pip options for a step in a build with a lock, as shell text with line breaks.

    If all wheels of the step are stored on this machine, pip installs these files and does not use an index.
    """
    needs_index = not all(_is_stored(recipe, wheel) for wheel in locked_wheels(recipe, step_number))
    links = []
    if step_number == UV_STEP:
        # The base may not know the project's own package indexes, so pip gets a page with the URLs.
        needs_index = False
        links.append(UV_LINKS)
    folder = stored_wheels_folder(recipe, step_number)
    if folder is not None:
        links.append(folder)
    options = _LOCKED_OPTIONS
    if not needs_index:
        options += " --no-index"
    for link in links:
        options += f"{_NEXT_OPTION}--find-links {link.path}"
    return options


def _lock_name(recipe: Recipe) -> str:
    """Return the name of the recipe's lock file, for messages."""
    return f"{recipe.name}{lock_file.SUFFIX}"


def render_requirements(recipe: Recipe, step_number: int) -> str:
    """Return the requirements file of a pip step for a build with a lock.

    It contains the options of the recipe's own requirements file, such as the index, and a line with a hash
    for each wheel. `step_number` is the index of the step in the recipe, or `UV_STEP` for the uv project.
    """
    lines = []
    if step_number != UV_STEP:
        file = recipe.image.pip[step_number].requirements
        if file is not None:
            lines += [line for line in requirements.read_requirements(file) if line.startswith("-")]
    for wheel in locked_wheels(recipe, step_number):
        requirement = f"{wheel.name}=={wheel.version}"
        # pip finds a stored wheel in a folder, and those of a uv project through the page `UV_LINKS`.
        is_linked = step_number == UV_STEP or _is_stored(recipe, wheel)
        # If the recipe itself names the URL of a wheel (`direct`), perhaps no index has the wheel.
        if wheel.direct and not is_linked:
            requirement = f"{wheel.name} @ {wheel.url}"
        lines.append(f"{requirement} --hash=sha256:{wheel.sha256}")
    return "".join(f"{line}\n" for line in lines)


def render_uv_links(recipe: Recipe) -> str:
    """Return an HTML page with links to the locked wheels of a uv project, for pip's ``--find-links``.

    Wheels that are stored on this machine are left out.
    """
    lines = ["<!DOCTYPE html>"]
    # The URLs are not written to the requirements file as "name @ URL", because pip would record them in the
    # image.
    for wheel in locked_wheels(recipe, UV_STEP):
        if not _is_stored(recipe, wheel):
            lines.append(f'<a href="{escape(wheel.url)}#sha256={wheel.sha256}">{escape(wheel.file)}</a>')
    return "".join(f"{line}\n" for line in lines)


WITH_SECRETS = "imgkit/with-secrets"
"""The path of the script that runs a step with secrets, in the build context and below ``/run``."""


def secret_mounts(names: Sequence[str]) -> str:
    """Return the options of RUN that provide the secrets `names` to a step. Without secrets, return "".

    BuildKit and podman support these options. The values are in files, which exist only during the step.
    """
    if not names:
        return ""
    options = [f"--mount=type=secret,id={name}" for name in names]
    # The script that passes the secrets to the command of the step, as `run_with_secrets` calls it.
    options.append(f"--mount=type=bind,source={WITH_SECRETS},target=/run/{WITH_SECRETS}")
    return "".join(f"{option}{NEXT}" for option in options)


def run_with_secrets(recipe: Recipe, names: Sequence[str], command: str) -> str:
    """Return a shell command that runs the program `command` with the secrets `names`.

    It has the form ``sh /run/imgkit/with-secrets token=HF_TOKEN netrc -- COMMAND``. This script passes the
    values to the program, and ends the build if the program has written a value to a file.
    """
    return f"{' '.join(secret_argv(recipe, names))}{NEXT}{command}"


def secret_argv(recipe: Recipe, names: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments before a command that uses secrets: ``sh /run/... token=HF_TOKEN netrc --``."""
    variables = {secret.id: secret.env for secret in recipe.image.secrets}
    args = []
    for name in names:
        variable = variables.get(name)
        # If the secret comes from a variable, the step gets the value in a variable of the same name, too.
        args.append(f"{name}={variable}" if variable else name)
    return ("sh", f"/run/{WITH_SECRETS}", *args, "--")
