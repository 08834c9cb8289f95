"""Let the runtime build the .sif: for registries, and where no mksquashfs reads a tar."""

from __future__ import annotations

import contextlib
from pathlib import Path

from imgkit_builder.archive import oci_folder
from imgkit_builder.archive.oci_folder import Laid
from imgkit_builder.sif import check, compression, limits, links
from imgkit_builder.sif.compression import Compression
from imgkit_builder.sif.conversion_job import ConversionJob, cache_flags, folder_name
from imgkit_builder.sif.options import Archive, EngineImage, OciFolder, Piped, Registry, Source, name_of
from imgkit_builder.sif.runtime import RuntimeTool
from imgkit_entrypoints.errors import ToolFailed

_LOCAL_REGISTRIES = ("localhost", "127.0.0.1", "[::1]")


def lay_out(source: Archive | OciFolder | EngineImage | Piped, job: ConversionJob) -> Laid:
    """Write an OCI folder into the workspace, under the name of the image."""
    folder, clock, limit = job.work.folder / "layout", job.clock, job.options.unpack_limit_bytes
    if isinstance(source, Archive):
        clock.stage(f"read {source.path.name}")
        laid = oci_folder.from_archive(source.path, folder, clock, unpack_limit_bytes=limit)
    elif isinstance(source, Piped):
        clock.stage("read standard input")
        with contextlib.closing(source.chunks()) as plain:
            laid = oci_folder.from_chunks(plain, folder, name="standard input", report=clock)
    elif isinstance(source, OciFolder):
        clock.stage(f"read {source.path.name}")
        laid = oci_folder.from_folder(source.path, folder, clock, unpack_limit_bytes=limit)
    else:
        clock.stage(f"save {source.name} from the engine")
        with source.save() as chunks:
            laid = oci_folder.from_chunks(
                chunks, folder, name=source.name, report=clock, expected_bytes=source.size_bytes
            )
    name = name_of(source, laid.names)
    layers = (laid.folder / "blobs/sha256" / one.removeprefix("sha256:") for one in laid.config.diff_ids)
    links.check(layers, where=name)
    folder.rename(job.work.folder / folder_name(name))
    return laid


def words(tool: RuntimeTool, packing: Compression, part: Path, source: tuple[str, ...]) -> tuple[str, ...]:
    """Arguments of the runtime; the last word of `source` is the image, the others are options."""
    options = list(cache_flags(tool))
    if packing.options:
        options += ["--mksquashfs-args", compression.arguments_for_runtime(packing, limits.gather())]
    return ("build", "--force", *options, *source[:-1], str(part), source[-1])


def build(job: ConversionJob, tool: RuntimeTool, source: tuple[str, ...]) -> None:
    """``singularity build`` into the part file.

    Raises
    ------
    ToolFailed : it failed, or made an empty image.
    """
    job.clock.stage(f"build with {tool}")
    output = job.run(*words(tool, job.compression, job.work.part, source))
    if check.EMPTY_IMAGE in output:
        raise ToolFailed(
            f"{tool} did not read the layers: it found no programs in the image ({check.EMPTY_IMAGE!r})",
            hint=f"another version of it, or --from daemon on the build host; the full log: {job.log.name}",
        )
    if not job.work.part.exists():
        raise ToolFailed(f"{tool} succeeded but wrote no file", hint=f"the full log: {job.log.name}")


def source_words(tool: RuntimeTool, source: Source, name: str = "IMAGE") -> tuple[str, ...]:
    """Where the runtime finds the image: the laid out folder, or a registry."""
    if not isinstance(source, Registry):
        return (f"oci:{folder_name(name)}",)
    host = source.reference.split("/", 1)[0].rsplit(":", 1)[0]
    plain = host in _LOCAL_REGISTRIES and tool.capabilities.no_https
    return (*(("--no-https",) if plain else ()), f"docker://{source.reference}")
