"""``dist-bench report FILE...``: saved runs as one page, drawing or text, without torch or a launch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from imgkit_entrypoints import files, terminal
from imgkit_entrypoints.apps.bench.record import reader
from imgkit_entrypoints.apps.bench.report import chart, content, page, reference
from imgkit_entrypoints.arguments import Parser
from imgkit_entrypoints.errors import UsageError

WRITERS = {
    ".html": page.html,
    ".svg": lambda report: chart.document(
        [one for section in report.sections for one in (section.chart, *section.others)]
    ),
    ".md": page.markdown,
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
    report = content.build([reader.load(file) for file in asked.files], tables)
    if target is None:
        terminal.document(page.markdown(report))
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
