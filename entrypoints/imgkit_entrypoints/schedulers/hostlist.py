"""Slurm's compact lists: ``node-[42,49-51]`` of hosts, ``2(x3),1`` of counts.

They are parsed here because images have no scontrol. A malformed list never falls back to this machine alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import NoReturn

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.terminal import shown

MOST = 65536
"""Hosts in one list: Slurm's own limit of a range (MAX_RANGE in src/common/hostlist.c)."""

LONGEST_NAME = 253
"""Characters of a host name (RFC 1123)."""
_NUMBER = re.compile("[0-9]+")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})([^0-9]*)", re.ASCII)
_COUNT = re.compile(r"(?P<count>[0-9]{1,9})(?:\(x(?P<times>[0-9]{1,9})\))?")


def expand_nodelist(text: str, *, where: str = "") -> tuple[str, ...]:
    """Hosts that a compact list names, in its order, unsorted and with repeats.

    Node 0 of a step is the first host of its list. Like Slurm, a range keeps the width of its low bound:
    ``n[098-101]`` is n098 n099 n100 n101, ``n[8-12]`` has no zeros. Several brackets in a name multiply in
    Slurm's order (`scontrol show hostnames`, 22.05): the last runs fastest, then the first, the second, ...

    Raises
    ------
    NoPlan : the list is empty, malformed or names more than 65536 hosts; a caret marks the place.
    """
    if text.strip() in ("", "(null)"):
        raise NoPlan(f"the node list {text!r} names no host", where=where or None)
    return tuple(_Reader(text, where).hosts())


def expand_counts(text: str, *, where: str = "") -> tuple[int, ...]:
    """Numbers of a list like ``4(x2),3``, one per node.

    Raises
    ------
    NoPlan : the list is malformed.
    """
    counts: list[int] = []
    at = 0
    for item in text.split(","):
        found = _COUNT.fullmatch(item)
        if found is None:
            _refuse(text, at, "a count like 4 or 4(x2) was expected", where)
        times = int(found["times"] or 1)
        if times > MOST or len(counts) + times > MOST:
            _refuse(text, at, f"more than {MOST} nodes", where)
        counts += [int(found["count"])] * times
        at += len(item) + 1
    return tuple(counts)


def folded(hosts: Iterable[str]) -> str:
    """Return hosts as Slurm prints them, ``node[003-007,012]``; `expand_nodelist` reads it.

    Only the last number before the first dot becomes a range, or the last number of an address.
    """
    groups: dict[str, list[str]] = {}  # by the name with an asterisk in place of its number
    for host in hosts:
        label, dot, domain = host.partition(".")
        if label.isdigit():
            label, dot, domain = host, "", ""
        if found := _NUMBERED.fullmatch(label):
            groups.setdefault(f"{found[1]}*{found[3]}{dot}{domain}", []).append(found[2])
        else:
            groups[host] = []
    return ",".join(
        name.replace("*", f"[{number_ranges(numbers)}]" if len(set(numbers)) > 1 else "".join(numbers[:1]))
        for name, numbers in groups.items()
    )


def number_ranges(numbers: Iterable[str]) -> str:
    """Return decimal numbers as ranges in ascending order, ``003-007,012``; a range keeps its width."""
    found: list[list[str]] = []
    for number in sorted(set(numbers), key=lambda one: (int(one), len(one))):
        if found and number == f"{int(found[-1][-1]) + 1:0{len(found[-1][0])}d}":
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(one[0] if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in found)


class _Reader:
    """One pass from left to right; a refusal points at `at`."""

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self.where = where
        self.at = 0

    def hosts(self) -> list[str]:
        hosts: list[str] = []
        while True:
            start = self.at
            names = self.item()
            if len(hosts) + len(names) > MOST:
                self.refuse(start, f"more than {MOST} hosts")
            hosts += names
            if self.at == len(self.text):
                return hosts
            self.at += 1  # the comma

    def item(self) -> list[str]:
        """One host, or all hosts that its brackets stand for."""
        start = self.at
        parts: list[list[str]] = []
        brackets: list[int] = []
        size = 1
        while (char := self.peek()) not in ("", ","):
            if char == "[":
                opened = self.at
                brackets.append(len(parts))
                parts.append(self.bracket())
                size *= len(parts[-1])
                if size > MOST:
                    self.refuse(opened, f"more than {MOST} hosts")
            else:
                parts.append([self.plain()])
        if self.at == start:
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
        return names

    def plain(self) -> str:
        start = self.at
        while (char := self.peek()) not in ("", ",", "["):
            if char == "]":
                self.refuse(self.at, "] without [")
            if char.isspace() or char in "()":
                self.refuse(self.at, f"a host name cannot contain {char!r}")
            self.at += 1
        return self.text[start : self.at]

    def bracket(self) -> list[str]:
        opened = self.at
        numbers: list[str] = []
        while self.peek() != "]":
            self.at += 1  # the bracket, or the comma between two ranges
            if self.at == len(self.text):
                self.refuse(opened, "[ without ]")
            begun = self.at
            numbers += self.numbers()
            if len(numbers) > MOST:
                self.refuse(begun, f"more than {MOST} hosts")
            if self.peek() == "":
                self.refuse(opened, "[ without ]")
            if self.peek() not in (",", "]"):
                self.refuse(self.at, "only numbers, ranges like 1-5 and commas may stand in brackets")
        self.at += 1
        return numbers

    def numbers(self) -> list[str]:
        """One number or range, padded to the width of its low bound."""
        begun = self.at
        low = self.number()
        if self.peek() != "-":
            return [low]
        self.at += 1
        high = self.number()
        first, last = int(low), int(high)
        if first > last:
            self.refuse(begun, f"the range goes down, from {low} to {high}")
        if last - first >= MOST:
            self.refuse(begun, f"more than {MOST} hosts")
        return [f"{value:0{len(low)}d}" for value in range(first, last + 1)]

    def number(self) -> str:
        found = _NUMBER.match(self.text, self.at)
        if found is None:
            if self.peek() in ("", "["):
                self.refuse(self.text.rindex("[", 0, self.at), "[ without ]")
            self.refuse(self.at, "a number was expected")
        if len(found[0]) > 18:
            self.refuse(self.at, "the number is too long")
        self.at = found.end()
        return found[0]

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def refuse(self, at: int, why: str) -> NoReturn:
        _refuse(self.text, at, why, self.where)


def _refuse(text: str, at: int, why: str, where: str) -> NoReturn:
    # The caret must stand under its place on a terminal, where a long list would hide it.
    before, after = shown(text[max(0, at - 50) : at]), shown(text[at : at + 50])
    raise NoPlan(
        why, where=where or None, hint=f"the list, at this position:\n{before}{after}\n{' ' * len(before)}^"
    )
