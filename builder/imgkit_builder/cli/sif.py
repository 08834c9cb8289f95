"""``imgkit sif``: any image to a .sif."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.cli.progress import reporter
from imgkit_entrypoints.errors import ToolMissing, UsageError

if TYPE_CHECKING:
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.sif.options import Converted, EngineImage, Options, Source, Stage
    from imgkit_entrypoints.system import SystemFacts

SCHEMA = 1
_ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst")
_MB = 1e6


class SifCompression(str, enum.Enum):
    """How the .sif is compressed."""

    AUTO = "auto"
    ZSTD = "zstd"
    GZIP = "gzip"


class Origin(str, enum.Enum):
    """Where the image is read from."""

    ARCHIVE = "archive"
    DAEMON = "daemon"
    OCI = "oci"
    REGISTRY = "registry"


def verb_sif(
    image: str = typer.Argument(
        metavar="ARCHIVE|RECIPE|IMAGE|OCI-DIR",
        help="An archive of imgkit save or docker save, a built recipe, a local image, or an OCI folder.",
    ),
    output: Path | None = typer.Option(
        None, "--output", "-o", metavar="X.sif", help="Where to write it; without it NAME.sif here."
    ),
    origin: Origin | None = typer.Option(
        None,
        "--from",
        help="Where from; without it a file is an archive, and an image is saved from the engine. "
        "daemon: the engine's export straight into the .sif, several times faster.",
    ),
    compression: SifCompression = typer.Option(
        SifCompression.AUTO, help="auto takes zstd where this machine can make and mount it."
    ),
    tmpdir: Path | None = typer.Option(
        None,
        metavar="DIR",
        help="For temporary files, 3.3 times the image; without it $IMGKIT_TMPDIR, $APPTAINER_TMPDIR, "
        "$SINGULARITY_TMPDIR, $TMPDIR, else beside the .sif.",
    ),
    force: bool = typer.Option(
        False, "--force", help="Convert even if it is up to date; overwrite a file that is no .sif."
    ),
    runtime: str | None = typer.Option(
        None, metavar="COMMAND", help="Without it singularity, else apptainer."
    ),
    no_test: bool = typer.Option(False, "--no-test", help="Do not execute anything in the new .sif."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the commands that would run."),
    as_json: bool = typer.Option(
        False, "--json", help="Print one JSON object on stdout, progress as JSON lines on stderr."
    ),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Show everything the runtime says."),
) -> None:
    """Convert an image to a .sif for Singularity or Apptainer, and check it.

    Needs no root and, for an archive, no docker. An older .sif is replaced in
    one step and only by a checked one; what is up to date stays. An
    interrupted run leaves the old file or none.

    \b
    Examples:
      imgkit sif mn5.tar
      imgkit sif mn5 --from daemon
      imgkit sif mn5.tar.zst -o /scratch/mn5.sif --tmpdir /scratch/tmp
      imgkit sif 127.0.0.1:5000/mine:1 --from registry
    """
    from imgkit_builder.sif import convert
    from imgkit_builder.sif.options import Options

    with (
        terminable(),
        reporter(as_json=as_json, verbose=verbose) as report,
        _source(image, origin, report) as (source, system),
    ):
        target = output or Path(f"{stem(image)}.sif")
        options = Options(
            runtime=runtime,
            module_hint=module_line(system),
            compression=compression.value,
            direct=origin is Origin.DAEMON,
            tmpdir=tmpdir,
            force=force,
            test=not no_test,
        )
        if dry_run:
            text, data = _planned(source, target, options)
        else:
            text, data = _result(convert.convert(source, target, options, report), target, system)
    print(json.dumps(data, indent=2) if as_json else text)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM, as a scheduler sends it at the time limit, cleans up like Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _source(
    image: str, origin: Origin | None, report: Reporter
) -> Iterator[tuple[Source, SystemFacts | None]]:
    """What `image` means, and the system it is for where that is known; an engine stays connected."""
    from imgkit_builder.archive import sidecar
    from imgkit_builder.sif.options import Archive, OciFolder, Registry

    path = Path(image)
    if origin is Origin.REGISTRY:
        yield Registry(reference=image.removeprefix("docker://")), system_of(image)
    elif origin is not Origin.DAEMON and path.is_file() and path.suffix not in (".yaml", ".yml"):
        _refuse_sif(path)
        described = sidecar.read(path)
        yield Archive(path=path), described.system if described else None
    elif origin is Origin.OCI or (origin is None and (path / "oci-layout").is_file()):
        if not (path / "oci-layout").is_file():
            raise UsageError("no OCI folder (it has no file oci-layout)", where=image)
        yield OciFolder(path=path), None
    else:
        if image.endswith(_ARCHIVE_SUFFIXES):
            raise UsageError(
                "there is no such archive",
                where=image,
                hint=f"save it on the build host: imgkit save {stem(image)}",
            )
        with engine_image(image, report) as found:
            yield found, system_of(image)


def _refuse_sif(path: Path) -> None:
    from imgkit_builder.sif.image import is_sif

    if is_sif(path):
        raise UsageError("it is a .sif already", where=str(path), hint=f"check it: imgkit test {path}")


@contextlib.contextmanager
def engine_image(image: str, report: Reporter) -> Iterator[EngineImage]:
    from imgkit_builder import engine

    name = image
    if image.endswith((".yaml", ".yml")):
        from imgkit_builder.recipe.load import load

        name = engine.default_tag(load(image))
    try:
        opened = engine.connect()
    except ToolMissing as error:
        hint = f"{error.hint}\nwithout docker give the archive: imgkit sif {stem(image)}.tar"
        raise ToolMissing(error.what, where=error.where, hint=hint) from error
    with opened as connected:
        yield engine.local_image(connected, name)


def system_of(image: str) -> SystemFacts | None:
    """The system of the recipe `image`, or of the shipped recipe that an image is named like."""
    from imgkit_builder.recipe import targets
    from imgkit_recipes import recipe_names

    name = image.rpartition("/")[2].partition(":")[0]
    if image.endswith((".yaml", ".yml")):
        return targets.find(image).system
    return targets.find(name).system if name in recipe_names() else None


def module_line(system: SystemFacts | None) -> str | None:
    modules = system.runtime.modules if system else ()
    return f"module load {' '.join(modules)}" if modules else None


def stem(image: str) -> str:
    """``mn5`` of ``dir/mn5.tar.gz``, ``mn5.yaml``, ``mn5:latest``; ``mine-1`` of ``host:5000/grp/mine:1``."""
    last = image.rstrip("/").rpartition("/")[2]
    for suffix in (*_ARCHIVE_SUFFIXES, ".yaml", ".yml"):
        if last.endswith(suffix):
            return last.removesuffix(suffix)
    name, _, version = last.partition("@")[0].partition(":")
    return name if version in ("", "latest") else f"{name}-{version}"


def stage_seconds(stages: tuple[Stage, ...]) -> dict[str, float]:
    """What took how long, for scripts."""
    return {stage.name: round(stage.seconds, 2) for stage in stages}


def stage_lines(stages: tuple[Stage, ...]) -> list[str]:
    """The same for people, with the sum; nothing where there were no stages."""
    if not stages:
        return []
    total = sum(stage.seconds for stage in stages)
    lines = [f"{stage.seconds:7.1f} s  {stage.name}" for stage in stages]
    return [*lines, f"{total:7.1f} s  in all"]


def _planned(source: Source, target: Path, options: Options) -> tuple[str, dict[str, Any]]:
    from imgkit_builder.sif import convert

    commands = convert.plan(source, target, options)
    data = {"schema": SCHEMA, "dry_run": True, "sif": str(target), "commands": list(commands)}
    return "\n".join(commands), data


def _result(converted: Converted, target: Path, system: SystemFacts | None) -> tuple[str, dict[str, Any]]:
    words = ["singularity", "exec", *(system.runtime.options if system else ()), str(target), "dist-train"]
    following = shlex.join(words)
    record = converted.record
    data = {
        "schema": SCHEMA,
        "sif": str(converted.path),
        "size_bytes": converted.size_bytes,
        "arch": converted.arch,
        "up_to_date": converted.up_to_date,
        "record": dataclasses.asdict(record),
        "seconds": stage_seconds(converted.stages),
        "log": str(converted.log) if converted.log else None,
        "next": following,
    }
    lines = stage_lines(converted.stages)
    about = f"{converted.size_bytes / _MB:.1f} MB  {converted.arch}  {record.compression}, {record.runtime}"
    lines.append(f"{target}  {about}{'  up to date' if converted.up_to_date else ''}")
    if record.image_id:
        lines.append(f"image  {record.image_id}")
    lines += [f"root   sha256:{record.root_sha256}", f"next:  {following}"]
    return "\n".join(lines), data
