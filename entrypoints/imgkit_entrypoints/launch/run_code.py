"""The check that the container of a job has the run's copy of its code.

A runtime may leave a mount out without an error. The job would then run the code of the image, and nobody
would know.
"""

from __future__ import annotations

from collections.abc import Mapping

from imgkit_entrypoints import facts
from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.system import WORKSPACE

CODE_VARIABLE = "IMGKIT_CODE"
"""Variable of a container with code of the run: the digest of the code that was sent."""
_MOUNTS = "/proc/self/mountinfo"


def refuse_missing_code(env: Mapping[str, str]) -> None:
    """Raise NoPlan if the run has code of its own, and nothing is mounted where its copy belongs.

    What is in the copy does not matter: the program may have changed it before a requeue.
    """
    code = env.get(CODE_VARIABLE, "")
    if not code:
        return
    lines = (facts.Reader(root=facts.root_of(env)).text(_MOUNTS) or "").splitlines()
    # Field 5 is the mount point (proc_pid_mountinfo(5)).
    mount_points = [line.split(" ")[4] for line in lines if line.count(" ") > 4]
    if f"/{WORKSPACE}" in mount_points:
        return
    raise NoPlan(
        f"the run's copy of the code is not mounted at /{WORKSPACE}",
        where=f"{CODE_VARIABLE}={code}",
        hint="if an admin has set `user bind control = no`, no folder can be mounted: build the code into "
        "the image (image.copy), and submit with --no-code",
    )
