"""Slurm's compact lists: ``node-[42,49-51]`` of hosts, ``2(x3),1`` of counts.

They are parsed here because images have no scontrol. A malformed list never falls back to this machine alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import NoReturn

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.terminal import escape_controls

MOST = 65536
"""Hosts in one list: Slurm's own limit of a range (MAX_RANGE in src/common/hostlist.c)."""

LONGEST_NAME = 253
"""Characters of a host name (RFC 1123)."""
_COUNT = re.compile(r"(?P<count>[0-9]{1,9})(?:\(x(?P<repeats>[0-9]{1,9})\))?")
_NAME_PART = re.compile(r"[^\s()\[\],]+")
_RANGE = re.compile("([0-9]+)(?:-([0-9]+))?")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})([^0-9]*)", re.ASCII)


def expand_nodelist(text: str, *, where: str = "") -> tuple[str, ...]:
    """Return the hosts that a compact list names, in its order, unsorted and with repeats.

    Node 0 of a step is the first host of its list. Like Slurm, a range keeps the width of its low bound:
    ``n[098-101]`` is n098 n099 n100 n101, ``n[8-12]`` has no zeros. Several brackets in a name multiply in
    Slurm's order (`scontrol show hostnames`, 22.05): the last runs fastest, then the first, the second, ...

    Raises
    ------
    NoPlan : the list is empty, malformed or names more than 65536 hosts; a caret marks the position.
    """
    if text.strip() in ("", "(null)"):
        raise NoPlan(f"the node list {text!r} names no host", where=where or None)
    return tuple(_Expansion(text, where).hosts())


def expand_counts(text: str, *, where: str = "") -> tuple[int, ...]:
    """Return the numbers of a list like ``4(x2),3``, one per node.

    Raises
    ------
    NoPlan : the list is malformed.
    """
    counts: list[int] = []
    position = 0
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            _raise_error(text, position, "a count like 4 or 4(x2) was expected", where)
        repeats = int(match["repeats"] or 1)
        if len(counts) + repeats > MOST:
            _raise_error(text, position, f"more than {MOST} nodes", where)
        counts += [int(match["count"])] * repeats
        position += len(item) + 1
    return tuple(counts)


def fold_hosts(hosts: Iterable[str]) -> str:
    """Return hosts as Slurm prints them, ``node[003-007,012]``; `expand_nodelist` reads it.

    Only the last number before the first dot becomes a range, or the last number of an address.
    """
    groups: dict[str, list[str]] = {}  # by the name with an asterisk for its number
    for host in hosts:
        label, dot, domain = host.partition(".")
        if label.isdigit():
            label, dot, domain = host, "", ""
        if match := _NUMBERED.fullmatch(label):
            groups.setdefault(f"{match[1]}*{match[3]}{dot}{domain}", []).append(match[2])
        else:
            groups[host] = []
    return ",".join(
        name.replace("*", f"[{number_ranges(numbers)}]" if len(set(numbers)) > 1 else "".join(numbers[:1]))
        for name, numbers in groups.items()
    )


def number_ranges(numbers: Iterable[str]) -> str:
    """Return decimal numbers as ranges in ascending order, ``003-007,012``; a range keeps its width."""
    ranges: list[list[str]] = []
    for number in sorted(set(numbers), key=lambda number: (int(number), len(number))):
        if ranges and number == f"{int(ranges[-1][-1]) + 1:0{len(ranges[-1][0])}d}":
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ",".join(map("-".join, ranges))


class _Expansion:
    """A list that is read from left to right; a refusal points at a position in it."""

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self.where = where

    def hosts(self) -> list[str]:
        hosts: list[str] = []
        start = 0
        while start <= len(self.text):
            names, end = self.names(start)
            if len(hosts) + len(names) > MOST:
                self.refuse(start, f"more than {MOST} hosts")
            hosts += names
            start = end + 1  # behind the comma
        return hosts

    def names(self, start: int) -> tuple[list[str], int]:
        """Return the host at `start`, or all hosts that its brackets stand for, and where it ends."""
        parts: list[list[str]] = []
        brackets: list[int] = []
        position, size = start, 1
        while (character := self.text[position : position + 1]) not in ("", ","):
            end = self.text.find("]", position)
            if match := _NAME_PART.match(self.text, position):
                parts.append([match[0]])
                position = match.end()
            elif character == "]":
                self.refuse(position, "] without [")
            elif character != "[":
                self.refuse(position, f"a host name cannot contain {character!r}")
            elif end < 0 or "[" in self.text[position + 1 : end]:
                self.refuse(position, "[ without ]")
            else:
                brackets.append(len(parts))
                parts.append(self.numbers(position + 1, end))
                size *= len(parts[-1])
                if size > MOST:
                    self.refuse(position, f"more than {MOST} hosts")
                position = end + 1
        if not parts:
            self.refuse(start, "a host name is missing")
        if sum(len(part[-1]) for part in parts) > LONGEST_NAME:
            self.refuse(start, f"a host name of more than {LONGEST_NAME} characters")
        # Slowest to fastest. Two brackets expand in reading order; with more, Slurm expands the part before
        # the last bracket from its right end.
        order = [*reversed(brackets[:-1]), *brackets[-1:]]
        names = []
        for choice in itertools.product(*(parts[index] for index in order)):
            chosen = dict(zip(order, choice, strict=True))
            names.append("".join(chosen.get(index, part[0]) for index, part in enumerate(parts)))
        return names, position

    def numbers(self, position: int, end: int) -> list[str]:
        """Return the numbers in brackets, each as wide as the low bound of its range."""
        numbers: list[str] = []
        while True:
            match = _RANGE.match(self.text, position, end)
            if match is None:
                self.refuse(position, "a number was expected")
            low, high = match[1], match[2] or match[1]
            if len(low) > 18 or len(high) > 18:
                self.refuse(position, "the number is too long")
            first, last = int(low), int(high)
            if first > last:
                self.refuse(position, f"the range goes down, from {low} to {high}")
            if len(numbers) + last - first >= MOST:
                self.refuse(position, f"more than {MOST} hosts")
            numbers += [f"{number:0{len(low)}d}" for number in range(first, last + 1)]
            position = match.end()
            if position == end:
                return numbers
            if self.text[position] != ",":
                self.refuse(position, "only numbers, ranges like 1-5 and commas may stand in brackets")
            position += 1

    def refuse(self, position: int, reason: str) -> NoReturn:
        _raise_error(self.text, position, reason, self.where)


def _raise_error(text: str, position: int, reason: str, where: str) -> NoReturn:
    # The caret must stand under its position on a terminal, where a long list would hide it.
    before, after = (
        escape_controls(text[max(0, position - 50) : position]),
        escape_controls(text[position : position + 50]),
    )
    hint = f"the list, at this position:\n{before}{after}\n{' ' * len(before)}^"
    raise NoPlan(reason, where=where or None, hint=hint)
