"""The lines of a failed program that an error quotes: its errors and its end, without progress bars."""

from __future__ import annotations

import sys

import pytest

from imgkit_builder.base import process
from imgkit_entrypoints.errors import ToolFailed

TOOL = r"""
import sys
print("start")
print("FATAL: no space for the index")
print(*(f"line {number}" for number in range(50)), sep="\n")
for percent in range(0, 100, 2):
    print(f"\r[{'=' * (percent // 4):25}] {percent}/100  {percent}%", end="")
    print(f"\r  spinner {'-/'[percent % 2]}", end="")
print("\r12.5MiB / 40MiB [====>---] 31 % 5s\n 45%|####    | 45/100 [00:03<00:04, 13it/s]")
print("   \u2501\u2501\u2501\u2501\u2501 10.2/10.2 MB 5.1 MB/s eta 0:00:00\n 32,768  16%  31.25MB/s  0:00:00")
print("95% of the quota is used\n\nit ends here\r")
sys.exit(3)
"""


def test_errors_and_the_end_are_quoted():
    with pytest.raises(ToolFailed) as caught:
        process.run((sys.executable, "-X", "utf8", "-c", TOOL))
    lines = (caught.value.hint or "").splitlines()
    numbers = [f"line {number}" for number in range(33, 50)]
    assert lines == [
        "its last lines:",
        "FATAL: no space for the index",
        *numbers,
        "95% of the quota is used",
        "it ends here",
    ]


def test_many_errors_leave_room_for_the_end():
    output = "\n".join([*(f"ERROR {number}" for number in range(30)), *map(str, range(30)), "ERROR: last"])
    assert process.last_lines(output) == [
        *(f"ERROR {number}" for number in range(21, 30)),
        *map(str, range(20, 30)),
        "ERROR: last",
    ]


def test_one_line_becomes_part_of_the_message():
    assert process.quote_output("x failed", "\r 10%\r 20%\nERROR: why\n", "do this") == (
        "x failed: ERROR: why",
        "do this",
    )
    assert process.quote_output("x failed", " 10%\n", "do this") == ("x failed", "do this")
