"""Select the files of a folder that go into an image.

Files that git ignores and files that imgkit or a cache has written stay out. Several lists of patterns
decide, and each applies to the paths below its folder. If several lists match a path, the last one wins.
Their order is: outputs of imgkit, ``.gitignore`` files from the root of the repository downwards (or the list
of files from git itself), ``.dockerignore``, and `ignore` of the recipe.

Files that usually contain secrets stay out, unless `ignore` brings them back by name.
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
from imgkit_entrypoints.errors import UsageError, join_names
from imgkit_entrypoints.files import TEMPORARY
from imgkit_entrypoints.system import WORKSPACE

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

NEVER = frozenset({".git", "__pycache__"})
"""Names that always stay out, whatever a pattern says. Names that begin with `TEMPORARY` stay out, too."""
OUTPUTS = ("*.sif", "*.sqsh")
"""Patterns of the files that imgkit writes, besides archives."""
GIT_PATHS = (
    *(".", f":(exclude,glob)**/{TEMPORARY}*", f":(exclude,glob)**/{TEMPORARY}*/**"),
    *(f":(exclude,glob)**/{pattern}" for pattern in OUTPUTS),
)
"""Paths for ``git status``. Files that imgkit leaves in a folder do not count as changes of its code."""
_KEY_BYTES = 1 << 16
"""How many bytes of a file are read to detect a private key. Keys and chains of certificates are shorter."""
# The largest size of a .gitignore or .dockerignore that is read.
_MOST_BYTES = 1 << 20
_MOST_STARS = 4
"""The largest number of stars in a pattern. With 4 stars, a name of 240 characters takes a second to match.
With 5 stars, it takes 40 seconds."""
CACHE_MARKERS = ("CACHEDIR.TAG", "pyvenv.cfg")
"""Files that mark a folder as a cache (bford.info/cachedir) or as a virtual environment of this machine."""
_RUN_FOLDER_NAMES = {"code.json", WORKSPACE}
"""A folder that contains both names is the folder of a run, with a copy of the code. If run folders were
copied into an image, the copy of each run would contain the copies of all earlier runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """A file, folder or link below the source, which is the folder that is copied into an image."""

    name: str
    """The path relative to the source, with ``/`` as the separator."""
    entry: os.DirEntry[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patterns:
    """The patterns of one list. They apply to the paths below the folder of that list."""

    spec: GitIgnoreSpec
    above: str = ""
    """If the list is in a folder above the source: the path from there to the source, such as ``src/``."""
    below: str = ""
    """If the list is in a folder below the source: the path of that folder, such as ``docs/``."""

    def excludes(self, path: str) -> bool | None:
        """Return whether the patterns exclude `path`, or None if no pattern matches it.

        `path` is relative to the source, so it is converted to the folder of the list first.
        """
        if not path.startswith(self.below):
            return None
        return self.spec.check_file(self.above + path.removeprefix(self.below)).include


@dataclass(frozen=True, slots=True, kw_only=True)
class _GitList:
    """The files that git tracks or would track, and the folders above them. Folders have a final slash."""

    names: frozenset[str]

    def excludes(self, path: str) -> bool | None:
        """Return True if git does not list `path`, and None otherwise, so that other rules decide."""
        if path in self.names:
            return None
        return True


_Rules = tuple[_Patterns | _GitList, ...]
"""Lists of patterns. The last list with a pattern that matches a path decides whether the path stays out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceListing:
    """The content of a source. The names that stay out have a final slash if they are folders."""

    entries: tuple[SourceEntry, ...]
    """The files and folders that go into the image. A folder comes before its content."""
    left_out: tuple[str, ...]
    """Names that stay out although the recipe's patterns do not exclude them."""
    secret: tuple[str, ...]
    """Names that stay out because such files usually contain secrets."""


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
    ignore : patterns from the recipe. ``!NAME`` brings back a name that another list excludes.
    listed : the paths below `source` that git lists. If they are given, ``.gitignore`` files are not read.
    hidden : resolved paths that must not be in an image. The result does not mention them at all.

    Raises
    ------
    OSError : a folder or a list of patterns cannot be read. The attribute `filename` of the error is set.
    UsageError : a pattern is invalid, or has more than four stars.
    """
    patterns = tuple(ignore)
    recipe_patterns = _Patterns(spec=_compile_patterns(patterns, "ignore"))
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
        # git has already applied the patterns of the .gitignore files to this list.
        git_rules = (_GitList(names=_add_parent_folders(listed)),)
    # The walker collects the results in its own lists.
    walker.add_folder(source, "", git_rules)
    return SourceListing(
        entries=tuple(walker.entries), left_out=tuple(walker.left_out), secret=tuple(walker.secret)
    )


def _list_exceptions(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the names that `patterns` bring back even if they look like secrets.

    For example, ``!keys/a.key`` brings back ``a.key``. A pattern must contain the name itself: ``!data/`` and
    ``!*`` do not bring back a secret that happens to be in the folder.
    """
    exception_names = []
    for pattern in patterns:
        _, _, last_part = pattern.rstrip("/").rpartition("/")
        name = last_part.removeprefix("!")
        # A name of wildcards only, such as "*", brings back nothing.
        if pattern.startswith("!") and name.strip("*?"):
            exception_names.append(name)
    return tuple(exception_names)


class _Decision(enum.Enum):
    """Whether a file or folder below the source goes into the image."""

    INCLUDE = enum.auto()
    HIDE = enum.auto()
    """It stays out, and the user is not told."""
    LEAVE_OUT = enum.auto()
    """It stays out, and the user is told its name."""
    REFUSE_SECRET = enum.auto()


@dataclass(slots=True, kw_only=True)
class _Walker:
    """Walks through the source, and decides for each file and folder whether it goes into the image."""

    recipe_patterns: _Patterns
    override_rules: _Rules
    """The patterns of ``.dockerignore`` and of the recipe. They override the patterns of ``.gitignore``."""
    reads_gitignore: bool
    hidden: frozenset[Path]
    exceptions: tuple[str, ...]
    """Patterns for names that go into the image even if they look like secrets, such as ``a.key``."""
    entries: list[SourceEntry] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    secret: list[str] = field(default_factory=list)

    def add_folder(self, folder: Path, prefix: str, git_rules: _Rules) -> None:
        """Add the content of `folder` to the lists of this object: `entries`, `left_out` and `secret`.

        Parameters
        ----------
        prefix : the path of `folder` relative to the source, with a final slash. Empty for the source itself.
        git_rules : git's rules from the folders above. All other rules override them.
        """
        entries = _list_entries(folder)
        siblings = {entry.name for entry in entries}
        if self.reads_gitignore and ".gitignore" in siblings:
            git_rules = (*git_rules, _read_patterns(folder / ".gitignore", below=prefix))
        rules = (*git_rules, *self.override_rules)  # the last rule that matches decides
        for entry in entries:
            name = prefix + entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder:
                name += "/"  # so that patterns such as "data/" match
            # A hidden entry (_Decision.HIDE) is in no list, so the user is not told about it.
            decision = self._decide(entry, name, siblings, rules)
            if decision is _Decision.LEAVE_OUT:
                self.left_out.append(name)
            if decision is _Decision.REFUSE_SECRET:
                self.secret.append(name)
            # As in git, an excluded folder is not searched, so all its content stays out.
            if decision is not _Decision.INCLUDE:
                continue
            self.entries.append(SourceEntry(name=name.rstrip("/"), entry=entry))
            if is_folder:
                # The call adds `override_rules` itself, so that they come after all rules of git.
                self.add_folder(Path(entry.path), name, git_rules)

    def _decide(self, entry: os.DirEntry[str], name: str, siblings: set[str], rules: _Rules) -> _Decision:
        """Return whether `entry` goes into the image, and if not, whether the user is told.

        Parameters
        ----------
        name : the path of `entry` relative to the source, with a final slash if it is a folder.
        siblings : the names in the same folder.
        rules : all rules that apply to the folder.
        """
        if entry.name in NEVER or entry.name.startswith(TEMPORARY) or self._is_hidden(entry):
            return _Decision.HIDE
        # True: the recipe excludes it. False: a pattern such as "!data/" brings it back. None: no pattern of
        # the recipe matches, so the other rules decide.
        excluded_by_recipe = self.recipe_patterns.excludes(name)
        if excluded_by_recipe:
            return _Decision.HIDE
        if excluded_by_recipe is None and _is_left_out(entry, name, siblings, rules):
            return _Decision.LEAVE_OUT
        # A file that looks like a secret goes into the image only if a pattern of the recipe names it, such
        # as "!keys/a.key". A pattern for its folder, such as "!keys/", is not enough.
        is_named = any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in self.exceptions)
        is_brought_back_by_name = excluded_by_recipe is False and is_named
        if not is_brought_back_by_name and _is_secret(entry, name):
            return _Decision.REFUSE_SECRET
        return _Decision.INCLUDE

    def _is_hidden(self, entry: os.DirEntry[str]) -> bool:
        """Return whether `entry` is one of the `hidden` paths."""
        # Compare the name first, because `resolve` needs several system calls.
        return any(entry.name == path.name and Path(entry.path).resolve() == path for path in self.hidden)


def _list_entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the files and folders in `folder`, sorted by name."""
    with os.scandir(folder) as scan:
        # Sort by bytes. The order of texts would depend on how a name outside UTF-8 was decoded.
        return sorted(scan, key=lambda entry: os.fsencode(entry.name))


def describe_left_out(names: Sequence[str]) -> str:
    """Return the names that `list_source` leaves out as text: ``a, b (git, Docker or imgkit ignores it)``."""
    return f"{join_names(names, 5)} (git, Docker or imgkit ignores it)"


def _add_parent_folders(paths: Iterable[str]) -> frozenset[str]:
    """Return `paths` and all folders above them: ``a/b/c.py`` -> ``a/``, ``a/b/``, ``a/b/c.py``."""
    names = set()
    for path in paths:
        names.add(path)
        folder, _, _ = path.rpartition("/")
        while folder and f"{folder}/" not in names:
            names.add(f"{folder}/")
            folder, _, _ = folder.rpartition("/")
    return frozenset(names)


def _find_last_decision(rules: _Rules, path: str) -> bool | None:
    """Return what the last of `rules` with a matching pattern says about `path`.

    True means that `path` stays out, False that a pattern such as ``!data/`` brings it back, and None that no
    rule has a pattern that matches it.
    """
    for rule in reversed(rules):
        decision = rule.excludes(path)
        if decision is not None:
            return decision
    return None


def _is_left_out(entry: os.DirEntry[str], name: str, siblings: set[str], rules: _Rules) -> bool:
    """Return whether `entry` stays out, either because of a pattern or because a program generated it.

    A pattern has priority. Only if no pattern matches, `entry` stays out if it is a cache or an output of
    imgkit.

    Parameters
    ----------
    name : the path of `entry` relative to the source, with a final slash if it is a folder.
    siblings : the names in the same folder. An output of imgkit is recognized by the files beside it.
    rules : all rules that apply to the folder. The last one that matches decides.
    """
    decision = _find_last_decision(rules, name)
    if decision is not None:
        return decision
    if name.endswith("/"):
        return _is_generated(entry, name, rules)
    return _is_output(entry.name, siblings)


def _is_generated(folder: os.DirEntry[str], prefix: str, rules: _Rules) -> bool:
    """Return whether everything in `folder` was made by a program, not by a person.

    This is the case for a cache, a virtual environment, the folder of a run, and a folder with nothing but
    outputs of imgkit.

    Parameters
    ----------
    prefix : the path of `folder` relative to the source, with a final slash.
    rules : all rules that apply to the folder.
    """
    with os.scandir(folder) as scan:
        entries = list(scan)
    names = {entry.name for entry in entries}
    has_cache_marker = not names.isdisjoint(CACHE_MARKERS)
    is_run_folder = names >= _RUN_FOLDER_NAMES
    if has_cache_marker or is_run_folder:
        return True
    for entry in entries:
        # imgkit's own temporary files (their names have this prefix) never go into an image, so they decide
        # nothing here.
        if entry.name.startswith(TEMPORARY):
            continue
        # A file that a pattern matches is one that a person cares about.
        has_pattern = _find_last_decision(rules, prefix + entry.name) is not None
        if has_pattern or not _is_output_or_run(entry, names):
            return False
    return bool(entries)  # an empty folder may have been made by a person


def _is_output_or_run(entry: os.DirEntry[str], siblings: set[str]) -> bool:
    """Return whether imgkit writes files with the name of `entry`, or `entry` is the folder of a run.

    `siblings` are the names in the same folder.
    """
    if entry.is_dir(follow_symlinks=False):
        return all(Path(entry.path, name).exists() for name in _RUN_FOLDER_NAMES)
    return _is_output(entry.name, siblings)


def _is_secret(entry: os.DirEntry[str], name: str) -> bool:
    """Return whether a file is a private key, or has the name of a file with secrets, such as ``.netrc``.

    The content decides for a file whose name ends in ``.pem`` or ``.key``, because public certificates have
    the same suffixes. It also decides for a small file without a suffix, such as ``id_deploy``.
    """
    has_secret_name = secret_patterns.is_secret_file(name)
    if not entry.is_file(follow_symlinks=False):
        return has_secret_name
    if name.lower().endswith((".pem", ".key")):
        start = _read_start(entry)
        # A certificate in PEM form is public. A file in another form may be a binary key.
        is_pem = start.startswith(b"-----BEGIN ")
        return secret_patterns.is_private_key(start) or not is_pem
    if has_secret_name:
        return True
    # Keys are small, so a larger file is not read.
    may_be_key = "." not in entry.name and entry.stat().st_size <= _KEY_BYTES
    return may_be_key and secret_patterns.is_private_key(_read_start(entry))


def _read_start(entry: os.DirEntry[str]) -> bytes:
    """Return the beginning of a file, which is long enough to contain any key."""
    with files.open_regular(Path(entry.path)) as file:
        return file.read(_KEY_BYTES)


def _is_output(name: str, siblings: set[str]) -> bool:
    """Return whether imgkit writes files with this `name`. `siblings` are the names in the same folder."""
    # A .tar may be a data set. It is an archive of imgkit only if a manifest file is in the same folder.
    archive = name.removesuffix(".manifest.json").removesuffix(".sha256")
    if ".tar" in archive and archive in siblings and f"{archive}.manifest.json" in siblings:
        return True
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in OUTPUTS)


def _compile_patterns(lines: Sequence[str], where: str) -> GitIgnoreSpec:
    """Return a matcher for patterns in the syntax of .gitignore.

    `where` is the file or key that contains the patterns, for messages.

    Raises
    ------
    UsageError : a pattern is invalid, or has so many stars that matching it could take hours.
    """
    import pathspec

    for line in lines:
        # A line that begins with "#" is a comment.
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
    """Return the number of stars in `pattern`.

    Each star multiplies the time that pathspec needs for a match.
    """
    count = 0
    for part in pattern.split("/"):
        if part == "**":  # matches any number of folders, but takes only the time of one star
            count += 1
        else:
            count += part.count("*")
    return count


def _read_parent_gitignores(source: Path) -> tuple[_Patterns, ...]:
    """Return the patterns of the ``.gitignore`` files in the folders above `source`, outermost first.

    The search ends at the root of the git repository. If the patterns exclude `source` as a whole, return no
    patterns, because the recipe names that folder on purpose.
    """
    source = source.resolve()
    patterns: tuple[_Patterns, ...] = ()
    for folder in _list_parents_in_repository(source):
        above = f"{source.relative_to(folder).as_posix()}/"
        patterns = (_read_patterns(folder / ".gitignore", above=above), *patterns)
    # The empty path stands for `source` itself. The decision is None if no pattern matches it.
    is_source_excluded = _find_last_decision(patterns, "") is True
    return () if is_source_excluded else patterns


def _list_parents_in_repository(folder: Path) -> Sequence[Path]:
    """Return the folders above `folder`, from the nearest one to the root of its git repository.

    The result is empty if `folder` is the root itself. It is also empty outside of a repository, because a
    .gitignore in the home folder, for example, does not apply there.
    """
    for parent_count, candidate in enumerate((folder, *folder.parents)):
        is_repository_root = os.path.lexists(candidate / ".git")
        if is_repository_root:
            return folder.parents[:parent_count]
    return ()


def _read_dockerignore(source: Path) -> _Patterns:
    """Return the patterns of the source's ``.dockerignore``, converted to the syntax of .gitignore.

    In .dockerignore, a pattern matches only paths that start in the folder of the file. So a slash is added:
    ``*.bin`` -> ``/*.bin``, ``!a/b`` -> ``!/a/b``.

    Raises
    ------
    UsageError : the file is a link to a file outside of its folder, or a pattern is invalid.
    """
    file = source / ".dockerignore"
    # A message may quote the patterns. In a source of unknown origin, the file may be a link to a secret.
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
        # As in Docker, "./a/" and "a/../b" are simplified to "a" and "b".
        path = os.path.normpath(pattern.removeprefix("!").strip().lstrip("/"))
        anchored_patterns.append(f"{negation}/{path}")
    return _Patterns(spec=_compile_patterns(anchored_patterns, str(file)))


def _read_patterns(file: Path, *, above: str = "", below: str = "") -> _Patterns:
    """Return the patterns of a ``.gitignore``. If there is no such file, the result matches nothing."""
    return _Patterns(spec=_compile_patterns(_read_lines(file), str(file)), above=above, below=below)


def _read_lines(file: Path) -> list[str]:
    """Return the lines of a list of patterns, or no lines if there is no such file."""
    # Like git, ignore a .gitignore that is a symbolic link.
    if not file.is_file() or (file.name == ".gitignore" and file.is_symlink()):
        return []
    return files.read_text(file, most_bytes=_MOST_BYTES, errors="surrogateescape").splitlines()
