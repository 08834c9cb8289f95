"""Archives: save an image, verify an archive, .sif or .sqsh."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import typer

from imgkit_builder.cli.common import (
    JSON,
    UNPACK_LIMIT,
    VERBOSE,
    complete_names,
    gigabytes,
    show,
    terminable,
)
from imgkit_builder.cli.progress import reporter
from imgkit_builder.workflow.names import image_name, module_line, stem
from imgkit_entrypoints.errors import EXIT_NO, UsageError

if TYPE_CHECKING:
    from imgkit_builder.archive.sidecar import Sidecar
    from imgkit_builder.archive.write import Saved
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.engine import Engine, ImageInfo
    from imgkit_entrypoints.system import SystemFacts

SCHEMA = 1

Baked = TypeVar("Baked")


ArchiveCompression = Literal["none", "gzip", "zstd"]


def verb_save(
    image: str = typer.Argument(
        metavar="RECIPE|IMAGE", autocompletion=complete_names, help="A built recipe, or a local image."
    ),
    output: Path | None = typer.Option(
        None, "--output", "-o", metavar="FILE", help="File to write (default: NAME.tar here)."
    ),
    compress: ArchiveCompression = typer.Option(
        "none",
        "--compression",
        help="zstd: a third of the size, no slower. gzip: readable anywhere.",
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the image and the file, then exit."),
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """Save an image as an archive, with checksum and manifest.

    Writes FILE, FILE.sha256 (for sha256sum -c) and FILE.manifest.json in one
    pass. Writes are atomic: an interrupted save leaves the old file. If the three
    files do not match, imgkit verify reports how to repair them. Prints the
    commands that copy, verify and convert the archive.

    \b
    Examples:
      imgkit save mn5
      imgkit save mn5 --compression zstd -o /scratch/mn5.tar.zst
      imgkit save registry.example.org/group/mine:1 --dry-run
    """
    from imgkit_builder import engine
    from imgkit_builder.archive import write

    with terminable(), reporter(as_json=as_json, verbose=verbose) as report, engine.connect() as connected:
        info = engine.inspect(connected, image_name(image))
        if not info.tag:
            raise UsageError(
                f"the image {image} has no name, and its archive could not be used",
                hint=f"docker tag {image} NAME:1, then: imgkit save NAME:1",
            )
        target = output or Path(stem(info.tag) + write.SUFFIXES[compress])
        # Before the engine stages 20 GB.
        write.preflight(target.absolute(), compress=compress, expected_bytes=info.size_bytes)
        if dry_run:
            lines, data = _planned(info, target, compress)
        else:
            saved, described = _saved(connected, info, target, compress, report)
            lines, data = _result(saved, described)
    show(data, *lines, as_json=as_json)


def _planned(info: ImageInfo, target: Path, compress: ArchiveCompression) -> tuple[list[str], dict[str, Any]]:
    data = {
        "schema": SCHEMA,
        "dry_run": True,
        "image": {"id": info.id, "tag": info.tag, "platform": info.platform, "size_bytes": info.size_bytes},
        "archive": {"name": str(target), "compress": compress},
    }
    size = f"{info.size_bytes / 1e6:.0f} MB" + ("" if compress == "none" else " before compression")
    lines = [
        f"would save {info.tag} ({info.platform}, {info.id})",
        f"to {target}, {size}, compress {compress}",
    ]
    return lines, data


def _saved(
    connected: Engine, info: ImageInfo, target: Path, compress: ArchiveCompression, report: Reporter
) -> tuple[Saved, Sidecar]:
    from imgkit_builder import engine
    from imgkit_builder.archive import sidecar, write
    from imgkit_builder.oci import manifest as manifests
    from imgkit_entrypoints import system as systems

    system = _baked(connected, info, str(systems.SYSTEM_JSON), systems.from_json, report)
    manifest = _baked(connected, info, manifests.MANIFEST_JSON, manifests.from_json, report)

    def describe(saved: Saved) -> Sidecar:
        image = sidecar.SavedImage(
            id=info.id,
            tag=info.tag,
            platform=info.platform,
            diff_ids=info.diff_ids,
            labels=dict(info.labels),
        )
        archive = sidecar.SavedArchive(
            name=target.name, size_bytes=saved.size_bytes, sha256=saved.sha256, compress=saved.compress
        )
        return sidecar.Sidecar(image=image, archive=archive, system=system, manifest=manifest)

    with engine.save_stream(connected, info.tag, report=report) as chunks:
        saved = write.save(
            chunks,
            target=target.absolute(),
            compress=compress,
            expected_bytes=info.size_bytes,
            report=report,
            describe=describe,
        )
    return dataclasses.replace(saved, path=target), describe(saved)


def _baked(
    connected: Engine, info: ImageInfo, path: str, parse: Callable[[str], Baked], report: Reporter
) -> Baked | None:
    """A file that imgkit baked into the image; None for an image that imgkit did not build."""
    from imgkit_builder import engine

    data = engine.read_file(connected, info.ref, path)
    try:
        return parse(data.decode()) if data is not None else None
    except (ValueError, TypeError, UsageError) as error:
        report.note(f"another imgkit wrote {path} in the image; the sidecar leaves it out: {error}")
        return None


def _result(saved: Saved, described: Sidecar) -> tuple[list[str], dict[str, Any]]:
    from imgkit_builder.archive import sidecar

    commands = _commands(saved.path, described.system)
    data = {
        "schema": SCHEMA,
        "image": dataclasses.asdict(described.image),
        "archive": dataclasses.asdict(described.archive) | {"path": str(saved.path)},
        "sidecars": [str(sidecar.sha256_path(saved.path)), str(sidecar.json_path(saved.path))],
        "commands": commands,
    }
    lines = [f"{saved.path}  {saved.size_bytes / 1e6:.1f} MB  sha256 {saved.sha256}"]
    if described.manifest and described.manifest.base.standin:
        lines.append("a STAND-IN without NVIDIA's software: for tests only, not for a cluster")
    where = described.system.title if described.system and described.system.title else "the cluster"
    lines.append(f"copy it:    {commands['copy']}")
    lines.append(f"on {where}:")
    steps = [commands[step] for step in ("allocate", "module", "verify", "convert")]
    lines += [f"            {command}" for command in steps if command]
    return lines, data


def _commands(path: Path, system: SystemFacts | None) -> dict[str, str]:
    """The next commands; an empty string stands for a step that is not needed."""
    from imgkit_builder.archive import sidecar

    transfer = system.transfer if system else None
    host = transfer.host if transfer and transfer.host else "CLUSTER"
    user = "" if "@" in host else "USER@"
    folder = transfer.directory if transfer else ""
    files = [str(path), str(sidecar.sha256_path(path)), str(sidecar.json_path(path))]
    # Quoted for this shell; the user replaces the words in capitals.
    copy = f"rsync -P {shlex.join(files)} {shlex.quote(f'{user}{host}:{folder}')}"
    runtime = system.runtime if system else None
    kind = runtime.kind if runtime else "singularity"
    slurm = system is not None and system.scheduler == "slurm" and system.queue.sif
    account = "-A ACCOUNT " if system is not None and "account" in system.queue.required else ""
    return {
        "copy": copy,
        "allocate": f"salloc {account}{shlex.join(system.queue.sif)}" if slurm and system else "",
        "module": module_line(system) or "",
        "verify": shlex.join(["sha256sum", "-c", sidecar.sha256_path(Path(path.name)).name]),
        "convert": {
            "singularity": shlex.join(["imgkit", "sif", path.name]),
            "pyxis": shlex.join(["imgkit", "sif", path.name, "--format", "sqsh"]),
        }.get(kind, f"docker load -i {path.name}"),
    }


def verb_verify(
    file: Path = typer.Argument(
        metavar="FILE", help="An archive (.tar, .tar.gz, .tar.zst), .sif, .sqsh or delta."
    ),
    unpack_limit: float | None = UNPACK_LIMIT,
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """Check an archive, .sif, .sqsh or delta against its recorded digests.

    Needs no Docker engine. Of an archive it checks the checksum, the one image and
    every layer's digest; of a .sif the root partition and the delta; of a .sqsh the
    checksum and its record. Exit code 1 if a check fails.

    \b
    Examples:
      imgkit verify mn5.tar
      imgkit verify mn5.sif
    """
    from imgkit_builder.base import checks
    from imgkit_builder.examine import verify

    with reporter(as_json=as_json, verbose=verbose) as report:
        results = verify.verify(file, report=report, unpack_limit_bytes=gigabytes(unpack_limit))
    show(checks.to_dict(results, file=str(file)), *checks.table(results), as_json=as_json)
    if not checks.passed(results):
        raise typer.Exit(EXIT_NO)
