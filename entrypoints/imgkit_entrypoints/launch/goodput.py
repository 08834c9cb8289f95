"""Goodput: the part of the allocated time in which a run trained, and where the rest went.

Three layers: the program notes its progress in shared memory (`ProgressNotes`); the head's `GoodputTimer`
adds the instants of attempts and keeps the result in the run's folder; `parts` is pure arithmetic. The
time of every node belongs to exactly one part at each moment, so the parts add up to what was allocated.
docs/reference/json.md defines them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.arguments import digits
from imgkit_entrypoints.errors import EXIT_SAVED, ImgkitError
from imgkit_entrypoints.launch.watchdog import shared
from imgkit_entrypoints.schedulers.placement import Placement

SCHEMA = 1
FILE = "goodput.json"
MOST_STARTS = 1000
"""Starts that the file keeps, the newest."""
BY_PROGRAM, BY_AGENT = "program", "node_agent"
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
    """One start of the node agents, in a run's folder, written as if a fault ended it just now."""

    job: str
    began: str
    """Start of the allocation or of the node agent, UTC."""
    seconds: float
    """Time since then."""
    nodes: int
    attempts: int
    code: int | None
    """Exit code; None: it runs, or it was killed."""
    source: str
    """`BY_PROGRAM`, or `BY_AGENT`: the program has noted no step, so that only the wall time is known."""
    node_s: Parts

    def __post_init__(self) -> None:
        """Refuse what no start can be.

        Raises
        ------
        ValueError : a number is negative or far too large, or `began` is no time.
        """
        for value in (self.seconds, self.nodes, *dataclasses.astuple(self.node_s)):
            if not 0 <= value <= _MOST_NODE_S:
                raise ValueError(f"{value} is not a number of seconds or nodes")
        if self.ended.year > 9000:
            raise ValueError(f"{self.began} is not a time")

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
        if all(start.source == BY_AGENT for start in self.starts):
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


EVERY_S, SHARE = 60.0, 0.1
"""The file is written again after a minute, or sooner, after a tenth of the time that the start has taken."""
_LONGEST_S = 400 * 86400
"""No job is older."""


class GoodputTimer:
    """Notes when what began and ended. On other nodes than the head it tells nobody."""

    def __init__(
        self,
        env: Mapping[str, str],
        place: Placement,
        say: Callable[[str], None],
        source: str,
    ) -> None:
        """Begin to count; `source` is that of `CountedStart`, or empty: nobody asks for the goodput."""
        self._say, self._job, self._source = say, place.job_id, source
        self._head = bool(source) and place.node_rank == 0
        self._folder = Path(env["IMGKIT_RUN_DIR"]) if env.get("IMGKIT_RUN_DIR") else None
        self._attempts: list[Attempt] = []
        self._notes: Path | None = None
        self._written_s, self._warned = 0.0, False
        self.nodes = place.nnodes
        """Nodes of the run, also those that wait."""
        self.code: int | None = None
        """Exit code of the start."""
        self._earlier = self._read() if self._head and self._folder else Goodput()
        now = time.time()
        self._began_at = _began(env, self._earlier, now) if self._folder else now
        self.began_s = time.monotonic() - (now - self._began_at)
        """Start of the time that is counted: the job's, or this node's own."""

    def __enter__(self) -> GoodputTimer:
        self._write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ImgkitError):
            self.code = error.exit_code
        self._write()
        if self._head and self._attempts:
            self._say(str(self._now()))

    def attempt(self, notes: Path, nodes: int) -> float:
        """Torchrun starts on `nodes` nodes; the workers' notes of their progress will be in `notes`.

        Returns the time at which the first attempt on this node began.
        """
        clear_progress(notes)
        self._notes = notes
        began_s = time.monotonic()
        self._attempts.append(Attempt(began_s=began_s, nodes=nodes))
        return self._attempts[0].began_s

    def ended(self, code: int) -> None:
        """The attempt is over, on this node with the exit code `code`."""
        self._attempts[-1] = dataclasses.replace(
            self._latest(), ended_s=time.monotonic(), well=code in (0, EXIT_SAVED)
        )

    def refresh(self) -> None:
        """Write the file again, if it is time."""
        now_s = time.monotonic()
        due_s = min(EVERY_S, max(1.0, SHARE * (now_s - self.began_s)))
        if now_s - self._written_s >= due_s:
            self._write()

    def _latest(self) -> Attempt:
        last = self._attempts[-1]
        if self._notes is None or last.ended_s is not None:
            return last
        return dataclasses.replace(last, progress=read_progress(self._notes))

    def _now(self) -> Goodput:
        attempts = [*self._attempts[:-1], self._latest()] if self._attempts else []
        now_s = time.monotonic()
        began = datetime.fromtimestamp(self._began_at, timezone.utc).isoformat(timespec="milliseconds")
        start = CountedStart(
            job=self._job,
            began=began,
            seconds=round(now_s - self.began_s, 3),
            nodes=self.nodes,
            attempts=len(attempts),
            code=self.code,
            source=BY_PROGRAM if any(one.progress for one in attempts) else self._source,
            node_s=parts(self.began_s, now_s, self.nodes, attempts),
        )
        return self._earlier.with_start(start)

    def _read(self) -> Goodput:
        """The earlier starts in the run's folder; none where their file is damaged."""
        assert self._folder is not None  # noqa: S101 - the caller has asked
        path = self._folder / FILE
        try:
            return read(path)
        except FileNotFoundError:
            return Goodput()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            self._say(f"warning: {path} is ignored: {why}; goodput covers only this start")
            return Goodput()

    def _write(self) -> None:
        if not self._head or self._folder is None:
            return
        self._written_s = time.monotonic()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            files.put(self._folder / FILE, self._now().to_json())
        except OSError as error:
            if not self._warned:
                self._say(f"warning: {self._folder / FILE} cannot be written: {error.strerror}")
            self._warned = True


def _began(env: Mapping[str, str], earlier: Goodput, now: float) -> float:
    """Return when the time of this start began, in seconds of the epoch.

    It is the scheduler's start of the job, where that is known, or the end of an earlier start in that job.
    """
    given = digits(env.get("SLURM_JOB_START_TIME", ""))
    if given is None or not 0 <= now - given <= _LONGEST_S:
        return now
    ends = (start.ended.timestamp() for start in earlier.starts)
    return max((float(given), *(end for end in ends if end <= now)))


PROGRESS_FILE = "progress"
PROGRESS_LAYOUT = struct.Struct("5d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The notes, as the node agent reads them."""

    first_s: float
    """Beginning of the first step of this attempt."""
    last_s: float
    """End of the latest step or save."""
    saving_s: float
    """Seconds between the two in which training waited for a save."""
    kept_s: float
    """End of the step whose state is safely written; 0: this attempt has written none."""
    kept_saving_s: float
    """`saving_s` at that time."""


class ProgressNotes:
    """The notes, as the worker writes them. Without a node agent they go nowhere."""

    def __init__(self, folder: str | None, rank: int) -> None:
        self._notes = memoryview(bytearray(PROGRESS_LAYOUT.size)).cast("d")
        self._states: dict[int, tuple[float, float]] = {}
        if folder and rank == 0:
            with contextlib.suppress(OSError):
                self._notes = memoryview(shared(Path(folder) / PROGRESS_FILE, PROGRESS_LAYOUT.size)).cast("d")

    def trains(self) -> None:
        """A step begins."""
        if not self._notes[0]:
            self._notes[1] = time.monotonic()
            self._notes[0] = self._notes[1]  # last: from now on the notes count

    def moved(self) -> None:
        """A step is done."""
        self._notes[1] = time.monotonic()

    @contextlib.contextmanager
    def saving(self, step: int | None = None) -> Iterator[None]:
        """Note the time for which training waits for a save, of the state after `step`."""
        began_s = time.monotonic()
        if step is not None:
            self._states[step] = began_s, self._notes[2]
        yield
        self._notes[1] = time.monotonic()
        self._notes[2] += self._notes[1] - began_s

    def keeps(self, step: int) -> None:
        """The state after `step` is safely written."""
        self._notes[4], self._notes[3] = reversed(self._states.pop(step, (0.0, 0.0)))


def clear_progress(folder: Path) -> None:
    """Forget the notes of an earlier attempt."""
    with contextlib.suppress(OSError):
        (folder / PROGRESS_FILE).unlink(missing_ok=True)


def read_progress(folder: Path) -> Progress | None:
    """Return the notes of the attempt; None before its first step, and where the program writes none."""
    try:
        with files.open_regular(folder / PROGRESS_FILE) as file:
            found = PROGRESS_LAYOUT.unpack(file.read(PROGRESS_LAYOUT.size))
    except (OSError, struct.error):
        return None
    if not found[0] or not all(map(math.isfinite, found)):
        return None
    first_s, last_s, saving_s, kept_s, kept_saving_s = found
    return Progress(
        first_s=first_s, last_s=last_s, saving_s=saving_s, kept_s=kept_s, kept_saving_s=kept_saving_s
    )
