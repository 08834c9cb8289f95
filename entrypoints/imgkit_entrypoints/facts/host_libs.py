"""Find the fabric's libraries on the host, and the image's libraries for CUDA's forward compatibility.

The job script mounts folders of the host below `HOST` (/run/imgkit/host) in the container. The dynamic linker
does not search there. If the recipe sets ``fabric.host_libs: auto``, this module reads the host's libraries
and the image's libraries of the same names. `fabric.library_path` then decides which of them workers load.
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
"""File names of the network plug-in aws-ofi-nccl. NCCL searches for the second name."""
FABRIC_LIBRARIES = ("libcxi.so.1", "libfabric.so.1", *PLUGINS)
LINKS = "/tmp/imgkit-host-libs-"  # noqa: S108 - files.make_links refuses another's
"""Beginning of the path of a folder that is on the library path and has links to the chosen libraries."""
CRAY = "/opt/cray/libfabric"
"""Where HPE installs libfabric. Each version has its own folder below it."""
# Where CUDA's images keep the newer libcuda.so.1 for forward compatibility.
COMPAT = "/usr/local/cuda/compat"
_COMPAT_FOLDERS = (COMPAT, f"{COMPAT}/lib.real", f"{COMPAT}/lib")
"""CUDA's images have the libraries in the first folder, and NGC images in the second.

The start script of NGC images creates the third folder.
"""
# The search ends after this many libraries, in case the host's files are damaged.
_MAX_LIBRARIES = 128
# Limit for parts of a path. Linux follows at most 40 links in a path, and each link may have several parts.
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

The libraries of glibc and of the compiler must fit each other, so they all come from the image. The driver's
libraries (libcuda, libnvidia-ml) are provided by the container runtime.
"""


def requested_by(recipe: SystemFacts, env: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the setting that requests the host's libraries, and the folders to search first.

    The variable `HOST_LIBS` takes precedence over the recipe. If neither requests the libraries, return
    ``("", ())``.

    Raises
    ------
    UsageError : `HOST_LIBS` is neither ``none`` nor ``auto[:/FOLDER]...``.
    """
    setting = env.get(HOST_LIBS)
    if setting:
        mode, *folders = setting.split(":")
        if mode not in ("none", "auto") or any(not folder.startswith("/") for folder in folders):
            hint = "auto, auto:/FOLDER:/FOLDER or none"
            raise UsageError(f"{setting!r} is neither none nor auto", where=HOST_LIBS, hint=hint)
        if mode == "none":
            return "", ()
        return f"{HOST_LIBS}={setting}", tuple(folders)
    if recipe.fabric.host_libs != "auto":
        return "", ()
    return f"{SYSTEM_JSON}: fabric.host_libs auto", recipe.runtime.host_libs


def find_host_libraries(reader: Reader, recipe: SystemFacts, env: Mapping[str, str]) -> HostLibraries | None:
    """Return the fabric's libraries on the host, and the image's files of the same names.

    If neither the recipe nor the user requests the host's libraries, return None.

    Raises
    ------
    UsageError : `HOST_LIBS` is neither ``none`` nor ``auto[:/FOLDER]...``.
    """
    source, first_folders = requested_by(recipe, env)
    if not source:
        return None
    # `HOST` is the mount of the host's folders. Only a launch by `imgkit run`, or a bind option, creates it.
    if not reader.exists(HOST):
        return HostLibraries(source=source, bound=False)
    folders = software.library_folders(reader, env)
    search = _Search(
        reader=reader,
        host_folders=_list_host_folders(reader, first_folders),
        # A folder with links of an earlier launch leads to the host's files, so it is not the image's.
        image_folders=tuple(folder for folder in folders if not folder.startswith(LINKS)),
    )
    # The image's C library is always needed: its version decides whether a library of the host can be loaded.
    for name in (*FABRIC_LIBRARIES, "libc.so.6"):
        search.add(name)  # this also adds all libraries that the host's file needs
    return HostLibraries(
        source=source,
        bound=True,
        host=tuple(search.host_candidates),
        image=tuple(search.image_candidates),
    )


def _list_host_folders(reader: Reader, first: Sequence[str]) -> tuple[str, ...]:
    """Return the folders of the host in which to search for libraries, in order.

    The folders in `first` come first, then the versions of HPE's libfabric with the newest first, and last
    the usual folders of Linux systems.
    """
    versions = sorted(reader.names(f"{HOST}{CRAY}"), key=natural, reverse=True)
    cray = (f"{CRAY}/{version}/lib64" for version in versions)
    triple = f"{platform.machine()}-linux-gnu"
    usual = ("/usr/lib64", f"/usr/lib/{triple}", "/usr/local/lib64", "/usr/local/lib")
    return tuple(dict.fromkeys((*first, *cray, *usual)))


@dataclass(slots=True, kw_only=True)
class _Search:
    """Collects libraries of the host, the libraries that they need, and the image's files of these names."""

    reader: Reader
    host_folders: tuple[str, ...]
    image_folders: tuple[str, ...]
    host_candidates: list[Candidate] = field(default_factory=list)
    image_candidates: list[Candidate] = field(default_factory=list)
    seen_names: set[str] = field(default_factory=set)

    def add(self, name: str, requester_folders: Sequence[str] = ()) -> None:
        """Add the image's and the host's file for `name`, and then the libraries that the host's file needs.

        Parameters
        ----------
        requester_folders : folders of the host to search first. They come from the RPATH and RUNPATH of the
            library that needs this library.
        """
        if name in self.seen_names:  # libraries may need each other in a circle
            return
        if "/" in name:  # the dynamic linker opens such a name as a path, without a search
            return
        if len(self.seen_names) >= _MAX_LIBRARIES:  # the host's files may be damaged
            return
        self.seen_names.add(name)
        self._add_image_library(name)
        if name in IMAGE_LIBRARIES:  # such as the C library, which must never come from the host
            return
        # Only the file in the first folder counts, as for the dynamic linker.
        for folder in (*requester_folders, *self.host_folders):
            path = f"{folder}/{name}"
            # lexists, because a link of the host may lead to a path that only exists on the host.
            if os.path.lexists(self.reader.real_path(f"{HOST}{path}")):
                self._add_host_library(name, path)
                return

    def _add_image_library(self, name: str) -> None:
        """Add the image's file for the library `name`, if there is one in the image's folders."""
        for folder in self.image_folders:
            path = f"{folder}/{name}"
            if self.reader.exists(path):
                self.image_candidates.append(self._read(name, path, self.reader.target(path)))
                return  # only the file in the first folder counts, as for the dynamic linker

    def _add_host_library(self, name: str, path: str) -> None:
        """Add the host's file `path` for the library `name`, and then all libraries that the file needs.

        `add` calls this method, and this method calls `add` for each library that is needed. This ends
        because `add` ignores a name that it has seen before.
        """
        # The path on the host to which all links lead. In the container, the same file is below `HOST`.
        target = _follow_on_host(self.reader, path)
        candidate = self._read(name, path, f"{HOST}{target}" if target else "")
        self.host_candidates.append(candidate)
        shared_object = candidate.object
        if shared_object is None:  # the file cannot be read, so its needs are unknown
            return
        # The dynamic linker searches these folders for the libraries that this file needs.
        origin = str(PurePosixPath(target).parent)
        folders = []
        for folder in (*shared_object.rpath, *shared_object.runpath):
            # $ORIGIN is the folder of the library itself, as in "$ORIGIN/../lib".
            folders.append(folder.replace("$ORIGIN", origin).replace("${ORIGIN}", origin))
        for needed_name in shared_object.needed:
            self.add(needed_name, folders)

    def _read(self, name: str, path: str, target: str) -> Candidate:
        """Read the library in the file `target`. If this fails, the result contains the reason.

        Parameters
        ----------
        name : name under which programs open the library, such as ``libfabric.so.1``.
        path : where the library was found. It may be a symbolic link.
        target : the file to which all links lead. Empty if that file is not mounted in the container.
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
    """Resolve all symbolic links in `path` on the host, and return the result, or "" for too many links.

    The links cannot be resolved by the kernel. The host's root is mounted at `HOST` in the container, so an
    absolute link to /opt/cray must lead to /run/imgkit/host/opt/cray.
    """
    resolved = PurePosixPath("/")
    remaining = list(PurePosixPath(path).parts)
    for _ in range(_MAX_PARTS):  # links may form a circle, which would never end
        if not remaining:
            return str(resolved)
        part = remaining.pop(0)
        if part == "/":  # a link with an absolute path starts again at the root
            resolved = PurePosixPath("/")
            continue
        if part == "..":
            resolved = resolved.parent
            continue
        try:
            link = reader.real_path(f"{HOST}{resolved / part}").readlink()
        except OSError:  # this part of the path is not a link
            resolved /= part
        else:
            remaining = [*PurePosixPath(link).parts, *remaining]
    return ""


def find_cuda_compat(reader: Reader, recipe: SystemFacts, env: Mapping[str, str]) -> CudaCompat | None:
    """Return the image's libraries for CUDA's forward compatibility, or None if they must not be used.

    With these libraries, a newer CUDA runs on an older driver. The variable `CUDA_COMPAT` takes precedence
    over the recipe.

    Raises
    ------
    UsageError : `CUDA_COMPAT` is none of ``none``, ``major`` and ``auto``.
    """
    rule, source = _choose_compat_rule(recipe, env)
    if rule == "none":
        return None
    # Whether the libraries are used is decided later, when the versions of CUDA and the driver are compared.
    compat_folders = _find_cuda_folders(reader, _COMPAT_FOLDERS)
    folder = compat_folders[0] if compat_folders else ""
    return CudaCompat(
        source=source,
        is_for_major=rule == "major",
        folder=folder,
        target=reader.target(f"{folder}/libcuda.so.1") if folder else "",
        cuda_folders=_find_cuda_folders(reader, software.library_folders(reader, env)),
    )


def _choose_compat_rule(recipe: SystemFacts, env: Mapping[str, str]) -> tuple[str, str]:
    """Return the rule for CUDA's forward compatibility, ``none``, ``major`` or ``auto``, and its source."""
    rules = get_args(CompatRule)
    user_rule = env.get(CUDA_COMPAT, "")
    if user_rule and user_rule not in rules:
        raise UsageError(f"{user_rule!r} is none of {', '.join(rules)}", where=CUDA_COMPAT)
    if user_rule:
        return user_rule, f"{CUDA_COMPAT}={user_rule}"
    rule = recipe.runtime.cuda_compat
    if rule == "major":
        return rule, "the default"
    return rule, f"{SYSTEM_JSON}: runtime.cuda_compat {rule}"


def _find_cuda_folders(reader: Reader, folders: Sequence[str]) -> tuple[str, ...]:
    """Return the folders that contain libcuda.so.1, the driver's library."""
    return tuple(folder for folder in folders if reader.exists(f"{folder}/libcuda.so.1"))
