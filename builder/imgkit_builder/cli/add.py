"""``imgkit add``: packages for an image that exists."""

from __future__ import annotations

import dataclasses

import typer

from imgkit_builder.cli.common import JSON, MB, VERBOSE, exit_on_sigterm, print_result
from imgkit_builder.cli.options import GroupedCommand
from imgkit_builder.cli.progress import reporter
from imgkit_builder.packages import add
from imgkit_builder.packages.add import AddRequest

COMMAND_CLASSES = {"add": GroupedCommand}


def verb_add(
    packages: list[str] = typer.Argument(
        None, metavar="PACKAGE...", help="Requirements, as for pip: einops, 'omegaconf>=2.3'."
    ),
    *,
    options: AddRequest,
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """Add Python packages to a .sif, in a squashfs beside it.

    The image's own pip resolves them in the image, with all that the image has as a
    constraint: its torch stays. The file holds only what the image lacks. It fits this
    image alone, and is written whole or not at all. Needs no root.

    \b
    Examples:
      imgkit add einops 'omegaconf>=2.3' --image pytorch.sif
      imgkit run --image pytorch.sif --packages pytorch+2.sqsh -- dist-run train.py
      imgkit add -r requirements.txt --image pytorch.sif -o extra.sqsh
      imgkit add einops --image pytorch.sif --wheels wheels     (without a network)
    """
    request = dataclasses.replace(options, requirements=tuple(packages or ()))
    with exit_on_sigterm(), reporter(as_json=as_json, verbose=verbose) as report:
        added = add.add(request, report)
    names = ", ".join(f"{package.name} {package.version}" for package in added.record.packages)
    state = "  up to date" if added.up_to_date else ""
    lines = [
        f"{added.path}  {added.size_bytes / MB:.1f} MB{state}",
        f"packages  {names or 'none: the image has all of them'}",
        f"next:  imgkit run ... --packages {added.path}",
        f"by hand:  {added.exec_line}",
    ]
    data = {"file": added.path, "size_bytes": added.size_bytes, "up_to_date": added.up_to_date}
    record = dataclasses.asdict(added.record)
    print_result({**data, "record": record, "exec": added.exec_line}, *lines, as_json=as_json)
