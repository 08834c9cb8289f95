"""Loads a recipe by name or file, with what it extends; reports all problems at once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_builder.recipe import bases, rules, system_files, systems
from imgkit_builder.recipe.check import check, check_system
from imgkit_builder.recipe.model import Document, Image, Recipe
from imgkit_builder.recipe.problems import (
    Collector,
    KeyPath,
    Position,
    RecipeErrors,
    choices,
    nearest,
    reason,
    shown,
)
from imgkit_builder.recipe.requirements import PYPROJECT, UV_LOCK
from imgkit_builder.recipe.system_files import Proof, is_path
from imgkit_builder.recipe.validation import validate
from imgkit_builder.recipe.yaml_tree import Items, Scalar, Table, YamlNode, kind, parse, plain
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import SystemFacts
from imgkit_recipes import FOLDER, recipe_names, recipe_path

APPENDED: frozenset[KeyPath] = frozenset(
    {("image", key) for key in ("ca", "secrets", "apt", "pip", "copy", "run")}
    | {("system", "runtime", key) for key in ("modules", "options", "binds", "host_libs", "host_modules")}
)
"""Lists to which a recipe appends; every other list replaces the inherited one."""
ATOMIC: frozenset[KeyPath] = frozenset({("image", "constraints"), ("image", "uv")})
"""Mappings that count as one value: they replace the inherited one."""


def load(ref: str | Path, *, build_args: Sequence[str] = ()) -> Recipe:
    """Load the recipe `ref`: a shipped name, or a path (with a ``/``, or ending in ``.yaml`` or ``.yml``).

    `build_args` are ``NAME=VALUE``, and replace values of ``image.args``.

    Raises
    ------
    RecipeErrors : the recipe has problems; lists all of them, and those of its parents.
    UsageError : there is no such recipe.
    """
    # A Path always means a file; a text without a slash or suffix is a shipped recipe.
    file = locate(str(ref.absolute()) if isinstance(ref, Path) else ref, Path.cwd())
    # `extends` can name any file of this machine: only what these folders hold is quoted in messages.
    folders = (file.parent, FOLDER, system_files.site_folder())
    problems = Collector(shows=tuple(folder.resolve() for folder in folders))
    # The name has no key, so no field of the model checks it.
    for message, hint in rules.recipe_name(file.stem):
        problems.error(Position(file=file, line=1, column=1), (), message, hint)
    tree, is_complete = resolve(file, problems)
    if tree is None:
        raise RecipeErrors(problems.errors)
    tree = _with_args(tree, build_args)
    document = _document(tree, problems, file, is_complete=is_complete)
    positions = _positions(tree)
    image: Image = _absolute(document.image, ("image",), positions)
    return Recipe(
        name=file.stem,
        description=document.description,
        image=image,
        system=document.system,
        file=file,
        sha256=_sha256(file.stem, document, image, problems),
        positions=positions,
        sources=dict(problems.digests),
        warnings=tuple(problems.warnings),
    )


def _document(tree: Table, problems: Collector, file: Path, *, is_complete: bool) -> Document:
    """Return the values of `tree`, which `file` begins. Raises RecipeErrors with all `problems`."""
    document = check(tree, problems, is_complete=is_complete)
    if document is not None:
        # A plug-in is loaded only for a recipe that names it, and its rules see complete values.
        if systems.is_known(document.system.scheduler):
            check_system(document.system, tree, problems)
        for number, issue in enumerate(document.system.known_issues):
            for key, (message, hint) in issue.faults():
                path: KeyPath = ("system", "known_issues", number, key)
                problems.error(tree.deepest(path)[0].position, path, message, hint)
        for path, (message, hint) in bases.doubts(document.image, document.system):
            problems.warn(tree.deepest(path)[0].position, path, message, hint)
    if document is None or problems.errors:
        # The requested file first, and each file from top to bottom.
        raise RecipeErrors(
            sorted(problems.errors, key=lambda problem: (problem.position.file != file, problem.position))
        )
    return document


def _positions(tree: Table) -> Mapping[KeyPath, Position]:
    """Return the position of every value; that of a short form stands for the values which it means."""
    positions = {path: node.position for path, node in tree.walk()}
    # Templates and messages ask for the expanded form: `platform: arm64` is the list [arm64].
    for path, below in ((("image", "platform"), 0), (("image", "constraints"), "policy")):
        if path in positions:
            positions.setdefault((*path, below), positions[path])
    return positions


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
    problems = Collector(shows=(FOLDER.resolve(), file.parent.resolve()))
    tree, proof = _system(file, (), problems)
    if tree is None:
        raise RecipeErrors(problems.errors)
    # Any image will do: the rules are those of a recipe.
    base = Scalar(position=tree.position, text="scratch:none")
    recipe = _replace(Table(position=tree.position, entries={}, keys={}), ("system",), tree)
    recipe = _replace(recipe, ("image", "base"), base)
    facts = _document(recipe, problems, file, is_complete=True).system
    return KnownSystem(name=name, file=file, facts=facts, proof=proof)


def _replace(table: Table, path: tuple[str, ...], node: YamlNode) -> Table:
    """Return `table` with `node` at `path`; tables on the way that do not exist are added."""
    key = path[0]
    if len(path) > 1:
        below = table.entries.get(key)
        empty = Table(position=node.position, entries={}, keys={})
        node = _replace(below if isinstance(below, Table) else empty, path[1:], node)
    keys = {key: node.position, **table.keys}
    return Table(position=table.position, entries={**table.entries, key: node}, keys=keys)


def _with_args(tree: Table, build_args: Sequence[str]) -> Table:
    """Return `tree` with other values in ``image.args``; each keeps the position of the recipe's value."""
    for argument in build_args:
        name, equals, value = argument.partition("=")
        node, path = tree.deepest(("image", "args"))
        declared = node.entries if len(path) == 2 and isinstance(node, Table) else {}
        if not equals:
            raise UsageError(f"{name!r} has no value", where="--build-arg", hint="write NAME=VALUE")
        if name not in declared:
            hint = choices(name, declared) if declared else f'declare it below image.args: {name}: "default"'
            raise UsageError(f"the recipe has no argument {name!r}", where="--build-arg", hint=hint)
        # Replaced before the check, so that the rules of a value apply to that of the command line too.
        scalar = Scalar(position=declared[name].position, text=value)
        tree = _replace(tree, ("image", "args", name), scalar)
    return tree


def _absolute(value: Any, path: KeyPath, positions: Mapping[KeyPath, Position]) -> Any:
    """Return `value` with absolute paths; each starts at the folder of the file that states it."""
    if isinstance(value, Path):
        # A file of this machine may be anywhere: "/" and "~" do not start at the recipe.
        return positions[path].file.parent / value.expanduser()
    if isinstance(value, tuple):
        return tuple(_absolute(item, (*path, index), positions) for index, item in enumerate(value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    names = [field.name for field in dataclasses.fields(value)]
    parts = {name: _absolute(getattr(value, name), (*path, name), positions) for name in names}
    return dataclasses.replace(value, **parts)


def _sha256(name: str, document: Document, image: Image, problems: Collector) -> str:
    """Return the digest of the content: paths as written, the bytes of requirements, locks, certificates.

    `problems` receives the digests of these files, and of the pyproject.toml of projects.
    """
    content = {"name": name, **dataclasses.asdict(document)}
    # A build on it names it as --base does; the others are the same with any.
    del content["image"]["current_base"]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
    # What a build reads besides the recipe; not the code, which the digest of the context covers.
    locks = (image.uv.project / UV_LOCK,) if image.uv else ()
    requirements = (step.requirements for step in image.pip if step.requirements is not None)
    for file in (*image.ca, *requirements, *locks):
        file_digest = hashlib.sha256(files.read_bytes(file))
        problems.digests[file] = file_digest.hexdigest()
        digest.update(file_digest.digest())
    projects = [step.project for step in image.pip] + [image.uv.project if image.uv else None]
    for project in filter(None, projects):
        pyproject = project / PYPROJECT
        problems.digests[pyproject] = hashlib.sha256(files.read_bytes(pyproject)).hexdigest()
    return digest.hexdigest()


def locate(ref: str, folder: Path) -> Path:
    """Return the absolute path of recipe `ref`; a relative path starts at `folder`.

    Raises
    ------
    UsageError : there is no such recipe or file.
    """
    try:
        if not is_path(ref):
            return _shipped(ref)
        file = (folder / ref).absolute()
        if file.is_dir():
            names = sorted(str(shown(path)) for path in file.glob("*.y*ml"))
            hint = f"it contains: {', '.join(names)}" if names else "name a .yaml file"
            raise UsageError(f"{ref} is a folder, not a recipe", hint=hint)
        if not file.exists():
            siblings = {path.stem: path.name for path in file.parent.glob("*.y*ml")}
            near = siblings.get(nearest(file.stem, siblings)) or nearest(file.stem, recipe_names())
            hint = f"did you mean {near}?" if near else "to see the shipped recipes: imgkit list"
            raise UsageError(f"there is no file {ref}", hint=hint)
        return file
    except (OSError, ValueError) as error:  # a name too long, a NUL byte, no permission
        raise UsageError(f"{ref!r} is not a recipe: {reason(error)}") from error


def _shipped(name: str) -> Path:
    if name in recipe_names():
        return recipe_path(name)
    if name in system_files.find_all():
        return system_files.locate(name, Path.cwd() / "recipe")
    if not name:
        raise UsageError("the recipe's name is empty", hint=choices("", recipe_names()))
    if name.endswith((".sif", ".sqsh")):
        raise UsageError(
            f"there is no file {name} here", hint="name its folder, or make it: imgkit sif RECIPE"
        )
    advice = f"; for the file {name}.yaml write ./{name}.yaml" if Path(f"{name}.yaml").is_file() else ""
    raise UsageError(f"there is no recipe {name!r}", hint=choices(name, recipe_names()) + advice)


def resolve(file: Path, problems: Collector, children: Sequence[Path] = ()) -> tuple[Table | None, bool]:
    """Read `file` and what it extends, and merge them; problems go to `problems`.

    The second value says whether every file could be read. `children` are the resolved files that led to it.
    """
    tree = parse(file, problems)
    if tree is None:
        return None, False
    if not {"image", "system"} & set(tree.entries) and file in system_files.find_all().values():
        return _recipe_of_system(file, problems), True
    _refuse_system_file(tree, problems)
    child, names_system, is_complete = _with_system(tree.without("extends"), file, problems)
    if "extends" not in tree.entries:
        return child, is_complete
    chain = (*children, file.resolve())
    parent_file = _locate_named(tree.entries["extends"], file, ("extends",), chain, problems, "recipe")
    parent, is_parent_complete = resolve(parent_file, problems, chain) if parent_file else (None, False)
    if parent is None:
        return child, False
    # Keys of the parent's system would mix two machines, so a named system replaces all of it.
    merged = merge_tables(parent.without("system") if names_system else parent, child, ())
    return merged, is_complete and is_parent_complete


def _recipe_of_system(file: Path, problems: Collector) -> Table:
    """Return a recipe for the system in `file`, which has none: the newest base that its nodes run.

    Raises
    ------
    UsageError : the file does not state the driver; the hint is the recipe to write.
    """
    name, position = file.stem, Position(file=file, line=1, column=1)
    facts = load_system(name).facts
    base = bases.newest(facts)
    if base is None:
        reference, driver = [(row.reference, row.driver) for row in bases.table() if row.driver][-1]
        hint = (
            f"write {name}.yaml with two lines, `image: {{base: {reference}}}` and `system: {name}`, and use "
            f"./{name}.yaml. That base needs driver {driver}; to see older ones: imgkit list --bases"
        )
        raise UsageError(f"{name} is a system without a recipe, and its driver is not known", hint=hint)
    message = f"{name} has no recipe: the base is {base.reference}, the newest that its nodes run"
    hint = f"for another: `image: {{base: NAME:TAG}}` and `system: {name}` in a file"
    problems.warn(position, ("image", "base"), message, hint)
    tree = Table(position=position, entries={}, keys={})
    for key, text in (("base", base.reference), ("platform", bases.platform_of(facts))):
        tree = _replace(tree, ("image", key), Scalar(position=position, text=text))
    system, _ = _system(file, (), problems)
    return tree if system is None else _replace(tree, ("system",), system)


def _refuse_system_file(tree: Table, problems: Collector) -> None:
    """Report a file that describes a system where a recipe is expected."""
    keys = {field.name for field in dataclasses.fields(SystemFacts)} - {"env"}
    if not {"image", "system"} & set(tree.entries) and keys & set(tree.entries):
        hint = f"a recipe names it: `image: {{base: NAME:TAG}}` and `system: ./{tree.position.file.name}`"
        problems.error(tree.position, (), "it describes a system, not a recipe", hint)
        raise RecipeErrors(problems.errors)


def _with_system(tree: Table, file: Path, problems: Collector) -> tuple[Table, bool, bool]:
    """Return `tree` with the values of the system that ``system: NAME`` or ``system: {extends: NAME}`` names.

    The second value says whether it names one, which then replaces that of a recipe which `tree` extends;
    the third whether that system could be read.
    """
    ref = tree.entries.get("system")
    if ref is None or (isinstance(ref, Scalar) and ref.type == "nothing"):
        return tree, False, True
    # `system: NAME` is short for `system: {extends: NAME}`; both may come without changes.
    changes = Table(position=ref.position, entries={}, keys={})
    if isinstance(ref, Table):
        if "extends" not in ref.entries:
            return tree, False, True
        changes, ref = ref.without("extends"), ref.entries["extends"]
    system_file = _locate_named(ref, file, ("system",), (), problems, "system")
    base = _system(system_file, (), problems)[0] if system_file else None
    if base is None:
        return tree.without("system"), True, False
    system = merge_tables(base, changes, ("system",))
    return _replace(tree, ("system",), system), True, True


_MOST_PARENTS = 50
_NAME_HINTS = {
    "recipe": "the parent can extend a further recipe",
    "system": "write system: NAME, or keys below it; imgkit list --systems shows the names",
}


def _locate_named(
    ref: YamlNode, source: Path, path: KeyPath, chain: Sequence[Path], problems: Collector, noun: str
) -> Path | None:
    """Return the file of the ``recipe`` or ``system`` that `ref` in `source` names; None after a problem.

    `chain` are the resolved files that led to it.
    """
    if not isinstance(ref, Scalar) or ref.type != "text":
        message = f"must be the name or path of one {noun}, not {kind(ref)}"
        problems.error(ref.position, path, message, _NAME_HINTS[noun])
        return None
    try:
        file = locate(ref.text, source.parent) if noun == "recipe" else system_files.locate(ref.text, source)
    except UsageError as error:
        message = f"{error.where}: {error.what}" if error.where else error.what
        # The hint names files that are there.
        may_show = not is_path(ref.text) or problems.may_show(source.parent / ref.text)
        problems.error(ref.position, path, message, (error.hint if may_show else "") or "")
        return None
    # Resolved: a link back to a child is a circle too.
    resolved = file.resolve()
    if resolved in chain:
        cycle = " -> ".join(step.name for step in (*chain[chain.index(resolved) :], resolved))
        problems.error(ref.position, path, f"is circular: {cycle}", "remove one `extends`")
        return None
    if len(chain) > _MOST_PARENTS:
        problems.error(ref.position, path, f"more than {_MOST_PARENTS} files extend each other", "merge some")
        return None
    return file


def _system(file: Path, children: Sequence[Path], problems: Collector) -> tuple[Table | None, Proof]:
    """Return the values of the system `file` over those that it extends, and the proof that it states."""
    tree = parse(file, problems)
    if tree is None:
        return None, Proof()
    # A system that brought packages would change images of recipes that only name it.
    for key in ("image", "system"):
        if key in tree.entries:
            hint = "write its keys without `system:` above them"
            problems.error(tree.keys[key], (), "a system has no image", hint)
            return None, Proof()
    proof = _proof(tree.entries["proof"], problems) if "proof" in tree.entries else Proof()
    values, parent = tree.without("proof", "extends"), tree.entries.get("extends")
    if parent is None:
        return values, proof
    chain = (*children, file.resolve())
    parent_file = _locate_named(parent, file, ("extends",), chain, problems, "system")
    base = _system(parent_file, chain, problems)[0] if parent_file else None
    return (None if base is None else merge_tables(base, values, ("system",))), proof


def _proof(node: YamlNode, problems: Collector) -> Proof:
    proof, _ = validate(Proof, plain(node))
    if proof is None:
        hint = "write one line of text for documented, rendered, simulated or run"
        message = "does not say how the values were tested"
        problems.error(node.position, ("proof",), message, hint)
    return proof or Proof()


def merge(parent: YamlNode, child: YamlNode, path: KeyPath) -> YamlNode:
    """Lay `child` over `parent`: mappings merge, lists in `APPENDED` append, everything else overrides."""
    if isinstance(parent, Table) and isinstance(child, Table) and path not in ATOMIC:
        return merge_tables(parent, child, path)
    if isinstance(parent, Items) and isinstance(child, Items) and path in APPENDED:
        return Items(position=child.position, items=(*parent.items, *child.items))
    return child


def merge_tables(parent: Table, child: Table, path: KeyPath) -> Table:
    """Lay the mapping `child` over `parent`, both at `path`."""
    entries = dict(parent.entries)
    for key, node in child.entries.items():
        entries[key] = merge(entries[key], node, (*path, key)) if key in entries else node
    return Table(position=child.position, entries=entries, keys={**parent.keys, **child.keys})
