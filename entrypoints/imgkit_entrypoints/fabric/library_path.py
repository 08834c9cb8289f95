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
from dataclasses import dataclass, field

from imgkit_entrypoints.fabric.fabric_plan import Decision, PlanDraft
from imgkit_entrypoints.facts import Candidate, CudaCompat, HostLibraries
from imgkit_entrypoints.facts.host_libs import COMPAT, LINKS, OF_IMAGE, PLUGINS, WANTED
from imgkit_entrypoints.system import HOST, HOST_FOLDERS, FabricKind

VARIABLE = "LD_LIBRARY_PATH"
KEY = "host_libs"
COMPAT_KEY = "cuda_compat"
_FOLLOWS = "which is not used"
"""Part of a fault that follows from that of another library, which is reported itself."""
_OF_RUNTIME = "/.singularity.d/libs"
"""Folder of the driver's libraries, which the runtime adds to the image's path."""
_DATA_CENTRE = re.compile(
    r"\b(Tesla|P4|P40|P100|V100S?|T4|A2|A10G?|A16|A30|A40|A100X?|A800|L4|L20|L40S?|H20|H100|H200|H800|GH200|"
    r"B100|B200|B300|GB200|GB300)\b"
)
"""GPUs for data centres, by the names that the driver gives them."""
_WORKSTATION = re.compile(r"\b(RTX|GTX|GeForce|Quadro|TITAN|Active)\b")
_CUDA_BY_DRIVER: tuple[tuple[int, tuple[int, int]], ...] = (
    *((450, (11, 0)), (455, (11, 1)), (460, (11, 2)), (465, (11, 3)), (470, (11, 4)), (495, (11, 5))),
    *((510, (11, 6)), (515, (11, 7)), (520, (11, 8)), (525, (12, 0)), (530, (12, 1)), (535, (12, 2))),
    *((545, (12, 3)), (550, (12, 4)), (555, (12, 5)), (560, (12, 6)), (565, (12, 7)), (570, (12, 8))),
    *((575, (12, 9)), (580, (13, 0)), (590, (13, 1))),
)
"""First driver of each version of CUDA (NVIDIA, release notes of the CUDA Toolkit, table of drivers)."""


def decide(draft: PlanDraft, kind: FabricKind) -> None:
    """Decide LD_LIBRARY_PATH where the recipe or a variable asks for it."""
    compat = draft.facts.cuda_compat
    front = _compat(draft, compat) if compat else ""
    if known := draft.facts.host_libraries:
        _host(draft, known, kind)
    if not front and not draft.links:
        return
    users, others = _parts(draft)
    own = (links_folder(draft.links),) if draft.links else ()
    value = ":".join(dict.fromkeys((*((front,) if front else ()), *users, *own, *others)))
    what = [f"{front} for CUDA"] if front else []
    what += [f"{own[0]} with {', '.join(draft.links)} of the host"] if own else []
    draft.chosen[VARIABLE] = value
    draft.decisions.append(
        Decision(variable=VARIABLE, value=value, reason=f"adds {' and '.join(what)}; the rest is as it was")
    )


def links_folder(links: Mapping[str, str]) -> str:
    """Folder of the node with a link for each library; the same libraries have the same folder."""
    digest = hashlib.sha256(repr(sorted(links.items())).encode()).hexdigest()[:12]
    return f"{LINKS}{os.getuid()}-{digest}"


def _parts(draft: PlanDraft) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Folders of the library path that the user added, and those of image and runtime.

    Those that an outer launch put there are left out: this one decides again.
    """
    compat = draft.facts.cuda_compat.folder if draft.facts.cuda_compat else ""
    words = (draft.value(VARIABLE) or "").split(":")
    now = [word for word in words if word and word != compat and not word.startswith(LINKS)]
    image = draft.facts.image_env
    # Without a manifest nobody knows the image's path: what the runtime leaves of it counts as the user's.
    others = {_OF_RUNTIME, *(image.get(VARIABLE, "") if image else "").split(":")}
    users = tuple(word for word in now if word not in others)
    return users, tuple(word for word in now if word in others)


def _note(draft: PlanDraft, variable: str, value: str, reason: str, *, used: bool = False) -> None:
    draft.decisions.append(Decision(variable=variable, value=value, reason=reason, used=used))


def _host(draft: PlanDraft, known: HostLibraries, kind: FabricKind) -> None:
    """Choose the libraries of the host, and report each with its reason."""
    if kind != "slingshot":
        _note(draft, KEY, "auto", f"the fabric is {kind}, which needs none of them ({known.source})")
        return
    if not known.bound:
        binds = ",".join(f"{folder}:{HOST}{folder}:ro" for folder in HOST_FOLDERS)
        what = f"{HOST} does not exist, so no library of the host can be used ({known.source})"
        _note(draft, KEY, "auto", what)
        draft.warn(what, f"start the job with imgkit run, or the container with --bind {binds}")
        return
    users, _ = _parts(draft)
    judge = _Judge(known=known, users=users)
    names = [name for name in WANTED if name in judge.host]
    for name in names:
        lib = judge.host[name]
        if mine := judge.of_user(name):
            reason = f"{VARIABLE} names {mine.rpartition('/')[0]}, which comes before the host's {lib.path}"
            draft.decisions.append(
                Decision(variable=name, value=mine, reason=reason, used=False, origin="user")
            )
        elif fault := judge.fault(name):
            _note(draft, name, lib.path, f"{name} {fault}")
            # The two names of the plug-in are mostly one file.
            if _FOLLOWS not in fault and not (name == PLUGINS[1] and PLUGINS[0] in judge.host):
                draft.warn(f"{KEY}: the host's {lib.path} is not used: {name} {fault}", _fix(fault))
    if not names:
        what = f"the host has none of {', '.join(WANTED)} in {HOST}: {known.source}"
        _note(draft, KEY, "auto", what)
        draft.warn(what, "list their folders in the recipe's system.runtime.host_libs")
    taken = judge.taken()
    for name, lib in taken.items():
        draft.links[name] = lib.target
        _note(draft, name, lib.path, judge.shown(lib), used=True)
    # NCCL opens the second name; an installation may have the first one alone.
    if PLUGINS[0] in taken and PLUGINS[1] not in taken and PLUGINS[1] not in judge.host:
        draft.links[PLUGINS[1]] = taken[PLUGINS[0]].target


def _fix(fault: str) -> str:
    if "GLIBC" in fault:
        return "use a newer base image, or libraries built in the image"
    return "use libraries that fit the image, or build them in the image"


@dataclass(slots=True, kw_only=True)
class _Judge:
    """Which libraries of the host the image can load."""

    known: HostLibraries
    users: Sequence[str]
    host: dict[str, Candidate] = field(init=False)
    image: dict[str, Candidate] = field(init=False)
    verdicts: dict[str, str] = field(default_factory=dict)
    """The fault of each library of the host; empty: it can be loaded."""

    def __post_init__(self) -> None:
        self.host = {item.name: item for item in self.known.host}
        self.image = {item.name: item for item in self.known.image}

    def of_user(self, name: str) -> str:
        """Path of the user's own library; empty if the user has none."""
        found = self.image.get(name)
        return found.path if found and found.path.rpartition("/")[0] in self.users else ""

    def taken(self) -> dict[str, Candidate]:
        """The wanted libraries that can be loaded, and what they need of the host."""
        found: dict[str, Candidate] = {}
        left = [
            name for name in WANTED if name in self.host and not self.of_user(name) and not self.fault(name)
        ]
        while left:
            name = left.pop(0)
            lib = self.host[name]
            if name not in found and lib.object is not None:
                found[name] = lib
                left += [need for need in lib.object.needed if self.from_host(lib, need)]
        return found

    def shown(self, lib: Candidate) -> str:
        """What was compared."""
        versions = lib.object.needs.get("libc.so.6", ()) if lib.object else ()
        libc = self.image.get("libc.so.6")
        newest = _newest(versions, "GLIBC")
        needed = f"GLIBC_{newest}" if newest else "no version of glibc"
        return f"the host's; it needs {needed}, {_has(libc, 'GLIBC_') if libc else ''}"

    def fault(self, name: str) -> str:
        """Why the image cannot load the host's `name`; empty if it can."""
        if name not in self.verdicts:
            self.verdicts[name] = ""  # libraries that need each other
            self.verdicts[name] = self._fault(self.host[name])
        return self.verdicts[name]

    def _fault(self, lib: Candidate) -> str:
        made, libc = lib.object, self.image.get("libc.so.6")
        if made is None:
            return f"of the host {lib.fault} ({lib.path})"
        if libc is None or libc.object is None:
            return "cannot be compared: the image's libc.so.6 is not on the library path"
        if made.machine != libc.object.machine:
            return f"is for {made.machine}, the image is for {libc.object.machine} ({lib.path})"
        if lib.name not in PLUGINS and made.soname != lib.name:
            return f"has the SONAME {made.soname or '(none)'} ({lib.path})"
        mine = self.image.get(lib.name)
        lost = [version for version in _defined(mine) if version not in made.defines]
        if mine is not None and lost:
            return f"lacks {lost[-1]}, which the image's has ({mine.path})"
        faults = (self._need(lib, need) for need in made.needed)
        return next((fault for fault in faults if fault), "")

    def from_host(self, lib: Candidate, need: str) -> bool:
        """Whether `lib` gets the library `need` from the host."""
        if need in OF_IMAGE or need not in self.host or self.of_user(need):
            return False
        mine = self.image.get(need)
        if mine is not None and need not in WANTED and not self._lacking(lib, mine):
            return False
        return not self.fault(need) and not self._lacking(lib, self.host[need])

    def _need(self, lib: Candidate, need: str) -> str:
        """Why `lib` cannot get the library `need` that it needs; empty if it can."""
        if self.from_host(lib, need):
            hides = [
                folder for folder in (lib.object.rpath if lib.object else ()) if self._of_image(folder, need)
            ]
            return f"has the RPATH {hides[0]}, where the image has another {need}" if hides else ""
        mine = self.image.get(need)
        if mine is not None:
            lacking = self._lacking(lib, mine)
            if not lacking:
                return ""
            if need in self.host and need not in OF_IMAGE and (fault := self.fault(need)):
                return f"needs {lacking}, and the host's {need} {fault}"
            return f"needs {lacking}, {_has(mine, lacking)}"
        if need not in self.host:
            where = "the image does not have" if need in OF_IMAGE else "neither the image nor the host has"
            return f"needs {need}, which {where}"
        fault = self.fault(need)
        if fault:
            return f"needs {need}, {_FOLLOWS}" if need in WANTED else f"needs {need}, and {need} {fault}"
        return f"needs {self._lacking(lib, self.host[need])} of {need}, which the host's lacks"

    def _of_image(self, folder: str, need: str) -> bool:
        mine = self.image.get(need)
        return mine is not None and mine.path == f"{folder}/{need}"

    @staticmethod
    def _lacking(lib: Candidate, server: Candidate) -> str:
        """The newest version that `lib` needs of `server`, which lacks it; empty if there is none.

        A library that defines no versions at all serves every one: the dynamic linker only warns then.
        """
        needs = lib.object.needs.get(server.name, ()) if lib.object else ()
        defined = _defined(server)
        return max((need for need in needs if defined and need not in defined), key=_order, default="")


def _defined(lib: Candidate | None) -> tuple[str, ...]:
    return lib.object.defines if lib is not None and lib.object is not None else ()


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]{1,9}", version))


def _newest(versions: Sequence[str], prefix: str) -> str:
    """Number of the newest version ``PREFIX_N``."""
    found = [version for version in versions if re.fullmatch(rf"{re.escape(prefix)}_[0-9.]+", version)]
    return max(found, key=_order)[len(prefix) + 1 :] if found else ""


def _has(server: Candidate, lacking: str) -> str:
    newest = _newest(_defined(server), lacking.rpartition("_")[0])
    return f"the image has {newest} ({server.path})" if newest else f"which the image's {server.path} lacks"


def _compat(draft: PlanDraft, known: CudaCompat) -> str:
    """The folder of CUDA's forward compatibility; empty where it must not be used, which is reported."""
    fault, reason = _compat_fault(draft, known)
    mine = next((folder for folder in known.others if folder in _parts(draft)[0]), "")
    if not fault and mine:
        fault = f"{VARIABLE} names {mine}, which has a libcuda.so.1 as well"
    if fault:
        _note(draft, COMPAT_KEY, known.folder or COMPAT, f"{fault} ({known.source})")
        return ""
    _note(draft, COMPAT_KEY, known.folder, f"{reason} ({known.source})", used=True)
    return known.folder


def _compat_fault(draft: PlanDraft, known: CudaCompat) -> tuple[str, str]:
    """Why forward compatibility must not be used, and why it is used."""
    facts, cuda = draft.facts, draft.env.get("CUDA_VERSION", "")
    if not known.folder:
        return f"the image has no {COMPAT}/libcuda.so.1", ""
    driver = re.search(r"\b([0-9]{3,5})\.([0-9]{1,5})(?:\.([0-9]{1,5}))?", facts.driver)
    image = re.match(r"([0-9]{1,5})\.([0-9]{1,5})", cuda)
    if not driver or not image:
        shown = facts.driver or "does not exist"
        return f"unknown versions: /proc/driver/nvidia/version {shown}; CUDA_VERSION={cuda!r}", ""
    supported = max((cuda for first, cuda in _CUDA_BY_DRIVER if first <= int(driver[1])), default=(0, 0))
    text = f"driver {driver[0]} supports CUDA {supported[0]}.{supported[1]}, the image has {image[0]}"
    wanted = (int(image[1]), int(image[2]))
    if int(driver[1]) > _CUDA_BY_DRIVER[-1][0] and wanted > supported:
        return f"driver {driver[0]} is newer than imgkit's table, so the CUDA that it supports is unknown", ""
    if wanted <= supported:
        return text, ""
    own = re.search(r"libcuda\.so\.([0-9]{3,5}(?:\.[0-9]{1,5}){1,2})$", known.target)
    if own and _order(own[1]) <= _order(driver[0]):
        return f"{text}, but its {known.target} is not newer than the driver", ""
    models = sorted({gpu.model for gpu in facts.gpu_devices})
    unfit = [model for model in models if _WORKSTATION.search(model) or not _DATA_CENTRE.search(model)]
    if unfit or not models:
        shown = f"{unfit[0] or 'a GPU without a name'} is none" if unfit else "the driver shows no GPU"
        return f"{text}, but forward compatibility is for data-centre GPUs, and {shown}", ""
    return "", f"{text}; {', '.join(models)} is a data-centre GPU"
