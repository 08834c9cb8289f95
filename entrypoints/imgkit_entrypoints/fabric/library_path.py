"""Decide which folders are added at the front of LD_LIBRARY_PATH.

These folders hold CUDA's libraries for forward compatibility, and libraries of the host such as libfabric. A
library of the host is used only if the image can load it: other libraries must define every symbol version
that it needs, such as GLIBC_2.34. The dynamic linker makes the same comparison, but only after NCCL has
started. If the linker finds a problem, NCCL falls back to TCP or exits, so this module looks for problems
earlier.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from imgkit_entrypoints import cuda_drivers
from imgkit_entrypoints.fabric.fabric_plan import FabricPlanBuilder
from imgkit_entrypoints.facts.host_facts import Candidate, CudaCompat, HostLibraries
from imgkit_entrypoints.facts.host_libs import COMPAT, FABRIC_LIBRARIES, IMAGE_LIBRARIES, LINKS, PLUGINS
from imgkit_entrypoints.system import HOST, HOST_FOLDERS

VARIABLE = "LD_LIBRARY_PATH"
# Names under which reports show the decisions about two settings of the recipe: fabric.host_libs and
# runtime.cuda_compat.
KEY = "host_libs"
COMPAT_KEY = "cuda_compat"
# The two names of the network plug-in aws-ofi-nccl. NCCL itself searches for the second one.
_OFI_PLUGIN, _DEFAULT_PLUGIN = PLUGINS
_RUNTIME_FOLDER = "/.singularity.d/libs"
"""Folder with the driver's libraries, which Singularity and Apptainer add to the image's path (``--nv``)."""


class LoadProblem(NamedTuple):
    """Why the image cannot load a library of the host."""

    text: str
    """End of a sentence about the library: ``needs GLIBC_2.38, the image has 2.35 (/usr/lib/libc.so.6)``."""
    missing_version: str = ""
    """A symbol version, such as ``GLIBC_2.38``, that the library needs and no available library defines."""
    unused_library: str = ""
    """Another library of the fabric that the library needs, but that cannot be used either."""


def set_library_path(plan: FabricPlanBuilder) -> None:
    """Set LD_LIBRARY_PATH if workers need libraries of the host or CUDA's forward compatibility.

    Forward compatibility is a libcuda.so that runs a newer CUDA on an older driver. Its folder comes first.
    The folders that the user added come next, then the folder with links to the host's libraries, and last
    the folders of the image.
    """
    compat_folder = _choose_compat_folder(plan)
    plan.links = _choose_host_libraries(plan)
    current = _split_library_path(plan)
    folders, additions = [], []
    if compat_folder:
        folders.append(compat_folder)
        additions.append(f"{compat_folder} for CUDA")
    folders += current.user
    if plan.links:
        folder = links_folder(plan.links)
        folders.append(folder)
        additions.append(f"{folder} with {', '.join(plan.links)} of the host")
    if not additions:
        return
    new_path = ":".join(dict.fromkeys((*folders, *current.image)))  # each folder once
    # Replace the value even if the user has set it: it still contains the user's folders.
    plan.replace_variable(VARIABLE, new_path, f"adds {' and '.join(additions)}; the rest is as it was")


def links_folder(links: Mapping[str, str]) -> str:
    """Return the path of the folder in which this node keeps a link for each of the host's libraries.

    The name of the folder contains a hash of `links`, so that runs with the same libraries share one folder.
    It also contains the user's id, because users cannot write to each other's folders.
    """
    digest = hashlib.sha256(repr(sorted(links.items())).encode()).hexdigest()[:12]
    return f"{LINKS}{os.getuid()}-{digest}"


class _Folders(NamedTuple):
    """The folders of the library path before this launch."""

    user: tuple[str, ...]
    """Folders that the user has added."""
    image: tuple[str, ...]
    """Folders of the image and of the container runtime."""


def _split_library_path(plan: FabricPlanBuilder) -> _Folders:
    """Return the folders that are in LD_LIBRARY_PATH before this launch, by who has added them.

    If this launch was started inside another launch of imgkit, the folders that the other launch has added
    are left out, because this launch decides about them again.
    """
    # Without a manifest, the image's own path is unknown. Its folders then count as the user's.
    image_path = plan.facts.image_env.get(VARIABLE, "") if plan.facts.image_env else ""
    # Apptainer adds the first folder, with the driver's libraries, to the image's path in every container.
    known_image_folders = {_RUNTIME_FOLDER, *image_path.split(":")}
    # An outer launch may have added this folder, and folders that begin with `LINKS`.
    compat_folder = plan.facts.cuda_compat.folder if plan.facts.cuda_compat else ""
    path = plan.worker_value(VARIABLE) or ""
    user_folders, image_folders = [], []
    for folder in path.split(":"):
        if folder in ("", compat_folder) or folder.startswith(LINKS):
            continue
        if folder in known_image_folders:
            image_folders.append(folder)
        else:
            user_folders.append(folder)
    return _Folders(tuple(user_folders), tuple(image_folders))


def _choose_host_libraries(plan: FabricPlanBuilder) -> dict[str, str]:
    """Return the libraries of the host that workers load, in the format of `FabricPlan.links`.

    Only Slingshot needs libraries of the host, so there are none for other fabrics. The report lists each
    library with the reason for or against it. The plan gets a warning for a library that cannot be loaded.
    """
    libraries = plan.facts.host_libraries
    if libraries is None:
        return {}
    source = libraries.source
    if plan.kind != "slingshot":
        plan.add_decision(KEY, "auto", f"the fabric is {plan.kind}, which needs none of them ({source})")
        return {}
    if not libraries.bound:
        binds = ",".join(f"{folder}:{HOST}{folder}:ro" for folder in HOST_FOLDERS)
        problem = f"{HOST} does not exist, so no library of the host can be used ({source})"
        plan.add_decision(KEY, "auto", problem)
        plan.add_warning(problem, f"start the job with imgkit run, or the container with --bind {binds}")
        return {}
    check = _LoadCheck(libraries, user_folders=_split_library_path(plan).user)
    _report_unused_libraries(plan, check, source)
    selected = check.select_libraries()
    for name, library in selected.items():
        plan.add_decision(name, library.path, check.evidence(library), used=True)
    links = {name: library.target for name, library in selected.items()}
    # NCCL opens the plug-in as libnccl-net.so, but some hosts have it only as libnccl-net-ofi.so. So the
    # first name is linked to the file with the second.
    if _OFI_PLUGIN in selected and _DEFAULT_PLUGIN not in check.host:
        links[_DEFAULT_PLUGIN] = selected[_OFI_PLUGIN].target
    return links


def _report_unused_libraries(plan: FabricPlanBuilder, check: _LoadCheck, source: str) -> None:
    """Report each of the host's fabric libraries that is not used, or that the host has none of them.

    `source` is the setting that requests the host's libraries.
    """
    names = [name for name in FABRIC_LIBRARIES if name in check.host]
    if not names:
        problem = f"the host has none of {', '.join(FABRIC_LIBRARIES)} in {HOST}: {source}"
        plan.add_decision(KEY, "auto", problem)
        plan.add_warning(problem, "list their folders in the recipe's system.runtime.host_libs")
    for name in names:
        user_path = check.user_path(name)
        if user_path:
            folder, _, _ = user_path.rpartition("/")
            reason = f"{VARIABLE} names {folder}, which comes before the host's {check.host[name].path}"
            plan.add_decision(name, user_path, reason, origin="user")
            continue
        load_problem = check.problem(name)
        if load_problem:
            _report_unloadable(plan, check, name, load_problem)


def _report_unloadable(plan: FabricPlanBuilder, check: _LoadCheck, name: str, problem: LoadProblem) -> None:
    """Report that the host's library `name` is not used because of `problem`, and add a warning.

    There is no warning if the warning about another library has the same cause: a library that this one
    needs, or the same plug-in under its other name.
    """
    path = check.host[name].path
    plan.add_decision(name, path, f"{name} {problem.text}")
    if problem.unused_library:  # the warning about that library names the cause
        return
    # The plug-in's two names are usually links to one file, so one warning is enough.
    if name == _DEFAULT_PLUGIN and _OFI_PLUGIN in check.host:
        return
    fix = "use libraries that fit the image, or build them in the image"
    if problem.missing_version.startswith("GLIBC"):
        fix = "use a newer base image, or libraries built in the image"
    plan.add_warning(f"{KEY}: the host's {path} is not used: {name} {problem.text}", fix)


class _LoadCheck:
    """Finds out which libraries of the host can be loaded in the image.

    A library usually needs other libraries, which come from the image or from the host. Methods take the
    names that programs open, such as ``libfabric.so.1``.
    """

    def __init__(self, libraries: HostLibraries, user_folders: Sequence[str]) -> None:
        self.user_folders = user_folders
        self.host = {library.name: library for library in libraries.host}
        self.image = {library.name: library for library in libraries.image}
        # Results of `problem` by the library's name.
        self._problems: dict[str, LoadProblem | None] = {}

    def user_path(self, name: str) -> str:
        """Return the path of the library `name` if it is in one of the user's folders, and "" otherwise.

        The image's candidates include the user's folders, because these are on the same library path.
        """
        if name not in self.image:
            return ""
        folder, _, _ = self.image[name].path.rpartition("/")
        return self.image[name].path if folder in self.user_folders else ""

    def select_libraries(self) -> dict[str, Candidate]:
        """Return the libraries of the host that workers should load, by name.

        These are the fabric's libraries that can be loaded, and all other libraries of the host that they
        need. A library of which the user has provided another file is left out.
        """
        pending = []  # names of libraries to select, together with what they need
        for name in FABRIC_LIBRARIES:
            if name in self.host and not self.user_path(name) and not self.problem(name):
                pending.append(name)
        selected: dict[str, Candidate] = {}
        while pending:
            name = pending.pop(0)
            library = self.host[name]
            # Several libraries may need the same one, and two may need each other.
            if name in selected or library.object is None:
                continue
            selected[name] = library
            pending += [needed for needed in library.object.needed if self.is_from_host(library, needed)]
        return selected

    def evidence(self, library: Candidate) -> str:
        """Return a text for the report that compares the needed version of glibc with the image's.

        For example ``the host's; it needs GLIBC_2.34, the image has 2.35 (/usr/lib/libc.so.6)``.
        """
        versions = library.object.needs.get("libc.so.6", ()) if library.object else ()
        newest = _find_newest_version(versions, "GLIBC")
        needed = f"GLIBC_{newest}" if newest else "no version of glibc"
        libc = self.image.get("libc.so.6")
        image_part = _describe_newest_version(libc, "GLIBC") if libc else ""
        return f"the host's; it needs {needed}, {image_part}"

    def problem(self, name: str) -> LoadProblem | None:
        """Return why the image cannot load the host's library `name`, or None if it can."""
        if name not in self._problems:
            # Libraries can need each other in a circle: `_find_problem` calls this method for the libraries
            # that `name` needs. The preliminary entry, which means "no problem", ends the recursion.
            self._problems[name] = None
            self._problems[name] = self._find_problem(self.host[name])
        return self._problems[name]

    def _find_problem(self, library: Candidate) -> LoadProblem | None:
        """Return the first reason why the host's `library` cannot be loaded in the image, or None.

        The library must be for the image's architecture, have the expected name, and offer at least what the
        image's file of the same name offers. All libraries that it needs must be available, too.
        """
        # `object` has the names and versions that were read from a file, or is None if that failed.
        shared = library.object
        libc = self.image.get("libc.so.6")
        if shared is None:
            return LoadProblem(f"of the host {library.fault} ({library.path})")
        if libc is None or libc.object is None:
            return LoadProblem("cannot be compared: the image's libc.so.6 is not on the library path")
        if shared.machine != libc.object.machine:
            machines = f"is for {shared.machine}, the image is for {libc.object.machine}"
            return LoadProblem(f"{machines} ({library.path})")
        # The SONAME is the name inside the file. Programs that need a library look for this name. NCCL opens
        # its plug-ins by their file name, so their SONAME does not matter.
        if library.name not in PLUGINS and shared.soname != library.name:
            return LoadProblem(f"has the SONAME {shared.soname or '(none)'} ({library.path})")
        # Workers will load the host's file instead of the image's. Other libraries of the image may need any
        # symbol version that the image's file defines, so the host's file must define all of them.
        image = self.image.get(library.name)
        if image:
            missing = [version for version in _list_defined_versions(image) if version not in shared.defines]
            if missing:
                return LoadProblem(f"lacks {missing[-1]}, which the image's has ({image.path})")
        for needed in shared.needed:
            problem = self._find_needed_problem(library, needed)
            if problem:
                return problem
        return None

    def is_from_host(self, library: Candidate, needed: str) -> bool:
        """Return whether `library` must get the library `needed` from the host instead of the image.

        `library` is a library of the host. `needed` is the name of a library that it needs.
        """
        if needed in IMAGE_LIBRARIES or needed not in self.host or self.user_path(needed):
            return False
        # The fabric's libraries always come from the host if possible. For all others, the image's file is
        # preferred if it is new enough.
        image = self.image.get(needed)
        if image is not None and needed not in FABRIC_LIBRARIES and not _find_missing_version(library, image):
            return False
        return not self.problem(needed) and not _find_missing_version(library, self.host[needed])

    def _find_needed_problem(self, library: Candidate, needed: str) -> LoadProblem | None:
        """Return why `library` cannot get the library `needed` from the image or the host.

        Return None if either of them can provide it.
        """
        if self.is_from_host(library, needed):
            return self._find_rpath_problem(library, needed)
        if needed in self.image:
            return self._find_image_problem(library, needed)
        if needed not in self.host:
            # IMAGE_LIBRARIES are never taken from the host, so the host is not mentioned.
            if needed in IMAGE_LIBRARIES:
                return LoadProblem(f"needs {needed}, which the image does not have")
            return LoadProblem(f"needs {needed}, which neither the image nor the host has")
        return self._find_host_problem(library, needed)

    def _find_host_problem(self, library: Candidate, needed: str) -> LoadProblem:
        """Return why `library` cannot use the host's `needed`, as `is_from_host` has found.

        Either the host's file cannot be loaded itself, or it is too old for `library`.
        """
        problem = self.problem(needed)
        if problem is None:
            version = _find_missing_version(library, self.host[needed])
            text = f"needs {version} of {needed}, which the host's lacks"
            return LoadProblem(text, missing_version=version)
        # A library of the fabric has a warning of its own, which names the cause. Others have none.
        if needed in FABRIC_LIBRARIES:
            return LoadProblem(f"needs {needed}, which is not used", unused_library=needed)
        return problem._replace(text=f"needs {needed}, and {needed} {problem.text}")

    def _find_rpath_problem(self, library: Candidate, needed: str) -> LoadProblem | None:
        """Return a problem if the RPATH of `library` leads to the image's `needed` instead of the host's.

        An RPATH is a list of folders that is stored in a library. The dynamic linker searches these folders
        before LD_LIBRARY_PATH, and so before the folder with links to the host's libraries. Return None if
        the RPATH does no harm.
        """
        if library.object is None or needed not in self.image:
            return None
        folder, _, name = self.image[needed].path.rpartition("/")
        if name == needed and folder in library.object.rpath:
            return LoadProblem(f"has the RPATH {folder}, where the image has another {needed}")
        return None

    def _find_image_problem(self, library: Candidate, needed: str) -> LoadProblem | None:
        """Return why `library` cannot use the image's `needed`, or None if it can.

        The image's file may be too old, which means that it lacks a symbol version.
        """
        image_library = self.image[needed]
        version = _find_missing_version(library, image_library)  # such as "GLIBC_2.38"
        if not version:
            return None
        # The host's file might be newer. If it cannot be used either, its own problem is the cause.
        if needed in self.host and needed not in IMAGE_LIBRARIES:
            problem = self.problem(needed)
            if problem:
                return problem._replace(text=f"needs {version}, and the host's {needed} {problem.text}")
        prefix, _, _ = version.rpartition("_")  # "GLIBC_2.38" -> "GLIBC"
        text = f"needs {version}, {_describe_newest_version(image_library, prefix)}"
        return LoadProblem(text, missing_version=version)


def _find_missing_version(library: Candidate, provider: Candidate) -> str:
    """Return the newest symbol version that `library` needs but `provider` does not define.

    `provider` is the library that should define it. A version is a text such as ``GLIBC_2.38``. If no version
    is missing, return "". If `provider` defines no versions at all, none counts as missing, because the
    dynamic linker only prints a warning in this case.
    """
    defined = _list_defined_versions(provider)
    if library.object is None or not defined:
        return ""
    versions = library.object.needs.get(provider.name, ())
    missing = [version for version in versions if version not in defined]
    return max(missing, key=_parse_version, default="")


def _list_defined_versions(library: Candidate) -> tuple[str, ...]:
    """Return the symbol versions that a library defines, or none if its file cannot be read."""
    return library.object.defines if library.object is not None else ()


def _parse_version(version: str) -> tuple[int, ...]:
    """Return the numbers in a version, which can be compared: ``GLIBC_2.34 -> (2, 34)``."""
    return tuple(int(part) for part in re.findall(r"[0-9]{1,9}", version))


def _find_newest_version(versions: Sequence[str], prefix: str) -> str:
    """Return the number of the newest version that has the prefix, or "" if no version has it.

    For example ``("GLIBC_2.17", "GLIBC_2.34"), "GLIBC" -> "2.34"``.
    """
    pattern = re.compile(rf"{re.escape(prefix)}_[0-9.]+")
    matching = [version for version in versions if pattern.fullmatch(version)]
    newest = max(matching, key=_parse_version, default="")
    return newest.removeprefix(f"{prefix}_")


def _describe_newest_version(image_library: Candidate, prefix: str) -> str:
    """Return the newest version that a library of the image defines, as part of a message.

    Only versions with `prefix` count, such as ``GLIBC`` for GLIBC_2.38.
    """
    newest = _find_newest_version(_list_defined_versions(image_library), prefix)
    if not newest:
        return f"which the image's {image_library.path} lacks"
    return f"the image has {newest} ({image_library.path})"


def _choose_compat_folder(plan: FabricPlanBuilder) -> str:
    """Decide about CUDA's forward compatibility, and return its folder, or "" if it is not used.

    Forward compatibility is a libcuda.so in the image that runs a newer CUDA on an older driver. The decision
    is added to the plan's report with its reason. There is no decision if forward compatibility is turned
    off, or if it is only allowed for a newer major version of CUDA and the image does not need one.
    """
    compat = plan.facts.cuda_compat
    if compat is None:  # turned off
        return ""
    versions = _find_cuda_versions(plan)
    needs_newer_major = versions is not None and versions.has_newer_major
    # `is_for_major` is the default: only allowed for a newer major version.
    if compat.is_for_major and not needs_newer_major:
        return ""
    is_used, reason = _judge_compat(plan, compat, versions)
    # The returned folder comes first on the library path, so it would hide a libcuda.so.1 of the user.
    user_folders = _split_library_path(plan).user
    user_cuda_folders = [folder for folder in compat.cuda_folders if folder in user_folders]
    if is_used and user_cuda_folders:
        is_used = False
        reason = f"{VARIABLE} names {user_cuda_folders[0]}, which has a libcuda.so.1 as well"
    # If the image has no such library, the report shows the folder where CUDA's images keep it.
    reported_folder = compat.folder or COMPAT
    plan.add_decision(COMPAT_KEY, reported_folder, f"{reason} ({compat.source})", used=is_used)
    return compat.folder if is_used else ""


class _CudaVersions(NamedTuple):
    """The CUDA that the image needs, and the newest one that the driver supports."""

    needed: cuda_drivers.CudaVersion
    supported: cuda_drivers.CudaVersion
    driver: tuple[int, ...]

    @property
    def is_driver_listed(self) -> bool:
        """Return whether imgkit's table has this driver. A newer driver may support more than `supported`."""
        return self.driver[0] <= cuda_drivers.NEWEST_BRANCH

    @property
    def has_newer_major(self) -> bool:
        """Return whether the image needs a newer major version than the driver is known to support."""
        return self.is_driver_listed and self.needed[0] > self.supported[0]


def _find_cuda_versions(plan: FabricPlanBuilder) -> _CudaVersions | None:
    """Return the driver's version, the CUDA that it supports, and the CUDA that the image needs.

    The image's CUDA is in the variable CUDA_VERSION, which NVIDIA's base images set. The result is None if it
    or the driver's version is unknown.
    """
    driver = _parse_version(plan.facts.driver_version)  # "535.104.05" -> (535, 104, 5)
    needed = cuda_drivers.parse_cuda(plan.env.get("CUDA_VERSION", ""))
    if not driver or needed is None:
        return None
    branch = driver[0]
    return _CudaVersions(needed=needed, supported=cuda_drivers.supported_cuda(branch), driver=driver)


def _judge_compat(
    plan: FabricPlanBuilder, compat: CudaCompat, versions: _CudaVersions | None
) -> tuple[bool, str]:
    """Return whether the image's CUDA needs forward compatibility and can use it, and the reason.

    Forward compatibility is a libcuda.so in the image that runs a newer CUDA on an older driver. It can only
    be used with a data-center GPU, and if this libcuda.so is newer than the driver.

    Parameters
    ----------
    compat : the folder of this libcuda.so, and the file to which its link leads.
    versions : the CUDA versions of the image and the driver, or None if they are unknown.
    """
    facts = plan.facts
    if not compat.folder:
        return False, f"the image has no {COMPAT}/libcuda.so.1"
    if versions is None:
        driver = facts.driver or "does not exist"
        cuda_version = plan.env.get("CUDA_VERSION", "")
        return False, f"unknown versions: /proc/driver/nvidia/version {driver}; CUDA_VERSION={cuda_version!r}"
    comparison = (
        f"driver {facts.driver_version} supports CUDA {'.'.join(map(str, versions.supported))}, the "
        f"image has {'.'.join(map(str, versions.needed))}"
    )
    if versions.needed <= versions.supported:
        return False, comparison
    # A driver that is newer than the table may support the image's CUDA, so nothing must be replaced.
    if not versions.is_driver_listed:
        reason = "is newer than imgkit's table, so the CUDA that it supports is unknown"
        return False, f"driver {facts.driver_version} {reason}"
    # The name of the real file ends with the driver version that it belongs to: libcuda.so.575.57.08.
    library = re.search(r"libcuda\.so\.([0-9]{3,5}(?:\.[0-9]{1,5}){1,2})$", compat.target)
    if library and _parse_version(library[1]) <= versions.driver:
        return False, f"{comparison}, but its {compat.target} is not newer than the driver"
    models = sorted({gpu.model for gpu in facts.gpu_devices})
    gpu_problem = _find_gpu_problem(models)
    if gpu_problem:
        return False, f"{comparison}, but forward compatibility is for data-centre GPUs, and {gpu_problem}"
    return True, f"{comparison}; {', '.join(models)} is a data-centre GPU"


def _find_gpu_problem(models: Sequence[str]) -> str:
    """Return why CUDA's forward compatibility cannot be used with GPUs of these models, or "" if it can.

    NVIDIA supports forward compatibility only on data-center GPUs.
    """
    if not models:
        return "the driver shows no GPU"
    for model in models:
        if not cuda_drivers.is_data_centre_gpu(model):
            return f"{model or 'a GPU without a name'} is none"
    return ""
