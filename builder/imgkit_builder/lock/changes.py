"""What a new lock changes over the old one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from imgkit_builder.recipe.model import LockedPlatform
from imgkit_builder.recipe.requirements import canonical_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An item that a lock now has in another version, or no longer, or for the first time."""

    kind: str
    """``base``, ``apt``, ``pip`` or ``file``."""
    name: str
    old: str
    """Empty where it is new."""
    new: str
    """Empty where it is gone."""

    def __str__(self) -> str:
        if not self.new:
            versions = f"{self.old}, removed"
        elif self.old:
            versions = f"{self.old} -> {self.new}"
        else:
            versions = self.new
        return f"{self.kind:4}  {self.name}  {versions}"


class _Item(NamedTuple):
    """What has a version in a lock. Two kinds may have items of the same name."""

    kind: str
    name: str


def list_changes(old: LockedPlatform | None, new: LockedPlatform) -> tuple[Change, ...]:
    """Return what changes from the lock `old` to `new`. Removed packages come last.

    Without an old lock, everything is new.
    """
    old_versions: dict[_Item, str] = {}
    if old:
        old_versions = _read_versions(old)
    new_versions = _read_versions(new)
    changes = []
    for item in {**new_versions, **old_versions}:
        old_version = old_versions.get(item, "")
        new_version = new_versions.get(item, "")
        if old_version != new_version:
            changes.append(Change(kind=item.kind, name=item.name, old=old_version, new=new_version))
    return tuple(changes)


def is_same(old: LockedPlatform | None, new: LockedPlatform) -> bool:
    """Return whether the two differ in nothing but their time."""
    return old is not None and old == dataclasses.replace(new, source_date_epoch=old.source_date_epoch)


def _read_versions(locked: LockedPlatform) -> dict[_Item, str]:
    """Return the version of each item in the lock for a platform: ``apt git:amd64`` -> ``1:2.39``.

    For the base and for files, the beginning of the digest takes the place of the version.
    """
    digest = locked.base.digest or locked.base.id
    versions = {_Item("base", locked.base.name): digest[:19]}
    for deb in locked.apt:
        versions[_Item("apt", f"{deb.name}:{deb.architecture}")] = deb.version
    for wheel in locked.pip:
        item = _Item("pip", canonical_name(wheel.name))
        if item in versions:
            # A later step may install a package in another version.
            versions[item] += f", then {wheel.version}"
        else:
            versions[item] = wheel.version
    # Digests are compared, too: a wheel that was built again has the same version and other content.
    for file, sha256 in sorted(locked.digests.items()):
        versions[_Item("file", file)] = sha256[:12]
    return versions
