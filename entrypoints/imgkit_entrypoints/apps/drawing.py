"""The common parts of the SVG charts of dist-bench and dist-train, which need no plotting library.

Markers, dashes and labels make the charts readable without colours, and they fit light and dark pages. They
use only plain classes and attributes, because converters for papers do not support CSS variables.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from html import escape

# The palette of Okabe and Ito, which colour-blind readers can tell apart. Each colour is for light pages, and
# its lighter variant for dark ones.
COLOURS = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#f0894a"),
    ("#009e73", "#2fc49b"),
    ("#a0478a", "#dd94c2"),
    ("#8a6d00", "#e6b020"),
    ("#4a4a4a", "#c8c8c8"),
)
DASHES = ("", "7 3", "2 3")
"""Dash patterns (stroke-dasharray). With more lines than colours, the second and third round are dashed."""
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
"""The CSS for the page or file that has the drawings."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis for values from `low` to `high`, which lie from `start` on in the drawing."""

    low: float
    high: float
    start: float
    length: float
    """Length in the drawing. Negative means upwards."""
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
    """Return a text escaped for HTML and XML, in which U+FFFD replaces characters that XML forbids."""
    return escape(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", value))
