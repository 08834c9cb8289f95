"""Applies the rules to a recipe's tree: the table for texts, rules for several values at once, and files
that it names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from imgkit_builder.recipe import requirements, systems, uv_lock
from imgkit_builder.recipe.problems import Collector, KeyPath, Position, choices
from imgkit_builder.recipe.requirements import names_other_file
from imgkit_builder.recipe.rules import (
    ANY,
    COMMANDS,
    PLATFORMS,
    BadReference,
    inherited,
    is_variable,
    matches,
    of_key,
    of_text,
    parse_reference,
)
from imgkit_builder.recipe.yaml_tree import (
    Items,
    Scalar,
    Table,
    TableEntry,
    YamlNode,
    children,
    deepest,
    kind,
)
from imgkit_entrypoints import files, secret_patterns
from imgkit_entrypoints.system import SystemFacts

Checked = set[KeyPath]
"""Places with a reported problem: the type check does not report them again."""

_EXPOSED = "anybody who can pull the image can read it; pass it when the job starts"
_IN_HISTORY = (
    "it stays in the image's history; write ${NAME} instead, in a requirements file or a command, and "
    "declare the variable: secrets: [{id: mine, env: NAME}], with secrets: [mine] in the step"
)


def normalise(tree: Table, found: Collector) -> Table:
    """Expand YAML's short forms (``platform: arm64``, ``constraints: keep``) to those of the model."""
    image = tree.entries.get("image")
    if image is None or not isinstance(image.value, Table):
        return tree
    entries: dict[str, TableEntry] = {}
    for key, entry in image.value.entries.items():
        path: KeyPath = ("image", key)
        if key == "platforms":
            found.error(
                entry.key, ("image", "platform"), "is called `platform`", "one name or a list of them"
            )
        elif key == "platform":
            entries["platforms"] = TableEntry(key=entry.key, value=_platforms(entry.value))
        elif key == "constraints":
            value = _constraints(entry.value, found, path)
            if value is not None:
                entries[key] = TableEntry(key=entry.key, value=value)
        else:
            entries[key] = entry
    whole = TableEntry(key=image.key, value=Table(position=image.value.position, entries=entries))
    return Table(position=tree.position, entries={**tree.entries, "image": whole})


def _platforms(value: YamlNode) -> YamlNode:
    items = value.items if isinstance(value, Items) else (value,)
    return Items(position=value.position, items=tuple(_platform(item) for item in items))


def _platform(value: YamlNode) -> YamlNode:
    if isinstance(value, Scalar) and value.type == "text" and f"linux/{value.text}" in PLATFORMS:
        return Scalar(position=value.position, text=f"linux/{value.text}")
    return value


def _constraints(value: YamlNode, found: Collector, path: KeyPath) -> YamlNode | None:
    if isinstance(value, Scalar) and value.text in ("keep", "ignore"):
        return Table(position=value.position, entries={"policy": TableEntry(key=value.position, value=value)})
    allowed = "allowed: keep, ignore, {drop: [NAME, ...]}"
    if not isinstance(value, Table):
        said = f"{value.text!r} is not a policy" if isinstance(value, Scalar) else f"not {kind(value)}"
        found.error(value.position, path, said, allowed)
        return None
    others = [(key, entry) for key, entry in value.entries.items() if key != "drop"]
    for key, entry in others:
        found.error(entry.key, (*path, key), "unknown key", allowed)
    drop = value.entries.get("drop")
    if drop is None and others:
        return None
    if drop is None or (isinstance(drop.value, Items) and not drop.value.items):
        found.error(value.position, path, "drops nothing", allowed)
        return None
    policy = Scalar(position=value.position, text="drop")
    return Table(
        position=value.position,
        entries={"policy": TableEntry(key=value.position, value=policy), "drop": drop},
    )


def check(tree: Table, found: Collector) -> Checked:
    """Apply every rule, and return the paths with a problem."""
    bad: Checked = set()
    for path, node, key in walk(tree):
        if isinstance(path[-1], str) and key is not None:
            bad |= _key(path, key, found)
        if isinstance(node, Scalar):
            bad |= _scalar(path, node, found)
    _together(tree, found, bad)
    return bad


def walk(node: YamlNode, path: KeyPath = ()) -> Iterator[tuple[KeyPath, YamlNode, Position | None]]:
    """Every node below `node` with its path, and the position of its key where it has one."""
    for part, child in children(node):
        below = (*path, part)
        key = node.entries[str(part)].key if isinstance(node, Table) else None
        yield below, child, key
        yield from walk(child, below)


def _key(path: KeyPath, position: Position, found: Collector) -> Checked:
    bad: Checked = set()
    for what, hint in of_key(path):
        found.error(position, path, what, hint)
        bad.add(path)
    return bad


def _scalar(path: KeyPath, node: Scalar, found: Collector) -> Checked:
    if node.type == "nothing":
        what = f"{node.text} is read as no value" if node.text else "has no value"
        hint = f'quote it if it is text: "{node.text}"' if node.text else "give it one or remove the key"
        found.error(node.position, path, what, hint)
        return {path}
    if node.type != "text":
        return set()
    # Texts written with | or > end in a line break: imgkit strips it from these two and keeps it elsewhere.
    ends_freely = path == ("description",) or any(matches(path, place) for place in COMMANDS)
    faults = of_text(path, node.text.rstrip("\n") if ends_freely else node.text)
    for what, hint in faults:
        found.error(node.position, path, what, hint)
    if not faults:
        _suspicious(path, node, found)
    return {path} if faults else set()


def _suspicious(path: KeyPath, node: Scalar, found: Collector) -> None:
    of_system = path[:-1] == ("system", "env")
    in_env = of_system or path[:-1] == ("image", "labels") or is_variable(path)
    holds = secret_patterns.in_value(node.text)
    if holds:
        of_build = path[:2] in (("image", "pip"), ("image", "run"))
        hint = _IN_HISTORY if of_build else _EXPOSED
        found.warn(node.position, path, f"this looks like {holds}", hint)
    elif in_env and secret_patterns.in_name(str(path[-1]), node.text):
        found.warn(node.position, path, "this looks like a secret", _EXPOSED)
    adds = is_variable(path) and inherited(str(path[-1]), node.text) is not None
    if (of_system or is_variable(path)) and not adds and re.search(r"\$\{?[A-Za-z_]", node.text):
        found.warn(node.position, path, "variables are not expanded: the $ stays", "write the whole value")


def _together(tree: Table, found: Collector, bad: Checked) -> None:
    """Apply the rules for several values."""
    _check_secrets(tree, found)
    base = _ngc_base(tree)
    for path, node, _ in walk(tree):
        if matches(path, ("image", "pip", ANY)) and isinstance(node, Table):
            _pip_step(path, node, found)
        elif matches(path, ("image", "pip", ANY, "packages", ANY)) and isinstance(node, Scalar):
            _replaces_torch(node.text, base, node.position, path, found)
        elif path == ("image", "platforms") and isinstance(node, Items):
            _platform_list(path, node, found, bad)
        elif path == ("system", "runtime") and isinstance(node, Table):
            _runtime(path, node, found)
        elif path[0] == "system" and isinstance(node, Scalar) and node.type == "integer":
            _least(path, node, found, bad)
        elif matches(path, ("image", "copy", ANY, "source")) and isinstance(node, Scalar):
            _inside(path, node, found, folder_allowed=True, bad=bad)
        elif matches(path, ("image", "pip", ANY, "requirements")) and isinstance(node, Scalar):
            file = _inside(path, node, found, folder_allowed=False, bad=bad)
            if file is not None:
                _requirements(file, path, found, base)
        elif matches(path, ("image", "pip", ANY, "project")) and isinstance(node, Scalar):
            folder = _inside(path, node, found, folder_allowed=True, bad=bad)
            if folder is not None:
                project(folder, node.position, path, found, base)
        elif path == ("image", "uv") and isinstance(node, Table):
            _uv(node, found, bad)
        elif matches(path, ("image", "ca", ANY)) and isinstance(node, Scalar):
            file = _inside(path, node, found, folder_allowed=False, bad=bad)
            if file is not None:
                certificate(file, node.position, path, found)


def _ngc_base(tree: Table) -> str:
    """The recipe's base if it is an image of NVIDIA's PyTorch, from any registry; else an empty text."""
    node, reached = deepest(tree, ("image", "base"))
    if reached != ("image", "base") or not isinstance(node, Scalar):
        return ""
    try:
        repository = parse_reference(node.text).repository
    except BadReference:
        return ""
    return node.text if f"/{repository}".endswith("/nvidia/pytorch") else ""


def _replaces_torch(text: str, base: str, position: Position, path: KeyPath, found: Collector) -> None:
    """Report a requirement that no version in `base` fulfils: its torch is a build of NVIDIA's own.

    ``2.3.0a0+40ec155e58.nv24.03`` is a pre-release, and equals no version that an index has.
    """
    name = requirements.released_pin(text) if base else ""
    if name:
        found.error(
            position,
            path,
            f"{text!r} would replace the {name} of {base}, which imgkit keeps: the build would fail",
            f"remove the version: {name}; or choose a base with that version of {name}",
        )


def _pip_step(path: KeyPath, step: Table, found: Collector) -> None:
    kinds = ("packages", "requirements", "project")
    stated = [key for key in kinds if key in step.entries]
    if len(stated) != 1:
        has = " and ".join(stated) or "none of them"
        what = f"needs exactly one of {', '.join(kinds)}; it has {has}"
        found.error(step.position, path, what, "write a step for each" if stated else "add packages: [NAME]")
    if "editable" in step.entries and "project" not in step.entries:
        what = "is for a project: other packages have no folder of their own"
        found.error(
            step.entries["editable"].key, (*path, "editable"), what, "add project: FOLDER, or remove it"
        )
    if "ignore" in step.entries and "project" not in step.entries:
        what = "is for a project: nothing else of this step is a folder"
        found.error(step.entries["ignore"].key, (*path, "ignore"), what, "add project: FOLDER, or remove it")
    for key in ("packages", "options"):
        entry = step.entries.get(key)
        if entry is None or not isinstance(entry.value, Items):
            continue
        items = entry.value.items
        if key == "packages" and not items:
            found.error(entry.value.position, (*path, key), "is empty", "remove the step")
        first = items[0] if items else None
        if key == "options" and isinstance(first, Scalar) and first.text and not first.text.startswith("-"):
            what = f"{first.text!r} is not an option"
            found.error(
                first.position, (*path, key, 0), what, "options begin with -; packages go to `packages`"
            )


def _uv(node: Table, found: Collector, bad: Checked) -> None:
    path: KeyPath = ("image", "uv", "project")
    stated = node.entries.get("project")
    if stated is None or not isinstance(stated.value, Scalar):
        return
    folder = _inside(path, stated.value, found, folder_allowed=True, bad=bad)
    if folder is not None:
        named = {key: _texts(node.entries.get(key)) for key in ("extras", "groups")}
        uv_project(folder, stated.value.position, path, found, **named)


def _texts(entry: TableEntry | None) -> tuple[str, ...]:
    items = entry.value.items if entry is not None and isinstance(entry.value, Items) else ()
    return tuple(item.text for item in items if isinstance(item, Scalar))


def _platform_list(path: KeyPath, node: Items, found: Collector, bad: Checked) -> None:
    if not node.items:
        found.error(node.position, path, "is empty", "allowed: amd64, arm64")
        bad.add(path)
    seen: set[str] = set()
    for index, item in enumerate(node.items):
        if isinstance(item, Scalar) and item.text in seen:
            found.error(item.position, (*path, index), f"{item.text} is listed twice", "keep one of them")
        elif isinstance(item, Scalar):
            seen.add(item.text)


def _runtime(path: KeyPath, node: Table, found: Collector) -> None:
    what_kind = node.entries.get("kind")
    if what_kind is None or not isinstance(what_kind.value, Scalar) or "command" in node.entries:
        return
    if what_kind.value.text in ("docker", "kubernetes"):
        example = {"docker": "docker", "kubernetes": "runai"}[what_kind.value.text]
        what = f"kind {what_kind.value.text} needs `command`: its default, singularity, is of another kind"
        found.error(what_kind.value.position, (*path, "kind"), what, f"for example command: {example}")


def check_system(facts: SystemFacts, tree: Table, found: Collector) -> None:
    """Apply what the recipe's own scheduler knows about its section."""
    scheduler, runtime = systems.registration(facts.scheduler), facts.runtime
    if runtime.kind not in scheduler.runtimes:
        path: KeyPath = ("system", "runtime", "kind")
        what = f"{facts.scheduler} does not start programs by {runtime.kind}: imgkit submit refuses it"
        found.warn(deepest(tree, path)[0].position, path, what, choices("", scheduler.runtimes))
    elif runtime.kind == "docker" and scheduler.by_podman and not systems.is_podman(runtime.command):
        path = ("system", "runtime", "command")
        what = f"{facts.scheduler} starts containers by podman alone: imgkit submit refuses {runtime.command}"
        found.warn(deepest(tree, path)[0].position, path, what, "command: podman, or podman-hpc")
    for fault in scheduler.faults(facts):
        path = ("system", *fault.path)
        found.error(deepest(tree, path)[0].position, path, fault.what, fault.hint)


_LEAST = {"gpus": 0, "cpus": 1, "cpus_per_gpu": 1, "nics": 1, "line_rate_Gbps": 1}


def _least(path: KeyPath, node: Scalar, found: Collector, bad: Checked) -> None:
    least = _LEAST.get(str(path[-1]))
    if least is not None and re.fullmatch(r"-?[0-9]{1,18}", node.text) and int(node.text) < least:
        found.error(node.position, path, f"{node.text} is too small", f"at least {least}")
        bad.add(path)


def _inside(
    path: KeyPath, node: Scalar, found: Collector, *, folder_allowed: bool, bad: Checked
) -> Path | None:
    """The file named by a value, if it exists inside the folder of the recipe's file."""
    if node.type != "text" or path in bad:
        return None
    folder = node.position.file.resolve().parent
    what = hint = ""
    try:
        named = folder / node.text
        target = named.resolve()
        if not node.text:
            what, hint = "is empty", "name a file"
        elif Path(node.text).is_absolute() or node.text.startswith("~"):
            what, hint = f"{node.text} is not relative", f"paths start at the recipe's folder, {folder}"
        elif not target.is_relative_to(folder):
            by = " through a symbolic link" if ".." not in Path(node.text).parts else ""
            what, hint = f"{node.text} leaves the recipe's folder{by}", f"put it below {folder}"
        elif not target.exists():
            there = [entry.name for entry in named.parent.iterdir()] if named.parent.is_dir() else []
            what = f"there is no {node.text} in {folder}"
            hint = choices(named.name, there).rpartition("; ")[2] if _near(named.name, there) else "create it"
        elif target.is_dir() and not folder_allowed:
            what, hint = f"{node.text} is a folder", "name a file"
        elif not (target.is_dir() or target.is_file()):
            what, hint = f"{node.text} is neither a file nor a folder", "name a regular file"
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # RuntimeError: a circle of links, before Python 3.13
        what, hint = f"{node.text!r} cannot be checked: {error}", "name a file in the recipe's folder"
    if what:
        found.error(node.position, path, what, hint)
        bad.add(path)
        return None
    return target


def _near(name: str, there: list[str]) -> bool:
    return "did you mean" in choices(name, there)


def _requirements(file: Path, path: KeyPath, found: Collector, base: str) -> None:
    """Report lines that name further files: only this one goes into the image."""
    try:
        lines = files.read_text(file).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        found.error(Position(file=file, line=1, column=1), path, f"cannot be read: {error}")
        return
    found.lines[file] = lines
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if names_other_file(line):
            place = Position(file=file, line=number, column=len(line) - len(line.lstrip()) + 1)
            found.error(
                place, path, f"{text!r} names a file that is not in the image", "write its lines here"
            )
        _replaces_torch(text, base, Position(file=file, line=number, column=1), path, found)
        holds = secret_patterns.in_value(text)
        if holds:
            place = Position(file=file, line=number, column=1)
            found.warn(place, path, f"this looks like {holds}", _IN_HISTORY)


def _check_secrets(tree: Table, found: Collector) -> None:
    """Report declarations without exactly one source or without a step, and names without a declaration."""
    declared: dict[str, tuple[Scalar, KeyPath]] = {}
    for path, node in _items(tree, "secrets"):
        name = node.entries["id"].value if "id" in node.entries else None
        if isinstance(name, Scalar) and name.text in declared:
            found.error(name.position, (*path, "id"), f"{name.text} is declared twice", "keep one of them")
        elif isinstance(name, Scalar):
            declared[name.text] = name, path
        stated = [key for key in ("env", "file") if key in node.entries]
        if len(stated) != 1:
            what = f"needs exactly one of env, file; it has {'both' if stated else 'neither'}"
            found.error(
                node.position, path, what, "env: NAME is a variable of this machine, file: PATH a file"
            )
    used = set()
    for list_ in ("pip", "run"):
        for path, node in _items(tree, list_):
            for below, item in _named(node, path):
                used.add(item.text)
                if item.text not in declared:
                    hint = choices(item.text, declared) if declared else "declare it below image.secrets"
                    found.error(item.position, below, f"there is no secret {item.text!r}", hint)
    for text, (stated_name, place) in declared.items():
        if text not in used:
            what = f"no step uses the secret {text}"
            found.warn(stated_name.position, place, what, f"add secrets: [{text}] to a step of pip or run")


def _items(tree: Table, key: str) -> Iterator[tuple[KeyPath, Table]]:
    """The mappings of the list ``image.KEY``."""
    path: KeyPath = ("image", key)
    node, reached = deepest(tree, path)
    if reached == path and isinstance(node, Items):
        for index, item in enumerate(node.items):
            if isinstance(item, Table):
                yield (*path, index), item


def _named(step: YamlNode, path: KeyPath) -> Iterator[tuple[KeyPath, Scalar]]:
    names = dict(children(step)).get("secrets")
    if isinstance(names, Items):
        for index, item in enumerate(names.items):
            if isinstance(item, Scalar) and item.type == "text":
                yield (*path, "secrets", index), item


def certificate(file: Path, position: Position, path: KeyPath, found: Collector) -> None:
    """Report a file of ``image.ca`` that is not a certificate as PEM text, or that holds a private key."""
    try:
        data = files.read_bytes(file)
    except OSError as error:
        found.error(position, path, f"{file.name} cannot be read: {error.strerror}")
        return
    if b"PRIVATE KEY-----" in data:
        hint = f"keep only the certificate: openssl x509 -in {file.name} -out certificate.crt"
        found.error(position, path, f"{file.name} holds a private key, which would be in the image", hint)
    elif b"-----BEGIN CERTIFICATE-----" not in data:
        hint = f"if it is DER, convert it: openssl x509 -inform der -in {file.name} -out certificate.crt"
        found.error(position, path, f"{file.name} is not a certificate in PEM form", hint)


def project(folder: Path, position: Position, path: KeyPath, found: Collector, base: str = "") -> None:
    """Report a folder of ``project`` without a usable pyproject.toml."""
    if not (folder / requirements.PYPROJECT).is_file():
        what = f"{folder.name} has no {requirements.PYPROJECT}"
        hint = "name the folder that has one" if folder.is_dir() else "name a folder"
        if (folder / "setup.py").is_file():
            hint = 'add one next to setup.py: [build-system] with requires = ["setuptools"]'
        found.error(position, path, what, hint)
        return
    try:
        needed = requirements.of_project(folder)
    except (OSError, ValueError) as error:
        found.error(position, path, f"its {requirements.PYPROJECT} cannot be read: {error}")
        return
    for one in needed:
        # PEP 508 spells a path "NAME @ file:...".
        if requirements.names_other_file(one.rpartition("@")[2]):
            what = f"depends on {one!r}, a path that is not in the image"
            found.error(position, path, what, "add a pip step with a project of its own before this one")
        _replaces_torch(one, base, position, path, found)


def uv_project(
    folder: Path,
    position: Position,
    path: KeyPath,
    found: Collector,
    *,
    extras: Sequence[str],
    groups: Sequence[str],
) -> None:
    """Report a folder of ``uv`` without a usable uv.lock, or whose pyproject.toml has changed since."""
    for name in (requirements.PYPROJECT, uv_lock.UV_LOCK):
        if not (folder / name).is_file():
            hint = (
                "write it: uv lock"
                if name == uv_lock.UV_LOCK and folder.is_dir()
                else "name the folder of one"
            )
            found.error(position, path, f"{folder.name} has no {name}", hint)
            return
    try:
        pyproject, content = uv_lock.tables(folder)
        lock = uv_lock.from_tables(pyproject, content)
        changed = uv_lock.changed(pyproject, lock.stated, extras=extras, groups=groups)
    except (OSError, ValueError) as error:
        found.error(position, path, f"its uv.lock cannot be used: {error}")
        return
    for name in changed:
        what = f"uv.lock is not up to date: {_line(folder, name)} and the lock differ about {name}"
        found.error(position, path, what, "write it again: uv lock")


def _line(folder: Path, name: str) -> str:
    """``pyproject.toml:7`` for the first line that names a distribution, or the file's name."""
    lines = files.read_text(folder / requirements.PYPROJECT).splitlines()
    known = re.compile(rf"(?<![A-Za-z0-9]){re.sub('-', '[-_.]+', name)}(?![A-Za-z0-9_.-])", re.IGNORECASE)
    number = next((number for number, line in enumerate(lines, 1) if known.search(line)), 0)
    return requirements.PYPROJECT + (f":{number}" if number else "")
