"""Choose the least that brings code to a remote: nothing, what an edit changed, or the whole folder.

An edit of large code makes a second delta over one that is both here and there. It only adds and replaces: a
file that is gone from the folder must show that of the image again, which no whiteout does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.delta import code as code_delta
from imgkit_builder.job.code import CodeFolder
from imgkit_builder.remote.store import Store
from imgkit_builder.sif.conversion import Options

_SMALL_BYTES = 100_000
"""Code that is smaller goes as a whole: one overlay less at the start of the job."""
_WORTH = 0.5
"""A second delta of more than this share of the first is not worth two files."""
_KEPT = 8
"""Deltas of whole folders that stay here, for the next edit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodePlan:
    """What a remote needs of the code."""

    targets: tuple[str, ...]
    """Paths in the store of its deltas, lowest first."""
    file: Path | None
    """The file to send as the last of them; None where the remote has all of them."""


@contextlib.contextmanager
def plan(code: CodeFolder, there: Store, options: Options, report: Reporter) -> Iterator[CodePlan]:
    """Make what the remote lacks; the file exists inside the block.

    Raises
    ------
    UsageError : the folder changes while it is read.
    ToolMissing, ToolFailed : nothing here squashes, or it failed.
    """
    whole = (f"deltas/{code.name}",)
    if code.name in there.codes:
        yield CodePlan(targets=whole, file=None)
        return
    with tempfile.TemporaryDirectory(prefix="imgkit-") as folder:
        work = Path(folder)
        options = dataclasses.replace(options, tmpdir=work)
        base = _base(code, there)
        if base is not None:
            over = code_delta.name_over(code.record.sha256, _sha256(base))
            targets = (f"deltas/{_name(base)}", f"deltas/{over}")
            if over in there.codes:
                yield CodePlan(targets=targets, file=None)
                return
            file = work / over
            made = code_delta.write_over(code.tree, base, file, options, report)
            if made and file.stat().st_size <= _WORTH * base.stat().st_size:
                yield CodePlan(targets=targets, file=file)
                return
        file = work / code.name
        code_delta.write(code.tree, file, options, report)
        yield CodePlan(targets=whole, file=file)
        _keep(code, file)


def _base(code: CodeFolder, there: Store) -> Path | None:
    """The newest delta of this folder that is both here and there."""
    if code.record.replace or code.tree.size_bytes <= _SMALL_BYTES:
        return None  # one mount hides the rest of the folder, so one file holds all
    try:
        kept = sorted(_folder().glob(f"{_key(code)}-*"), key=lambda path: path.stat().st_mtime)
    except OSError:
        return None
    return next((path for path in reversed(kept) if _name(path) in there.codes), None)


def _keep(code: CodeFolder, file: Path) -> None:
    """Keep the delta of a whole folder, if the cache can be written, and remove the oldest ones."""
    with contextlib.suppress(OSError):
        files.make_own_folder(files.cache_dir())
        _folder().mkdir(exist_ok=True)
        with (
            files.open_regular(file) as made,
            files.writing(_folder() / f"{_key(code)}-{file.name}") as stream,
        ):
            shutil.copyfileobj(made, stream)
        for old in sorted(_folder().iterdir(), key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            old.unlink(missing_ok=True)


def _folder() -> Path:
    return files.cache_dir() / "code"


def _key(code: CodeFolder) -> str:
    """Text that differs for two folders."""
    return hashlib.sha256(os.fsencode(code.folder.resolve())).hexdigest()[:16]


def _name(kept: Path) -> str:
    return kept.name.partition("-")[2]


def _sha256(kept: Path) -> str:
    """The digest in the name of a delta of a whole folder."""
    return _name(kept).removeprefix("code-").removesuffix(".imgdelta")
