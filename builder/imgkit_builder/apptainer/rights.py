"""Find out how the runtime can become root for the steps of a definition, and if this user may do that.

The steps install packages, so they have to run as root. For an ordinary user, the runtime becomes root in a
user namespace. It is root only inside the namespace, and has no rights of root outside.
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
    """A setting of the kernel that can forbid user namespaces."""

    file: str
    forbidding: str
    """The value that forbids user namespaces to ordinary users."""
    allowing: str

    @property
    def problem(self) -> str:
        """Return a text about the forbidding value, such as ``/proc/sys/user/max_user_namespaces is 0``."""
        return f"/{self.file} is {self.forbidding}"

    @property
    def hint(self) -> str:
        """Return how to change the setting, as ``ask an administrator: sysctl -w ...``."""
        key = self.file.removeprefix("proc/sys/").replace("/", ".")
        return f"ask an administrator: sysctl -w {key}={self.allowing}"


SETTINGS = (
    KernelSetting(MAX_NAMESPACES, "0", "15000"),
    KernelSetting("proc/sys/kernel/unprivileged_userns_clone", "0", "1"),
)
"""The settings that can forbid user namespaces to all ordinary users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """How the steps of a definition would run for this user."""

    way: str
    """A phrase for messages, such as ``as root``. Empty if the steps cannot run."""
    problem: str = ""
    """Why the steps cannot run, or what they cannot do."""
    hint: str = ""
    """How to get more rights."""
    needs_namespace: bool = False
    """Whether root needs a user namespace, because it lacks a capability. See ``sif/namespace.py``."""


def inspect_rights(*, root: Path = Path("/"), uid: int | None = None) -> Rights:
    """Return how the runtime would run the steps for the user `uid`, by default the current user.

    Only files below `root` are read, which replaces ``/`` in tests. Starting a container to find out would
    take seconds, and a failure would show the message of the runtime instead of ours.
    """
    uid = os.getuid() if uid is None else uid
    if uid == 0:
        # In a container, root may lack capabilities that a build needs.
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
    # With a range of user ids and newuidmap, files in the namespace can belong to several users, as in a
    # build by the real root.
    has_ranges = _has_range(root / "etc/subuid", uid) and _has_range(root / "etc/subgid", uid)
    if has_ranges and shutil.which("newuidmap"):
        return Rights(way="as root of a user namespace, with the users of /etc/subuid")
    way = "as root of a user namespace with one user"
    # fakeroot only pretends to change owners, but then programs such as apt do not fail.
    if shutil.which("fakeroot"):
        way = "as root of a user namespace, with the program fakeroot"
    return Rights(
        way=way,
        problem="other owners become root: a step that starts a server as another user fails",
        hint="ask an administrator for a range in /etc/subuid and /etc/subgid, and for newuidmap",
    )


def forbids_namespaces(root: Path, setting: KernelSetting) -> bool:
    """Return whether the kernel's current value of `setting` forbids user namespaces to ordinary users."""
    return read_small_file(root / setting.file) == setting.forbidding


def _has_all_capabilities(root: Path) -> bool:
    """Return whether root has every capability of the kernel. In a container, root may lack some."""
    last_capability = read_small_file(root / "proc/sys/kernel/cap_last_cap")
    # The line is "CapBnd:    000001ffffffffff", with one bit for each capability.
    match = re.search(r"^CapBnd:\s*([0-9a-f]+)$", read_small_file(root / "proc/self/status"), re.MULTILINE)
    # Without /proc, nothing is known. Then True is returned, and the runtime itself reports what is missing.
    if match is None or not last_capability.isdigit():
        return True
    all_capabilities = (1 << (int(last_capability) + 1)) - 1
    return int(match[1], 16) == all_capabilities


def _has_range(file: Path, uid: int) -> bool:
    """Return whether `file` (/etc/subuid or /etc/subgid) has a range for the user with the number `uid`.

    A range can be listed under the number or the name of the user.
    """
    user_spellings = [str(uid)]
    with contextlib.suppress(KeyError):  # the user has no name on this machine
        user_spellings.append(pwd.getpwuid(uid).pw_name)
    for line in read_small_file(file).splitlines():
        owner, _, _ = line.partition(":")  # "me:100000:65536"
        if owner in user_spellings:
            return True
    return False


def read_small_file(path: Path) -> str:
    """Return the stripped content of a small file, or "" if it cannot be read."""
    try:
        return files.read_text(path, errors="replace").strip()
    except OSError:
        return ""
