"""Build secrets in a recipe: their declarations, and the steps that name them."""

from __future__ import annotations

from collections.abc import Iterator

from imgkit_builder.recipe.problems import Collector, KeyPath, choices
from imgkit_builder.recipe.yaml_tree import Items, Scalar, Table, YamlNode, children, deepest


def check(tree: Table, found: Collector) -> None:
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
