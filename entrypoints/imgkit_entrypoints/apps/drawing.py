"""Common parts of the SVG charts of dist-bench and dist-train, which are drawn without a plotting library.

Markers, dashes and labels make the charts readable without colors. The colors suit light and dark pages. The
SVG uses only simple CSS classes, because programs that convert it for papers do not support CSS variables.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from html import escape

# The palette of Okabe and Ito, which color-blind readers can distinguish. The first of each pair is for light
# pages, and the lighter second one is for dark pages.
COLOURS = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#f0894a"),
    ("#009e73", "#2fc49b"),
    ("#a0478a", "#dd94c2"),
    ("#8a6d00", "#e6b020"),
    ("#4a4a4a", "#c8c8c8"),
)
DASHES = ("", "7 3", "2 3")
"""Dash patterns (stroke-dasharray). If there are more lines than colors, colors are reused with dashes."""
# Classes .s0, .s1, ... set the stroke of the lines, and .f0, .f1, ... fill their markers.
STYLE = (
    ".paper{fill:#fff}.grid{stroke:#e3e5e8}.frame{stroke:#8a9099;fill:none}"
    "text{font:12px system-ui,'DejaVu Sans',Helvetica,Arial,sans-serif;fill:#1c1f23}"
    "text.quiet{fill:#555b63}text.head{font-size:15px;font-weight:600}"
    + "".join(
        f".s{number}{{stroke:{light}}}.f{number}{{fill:{light}}}" for number, (light, _) in enumerate(COLOURS)
    )
    + "@media (prefers-color-scheme:dark){.paper{fill:#16181b}.grid{stroke:#2c3035}.frame{stroke:#737a83}"
    "text{fill:#e8eaed}text.quiet{fill:#a9b0b9}"
    + "".join(
        f".s{number}{{stroke:{dark}}}.f{number}{{fill:{dark}}}" for number, (_, dark) in enumerate(COLOURS)
    )
    + "}"
)
"""The CSS for the page or SVG file that contains the drawings."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis that maps values from `low` to `high` to positions in the drawing, beginning at `start`."""

    low: float
    high: float
    start: float
    length: float
    """Length in the drawing. It is negative for an axis that points upwards, because y grows downwards."""
    is_logarithmic: bool = False

    def position(self, value: float) -> float:
        """Return the position of a value in the drawing."""
        if self.is_logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * self.length


def document(body: str, width: int, height: int) -> str:
    """Return the text of an SVG file with the elements in `body`."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def escaped(value: str) -> str:
    """Return a text that is escaped for HTML and XML. Characters that XML forbids are replaced by U+FFFD."""
    return escape(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", value))
