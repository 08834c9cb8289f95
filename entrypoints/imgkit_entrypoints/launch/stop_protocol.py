"""The stop protocol between the launcher and the program: two files in ``IMGKIT_STOP_DIR``, a node's folder.

The launcher makes ``stop`` when the program should save and end; its one line is the reason. A program that
has saved writes ``state-saved`` with one line ``JOB_ID STEP`` (the job id is in ``IMGKIT_JOB_ID``) and exits
with 0. The launcher then exits with 85, "requeue me", or with 0 if a person asked. At a step boundary::

    stop, job = Path(os.environ["IMGKIT_STOP_DIR"]), os.environ["IMGKIT_JOB_ID"]
    if (stop / "stop").exists():
        save(step)
        (stop / "state-saved").write_text(f"{job} {step}")
        sys.exit(0)

Ranks see the file at slightly different times, so they must agree on the step by an all-reduce first.

A program that cannot go on with any number of nodes writes those that it can go on with into ``node-counts``,
one line of numbers. Where a range of nodes shrinks, the launchers take the largest of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.arguments import digits
from imgkit_entrypoints.errors import UsageError

STOP, SAVED, COUNTS = "stop", "state-saved", "node-counts"
PHASE = "torchrun"
"""How far torchrun is (start_up.py); no part of the protocol."""
LOCAL_JOB = "local"
"""Value of IMGKIT_JOB_ID if no scheduler gave one."""


@contextlib.contextmanager
def folder(wanted: Path | None, node_rank: int) -> Iterator[Path]:
    """Yield this node's stop folder without old marks; a temporary one is removed at the end.

    Raises
    ------
    UsageError : the folder cannot be written.
    """
    try:
        # A container may have a read-only root without /tmp.
        made = _first_writable((None, "/dev/shm", os.curdir)) if wanted is None else None  # noqa: S108
        # `wanted` may lie on a file system that all nodes share.
        place = made or (wanted or Path()) / f"node{node_rank}"
        if made is None:
            files.make_own_folder(place)
        clear(place)
    except OSError as error:
        raise UsageError(
            f"the stop folder cannot be used: {error.strerror}",
            where=str(error.filename or wanted),
            hint="name a writable folder of this node in IMGKIT_STOP_DIR, or set TMPDIR",
        ) from error
    try:
        yield place
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def clear(place: Path) -> None:
    """Remove the marks of an earlier run.

    Raises
    ------
    OSError : a mark cannot be removed.
    """
    for name in (STOP, SAVED, COUNTS, PHASE):
        (place / name).unlink(missing_ok=True)


def _first_writable(places: tuple[str | None, ...]) -> Path:
    last: OSError | None = None
    for place in places:
        try:
            return Path(tempfile.mkdtemp(prefix="imgkit-stop-", dir=place)).absolute()
        except OSError as error:
            last = error
    assert last is not None  # noqa: S101 - places is not empty
    raise last


def raise_flag(place: Path, reason: str) -> None:
    """Ask the program to save and end."""
    with contextlib.suppress(OSError):
        files.put(place / STOP, f"{reason}\n")


def saved_step(place: Path, job_id: str) -> tuple[str | None, str]:
    """Return the step that this job's program has saved, or None, and why an existing mark does not count."""
    try:
        words = files.read_own(place / SAVED).split()
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{place / SAVED} does not count: {error.strerror}"
    except UnicodeDecodeError as error:
        return None, f"{place / SAVED} cannot be read: {error}"
    if words[:1] != [job_id]:
        found = words[0] if words else "nothing"
        return None, f"{place / SAVED} names job {found}, not {job_id} (IMGKIT_JOB_ID), so it does not count"
    return (words[1] if len(words) > 1 else "?"), ""


def node_counts(place: Path) -> tuple[int, ...]:
    """Return the numbers of nodes that the program has said it can go on with; empty: it has not said."""
    try:
        words = files.read_own(place / COUNTS).split()
    except (OSError, UnicodeDecodeError):
        return ()
    counts = [digits(word) for word in words]
    return tuple(count for count in counts if count)
