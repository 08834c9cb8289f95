"""``imgkit sbom``: the packages in an image, and what it was made of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from imgkit_builder.cli.common import UNPACK_LIMIT, VERBOSE, complete_names, gigabytes, terminable
from imgkit_builder.cli.progress import reporter
from imgkit_builder.workflow.convert import source_of
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.delta.source import OpenedImage


def verb_sbom(
    image: str = typer.Argument(
        metavar="SIF|ARCHIVE|RECIPE|IMAGE|OCI-DIR",
        autocompletion=complete_names,
        help="A .sif, an archive, a built recipe, a local image or an OCI folder.",
    ),
    output: Path | None = typer.Option(
        None, "--output", "-o", metavar="FILE", help="File to write (default: standard output)."
    ),
    provenance: bool = typer.Option(
        False, "--provenance", help="Write a provenance statement for a .sif or archive instead."
    ),
    add: bool = typer.Option(
        False, "--add", help="Add the provenance statement to the .sif, which must not be signed yet."
    ),
    unpack_limit: float | None = UNPACK_LIMIT,
    verbose: bool = VERBOSE,
) -> None:
    """List the packages in an image, with versions, licences and digests.

    Lists Debian and Python packages and imgkit's own files, as an SPDX 2.3
    document in JSON, which scanners read. Executes nothing in the image. A .sif that
    imgkit converted contains its document, at /opt/imgkit/sbom.spdx.json.

    --provenance writes an unsigned in-toto statement with SLSA provenance: recipe,
    base, git revision and, for a locked image, every package with its sha256.

    \b
    Examples:
      imgkit sbom mn5.sif
      imgkit sbom mn5 -o mn5.spdx.json
      imgkit sbom mn5.tar.zst
      imgkit sbom mn5.sif --provenance -o mn5.sif.intoto.json
      imgkit sbom mn5.sif --provenance --add
    """
    from imgkit_builder.delta import source
    from imgkit_entrypoints import files

    if add and (not provenance or output is not None):
        raise UsageError("--add needs --provenance and cannot be combined with --output", where="--add")
    if provenance:
        _state_provenance(Path(image), output, add=add, verbose=verbose)
        return
    with (
        terminable(),
        reporter(as_json=False, verbose=verbose) as report,
        image_of(image, report, unpack_limit) as found,
    ):
        report.stage(f"list the packages of {image}")
        text = source.document(found)
    if output is None:
        terminal.document(text)
        return
    with files.replacing(output, failed="cannot be written", hint="name a writable file") as stream:
        stream.write(text.encode())
    terminal.err(f"imgkit: wrote {output}")


def _state_provenance(file: Path, output: Path | None, *, add: bool, verbose: bool) -> None:
    """Print the statement about `file`, write it to `output`, or add it to the .sif."""
    from imgkit_builder.sif.image import is_sif
    from imgkit_builder.signing import provenance

    if not file.is_file():
        raise UsageError("--provenance needs a .sif, or an archive from imgkit save", where=str(file))
    if add and not is_sif(file):
        raise UsageError(
            "--add needs a .sif", where=str(file), hint=f"imgkit sbom {file} --provenance -o FILE"
        )
    if output is not None:
        provenance.check_target(output)
    with reporter(as_json=False, verbose=verbose) as report:
        found = provenance.of_file(file, report)
    statement = provenance.text(found.parts if add else (found.file,), found.evidence)
    if add:
        provenance.attach(file, statement)
    elif output is not None:
        provenance.write(output, statement)
    else:
        terminal.document(statement)
    lock = found.evidence.lock
    packages = f"and {len(lock.apt) + len(lock.pip)} packages" if lock else "only: no lock, no packages"
    target = f"added to {file}" if add else f"wrote {output}" if output else "provenance statement"
    terminal.err(f"imgkit: {target}: names the base {packages}")
    if lock is None:
        terminal.err("imgkit: to list packages too: imgkit lock RECIPE, then build again")


@contextlib.contextmanager
def image_of(name: str, report: Reporter, unpack_limit_gb: float | None) -> Iterator[OpenedImage]:
    """Yield the image called `name`, open; an engine stays connected."""
    from imgkit_builder.delta import source
    from imgkit_builder.sif import image
    from imgkit_builder.sif.conversion import Piped

    limit = gigabytes(unpack_limit_gb)
    if name.endswith((".sif", ".sqsh")) or image.is_sif(Path(name)):
        with source.opened(Path(name), report) as found:
            yield found
        return
    with source_of(name) as (stored, _):
        if isinstance(stored, Piped):
            raise UsageError("an image is read more than once, which a pipe does not allow", where=name)
        with source.opened(stored, report, unpack_limit_bytes=limit) as found:
            yield found
