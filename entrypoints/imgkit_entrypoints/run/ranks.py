"""The ranks of a run, and the values and files that they exchange. Nothing that arrives is unpickled."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, UsageError

LONGEST = 1 << 20
"""Most bytes of one rank's value in `Ranks.gather`."""
LONGEST_ROWS = 1 << 36
"""Most bytes of one rank's rows in `Ranks.collect`, so that a false size is refused and not allocated."""

PIECE = 4 << 20
"""Bytes of a file that travel at once."""
INLINE = 480
"""Bytes of a value that travel with its size, so that a short one takes one exchange."""
LONGEST_CALL = 24
"""Letters of the longest name of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Ranks and device of this worker. One rank alone needs no process group."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    group: Any = None
    """The process group whose tensors lie on `device`; None: the default one."""

    def synchronize(self) -> None:
        """Wait until the device has finished its work; an earlier clock measures only the launch."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather(self, mine: Any, kind: Any, *, call: str = "") -> list[Any]:
        """Give every rank the values of all ranks, in their order; a collective call.

        The values travel as JSON in tensors of bytes. torch's own collectives of objects unpickle what
        arrives, so a process that poses as a rank could run code.

        Parameters
        ----------
        mine : value of the type `kind`, from which JSON can be made; dataclasses included.
        kind : type hint of every value, as `json_text.read` takes it.
        call : the program's call that this belongs to, in ASCII, for the message where ranks differ in it.

        Raises
        ------
        CheckFailed : on every rank, if they are at different calls; names them.
        ToolFailed : on every rank, if one sent too much or something else than a `kind`; names it.
        """
        sent = json.dumps(mine, default=dataclasses.asdict, allow_nan=False).encode()
        sizes, rows = self._announced(len(sent), sent, call, LONGEST)
        if max(sizes) > INLINE:
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
            rows = _rows_of(self._gathered(padded))
        values: list[Any] = []
        known: dict[bytes, Any] = {}  # most ranks send the same, and reading it takes most of the time
        for rank, row in enumerate(rows):
            text = row[: sizes[rank]]
            try:
                if text not in known:
                    known[text] = json_text.read(kind, json_text.parse(text), "value")
            except ValueError as error:
                raise _refused(rank, str(error)) from None
            values.append(known[text])
        return values

    def _announced(self, size: int, sent: bytes, call: str, most: int) -> tuple[list[int], list[bytes]]:
        """The sizes of what all ranks send, from 1 to `most`, and its first `INLINE` bytes."""
        own = size.to_bytes(8, "little") + call.encode().ljust(LONGEST_CALL) + sent[:INLINE].ljust(INLINE)
        heads = _rows_of(self._gathered(torch.frombuffer(bytearray(own), dtype=torch.uint8)))
        calls = [head[8 : 8 + LONGEST_CALL].decode(errors="replace").rstrip() for head in heads]
        if len(set(calls)) > 1:
            raise CheckFailed(
                f"the ranks are at different calls: {told(calls)}",
                hint="let all ranks take the same number of steps, and call run.restore, run.steps and "
                "run.save equally often",
            )
        sizes = [int.from_bytes(head[:8], "little") for head in heads]
        for rank, size in enumerate(sizes):
            if not 0 < size <= most:
                raise _refused(rank, f"{size} bytes, not 1 to {most}")
        return sizes, [head[8 + LONGEST_CALL :] for head in heads]

    def collect(self, rows: Mapping[str, bytes], *, call: str = "") -> dict[str, list[torch.Tensor]]:
        """Give rank 0 the rows of all ranks by name, and the others nothing; a collective call.

        The names are the same on all ranks. They travel to rank 0 alone, once and as they are: it looks into
        none of them. The rows are views of one tensor.

        Raises
        ------
        CheckFailed : on every rank, if they are at different calls; names them.
        ToolFailed : a rank sent rows of other sizes than it had said; names it.
        """
        names = sorted(rows)
        head = b"".join(len(rows[name]).to_bytes(8, "little") for name in names)
        sent = b"".join((head, *(rows[name] for name in names)))
        sizes, _ = self._announced(max(1, len(sent)), b"", call, LONGEST_ROWS)
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        if sent:
            padded[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        arrived = self._at_rank_0(padded)
        if arrived is None or not names:
            return {}
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        heads = _rows_of(arrived[:, : len(head)])
        for rank, (row, own) in enumerate(zip(arrived.unbind(), heads, strict=True)):
            lengths = [int.from_bytes(own[at : at + 8], "little") for at in range(0, len(head), 8)]
            if len(head) + sum(lengths) != sizes[rank]:
                raise _refused(rank, f"rows of {lengths} bytes in {sizes[rank]}")
            begin = len(head)
            for name, length in zip(names, lengths, strict=True):
                parts[name].append(row[begin : begin + length])
                begin += length
        return parts

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors, which have one size, as rows in host memory."""
        if self.world_size == 1:
            return mine[None]
        own = mine.to(self.device)
        rows = own.new_empty((self.world_size, len(own)))
        dist.all_gather(list(rows.unbind()), own, group=self.group)
        return rows.cpu()

    def _at_rank_0(self, mine: torch.Tensor) -> torch.Tensor | None:
        """What `_gathered` returns, on rank 0 alone."""
        if self.world_size == 1:
            return mine[None]
        own = mine.to(self.device)
        rows = own.new_empty((self.world_size, len(own))) if self.rank == 0 else None
        dist.gather(own, None if rows is None else list(rows.unbind()), dst=0, group=self.group)
        return None if rows is None else rows.cpu()

    def broadcast(self, data: bytes, source: int) -> bytes:
        """Give every rank the bytes of rank `source`; a collective call."""
        if self.world_size == 1:
            return data
        size = torch.tensor([len(data)], device=self.device)
        dist.broadcast(size, source, group=self.group)
        received = bytearray(data) if self.rank == source else bytearray(int(size.item()))
        if not received:
            return b""
        host = torch.frombuffer(received, dtype=torch.uint8)
        sent = host.to(self.device)
        dist.broadcast(sent, source, group=self.group)
        host.copy_(sent)
        return bytes(received)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delivered:
    problem: str = ""
    path: str = ""


class Delivery:
    """Brings the parts of a checkpoint to the nodes that do not see its folder; collective calls.

    One rank that sees it sends each part, in pieces, to one rank of each such node. That rank writes a file
    without a lasting name, which the ranks of its node read.

    Parameters
    ----------
    blind : for each rank the name of its node, if it does not see the folder; else an empty text.
    """

    def __init__(self, source: int, blind: Sequence[str], here: Ranks) -> None:
        first: dict[str, int] = {}
        for rank, node in enumerate(blind):
            if node:
                first.setdefault(node, rank)
        self._here, self._source = here, source
        self._leader = first.get(blind[here.rank])
        """The rank that writes for this one; None: it sees the folder."""
        self._members = sorted({source, *first.values()})
        self._group = dist.new_group(self._members, backend="gloo")
        self._streams: dict[str, BinaryIO | None] = {}

    def part(self, path: Path, size: int, sha256: str) -> BinaryIO | None:
        """Open a part; None on a rank that sees the folder.

        Raises
        ------
        ToolFailed : on every rank, if a rank cannot read, write or open it; names the rank.
        """
        here = self._here
        if path.name not in self._streams:
            spool = files.temporary_name(Path(tempfile.gettempdir()) / path.name)
            mine = _Delivered()
            if here.rank in self._members:
                problem = (
                    self._send(path, size)
                    if here.rank == self._source
                    else self._receive(spool, size, sha256)
                )
                mine = _Delivered(problem=problem, path=str(spool))
            every = here.gather(mine, _Delivered, call="run.restore")
            stream, problem = None, ""
            if self._leader is not None and not any(one.problem for one in every):
                try:
                    stream = files.open_regular(Path(every[self._leader].path))
                except OSError as error:
                    problem = f"{every[self._leader].path}: {error.strerror}"
            problems = [one.problem for one in every]
            problems = [one or other for one, other in zip(problems, here.gather(problem, str), strict=True)]
            if self._leader == here.rank:
                spool.unlink(missing_ok=True)
            if bad := [(rank, text) for rank, text in enumerate(problems) if text]:
                raise ToolFailed(
                    "the checkpoint cannot be passed on to the nodes that do not see its folder: rank "
                    f"{bad[0][0]}: {bad[0][1]}",
                    where=str(path),
                    hint="put the run folder on a file system that all nodes share; or set TMPDIR, on each "
                    "node, to a folder with room for the checkpoint",
                )
            self._streams[path.name] = stream
        kept = self._streams[path.name]
        if kept is None:
            return None
        stream = os.fdopen(os.dup(kept.fileno()), "rb")
        stream.seek(0)  # both have one position
        return stream

    def _send(self, path: Path, size: int) -> str:
        """Send a part; return why it could not be read. The receivers get as many bytes in any case."""
        problem, piece = "", torch.zeros(PIECE, dtype=torch.uint8)
        with contextlib.ExitStack() as stack:
            try:
                stream = stack.enter_context(files.open_regular(path))
            except OSError as error:
                problem = error.strerror or str(error)
            for at in range(0, size, PIECE):
                own = piece[: min(PIECE, size - at)]
                try:
                    content = bytearray(b"" if problem else stream.read(len(own)))
                except OSError as error:
                    content, problem = bytearray(), error.strerror or str(error)
                if len(content) == len(own):
                    own = torch.frombuffer(content, dtype=torch.uint8)
                problem = problem or ("" if content else "it has become shorter")
                dist.broadcast(own, self._source, group=self._group)
        return problem

    def _receive(self, spool: Path, size: int, sha256: str) -> str:
        """Write a part to `spool`; return why that failed."""
        problem, found, piece = "", hashlib.sha256(), torch.empty(PIECE, dtype=torch.uint8)
        with contextlib.ExitStack() as stack:
            try:
                sink = stack.enter_context(files.create(spool, mode=0o600))
            except OSError as error:
                problem = f"{spool}: {error.strerror}"
            for at in range(0, size, PIECE):
                own = piece[: min(PIECE, size - at)]
                dist.broadcast(own, self._source, group=self._group)
                if not problem:
                    content = bytes_of(own, len(own))
                    found.update(content)
                    try:
                        sink.write(content)
                        sink.flush()
                    except OSError as error:
                        problem = f"{spool}: {error.strerror}"
        if problem:
            spool.unlink(missing_ok=True)
        elif found.hexdigest() != sha256:
            problem = "its bytes arrived with another sha256 than its manifest has"
        return problem


def _rows_of(rows: torch.Tensor) -> list[bytes]:
    """The bytes of each row of a matrix."""
    count, size = rows.shape
    content = bytes_of(rows.reshape(-1), count * size)
    return [content[at : at + size] for at in range(0, count * size, max(1, size))]


def bytes_of(row: torch.Tensor, size: int) -> bytes:
    """The first `size` bytes of a tensor."""
    content = bytearray(size)
    if size:
        torch.frombuffer(content, dtype=torch.uint8).copy_(row[:size])
    return bytes(content)


SHOWN = 5
"""Names that a message lists."""


def some(names: Sequence[str]) -> str:
    """The first of `names`, for a message: ``a, b and 7 more``."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def told(values: Sequence[object]) -> str:
    """Name the ranks of each value, the most frequent one last: ``rank 1: 3, ranks 0, 2: 4``."""
    known = sorted(set(values), key=lambda value: (values.count(value), str(value)))
    groups = [(value, [str(rank) for rank, one in enumerate(values) if one == value]) for value in known]
    return ", ".join(f"rank{'s' if ranks[1:] else ''} {', '.join(ranks)}: {one}" for one, ranks in groups)


def _refused(rank: int, what: str) -> ToolFailed:
    return ToolFailed(
        f"rank {rank} sent a value that is not from this program: {what}",
        hint="start the same image on every node; if it is the same, a stranger may have joined the run",
    )


def connected(env: Mapping[str, str], own_rank: int) -> Ranks:
    """The ranks of the process group that the program has opened, with a gloo group for calls of their own.

    Raises
    ------
    UsageError : there is no process group yet, or it knows this process by another rank than `own_rank`.
    """
    grouped = dist.is_available() and dist.is_initialized()
    if not grouped and int(env.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "the ranks are not connected yet",
            hint="call torch.distributed.init_process_group() before run.restore and run.steps",
        )
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    if rank != own_rank:
        raise UsageError(
            f"this is rank {rank} of the process group, but RANK said {own_rank} at Run.start",
            hint="start the program by dist-run or torchrun, or set RANK and LOCAL_RANK before Run.start",
        )
    return Ranks(
        rank=rank,
        local_rank=int(env.get("LOCAL_RANK", "0")),
        world_size=world_size,
        device=torch.device("cpu"),
        # Its calls mix with none of the program's, and use no GPU.
        group=dist.new_group(backend="gloo") if world_size > 1 else None,
    )


def with_own_group(here: Ranks) -> Ranks:
    """The same ranks with another gloo group, for calls of a thread; a collective call."""
    group = dist.new_group(backend="gloo") if here.world_size > 1 else None
    return dataclasses.replace(here, device=torch.device("cpu"), group=group)
