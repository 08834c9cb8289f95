"""The text of the steps that call pip, and of the constraints that keep the base's torch."""

from __future__ import annotations

import posixpath
import re
import shlex

from imgkit_builder.image import locked_steps, secret_steps
from imgkit_builder.image.instructions import INSIDE, NEXT, ContextFile, PipCommand, Project, Text
from imgkit_builder.recipe.model import Constraints, PipStep, Recipe
from imgkit_entrypoints.errors import UsageError

CONSTRAINT = f"{INSIDE}/constraint.txt"
BASE_CONSTRAINT = f"{INSIDE}/base-constraint.txt"

# A pip step must never replace these distributions of the base; their names are the same in every release.
PROTECTED = r"torch|torchvision|torchaudio|triton|pytorch[-_.]triton|nvidia[-_.]nccl[-_.]cu[0-9]+"

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
    command = NEXT.join(
        (
            'if [ -n "${PIP_CONSTRAINT:-}" ]; then',
            f"    sed -E '/^({names})([^A-Za-z0-9._-]|$)/Id' \"$PIP_CONSTRAINT\" > {BASE_CONSTRAINT};",
            f"else : > {BASE_CONSTRAINT}; fi",
        )
    )
    return Text(origin=stated, text=command)


def command(recipe: Recipe, number: int, step: PipStep, *, pip: str = "python3 -m pip") -> PipCommand:
    """The command of pip step `number` (from 0) that installs packages and requirements by `pip`."""
    text = _install(recipe, step, pip)
    kept = locked_steps.kept_wheels(recipe, number)
    if recipe.lock:
        text += f"{NEXT}    {locked_steps.pip_options(recipe, number)}"
    requirements = None
    if recipe.lock or step.requirements is not None or step.project is not None:
        member = requirements_member(number)
        requirements = ContextFile(member=member, path=f"{INSIDE}/{posixpath.basename(member)}")
        text += f"{NEXT}    --requirement {requirements.path}"
    if not recipe.lock:
        text += "".join(f"{NEXT}    {shlex.quote(package)}" for package in step.packages)
    if recipe.lock:
        text += locked_steps.pip_advice(recipe)
    if kept:
        text += f"{NEXT}&& rm -rf {kept.path}"
    return PipCommand(
        origin=recipe.where("image", "pip", number),
        command=text,
        requirements=requirements,
        kept=kept,
        mounts=secret_steps.mounts(step.secrets),
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
        mounts=secret_steps.mounts(step.secrets),
    )


def _install(recipe: Recipe, step: PipStep, pip: str = "python3 -m pip") -> str:
    """The command up to what it installs."""
    # An option adds to PIP_CONSTRAINT. The variable itself would also apply in the isolated environments that
    # pip builds packages in, and those must be free to choose their torch.
    command = (
        secret_steps.wrapped(recipe, step.secrets, "env ")
        + f"{PIP}{base_constraint(recipe.image.constraints)}"
    )
    command += "".join(f"{NEXT}{name}={shlex.quote(value)}" for name, value in step.env.items())
    command += f"{NEXT}{pip} install --no-cache-dir --constraint {CONSTRAINT}"
    return command + (f"{NEXT}    {shlex.join(step.options)}" if step.options else "")


def base_constraint(constraints: Constraints) -> str:
    """The variable for pip that applies the recipe's policy for the base's own constraint file."""
    match constraints.policy:
        case "keep":
            return ""
        case "ignore":
            return " PIP_CONSTRAINT=''"
        case "drop":
            return f" PIP_CONSTRAINT={BASE_CONSTRAINT}"
