"""Load a recipe, merge it with the recipes that it extends, and report all problems at once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from imgkit_builder.recipe import bases, rules, system_files, systems
from imgkit_builder.recipe.check import check, check_system
from imgkit_builder.recipe.model import Document, Image, Recipe
from imgkit_builder.recipe.problems import (
    Collector,
    KeyPath,
    Position,
    RecipeErrors,
    allowed_hint,
    error_reason,
    nearest_name,
    shorten_path,
)
from imgkit_builder.recipe.requirements import PYPROJECT, UV_LOCK
from imgkit_builder.recipe.system_files import Proof, is_path
from imgkit_builder.recipe.validation import validate
from imgkit_builder.recipe.yaml_tree import Items, Scalar, Table, YamlNode, describe_kind, read_yaml, to_data
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import Fault
from imgkit_entrypoints.system import SystemFacts
from imgkit_recipes import FOLDER as SHIPPED_FOLDER
from imgkit_recipes import recipe_names, recipe_path

APPENDED: frozenset[KeyPath] = frozenset(
    {("image", key) for key in ("ca", "secrets", "apt", "pip", "copy", "run")}
    | {("system", "runtime", key) for key in ("modules", "options", "binds", "host_libs", "host_modules")}
)
"""Lists that a recipe appends to the inherited list. Any other list replaces the inherited one."""
ATOMIC: frozenset[KeyPath] = frozenset({("image", "constraints"), ("image", "uv")})
"""Mappings that replace the inherited mapping as a whole. Any other mapping is merged key by key."""


def load(ref: str | Path, *, build_args: Sequence[str] = ()) -> Recipe:
    """Load a recipe together with the recipes that it extends, and check all values.

    Parameters
    ----------
    ref : the name of a shipped recipe, or the path of a file. A text is a path if it contains a ``/``, or
        ends in ``.yaml`` or ``.yml``.
    build_args : texts ``NAME=VALUE`` that replace values of ``image.args``.

    Raises
    ------
    RecipeErrors : the recipe or one of its parents has problems. The error lists all of them.
    UsageError : there is no such recipe.
    """
    # A Path always means a file. A text without a slash or a suffix is the name of a shipped recipe.
    if isinstance(ref, Path):
        ref = str(ref.absolute())
    file = locate_recipe(ref, Path.cwd())
    problems = _make_collector(file)
    # The recipe is named after its file. The name is not a key, so the check of the keys does not cover it.
    for message, hint in rules.find_recipe_name_faults(file.stem):
        problems.error(Position(file=file, line=1, column=1), (), message, hint)
    merged = _read_with_parents(file, problems)
    if merged.tree is None:
        raise RecipeErrors(problems.errors)
    # Replace the arguments first, so that the new values are checked, too.
    tree = _replace_args(merged.tree, build_args)
    document = _make_document(tree, problems, file, is_complete=merged.is_complete)
    positions = _list_positions(tree)
    # The digest of the recipe is made from `document`, whose paths are still relative, so that it does not
    # depend on the folder.
    image: Image = _make_absolute(document.image, ("image",), positions)
    counted_files = _list_counted_files(image)
    named_files = [*counted_files, *_list_project_files(image)]
    digests = {path: hashlib.sha256(files.read_bytes(path)).hexdigest() for path in named_files}
    return Recipe(
        name=file.stem,
        description=document.description,
        image=image,
        system=document.system,
        file=file,
        sha256=_hash_recipe(file.stem, document, [digests[counted] for counted in counted_files]),
        positions=positions,
        sources={**problems.digests, **digests},
        warnings=tuple(problems.warnings),
    )


def _make_collector(file: Path) -> Collector:
    """Return a collector for the problems of the recipe `file` and of the files that it extends."""
    # A recipe of unknown origin can extend any file on this machine. Messages quote only files in these
    # folders, so that they cannot reveal a secret.
    folders = (file.parent, SHIPPED_FOLDER, system_files.site_folder())
    return Collector(visible_folders=tuple(folder.resolve() for folder in folders))


def _make_document(tree: Table, problems: Collector, file: Path, *, is_complete: bool) -> Document:
    """Check `tree`, a recipe that is already merged with its parents, and return its values.

    Parameters
    ----------
    problems : contains the problems found so far. New problems are added to it.
    file : the recipe that the user named. Its problems are listed first.
    is_complete : False if a parent recipe could not be read. A missing key is then no problem, because the
        parent may set it.

    Raises
    ------
    RecipeErrors : the recipe has problems, found here or earlier.
    """
    document = check(tree, problems, is_complete=is_complete)
    if document is not None:
        _check_document(document, tree, problems)
    if document is None or problems.errors:
        # The requested file comes first. Within each file, problems are sorted from top to bottom.
        errors = sorted(problems.errors, key=lambda error: (error.position.file != file, error.position))
        raise RecipeErrors(errors)
    return document


def _check_document(document: Document, tree: Table, problems: Collector) -> None:
    """Check the system and the base of a recipe with the rules that need the values of several keys.

    `tree` has the positions of the values in `document`.
    """
    # A plug-in is loaded only if the recipe names it.
    if systems.is_scheduler(document.system.scheduler):
        check_system(document.system, tree, problems)
    for index, issue in enumerate(document.system.known_issues):
        for key, (message, hint) in issue.faults():
            path: KeyPath = ("system", "known_issues", index, key)
            problems.error(tree.position_of(path), path, message, hint)
    # A driver that may be too old, for example, does not make the recipe unusable.
    for path, (message, hint) in bases.find_warnings(document.image, document.system):
        problems.warn(tree.position_of(path), path, message, hint)


_SHORT_FORMS: Mapping[KeyPath, str | int] = {("image", "platform"): 0, ("image", "constraints"): "policy"}
"""Key with a short form -> the key of the same value in the long form, below this key."""


def _list_positions(tree: Table) -> Mapping[KeyPath, Position]:
    """Return the file, line and column of every value in `tree`.

    A value can have a short form. For example, ``platform: arm64`` stands for the list ``[arm64]``. Later
    messages refer to the item of that list, so the item gets the position of the short form.
    """
    positions = {path: node.position for path, node in tree.walk()}
    for path, long_key in _SHORT_FORMS.items():
        long_path = (*path, long_key)
        # In the long form, the value has a position already.
        if path in positions and long_path not in positions:
            positions[long_path] = positions[path]
    return positions


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSystem:
    """A system that recipes can name."""

    name: str
    file: Path
    facts: SystemFacts
    proof: Proof


def load_system(name: str) -> KnownSystem:
    """Load a known system by its name, without a recipe that uses it.

    Raises
    ------
    RecipeErrors : the file of the system has problems. The error lists all of them.
    UsageError : there is no such system, or users other than the owner can write its file.
    """
    file = system_files.locate_system(name)
    problems = Collector(visible_folders=(SHIPPED_FOLDER.resolve(), file.parent.resolve()))
    system = _read_system(file, (), problems)
    values = system.values
    if values is None:
        raise RecipeErrors(problems.errors)
    # The checks expect a recipe.
    recipe = _add_placeholder_image(values)
    facts = _make_document(recipe, problems, file, is_complete=True).system
    return KnownSystem(name=name, file=file, facts=facts, proof=system.proof)


def _add_placeholder_image(system: Table) -> Table:
    """Return a recipe with the values of `system`, and with a base image that does not exist.

    The recipe is only checked, and its image is never built.
    """
    base = Scalar(position=system.position, text="scratch:none")
    recipe = _with_node(_empty_table(system.position), ("system",), system)
    return _with_node(recipe, ("image", "base"), base)


def _empty_table(position: Position) -> Table:
    return Table(position=position, entries={}, keys={})


def _with_node(table: Table, path: tuple[str, ...], node: YamlNode) -> Table:
    """Return a copy of `table` in which `path` leads to `node`. Missing mappings on the way are created.

    If `table` already has the first key of `path`, that key keeps its position. So a message about a value of
    ``--build-arg`` names the line of the value that it replaces.
    """
    key, *rest = path
    entry = node
    if rest:
        child = table.entries.get(key)
        if not isinstance(child, Table):
            child = _empty_table(node.position)
        entry = _with_node(child, tuple(rest), node)
    keys = {key: entry.position, **table.keys}  # the old position comes last, so it replaces the new one
    return Table(position=table.position, entries={**table.entries, key: entry}, keys=keys)


def _replace_args(tree: Table, build_args: Sequence[str]) -> Table:
    """Return `tree` with the values of the option ``--build-arg`` in ``image.args``.

    Each item of `build_args` is a text ``NAME=VALUE``. The values are replaced before the checks, so the
    checks cover them. A message about such a value names the line of the value that it replaces.

    Raises
    ------
    UsageError : an item has no ``=``, or the recipe does not declare the argument.
    """
    declared = _find_declared_args(tree)
    for argument in build_args:
        name, equals, value = argument.partition("=")
        if not equals:
            raise UsageError(f"{name!r} has no value", where="--build-arg", hint="write NAME=VALUE")
        if name not in declared:
            hint = f'declare it below image.args: {name}: "default"'
            if declared:
                hint = allowed_hint(name, declared)
            raise UsageError(f"the recipe has no argument {name!r}", where="--build-arg", hint=hint)
        new_value = Scalar(position=declared[name].position, text=value)
        tree = _with_node(tree, ("image", "args", name), new_value)
    return tree


def _find_declared_args(tree: Table) -> Mapping[str, YamlNode]:
    """Return the arguments below ``image.args`` with their default values. There may be none."""
    # `tree` is not checked yet, so `image.args` may be missing or of another type.
    for _, args in tree.select("image", "args"):
        if isinstance(args, Table):
            return args.entries
    return {}


def _make_absolute(value: Any, path: KeyPath, positions: Mapping[KeyPath, Position]) -> Any:
    """Return a value of a recipe with all file paths in it made absolute.

    A relative path starts at the folder of the file that contains it. This may be the file of a parent recipe
    in another folder, so `positions` is used to look it up. Lists and dataclasses are converted with
    everything in them.

    Parameters
    ----------
    value : a value from the checked recipe.
    path : the key of `value` in the recipe.
    positions : the position of every value that a file sets.
    """
    if isinstance(value, Path):
        # Every path comes from a file and has a position, because no key has a path as its default.
        # If the path is absolute, also after "~" is expanded, `/` drops the folder on its left.
        return positions[path].file.parent / value.expanduser()
    if isinstance(value, tuple):
        return tuple(_make_absolute(item, (*path, index), positions) for index, item in enumerate(value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    absolute_fields = {}
    # A field may be called differently in a recipe (`platform` for `platforms`), but no field with paths is.
    for field in dataclasses.fields(value):
        absolute_fields[field.name] = _make_absolute(
            getattr(value, field.name), (*path, field.name), positions
        )
    return dataclasses.replace(value, **absolute_fields)


def _list_counted_files(image: Image) -> list[Path]:
    """Return the files whose content is part of the sha256 of a recipe.

    These are certificates, requirements files, and the lock of a uv project. The code of projects is not part
    of it, because the digest of the build context covers that code.
    """
    counted_files = list(image.ca)
    counted_files += [step.requirements for step in image.pip if step.requirements is not None]
    if image.uv is not None:
        counted_files.append(image.uv.project / UV_LOCK)
    return counted_files


def _list_project_files(image: Image) -> list[Path]:
    """Return the pyproject.toml of each project that is installed."""
    projects = [step.project for step in image.pip if step.project is not None]
    if image.uv is not None:
        projects.append(image.uv.project)
    return [project / PYPROJECT for project in projects]


def _hash_recipe(name: str, document: Document, file_digests: Sequence[str]) -> str:
    """Return the sha256 of a recipe's name, its values, and the content of the files that it names.

    Parameters
    ----------
    document : the values of the recipe, with file paths as the author wrote them. Absolute paths would make
        the digest depend on the folder of the recipe.
    file_digests : the sha256 of each file whose content counts, in a fixed order.
    """
    content = {"name": name, **dataclasses.asdict(document)}
    # Only a build with --base current uses this key, and such a build records the base itself. For any other
    # build the key makes no difference.
    del content["image"]["current_base"]
    # Sorted, so that the order of keys in a file makes no difference.
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
    for file_digest in file_digests:
        digest.update(bytes.fromhex(file_digest))
    return digest.hexdigest()


def locate_recipe(ref: str, folder: Path) -> Path:
    """Return the absolute path of the recipe `ref`, which is the name of a shipped recipe or a path.

    A relative path starts at `folder`.

    Raises
    ------
    UsageError : there is no such recipe or file.
    """
    try:
        if not is_path(ref):
            return _locate_shipped(ref)
        file = (folder / ref).absolute()
        if file.is_dir():
            raise _folder_error(ref, file)
        if not file.exists():
            raise _missing_file_error(ref, file)
        return file
    except (OSError, ValueError) as error:  # a name too long, a NUL byte, no permission
        raise UsageError(f"{ref!r} is not a recipe: {error_reason(error)}") from error


def _folder_error(ref: str, folder: Path) -> UsageError:
    """Return the error for `ref`, the path of a folder. The hint lists the recipes in the folder."""
    names = sorted(str(shorten_path(path)) for path in folder.glob("*.y*ml"))
    hint = f"it contains: {', '.join(names)}" if names else "name a .yaml file"
    return UsageError(f"{ref} is a folder, not a recipe", hint=hint)


def _missing_file_error(ref: str, file: Path) -> UsageError:
    """Return the error for the path of a recipe that does not exist.

    The hint suggests a file in the same folder, or a shipped recipe, with a similar name.

    Parameters
    ----------
    ref : the path as the user wrote it.
    file : the absolute path.
    """
    siblings = {path.stem: path.name for path in file.parent.glob("*.y*ml")}
    # Prefer a file in the same folder, since the user wrote a path and not the name of a shipped recipe.
    sibling = siblings.get(nearest_name(file.stem, siblings), "")
    nearest = sibling or nearest_name(file.stem, recipe_names())
    hint = "to see the shipped recipes: imgkit list"
    if nearest:
        hint = f"did you mean {nearest}?"
    return UsageError(f"there is no file {ref}", hint=hint)


def _locate_shipped(name: str) -> Path:
    """Return the file of the shipped recipe `name`, or of the known system with that name.

    A system without a recipe can be used like a recipe. Its base is the newest image that its nodes can run.

    Raises
    ------
    UsageError : there is neither a recipe nor a system with that name.
    """
    if not name:
        raise UsageError("the recipe's name is empty", hint=allowed_hint("", recipe_names()))
    if name in recipe_names():
        return recipe_path(name)
    if name in system_files.find_systems():
        return system_files.locate_system(name)
    if name.endswith((".sif", ".sqsh")):
        hint = "name its folder, or make it: imgkit sif RECIPE"
        raise UsageError(f"there is no file {name} here", hint=hint)
    hint = allowed_hint(name, recipe_names())
    if Path(f"{name}.yaml").is_file():
        hint += f"; for the file {name}.yaml write ./{name}.yaml"
    raise UsageError(f"there is no recipe {name!r}", hint=hint)


class _MergedRecipe(NamedTuple):
    """A recipe merged with the recipes that it extends."""

    tree: Table | None
    """None if the recipe's own file cannot be read."""
    is_complete: bool
    """Whether every file could be read. If not, keys may be missing."""


def _read_with_parents(file: Path, problems: Collector, extended_by: Sequence[Path] = ()) -> _MergedRecipe:
    """Read the recipe `file` and the recipes that it extends, and merge them.

    A recipe extends another one (its parent) by the key ``extends``. A value of the child replaces or extends
    the value of the parent, as described in `merge`.

    Parameters
    ----------
    problems : receives the problems of all files.
    extended_by : the resolved paths of the recipes that extend `file`. They are needed to detect a circle.
    """
    tree = read_yaml(file, problems)
    if tree is None:
        return _MergedRecipe(None, is_complete=False)
    # If `file` describes a known system, make a recipe of it. The recipe gets the newest base that the nodes
    # can run.
    if not {"image", "system"} & set(tree.entries) and file in system_files.find_systems().values():
        return _MergedRecipe(_make_recipe_of_system(file, problems), is_complete=True)
    _refuse_system_file(tree, problems)
    child = tree.without("extends")
    is_complete = True
    named_system = _find_named_system(tree)
    if named_system is not None:
        system = _read_named_system(named_system, ("system",), (), problems)
        is_complete = system is not None
        child = _with_node(child, ("system",), system) if system else child.without("system")
    if "extends" not in tree.entries:
        return _MergedRecipe(child, is_complete)
    chain = (*extended_by, file.resolve())
    parent, is_parent_complete = _read_parent(tree.entries["extends"], chain, problems)
    if parent is None:
        return _MergedRecipe(child, is_complete=False)
    if named_system is not None:
        # The named system replaces the parent's system as a whole. Merging the two would mix the values of
        # two machines.
        parent = parent.without("system")
    return _MergedRecipe(merge_tables(parent, child, ()), is_complete and is_parent_complete)


def _read_parent(ref: YamlNode, chain: Sequence[Path], problems: Collector) -> _MergedRecipe:
    """Read the recipe that the key ``extends`` names, merged with the recipes that it extends itself.

    `ref` is the value of the key, and `chain` has the resolved paths of the recipes that lead to it.
    """
    file = _locate_named(ref, ("extends",), chain, problems, "recipe")
    if file is None:
        return _MergedRecipe(None, is_complete=False)
    return _read_with_parents(file, problems, chain)


def _make_recipe_of_system(file: Path, problems: Collector) -> Table:
    """Return a recipe for the system in `file`, which has no recipe of its own.

    The base is the newest image of NVIDIA's PyTorch that runs with the driver of the system's nodes. A
    warning tells the user which image was chosen.

    Raises
    ------
    RecipeErrors : the file has problems.
    UsageError : the file does not name the driver, so no base can be chosen. The hint shows the recipe to
        write.
    """
    name = file.stem
    facts = load_system(name).facts  # raises an error if the file has problems
    base = bases.newest_base(facts)
    if base is None:
        raise _unknown_driver_error(name)
    start_of_file = Position(file=file, line=1, column=1)
    message = f"{name} has no recipe: the base is {base.reference}, the newest that its nodes run"
    hint = f"for another: `image: {{base: NAME:TAG}}` and `system: {name}` in a file"
    problems.warn(start_of_file, ("image", "base"), message, hint)
    # Each value needs a position for messages.
    base_node = Scalar(position=start_of_file, text=base.reference)
    platform_node = Scalar(position=start_of_file, text=bases.node_platform(facts))
    recipe = _with_node(_empty_table(start_of_file), ("image", "base"), base_node)
    recipe = _with_node(recipe, ("image", "platform"), platform_node)
    # Read the file again, because `facts` have no positions.
    system = _read_system(file, (), problems).values
    if system is None:  # the file has been damaged in the meantime
        return recipe
    return _with_node(recipe, ("system",), system)


def _unknown_driver_error(name: str) -> UsageError:
    """Return the error for a system that has no recipe and whose driver is unknown."""
    newest = [base for base in bases.load_table() if base.driver][-1]
    hint = (
        f"write {name}.yaml with two lines, `image: {{base: {newest.reference}}}` and `system: {name}`, "
        f"and use ./{name}.yaml. That base needs driver {newest.driver}; "
        "to see older ones: imgkit list --bases"
    )
    return UsageError(f"{name} is a system without a recipe, and its driver is not known", hint=hint)


def _refuse_system_file(tree: Table, problems: Collector) -> None:
    """Raise RecipeErrors if `tree`, which should be a recipe, describes a system.

    In a system's file, keys such as ``scheduler`` are at the top level. In a recipe, they are below
    ``system``. Without this check, every such key would be reported as unknown.
    """
    # `env` does not identify a system. In a recipe, it may be a key of `image` that was written at the wrong
    # level.
    system_keys = {field.name for field in dataclasses.fields(SystemFacts)} - {"env"}
    keys = set(tree.entries)
    if not keys & {"image", "system"} and keys & system_keys:
        hint = f"a recipe names it: `image: {{base: NAME:TAG}}` and `system: ./{tree.position.file.name}`"
        problems.error(tree.position, (), "it describes a system, not a recipe", hint)
        raise RecipeErrors(problems.errors)


class _NamedSystem(NamedTuple):
    """A reference to a system, in a recipe or in the file of another system."""

    ref: YamlNode
    """The value of the key that names the system."""
    changes: Table
    """Values that replace values of the system."""


def _find_named_system(tree: Table) -> _NamedSystem | None:
    """Return the name of the system that a recipe refers to, and the keys that change some of its values.

    A recipe refers to a system by ``system: NAME``, or by ``system: {extends: NAME}`` with keys that change
    its values. If the recipe does neither, return None.
    """
    system = tree.entries.get("system")
    if isinstance(system, Table):
        if "extends" not in system.entries:
            return None
        return _NamedSystem(system.entries["extends"], system.without("extends"))
    # `system:` without a value is reported by the check of empty values.
    if system is None or (isinstance(system, Scalar) and system.type == "nothing"):
        return None
    return _NamedSystem(system, _empty_table(system.position))


def _read_named_system(
    named_system: _NamedSystem, path: KeyPath, chain: Sequence[Path], problems: Collector
) -> Table | None:
    """Return the values of the system that `named_system` refers to, with its changes.

    After a problem, report it and return None.

    Parameters
    ----------
    path : the key that names the system, for messages.
    chain : the resolved paths of the files that extend each other so far. The system's file must not be one
        of them.
    """
    file = _locate_named(named_system.ref, path, chain, problems, "system")
    if file is None:
        return None
    values = _read_system(file, chain, problems).values
    if values is None:
        return None
    return merge_tables(values, named_system.changes, ("system",))


# The longest chain of files that extend each other. It is far below Python's recursion limit.
_MOST_PARENTS = 50
_NAME_HINTS = {
    "recipe": "the parent can extend a further recipe",
    "system": "write system: NAME, or keys below it; imgkit list --systems shows the names",
}


def _locate_named(
    ref: YamlNode, path: KeyPath, chain: Sequence[Path], problems: Collector, noun: str
) -> Path | None:
    """Return the file that a key such as ``extends: NAME`` refers to.

    After a problem, report it and return None.

    Parameters
    ----------
    ref : the value of the key. It is a name, or a path relative to the folder of the file that contains the
        key.
    path : the key, for messages.
    chain : the resolved paths of the files that extend each other so far. The new file must not be one of
        them.
    problems : receives the problem.
    noun : the kind of file that `ref` refers to, ``recipe`` or ``system``.
    """
    if not isinstance(ref, Scalar) or ref.type != "text":
        message = f"must be the name or path of one {noun}, not {describe_kind(ref)}"
        problems.error(ref.position, path, message, _NAME_HINTS[noun])
        return None
    source = ref.position.file
    try:
        if noun == "recipe":
            file = locate_recipe(ref.text, source.parent)
        else:
            file = system_files.locate_system(ref.text, source)
    except UsageError as error:
        may_show_hint = not is_path(ref.text) or problems.may_show(source.parent / ref.text)
        # The hint lists the files of that folder. A recipe of unknown origin must not be able to reveal their
        # names.
        hint = error.hint if may_show_hint else ""
        message = f"{error.where}: {error.what}" if error.where else error.what
        problems.error(ref.position, path, message, hint or "")
        return None
    fault = _find_chain_fault(file, chain)
    if fault is not None:
        problems.error(ref.position, path, *fault)
        return None
    return file


def _find_chain_fault(file: Path, chain: Sequence[Path]) -> Fault | None:
    """Return why the last file of `chain` cannot extend `file`, or None if it can.

    `chain` has the resolved paths of files that extend each other.
    """
    # Symbolic links are resolved, because a link to a file of the chain also closes a circle.
    resolved = file.resolve()
    if resolved in chain:
        cycle = (*chain[chain.index(resolved) :], resolved)
        names = " -> ".join(member.name for member in cycle)
        return f"is circular: {names}", "remove one `extends`"
    if len(chain) > _MOST_PARENTS:
        return f"more than {_MOST_PARENTS} files extend each other", "merge some"
    return None


class _SystemFile(NamedTuple):
    """The content of a file that describes a system."""

    values: Table | None
    """None if there was a problem."""
    proof: Proof = Proof()


def _read_system(file: Path, extended_by: Sequence[Path], problems: Collector) -> _SystemFile:
    """Read the file of a system (the facts about a cluster), and merge it with the system that it extends.

    A value that `file` does not set comes from the system named by its key ``extends``. Problems are
    reported, and the result then has no values. Its proof describes how the values of `file` were tested.

    Parameters
    ----------
    extended_by : the resolved paths of the files that extend `file`. They are needed to detect a circle.
    """
    tree = read_yaml(file, problems)
    if tree is None:
        return _SystemFile(values=None)
    if _report_recipe_key(tree, problems):
        return _SystemFile(values=None)
    proof = Proof()
    if "proof" in tree.entries:
        proof = _read_proof(tree.entries["proof"], problems)
    # `proof` is removed, so that it is never merged: a test of the parent proves nothing about this system.
    values = tree.without("proof", "extends")
    if "extends" not in tree.entries:
        return _SystemFile(values, proof)
    # This calls `_read_system` for the parent. The result is None if the parent has problems.
    chain = (*extended_by, file.resolve())
    parent = _NamedSystem(tree.entries["extends"], changes=values)
    merged = _read_named_system(parent, ("extends",), chain, problems)
    return _SystemFile(merged, proof)


def _report_recipe_key(tree: Table, problems: Collector) -> bool:
    """Report the key ``image`` or ``system`` in the file of a system, and return whether there is one.

    A system cannot have an image. Packages in it would change the image of every recipe that uses the system.
    """
    for key in ("image", "system"):
        if key in tree.entries:
            hint = "write its keys without `system:` above them"
            problems.error(tree.keys[key], (), "a system has no image", hint)
            return True
    return False


def _read_proof(node: YamlNode, problems: Collector) -> Proof:
    """Return the value `node` of the key ``proof``, which describes how the values of a system were tested.

    If the value cannot be used, report it and return an empty `Proof`.
    """
    proof, _ = validate(Proof, to_data(node))
    if proof is None:
        hint = "write one line of text for documented, rendered, simulated or run"
        message = "does not say how the values were tested"
        problems.error(node.position, ("proof",), message, hint)
        return Proof()
    return proof


def merge(parent: YamlNode, child: YamlNode, path: KeyPath) -> YamlNode:
    """Return the merged value of the key `path`, which both a recipe and its parent set.

    Mappings are merged key by key, except those in `ATOMIC`. The lists in `APPENDED` are appended to the
    parent's list. Any other value of `child` replaces the value of `parent`.
    """
    if isinstance(parent, Table) and isinstance(child, Table) and path not in ATOMIC:
        return merge_tables(parent, child, path)
    if isinstance(parent, Items) and isinstance(child, Items) and path in APPENDED:
        return Items(position=child.position, items=(*parent.items, *child.items))
    return child


def merge_tables(parent: Table, child: Table, path: KeyPath) -> Table:
    """Merge the mappings of a parent recipe and its child at the key `path`.

    If both have a key, `merge` decides: it merges mappings, appends to some lists, and otherwise takes the
    value of the child.
    """
    entries = dict(parent.entries)
    for key, node in child.entries.items():
        if key in entries:
            entries[key] = merge(entries[key], node, (*path, key))
        else:
            entries[key] = node
    return Table(position=child.position, entries=entries, keys={**parent.keys, **child.keys})
