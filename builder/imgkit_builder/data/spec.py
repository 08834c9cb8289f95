"""Parse the items of the key ``data``: folders of the project, paths on the cluster, and hub repositories.

Jobs see models of the Hugging Face hub in ``/workspace/hf/hub``, which has the layout of the hub's cache.
They see data sets in ``/workspace/hf/data``, because ``datasets`` does not read that cache without internet.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from imgkit_builder.recipe import rules as recipe_rules
from imgkit_entrypoints import rules
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import WORKSPACE

# A path of the project that needs no quotes in a mount option, in which ":" and "," separate the parts, and
# that rsync and shells do not take for a pattern.
_PROJECT_PATH = re.compile(r"[^\x00-\x1f\x7f\"'\\%`$:,*?\[\]]+")
HUB_HOME = "hf"
"""The folder of the run's code that is HF_HOME in a job with items of the hub."""
HUB_CACHE = ".hub"
"""Folder in a data set that is laid out as the hub's cache. `datasets` ignores it for its leading dot."""
# "hf://openai-community/gpt2", "hf://gpt2@v1.0", "hf://datasets/me/letters@refs/pr/3"
_HUB_ITEM = re.compile(
    r"hf://(?P<kind>datasets/)?(?P<name>[a-z0-9][\w.-]*(/[a-z0-9][\w.-]*)?)(@(?P<revision>[a-z0-9][\w./-]*))?",
    re.ASCII | re.IGNORECASE,
)
COMMIT = re.compile(r"[0-9a-f]{40}")
"""The complete id of a commit of the hub, a SHA-1 as in Git."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRepo:
    """A model or a data set of the Hugging Face hub."""

    name: str
    """``openai-community/gpt2``, or ``gpt2``."""
    is_data_set: bool
    revision: str
    """A branch, a tag or a commit. If it is empty, the newest commit is meant."""

    @property
    def cache_name(self) -> str:
        """Return the repository's folder in the hub's cache: ``models--openai-community--gpt2``."""
        kind = "datasets" if self.is_data_set else "models"
        return "--".join((kind, *self.name.split("/")))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """One item of ``data``: where the data comes from, and where the job sees it."""

    source: str
    """The path of a folder, or the item itself for a repository of the hub.

    A folder of the project has a path relative to the project, ``data/letters``. A folder on the nodes has an
    absolute path, or one that begins with a variable of the site: ``/gpfs/letters``, ``$SCRATCH/letters``.
    """
    target: str
    """Absolute path at which the job sees the data."""
    hub: HubRepo | None = None
    """The repository of the hub. It is None for a folder."""

    @property
    def is_local(self) -> bool:
        """Return whether the data is on this machine, so that it has to be sent to a remote."""
        # Items of the hub count, too. They are downloaded here and sent like a folder of the project.
        return not self.source.startswith(("/", "$"))


def parse_spec(text: str) -> DataSpec:
    """Parse an item such as ``data/letters``, ``/gpfs/letters:/data`` or ``hf://datasets/me/letters``.

    The first form is a folder of the project, the second one a folder of the cluster with its path in the
    job, and the third one a repository of the hub.

    Raises
    ------
    UsageError : the text has none of these forms.
    """
    if text.startswith("hf:"):
        return _parse_hub_item(text)
    if text.startswith(("/", "$")):
        return _parse_cluster_path(text)
    path = posixpath.normpath(text)
    # A leading dot means the project itself, a folder outside of it, or a hidden one.
    if not _PROJECT_PATH.fullmatch(text) or path.startswith((".", "~")):
        raise UsageError(
            f"{text!r} is not a folder of data",
            where="data",
            hint="a folder of the project: data/NAME; or a path on the cluster: /SRC:/DEST",
        )
    return DataSpec(source=path, target=f"/{WORKSPACE}/{path}")


def parse_all(texts: Iterable[str]) -> tuple[DataSpec, ...]:
    """Parse all items, and check that no two of them overlap in the job: ``/data`` and ``/data/letters``.

    Raises
    ------
    UsageError : an item cannot be parsed, or the target of one is the target of another or below it.
    """
    specs = tuple(parse_spec(text) for text in texts)
    for first, second in itertools.combinations(specs, 2):
        outer, inner = sorted((first.target, second.target), key=len)
        if posixpath.commonpath((outer, inner)) == outer:
            raise UsageError(
                f"{inner} is in {outer}, which is another folder of data",
                where="data",
                hint="remove one of them, or give it another place: /SRC:/DEST",
            )
    return specs


def _parse_hub_item(text: str) -> DataSpec:
    """Parse ``hf://NAME[@REVISION]`` or ``hf://datasets/NAME[@REVISION]``."""
    match = _HUB_ITEM.fullmatch(text)
    # "--" separates the parts of a folder's name in the hub's cache, so "--" in a name would be ambiguous.
    if match is None or ".." in text or "--" in match["name"]:
        raise UsageError(
            f"{text!r} is no model or data set of the hub",
            where="data",
            hint="hf://NAME or hf://datasets/NAME, and perhaps @REVISION: hf://openai-community/gpt2@main",
        )
    repo = HubRepo(
        name=match["name"], is_data_set=match["kind"] is not None, revision=match["revision"] or ""
    )
    path = f"data/{repo.name}" if repo.is_data_set else f"hub/{repo.cache_name}"
    return DataSpec(source=text, target=f"/{WORKSPACE}/{HUB_HOME}/{path}", hub=repo)


def _parse_cluster_path(text: str) -> DataSpec:
    """Parse ``/SRC:/DEST``. SRC may begin with a variable of the site: ``$SCRATCH/letters:/data``."""
    source, _, target = text.partition(":")
    for message, hint in _cluster_path_faults(text, source, target):
        raise UsageError(message, where="data", hint=hint)
    return DataSpec(source=source, target=posixpath.normpath(target))


def _cluster_path_faults(text: str, source: str, target: str) -> Iterator[rules.Fault]:
    """Yield what is wrong with ``SOURCE:TARGET``, a folder of the cluster, and a hint for each fault.

    The most important fault comes first, and callers show only that one.

    Parameters
    ----------
    text : the whole item.
    """
    yield from rules.printable_text(text)
    yield from rules.bind_mount(text)
    if not target or ":" in target:
        yield f"{text!r} does not say where the job sees it", f"write {source}:/DEST"
    yield from recipe_rules.copy_target(target)
