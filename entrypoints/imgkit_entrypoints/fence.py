"""The fence around the run's folder: what workers of an earlier attempt write there no longer counts.

A node that is cut off may still have workers of an attempt that the others have given up. So the head
writes the file ``attempt`` before each attempt, one line ``JOB_ID ATTEMPT RUN``. A worker looks there before
a checkpoint or ``state-saved`` is renamed into place. RUN differs between starts of the node
agents, since a requeued job has the same id and begins with attempt 1 again.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Mapping
from pathlib import Path

from imgkit_entrypoints import files

FILE = "attempt"


VARIABLE = "IMGKIT_FENCE"
"""RUN, for the workers of the head; only there does a rank write what all nodes share."""


def admit_attempt(folder: Path, job_id: str, attempt: int, run: str) -> str:
    """Let only workers of `attempt` write into `folder`; return why the fence is down, empty if it stands."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write_file(folder / FILE, f"{job_id} {attempt} {run}\n")
    except OSError as error:
        # The old line would keep the new workers out. A full disk can remove it.
        with contextlib.suppress(OSError):
            (folder / FILE).unlink()
        return f"{folder / FILE}: {error.strerror}; workers of an earlier attempt may still write"
    return ""


def check_fence(env: Mapping[str, str]) -> None:
    """Let a worker write only while its attempt is current; where nobody says which one is, let it write.

    Raises
    ------
    OSError : the attempt of this worker is over.
    """
    folder, attempt = env.get("IMGKIT_RUN_DIR"), env.get("IMGKIT_ATTEMPT")
    if not folder or not attempt:
        return
    try:
        current = files.read_own(Path(folder) / FILE).split()
    except (OSError, UnicodeDecodeError):
        return
    run = env.get(VARIABLE)
    if current != [env.get("IMGKIT_JOB_ID", ""), attempt, *([run] if run else current[2:])]:
        content = " ".join(current)[:200]
        problem = f"attempt {attempt} of the run is over, {Path(folder) / FILE} says {content!r}"
        raise OSError(errno.ESTALE, problem)
