"""Ask NCCL about a hang, and find the files of torch's flight recorder.

RAS is NCCL's service for questions about its state. It knows which ranks of a communicator do not answer, and
which ranks have launched fewer collectives than others. From NCCL 2.24 on, every process with a communicator
has a RAS thread, which answers on a port of its node. The protocol consists of lines of text, and NCCL closes
the connection after its answer. Format and limits: NCCL User Guide, "RAS", and src/ras/client_support.cc of
NCCL 2.24.3 to 2.30.7.

The flight recorder is part of torch. After a timeout, each rank writes a file about its latest collectives.
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
"""Longest time in seconds for a question and its answer.

NCCL itself waits `_PEER_TIMEOUT_S` seconds for a process that does not answer, and twice as long in large
jobs.
"""
# Largest answer that is read: 1 MiB.
MAX_ANSWER_BYTES = 1 << 20
MAX_LINES = 24
"""Largest number of lines in a report."""
# Seconds that NCCL is told to wait for other processes ("TIMEOUT 2").
_PEER_TIMEOUT_S = 2
# Seconds to connect, and to wait for the first line of the protocol.
_GREETING_S = 1.0
# Number of attempts to connect. The processes of a node share the port, and the kernel chooses which of them
# gets a connection. A stopped process never sends its first line.
_MAX_CONNECTIONS = 3
# Largest number of characters of a line. The rest is cut off.
_MAX_LINE_CHARACTERS = 160
# The headings at the end of an answer: the list of errors comes first, and then the list of warnings.
_ERRORS_HEADING = "\nErrors\n======\n"
_WARNINGS_HEADING = re.compile(r"Warnings|=+")
# "  Rank 3 -- GPU 3 managed by process 4711 on node n2"
_RANK = re.compile(r"  Rank (\d{1,9}) -- GPU [^-]{1,40} managed by process \d+ on node (\S+)")
_RANK_NUMBER = re.compile(r"(?m)^  Rank (\d{1,9}) -- ")


def ras_address(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the host and port at which NCCL's RAS answers, or None if the workers do not use RAS.

    RAS is NCCL's service for questions about its state. `env` is the environment of the workers.
    """
    if env.get("IMGKIT_DEVICE") != "cuda" or env.get("NCCL_RAS_ENABLE") == "0":
        return None
    host, _, port = env.get("NCCL_RAS_ADDR", RAS_DEFAULT).rpartition(":")
    port_number = parse_digits(port)
    if not host or port_number is None or not 0 < port_number < 1 << 16:
        return None  # NCCL does not listen at such an address either
    return host.strip("[]"), port_number


def ask_about_hang(env: Mapping[str, str]) -> Question | None:
    """Start a question to NCCL about its state. Return None if the workers with `env` do not use RAS."""
    address = ras_address(env)
    return Question(*address) if address else None


class Question:
    """One question to NCCL, which a thread asks in the background.

    If the node agent waited for the answer itself, it could not send heartbeats in the meantime, and the
    other nodes would consider it lost.
    """

    def __init__(self, host: str, port: int) -> None:
        self.lines: list[str] = []
        """Lines for the report. Empty without an answer, and if nothing listens at the address."""
        self._until = time.monotonic() + LIMIT_S
        self._thread = threading.Thread(target=self._ask, args=(host, port), daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Return whether the answer may still arrive."""
        return self._thread.is_alive() and time.monotonic() < self._until

    def _ask(self, host: str, port: int) -> None:
        """Ask NCCL, and set `lines` to its report, or to the reason why there is no report.

        If no NCCL with RAS is running, `lines` stays empty. A thread runs this method, while the node agent
        reads `lines`.
        """
        name = f"NCCL's RAS ({host}:{port})"
        try:
            problems = summarize_answer(_read_answer(host, port))
        except (ConnectionError, socket.gaierror):
            return  # NCCL is older, has no communicator yet, or has ended
        # TimeoutError is an OSError as well, so it must come before OSError.
        except TimeoutError:
            self.lines = [f"  {name} does not answer"]
        except (OSError, ValueError) as error:
            self.lines = [f"  {name} sent an unreadable answer: {error}"]
        else:
            self.lines = [f"  {name}:", *(f"    {line}" for line in problems)]


def _read_answer(host: str, port: int) -> bytes:
    """Return NCCL's answer to the command VERBOSE STATUS, which lists the errors of all its communicators.

    Several processes of the node may share the port, and the kernel chooses which one gets the connection. So
    up to `_MAX_CONNECTIONS` connections are made until one of the processes answers.

    Raises
    ------
    TimeoutError : no process has sent the first line of the protocol in time.
    ConnectionResetError : NCCL has closed the connection.
    ValueError : another program listens at this address.
    """
    for _ in range(_MAX_CONNECTIONS):
        answer = _ask_process(host, port)
        if answer is not None:
            return answer
    raise TimeoutError


def _ask_process(host: str, port: int) -> bytes | None:
    """Connect to one of the processes that share the port, and return its answer to VERBOSE STATUS.

    Return None if the process does not send the first line of the protocol in time. It may be stopped, and
    the next connection may reach another process. The errors are those of `_read_answer`.
    """
    with (
        socket.create_connection((host, port), timeout=_GREETING_S) as link,
        link.makefile("rb") as stream,
    ):
        link.sendall(b"CLIENT PROTOCOL 2\n")
        try:
            greeting = stream.readline(_MAX_LINE_CHARACTERS)
        except TimeoutError:
            return None
        if not greeting:
            raise ConnectionResetError
        if not greeting.startswith(b"SERVER PROTOCOL "):
            raise ValueError("another program listens there")
        # NCCL itself waits for other processes that do not answer, and it must stop waiting before we do.
        link.sendall(f"TIMEOUT {_PEER_TIMEOUT_S}\nVERBOSE STATUS\n".encode())
        link.settimeout(LIMIT_S)
        return stream.read(MAX_ANSWER_BYTES)


def summarize_answer(answer: bytes) -> list[str]:
    """Return the errors and warnings in NCCL's answer to the command VERBOSE STATUS.

    NCCL writes one line for each rank. Consecutive lines about ranks of the same node are joined into one
    line. After `MAX_LINES` lines, one more line counts the remaining lines.

    Raises
    ------
    ValueError : `answer` contains no list of errors. The list may be empty: one line of the result then says
        that all ranks answer.
    """
    # `answer` comes from the network, so its size is limited here, and its characters in `_make_printable`.
    answer_text = answer[:MAX_ANSWER_BYTES].decode("ascii", "replace")
    _, heading, problems = answer_text.partition(_ERRORS_HEADING)
    if not heading:
        raise ValueError("it contains no list of errors")
    # The warnings follow the errors. Drop the heading between the two lists.
    lines = [line for line in problems.split("\n") if line and not _WARNINGS_HEADING.fullmatch(line)]
    if not lines:
        return ["all ranks of all communicators answer, and have launched the same number of collectives"]
    summary = [_make_printable(line) for line in _fold_ranks(lines)]
    if len(summary) <= MAX_LINES:
        return summary
    return [*summary[:MAX_LINES], f"and {len(summary) - MAX_LINES} more lines"]


def _make_printable(line: str) -> str:
    return re.sub("[^ -~]", "?", line)[:_MAX_LINE_CHARACTERS]


def _fold_ranks(lines: list[str]) -> Iterator[str]:
    """Yield `lines`, but join consecutive lines about ranks of the same node into one line.

    Such a line is `` Ranks 0-3,5 on node n2``. Lines that are not about a rank stay as they are. The order of
    the lines is kept, so that the ranks stay below the heading of their error.
    """
    for node, group in groupby(lines, _node_of_rank_line):
        node_lines = list(group)
        if node is None or len(node_lines) == 1:
            yield from node_lines
        else:
            ranks = _RANK_NUMBER.findall("\n".join(node_lines))
            yield f"  Ranks {number_ranges(ranks)} on node {node}"


def _node_of_rank_line(line: str) -> str | None:
    """Return the node in a line about a rank, or None for any other line."""
    match = _RANK.fullmatch(line)
    return match[2] if match else None


DUMP_PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
"""Variable with the beginning of the names of the recorder's files. torch appends the rank."""
OLD_DUMP_PREFIX = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""Name of the same variable in older versions of torch. Newer versions print a warning about it."""
RENAMED_SINCE = (2, 9)
"""First version of torch that reads `DUMP_PREFIX`. From this version on, the recorder is on by default."""


def recorder_variables(env: Mapping[str, str], torch_version: str, job_id: str) -> dict[str, str]:
    """Return the variables that switch on torch's flight recorder.

    The recorder keeps the latest collectives of each rank, and writes them to a file after a timeout. It is
    only for workers on GPUs, so the result is empty on CPUs. Variables that `env`, the environment of the
    command, already sets are left out, so that the user's values stay.
    """
    if env.get("IMGKIT_DEVICE") != "cuda":
        return {}
    variables = {
        # torchrun sets this to 1, with which NCCL is torn down while the files are written. 3 is torch's own
        # default.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    # Older versions of torch have another name for this variable, and by default record no collectives.
    prefix_variable = DUMP_PREFIX
    if not plan.is_torch_since(torch_version, RENAMED_SINCE):
        prefix_variable = OLD_DUMP_PREFIX
        variables["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "2000"  # number of collectives
    prefix = _choose_dump_prefix(env, job_id)
    if prefix:
        variables[prefix_variable] = prefix
    return {name: value for name, value in variables.items() if name not in env}


def _choose_dump_prefix(env: Mapping[str, str], job_id: str) -> str:
    """Return the beginning of the names of the recorder's files, to which torch appends the rank.

    Return "" if the user has already chosen it in `env`, or if there is no safe folder for the files.
    """
    # The user may use the old or the new name with any version of torch. If we set the other name, there
    # would be two values for the same files.
    if OLD_DUMP_PREFIX in env or DUMP_PREFIX in env:
        return ""
    folder = _choose_recorder_folder(env)
    if folder is None:
        return ""
    # The job's id keeps two jobs on one node from writing the same files.
    job_name = re.sub("[^A-Za-z0-9.-]", "_", job_id)
    return str(folder / f"nccl-{job_name}-rank-")


def _choose_recorder_folder(env: Mapping[str, str]) -> Path | None:
    """Return the folder for the recorder's files: the run's folder, or else the folder for temporary files.

    If other users can write to this folder, return a private folder inside it, or None if that cannot be
    created. torch follows links. If another user created a link with the name of such a file, torch would
    overwrite any file of this user.
    """
    folder = Path(env.get("IMGKIT_RUN_DIR") or tempfile.gettempdir())
    try:
        others_can_write = folder.stat().st_mode & 0o022
    except OSError:
        return folder  # the folder does not exist yet, and the run creates it later
    if not others_can_write:
        return folder
    private_folder = folder / f"imgkit-nccl-{os.geteuid()}"
    try:
        files.make_own_folder(private_folder)
    except OSError:
        return None
    return private_folder


def describe_recorder_files(env: Mapping[str, str], since: float) -> str:
    """Return a line about the files that torch's flight recorder has written since the time `since`.

    `since` is in seconds of the epoch. It is the start of the attempt, so that files of an earlier attempt
    are not reported again. `env` is the environment of the workers, which contains the folder and the
    beginning of the file names (`recorder_variables`). Return "" if there are no new files.
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
