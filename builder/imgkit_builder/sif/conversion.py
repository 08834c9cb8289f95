"""The classes that describe a conversion: its options, compression, format, result, and the running job.

Every step of `convert.convert` gets the same `ConversionJob`.
"""

from __future__ import annotations

import abc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TextIO

from imgkit_builder.base.flags import option_field
from imgkit_builder.base.progress import Reporter
from imgkit_builder.oci.config import ImageConfig
from imgkit_builder.sif.entries import ImageEntry
from imgkit_builder.sif.image import Advance, ImgkitRecord
from imgkit_builder.sif.mksquashfs import Limits
from imgkit_builder.sif.runtime import Capabilities, RuntimeTool, find_runtime, run, scratch_env
from imgkit_builder.sif.workspace import Workspace
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import CompressionChoice

WriterChoice = Literal["auto", "imgkit", "runtime"]
FormatName = Literal["sif", "sqsh"]
"""What is written: a .sif, or the .sqsh that enroot, pyxis and ch-run start."""


class AddedFiles(NamedTuple):
    """Files that imgkit adds to an image during a conversion."""

    replacing: tuple[ImageEntry, ...]
    """Files that replace the image's own."""
    if_missing: tuple[ImageEntry, ...]
    """Files that an image gets only if it has nothing at their paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to convert. Most fields are options of ``imgkit sif``."""

    module_hint: str | None = None
    """The line that provides the runtime on the system."""
    format: FormatName = "sif"
    unpack_limit_bytes: int | None = None
    """Most bytes that an archive may unpack to; None: 100 times its size, and at least 1 GB."""
    writer: WriterChoice = option_field(
        "auto",
        help="imgkit: write the file with mksquashfs. runtime: let Singularity or Apptainer build it from "
        "the layers, through spython. auto: imgkit if mksquashfs is available, else runtime; prints which.",
    )
    compression: CompressionChoice = option_field(
        "auto",
        help="auto: runtime.compression of the system, if it states one; else gzip in a .sqsh, and in a "
        ".sif zstd if this machine can write and mount it, else gzip.",
    )
    tmpdir: Path | None = option_field(
        None,
        metavar="DIR",
        help="Folder for temporary files (default: $IMGKIT_TMPDIR, $APPTAINER_TMPDIR, $SINGULARITY_TMPDIR, "
        "$TMPDIR, else next to the file).",
    )
    force: bool = option_field(
        False, help="Convert even if the file is up to date; overwrite a file of another format."
    )
    runtime: str | None = option_field(
        None,
        "--runtime-command",
        metavar="COMMAND",
        help="Name or path of the runtime (default: singularity, else apptainer).",
    )
    test: bool = option_field(True, "--no-test", help="Do not test the result by running it.")


class Format(abc.ABC):
    """The steps of a conversion that differ between a .sif and a .sqsh. Both contain one squashfs."""

    name: FormatName
    default_compression: CompressionChoice = "auto"
    is_started_here = False
    """Whether a runtime on this machine may start the new file as a test."""
    has_checksum = False
    """Whether a checksum file is written next to the new file."""

    @abc.abstractmethod
    def matches(self, path: Path) -> bool:
        """Return whether the file is of this format. Return False if it cannot be read."""

    @abc.abstractmethod
    def added_files(self, config: ImageConfig, note: Callable[[str], None]) -> AddedFiles:
        """Return the files that imgkit adds to an image, such as the scripts that a runtime expects.

        `note` receives a sentence for the user about each variable that the format cannot hold.

        Raises
        ------
        UsageError : the format cannot hold a value of the configuration.
        """

    def filter_entries(
        self, entries: Iterator[ImageEntry], note: Callable[[str], None]
    ) -> Iterator[ImageEntry]:
        """Return the `entries` that the format can hold. `note` receives a sentence about the others."""
        return entries

    def squashfs_offset(self, config: ImageConfig) -> int:
        """Return the byte of the file at which the squashfs begins."""
        return 0

    @abc.abstractmethod
    def complete(self, path: Path, config: ImageConfig) -> None:
        """Write the headers of the format around the squashfs in the file `path`, and check the result.

        imgkit's record is added later, by `put_record`.

        Raises
        ------
        CheckFailed : the squashfs is incomplete.
        """

    @abc.abstractmethod
    def put_record(self, path: Path, record: ImgkitRecord, advance: Advance) -> tuple[ImgkitRecord, str]:
        """Add `record` to the file `path`, together with the digest of the squashfs in the file.

        Returns
        -------
        The record with the digest, and the sha256 of the whole file. The sha256 is ``""`` if the format has
        no checksum file.
        """

    @abc.abstractmethod
    def intact_record(
        self, path: Path, config: ImageConfig, accepts: Callable[[ImgkitRecord], bool]
    ) -> ImgkitRecord | None:
        """Return the record of the existing file `path` if it need not be written again, else None.

        The file is kept if it is undamaged and `accepts` is true for its record.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One finished stage of a conversion, and how long it took."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The result of a conversion: a complete and checked .sif or .sqsh."""

    path: Path
    format: FormatName = "sif"
    size_bytes: int
    arch: str
    record: ImgkitRecord
    up_to_date: bool
    """Whether the existing file was kept, because image, runtime and compression are the same."""
    stages: tuple[Stage, ...]
    log: Path | None


class Clock:
    """A reporter that forwards everything to another reporter, and measures the duration of each stage."""

    def __init__(self, report: Reporter) -> None:
        self.stages: list[Stage] = []
        self.advance = report.advance
        self.line = report.line
        self.note = report.note
        self._report = report
        self._name = ""
        self._start_s = 0.0

    def stage(self, text: str) -> None:
        """Begin a new stage. The stage before it ends."""
        self.finish()
        self._name = text
        self._start_s = time.monotonic()
        self._report.stage(text)

    def finish(self) -> None:
        """End the current stage, if there is one, and record its duration."""
        if self._name:
            seconds = time.monotonic() - self._start_s
            self.stages.append(Stage(name=self._name, seconds=seconds))
        self._name = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """How a squashfs is compressed."""

    name: str
    """``zstd``, ``gzip``, or ``runtime`` for a runtime that accepts no options and uses its configuration."""
    level: int = 0
    options: tuple[str, ...] = ()
    """Options of mksquashfs."""
    note: str = ""
    """A sentence for the user."""

    def __str__(self) -> str:
        return f"{self.name} {self.level}" if self.level else self.name

    def runtime_options(self, limits: Limits) -> tuple[str, ...]:
        """Return the options of a runtime's ``build`` that pass compression and `limits` to mksquashfs."""
        if not self.options:
            return ()
        mksquashfs_args = self.options + limits.mksquashfs_options()
        return ("--mksquashfs-args", " ".join(mksquashfs_args))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionJob:
    """A running conversion: its options, temporary files, progress display and log."""

    tool: RuntimeTool | None
    """The container runtime, or None if no step so far needed one. Then `run` looks for one."""
    options: Options
    compression: Compression
    work: Workspace
    clock: Clock
    log: TextIO

    def run(
        self,
        *arguments: str | Path,
        folder: Path | None = None,
        on_line: Callable[[str], None] | None = None,
        namespace: bool = False,
    ) -> str:
        """Run the runtime with `arguments`, and return its output. Its temporary files go to the workspace.

        Parameters
        ----------
        folder : working folder of the runtime. None means the temporary folder.
        on_line : receives each line of the output. If None, the lines are shown to the user.
        namespace : run the runtime in a user namespace, as described in `runtime.run`.
        """
        tool = self.tool or find_runtime(self.options.runtime, module_hint=self.options.module_hint)
        args = [str(argument) for argument in arguments]
        self.log.write(f"$ {tool.path} {' '.join(args)}\n")
        finished = run(
            tool,
            args,
            folder=folder or self.work.folder,
            env=scratch_env(self.work.folder),
            on_line=on_line or self.clock.line,
            log=self.log,
            namespace=namespace,
        )
        return finished.output


# Measured CPU time and size for packing a torch folder of 754 MB:
#   gzip 9 (the runtimes' default)   50 s    196 MB
#   gzip 6                           18 s    197 MB
#   zstd 3                           2.9 s   198 MB
#   zstd 15 (its default level)      57 s    171 MB
# A program that starts reads many small pieces, and for each piece a whole block is decompressed.
# `import torch` takes 3.6 CPU seconds with blocks of 1 MiB (228 MB), 2.8 with 256 KiB (239 MB), and 2.7 with
# 128 KiB (251 MB).
ZSTD = Compression(name="zstd", level=3, options=("-comp", "zstd", "-Xcompression-level", "3", "-b", "256K"))
GZIP = Compression(name="gzip", level=6, options=("-comp", "gzip", "-Xcompression-level", "6"))


def choose_compression(
    capabilities: Capabilities | None, requested: CompressionChoice, *, zstd_error: str
) -> Compression:
    """Return the compression for a new file: the requested one, or else zstd if possible, or else gzip.

    zstd is possible if this machine can write it and mount it.

    Parameters
    ----------
    capabilities : options of the runtime that builds the file, or None if imgkit runs mksquashfs.
    zstd_error : why mksquashfs cannot compress with zstd, or ``""`` if it can.

    Raises
    ------
    UsageError : zstd was requested and is not possible.
    """
    # Without the option --mksquashfs-args, a runtime does not accept a compression.
    if capabilities is not None and not capabilities.mksquashfs_args:
        return _choose_by_runtime(requested)
    if requested == "gzip":
        return GZIP
    zstd_problem = zstd_error
    if not kernel_reads_zstd():  # this is reported first: another mksquashfs would not help
        zstd_problem = f"this kernel ({os.uname().release}) cannot mount zstd squashfs; 4.14 can"
    if not zstd_problem:
        return ZSTD
    if requested == "zstd":
        raise UsageError(zstd_problem, where="--compression zstd", hint="--compression gzip")
    return GZIP  # "auto"


def _choose_by_runtime(requested: CompressionChoice) -> Compression:
    """Return the compression for a runtime that accepts no options and uses its own configuration.

    Raises
    ------
    UsageError : zstd was requested, but such a runtime has no option for it.
    """
    if requested == "zstd":
        raise UsageError(
            "this runtime has no --mksquashfs-args (Apptainer from 1.4 has it), so it cannot use zstd",
            where="--compression zstd",
            hint="leave --compression out, or install mksquashfs and use --writer imgkit",
        )
    return Compression(
        name="runtime",
        note="this runtime compresses as it is configured (gzip 9 by default: slow), a thread for each "
        "processor of the node; an admin sets `mksquashfs procs` and `mksquashfs mem` in its conf file",
    )


def kernel_reads_zstd(release: str | None = None) -> bool:
    """Return whether this kernel can mount a zstd squashfs, which needs Linux 4.14.

    `release` replaces the version of the running kernel. If the version cannot be parsed, the result is True.
    """
    try:
        major, minor, *_ = (release or os.uname().release).split(".")
        return (int(major), int(minor)) >= (4, 14)
    except ValueError:  # not two numbers
        return True
