"""Libraries of the host that a job script binds below `HOST`, where no program finds them by itself.

They are read for a recipe with ``fabric.host_libs: auto``; `fabric.library_path` decides which of them
workers load. Also read: the image's own libraries of these names, and its CUDA forward compatibility.
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
"""How the name begins of a folder with links to the chosen libraries, on the path of a program in a run."""
CRAY = "/opt/cray/libfabric"
"""HPE's folder of libfabric, with one folder for each version."""
COMPAT = "/usr/local/cuda/compat"
_COMPAT_FOLDERS = (COMPAT, f"{COMPAT}/lib.real", f"{COMPAT}/lib")
"""CUDA's images have the libraries in the first, NGC's in the second (its start script makes the third)."""
_MOST_LIBRARIES = 128
_MOST_LINKS = 40
OF_IMAGE = frozenset(
    (
        *("libc.so.6", "libm.so.6", "libmvec.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1"),
        *("libutil.so.1", "libresolv.so.2", "libanl.so.1", "libnsl.so.1", "libthread_db.so.1"),
        *("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libgcc_s.so.1", "libstdc++.so.6"),
        *("libcuda.so.1", "libnvidia-ml.so.1"),
    )
)
"""Libraries that never come from the host: those of glibc and the compiler are one set with the image's, and
the runtime brings those of the driver."""


def requested_by(recipe: SystemFacts, env: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return who asks for the host's libraries, and the folders to search first; empty: nobody does.

    Raises
    ------
    UsageError : the variable has another value.
    """
    if value := env.get(HOST_LIBS):
        mode, *folders = value.split(":")
        if mode not in ("none", "auto") or any(not folder.startswith("/") for folder in folders):
            hint = "auto, auto:/FOLDER:/FOLDER or none"
            raise UsageError(f"{value!r} is neither none nor auto", where=HOST_LIBS, hint=hint)
        return (f"{HOST_LIBS}={value}", tuple(folders)) if mode == "auto" else ("", ())
    if recipe.fabric.host_libs != "auto":
        return "", ()
    return f"{SYSTEM_JSON}: fabric.host_libs auto", recipe.runtime.host_libs


def libraries(reader: Reader, recipe: SystemFacts, env: Mapping[str, str]) -> HostLibraries | None:
    """Return what the host and the image have of the fabric's libraries; None if nobody asks.

    Raises
    ------
    UsageError : `HOST_LIBS` has another value than those that it may have.
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
    # The image's C library decides, also where no library of the host could be read.
    for name in (*FABRIC_LIBRARIES, "libc.so.6"):
        search.add(name)
    return HostLibraries(source=source, bound=True, host=tuple(search.host), image=tuple(search.image))


def _host_folders(reader: Reader, first: Sequence[str]) -> tuple[str, ...]:
    """Return the folders of the host in which to look, in order."""
    versions = sorted(reader.names(f"{HOST}{CRAY}"), key=natural, reverse=True)
    cray = (f"{CRAY}/{version}/lib64" for version in versions)
    triple = f"{platform.machine()}-linux-gnu"
    usual = ("/usr/lib64", f"/usr/lib/{triple}", "/usr/local/lib64", "/usr/local/lib")
    return tuple(dict.fromkeys((*first, *cray, *usual)))


@dataclass(slots=True, kw_only=True)
class _Search:
    """The walk over what libraries need, on both sides."""

    reader: Reader
    host_folders: tuple[str, ...]
    image_folders: tuple[str, ...]
    host: list[Candidate] = field(default_factory=list)
    image: list[Candidate] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def add(self, name: str, near: Sequence[str] = ()) -> None:
        """Add `name` of both sides, and then what the host's file needs; `near` are folders of the host."""
        if name in self.seen or len(self.seen) >= _MOST_LIBRARIES or "/" in name:
            return
        self.seen.add(name)
        paths = [f"{folder}/{name}" for folder in self.image_folders]
        path = next((path for path in paths if self.reader.exists(path)), None)
        if path:
            self.image.append(self._read(name, path, self.reader.target(path)))
        if name in OF_IMAGE:
            return
        paths = [f"{folder}/{name}" for folder in (*near, *self.host_folders)]
        path = next((path for path in paths if os.path.lexists(self.reader.real_path(f"{HOST}{path}"))), None)
        if path is None:
            return
        target = _follow_on_host(self.reader, path)
        library = self._read(name, path, f"{HOST}{target}" if target else "")
        self.host.append(library)
        if library.object is not None:
            origin = str(PurePosixPath(target).parent)
            folders = [*library.object.rpath, *library.object.runpath]
            folders = [text.replace("$ORIGIN", origin).replace("${ORIGIN}", origin) for text in folders]
            for needed in library.object.needed:
                self.add(needed, folders)

    def _read(self, name: str, path: str, target: str) -> Candidate:
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
    """Return `path` of the host with its links followed as the host does; empty if they do not end there."""
    resolved, parts = PurePosixPath("/"), [*reversed(PurePosixPath(path).parts[1:])]
    for _ in range(_MOST_LINKS * 16):
        if not parts:
            return str(resolved)
        part = parts.pop()
        if part == "..":
            resolved = resolved.parent
            continue
        try:
            link = str(reader.real_path(f"{HOST}{resolved / part}").readlink())
        except OSError:
            resolved /= part
            continue
        if link.startswith("/"):
            resolved = PurePosixPath("/")
        parts += [item for item in reversed(PurePosixPath(link).parts) if item != "/"]
    return ""


def compat(reader: Reader, recipe: SystemFacts, env: Mapping[str, str]) -> CudaCompat | None:
    """Return the image's folder for CUDA's forward compatibility; None if it must not be used.

    Raises
    ------
    UsageError : the value of `CUDA_COMPAT` is no `CompatRule`.
    """
    rules = get_args(CompatRule)
    value = env.get(CUDA_COMPAT, "")
    if value and value not in rules:
        raise UsageError(f"{value!r} is none of {', '.join(rules)}", where=CUDA_COMPAT)
    rule = value or recipe.runtime.cuda_compat
    if rule == "none":
        return None
    source = "the default"
    if value:
        source = f"{CUDA_COMPAT}={value}"
    elif rule == "auto":
        source = f"{SYSTEM_JSON}: runtime.cuda_compat auto"

    def with_cuda(folders: Sequence[str]) -> tuple[str, ...]:
        return tuple(folder for folder in folders if reader.exists(f"{folder}/libcuda.so.1"))

    folder = (*with_cuda(_COMPAT_FOLDERS), "")[0]
    target = reader.target(f"{folder}/libcuda.so.1") if folder else ""
    cuda_folders = with_cuda(software.library_folders(reader, env))
    return CudaCompat(
        source=source, is_for_major=rule == "major", folder=folder, target=target, cuda_folders=cuda_folders
    )
