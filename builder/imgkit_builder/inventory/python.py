"""Python packages, as pip finds them: METADATA of wheels, PKG-INFO of eggs and of distutils."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from imgkit_builder.inventory import licences
from imgkit_builder.inventory.packages import Licence, Package
from imgkit_builder.inventory.paragraphs import Fields, first, value

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_VERSION = re.compile(r"[0-9A-Za-z.!+_*-]{1,128}")
_FOLDERS = ("site-packages", "dist-packages")
_ENDINGS = (".dist-info/METADATA", ".egg-info/PKG-INFO", ".egg/EGG-INFO/PKG-INFO", ".egg-info")


def describes(path: str) -> bool:
    """Whether the file `path` describes a Python package."""
    return path.endswith(_ENDINGS)


def package(path: str, text: str) -> Package | None:
    """The package that the file `path` describes; None where it is none.

    The name of the file says name and version where `text` does not, where it is too large.
    """
    ending = next(one for one in _ENDINGS if path.endswith(one))
    entry = PurePosixPath(path.removesuffix(ending))
    fields = first(text)
    name, version = value(fields, "name"), value(fields, "version")
    if not _NAME.fullmatch(name) or not _VERSION.fullmatch(version):
        name, version = (*entry.name.split("-"), "", "")[:2]
    if not _NAME.fullmatch(name) or not _VERSION.fullmatch(version):
        return None
    return Package(kind="pypi", name=name, version=version, folder=folder_of(path), licence=_licence(fields))


def folder_of(path: str) -> str:
    """The folder of the package that the file `path` describes."""
    ending = next(one for one in _ENDINGS if path.endswith(one))
    return str(PurePosixPath("/", path.removesuffix(ending)).parent)


def is_installed(package: Package) -> bool:
    """Whether Python finds it; what another one brings along, as ``setuptools/_vendor`` has, is none."""
    return PurePosixPath(package.folder).name in _FOLDERS


def _licence(fields: Fields) -> Licence:
    """The licence by the three fields that name one, the newest first; two classifiers are no expression."""
    if expression := value(fields, "license-expression"):
        return Licence(spdx=licences.expression(expression), stated=licences.shortened(expression))
    stated = value(fields, "license")
    if stated.upper() == "UNKNOWN":
        stated = ""
    classified = [one for one in fields.get("classifier", ()) if one.startswith("License :: ")]
    spdx = licences.from_words(stated)
    if not spdx and len(classified) == 1:
        spdx = licences.from_classifier(classified[0])
    # Some packages put the whole text there.
    words = [stated.partition("\n")[0], *(one.rpartition(" :: ")[2] for one in classified)]
    return Licence(spdx=spdx, stated=licences.shortened("; ".join(filter(None, words))))
