"""The hosts of systems without a scheduler, from a flag or a file."""

from __future__ import annotations

import re
from pathlib import Path

from imgkit_entrypoints.errors import UsageError

_HOST = r"(?:[A-Za-z0-9._-]+@)?[A-Za-z0-9][A-Za-z0-9.:_-]*"


def read(text: str, file: Path | None) -> tuple[str, ...]:
    """Hosts in their order, the head first: ``a,b``, or a file with one a line (``#`` begins a comment).

    Raises
    ------
    UsageError : both are given, the file cannot be read, or what is there is no host or is there twice.
    """
    if text and file is not None:
        raise UsageError("--hosts and --hostfile", where="--hostfile", hint="one of the two")
    places = [("--hosts", part.strip()) for part in text.split(",")] if text else []
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot be read: {error}", where=str(file)) from None
        # Open MPI's own files carry "slots=N" behind the name; how many ranks there are is --gpus' word here.
        words = ((number, line.partition("#")[0].split()) for number, line in enumerate(lines, 1))
        places = [(f"{file}:{number}", row[0]) for number, row in words if row]
    hosts = tuple(host for _, host in places)
    for where, host in places:
        if not re.fullmatch(_HOST, host):
            raise UsageError(f"{host!r} is not a host", where=where, hint="a name or an address")
        if hosts.count(host) > 1:
            raise UsageError(f"{host} is there twice", where=where, hint="each node once")
    return hosts
