"""Keep workers of an earlier attempt from writing into the run folder.

A node that is cut off may still have workers of an attempt that the other nodes have given up. So the head
writes the file ``attempt`` before each attempt. It has one line ``JOB_ID ATTEMPT RUN``, and a worker reads it
before it renames a checkpoint or ``state-saved`` into place. RUN differs between starts of the node agents,
because a requeued job has the same id and begins with attempt 1 again.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Mapping
from pathlib import Path

from imgkit_entrypoints import files

FILE = "attempt"


VARIABLE = "IMGKIT_FENCE"
"""Variable with RUN for the workers of the head. Only ranks there write files that all nodes share."""


def admit_attempt(folder: Path, job_id: str, attempt: int, run: str) -> str:
    """Write the file that admits only workers of `attempt` to `folder`.

    Return a warning if the file cannot be written, so that workers of an earlier attempt may still write.
    Otherwise return an empty text.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write_file(folder / FILE, f"{job_id} {attempt} {run}\n")
    except OSError as error:
        # The line of the earlier attempt would keep the new workers out. A full disk can still remove it.
        with contextlib.suppress(OSError):
            (folder / FILE).unlink()
        return f"{folder / FILE}: {error.strerror}; workers of an earlier attempt may still write"
    return ""


def check_fence(env: Mapping[str, str]) -> None:
    """Check that this worker's attempt is the current one, before the worker writes into the run folder.

    Nothing is checked outside of a run, or if the file cannot be read.

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
    # "4711 2 1f2e3d4c". Workers of other nodes do not have RUN, so only job and attempt count for them.
    own = [env.get("IMGKIT_JOB_ID", ""), attempt]
    if env.get(VARIABLE):
        own.append(env[VARIABLE])
    else:
        own += current[2:]
    if current != own:
        content = " ".join(current)[:200]
        problem = f"attempt {attempt} of the run is over, {Path(folder) / FILE} says {content!r}"
        raise OSError(errno.ESTALE, problem)
