"""Read the libraries of the host, and the image's CUDA forward compatibility.

A job script binds folders of the host below `HOST` (/run/imgkit/host), where programs do not find libraries
by themselves. For a recipe with ``fabric.host_libs: auto`` this module reads the host's libraries and the
image's libraries of the same names. `fabric.library_path` decides which of them workers load.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import get_args

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.facts import elf, software
from imgkit_entrypoints.facts.host_facts import Candidate, CudaCompat, HostLibraries
from imgkit_entrypoints.facts.reader import Reader, natural
from imgkit_entrypoints.system import (
    CUDA_COMPAT,
    HOST,
    HOST_FOLDERS,
    HOST_LIBS,
    SYSTEM_JSON,
    CompatRule,
    SystemFacts,
)

PLUGINS = ("libnccl-net-ofi.so", "libnccl-net.so")
"""Names of aws-ofi-nccl; NCCL looks for the second one."""
FABRIC_LIBRARIES = ("libcxi.so.1", "libfabric.so.1", *PLUGINS)
LINKS = "/tmp/imgkit-host-libs-"  # noqa: S108 - files.make_links refuses another's
"""Beginning of the name of the folder with links to the chosen libraries, which is on the library path."""
CRAY = "/opt/cray/libfabric"
"""HPE's folder of libfabric, with one folder for each version."""
# Where CUDA's images keep the newer libcuda.so.1 for forward compatibility.
COMPAT = "/usr/local/cuda/compat"
_COMPAT_FOLDERS = (COMPAT, f"{COMPAT}/lib.real", f"{COMPAT}/lib")
"""CUDA's images have the libraries in the first, NGC's in the second (its start script makes the third)."""
# The search ends after so many libraries.
_MAX_LIBRARIES = 128
# Linux follows at most 40 links in a path, and each may have several parts.
_MAX_PARTS = 40 * 16
IMAGE_LIBRARIES = frozenset(
    (
        *("libc.so.6", "libm.so.6", "libmvec.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1"),
        *("libutil.so.1", "libresolv.so.2", "libanl.so.1", "libnsl.so.1", "libthread_db.so.1"),
        *("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libgcc_s.so.1", "libstdc++.so.6"),
        *("libcuda.so.1", "libnvidia-ml.so.1"),
    )
)
"""Libraries that never come from the host.

Those of glibc and of the compiler must fit each other, so all come from the image. The container runtime
provides those of the driver.
"""


def requested_by(recipe: SystemFacts, env: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the setting that asks for the host's libraries, and the folders to search first.

    The variable `HOST_LIBS` counts before the recipe. If nothing asks for the libraries, return ``("", ())``.

    Raises
    ------
    UsageError : `HOST_LIBS` is neither ``none`` nor ``auto[:/FOLDER]...``.
    """
    value = env.get(HOST_LIBS)
    if value:
        mode, *folders = value.split(":")
        if mode not in ("none", "auto") or any(not folder.startswith("/") for folder in folders):
            hint = "auto, auto:/FOLDER:/FOLDER or none"
            raise UsageError(f"{value!r} is neither none nor auto", where=HOST_LIBS, hint=hint)
        if mode == "none":
            return "", ()
        return f"{HOST_LIBS}={value}", tuple(folders)
    if recipe.fabric.host_libs != "auto":
        return "", ()
    return f"{SYSTEM_JSON}: fabric.host_libs auto", recipe.runtime.host_libs


def find_host_libraries(reader: Reader, recipe: SystemFacts, env: Mapping[str, str]) -> HostLibraries | None:
    """Return the libraries of the fabric that the host and the image have.

    Return None if neither the recipe nor the user asks for the host's libraries.

    Raises
    ------
    UsageError : `HOST_LIBS` is neither ``none`` nor ``auto[:/FOLDER]...``.
    """
    source, first = requested_by(recipe, env)
    if not source:
        return None
    if not reader.exists(HOST):
        return HostLibraries(source=source, bound=False)
    folders = software.library_folders(reader, env)
    search = _Search(
        reader=reader,
        host_folders=_host_folders(reader, first),
        image_folders=tuple(folder for folder in folders if not folder.startswith(LINKS)),
    )
    # The image's C library is always added, because it decides whether a library of the host can be loaded.
    for name in (*FABRIC_LIBRARIES, "libc.so.6"):
        search.add(name)
    return HostLibraries(source=source, bound=True, host=tuple(search.host), image=tuple(search.image))


def _host_folders(reader: Reader, first: Sequence[str]) -> tuple[str, ...]:
    """Return the folders of the host to search: `first`, HPE's libfabric (newest first), the system's."""
    versions = sorted(reader.names(f"{HOST}{CRAY}"), key=natural, reverse=True)
    cray = (f"{CRAY}/{version}/lib64" for version in versions)
    triple = f"{platform.machine()}-linux-gnu"
    usual = ("/usr/lib64", f"/usr/lib/{triple}", "/usr/local/lib64", "/usr/local/lib")
    return tuple(dict.fromkeys((*first, *cray, *usual)))


@dataclass(slots=True, kw_only=True)
class _Search:
    """Collects libraries of host and image, and then the libraries that those of the host need."""

    reader: Reader
    host_folders: tuple[str, ...]
    image_folders: tuple[str, ...]
    host: list[Candidate] = field(default_factory=list)
    image: list[Candidate] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def add(self, name: str, requester_folders: Sequence[str] = ()) -> None:
        """Add the image's and the host's file for `name`, and then the libraries that the host's file needs.

        Parameters
        ----------
        requester_folders : folders of the host to search first. The library that needs this one names them
            (RPATH and RUNPATH).
        """
        # Libraries may need each other in a circle. A name with a slash is not searched for.
        if name in self.seen or len(self.seen) >= _MAX_LIBRARIES or "/" in name:
            return
        self.seen.add(name)
        for folder in self.image_folders:
            path = f"{folder}/{name}"
            if self.reader.exists(path):
                self.image.append(self._read(name, path, self.reader.target(path)))
                break
        if name in IMAGE_LIBRARIES:
            return
        for folder in (*requester_folders, *self.host_folders):
            path = f"{folder}/{name}"
            if os.path.lexists(self.reader.real_path(f"{HOST}{path}")):
                self._add_host_library(name, path)
                break

    def _add_host_library(self, name: str, path: str) -> None:
        """Add the host's file `path` for the library `name`, and then the libraries that the file needs."""
        target = _follow_on_host(self.reader, path)
        library = self._read(name, path, f"{HOST}{target}" if target else "")
        self.host.append(library)
        if library.object is None:
            return
        origin = str(PurePosixPath(target).parent)
        folders = []
        for folder in (*library.object.rpath, *library.object.runpath):
            # $ORIGIN is the folder of the library itself, as in "$ORIGIN/../lib".
            folders.append(folder.replace("$ORIGIN", origin).replace("${ORIGIN}", origin))
        for needed in library.object.needed:
            self.add(needed, folders)

    def _read(self, name: str, path: str, target: str) -> Candidate:
        """Read the library in the file `target`. If it cannot be read, the result has the reason.

        Parameters
        ----------
        name : name by which programs open the library, such as ``libfabric.so.1``.
        path : where the library was found. It may be a link.
        target : the file after all links. Empty if the links lead to a place that is not mounted.
        """
        if not target or not self.reader.exists(target):
            fault = f"is a link out of what is bound ({', '.join(HOST_FOLDERS)})"
            return Candidate(name=name, path=path, target="", fault=fault)
        try:
            library = elf.read(Path(self.reader.real_path(target)))
        except OSError as error:
            return Candidate(name=name, path=path, target=target, fault=f"cannot be read: {error.strerror}")
        except elf.NotShared as error:
            return Candidate(name=name, path=path, target=target, fault=str(error))
        version, opens = software.inspect_library(self.reader, name, target)
        return Candidate(name=name, path=path, target=target, object=library, version=version, opens=opens)


def _follow_on_host(reader: Reader, path: str) -> str:
    """Return `path` of the host with all links followed, or "" if there are too many links.

    The container itself would follow them wrongly: the host's root is mounted at `HOST`, so an absolute link
    to /opt/cray means /run/imgkit/host/opt/cray.
    """
    resolved = PurePosixPath("/")
    remaining = list(PurePosixPath(path).parts)
    for _ in range(_MAX_PARTS):
        if not remaining:
            return str(resolved)
        part = remaining.pop(0)
        if part == "/":  # the beginning of an absolute path
            resolved = PurePosixPath("/")
        elif part == "..":
            resolved = resolved.parent
        else:
            try:
                link = reader.real_path(f"{HOST}{resolved / part}").readlink()
            except OSError:  # it is no link
                resolved /= part
            else:
                remaining = [*PurePosixPath(link).parts, *remaining]
    return ""


def find_cuda_compat(reader: Reader, recipe: SystemFacts, env: Mapping[str, str]) -> CudaCompat | None:
    """Return the image's libraries for CUDA's forward compatibility, or None if they must not be used.

    With these libraries, a newer CUDA runs on an older driver. The variable `CUDA_COMPAT` counts before the
    recipe.

    Raises
    ------
    UsageError : `CUDA_COMPAT` is none of ``none``, ``major`` and ``auto``.
    """
    rules = get_args(CompatRule)
    value = env.get(CUDA_COMPAT, "")
    if value and value not in rules:
        raise UsageError(f"{value!r} is none of {', '.join(rules)}", where=CUDA_COMPAT)
    rule = value or recipe.runtime.cuda_compat
    if rule == "none":
        return None
    if value:
        source = f"{CUDA_COMPAT}={value}"
    elif rule == "auto":
        source = f"{SYSTEM_JSON}: runtime.cuda_compat auto"
    else:
        source = "the default"
    compat_folders = _folders_with_cuda(reader, _COMPAT_FOLDERS)
    folder = compat_folders[0] if compat_folders else ""
    return CudaCompat(
        source=source,
        is_for_major=rule == "major",
        folder=folder,
        target=reader.target(f"{folder}/libcuda.so.1") if folder else "",
        cuda_folders=_folders_with_cuda(reader, software.library_folders(reader, env)),
    )


def _folders_with_cuda(reader: Reader, folders: Sequence[str]) -> tuple[str, ...]:
    """Return those of `folders` that have the driver's library."""
    return tuple(folder for folder in folders if reader.exists(f"{folder}/libcuda.so.1"))
