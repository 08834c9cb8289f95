"""Locked packages and platforms with plausible values; a test states those that matter to it."""

from __future__ import annotations

from typing import Any

from imgkit_builder.recipe.model import LockedBase, LockedDeb, LockedPlatform, LockedWheel, LockRequest


def locked_deb(name: str, version: str, **fields: Any) -> LockedDeb:
    file = f"{name}_{version.replace(':', '%3a')}_amd64.deb"
    values = {
        "architecture": "amd64",
        "file": file,
        "url": f"http://deb.example.org/debian/pool/main/{name[0]}/{name}/{file}",
        "sha256": "a" * 64,
        "size_bytes": 1,
    }
    return LockedDeb(name=name, version=version, **{**values, **fields})


def locked_wheel(name: str, version: str, **fields: Any) -> LockedWheel:
    """Return a wheel of an index, or one without a URL if it is `kept`."""
    file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    url = "" if fields.get("kept") else f"https://files.example.org/{file}"
    values = {"step": 0, "file": file, "url": url, "sha256": "b" * 64}
    return LockedWheel(name=name, version=version, **{**values, **fields})


def locked_platform(**fields: Any) -> LockedPlatform:
    values = {
        "platform": "linux/amd64",
        "source_date_epoch": 1_700_000_000,
        "request": LockRequest(base="a:1"),
        "base": LockedBase(name="a:1", id=f"sha256:{'c' * 64}"),
    }
    return LockedPlatform(**{**values, **fields})
