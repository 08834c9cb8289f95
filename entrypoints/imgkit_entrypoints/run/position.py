"""The position of a run in its data, with the random numbers that belong to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import loaders, random_state
from imgkit_entrypoints.run.random_state import GeneratorStates, restore_generators, states_of
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.tracked import has_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One of the loops over `Run.steps` in an epoch, and the loader of its latest pass."""

    passes: int = 0
    """Those that are finished."""
    batches: int = -1
    """Length of the loader; -1: unknown, or not the same in every pass."""
    samples: int = -1
    """Samples of the data; -1: unknown."""
    batch_size: int | None = None
    """Samples in each batch of a rank; None: unknown."""
    sampler_epoch: int | None = None

    @classmethod
    def over(cls, loader: Any, passes: int = 0) -> Loop:
        """Describe a loop over `loader` after so many passes."""
        samples, batches, batch_size = -1, -1, 1
        if isinstance(loader, DataLoader):
            samples, batch_size = loaders.length(loader.dataset), loader.batch_size
            if type(loader.batch_sampler) in (BatchSampler, type(None)):
                batches = loaders.length(loader)
        elif not has_state(loader):
            samples = loaders.length(loader)
        epoch = loaders.sampler_epoch(loader)
        return cls(
            passes=passes, batches=batches, samples=samples, batch_size=batch_size, sampler_epoch=epoch
        )


@dataclass(slots=True)
class _LoopGenerators:
    """The states of the generators that the loader of a loop uses."""

    first: GeneratorStates
    """At the start of the first pass of all."""
    start: GeneratorStates
    """At the start of the latest pass."""
    saved: GeneratorStates = ()
    """Those in the checkpoint; there was no pass since the restore."""
    live: Sequence[torch.Generator] = ()

    def now(self) -> GeneratorStates:
        """Return the states now."""
        return self.saved or states_of(self.live)


@dataclass(slots=True, kw_only=True)
class _Resume:
    """What the first pass after a restore needs of the checkpoint."""

    random: Mapping[str, Any]
    has_same_ranks: bool
    repeats: bool
    """Whether the program does again what it had done in this epoch before the checkpoint."""


class DataPosition:
    """Steps, passes and batches so far.

    A checkpoint within a pass has the random numbers at its start, from which samplers draw, and those of
    now. A resumed pass draws its order again, skips what was done, and goes on with the latter.
    """

    def __init__(self) -> None:
        self.step = 0
        self.is_open = False
        """Whether a pass is under way."""
        self.loops: dict[str, Loop] = {}
        """The loops of an epoch by name; a loop that has no name is alone."""
        self._name, self._batch, self._length = "", 0, -1
        """Loop, batches so far and length of the latest pass; 0 batches: it is finished."""
        self._generators: dict[str, _LoopGenerators] = {}
        self._pass_random: Mapping[str, Any] = {}
        self._resume: _Resume | None = None

    @property
    def epoch(self) -> int:
        """Epochs that are finished, with the passes of all their loops."""
        return min((loop.passes for loop in self.loops.values()), default=0)

    @property
    def repeats(self) -> bool:
        """Whether the program does again what it had done in this epoch before the checkpoint."""
        return self._resume is not None and self._resume.repeats

    @property
    def passes(self) -> float:
        """Epochs so far, with the part of the one that is under way."""
        part = self._batch / self._length if self._length > 0 else 0.0
        return (sum(loop.passes for loop in self.loops.values()) + part) / max(1, len(self.loops))

    def remaining(self, name: str, length: int) -> int:
        """Return the steps that are left in the pass of a loop, of `length` steps, that begins next."""
        if self._resume is None or name not in self.loops:
            return length
        if self.loops[name].passes > self.epoch:
            return 0
        return max(0, length - (self._batch if name == self._name else 0))

    def count(self) -> None:
        """Note that a step is done."""
        self.step, self._batch = self.step + 1, self._batch + self.is_open

    def values(self, *, at_start: bool = False) -> dict[str, Any]:
        """Return the position as a checkpoint has it; `at_start`: a pass begins now."""
        loops = {name: dataclasses.asdict(loop) for name, loop in self.loops.items()}
        numbers = {"step": self.step, "name": self._name, "batch": self._batch}
        return {**numbers, "loops": loops, "at_start": at_start}

    def rank_values(self) -> dict[str, Any]:
        """Return the random states of this rank as a checkpoint has them."""
        is_pending = self._resume is not None and self._batch > 0
        return {
            "now": self._resume.random if self._resume and is_pending else random_state.capture(),
            "pass": self._pass_random,
            "loops": {name: (item.first, item.start, item.now()) for name, item in self._generators.items()},
        }

    def take_over(
        self, values: Mapping[str, Any], random: Mapping[str, Any], world_size: int, ranks: Ranks
    ) -> str:
        """Go on from what `values` and `rank_values` returned in a run of `world_size` ranks.

        Returns a warning if some samples of the epoch come again; empty: none does.
        """
        self.step, self._batch, self._name = values["step"], values["batch"], values["name"]
        self.loops = {name: Loop(**loop) for name, loop in values["loops"].items()}
        self._pass_random = random["pass"]
        self._generators = {name: _LoopGenerators(*states) for name, states in random["loops"].items()}
        random_state.restore(random["now"])
        has_same_ranks, batches = world_size == ranks.world_size, self._batch * world_size
        if not has_same_ranks:
            self._batch = batches // ranks.world_size
            random_state.seed_everything(int(torch.randint(1 << 62, ()).item()) + ranks.rank)
        self._resume = _Resume(
            random=random_state.capture(), has_same_ranks=has_same_ranks, repeats=values["at_start"]
        )
        if batches % ranks.world_size == 0:
            return ""
        return f"{ranks.world_size} ranks instead of {world_size}: some samples of this epoch come again"

    def should_begin(self, name: str, loader: Any) -> bool:
        """Return whether a pass of the loop `name` begins now; False: it was finished before the checkpoint.

        Raises
        ------
        UsageError : another pass is not finished, or another loop comes now in the epoch.
        """
        self._refuse_unfinished(name)
        expected = next((key for key, loop in self.loops.items() if loop.passes == self.epoch), name)
        is_new = name not in self.loops
        if name == expected or (is_new and all(loop.passes == 1 for loop in self.loops.values())):
            self.loops.setdefault(name, Loop())
            if not name and not self._resume:
                _refuse_unlike(self.loops[""], Loop.over(loader))
            return True
        if self._resume and not is_new and self.loops[name].passes > self.epoch:
            self._resume.repeats = True
            return False
        raise UsageError(
            f"epoch {self.epoch} comes to the loop {_loop_name(name)} before the loop {_loop_name(expected)}",
            where="run.steps",
            hint="go through the same loops in every epoch, in the same order: run.steps(loader, name=...), "
            "with an empty list as the loader where a loop is left out",
        )

    def _refuse_unfinished(self, name: str) -> None:
        if self.is_open:
            raise UsageError(
                f"the loop {_loop_name(name)} begins while a pass of the loop {_loop_name(self._name)} is "
                "under way",
                where="run.steps",
                hint="let one loader give the batches of both, for example over a StackDataset; an "
                "evaluation iterates over its loader without run.steps",
            )
        if self._batch and self._batch == self._length and not self._resume:
            self.close()  # left by a `break` at its last batch
        if self._batch and not self._resume:
            size = f" of {self._length}" if self._length > 0 else ""
            raise UsageError(
                f"the pass of the loop {_loop_name(self._name)} was left after {self._batch}{size} batches, "
                "and another one begins: a resume would go on with the first",
                where="run.steps",
                hint="let each pass come to its end, for example over fewer samples or range(STEPS); a break "
                "may only end the program",
            )

    def open(self, loader: Any, name: str) -> Iterator[Any]:
        """Begin a pass over `loader`, or go on where the checkpoint was taken, and iterate over its batches.

        Raises
        ------
        UsageError : the checkpoint was taken in a pass over another loader.
        """
        resume, self._resume = self._resume, None
        last, loop = self.loops[name], Loop.over(loader, self.loops[name].passes)
        is_within = resume is not None and self._batch > 0
        if resume and is_within:
            _refuse_other_loader(name, last, loop, self._batch, has_same_ranks=resume.has_same_ranks)
            if last.batch_size and loop.batch_size:
                self._batch = self._batch * last.batch_size // loop.batch_size
        elif resume and resume.repeats:
            random_state.restore(resume.random)
        self.loops[name] = loop
        self._name, self._length, self.is_open = name, loaders.length(loader), True
        live = loaders.generators(loader)
        generators = self._generators.setdefault(name, _LoopGenerators(states_of(live), ()))
        if resume and is_within:
            random, states = resume.random, generators.saved
        else:
            if _are_equal(states_of(live), generators.first):  # one that was made for this pass would differ
                restore_generators(live, generators.saved)
            random, states = random_state.capture(), states_of(live)
            self._pass_random, generators.start = random, states
        generators.live, generators.saved = live, ()

        def rewind() -> None:
            random_state.restore(self._pass_random)
            restore_generators(live, generators.start)

        def forward() -> None:
            random_state.restore(random)
            restore_generators(live, states)

        keeps_workers = loop.passes > 0
        return loaders.iterate(
            loader, self._batch, keeps_workers=keeps_workers, rewind=rewind, forward=forward
        )

    def close(self) -> None:
        """Note that the pass is finished."""
        loop = self.loops[self._name]
        self.loops[self._name] = dataclasses.replace(loop, passes=loop.passes + 1)
        self._batch, self.is_open = 0, False


def _loop_name(name: str) -> str:
    return name or "without a name"


def _are_equal(states: GeneratorStates, saved: GeneratorStates) -> bool:
    return len(states) == len(saved) and all(map(torch.equal, states, saved))


def _refuse_unlike(last: Loop, loop: Loop) -> None:
    """Raise UsageError if two loops without a name are over unlike loaders."""
    sizes, last_sizes = (loop.batches, loop.batch_size), (last.batches, last.batch_size)
    if last.passes and -1 not in (last.batches, loop.batches) and sizes != last_sizes:
        raise UsageError(
            f"a loop without a name was over {last.batches} batches of {last.batch_size}, and is over "
            f"{loop.batches} of {loop.batch_size} now: a resume could not tell two loops from each other",
            where="run.steps",
            hint="where an epoch has several, name each: run.steps(loader, name=...); an evaluation needs no "
            "run.steps",
        )


def _refuse_other_loader(name: str, last: Loop, loop: Loop, batch: int, *, has_same_ranks: bool) -> None:
    """Raise UsageError if `loop` is not over the loader of `last`."""
    hint = "give it the same loader; where an epoch has several loops, name each: run.steps(loader, name=...)"
    is_loader, is_shorter = loop.batches >= 0, 0 <= loop.samples < max(batch, last.samples)
    if last.sampler_epoch != loop.sampler_epoch:
        change = f"had a sampler with the epoch {last.sampler_epoch}, and this one has {loop.sampler_epoch}"
        hint = "for epoch in range(run.epoch, EPOCHS), and sampler.set_epoch(epoch) before run.steps"
    elif not has_same_ranks:
        return
    elif (is_loader and last.samples != loop.samples) or is_shorter:
        change = f"was over {last.samples} samples, and this loader has {loop.samples}"
    elif (last.batches, last.batch_size) != (loop.batches, loop.batch_size):
        sizes = f"{last.batches} batches of {last.batch_size}"
        change = f"was over {sizes}, and this loader has {loop.batches} of {loop.batch_size}"
    else:
        return
    raise UsageError(
        f"the pass of the loop {_loop_name(name)} in the checkpoint {change}", where="run.steps", hint=hint
    )
