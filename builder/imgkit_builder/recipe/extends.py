"""``extends``: reads a recipe and all its parents, then merges them from the first parent on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.recipe.problems import Collector, KeyPath, choices, nearest, shown
from imgkit_builder.recipe.yaml_tree import Items, Scalar, Table, TableEntry, YamlNode, kind, parse
from imgkit_entrypoints.errors import UsageError
from imgkit_recipes import recipe_names, recipe_path

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
        raise UsageError(f"{ref!r} is not a recipe: {error}") from error


def _shipped(name: str) -> Path:
    if name in recipe_names():
        return recipe_path(name)
    if not name:
        raise UsageError("the recipe's name is empty", hint=choices("", recipe_names()))
    beside = f"; for the file {name}.yaml write ./{name}.yaml" if Path(f"{name}.yaml").is_file() else ""
    raise UsageError(f"there is no recipe {name!r}", hint=choices(name, recipe_names()) + beside)


def resolve(file: Path, found: Collector) -> Resolved:
    """Read `file` and what it extends, and merge them; problems go to `found`."""
    chain: list[Table] = []
    files = [file.resolve()]
    whole = True
    current: Path | None = file
    while current is not None:
        tree = parse(current, found)
        if tree is None:
            whole = False
            break
        parent = tree.entries.get("extends")
        chain.append(_without(tree, "extends"))
        if parent is None:
            break
        current = _parent(parent.value, current.parent, files, found)
        whole = current is not None
    if not chain:
        return Resolved(tree=None, whole=False)
    merged = chain.pop()
    while chain:
        merged = _merge_tables(merged, chain.pop(), ())
    return Resolved(tree=merged, whole=whole)


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
    seen = file.resolve()
    if seen in files:
        cycle = " -> ".join(step.name for step in (*files[files.index(seen) :], seen))
        found.error(ref.position, path, f"is circular: {cycle}", "remove one `extends`")
        return None
    files.append(seen)
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
