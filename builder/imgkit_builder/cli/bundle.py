"""``imgkit bundle``: the single-file executable (zipapp) for clusters without internet."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from imgkit_builder.cli.common import JSON, show
from imgkit_builder.cli.progress import reporter

if TYPE_CHECKING:
    from imgkit_builder.workflow.zipapp import Bundle

SCHEMA = 1


def verb_bundle(
    output: Path = typer.Option(Path("imgkit.pyz"), "--output", "-o", metavar="FILE", help="File to write."),
    as_json: bool = JSON,
) -> None:
    """Write imgkit as a single-file executable (zipapp) for a cluster without internet.

    It builds, shows, converts, verifies and tests images, and it submits and follows
    jobs, on any architecture. It needs Python 3.10 or newer and no installation.
    Copy it next to the archive.

    \b
    Examples:
      imgkit bundle
      rsync -P imgkit.pyz mn5.tar USER@CLUSTER:
      python3 imgkit.pyz sif mn5.tar                        # on the cluster
      python3 imgkit.pyz submit mn5.sif ... -- dist-bench   # there too
    """
    with reporter(as_json=as_json) as report:
        report.stage(f"bundle {output}")
        made = write(output.absolute())
    data = {"schema": SCHEMA, **dataclasses.asdict(made), "path": str(output)}
    lines = (
        f"{output}  {made.size_bytes / 1e6:.2f} MB  sha256 {made.sha256}",
        f"contains {', '.join(made.distributions)}",
        f"next: rsync -P {output} USER@CLUSTER:  and there: python3 {output.name} doctor --for sif",
    )
    show(data, *lines, as_json=as_json)


def write(target: Path) -> Bundle:
    """Write the executable to `target`; one start must load all verbs, and one typer and rich."""
    from imgkit_builder.cli.app import BUNDLE_VERBS, main_bundled
    from imgkit_builder.workflow import zipapp

    return zipapp.bundle(target, main_bundled, (["--version"], [BUNDLE_VERBS[0], "--help"]))
