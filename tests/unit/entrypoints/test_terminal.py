"""No text of a file, a machine or a program steers the terminal, or begins a line of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

import pytest
from file_tree import write_files
from hypothesis import example, given
from hypothesis import strategies as st

from imgkit_entrypoints import terminal
from imgkit_entrypoints.cli import main
from imgkit_entrypoints.errors import ImgkitError

EVIL = "made:1\nok    signature  good\x1b[2J\r\x9b31m\u202egpj.exe\u2066\u200b\u061c\x07\x7f\x85\u2028\t"
TEXT = st.text(st.characters(codec=None))


@given(TEXT)
@example(f"{EVIL}\ud800")
def test_shown_text_is_printable(text):
    printable = terminal.escape_controls(text)
    assert printable.isprintable()
    assert terminal.escape_controls(printable) == printable
    assert (printable == text) == text.isprintable()


def test_escapes_name_the_character():
    assert terminal.escape_controls("a\x1b[2J\n\t\u202e") == r"a\x1b[2J\n\t\u202e"
    assert terminal.escape_controls("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"
    assert terminal.escape_controls("größer … 日本") == "größer … 日本"


@given(st.lists(TEXT, max_size=4))
@example([EVIL, ""])
def test_each_argument_is_one_line(lines):
    with pytest.MonkeyPatch.context() as patch, pipe(patch) as read:
        terminal.print_results(*lines)
        printed = read().decode()
    assert printed.count("\n") == len(lines)
    assert printed.replace("\n", "").isprintable()


@given(TEXT, st.none() | TEXT, st.none() | TEXT)
@example(f"{EVIL}\ud800", EVIL, EVIL)
def test_no_line_of_an_error_is_forged(message, where, hint):
    first, *lines = str(ImgkitError(message, where=where, hint=hint)).split("\n")
    assert first.isprintable()
    assert all(line.isprintable() and line.startswith(("  -> ", "     ")) for line in lines)
    assert sum(line.startswith("  -> ") for line in lines) == bool(hint)


@contextmanager
def pipe(patch: pytest.MonkeyPatch, *, is_terminal: bool = False) -> Iterator[Callable[[], bytes]]:
    """Our standard output as a pipe, or as a terminal; yields what reads all of it."""
    reader, writer = os.openpty() if is_terminal else os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8", newline="\n") as stream:
        patch.setattr("sys.stdout", stream)

        def read() -> bytes:
            return printed(stream, reader)

        yield read
    os.close(reader)


def printed(stream: TextIOWrapper, reader: int) -> bytes:
    stream.write("\x04")  # the end
    stream.flush()
    output = b""
    while not output.endswith(b"\x04"):
        output += os.read(reader, 1 << 16)
    return output[:-1].replace(b"\r\n", b"\n")  # a terminal's own


SCRIPT = "#!/bin/sh\n\techo 'a\x1b[2J\x9b' # \u202e\n"


def test_document_is_exact_except_to_a_terminal(monkeypatch):
    with pipe(monkeypatch) as read:
        terminal.print_document(SCRIPT)
        assert read() == SCRIPT.encode()
    with pipe(monkeypatch, is_terminal=True) as read:
        terminal.print_document(SCRIPT)
        output = read().decode().expandtabs()
    assert output == "#!/bin/sh\n        echo 'a\\x1b[2J\\x9b' # \\u202e\n"


PROGRAM = b"\x1b[32mgreen\x1b[0m\r\n 10%\r 20%\r\n\x1b]0;title\x07\xff\xc2\x9b2J gr\xc3\xb6\xc3\x9fer\n"
SEEN = "green\n 10%\n 20%\n\\x1b]0;title\\x07\\xff\\x9b2J größer\n"


@given(st.lists(st.integers(0, len(PROGRAM)), max_size=5))
def test_program_cannot_steer_a_terminal_wherever_its_output_is_cut(cuts):
    boundaries = [0, *sorted(cuts), len(PROGRAM)]
    parts = [PROGRAM[start:end] for start, end in itertools.pairwise(boundaries)]
    for is_terminal, expected in ((False, PROGRAM.replace(b"\r\n", b"\n")), (True, SEEN.encode())):
        with pytest.MonkeyPatch.context() as patch, pipe(patch, is_terminal=is_terminal) as read:
            write = terminal.output_copier()
            for part in parts:
                write(part)
            assert read() == expected


@pytest.mark.parametrize("line", ["dist-doctor", "dist-doctor --json", "dist-env", "dist-env --json"])
def test_node_with_hostile_files_is_shown_harmless(tmp_path, capsys, monkeypatch, line):
    files = {
        "proc/sys/kernel/hostname": EVIL,
        "proc/driver/nvidia/gpus/0000:17:00.0/information": f"Model: {EVIL}",
        "dev/nvidia0": "",
        "sys/class/net/eth0/operstate": EVIL,
    }
    monkeypatch.setenv("IMGKIT_ROOT", str(write_files(tmp_path, files)))
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_JOB_NODELIST", EVIL)
    with pytest.raises(SystemExit):
        main.main(line.split())
    printed = "".join(capsys.readouterr())
    assert printed.replace("\n", "").isprintable()
    assert "good" in printed
    assert not [line for line in printed.split("\n") if line.startswith("ok    signature")]


@pytest.mark.parametrize(("closed", "descriptor"), [("0<&-", 0), ("2>&-", 2)])
def test_closed_stream_is_open_also_in_programs_that_are_started(closed, descriptor):
    program = (
        "import subprocess; from imgkit_entrypoints import terminal; terminal.open_closed_streams(); "
        f"subprocess.run(['sh', '-c', 'test -e /proc/$$/fd/{descriptor} && echo open'])"
    )
    line = f'exec "$0" -c "$1" {closed}'
    result = subprocess.run(
        ["sh", "-c", line, sys.executable, program], capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "open\n"


CLOSED = """
import os, sys
from imgkit_entrypoints import terminal
terminal.open_closed_streams()
if (sys.stdout.fileno(), sys.stderr.fileno()) != (1, 2):
    os._exit(1)
for stream in (sys.stdout, sys.stderr):
    try:
        stream.write("lost")
        stream.flush()
    except OSError:
        continue
    os._exit(2)
os._exit(0)
"""


def test_output_to_closed_streams_is_an_error():
    argv = ("sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, CLOSED)
    assert subprocess.run(argv, timeout=60).returncode == 0


def test_result_that_cannot_be_written_is_an_error(monkeypatch):
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails as well
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(terminal.OutputLost, match="No space left"):
            terminal.print_results("a")
    with contextlib.suppress(OSError):
        full.close()
