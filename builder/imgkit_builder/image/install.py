"""The text of the steps that install packages: pip, a uv project, what a lock states, and build secrets.

The base decides about a uv project: ``image/uv_inside.py`` runs in it as a part of the step, so all
builders do the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import json
import posixpath
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from imgkit_builder.image import uv_inside
from imgkit_builder.image.instructions import INSIDE, NEXT, ContextFile, PipCommand, Project, Text, UvCommand
from imgkit_builder.oci.manifest import LOCK_LABEL
from imgkit_builder.recipe import lock_file, requirements, uv_lock
from imgkit_builder.recipe.model import (
    UV_STEP,
    Constraints,
    LockedDeb,
    LockedWheel,
    PipStep,
    Recipe,
)
from imgkit_builder.recipe.requirements import PROTECTED, canonical
from imgkit_builder.recipe.rules import expanded
from imgkit_builder.recipe.uv_lock import UvLock
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.files import read_text

CONSTRAINT = f"{INSIDE}/constraint.txt"
BASE_CONSTRAINT = f"{INSIDE}/base-constraint.txt"

# pip cannot break the system packages of an image, so it may install there (PEP 668). These are variables,
# not options: an old pip stops at an unknown option but ignores an unknown variable. pip writes no byte code
# of its own: in a base without any, it would add 11 MB to each layer.
PIP = "PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore"


def project_member(number: int) -> str:
    """The folder of the project of pip step `number` (from 0) in the build context."""
    return f"project/{number}"


def requirements_member(number: int) -> str:
    """Path of the requirements file of pip step `number` (from 0) in the build context."""
    return f"imgkit/requirements-{number}.txt"


def protect() -> str:
    """The command that writes the versions of the base's `PROTECTED` distributions to `CONSTRAINT`."""
    # "pip freeze" would print "torch @ file://..." for a torch built in the base, as in NVIDIA's images.
    parts = (
        f"mkdir -p {INSIDE}",
        f"python3 -m pip list --format=freeze --disable-pip-version-check > {CONSTRAINT}",
        f"sed -n -i -E '/^({PROTECTED})==/Ip' {CONSTRAINT}",
    )
    return f"{NEXT}&& ".join(parts)


def filtered_constraint(recipe: Recipe) -> Text | None:
    """The command that copies the base's constraint file without the dropped names."""
    constraints = recipe.image.constraints
    if constraints.policy != "drop":
        return None
    stated = recipe.where("image", "constraints")
    for name in constraints.drop:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
            raise UsageError(
                f"image.constraints.drop: {name!r} is not the name of a distribution",
                where=stated,
                hint="letters, digits, '.', '_' and '-', without a version, for example: drop: [flash-attn]",
            )
    names = "|".join(re.sub(r"[-_.]+", "[-_.]+", name) for name in constraints.drop)
    pip_command = NEXT.join(
        (
            'if [ -n "${PIP_CONSTRAINT:-}" ]; then',
            f"    sed -E '/^({names})([^A-Za-z0-9._-]|$)/Id' \"$PIP_CONSTRAINT\" > {BASE_CONSTRAINT};",
            f"else : > {BASE_CONSTRAINT}; fi",
        )
    )
    return Text(origin=stated, text=pip_command)


def pip_command(recipe: Recipe, number: int, step: PipStep, *, pip: str = "python3 -m pip") -> PipCommand:
    """The command of pip step `number` (from 0) that installs packages and requirements by `pip`."""
    text = _install(recipe, step, pip)
    kept = kept_wheels(recipe, number)
    if recipe.lock:
        text += f"{NEXT}    {pip_options(recipe, number)}"
    requirements = None
    if recipe.lock or step.requirements is not None or step.project is not None:
        member = requirements_member(number)
        requirements = ContextFile(member=member, path=f"{INSIDE}/{posixpath.basename(member)}")
        text += f"{NEXT}    --requirement {requirements.path}"
    if not recipe.lock:
        text += "".join(f"{NEXT}    {shlex.quote(package)}" for package in step.packages)
    if recipe.lock:
        text += pip_advice(recipe)
    if kept:
        text += f"{NEXT}&& rm -rf {kept.path}"
    return PipCommand(
        origin=recipe.where("image", "pip", number),
        command=text,
        requirements=requirements,
        kept=kept,
        mounts=secret_mounts(step.secrets),
    )


def project(recipe: Recipe, number: int, step: PipStep) -> Project:
    """The command of pip step `number` that installs the user's own project."""
    member = project_member(number)
    target = posixpath.normpath(step.editable) if step.editable else f"{INSIDE}/{member}"
    form = "--editable " if step.editable else ""
    if recipe.lock:
        form = f"--no-deps {form}"  # the locked steps have installed them
    return Project(
        origin=recipe.where("image", "pip", number),
        member=member,
        target=target,
        command=f"{_install(recipe, step)}{NEXT}    {form}{shlex.quote(target)}",
        stays=step.editable is not None,
        mounts=secret_mounts(step.secrets),
    )


def _install(recipe: Recipe, step: PipStep, pip: str = "python3 -m pip") -> str:
    """The command up to what it installs."""
    # An option adds to PIP_CONSTRAINT. The variable itself would also apply in the isolated environments that
    # pip builds packages in, and those must be free to choose their torch.
    pip_command = (
        with_secrets(recipe, step.secrets, "env ") + f"{PIP}{base_constraint(recipe.image.constraints)}"
    )
    pip_command += "".join(f"{NEXT}{name}={shell_value(name, value)}" for name, value in step.env.items())
    pip_command += f"{NEXT}{pip} install --no-cache-dir --constraint {CONSTRAINT}"
    return pip_command + (f"{NEXT}    {shlex.join(step.options)}" if step.options else "")


def shell_value(name: str, value: str) -> str:
    """The value of the variable `name` for a shell; ``/x:$NAME`` adds to the base's value."""
    return expanded(name, value, lambda text: re.sub(r'([\\"$`])', r"\\\1", text)) or shlex.quote(value)


def base_constraint(constraints: Constraints) -> str:
    """The variable for pip that applies the recipe's policy for the base's own constraint file."""
    match constraints.policy:
        case "keep":
            return ""
        case "ignore":
            return " PIP_CONSTRAINT=''"
        case "drop":
            return f" PIP_CONSTRAINT={BASE_CONSTRAINT}"


UV_LOCK = ContextFile(member="imgkit/uv.json", path=f"{INSIDE}/uv.json")
UV_PROGRAM = ContextFile(member="imgkit/uv-inside.py", path=f"{INSIDE}/uv-inside.py")
UV_LIST = ContextFile(member="imgkit/uv.txt", path=f"{INSIDE}/uv.txt")
UV_LINKS = ContextFile(member="imgkit/uv.html", path=f"{INSIDE}/uv.html")
UV_KEPT = ContextFile(member="imgkit/locked-uv", path=f"{INSIDE}/locked-uv")

PIP_OPTIONS = "--require-hashes --no-deps --only-binary=:all:"
_EXACT = f"--no-cache-dir {PIP_OPTIONS} --no-index"


def uv_command(recipe: Recipe) -> UvCommand | None:
    """The step of `recipe`; None where it names no uv project, or where its lock has nothing of it."""
    if recipe.image.uv is None:
        return None
    if recipe.lock is None:
        return _step(recipe, (UV_LOCK, UV_PROGRAM), f"{_choose(recipe)}{NEXT}&& {_pip('install')}")
    if not locked_wheels(recipe, UV_STEP):
        return None
    if kept_uv(recipe):
        return _step(recipe, (UV_LIST,), f"{_pip('install', UV_KEPT)}{NEXT}&& rm -rf {UV_KEPT.path}", UV_KEPT)
    return _step(recipe, (UV_LIST, UV_LINKS), _pip("install"))


def uv_question(recipe: Recipe, answer: str, *, keep: str) -> UvCommand | None:
    """The step that a lock is made with: it writes the wheels to `answer`, and their files to `keep`."""
    if recipe.image.uv is None:
        return None
    commands = [_choose(recipe) + f" {answer}"]
    if keep:
        commands.append(f"{_pip('download')}{NEXT}    --dest {keep}")
    if recipe.image.pip:
        commands.append(_pip("install"))
    return _step(recipe, (UV_LOCK, UV_PROGRAM), f"{NEXT}&& ".join(commands))


def _step(
    recipe: Recipe, uv_files: tuple[ContextFile, ...], uv_command: str, folder: ContextFile | None = None
) -> UvCommand:
    return UvCommand(origin=recipe.where("image", "uv"), files=uv_files, kept=folder, command=uv_command)


def _choose(recipe: Recipe) -> str:
    before = f"{PIP}{base_constraint(recipe.image.constraints)}"
    return f"{before}{NEXT}python3 -I -B {UV_PROGRAM.path} {UV_LOCK.path} {INSIDE}"


def _pip(verb: str, links: ContextFile = UV_LINKS) -> str:
    # The base's constraints are part of the choice.
    return (
        f"{PIP} PIP_CONSTRAINT=''{NEXT}python3 -m pip {verb} {_EXACT}"
        f"{NEXT}    --find-links {links.path} --requirement {UV_LIST.path}"
    )


def kept_uv(recipe: Recipe) -> tuple[LockedWheel, ...]:
    """The wheels of a locked recipe, if all of them lie on this machine."""
    wheels = locked_wheels(recipe, UV_STEP)
    return wheels if all(one.file in recipe.kept for one in wheels) else ()


def uv_files(recipe: Recipe) -> Iterator[tuple[str, bytes]]:
    """Name and content of the files of the step in the build context.

    Raises
    ------
    UsageError : uv.lock or pyproject.toml cannot be read; it may have changed since the recipe was checked.
    """
    if recipe.image.uv is None:
        return
    if recipe.lock is not None:
        wheels = [dataclasses.asdict(one) for one in locked_wheels(recipe, UV_STEP)]
        if wheels:
            yield UV_LIST.member, _lines(map(uv_inside.requirement, wheels))
        if wheels and not kept_uv(recipe):
            yield UV_LINKS.member, _lines((uv_inside.PAGE, *map(uv_inside.link, wheels)))
        return
    try:
        lock = uv_lock.read(recipe.image.uv.project)
    except (OSError, ValueError) as error:
        where = recipe.where("image", "uv")
        raise UsageError(f"the uv project cannot be read: {error}", where=where) from error
    yield UV_LOCK.member, as_json(recipe, lock).encode()
    yield UV_PROGRAM.member, importlib.resources.files(__package__).joinpath("uv_inside.py").read_bytes()


def _lines(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def as_json(recipe: Recipe, lock: UvLock) -> str:
    """What the program in the base reads: the lock, and what the recipe wants of it."""
    uv = recipe.image.uv
    assert uv is not None  # noqa: S101 - for the type checker
    own = lock.packages[lock.project]
    needs = [
        *own.needs,
        *(need for extra in uv.extras for need in own.extras.get(canonical(extra), ())),
        *(need for group in uv.groups for need in lock.groups.get(canonical(group), ())),
    ]
    content = {
        "project": lock.project,
        "requires_python": lock.requires_python,
        "environments": lock.environments,
        "needs": [dataclasses.asdict(need) for need in needs],
        "packages": [dataclasses.asdict(package) for package in lock.packages],
        "protected": PROTECTED,
        "left": sorted({name for step in recipe.image.pip for name in _named(step)}),
    }
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _named(step: PipStep) -> Iterator[str]:
    """Normalised names of the packages that a pip step names itself."""
    # A URL of a repository has a name only where the requirement states one.
    lines = [package for package in step.packages if not package.startswith("git+")]
    if step.requirements is not None:
        lines += read_text(step.requirements, errors="replace").splitlines()
    for line in lines:
        if name := re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", line):
            yield canonical(name[1])


LOCKED_APT = "locked-apt"
"""The folder of the apt step's files, in the build context and below `INSIDE`."""
SCRIPT = "install-locked.sh"
PACKAGES = "packages.txt"
LOCK_TOML = "imgkit/lock.toml"
"""The lock in the context; the image has it in `INSIDE`."""


# Both services take any time, and give the archive as it was then. A package that was a few hours old when
# the lock was made is in the next snapshot.
_SNAPSHOTS = {
    "debian": "https://snapshot.debian.org/archive/debian",
    "debian-security": "https://snapshot.debian.org/archive/debian-security",
    "ubuntu": "https://snapshot.ubuntu.com/ubuntu",
    "ubuntu-ports": "https://snapshot.ubuntu.com/ubuntu",
}
_LATER_S = (0, 86400)


def lock_labels(text: str) -> dict[str, str]:
    """Return the labels of a locked image; `text` is that of its lock."""
    return {LOCK_LABEL: hashlib.sha256(text.encode()).hexdigest()}


def locked_apt(recipe: Recipe) -> str:
    """The command of the locked apt step."""
    folder = f"{INSIDE}/{LOCKED_APT}"
    script = shlex.join(("sh", f"{folder}/{SCRIPT}", recipe.reference, _lock(recipe)))
    parts = (script, "apt-get clean", f"rm -rf /var/lib/apt/lists/* {folder}")
    return f"{NEXT}&& ".join(parts)


def locked_packages(recipe: Recipe) -> str:
    """The content of `PACKAGES`: a line for each package of the lock, as `SCRIPT` reads it."""
    assert recipe.lock is not None  # noqa: S101 - for the type checker: only a locked recipe has such a step
    asked = {re.split(r"[=/:]", word)[0] for word in recipe.image.apt}
    lines = []
    for deb in recipe.lock.apt:
        mark = "manual" if deb.name in asked else "auto"
        urls = " ".join((deb.url, *snapshots(deb, recipe.lock.source_date_epoch)))
        lines.append(f"{deb.sha256} {deb.file} {mark} {deb.name}:{deb.architecture} {urls}\n")
    return "".join(lines)


def snapshots(deb: LockedDeb, epoch: int) -> tuple[str, ...]:
    """Where the distribution's snapshot service has `deb`; nowhere for a package of somebody else."""
    place = re.search(r"/(debian-security|debian|ubuntu-ports|ubuntu)/(pool/.+)", urlsplit(deb.url).path)
    if place is None:
        return ()
    times = (time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(epoch + later)) for later in _LATER_S)
    return tuple(f"{_SNAPSHOTS[place[1]]}/{one}/{place[2]}" for one in times)


def locked_wheels(recipe: Recipe, number: int) -> tuple[LockedWheel, ...]:
    """What pip step `number` (from 0) installs."""
    return tuple(one for one in recipe.lock.pip if one.step == number) if recipe.lock else ()


def kept_wheels(recipe: Recipe, number: int) -> ContextFile | None:
    """The folder of the wheels of step `number` that lie on this machine."""
    if not any(one.file in recipe.kept for one in locked_wheels(recipe, number)):
        return None
    member = f"locked-pip-{number}"
    return ContextFile(member=f"imgkit/{member}", path=f"{INSIDE}/{member}")


def pip_options(recipe: Recipe, number: int) -> str:
    """The options of a locked pip step; one whose wheels are all kept asks no index."""
    kept = kept_wheels(recipe, number)
    if kept is None:
        return PIP_OPTIONS
    whole = all(one.file in recipe.kept for one in locked_wheels(recipe, number))
    return f"{PIP_OPTIONS}{' --no-index' if whole else ''}{NEXT}    --find-links {kept.path}"


def pip_advice(recipe: Recipe) -> str:
    """The end of a locked pip step, which says what helps where the step fails."""
    text = (
        "imgkit: where an index no longer has a wheel of the lock: imgkit lock "
        f"{recipe.reference} --upgrade, or put the wheel into {_lock(recipe)}.files/ (imgkit lock "
        f"{recipe.reference} --keep-files stores all of them there)"
    )
    return f"{NEXT}|| {{ echo {shlex.quote(text)} >&2; exit 1; }}"


def _lock(recipe: Recipe) -> str:
    return f"{recipe.name}{lock_file.SUFFIX}"


def requirements_text(recipe: Recipe, number: int) -> str:
    """The requirements file of a locked pip step: the options of the recipe's own file, then the wheels."""
    own = recipe.image.pip[number].requirements
    stated = requirements.of_file(own) if own else ()
    lines = [line for line in stated if line.startswith("-")]
    for one in locked_wheels(recipe, number):
        direct = one.direct and one.file not in recipe.kept
        what = f"{one.name} @ {one.url}" if direct else f"{one.name}=={one.version}"
        lines.append(f"{what} --hash=sha256:{one.sha256}")
    return "".join(f"{line}\n" for line in lines)


WITH_SECRETS = "imgkit/with-secrets"
"""The script around a step that uses secrets, in the build context and below ``/run``."""


def secret_mounts(names: Sequence[str]) -> str:
    """The options of RUN for a step with secrets, in BuildKit's dialect, which podman knows too."""
    if not names:
        return ""
    script = f"--mount=type=bind,source={WITH_SECRETS},target=/run/{WITH_SECRETS}"
    return "".join(
        f"{option}{NEXT}" for option in (*(f"--mount=type=secret,id={name}" for name in names), script)
    )


def with_secrets(recipe: Recipe, names: Sequence[str], before: str) -> str:
    """What comes before a command that uses secrets: it gets them, and must not write them to a file."""
    return f"{' '.join(secret_argv(recipe, names))}{NEXT}{before}" if names else ""


def secret_argv(recipe: Recipe, names: Sequence[str]) -> tuple[str, ...]:
    """The argv before a command that uses secrets."""
    variables = {secret.id: secret.env for secret in recipe.image.secrets}
    named = (f"{name}={variables[name]}" if variables.get(name) else name for name in names)
    return ("sh", f"/run/{WITH_SECRETS}", *named, "--")
