"""The only module that prints: text of files, other machines and programs must not steer a terminal.

`print_results` and `print_messages` take lines. In each, what a terminal acts on or does not show
becomes an escape, such as ``\\x1b``. So does a line break: a value from elsewhere cannot begin a line and
look like one of imgkit's.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable
from typing import IO, Any

_SEQUENCE = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
_UNFINISHED = re.compile(r"\x1b(\[[0-9;:?]{0,20})?\Z")


def escape_controls(text: str, *, keep: str = "") -> str:
    """Return `text` with an escape for each character that `repr` escapes too, except those in `keep`.

    These are controls, line breaks, marks of the direction of writing, what has no width, and what is no
    character at all. A text that was escaped stays as it is.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def strip_styles(text: str) -> str:
    """Return `text` without the sequences by which programs colour and move what a terminal shows."""
    return _SEQUENCE.sub("", text)


class OutputLost(OSError):
    """Standard output is closed or full, and lacks what was printed."""


def print_results(*lines: str) -> None:
    """Print results: each argument is one line of standard output.

    Raises
    ------
    OutputLost : they cannot be written.
    """
    _print(sys.stdout, _join_lines(lines))


def print_messages(*lines: str) -> None:
    """Print messages: each argument is one line of standard error, unless that is closed or full."""
    with contextlib.suppress(OSError):
        sys.stderr.write(_join_lines(lines))
        sys.stderr.flush()


def print_document(text: str) -> None:
    """Print a whole text, such as JSON or a script: its exact bytes, except to a terminal.

    Raises
    ------
    OutputLost : it cannot be written.
    """
    if sys.stdout.isatty():
        text = escape_controls(text, keep="\n\t")
    _print(sys.stdout.buffer, text.encode())  # the locale must not change encoding or line ends


def _join_lines(lines: tuple[str, ...]) -> str:
    # One text for one call: lines of several processes do not mix.
    return "".join(f"{escape_controls(line)}\n" for line in lines)


def _print(stream: IO[Any], data: str | bytes) -> None:
    try:
        sys.stdout.flush()
        stream.write(data)
        stream.flush()
    except OSError as error:
        raise OutputLost(error.errno, error.strerror) from error


def open_closed_streams() -> None:
    """Open standard input, output and error where they are closed, so that writing to them fails as before.

    Otherwise the next file or socket of this process gets the free descriptor, and the programs that it
    starts print into that.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)  # the lowest free number
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def output_copier(*, to_err: bool = False) -> Callable[[bytes], None]:
    """Return what passes on a program's output as it comes: exactly, except to a terminal.

    There it loses its style, a carriage return ends a line, and all else is escaped as in `escape_controls`.
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
            stream.write(escape_controls(strip_styles(text.removesuffix(unfinished)), keep="\n\t"))
        stream.flush()

    return write
