"""What all ranks do together in a folder that all of them see: prove that, write the shards, verify them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_entrypoints import fence, files, json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import disk, shard_file, shard_index
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.shard_index import Index
from imgkit_entrypoints.run.sharded import Contents, Staged

PATIENCE_S = 10.0
"""Time in which a file of another node appears; NFS remembers for some seconds that a name was absent."""
_SHOWN = 1000
"""Characters of a message that may repeat what a stranger has written."""
PROBE = f"{files.TEMPORARY}seen-"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What a rank sends of its file."""

    problem: str = ""
    size_bytes: int = 0
    sha256: str = ""


def prove(folder: Path, here: Ranks) -> None:
    """Prove that all ranks write into the same folder; a collective call.

    Raises
    ------
    UsageError : on every rank, if one does not; names the hosts.
    """
    if here.world_size == 1:
        return
    probe = here.broadcast(f"{PROBE}{secrets.token_hex(8)}".encode(), 0).decode()
    mine, problem = folder / probe, ""
    try:
        if here.rank == 0:
            mine.mkdir(parents=True)
    except OSError as error:
        problem = f"{error.strerror}"
    here.gather(problem, str, call="run.restore")
    end = time.monotonic() + PATIENCE_S
    while not problem:
        try:
            files.create(mine / str(here.rank)).close()
            break
        except OSError as error:
            if time.monotonic() > end:
                problem = f"{error.strerror}"
            time.sleep(0.1)
    host = socket.gethostname()
    every = here.gather([host, problem], list[str], call="run.restore")
    if here.rank == 0:
        _remove(mine)
    if lost := sorted({f"{host} ({why})" for host, why in every if why}):
        raise UsageError(
            f"sharded state needs a folder that all ranks see and write, and rank 0 on {every[0][0]} shares "
            f"this one not with {', '.join(lost)}",
            where=str(folder),
            hint="name a folder on a file system that all nodes share: Run.start(FOLDER), --run-dir or "
            "IMGKIT_RUN_DIR",
        )


def _remove(probe: Path) -> None:
    with contextlib.suppress(OSError):  # an empty folder with a temporary name harms nobody
        for path in probe.iterdir():
            path.unlink()
        probe.rmdir()


class Writing:
    """One checkpoint that all ranks write, in a thread of each, on a group of its own."""

    def __init__(self, here: Ranks, staged: Staged, env: Mapping[str, str] = os.environ) -> None:
        self._here, self._staged, self._env = here, staged, env
        self._has_begun = False

    def lead(self, temporary: Path) -> disk.Rows:
        """Let all ranks write into `temporary`; return the rows of their files. Rank 0 calls it.

        Raises
        ------
        OSError : a rank could not; names it.
        """
        self._has_begun = True
        self._here.broadcast(temporary.name.encode(), 0)
        return self._write(temporary)

    def _write(self, temporary: Path) -> disk.Rows:
        mine = _Row()
        try:
            fence.check(self._env)
            row = disk.write_file(temporary / self._staged.file, self._staged.write)
            mine = _Row(size_bytes=int(row["size_bytes"]), sha256=str(row["sha256"]))
        except OSError as error:
            mine = _Row(problem=error.strerror or str(error))
        every = self._here.gather(mine, _Row, call="run.save")
        for rank, one in enumerate(every):
            if one.problem:
                raise OSError(0, f"rank {rank}: {one.problem}")
        return {
            shard_file.name_of(rank, len(every)): {"size_bytes": one.size_bytes, "sha256": one.sha256}
            for rank, one in enumerate(every)
        }

    def conclude(self, *, is_written: bool) -> None:
        """Tell the others how it ended. Rank 0 calls it."""
        if not self._has_begun:
            self._here.broadcast(b"", 0)
        self._here.broadcast(b"1" if is_written else b"", 0)

    def follow(self, folder: Path) -> bool:
        """Write this rank's file into rank 0's checkpoint in `folder`; return whether that is whole then.

        Raises
        ------
        OSError : a rank could not write its file.
        """
        name = self._here.broadcast(b"", 0).decode()
        problem = None
        if name:
            try:
                self._write(folder / name)
            except OSError as error:
                problem = error
        is_written = bool(self._here.broadcast(b"", 0))
        if problem is not None:
            raise problem
        return is_written


def verify(checkpoint: Path, here: Ranks, source: int) -> Contents | str:
    """Read what a sharded checkpoint has, or the reason why it cannot be used; a collective call.

    Each file is hashed by one rank; the headers are read by all. Rank `source` has compared the other
    files with the manifest.

    Raises
    ------
    UsageError : on every rank, if one does not see the checkpoint; names the hosts.
    """
    manifest = _bytes(checkpoint / disk.MANIFEST)
    digest = hashlib.sha256(manifest).hexdigest()
    found = here.gather([socket.gethostname(), digest], list[str], call="run.restore")
    if lost := sorted({host for host, one in found if one != found[source][1]}):
        raise UsageError(
            f"this sharded checkpoint is on {found[source][0]}, and not on {', '.join(lost)}",
            where=str(checkpoint),
            hint="put the folder on a file system that all nodes share",
        )
    contents: Contents | None = None
    problem = ""
    try:
        rows = json_text.parse(manifest)["files"]
        names = sorted(name for name in rows if name.endswith(shard_file.SUFFIX))
        for name in names[here.rank :: here.world_size]:
            problem = problem or disk.damaged(checkpoint, name, rows[name])
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{checkpoint}: {error}"
    problem = _first(problem, here)
    if not problem:  # a damaged header would be reported as one of another format
        contents, problem = _contents(checkpoint, names)
    problem = _first(problem, here)
    return problem if problem or contents is None else contents


def _first(problem: str, here: Ranks) -> str:
    """The first problem of all ranks; a collective call."""
    return next((one for one in here.gather(problem[:_SHOWN], str, call="run.restore") if one), "")


def _contents(checkpoint: Path, names: list[str]) -> tuple[Contents | None, str]:
    path = checkpoint / shard_index.INDEX
    try:
        index = Index.parse(_bytes(path))
        pieces: dict[str, list[shard_file.Piece]] = {}
        for name in names:
            path = checkpoint / name
            for one in shard_file.read(path):
                pieces.setdefault(one.name, []).append(one)
    except (OSError, ValueError) as error:
        return None, f"{path} is not what this imgkit writes: {error}"
    shapes = {name: (one.dtype, one.shape) for name, one in index.wholes.items()}
    if gap := shard_file.first_gap(pieces, shapes):
        return None, f"{checkpoint}: {gap}"
    by_offsets = {name: {one.offsets: one for one in own} for name, own in pieces.items()}
    return Contents(folder=checkpoint, index=index, pieces=by_offsets), ""


def _bytes(path: Path) -> bytes:
    try:
        return files.read_bytes(path, most_bytes=shard_file.MOST_BYTES)
    except OSError:
        return b""
