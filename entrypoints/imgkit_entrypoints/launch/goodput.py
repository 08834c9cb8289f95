"""Goodput: the part of the allocated time in which a run trained, and where the rest went. Pure arithmetic.

The time of every node belongs to exactly one part at each moment, so the parts add up to what was allocated.
docs/reference/json.md defines them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.launch.progress import Progress

SCHEMA = 1
FILE = "goodput.json"
MOST_STARTS = 1000
"""Starts that the file keeps, the newest."""
TOLD, SEEN = "program", "launcher"
"""Who knows where the time of a start went."""
_MOST_NODE_S = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Node-seconds: a second of two nodes counts twice."""

    starting: float = 0.0
    """The time between the start of the allocation and the first step."""
    training: float = 0.0
    """Steps and evaluations whose result lasts."""
    saving: float = 0.0
    """Time in which training waited for a save."""
    lost: float = 0.0
    """The time between the last saved step before a fault and the first step after it."""
    idle: float = 0.0
    """The rest: nodes without a worker while others train, and the end of the run."""

    @property
    def allocated(self) -> float:
        """The sum."""
        return self.starting + self.training + self.saving + self.lost + self.idle

    def plus(self, other: Parts) -> Parts:
        """Return the sum of both."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Parts(**dict(zip(NAMES, (one + two for one, two in pairs), strict=True)))


NAMES = tuple(one.name for one in dataclasses.fields(Parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of torchrun. Times are those of `time.monotonic`."""

    began_s: float
    nodes: int
    """Nodes with workers."""
    ended_s: float | None = None
    """None: it still runs."""
    well: bool = False
    """The program has ended with 0, or with a saved state."""
    progress: Progress | None = None
    """The notes of the program; None: it has noted no step yet, or never does."""

    def counted(self, now_s: float) -> tuple[float, float, float]:
        """Return beginning and end of the time whose result lasts, and the seconds for saves in it.

        An attempt that still runs counts as if a fault ended it now.
        """
        if self.progress is None:
            end_s = now_s if self.ended_s is None else self.ended_s
            first_s = end_s if self.well else self.began_s
            return first_s, first_s, 0.0
        made = self.progress
        if self.well:
            return made.first_s, made.last_s, made.saving_s
        return made.first_s, made.kept_s or made.first_s, made.kept_saving_s


def parts(began_s: float, now_s: float, nodes: int, attempts: Sequence[Attempt]) -> Parts:
    """Divide the time of `nodes` nodes from `began_s` to `now_s` among the parts."""
    spent = dict.fromkeys(NAMES, 0.0)
    at_s, after = began_s, "lost"
    for number, attempt in enumerate(attempts):
        first_s, last_s, saving_s = attempt.counted(now_s)
        first_s = min(max(first_s, at_s), now_s)
        last_s = min(max(last_s, first_s), now_s)
        saving_s = min(max(saving_s, 0.0), last_s - first_s)
        working = min(attempt.nodes, nodes)
        spent["lost" if number and after == "lost" else "starting"] += (first_s - at_s) * nodes
        spent["saving"] += saving_s * working
        spent["training"] += (last_s - first_s - saving_s) * working
        spent["idle"] += (last_s - first_s) * (nodes - working)
        at_s, after = last_s, "idle" if attempt.well else "lost"
    spent[after] += max(0.0, now_s - at_s) * nodes
    return Parts(**spent)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedStart:
    """One start of the launchers, in a run's folder. It is written as if a fault ended the start just now."""

    job: str
    began: str
    """Start of the allocation or of the launcher, UTC."""
    seconds: float
    """Time since then."""
    nodes: int
    attempts: int
    code: int | None
    """Exit code; None: it runs, or it was killed."""
    source: str
    """`TOLD`, or `SEEN`: the program has noted no step, so that nothing is known but the wall time."""
    node_s: Parts

    def __post_init__(self) -> None:
        """Refuse what no start can be.

        Raises
        ------
        ValueError : a number is negative or far too large, or `began` is no time.
        """
        for value in (self.seconds, self.nodes, *dataclasses.astuple(self.node_s)):
            if not 0 <= value <= _MOST_NODE_S:
                raise ValueError(f"{value} is no number of seconds or nodes")
        if self.ended.year > 9000:
            raise ValueError(f"{self.began} is no time")

    @property
    def ended(self) -> datetime:
        """The last moment that is known.

        Raises
        ------
        ValueError : the times are none.
        """
        try:
            return datetime.fromisoformat(self.began).astimezone(timezone.utc) + timedelta(
                seconds=self.seconds
            )
        except OverflowError as error:
            raise ValueError(str(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """All starts in a run's folder, the oldest first."""

    starts: tuple[CountedStart, ...] = field(default=())

    @property
    def node_s(self) -> Parts:
        """The sum over all starts."""
        total = Parts()
        for start in self.starts:
            total = total.plus(start.node_s)
        return total

    @property
    def share(self) -> float | None:
        """Training as a part of the whole, 0 to 1; None where the program has never noted a step."""
        total = self.node_s
        if all(start.source == SEEN for start in self.starts):
            return None
        return total.training / total.allocated if total.allocated else 0.0

    def with_start(self, start: CountedStart) -> Goodput:
        """Return these starts and one more."""
        return Goodput(starts=(*self.starts, start)[-MOST_STARTS:])

    def to_json(self) -> str:
        """Return the text of the file."""
        total, share = self.node_s, self.share
        about: dict[str, Any] = {
            "schema": SCHEMA,
            "goodput": None if share is None else round(share, 4),
            "allocated_node_s": round(total.allocated, 3),
            "node_s": _rounded(total),
            "starts": [
                {**dataclasses.asdict(start), "node_s": _rounded(start.node_s)} for start in self.starts
            ],
        }
        return json.dumps(about, indent=1) + "\n"

    def __str__(self) -> str:
        """Return the line that a run ends with."""
        total, nodes = self.node_s, {start.nodes for start in self.starts}
        size = nodes.pop() if len(nodes) == 1 else 0
        unit, places = ("s" if size else "node-s"), (0 if total.allocated >= 100 * (size or 1) else 1)

        def shown(node_s: float) -> str:
            return f"{node_s / (size or 1):.{places}f} {unit}"

        where = f" on {size} node{'s' if size > 1 else ''}" if size else ""
        starts = f" over {len(self.starts)} starts" if len(self.starts) > 1 else ""
        if self.share is None:
            return f"{shown(total.allocated)}{where}{starts}; no goodput: the program reported no steps"
        words = {**dict(zip(NAMES, NAMES, strict=True)), "lost": "lost to faults"}
        told = ", ".join(f"{words[name]} {shown(getattr(total, name))}" for name in NAMES)
        return f"goodput {100 * self.share:.0f} %{starts}: {shown(total.allocated)}{where}: {told}"


def _rounded(spent: Parts) -> dict[str, float]:
    return {name: round(getattr(spent, name), 3) for name in NAMES}


def from_json(text: str) -> Goodput:
    """Read the text of the file.

    Raises
    ------
    ValueError : it is damaged, or of a later imgkit.
    """
    values = json_text.parse(text)
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        raise ValueError(f"it has no schema {SCHEMA}")
    found: Goodput = json_text.read(Goodput, {"starts": values.get("starts")}, FILE)
    return found


def read(path: Path) -> Goodput:
    """Read the file `path`, which must be this user's own.

    Raises
    ------
    OSError : it cannot be read. ValueError : it is damaged, or of a later imgkit.
    """
    with files.open_own(path) as stream:
        return from_json(stream.read(json_text.MOST_BYTES + 1).decode())
