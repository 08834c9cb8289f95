"""The layers of an image: makes the values that fill both templates.

Notes
-----
Layers that change rarely come first: base, certificates, apt, pip, environment, run steps, the entry points,
the user's code, run steps that need it, facts and provenance, labels. The environment comes before the run
steps, which need it, and after pip, so that a new value does not repeat the installation.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from imgkit_builder import __version__
from imgkit_builder.image import wheel
from imgkit_builder.image.instructions import (
    Authorities,
    Block,
    ContextFile,
    Copy,
    KeyValue,
    Layers,
    PipCommand,
    Project,
    RunStep,
    Text,
)
from imgkit_builder.recipe.model import Constraints, KeyPath, PipStep, Recipe, RunCommand
from imgkit_entrypoints.errors import UsageError
from imgkit_recipes import FOLDER

NEXT = " \\\n    "
"""Continues a shell command or instruction on the next line."""

INSIDE = "/opt/imgkit"
"""The folder of imgkit's own files in the image."""
CONSTRAINT = f"{INSIDE}/constraint.txt"
BASE_CONSTRAINT = f"{INSIDE}/base-constraint.txt"

# A pip step must never replace these distributions of the base; their names are the same in every release.
PROTECTED = r"torch|torchvision|torchaudio|triton|pytorch[-_.]triton|nvidia[-_.]nccl[-_.]cu[0-9]+"

# pip cannot break the system packages of an image, so it may install there (PEP 668). These are variables,
# not options: an old pip stops at an unknown option but ignores an unknown variable. pip writes no byte code
# of its own: in a base without any, it would add 11 MB to each layer.
PIP = "PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore"

# Byte code of the entry points: a read-only image would compile them at every start. What pip writes holds
# the time of the installation, and a delta would have all of it after each change. The hash of a source
# stays, and under one seed the order of sets does. Columns for tracebacks are a quarter of it when
# compressed, and dist-bench makes reports once, on a laptop.
COMPILE = (
    "PYTHONHASHSEED=0 python3 -s -X no_debug_ranges -m compileall -q --invalidation-mode checked-hash"
    f"{NEXT}    -x /bench/report/ \"$(python3 -IBc 'import {wheel.PACKAGE} as it; print(it.__path__[0])')\""
)

CERTIFICATES = "/usr/local/share/ca-certificates"
"""The folder of local authorities, which ``update-ca-certificates`` adds to `BUNDLE` (Debian, Ubuntu)."""
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
TRUST = ("CURL_CA_BUNDLE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
"""Variables of programs that come with authorities of their own: pip, requests, and what conda installs."""

WITH_SECRETS = "imgkit/with-secrets"
"""The script around a step that uses secrets, in the build context and below ``/run``."""


def layers(recipe: Recipe, *, base: str | None = None, platform: str | None = None) -> Layers:
    """The layers of `recipe` on `base` (default: the recipe's); only shell commands are quoted.

    Raises
    ------
    UsageError : a value does not fit on one line, or is not the name of a distribution.
    """
    image = recipe.image
    for value, path in _values(recipe):
        if re.search(r"[\n\r\0]", value):
            found = f"{'.'.join(map(str, path))}: a line end or NUL"
            refuse(found, "a Dockerfile", recipe.where(*path), "write it on one line")
    shipped = recipe.file.parent == FOLDER
    wheel_name = wheel.file_name()
    return Layers(
        name=recipe.name,
        file=recipe.file.name,
        reference=recipe.name if shipped else shlex.quote(recipe.file.name),
        platform=platform or image.platforms[0],
        uses_secrets=bool(image.used_secrets),
        base=_base(recipe, base),
        ca=_ca(recipe),
        apt=_apt(recipe),
        # A run step may call pip too, and can then use the file.
        protect=_protect() if image.pip or image.run else "",
        filtered_constraint=_filtered_constraint(recipe) if image.pip else None,
        pip=tuple(_pip(recipe, number, step) for number, step in enumerate(image.pip)),
        env=_env(recipe),
        workdir=Text(
            origin=_stated(recipe, "image", "workdir") or "imgkit: the default folder", text=image.workdir
        ),
        run=_run(recipe, "pip"),
        wheel=ContextFile(member=f"imgkit/{wheel_name}", path=f"{INSIDE}/{wheel_name}"),
        # The base's PIP_CONSTRAINT does not apply here; if its file is missing, pip would stop.
        install_wheel=f"{PIP} PIP_CONSTRAINT=''{NEXT}python3 -m pip install --no-cache-dir --no-compile"
        f" --no-index --no-deps --force-reinstall{NEXT}    {INSIDE}/{wheel_name}{NEXT}&& {COMPILE}",
        projects=tuple(
            _project(recipe, number, step)
            for number, step in enumerate(image.pip)
            if step.project is not None
        ),
        copy=tuple(
            Copy(
                origin=recipe.where("image", "copy", number),
                member=copy_member(number),
                target=posixpath.normpath(step.target),
            )
            for number, step in enumerate(image.copy)
        ),
        run_after_copy=_run(recipe, "copy"),
        labels=_labels(recipe),
    )


def certificate_member(number: int) -> str:
    """Path of certificate `number` (from 0) in the build context."""
    return f"imgkit/ca-{number}.crt"


def project_member(number: int) -> str:
    """The folder of the project of pip step `number` (from 0) in the build context."""
    return f"project/{number}"


def requirements_member(number: int) -> str:
    """Path of the requirements file of pip step `number` (from 0) in the build context."""
    return f"imgkit/requirements-{number}.txt"


def copy_member(number: int) -> str:
    """The folder of copy step `number` (from 0) in the build context."""
    return f"copy/{number}"


def _values(recipe: Recipe) -> Iterable[tuple[str, KeyPath]]:
    """Every value of the image part that must fit on one line, with its path."""
    image = recipe.image
    yield image.base, ("image", "base")
    yield image.workdir, ("image", "workdir")
    for number, package in enumerate(image.apt):
        yield package, ("image", "apt", number)
    for number, command in enumerate(image.run):
        yield command.command.strip(), ("image", "run", number)
    for number, step in enumerate(image.pip):
        editable = (step.editable,) if step.editable else ()
        for key, words in (("options", step.options), ("packages", step.packages), ("editable", editable)):
            for place, word in enumerate(words):
                yield word, ("image", "pip", number, key, place)
    for number, copy in enumerate(image.copy):
        yield copy.target, ("image", "copy", number, "target")
    steps: Iterable[tuple[KeyPath, Mapping[str, str]]]
    steps = ((("image", "pip", number, "env"), step.env) for number, step in enumerate(image.pip))
    for where, pairs in (*steps, (("image", "env"), image.env), (("image", "labels"), image.labels)):
        for key, value in pairs.items():
            yield key, (*where, key)
            yield value, (*where, key)


def _base(recipe: Recipe, override: str | None) -> Text:
    stated = recipe.where("image", "base")
    if override in (None, recipe.image.base):
        return Text(origin=stated, text=recipe.image.base)
    return Text(origin=f"--base (instead of {recipe.image.base}, {stated})", text=override)


def _ca(recipe: Recipe) -> Authorities | None:
    """The command that adds the certificates to the system's, before the first step that uses the network."""
    if not recipe.image.ca:
        return None
    names = [posixpath.basename(certificate_member(number)) for number in range(len(recipe.image.ca))]
    # A base that names a bundle for pip trusts what it holds: the variable set here must not lose that.
    parts = (
        f'if [ -f "${{PIP_CERT:-}}" ] && [ "$PIP_CERT" != {BUNDLE} ]; then',
        f'    cp -- "$PIP_CERT" {CERTIFICATES}/imgkit-base.crt; fi;',
        "if command -v update-ca-certificates > /dev/null; then update-ca-certificates;",
        f"else mkdir -p {posixpath.dirname(BUNDLE)} && cat {CERTIFICATES}/*.crt >> {BUNDLE}; fi",
    )
    return Authorities(
        origin=_origins(recipe, [("image", "ca", number) for number in range(len(names))]),
        files=tuple(
            ContextFile(member=certificate_member(number), path=f"{CERTIFICATES}/imgkit-{name}")
            for number, name in enumerate(names)
        ),
        install=NEXT.join(parts),
        env=tuple(KeyValue(key=name, value=BUNDLE) for name in TRUST),
    )


def _apt(recipe: Recipe) -> Text | None:
    packages = recipe.image.apt
    if not packages:
        return None
    parts = (
        "apt-get update",
        "DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends"
        + "".join(f"{NEXT}    {shlex.quote(package)}" for package in packages),
        "apt-get clean",
        "rm -rf /var/lib/apt/lists/*",
    )
    stated = _origins(recipe, [("image", "apt", number) for number in range(len(packages))])
    return Text(origin=stated, text=f"{NEXT}&& ".join(parts))


def _protect() -> str:
    # "pip freeze" would print "torch @ file://..." for a torch built in the base, as in NVIDIA's images.
    parts = (
        f"mkdir -p {INSIDE}",
        f"python3 -m pip list --format=freeze --disable-pip-version-check > {CONSTRAINT}",
        f"sed -n -i -E '/^({PROTECTED})==/Ip' {CONSTRAINT}",
    )
    return f"{NEXT}&& ".join(parts)


def _filtered_constraint(recipe: Recipe) -> Text | None:
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


def _pip(recipe: Recipe, number: int, step: PipStep) -> PipCommand:
    command = _pip_install(recipe, step)
    requirements = None
    if step.requirements is not None or step.project is not None:
        member = requirements_member(number)
        requirements = ContextFile(member=member, path=f"{INSIDE}/{posixpath.basename(member)}")
        command += f"{NEXT}    --requirement {requirements.path}"
    command += "".join(f"{NEXT}    {shlex.quote(package)}" for package in step.packages)
    return PipCommand(
        origin=recipe.where("image", "pip", number),
        command=command,
        requirements=requirements,
        mounts=_mounts(step.secrets),
    )


def _project(recipe: Recipe, number: int, step: PipStep) -> Project:
    member = project_member(number)
    target = posixpath.normpath(step.editable) if step.editable else f"{INSIDE}/{member}"
    form = "--editable " if step.editable else ""
    return Project(
        origin=recipe.where("image", "pip", number),
        member=member,
        target=target,
        command=f"{_pip_install(recipe, step)}{NEXT}    {form}{shlex.quote(target)}",
        stays=step.editable is not None,
        mounts=_mounts(step.secrets),
    )


def _pip_install(recipe: Recipe, step: PipStep) -> str:
    """The command up to what it installs."""
    # An option adds to PIP_CONSTRAINT. The variable itself would also apply in the isolated environments that
    # pip builds packages in, and those must be free to choose their torch.
    command = (
        _with_secrets(recipe, step.secrets, "env ") + f"{PIP}{_base_constraint(recipe.image.constraints)}"
    )
    command += "".join(f"{NEXT}{name}={shlex.quote(value)}" for name, value in step.env.items())
    command += f"{NEXT}python3 -m pip install --no-cache-dir --constraint {CONSTRAINT}"
    return command + (f"{NEXT}    {shlex.join(step.options)}" if step.options else "")


def _base_constraint(constraints: Constraints) -> str:
    match constraints.policy:
        case "keep":
            return ""
        case "ignore":
            return " PIP_CONSTRAINT=''"
        case "drop":
            return f" PIP_CONSTRAINT={BASE_CONSTRAINT}"


def _run(recipe: Recipe, after: str) -> tuple[RunStep, ...]:
    """The user's commands of one place."""
    commands = enumerate(recipe.image.run)
    return tuple(_command(recipe, number, one) for number, one in commands if one.after == after)


def _command(recipe: Recipe, number: int, command: RunCommand) -> RunStep:
    text = command.command.strip()
    # Docker reads some beginnings as its own syntax (flags, JSON), a last backslash as a continued line, and
    # newer engines read << as a heredoc; the exec form keeps all of them as text.
    plain = not text.startswith(("--", "[")) and "<<" not in text and not text.endswith("\\")
    exec_form = json.dumps(["/bin/sh", "-c", text], ensure_ascii=False)
    posix = f"sh -c {shlex.quote(text)}"
    docker = text if plain else exec_form
    if command.secrets:
        docker = posix = _with_secrets(recipe, command.secrets, "") + posix
    return RunStep(
        origin=recipe.where("image", "run", number),
        docker=docker,
        posix=posix,
        mounts=_mounts(command.secrets),
    )


def _mounts(names: Sequence[str]) -> str:
    """The options of RUN for a step with secrets, in BuildKit's dialect, which podman knows too."""
    if not names:
        return ""
    script = f"--mount=type=bind,source={WITH_SECRETS},target=/run/{WITH_SECRETS}"
    return "".join(
        f"{option}{NEXT}" for option in (*(f"--mount=type=secret,id={name}" for name in names), script)
    )


def _with_secrets(recipe: Recipe, names: Sequence[str], before: str) -> str:
    """What comes before a command that uses secrets: it gets them, and must not write them to a file."""
    if not names:
        return ""
    variables = {secret.id: secret.env for secret in recipe.image.secrets}
    words = [f"{name}={variables[name]}" if variables.get(name) else name for name in names]
    return f"sh /run/{WITH_SECRETS} {' '.join(words)} --{NEXT}{before}"


def _env(recipe: Recipe) -> Block:
    # The host's ~/.local is visible inside a .sif; Python must not import its packages.
    merged = {"PYTHONNOUSERSITE": "1", **recipe.image.env}
    stated = _origins(recipe, [("image", "env", key) for key in recipe.image.env])
    return Block(origin=stated or "imgkit: ignore packages in the host's ~/.local", entries=_entries(merged))


def _labels(recipe: Recipe) -> Block:
    """Labels that depend on the recipe alone; the build adds date, revision, base and context."""
    description = " ".join(recipe.description.split())
    # Without its own title and version, the image would inherit those of the base's Linux distribution.
    merged = {
        "org.opencontainers.image.title": recipe.name,
        "org.opencontainers.image.version": __version__,
        **({"org.opencontainers.image.description": description} if description else {}),
        **recipe.image.labels,
        "imgkit.recipe": recipe.name,
        "imgkit.recipe.sha256": recipe.sha256,
        "imgkit.version": __version__,
    }
    stated = _origins(recipe, [("image", "labels", key) for key in recipe.image.labels])
    return Block(origin=stated or "imgkit: what this image is", entries=_entries(merged))


def _entries(pairs: Mapping[str, str]) -> tuple[KeyValue, ...]:
    return tuple(KeyValue(key=key, value=value) for key, value in pairs.items())


def _stated(recipe: Recipe, *path: str | int) -> str:
    """``file.yaml:12`` for the value at `path`; empty for a default."""
    return recipe.where(*path) if path in recipe.positions else ""


def _origins(recipe: Recipe, paths: Sequence[KeyPath]) -> str:
    """Places of several values, shortened: ``mn5.yaml:12-14, mn5-llm.yaml:3``."""
    spans: list[tuple[str, int, int]] = []
    for path in paths:
        name, _, number = recipe.where(*path).rpartition(":")
        if not name:
            return recipe.where(*path)
        line = int(number)
        if spans and spans[-1][0] == name and line in (spans[-1][2], spans[-1][2] + 1):
            spans[-1] = (name, spans[-1][1], line)
        else:
            spans.append((name, line, line))
    return ", ".join(f"{name}:{first}" + (f"-{last}" if last > first else "") for name, first, last in spans)


def refuse(found: str, place: str, where: str, hint: str) -> NoReturn:
    """Raise the error for a value that the rendered format cannot express."""
    raise UsageError(f"{found} cannot appear in {place}", where=where or None, hint=hint)
