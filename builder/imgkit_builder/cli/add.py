"""``imgkit add``: add packages to an existing image."""

from __future__ import annotations

import dataclasses

import typer

from imgkit_builder.cli.common import HERE, JSON, MB, VERBOSE, exit_on_sigterm, print_result
from imgkit_builder.cli.jobs import may_ask
from imgkit_builder.cli.options import GroupedCommand
from imgkit_builder.cli.progress import reporter
from imgkit_builder.packages import add
from imgkit_builder.packages.add import AddRequest, ImageMachine

COMMAND_CLASSES = {"add": GroupedCommand}


def verb_add(
    packages: list[str] = typer.Argument(
        None, metavar="PACKAGE...", help="Requirements, as for pip: einops, 'omegaconf>=2.3'."
    ),
    *,
    on: str = typer.Option(
        "", metavar="NAME", help="The remote with the image, by its path there (imgkit remote list)."
    ),
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
      imgkit add einops --on mn5 --image /appl/ai/pytorch.sif
    """
    request = dataclasses.replace(options, requirements=tuple(packages or ()))
    with exit_on_sigterm(), reporter(as_json=as_json, verbose=verbose) as report:
        added = add.add(request, report, machine=_connect_to_machine(on))
    names = ", ".join(f"{package.name} {package.version}" for package in added.record.packages)
    state = "  up to date" if added.up_to_date else ""
    on_flag = f" --on {on}" if on else ""
    lines = [
        f"{added.path}  {added.size_bytes / MB:.1f} MB{state}",
        f"packages  {names or 'none: the image has all of them'}",
        f"next:  imgkit run ...{on_flag} --packages {added.path}",
        f"by hand:  {added.exec_line}",
    ]
    data = {
        "file": added.path,
        "size_bytes": added.size_bytes,
        "up_to_date": added.up_to_date,
        "record": dataclasses.asdict(added.record),
        "exec": added.exec_line,
    }
    print_result(data, *lines, as_json=as_json)


def _connect_to_machine(name: str) -> ImageMachine | None:
    """Connect to the remote `name`, and return it as the machine on which pip runs in the image.

    Return None if `name` means this machine. The image is started with the program of the remote's recipe,
    such as ``apptainer``. If there is no recipe, or its runtime is not of the kind singularity, the program
    is ``singularity``.
    """
    if name in ("", HERE):
        return None
    from imgkit_builder.jobs import runtimes
    from imgkit_builder.jobs.remote import config, connection, packages
    from imgkit_builder.recipe import targets

    remote = config.get_remote(name)
    program = "singularity"
    modules: tuple[str, ...] = ()  # the environment modules that the program needs
    if remote.recipe:
        recipe_runtime = targets.load_target(remote.recipe).system.runtime
        if recipe_runtime.kind == runtimes.get_runtime("singularity").kind:
            program = recipe_runtime.command
            modules = recipe_runtime.modules
    remote_connection = connection.connect(remote, ask=may_ask())
    remote_connection.login()  # ssh asks for a password now, and not in the middle of a progress bar
    return packages.machine_of(remote_connection, program, modules)
