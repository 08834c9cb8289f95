"""The last words of a rank that gets SIGHUP; the signal is real."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

STUCK = """
import ctypes, threading
from imgkit_entrypoints.apps.bench.sighup import HangupThread
hangup = HangupThread()
hangup.last_words = lambda: print("INCOMPLETE")
threading.Thread(target=threading.Event().wait, daemon=True).start()
{before}
print("ready", flush=True)
ctypes.CDLL(None).pause()  # as in a collective: no handler of Python's runs
"""


def ended(before: str = "") -> tuple[int, str]:
    """Exit code and output of a rank that hangs and gets HUP."""
    script = STUCK.format(before=before)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        told, _ = process.communicate(timeout=20)
    return process.returncode, told


def test_rank_that_hangs_has_last_words() -> None:
    assert ended() == (1, "INCOMPLETE\n")


def test_rank_that_has_told_is_silent() -> None:
    assert ended("with hangup.held_off(): pass") == (1, "")


@pytest.mark.parametrize("tell", ["None", "lambda: 1 / 0"])
def test_rank_ends_in_any_case(tell: str) -> None:
    assert ended(f"hangup.last_words = {tell}") == (1, "")
