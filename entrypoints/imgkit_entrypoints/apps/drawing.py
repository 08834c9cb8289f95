"""Shared parts of the SVG charts and pages of dist-bench and dist-train, without a plotting library.

Charts are readable without colours (markers, dashes, labels) and on light and dark pages. They use plain
classes and attributes only, because converters for papers do not support CSS variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

# The palette of Okabe and Ito, which colour-blind readers can tell apart, with light variants for dark pages.
COLOURS = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#f0894a"),
    ("#009e73", "#2fc49b"),
    ("#a0478a", "#dd94c2"),
    ("#8a6d00", "#e6b020"),
    ("#4a4a4a", "#c8c8c8"),
)
DASHES = ("", "7 3", "2 3")
"""Dash patterns: solid for the first round of colours, then dashed for the next two."""
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
"""CSS for the page or file that holds the drawings."""


_PAGE_STYLE = """
:root{color-scheme:light dark}
body{margin:0;background:#fff;color:#1c1f23;font:15px/1.5 system-ui,'DejaVu Sans',Helvetica,Arial,sans-serif}
main{max-width:1024px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:24px;margin:0 0 2px}h2{font-size:18px;margin:36px 0 6px}h3{font-size:14px;margin:20px 0 4px}
p{margin:6px 0}.quiet{color:#555b63;font-size:13px}.wide{overflow-x:auto}figure{margin:10px 0}
svg{display:block;max-width:100%;height:auto}ul{margin:4px 0;padding-left:20px}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;margin:6px 0}
th,td{padding:4px 12px 4px 0;text-align:right;border-bottom:1px solid #e3e5e8;vertical-align:top}
th{font-weight:600;vertical-align:bottom}
th:first-child,td:first-child,table.words th,table.words td{text-align:left}
td:first-child{white-space:nowrap}table.words td:last-child{overflow-wrap:anywhere}
summary{cursor:pointer;font-weight:600;font-size:14px;margin-top:14px}
tr.differs td{background:#fff3d6}a{color:#0a5a9c}
@media (prefers-color-scheme:dark){body{background:#16181b;color:#e8eaed}.quiet{color:#a9b0b9}
th,td{border-color:#2c3035}tr.differs td{background:#463a14}a{color:#7cc0f2}}
.phone{display:none}
@media screen and (max-width:760px){main{padding:16px 20px 40px}.desk{display:none}.phone{display:block}
thead{display:none}table,tbody,tr,td{display:block}tr{padding:6px 0;border-bottom:1px solid #8a9099}
td,td:first-child{display:flex;justify-content:space-between;gap:16px;padding:1px 0;border:0}
td,table.words td:last-child{white-space:normal;overflow-wrap:anywhere;text-align:right}
td::before{content:attr(data-head);text-align:left;font-weight:600;flex:none;max-width:50%}}
@media print{main{max-width:none;padding:0}}
"""


def document(body: str, width: int, height: int) -> str:
    """One SVG file that holds `body`."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def page(title: str, parts: Iterable[str]) -> str:
    """One self-contained HTML page. It loads nothing, and its content security policy forbids it to."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_PAGE_STYLE}{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, marked: Sequence[int] = (), words: bool = False
) -> str:
    """A table of texts for `page`; `marked` rows are shaded, and `words` aligns all cells left."""
    names = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in head)
    body = "".join(
        f"<tr{' class=differs' if number in marked else ''}>"
        + "".join(
            f'<td data-head="{escaped(name)}">{escaped(cell)}</td>'
            for name, cell in zip(head, row, strict=True)
        )
        + "</tr>\n"
        for number, row in enumerate(rows)
    )
    kind = ' class="words"' if words else ""
    return (
        f'<div class="wide"><table{kind}><thead><tr>{names}</tr></thead>\n<tbody>{body}</tbody></table></div>'
    )


def escaped(value: str) -> str:
    """Escape `value` for HTML and XML, and replace the characters that XML forbids."""
    return escape(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", value))
