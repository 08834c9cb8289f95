"""The build context: one normalised tar of what the recipe needs and nothing else.

Notes
-----
Names sorted, owner 0:0, one fixed time, modes 0644 or 0755 by the executable bit: neither umask nor user nor
time of checkout shows in its sha256 or invalidates a layer. Files are read from disk twice, once for the
sha256 and once while they are sent, and never held in memory.
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

# 1980-01-01: with an earlier time, a user's file could not be put into a zip or a wheel inside the image.
MTIME_S = 315532800

ALWAYS_IGNORED = frozenset({".git", "__pycache__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TarMember:
    """One entry of the tar: bytes at hand, a file on disk, a folder or a link."""

    name: str
    kind: bytes = tarfile.REGTYPE
    mode: int = 0o644
    size_bytes: int = 0
    data: bytes = b""
    source: Path | None = None
    """Where the content is read from, if not from `data`."""
    link: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What is sent to the engine; the same recipe, base and sources give the same bytes."""

    dockerfile: str
    manifest: Manifest
    members: tuple[TarMember, ...]
    sha256: str
    """Of the whole tar."""
    size_bytes: int

    def open(self) -> BinaryIO:
        """The tar as a stream, to be read to its end and closed.

        Raises
        ------
        UsageError : while it is read, when a file is no longer what `pack` saw.
        """
        return io.BufferedReader(_Stream(self._checked()), CHUNK_BYTES)

    def _checked(self) -> Iterator[bytes]:
        digest = hashlib.sha256()
        for chunk in _tar(self.members):
            digest.update(chunk)
            # The last chunk is held back on a mismatch: an unfinished tar builds nothing.
            if chunk is _END and digest.hexdigest() != self.sha256:
                raise UsageError(
                    "files of image.copy changed while they were sent",
                    hint="run the build again when nothing writes to them, or list them under `ignore`",
                )
            yield chunk


def pack(recipe: Recipe, *, base: BaseImage, platform: str, revision: str) -> BuildContext:
    """Collect what the image is built from; reads every copied file once.

    Raises
    ------
    UsageError : a source that is missing, unreadable, or neither file, folder nor link inside itself.
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
        *_requirements(recipe),
    ]
    if recipe.image.copy:
        members.append(_folder("copy"))
    for number, step in enumerate(recipe.image.copy):
        members += _copied(step, layers.copy_member(number), recipe.where("image", "copy", number))
    # By bytes: the order of text depends on how a name that is no UTF-8 was decoded.
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
    """git commit of `folder`, with ``-dirty`` where it differs; empty where git does not track it."""
    git = ("git", "--no-optional-locks", "-C", folder)
    try:
        head = process.run([*git, "rev-parse", "--verify", "HEAD"], check=False)
        tracked = process.run([*git, "ls-files", "--", "."], check=False)
        changed = process.run([*git, "status", "--porcelain", "--", "."], check=False)
    except ToolMissing:
        return ""
    commit = re.search(r"^[0-9a-f]{40,64}$", head.output, re.MULTILINE)
    # Untracked files inside some repository, for example a virtual environment's, are not of its commit.
    if head.returncode or commit is None or not tracked.output:
        return ""
    return commit.group() + ("-dirty" if changed.output else "")


def _bytes(name: str, data: bytes) -> TarMember:
    return TarMember(name=name, data=data, size_bytes=len(data))


def _folder(name: str) -> TarMember:
    return TarMember(name=name, kind=tarfile.DIRTYPE, mode=0o755)


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
                    hint="write its lines here; install your own code by image.copy and image.run",
                )
        yield _bytes(layers.requirements_member(number), data)


def _copied(step: CopyStep, prefix: str, where: str) -> Iterator[TarMember]:
    """What one copy step takes from disk: the content of a folder, or one file under its name."""
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
    """Everything in `folder`; `below` is its path below the source, empty or with a slash at its end."""
    with _readable(folder), os.scandir(folder) as scan:
        entries = list(scan)
    for entry in entries:
        is_folder = entry.is_dir(follow_symlinks=False)
        # With its slash a folder matches patterns such as "data/"; as in git, nothing below comes back in.
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
    # Judged by where it really leads: "a/../x" leaves the folder if a is itself a link to somewhere deeper.
    inside = not target.is_absolute() and Path(os.path.realpath(path)).is_relative_to(root)
    if not inside:
        raise UsageError(
            f"a link out of the copied folder, to {target}",
            where=str(path),
            hint=f"make it a relative link to something inside {root}, copy what it names, or "
            + _ignore_hint(path),
        )
    return TarMember(name=name, kind=tarfile.SYMTYPE, mode=0o777, link=str(target))


def _matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether a path below the source matches `patterns` by gitignore's rules."""
    if not patterns:
        return lambda path: False
    import pathspec

    return pathspec.GitIgnoreSpec.from_lines(patterns).match_file


@contextlib.contextmanager
def _readable(path: Path, where: str = "", otherwise: str = "") -> Iterator[None]:
    """Turn an OSError inside the block into the error that names `path`."""
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
    """The archive, a chunk at a time; its end is the object `_END`."""
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
    # GNU's form, not pax: it holds names that are no UTF-8 as they are, and any size.
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _content(member: TarMember) -> Iterator[bytes]:
    if member.source is None:
        yield member.data
        return
    left = member.size_bytes
    with _readable(member.source), member.source.open("rb", buffering=0) as stream:
        # One byte more than is left shows a file that grew.
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
        hint=f"run the build again when nothing writes to it, or {_ignore_hint(path)}",
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
        # The generator has a file open; closing it closes that.
        if not self.closed:
            close = getattr(self._chunks, "close", None)
            if close:
                close()
        super().close()
