"""``imgkit save`` and ``imgkit verify``: write an archive, and check an archive, .sif or .sqsh."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import typer

from imgkit_builder import engine as engines
from imgkit_builder.archive import sidecar, write
from imgkit_builder.cli.common import (
    JSON,
    UNPACK_LIMIT,
    VERBOSE,
    exit_on_sigterm,
    gigabytes_to_bytes,
    name_argument,
    output_option,
    print_result,
    show_checks,
)
from imgkit_builder.cli.progress import reporter
from imgkit_builder.examine import verify
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.workflow.names import image_name, module_line, name_stem
from imgkit_entrypoints import system as systems
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_builder.archive.sidecar import Sidecar
    from imgkit_builder.archive.write import SavedFile
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.engine import Engine, ImageInfo
    from imgkit_entrypoints.system import SystemFacts

Parsed = TypeVar("Parsed")


def verb_save(
    image: str = name_argument("RECIPE|IMAGE", "A built recipe, or a local image."),
    output: Path | None = output_option("FILE", "File to write (default: NAME.tar here)."),
    compress: Literal["none", "gzip", "zstd"] = typer.Option(
        "none", "--compression", help="zstd: a third of the size, no slower. gzip: readable anywhere."
    ),
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
    """
    with (
        exit_on_sigterm(),
        reporter(as_json=as_json, verbose=verbose) as report,
        engines.connect() as engine,
    ):
        info = engines.inspect(engine, image_name(image))
        if not info.tag:
            raise UsageError(
                f"the image {image} has no name, and its archive could not be used",
                hint=f"docker tag {image} NAME:1, then: imgkit save NAME:1",
            )
        target = output or Path(name_stem(info.tag) + write.SUFFIXES[compress])
        # This check comes before the engine prepares an export of 20 GB or so.
        write.check_target(target.absolute(), compress=compress, expected_bytes=info.size_bytes)
        make_sidecar = _read_facts_for_sidecar(engine, info, target, report)
        with engines.save_stream(engine, info.tag, report=report) as chunks:
            saved = write.save_archive(
                chunks,
                target=target.absolute(),
                compress=compress,
                expected_bytes=info.size_bytes,
                report=report,
                describe=make_sidecar,
            )
    # `save_archive` has already written this sidecar. The text for the user is made from the same values.
    facts = make_sidecar(saved)
    commands = _next_commands(target, facts.system)
    lines = [f"{target}  {saved.size_bytes / 1e6:.1f} MB  sha256 {saved.sha256}"]
    if facts.manifest and facts.manifest.base.standin:
        lines.append("a STAND-IN without NVIDIA's software: for tests only, not for a cluster")
    lines += _format_commands(commands, facts.system)
    data = {
        "image": dataclasses.asdict(facts.image),
        "archive": dataclasses.asdict(facts.archive) | {"path": target},
        "sidecars": [sidecar.sha256_path(target), sidecar.json_path(target)],
        "commands": commands,
    }
    print_result(data, *lines, as_json=as_json)


def _read_facts_for_sidecar(
    engine: Engine, info: ImageInfo, target: Path, report: Reporter
) -> Callable[[SavedFile], Sidecar]:
    """Read the facts about an image, and return a function that makes the sidecar of its archive.

    The sidecar is a file such as ``X.tar.manifest.json`` beside ``X.tar``. It describes the image and the
    archive. The facts about the image are read now, while the engine is connected. The returned function adds
    those about the archive, such as its digest, which are only known after it has been written.
    """
    system = _read_imgkit_file(engine, info, report, str(systems.SYSTEM_JSON), systems.from_json)
    manifest = _read_imgkit_file(engine, info, report, manifests.MANIFEST_JSON, manifests.from_json)
    image = sidecar.SavedImage(
        id=info.id, tag=info.tag, platform=info.platform, diff_ids=info.diff_ids, labels=dict(info.labels)
    )

    def make_sidecar(saved: SavedFile) -> Sidecar:
        archive = sidecar.SavedArchive(
            name=target.name, size_bytes=saved.size_bytes, sha256=saved.sha256, compress=saved.compress
        )
        return sidecar.Sidecar(image=image, archive=archive, system=system, manifest=manifest)

    return make_sidecar


def _read_imgkit_file(
    engine: Engine, info: ImageInfo, report: Reporter, path: str, parse: Callable[[str], Parsed]
) -> Parsed | None:
    """Read and parse the file `path`, which imgkit writes into each image that it builds.

    The result is None if there is no such file, because imgkit did not build the image. It is also None, with
    a note to the user, if `parse` raises an error. Then another version of imgkit wrote the file in a format
    that this one does not know.
    """
    data = engines.read_file(engine, info.ref, path)
    if data is None:
        return None
    try:
        return parse(data.decode())
    except (ValueError, TypeError, UsageError) as error:
        # The archive itself is complete, so the save goes on with a smaller sidecar.
        report.note(f"another imgkit wrote {path} in the image; the sidecar leaves it out: {error}")
        return None


def _next_commands(archive: Path, system: SystemFacts | None) -> dict[str, str]:
    """Return the commands that copy, verify and convert the archive, by their purpose.

    An example is ``{"copy": "rsync -P mn5.tar ...", "module": "", "verify": "sha256sum -c ...", "convert":
    "imgkit sif ..."}``. The commands contain the values of the image's system. A step that is not needed has
    the command "".
    """
    checksum_file = sidecar.sha256_path(archive)
    files = [str(archive), str(checksum_file), str(sidecar.json_path(archive))]
    module = module_line(system)
    if system is not None and system.queue.sif:  # the options of a job that converts the archive
        module = ""  # that job loads the module itself
    return {
        "copy": f"rsync -P {shlex.join(files)} {_copy_destination(system)}",
        "module": module,
        "verify": shlex.join(["sha256sum", "-c", checksum_file.name]),
        "convert": shlex.join(_conversion_argv(archive.name, system)),
    }


def _format_commands(commands: Mapping[str, str], system: SystemFacts | None) -> list[str]:
    """Return the lines that show the result of `_next_commands` to the user, without the empty commands.

    `system` is the cluster that the image is for, or None if it is unknown.
    """
    cluster = system.title if system and system.title else "the cluster"
    lines = [f"copy it:    {commands['copy']}", f"on {cluster}:"]
    for step in ("module", "verify", "convert"):
        if commands[step]:
            lines.append(f"            {commands[step]}")
    return lines


def _copy_destination(system: SystemFacts | None) -> str:
    """Return the folder on the cluster to copy an archive to, quoted for a shell, such as ``USER@CLUSTER:``.

    The user has to replace the words in capitals.
    """
    if system is None:
        return "USER@CLUSTER:"
    host = system.transfer.host or "CLUSTER"
    user = "" if "@" in host else "USER@"
    return shlex.quote(f"{user}{host}:{system.transfer.directory}")


def _conversion_argv(archive: str, system: SystemFacts | None) -> list[str]:
    """Return the command that makes the image in `archive` ready to run, such as ``imgkit sif mn5.tar``.

    The image's system (the cluster that it is for) decides about the format, and whether a job must do the
    conversion. A runtime that starts neither a .sif nor a .sqsh gets ``docker load``. The user replaces the
    word ACCOUNT, and may change the time limit of the job, 1 hour.
    """
    argv = ["imgkit", "sif", archive]
    if system is None:
        return argv
    format_options = {"singularity": [], "pyxis": ["--format", "sqsh"]}
    if system.runtime.kind not in format_options:
        return ["docker", "load", "-i", archive]
    argv += format_options[system.runtime.kind]
    # Where the login nodes may kill a conversion, the system has the options of a job that does it.
    needs_job = bool(system.queue.sif)
    if needs_job:
        argv.append("--submit")
        if "account" in system.queue.required:
            argv += ["-A", "ACCOUNT"]
        argv += ["--time", "1h"]
    return argv


def verb_verify(
    file: Path = typer.Argument(metavar="FILE", help="An archive (.tar, .tar.gz, .tar.zst), .sif or .sqsh."),
    unpack_limit: float | None = UNPACK_LIMIT,
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """Check an archive, .sif or .sqsh against its recorded digests.

    Needs no Docker engine. Of an archive it checks the checksum, the one image and
    every layer's digest; of a .sif the root partition and its record; of a .sqsh the
    checksum and its record. Exit code 1 if a check fails.

    \b
    Examples:
      imgkit verify mn5.tar
      imgkit verify mn5.sif --json
    """
    with reporter(as_json=as_json, verbose=verbose) as report:
        limit = gigabytes_to_bytes(unpack_limit)
        results = verify.verify_file(file, report=report, unpack_limit_bytes=limit)
    show_checks(results, as_json=as_json, file=str(file))
