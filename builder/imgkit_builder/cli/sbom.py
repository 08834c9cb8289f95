"""``imgkit sbom``: the packages in an image."""

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
    unpack_limit: float | None = UNPACK_LIMIT,
    verbose: bool = VERBOSE,
) -> None:
    """List the packages in an image, with versions and digests.

    Lists Debian and Python packages and imgkit's own files, as an SPDX 2.3
    document in JSON, which scanners read. Executes nothing in the image. A .sif that
    imgkit converted contains its document, at /opt/imgkit/sbom.spdx.json.

    \b
    Examples:
      imgkit sbom mn5.sif
      imgkit sbom mn5 -o mn5.spdx.json
      imgkit sbom mn5.tar.zst
    """
    from imgkit_builder.delta import source
    from imgkit_entrypoints import files

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


@contextlib.contextmanager
def image_of(name: str, report: Reporter, unpack_limit_gb: float | None) -> Iterator[OpenedImage]:
    """Yield the image called `name`, open; an engine stays connected."""
    from imgkit_builder.delta import source
    from imgkit_builder.sif import image
    from imgkit_builder.sif.entries import Piped

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
