"""What imgkit and pip noted in an image, collected while its files pass by.

The record of a .sif or .sqsh that imgkit wrote holds these facts, so that nobody has to read the squashfs for
them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from imgkit_builder.archive.tar_read import REGULAR
from imgkit_builder.oci import manifest
from imgkit_entrypoints import json_text, system

if TYPE_CHECKING:
    from imgkit_builder.sif.entries import ImageEntry

_MANIFEST = manifest.MANIFEST_JSON.lstrip("/")
_SYSTEM = str(system.SYSTEM_JSON).lstrip("/")
_LOCK = manifest.LOCK_TOML.lstrip("/")
BAKED_FILES = (_MANIFEST, _SYSTEM)
"""Files of imgkit in an image whose text is a part of the facts."""
# "usr/lib/python3.12/site-packages/flash_attn-2.5.dist-info": the lib folder, and the name
_DISTRIBUTION = re.compile(
    r"(?P<lib>.*)/python3[^/]*/(?:site|dist)-packages/(?P<name>[^/]+)-[^/-]+\.dist-info"
)
_ORIGIN = ".dist-info/direct_url.json"
_MOST_FILE_BYTES = 1 << 20
"""A larger file is not one of imgkit's or pip's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A Python package that a Python on the image's PATH finds."""

    name: str
    """As its .dist-info spells it."""
    folder: str = ""
    """Where an editable installation leads (PEP 610); empty for any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BakedFacts:
    """What imgkit and pip noted in an image."""

    manifest: str = ""
    """Text of `manifest.MANIFEST_JSON`; empty where imgkit did not build the image."""
    system: str = ""
    """Text of system.json."""
    distributions: tuple[Distribution, ...] | None = None
    """The Python packages, sorted by name; None if they are unknown. If the image was built from a lock file,
    only packages are listed whose origin pip noted: the lock file lists the others."""


class BakedFactsCollector:
    """Collect `BakedFacts` from the names and the small files of an image, in any order."""

    def __init__(self) -> None:
        self._texts: dict[str, bytes] = {}
        self._names: set[str] = set()

    def observe(self, entries: Iterable[ImageEntry]) -> Iterator[ImageEntry]:
        """Yield `entries` unchanged, and keep a copy of the names and contents that `facts` needs.

        The content of an entry can be read once only, so an entry that was read is passed on as a copy.
        """
        for entry in entries:
            for name in entry.names:
                self.add_name(name)
            is_small_file = entry.kind == REGULAR and entry.size_bytes <= _MOST_FILE_BYTES
            if is_small_file and self.is_relevant(entry.name):
                data = entry.read()
                self.add(entry.name, data)
                yield entry.with_read_content(data)
            else:
                yield entry

    def is_relevant(self, name: str) -> bool:
        """Return whether the content of the file `name` is needed: imgkit's own, or a package's origin."""
        return name in BAKED_FILES or name.endswith(_ORIGIN)

    def add(self, name: str, data: bytes) -> None:
        """Keep the content of a file for which `is_relevant` is true."""
        self._texts[name] = data

    def add_name(self, name: str) -> None:
        """Keep the name of a file if it says that a package is installed or that a lock file was used."""
        if name == _LOCK or name.endswith(".dist-info/METADATA"):
            self._names.add(name)

    def facts(self, path: str) -> BakedFacts:
        """Return the facts of an image whose variable PATH is `path`."""
        distributions = sorted(self._distributions(path), key=attrgetter("name", "folder"))
        return BakedFacts(
            manifest=self._text(_MANIFEST), system=self._text(_SYSTEM), distributions=tuple(distributions)
        )

    def _text(self, name: str) -> str:
        return self._texts.get(name, b"").decode("utf-8", "replace")

    def _distributions(self, path: str) -> Iterator[Distribution]:
        """Yield the Python packages of the Pythons on the image's PATH, which is `path`.

        ``/usr/bin`` on PATH makes the packages in ``usr/lib/python3.12/site-packages`` count.
        """
        libs = library_folders(path)
        for folder in self._dist_info_folders():
            match = _DISTRIBUTION.fullmatch(folder)
            if match is not None and match["lib"] in libs:
                direct_url = self._texts.get(f"{folder}/direct_url.json", b"")
                yield Distribution(name=match["name"], folder=_editable_folder(direct_url))

    def _dist_info_folders(self) -> set[str]:
        """Return the .dist-info folders of the packages to list. Each installed package has one.

        If the image was built from a lock file, only packages with a ``direct_url.json`` are listed: pip
        writes one for what it did not get from an index, and the lock file lists the rest.
        """
        folders = {name.removesuffix("/direct_url.json") for name in self._texts if name.endswith(_ORIGIN)}
        if _LOCK not in self._names:
            folders |= {name.removesuffix("/METADATA") for name in self._names}
        return folders


def library_folders(path: str) -> list[str]:
    """Return the ``lib`` folders beside the folders of `path`, a variable PATH, as relative paths.

    ``/usr/bin`` -> ``usr/lib``, ``usr/local/lib``.
    """
    # "/usr/bin" -> "usr"; a dict keeps the order and drops repeated ones.
    prefixes = dict.fromkeys(posixpath.dirname(folder).strip("/") for folder in path.split(":"))
    folders = []
    for prefix in prefixes:
        folders += [f"{prefix}/lib".lstrip("/"), f"{prefix}/local/lib".lstrip("/")]
    return folders


def _editable_folder(direct_url: bytes) -> str:
    """Return the source folder of a package that was installed with ``pip install --editable``, else ``""``.

    `direct_url` is the content of the package's ``direct_url.json`` (PEP 610), or empty.
    """
    try:
        origin = json_text.parse(direct_url)
        if not origin["dir_info"].get("editable"):
            return ""
        return unquote(urlsplit(origin["url"]).path)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
