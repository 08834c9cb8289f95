"""Check that the run's copy of the user's code is mounted in the container of a job.

A container runtime may leave out a mount without an error. The job would then silently run older code from
the image.
"""

from __future__ import annotations

from collections.abc import Mapping

from imgkit_entrypoints import facts
from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.system import WORKSPACE

CODE_VARIABLE = "IMGKIT_CODE"
"""Variable with the digest of the code that was sent with the run. It is not set if the run has no code."""
# Each line describes a mount: "36 35 98:0 / /workspace rw,noatime - ext3 /dev/root rw".
_MOUNTINFO_FILE = "/proc/self/mountinfo"
_MOUNT_POINT_FIELD = 4  # the index of the fifth field (proc_pid_mountinfo(5))


def refuse_missing_code(env: Mapping[str, str]) -> None:
    """Raise NoPlan if the run's copy of the user's code is not mounted in the container.

    Otherwise, the program would run the image's older code, or not be found. If the run has a copy,
    `CODE_VARIABLE` contains its digest. A run without a copy passes. The digest is not compared with the
    content of the copy, because the program may have changed files before a requeue.
    """
    code = env.get(CODE_VARIABLE, "")
    if not code:
        return
    # The list of mounts shows whether the folder is a mount, even if the image has a folder of the same name.
    reader = facts.Reader(root=facts.root_of(env))  # IMGKIT_ROOT may name another root folder than "/"
    mountinfo = reader.text(_MOUNTINFO_FILE) or ""
    # "36 35 98:0 / /workspace rw,noatime - ext3 /dev/root rw" -> "/workspace"
    mounts = [line.split(" ") for line in mountinfo.splitlines()]
    mount_points = [fields[_MOUNT_POINT_FIELD] for fields in mounts if len(fields) > _MOUNT_POINT_FIELD]
    if f"/{WORKSPACE}" in mount_points:
        return
    raise NoPlan(
        f"the run's copy of the code is not mounted at /{WORKSPACE}",
        where=f"{CODE_VARIABLE}={code}",
        hint="if an admin has set `user bind control = no`, no folder can be mounted: build the code into "
        "the image (image.copy), and submit with --no-code",
    )
