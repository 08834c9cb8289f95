"""Find out how the runtime becomes root for the steps of a definition, and whether this user can do that.

The steps install packages, for which they have to run as root. For an ordinary user, the runtime does so in
a user namespace.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from imgkit_entrypoints import files

MAX_NAMESPACES = "proc/sys/user/max_user_namespaces"


class KernelSetting(NamedTuple):
    """A setting of the kernel about user namespaces."""

    file: str
    forbidding: str
    """The value that forbids them to ordinary users."""
    allowing: str

    @property
    def problem(self) -> str:
        """Return a text about a setting that forbids them: ``/proc/sys/user/max_user_namespaces is 0``."""
        return f"/{self.file} is {self.forbidding}"

    @property
    def hint(self) -> str:
        """Return how to change the setting: ``ask an administrator: sysctl -w ...``."""
        key = self.file.removeprefix("proc/sys/").replace("/", ".")
        return f"ask an administrator: sysctl -w {key}={self.allowing}"


SETTINGS = (
    KernelSetting(MAX_NAMESPACES, "0", "15000"),
    KernelSetting("proc/sys/kernel/unprivileged_userns_clone", "0", "1"),
)
"""The settings with which a kernel can forbid them to all ordinary users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """How the steps of a definition run for this user."""

    way: str
    """A phrase for people, such as ``as root``. Empty if the steps cannot run."""
    problem: str = ""
    """Why the steps cannot run, or what they cannot do."""
    hint: str = ""
    """How to get more rights."""
    needs_namespace: bool = False
    """Whether root needs a user namespace because it lacks a capability; see ``sif/namespace.py``."""


def inspect_rights(*, root: Path = Path("/"), uid: int | None = None) -> Rights:
    """Return how the runtime would run the steps for the user `uid`, by default this one.

    Only files below `root` are read. To start a container and see would take seconds, and a failure would
    come with the runtime's message instead of ours.
    """
    uid = os.getuid() if uid is None else uid
    if uid == 0:
        if _has_all_capabilities(root):
            return Rights(way="as root")
        return Rights(
            way="as root of a user namespace, as root lacks a capability here", needs_namespace=True
        )
    for setting in SETTINGS:
        if forbids_namespaces(root, setting):
            return Rights(
                way="",
                problem=f"{setting.problem}: ordinary users get no user namespace",
                hint=f"{setting.hint}; or build where Docker is",
            )
    # With a range of user numbers and newuidmap, files can belong to several users, as in a real root's
    # build.
    has_ranges = _has_range(root / "etc/subuid", uid) and _has_range(root / "etc/subgid", uid)
    if has_ranges and shutil.which("newuidmap"):
        return Rights(way="as root of a user namespace, with the users of /etc/subuid")
    way = "as root of a user namespace with one user"
    if shutil.which("fakeroot"):
        way = "as root of a user namespace, with the program fakeroot"
    return Rights(
        way=way,
        problem="other owners become root: a step that starts a server as another user fails",
        hint="ask an administrator for a range in /etc/subuid and /etc/subgid, and for newuidmap",
    )


def forbids_namespaces(root: Path, setting: KernelSetting) -> bool:
    """Return whether `setting` forbids ordinary users to create a user namespace."""
    return read_small_file(root / setting.file) == setting.forbidding


def _has_all_capabilities(root: Path) -> bool:
    """Return whether root has every capability of the kernel. In a container it may lack some."""
    last = read_small_file(root / "proc/sys/kernel/cap_last_cap")
    # "CapBnd:	000001ffffffffff", a bit for each capability
    match = re.search(r"^CapBnd:\s*([0-9a-f]+)$", read_small_file(root / "proc/self/status"), re.MULTILINE)
    # Without /proc nothing is known. The answer is then yes, and the runtime reports what is missing.
    if match is None or not last.isdigit():
        return True
    all_capabilities = (1 << (int(last) + 1)) - 1
    return int(match[1], 16) == all_capabilities


def _has_range(file: Path, uid: int) -> bool:
    """Return whether `file`, /etc/subuid or /etc/subgid, has a range for the user `uid` or its name."""
    names = [str(uid)]
    with contextlib.suppress(KeyError):  # the user has no name
        names.append(pwd.getpwuid(uid).pw_name)
    for line in read_small_file(file).splitlines():
        owner, _, _ = line.partition(":")  # "me:100000:65536"
        if owner in names:
            return True
    return False


def read_small_file(path: Path) -> str:
    """Return the stripped content of a small file, or "" if it cannot be read."""
    try:
        return files.read_text(path, errors="replace").strip()
    except OSError:
        return ""
