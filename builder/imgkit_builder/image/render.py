"""Render a recipe as a Dockerfile or as a Singularity definition file.

A recipe is first converted to its layers, which fill one of two templates. Layers that rarely change come
first: base, certificates, apt, the uv project, pip, environment, run steps, the entry points, the user's
code, run steps that need that code, system facts and provenance, labels. The environment comes before the run
steps, which need it, and after pip, so that a new value of a variable does not repeat the installation.

Docker's classic builder must be able to read the Dockerfile, so the template uses no heredoc, ``RUN --mount``
or ``COPY --link`` (docs/adr/0003). The builder expands ``$``, quotes and backslashes in ENV, LABEL, WORKDIR
and COPY. In COPY, it does so even after it has decoded the JSON form. It expands nothing in RUN. Every value
of a recipe is quoted for the instruction in which it appears.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from imgkit_builder.image import install, wheel
from imgkit_builder.image.instructions import (
    INSIDE,
    NEXT,
    Additions,
    Block,
    ContextFile,
    Early,
    Layers,
    Step,
    Text,
    imgkit_file,
)
from imgkit_builder.oci.manifest import LOCK_LABEL
from imgkit_builder.recipe.model import Recipe, RunCommand
from imgkit_builder.recipe.problems import KeyPath
from imgkit_builder.recipe.rules import quote_inherited
from imgkit_entrypoints import __version__
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Environment

# The comment that is above each instruction and says where it comes from: "# imgkit: PURPOSE", "# --base NAME
# (...)", or "# mn5.yaml:12-14, mn5-llm.yaml:3"
TRACE = re.compile(r"\s*# (imgkit: .+|--base .+|[^/]+:\d+(?:-\d+)?(?:, [^/]+:\d+(?:-\d+)?)*)")


def render_dockerfile(
    recipe: Recipe, *, base: str | None = None, platform: str | None = None, base_user: str = ""
) -> str:
    """Return the Dockerfile of `recipe` as text.

    FROM does not name the platform. With a local image of another architecture, ``FROM --platform`` would
    build the wrong image. imgkit compares the platform of the base before the build instead.

    Parameters
    ----------
    base : the base image, if it differs from the base in the recipe.
    platform : the platform, which appears only in a comment.
    base_user : the user of the base, if that is not root. It is known only on a machine that has the base.

    Raises
    ------
    UsageError : a value cannot be written in a Dockerfile, for example a variable with a line break.
    """
    layers = build_layers(recipe, base=base, platform=platform, base_user=base_user)
    return _fill_template("dockerfile.j2", layers)


def render_resolver(layers: Layers, *, folder: str) -> str:
    """Return the Dockerfile of the build that finds the packages for the lock of a recipe.

    `folder` is a folder in that image. It contains programs of imgkit that run in place of apt and pip.
    """
    return _fill_template("resolver.j2", layers, folder=folder)


def render_definition(recipe: Recipe, *, base: str | None = None, platform: str | None = None) -> str:
    """Return the Singularity definition file of `recipe` as text.

    It describes the same image as the Dockerfile. The user builds it inside the unpacked build context. Its
    first lines contain the commands for that.

    Raises
    ------
    UsageError : a value cannot be written in a definition file. Most of these values can be written in a
        Dockerfile.
    """
    return render_build_definition(recipe, Additions(), base=base, platform=platform)


def render_build_definition(
    recipe: Recipe,
    additions: Additions,
    *,
    base: str | None,
    platform: str | None,
    bootstrap: str = "docker",
    source: str = "",
) -> str:
    """Return the definition file with which imgkit itself builds an image.

    It is the result of `render_definition` plus `additions`, such as the labels of this build.

    Parameters
    ----------
    base : the base image, if it differs from the base in the recipe.
    platform : the platform, which appears only in a comment.
    bootstrap : the kind of source for the base. ``docker`` is a registry, ``localimage`` a file, and ``oci``
        a folder.
    source : the location of the base. By default it is the name of the base.

    Raises
    ------
    UsageError : a value cannot be written in a definition file, or the recipe uses build secrets.
    """
    layers = build_layers(recipe, base=base, platform=platform)
    if layers.uses_secrets:
        where = recipe.where("image", "secrets")
        refuse_value("a build secret", "a definition file", where, "use --format dockerfile and imgkit build")
    _refuse_white_space(layers.labels)
    steps = (*additions.steps, *_list_definition_steps(layers))
    text = _fill_template(
        "definition.j2",
        layers,
        source=source or layers.base.text,
        bootstrap=bootstrap,
        additions=additions,
        steps=steps,
    )
    _refuse_build_arguments(text)
    return text


def _refuse_white_space(labels: Block) -> None:
    """Raise UsageError for a label with white space that a definition file cannot contain."""
    for label, value in labels.entries.items():
        if re.search(r"\s", label) or value != value.strip():
            problem = f"label {label!r}: white space in its name or around its value"
            hint = "remove it, or use --format dockerfile"
            refuse_value(problem, "a definition file", labels.origin, hint)


def _refuse_build_arguments(text: str) -> None:
    """Raise UsageError if the definition file `text` contains ``{{ word }}``.

    Apptainer >= 1.2 replaces it by the build argument `word`, and fails if there is no such argument.
    """
    for line_number, line in enumerate(text.split("\n"), 1):
        match = re.search(r"\{\{\s*\w+\s*\}\}", line)
        if match is not None:
            where = find_origin(text, line_number)
            refuse_value(match.group(), "a definition file", where, "use --format dockerfile")


def find_origin(text: str, line: int) -> str:
    """Return the line of the recipe that causes line `line` (from 1) of a rendered text: ``mn5.yaml:12``.

    The comment above each instruction contains the answer. An instruction that combines several values gives
    ``mn5.yaml:12-14, mn5-llm.yaml:3``. For a step that imgkit adds itself, the result is ``imgkit: `` and the
    purpose of the step. For a line above all instructions, the result is empty.
    """
    # The nearest such comment above the line belongs to its instruction.
    for earlier_line in reversed(text.split("\n")[:line]):
        match = TRACE.fullmatch(earlier_line)
        if match is not None:
            return match[1]
    return ""


def _fill_template(name: str, layers: Layers, **values: object) -> str:
    """Render the template `name`, such as ``dockerfile.j2``.

    The template can use the fields of `layers`, and `values`, which have other names. It can also use
    ``trust``, the variables with which programs find the certificates of the image.
    """
    jinja = template_environment("templates")
    jinja.filters.update(
        docker_quote=docker_quote,
        docker_value=_docker_value,
        # A filter gets the value on its left side first: {{ value | sh_value(name) }}.
        sh_value=lambda value, name: install.shell_value(name, value),
        docker_key=_docker_key,
        copy_arguments=_render_copy_arguments,
        copy_file=_render_copy,
    )
    # Not `dataclasses.asdict`, which would also convert the objects in the fields, such as steps.
    fields = {field.name: getattr(layers, field.name) for field in dataclasses.fields(layers)}
    return jinja.get_template(name).render(fields, **values, trust=TRUST)


def template_environment(shipped: str, folder: Path | None = None) -> Environment:
    """Return a jinja2 environment that looks for templates in `folder` first, and then in `shipped`.

    `shipped` is a folder of the package imgkit_recipes. A template that uses a missing value raises an error.
    """
    # Imported here, because only some commands render, and the import takes longer than the rest of "imgkit
    # --help".
    from jinja2 import ChoiceLoader, FileSystemLoader, PackageLoader, StrictUndefined

    from imgkit_builder.image.sandbox import Templates

    loaders: list[FileSystemLoader | PackageLoader] = [PackageLoader("imgkit_recipes", shipped)]
    if folder is not None:
        loaders.insert(0, FileSystemLoader(folder))
    jinja = Templates(
        loader=ChoiceLoader(loaders),
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters["sh_quote"] = shlex.quote
    return jinja


def _list_definition_steps(layers: Layers) -> Iterator[Step]:
    """Yield the steps of the section ``%post`` of a definition file, in the order in which they run.

    A Dockerfile also has instructions such as ENV and COPY between the steps. Here they become shell
    commands.
    """
    if layers.args:
        yield Step(origin=layers.args.origin, command=_export(layers.args.entries))
    # The section `%files` copies files with the modes that they have on this machine.
    copied = [INSIDE]
    if layers.ca:
        copied += [file.path for file in layers.ca.files]
    yield _make_imgkit_step(
        "copied files have the same modes, whatever umask copied them",
        f"chmod -R u=rwX,go=rX {' '.join(copied)}",
    )
    if layers.ca:
        yield Step(origin=layers.ca.origin, command=f"{layers.ca.command}\n{_export(TRUST)}")
    yield from _list_early_steps(layers.before_apt)
    yield from map(_add_parentheses, layers.apt)
    yield from _list_early_steps(layers.after_apt)
    yield from map(_add_parentheses, (*layers.protect, *layers.pip))
    workdir = layers.workdir
    yield Step(origin=layers.env.origin, command=_export(layers.env.entries))
    yield Step(origin=workdir.origin, command=f"mkdir -p -- {shlex.quote(workdir.text)}")
    yield from _list_commands(layers.run, workdir.text)
    yield _add_parentheses(layers.install_wheel)
    yield from map(_add_copy_of_project, layers.projects)
    if layers.projects:
        yield _make_imgkit_step("the projects are installed", f"rm -rf {INSIDE}/project")
    yield from _list_copy_steps(layers.copy)
    if layers.copy:
        yield _make_imgkit_step("the copies are in their places", f"rm -rf {INSIDE}/copy")
    yield from _list_commands(layers.run_after_copy, workdir.text)


def _list_early_steps(early: Early) -> Iterator[Step]:
    """Yield the steps for the user's files and commands that come before pip."""
    yield from _list_copy_steps(early.copy)
    yield from _list_commands(early.run, "/")


def _add_copy_of_project(step: Step) -> Step:
    """Return the `step` that installs a project, after a command that copies the project to its own folder.

    Only an editable project has such a folder. The section `%files` has copied any project to `INSIDE`.
    """
    (folder,) = step.files
    command = step.command
    if folder.path != f"{INSIDE}/{folder.context_path}":
        command = f"{_render_copy_command(folder)}\n{command}"
    return Step(origin=step.origin, command=command)


def _add_parentheses(step: Step) -> Step:
    """Put the commands of `step` into parentheses if they are joined by ``&&``.

    The section ``%post`` runs under ``set -e``. Without parentheses, a failure of ``a`` in ``a && b`` would
    not end the build. In ``(a && b)``, it does.
    """
    if f"{NEXT}&& " not in step.command:
        return step
    return dataclasses.replace(step, command=f"({step.command})")


def _make_imgkit_step(purpose: str, command: str, files: tuple[ContextFile, ...] = ()) -> Step:
    """Return a step that imgkit adds to the steps of the recipe.

    `purpose` appears in the comment above it.
    """
    return Step(origin=f"imgkit: {purpose}", command=command, files=files)


def _list_copy_steps(copies: Iterable[ContextFile]) -> Iterator[Step]:
    """Yield a step for each of `copies`, which copies the user's files to their folder in the image."""
    for copy in copies:
        yield Step(origin=copy.origin, command=_render_copy_command(copy))


def _list_commands(steps: Iterable[Step], folder: str) -> Iterator[Step]:
    """Yield the user's `steps` such that each command starts in `folder`.

    Each command runs in a subshell, so it cannot change the working directory of the next one.
    """
    for step in steps:
        yield Step(origin=step.origin, command=f"(cd -- {shlex.quote(folder)} && {step.command})")


def _export(variables: Mapping[str, str]) -> str:
    """Return a shell command that sets and exports `variables`."""
    values = (f"{key}={install.shell_value(key, value)}" for key, value in variables.items())
    return f"export {NEXT.join(values)}"


def _render_copy_command(code: ContextFile) -> str:
    """Return shell commands that copy a folder of the build context to its path in the image."""
    target = shlex.quote(code.path)
    return f"mkdir -p -- {target}\ncp -RP -- {INSIDE}/{code.context_path}/. {target}"


def docker_quote(value: str) -> str:
    """Return `value` in double quotes for ENV, LABEL and WORKDIR. A ``$`` is escaped."""
    return '"' + re.sub(r'([\\"$])', r"\\\1", value) + '"'


def _docker_value(value: str, key: str) -> str:
    """Return the value of the variable `key`, quoted for ENV.

    In a value such as ``/x:$PATH``, Docker expands the reference, which adds to the base's value. In any
    other value, ``$`` is escaped.
    """
    # `quote_inherited` puts quotes around the whole value, so remove those of `docker_quote`.
    inherited = quote_inherited(key, value, lambda text: docker_quote(text)[1:-1])
    return inherited or docker_quote(value)


def _docker_key(value: str) -> str:
    """Return the name of a label. It is quoted only if it contains unusual characters."""
    if re.fullmatch(r"[A-Za-z0-9._/-]+", value):
        return value
    return docker_quote(value)


def _render_copy_arguments(paths: Sequence[str]) -> str:
    """Return the JSON form of the arguments of COPY.

    Some characters are escaped twice, because the builder expands ``$`` and quotes even after it has decoded
    the JSON.
    """
    escaped_paths = [re.sub(r"""([\\"'$])""", r"\\\1", path) for path in paths]
    return json.dumps(escaped_paths, ensure_ascii=False)


def _render_copy(file: ContextFile) -> str:
    """Return the JSON form of the arguments of COPY, for a file or for the content of a folder."""
    slash = "/" if file.is_folder else ""
    return _render_copy_arguments([f"{file.context_path}{slash}", f"{file.path}{slash}"])


# Compile the entry points during the build, because a read-only image would compile them at every start. The
# files must have the same bytes in each build. Otherwise all of them would be sent to the cluster again. So
# they contain the hash of their source and not its time, as those of pip would, and PYTHONHASHSEED fixes the
# order of sets. The option no_debug_ranges leaves out the columns for tracebacks, which are a quarter of the
# compressed size.
COMPILE = (
    "PYTHONHASHSEED=0 python3 -s -X no_debug_ranges -m compileall -q --invalidation-mode checked-hash"
    f"{NEXT}    \"$(python3 -IBc 'import {wheel.PACKAGE} as it; print(it.__path__[0])')\""
)

CERTIFICATES = "/usr/local/share/ca-certificates"
"""The folder with the certificates of local authorities. ``update-ca-certificates`` adds them to `BUNDLE`
(Debian, Ubuntu)."""
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
TRUST = dict.fromkeys(("CURL_CA_BUNDLE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"), BUNDLE)
"""Variables that make programs use `BUNDLE`. pip, requests and conda's programs otherwise use their own list
of certificate authorities."""


def build_layers(recipe: Recipe, *, base: str | None, platform: str | None, base_user: str = "") -> Layers:
    """Return the layers of the image of `recipe`, which fill the templates.

    Shell commands in the layers are already quoted. The templates quote all other values.

    Parameters
    ----------
    base : the base image, if it differs from the base in the recipe.
    platform : the platform, which appears only in a comment.
    base_user : the user of the base. Empty means root, or unknown.

    Raises
    ------
    UsageError : a value contains a line break, or an item of ``constraints.drop`` is not the name of a
        distribution.
    """
    _refuse_line_ends(recipe)
    image = recipe.image
    user, _, _ = base_user.partition(":")  # "root:root" names a group, too
    is_root = user in ("root", "0")
    return Layers(
        image=image,
        name=recipe.name,
        file=recipe.file.name,
        reference=shlex.quote(recipe.reference),
        platform=platform or image.platforms[0],
        uses_secrets=bool(image.used_secrets),
        base=_choose_base(recipe, base),
        base_user="" if is_root else base_user,
        args=_block(recipe, "args", image.args) if image.args else None,
        ca=_make_certificates_step(recipe) if image.ca else None,
        before_apt=Early(copy=_list_copies(recipe, "base"), run=_list_run_steps(recipe, "base")),
        after_apt=Early(copy=_list_copies(recipe, "apt"), run=_list_run_steps(recipe, "apt")),
        apt=_list_apt_steps(recipe),
        protect=_list_protection_steps(recipe),
        pip=_list_pip_steps(recipe),
        env=_env(recipe),
        workdir=_choose_workdir(recipe),
        run=_list_run_steps(recipe, "pip"),
        install_wheel=_make_wheel_step(),
        projects=_list_project_steps(recipe),
        copy=_list_copies(recipe, "pip"),
        origins=(install.LOCK_TOML,) if recipe.lock else (),
        run_after_copy=_list_run_steps(recipe, "copy"),
        labels=_labels(recipe),
    )


def _refuse_line_ends(recipe: Recipe) -> None:
    """Raise UsageError for a value with a line break, which would begin a new instruction in a Dockerfile.

    Commands may have several lines, because they are quoted.
    """
    for path, value in _list_texts(dataclasses.asdict(recipe.image), ("image",)):
        # Remove line breaks that are allowed. The check below still finds \r and NUL.
        if path[-1] == "command":
            value = value.replace("\n", "")
        if re.search(r"[\n\r\0]", value):
            key = ".".join(map(str, path))
            problem = f"{key}: a line end or NUL"
            refuse_value(problem, "a Dockerfile", recipe.where(*path), "write it on one line")


def _list_apt_steps(recipe: Recipe) -> tuple[Step, ...]:
    """Return the step that installs Debian packages, or an empty tuple if there are no packages."""
    apt_packages = recipe.lock.apt if recipe.lock else recipe.image.apt
    if not apt_packages:
        return ()
    return (install.apt_step(recipe, _format_origins(recipe, "apt", range(len(recipe.image.apt)))),)


def _list_pip_steps(recipe: Recipe) -> tuple[Step, ...]:
    """Return the steps that install packages with pip.

    If the recipe has a lock, steps without a wheel in the lock are left out, because they would install
    nothing.
    """
    steps = []
    for step_number in install.pip_step_numbers(recipe):
        if recipe.lock and not install.locked_wheels(recipe, step_number):
            continue
        steps.append(install.pip_step(recipe, step_number))
    return tuple(steps)


def _list_project_steps(recipe: Recipe) -> tuple[Step, ...]:
    """Return the steps that install the user's own projects."""
    steps = enumerate(recipe.image.pip)
    return tuple(
        install.project_step(recipe, index, step) for index, step in steps if step.project is not None
    )


def _list_protection_steps(recipe: Recipe) -> tuple[Step, ...]:
    """Return the steps that make pip keep packages of the base, such as torch.

    The steps write files with the versions to keep. The first file is also written if the recipe has only run
    steps, because their commands may call pip with that file.
    """
    image = recipe.image
    uses_pip = image.uv or image.pip
    steps = []
    if uses_pip or image.run:
        steps.append(install.protection_step())
    # Only this policy changes the base's constraint file. The others need no copy of it.
    if uses_pip and image.constraints.policy == "drop":
        steps.append(install.constraint_step(recipe))
    return tuple(steps)


def _make_wheel_step() -> Step:
    """Return the step that installs imgkit's entry points."""
    wheel_file = imgkit_file(wheel.wheel_name())
    # This step needs no constraints. With the base's PIP_CONSTRAINT, pip would fail if the file it names is
    # missing. pip compiles nothing, because `COMPILE` does it such that each build gives the same bytes.
    command = (
        f"{install.PIP_VARIABLES} PIP_CONSTRAINT=''"
        f"{NEXT}python3 -m pip install --no-cache-dir --no-compile --no-index --no-deps --force-reinstall"
        f"{NEXT}    {wheel_file.path}"
        f"{NEXT}&& {COMPILE}"
    )
    return _make_imgkit_step(
        purpose="no index, no dependencies; forced, because a changed wheel can have the same version",
        command=command,
        files=(wheel_file,),
    )


def _list_copies(recipe: Recipe, after: str) -> tuple[ContextFile, ...]:
    """Return the user's files to copy after the step `after`: ``base``, ``apt`` or ``pip``."""
    copies = []
    for index, step in enumerate(recipe.image.copy):
        if step.after != after:
            continue
        copy = ContextFile(
            context_path=copy_folder(index),
            path=posixpath.normpath(step.target),
            is_folder=True,
            origin=recipe.where("image", "copy", index),
        )
        copies.append(copy)
    return tuple(copies)


def certificate_file(number: int) -> str:
    """Return the path of a certificate in the build context. `number` is its index in the recipe."""
    return f"imgkit/ca-{number}.crt"


def copy_folder(number: int) -> str:
    """Return the folder of a copy step in the build context.

    `number` is the index of the step in the recipe.
    """
    return f"copy/{number}"


def _list_texts(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yield every text and key in a nested value of a recipe, with its path: ``("image", "env", "A")``.

    Values of other types, such as numbers, are skipped.
    """
    # A text is also a sequence, so it comes first.
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield (*path, key), key
            yield from _list_texts(item, (*path, key))
    elif isinstance(value, Sequence):
        for index, item in enumerate(value):
            yield from _list_texts(item, (*path, index))


def _choose_base(recipe: Recipe, override: str | None) -> Text:
    """Return the base image, with the line of the recipe or the option that selects it.

    By default, it is the exact image in the recipe's lock, or the base of the recipe if it has no lock.
    `override` is the value of ``--base``, or None.
    """
    default = recipe.image.base
    if recipe.lock:
        # The lock identifies the base by its digest, so that a moved tag does not change the image.
        default = recipe.lock.base.exact
    name = default if override is None else override
    # The origin appears in the comment above FROM, and in errors about it.
    where = recipe.where("image", "base")
    if name in (default, recipe.image.base):
        return Text(origin=where, text=name)
    return Text(origin=f"--base (instead of {recipe.image.base}, {where})", text=name)


def _choose_workdir(recipe: Recipe) -> Text:
    """Return the working directory of the image, with the line of the recipe that sets it."""
    origin = "imgkit: the default folder"
    if ("image", "workdir") in recipe.positions:
        origin = recipe.where("image", "workdir")
    return Text(origin=origin, text=recipe.image.workdir)


def _make_certificates_step(recipe: Recipe) -> Step:
    """Return the step that makes the image trust the recipe's certificates.

    It comes before the first access to the network, which may go through a proxy with such a certificate.
    """
    indices = range(len(recipe.image.ca))
    files = []
    for index in indices:
        context_path = certificate_file(index)
        path = f"{CERTIFICATES}/imgkit-{posixpath.basename(context_path)}"
        files.append(ContextFile(context_path=context_path, path=path))
    lines = (
        # If the base sets PIP_CERT to its own file, the certificates in that file are added. imgkit also sets
        # PIP_CERT, so they would be lost otherwise.
        f'if [ -f "${{PIP_CERT:-}}" ] && [ "$PIP_CERT" != {BUNDLE} ]; then',
        f'    cp -- "$PIP_CERT" {CERTIFICATES}/imgkit-base.crt; fi;',
        # This program of Debian writes all certificates of the image to `BUNDLE`, one file. An image without
        # it may already have that file, so the certificates are appended.
        "if command -v update-ca-certificates > /dev/null; then update-ca-certificates;",
        f"else mkdir -p {posixpath.dirname(BUNDLE)} && cat {CERTIFICATES}/*.crt >> {BUNDLE}; fi",
    )
    return Step(origin=_format_origins(recipe, "ca", indices), files=tuple(files), command=NEXT.join(lines))


def _list_run_steps(recipe: Recipe, after: str) -> tuple[Step, ...]:
    """Return the user's commands that run after the step `after`: ``base``, ``apt``, ``pip`` or ``copy``."""
    commands = enumerate(recipe.image.run)
    return tuple(_make_run_step(recipe, index, run) for index, run in commands if run.after == after)


def _make_run_step(recipe: Recipe, number: int, command: RunCommand) -> Step:
    """Return the step of a user's command, quoted for a Dockerfile and for a definition file.

    `number` is the index of the command in the recipe.
    """
    return Step(
        origin=recipe.where("image", "run", number),
        command=_render_run_for_shell(recipe, command),
        docker=_render_run_for_docker(recipe, command),
        mounts=install.secret_mounts(command.secrets),
    )


def _render_run_for_shell(recipe: Recipe, command: RunCommand) -> str:
    """Return a user's command as shell text on one line, for a definition file."""
    text = command.command.strip()
    shell_command = f"sh -c {shlex.quote(text)}"
    if "\n" in text:
        # With -e, the first line that fails ends the step. Without it, the shell would continue with the next
        # line.
        shell_command = f"sh -ec {_quote_on_one_line(text)}"
    if command.secrets:
        return install.run_with_secrets(recipe, command.secrets, shell_command)
    return shell_command


def _render_run_for_docker(recipe: Recipe, command: RunCommand) -> str:
    """Return the argument of RUN in a Dockerfile for a user's command.

    It is the command itself, if Docker reads it unchanged. Otherwise it is a JSON list, the exec form of RUN.
    """
    text = command.command.strip()
    is_one_line = "\n" not in text
    if is_one_line and command.secrets:
        # A script of imgkit begins the line, so Docker cannot take the command for its own syntax.
        return _render_run_for_shell(recipe, command)
    if is_one_line and not _is_docker_syntax(text):
        return text
    shell_options = "-c" if is_one_line else "-ec"  # -e: the first line that fails ends the step
    argv: tuple[str, ...] = ("/bin/sh", shell_options, text)
    if command.secrets:
        argv = (*install.secret_argv(recipe, command.secrets), *argv)
    return json.dumps(argv, ensure_ascii=False)


def _is_docker_syntax(text: str) -> bool:
    """Return whether Docker would read the command `text` as flags, JSON, a heredoc or a continued line."""
    return text.startswith(("--", "[")) or "<<" in text or text.endswith("\\")


def _quote_on_one_line(text: str) -> str:
    """Return `text` as one shell word without line breaks.

    In a definition file, a line that begins with ``%`` would end the section.
    """
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return f'"$(printf %b {shlex.quote(escaped)})"'


def _env(recipe: Recipe) -> Block:
    """Return the variables of the image, with the lines of the recipe that set them."""
    # The host's ~/.local is visible inside a .sif. This variable keeps Python from importing packages from
    # there.
    variables = {"PYTHONNOUSERSITE": "1", **recipe.image.env}
    return _block(recipe, "env", variables, "imgkit: ignore packages in the host's ~/.local")


def _labels(recipe: Recipe) -> Block:
    """Return the labels that depend only on the recipe. The build adds date, revision, base and context."""
    # Title and version are always set. Otherwise the image would inherit those of its base.
    labels = {
        "org.opencontainers.image.title": recipe.name,
        "org.opencontainers.image.version": __version__,
    }
    description = " ".join(recipe.description.split())
    if description:
        labels["org.opencontainers.image.description"] = description
    # The recipe may replace the labels above, but not those below: imgkit reads them itself.
    labels |= recipe.image.labels
    labels |= {
        "imgkit.recipe": recipe.name,
        "imgkit.recipe.sha256": recipe.sha256,
        "imgkit.version": __version__,
    }
    if recipe.lock:
        labels[LOCK_LABEL] = hashlib.sha256(recipe.lock_text.encode()).hexdigest()
    return _block(recipe, "labels", labels, "imgkit: what this image is")


def _block(recipe: Recipe, key: str, entries: Mapping[str, str], default_origin: str = "") -> Block:
    """Return a block of variables or labels, with the lines of the recipe that set them.

    `entries` may contain more than the values of ``image.KEY``. If the recipe sets none of them,
    `default_origin` is used instead of the lines.
    """
    origin = _format_origins(recipe, key, getattr(recipe.image, key))
    return Block(origin=origin or default_origin, entries=entries)


def _format_origins(recipe: Recipe, key: str, items: Iterable[str | int]) -> str:
    """Return the lines of the recipe that set `items` of ``image.KEY``.

    For example, ``mn5.yaml:12-14, mn5-llm.yaml:3``.
    """
    ranges: list[_LineRange] = []
    for item in items:
        file, _, line_text = recipe.where("image", key, item).rpartition(":")
        if not file:
            return line_text  # no file sets the value, so `where` has returned only the name of the recipe
        line = int(line_text)
        if ranges and ranges[-1].is_continued_by(file, line):
            ranges[-1].last = line
        else:
            ranges.append(_LineRange(file=file, first=line, last=line))
    return ", ".join(map(str, ranges))


@dataclass(slots=True, kw_only=True)
class _LineRange:
    """A range of consecutive lines in a file."""

    file: str
    first: int
    last: int

    def is_continued_by(self, file: str, line: int) -> bool:
        """Return whether `line` of `file` is the last line of this range, or the line after it."""
        return file == self.file and line in (self.last, self.last + 1)

    def __str__(self) -> str:
        text = f"{self.file}:{self.first}"
        if self.last > self.first:
            text += f"-{self.last}"
        return text


def refuse_value(value: str, form: str, where: str, hint: str) -> NoReturn:
    """Raise the error for a value that cannot be written in `form`, such as ``a Dockerfile``."""
    raise UsageError(f"{value} cannot appear in {form}", where=where or None, hint=hint)
