"""The only module that prints: text of files, other machines and programs must not steer a terminal.

`out` and `err` take lines. In each, what a terminal acts on or does not show becomes an escape, such as
``\\x1b``. So does a line break: a value from elsewhere cannot begin a line and look like one of imgkit's.
"""

from __future__ import annotations

import codecs
import io
import re
import sys
from collections.abc import Callable
from typing import TextIO

_SEQUENCE = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
_UNFINISHED = re.compile(r"\x1b(\[[0-9;:?]{0,20})?\Z")


def shown(text: str, *, keep: str = "") -> str:
    """Return `text` with an escape for each character that `repr` escapes too, except those in `keep`.

    These are controls, line breaks, marks of the direction of writing, what has no width, and what is no
    character at all. A text that was escaped stays as it is.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def unstyled(text: str) -> str:
    """Return `text` without the sequences by which programs colour and move what a terminal shows."""
    return _SEQUENCE.sub("", text)


def out(*lines: str) -> None:
    """Print results: each argument is one line of standard output."""
    _put(sys.stdout, lines)


def err(*lines: str) -> None:
    """Print messages: each argument is one line of standard error."""
    _put(sys.stderr, lines)


def _put(stream: TextIO, lines: tuple[str, ...]) -> None:
    # One call: lines of several processes do not mix.
    stream.write("".join(f"{shown(line)}\n" for line in lines))
    stream.flush()


def document(text: str) -> None:
    """Print a whole text, such as JSON or a script: its exact bytes, except to a terminal."""
    sys.stdout.flush()
    if sys.stdout.isatty():
        text = shown(text, keep="\n\t")
    sys.stdout.buffer.write(text.encode())  # the locale must not change encoding or line ends
    sys.stdout.flush()


def passing(*, to_err: bool = False) -> Callable[[bytes], None]:
    """Return what passes on a program's output as it comes: exactly, except to a terminal.

    There it loses its style, a carriage return ends a line, and all else is escaped as in `shown`.
    """
    stream = sys.stderr if to_err else sys.stdout
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8")("backslashreplace"), translate=True
    )
    unfinished = ""

    def write(chunk: bytes) -> None:
        nonlocal unfinished
        if not stream.isatty():
            stream.buffer.write(chunk)
        else:
            text = unfinished + decoder.decode(chunk)
            match = _UNFINISHED.search(text)
            unfinished = match[0] if match else ""
            stream.write(shown(unstyled(text.removesuffix(unfinished)), keep="\n\t"))
        stream.flush()

    return write
