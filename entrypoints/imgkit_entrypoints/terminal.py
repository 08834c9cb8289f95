"""Print lines in a way that text from files, other machines and programs cannot control the terminal.

No other module prints. `print_results` and `print_messages` replace each character that a terminal acts on or
does not show with an escape such as ``\\x1b``. They also escape line breaks. So no value from elsewhere can
begin a line that looks like one of imgkit's lines.
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

# Control sequences that set colours or move the cursor, such as "\x1b[31m" and "\x1b[2K".
_SEQUENCE = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
# The beginning of such a sequence at the end of a chunk. The next chunk may contain the rest.
_UNFINISHED = re.compile(r"\x1b(\[[0-9;:?]{0,20})?\Z")


def escape_controls(text: str, *, keep: str = "") -> str:
    """Return `text` with an escape in place of each character that is not printable, as `repr` writes it.

    These characters are control characters, line breaks, marks for the direction of writing, and characters
    without width. For example, a tab becomes ``\\t``. Escaping a text twice changes nothing.

    Parameters
    ----------
    keep : characters that are not escaped.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def strip_styles(text: str) -> str:
    """Return `text` without the control sequences that set colours or move the cursor."""
    return _SEQUENCE.sub("", text)


class OutputLost(OSError):
    """Standard output is closed or full, so a part of the output is lost."""


def print_results(*lines: str) -> None:
    """Print results to standard output, one line for each argument.

    Raises
    ------
    OutputLost : the lines cannot be written.
    """
    _print(sys.stdout, _join_lines(lines))


def print_messages(*lines: str) -> None:
    """Print messages to standard error, one line for each argument.

    Nothing happens if standard error is closed or full.
    """
    with contextlib.suppress(OSError):
        sys.stderr.write(_join_lines(lines))
        sys.stderr.flush()


def print_document(text: str) -> None:
    """Print a complete text, such as JSON or a script, to standard output.

    A file or pipe gets exactly the bytes of the text. On a terminal, control characters are escaped.

    Raises
    ------
    OutputLost : the text cannot be written.
    """
    if sys.stdout.isatty():
        text = escape_controls(text, keep="\n\t")
    _print(sys.stdout.buffer, text.encode())  # as bytes, so that the locale cannot change the encoding


def _join_lines(lines: tuple[str, ...]) -> str:
    """Return all lines as one text. Because one call writes it, lines of several processes do not mix."""
    return "".join(f"{escape_controls(line)}\n" for line in lines)


def _print(stream: IO[Any], data: str | bytes) -> None:
    """Write `data` to standard output or its buffer, and raise `OutputLost` if that fails."""
    try:
        sys.stdout.flush()
        stream.write(data)
        stream.flush()
    except OSError as error:
        raise OutputLost(error.errno, error.strerror) from error


def open_closed_streams() -> None:
    """Open /dev/null in place of each standard stream that is closed.

    Otherwise the next file or socket of this process would get the free descriptor 0, 1 or 2, and programs
    that it starts would print into that file. /dev/null is opened only for reading. So a write still fails,
    and the loss of output is noticed.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The new descriptor is the lowest free number, which is the closed one.
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def output_copier(*, to_err: bool = False) -> Callable[[bytes], None]:
    """Return a function that copies a program's output to our own output, chunk by chunk.

    If our output is a file or pipe, it gets exactly the same bytes. On a terminal, colours are removed, a
    carriage return becomes a line break, and other control characters are escaped.

    Parameters
    ----------
    to_err : True to copy to standard error instead of standard output.
    """
    stream = sys.stderr if to_err else sys.stdout
    if stream.isatty():
        return _TerminalCopier(stream).copy

    def copy_to_file(chunk: bytes) -> None:
        stream.buffer.write(chunk)
        stream.flush()

    return copy_to_file


class _TerminalCopier:
    """Copies the output of one program to a terminal, without what could control the terminal."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._decoder = io.IncrementalNewlineDecoder(
            codecs.getincrementaldecoder("utf-8")("backslashreplace"), translate=True
        )
        self._unfinished = ""
        """The beginning of a control sequence at the end of the last chunk."""

    def copy(self, chunk: bytes) -> None:
        """Print a chunk of the output. Its end is kept until the next chunk if it is incomplete.

        A chunk may end within a character, which the decoder keeps, or within a control sequence.
        """
        text = self._unfinished + self._decoder.decode(chunk)
        match = _UNFINISHED.search(text)
        self._unfinished = match[0] if match else ""
        complete_text = text.removesuffix(self._unfinished)
        # Sequences for colours are removed first. Otherwise they would be visible as "\x1b[31m".
        self._stream.write(escape_controls(strip_styles(complete_text), keep="\n\t"))
        self._stream.flush()
