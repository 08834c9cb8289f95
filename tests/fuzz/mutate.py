"""Change valid inputs a little: bytes, and the structures that a checksum or a digest would otherwise protect.

Every change is a `Change`, three numbers, so that Hypothesis can shrink a list of them and a soak can draw them.
"""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from imgkit_entrypoints import json_text

BLOCK = 512
ODD_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
ODD_WORDS = (
    *("", "²", "9" * 5000, "-1", "1e999", "\0", "../..", "a" * 5000, "[1-1000000000]", "٣", "%s", "\x1b[2J"),
    *(
        "0x10",
        "1_0",
        "nan",
        "inf",
        "*" * 40,
        "/" * 3000,
        "\ud800",
        "￿",
        "1,,2",
        "0-99999999999",
        "- - - -",
        "<<",
        "&a",
    ),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, [], {}, 0, -1, 1 << 70, 0.5, [[]], {"": {}}, ["x"] * 3, {"digest": "sha256:" + "0" * 64}),
    *ODD_WORDS,
)


class Change(NamedTuple):
    """A kind of change, its position as a fraction of 2**32, and a value for it."""

    kind: int
    position: int
    value: int


def at(change: Change, size: int) -> int:
    """Return the index of `change` among `size` items."""
    return change.position * max(size, 1) >> 32


def in_bytes(data: bytes, change: Change) -> bytes:
    """Flip, cut, repeat, delete, splice, or overwrite with a number that programs get wrong."""
    position, value = at(change, len(data)), change.value
    other_position = (change.position * 2654435761 + value) % max(len(data), 1)
    low, high = sorted((position, other_position))
    number = ODD_NUMBERS[value % len(ODD_NUMBERS)]
    match change.kind % 8:
        case 0:
            return (
                data[:position] + bytes([data[position] ^ (1 << value % 8)]) + data[position + 1 :]
                if data
                else data
            )
        case 1:
            return data[:position] + bytes([value & 0xFF]) + data[position + 1 :]
        case 2:
            return data[:position]
        case 3:
            return data[:low] + data[low:high][:4096] * (value % 4) + data[high:]
        case 4:
            return data[:position] + data[position + value % 64 :]
        case 5:
            width = (2, 4, 8)[value % 3]
            return (
                data[:position]
                + (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")
                + data[position + width :]
            )
        case 6:
            return data[:position] + str(number).encode() + data[position:]
        case _:
            return data[:position] + data[other_position : other_position + 64 + value] + data[position:]


def in_text(data: bytes, change: Change) -> bytes:
    """Change a word, or the bytes."""
    if change.kind % 3:
        return in_bytes(data, change)
    pieces = data.split(b" ")
    pieces[at(change, len(pieces))] = ODD_WORDS[change.value % len(ODD_WORDS)].encode(
        "utf-8", "surrogatepass"
    )
    return b" ".join(pieces)


def in_json(data: bytes, change: Change) -> bytes:
    """Swap one value for an odd one, drop or repeat it, wrap it in lists, or change the bytes."""
    if change.kind % 4 == 3:
        return in_bytes(data, change._replace(kind=change.kind >> 2))
    try:
        document = [json.loads(data)]
    except (ValueError, RecursionError):
        return in_bytes(data, change)
    slots = list(_slots(document))
    holder, key = slots[at(change, len(slots))]
    match change.kind % 4:
        case 0:
            holder[key] = ODD_VALUES[change.value % len(ODD_VALUES)]
        case 1 if isinstance(holder, dict) and len(holder) > 1:
            del holder[key]
        case 1:
            holder[key] = [holder[key]] * (change.value % 50)
        case _:
            source, name = slots[change.value * 7919 % len(slots)]
            holder[key] = json.loads(json.dumps(source[name]))
    return json.dumps(document[0]).encode()


def in_sealed(data: bytes, change: Change) -> bytes:
    """Change JSON that holds a digest of itself, and put the right digest in."""
    changed = in_json(data, change)
    try:
        document = json.loads(changed)
        document.pop(json_text.SEAL, None)
        return json.dumps(json_text.seal(document)).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return changed


def in_record(data: bytes, change: Change) -> bytes:
    """Change the record at the end of a .sqsh, or the bytes."""
    if change.kind % 4 == 0 or len(data) < 16:
        return in_bytes(data, change._replace(kind=change.kind // 4))
    start = max(len(data) - 16 - int.from_bytes(data[-16:-8], "little"), 0)
    text = in_sealed(data[start:-16], change._replace(kind=change.kind // 4))
    return data[:start] + text + len(text).to_bytes(8, "little") + data[-8:]


def _slots(document: list[Any]) -> Iterable[tuple[Any, Any]]:
    waiting: list[Any] = [document]
    while waiting:
        holder = waiting.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            yield holder, key
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])


FIELDS = tuple(itertools.pairwise((0, 100, 108, 116, 124, 136, 148, 156, 157, 257, 265, 329, 345, 500)))
"""Places of the fields of a tar header."""


def in_tar(data: bytes, change: Change) -> bytes:
    """Change a field of a header and repair its checksum, move whole members, or change the bytes."""
    heads = _heads(data)
    if change.kind % 3 == 0 or not heads:
        return in_bytes(data, change._replace(kind=change.kind // 3))
    position = heads[at(change, len(heads))]
    other_position = heads[change.value * 7919 % len(heads)]
    if change.kind % 3 == 1 and change.value % 5 == 0:
        following = next((head for head in heads if head > position), len(data))
        return (
            data[:other_position] + data[position:following] * (1 + change.value % 3) + data[other_position:]
        )
    header = bytearray(data[position : position + BLOCK])
    start, end = FIELDS[change.value % len(FIELDS)]
    odd: tuple[bytes, ...] = (
        *(b"%o" % (number % (1 << 33)) for number in ODD_NUMBERS),
        *(b"\x80" + number.to_bytes(11, "big") for number in ODD_NUMBERS),
        *(
            b"\xff" * 12,
            b"-1",
            b"x",
            b"g",
            b"L",
            b"K",
            b"S",
            b"1",
            b"2",
            b"5",
            b"\xc2\xb2",
            b"../x",
            b"a/" * 50,
            b"",
        ),
        data[other_position + start : other_position + end],
    )
    header[start:end] = odd[change.value // len(FIELDS) % len(odd)][: end - start].ljust(end - start, b"\0")
    return data[:position] + repaired(bytes(header)) + data[position + BLOCK :]


def repaired(header: bytes) -> bytes:
    """A tar header with the checksum that it should have."""
    changed = bytearray(header)
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed)
    return bytes(changed)


def _heads(data: bytes) -> list[int]:
    return [
        position
        for position in range(0, len(data) - BLOCK + 1, BLOCK)
        if data[position + 257 : position + 262] == b"ustar"
    ]


def in_gzip(inner: Callable[[bytes, Change], bytes]) -> Callable[[bytes, Change], bytes]:
    """Change what a gzip stream holds, or the stream."""

    def changed(data: bytes, change: Change) -> bytes:
        if change.kind % 2:
            return in_bytes(data, change._replace(kind=change.kind // 2))
        try:
            return gzip.compress(
                inner(gzip.decompress(data), change._replace(kind=change.kind // 2)), 1, mtime=0
            )
        except (OSError, EOFError, zlib.error):
            return in_bytes(data, change)

    return changed
