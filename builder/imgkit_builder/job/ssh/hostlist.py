"""The hosts of a system without a scheduler, from a flag or a file."""

from __future__ import annotations

import collections
import ipaddress
import re
import socket
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError

# No word can begin with "-": ssh and mpirun would read it as an option.
_USER = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


_MOST_BYTES = 4 << 20


def read(text: str, file: Path | None) -> tuple[str, ...]:
    """Hosts in order, the head first: ``a,b``, or a file with one host per line (``#`` begins a comment).

    Raises
    ------
    UsageError : both are given, the file cannot be read, or a word is not a host or occurs twice.
    """
    if text and file is not None:
        raise UsageError("--hosts and --hostfile", where="--hostfile", hint="give only one of them")
    places = [("--hosts", part.strip()) for part in text.split(",")] if text else []
    if file is not None:
        places = _in_file(file)
    hosts = tuple(host for _, host in places)
    counts = collections.Counter(hosts)
    for where, host in places:
        if not is_host(host):
            raise UsageError(
                f"{host!r} is not a host",
                where=where,
                hint="a name or an address, for ssh also USER@HOST; --gpus sets the number of ranks",
            )
        if counts[host] > 1:
            raise UsageError(f"{host} occurs twice", where=where, hint="name each node once")
    return hosts


def is_here(host: str) -> bool:
    """Whether `host` is this machine: one of its addresses can be bound here."""
    try:
        found = socket.getaddrinfo(host.rpartition("@")[2], 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False


def _in_file(file: Path) -> list[tuple[str, str]]:
    try:
        lines = files.read_text(file, most_bytes=_MOST_BYTES).splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot be read: {error}", where=str(file), hint="name a file with one host per line"
        ) from None
    # Files for Open MPI have "slots=N" after the name.
    rows = ((number, text.partition("#")[0].split()) for number, text in enumerate(lines, 1))
    places = [(f"{file}:{number}", row[0]) for number, row in rows if row]
    if not places:
        raise UsageError("the file has no hosts", where=str(file), hint="write one host per line")
    return places


def is_host(text: str) -> bool:
    """Whether `text` is a name or an address, also with ``USER@``, that no program takes for an option."""
    user, at, name = text.rpartition("@")
    if at and not re.fullmatch(_USER, user):
        return False
    if ":" not in name:
        return re.fullmatch(_NAME, name) is not None
    try:
        ipaddress.IPv6Address(name)
    except ValueError:
        return False
    return True
