"""``--require``: the least bandwidth that a run must reach, as users write it."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """The least bandwidth of the largest size: a percentage of the line rate, or a bus bandwidth."""

    percent: float | None = None
    GBps: float | None = None

    def __str__(self) -> str:
        return f"{self.percent:g} %" if self.percent is not None else f"{self.GBps:g} GBps"


def requirement(text: str) -> Requirement:
    """Parse ``80%`` of the line rate, or ``300`` or ``300GBps`` of busbw.

    Raises
    ------
    argparse.ArgumentTypeError : the text is neither.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(%|GBps)?", text.strip())
    if not found or not (value := float(found[1])):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a percentage of the line rate (80%) nor a busbw in GBps (300): "
            "1 GBps is 1e9 bytes per second, so 300 Gbps are 37.5 GBps"
        )
    return Requirement(percent=value) if found[2] == "%" else Requirement(GBps=value)
