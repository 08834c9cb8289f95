"""``dist-bench report FILE...``: saved runs as one page, drawing or text. Needs no torch and no launch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.apps.bench.record import schema
from imgkit_entrypoints.apps.bench.report import chart, page, reference, sections
from imgkit_entrypoints.arguments import Parser
from imgkit_entrypoints.errors import UsageError

WRITERS = {
    ".html": page.html,
    ".svg": lambda report: chart.document([section.panel for section in report.sections]),
    ".md": page.markdown,
}


def main(words: Sequence[str]) -> int:
    """Write the report that `words` ask for.

    Raises
    ------
    UsageError : a file is none of ``dist-bench --save``, the runs cannot share a chart, or the report
        cannot be written.
    """
    parser = Parser(
        prog="dist-bench report",
        description="Saved runs side by side: bus bandwidth over size, tables, and what each run said.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written by dist-bench --save")
    names = "|".join(table.name for table in reference.TABLES)
    parser.add_argument(
        "--reference",
        action="append",
        default=[],
        metavar=names,
        help="a published table to draw in; may be repeated",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="report.html, .svg or .md; default: Markdown on stdout",
    )
    asked = parser.parse_args(words)
    target: Path | None = asked.output
    if target is not None and target.suffix.lower() not in WRITERS:
        raise UsageError(
            f"cannot tell the format from {target.name!r}", where="-o", hint=f"end it in {', '.join(WRITERS)}"
        )
    if twice := [file for file in asked.files if asked.files.count(file) > 1]:
        raise UsageError("the same file twice", where=str(twice[0]), hint="each run is one line of the chart")
    tables = [reference.find(name) for name in dict.fromkeys(asked.reference)]
    report = sections.build([schema.load(file) for file in asked.files], tables)
    if target is None:
        sys.stdout.write(page.markdown(report))
        return 0
    write(target, WRITERS[target.suffix.lower()](report))
    print(f"wrote {target}", file=sys.stderr)
    return 0


def write(target: Path, content: str) -> None:
    """Put `content` there in one step: an interrupted run leaves the old file or none.

    Raises
    ------
    UsageError : it cannot be written.
    """
    with files.replacing(target, failed="cannot write it", hint="-o report.html") as file:
        file.write(content.encode())
