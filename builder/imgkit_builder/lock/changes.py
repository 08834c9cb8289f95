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
        versions = (
            f"{self.old} -> {self.new}" if self.old and self.new else self.new or f"{self.old}, removed"
        )
        return f"{self.kind:4}  {self.name}  {versions}"


def between(old: LockedPlatform | None, new: LockedPlatform) -> tuple[Change, ...]:
    """Return the changes from `old`, which may not exist, to `new`."""
    before = dict(_versions(old)) if old else {}
    after = dict(_versions(new))
    return tuple(
        Change(kind=key[0], name=key[1], old=before.get(key, ""), new=after.get(key, ""))
        for key in {**after, **before}  # what is gone comes last
        if before.get(key, "") != after.get(key, "")
    )


def is_same(old: LockedPlatform | None, new: LockedPlatform) -> bool:
    """Return whether the two differ in nothing but their time."""
    return old is not None and old == dataclasses.replace(new, source_date_epoch=old.source_date_epoch)


def _versions(part: LockedPlatform) -> Iterator[tuple[tuple[str, str], str]]:
    yield ("base", part.base.name), (part.base.digest or part.base.id)[:19]
    for deb in part.apt:
        yield ("apt", f"{deb.name}:{deb.architecture}"), deb.version
    steps: dict[str, list[str]] = {}
    for wheel in part.pip:
        # A later step may replace what an earlier one installs.
        steps.setdefault(canonical_name(wheel.name), []).append(wheel.version)
    for name, versions in steps.items():
        yield ("pip", name), ", then ".join(versions)
    # Under the same version a file may have other content: a wheel that was built again.
    for file, sha256 in sorted(part.digests.items()):
        yield ("file", file), sha256[:12]
