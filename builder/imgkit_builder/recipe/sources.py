"""The files of a folder that go into an image: what git ignores and what imgkit or a cache wrote stays out.

Several lists of patterns decide, each about the folders below it. The last one that knows a path wins:
outputs of imgkit, ``.gitignore`` from the repository's root downwards or the list of git itself,
``.dockerignore``, then `ignore`.
Files that usually hold secrets stay out unless `ignore` brings them back by name.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_entrypoints import files, secret_patterns
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.files import TEMPORARY
from imgkit_entrypoints.system import WORKSPACE

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

NEVER = frozenset({".git", "__pycache__"})
"""Names that stay out, whatever a pattern says; so do those that begin with `TEMPORARY`."""
OUTPUTS = ("*.sif",)
"""What imgkit writes, besides archives."""
GIT_PATHS = (
    *(".", f":(exclude,glob)**/{TEMPORARY}*", f":(exclude,glob)**/{TEMPORARY}*/**"),
    *(f":(exclude,glob)**/{pattern}" for pattern in OUTPUTS),
)
"""Paths for ``git status``: what imgkit leaves in a folder is no change of its code."""
_KEY_BYTES = 1 << 16
"""How much of a file imgkit reads to find a private key; a chain of certificates is shorter."""
_MOST_BYTES = 1 << 20
_MOST_STARS = 4
"""Stars in one pattern: the time for a name of 240 characters grows from a second to 40 with the next one."""
MARKERS = ("CACHEDIR.TAG", "pyvenv.cfg")
"""A folder with such a file is a cache (bford.info/cachedir) or a virtual environment of this machine."""
_RUN_FOLDER = {"code.json", WORKSPACE}
"""A folder with both is that of a run. With it, the code of each run would have the copies of all earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """One file, folder or link below a source."""

    name: str
    """Its path below the source, with ``/``."""
    entry: os.DirEntry[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patterns:
    """Patterns for the paths below one folder."""

    above: str
    """What comes before a path below the source, to make it a path below that folder: ``src/``."""
    below: str
    """The folder's path below the source, with a final slash; empty for the source and for folders above."""
    spec: GitIgnoreSpec

    def decision(self, path: str) -> bool | None:
        """Return whether `path`, below the source, stays out; None where no pattern matches."""
        if not path.startswith(self.below):
            return None
        return self.spec.check_file(self.above + path.removeprefix(self.below)).include


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """The paths that git lists, and the folders above them with a final slash."""

    names: frozenset[str]

    def decision(self, path: str) -> bool | None:
        """Return whether `path` stays out; None for a path of the list."""
        return None if path in self.names else True


_Rules = tuple[_Patterns | _Listed, ...]


def walk(
    source: Path,
    ignore: Iterable[str] = (),
    *,
    listed: Iterable[str] | None = None,
    hidden: Collection[Path] = (),
    left_out: list[str] | None = None,
    secret: list[str] | None = None,
) -> Iterator[SourceEntry]:
    """Yield what goes into the image of the folder `source`, a folder before its content.

    Parameters
    ----------
    ignore : patterns of the recipe; ``!NAME`` brings back what another list leaves out.
    listed : the paths of files that git lists below `source`, in place of the ``.gitignore`` files.
    hidden : resolved paths that must not be in an image.
    left_out : receives the names that anything but `ignore` leaves out, folders with a final slash.
    secret : receives the names that stay out because they usually hold secrets.

    Raises
    ------
    OSError : a folder or a list of patterns cannot be read; its `filename` is set.
    UsageError : a pattern is none, or has more than four stars.
    """
    ignore = tuple(ignore)
    of_recipe = _Patterns(above="", below="", spec=_spec(ignore, "ignore"))
    brought_back = (pattern[1:].rstrip("/").rpartition("/")[2] for pattern in ignore if pattern[:1] == "!")
    walker = _Walker(
        of_recipe=of_recipe,
        reads_gitignore=listed is None,
        late=(*_dockerignore(source), of_recipe),
        hidden=frozenset(hidden),
        left_out=[] if left_out is None else left_out,
        secret=[] if secret is None else secret,
        # "!data/" and "!*" bring back folders and files, and never a secret that happens to lie there.
        named=tuple(name for name in brought_back if name.strip("*?")),
    )
    above: _Rules = _above(source) if listed is None else (_Listed(names=_with_folders(listed)),)
    yield from walker.folder(source, "", above)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walker:
    of_recipe: _Patterns
    """Those of the recipe, which count last."""
    late: tuple[_Patterns, ...]
    """The patterns that win over those of folders; `of_recipe` is the last."""
    reads_gitignore: bool
    hidden: frozenset[Path]
    left_out: list[str]
    secret: list[str]
    named: tuple[str, ...]
    """The last parts of the patterns that bring something back."""

    def folder(self, folder: Path, below: str, above: _Rules) -> Iterator[SourceEntry]:
        """Yield what counts in `folder`; `below` is its path below the source, empty or with a last slash."""
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: os.fsencode(entry.name))
        names = {entry.name for entry in entries}
        general = above
        if self.reads_gitignore and ".gitignore" in names:
            general = (*above, *_patterns(_lines(folder / ".gitignore"), folder / ".gitignore", below=below))
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            # The slash lets a folder match patterns such as "data/"; as in git, this excludes all below it.
            name = f"{below}{entry.name}{'/' if is_folder else ''}"
            if entry.name in NEVER or entry.name.startswith(TEMPORARY) or self._is_hidden(entry):
                continue
            stays_out = _last_word((*general, *self.late), name)
            if stays_out is None:
                stays_out = (
                    self._is_made(entry, name, general) if is_folder else _is_output(entry.name, names)
                )
            by_name = any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in self.named)
            is_wanted = by_name and self.of_recipe.decision(name) is False
            if not stays_out and not is_wanted and _is_secret(entry, name):
                self.secret.append(name)
            elif not stays_out:
                yield SourceEntry(name=name.rstrip("/"), entry=entry)
                if is_folder:
                    yield from self.folder(Path(entry.path), name, general)
            elif self.of_recipe.decision(name) is None:
                self.left_out.append(name)

    def _is_made(self, folder: os.DirEntry[str], name: str, general: _Rules) -> bool:
        """Return whether a program made all of `folder`.

        It is a cache, a virtual environment or a run folder, or it has outputs of imgkit alone.
        """
        with os.scandir(folder) as scan:
            entries = list(scan)
        names, rules = {entry.name for entry in entries}, (*general, *self.late)
        if not names.isdisjoint(MARKERS) or names >= _RUN_FOLDER:
            return True
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                is_output = all(Path(entry.path, part).exists() for part in _RUN_FOLDER)
            else:
                is_output = _is_output(entry.name, names)
            is_own = is_output and _last_word(rules, name + entry.name) is None
            if not (is_own or entry.name.startswith(TEMPORARY)):
                return False
        return bool(entries)

    def _is_hidden(self, entry: os.DirEntry[str]) -> bool:
        return any(entry.name == path.name and Path(entry.path).resolve() == path for path in self.hidden)


def left_out_text(names: Sequence[str]) -> str:
    """Return names that `walk` leaves out for a message: ``a, b (git, Docker or imgkit ignores it)``."""
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{rest} (git, Docker or imgkit ignores it)"


def _with_folders(listed: Iterable[str]) -> frozenset[str]:
    names: set[str] = set()
    for name in listed:
        names.add(name)
        above = name.rpartition("/")[0]
        while above and f"{above}/" not in names:
            names.add(f"{above}/")
            above = above.rpartition("/")[0]
    return frozenset(names)


def _last_word(patterns: _Rules, path: str) -> bool | None:
    decisions = (rules.decision(path) for rules in reversed(patterns))
    return next((decision for decision in decisions if decision is not None), None)


def _is_secret(entry: os.DirEntry[str], name: str) -> bool:
    """Return whether its name says so, or a key lies in a file with a key's name; certificates are public."""
    by_name = secret_patterns.in_file_name(name)
    if not entry.is_file(follow_symlinks=False):
        return by_name
    may_be_public = name.lower().endswith((".pem", ".key"))
    # Of a small file without a suffix, such as id_deploy, the content decides.
    may_be_key = "." not in entry.name and entry.stat().st_size <= _KEY_BYTES
    if not may_be_public and (by_name or not may_be_key):
        return by_name
    with files.open_regular(Path(entry.path)) as file:
        start = file.read(_KEY_BYTES)
    return secret_patterns.is_private_key(start) or (may_be_public and not start.startswith(b"-----BEGIN "))


def _is_output(name: str, names: set[str]) -> bool:
    # An archive is one of imgkit's only where its record lies next to it; a data set may be a .tar too.
    archive = name.removesuffix(".manifest.json").removesuffix(".sha256")
    if ".tar" in archive and archive in names and f"{archive}.manifest.json" in names:
        return True
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in OUTPUTS)


def _spec(lines: Sequence[str], where: str) -> GitIgnoreSpec:
    import pathspec

    for line in lines:
        stars = sum(1 if part == "**" else part.count("*") for part in line.split("/"))
        if stars > _MOST_STARS and not line.startswith("#"):
            raise UsageError(
                f"the pattern {line!r} has more than {_MOST_STARS} stars: matching it could take hours",
                where=where,
                hint="write it as several patterns",
            )
    try:
        return pathspec.GitIgnoreSpec.from_lines(lines)
    except (ValueError, re.error) as error:
        raise UsageError(f"a pattern cannot be read: {error}", where=where, hint="correct it") from error


def _above(source: Path) -> tuple[_Patterns, ...]:
    """Return the patterns of ``.gitignore`` above `source`, up to its repository's root, the outermost first.

    A source that these patterns exclude as a whole was named on purpose: then they do not count.
    """
    source = source.resolve()
    patterns: tuple[_Patterns, ...] = ()
    for folder in (source, *source.parents):
        if folder != source:
            file, above = folder / ".gitignore", f"{source.relative_to(folder).as_posix()}/"
            patterns = (*_patterns(_lines(file), file, above=above), *patterns)
        if os.path.lexists(folder / ".git"):
            return () if _last_word(patterns, "") else patterns
    return ()  # outside git, a file of somebody's home folder says nothing about this one


def _dockerignore(source: Path) -> tuple[_Patterns, ...]:
    """Return the patterns of ``.dockerignore``, which start at its folder, as those of gitignore's kind."""
    anchored, file = [], source / ".dockerignore"
    # A message may quote the patterns, and a stranger's link may lead to a secret.
    if file.is_symlink() and not file.resolve().is_relative_to(source.resolve()):
        raise UsageError("it is a link out of its folder", where=str(file), hint="put the list itself there")
    for line in _lines(file):
        pattern = line.strip()
        if pattern and not pattern.startswith("#"):
            back = "!" if pattern.startswith("!") else ""
            anchored.append(f"{back}/{os.path.normpath(pattern.removeprefix('!').strip().lstrip('/'))}")
    return _patterns(anchored, file)


def _patterns(lines: Sequence[str], file: Path, *, above: str = "", below: str = "") -> tuple[_Patterns, ...]:
    """Return the patterns of `file`; nothing if it has none."""
    return (_Patterns(above=above, below=below, spec=_spec(lines, str(file))),) if lines else ()


def _lines(file: Path) -> list[str]:
    if not file.is_file() or (file.name == ".gitignore" and file.is_symlink()):  # as git: it follows no link
        return []
    return files.read_text(file, most_bytes=_MOST_BYTES, errors="surrogateescape").splitlines()
