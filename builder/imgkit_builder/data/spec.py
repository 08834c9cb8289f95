"""Parse an item of the key ``data``: a folder of the project, or a path on the cluster and its place."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass

from imgkit_builder.recipe import rules as recipe_rules
from imgkit_entrypoints import rules
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import WORKSPACE

_PROJECT_PATH = re.compile(r"[^\x00-\x1f\x7f\"'\\%`$:,*?\[\]]+")
"""A path that needs no quotes in a mount option, and is no pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """What one item of ``data`` means."""

    source: str
    """A folder of the project, relative to it; or a path on the nodes, which may begin with a variable."""
    target: str
    """Absolute path at which the job sees it."""

    @property
    def is_local(self) -> bool:
        """Whether the data is in the project, and has to be sent to a remote."""
        return not self.source.startswith(("/", "$"))


def parse(text: str) -> DataSpec:
    """Return the meaning of ``data/letters``, or of ``/gpfs/letters:/data``.

    Raises
    ------
    UsageError : the text has neither of these forms.
    """
    if text.startswith(("/", "$")):
        return _parse_cluster_path(text)
    path = posixpath.normpath(text)
    if not _PROJECT_PATH.fullmatch(text) or path.startswith((".", "~")):
        raise UsageError(
            f"{text!r} is not a folder of data",
            where="data",
            hint="a folder of the project: data/NAME; or a path on the cluster: /SRC:/DEST",
        )
    return DataSpec(source=path, target=f"/{WORKSPACE}/{path}")


def parse_all(texts: Iterable[str]) -> tuple[DataSpec, ...]:
    """Return the meaning of all items.

    Raises
    ------
    UsageError : an item cannot be parsed, or the job would see one inside another.
    """
    specs: list[DataSpec] = []
    for text in texts:
        spec = parse(text)
        for earlier in specs:
            outer, inner = sorted((earlier.target, spec.target), key=len)
            if f"{inner}/".startswith(f"{outer}/"):
                raise UsageError(
                    f"{inner} is in {outer}, which is another folder of data",
                    where="data",
                    hint="remove one of them, or give it another place: /SRC:/DEST",
                )
        specs.append(spec)
    return tuple(specs)


def _parse_cluster_path(text: str) -> DataSpec:
    """Return the meaning of ``/SRC:/DEST``, in which SRC may begin with a variable of the site."""
    source, _, target = text.partition(":")
    faults = [*rules.printable(text), *rules.bind(text)]
    if not faults and (not target or ":" in target):
        faults = [(f"{text!r} does not say where the job sees it", f"write {source}:/DEST")]
    faults += recipe_rules.copy_target(target) if not faults else ()
    for message, hint in faults:
        raise UsageError(message, where="data", hint=hint)
    return DataSpec(source=source, target=posixpath.normpath(target))
