"""Ask NCCL about a hang: the answer of its RAS threads, and the files of torch's flight recorder.

RAS knows which ranks a communicator misses, and which have launched fewer collectives. From NCCL 2.24 on,
every process with a communicator has a RAS thread that answers on a port of its node. The protocol is lines
of text, and NCCL closes the connection after its answer. Format and limits: NCCL User Guide, "RAS", and
src/ras/client_support.cc of NCCL 2.24.3 to 2.30.7.

The flight recorder is a part of torch. After a timeout, it writes one file per rank about its collectives.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.arguments import parse_digits
from imgkit_entrypoints.facts.reader import natural
from imgkit_entrypoints.launch import plan
from imgkit_entrypoints.schedulers.hostlist import number_ranges

# The address at which RAS listens unless NCCL_RAS_ADDR names another one.
RAS_DEFAULT = "localhost:28028"
LIMIT_S = 8.0
"""Seconds for the whole question.

NCCL waits `_PEERS_S` seconds for a process that is silent, and as long again in large jobs.
"""
# Largest answer that is read: 1 MiB.
MAX_ANSWER_BYTES = 1 << 20
MAX_LINES = 24
"""Largest number of lines in a report."""
# Seconds that NCCL is asked to wait for other processes ("TIMEOUT 2").
_PEERS_S = 2
# Seconds to connect, and to wait for the first line of the protocol.
_GREETING_S = 1.0
# The processes of a node share the port. The kernel may choose a stopped process, which never greets.
_TRIES = 3
# Characters of a line that are kept.
_LONGEST = 160
# The headings at the end of an answer: the list of errors comes first, and then the list of warnings.
_ERRORS_HEADING = "\nErrors\n======\n"
_WARNINGS_HEADING = re.compile(r"Warnings|=+")
# "  Rank 3 -- GPU 3 managed by process 4711 on node n2"
_RANK = re.compile(r"  Rank (\d{1,9}) -- GPU [^-]{1,40} managed by process \d+ on node (\S+)")
_RANK_NUMBER = re.compile(r"(?m)^  Rank (\d{1,9}) -- ")


def ras_address(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the host and port at which NCCL's RAS answers, or None if the workers of `env` do not use it.

    RAS is NCCL's service for questions about its state. Each process with NCCL answers at this address.
    """
    if env.get("IMGKIT_DEVICE") != "cuda" or env.get("NCCL_RAS_ENABLE") == "0":
        return None
    host, _, port = env.get("NCCL_RAS_ADDR", RAS_DEFAULT).rpartition(":")
    number = parse_digits(port)
    if not host or number is None or not 0 < number < 1 << 16:
        return None  # NCCL does not listen at such an address either
    return host.strip("[]"), number


def ask_about_hang(env: Mapping[str, str]) -> Question | None:
    """Start a question to the NCCL of the workers of `env`. Return None if it cannot be asked."""
    address = ras_address(env)
    return Question(*address) if address else None


class Question:
    """One question to NCCL, which is asked in a thread.

    While a node agent waited for the answer itself, it would send no heartbeat, and would count as lost.
    """

    def __init__(self, host: str, port: int) -> None:
        self.lines: list[str] = []
        """Lines for the report. Empty while there is no answer, and if nothing listens at the address."""
        self._until = time.monotonic() + LIMIT_S
        self._thread = threading.Thread(target=self._ask, args=(host, port), daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Return whether the answer may still come."""
        return self._thread.is_alive() and time.monotonic() < self._until

    def _ask(self, host: str, port: int) -> None:
        """Ask NCCL, and set `lines` to its report, or to the reason why there is none.

        `lines` stays empty if no NCCL with RAS runs here.
        """
        name = f"NCCL's RAS ({host}:{port})"
        try:
            problems = summarize_answer(_read_answer(host, port))
        except (ConnectionError, socket.gaierror):
            return  # NCCL is older, has no communicator yet, or has ended
        except TimeoutError:
            self.lines = [f"  {name} does not answer"]
        except (OSError, ValueError) as error:
            self.lines = [f"  {name} sent an unreadable answer: {error}"]
        else:
            self.lines = [f"  {name}:", *(f"    {line}" for line in problems)]


def _read_answer(host: str, port: int) -> bytes:
    """Return NCCL's answer to the command VERBOSE STATUS, which lists the errors of all its communicators.

    Raises
    ------
    TimeoutError : no process has greeted.
    ConnectionResetError : NCCL has closed the connection.
    ValueError : another program listens at this address.
    """
    for _ in range(_TRIES):
        with (
            socket.create_connection((host, port), timeout=_GREETING_S) as link,
            link.makefile("rb") as stream,
        ):
            link.sendall(b"CLIENT PROTOCOL 2\n")
            try:
                greeting = stream.readline(_LONGEST)
            except TimeoutError:
                continue  # perhaps a stopped process, so that the next connection reaches another process
            if not greeting:
                raise ConnectionResetError
            if not greeting.startswith(b"SERVER PROTOCOL "):
                raise ValueError("another program listens there")
            link.sendall(f"TIMEOUT {_PEERS_S}\nVERBOSE STATUS\n".encode())
            link.settimeout(LIMIT_S)
            return stream.read(MAX_ANSWER_BYTES)
    raise TimeoutError


def summarize_answer(answer: bytes) -> list[str]:
    """Return the errors and warnings in NCCL's answer to the command VERBOSE STATUS.

    After `MAX_LINES` lines, one more line counts the rest. NCCL writes one line for each rank. Consecutive
    lines about ranks of the same node become one line.

    Raises
    ------
    ValueError : `answer` has no list of errors.
    """
    text = answer[:MAX_ANSWER_BYTES].decode("ascii", "replace")
    _, heading, problems = text.partition(_ERRORS_HEADING)
    if not heading:
        raise ValueError("it contains no list of errors")
    lines = []
    for line in problems.split("\n"):
        if line and not _WARNINGS_HEADING.fullmatch(line):
            lines.append(line)
    if not lines:
        return ["all ranks of all communicators answer, and have launched the same number of collectives"]
    summary = [_printable(line) for line in _fold_ranks(lines)]
    if len(summary) <= MAX_LINES:
        return summary
    return [*summary[:MAX_LINES], f"and {len(summary) - MAX_LINES} more lines"]


def _printable(line: str) -> str:
    return re.sub("[^ -~]", "?", line)[:_LONGEST]


def _fold_ranks(lines: list[str]) -> Iterator[str]:
    """Yield `lines`, with one line for consecutive ranks of a node: `` Ranks 0-3,5 on node n2``.

    Lines that are not about a rank stay as they are.
    """
    for node, group in groupby(lines, _node_of_rank_line):
        node_lines = list(group)
        if node is None or len(node_lines) == 1:
            yield from node_lines
        else:
            ranks = _RANK_NUMBER.findall("\n".join(node_lines))
            yield f"  Ranks {number_ranges(ranks)} on node {node}"


def _node_of_rank_line(line: str) -> str | None:
    """Return the node that a line about a rank names, or None for any other line."""
    match = _RANK.fullmatch(line)
    return match[2] if match else None


DUMP_PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
"""Variable with the beginning of the files' names, to which torch adds the rank."""
OLD_DUMP_PREFIX = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""The same for older versions of torch. Newer versions warn about it."""
RENAMED_SINCE = (2, 9)
"""First version of torch that reads `DUMP_PREFIX`, and that records and dumps by default."""


def recorder_variables(env: Mapping[str, str], torch_version: str, job_id: str) -> dict[str, str]:
    """Return the variables that switch torch's flight recorder on.

    The recorder keeps the latest collectives of each rank, and writes them to a file after a timeout. A
    variable that `env` already has is left out. If the user has named a place for the files, or if no safe
    folder can be used, the variable for their names is left out as well.
    """
    if env.get("IMGKIT_DEVICE") != "cuda":
        return {}
    variables = {
        # torchrun sets this to 1, and NCCL is then torn down during the dump. 3 is torch's own default.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    prefix_variable = DUMP_PREFIX
    if not plan.is_torch_since(torch_version, RENAMED_SINCE):
        prefix_variable = OLD_DUMP_PREFIX
        variables["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "2000"  # collectives; by default, it records none
    user_has_named_files = OLD_DUMP_PREFIX in env or DUMP_PREFIX in env
    folder = None if user_has_named_files else _recorder_folder(env)
    if folder:
        job_name = re.sub("[^A-Za-z0-9.-]", "_", job_id)
        variables[prefix_variable] = str(folder / f"nccl-{job_name}-rank-")
    return {name: value for name, value in variables.items() if name not in env}


def _recorder_folder(env: Mapping[str, str]) -> Path | None:
    """Return the folder for the recorder's files: the run's folder, or else the folder of temporary files.

    If other users can write to this folder, return a private folder in it, or None if that cannot be made.
    torch follows links, so another user's link with a file's name could make it overwrite any file.
    """
    folder = Path(env.get("IMGKIT_RUN_DIR") or tempfile.gettempdir())
    try:
        others_can_write = folder.stat().st_mode & 0o022
    except OSError:
        return folder  # the run makes this folder later
    if not others_can_write:
        return folder
    private_folder = folder / f"imgkit-nccl-{os.geteuid()}"
    try:
        files.make_own_folder(private_folder)
    except OSError:
        return None
    return private_folder


def recorder_dumps(env: Mapping[str, str], since: float) -> str:
    """Return a line about the files that torch's flight recorder has written after `since`.

    `since` is in seconds of the epoch. Return "" if there are no new files.
    """
    prefix = env.get(DUMP_PREFIX) or env.get(OLD_DUMP_PREFIX)
    if not prefix:
        return ""
    folder, name = Path(prefix).parent, Path(prefix).name
    new_files = [path for path in folder.glob(f"{name}*") if path.stat().st_mtime >= since]
    if not new_files:
        return ""
    suffixes = [path.name.removeprefix(name) for path in new_files]  # usually "0", "1", ...
    ranks = ", ".join(sorted(suffixes, key=natural))
    return (
        f"NCCL's flight recorder has written {prefix}N for rank {ranks}, with the collectives. "
        f"To compare them: torchfrtrace --prefix {name} {folder}"
    )
