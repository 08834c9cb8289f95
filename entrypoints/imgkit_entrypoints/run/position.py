"""The position of a run in its data, and what the ranks must agree on before they resume from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import checkpoints, random_state, resumable
from imgkit_entrypoints.run.checkpoints import FoundCheckpoint
from imgkit_entrypoints.run.random_state import LoopGenerators
from imgkit_entrypoints.run.ranks import Ranks, told
from imgkit_entrypoints.run.tracked import OWN_PARTS

RANDOM, PASS = OWN_PARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One of the loops over `Run.steps` in an epoch, and the loader of its latest pass."""

    passes: int = 0
    """Those that are done."""
    batches: int = -1
    """Length of the loader; -1: unknown, or not the same in every pass."""
    samples: int = -1
    """Samples of rank 0's loader; -1: unknown."""
    batch_size: int | None = None
    """Samples in each batch of a rank; None: unknown."""
    sampler_epoch: int | None = None
    keeps_workers: bool = False
    """Whether the pass began with the workers of the one before."""
    keeps_generators: bool = False
    data: str = ""
    """`resumable.fingerprint` of rank 0's loader; empty: unknown."""

    @classmethod
    def over(cls, loader: Any, samples: int, last: Loop) -> Loop:
        """Describe the loop `last` with the loader of another pass."""
        return cls(
            passes=last.passes,
            batches=resumable.length(loader) if resumable.has_fixed_length(loader) else -1,
            samples=samples,
            batch_size=resumable.batch_size(loader),
            sampler_epoch=resumable.sampler_epoch(loader),
            keeps_workers=getattr(loader, "_iterator", None) is not None,
            data=resumable.fingerprint(loader),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPosition:
    """The position that a checkpoint keeps; equal on all ranks."""

    step: int = 0
    loops: Mapping[str, Loop] = field(default_factory=dict)
    """The loops of an epoch by name, in their order."""
    batch: int = 0
    """Batches that each rank has had in the pass that is not done."""
    at_start: bool = False
    """Whether the checkpoint was taken by `Run.steps` before the first batch of a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOptions:
    """What `Run.steps` was called with on one rank."""

    name: str
    batches: int
    """Length of the loader; -1: unknown."""
    samples: int
    save_every: int
    accumulate: int
    step: int
    tracked: str
    """Names of the objects that `Run.track` got."""


@dataclass(slots=True, kw_only=True)
class _Resumed:
    """What the first pass after a restore needs of the checkpoint."""

    drawn: Mapping[str, Any]
    pass_drawn: Mapping[str, Any]
    same_ranks: bool
    repeats: bool
    """Whether the program does again what it had done in this epoch before the checkpoint."""


class LivePosition:
    """The position of a running loop, with the random numbers that belong to it."""

    def __init__(self) -> None:
        self.step = 0
        self.was_broken_off = False
        """Whether the latest pass ended before its loader."""
        self._loops: dict[str, Loop] = {}
        self._callers: list[str] = []
        """Lines of the program by which it came to `Run.steps` without a name."""
        self._name, self._batch, self._length = "", 0, -1
        """Loop, batches so far and length of the latest pass."""
        self.is_open = self._is_unfinished = False
        """Whether that pass is under way, and whether it is not done."""
        self._generators = LoopGenerators()
        self._pass_drawn: Mapping[str, Any] | None = None
        self._resumed: _Resumed | None = None
        self._saved_loops: dict[str, Loop] = {}
        """Those in the checkpoint without a pass since the restore."""

    @property
    def epoch(self) -> int:
        """Epochs that are done, with the passes of all their loops."""
        return min((one.passes for one in self._loops.values()), default=0)

    @property
    def _are_in_first_epoch(self) -> bool:
        return all(one.passes == 1 for one in self._loops.values())

    @property
    def may_have_more_loops(self) -> bool:
        """Whether the epoch may have more loops than those with a name that it had so far."""
        return self._are_in_first_epoch and any(self._loops)

    @property
    def is_between_passes(self) -> bool:
        """Whether the checkpoint was taken between two passes, and none has begun since."""
        return self._resumed is not None and not self._batch and self.has_loops

    def draws_before_pass(self) -> bool:
        """Whether the program has drawn random numbers between the restore and a pass that was under way.

        They are other ones than at the beginning of that pass, unless it has set a seed.
        """
        resumed = self._resumed
        if resumed is None or not self._batch or not resumed.same_ranks:
            return False
        now = random_state.current()
        return not any(random_state.same(now, one) for one in (resumed.drawn, resumed.pass_drawn))

    def other_data(self, name: str, loader: Any, samples: int) -> str:
        """How the data of a loop's first pass since the restore differ from those in the checkpoint."""
        saved = self._saved_loops.pop(name, None)
        if saved is None:
            return ""
        if -1 not in (saved.samples, samples) and saved.samples != samples:
            return f"has {samples} samples, and had {saved.samples}"
        if saved.data and (now := resumable.fingerprint(loader)) and now != saved.data:
            return f"has as many samples as before, but other values or file names ({saved.data}, now {now})"
        return ""

    @property
    def repeats(self) -> bool:
        """Whether the program does again what it had done in this epoch before the checkpoint."""
        return self._resumed is not None and self._resumed.repeats

    @property
    def has_loops(self) -> bool:
        """Whether there was a pass of `Run.steps`."""
        return bool(self._loops)

    def kept(self, *, at_start: bool = False) -> RunPosition:
        """The position as a checkpoint keeps it."""
        return RunPosition(step=self.step, loops=dict(self._loops), batch=self._batch, at_start=at_start)

    def passes(self) -> float:
        """Epochs so far, with the part of the one that is under way."""
        part = self._batch / self._length if self._length > 0 else 0.0
        return (sum(one.passes for one in self._loops.values()) + part) / max(1, len(self._loops))

    def count(self) -> None:
        """A step is done."""
        self.step, self._batch = self.step + 1, self._batch + self.is_open

    def between_updates(self, accumulate: int) -> bool:
        """Whether the weights are updated after every `accumulate` batches, and were after this one."""
        return self._batch % accumulate == 0 or self._batch == self._length

    def drawn(self) -> dict[str, bytes]:
        """This rank's random states as torch saves them, by the part of a checkpoint that keeps them."""
        pending = self._resumed.drawn if self._resumed and self._batch else None
        now = {**(pending or random_state.current()), "more": self._generators.states()}
        states: dict[str, Mapping[str, Any]] = {RANDOM: now}
        if self._loops:
            states[PASS] = {**(self._pass_drawn or now), "more": self._generators.at_start()}
        return {name: random_state.written(state) for name, state in states.items()}

    def take_over(
        self, position: RunPosition, found: FoundCheckpoint, here: Ranks, say: Callable[[str], None]
    ) -> None:
        """Go on from the `position` in a checkpoint, with its random numbers; a collective call."""
        drawn = found.rows(RANDOM)
        pass_drawn = found.rows(PASS) if PASS in found.parts else drawn
        self.step, self._loops, self._batch = position.step, dict(position.loops), position.batch
        self._saved_loops = dict(position.loops)
        try:
            if len(drawn) == here.world_size:
                own = drawn[here.rank]
                random_state.restore(own)
            else:
                own = self._of_other_ranks(len(drawn), drawn[0], here, say)
            begun = pass_drawn[here.rank % len(pass_drawn)]
            self._generators.take_over(own.get("more", {}), begun.get("more", {}))
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise UsageError(
                f"the random state of rank {here.rank} in the checkpoint is invalid ({error})",
                where=str(found.where / RANDOM),
                hint=f"mv {found.where} elsewhere, and the run resumes from an older checkpoint",
            ) from None
        self._pass_drawn = begun
        self._resumed = _Resumed(
            drawn=own,
            pass_drawn=begun,
            same_ranks=len(drawn) == here.world_size,
            repeats=position.at_start,
        )

    def _of_other_ranks(
        self, ranks: int, drawn: Mapping[str, Any], here: Ranks, say: Callable[[str], None]
    ) -> Mapping[str, Any]:
        """Convert the position of each of `ranks` ranks, and draw new random numbers for every rank."""
        batches = self._batch * ranks
        self._batch = batches // here.world_size
        if batches % here.world_size:
            say(f"{here.world_size} ranks instead of {ranks}: some samples of this epoch come again")
        random_state.restore(drawn)
        random_state.seed_everything(int(torch.randint(1 << 62, ()).item()) + here.rank)
        return random_state.current()

    def refuse_other_caller(self, frame: FrameType | None) -> None:
        """Raise UsageError if a loop without a name was called elsewhere in the program before."""
        now = []
        while frame is not None:
            now.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            frame = frame.f_back
        self._callers = self._callers or now
        if now != self._callers:
            pairs = zip(self._callers, now, strict=False)
            before, line = next((one for one in pairs if one[0] != one[1]), (self._callers[0], now[0]))
            raise UsageError(
                f"two loops over run.steps have no name, at {before} and {line}: a resume could not tell one "
                "from the other",
                where="run.steps",
                hint="where an epoch has several, name each: run.steps(loader, name=...); where only one of "
                "them runs in an epoch, give them the same name; an evaluation needs no run.steps",
            )

    def is_next(self, name: str) -> bool:
        """Whether a pass of the loop `name` begins now; False: it was done before the checkpoint.

        Raises
        ------
        UsageError : another pass is under way, or another loop comes now in the epoch.
        """
        if self.is_open:
            raise UsageError(
                f"the loop {_shown(name)} begins while a pass of the loop {_shown(self._name)} is under way",
                where="run.steps",
                hint="let one loader give the batches of both, for example over a StackDataset; an "
                "evaluation iterates over its loader without run.steps",
            )
        if self._is_unfinished:  # the program has caught the error that ended it
            self.close(broken_off=True)
        due = next((key for key, one in self._loops.items() if one.passes == self.epoch), name)
        is_new = name not in self._loops
        if name == due or (is_new and self._are_in_first_epoch):
            self._loops.setdefault(name, Loop())
            return True
        if self._resumed and not is_new and self._loops[name].passes > self.epoch:
            self._resumed.repeats = True
            return False
        raise UsageError(
            f"epoch {self.epoch} comes to the loop {_shown(name)}, but the loop {_shown(due)} is next",
            where="run.steps",
            hint="go through the same loops in every epoch, in the same order: run.steps(loader, name=...), "
            "with an empty list as the loader where a loop is left out",
        )

    def open(self, loader: Any, options: PassOptions) -> Iterator[Any]:
        """Begin a pass over `loader`, or go on where the checkpoint was taken, and iterate over its batches.

        Parameters
        ----------
        options : those of rank 0.

        Raises
        ------
        UsageError : the checkpoint was taken in a pass over another loader.
        """
        resumed, self._resumed = self._resumed, None
        middle = resumed if self._batch else None
        name, last = options.name, self._loops[options.name]
        loop = Loop.over(loader, options.samples, last)
        if middle:
            _refuse_other_loader(name, last, loop, same_ranks=middle.same_ranks)
            self._batch = _batches_of(self._batch, last.batch_size, loop.batch_size)
        elif resumed and resumed.repeats:
            random_state.restore(resumed.drawn)
        if middle or self._generators.has_saved(name):
            # After one pass alone, a loader that keeps its workers is taken for one that the program keeps.
            kept = last.keeps_workers or (not middle and last.passes == 1)
            loop = dataclasses.replace(loop, keeps_workers=kept)
        more = {name: resumable.generators(loader)}
        known = last.keeps_generators if middle or last.passes > 1 else None
        kept = self._generators.open(name, more[name], known, in_pass=middle is not None)
        self._loops[name] = dataclasses.replace(loop, keeps_generators=kept)
        self._name, self._length = name, resumable.length(loader)
        self.is_open = self._is_unfinished = True
        self.was_broken_off = False
        begun = self._pass_drawn = middle.pass_drawn if middle else random_state.current(more)
        now = middle.drawn if middle else begun
        return resumable.opened(
            loader,
            self._batch,
            keeps_workers=loop.keeps_workers,
            rewind=lambda: random_state.restore(begun, more),
            wind=lambda: random_state.restore(now, more),
        )

    def close(self, *, broken_off: bool = False) -> None:
        """The pass is done; `broken_off`: before its loader was."""
        loop = self._loops[self._name]
        self._loops[self._name] = dataclasses.replace(loop, passes=loop.passes + 1)
        self._batch, self._is_unfinished, self.was_broken_off = 0, False, broken_off
        self.leave()

    def leave(self) -> None:
        """The pass is not under way any more."""
        self.is_open = False


def _shown(name: str) -> str:
    return name or "without a name"


def _batches_of(batches: int, size: int | None, other: int | None) -> int:
    """Convert a number of batches into one of batches of another size."""
    return batches * size // other if size and other and size != other else batches


def _refuse_other_loader(name: str, last: Loop, loop: Loop, *, same_ranks: bool) -> None:
    """Raise UsageError if `loop` is not over the loader of `last`."""
    hint = "give it the same loader; where an epoch has several loops, name each: run.steps(loader, name=...)"
    if same_ranks and last.samples != loop.samples:
        other = f"was over {last.samples} samples, and this loader has {loop.samples}"
    elif same_ranks and last.batch_size == loop.batch_size and last.batches != loop.batches:
        other = f"was over {last.batches} batches, and this loader has {loop.batches}"
    elif last.sampler_epoch != loop.sampler_epoch:
        other = f"had a sampler with the epoch {last.sampler_epoch}, and this one has {loop.sampler_epoch}"
        hint = "for epoch in range(run.epoch, EPOCHS), and sampler.set_epoch(epoch) before run.steps"
    else:
        return
    raise UsageError(
        f"the pass of the loop {_shown(name)} in the checkpoint {other}", where="run.steps", hint=hint
    )


def position_in(found: FoundCheckpoint) -> RunPosition:
    """Read the position from a checkpoint; a collective call.

    Raises
    ------
    UsageError : another program has written it.
    """
    try:
        position: RunPosition = json_text.read(RunPosition, found.values(checkpoints.STATE)["run"], "run")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"this checkpoint was written by another program: its position is missing or invalid ({error})",
            where=str(found.where / checkpoints.STATE),
            hint="name another folder in Run.start(FOLDER); dist-train's checkpoints are for dist-train",
        ) from None
    return position


def refuse_different(every: Sequence[PassOptions]) -> None:
    """Raise UsageError, on every rank, if the options of the ranks differ; names the ranks."""
    for name, meaning in (
        ("step", "the ranks have taken different numbers of steps"),
        ("name", "the ranks are in different loops"),
        ("batches", "the loaders of the ranks have different lengths"),
        ("save_every", "the ranks have different values of save_every"),
        ("accumulate", "the ranks have different values of accumulate"),
        ("tracked", "the ranks track different objects"),
    ):
        values = [getattr(one, name) for one in every]
        if len(set(values)) > 1:
            raise UsageError(
                f"{meaning}: {told(values)}",
                where="run.steps",
                hint="all ranks must do the same; DistributedSampler gives them equal loaders",
            )
