"""The lock file and its folder of kept files on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from imgkit_builder import __version__
from imgkit_builder.recipe import lock_file, lock_follow
from imgkit_builder.recipe.model import Lock, LockedPlatform, Recipe
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError


def kept(file: Path, part: LockedPlatform | None) -> dict[str, Path]:
    """The wheels of `part` that no index has, by name.

    Raises
    ------
    UsageError : one is missing.
    """
    found = {
        one.file: lock_follow.kept_folder(file) / one.file for one in (part.pip if part else ()) if one.kept
    }
    for name, path in found.items():
        if not path.is_file():
            raise UsageError(
                f"the kept wheel {name} is missing",
                where=str(path),
                hint="bring the folder back, or build it again: imgkit lock RECIPE --keep --upgrade",
            )
    return found


def write(recipe: Recipe, file: Path, old: Lock | None, part: LockedPlatform, made: Path | None) -> None:
    """Write `part` into the lock `file`, and its files from the folder `made` beside it.

    The files come first: a lock never names a file that is not there. Those that only `old` names go last.

    Raises
    ------
    OSError, UsageError : something cannot be written, or would be refused when it is read; the old lock is
        as it was.
    """
    lock = old or Lock(recipe=recipe.name, imgkit=__version__, platforms=())
    new = Lock(recipe=recipe.name, imgkit=__version__, platforms=lock.replaced(part).platforms)
    content = lock_file.text(new)
    lock_file.parse(content, file)  # names, versions and URLs are what the base answered
    if made is not None:
        _store(lock_follow.kept_folder(file), made, part.digests)
    hint = "choose a folder that this user may write to"
    with files.replacing(file, failed="the lock cannot be written", hint=hint) as stream:
        stream.write(content.encode())
    named = {name for one in new.platforms for name in one.digests}
    for name in {name for one in lock.platforms for name in one.digests} - named:
        (lock_follow.kept_folder(file) / name).unlink(missing_ok=True)


def _store(folder: Path, made: Path, digests: Mapping[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name in sorted(digests):
        if (made / name).is_file():
            with files.writing(folder / name) as stream, files.open_regular(made / name) as source:
                shutil.copyfileobj(source, stream)
