"""Collect the facts that imgkit and pip recorded in an image, while the image's files are converted.

imgkit stores these facts in the record of a .sif or .sqsh. So they can be read without unpacking the
squashfs.
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
"""Files that imgkit writes into an image. Their texts are a part of the facts."""
# "usr/lib/python3.12/site-packages/flash_attn-2.5.dist-info" -> lib "usr/lib", name "flash_attn"
_DISTRIBUTION = re.compile(
    r"(?P<lib>.*)/python3[^/]*/(?:site|dist)-packages/(?P<name>[^/]+)-[^/-]+\.dist-info"
)
_DIRECT_URL = "direct_url.json"
"""The file in a .dist-info folder with the origin of a package that does not come from an index (PEP 610)."""
_MOST_FILE_BYTES = 1 << 20
"""The files of imgkit and pip are smaller. A larger file of the same name is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A Python package that is installed for a Python on the image's PATH."""

    name: str
    """Name of the package, as its .dist-info folder spells it."""
    folder: str = ""
    """Source folder of an editable installation (PEP 610). Empty for other installations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BakedFacts:
    """The facts about an image that imgkit and pip recorded in it."""

    manifest: str = ""
    """Text of the file `manifest.MANIFEST_JSON`. Empty if imgkit did not build the image."""
    system: str = ""
    """Text of the file system.json."""
    distributions: tuple[Distribution, ...] | None = None
    """The Python packages, sorted by name, or None if they are unknown. If the image was built from a lock
    file, only packages whose origin pip recorded are listed. The lock file lists the others."""


class BakedFactsCollector:
    """Collect `BakedFacts` from the names and the small files of an image, in any order."""

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}
        """The contents of small files, by their paths."""
        self._dist_info_folders: set[str] = set()
        """The .dist-info folders of all installed packages."""
        self._has_lock = False
        """Whether the image was built from a lock file."""

    def observe(self, entries: Iterable[ImageEntry]) -> Iterator[ImageEntry]:
        """Yield `entries` with the same content, and collect the names and contents that `facts` needs.

        The facts are complete only after the last entry has been yielded. The content of an entry can be read
        only once. So an entry whose content was read is replaced by a copy that can be read again.
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
        """Return whether `facts` needs the content of the file `name`.

        It needs the files of imgkit, and the file ``direct_url.json`` with the origin of a package.
        """
        return name in BAKED_FILES or name.endswith(f".dist-info/{_DIRECT_URL}")

    def add(self, name: str, data: bytes) -> None:
        """Store the content of a file for which `is_relevant` is true."""
        self._contents[name] = data

    def add_name(self, name: str) -> None:
        """Store the name of a file if it shows that a package is installed or that a lock file was used."""
        if name == _LOCK:
            self._has_lock = True
        elif name.endswith(".dist-info/METADATA"):
            self._dist_info_folders.add(posixpath.dirname(name))

    def facts(self, path: str) -> BakedFacts:
        """Return the facts collected from the entries so far. `path` is the variable PATH of the image."""
        distributions = sorted(self._list_distributions(path), key=attrgetter("name", "folder"))
        return BakedFacts(
            manifest=self._text(_MANIFEST), system=self._text(_SYSTEM), distributions=tuple(distributions)
        )

    def _text(self, name: str) -> str:
        return self._contents.get(name, b"").decode("utf-8", "replace")

    def _list_distributions(self, path: str) -> Iterator[Distribution]:
        """Yield the packages of every Python on the image's PATH, which is given as `path`.

        If ``/usr/bin`` is on PATH, the packages in ``usr/lib/python3.12/site-packages`` are included. A
        package that was installed with ``pip install --editable`` is given with its source folder.
        """
        libs = library_folders(path)
        for dist_info in self._list_dist_info_folders():
            match = _DISTRIBUTION.fullmatch(dist_info)
            if match is None or match["lib"] not in libs:
                continue
            direct_url = self._contents.get(f"{dist_info}/{_DIRECT_URL}", b"")  # pip notes that folder there
            yield Distribution(name=match["name"], folder=_parse_editable_folder(direct_url))

    def _list_dist_info_folders(self) -> set[str]:
        """Return the .dist-info folders of the packages to list. Each installed package has such a folder.

        If the image was built from a lock file, only packages with a ``direct_url.json`` are listed. pip
        writes this file for a package that does not come from an index. The lock file lists all other
        packages.
        """
        direct_urls = [path for path in self._contents if posixpath.basename(path) == _DIRECT_URL]
        folders = {posixpath.dirname(path) for path in direct_urls}
        if not self._has_lock:
            folders |= self._dist_info_folders
        return folders


def library_folders(path: str) -> list[str]:
    """Return the ``lib`` folders next to the folders in `path`, the value of a variable PATH.

    The results are relative paths: ``/usr/bin`` -> ``usr/lib``, ``usr/local/lib``.
    """
    # "/usr/bin" -> "usr". A dict drops repeated prefixes but keeps their order.
    prefixes = dict.fromkeys(posixpath.dirname(folder).strip("/") for folder in path.split(":"))
    folders = []
    for prefix in prefixes:
        folders += [f"{prefix}/lib".lstrip("/"), f"{prefix}/local/lib".lstrip("/")]
    return folders


def _parse_editable_folder(direct_url: bytes) -> str:
    """Return the source folder of a package that was installed with ``pip install --editable``, else ``""``.

    `direct_url` is the content of the package's ``direct_url.json`` (PEP 610). It is empty if the package has
    no such file.
    """
    try:
        origin = json_text.parse(direct_url)
        if not origin["dir_info"].get("editable"):
            return ""
        return unquote(urlsplit(origin["url"]).path)
    except (ValueError, KeyError, TypeError, AttributeError):
        # No file, no JSON, or JSON without a folder. Another program may have written anything into it.
        return ""
