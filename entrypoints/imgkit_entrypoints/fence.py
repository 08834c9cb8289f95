"""Keep workers of an earlier attempt from writing into the run folder.

An attempt is one start of the workers on all nodes. A node that is cut off from the network may still run
workers of an attempt that the other nodes have given up. So the head (node 0) writes the file ``attempt``
before each attempt. It contains one line ``JOB_ID ATTEMPT RUN``, and a worker reads it before it renames a
checkpoint or ``state-saved`` into place. RUN differs between starts of the node agents. It is needed because
a requeued job has the same id and begins with attempt 1 again.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Mapping
from pathlib import Path

from imgkit_entrypoints import files

FILE = "attempt"


VARIABLE = "IMGKIT_FENCE"
"""Variable with RUN for the workers on the head. Only these workers write files that all nodes share."""


def admit_attempt(folder: Path, job_id: str, attempt: int, run: str) -> str:
    """Write the file that allows only workers of `attempt` to write into `folder`.

    If the file cannot be written, workers of an earlier attempt may still write, and the result is a warning
    about that. Otherwise, return "".
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write_file(folder / FILE, f"{job_id} {attempt} {run}\n")
    except OSError as error:
        # With the line of the earlier attempt, the new workers could not write. Even on a full disk, it can
        # be removed.
        with contextlib.suppress(OSError):
            (folder / FILE).unlink()
        return f"{folder / FILE}: {error.strerror}; workers of an earlier attempt may still write"
    return ""


def check_fence(env: Mapping[str, str]) -> None:
    """Check that this worker's attempt is the current one. Workers call this before they write files.

    An attempt is one start of the workers on all nodes. The head (node 0) writes the current one into a file
    in the run folder. A node that is cut off from the network may still run workers of an earlier attempt,
    which must not replace files of the current attempt.

    Outside of a run, or if the file cannot be read, nothing is checked.

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
    # An example is "4711 2 1f2e3d4c". Workers on nodes other than the head do not know RUN, so only job and
    # attempt are compared for them.
    own = [env.get("IMGKIT_JOB_ID", ""), attempt]
    if env.get(VARIABLE):
        own.append(env[VARIABLE])
    else:
        own += current[2:]  # take it from the file, so that it is equal
    if current != own:
        content = " ".join(current)[:200]
        problem = f"attempt {attempt} of the run is over, {Path(folder) / FILE} says {content!r}"
        raise OSError(errno.ESTALE, problem)
