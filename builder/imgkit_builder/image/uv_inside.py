"""Runs inside the base: chooses what a project's uv.lock adds to it, or says what does not fit together.

``python3 uv_inside.py LOCK.json FOLDER [CHOSEN.json]`` reads what ``image/install.py`` wrote. It
writes ``FOLDER/uv.txt`` (requirements with hashes) and ``FOLDER/uv.html`` (links to exactly these wheels) for
pip. It adds the locked versions to ``FOLDER/constraint.txt``, so that later pip steps keep them.
``CHOSEN.json`` gets the wheels.

Notes
-----
This file runs by path in the base's Python, without this package. It needs the standard library and the
copy of ``packaging`` inside pip, which knows the markers, tags and versions exactly as that pip does.
"""

from __future__ import annotations

import collections
import html
import importlib
import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

PAGE = "<!DOCTYPE html>"
"""The beginning of a page of links."""


def main(argv: list[str]) -> int:
    """Do all of it; the exit code is 1 where lock and base do not fit together."""
    lock = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    try:
        chosen = UvChoice(lock, installed(), constraints(os.environ.get("PIP_CONSTRAINT", "")))
    except ImportError as error:
        print(f"this base has no pip that imgkit can use for uv.lock: {error}")
        return 1
    chosen.walk()
    if chosen.problems:
        print("uv.lock does not fit this base:")
        for what, hint in chosen.problems:
            print(f"{what}\n  -> {hint}")
        return 1
    for note in chosen.notes:
        print(note)
    write(Path(argv[1]), chosen)
    if argv[2:]:
        Path(argv[2]).parent.mkdir(parents=True, exist_ok=True)
        Path(argv[2]).write_text(json.dumps(chosen.wheels), encoding="utf-8")
    print(f"uv.lock: {len(chosen.wheels)} packages to install, {chosen.as_in_base} as in the base")
    return 0


def installed() -> dict[str, str]:
    """Versions in the base by normalised name; the first on the path counts, as for an import."""
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        name = one.metadata["Name"]
        if name and one.version:
            found.setdefault(canonical(name), one.version)
    return found


def constraints(files: str) -> dict[str, tuple[str, str]]:
    """The requirement and the file of each constraint, by normalised name; `files` is PIP_CONSTRAINT."""
    found = {}
    for path in files.split():
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            text = line.partition("#")[0].partition(";")[0].strip()
            name = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", text)
            if name and "@" not in text:
                found[canonical(name[0])] = (text, path)
    return found


def canonical(name: str) -> str:
    """The name as PyPA's specification normalises it."""
    return re.sub(r"[-_.]+", "-", name).lower()


class UvChoice:
    """What a lock adds to a base."""

    def __init__(
        self, lock: dict[str, Any], base: dict[str, str], constrained: dict[str, tuple[str, str]]
    ) -> None:
        self._markers = importlib.import_module("pip._vendor.packaging.markers")
        self._requirements = importlib.import_module("pip._vendor.packaging.requirements")
        self._specifiers = importlib.import_module("pip._vendor.packaging.specifiers")
        self._versions = importlib.import_module("pip._vendor.packaging.version")
        self._utils = importlib.import_module("pip._vendor.packaging.utils")
        tags = importlib.import_module("pip._vendor.packaging.tags")
        self._tags = {tag: place for place, tag in reversed(list(enumerate(tags.sys_tags())))}
        self._lock, self._base, self._constrained = lock, base, constrained
        self.problems: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.wheels: list[dict[str, str]] = []
        self.versions: dict[str, str] = {}
        self.as_in_base = 0

    def walk(self) -> None:
        """Visit every package that the project wants here, the nearest first."""
        lock, project = self._lock, self._lock["packages"][self._lock["project"]]
        self._check_environment()
        queue = collections.deque[Any]((need, (project["name"],)) for need in lock["needs"])
        done: dict[int, bool] = {lock["project"]: True}
        followed = set()
        while queue:
            need, path = queue.popleft()
            package = lock["packages"][need["package"]]
            if need["marker"] and not self._holds(need["marker"]):
                continue
            if need["package"] not in done:
                done[need["package"]] = self._add(package, " -> ".join(path))
            if not done[need["package"]]:
                continue
            for extra in ("", *need["extras"]):
                if (need["package"], extra) not in followed:
                    followed.add((need["package"], extra))
                    own = need["package"] == lock["project"]
                    plain = [] if own else package["needs"]
                    below = package["extras"].get(extra, []) if extra else plain
                    queue.extend((one, (*path, package["name"])) for one in below)

    def _holds(self, marker: str) -> bool:
        return bool(self._markers.Marker(marker).evaluate({"extra": ""}))

    def _check_environment(self) -> None:
        here, wants = ".".join(map(str, sys.version_info[:3])), self._lock["requires_python"]
        if wants and not self._specifiers.SpecifierSet(wants).contains(here, prereleases=True):
            what = f"Python: uv.lock requires {wants}, the base has {here}"
            self.problems.append((what, "choose another base"))
        made_for = self._lock["environments"]
        if made_for and not any(map(self._holds, made_for)):
            what = f"uv.lock was made for: {' or '.join(made_for)}"
            self.problems.append((what, "add this platform to tool.uv.environments, then: uv lock"))

    def _add(self, package: dict[str, Any], wanted_by: str) -> bool:
        """Decide on one package; whether what it depends on is needed too."""
        name, version = package["name"], package["version"]
        has = self._base.get(name)
        if has and self._is_protected(name):
            # A base builds its own torch, 2.3.0a0+40ec155e58.nv24.03: the release is what counts. What only
            # that torch needs comes with the base.
            if self._release(has) != self._release(version):
                what = f"the base has {has}, which imgkit never replaces"
                self._conflict(package, what, wanted_by, str(self._release(has)))
            elif has != version:
                self.notes.append(f"{name}: the base's {has} stays in place of {version}")
            return False
        self.versions[name] = version
        if has and self._is_same(has, version):
            self.as_in_base += 1
            return True
        if name in self._constrained:
            text, file = self._constrained[name]
            if not self._requirements.Requirement(text).specifier.contains(version, prereleases=True):
                self._conflict(package, f"{file} of the base has {text}", wanted_by, has or "")
                return True
        self._choose(package, wanted_by)
        return True

    def _is_protected(self, name: str) -> bool:
        return bool(re.fullmatch(self._lock["protected"], name, re.IGNORECASE))

    def _is_same(self, has: str, version: str) -> bool:
        # A distribution package may have a version that is none of PEP 440.
        try:
            return bool(self._versions.Version(has) == self._versions.Version(version))
        except ValueError:
            return has == version

    def _release(self, version: str) -> Any:
        """The version 2.3.0 for ``2.3.0a0+nv24.03``."""
        return self._versions.Version(self._versions.Version(version).base_version)

    def _conflict(self, package: dict[str, Any], found: str, wanted_by: str, release: str) -> None:
        name = package["name"]
        what = f"{name}: uv.lock has {package['version']}, but {found} (wanted by {wanted_by})"
        hint = "lock a version that fits, or choose another base"
        if release:
            hint = f"lock the base's release: uv lock --upgrade-package '{name}=={release}'"
        if not self._is_protected(name):
            hint += f"; or let it differ, in the recipe: image: {{constraints: {{drop: [{name}]}}}}"
        self.problems.append((what, hint))

    def _choose(self, package: dict[str, Any], wanted_by: str) -> None:
        name, version = package["name"], package["version"]
        best = min(package["wheels"], key=self._rank, default=None)
        if best is not None and self._rank(best) < len(self._tags):
            self.wheels.append({"name": name, "version": version, **best})
            return
        if name in self._lock["left"]:
            self.notes.append(f"{name} {version}: left to the pip step that names it")
            return
        python = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {os.uname().machine}"
        what = f"has no wheel for {python} in uv.lock"
        if package["source"]:
            what = f"comes from {package['source']}"
        self.problems.append(
            (
                f"{name} {version} {what} (wanted by {wanted_by})",
                f"build it in a pip step, which then keeps to this version: pip: [{{packages: [{name}]}}]",
            )
        )

    def _rank(self, wheel: dict[str, str]) -> int:
        """The place of a wheel in the order of this Python's pip; the number of tags if it does not fit."""
        try:
            tags = self._utils.parse_wheel_filename(wheel["file"])[3]
        except ValueError:
            tags = ()
        return min((self._tags.get(tag, len(self._tags)) for tag in tags), default=len(self._tags))


def requirement(wheel: dict[str, str]) -> str:
    """The line of a requirements file for one wheel."""
    return f"{wheel['name']}=={wheel['version']} --hash=sha256:{wheel['sha256']}"


def link(wheel: dict[str, str]) -> str:
    """The line of a page of links for one wheel."""
    # Not name @ URL: pip would record the address of every wheel in the image.
    return f'<a href="{html.escape(wheel["url"])}#sha256={wheel["sha256"]}">{html.escape(wheel["file"])}</a>'


def write(folder: Path, chosen: UvChoice) -> None:
    """Write the files for pip."""
    pinned = [f"{name}=={version}" for name, version in sorted(chosen.versions.items())]
    for name, mode, text in (
        ("uv.txt", "w", map(requirement, chosen.wheels)),
        ("uv.html", "w", [PAGE, *map(link, chosen.wheels)]),
        ("constraint.txt", "a", pinned),
    ):
        with (folder / name).open(mode, encoding="utf-8") as stream:
            stream.write("".join(line + "\n" for line in text))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
