"""Decide which folders go in front of LD_LIBRARY_PATH.

They hold CUDA's libraries for forward compatibility, and libraries of the host such as libfabric. A library
of the host is used only if the image can load it, which means that every symbol version that it needs (such
as GLIBC_2.34) is defined by the library that will serve it. The dynamic linker compares the same versions,
but only after NCCL has started, and NCCL then falls back to TCP or ends.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from imgkit_entrypoints import cuda_drivers
from imgkit_entrypoints.fabric.fabric_plan import PlanDraft
from imgkit_entrypoints.facts.host_facts import Candidate, CudaCompat, HostLibraries
from imgkit_entrypoints.facts.host_libs import COMPAT, FABRIC_LIBRARIES, IMAGE_LIBRARIES, LINKS, PLUGINS
from imgkit_entrypoints.system import HOST, HOST_FOLDERS, FabricKind

VARIABLE = "LD_LIBRARY_PATH"
# Settings of the recipe (fabric.host_libs, runtime.cuda_compat), as reports name them.
KEY = "host_libs"
COMPAT_KEY = "cuda_compat"
_FOLLOWS = "which is not used"
"""Part of a problem that is due to another library. That library gets a warning of its own."""
_RUNTIME_FOLDER = "/.singularity.d/libs"
"""Folder with the driver's libraries, which Singularity and Apptainer add to the image's path (``--nv``)."""


def decide_library_path(draft: PlanDraft, kind: FabricKind) -> None:
    """Decide LD_LIBRARY_PATH, if workers need libraries of the host or CUDA's forward compatibility.

    Forward compatibility is a libcuda.so that runs a newer CUDA on an older driver. The order of the folders
    is: forward compatibility, the folders that the user added, the links to the host's libraries, and the
    folders of the image.
    """
    folders, reasons = [], []
    if draft.facts.cuda_compat:
        compat_folder = _decide_compat(draft, draft.facts.cuda_compat)
        if compat_folder:
            folders.append(compat_folder)
            reasons.append(f"{compat_folder} for CUDA")
    if draft.facts.host_libraries:
        _decide_host(draft, draft.facts.host_libraries, kind)
    current = _current_folders(draft)
    folders += current.user
    if draft.links:
        folder = links_folder(draft.links)
        folders.append(folder)
        reasons.append(f"{folder} with {', '.join(draft.links)} of the host")
    if not reasons:
        return
    value = ":".join(dict.fromkeys((*folders, *current.image)))
    draft.chosen[VARIABLE] = value
    draft.report(VARIABLE, value, f"adds {' and '.join(reasons)}; the rest is as it was", used=True)


def links_folder(links: Mapping[str, str]) -> str:
    """Return the folder of the node that holds a link for each library.

    Its name has a hash of `links`, so that runs with the same libraries share one folder.
    """
    digest = hashlib.sha256(repr(sorted(links.items())).encode()).hexdigest()[:12]
    return f"{LINKS}{os.getuid()}-{digest}"


class _Folders(NamedTuple):
    """The folders of the library path before this launch."""

    user: tuple[str, ...]
    """Folders that the user has added."""
    image: tuple[str, ...]
    """Folders of the image and of the container runtime."""


def _current_folders(draft: PlanDraft) -> _Folders:
    """Return the folders that LD_LIBRARY_PATH has before this launch: the user's, and those of the image.

    If an outer launch of imgkit (one from which this launch was started) has added folders, they are left
    out, because this launch decides about them again.
    """
    # Without a manifest the image's own path is unknown. All that the variable has then counts as the user's.
    image_path = draft.facts.image_env.get(VARIABLE, "") if draft.facts.image_env else ""
    known_image_folders = {_RUNTIME_FOLDER, *image_path.split(":")}
    compat_folder = draft.facts.cuda_compat.folder if draft.facts.cuda_compat else ""
    path = draft.value(VARIABLE) or ""
    user_folders, image_folders = [], []
    for folder in path.split(":"):
        if folder in ("", compat_folder) or folder.startswith(LINKS):
            continue
        if folder in known_image_folders:
            image_folders.append(folder)
        else:
            user_folders.append(folder)
    return _Folders(tuple(user_folders), tuple(image_folders))


def _decide_host(draft: PlanDraft, libraries: HostLibraries, kind: FabricKind) -> None:
    """Choose the libraries of the host that workers load, and put them into the plan's links.

    Only Slingshot needs them. Every library is reported with its reason. A library that the image cannot load
    gets a warning.
    """
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
    check = _LoadCheck(libraries, user_folders=_current_folders(draft).user)
    names = [name for name in FABRIC_LIBRARIES if name in check.host]
    if not names:
        problem = f"the host has none of {', '.join(FABRIC_LIBRARIES)} in {HOST}: {source}"
        draft.report(KEY, "auto", problem)
        draft.warn(problem, "list their folders in the recipe's system.runtime.host_libs")
    for name in names:
        _report_unused(draft, check, name)
    selected = check.select()
    for name, library in selected.items():
        draft.links[name] = library.target
        draft.report(name, library.path, check.evidence(library), used=True)
    # NCCL opens libnccl-net.so, but an installation may have only libnccl-net-ofi.so.
    ofi_name, net_name = PLUGINS
    if ofi_name in selected and net_name not in check.host:
        draft.links[net_name] = selected[ofi_name].target


def _report_unused(draft: PlanDraft, check: _LoadCheck, name: str) -> None:
    """Report why the host's library `name` is not used. If it is used, do nothing."""
    library = check.host[name]
    path = check.user_path(name)
    if path:
        folder, _, _ = path.rpartition("/")
        reason = f"{VARIABLE} names {folder}, which comes before the host's {library.path}"
        draft.report(name, path, reason, origin="user")
        return
    problem = check.problem(name)
    if not problem:
        return
    draft.report(name, library.path, f"{name} {problem}")
    # The plug-in's two names are usually links to one file, so one warning is enough.
    ofi_name, net_name = PLUGINS
    is_second_name = name == net_name and ofi_name in check.host
    if _FOLLOWS in problem or is_second_name:
        return
    fix = "use libraries that fit the image, or build them in the image"
    if "GLIBC" in problem:
        fix = "use a newer base image, or libraries built in the image"
    draft.warn(f"{KEY}: the host's {library.path} is not used: {name} {problem}", fix)


class _LoadCheck:
    """Finds out which libraries of the host the image can load.

    A library may need others, which come from the image or from the host. Names are those that programs open,
    such as ``libfabric.so.1``.
    """

    def __init__(self, libraries: HostLibraries, user_folders: Sequence[str]) -> None:
        self.user_folders = user_folders
        self.host = {library.name: library for library in libraries.host}
        self.image = {library.name: library for library in libraries.image}
        self.problems: dict[str, str] = {}
        """Why each library of the host cannot be loaded. Empty texts if it can. Filled by `problem`."""

    def user_path(self, name: str) -> str:
        """Return the path of a library in one of the user's folders, or an empty text if there is none."""
        if name not in self.image:
            return ""
        folder, _, _ = self.image[name].path.rpartition("/")
        return self.image[name].path if folder in self.user_folders else ""

    def select(self) -> dict[str, Candidate]:
        """Return the fabric's libraries of the host that can be loaded, by name.

        The result also has all other libraries of the host that these need.
        """
        queue = []
        for name in FABRIC_LIBRARIES:
            if name in self.host and not self.user_path(name) and not self.problem(name):
                queue.append(name)
        selected: dict[str, Candidate] = {}
        for name in queue:  # it grows in the loop, until all needed libraries are there
            library = self.host[name]
            if name not in selected and library.object is not None:
                selected[name] = library
                queue += [needed for needed in library.object.needed if self.is_from_host(library, needed)]
        return selected

    def evidence(self, library: Candidate) -> str:
        """Return the versions of glibc that `library` needs and that the image has, for the report.

        For example ``the host's; it needs GLIBC_2.34, the image has 2.35 (/usr/lib/libc.so.6)``.
        """
        versions = library.object.needs.get("libc.so.6", ()) if library.object else ()
        newest = _newest_version(versions, "GLIBC")
        needed = f"GLIBC_{newest}" if newest else "no version of glibc"
        libc = self.image.get("libc.so.6")
        return f"the host's; it needs {needed}, {_supported_text(libc, 'GLIBC_') if libc else ''}"

    def problem(self, name: str) -> str:
        """Return why the image cannot load the host's library `name`, or an empty text if it can."""
        if name not in self.problems:
            # The entry ends the recursion for libraries that need each other.
            self.problems[name] = ""
            self.problems[name] = self._find_problem(self.host[name])
        return self.problems[name]

    def _find_problem(self, library: Candidate) -> str:
        """Return the first reason why the image cannot load `library` of the host, or "" if it can."""
        shared, libc = library.object, self.image.get("libc.so.6")
        if shared is None:
            return f"of the host {library.fault} ({library.path})"
        if libc is None or libc.object is None:
            return "cannot be compared: the image's libc.so.6 is not on the library path"
        if shared.machine != libc.object.machine:
            return f"is for {shared.machine}, the image is for {libc.object.machine} ({library.path})"
        # The SONAME is the name inside the file. NCCL opens its plug-ins by their file name.
        if library.name not in PLUGINS and shared.soname != library.name:
            return f"has the SONAME {shared.soname or '(none)'} ({library.path})"
        # Workers will load the host's file instead of the image's, so it must define every symbol version
        # that the image's defines.
        image = self.image.get(library.name)
        if image:
            missing = [version for version in _defined_versions(image) if version not in shared.defines]
            if missing:
                return f"lacks {missing[-1]}, which the image's has ({image.path})"
        problems = (self._need_problem(library, needed) for needed in shared.needed)
        return next(filter(None, problems), "")

    def is_from_host(self, library: Candidate, needed: str) -> bool:
        """Return whether the host, and not the image, provides the library `needed` to `library`.

        `library` is a library of the host that workers load, and `needed` is the name of one that it opens.
        """
        if needed in IMAGE_LIBRARIES or needed not in self.host or self.user_path(needed):
            return False
        # Apart from the fabric's own libraries, the image's file comes first if it is new enough.
        image = self.image.get(needed)
        if image is not None and needed not in FABRIC_LIBRARIES and not _missing_version(library, image):
            return False
        return not self.problem(needed) and not _missing_version(library, self.host[needed])

    def _need_problem(self, library: Candidate, needed: str) -> str:
        """Return why neither the image nor the host can provide the library `needed` to `library`.

        The result is "" if one of the two can.
        """
        if self.is_from_host(library, needed):
            return self._rpath_problem(library, needed)
        if needed in self.image:
            return self._image_problem(library, needed)
        if needed not in self.host:
            if needed in IMAGE_LIBRARIES:
                return f"needs {needed}, which the image does not have"
            return f"needs {needed}, which neither the image nor the host has"
        problem = self.problem(needed)
        if not problem:
            version = _missing_version(library, self.host[needed])
            return f"needs {version} of {needed}, which the host's lacks"
        if needed in FABRIC_LIBRARIES:
            return f"needs {needed}, {_FOLLOWS}"
        return f"needs {needed}, and {needed} {problem}"

    def _rpath_problem(self, library: Candidate, needed: str) -> str:
        """Return why `library` would load another file than the host's `needed`, or "" if it would not.

        An RPATH is a list of folders inside a library. The dynamic linker searches it before LD_LIBRARY_PATH,
        and so before the links to the host's libraries.
        """
        if library.object is None or needed not in self.image:
            return ""
        folder, _, name = self.image[needed].path.rpartition("/")
        if name == needed and folder in library.object.rpath:
            return f"has the RPATH {folder}, where the image has another {needed}"
        return ""

    def _image_problem(self, library: Candidate, needed: str) -> str:
        """Return why the image's `needed` is too old for `library`, or an empty text if it is not."""
        version = _missing_version(library, self.image[needed])
        if not version:
            return ""
        if needed in self.host and needed not in IMAGE_LIBRARIES and self.problem(needed):
            return f"needs {version}, and the host's {needed} {self.problem(needed)}"
        return f"needs {version}, {_supported_text(self.image[needed], version)}"


def _missing_version(library: Candidate, server: Candidate) -> str:
    """Return the newest symbol version, such as ``GLIBC_2.38``, that `library` needs and `server` lacks.

    `server` is the library that should provide it. The result is "" if it lacks none. If `server` defines no
    versions at all, none counts as missing, because the dynamic linker then only prints a warning.
    """
    defined = _defined_versions(server)
    if library.object is None or not defined:
        return ""
    needs = library.object.needs.get(server.name, ())
    return max((need for need in needs if need not in defined), key=_version_key, default="")


def _defined_versions(library: Candidate) -> tuple[str, ...]:
    return library.object.defines if library.object is not None else ()


def _version_key(version: str) -> tuple[int, ...]:
    """Return the numbers of a version for comparisons: ``GLIBC_2.34 -> (2, 34)``."""
    return tuple(int(part) for part in re.findall(r"[0-9]{1,9}", version))


def _newest_version(versions: Sequence[str], prefix: str) -> str:
    """Return the number of the newest version with a prefix, or an empty text if no version has it.

    For example ``("GLIBC_2.17", "GLIBC_2.34"), "GLIBC" -> "2.34"``.
    """
    pattern = re.compile(rf"{re.escape(prefix)}_[0-9.]+")
    matching = filter(pattern.fullmatch, versions)
    return max(matching, key=_version_key, default="").removeprefix(f"{prefix}_")


def _supported_text(server: Candidate, version: str) -> str:
    """Return which version the image's library has of the kind of `version`, for a message."""
    newest = _newest_version(_defined_versions(server), version.rpartition("_")[0])
    return f"the image has {newest} ({server.path})" if newest else f"which the image's {server.path} lacks"


def _decide_compat(draft: PlanDraft, compat: CudaCompat) -> str:
    """Report whether CUDA's forward compatibility is used, and return its folder.

    It is "" if it is not used.
    """
    versions = _cuda_versions(draft)
    if compat.is_for_major and (versions is None or not versions.has_newer_major):
        return ""  # the driver runs the image's CUDA, or that is unknown, so there is nothing to decide
    is_used, reason = _choose_compat(draft, compat, versions)
    # If a folder that the user added has a libcuda.so.1, that library is kept.
    user_folders = _current_folders(draft).user
    user_cuda = [folder for folder in compat.cuda_folders if folder in user_folders]
    if is_used and user_cuda:
        is_used, reason = False, f"{VARIABLE} names {user_cuda[0]}, which has a libcuda.so.1 as well"
    draft.report(COMPAT_KEY, compat.folder or COMPAT, f"{reason} ({compat.source})", used=is_used)
    return compat.folder if is_used else ""


class _CudaVersions(NamedTuple):
    """The CUDA that the image needs, and the newest one that the driver supports."""

    needed: cuda_drivers.CudaVersion
    supported: cuda_drivers.CudaVersion
    driver: tuple[int, ...]

    @property
    def is_driver_listed(self) -> bool:
        """Return False if the driver is newer than imgkit's table, so that it may support more."""
        return self.driver[0] <= cuda_drivers.NEWEST_BRANCH

    @property
    def has_newer_major(self) -> bool:
        """Return whether the image needs a newer major version than the driver is known to support."""
        return self.is_driver_listed and self.needed[0] > self.supported[0]


def _cuda_versions(draft: PlanDraft) -> _CudaVersions | None:
    """Return the versions that decide about forward compatibility, or None if one of them is unknown."""
    driver = _version_key(draft.facts.driver_version)
    needed = cuda_drivers.parse_cuda(draft.env.get("CUDA_VERSION", ""))
    if not driver or needed is None:
        return None
    return _CudaVersions(needed, cuda_drivers.supported_cuda(driver[0]), driver)


def _choose_compat(draft: PlanDraft, compat: CudaCompat, versions: _CudaVersions | None) -> tuple[bool, str]:
    """Return whether forward compatibility can and must be used, and the reason.

    `versions` are the CUDA versions of the image and the driver, or None if they are unknown.
    """
    facts = draft.facts
    if not compat.folder:
        return False, f"the image has no {COMPAT}/libcuda.so.1"
    if versions is None:
        driver = facts.driver or "does not exist"
        cuda_version = draft.env.get("CUDA_VERSION", "")
        return False, f"unknown versions: /proc/driver/nvidia/version {driver}; CUDA_VERSION={cuda_version!r}"
    comparison = (
        f"driver {facts.driver_version} supports CUDA {'.'.join(map(str, versions.supported))}, the "
        f"image has {'.'.join(map(str, versions.needed))}"
    )
    if versions.needed <= versions.supported:
        return False, comparison
    if not versions.is_driver_listed:
        reason = "is newer than imgkit's table, so the CUDA that it supports is unknown"
        return False, f"driver {facts.driver_version} {reason}"
    # The name of the real file ends with the driver version that it belongs to: libcuda.so.575.57.08.
    library = re.search(r"libcuda\.so\.([0-9]{3,5}(?:\.[0-9]{1,5}){1,2})$", compat.target)
    if library and _version_key(library[1]) <= versions.driver:
        return False, f"{comparison}, but its {compat.target} is not newer than the driver"
    models = sorted({gpu.model for gpu in facts.gpu_devices})
    requirement = "forward compatibility is for data-centre GPUs"
    if not models:
        return False, f"{comparison}, but {requirement}, and the driver shows no GPU"
    for model in models:
        if not cuda_drivers.is_data_centre_gpu(model):
            name = model or "a GPU without a name"
            return False, f"{comparison}, but {requirement}, and {name} is none"
    return True, f"{comparison}; {', '.join(models)} is a data-centre GPU"
