"""What a new lock changes over the old one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

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


def list_changes(old: LockedPlatform | None, new: LockedPlatform) -> tuple[Change, ...]:
    """Return what changes from the lock `old` to `new`. Removed packages come last.

    Without an old lock, everything is new.
    """
    old_versions = {}
    if old:
        old_versions = dict(_list_versions(old))
    new_versions = dict(_list_versions(new))
    changes = []
    for kind, name in {**new_versions, **old_versions}:
        old_version = old_versions.get((kind, name), "")
        new_version = new_versions.get((kind, name), "")
        if old_version != new_version:
            changes.append(Change(kind=kind, name=name, old=old_version, new=new_version))
    return tuple(changes)


def is_same(old: LockedPlatform | None, new: LockedPlatform) -> bool:
    """Return whether the two differ in nothing but their time."""
    return old is not None and old == dataclasses.replace(new, source_date_epoch=old.source_date_epoch)


def _list_versions(part: LockedPlatform) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield kind and name of each item in the lock for a platform, and its version.

    For example, ``(("apt", "git:amd64"), "1:2.39")``. For the base and for files, the beginning of the digest
    takes the place of the version.
    """
    yield ("base", part.base.name), (part.base.digest or part.base.id)[:19]
    for deb in part.apt:
        yield ("apt", f"{deb.name}:{deb.architecture}"), deb.version
    steps: dict[str, list[str]] = {}
    for wheel in part.pip:
        # A later step may install a package in another version: "1.26, then 2.0".
        steps.setdefault(canonical_name(wheel.name), []).append(wheel.version)
    for name, versions in steps.items():
        yield ("pip", name), ", then ".join(versions)
    # Digests are compared, too: a wheel that was built again has the same version and other content.
    for file, sha256 in sorted(part.digests.items()):
        yield ("file", file), sha256[:12]
