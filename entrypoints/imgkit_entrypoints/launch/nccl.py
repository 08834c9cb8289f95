"""What NCCL itself knows of a hang: an answer of its RAS threads, and the files of its flight recorder.

RAS says which ranks a communicator misses, and which have launched fewer collectives. From 2.24 on, every
process with a communicator has a RAS thread that answers on a port of its node. The protocol is lines of
text; NCCL closes the connection after its answer. Format and limits: NCCL User Guide, "RAS", and
src/ras/client_support.cc of NCCL 2.24.3 to 2.30.7.

The flight recorder is torch's: files about each rank's collectives after a timeout.
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
from imgkit_entrypoints.schedulers.hostlist import number_ranges

RAS_DEFAULT = "localhost:28028"
LIMIT_S = 8.0
"""Time for all of it. NCCL waits `_PEERS_S` for a process that is silent, and as long again in large jobs."""
MOST_BYTES = 1 << 20
SHOWN = 24
"""Lines of a report."""
_PEERS_S = 2
_GREETING_S = 1.0
_TRIES = 3
"""The processes of a node share the port. The kernel may choose a stopped one, which never greets."""
_LONGEST = 160
_PROBLEMS = "\nErrors\n======\n"
_OTHERS = re.compile(r"Warnings|=+")
_RANK = re.compile(r"  Rank (\d{1,9}) -- GPU [^-]{1,40} managed by process \d+ on node (\S+)")


def ras_address(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port at which NCCL answers; None where the workers of `env` have no NCCL or no RAS."""
    if env.get("IMGKIT_DEVICE") != "cuda" or env.get("NCCL_RAS_ENABLE") == "0":
        return None
    host, _, port = env.get("NCCL_RAS_ADDR", RAS_DEFAULT).rpartition(":")
    number = parse_digits(port)
    if not host or number is None or not 0 < number < 1 << 16:
        return None  # NCCL does not listen there either
    return host.strip("[]"), number


def question(env: Mapping[str, str]) -> Question | None:
    """Ask the NCCL of the workers of `env`; None where it cannot be asked."""
    address = ras_address(env)
    return Question(*address) if address else None


class Question:
    """One question to NCCL, asked in a thread: a node agent that waited for the answer would not beat."""

    def __init__(self, host: str, port: int) -> None:
        self.lines: list[str] = []
        """Lines for the report; none where nothing listens or the time is over."""
        self._until = time.monotonic() + LIMIT_S
        self._thread = threading.Thread(target=self._ask, args=(host, port), daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the answer may still come."""
        return self._thread.is_alive() and time.monotonic() < self._until

    def _ask(self, host: str, port: int) -> None:
        name = f"NCCL's RAS ({host}:{port})"
        try:
            self.lines = [f"  {name}:", *(f"    {line}" for line in report(_answer(host, port)))]
        except (ConnectionError, socket.gaierror):
            return  # NCCL is older, has no communicator yet, or has ended
        except TimeoutError:
            self.lines = [f"  {name} does not answer"]
        except (OSError, ValueError) as error:
            self.lines = [f"  {name} sent an unreadable answer: {error}"]


def _answer(host: str, port: int) -> bytes:
    for _ in range(_TRIES):
        with (
            socket.create_connection((host, port), timeout=_GREETING_S) as link,
            link.makefile("rb") as stream,
        ):
            link.sendall(b"CLIENT PROTOCOL 2\n")
            try:
                greeting = stream.readline(_LONGEST)
            except TimeoutError:
                continue
            if not greeting:
                raise ConnectionResetError
            if not greeting.startswith(b"SERVER PROTOCOL "):
                raise ValueError("another program listens there")
            link.sendall(f"TIMEOUT {_PEERS_S}\nVERBOSE STATUS\n".encode())
            link.settimeout(LIMIT_S)
            return stream.read(MOST_BYTES)
    raise TimeoutError


def report(answer: bytes) -> list[str]:
    """Return the errors and warnings in NCCL's answer to VERBOSE STATUS, at most `SHOWN` lines.

    Ranks that NCCL lists one below the other become one line for each node.

    Raises
    ------
    ValueError : it is no such answer.
    """
    _, separator, problems = answer[:MOST_BYTES].decode("ascii", "replace").partition(_PROBLEMS)
    if not separator:
        raise ValueError("it contains no list of errors")
    lines = [line for line in problems.split("\n") if line and not _OTHERS.fullmatch(line)]
    entries = [re.sub("[^ -~]", "?", line)[:_LONGEST] for line in _folded(lines)]
    if not entries:
        return ["all ranks of all communicators answer, and have launched the same number of collectives"]
    rest = [f"and {len(entries) - SHOWN} more lines"] if entries[SHOWN:] else []
    return entries[:SHOWN] + rest


def _folded(lines: list[str]) -> Iterator[str]:
    matches = ((line, _RANK.fullmatch(line)) for line in lines)
    for node, pairs in groupby(matches, lambda pair: pair[1][2] if pair[1] else None):
        group = list(pairs)
        if node is None or len(group) == 1:
            yield from (line for line, _ in group)
        else:
            yield f"  Ranks {number_ranges(match[1] for _, match in group if match)} on node {node}"


DUMP_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables with the beginning of the files' names, to which torch adds the rank. Older versions read the
second; newer ones warn about it."""
RENAMED = (2, 9)
"""Version of torch that first reads the first name, and records and dumps by itself."""


def recorder_variables(env: Mapping[str, str], torch: str, job_id: str) -> dict[str, str]:
    """Return the variables that make torch of version `torch` record and dump where `recorder_dumps` looks.

    Variables that `env` already has are left out.
    """
    if env.get("IMGKIT_DEVICE") != "cuda":
        return {}
    folder = None if any(name in env for name in DUMP_PREFIXES) else _folder(env)
    prefix = str(folder / f"nccl-{re.sub('[^A-Za-z0-9.-]', '_', job_id)}-rank-") if folder else ""
    version = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", torch)
    variables = {
        # torchrun sets 1, which tears NCCL down during the dump. This is torch's own default.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    if version and tuple(map(int, version.groups())) >= RENAMED:
        variables[DUMP_PREFIXES[0]] = prefix
    else:
        variables |= {DUMP_PREFIXES[1]: prefix, "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
    unused = set(env) if prefix else {*env, *DUMP_PREFIXES}
    return {name: value for name, value in variables.items() if name not in unused}


def _folder(env: Mapping[str, str]) -> Path | None:
    """The run's folder, or one of this user's own where others could plant links, which torch follows."""
    folder = Path(env.get("IMGKIT_RUN_DIR") or tempfile.gettempdir())
    try:
        shared = folder.stat().st_mode & 0o022
    except OSError:
        return folder  # a folder that the run makes
    if not shared:
        return folder
    private = folder / f"imgkit-nccl-{os.geteuid()}"
    try:
        files.make_own_folder(private)
    except OSError:
        return None
    return private


def recorder_dumps(env: Mapping[str, str], since: float) -> str:
    """Return a line about the files written after `since` (seconds of the epoch); empty if there are none."""
    prefix = next((env[name] for name in DUMP_PREFIXES if env.get(name)), "")
    if not prefix:
        return ""
    folder, name = Path(prefix).parent, Path(prefix).name
    written = [path for path in folder.glob(f"{name}*") if path.stat().st_mtime >= since]
    if not written:
        return ""
    ranks = ", ".join(sorted((path.name.removeprefix(name) for path in written), key=_as_number))
    return (
        f"NCCL's flight recorder has written {prefix}N for rank {ranks}, with the collectives. "
        f"To compare them: torchfrtrace --prefix {name} {folder}"
    )


def _as_number(text: str) -> tuple[int, str]:
    return (-1 if (number := parse_digits(text)) is None else number, text)
