"""The fence around the run's folder: what workers of an earlier attempt write there no longer counts.

A node that is cut off may still have workers of an attempt that the others have given up. So the head writes
the file ``attempt`` before each attempt, one line ``JOB_ID ATTEMPT``, and a worker looks there before a
snapshot or ``state-saved`` gets its name.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Mapping
from pathlib import Path

from imgkit_entrypoints import files

FILE = "attempt"


def admit(folder: Path, job_id: str, attempt: int) -> str:
    """Let only workers of `attempt` write into `folder`; return why the fence is down, empty if it stands."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.put(folder / FILE, f"{job_id} {attempt}\n")
    except OSError as error:
        with contextlib.suppress(
            OSError
        ):  # the old line would keep the new workers out; a full disk can remove
            (folder / FILE).unlink()
        return f"{folder / FILE}: {error.strerror}; nothing keeps workers of an earlier attempt from writing"
    return ""


def check(env: Mapping[str, str]) -> None:
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
    if current != [env.get("IMGKIT_JOB_ID", ""), attempt]:
        why = f"attempt {attempt} of the run is over, {Path(folder) / FILE} says {' '.join(current)[:200]!r}"
        raise OSError(errno.ESTALE, why)
