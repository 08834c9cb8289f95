"""Debian packages: dpkg's list of what is installed, and the licences in debian/copyright.

The list has one paragraph per package. A distroless image has a file for each package instead of the list.
The licence files have the machine-readable form 1.0 of the Debian policy (DEP 5).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from imgkit_builder.inventory import licences
from imgkit_builder.inventory.packages import Licence, Package
from imgkit_builder.inventory.paragraphs import paragraphs, value

_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]{1,127}")
_VERSION = re.compile(r"[0-9A-Za-z.+:~-]{1,128}")
_ARCHITECTURE = re.compile(r"[a-z0-9-]{0,32}")
_FORMAT = "copyright-format/1.0"
_HEAD_CHARACTERS = 400
"""The format is the first field, behind comments at most."""


def installed(text: str) -> Iterator[Package | str]:
    """Yield the packages that the list `text` says are there, or what is wrong with an entry."""
    for number, fields in enumerate(paragraphs(text), 1):
        name, version = value(fields, "package"), value(fields, "version")
        architecture = value(fields, "architecture")
        state = value(fields, "status").split()
        if state and state[-1] in ("not-installed", "config-files"):
            continue
        if _NAME.fullmatch(name) and _VERSION.fullmatch(version) and _ARCHITECTURE.fullmatch(architecture):
            yield Package(kind="deb", name=name, version=version, architecture=architecture)
        elif name or state:
            yield f"entry {number} is no package"


def licence(text: str) -> Licence:
    """The licences in debian/copyright, which is `text`; empty where it is not machine-readable."""
    if _FORMAT not in text[:_HEAD_CHARACTERS]:
        return Licence()
    names: dict[str, None] = {}
    for fields in paragraphs(text):
        if "files" in fields:
            name = value(fields, "license").partition("\n")[0].strip()
            names[name] = None
    stated = [name for name in names if name]
    spdx = [licences.from_debian(name) for name in names]
    return Licence(
        spdx=licences.all_of(spdx) if all(spdx) else "", stated=licences.shortened(", ".join(stated))
    )
