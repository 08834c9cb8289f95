"""Read files from a .sif or .sqsh with the program unsquashfs."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import process
from imgkit_builder.sif import image, mksquashfs, sqsh, squash
from imgkit_builder.sif.baked_facts import BAKED_FILES, BakedFacts, BakedFactsCollector
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import CheckFailed, ToolMissing

MOST_BYTES = 64 << 20
"""Size of the largest file that is read as a whole."""
_WILDCARD = re.compile(r"[*?\[\]\\]")
# A line such as "-rwxr-xr-x 0/0   123 2024-03-01 12:00 /usr/bin/a". A device has "10, 200" in place of the
# size.
_LISTED_FILE = re.compile(
    r"(?P<mode>[-dlcbps]\S{9}) (?P<uid>\d+)/(?P<gid>\d+) +(?P<size>\d+(?:, *\d+)?) \S+ \S+ /(?P<path>.*)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFile:
    """A file in the output of ``unsquashfs -lln``. A file whose name has a line break is not listed."""

    path: str
    """Relative path. For a symlink, `` -> `` and the target follow."""
    mode: str
    """Type and permissions as ``ls -l`` prints them: ``-rwxr-xr-x``."""
    uid: int
    gid: int
    size: str
    """Size of a file in bytes, or ``MAJOR,MINOR`` of a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Squashfs:
    """A squashfs at byte `offset` of a file."""

    path: Path
    offset: int = 0

    def list_files(self, *patterns: str) -> Iterator[ListedFile]:
        """Yield the files that match one of `patterns`, such as ``opt/*.json``, and the files below them.

        Without patterns, yield all files.

        Raises
        ------
        ToolMissing : there is no unsquashfs, or it cannot unpack this compression.
        ToolFailed : the squashfs is damaged.
        """
        output = process.filter_through(self._argv("-lln", "-dest", "", str(self.path), *patterns), ())
        for line in process.split_lines(output):
            match = _LISTED_FILE.fullmatch(os.fsdecode(line))
            if match is None:  # the header, or a message of unsquashfs about devices
                continue
            yield ListedFile(
                path=match["path"],
                mode=match["mode"],
                uid=int(match["uid"]),
                gid=int(match["gid"]),
                size=match["size"].replace(" ", ""),
            )

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the content of the regular files `names`, as a dict from name to content.

        Files that are missing, or larger than `MOST_BYTES`, are left out.

        Raises
        ------
        CheckFailed : the squashfs is damaged.
        ToolMissing : there is no unsquashfs, or it cannot unpack this compression.
        """
        # unsquashfs reads a file with one pattern per line, so a name with a line break cannot be selected.
        names = [name for name in names if "\n" not in name]
        # Escape wildcards: unsquashfs would take a name like "a[1].json" for a pattern.
        patterns = [_WILDCARD.sub(r"\\\g<0>", name) + "\n" for name in names]
        contents = {}
        with tempfile.TemporaryDirectory(prefix="imgkit-") as scratch:
            # `_read_small_file` compares real paths, and the folder for temporary files may be a link.
            folder = Path(os.path.realpath(scratch))
            pattern_file = folder / "names"
            with files.create_file(pattern_file) as stream:
                stream.write(os.fsencode("".join(patterns)))
            unpacked = folder / "files"
            self.unpack(unpacked, "-ef", str(pattern_file))
            for name in names:
                content = _read_small_file(unpacked, name)
                if content is not None:
                    contents[name] = content
        return contents

    def unpack(self, folder: Path, *options: str) -> None:
        """Unpack files to `folder`. The `options` of unsquashfs may select files; the default is all files.

        The unpacked files belong to this user. Devices are left out, because only root can create them.

        Raises
        ------
        CheckFailed : the squashfs is damaged.
        ToolMissing : there is no unsquashfs, or it cannot unpack this compression.
        """
        argv = self._argv("-force", "-no-xattrs", "-dest", str(folder), *options, str(self.path))
        result = process.run(argv, check=False)
        if "unsupported by this version" in result.output:
            raise ToolMissing(result.tail(), where=str(self.path), hint="a newer squashfs-tools")
        # unsquashfs exits with 2 if it could not create a device, which is not an error here.
        if result.returncode not in (0, 2):
            raise CheckFailed(
                f"unsquashfs cannot read it: {result.tail()}", where=str(self.path), hint="copy it again"
            )

    def _argv(self, *arguments: str) -> list[str]:
        argv = [_find_unsquashfs(), "-no-progress"]
        if self.offset:
            argv += ["-offset", str(self.offset)]
        return [*argv, *arguments]


def _read_small_file(root: Path, name: str) -> bytes | None:
    """Return the content of the regular file `name` below `root`, or None if it is missing or too large.

    `root` is a temporary folder with unpacked files. It must be an absolute path without links.
    """
    path = root / name
    # A link in the image could lead to any file of this machine, such as a private key. So a path with a link
    # in it is not read.
    has_link = os.path.realpath(path) != f"{root}/{name}"
    if has_link or not path.is_file():
        return None
    # An image has files that only root may read. This is a copy of the file, which belongs to this user.
    path.chmod(0o600)
    with files.open_regular(path) as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        return None
    return content


def _find_unsquashfs() -> str:
    """Return the path of unsquashfs 4.4 or later.

    Earlier versions cannot read a squashfs that begins in the middle of a file, as in a .sif.

    Raises
    ------
    ToolMissing : this machine has no such unsquashfs.
    """
    # The package of mksquashfs also contains unsquashfs, so it may be in the same folder.
    candidates = ["unsquashfs"]
    candidates += [str(program.with_name("unsquashfs")) for program in mksquashfs.find_programs()]
    for candidate in candidates:
        program = shutil.which(candidate)
        if program is not None and mksquashfs.has_option(Path(program), r"-o\[ffset\]"):
            return program
    raise ToolMissing("unsquashfs 4.4 or later is not on this machine", hint=squash.INSTALL)


def open_squashfs(path: Path) -> tuple[Squashfs, ...]:
    """Return the squashfs images in a .sif or .sqsh, in the order in which a runtime stacks them, top first.

    A .sqsh is a single squashfs. A .sif has a root partition and may have overlays. The files of an overlay
    hide those of the same names below it.

    Raises
    ------
    CheckFailed : the file is neither a .sif nor a .sqsh, or it has no root partition.
    """
    if sqsh.is_sqsh(path):
        return (Squashfs(path=path),)
    sif = image.read(path)
    partitions = (sif.require_root(), *sif.overlays)
    return tuple(Squashfs(path=path, offset=partition.offset) for partition in reversed(partitions))


def read(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the content of the files `names` in the .sif or .sqsh `path`. Missing files are left out.

    Raises
    ------
    CheckFailed : the squashfs is damaged.
    ToolMissing : there is no unsquashfs, or it cannot unpack this compression.
    """
    names = tuple(names)  # an iterator could be used only for the first squashfs
    contents: dict[str, bytes] = {}
    # `open_squashfs` returns the top first. Read from the bottom to the top, so that a file of an overlay (a
    # second squashfs that is mounted over the image) replaces the file below it.
    for squashfs in reversed(open_squashfs(path)):
        contents |= squashfs.read(names)
    return contents


def baked_facts(path: Path) -> BakedFacts:
    """Return the facts that imgkit and pip recorded in the image of a .sif or .sqsh.

    If imgkit wrote the file, the record at its end contains these facts. Otherwise the function reads the two
    files that imgkit adds to images with unsquashfs. Then the Python packages remain unknown.

    Raises
    ------
    CheckFailed : the record or the squashfs is damaged.
    ToolMissing : another program wrote the file, and there is no unsquashfs for its compression.
    """
    record = image.read(path).record if image.is_sif(path) else sqsh.read_record(path)
    if record is not None and record.facts is not None:
        return record.facts
    collector = BakedFactsCollector()
    for name, data in read(path, BAKED_FILES).items():
        collector.add(name, data)
    facts = collector.facts(path="")  # the value of PATH is used only to find packages
    # The collector has seen no package, but the image may have some: None says "unknown", not "none".
    return dataclasses.replace(facts, distributions=None)
