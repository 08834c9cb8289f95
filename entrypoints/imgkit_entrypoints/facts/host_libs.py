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
from typing import TypeVar

from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.facts import elf, software
from imgkit_entrypoints.facts.host_facts import Candidate, CudaCompat, HostLibraries
from imgkit_entrypoints.facts.reader import NOT_FILES, Reader, natural
from imgkit_entrypoints.system import CUDA_COMPAT, HOST, HOST_FOLDERS, HOST_LIBS, SYSTEM_JSON

PLUGINS = ("libnccl-net-ofi.so", "libnccl-net.so")
"""Names of aws-ofi-nccl; NCCL looks for the second one."""
WANTED = ("libcxi.so.1", "libfabric.so.1", *PLUGINS)
LINKS = "/tmp/imgkit-host-libs-"  # noqa: S108 - files.make_links refuses another's
"""How the name begins of a folder with links to the chosen libraries, on the path of a program in a run."""
CRAY = "/opt/cray/libfabric"
"""HPE's folder of libfabric, with one folder for each version."""
COMPAT = "/usr/local/cuda/compat"
_COMPAT_FOLDERS = (COMPAT, f"{COMPAT}/lib.real", f"{COMPAT}/lib")
"""CUDA's images have the libraries in the first, NGC's in the second (its start script makes the third)."""
_Kept = TypeVar("_Kept", HostLibraries, CudaCompat)
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


def asked(reader: Reader, env: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Who asks for the host's libraries, and the folders to search first; empty: nobody does.

    Raises
    ------
    UsageError : the variable has another value.
    """
    if given := env.get(HOST_LIBS):
        word, *folders = given.split(":")
        if word not in ("none", "auto") or any(not folder.startswith("/") for folder in folders):
            raise UsageError(
                f"{given!r} is neither none nor auto",
                where=HOST_LIBS,
                hint="auto, auto:/FOLDER:/FOLDER or none",
            )
        return (f"{HOST_LIBS}={given}", tuple(folders)) if word == "auto" else ("", ())
    recipe = software.baked(reader, str(SYSTEM_JSON))
    fabric, runtime = recipe.get("fabric"), recipe.get("runtime")
    if not isinstance(fabric, dict) or fabric.get("host_libs") != "auto":
        return "", ()
    listed = runtime.get("host_libs") if isinstance(runtime, dict) else None
    folders = [item for item in listed if isinstance(item, str)] if isinstance(listed, list) else []
    return f"{SYSTEM_JSON}: fabric.host_libs auto", tuple(folders)


def libraries(reader: Reader, env: Mapping[str, str]) -> HostLibraries | None:
    """What the host and the image have of the fabric's libraries; None if nobody asks.

    Raises
    ------
    UsageError : `HOST_LIBS` has another value than those that it may have.
    """
    source, first = asked(reader, env)
    if not source:
        return None
    if saved := _saved(reader, HostLibraries, "host_libraries"):
        return saved
    if not reader.exists(HOST):
        return HostLibraries(source=source, bound=False)
    own = tuple(folder for folder in software.library_folders(reader, env) if not folder.startswith(LINKS))
    search = _Search(reader=reader, host=_host_folders(reader, first), image=own)
    for name in WANTED:
        search.look(name)
    # The image's C library decides, also where no library of the host could be read.
    search.look("libc.so.6")
    return HostLibraries(source=source, bound=True, host=tuple(search.found), image=tuple(search.of_image))


def _saved(reader: Reader, kind: type[_Kept], name: str) -> _Kept | None:
    """What a saved tree keeps in the place of libraries; None on a live machine, or if it keeps nothing."""
    data = reader.not_files().get(name)
    if data is None:
        return None
    try:
        kept: _Kept = json_text.read(kind, data, name)
    except ValueError as error:
        raise UsageError(str(error), where=str(reader.place(NOT_FILES))) from error
    return kept


def _host_folders(reader: Reader, first: Sequence[str]) -> tuple[str, ...]:
    """Folders of the host in which to look, in order."""
    versions = sorted(reader.names(f"{HOST}{CRAY}"), key=natural, reverse=True)
    cray = (f"{CRAY}/{version}/lib64" for version in versions)
    triple = f"{platform.machine()}-linux-gnu"
    usual = ("/usr/lib64", f"/usr/lib/{triple}", "/usr/local/lib64", "/usr/local/lib")
    return tuple(dict.fromkeys((*first, *cray, *usual)))


@dataclass(slots=True, kw_only=True)
class _Search:
    """The walk over what libraries need, on both sides."""

    reader: Reader
    host: tuple[str, ...]
    image: tuple[str, ...]
    found: list[Candidate] = field(default_factory=list)
    of_image: list[Candidate] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def look(self, name: str, near: Sequence[str] = ()) -> None:
        """Find `name` on both sides, and then what the host's file needs; `near` are folders of the host."""
        if name in self.seen or len(self.seen) >= _MOST_LIBRARIES or "/" in name:
            return
        self.seen.add(name)
        for folder in self.image:
            if self.reader.exists(f"{folder}/{name}"):
                path = f"{folder}/{name}"
                self.of_image.append(self._read(name, path, self.reader.target(path)))
                break
        if name in OF_IMAGE:
            return
        for folder in (*near, *self.host):
            path = f"{folder}/{name}"
            if os.path.lexists(self.reader.place(f"{HOST}{path}")):
                real = _followed(self.reader, path)
                known = self._read(name, path, f"{HOST}{real}" if real else "")
                self.found.append(known)
                if known.object is not None:
                    origin = str(PurePosixPath(real).parent)
                    own = (*known.object.rpath, *known.object.runpath)
                    folders = [word.replace("$ORIGIN", origin).replace("${ORIGIN}", origin) for word in own]
                    for further in known.object.needed:
                        self.look(further, folders)
                return

    def _read(self, name: str, path: str, target: str) -> Candidate:
        if not target or not self.reader.exists(target):
            fault = f"is a link out of what is bound ({', '.join(HOST_FOLDERS)})"
            return Candidate(name=name, path=path, target="", fault=fault)
        try:
            read = elf.read(Path(self.reader.place(target)))
        except OSError as error:
            return Candidate(name=name, path=path, target=target, fault=f"cannot be read: {error.strerror}")
        except elf.NotShared as error:
            return Candidate(name=name, path=path, target=target, fault=str(error))
        return Candidate(name=name, path=path, target=target, object=read)


def _followed(reader: Reader, path: str) -> str:
    """`path` of the host with its links followed as the host does; empty if they do not end there."""
    done, left = PurePosixPath("/"), [*reversed(PurePosixPath(path).parts[1:])]
    for _ in range(_MOST_LINKS * 16):
        if not left:
            return str(done)
        part = left.pop()
        if part == "..":
            done = done.parent
            continue
        try:
            link = str(reader.place(f"{HOST}{done / part}").readlink())
        except OSError:
            done /= part
            continue
        parts = PurePosixPath(link).parts
        if link.startswith("/"):
            done, parts = PurePosixPath("/"), parts[1:]
        left += reversed(parts)
    return ""


def compat(reader: Reader, env: Mapping[str, str]) -> CudaCompat | None:
    """The image's folder for CUDA's forward compatibility; None if nobody asks for it.

    Raises
    ------
    UsageError : `CUDA_COMPAT` is neither ``none`` nor ``auto``.
    """
    given = env.get(CUDA_COMPAT)
    if given not in (None, "", "none", "auto"):
        raise UsageError(f"{given!r} is neither none nor auto", where=CUDA_COMPAT)
    runtime = software.baked(reader, str(SYSTEM_JSON)).get("runtime")
    recipe = runtime.get("cuda_compat") if isinstance(runtime, dict) else None
    if (given or recipe) != "auto":
        return None
    if saved := _saved(reader, CudaCompat, "cuda_compat"):
        return saved
    source = f"{CUDA_COMPAT}=auto" if given else f"{SYSTEM_JSON}: runtime.cuda_compat auto"
    folders = software.library_folders(reader, env)
    others = tuple(folder for folder in folders if reader.exists(f"{folder}/libcuda.so.1"))
    for folder in _COMPAT_FOLDERS:
        if reader.exists(f"{folder}/libcuda.so.1"):
            target = reader.target(f"{folder}/libcuda.so.1")
            return CudaCompat(source=source, folder=folder, target=target, others=others)
    return CudaCompat(source=source, others=others)
