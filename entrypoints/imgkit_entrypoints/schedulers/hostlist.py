"""Slurm's compact lists of hosts and of counts.

``node-[42,49-51]`` means node-42, node-49, node-50 and node-51, and ``2(x3),1`` means 2, 2, 2 and 1. The
lists are parsed here because images do not contain scontrol. A malformed list is an error, because a run must
never silently use only this machine.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.terminal import escape_controls

MAX_HOSTS = 65536
"""Largest number of hosts in a list, which is Slurm's limit for a range (MAX_RANGE in src/common/hostlist.c).
"""
MAX_NUMBER_DIGITS = 18
"""Largest number of digits of a number in brackets."""
LONGEST_NAME = 253
"""Largest number of characters in a host name (RFC 1123)."""
# "4", or "4(x2)" for two nodes with 4 each.
_COUNT = re.compile(r"(?P<count>[0-9]{1,9})(?:\(x(?P<repeats>[0-9]{1,9})\))?")
# A part of a name outside of brackets: "node-" in "node-[1-2]".
_NAME_PART = re.compile(r"[^\s()\[\],]+")
# "7", or "5-7" for 5, 6 and 7.
_RANGE = re.compile("([0-9]+)(?:-([0-9]+))?")
# A name, split at its last number: "node003-ib" has the groups "node", "003" and "-ib".
_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})([^0-9]*)", re.ASCII)


def expand_nodelist(text: str, *, where: str = "") -> tuple[str, ...]:
    """Return the hosts in a compact list: ``"a3,a[5-7]"`` contains a3, a5, a6 and a7.

    Order and duplicates are kept, because node 0 of a step is its first host. As in Slurm, numbers have at
    least as many digits as the low end of their range: ``n[098-101]`` is n098, n099, n100, n101, and
    ``n[8-12]`` has no zeros. If a name has several brackets, the numbers vary in Slurm's order (`scontrol
    show hostnames`, 22.05). The last bracket varies fastest, then the first bracket, the second and so on.

    Parameters
    ----------
    where : the variable that contains the list, for errors.

    Raises
    ------
    NoPlan : the list is empty, malformed or has more than 65536 hosts. In the message, a caret marks the
        position.
    """
    if text.strip() in ("", "(null)"):
        raise NoPlan(f"the node list {text!r} names no host", where=where or None)
    return tuple(_Expansion(text, where).read_hosts())


def expand_counts(text: str, *, where: str = "") -> tuple[int, ...]:
    """Return the numbers in a list of counts, one for each node: ``"4(x2),3"`` means 4, 4, 3.

    Slurm writes such lists. ``4(x2)`` means that two nodes have 4 tasks each.

    Parameters
    ----------
    where : the variable that contains the list, for errors.

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
        # Check before the list grows. "4(x999999999)" would fill the memory.
        if len(counts) + repeats > MAX_HOSTS:
            _raise_error(text, position, f"more than {MAX_HOSTS} nodes", where)
        counts += [int(match["count"])] * repeats
        position += len(item) + 1
    return tuple(counts)


def fold_hosts(hosts: Iterable[str]) -> str:
    """Return hosts as a list in Slurm's compact form: n3, n4, n5 and n9 become ``"n[3-5,9]"``.

    `expand_nodelist` does the reverse. In each name, only one number can become part of a range: the last
    number before the first dot. In an address such as 10.0.0.7, it is the last number.
    """
    numbers_by_pattern: dict[str, list[str]] = {}  # {"n*": ["3", "4", "5", "9"], "login": []}
    for host in hosts:
        pattern, number = _split_at_number(host)
        numbers = numbers_by_pattern.setdefault(pattern, [])
        if number:
            numbers.append(number)
    names = []
    for pattern, numbers in numbers_by_pattern.items():
        ranges = number_ranges(numbers)
        if len(set(numbers)) > 1:
            ranges = f"[{ranges}]"
        names.append(pattern.replace("*", ranges))  # without a number, there is no "*" to replace
    return ",".join(names)


def _split_at_number(host: str) -> tuple[str, str]:
    """Return a host with ``*`` instead of its last number, and the number: ``"n3-ib" -> "n*-ib", "3"``.

    A host name has its number before the first dot, and an address at its end: ``n3.cluster.org`` and
    ``10.0.0.7``. If there is no number, return the host unchanged, and "".
    """
    label, dot, domain = host.partition(".")
    if label.isdigit():  # an address
        label, dot, domain = host, "", ""
    match = _NUMBERED.fullmatch(label)
    if match is None:
        return host, ""
    before, number, after = match.groups()
    return f"{before}*{after}{dot}{domain}", number


def number_ranges(numbers: Iterable[str]) -> str:
    """Return decimal numbers as ranges in ascending order, such as ``003-007,012``.

    All numbers of a range have leading zeros in the same way: 9 and 10 form ``9-10``, but 9 and 010 stay
    separate.
    """
    ranges: list[str] = []
    previous = ""
    # Numbers with the same value but other leading zeros, such as 9 and 009, are different hosts.
    for number in sorted(set(numbers), key=lambda number: (int(number), len(number))):
        # The number extends the last range if it follows `previous` and has the same width.
        if previous and number == f"{int(previous) + 1:0{len(previous)}d}":
            first, _, _ = ranges[-1].partition("-")
            ranges[-1] = f"{first}-{number}"
        else:
            ranges.append(number)
        previous = number
    return ",".join(ranges)


class _NamePart(NamedTuple):
    """A part of a host name, such as ``n`` or ``[1-2]`` in ``n[1-2]``.

    ``n`` has the only choice n, and ``[1-2]`` has the choices 1 and 2.
    """

    choices: list[str]
    is_bracket: bool = False


def _combine_parts(parts: Sequence[_NamePart]) -> list[str]:
    """Return all host names that can be formed from the choices of `parts`, in Slurm's order.

    `expand_nodelist` describes the order. It matters, because the position of a node in the list is its rank.

    Parameters
    ----------
    parts : the parts of a host name. A bracket, such as ``[1-2]``, has several choices, and any other text
        has one.
    """
    brackets = [index for index, part in enumerate(parts) if part.is_bracket]
    # The indexes of the brackets, from the one that varies slowest to the fastest. For a[1-2]b[1-2]c[1-2],
    # the order is b, a, c, and the names are a1b1c1, a1b1c2, a2b1c1, a2b1c2, a1b2c1 and so on.
    slowest_first = [*reversed(brackets[:-1]), *brackets[-1:]]
    names = []
    # The last iterable of itertools.product varies fastest.
    for chosen_numbers in itertools.product(*(parts[index].choices for index in slowest_first)):
        part_texts = [part.choices[0] for part in parts]
        for index, number in zip(slowest_first, chosen_numbers, strict=True):
            part_texts[index] = number
        names.append("".join(part_texts))
    return names


class _Expansion:
    """Expands a compact list of hosts, which is read from left to right.

    Errors show their position in the list.
    """

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self.where = where

    def read_hosts(self) -> list[str]:
        """Return the hosts of the whole list, item by item. Commas outside of brackets separate items.

        Raises
        ------
        NoPlan : the list is malformed or has too many hosts.
        """
        hosts: list[str] = []
        start = 0
        # After a final comma, `start` is the length of the text. `read_item` refuses the empty item there.
        while start <= len(self.text):
            names, end = self.read_item(start)
            if len(hosts) + len(names) > MAX_HOSTS:
                self.refuse(start, f"more than {MAX_HOSTS} hosts")
            hosts += names
            start = end + 1  # the position after the comma
        return hosts

    def read_item(self, start: int) -> tuple[list[str], int]:
        """Return the hosts that the item at position `start` stands for, and the position where it ends.

        An item is the text up to the next comma or to the end of the list, such as ``n[1-2]``.
        """
        parts: list[_NamePart] = []
        host_count = 1
        position = start
        while position < len(self.text) and self.text[position] != ",":
            part, end = self.read_part(position)
            parts.append(part)
            # Check before the names are built. A short list can stand for more names than fit into memory.
            host_count *= len(part.choices)
            if host_count > MAX_HOSTS:
                self.refuse(position, f"more than {MAX_HOSTS} hosts")  # raises NoPlan
            position = end
        if not parts:
            self.refuse(start, "a host name is missing")
        # The last number of a bracket is usually the longest. If another one is, a name may be a little too
        # long, which does no harm.
        if sum(len(part.choices[-1]) for part in parts) > LONGEST_NAME:
            self.refuse(start, f"a host name of more than {LONGEST_NAME} characters")
        return _combine_parts(parts), position

    def read_part(self, position: int) -> tuple[_NamePart, int]:
        """Return the part at `position`, such as ``n`` or ``[1-2]``, and the position where it ends."""
        match = _NAME_PART.match(self.text, position)
        if match:
            return _NamePart([match[0]]), match.end()
        character = self.text[position]
        if character == "]":
            self.refuse(position, "] without [")
        if character != "[":
            self.refuse(position, f"a host name cannot contain {character!r}")
        # Brackets cannot be nested, so the next "]" must come before another "[".
        end = self.text.find("]", position)
        if end < 0 or "[" in self.text[position + 1 : end]:
            self.refuse(position, "[ without ]")
        return _NamePart(self.read_numbers(position + 1, end), is_bracket=True), end + 1

    def read_numbers(self, position: int, end: int) -> list[str]:
        """Return the numbers in a bracket, which are between the positions `position` and `end`.

        ``098-100,7`` contains 098, 099, 100 and 7. Each number has at least as many digits as the low end of
        its range.
        """
        numbers: list[str] = []
        while True:
            match = _RANGE.match(self.text, position, end)
            if match is None:
                self.refuse(position, "a number was expected")
            numbers += self.expand_range(match)
            if len(numbers) > MAX_HOSTS:
                self.refuse(position, f"more than {MAX_HOSTS} hosts")
            position = match.end()
            if position == end:  # the closing bracket
                return numbers
            if self.text[position] != ",":
                self.refuse(position, "only numbers, ranges like 1-5 and commas may stand in brackets")
            position += 1

    def expand_range(self, match: re.Match[str]) -> list[str]:
        """Return the numbers of a range that `_RANGE` has matched: ``098-100`` contains 098, 099 and 100.

        Each number has at least as many digits as the low end of the range.
        """
        low, high = match[1], match[2] or match[1]
        # `refuse` raises an error. Python would take long to convert a number of very many digits.
        if len(low) > MAX_NUMBER_DIGITS or len(high) > MAX_NUMBER_DIGITS:
            self.refuse(match.start(), "the number is too long")
        first, last = int(low), int(high)
        if first > last:
            self.refuse(match.start(), f"the range goes down, from {low} to {high}")
        if last - first >= MAX_HOSTS:  # check before the numbers are built
            self.refuse(match.start(), f"more than {MAX_HOSTS} hosts")
        return [f"{number:0{len(low)}d}" for number in range(first, last + 1)]

    def refuse(self, position: int, reason: str) -> NoReturn:
        """Raise a NoPlan error that shows `position` in the list."""
        _raise_error(self.text, position, reason, self.where)


def _raise_error(text: str, position: int, reason: str, where: str) -> NoReturn:
    """Raise a NoPlan error whose hint shows the text around `position`, with a caret below the position.

    At most 50 characters on each side are shown. A terminal would wrap a longer line, and the caret would be
    in the wrong place. Control characters are escaped for the same reason.
    """
    before = escape_controls(text[max(0, position - 50) : position])
    after = escape_controls(text[position : position + 50])
    hint = f"the list, at this position:\n{before}{after}\n{' ' * len(before)}^"
    raise NoPlan(reason, where=where or None, hint=hint)
