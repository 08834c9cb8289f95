"""The system that a .sif is for, its projects and its architecture, read from the image without a runtime."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from imgkit_builder.delta import source, tree
from imgkit_builder.delta.read_squashfs import SquashfsLayer
from imgkit_builder.oci import manifest
from imgkit_builder.oci.manifest import InstalledProject
from imgkit_builder.recipe.requirements import canonical
from imgkit_builder.recipe.targets import Target, checked
from imgkit_builder.sif import image, runtime_files
from imgkit_entrypoints import json_text, system
from imgkit_entrypoints.errors import CheckFailed, ToolMissing, UsageError


def target(path: Path) -> Target:
    """The recipe's name and system inside the .sif or .sqsh `path`.

    Raises
    ------
    CheckFailed : it is damaged, or imgkit did not build its image.
    ToolMissing : this machine cannot unpack its compression.
    UsageError : its system holds a value that no recipe may have.
    """
    arch, layers = source.in_file(path)
    try:
        image_manifest = manifest.from_json(_text(layers, manifest.MANIFEST_JSON))
        facts = system.from_json(_text(layers, str(system.SYSTEM_JSON)))
    except (KeyError, ValueError) as error:
        raise CheckFailed(
            f"it does not name its system: {error}",
            where=str(path),
            hint=f"name the recipe: imgkit run RECIPE --image {path} ...",
        ) from error
    platforms = (f"linux/{arch}",)
    return checked(
        Target(
            name=image_manifest.recipe,
            system=facts,
            platforms=platforms,
            file=path,
            projects=image_manifest.projects,
            workdir=image_manifest.workdir,
            base=image_manifest.base.name,
            base_env=tuple(image_manifest.base.env),
        )
    )


def projects(path: Path, overlay: str, name: str) -> tuple[InstalledProject, ...]:
    """The projects that the .sif `path`, with the delta `overlay` over it, has installed by its recipe.

    The project `name` is among them also if another command installed it. Raises as `target` does.
    """
    layers = source.mounted(image.read(path))
    if overlay:
        layers = (SquashfsLayer(Path(overlay)), *layers)
    data = tree.content(layers, manifest.MANIFEST_JSON)
    recorded = manifest.from_json(data.decode()).projects if data else ()
    if any(project.name == name for project in recorded):
        return recorded
    return (*recorded, *_distributions(layers, name))


def _distributions(layers: tree.Stack, name: str) -> Iterator[InstalledProject]:
    """The project `name` in the folders where the Pythons of the image's PATH find packages."""
    script = tree.content(layers, runtime_files.ENVIRONMENT) or b""
    path = runtime_files.variables(script.decode(errors="replace")).get("PATH", "")
    prefixes = dict.fromkeys(posixpath.dirname(folder).strip("/") for folder in path.split(":"))
    libs = [f"{prefix}/{lib}" for prefix in prefixes for lib in ("lib", "local/lib")]
    pythons = [
        f"{lib}/{entry}" for lib in libs for entry in _names(layers, lib) if entry.startswith("python3")
    ]
    is_locked = tree.find(layers, manifest.LOCK_TOML.strip("/")) is not None
    for folder in (f"{python}/{kind}" for python in pythons for kind in ("site-packages", "dist-packages")):
        for entry in _names(layers, folder):
            distribution = entry.removesuffix(".dist-info")
            if distribution == entry or canonical(distribution.rpartition("-")[0]) != name:
                continue
            direct_url = tree.content(layers, f"{folder}/{entry}/direct_url.json")
            if direct_url is not None or not is_locked:  # a locked .sif has none, whatever pip wrote
                yield InstalledProject(name=name, folder=_editable(direct_url or b""))


def _names(layers: tree.Stack, path: str) -> Iterable[str]:
    node = tree.find(layers, path)
    return tree.children(node.layers, path) if node and node.entry.kind == "dir" else ()


def _editable(direct_url: bytes) -> str:
    """The folder to which an editable installation leads (PEP 610); empty for any other."""
    try:
        origin: Any = json_text.parse(direct_url)
        return unquote(urlsplit(origin["url"]).path) if origin["dir_info"].get("editable") else ""
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


_MACHINES = {0x3E: "amd64", 0xB7: "arm64", 0x15: "ppc64le", 0xF3: "riscv64"}
"""Field ``e_machine`` of an ELF program."""


def arch(path: Path) -> str:
    """The architecture of the .sif or .sqsh `path`, stated or that of its shell; empty if it is unknown."""
    try:
        recorded, layers = source.in_file(path)
        shell = None if recorded != "unknown" else _followed(layers, "bin/sh")
        head = next(iter(shell.layer.content(shell)), b"")[:20] if shell and shell.kind == "file" else b""
    except (CheckFailed, ToolMissing, UsageError):
        return ""
    if recorded != "unknown":
        return recorded
    is_little = head[:4] == b"\x7fELF" and head[5:6] == b"\x01"
    return _MACHINES.get(int.from_bytes(head[18:20], "little"), "") if is_little else ""


def _followed(layers: tree.Stack, path: str) -> tree.TreeEntry | None:
    """The entry to which the links on `path` lead; None if there is none, or it takes too many steps."""
    parts, at, entry = path.split("/")[::-1], "", None
    for _ in range(_MOST_STEPS):
        if not parts:
            return entry
        name = parts.pop()
        if name in ("", ".", ".."):
            at = posixpath.dirname(at) if name == ".." else at
            continue
        node = tree.find(layers, tree.join(at, name))
        if node is None:
            return None
        if node.entry.kind == "symlink":
            at = "" if node.entry.link.startswith("/") else at
            parts += node.entry.link.split("/")[::-1]
        else:
            at, entry = tree.join(at, name), node.entry
    return None


_MOST_STEPS = 200


def _text(layers: tree.Stack, path: str) -> str:
    data = tree.content(layers, path)
    if data is None:
        raise KeyError(f"it has no {path}")
    return data.decode()
