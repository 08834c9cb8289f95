"""Combine layers into the visible tree, and find the difference of two such trees. Pure: writes nothing.

An image's tree is its layers laid over each other; so is that of a .sif with deltas. A delta holds the
difference of the two, entry by entry, with a whiteout for every deleted entry. It has no opaque folders: the
kernel ignores that mark when an ordinary user mounts (docs/delta.md).

Both trees usually share their lower layers as the same objects. A folder to which the same layers contribute
on both sides is equal on both sides, so imgkit does not read it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from imgkit_builder.archive.tar_read import CAPABILITY
from imgkit_entrypoints.errors import CheckFailed

DEEPEST = 400
"""Folders within each other that a reader takes: Python's recursion ends at 1000, and no image is as deep."""

Kind = Literal["file", "dir", "symlink", "char", "block", "fifo", "whiteout"]


class Layer(Protocol):
    """A tree that lies over others; paths are relative, the root is the empty text."""

    def children(self, path: str) -> Mapping[str, TreeEntry]:
        """Entries of this layer in its folder `path`, by name; whiteouts are entries too."""
        ...

    def content(self, entry: TreeEntry) -> Iterator[bytes]:
        """The bytes of a file of this layer."""
        ...

    def names(self, group: int) -> Collection[str]:
        """All paths in this layer that are hard links of the file `group`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeEntry:
    """One name in one layer; equal only to itself."""

    layer: Layer
    kind: Kind
    mode: int = 0
    """Permission bits."""
    uid: int = 0
    gid: int = 0
    mtime_s: int = 0
    size_bytes: int = 0
    """Size of a file; 0 for other kinds."""
    link: str = ""
    """Target of a symlink."""
    device: tuple[int, int] = (0, 0)
    """Major and minor number."""
    xattrs: Mapping[str, bytes] = field(default_factory=dict)
    opaque: bool = False
    """The folder hides those below it and does not add to them."""
    implied: bool = False
    """The folder has no entry of its own: layers below set mode and owner."""
    group: int | None = None
    """Number of a file with several names within its layer."""
    place: int | str = 0
    """Place at which its layer finds the content."""


@dataclass(frozen=True, slots=True)
class Node:
    """A visible entry, and for a folder the layers that contribute to it, the uppermost first."""

    entry: TreeEntry
    layers: tuple[Layer, ...] = ()


Stack = tuple[Layer, ...]
"""Layers, the uppermost first."""

Changes = dict[str, TreeEntry | None]
"""Path to the entry of a delta, None for a whiteout; a folder comes before its content."""


def children(layers: Stack, path: str) -> dict[str, Node]:
    """Visible entries of the folder `path`, to which `layers` contribute."""
    tops: dict[str, TreeEntry] = {}
    implied: dict[str, TreeEntry] = {}
    below: dict[str, list[Layer]] = {}
    closed: set[str] = set()
    for layer in layers:
        for name, entry in layer.children(path).items():
            if name in closed:
                continue
            if entry.kind == "dir":
                (implied if entry.implied else tops).setdefault(name, entry)
                below.setdefault(name, []).append(layer)
                if entry.opaque:
                    closed.add(name)
                continue
            closed.add(name)
            # A file or whiteout below a folder only ends the list of its layers.
            if name not in below and entry.kind != "whiteout":
                tops[name] = entry
    shown = {**implied, **tops}
    return {name: Node(entry, tuple(below.get(name, ()))) for name, entry in shown.items()}


def find(stack: Stack, path: str) -> Node | None:
    """The visible entry at `path`; None if there is none."""
    layers, above, node = stack, "", None
    for name in path.split("/"):
        node = children(layers, above).get(name)
        if node is None:
            return None
        layers, above = node.layers, join(above, name)
    return node


def content(stack: Stack, path: str, most_bytes: int = 1 << 20) -> bytes | None:
    """The bytes of the file at `path`, read without running anything; None if there is no file.

    Raises
    ------
    CheckFailed : it is larger than `most_bytes`.
    """
    node = find(stack, path.lstrip("/"))
    if node is None or node.entry.kind != "file":
        return None
    if node.entry.size_bytes > most_bytes:
        raise CheckFailed(
            f"/{path.lstrip('/')} has {node.entry.size_bytes} bytes, at most {most_bytes} are usual"
        )
    return b"".join(node.entry.layer.content(node.entry))


def join(folder: str, name: str) -> str:
    """Path of `name` in `folder`."""
    return f"{folder}/{name}" if folder else name


def changes(old: Stack, new: Stack, *, skip: Collection[str] = ()) -> Changes:
    """Entries that must lie over `old` to show `new`; paths in `skip` stay unchanged."""
    found = dict(_changes(old, new, "", _Links(old), _Links(new), frozenset(skip)))
    for entry in tuple(found.values()):
        if entry is not None and entry.group is not None:
            # Hard links stay hard links only within one layer.
            for name in _Links(new).of(entry) - found.keys():
                _add(found, new, name)
    return {path: found[path] for path in sorted(found, key=order)}


def everything(stack: Stack, path: str = "") -> Iterator[tuple[str, TreeEntry]]:
    """Every visible entry of `stack` below the folder `path`."""
    for name, node in _sorted(children(stack, path)):
        inside = join(path, name)
        yield inside, node.entry
        if node.entry.kind == "dir":
            yield from everything(node.layers, inside)


def order(path: str) -> list[bytes]:
    """Sort key that puts a folder before its content, in any locale."""
    return [os.fsencode(part) for part in path.split("/")]


class _Links:
    """The visible names of files with several names."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def of(self, entry: TreeEntry) -> frozenset[str]:
        if entry.group is None:
            return frozenset()
        names = (name for name in entry.layer.names(entry.group) if self._shows(name, entry))
        return frozenset(names)

    def _shows(self, name: str, entry: TreeEntry) -> bool:
        node = find(self._stack, name)
        return node is not None and (node.entry.layer, node.entry.group) == (entry.layer, entry.group)


def _changes(
    old: Stack, new: Stack, path: str, was: _Links, now: _Links, skip: frozenset[str]
) -> Iterator[tuple[str, TreeEntry | None]]:
    if old == new:
        return
    before, after = children(old, path), children(new, path)
    for name, _ in _sorted({**before, **after}):
        one, other, inside = before.get(name), after.get(name), join(path, name)
        if inside in skip:
            continue
        if other is None:
            yield inside, None
        elif other.entry.kind == "dir":
            lower = one.layers if one and one.entry.kind == "dir" else ()
            within = list(_changes(lower, other.layers, inside, was, now, skip))
            if within or one is None or differ(one.entry, other.entry):
                yield inside, other.entry
                yield from within
        elif one is None or differ(one.entry, other.entry) or _relinked(one.entry, other.entry, was, now):
            yield inside, other.entry


def _sorted(nodes: Mapping[str, Node]) -> list[tuple[str, Node]]:
    return sorted(nodes.items(), key=lambda item: os.fsencode(item[0]))


def _relinked(one: TreeEntry, other: TreeEntry, was: _Links, now: _Links) -> bool:
    if one is other or (one.group is None and other.group is None):
        return False
    return (len(was.of(one)) > 1 or len(now.of(other)) > 1) and was.of(one) != now.of(other)


def differ(one: TreeEntry, other: TreeEntry) -> bool:
    """Whether two entries of one name are different: in kind, owner, rights, time of a file, or content.

    Of extended attributes a capability counts: a squashfs of imgkit has no other.
    """
    if one is other:
        return False
    if _about(one) != _about(other):
        return True
    return one.kind == "file" and (one.size_bytes != other.size_bytes or digest(one) != digest(other))


def _about(entry: TreeEntry) -> tuple[object, ...]:
    # Engines and runtimes change the times of folders when they create mount points in them.
    time = entry.mtime_s if entry.kind == "file" else 0
    owner, capability = (entry.uid, entry.gid), entry.xattrs.get(CAPABILITY)
    return entry.kind, entry.mode, owner, capability, time, entry.link, entry.device


def digest(entry: TreeEntry) -> bytes:
    """sha256 of a file's content."""
    found = hashlib.sha256()
    for chunk in entry.layer.content(entry):
        found.update(chunk)
    return found.digest()


def _add(found: Changes, stack: Stack, path: str) -> None:
    """Put the entry at `path` and the folders above it into `found`."""
    parts = path.split("/")
    for count in range(1, len(parts) + 1):
        name = "/".join(parts[:count])
        if name not in found and (node := find(stack, name)):
            found[name] = node.entry
