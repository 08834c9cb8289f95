"""``imgkit sbom``: the packages in an image."""

from __future__ import annotations

from pathlib import Path

from imgkit_builder.cli.common import (
    UNPACK_LIMIT,
    VERBOSE,
    exit_on_sigterm,
    gigabytes_to_bytes,
    name_argument,
    output_option,
    print_message,
)
from imgkit_builder.cli.progress import reporter
from imgkit_builder.workflow.sbom import sbom_document
from imgkit_entrypoints import files, terminal


def verb_sbom(
    image: str = name_argument(
        "SIF|ARCHIVE|RECIPE|IMAGE|OCI-DIR",
        "A .sif, an archive, a built recipe, a local image or an OCI folder.",
    ),
    output: Path | None = output_option("FILE", "File to write (default: standard output)."),
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
    with exit_on_sigterm(), reporter(as_json=False, verbose=verbose) as report:
        text = sbom_document(image, report, unpack_limit_bytes=gigabytes_to_bytes(unpack_limit))
    if output is None:
        terminal.print_document(text)
        return
    with files.replace_named_file(output, failed="cannot be written", hint="name a writable file") as stream:
        stream.write(text.encode())
    print_message(f"wrote {output}")
