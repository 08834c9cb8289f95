"""What comes in front of the library path: CUDA's forward compatibility, and libraries of the host.

A library of the host is used only if the image can load it: every version of a symbol that it needs must be
defined by the library that will serve it. The dynamic linker compares the same versions, but only when NCCL
has already begun, and NCCL then uses TCP or ends.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence

from imgkit_entrypoints import cuda_drivers
from imgkit_entrypoints.fabric.fabric_plan import PlanDraft
from imgkit_entrypoints.facts.host_facts import Candidate, CudaCompat, HostLibraries
from imgkit_entrypoints.facts.host_libs import COMPAT, FABRIC_LIBRARIES, LINKS, OF_IMAGE, PLUGINS
from imgkit_entrypoints.system import HOST, HOST_FOLDERS, FabricKind

VARIABLE = "LD_LIBRARY_PATH"
KEY = "host_libs"
COMPAT_KEY = "cuda_compat"
_FOLLOWS = "which is not used"
"""Part of a fault that follows from that of another library, which is reported itself."""
_OF_RUNTIME = "/.singularity.d/libs"
"""Folder of the driver's libraries, which the runtime adds to the image's path."""


def decide_library_path(draft: PlanDraft, kind: FabricKind) -> None:
    """Decide LD_LIBRARY_PATH where the recipe or a variable asks for it."""
    compat = draft.facts.cuda_compat
    compat_folder = _decide_compat(draft, compat) if compat else ""
    if draft.facts.host_libraries:
        _decide_host(draft, draft.facts.host_libraries, kind)
    folders, reasons = [], []
    if compat_folder:
        folders.append(compat_folder)
        reasons.append(f"{compat_folder} for CUDA")
    user_folders, image_folders = _current_folders(draft)
    folders += user_folders
    if draft.links:
        folders.append(links_folder(draft.links))
        reasons.append(f"{folders[-1]} with {', '.join(draft.links)} of the host")
    if not reasons:
        return
    value = ":".join(dict.fromkeys((*folders, *image_folders)))
    draft.chosen[VARIABLE] = value
    draft.report(VARIABLE, value, f"adds {' and '.join(reasons)}; the rest is as it was", used=True)


def links_folder(links: Mapping[str, str]) -> str:
    """Return the node's folder with a link for each library; the same libraries have the same folder."""
    digest = hashlib.sha256(repr(sorted(links.items())).encode()).hexdigest()[:12]
    return f"{LINKS}{os.getuid()}-{digest}"


def _current_folders(draft: PlanDraft) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the folders of the library path that the user added, and those of image and runtime.

    Those that an outer launch put there are left out: this one decides again.
    """
    compat = draft.facts.cuda_compat.folder if draft.facts.cuda_compat else ""
    folders = [
        folder
        for folder in (draft.value(VARIABLE) or "").split(":")
        if folder and folder != compat and not folder.startswith(LINKS)
    ]
    # Without a manifest nobody knows the image's path: what the runtime leaves of it counts as the user's.
    image_path = (draft.facts.image_env or {}).get(VARIABLE, "")
    image_folders = {_OF_RUNTIME, *image_path.split(":")}
    users = tuple(folder for folder in folders if folder not in image_folders)
    return users, tuple(folder for folder in folders if folder in image_folders)


def _decide_host(draft: PlanDraft, libraries: HostLibraries, kind: FabricKind) -> None:
    """Choose the libraries of the host, and report each with its reason."""
    source = libraries.source
    if kind != "slingshot":
        draft.report(KEY, "auto", f"the fabric is {kind}, which needs none of them ({source})")
        return
    if not libraries.bound:
        binds = ",".join(f"{folder}:{HOST}{folder}:ro" for folder in HOST_FOLDERS)
        problem = f"{HOST} does not exist, so no library of the host can be used ({source})"
        draft.report(KEY, "auto", problem)
        draft.warn(problem, f"start the job with imgkit run, or the container with --bind {binds}")
        return
    check = _LoadCheck(libraries, user_folders=_current_folders(draft)[0])
    names = [name for name in FABRIC_LIBRARIES if name in check.host]
    if not names:
        problem = f"the host has none of {', '.join(FABRIC_LIBRARIES)} in {HOST}: {source}"
        draft.report(KEY, "auto", problem)
        draft.warn(problem, "list their folders in the recipe's system.runtime.host_libs")
    for name in names:
        library = check.host[name]
        if path := check.user_path(name):
            folder = path.rpartition("/")[0]
            reason = f"{VARIABLE} names {folder}, which comes before the host's {library.path}"
            draft.report(name, path, reason, origin="user")
        elif fault := check.fault(name):
            draft.report(name, library.path, f"{name} {fault}")
            # The two names of the plug-in are mostly one file.
            if _FOLLOWS not in fault and not (name == PLUGINS[1] and PLUGINS[0] in check.host):
                draft.warn(f"{KEY}: the host's {library.path} is not used: {name} {fault}", _remedy(fault))
    selected = check.select()
    for name, library in selected.items():
        draft.links[name] = library.target
        draft.report(name, library.path, check.evidence(library), used=True)
    # NCCL opens the second name; an installation may have the first one alone.
    if PLUGINS[0] in selected and PLUGINS[1] not in check.host:
        draft.links[PLUGINS[1]] = selected[PLUGINS[0]].target


def _remedy(fault: str) -> str:
    if "GLIBC" in fault:
        return "use a newer base image, or libraries built in the image"
    return "use libraries that fit the image, or build them in the image"


class _LoadCheck:
    """Which libraries of the host the image can load."""

    def __init__(self, libraries: HostLibraries, user_folders: Sequence[str]) -> None:
        self.user_folders = user_folders
        self.host = {library.name: library for library in libraries.host}
        self.image = {library.name: library for library in libraries.image}
        self.faults: dict[str, str] = {}
        """The fault of each library of the host; empty: it can be loaded."""

    def user_path(self, name: str) -> str:
        """Return the path of the user's own library; empty if the user has none."""
        path = self.image[name].path if name in self.image else ""
        return path if path.rpartition("/")[0] in self.user_folders else ""

    def select(self) -> dict[str, Candidate]:
        """Return the fabric's libraries that can be loaded, and what they need of the host."""
        selected: dict[str, Candidate] = {}
        names = [name for name in FABRIC_LIBRARIES if name in self.host and not self.user_path(name)]
        names = [name for name in names if not self.fault(name)]
        for name in names:  # grows
            library = self.host[name]
            if name not in selected and library.object is not None:
                selected[name] = library
                names += [needed for needed in library.object.needed if self.from_host(library, needed)]
        return selected

    def evidence(self, library: Candidate) -> str:
        """Return what was compared."""
        versions = library.object.needs.get("libc.so.6", ()) if library.object else ()
        newest = _newest_version(versions, "GLIBC")
        needed = f"GLIBC_{newest}" if newest else "no version of glibc"
        libc = self.image.get("libc.so.6")
        return f"the host's; it needs {needed}, {_supported_text(libc, 'GLIBC_') if libc else ''}"

    def fault(self, name: str) -> str:
        """Return why the image cannot load the host's `name`; empty if it can."""
        if name not in self.faults:
            self.faults[name] = ""  # libraries that need each other
            self.faults[name] = self._find_fault(self.host[name])
        return self.faults[name]

    def _find_fault(self, library: Candidate) -> str:
        shared, libc = library.object, self.image.get("libc.so.6")
        if shared is None:
            return f"of the host {library.fault} ({library.path})"
        if libc is None or libc.object is None:
            return "cannot be compared: the image's libc.so.6 is not on the library path"
        if shared.machine != libc.object.machine:
            return f"is for {shared.machine}, the image is for {libc.object.machine} ({library.path})"
        if library.name not in PLUGINS and shared.soname != library.name:
            return f"has the SONAME {shared.soname or '(none)'} ({library.path})"
        if image := self.image.get(library.name):
            lost = [version for version in _defined_versions(image) if version not in shared.defines]
            if lost:
                return f"lacks {lost[-1]}, which the image's has ({image.path})"
        faults = (self._need_fault(library, needed) for needed in shared.needed)
        return next(filter(None, faults), "")

    def from_host(self, library: Candidate, needed: str) -> bool:
        """Return whether `library` gets the library `needed` from the host."""
        if needed in OF_IMAGE or needed not in self.host or self.user_path(needed):
            return False
        image = self.image.get(needed)
        if image is not None and needed not in FABRIC_LIBRARIES and not _missing_version(library, image):
            return False
        return not self.fault(needed) and not _missing_version(library, self.host[needed])

    def _need_fault(self, library: Candidate, needed: str) -> str:
        """Return why `library` cannot get the library `needed`; empty if it can."""
        image, host = self.image.get(needed), self.host.get(needed)
        if self.from_host(library, needed):
            for folder in library.object.rpath if library.object else ():
                if image is not None and image.path == f"{folder}/{needed}":
                    return f"has the RPATH {folder}, where the image has another {needed}"
            return ""
        if image is not None:
            version = _missing_version(library, image)
            if not version:
                return ""
            if host and needed not in OF_IMAGE and (fault := self.fault(needed)):
                return f"needs {version}, and the host's {needed} {fault}"
            return f"needs {version}, {_supported_text(image, version)}"
        if host is None:
            where = "the image does not have" if needed in OF_IMAGE else "neither the image nor the host has"
            return f"needs {needed}, which {where}"
        if fault := self.fault(needed):
            reason = _FOLLOWS if needed in FABRIC_LIBRARIES else f"and {needed} {fault}"
            return f"needs {needed}, {reason}"
        return f"needs {_missing_version(library, host)} of {needed}, which the host's lacks"


def _missing_version(library: Candidate, server: Candidate) -> str:
    """Return the newest version that `library` needs of `server`, which lacks it; empty if there is none.

    A library that defines no versions at all serves every one: the dynamic linker only warns then.
    """
    needs = library.object.needs.get(server.name, ()) if library.object else ()
    defined = _defined_versions(server)
    return max((need for need in needs if defined and need not in defined), key=_version_key, default="")


def _defined_versions(library: Candidate) -> tuple[str, ...]:
    return library.object.defines if library.object is not None else ()


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]{1,9}", version))


def _newest_version(versions: Sequence[str], prefix: str) -> str:
    """Return the number of the newest version ``PREFIX_N``."""
    pattern = rf"{re.escape(prefix)}_[0-9.]+"
    newest = max(
        (version for version in versions if re.fullmatch(pattern, version)), key=_version_key, default=""
    )
    return newest[len(prefix) + 1 :]


def _supported_text(server: Candidate, version: str) -> str:
    newest = _newest_version(_defined_versions(server), version.rpartition("_")[0])
    return f"the image has {newest} ({server.path})" if newest else f"which the image's {server.path} lacks"


def _decide_compat(draft: PlanDraft, compat: CudaCompat) -> str:
    """Report and return the folder of CUDA's forward compatibility; empty where it must not be used."""
    if compat.is_for_major and not _has_newer_major(draft):
        return ""  # the driver runs the image's CUDA: nothing is decided
    fault, reason = _compat_fault(draft, compat)
    user_folders = _current_folders(draft)[0]
    folder = next((folder for folder in compat.cuda_folders if folder in user_folders), "")
    if not fault and folder:
        fault = f"{VARIABLE} names {folder}, which has a libcuda.so.1 as well"
    value = compat.folder or COMPAT
    draft.report(COMPAT_KEY, value, f"{fault or reason} ({compat.source})", used=not fault)
    return "" if fault else compat.folder


def _has_newer_major(draft: PlanDraft) -> bool:
    """Return whether the image's CUDA is known to be of a newer major version than the driver supports."""
    driver = _version_key(draft.facts.driver_version)
    needed = cuda_drivers.parse_cuda(draft.env.get("CUDA_VERSION", ""))
    if not driver or needed is None or driver[0] > cuda_drivers.NEWEST_BRANCH:
        return False
    return needed[0] > cuda_drivers.supported_cuda(driver[0])[0]


def _compat_fault(draft: PlanDraft, compat: CudaCompat) -> tuple[str, str]:
    """Return why forward compatibility must not be used, or why it is used."""
    facts, cuda_version = draft.facts, draft.env.get("CUDA_VERSION", "")
    if not compat.folder:
        return f"the image has no {COMPAT}/libcuda.so.1", ""
    driver = _version_key(facts.driver_version)
    needed = cuda_drivers.parse_cuda(cuda_version)
    if not driver or needed is None:
        text = facts.driver or "does not exist"
        return f"unknown versions: /proc/driver/nvidia/version {text}; CUDA_VERSION={cuda_version!r}", ""
    supported = cuda_drivers.supported_cuda(driver[0])
    text = (
        f"driver {facts.driver_version} supports CUDA {supported[0]}.{supported[1]}, the image has "
        f"{needed[0]}.{needed[1]}"
    )
    if driver[0] > cuda_drivers.NEWEST_BRANCH and needed > supported:
        reason = "is newer than imgkit's table, so the CUDA that it supports is unknown"
        return f"driver {facts.driver_version} {reason}", ""
    if needed <= supported:
        return text, ""
    library = re.search(r"libcuda\.so\.([0-9]{3,5}(?:\.[0-9]{1,5}){1,2})$", compat.target)
    if library and _version_key(library[1]) <= driver:
        return f"{text}, but its {compat.target} is not newer than the driver", ""
    models = sorted({gpu.model for gpu in facts.gpu_devices})
    if not models:
        return f"{text}, but forward compatibility is for data-centre GPUs, and the driver shows no GPU", ""
    for model in models:
        if not cuda_drivers.is_data_centre_gpu(model):
            name = model or "a GPU without a name"
            return f"{text}, but forward compatibility is for data-centre GPUs, and {name} is none", ""
    return "", f"{text}; {', '.join(models)} is a data-centre GPU"
