"""The difference of two trees: laid over the old one it shows the new one, for any layers."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imgkit_builder.delta import tree
from imgkit_builder.delta.tree import Stack, TreeEntry


@dataclass(frozen=True)
class Item:
    """What a layer holds at a path."""

    kind: str
    content: int = 0
    opaque: bool = False
    group: int | None = None


class Fake:
    """A layer in memory."""

    def __init__(self, items: Mapping[str, Item], contents: Mapping[str, bytes] | None = None) -> None:
        self.entries: dict[str, TreeEntry] = {}
        for path, item in items.items():
            self.entries[path] = TreeEntry(
                layer=self,
                kind=item.kind,  # type: ignore[arg-type]
                mode=0o755,
                size_bytes=1 if item.kind == "file" else 0,
                link=str(item.content) if item.kind == "symlink" else "",
                opaque=item.opaque,
                group=item.group if item.kind == "file" else None,
                place=item.content if item.group is None else item.group,
            )

    def children(self, path: str) -> dict[str, TreeEntry]:
        return {
            posixpath.basename(name): entry
            for name, entry in self.entries.items()
            if posixpath.dirname(name) == path
        }

    def content(self, entry: TreeEntry) -> Iterator[bytes]:
        yield bytes([int(entry.place)])

    def names(self, group: int) -> list[str]:
        return [path for path, entry in self.entries.items() if entry.group == group]


class Laid(Fake):
    """The difference as the layer that a delta is: no opaque folder in it."""

    def __init__(self, changes: tree.Changes) -> None:
        self._of = {path: entry for path, entry in changes.items() if entry is not None}
        super().__init__({})
        for path, entry in changes.items():
            if entry is None:
                self.entries[path] = TreeEntry(layer=self, kind="whiteout")
            else:
                group = None if entry.group is None else hash((id(entry.layer), entry.group))
                self.entries[path] = TreeEntry(
                    layer=self, kind=entry.kind, mode=entry.mode, size_bytes=entry.size_bytes,
                    link=entry.link, group=group, place=path,
                )  # fmt: skip

    def content(self, entry: TreeEntry) -> Iterator[bytes]:
        known = self._of[str(entry.place)]
        yield from known.layer.content(known)


def shown(stack: Stack) -> dict[str, Any]:
    """Everything about every path, with the names of files that have several."""
    entries = dict(tree.everything(stack))
    names: dict[object, list[str]] = {}
    for path, entry in entries.items():
        if entry.group is not None:
            names.setdefault((id(entry.layer), entry.group), []).append(path)
    return {
        path: (
            entry.kind,
            entry.link,
            tree.digest(entry) if entry.kind == "file" else b"",
            tuple(names.get((id(entry.layer), entry.group), [path])),
        )
        for path, entry in entries.items()
    }


def reference(layers: Sequence[Mapping[str, Item]]) -> dict[str, str]:
    """The same tree by doing what each layer says, lowest first."""
    found: dict[str, str] = {}

    def clear(path: str, *, itself: bool) -> None:
        for name in [name for name in found if name.startswith(f"{path}/") or (itself and name == path)]:
            del found[name]

    for items in layers:
        for path, item in items.items():
            if item.kind == "whiteout":
                clear(path, itself=True)
            elif item.kind != "dir" or found.get(path, "dir") != "dir":
                clear(path, itself=True)
                found[path] = item.kind
            else:
                if item.opaque:
                    clear(path, itself=False)
                found[path] = "dir"
    return found


NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
ITEMS = st.one_of(
    st.builds(Item, kind=st.just("file"), content=st.integers(0, 2)),
    st.builds(Item, kind=st.just("file"), group=st.integers(0, 1)),
    st.builds(Item, kind=st.sampled_from(["dir", "whiteout"])),
    st.builds(Item, kind=st.just("dir"), opaque=st.booleans()),
    st.builds(Item, kind=st.just("symlink"), content=st.integers(0, 1)),
)


def consistent(edits: Sequence[tuple[str, Item]]) -> dict[str, Item]:
    """A layer in which whatever has something below it is a folder; parents come first."""
    found: dict[str, Item] = {}
    for path, item in edits:
        parts = path.split("/")
        above = ["/".join(parts[:count]) for count in range(1, len(parts))]
        if any(found.get(name, Item("dir")).kind != "dir" for name in above):
            continue
        if item.kind != "dir" and any(name.startswith(f"{path}/") for name in found):
            continue
        for name in above:
            found.setdefault(name, Item("dir"))
        found[path] = item
    return dict(sorted(found.items()))


LAYERS = st.lists(st.lists(st.tuples(PATHS, ITEMS), max_size=8).map(consistent), max_size=3)


@settings(max_examples=150, deadline=None)
@given(layers=LAYERS)
def test_layers_show_what_one_after_the_other_makes(layers: list[dict[str, Item]]) -> None:
    stack = tuple(Fake(items) for items in reversed(layers))
    assert {path: kind for path, (kind, *_) in shown(stack).items()} == reference(layers)


@settings(max_examples=300, deadline=None)
@given(common=LAYERS, above=LAYERS, instead=LAYERS)
def test_difference_over_the_old_shows_the_new(
    common: list[dict[str, Item]], above: list[dict[str, Item]], instead: list[dict[str, Item]]
) -> None:
    below = tuple(Fake(items) for items in reversed(common))
    old = (*(Fake(items) for items in reversed(above)), *below)
    new = (*(Fake(items) for items in reversed(instead)), *below)
    delta = Laid(tree.changes(old, new))
    assert shown((delta, *old)) == shown(new)
    for path, entry in delta.entries.items():
        if entry.kind == "whiteout":
            assert tree.find(old, path) is not None, "a whiteout of nothing"


def test_equal_layer_again_is_no_difference() -> None:
    items = {"a": Item("dir"), "a/b": Item("file", 1), "l": Item("symlink", 1)}
    below = Fake({"x": Item("file", 2)})
    assert tree.changes((Fake(items), below), (Fake(items), below)) == {}


def test_replaced_folder_by_whiteouts_of_each_entry() -> None:
    old = (
        Fake({"d": Item("dir"), "d/keep": Item("file", 1), "d/gone": Item("dir"), "d/gone/x": Item("file")}),
    )
    new = (Fake({"d": Item("dir", opaque=True), "d/keep": Item("file", 1), "d/new": Item("file", 2)}), *old)
    found = tree.changes(old, new)
    assert list(found) == ["d", "d/gone", "d/new"]
    assert found["d/gone"] is None


def test_names_of_one_file_travel_together() -> None:
    below = Fake({"a": Item("file", group=1), "b": Item("file", group=1), "c": Item("file", 2)})
    old = (Fake({"b": Item("file", 7)}), below)
    assert list(tree.changes(old, (below,))) == ["a", "b"]


def test_what_the_runtime_adds_is_left_alone() -> None:
    old, new = (Fake({".singularity.d": Item("dir"), "a": Item("file")}),), (Fake({"a": Item("file", 1)}),)
    assert list(tree.changes(old, new, skip={".singularity.d"})) == ["a"]


@pytest.mark.parametrize("path", ["no", "a/no", "a/b/no"])
def test_nothing_found_where_nothing_is(path: str) -> None:
    stack = (Fake({"a": Item("dir"), "a/b": Item("file")}),)
    assert tree.find(stack, path) is None


def test_linked_or_not_is_a_difference() -> None:
    apart = (Fake({"a": Item("file", 1), "b": Item("file", 1)}),)
    linked = (Fake({"a": Item("file", group=1), "b": Item("file", group=1)}),)
    assert list(tree.changes(apart, linked)) == ["a", "b"]
    assert list(tree.changes(linked, apart)) == ["a", "b"]
    assert tree.changes(linked, (Fake({"a": Item("file", group=1), "b": Item("file", group=1)}),)) == {}
