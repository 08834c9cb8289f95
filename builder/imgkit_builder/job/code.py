"""Which files of a folder go to the nodes as code (``--code``), and what the run's record says of them."""

from __future__ import annotations

import collections
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import process
from imgkit_builder.base.progress import Reporter
from imgkit_builder.base.sizes import size_text
from imgkit_builder.delta import code as code_delta
from imgkit_builder.delta.code import CodeFile, CodeTree
from imgkit_builder.image.context import LargeContext
from imgkit_builder.job.request import CodeRecord, Request
from imgkit_builder.recipe import sources
from imgkit_entrypoints.errors import ToolFailed, ToolMissing, UsageError

LARGE_BYTES = 100 * 10**6
"""More code goes only where the user agrees: often it is data that was not meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFolder:
    """The code of a run, which has been read once."""

    folder: Path
    tree: CodeTree
    record: CodeRecord

    @property
    def name(self) -> str:
        """The name of its delta."""
        return code_delta.name_of(self.record.sha256)


def read(request: Request, *, large: bool, report: Reporter) -> CodeFolder:
    """Read the folder of ``--code``, which takes time where it is large.

    Raises
    ------
    UsageError : it is no folder, has no file, holds what looks secret, or cannot be read.
    LargeContext : it is large, and `large` does not allow it; raised before a file is read.
    """
    assert request.code is not None  # noqa: S101 - the caller has looked
    folder = request.code
    if not folder.is_dir():
        what = "it is no folder" if os.path.lexists(folder) else "there is no such folder"
        raise UsageError(
            what, where=f"--code {folder}", hint="the folder of your code, for example: --code ."
        )
    found = tuple(_found(folder, request.allow))
    if not any(one.kind != "dir" for one in found):
        raise UsageError(
            "no file of it would go to the nodes",
            where=f"--code {folder}",
            hint=".gitignore and .dockerignore leave files out: git status --ignored",
        )
    if not large:
        _refuse_large(folder, found)
    if sum(one.size_bytes for one in found) > LARGE_BYTES:
        report.stage(f"read {folder}")
    tree = CodeTree(found, report)
    described, clean = _git_state(folder)
    record = CodeRecord(
        sha256=tree.sha256, git=described, uncommitted=not clean, replace=request.code_replace
    )
    return CodeFolder(folder=folder, tree=tree, record=record)


def _found(folder: Path, allow: Sequence[str]) -> Iterator[CodeFile]:
    secret: list[str] = []
    bring_back = [f"!{name}" for name in allow]
    try:
        for one in sources.walk(folder, bring_back, listed=_listed_by_git(folder), secret=secret):
            yield _file(one)
    except FileNotFoundError as error:
        raise UsageError(
            "it vanished while imgkit read it", where=str(error.filename), hint="the same command again"
        ) from None
    except OSError as error:
        raise UsageError(
            f"it cannot be read: {error.strerror}",
            where=str(error.filename),
            hint="chmod u+rX it, or list it in .gitignore or .dockerignore",
        ) from error
    if secret:
        raise UsageError(
            f"these usually hold secrets: {', '.join(secret[:5])}{' ...' if secret[5:] else ''}",
            where=f"--code {folder}",
            hint="list them in .gitignore or .dockerignore; if it holds none: "
            f"--allow {secret[0].rstrip('/')}",
        )


def _file(found: sources.Found) -> CodeFile:
    path, status = Path(found.entry.path), found.entry.stat(follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        return CodeFile(name=found.name, kind="dir", source=path)
    if stat.S_ISLNK(status.st_mode):
        # Not Path.readlink: it loses ./ and //.
        return CodeFile(name=found.name, kind="symlink", source=path, link=os.readlink(path))  # noqa: PTH115
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(
            "only files, folders and links go to the nodes, and this is none",
            where=str(path),
            hint="list it in .gitignore or .dockerignore",
        )
    return CodeFile(
        name=found.name,
        kind="file",
        source=path,
        size_bytes=status.st_size,
        executable=bool(status.st_mode & stat.S_IXUSR),
    )


def _listed_by_git(folder: Path) -> Collection[str] | None:
    """The files of `folder` that git tracks or does not ignore; None where git does not know the folder."""
    words = (*process.GIT, "-C", str(folder), "ls-files", "-coz", "--exclude-standard")
    try:
        output = b"".join(process.through(words, []))
    except (ToolMissing, ToolFailed):
        return None
    names: list[str] = []
    for row in filter(None, output.split(b"\0")):
        name = os.fsdecode(row).rstrip("/")
        names.append(name)
        inside = folder / name
        if inside.is_dir() and not inside.is_symlink():  # a repository in this one
            names += (f"{name}/{one}" for one in _listed_by_git(inside) or ())
    # Git lists nothing in a folder that it ignores as a whole, and which was named on purpose.
    return names or None


def _git_state(folder: Path) -> tuple[str, bool]:
    """What git calls the state of `folder`, and whether all of it is committed; empty without git."""
    git = (*process.GIT, "-C", folder)
    try:
        described = process.run((*git, "describe", "--always", "--dirty"), check=False)
        changed = process.run((*git, "status", "--porcelain", "--", "."), check=False)
    except ToolMissing:
        return "", False
    if described.returncode or changed.returncode:
        return "", False
    return described.output.strip(), not changed.output.strip()


def _refuse_large(folder: Path, found: Sequence[CodeFile]) -> None:
    """Name the largest parts of code that is larger than `LARGE_BYTES`."""
    sizes: collections.Counter[str] = collections.Counter()
    for one in found:
        sizes[one.name.partition("/")[0]] += one.size_bytes
    if sizes.total() <= LARGE_BYTES:
        return
    shown = ", ".join(f"{name} {size_text(size)}" for name, size in sizes.most_common(3) if size > 10**6)
    raise LargeContext(
        f"the code has {size_text(sizes.total())}: {shown}",
        where=f"--code {folder}",
        hint="list data in .gitignore or .dockerignore, and bind it when the job starts (--bind); to send "
        "all of it: --yes",
    )
