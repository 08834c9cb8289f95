"""Keep workers of an earlier attempt from writing into the run folder.

An attempt is one start of the workers on all nodes. A node that is cut off from the network may still run
workers of an attempt that the other nodes have given up. So the head (node 0) writes the file ``attempt``
before each attempt. It contains one line ``JOB_ID ATTEMPT RUN_ID``, and a worker reads it before it renames a
checkpoint or ``state-saved`` into place. RUN_ID differs between starts of the node agents. It is needed
because a requeued job has the same id and begins with attempt 1 again.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Mapping
from pathlib import Path

from imgkit_entrypoints import files

ATTEMPT_FILE = "attempt"
"""Name of the file in the run folder that names the current attempt."""
RUN_ID_VARIABLE = "IMGKIT_FENCE"
"""Variable with RUN_ID for the workers on the head. Only these workers write files that all nodes share."""


def admit_attempt(folder: Path, job_id: str, attempt: int, run_id: str) -> str:
    """Write the file that allows only workers of `attempt` to write into `folder`.

    Each worker compares the file with its own attempt before it writes (`check_fence`). If the file cannot be
    written, workers of an earlier attempt may still write, and the result is a warning about that. Otherwise,
    return "".
    """
    path = folder / ATTEMPT_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write_file(path, f"{job_id} {attempt} {run_id}\n")
    except OSError as error:
        # The file of the earlier attempt would keep the workers of this attempt from writing. Without a file,
        # all workers may write. A file can be removed even if the disk is full.
        with contextlib.suppress(OSError):
            path.unlink()
        return f"{path}: {error.strerror}; workers of an earlier attempt may still write"
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
    if not folder or not attempt:  # outside of a run
        return
    path = Path(folder) / ATTEMPT_FILE
    try:
        current_ids = files.read_own(path).split()  # "4711 2 1f2e3d4c": the job, the attempt and the run
    except (OSError, UnicodeDecodeError):
        return
    own_ids = [env.get("IMGKIT_JOB_ID", ""), attempt]
    if env.get(RUN_ID_VARIABLE):  # only the workers on the head know the id of the run
        own_ids.append(env[RUN_ID_VARIABLE])
    if current_ids[: len(own_ids)] != own_ids:
        content = " ".join(current_ids)[:200]
        raise OSError(errno.ESTALE, f"attempt {attempt} of the run is over, {path} says {content!r}")
