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

import json
import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from imgkit_builder.image import install, wheel
from imgkit_builder.image.instructions import (
    INSIDE,
    NEXT,
    Additions,
    Authorities,
    Block,
    ContextFile,
    Copy,
    Definition,
    Early,
    KeyValue,
    Layers,
    Project,
    RunStep,
    Step,
    Text,
)
from imgkit_builder.recipe.model import KeyPath, Recipe, RunCommand
from imgkit_builder.recipe.rules import expanded
from imgkit_entrypoints import __version__
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Environment

TRACE = re.compile(r"\s*# (imgkit: .+|--base .+|[^/]+:\d+(?:-\d+)?(?:, [^/]+:\d+(?:-\d+)?)*)")


def dockerfile(
    recipe: Recipe, *, base: str | None = None, platform: str | None = None, base_user: str = ""
) -> str:
    """Text of the Dockerfile; `base` replaces the recipe's, `platform` appears only in a comment.

    Only a machine that has the base knows its user; for another one than root, name `base_user`.

    FROM names no platform: imgkit compares it with the base before the build. ``FROM --platform`` with a
    local image of another architecture would build the wrong image.

    Raises
    ------
    UsageError : a Dockerfile cannot express a value, for example a variable with a line end.
    """
    return _fill("dockerfile.j2", layers(recipe, base=base, platform=platform, base_user=base_user))


def resolver(made: Layers, *, folder: str) -> str:
    """Text of the Dockerfile that asks a base, with `made`'s steps as questions that `folder` answers."""
    return _fill("resolver.j2", made, folder=folder)


def definition(recipe: Recipe, *, base: str | None = None, platform: str | None = None) -> str:
    """Text of a Singularity definition file for the same image.

    Build the text inside the unpacked build context; its first lines have the commands.

    Raises
    ------
    UsageError : a definition file cannot express a value; a Dockerfile can express most of them.
    """
    made = layers(recipe, base=base, platform=platform)
    return _definition(recipe, made, more=Additions(), bootstrap="docker", place=made.base.text).text


def marked_definition(
    recipe: Recipe, *, base: str, platform: str, more: Additions, bootstrap: str, place: str
) -> Definition:
    """The same with `more`, as imgkit builds it; `bootstrap` and `place` name where the runtime finds `base`.

    Raises
    ------
    UsageError : as in `definition`.
    """
    made = layers(recipe, base=base, platform=platform)
    return _definition(recipe, made, more=more, bootstrap=bootstrap, place=place)


def _definition(recipe: Recipe, made: Layers, *, more: Additions, bootstrap: str, place: str) -> Definition:
    if made.uses_secrets:
        stated = recipe.where("image", "secrets")
        refuse("a build secret", "a definition file", stated, "use --format dockerfile and imgkit build")
    for label in made.labels.entries:
        if re.search(r"\s", label.key) or label.value != label.value.strip():
            found = f"label {label.key!r}: white space in its name or around its value"
            refuse(found, "a definition file", made.labels.origin, "remove it, or use --format dockerfile")
    run = (*more.steps, *_definition_steps(made))
    text = _fill("definition.j2", made, more=more, steps=run, bootstrap=bootstrap, place=place)
    for number, line in enumerate(text.split("\n"), 1):
        # Apptainer >= 1.2 replaces {{ word }} by a build argument, and fails if there is no such argument.
        if match := re.search(r"\{\{\s*\w+\s*\}\}", line):
            refuse(match.group(), "a definition file", origin(text, number), "use --format dockerfile")
    return Definition(text=text, steps=run)


def origin(text: str, line: int) -> str:
    """The comment above line `line` (from 1) of a rendered text: ``mn5.yaml:12``.

    An instruction made of several values gives ``mn5.yaml:12-14, mn5-llm.yaml:3``. A step of imgkit's own
    gives ``imgkit: `` and its purpose. A line above all instructions gives an empty string.
    """
    for above in reversed(text.split("\n")[:line]):
        if found := TRACE.fullmatch(above):
            return found.group(1)
    return ""


def _fill(template: str, made: Layers, **further: object) -> str:
    jinja = environment("templates")
    filters: Mapping[str, Callable[..., str]] = {
        "docker_quote": docker_quote,
        "docker_value": _docker_value,
        "sh_value": lambda entry: install.shell_value(entry.key, entry.value),
        "docker_key": _docker_key,
        "copy_words": _copy_words,
    }
    jinja.filters.update(filters)
    values = {name: getattr(made, name) for name in made.__slots__}
    return jinja.get_template(template).render(values, **further)


def environment(shipped: str, own: Path | None = None) -> Environment:
    """Templates from the folder `own`, then the shipped ones of that folder; a missing value is an error."""
    # Imported here: only some verbs render, and the import takes longer than the rest of "imgkit --help".
    from jinja2 import ChoiceLoader, FileSystemLoader, PackageLoader, StrictUndefined

    from imgkit_builder.image.sandbox import Templates

    made = Templates(
        loader=ChoiceLoader(
            [*([FileSystemLoader(own)] if own else []), PackageLoader("imgkit_recipes", shipped)]
        ),
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["sh_quote"] = shlex.quote
    return made


def _definition_steps(made: Layers) -> Iterator[Step]:
    """Yield the steps of the image `made`."""
    if made.args:
        yield Step(origin=made.args.origin, command=_export(made.args))
    # Brackets: without them, only the last command of several behind && would end the build when it fails.
    copied = " ".join((INSIDE, *(file.path for file in made.ca.files))) if made.ca else INSIDE
    yield _own(
        "copied files have the same modes, whatever umask copied them", f"chmod -R u=rwX,go=rX {copied}"
    )
    if made.ca:
        exported = _export(Block(origin=made.ca.origin, entries=made.ca.env))
        yield Step(origin=made.ca.origin, command=f"{made.ca.install}\n{exported}")
    yield from _early_steps(made.before_apt)
    if made.apt:
        yield Step(origin=made.apt.origin, command=f"({made.apt.text})")
    yield from _early_steps(made.after_apt)
    if made.protect:
        yield _own("every pip step below must keep the base's torch and NCCL", f"({made.protect})")
    if made.filtered_constraint:
        yield Step(origin=made.filtered_constraint.origin, command=made.filtered_constraint.text)
    if made.uv:
        yield Step(origin=made.uv.origin, command=f"({made.uv.command})")
    for pip in made.pip:
        yield Step(origin=pip.origin, command=f"({pip.command})" if pip.kept else pip.command)
    yield Step(origin=made.env.origin, command=_export(made.env))
    yield Step(origin=made.workdir.origin, command=f"mkdir -p -- {shlex.quote(made.workdir.text)}")
    for run in made.run:
        yield _run(run, made.workdir.text)
    yield _own(
        "no index, no dependencies; forced, because a changed wheel can have the same version",
        f"({made.install_wheel})",
    )
    for project in made.projects:
        placed = f"{_placed(project)}\n" if project.stays else ""
        yield Step(origin=project.origin, command=f"{placed}{project.command}")
    if made.projects:
        yield _own("the projects are installed", f"rm -rf {INSIDE}/project")
    for copy in made.copy:
        yield Step(origin=copy.origin, command=_placed(copy))
    if made.copy:
        yield _own("the copies are in their places", f"rm -rf {INSIDE}/copy")
    for run in made.run_after_copy:
        yield _run(run, made.workdir.text)


def _own(purpose: str, command: str) -> Step:
    return Step(origin=f"imgkit: {purpose}", command=command)


def _export(block: Block) -> str:
    values = (f"{one.key}={install.shell_value(one.key, one.value)}" for one in block.entries)
    return f"export {NEXT.join(values)}"


def _early_steps(steps: Early) -> Iterator[Step]:
    for copy in steps.copy:
        yield Step(origin=copy.origin, command=_placed(copy))
    for run in steps.run:
        yield _run(run, "/")


def _run(step: RunStep, folder: str) -> Step:
    return Step(origin=step.origin, command=f"(cd -- {shlex.quote(folder)} && {step.posix})")


def _placed(code: Copy | Project) -> str:
    """The commands that put the content of a folder of the context into its place."""
    target = shlex.quote(code.target)
    return f"mkdir -p -- {target}\ncp -RP -- {INSIDE}/{code.member}/. {target}"


def docker_quote(value: str) -> str:
    """Double quotes for ENV, LABEL and WORKDIR, with ``$`` escaped."""
    return '"' + re.sub(r'([\\"$])', r"\\\1", value) + '"'


def _docker_value(entry: KeyValue) -> str:
    """The value of ENV; one that adds to the base's value names it, as Docker expands it."""
    added = expanded(entry.key, entry.value, lambda text: docker_quote(text)[1:-1])
    return added or docker_quote(entry.value)


def _docker_key(value: str) -> str:
    """The name of a label, quoted only where it must be."""
    return value if re.fullmatch(r"[A-Za-z0-9._/-]+", value) else docker_quote(value)


def _copy_words(words: Sequence[str]) -> str:
    """The JSON form of COPY; the builder expands each word once more after decoding it."""
    return json.dumps([re.sub(r"""([\\"'$])""", r"\\\1", word) for word in words], ensure_ascii=False)


# Byte code of the entry points: a read-only image would compile them at every start. What pip writes holds
# the time of the installation, and a delta would have all of it after each change. The hash of a source
# stays, and under one seed the order of sets does. Columns for tracebacks are a quarter of it when
# compressed.
COMPILE = (
    "PYTHONHASHSEED=0 python3 -s -X no_debug_ranges -m compileall -q --invalidation-mode checked-hash"
    f"{NEXT}    \"$(python3 -IBc 'import {wheel.PACKAGE} as it; print(it.__path__[0])')\""
)

CERTIFICATES = "/usr/local/share/ca-certificates"
"""The folder of local authorities, which ``update-ca-certificates`` adds to `BUNDLE` (Debian, Ubuntu)."""
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
TRUST = ("CURL_CA_BUNDLE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
"""Variables of programs that come with authorities of their own: pip, requests, and what conda installs."""


def layers(
    recipe: Recipe, *, base: str | None = None, platform: str | None = None, base_user: str = ""
) -> Layers:
    """The layers of `recipe` on `base` (default: the recipe's), whose user is `base_user`.

    Only shell commands are quoted.

    Raises
    ------
    UsageError : a value does not fit on one line, or is not the name of a distribution.
    """
    image = recipe.image
    for value, path in _values(recipe):
        if re.search(r"[\n\r\0]", value):
            found = f"{'.'.join(map(str, path))}: a line end or NUL"
            refuse(found, "a Dockerfile", recipe.where(*path), "write it on one line")
    wheel_name = wheel.file_name()
    return Layers(
        image=image,
        name=recipe.name,
        file=recipe.file.name,
        reference=shlex.quote(recipe.reference),
        platform=platform or image.platforms[0],
        uses_secrets=bool(image.used_secrets),
        base=_base(recipe, base),
        base_user="" if base_user.partition(":")[0] in ("root", "0") else base_user,
        args=_args(recipe),
        ca=_ca(recipe),
        before_apt=_early(recipe, "base"),
        after_apt=_early(recipe, "apt"),
        apt=_apt(recipe),
        apt_files=_locked(f"imgkit/{install.LOCKED_APT}") if recipe.lock and recipe.lock.apt else None,
        # A run step may call pip too, and can then use the file.
        protect=install.protect() if image.uv or image.pip or image.run else "",
        filtered_constraint=install.filtered_constraint(recipe) if image.uv or image.pip else None,
        uv=install.uv_command(recipe),
        pip=tuple(
            install.pip_command(recipe, number, step)
            for number, step in enumerate(image.pip)
            if recipe.lock is None or install.locked_wheels(recipe, number)
        ),
        env=_env(recipe),
        workdir=Text(
            origin=_stated(recipe, "image", "workdir") or "imgkit: the default folder", text=image.workdir
        ),
        run=_run_steps(recipe, "pip"),
        wheel=ContextFile(member=f"imgkit/{wheel_name}", path=f"{INSIDE}/{wheel_name}"),
        # The base's PIP_CONSTRAINT does not apply here; if its file is missing, pip would stop.
        install_wheel=f"{install.PIP} PIP_CONSTRAINT=''{NEXT}python3 -m pip install --no-cache-dir"
        f" --no-compile --no-index --no-deps --force-reinstall{NEXT}    {INSIDE}/{wheel_name}"
        f"{NEXT}&& {COMPILE}",
        projects=tuple(
            install.project(recipe, number, step)
            for number, step in enumerate(image.pip)
            if step.project is not None
        ),
        copy=_copies(recipe, "pip"),
        origins=(_locked(install.LOCK_TOML),) if recipe.lock else (),
        run_after_copy=_run_steps(recipe, "copy"),
        labels=_labels(recipe),
    )


def _early(recipe: Recipe, after: str) -> Early:
    return Early(copy=_copies(recipe, after), run=_run_steps(recipe, after))


def _copies(recipe: Recipe, after: str) -> tuple[Copy, ...]:
    return tuple(
        Copy(
            origin=recipe.where("image", "copy", number),
            member=copy_member(number),
            target=posixpath.normpath(step.target),
        )
        for number, step in enumerate(recipe.image.copy)
        if step.after == after
    )


def _locked(member: str) -> ContextFile:
    """A file or folder that only a locked build has."""
    return ContextFile(member=member, path=f"{INSIDE}/{member.removeprefix('imgkit/')}")


def certificate_member(number: int) -> str:
    """Path of certificate `number` (from 0) in the build context."""
    return f"imgkit/ca-{number}.crt"


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
        yield command.command.replace("\n", " "), ("image", "run", number)
    for number, step in enumerate(image.pip):
        editable = (step.editable,) if step.editable else ()
        for key, words in (("options", step.options), ("packages", step.packages), ("editable", editable)):
            for place, word in enumerate(words):
                yield word, ("image", "pip", number, key, place)
    for number, copy in enumerate(image.copy):
        yield copy.target, ("image", "copy", number, "target")
    steps: Iterable[tuple[KeyPath, Mapping[str, str]]]
    steps = ((("image", "pip", number, "env"), step.env) for number, step in enumerate(image.pip))
    mappings = {"env": image.env, "args": image.args, "labels": image.labels}
    for where, pairs in (*steps, *((("image", key), value) for key, value in mappings.items())):
        for key, value in pairs.items():
            yield key, (*where, key)
            yield value, (*where, key)


def _base(recipe: Recipe, override: str | None) -> Text:
    stated = recipe.where("image", "base")
    if recipe.lock and override in (None, recipe.lock.base.exact):
        return Text(origin=stated, text=recipe.lock.base.exact)
    if override in (None, recipe.image.base):
        return Text(origin=stated, text=recipe.image.base)
    return Text(origin=f"--base (instead of {recipe.image.base}, {stated})", text=override)


def _args(recipe: Recipe) -> Block | None:
    stated = _origins(recipe, [("image", "args", key) for key in recipe.image.args])
    return Block(origin=stated, entries=_entries(recipe.image.args)) if recipe.image.args else None


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
    if not packages or (recipe.lock and not recipe.lock.apt):
        return None
    stated = _origins(recipe, [("image", "apt", number) for number in range(len(packages))])
    if recipe.lock:
        return Text(origin=stated, text=install.locked_apt(recipe))
    parts = (
        "apt-get update",
        "DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends"
        + "".join(f"{NEXT}    {shlex.quote(package)}" for package in packages),
        "apt-get clean",
        "rm -rf /var/lib/apt/lists/*",
    )
    return Text(origin=stated, text=f"{NEXT}&& ".join(parts))


def _run_steps(recipe: Recipe, after: str) -> tuple[RunStep, ...]:
    """The user's commands of one place."""
    commands = enumerate(recipe.image.run)
    return tuple(_command(recipe, number, one) for number, one in commands if one.after == after)


def _command(recipe: Recipe, number: int, command: RunCommand) -> RunStep:
    text = command.command.strip()
    # Docker reads some beginnings as its own syntax (flags, JSON), a last backslash as a continued line, and
    # newer engines read << as a heredoc; the exec form keeps all of them as text, and line ends too.
    lines = "\n" in text
    plain = not (lines or text.startswith(("--", "[")) or "<<" in text or text.endswith("\\"))
    # Of several lines, the first that fails ends the step; a shell alone would go on.
    shell = ("/bin/sh", "-ec" if lines else "-c", text)
    posix = f"sh {shell[1]} {_one_line(text) if lines else shlex.quote(text)}"
    docker = text if plain else json.dumps(shell, ensure_ascii=False)
    if command.secrets:
        argv = (*install.secret_argv(recipe, command.secrets), *shell)
        posix = install.with_secrets(recipe, command.secrets, "") + posix
        docker = json.dumps(argv, ensure_ascii=False) if lines else posix
    return RunStep(
        origin=recipe.where("image", "run", number),
        docker=docker,
        posix=posix,
        mounts=install.secret_mounts(command.secrets),
    )


def _one_line(text: str) -> str:
    """One word of a shell that is `text`: a definition ends where a line begins with ``%``."""
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return f'"$(printf %b {shlex.quote(escaped)})"'


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
        **(install.lock_labels(recipe.lock_text) if recipe.lock else {}),
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
