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
from imgkit_builder.recipe.rules import expanded
from imgkit_entrypoints import __version__
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Environment

TRACE = re.compile(r"\s*# (imgkit: .+|--base .+|[^/]+:\d+(?:-\d+)?(?:, [^/]+:\d+(?:-\d+)?)*)")


def dockerfile(
    recipe: Recipe, *, base: str | None = None, platform: str | None = None, base_user: str = ""
) -> str:
    """Return the text of the Dockerfile; `base` replaces the recipe's, `platform` appears only in a comment.

    Only a machine that has the base knows its user; for another one than root, name `base_user`.

    FROM names no platform: imgkit compares it with the base before the build. ``FROM --platform`` with a
    local image of another architecture would build the wrong image.

    Raises
    ------
    UsageError : a Dockerfile cannot express a value, for example a variable with a line end.
    """
    return _fill("dockerfile.j2", build_layers(recipe, base=base, platform=platform, base_user=base_user))


def resolver(layers: Layers, *, folder: str) -> str:
    """Return the Dockerfile that resolves a recipe's packages; the programs in `folder` are its steps."""
    return _fill("resolver.j2", layers, folder=folder)


def definition(recipe: Recipe, *, base: str | None = None, platform: str | None = None) -> str:
    """Return the text of a Singularity definition file for the same image.

    Build the text inside the unpacked build context; its first lines have the commands.

    Raises
    ------
    UsageError : a definition file cannot express a value; a Dockerfile can express most of them.
    """
    return built_definition(recipe, Additions(), base=base, platform=platform)


def built_definition(
    recipe: Recipe,
    additions: Additions,
    *,
    base: str | None = None,
    platform: str | None = None,
    bootstrap: str = "docker",
    source: str = "",
) -> str:
    """Return the same with `additions`, as imgkit builds it.

    Parameters
    ----------
    bootstrap, source : the agent of the runtime, and where it finds `base`; by default that name.

    Raises
    ------
    UsageError : as in `definition`.
    """
    layers = build_layers(recipe, base=base, platform=platform)
    if layers.uses_secrets:
        where = recipe.where("image", "secrets")
        refuse("a build secret", "a definition file", where, "use --format dockerfile and imgkit build")
    for label, value in layers.labels.entries.items():
        if re.search(r"\s", label) or value != value.strip():
            problem = f"label {label!r}: white space in its name or around its value"
            refuse(
                problem, "a definition file", layers.labels.origin, "remove it, or use --format dockerfile"
            )
    steps = (*additions.steps, *_definition_steps(layers))
    values = {"additions": additions, "steps": steps, "bootstrap": bootstrap}
    text = _fill("definition.j2", layers, source=source or layers.base.text, **values)
    for number, line in enumerate(text.split("\n"), 1):
        # Apptainer >= 1.2 replaces {{ word }} by a build argument, and fails if there is no such argument.
        if match := re.search(r"\{\{\s*\w+\s*\}\}", line):
            refuse(match.group(), "a definition file", origin(text, number), "use --format dockerfile")
    return text


def origin(text: str, line: int) -> str:
    """Return the comment above line `line` (from 1) of a rendered text: ``mn5.yaml:12``.

    An instruction made of several values gives ``mn5.yaml:12-14, mn5-llm.yaml:3``. A step of imgkit's own
    gives ``imgkit: `` and its purpose. A line above all instructions gives an empty string.
    """
    for above in reversed(text.split("\n")[:line]):
        if match := TRACE.fullmatch(above):
            return match.group(1)
    return ""


def _fill(template: str, layers: Layers, **values: object) -> str:
    jinja = environment("templates")
    jinja.filters.update(
        docker_quote=docker_quote,
        docker_value=_docker_value,
        sh_value=lambda value, key: install.shell_value(key, value),
        docker_key=_docker_key,
        copy_words=_copy_words,
        copy_file=_copy_file,
    )
    values.update((name, getattr(layers, name)) for name in layers.__slots__)
    return jinja.get_template(template).render(values, trust=TRUST)


def environment(shipped: str, folder: Path | None = None) -> Environment:
    """Return templates from `folder`, then the `shipped` ones of that name; a missing value is an error."""
    # Imported here: only some verbs render, and the import takes longer than the rest of "imgkit --help".
    from jinja2 import ChoiceLoader, FileSystemLoader, PackageLoader, StrictUndefined

    from imgkit_builder.image.sandbox import Templates

    loaders = [FileSystemLoader(folder)] if folder else []
    jinja = Templates(
        loader=ChoiceLoader([*loaders, PackageLoader("imgkit_recipes", shipped)]),
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters["sh_quote"] = shlex.quote
    return jinja


def _definition_steps(layers: Layers) -> Iterator[Step]:
    """Yield the steps of an image in a definition."""
    if layers.args:
        yield Step(origin=layers.args.origin, command=_export(layers.args.entries))
    copied = [INSIDE, *(file.path for file in layers.ca.files)] if layers.ca else [INSIDE]
    yield _imgkit_step(
        "copied files have the same modes, whatever umask copied them",
        f"chmod -R u=rwX,go=rX {' '.join(copied)}",
    )
    if layers.ca:
        yield Step(origin=layers.ca.origin, command=f"{layers.ca.command}\n{_export(TRUST)}")
    yield from _user_steps(layers.before_apt.copy, layers.before_apt.run, "/")
    yield from map(_bracketed, layers.apt)
    yield from _user_steps(layers.after_apt.copy, layers.after_apt.run, "/")
    yield from map(_bracketed, (*layers.protect, *layers.pip))
    workdir = layers.workdir
    yield Step(origin=layers.env.origin, command=_export(layers.env.entries))
    yield Step(origin=workdir.origin, command=f"mkdir -p -- {shlex.quote(workdir.text)}")
    yield from _user_steps((), layers.run, workdir.text)
    yield _bracketed(layers.install_wheel)
    for project in layers.projects:
        (folder,) = project.files
        # `%files` puts it below INSIDE, where a project stays that is not editable.
        copy = f"{_copy_command(folder)}\n" if folder.path != f"{INSIDE}/{folder.member}" else ""
        yield Step(origin=project.origin, command=f"{copy}{project.command}")
    if layers.projects:
        yield _imgkit_step("the projects are installed", f"rm -rf {INSIDE}/project")
    yield from _user_steps(layers.copy, (), workdir.text)
    if layers.copy:
        yield _imgkit_step("the copies are in their places", f"rm -rf {INSIDE}/copy")
    yield from _user_steps((), layers.run_after_copy, workdir.text)


def _bracketed(step: Step) -> Step:
    """Put brackets around ``&&``: without them, only the last command would end the build when it fails."""
    if f"{NEXT}&& " not in step.command:
        return step
    return dataclasses.replace(step, command=f"({step.command})")


def _imgkit_step(purpose: str, command: str, files: tuple[ContextFile, ...] = ()) -> Step:
    return Step(origin=f"imgkit: {purpose}", command=command, files=files)


def _user_steps(copies: Sequence[ContextFile], runs: Sequence[Step], folder: str) -> Iterator[Step]:
    for copy in copies:
        yield Step(origin=copy.origin, command=_copy_command(copy))
    for run in runs:
        yield Step(origin=run.origin, command=f"(cd -- {shlex.quote(folder)} && {run.command})")


def _export(variables: Mapping[str, str]) -> str:
    values = (f"{key}={install.shell_value(key, value)}" for key, value in variables.items())
    return f"export {NEXT.join(values)}"


def _copy_command(code: ContextFile) -> str:
    """Return the commands that copy the content of a folder of the context to its target."""
    target = shlex.quote(code.path)
    return f"mkdir -p -- {target}\ncp -RP -- {INSIDE}/{code.member}/. {target}"


def docker_quote(value: str) -> str:
    """Return `value` in double quotes for ENV, LABEL and WORKDIR, with ``$`` escaped."""
    return '"' + re.sub(r'([\\"$])', r"\\\1", value) + '"'


def _docker_value(value: str, key: str) -> str:
    """Return the value of ENV; one that adds to the base's value names it, as Docker expands it."""
    return expanded(key, value, lambda text: docker_quote(text)[1:-1]) or docker_quote(value)


def _docker_key(value: str) -> str:
    """Return the name of a label, quoted only where it must be."""
    return value if re.fullmatch(r"[A-Za-z0-9._/-]+", value) else docker_quote(value)


def _copy_words(paths: Sequence[str]) -> str:
    """Return the JSON form of COPY; the builder expands each path once more after decoding it."""
    return json.dumps([re.sub(r"""([\\"'$])""", r"\\\1", path) for path in paths], ensure_ascii=False)


def _copy_file(file: ContextFile) -> str:
    """Return the JSON form of COPY for one file, or for the content of a folder."""
    slash = "/" if file.is_folder else ""
    return _copy_words([f"{file.member}{slash}", f"{file.path}{slash}"])


# Byte code of the entry points: a read-only image would compile them at every start. What pip writes holds
# the time of the installation, so all of it would be sent after each build. The hash of a source stays, and
# under one seed the order of sets does. Columns for tracebacks are a quarter of it when compressed.
COMPILE = (
    "PYTHONHASHSEED=0 python3 -s -X no_debug_ranges -m compileall -q --invalidation-mode checked-hash"
    f"{NEXT}    \"$(python3 -IBc 'import {wheel.PACKAGE} as it; print(it.__path__[0])')\""
)

CERTIFICATES = "/usr/local/share/ca-certificates"
"""The folder of local authorities, which ``update-ca-certificates`` adds to `BUNDLE` (Debian, Ubuntu)."""
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
TRUST = dict.fromkeys(("CURL_CA_BUNDLE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"), BUNDLE)
"""Variables of programs that come with authorities of their own: pip, requests, and what conda installs."""


def build_layers(
    recipe: Recipe, *, base: str | None = None, platform: str | None = None, base_user: str = ""
) -> Layers:
    """Return the layers of `recipe` on `base` (default: the recipe's), whose user is `base_user`.

    Only shell commands are quoted.

    Raises
    ------
    UsageError : a value does not fit on one line, or is not the name of a distribution.
    """
    image = recipe.image
    for path, value in _texts(dataclasses.asdict(image), ("image",)):
        # The line ends of a command are quoted.
        if re.search(r"[\r\0]" if path[-1] == "command" else r"[\n\r\0]", value):
            problem = f"{'.'.join(map(str, path))}: a line end or NUL"
            refuse(problem, "a Dockerfile", recipe.where(*path), "write it on one line")
    lock = recipe.lock
    has_workdir = ("image", "workdir") in recipe.positions
    return Layers(
        image=image,
        name=recipe.name,
        file=recipe.file.name,
        reference=shlex.quote(recipe.reference),
        platform=platform or image.platforms[0],
        uses_secrets=bool(image.used_secrets),
        base=_base(recipe, base),
        base_user="" if base_user.partition(":")[0] in ("root", "0") else base_user,
        args=_block(recipe, "args", image.args) if image.args else None,
        ca=_authorities(recipe) if image.ca else None,
        before_apt=Early(copy=_copies(recipe, "base"), run=_run_steps(recipe, "base")),
        after_apt=Early(copy=_copies(recipe, "apt"), run=_run_steps(recipe, "apt")),
        apt=(install.apt_step(recipe, _origins(recipe, "apt", range(len(image.apt)))),)
        if (lock.apt if lock else image.apt)
        else (),
        protect=_protect(recipe),
        pip=tuple(
            install.pip_command(recipe, number)
            for number in install.pip_step_numbers(recipe)
            if lock is None or install.locked_wheels(recipe, number)
        ),
        env=_env(recipe),
        workdir=Text(
            origin=recipe.where("image", "workdir") if has_workdir else "imgkit: the default folder",
            text=image.workdir,
        ),
        run=_run_steps(recipe, "pip"),
        install_wheel=_install_wheel(),
        projects=tuple(
            install.project(recipe, number, step)
            for number, step in enumerate(image.pip)
            if step.project is not None
        ),
        copy=_copies(recipe, "pip"),
        origins=(_locked_file(install.LOCK_TOML),) if lock else (),
        run_after_copy=_run_steps(recipe, "copy"),
        labels=_labels(recipe),
    )


def _protect(recipe: Recipe) -> tuple[Step, ...]:
    image = recipe.image
    uses_pip = image.uv or image.pip
    # A run step may call pip too, and can then use the file.
    steps = [install.protect()] if uses_pip or image.run else []
    if uses_pip and image.constraints.policy == "drop":
        steps.append(install.filtered_constraint(recipe))
    return tuple(steps)


def _install_wheel() -> Step:
    member = f"imgkit/{wheel.file_name()}"
    path = f"{INSIDE}/{wheel.file_name()}"
    return _imgkit_step(
        "no index, no dependencies; forced, because a changed wheel can have the same version",
        # The base's PIP_CONSTRAINT does not apply here; if its file is missing, pip would stop.
        f"{install.PIP} PIP_CONSTRAINT=''{NEXT}python3 -m pip install --no-cache-dir --no-compile --no-index"
        f" --no-deps --force-reinstall{NEXT}    {path}{NEXT}&& {COMPILE}",
        files=(ContextFile(member=member, path=path),),
    )


def _copies(recipe: Recipe, after: str) -> tuple[ContextFile, ...]:
    return tuple(
        ContextFile(
            member=copy_member(number),
            path=posixpath.normpath(step.target),
            is_folder=True,
            origin=recipe.where("image", "copy", number),
        )
        for number, step in enumerate(recipe.image.copy)
        if step.after == after
    )


def _locked_file(member: str) -> ContextFile:
    """Return a file or folder that only a locked build has."""
    return ContextFile(member=member, path=f"{INSIDE}/{member.removeprefix('imgkit/')}")


def certificate_member(number: int) -> str:
    """Return the path of certificate `number` (from 0) in the build context."""
    return f"imgkit/ca-{number}.crt"


def copy_member(number: int) -> str:
    """Return the folder of copy step `number` (from 0) in the build context."""
    return f"copy/{number}"


def _texts(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yield every text and key below `value` with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield (*path, key), key
            yield from _texts(item, (*path, key))
    elif isinstance(value, Sequence):
        for number, item in enumerate(value):
            yield from _texts(item, (*path, number))


def _base(recipe: Recipe, override: str | None) -> Text:
    where = recipe.where("image", "base")
    if recipe.lock and override in (None, recipe.lock.base.exact):
        return Text(origin=where, text=recipe.lock.base.exact)
    if override is None or override == recipe.image.base:
        return Text(origin=where, text=recipe.image.base)
    return Text(origin=f"--base (instead of {recipe.image.base}, {where})", text=override)


def _authorities(recipe: Recipe) -> Step:
    """Return the step that adds the certificates to the system's, before the first use of the network."""
    members = [certificate_member(number) for number in range(len(recipe.image.ca))]
    # A base that names a bundle for pip trusts what it holds: the variable set here must not lose that.
    parts = (
        f'if [ -f "${{PIP_CERT:-}}" ] && [ "$PIP_CERT" != {BUNDLE} ]; then',
        f'    cp -- "$PIP_CERT" {CERTIFICATES}/imgkit-base.crt; fi;',
        "if command -v update-ca-certificates > /dev/null; then update-ca-certificates;",
        f"else mkdir -p {posixpath.dirname(BUNDLE)} && cat {CERTIFICATES}/*.crt >> {BUNDLE}; fi",
    )
    return Step(
        origin=_origins(recipe, "ca", range(len(members))),
        files=tuple(
            ContextFile(member=member, path=f"{CERTIFICATES}/imgkit-{posixpath.basename(member)}")
            for member in members
        ),
        command=NEXT.join(parts),
    )


def _run_steps(recipe: Recipe, after: str) -> tuple[Step, ...]:
    """Return the user's commands of one position."""
    commands = enumerate(recipe.image.run)
    return tuple(_run_step(recipe, number, run) for number, run in commands if run.after == after)


def _run_step(recipe: Recipe, number: int, command: RunCommand) -> Step:
    text = command.command.strip()
    # Docker reads some beginnings as its own syntax (flags, JSON), a last backslash as a continued line, and
    # newer engines read << as a heredoc; the exec form keeps all of them as text, and line ends too.
    has_lines = "\n" in text
    is_plain = not (has_lines or text.startswith(("--", "[")) or "<<" in text or text.endswith("\\"))
    # Of several lines, the first that fails ends the step; a shell alone would go on.
    shell = ("/bin/sh", "-ec" if has_lines else "-c", text)
    posix = f"sh {shell[1]} {_one_line(text) if has_lines else shlex.quote(text)}"
    docker = text if is_plain else json.dumps(shell, ensure_ascii=False)
    if command.secrets:
        argv = (*install.secret_argv(recipe, command.secrets), *shell)
        posix = install.with_secrets(recipe, command.secrets, "") + posix
        docker = json.dumps(argv, ensure_ascii=False) if has_lines else posix
    return Step(
        origin=recipe.where("image", "run", number),
        command=posix,
        docker=docker,
        mounts=install.secret_mounts(command.secrets),
    )


def _one_line(text: str) -> str:
    """Return one word of a shell that is `text`: a definition ends where a line begins with ``%``."""
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return f'"$(printf %b {shlex.quote(escaped)})"'


def _env(recipe: Recipe) -> Block:
    # The host's ~/.local is visible inside a .sif; Python must not import its packages.
    pairs = {"PYTHONNOUSERSITE": "1", **recipe.image.env}
    return _block(recipe, "env", pairs, "imgkit: ignore packages in the host's ~/.local")


def _labels(recipe: Recipe) -> Block:
    """Return the labels that depend on the recipe alone; the build adds date, revision, base and context."""
    description = " ".join(recipe.description.split())
    # Without its own title and version, the image would inherit those of the base's Linux distribution.
    pairs = {
        "org.opencontainers.image.title": recipe.name,
        "org.opencontainers.image.version": __version__,
        **({"org.opencontainers.image.description": description} if description else {}),
        **recipe.image.labels,
        "imgkit.recipe": recipe.name,
        "imgkit.recipe.sha256": recipe.sha256,
        "imgkit.version": __version__,
    }
    if recipe.lock:
        pairs[LOCK_LABEL] = hashlib.sha256(recipe.lock_text.encode()).hexdigest()
    return _block(recipe, "labels", pairs, "imgkit: what this image is")


def _block(recipe: Recipe, key: str, pairs: Mapping[str, str], default_origin: str = "") -> Block:
    """Return a block of `pairs`, among them the values of ``image.KEY``."""
    return Block(origin=_origins(recipe, key, getattr(recipe.image, key)) or default_origin, entries=pairs)


def _origins(recipe: Recipe, key: str, items: Iterable[str | int]) -> str:
    """Return the lines of items of ``image.KEY``, shortened: ``mn5.yaml:12-14, mn5-llm.yaml:3``."""
    spans: list[tuple[str, int, int]] = []
    for item in items:
        name, _, number = recipe.where("image", key, item).rpartition(":")
        if not name:
            return number
        line = int(number)
        if spans and spans[-1][0] == name and line in (spans[-1][2], spans[-1][2] + 1):
            spans[-1] = (name, spans[-1][1], line)
        else:
            spans.append((name, line, line))
    return ", ".join(f"{name}:{first}" + (f"-{last}" if last > first else "") for name, first, last in spans)


def refuse(value: str, form: str, where: str, hint: str) -> NoReturn:
    """Raise the error for a value that a rendered form cannot express."""
    raise UsageError(f"{value} cannot appear in {form}", where=where or None, hint=hint)
