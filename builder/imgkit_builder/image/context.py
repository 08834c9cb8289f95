"""The build context: one normalised tar of exactly the files that the recipe needs.

Notes
-----
Names are sorted, the owner is 0:0, the time is fixed, and modes are 0644 or 0755 by the executable bit. So
umask, user and time of checkout neither change the sha256 nor invalidate a layer. Files are read from disk
twice, once for the sha256 and once while they are sent, and never kept in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from imgkit_builder import __version__
from imgkit_builder.base import process
from imgkit_builder.image import layers, render
from imgkit_builder.image import manifest as manifests
from imgkit_builder.image.manifest import BaseImage, Manifest
from imgkit_builder.image.wheel import entrypoints_wheel
from imgkit_builder.recipe.model import CopyStep, Recipe
from imgkit_builder.recipe.requirements import names_other_file
from imgkit_entrypoints import system
from imgkit_entrypoints.errors import ImgkitError, ToolMissing, UsageError

CHUNK_BYTES = 1 << 20

# 1980-01-01: zip files and wheels, which a user may make inside the image, hold no earlier time.
MTIME_S = 315532800

ALWAYS_IGNORED = frozenset({".git", "__pycache__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TarMember:
    """One member of the tar: bytes in memory, a file on disk, a folder or a link."""

    name: str
    kind: bytes = tarfile.REGTYPE
    mode: int = 0o644
    size_bytes: int = 0
    data: bytes = b""
    source: Path | None = None
    """The file with the content; None: `data` is the content."""
    link: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """The input of a build; the same recipe, base and sources give the same bytes."""

    dockerfile: str
    manifest: Manifest
    members: tuple[TarMember, ...]
    sha256: str
    """Digest of the whole tar."""
    size_bytes: int

    def open(self) -> BinaryIO:
        """Open the tar as a stream; read it to its end, then close it.

        Raises
        ------
        UsageError : while reading, if a file differs from what `pack` saw.
        """
        return io.BufferedReader(_Stream(self._checked()), CHUNK_BYTES)

    def _checked(self) -> Iterator[bytes]:
        digest = hashlib.sha256()
        for chunk in _tar(self.members):
            digest.update(chunk)
            # After a mismatch the last chunk is not sent: the engine builds nothing from an unfinished tar.
            if chunk is _END and digest.hexdigest() != self.sha256:
                raise UsageError(
                    "files of image.copy changed while they were sent",
                    hint="build again when no program writes to them, or list them under `ignore`",
                )
            yield chunk


def pack(recipe: Recipe, *, base: BaseImage, platform: str, revision: str) -> BuildContext:
    """Collect the input of a build; reads every copied file once.

    Raises
    ------
    UsageError : a source is missing, unreadable, or more than files, folders and links inside itself.
    """
    dockerfile = render.dockerfile(recipe, base=base.name, platform=platform)
    wheel = entrypoints_wheel()
    manifest = Manifest(
        imgkit=__version__,
        recipe=recipe.name,
        recipe_sha256=recipe.sha256,
        base=base,
        platform=platform,
        wheel_sha256=wheel.sha256,
        revision=revision,
    )
    members = [
        _bytes("Dockerfile", dockerfile.encode()),
        _folder("imgkit"),
        _bytes(f"imgkit/{wheel.name}", wheel.data),
        _bytes("imgkit/system.json", system.to_json(recipe.system).encode()),
        _bytes("imgkit/manifest.json", manifests.to_json(manifest).encode()),
        *_certificates(recipe),
        *_requirements(recipe),
    ]
    if recipe.image.copy:
        members.append(_folder("copy"))
    for number, step in enumerate(recipe.image.copy):
        members += _copied(step, layers.copy_member(number), recipe.where("image", "copy", number))
    # By bytes: the order of text depends on how a name outside UTF-8 was decoded.
    members.sort(key=lambda member: os.fsencode(member.name))
    digest, size_bytes = hashlib.sha256(), 0
    for chunk in _tar(members):
        digest.update(chunk)
        size_bytes += len(chunk)
    return BuildContext(
        dockerfile=dockerfile,
        manifest=manifest,
        members=tuple(members),
        sha256=digest.hexdigest(),
        size_bytes=size_bytes,
    )


def revision(folder: Path) -> str:
    """The git commit of `folder`, with ``-dirty`` after changes; empty where git does not track it."""
    git = ("git", "--no-optional-locks", "-C", folder)
    try:
        head = process.run([*git, "rev-parse", "--verify", "HEAD"], check=False)
        tracked = process.run([*git, "ls-files", "--", "."], check=False)
        changed = process.run([*git, "status", "--porcelain", "--", "."], check=False)
    except ToolMissing:
        return ""
    commit = re.search(r"^[0-9a-f]{40,64}$", head.output, re.MULTILINE)
    # A folder that is untracked inside a repository, for example in a virtual environment, has no commit.
    if head.returncode or commit is None or not tracked.output:
        return ""
    return commit.group() + ("-dirty" if changed.output else "")


def _bytes(name: str, data: bytes) -> TarMember:
    return TarMember(name=name, data=data, size_bytes=len(data))


def _folder(name: str) -> TarMember:
    return TarMember(name=name, kind=tarfile.DIRTYPE, mode=0o755)


def _certificates(recipe: Recipe) -> Iterator[TarMember]:
    for number, file in enumerate(recipe.image.ca):
        with _readable(file, recipe.where("image", "ca", number), "name another file"):
            # A file without a last line end would spoil the bundle.
            yield _bytes(layers.certificate_member(number), file.read_bytes().rstrip() + b"\n")


def _requirements(recipe: Recipe) -> Iterator[TarMember]:
    for number, step in enumerate(recipe.image.pip):
        if step.requirements is None:
            continue
        stated = recipe.where("image", "pip", number, "requirements")
        with _readable(step.requirements, stated, "name another file"):
            data = step.requirements.read_bytes()
        for line, text in enumerate(data.decode(errors="replace").splitlines(), 1):
            # A recipe's check refuses this too; the file may have changed since.
            if names_other_file(text):
                raise UsageError(
                    f"a requirements file names another file: {text.strip()}",
                    where=f"{step.requirements}:{line}",
                    hint="copy its lines here; install your own code with image.copy and image.run",
                )
        yield _bytes(layers.requirements_member(number), data)


def _copied(step: CopyStep, prefix: str, where: str) -> Iterator[TarMember]:
    """The files of one copy step: the content of a folder, or one file under its name."""
    yield _folder(prefix)
    with _readable(step.source, where, "name another source"):
        is_folder = stat.S_ISDIR(step.source.stat().st_mode)
    if is_folder:
        yield from _walk(step.source, prefix, "", root=step.source.resolve(), ignored=_matcher(step.ignore))
    else:
        yield _entry(step.source, f"{prefix}/{step.source.name}", step.source.stat())


def _walk(
    folder: Path, prefix: str, below: str, *, root: Path, ignored: Callable[[str], bool]
) -> Iterator[TarMember]:
    """Everything in `folder`; `below` is its path relative to the source, empty or with a final slash."""
    with _readable(folder), os.scandir(folder) as scan:
        entries = list(scan)
    for entry in entries:
        is_folder = entry.is_dir(follow_symlinks=False)
        # The slash lets a folder match patterns such as "data/"; as in git, this excludes everything below.
        if entry.name in ALWAYS_IGNORED or ignored(f"{below}{entry.name}{'/' if is_folder else ''}"):
            continue
        path, name = Path(entry.path), f"{prefix}/{below}{entry.name}"
        if is_folder:
            yield _folder(name)
            yield from _walk(path, prefix, f"{below}{entry.name}/", root=root, ignored=ignored)
        elif entry.is_symlink():
            yield _link(path, name, root)
        else:
            with _readable(path):
                status = path.lstat()
            yield _entry(path, name, status)


def _entry(path: Path, name: str, status: os.stat_result) -> TarMember:
    if not stat.S_ISREG(status.st_mode):
        raise UsageError("not a file, folder or link", where=str(path), hint=_ignore_hint(path))
    return TarMember(
        name=name,
        mode=0o755 if status.st_mode & stat.S_IXUSR else 0o644,
        size_bytes=status.st_size,
        source=path,
    )


def _link(path: Path, name: str, root: Path) -> TarMember:
    target = path.readlink()
    # The resolved target counts: "a/../x" leaves the folder if a is itself a link to a deeper folder.
    inside = not target.is_absolute() and Path(os.path.realpath(path)).is_relative_to(root)
    if not inside:
        raise UsageError(
            f"a link out of the copied folder, to {target}",
            where=str(path),
            hint=f"make it a relative link inside {root}, replace it by a copy, or " + _ignore_hint(path),
        )
    return TarMember(name=name, kind=tarfile.SYMTYPE, mode=0o777, link=str(target))


def _matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """A function that matches paths below the source with `patterns`, as gitignore does."""
    if not patterns:
        return lambda path: False
    import pathspec

    return pathspec.GitIgnoreSpec.from_lines(patterns).match_file


@contextlib.contextmanager
def _readable(path: Path, where: str = "", otherwise: str = "") -> Iterator[None]:
    """Turn an OSError inside the block into an error that names `path`."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read: {error.strerror}",
            where=where or None,
            hint=otherwise or f"chmod u+rX it, or {_ignore_hint(path)}",
        ) from error


def _ignore_hint(path: Path) -> str:
    return f"add {path.name!r} to this copy's `ignore`"


def _tar(members: list[TarMember] | tuple[TarMember, ...]) -> Iterator[bytes]:
    """The archive in chunks; the last chunk is the object `_END`."""
    for member in members:
        yield _header(member)
        yield from _content(member)
        yield bytes(-member.size_bytes % tarfile.BLOCKSIZE)
    yield _END


_END = bytes(2 * tarfile.BLOCKSIZE)


def _header(member: TarMember) -> bytes:
    info = tarfile.TarInfo(member.name)
    info.type, info.mode, info.linkname = member.kind, member.mode, member.link
    info.size, info.mtime = member.size_bytes, MTIME_S
    # GNU's format, not pax: it keeps names outside UTF-8 unchanged and allows any size.
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _content(member: TarMember) -> Iterator[bytes]:
    if member.source is None:
        yield member.data
        return
    left = member.size_bytes
    with _readable(member.source), member.source.open("rb", buffering=0) as stream:
        # Reading one byte more than expected detects a file that grew.
        while chunk := stream.read(min(CHUNK_BYTES, left + 1)):
            left -= len(chunk)
            if left < 0:
                raise _changed(member.source, "grew")
            yield chunk
    if left:
        raise _changed(member.source, "shrank")


def _changed(path: Path, how: str) -> ImgkitError:
    return UsageError(
        f"{path} {how} while it was read",
        hint=f"build again when no program writes to it, or {_ignore_hint(path)}",
    )


class _Stream(io.RawIOBase):
    """A readable file over chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._left:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left = memoryview(chunk)
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def close(self) -> None:
        # The generator may have a file open; closing the generator closes the file.
        if not self.closed:
            close = getattr(self._chunks, "close", None)
            if close:
                close()
        super().close()
