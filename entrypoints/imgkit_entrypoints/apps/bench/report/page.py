"""A report as one self-contained HTML page, or as Markdown for papers and issues."""

from __future__ import annotations

import re
from collections.abc import Iterator

from imgkit_entrypoints.apps import drawing
from imgkit_entrypoints.apps.bench.report import chart
from imgkit_entrypoints.apps.bench.report.content import BenchReport, Grid
from imgkit_entrypoints.apps.drawing import escaped

TITLE = "dist-bench report"
UNITS = "1 GBps = 1e9 B/s = 8 Gbps. Sizes are those of the size column of nccl-tests."
BESIDE = "Compared with published figures for the same number of nodes and ranks"
SPREAD = "Variation of single iterations"

_STYLE = """
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


def html(report: BenchReport) -> str:
    """The page. It loads nothing, and its content security policy forbids it to."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{TITLE}</title><style>{_STYLE}{drawing.STYLE}</style></head>\n<body><main>\n"
        + "\n".join(_parts(report))
        + "\n</main></body></html>\n"
    )


def _parts(report: BenchReport) -> Iterator[str]:
    yield f'<h1>{TITLE}</h1><p class="quiet">{escaped(UNITS)}</p>'
    yield _table(report.runs, words=True)
    for label, sentences in report.verdicts:
        items = "".join(f"<li>{escaped(sentence)}</li>" for sentence in sentences)
        yield f"<h3>Verdict on {escaped(label)}</h3><ul>{items}</ul>"
    for section in report.sections:
        yield f"<h2>{escaped(section.title)}</h2>"
        for one in (section.chart, *section.others):
            yield f'<figure class="desk">{chart.draw(one)}</figure>'
            yield f'<figure class="phone">{chart.draw(one, chart.NARROW)}</figure>'
        yield from (f'<p class="quiet">{escaped(note)}</p>' for note in section.notes)
        if section.beside:
            yield f"<h3>{BESIDE}</h3>{_table(section.beside)}"
        yield f"<h3>All sizes</h3>{_table(section.bandwidth)}"
        if section.spread:
            yield f"<details><summary>{SPREAD}</summary>{_table(section.spread)}</details>"
    if report.published:
        yield f"<h2>Published figures</h2>{_table(report.published)}"
        for title, note, source in report.sources:
            link = f'<a href="{escaped(source)}">{escaped(source)}</a>'
            yield f'<p class="quiet">{escaped(title)}. {escaped(note)}. {link}</p>'
    yield f"<h2>Where it was measured</h2>{_table(report.fingerprint, words=True)}"
    if report.fingerprint.marked:
        yield '<p class="quiet">The runs differ in the shaded rows.</p>'


def _table(grid: Grid, *, words: bool = False) -> str:
    head = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in grid.head)
    rows = "".join(
        f"<tr{' class=differs' if number in grid.marked else ''}>"
        + "".join(
            f'<td data-head="{escaped(head)}">{escaped(cell)}</td>'
            for head, cell in zip(grid.head, row, strict=True)
        )
        + "</tr>\n"
        for number, row in enumerate(grid.rows)
    )
    kind = ' class="words"' if words else ""
    return (
        f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>'
    )


def markdown(report: BenchReport) -> str:
    """The tables and sentences as Markdown, without the charts."""
    parts = [f"# {TITLE}", UNITS, _grid(report.runs)]
    for label, sentences in report.verdicts:
        parts += [
            f"Verdict on {_plain(label)}:",
            "\n".join(f"- {_plain(sentence)}" for sentence in sentences),
        ]
    for section in report.sections:
        parts += [f"## {_plain(section.title)}", *map(_plain, section.notes)]
        parts += [f"{BESIDE}:", _grid(section.beside)] if section.beside else []
        parts += [_grid(section.bandwidth)]
        parts += [f"{SPREAD}:", _grid(section.spread)] if section.spread else []
    if report.published:
        parts += ["## Published figures", _grid(report.published)]
        parts += [f"{_plain(title)}. {_plain(note)}. <{source}>" for title, note, source in report.sources]
    parts += ["## Where it was measured", _grid(report.fingerprint)]
    return "\n\n".join(parts) + "\n"


def _grid(grid: Grid) -> str:
    sides = " | ".join(["---", *["---:"] * (len(grid.head) - 1)])
    lines = [" | ".join(map(_plain, cells)) for cells in (grid.head, *grid.rows)]
    return "\n".join(f"| {line} |" for line in (lines[0], sides, *lines[1:]))


def _plain(value: str) -> str:
    """One line that Markdown shows literally."""
    return re.sub(r"([\\`*\[\]|<>&])", r"\\\1", " ".join(re.sub(r"[\x00-\x1f\x7f]", " ", value).split()))
