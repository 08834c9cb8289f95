"""The files of a folder that go into an image: what git ignores and what imgkit or a cache wrote stays out.

Several lists of patterns decide, each about the folders below it. The last one that knows a path wins:
outputs of imgkit, ``.gitignore`` from the repository's root downwards or the list of git itself,
``.dockerignore``, then `ignore`.
Files that usually hold secrets stay out unless `ignore` brings them back by name.
"""

from __future__ import annotations

import enum
import fnmatch
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
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
OUTPUTS = ("*.sif", "*.sqsh")
"""What imgkit writes, besides archives."""
GIT_PATHS = (
    *(".", f":(exclude,glob)**/{TEMPORARY}*", f":(exclude,glob)**/{TEMPORARY}*/**"),
    *(f":(exclude,glob)**/{pattern}" for pattern in OUTPUTS),
)
"""Paths for ``git status``: what imgkit leaves in a folder is no change of its code."""
_KEY_BYTES = 1 << 16
"""How much of a file imgkit reads to find a private key; a chain of certificates is shorter."""
# The largest .gitignore or .dockerignore that is read.
_MOST_BYTES = 1 << 20
_MOST_STARS = 4
"""Most stars in a pattern. With 4, a name of 240 characters takes a second to match, with 5 it takes 40."""
MARKERS = ("CACHEDIR.TAG", "pyvenv.cfg")
"""A folder with such a file is a cache (bford.info/cachedir) or a virtual environment of this machine."""
_RUN_FOLDER_NAMES = {"code.json", WORKSPACE}
"""A folder with both is that of a run, with a copy of the code. If run folders went into an image, each run's
copy would contain the copies of all earlier runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """A file, folder or link below a source, the folder that is copied into an image."""

    name: str
    """Its path below the source, with ``/``."""
    entry: os.DirEntry[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patterns:
    """Patterns of one list, which apply to the paths below its folder."""

    spec: GitIgnoreSpec
    above: str = ""
    """For patterns of a folder above the source: the source's path below that folder, such as ``src/``."""
    below: str = ""
    """For patterns of a folder below the source: its path, such as ``docs/``. Otherwise empty."""

    def excludes(self, path: str) -> bool | None:
        """Return whether the patterns leave out `path`, a path below the source. None: no pattern matches."""
        if not path.startswith(self.below):
            return None
        return self.spec.check_file(self.above + path.removeprefix(self.below)).include


@dataclass(frozen=True, slots=True, kw_only=True)
class _GitList:
    """The files that git tracks or would track, and the folders above them with a final slash."""

    names: frozenset[str]

    def excludes(self, path: str) -> bool | None:
        """Return True if git does not list `path`. Return None if it does: then other rules decide."""
        if path in self.names:
            return None
        return True


_Rules = tuple[_Patterns | _GitList, ...]
"""Lists of patterns. The last list that has a pattern for a path decides whether it stays out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceListing:
    """What is below a source. A folder among the omitted names has a final slash."""

    entries: tuple[SourceEntry, ...]
    """The files and folders that go into the image, a folder before its content."""
    left_out: tuple[str, ...]
    """Names that stay out although the patterns of the recipe do not list them."""
    secret: tuple[str, ...]
    """Names that stay out because they usually hold secrets."""


def list_source(
    source: Path,
    ignore: Iterable[str] = (),
    *,
    listed: Iterable[str] | None = None,
    hidden: Collection[Path] = (),
) -> SourceListing:
    """Return the files and folders below `source` that go into the image, and the names that stay out.

    Parameters
    ----------
    ignore : patterns of the recipe. ``!NAME`` brings back what another list leaves out.
    listed : the paths of files that git lists below `source`. With them, ``.gitignore`` files are not read.
    hidden : resolved paths that must not be in an image. They are in no list of the result.

    Raises
    ------
    OSError : a folder or a list of patterns cannot be read; its `filename` is set.
    UsageError : a pattern is invalid, or has more than four stars.
    """
    patterns = tuple(ignore)
    recipe_patterns = _Patterns(spec=_compile(patterns, "ignore"))
    walker = _Walker(
        recipe_patterns=recipe_patterns,
        override_rules=(_read_dockerignore(source), recipe_patterns),
        reads_gitignore=listed is None,
        hidden=frozenset(hidden),
        exceptions=_list_exceptions(patterns),
    )
    if listed is None:
        git_rules: _Rules = _read_parent_gitignores(source)
    else:
        # git has applied its patterns already.
        git_rules = (_GitList(names=_with_folders(listed)),)
    walker.add_folder(source, "", git_rules)
    return SourceListing(
        entries=tuple(walker.entries), left_out=tuple(walker.left_out), secret=tuple(walker.secret)
    )


def _list_exceptions(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the names that `patterns` bring back even if they hold secrets: ``!keys/a.key`` -> ``a.key``.

    ``!data/`` and ``!*`` bring back other files only: a secret that happens to lie there stays out.
    """
    names = []
    for pattern in patterns:
        _, _, last_part = pattern.rstrip("/").rpartition("/")
        name = last_part.removeprefix("!")
        if pattern.startswith("!") and name.strip("*?"):
            names.append(name)
    return tuple(names)


class _Decision(enum.Enum):
    """What becomes of a file or folder below a source."""

    INCLUDE = enum.auto()
    HIDE = enum.auto()
    """It stays out, and nobody needs to know."""
    LEAVE_OUT = enum.auto()
    """It stays out, and the user is told its name."""
    REFUSE_SECRET = enum.auto()


@dataclass(slots=True, kw_only=True)
class _Walker:
    """Walks a source, and decides for each entry whether it stays out."""

    recipe_patterns: _Patterns
    override_rules: _Rules
    """Patterns of ``.dockerignore`` and of the recipe, which win over those of ``.gitignore``."""
    reads_gitignore: bool
    hidden: frozenset[Path]
    exceptions: tuple[str, ...]
    """Names that are packed even if they look like secrets."""
    entries: list[SourceEntry] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    secret: list[str] = field(default_factory=list)

    def add_folder(self, folder: Path, prefix: str, git_rules: _Rules) -> None:
        """Add all that is below `folder` to the lists of this object.

        Parameters
        ----------
        prefix : the path of `folder` below the source, with a final slash; empty for the source itself.
        git_rules : the rules of git for the folders above. They have the least weight.
        """
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: os.fsencode(entry.name))
        siblings = {entry.name for entry in entries}
        if self.reads_gitignore and ".gitignore" in siblings:
            git_rules = (*git_rules, _read_patterns(folder / ".gitignore", below=prefix))
        rules = (*git_rules, *self.override_rules)
        for entry in entries:
            name = prefix + entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder:
                # With the slash, it matches patterns such as "data/". As in git, all below it stays out then.
                name += "/"
            decision = self._decide(entry, name, siblings, rules)
            if decision is _Decision.LEAVE_OUT:
                self.left_out.append(name)
            elif decision is _Decision.REFUSE_SECRET:
                self.secret.append(name)
            elif decision is _Decision.INCLUDE:
                self.entries.append(SourceEntry(name=name.rstrip("/"), entry=entry))
                if is_folder:
                    self.add_folder(Path(entry.path), name, git_rules)

    def _decide(self, entry: os.DirEntry[str], name: str, siblings: set[str], rules: _Rules) -> _Decision:
        """Return whether `entry` goes into the image.

        Parameters
        ----------
        name : the path of `entry` below the source, with a final slash if it is a folder.
        siblings : the names in its folder.
        rules : all rules for its folder.
        """
        if entry.name in NEVER or entry.name.startswith(TEMPORARY) or self._is_hidden(entry):
            return _Decision.HIDE
        excluded_by_recipe = self.recipe_patterns.excludes(name)
        if excluded_by_recipe:
            return _Decision.HIDE
        if excluded_by_recipe is None and _stays_out(entry, name, siblings, rules):
            return _Decision.LEAVE_OUT
        # Only a pattern of the recipe with its name, such as "!keys/a.key", brings back a secret.
        has_exception = any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in self.exceptions)
        is_brought_back = excluded_by_recipe is False and has_exception
        if not is_brought_back and _is_secret(entry, name):
            return _Decision.REFUSE_SECRET
        return _Decision.INCLUDE

    def _is_hidden(self, entry: os.DirEntry[str]) -> bool:
        return any(entry.name == path.name and Path(entry.path).resolve() == path for path in self.hidden)


def describe_left_out(names: Sequence[str]) -> str:
    """Return names that `list_source` leaves out as text: ``a, b (git, Docker or imgkit ignores it)``."""
    text = ", ".join(names[:5])
    if len(names) > 5:
        text += f" and {len(names) - 5} more"
    return f"{text} (git, Docker or imgkit ignores it)"


def _with_folders(paths: Iterable[str]) -> frozenset[str]:
    """Return `paths` and the folders above them: ``a/b/c.py`` -> ``a/``, ``a/b/``, ``a/b/c.py``."""
    names = set()
    for path in paths:
        names.add(path)
        folder, _, _ = path.rpartition("/")
        while folder and f"{folder}/" not in names:
            names.add(f"{folder}/")
            folder, _, _ = folder.rpartition("/")
    return frozenset(names)


def _last_decision(rules: _Rules, path: str) -> bool | None:
    """Return whether `path` stays out, as the last of `rules` with a pattern for it decides.

    Return None if no rule has one.
    """
    for rule in reversed(rules):
        decision = rule.excludes(path)
        if decision is not None:
            return decision
    return None


def _stays_out(entry: os.DirEntry[str], name: str, siblings: set[str], rules: _Rules) -> bool:
    """Return whether `entry` stays out, because of a pattern or because a program made it.

    Patterns win: only if no pattern matches, it counts whether `entry` is a cache or an output of imgkit. The
    parameters are those of `_Walker._decide`.
    """
    decision = _last_decision(rules, name)
    if decision is not None:
        return decision
    if name.endswith("/"):
        return _is_generated(entry, name, rules)
    return _is_output(entry.name, siblings)


def _is_generated(folder: os.DirEntry[str], prefix: str, rules: _Rules) -> bool:
    """Return whether a program, not a person, made all that is in `folder`.

    The folder is a cache, a virtual environment or the folder of a run, or contains only outputs of imgkit.
    `prefix` is its path below the source, with a final slash.
    """
    with os.scandir(folder) as scan:
        entries = list(scan)
    names = {entry.name for entry in entries}
    if not names.isdisjoint(MARKERS) or names >= _RUN_FOLDER_NAMES:
        return True
    for entry in entries:
        if entry.name.startswith(TEMPORARY):
            continue
        if _last_decision(rules, prefix + entry.name) is not None:
            return False  # somebody wrote a pattern for this file
        if entry.is_dir(follow_symlinks=False):
            is_output = all(Path(entry.path, name).exists() for name in _RUN_FOLDER_NAMES)
        else:
            is_output = _is_output(entry.name, names)
        if not is_output:
            return False
    return bool(entries)


def _is_secret(entry: os.DirEntry[str], name: str) -> bool:
    """Return whether a file usually holds a secret, such as ``.netrc``, or is a private key.

    Of a file that ends in ``.pem`` or ``.key``, the content decides, because certificates have the same
    suffixes and are public. So it does of a small file without a suffix, such as ``id_deploy``.
    """
    has_secret_name = secret_patterns.is_secret_file(name)
    if not entry.is_file(follow_symlinks=False):
        return has_secret_name
    has_key_suffix = name.lower().endswith((".pem", ".key"))
    if not has_key_suffix:
        # Only small files are read, since keys are small.
        may_be_key = "." not in entry.name and entry.stat().st_size <= _KEY_BYTES
        if has_secret_name or not may_be_key:
            return has_secret_name
    with files.open_regular(Path(entry.path)) as file:
        start = file.read(_KEY_BYTES)
    if secret_patterns.is_private_key(start):
        return True
    # A certificate is public. What is not PEM text may be a key in a binary form.
    return has_key_suffix and not start.startswith(b"-----BEGIN ")


def _is_output(name: str, siblings: set[str]) -> bool:
    """Return whether `name` is that of a file that imgkit writes. `siblings` are the names in its folder."""
    # A .tar may be a data set. It is an archive of imgkit only if its manifest file lies next to it.
    archive = name.removesuffix(".manifest.json").removesuffix(".sha256")
    if ".tar" in archive and archive in siblings and f"{archive}.manifest.json" in siblings:
        return True
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in OUTPUTS)


def _compile(lines: Sequence[str], where: str) -> GitIgnoreSpec:
    """Return a matcher for patterns in the form of gitignore. `where` is their file or key, for messages.

    Raises
    ------
    UsageError : a pattern is invalid, or has so many stars that matching it would take hours.
    """
    import pathspec

    for line in lines:
        if _count_stars(line) > _MOST_STARS and not line.startswith("#"):
            raise UsageError(
                f"the pattern {line!r} has more than {_MOST_STARS} stars: matching it could take hours",
                where=where,
                hint="write it as several patterns",
            )
    try:
        return pathspec.GitIgnoreSpec.from_lines(lines)
    except (ValueError, re.error) as error:
        raise UsageError(f"a pattern cannot be read: {error}", where=where, hint="correct it") from error


def _count_stars(pattern: str) -> int:
    """Return the number of stars in `pattern`. pathspec's time to match it multiplies with each."""
    count = 0
    for part in pattern.split("/"):
        if part == "**":  # any folders: this takes the time of one star
            count += 1
        else:
            count += part.count("*")
    return count


def _read_parent_gitignores(source: Path) -> tuple[_Patterns, ...]:
    """Return the patterns of the ``.gitignore`` files in the folders above `source`, the outermost first.

    The search ends at the root of the repository. If the patterns exclude `source` as a whole, the result is
    empty: the recipe names that folder on purpose.
    """
    source = source.resolve()
    patterns: tuple[_Patterns, ...] = ()
    for folder in (source, *source.parents):
        if folder != source:
            above = f"{source.relative_to(folder).as_posix()}/"
            patterns = (_read_patterns(folder / ".gitignore", above=above), *patterns)
        is_repository_root = os.path.lexists(folder / ".git")
        if is_repository_root:
            if _last_decision(patterns, ""):
                return ()
            return patterns
    return ()  # not in a repository: a .gitignore in the home folder does not concern this folder


def _read_dockerignore(source: Path) -> _Patterns:
    """Return the patterns of the source's ``.dockerignore``, converted to the form of gitignore.

    In Docker's form, a pattern matches only from the folder of the file on, so a slash is added: ``*.bin`` ->
    ``/*.bin``, ``!a/b`` -> ``!/a/b``.

    Raises
    ------
    UsageError : the file is a link out of its folder, or a pattern is invalid.
    """
    file = source / ".dockerignore"
    # A message may quote the patterns, and a link in a source of unknown origin may lead to a secret.
    if file.is_symlink() and not file.resolve().is_relative_to(source.resolve()):
        raise UsageError("it is a link out of its folder", where=str(file), hint="put the list itself there")
    anchored_patterns = []
    for line in _read_lines(file):
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        negation = ""
        if pattern.startswith("!"):
            negation = "!"
        path = os.path.normpath(pattern.removeprefix("!").strip().lstrip("/"))
        anchored_patterns.append(f"{negation}/{path}")
    return _Patterns(spec=_compile(anchored_patterns, str(file)))


def _read_patterns(file: Path, *, above: str = "", below: str = "") -> _Patterns:
    """Return the patterns of a ``.gitignore``. Without such a file, they are empty, and match nothing."""
    return _Patterns(spec=_compile(_read_lines(file), str(file)), above=above, below=below)


def _read_lines(file: Path) -> list[str]:
    # Like git, do not read a .gitignore that is a link.
    if not file.is_file() or (file.name == ".gitignore" and file.is_symlink()):
        return []
    return files.read_text(file, most_bytes=_MOST_BYTES, errors="surrogateescape").splitlines()
