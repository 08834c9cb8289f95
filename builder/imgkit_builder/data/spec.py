"""Parse the items of the key ``data``: folders of the project, paths on the cluster, and hub repositories.

Jobs find models of the Hugging Face hub in ``/workspace/hf/hub``, which has the layout of the hub's cache.
They find data sets in ``/workspace/hf/data``, because without internet ``datasets`` does not read the cache.
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

# A path of the project that needs no quotes in a mount option, in which ":" and "," separate the parts. The
# path must not be a pattern for rsync and shells, either.
_PROJECT_PATH = re.compile(r"[^\x00-\x1f\x7f\"'\\%`$:,*?\[\]]+")
HUB_HOME = "hf"
"""The folder below the run's code that is HF_HOME in a job with hub items."""
HUB_CACHE = ".hub"
"""The folder in a data set with the layout of the hub's cache. `datasets` skips names with a leading dot."""
# "hf://openai-community/gpt2", "hf://gpt2@v1.0", "hf://datasets/me/letters@refs/pr/3"
_HUB_ITEM_FORM = re.compile(
    r"hf://(?P<kind>datasets/)?(?P<name>[a-z0-9][\w.-]*(/[a-z0-9][\w.-]*)?)(@(?P<revision>[a-z0-9][\w./-]*))?",
    re.ASCII | re.IGNORECASE,
)
COMMIT = re.compile(r"[0-9a-f]{40}")
"""A complete commit id of the hub, which is a SHA-1 as in Git."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRepo:
    """A model or a data set of the Hugging Face hub."""

    name: str
    """``openai-community/gpt2``, or ``gpt2``."""
    is_data_set: bool
    revision: str
    """A branch, a tag or a commit. If it is empty, the newest commit is used."""

    @property
    def cache_name(self) -> str:
        """Return the name of the folder in the hub's cache: ``models--openai-community--gpt2``."""
        kind = "datasets" if self.is_data_set else "models"
        return "--".join((kind, *self.name.split("/")))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """One item of ``data``: where the data comes from, and where the job sees it."""

    source: str
    """The path of a folder. For a hub repository, the text of the item itself.

    A folder of the project has a path relative to the project, such as ``data/letters``. A folder on the
    nodes has an absolute path, or one that begins with a variable of the site: ``/gpfs/letters``,
    ``$SCRATCH/letters``.
    """
    target: str
    """The absolute path at which the job sees the data."""
    hub: HubRepo | None = None
    """The hub repository. None for a folder."""

    @property
    def is_local(self) -> bool:
        """Return whether the data is on this machine, so that it has to be sent to a remote."""
        # Hub items count as local. They are downloaded to this machine and then sent like a folder of the
        # project.
        return not self.source.startswith(("/", "$"))


def parse_spec(text: str) -> DataSpec:
    """Parse an item of the key ``data``.

    It has one of three forms: ``data/letters`` is a folder of the project, ``/gpfs/letters:/data`` is a
    folder of the cluster with its path in the job, and ``hf://datasets/me/letters`` is a hub repository.

    Raises
    ------
    UsageError : the text has none of these forms.
    """
    if text.startswith("hf:"):
        return _parse_hub_item(text)
    if text.startswith(("/", "$")):
        return _parse_cluster_path(text)
    path = posixpath.normpath(text)
    # A path with a leading dot is the project itself, a folder outside of it, or a hidden folder.
    if not _PROJECT_PATH.fullmatch(text) or path.startswith((".", "~")):
        raise UsageError(
            f"{text!r} is not a folder of data",
            where="data",
            hint="a folder of the project: data/NAME; or a path on the cluster: /SRC:/DEST",
        )
    return DataSpec(source=path, target=f"/{WORKSPACE}/{path}")


def parse_all(texts: Iterable[str]) -> tuple[DataSpec, ...]:
    """Parse all items, and refuse paths in the job that overlap, such as ``/data`` and ``/data/letters``.

    A mount at one of them would hide files of the other.

    Raises
    ------
    UsageError : an item cannot be parsed, or the target of an item is equal to another target or below it.
    """
    specs = tuple(parse_spec(text) for text in texts)
    for first, second in itertools.combinations(specs, 2):
        # A path can only be inside of a shorter path.
        outer, inner = sorted((first.target, second.target), key=len)
        if posixpath.commonpath((outer, inner)) == outer:
            raise UsageError(
                f"{inner} is in {outer}, which is another folder of data",
                where="data",
                hint="remove one of them, or give it another place: /SRC:/DEST",
            )
    return specs


def _parse_hub_item(text: str) -> DataSpec:
    """Parse ``hf://NAME[@REVISION]``, a model, or ``hf://datasets/NAME[@REVISION]``, a data set.

    Without a revision (a branch, tag or commit), the revision is empty, which means the newest one.

    Raises
    ------
    UsageError : the text has neither of these forms.
    """
    match = _HUB_ITEM_FORM.fullmatch(text)
    # In the hub's cache, "--" separates the parts of a folder's name. So a name with "--" would be ambiguous.
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
    """Yield the faults of ``SOURCE:TARGET``, a folder of the cluster, each with a hint.

    The most important fault comes first. Callers show only this one.

    Parameters
    ----------
    text : the whole item.
    """
    yield from rules.printable_text(text)
    yield from rules.bind_mount(text)
    if not target or ":" in target:
        yield f"{text!r} does not say where the job sees it", f"write {source}:/DEST"
    yield from recipe_rules.find_copy_target_faults(target)
