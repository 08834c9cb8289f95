"""Compare a new lock with the old one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from imgkit_builder.recipe.model import LockedPlatform
from imgkit_builder.recipe.requirements import canonical_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An item of a lock that was added, removed, or has another version than before."""

    kind: str
    """``base``, ``apt``, ``pip`` or ``file``."""
    name: str
    old: str
    """The version in the old lock. Empty if the item is new."""
    new: str
    """The version in the new lock. Empty if the item was removed."""

    def __str__(self) -> str:
        if not self.new:
            versions = f"{self.old}, removed"
        elif self.old:
            versions = f"{self.old} -> {self.new}"
        else:
            versions = self.new
        return f"{self.kind:4}  {self.name}  {versions}"


class _Item(NamedTuple):
    """The key of an item that has a version in a lock. Items of two kinds may have the same name."""

    kind: str
    name: str


def list_changes(old: LockedPlatform | None, new: LockedPlatform) -> tuple[Change, ...]:
    """Return the changes from the lock `old` to the lock `new`. Removed packages come last.

    If there is no old lock, everything counts as new.
    """
    old_versions: dict[_Item, str] = {}
    if old:
        old_versions = _list_version_texts(old)
    new_versions = _list_version_texts(new)
    changes = []
    # A dict keeps its order: items of the new lock first, then those that are only in the old one.
    for item in {**new_versions, **old_versions}:
        old_version = old_versions.get(item, "")
        new_version = new_versions.get(item, "")
        if old_version != new_version:
            changes.append(Change(kind=item.kind, name=item.name, old=old_version, new=new_version))
    return tuple(changes)


def is_same(old: LockedPlatform | None, new: LockedPlatform) -> bool:
    """Return whether the two locks differ in nothing but the time at which they were made."""
    return old is not None and old == dataclasses.replace(new, source_date_epoch=old.source_date_epoch)


def _list_version_texts(locked: LockedPlatform) -> dict[_Item, str]:
    """Return the version of each item in the lock of a platform, such as ``apt git:amd64`` -> ``1:2.39``.

    The base and the files have no version. The first characters of their digests are used instead. A wheel of
    several steps has several versions: ``1.26, then 2.1``.
    """
    digest = locked.base.digest or locked.base.id
    versions = {_Item("base", locked.base.name): digest[:19]}  # "sha256:" and 12 digits
    for deb in locked.apt:
        versions[_Item("apt", f"{deb.name}:{deb.architecture}")] = deb.version
    for wheel in locked.pip:
        item = _Item("pip", canonical_name(wheel.name))
        if item in versions:
            # Several pip steps may install the same package. The wheels are in the order of the steps.
            versions[item] += f", then {wheel.version}"
        else:
            versions[item] = wheel.version
    # Digests are compared, too, because a wheel that was built again has the same version but other content.
    for file, sha256 in sorted(locked.digests.items()):
        versions[_Item("file", file)] = sha256[:12]
    return versions
