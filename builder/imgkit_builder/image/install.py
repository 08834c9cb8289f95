"""The commands that install packages with apt, pip, uv.lock or a lock, and the options for build secrets."""

from __future__ import annotations

import posixpath
import re
import shlex
import time
from collections.abc import Sequence
from html import escape
from urllib.parse import urlsplit

from imgkit_builder.image.instructions import INSIDE, NEXT, ContextFile, Step
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
PIP = "PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore"
_PYTHON_PIP = "python3 -m pip"
# A lock lists all dependencies, so pip need not look for any. Source distributions are refused, because their
# build would run code that no hash in the lock covers.
_LOCKED_OPTIONS = "--require-hashes --no-deps --only-binary=:all:"

UV_JSON = ContextFile(context_path="imgkit/uv.json", path=f"{INSIDE}/uv.json")
UV_PROGRAM = ContextFile(context_path="imgkit/inside_uv.py", path=f"{INSIDE}/inside_uv.py")
UV_LINKS = ContextFile(context_path="imgkit/uv.html", path=f"{INSIDE}/uv.html")


def pip_step_numbers(recipe: Recipe) -> list[int]:
    """Return the indices of the recipe's pip steps. The step for a uv project comes first, as `UV_STEP`."""
    indices = list(range(len(recipe.image.pip)))
    if recipe.image.uv:
        indices.insert(0, UV_STEP)
    return indices


def step_name(number: int) -> str:
    """Return the name of pip step `number` in file names: ``0``, ``1``, or ``uv`` for the uv project."""
    return "uv" if number == UV_STEP else str(number)


def project_folder(number: int) -> str:
    """Return the folder in the build context for the project of pip step `number`."""
    return f"project/{number}"


def requirements_file(number: int) -> ContextFile:
    """Return the requirements file of pip step `number`, in the build context and in the image."""
    name = f"requirements-{step_name(number)}.txt"
    return ContextFile(context_path=f"imgkit/{name}", path=f"{INSIDE}/{name}")


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

    NVIDIA's images have such a file. It keeps pip from changing the packages of the image.

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
    # In the names of distributions, "-", "_" and "." mean the same.
    names = "|".join(re.sub(r"[-_.]+", "[-_.]+", name) for name in constraints.drop)
    # If the base has no constraint file, write an empty one, because pip fails if the file is missing.
    lines = (
        'if [ -n "${PIP_CONSTRAINT:-}" ]; then',
        f"    sed -E '/^({names})([^A-Za-z0-9._-]|$)/Id' \"$PIP_CONSTRAINT\" > {BASE_CONSTRAINT};",
        f"else : > {BASE_CONSTRAINT}; fi",
    )
    return Step(origin=where, command=NEXT.join(lines))


def pip_step(recipe: Recipe, number: int, *, pip: str = _PYTHON_PIP) -> Step:
    """Return the step that installs the packages of pip step `number` from an index.

    For a project, this step installs only its dependencies. A later step, `project_step`, installs the
    project itself.

    Parameters
    ----------
    number : the index of the pip step in the recipe, or `UV_STEP` for the uv project.
    pip : the command that runs pip. The build that makes a lock runs another program instead.
    """
    # The uv project is installed by a step with default settings, which is not in the recipe's list.
    if number == UV_STEP:
        step = PipStep()
        where = recipe.where("image", "uv")
    else:
        step = recipe.image.pip[number]
        where = recipe.where("image", "pip", number)
    command = _install_command(recipe, step, pip)
    # A lock has priority, because it also lists the wheels of the uv project.
    if recipe.lock:
        command, files = _install_locked(recipe, number, command)
    elif number == UV_STEP:
        command, files = _install_uv(command)
    else:
        command, files = _install_packages(step, number, command)
    return Step(origin=where, command=command, mounts=secret_mounts(step.secrets), files=tuple(files))


def _install_locked(recipe: Recipe, number: int, command: str) -> tuple[str, list[ContextFile]]:
    """Complete `command` so that it installs the wheels of the lock for pip step `number`.

    Return the command, and the files of the build context that it needs.
    """
    file = requirements_file(number)
    files = [file]
    if number == UV_STEP:
        files.append(UV_LINKS)
    command += f"{NEXT}    {locked_pip_options(recipe, number)}{NEXT}    --requirement {file.path}"
    command += f"{NEXT}|| {{ echo {shlex.quote(_missing_wheel_advice(recipe))} >&2; exit 1; }}"
    # The folder of wheels that are stored on this machine. It is copied into the image, and removed again
    # after the installation.
    wheels = kept_wheels(recipe, number)
    if wheels is not None:
        files.append(wheels)
        command += f"{NEXT}&& rm -rf {wheels.path}"
    return command, files


def _install_uv(command: str) -> tuple[str, list[ContextFile]]:
    """Complete `command` so that it installs the packages of uv.lock.

    Return the command, and the files of the build context that it needs.
    """
    command += f"{NEXT}    {_LOCKED_OPTIONS}{NEXT}    --requirement {requirements_file(UV_STEP).path}"
    # This program selects the packages of uv.lock that fit the base, and writes the requirements file and the
    # constraints that pip then reads. So it runs first.
    return f"python3 -I -B {UV_PROGRAM.path} {INSIDE}{NEXT}&& {command}", [UV_JSON, UV_PROGRAM]


def _install_packages(step: PipStep, number: int, command: str) -> tuple[str, list[ContextFile]]:
    """Complete `command` with the packages and requirements of `step`.

    Return the command, and the files of the build context that it needs.
    """
    files = []
    # For a project, imgkit writes its dependencies to this file, too.
    if step.requirements is not None or step.project is not None:
        file = requirements_file(number)
        files.append(file)
        command += f"{NEXT}    --requirement {file.path}"
    for package in step.packages:
        command += f"{NEXT}    {shlex.quote(package)}"
    return command, files


def _missing_wheel_advice(recipe: Recipe) -> str:
    """Return the message for a build in which an index no longer has a wheel of the lock."""
    return (
        "imgkit: where an index no longer has a wheel of the lock: imgkit lock "
        f"{recipe.reference} --upgrade, or put the wheel into {_lock_name(recipe)}.files/ (imgkit lock "
        f"{recipe.reference} --keep-files stores all of them there)"
    )


def project_step(recipe: Recipe, number: int, step: PipStep) -> Step:
    """Return the step that installs the user's own project of pip step `number`.

    An editable project is copied to its folder in the image, such as ``/workspace``, and stays there. Any
    other project is installed from imgkit's folder, and its files are then removed.
    """
    context_path = project_folder(number)
    origin = recipe.where("image", "pip", number)
    command = f"{_install_command(recipe, step)}{NEXT}    "
    if recipe.lock:
        command += "--no-deps "  # the steps before have installed the locked dependencies
    if step.editable:
        path = posixpath.normpath(step.editable)
        command += f"--editable {shlex.quote(path)}"
        docker_command = command
    else:
        path = f"{INSIDE}/{context_path}"
        command += path
        # A definition file removes the folder only once, after the last project.
        docker_command = f"{command}{NEXT}&& rm -rf {INSIDE}/project"
    return Step(
        origin=origin,
        command=command,
        docker=docker_command,
        mounts=secret_mounts(step.secrets),
        files=(ContextFile(context_path=context_path, path=path, is_folder=True, origin=origin),),
    )


_PIP_CONSTRAINTS = {"keep": "", "ignore": " PIP_CONSTRAINT=''", "drop": f" PIP_CONSTRAINT={BASE_CONSTRAINT}"}
"""Policy of ``image.constraints`` -> the variable that replaces the base's own constraint file."""


def _install_command(recipe: Recipe, step: PipStep, pip: str = _PYTHON_PIP) -> str:
    """Return the command ``pip install`` with its options and variables, but without the packages."""
    # imgkit's constraint is an option and not the variable PIP_CONSTRAINT. The variable would also apply in
    # the isolated environments in which pip builds packages, which must be free to choose their torch. The
    # option is used in addition to the base's variable.
    variables = PIP + _PIP_CONSTRAINTS[recipe.image.constraints.policy]
    for name, value in step.env.items():
        variables += f"{NEXT}{name}={shell_value(name, value)}"
    command = secret_prefix(recipe, step.secrets, "env ") + variables
    command += f"{NEXT}{pip} install --no-cache-dir --constraint {CONSTRAINT}"
    if step.options:
        command += f"{NEXT}    {shlex.join(step.options)}"
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
        path = f"{INSIDE}/{LOCKED_APT}"
        script = shlex.join(("sh", f"{path}/{SCRIPT}", recipe.reference, _lock_name(recipe)))
        command = _join_commands(script, "apt-get clean", f"rm -rf /var/lib/apt/lists/* {path}")
        folder = ContextFile(context_path=f"imgkit/{LOCKED_APT}", path=path, is_folder=True)
        return Step(origin=origin, command=command, files=(folder,))
    install_command = "DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends"
    for package in recipe.image.apt:
        install_command += f"{NEXT}    {shlex.quote(package)}"
    command = _join_commands(
        "apt-get update", install_command, "apt-get clean", "rm -rf /var/lib/apt/lists/*"
    )
    return Step(origin=origin, command=command)


def _join_commands(*commands: str) -> str:
    """Return a shell command that runs `commands` one after another, until one of them fails."""
    return f"{NEXT}&& ".join(commands)


LOCKED_APT = "locked-apt"
"""The folder with the files of the apt step, in the build context and below `INSIDE` in the image."""
SCRIPT = "install-locked.sh"
PACKAGES = "packages.txt"
LOCK_TOML = "imgkit/lock.toml"
"""The path of the lock in the build context. In the image, the lock is in `INSIDE`."""


# URLs of the snapshot services of Debian and Ubuntu, which provide the archive as it was at any time. They
# still have packages that the archive has dropped since the lock was made. A package that was only hours old
# at that time may be missing until the snapshot of the next day, hence the second delay.
_SNAPSHOTS = {
    "debian": "https://snapshot.debian.org/archive/debian",
    "debian-security": "https://snapshot.debian.org/archive/debian-security",
    "ubuntu": "https://snapshot.ubuntu.com/ubuntu",
    "ubuntu-ports": "https://snapshot.ubuntu.com/ubuntu",
}
_SNAPSHOT_DELAYS_S = (0, 24 * 3600)


def render_packages(recipe: Recipe) -> str:
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
    for delay_s in _SNAPSHOT_DELAYS_S:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(epoch + delay_s))
        urls.append(f"{_SNAPSHOTS[archive]}/{stamp}/{path}")
    return tuple(urls)


def locked_wheels(recipe: Recipe, number: int) -> tuple[LockedWheel, ...]:
    """Return the wheels in the lock that belong to pip step `number`."""
    if recipe.lock is None:
        return ()
    return tuple(wheel for wheel in recipe.lock.pip if wheel.step == number)


def kept_wheels(recipe: Recipe, number: int) -> ContextFile | None:
    """Return the folder with the wheels of pip step `number` that are stored on this machine.

    ``imgkit lock --keep-files`` stores them. Return None if none of the wheels is stored.
    """
    if not any(wheel.file in recipe.kept for wheel in locked_wheels(recipe, number)):
        return None
    name = f"locked-pip-{step_name(number)}"
    return ContextFile(context_path=f"imgkit/{name}", path=f"{INSIDE}/{name}", is_folder=True)


def locked_pip_options(recipe: Recipe, number: int) -> str:
    """Return the pip options for step `number` in a build with a lock.

    If all wheels of the step are stored on this machine, pip installs these files and does not use an index.
    """
    options = _LOCKED_OPTIONS
    if number == UV_STEP:
        # The lock contains the URLs of the wheels. The base may not know the project's own package indexes.
        options += f" --no-index{NEXT}    --find-links {UV_LINKS.path}"
    elif all(wheel.file in recipe.kept for wheel in locked_wheels(recipe, number)):
        options += " --no-index"
    # The folder of the stored wheels, if there are any.
    folder = kept_wheels(recipe, number)
    if folder is not None:
        options += f"{NEXT}    --find-links {folder.path}"
    return options


def _lock_name(recipe: Recipe) -> str:
    """Return the name of the recipe's lock file, for messages."""
    return f"{recipe.name}{lock_file.SUFFIX}"


def render_requirements(recipe: Recipe, number: int) -> str:
    """Return the requirements file of pip step `number` for a build with a lock.

    It contains the options of the recipe's own requirements file, such as the index, and a line with a hash
    for each wheel. `number` is the index of the step in the recipe, or `UV_STEP` for the uv project.
    """
    lines = []
    if number != UV_STEP:
        file = recipe.image.pip[number].requirements
        if file is not None:
            lines += [line for line in requirements.read_requirements(file) if line.startswith("-")]
    for wheel in locked_wheels(recipe, number):
        # If the recipe names a wheel by its URL (`direct`), no index may have the wheel, so pip needs the URL
        # again. A file that is stored here needs no URL. The URLs of uv's wheels are in the page `UV_LINKS`.
        requirement = f"{wheel.name}=={wheel.version}"
        if wheel.direct and wheel.file not in recipe.kept and number != UV_STEP:
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
        if wheel.file not in recipe.kept:
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
    options.append(f"--mount=type=bind,source={WITH_SECRETS},target=/run/{WITH_SECRETS}")
    return "".join(f"{option}{NEXT}" for option in options)


def secret_prefix(recipe: Recipe, names: Sequence[str], command: str) -> str:
    """Return the text to put before a command that uses the secrets `names`. Without secrets, return "".

    The text calls the script `WITH_SECRETS`. The script passes the values to the command, and ends the build
    if the command has written a value to a file. `command` is put after the script, for example ``env `` if
    variables follow.
    """
    if not names:
        return ""
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
