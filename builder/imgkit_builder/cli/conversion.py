"""Options and output that the verbs for .sif files and deltas share."""

from __future__ import annotations

import contextlib
import shlex
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from imgkit_builder.cli.common import image_name, stem
from imgkit_entrypoints.errors import ImgkitError, ToolMissing

if TYPE_CHECKING:
    from pathlib import Path

    from imgkit_builder.sif.conversion import EngineImage, Helper, Stage

MB = 1e6

RUNTIME: str | None = typer.Option(
    None, metavar="COMMAND", help="Runtime to use (default: singularity, else apptainer)."
)
TMPDIR: Path | None = typer.Option(
    None, metavar="DIR", help="Folder for temporary files (default: as for imgkit sif)."
)
NO_TEST: bool = typer.Option(False, "--no-test", help="Do not run anything in the result.")
VERBOSE: bool = typer.Option(False, "--verbose", "-v", help="Show all output of the runtime.")


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM, which a scheduler sends at the time limit, clean up like Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def engine_image(image: str) -> Iterator[EngineImage]:
    """Yield the image called `image` of a Docker engine, which stays connected."""
    from imgkit_builder import engine

    name = image_name(image)
    try:
        opened = engine.connect()
    except ToolMissing as error:
        hint = f"{error.hint}\nwithout Docker, give the archive: imgkit sif {stem(image)}.tar"
        raise ToolMissing(error.what, where=error.where, hint=hint) from error
    with opened as connected:
        yield engine.local_image(connected, name)


def helper(image: EngineImage | None = None) -> Callable[[], Helper | None]:
    """Return what finds an engine that squashes; the base of `image` then serves to install mksquashfs."""

    def find() -> Helper | None:
        from imgkit_builder import engine

        labels = dict(image.config.labels) if image else {}
        base = labels.get("org.opencontainers.image.base.name", "")
        return engine.squash_helper((base,) if base else ())

    return find


def next_line(sif: Path, command: str, *, overlay: str = "") -> str:
    """The command that runs `command` in `sif` with the options of the system that its image is for.

    An image that imgkit did not build names no system and has no ``dist-*`` commands: then it opens a shell.
    """
    from imgkit_builder.job import baked

    layer = ("--overlay", overlay) if overlay else ()
    try:
        runtime = baked.target(sif).system.runtime
    except (ImgkitError, OSError):
        return shlex.join(("singularity", "shell", *layer, str(sif)))
    on_singularity = runtime.kind == "singularity"
    program, options = (runtime.command, runtime.options) if on_singularity else ("singularity", ())
    mounts = (word for bind in runtime.binds for word in ("--bind", bind))
    return shlex.join((program, "exec", *options, *mounts, *layer, str(sif), command))


def stage_seconds(stages: tuple[Stage, ...]) -> dict[str, float]:
    """Seconds per stage, for scripts."""
    return {stage.name: round(stage.seconds, 2) for stage in stages}


def stage_lines(stages: tuple[Stage, ...]) -> list[str]:
    """Seconds per stage and their sum, for people; empty if there were no stages."""
    if not stages:
        return []
    total = sum(stage.seconds for stage in stages)
    lines = [f"{stage.seconds:7.1f} s  {stage.name}" for stage in stages]
    return [*lines, f"{total:7.1f} s  in all"]
