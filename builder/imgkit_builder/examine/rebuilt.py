"""Compare a .sif with another one that was built from its lock, and name the steps that make a difference."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive import read
from imgkit_builder.base.progress import Reporter
from imgkit_builder.delta import source, tree
from imgkit_builder.delta.tree import TreeEntry
from imgkit_builder.engine.following import instruction_lines
from imgkit_builder.sif import coverage, image
from imgkit_builder.sif.image import DataType

_LAYERS = ("RUN", "COPY", "WORKDIR")
"""Instructions of a rendered Dockerfile that make a layer; the last one only where the folder is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentEntry:
    """A file, folder or link that two images do not have alike."""

    path: str
    what: str
    layer: int = 0
    """Number of the new image's layer that has it, from 1; 0 where none does, or nobody knows."""
    origin: str = ""
    """Line of the recipe that made the layer; empty for a layer of the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltSif:
    """What the comparison of a .sif with a newly built one says."""

    equal: bool
    """Whether the files have one sha256, apart from a signature."""
    had_sha256: str
    rebuilt_sha256: str
    different: tuple[DifferentEntry, ...]
    """The first entries that differ, by their names."""
    more: int
    """Number of those that are not listed."""


def compare(had: Path, made: Path, report: Reporter, *, most: int = 20) -> RebuiltSif:
    """Compare the .sif `had` with `made`; entry by entry where their bytes differ.

    Raises
    ------
    CheckFailed : one of them is damaged or no .sif.
    ToolMissing : this machine cannot unpack its compression.
    """
    sums = read.sha256(had, report=report), read.sha256(made, report=report)
    if sums[0] == sums[1] or _covered_alike(had, made):
        return RebuiltSif(equal=True, had_sha256=sums[0], rebuilt_sha256=sums[1], different=(), more=0)
    found = list(differences(source.mounted(image.read(had)), source.mounted(image.read(made))))
    return RebuiltSif(
        equal=False,
        had_sha256=sums[0],
        rebuilt_sha256=sums[1],
        different=tuple(DifferentEntry(path=path, what=what) for path, what in found[:most]),
        more=max(len(found) - most, 0),
    )


def _covered_alike(had: Path, made: Path) -> bool:
    """Whether only signatures differ: then the digests of all other bytes do not."""
    signed = any(one.datatype == DataType.SIGNATURE for one in image.read(had).descriptors)
    covered = coverage.data_of(had)
    return signed and covered is not None and covered == coverage.data_of(made)


def differences(had: tree.Stack, made: tree.Stack, path: str = "") -> Iterator[tuple[str, str]]:
    """Each path below `path` that differs between two trees, in order, and what is different."""
    before, after = tree.children(had, path), tree.children(made, path)
    for name in sorted(before.keys() | after.keys(), key=os.fsencode):
        one, other, inside = before.get(name), after.get(name), tree.join(path, name)
        if one is None or other is None:
            yield inside, "only in the new file" if one is None else "only in the old file"
            continue
        if what := ", ".join(_different(one.entry, other.entry)):
            yield inside, what
        if one.entry.kind == other.entry.kind == "dir":
            yield from differences(one.layers, other.layers, inside)


def _different(one: TreeEntry, other: TreeEntry) -> Iterator[str]:
    if one.kind != other.kind:
        yield f"a {other.kind}, was a {one.kind}"
        return
    if one.kind == "file" and tree.digest(one) != tree.digest(other):
        yield f"content ({other.size_bytes} bytes, were {one.size_bytes})"
    if one.mode != other.mode:
        yield f"mode {other.mode:o}, was {one.mode:o}"
    if (one.uid, one.gid) != (other.uid, other.gid):
        yield f"owner {other.uid}:{other.gid}, was {one.uid}:{one.gid}"
    if one.mtime_s != other.mtime_s:
        yield f"time {other.mtime_s}, was {one.mtime_s}"
    if (one.link, one.device) != (other.link, other.device):
        yield "target"
    if dict(one.xattrs) != dict(other.xattrs):
        yield "extended attributes"


def origins(dockerfile: str, layers: int) -> Mapping[int, str]:
    """The recipe's line for each of the last `layers` layers, counted from 0; empty where that is unclear."""
    text = dockerfile.splitlines()
    for kinds in (_LAYERS[:2], _LAYERS):
        lines = instruction_lines(dockerfile, only=kinds)
        if len(lines) == layers:
            return dict(enumerate(_origin(text, line) for line in lines))
    return {}


def _origin(text: Sequence[str], line: int) -> str:
    """What the comment above the instruction at `line` says, and the instruction."""
    above = text[line - 2].removeprefix("# ") if line > 1 and text[line - 2].startswith("# ") else ""
    return f"{above} ({text[line - 1][:60]})"


def placed(entry: DifferentEntry, layers: Sequence[tree.Layer], made_by: Mapping[int, str]) -> DifferentEntry:
    """`entry` with the uppermost of `layers`, the lowest first; `made_by` is for the last of them."""
    below = len(layers) - len(made_by)
    for number in reversed(range(len(layers))):
        if _has(layers[number], entry.path):
            origin = made_by.get(number - below, "")
            return DifferentEntry(path=entry.path, what=entry.what, layer=number + 1, origin=origin)
    return entry


def _has(layer: tree.Layer, path: str) -> bool:
    return tree.find((layer,), path) is not None
