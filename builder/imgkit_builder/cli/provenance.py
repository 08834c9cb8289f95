"""``imgkit provenance``."""

from __future__ import annotations

from pathlib import Path

import typer

from imgkit_builder.cli.common import JSON, show
from imgkit_builder.cli.progress import reporter
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import UsageError

SCHEMA = 1
SUFFIX = ".intoto.json"


def verb_provenance(
    file: Path = typer.Argument(metavar="FILE", help="A .sif, or an archive from imgkit save."),
    output: Path | None = typer.Option(
        None, "--output", "-o", metavar="FILE", help=f"File to write (default: FILE{SUFFIX})."
    ),
    add: bool = typer.Option(False, "--add", help="Add it to the .sif, which must not be signed yet."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the statement, and write nothing."),
    as_json: bool = JSON,
) -> None:
    """State what a .sif or archive is and what it was made of: an in-toto statement with SLSA provenance.

    It names recipe, base, git revision and, for a locked image, every package
    with its sha256, as the image records them. It is unsigned: imgkit sign
    signs a .sif with an added one.

    \b
    Examples:
      imgkit provenance mn5.sif                 (writes mn5.sif.intoto.json)
      imgkit provenance mn5.sif --add
      imgkit provenance mn5.tar --dry-run
    """
    from imgkit_builder.sif import image
    from imgkit_builder.signing import provenance

    if add and output is not None:
        raise UsageError("--add and --output exclude each other", hint="leave one of them out")
    if add and file.is_file() and not image.is_sif(file):
        raise UsageError("--add is for a .sif", where=str(file), hint=f"imgkit provenance {file}")
    target = output or file.with_name(file.name + SUFFIX)
    if not add and not dry_run:
        provenance.check_target(target)
    with reporter(as_json=as_json) as report:
        found = provenance.of_file(file, report)
    statement = provenance.text(found.parts if add else (found.file,), found.evidence)
    if dry_run:
        terminal.document(statement)
        return
    if add:
        provenance.attach(file, statement)
    else:
        provenance.write(target, statement)
    lock = found.evidence.lock
    packages = len(lock.apt) + len(lock.pip) if lock else 0
    place = file if add else target
    said = f"names the base and {packages} packages" if lock else "names the base, and no package: no lock"
    lines = [f"{place}  {'has the statement' if add else 'written'}, which {said}"]
    if lock is None:
        lines.append("to have them: imgkit lock RECIPE, and build again")
    data = {"schema": SCHEMA, "file": str(file), "statement": str(place), "added": add}
    show({**data, "locked": lock is not None, "packages": packages}, *lines, as_json=as_json)
