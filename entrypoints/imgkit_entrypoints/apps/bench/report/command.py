"""``dist-bench report FILE...``: saved runs as one page, drawing or text, without torch or a launch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from imgkit_entrypoints import files, terminal
from imgkit_entrypoints.apps import drawing
from imgkit_entrypoints.apps.bench import record
from imgkit_entrypoints.apps.bench.report import chart, content, reference
from imgkit_entrypoints.apps.bench.report.content import BenchReport, Grid
from imgkit_entrypoints.apps.drawing import escaped
from imgkit_entrypoints.arguments import Parser
from imgkit_entrypoints.errors import UsageError

TITLE = "dist-bench report"
UNITS = "1 GBps = 1e9 B/s = 8 Gbps. Sizes are those of the size column of nccl-tests."
BESIDE = "Compared with published figures for the same number of nodes and ranks"
SPREAD = "Variation of single iterations"


def html(report: BenchReport) -> str:
    """The page."""
    return drawing.page(TITLE, _parts(report))


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
    return drawing.table(grid.head, grid.rows, marked=grid.marked, words=words)


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


WRITERS = {
    ".html": html,
    ".svg": lambda report: chart.document(
        [one for section in report.sections for one in (section.chart, *section.others)]
    ),
    ".md": markdown,
}


def main(words: Sequence[str]) -> int:
    """Write the report that `words` ask for.

    Raises
    ------
    UsageError : ``dist-bench --save`` did not write a file, the runs cannot share a chart, or the
        report cannot be written.
    """
    parser = Parser(
        prog="dist-bench report",
        description="Show saved runs side by side: bus bandwidth over size, tables, and each run's verdict.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="file written by dist-bench --save"
    )
    names = "|".join(table.name for table in reference.TABLES)
    parser.add_argument(
        "--reference",
        action="append",
        default=[],
        metavar=names,
        help="add a published table to the charts; may be repeated",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="report.html, .svg or .md (default: Markdown on stdout)",
    )
    asked = parser.parse_args(words)
    target: Path | None = asked.output
    if target is not None and target.suffix.lower() not in WRITERS:
        raise UsageError(
            f"{target.name!r} names no known format",
            where="-o",
            hint=f"use a name that ends in {', '.join(WRITERS)}",
        )
    if twice := [file for file in asked.files if asked.files.count(file) > 1]:
        raise UsageError("the same file is given twice", where=str(twice[0]), hint="name each saved run once")
    tables = [reference.find(name) for name in dict.fromkeys(asked.reference)]
    report = content.build([record.load(file) for file in asked.files], tables)
    if target is None:
        terminal.document(markdown(report))
        return 0
    write(target, WRITERS[target.suffix.lower()](report))
    terminal.err(f"wrote {target}")
    return 0


def write(target: Path, content: str) -> None:
    """Write `content` in one step: an interruption leaves the old file or none.

    Raises
    ------
    UsageError : the file cannot be written.
    """
    with files.replacing(
        target, failed="cannot write the report", hint="name a writable file: -o report.html"
    ) as file:
        file.write(content.encode())
