"""Loads a recipe by name or file, with the recipes that it extends; reports all problems at once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.recipe import bases, rules, system_files, systems
from imgkit_builder.recipe.check import check, check_system, normalise, walk
from imgkit_builder.recipe.model import Image, PipStep, Recipe
from imgkit_builder.recipe.problems import (
    Collector,
    KeyPath,
    Position,
    Problem,
    RecipeErrors,
    choices,
    nearest,
    reason,
    shown,
)
from imgkit_builder.recipe.requirements import PYPROJECT
from imgkit_builder.recipe.system_files import Proof
from imgkit_builder.recipe.typecheck import Document, typecheck
from imgkit_builder.recipe.uv_lock import UV_LOCK
from imgkit_builder.recipe.yaml_tree import (
    Items,
    Scalar,
    Table,
    TableEntry,
    YamlNode,
    children,
    deepest,
    kind,
    parse,
)
from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import SystemFacts
from imgkit_recipes import FOLDER, recipe_names, recipe_path


def load(ref: str | Path, *, build_args: Sequence[str] = ()) -> Recipe:
    """Load the recipe `ref`: a shipped name, or a path (with a ``/``, or ending in ``.yaml`` or ``.yml``).

    `build_args` are ``NAME=VALUE``, and replace values of ``image.args``.

    Raises
    ------
    RecipeErrors : the recipe has problems; lists all of them, and those of its parents.
    UsageError : there is no such recipe.
    """
    file = locate(str(ref.absolute()) if isinstance(ref, Path) else ref, Path.cwd())
    found = Collector(shows=(file.parent.resolve(), FOLDER.resolve(), system_files.site_folder().resolve()))
    _check_name(file, found)
    resolved = resolve(file, found)
    if resolved.tree is None:
        raise RecipeErrors(found.errors)
    tree = normalise(_with_args(resolved.tree, build_args), found)
    document = _checked(tree, found, file, whole=resolved.whole)
    positions = {path: node.position for path, node, _ in walk(tree)}
    image = _absolute(document.image, positions)
    description = document.description.strip()
    return Recipe(
        name=file.stem,
        description=description,
        image=image,
        system=document.system,
        file=file,
        sha256=_sha256(file.stem, dataclasses.replace(document, description=description), image, found),
        positions=positions,
        sources=dict(found.digests),
        warnings=tuple(found.warnings),
    )


def _checked(tree: Table, found: Collector, file: Path, *, whole: bool) -> Document:
    """The values of `tree`, which `file` begins. Raises RecipeErrors with everything that `found` holds."""
    document = typecheck(tree, check(tree, found), found, whole=whole)
    if document is not None and systems.is_known(document.system.scheduler):
        check_system(document.system, tree, found)
    if document is not None:
        for path, (what, hint) in bases.doubts(document.image, document.system):
            found.warn(deepest(tree, path)[0].position, path, what, hint)
    if document is None or found.errors:
        raise RecipeErrors(sorted(found.errors, key=lambda problem: _order(problem, file)))
    return document


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSystem:
    """A system that recipes can name."""

    name: str
    file: Path
    facts: SystemFacts
    proof: Proof


def load_system(name: str) -> KnownSystem:
    """Load the known system `name` alone.

    Raises
    ------
    RecipeErrors : its file has problems; lists all of them.
    UsageError : there is no such system, or others can write its file.
    """
    file = system_files.locate(name, Path.cwd() / "recipe")
    found = Collector(shows=(FOLDER.resolve(), file.parent.resolve()))
    tree, proof = _system(file, [], found)
    if tree is None:
        raise RecipeErrors(found.errors)
    # Any image will do: the rules are those of a recipe.
    base = Scalar(position=tree.position, text="scratch:none")
    image = Table(position=tree.position, entries={"base": TableEntry(key=tree.position, value=base)})
    parts = {"image": image, "system": tree}
    entries = {key: TableEntry(key=tree.position, value=part) for key, part in parts.items()}
    document = _checked(Table(position=tree.position, entries=entries), found, file, whole=True)
    return KnownSystem(name=name, file=file, facts=document.system, proof=proof)


def _with_args(tree: Table, build_args: Sequence[str]) -> Table:
    """`tree` with other values in ``image.args``; each keeps the position of the recipe's own value."""
    for text in build_args:
        name, between, value = text.partition("=")
        node, reached = deepest(tree, ("image", "args"))
        declared = node.entries if reached == ("image", "args") and isinstance(node, Table) else {}
        if not between:
            raise UsageError(f"{name!r} has no value", where="--build-arg", hint="write NAME=VALUE")
        if name not in declared:
            hint = choices(name, declared) if declared else f'declare it below image.args: {name}: "default"'
            raise UsageError(f"the recipe has no argument {name!r}", where="--build-arg", hint=hint)
        scalar = Scalar(position=declared[name].value.position, text=value)
        args = Table(position=node.position, entries={name: TableEntry(key=declared[name].key, value=scalar)})
        image = Table(position=node.position, entries={"args": TableEntry(key=node.position, value=args)})
        changed = Table(position=tree.position, entries={"image": TableEntry(key=node.position, value=image)})
        tree = _merge_tables(tree, changed, ())
    return tree


def _check_name(file: Path, found: Collector) -> None:
    """The file's name is the recipe's name; images and .sif files get it too."""
    for what, hint in rules.recipe_name(file.stem):
        found.error(Position(file=file, line=1, column=1), (), what, hint)


def _order(problem: Problem, asked: Path) -> tuple[bool, str, int, int]:
    """Sort the requested file first, and each file from top to bottom."""
    place = problem.position
    return place.file != asked, str(place.file), place.line, place.column


def _absolute(image: Image, positions: Mapping[KeyPath, Position]) -> Image:
    """Make the paths of `image` absolute; each starts at the folder of the file that states it."""

    def place(path: Path, *where: str | int) -> Path:
        return positions[where].file.parent / path

    def placed(step: PipStep, index: int) -> PipStep:
        where = ("image", "pip", index)
        return dataclasses.replace(
            step,
            requirements=step.requirements and place(step.requirements, *where, "requirements"),
            project=step.project and place(step.project, *where, "project"),
        )

    uv = image.uv and dataclasses.replace(image.uv, project=place(image.uv.project, "image", "uv", "project"))
    pip = tuple(placed(step, index) for index, step in enumerate(image.pip))
    copy = tuple(
        dataclasses.replace(step, source=place(step.source, "image", "copy", index, "source"))
        for index, step in enumerate(image.copy)
    )
    ca = tuple(place(file, "image", "ca", index) for index, file in enumerate(image.ca))
    # A file of this machine may be anywhere: "/" and "~" do not start at the recipe.
    secrets = tuple(
        dataclasses.replace(
            one, file=one.file and place(one.file.expanduser(), "image", "secrets", index, "file")
        )
        for index, one in enumerate(image.secrets)
    )
    return dataclasses.replace(image, ca=ca, secrets=secrets, uv=uv, pip=pip, copy=copy)


def _sha256(name: str, document: Document, image: Image, found: Collector) -> str:
    """Digest of the recipe's content: paths as written, the bytes of requirements files, locks, certificates.

    `found` receives the digests of these files, and of what projects state.
    """
    content = {"name": name, **dataclasses.asdict(document)}
    # A build on it names it as --base does; the others are the same with any.
    del content["image"]["current_base"]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
    locks = (image.uv.project / UV_LOCK,) if image.uv else ()
    requirements = (step.requirements for step in image.pip if step.requirements is not None)
    for file in (*image.ca, *requirements, *locks):
        one = hashlib.sha256(files.read_bytes(file))
        found.digests[file] = one.hexdigest()
        digest.update(one.digest())
    projects = [step.project for step in image.pip] + [image.uv.project if image.uv else None]
    for project in filter(None, projects):
        stated = project / PYPROJECT
        found.digests[stated] = hashlib.sha256(files.read_bytes(stated)).hexdigest()
    return digest.hexdigest()


APPENDED: frozenset[KeyPath] = frozenset(
    {
        ("image", "ca"),
        ("image", "secrets"),
        ("image", "apt"),
        ("image", "pip"),
        ("image", "copy"),
        ("image", "run"),
        ("system", "runtime", "modules"),
        ("system", "runtime", "options"),
        ("system", "runtime", "binds"),
        ("system", "runtime", "host_libs"),
        ("system", "runtime", "host_modules"),
    }
)
"""Lists to which a recipe appends; every other list replaces the inherited one."""

ATOMIC: frozenset[KeyPath] = frozenset({("image", "constraints"), ("image", "uv")})
"""Mappings that count as one value: they replace the inherited one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The merged tree; `whole` is false where a file of the chain could not be read."""

    tree: Table | None
    whole: bool


def is_path(ref: str) -> bool:
    """Whether `ref` names a file rather than a shipped recipe."""
    return "/" in ref or ref.endswith((".yaml", ".yml"))


def locate(ref: str, folder: Path) -> Path:
    """The absolute path of recipe `ref`; a relative path starts at `folder`.

    Raises
    ------
    UsageError : there is no such recipe or file.
    """
    try:
        if not is_path(ref):
            return _shipped(ref)
        file = (folder / ref).absolute()
        if file.is_dir():
            inside = sorted(shown(path) for path in file.glob("*.y*ml"))
            raise UsageError(
                f"{ref} is a folder, not a recipe",
                hint=f"it contains: {', '.join(map(str, inside))}" if inside else "name a .yaml file",
            )
        if not file.exists():
            beside = {path.stem: path.name for path in file.parent.glob("*.y*ml")}
            stem = nearest(file.stem, beside)
            near = beside[stem] if stem else nearest(file.stem, recipe_names())
            raise UsageError(
                f"there is no file {ref}",
                hint=f"did you mean {near}?" if near else "to see the shipped recipes: imgkit list",
            )
        return file
    except (OSError, ValueError) as error:  # a name too long, a NUL byte, no permission
        raise UsageError(f"{ref!r} is not a recipe: {reason(error)}") from error


def _shipped(name: str) -> Path:
    if name in recipe_names():
        return recipe_path(name)
    if name in system_files.known():
        hint = f"write a recipe of two lines: `image: {{base: NAME:TAG}}` and `system: {name}`"
        raise UsageError(f"{name} is a system, not a recipe", hint=hint)
    if not name:
        raise UsageError("the recipe's name is empty", hint=choices("", recipe_names()))
    beside = f"; for the file {name}.yaml write ./{name}.yaml" if Path(f"{name}.yaml").is_file() else ""
    raise UsageError(f"there is no recipe {name!r}", hint=choices(name, recipe_names()) + beside)


def resolve(file: Path, found: Collector) -> Resolved:
    """Read `file` and what it extends, and merge them; problems go to `found`."""
    chain: list[tuple[Table, bool]] = []
    files = [file.resolve()]
    whole = True
    current: Path | None = file
    while current is not None:
        tree = parse(current, found)
        if tree is None:
            whole = False
            break
        parent = tree.entries.get("extends")
        _refuse_system_file(tree, found)
        own, names_system, complete = _with_system(_without(tree, "extends"), current, found)
        whole = whole and complete
        chain.append((own, names_system))
        if parent is None:
            break
        current = _parent(parent.value, current.parent, files, found)
        whole = whole and current is not None
    if not chain:
        return Resolved(tree=None, whole=False)
    merged, _ = chain.pop()
    while chain:
        own, names_system = chain.pop()
        merged = _merge_tables(_without(merged, "system") if names_system else merged, own, ())
    return Resolved(tree=merged, whole=whole)


def _refuse_system_file(tree: Table, found: Collector) -> None:
    """Report a file that describes a system where a recipe is expected."""
    keys = {known.name for known in dataclasses.fields(SystemFacts)} - {"env"}
    if "image" not in tree.entries and "system" not in tree.entries and keys & set(tree.entries):
        hint = f"a recipe names it: `image: {{base: NAME:TAG}}` and `system: ./{tree.position.file.name}`"
        found.error(tree.position, (), "it describes a system, not a recipe", hint)
        raise RecipeErrors(found.errors)


def _with_system(tree: Table, file: Path, found: Collector) -> tuple[Table, bool, bool]:
    """`tree` with the system that ``system: NAME`` or ``system: {extends: NAME}`` names in its place.

    The second value says whether it names one, which then replaces that of a recipe which `tree` extends;
    the third whether that system could be read.
    """
    stated = tree.entries.get("system")
    if stated is None:
        return tree, False, True
    ref = stated.value
    own = Table(position=ref.position, entries={})
    if isinstance(ref, Scalar) and ref.type == "nothing":
        return tree, False, True
    if isinstance(ref, Table):
        if "extends" not in ref.entries:
            return tree, False, True
        own, ref = _without(ref, "extends"), ref.entries["extends"].value
    base = _named_system(ref, file, ("system",), [], found)
    if base is None:
        return _without(tree, "system"), True, False
    entry = TableEntry(key=stated.key, value=_merge_tables(base, own, ("system",)))
    return Table(position=tree.position, entries={**tree.entries, "system": entry}), True, True


def _named_system(
    ref: YamlNode, stated_in: Path, path: KeyPath, files: list[Path], found: Collector
) -> Table | None:
    """The system that `ref` in the file `stated_in` names; None after a problem."""
    if not isinstance(ref, Scalar) or ref.type != "text":
        hint = "write system: NAME, or keys below it; imgkit list --systems shows the names"
        found.error(ref.position, path, f"must be the name or path of one system, not {kind(ref)}", hint)
        return None
    try:
        file = system_files.locate(ref.text, stated_in)
    except UsageError as error:
        where = f"{error.where}: " if error.where else ""
        # The hint names files that are there.
        may_show = not system_files.is_path(ref.text) or found.may_show(stated_in.parent / ref.text)
        found.error(ref.position, path, f"{where}{error.what}", (error.hint if may_show else "") or "")
        return None
    return None if _is_circular(file, files, ref, path, found) else _system(file, files, found)[0]


def _is_circular(file: Path, files: list[Path], ref: YamlNode, path: KeyPath, found: Collector) -> bool:
    """Whether `file`, which `ref` names, is one of those that lead to it; reports that."""
    seen = file.resolve()
    if seen not in files:
        return False
    cycle = " -> ".join(step.name for step in (*files[files.index(seen) :], seen))
    found.error(ref.position, path, f"is circular: {cycle}", "remove one `extends`")
    return True


def _system(file: Path, files: list[Path], found: Collector) -> tuple[Table | None, Proof]:
    """The values of the system `file`, over those that it extends, and the proof that it states."""
    tree = parse(file, found)
    if tree is None:
        return None, Proof()
    if image := tree.entries.get("image") or tree.entries.get("system"):
        found.error(image.key, (), "a system has no image", "write its keys without `system:` above them")
        return None, Proof()
    stated = tree.entries.get("proof")
    proof = _proof(stated.value, found) if stated else Proof()
    own, parent = _without(_without(tree, "proof"), "extends"), tree.entries.get("extends")
    if parent is None:
        return own, proof
    above = _named_system(parent.value, file, ("extends",), [*files, file.resolve()], found)
    return (None if above is None else _merge_tables(above, own, ("system",))), proof


def _proof(node: YamlNode, found: Collector) -> Proof:
    texts = {key: child.text if isinstance(child, Scalar) else None for key, child in children(node)}
    made, faults = json_text.checked(Proof, texts, closed=True)
    unseen = any(True for text in texts.values() for _ in rules.printable(text or ""))
    if faults or unseen or not isinstance(node, Table):
        hint = "write one line of text for documented, rendered, simulated or run"
        found.error(node.position, ("proof",), "does not say how the values were tested", hint)
        return Proof()
    proved: Proof = made
    return proved


def _parent(ref: YamlNode, folder: Path, files: list[Path], found: Collector) -> Path | None:
    """The file named by `ref`, which is added to `files`; None after a problem."""
    path: KeyPath = ("extends",)
    if not isinstance(ref, Scalar) or ref.type != "text":
        what = f"must be the name or path of one recipe, not {kind(ref)}"
        found.error(ref.position, path, what, "the parent can extend a further recipe")
        return None
    try:
        file = locate(ref.text, folder)
    except UsageError as error:
        # The hint names files that are there.
        hint = error.hint if not is_path(ref.text) or found.may_show(folder / ref.text) else ""
        found.error(ref.position, path, error.what, hint or "")
        return None
    if _is_circular(file, files, ref, path, found):
        return None
    files.append(file.resolve())
    return file


def _without(tree: Table, key: str) -> Table:
    return Table(
        position=tree.position, entries={name: entry for name, entry in tree.entries.items() if name != key}
    )


def merge(parent: YamlNode, child: YamlNode, path: KeyPath) -> YamlNode:
    """Lay `child` over `parent`: mappings merge, lists in `APPENDED` append, everything else overrides."""
    if isinstance(parent, Table) and isinstance(child, Table) and path not in ATOMIC:
        return _merge_tables(parent, child, path)
    if isinstance(parent, Items) and isinstance(child, Items) and path in APPENDED:
        return Items(position=child.position, items=(*parent.items, *child.items))
    return child


def _merge_tables(parent: Table, child: Table, path: KeyPath) -> Table:
    entries = dict(parent.entries)
    for key, entry in child.entries.items():
        below = entries.get(key)
        value = entry.value if below is None else merge(below.value, entry.value, (*path, key))
        entries[key] = TableEntry(key=entry.key, value=value)
    return Table(position=child.position, entries=entries)
