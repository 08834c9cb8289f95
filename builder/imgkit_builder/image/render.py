"""A recipe becomes its layers, and those a Dockerfile or a definition: one model, two templates.

Layers that change rarely come first: base, certificates, apt, the uv project, pip, environment, run steps,
the entry points, the user's code, run steps that need it, facts and provenance, labels. The environment comes
before the run steps, which need it, and after pip, so that a new value does not repeat the installation.

Docker's classic builder reads the text, so it uses no heredoc, ``RUN --mount`` or ``COPY --link``
(docs/adr/0003). It expands ``$``, quotes and backslashes in ENV, LABEL, WORKDIR and COPY; in COPY even
after it has decoded its JSON. It expands nothing in RUN. Every value of a recipe is quoted for its
position.
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
)
from imgkit_builder.oci.manifest import LOCK_LABEL
from imgkit_builder.recipe.model import Recipe, RunCommand
from imgkit_builder.recipe.problems import KeyPath
from imgkit_builder.recipe.rules import quote_inherited
from imgkit_entrypoints import __version__
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Environment

# The comment above an instruction: "# imgkit: PURPOSE", "# --base NAME (...)", "# mn5.yaml:12-14,
# mn5-llm.yaml:3"
TRACE = re.compile(r"\s*# (imgkit: .+|--base .+|[^/]+:\d+(?:-\d+)?(?:, [^/]+:\d+(?:-\d+)?)*)")


def render_dockerfile(
    recipe: Recipe, *, base: str | None = None, platform: str | None = None, base_user: str = ""
) -> str:
    """Return the text of the Dockerfile of `recipe`.

    FROM names no platform, since ``FROM --platform`` with a local image of another architecture would build
    the wrong image. imgkit compares the platform with the base before the build.

    Parameters
    ----------
    base : the base image, if it is not that of the recipe.
    platform : appears in a comment only.
    base_user : the user of the base, if that is not root. Only a machine that has the base knows it.

    Raises
    ------
    UsageError : a Dockerfile cannot express a value, for example a variable with a line end.
    """
    layers = build_layers(recipe, base=base, platform=platform, base_user=base_user)
    return _fill_template("dockerfile.j2", layers)


def render_resolver(layers: Layers, *, folder: str) -> str:
    """Return the Dockerfile of the build that finds the packages for a recipe's lock.

    `folder` is the folder of imgkit's programs in that image, which run in place of apt and pip.
    """
    return _fill_template("resolver.j2", layers, folder=folder)


def render_definition(recipe: Recipe, *, base: str | None = None, platform: str | None = None) -> str:
    """Return the text of a Singularity definition file for the same image.

    Build the text inside the unpacked build context; its first lines have the commands.

    Raises
    ------
    UsageError : a definition file cannot express a value; a Dockerfile can express most of them.
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
    """Return the text of the definition file that imgkit itself builds with a runtime.

    It is that of `render_definition`, with `additions`, such as the labels of the build.

    Parameters
    ----------
    base, platform : as in `render_dockerfile`.
    bootstrap : where the base is: ``docker`` is a registry, ``localimage`` a file, ``oci`` a folder.
    source : where it finds the base; by default the name of the base.

    Raises
    ------
    UsageError : as in `render_definition`.
    """
    layers = build_layers(recipe, base=base, platform=platform)
    if layers.uses_secrets:
        where = recipe.where("image", "secrets")
        refuse_value("a build secret", "a definition file", where, "use --format dockerfile and imgkit build")
    for label, value in layers.labels.entries.items():
        if re.search(r"\s", label) or value != value.strip():
            problem = f"label {label!r}: white space in its name or around its value"
            hint = "remove it, or use --format dockerfile"
            refuse_value(problem, "a definition file", layers.labels.origin, hint)
    steps = (*additions.steps, *_list_definition_steps(layers))
    text = _fill_template(
        "definition.j2",
        layers,
        source=source or layers.base.text,
        bootstrap=bootstrap,
        additions=additions,
        steps=steps,
    )
    for number, line in enumerate(text.split("\n"), 1):
        # Apptainer >= 1.2 replaces {{ word }} by a build argument, and fails if there is no such argument.
        match = re.search(r"\{\{\s*\w+\s*\}\}", line)
        if match is not None:
            where = find_origin(text, number)
            refuse_value(match.group(), "a definition file", where, "use --format dockerfile")
    return text


def find_origin(text: str, line: int) -> str:
    """Return the line of the recipe that gives line `line` (from 1) of a rendered text: ``mn5.yaml:12``.

    Each instruction has a comment above it that says so. An instruction made of several values gives
    ``mn5.yaml:12-14, mn5-llm.yaml:3``, and a step of imgkit's own ``imgkit: `` and its purpose. The result
    is empty for a line above all instructions.
    """
    for earlier_line in reversed(text.split("\n")[:line]):
        match = TRACE.fullmatch(earlier_line)
        if match is not None:
            return match[1]
    return ""


def _fill_template(name: str, layers: Layers, **values: object) -> str:
    """Return the text of the template `name`, such as ``dockerfile.j2``.

    The template uses the fields of `layers`, and `values`.
    """
    jinja = template_environment("templates")
    jinja.filters.update(
        docker_quote=docker_quote,
        docker_value=_docker_value,
        sh_value=lambda value, key: install.shell_value(key, value),
        docker_key=_docker_key,
        copy_arguments=_copy_arguments,
        copy_file=_copy_file,
    )
    fields = {field.name: getattr(layers, field.name) for field in dataclasses.fields(layers)}
    return jinja.get_template(name).render({**values, **fields}, trust=TRUST)


def template_environment(shipped: str, folder: Path | None = None) -> Environment:
    """Return a jinja2 environment that finds templates in `folder`, or else in imgkit's folder `shipped`.

    A template that uses a missing value raises an error.
    """
    # Imported here: only some verbs render, and the import takes longer than the rest of "imgkit --help".
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
    """Yield the steps of ``%post`` in a definition file, in the order in which they run.

    A Dockerfile has instructions such as ENV and COPY in between. Here they become shell commands.
    """
    if layers.args:
        yield Step(origin=layers.args.origin, command=_export(layers.args.entries))
    # `%files` keeps the modes of the files on this machine.
    copied = [INSIDE]
    if layers.ca:
        copied += [file.path for file in layers.ca.files]
    yield _imgkit_step(
        "copied files have the same modes, whatever umask copied them",
        f"chmod -R u=rwX,go=rX {' '.join(copied)}",
    )
    if layers.ca:
        yield Step(origin=layers.ca.origin, command=f"{layers.ca.command}\n{_export(TRUST)}")
    yield from _list_copy_steps(layers.before_apt.copy)
    yield from _list_commands(layers.before_apt.run, "/")
    yield from map(_add_parentheses, layers.apt)
    yield from _list_copy_steps(layers.after_apt.copy)
    yield from _list_commands(layers.after_apt.run, "/")
    yield from map(_add_parentheses, (*layers.protect, *layers.pip))
    workdir = layers.workdir
    yield Step(origin=layers.env.origin, command=_export(layers.env.entries))
    yield Step(origin=workdir.origin, command=f"mkdir -p -- {shlex.quote(workdir.text)}")
    yield from _list_commands(layers.run, workdir.text)
    yield _add_parentheses(layers.install_wheel)
    for project in layers.projects:
        (folder,) = project.files
        command = project.command
        # `%files` puts it below INSIDE, where a project stays that is not editable.
        if folder.path != f"{INSIDE}/{folder.context_path}":
            command = f"{_copy_command(folder)}\n{command}"
        yield Step(origin=project.origin, command=command)
    if layers.projects:
        yield _imgkit_step("the projects are installed", f"rm -rf {INSIDE}/project")
    yield from _list_copy_steps(layers.copy)
    if layers.copy:
        yield _imgkit_step("the copies are in their places", f"rm -rf {INSIDE}/copy")
    yield from _list_commands(layers.run_after_copy, workdir.text)


def _add_parentheses(step: Step) -> Step:
    """Put the commands of `step` into parentheses if they are joined by ``&&``.

    ``%post`` runs under ``set -e``. In ``a && b``, a failure of ``a`` would not end the build, in
    ``(a && b)`` it does.
    """
    if f"{NEXT}&& " not in step.command:
        return step
    return dataclasses.replace(step, command=f"({step.command})")


def _imgkit_step(purpose: str, command: str, files: tuple[ContextFile, ...] = ()) -> Step:
    return Step(origin=f"imgkit: {purpose}", command=command, files=files)


def _list_copy_steps(copies: Iterable[ContextFile]) -> Iterator[Step]:
    """Yield a step for each of `copies`, which copies the user's files to their path in the image."""
    for copy in copies:
        yield Step(origin=copy.origin, command=_copy_command(copy))


def _list_commands(steps: Iterable[Step], folder: str) -> Iterator[Step]:
    """Yield the user's `steps`. Each command starts in `folder`, and cannot change that of the next one."""
    for step in steps:
        yield Step(origin=step.origin, command=f"(cd -- {shlex.quote(folder)} && {step.command})")


def _export(variables: Mapping[str, str]) -> str:
    values = (f"{key}={install.shell_value(key, value)}" for key, value in variables.items())
    return f"export {NEXT.join(values)}"


def _copy_command(code: ContextFile) -> str:
    """Return the shell commands that copy the content of a folder of the context to its path in the image."""
    target = shlex.quote(code.path)
    return f"mkdir -p -- {target}\ncp -RP -- {INSIDE}/{code.context_path}/. {target}"


def docker_quote(value: str) -> str:
    """Return `value` in double quotes for ENV, LABEL and WORKDIR, with ``$`` escaped."""
    return '"' + re.sub(r'([\\"$])', r"\\\1", value) + '"'


def _docker_value(value: str, key: str) -> str:
    """Return the value of the variable `key`, quoted for ENV.

    Docker expands ``/x:$PATH``, which adds to the base's value. In any other value, ``$`` is escaped.
    """
    # Without the outer quotes, since `quote_inherited` puts quotes around the whole value.
    inherited = quote_inherited(key, value, lambda text: docker_quote(text)[1:-1])
    return inherited or docker_quote(value)


def _docker_key(value: str) -> str:
    """Return the name of a label, quoted only where it must be."""
    if re.fullmatch(r"[A-Za-z0-9._/-]+", value):
        return value
    return docker_quote(value)


def _copy_arguments(paths: Sequence[str]) -> str:
    """Return the arguments of COPY as JSON.

    Some characters are escaped twice: the builder expands ``$`` and quotes in each path even after it has
    decoded the JSON.
    """
    escaped_paths = [re.sub(r"""([\\"'$])""", r"\\\1", path) for path in paths]
    return json.dumps(escaped_paths, ensure_ascii=False)


def _copy_file(file: ContextFile) -> str:
    """Return the JSON form of COPY for one file, or for the content of a folder."""
    slash = "/" if file.is_folder else ""
    return _copy_arguments([f"{file.context_path}{slash}", f"{file.path}{slash}"])


# Compile the entry points in the image, because a read-only image would compile them at every start. The
# files must have the same bytes in each build, or all of them would be sent to the cluster again. So they
# hold the hash of their source and not its time, as those of pip would, and PYTHONHASHSEED fixes the order of
# sets. no_debug_ranges leaves out the columns for tracebacks, a quarter of the compressed size.
COMPILE = (
    "PYTHONHASHSEED=0 python3 -s -X no_debug_ranges -m compileall -q --invalidation-mode checked-hash"
    f"{NEXT}    \"$(python3 -IBc 'import {wheel.PACKAGE} as it; print(it.__path__[0])')\""
)

CERTIFICATES = "/usr/local/share/ca-certificates"
"""The folder of local authorities, which ``update-ca-certificates`` adds to `BUNDLE` (Debian, Ubuntu)."""
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
TRUST = dict.fromkeys(("CURL_CA_BUNDLE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"), BUNDLE)
"""Variables that make programs use `BUNDLE`: pip, requests and conda's programs bring their own list of
certificate authorities."""


def build_layers(recipe: Recipe, *, base: str | None, platform: str | None, base_user: str = "") -> Layers:
    """Return the layers of the image of `recipe`, from which both templates are filled.

    Shell commands in them are quoted; the templates quote all other values.

    Parameters
    ----------
    base, platform, base_user : as in `render_dockerfile`.

    Raises
    ------
    UsageError : a value does not fit on one line, or ``constraints.drop`` has no name of a distribution.
    """
    _refuse_line_ends(recipe)
    image = recipe.image
    user, _, _ = base_user.partition(":")  # "root:root" names a group, too
    if user in ("root", "0"):
        base_user = ""
    workdir_origin = "imgkit: the default folder"
    if ("image", "workdir") in recipe.positions:
        workdir_origin = recipe.where("image", "workdir")
    args = None
    if image.args:
        args = _block(recipe, "args", image.args)
    ca = None
    if image.ca:
        ca = _certificates_step(recipe)
    origins: tuple[ContextFile, ...] = ()
    if recipe.lock:
        origins = (ContextFile(context_path=install.LOCK_TOML, path=f"{INSIDE}/lock.toml"),)
    return Layers(
        image=image,
        name=recipe.name,
        file=recipe.file.name,
        reference=shlex.quote(recipe.reference),
        platform=platform or image.platforms[0],
        uses_secrets=bool(image.used_secrets),
        base=_base(recipe, base),
        base_user=base_user,
        args=args,
        ca=ca,
        before_apt=Early(copy=_list_copies(recipe, "base"), run=_list_run_steps(recipe, "base")),
        after_apt=Early(copy=_list_copies(recipe, "apt"), run=_list_run_steps(recipe, "apt")),
        apt=_list_apt_steps(recipe),
        protect=_list_protection_steps(recipe),
        pip=_list_pip_steps(recipe),
        env=_env(recipe),
        workdir=Text(origin=workdir_origin, text=image.workdir),
        run=_list_run_steps(recipe, "pip"),
        install_wheel=_install_wheel(),
        projects=_list_project_steps(recipe),
        copy=_list_copies(recipe, "pip"),
        origins=origins,
        run_after_copy=_list_run_steps(recipe, "copy"),
        labels=_labels(recipe),
    )


def _refuse_line_ends(recipe: Recipe) -> None:
    """Raise UsageError for a value with a line end, which would begin a new instruction in a Dockerfile.

    Commands may have several lines, since they are quoted.
    """
    for path, value in _list_texts(dataclasses.asdict(recipe.image), ("image",)):
        if path[-1] == "command":
            value = value.replace("\n", "")
        if re.search(r"[\n\r\0]", value):
            key = ".".join(map(str, path))
            problem = f"{key}: a line end or NUL"
            refuse_value(problem, "a Dockerfile", recipe.where(*path), "write it on one line")


def _list_apt_steps(recipe: Recipe) -> tuple[Step, ...]:
    packages = recipe.lock.apt if recipe.lock else recipe.image.apt
    if not packages:
        return ()
    return (install.apt_step(recipe, _origins(recipe, "apt", range(len(recipe.image.apt)))),)


def _list_pip_steps(recipe: Recipe) -> tuple[Step, ...]:
    """Return the steps that install packages with pip.

    With a lock, a step for which the lock has no wheel is left out: it would install nothing.
    """
    numbers = install.pip_step_numbers(recipe)
    if recipe.lock:
        numbers = [number for number in numbers if install.locked_wheels(recipe, number)]
    return tuple(install.pip_step(recipe, number) for number in numbers)


def _list_project_steps(recipe: Recipe) -> tuple[Step, ...]:
    steps = enumerate(recipe.image.pip)
    return tuple(
        install.project_step(recipe, number, step) for number, step in steps if step.project is not None
    )


def _list_protection_steps(recipe: Recipe) -> tuple[Step, ...]:
    """Return the steps that make pip keep packages of the base, such as torch.

    They write files with the versions to keep. The first is also written if there are only run steps, because
    these may call pip and use the file.
    """
    image = recipe.image
    uses_pip = image.uv or image.pip
    steps = []
    if uses_pip or image.run:
        steps.append(install.protection_step())
    if uses_pip and image.constraints.policy == "drop":
        steps.append(install.constraint_step(recipe))
    return tuple(steps)


def _install_wheel() -> Step:
    """Return the step that installs the entry points."""
    name = wheel.wheel_name()
    path = f"{INSIDE}/{name}"
    return _imgkit_step(
        "no index, no dependencies; forced, because a changed wheel can have the same version",
        # Nothing is constrained here, and pip would stop if the file of the base's PIP_CONSTRAINT is missing.
        f"{install.PIP} PIP_CONSTRAINT=''{NEXT}python3 -m pip install --no-cache-dir --no-compile --no-index"
        f" --no-deps --force-reinstall{NEXT}    {path}{NEXT}&& {COMPILE}",
        files=(ContextFile(context_path=f"imgkit/{name}", path=path),),
    )


def _list_copies(recipe: Recipe, after: str) -> tuple[ContextFile, ...]:
    """Return the user's files to copy behind the step `after`: ``base``, ``apt`` or ``pip``."""
    copies = []
    for number, step in enumerate(recipe.image.copy):
        if step.after != after:
            continue
        copy = ContextFile(
            context_path=copy_folder(number),
            path=posixpath.normpath(step.target),
            is_folder=True,
            origin=recipe.where("image", "copy", number),
        )
        copies.append(copy)
    return tuple(copies)


def certificate_file(number: int) -> str:
    """Return the path of certificate `number` (from 0) in the build context."""
    return f"imgkit/ca-{number}.crt"


def copy_folder(number: int) -> str:
    """Return the folder of copy step `number` (from 0) in the build context."""
    return f"copy/{number}"


def _list_texts(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yield every text and key in a nested value of a recipe, with its path: ``("image", "env", "A")``."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield (*path, key), key
            yield from _list_texts(item, (*path, key))
    elif isinstance(value, Sequence):
        for number, item in enumerate(value):
            yield from _list_texts(item, (*path, number))


def _base(recipe: Recipe, override: str | None) -> Text:
    where = recipe.where("image", "base")
    if recipe.lock and override in (None, recipe.lock.base.exact):
        return Text(origin=where, text=recipe.lock.base.exact)
    if override is None or override == recipe.image.base:
        return Text(origin=where, text=recipe.image.base)
    return Text(origin=f"--base (instead of {recipe.image.base}, {where})", text=override)


def _certificates_step(recipe: Recipe) -> Step:
    """Return the step that makes the image trust the recipe's certificates.

    It comes before the first use of the network, which may go through a proxy with such a certificate.
    """
    numbers = range(len(recipe.image.ca))
    files = []
    for number in numbers:
        context_path = certificate_file(number)
        path = f"{CERTIFICATES}/imgkit-{posixpath.basename(context_path)}"
        files.append(ContextFile(context_path=context_path, path=path))
    # If the base has set PIP_CERT to a file of its own, its certificates are added: imgkit sets the variable,
    # too, and they must not get lost.
    lines = (
        f'if [ -f "${{PIP_CERT:-}}" ] && [ "$PIP_CERT" != {BUNDLE} ]; then',
        f'    cp -- "$PIP_CERT" {CERTIFICATES}/imgkit-base.crt; fi;',
        "if command -v update-ca-certificates > /dev/null; then update-ca-certificates;",
        f"else mkdir -p {posixpath.dirname(BUNDLE)} && cat {CERTIFICATES}/*.crt >> {BUNDLE}; fi",
    )
    return Step(origin=_origins(recipe, "ca", numbers), files=tuple(files), command=NEXT.join(lines))


def _list_run_steps(recipe: Recipe, after: str) -> tuple[Step, ...]:
    """Return the user's commands to run behind the step `after`: ``base``, ``apt``, ``pip`` or ``copy``."""
    commands = enumerate(recipe.image.run)
    return tuple(_run_step(recipe, number, run) for number, run in commands if run.after == after)


def _run_step(recipe: Recipe, number: int, command: RunCommand) -> Step:
    """Return the step of the user's command `number`, quoted for a Dockerfile and for a definition."""
    text = command.command.strip()
    has_lines = "\n" in text
    if has_lines:
        # -e: the first line that fails ends the step. Without it, a shell would go on with the next line.
        argv: tuple[str, ...] = ("/bin/sh", "-ec", text)
        shell_command = f"sh -ec {_quote_on_one_line(text)}"
    else:
        argv = ("/bin/sh", "-c", text)
        shell_command = f"sh -c {shlex.quote(text)}"
    docker = text
    needs_exec_form = has_lines or _is_docker_syntax(text)
    if command.secrets:
        argv = (*install.secret_argv(recipe, command.secrets), *argv)
        shell_command = install.secret_prefix(recipe, command.secrets, "") + shell_command
        docker = shell_command
        needs_exec_form = has_lines
    if needs_exec_form:
        # The exec form, a JSON list, keeps the whole text as it is, with its line ends.
        docker = json.dumps(argv, ensure_ascii=False)
    return Step(
        origin=recipe.where("image", "run", number),
        command=shell_command,
        docker=docker,
        mounts=install.secret_mounts(command.secrets),
    )


def _is_docker_syntax(text: str) -> bool:
    """Return whether Docker would read a command as flags, JSON, a heredoc or a continued line."""
    return text.startswith(("--", "[")) or "<<" in text or text.endswith("\\")


def _quote_on_one_line(text: str) -> str:
    """Return `text` as one word of a shell, without line ends.

    A section of a definition ends where a line begins with ``%``.
    """
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return f'"$(printf %b {shlex.quote(escaped)})"'


def _env(recipe: Recipe) -> Block:
    """Return the variables of the image."""
    # The host's ~/.local is visible inside a .sif; Python must not import its packages.
    variables = {"PYTHONNOUSERSITE": "1", **recipe.image.env}
    return _block(recipe, "env", variables, "imgkit: ignore packages in the host's ~/.local")


def _labels(recipe: Recipe) -> Block:
    """Return the labels that depend on the recipe alone. The build adds date, revision, base and context."""
    # Title and version are always set: otherwise the image would inherit those of the base.
    labels = {
        "org.opencontainers.image.title": recipe.name,
        "org.opencontainers.image.version": __version__,
    }
    description = " ".join(recipe.description.split())
    if description:
        labels["org.opencontainers.image.description"] = description
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
    """Return a block of variables or labels, with the lines of the recipe that state them.

    `entries` may have more than the values of ``image.KEY``. If the recipe states none, `default_origin`
    takes the place of the lines.
    """
    origin = _origins(recipe, key, getattr(recipe.image, key))
    return Block(origin=origin or default_origin, entries=entries)


def _origins(recipe: Recipe, key: str, items: Iterable[str | int]) -> str:
    """Return the lines that state `items` of ``image.KEY``: ``mn5.yaml:12-14, mn5-llm.yaml:3``."""
    ranges: list[_LineRange] = []
    for item in items:
        file, _, line_text = recipe.where("image", key, item).rpartition(":")
        if not file:
            return line_text  # the name of the recipe alone: no file states the value
        line = int(line_text)
        if ranges and ranges[-1].is_continued_by(file, line):
            ranges[-1].last = line
        else:
            ranges.append(_LineRange(file=file, first=line, last=line))
    return ", ".join(map(str, ranges))


@dataclass(slots=True, kw_only=True)
class _LineRange:
    """Lines of a file that follow each other."""

    file: str
    first: int
    last: int

    def is_continued_by(self, file: str, line: int) -> bool:
        """Return whether `line` of `file` is the last one of this range, or the one behind it."""
        return file == self.file and line in (self.last, self.last + 1)

    def __str__(self) -> str:
        text = f"{self.file}:{self.first}"
        if self.last > self.first:
            text += f"-{self.last}"
        return text


def refuse_value(value: str, form: str, where: str, hint: str) -> NoReturn:
    """Raise the error for a value that a rendered form cannot express."""
    raise UsageError(f"{value} cannot appear in {form}", where=where or None, hint=hint)
