"""What is different between two images, or between what recipes and locks say about them. Pure values.

`of_recipe`, `of_lock` and `of_image` make the two sides of a comparison.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from imgkit_builder.delta import source, tree
from imgkit_builder.delta.source import OpenedImage
from imgkit_builder.delta.tree import TreeEntry
from imgkit_builder.inventory.collector import pypi_key
from imgkit_builder.sif import entries

if TYPE_CHECKING:
    from imgkit_builder.recipe import Recipe
    from imgkit_builder.recipe.model import LockedPlatform

_RANK = ("recipe", "lock", "image")
"""What knows less comes first: a recipe names some packages, a lock also what they need, an image all."""

_PLACES = frozenset(one.path for one in entries.if_missing()) | {"opt", "opt/imgkit"}
"""What a conversion adds to an image that lacks it."""

ANY = "*"
"""Stands for the version of a package that a recipe names without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSide:
    """One of the two that are compared, with what it can tell."""

    name: str
    kind: Literal["recipe", "lock", "image"]
    base: str
    """Name of the base; empty where it is not known."""
    base_digest: str = ""
    packages: Mapping[tuple[str, str], str]
    """Kind (``deb``, ``pypi``) and name to the version, or to what a recipe asks for."""
    env: Mapping[str, str] | None
    """None where it tells nothing about variables."""
    image: OpenedImage | None = None
    """None where it tells nothing about files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """One name that is not the same on both sides; an empty text stands for a side that lacks it."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDifference:
    """One file, link or folder."""

    path: str
    how: Literal["added", "removed", "changed", "attributes"]
    """``attributes``: the same content with another time, owner or mode."""
    before_bytes: int
    after_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifference:
    """A layer that only one side has, by its place from the bottom."""

    number: int
    before: str
    before_bytes: int
    after: str
    after_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """All that is different; None where one of the sides cannot tell."""

    base: tuple[ValueDifference, ...]
    packages: tuple[ValueDifference, ...]
    env: tuple[ValueDifference, ...] | None
    files: tuple[FileDifference, ...] | None
    layers: tuple[LayerDifference, ...] | None
    not_compared: tuple[str, ...]
    """What a side cannot tell, a sentence each."""

    @property
    def equal(self) -> bool:
        """Whether nothing that both tell is different."""
        return not any((self.base, self.packages, self.env, self.files, self.layers))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"equal": self.equal, **dataclasses.asdict(self)}


def compare(one: ComparedSide, other: ComparedSide) -> Differences:
    """What `other` has that `one` has not, and the other way round.

    Where the two are of different kinds, only what the lesser one names is compared: the rest is the base's.
    """
    lesser = min(one, other, key=lambda side: _RANK.index(side.kind))
    names = lesser.packages.keys() if one.kind != other.kind else one.packages.keys() | other.packages.keys()
    found = ((f"{key[0]} {key[1]}", one.packages.get(key, ""), other.packages.get(key, "")) for key in names)
    images = one.image is not None and other.image is not None
    return Differences(
        base=tuple(_base(one, other)),
        packages=tuple(
            ValueDifference(name=name, before=before, after=after)
            for name, before, after in sorted(found)
            if not _fits(before, after)
        ),
        env=_env(one, other, lesser),
        files=tuple(_files(one.image, other.image)) if one.image and other.image else None,
        layers=_layers(one.image, other.image) if images else None,
        not_compared=tuple(_not_compared(one, other)),
    )


def _base(one: ComparedSide, other: ComparedSide) -> Iterator[ValueDifference]:
    if one.base_digest and other.base_digest:
        if one.base_digest != other.base_digest:
            yield ValueDifference(name="digest", before=one.base_digest, after=other.base_digest)
    elif one.base and other.base and one.base != other.base:
        yield ValueDifference(name="name", before=one.base, after=other.base)


def _fits(before: str, after: str) -> bool:
    """Whether two versions are one, or one is a version that the other asks for."""
    if before == after:
        return True
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion

    for asked, version in ((before, after), (after, before)):
        try:
            if asked == "*" or (
                asked and version and SpecifierSet(asked).contains(version, prereleases=True)
            ):
                return bool(version)
        except (InvalidSpecifier, InvalidVersion):
            continue
    return False


def _env(one: ComparedSide, other: ComparedSide, lesser: ComparedSide) -> tuple[ValueDifference, ...] | None:
    if one.env is None or other.env is None:
        return None
    names = set(one.env.keys() | other.env.keys())
    if one.kind != other.kind:
        names = set(lesser.env or {})
    found = ((name, one.env.get(name, ""), other.env.get(name, "")) for name in sorted(names))
    return tuple(
        ValueDifference(name=name, before=before, after=after)
        for name, before, after in found
        if before != after
    )


def _not_compared(one: ComparedSide, other: ComparedSide) -> Iterator[str]:
    if one.kind != other.kind:
        lesser, more = sorted((one, other), key=lambda side: _RANK.index(side.kind))
        yield f"only what the {lesser.kind} lists is compared; {more.name} may hold more packages, variables"
    for kind in dict.fromkeys((one.kind, other.kind)):
        if kind == "recipe":
            yield "a recipe has no files, no layers, and versions only where it states them"
        elif kind == "lock":
            yield "a lock has no files, no layers and no variables"
    images = [side.image for side in (one, other) if side.image]
    if len(images) == 2 and not all(image.layers for image in images):
        yield "a .sif or .sqsh keeps no layers"


def _files(old: OpenedImage, new: OpenedImage) -> Iterator[FileDifference]:
    """Files that differ; those that a conversion or a runtime makes only where both sides have them."""
    both = old.added == new.added
    skip = (source.NEVER - source.OWN) | (frozenset() if both else old.added | new.added)
    places = frozenset() if both else _PLACES
    before = _ByPath(old.stack)
    for path, entry in tree.changes(old.stack, new.stack, skip=skip).items():
        was = before.entry(path)
        if was is not None and (entry is None or (was.kind == "dir") != (entry.kind == "dir")):
            gone = before.below(path) if was.kind == "dir" else [(path, was)]
            for name, one in gone:
                if name in places or name in skip:
                    continue
                yield FileDifference(path=name, how="removed", before_bytes=one.size_bytes, after_bytes=0)
            was = None
        if entry is None or (was is None and path in places):
            continue
        size = was.size_bytes if was else 0
        if was is None:
            yield FileDifference(path=path, how="added", before_bytes=0, after_bytes=entry.size_bytes)
        elif tree.differ(was, entry):
            same = _same_content(was, entry)
            yield FileDifference(
                path=path,
                how="attributes" if same else "changed",
                before_bytes=size,
                after_bytes=entry.size_bytes,
            )


def _same_content(one: TreeEntry, other: TreeEntry) -> bool:
    if (one.kind, one.size_bytes, one.link, one.device) != (
        other.kind,
        other.size_bytes,
        other.link,
        other.device,
    ):
        return False
    return one.kind != "file" or tree.digest(one) == tree.digest(other)


class _ByPath:
    """Entries of a tree by their path; each folder is listed once."""

    def __init__(self, stack: tree.Stack) -> None:
        self._folders: dict[str, dict[str, tree.Node]] = {"": tree.children(stack, "")}

    def entry(self, path: str) -> TreeEntry | None:
        node = self._node(path)
        return node.entry if node else None

    def below(self, path: str) -> Iterator[tuple[str, TreeEntry]]:
        """The folder `path` and all that is in it."""
        node = self._node(path)
        if node:
            yield path, node.entry
            yield from tree.everything(node.layers, path)

    def _node(self, path: str) -> tree.Node | None:
        folder, _, name = path.rpartition("/")
        if folder not in self._folders:
            above = self._node(folder)
            self._folders[folder] = tree.children(above.layers, folder) if above else {}
        return self._folders[folder].get(name)


def _layers(one: OpenedImage | None, other: OpenedImage | None) -> tuple[LayerDifference, ...] | None:
    if one is None or other is None or not one.layers or not other.layers:
        return None
    found = []
    for number in range(max(len(one.layers), len(other.layers))):
        before, before_bytes = _layer(one, number, other)
        after, after_bytes = _layer(other, number, one)
        if before != after:
            found.append(
                LayerDifference(
                    number=number + 1,
                    before=before,
                    before_bytes=before_bytes,
                    after=after,
                    after_bytes=after_bytes,
                )
            )
    return tuple(found)


def _layer(image: OpenedImage, number: int, other: OpenedImage) -> tuple[str, int]:
    """Digest of a layer, and the bytes of its files, which count only where the other side lacks it."""
    if number >= len(image.layers):
        return "", 0
    digest, layer = image.layers[number]
    if number < len(other.layers) and other.layers[number][0] == digest:
        return digest, 0
    return digest, sum(entry.size_bytes for _, entry in tree.everything((layer,)))


def of_image(image: OpenedImage) -> ComparedSide:
    """What an open image tells: everything."""
    listed = source.inventory(image)
    found = ((one.kind, one.name, one.version) for one in listed.packages)
    return ComparedSide(
        name=image.name,
        kind="image",
        base=listed.base,
        base_digest=listed.base_digest,
        packages=_by_name(found),
        env=dict(image.env),
        image=image,
    )


def of_lock(name: str, part: LockedPlatform) -> ComparedSide:
    """What one platform of a lock tells: base and packages."""
    found = (
        *(("deb", one.name, one.version) for one in part.apt),
        *(("pypi", one.name, one.version) for one in part.pip),
    )
    return ComparedSide(
        name=f"{name} ({part.platform})",
        kind="lock",
        base=part.base.name,
        base_digest=part.base.digest or part.base.id,
        packages=_by_name(found),
        env=None,
    )


def of_recipe(name: str, recipe: Recipe) -> ComparedSide:
    """What a recipe tells: the packages that it asks for, and the variables that it sets.

    Raises
    ------
    OSError : a requirements file cannot be read.
    """
    from imgkit_builder.recipe import lock_file

    request = lock_file.request_of(recipe)
    asked = (_of_pip(one) for step in request.pip for one in step.requirements)
    found = (*map(_of_apt, request.apt), *(one for one in asked if one))
    return ComparedSide(
        name=name,
        kind="recipe",
        base=request.base,
        packages=_by_name(found),
        env=dict(recipe.image.env),
    )


def _of_apt(text: str) -> tuple[str, str, str]:
    name, equals, version = text.partition("=")
    return "deb", name.partition(":")[0].partition("/")[0], version if equals else ANY


def _of_pip(text: str) -> tuple[str, str, str] | None:
    """Name and wanted versions; None for a file or URL without a name."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        found = Requirement(text)
    except InvalidRequirement:
        return None
    return "pypi", found.name, str(found.specifier) or ANY


def _by_name(found: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str], str]:
    """Versions by kind and name; a package that is there in several has them all."""
    versions: dict[tuple[str, str], set[str]] = {}
    for kind, name, version in found:
        key = name if kind == "deb" else pypi_key(name, version)[1]
        versions.setdefault((kind, key), set()).add(version)
    return {key: ", ".join(sorted(each)) for key, each in versions.items()}
