"""``imgkit bundle``: the one-file tool for clusters without internet."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import typer

from imgkit_builder.cli.common import JSON, show
from imgkit_builder.cli.progress import reporter

SCHEMA = 1


def verb_bundle(
    output: Path = typer.Option(
        Path("imgkit.pyz"), "--output", "-o", metavar="FILE", help="Where to write it."
    ),
    as_json: bool = JSON,
) -> None:
    """Write a one-file imgkit for a cluster without internet.

    It builds, shows, converts, verifies and tests images, and it submits and follows
    jobs, on any architecture. It needs Python 3.10 or newer and no installation.
    Copy it beside the archive.

    \b
    Examples:
      imgkit bundle
      rsync -P imgkit.pyz mn5.tar USER@CLUSTER:
      python3 imgkit.pyz sif mn5.tar                        # on the cluster
      python3 imgkit.pyz submit mn5.sif ... -- dist-bench   # there too
    """
    from imgkit_builder.cli import zipapp

    with reporter(as_json=as_json) as report:
        report.stage(f"bundle {output}")
        made = zipapp.bundle(output.absolute())
    data = {"schema": SCHEMA, **dataclasses.asdict(made), "path": str(output)}
    lines = (
        f"{output}  {made.size_bytes / 1e6:.2f} MB  sha256 {made.sha256}",
        f"contains {', '.join(made.distributions)}",
        f"next: rsync -P {output} USER@CLUSTER:  and there: python3 {output.name} doctor --for sif",
    )
    show(data, *lines, as_json=as_json)
