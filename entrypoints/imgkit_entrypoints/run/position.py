"""The position of a run in its data, with the random numbers that belong to it.

A resumed pass over a loader draws the order of its samples again, and skips the batches that were done.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import random_state
from imgkit_entrypoints.run.random_state import GeneratorStates, restore_generators, states_of
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.stateful_loaders import iterate_stateful
from imgkit_entrypoints.run.tracked import has_state

ORDER_OPTIONS = ("shuffle", "seed", "replacement")
"""Attributes of torch's samplers that decide about the order of samples."""


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
    sampler: str = ""
    """Class and options of the sampler; empty: there is none."""

    @classmethod
    def over(cls, loader: Any, passes: int = 0) -> Loop:
        """Describe a loop over `loader` after so many passes."""
        samples, batches, batch_size = -1, -1, 1
        if isinstance(loader, DataLoader):
            samples, batch_size = loader_length(loader.dataset), loader.batch_size
            if type(loader.batch_sampler) in (BatchSampler, type(None)):
                batches = loader_length(loader)
        elif not has_state(loader):
            samples = loader_length(loader)
        return cls(
            passes=passes,
            batches=batches,
            samples=samples,
            batch_size=batch_size,
            sampler_epoch=sampler_epoch(loader),
            sampler=_describe_sampler(loader),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnnamedPass:
    """The latest pass of a loop without a name."""

    line: str
    """Where the program calls `Run.steps`, as FILE:LINE."""
    loop: Loop
    loader: Callable[[], Any]
    """Returns its loader; None: the program has dropped it, or it is a list or the like."""

    def is_over(self, loader: Any, loop: Loop) -> bool:
        """Return whether its loader may be `loader`."""
        has_length = -1 not in (self.loop.batches, loop.batches)
        sizes = (self.loop.batches, self.loop.batch_size), (loop.batches, loop.batch_size)
        if has_length and sizes[0] != sizes[1]:
            return False
        last_loader = self.loader()
        return last_loader is None or last_loader is loader


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
        self.was_left = False
        """Whether the program has left the latest pass by a ``break``."""
        self.loops: dict[str, Loop] = {}
        """The loops of an epoch by name; a loop that has no name is alone."""
        self.batch = 0
        """Batches of the latest pass that are done; 0: it is finished."""
        self._name, self._length = "", -1
        """Loop and length of the latest pass."""
        self._generators: dict[str, _LoopGenerators] = {}
        self._pass_random: Mapping[str, Any] = {}
        self._unnamed_pass: _UnnamedPass | None = None
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
        part = self.batch / self._length if self._length > 0 else 0.0
        return (sum(loop.passes for loop in self.loops.values()) + part) / max(1, len(self.loops))

    def remaining(self, name: str, length: int) -> int:
        """Return the steps that are left in the pass of a loop, of `length` steps, that begins next."""
        if self._resume is None or name not in self.loops:
            return length
        if self.loops[name].passes > self.epoch:
            return 0
        return max(0, length - (self.batch if name == self._name else 0))

    def count(self) -> None:
        """Note that a step is done."""
        self.step, self.batch = self.step + 1, self.batch + self.is_open

    def values(self, *, at_start: bool = False) -> dict[str, Any]:
        """Return the position as a checkpoint has it; `at_start`: a pass begins now."""
        loops = {name: dataclasses.asdict(loop) for name, loop in self.loops.items()}
        numbers = {"step": self.step, "name": self._name, "batch": self.batch}
        return {**numbers, "loops": loops, "at_start": at_start, "was_left": self.was_left}

    def rank_values(self) -> dict[str, Any]:
        """Return the random states of this rank as a checkpoint has them."""
        is_pending = self._resume is not None and self.batch > 0
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
        self.step, self.batch, self._name = values["step"], values["batch"], values["name"]
        self.loops = {name: Loop(**loop) for name, loop in values["loops"].items()}
        self._pass_random = random["pass"]
        self._generators = {name: _LoopGenerators(*states) for name, states in random["loops"].items()}
        random_state.restore(random["now"])
        has_same_ranks, batches = world_size == ranks.world_size, self.batch * world_size
        if not has_same_ranks:
            self.batch = batches // ranks.world_size
            random_state.seed_everything(int(torch.randint(1 << 62, ()).item()) + ranks.rank)
        self._resume = _Resume(
            random=random_state.capture(), has_same_ranks=has_same_ranks, repeats=values["at_start"]
        )
        if batches % ranks.world_size == 0:
            return ""
        return f"{ranks.world_size} ranks instead of {world_size}: some samples of this epoch come again"

    def should_begin(self, name: str) -> bool:
        """Return whether a pass of the loop `name` begins now; False: it was finished before the checkpoint.

        Raises
        ------
        UsageError : another pass is not finished, or another loop comes now in the epoch.
        """
        self._refuse_unfinished(name)
        expected = next((key for key, loop in self.loops.items() if loop.passes == self.epoch), name)
        is_new = name not in self.loops
        is_first_epoch = not self._resume and all(loop.passes == 1 for loop in self.loops.values())
        if name == expected or (is_new and is_first_epoch):
            self.loops.setdefault(name, Loop())
            return True
        if self._resume and not is_new and self.loops[name].passes > self.epoch:
            self._resume.repeats = True
            return False
        raise _refusal(
            f"epoch {self.epoch} comes to the loop {_loop_name(name)} before the loop {_loop_name(expected)}",
            "go through the same loops in every epoch, in the same order: run.steps(loader, name=...), with "
            "an empty list as the loader where a loop is left out",
        )

    def refuse_second_loop(self, loader: Any, line: str, *, is_next_epoch: bool) -> None:
        """Raise UsageError if this pass without a name is not one of the same loop as the latest.

        Parameters
        ----------
        line : where the program calls `Run.steps`.
        is_next_epoch : the program has read the epoch since the latest pass, so that another line may be the
            next part of the training.
        """
        last, loop = self._unnamed_pass, Loop.over(loader)
        self._unnamed_pass = _UnnamedPass(line=line, loop=loop, loader=_weak_reference(loader))
        if last is None:
            return
        if not last.is_over(loader, loop):
            gc.collect()  # the last loader may be part of a cycle that the program has dropped
        has_same_loader = last.is_over(loader, loop)
        if line != last.line and not (has_same_loader and is_next_epoch):
            problem = f"the loops at {last.line} and {line} have no names"
        elif not has_same_loader:
            problem = f"the loop at {line} has no name, and goes over several loaders"
        else:
            return
        raise _refusal(
            f"{problem}: a resume could not tell their passes from each other",
            "give each a name: run.steps(loader, name=...); one loop at two lines has the same name at both",
        )

    def _refuse_unfinished(self, name: str) -> None:
        last_name = _loop_name(self._name)
        if self.is_open:
            raise _refusal(
                f"the loop {_loop_name(name)} begins while a pass of the loop {last_name} is under way",
                "let one loader give the batches of both, for example over a StackDataset; an evaluation "
                "iterates over its loader without run.steps",
            )
        if self.batch and self.batch == self._length and not self._resume:
            self.close()  # left by a `break` at its last batch
        if self.batch and not self._resume:
            size = f" of {self._length}" if self._length > 0 else ""
            raise _refusal(
                f"the pass of the loop {last_name} was left after {self.batch}{size} batches, and another "
                "one begins: a resume would go on with the first",
                "let each pass come to its end, for example over fewer samples or range(STEPS); a break may "
                "only end the program",
            )

    def open(self, loader: Any, name: str) -> Iterator[Any]:
        """Begin a pass over `loader`, or go on where the checkpoint was taken, and iterate over its batches.

        Raises
        ------
        UsageError : the checkpoint was taken in a pass over another loader.
        """
        resume, self._resume = self._resume, None
        last, loop = self.loops[name], Loop.over(loader, self.loops[name].passes)
        is_within = resume is not None and self.batch > 0
        if resume and is_within:
            _refuse_other_loader(name, last, loop, self.batch, has_same_ranks=resume.has_same_ranks)
            if last.batch_size and loop.batch_size:
                self.batch = self.batch * last.batch_size // loop.batch_size
        elif resume and resume.repeats:
            random_state.restore(resume.random)
        self.loops[name] = loop
        self._name, self._length, self.is_open, self.was_left = name, loader_length(loader), True, False
        live = loader_generators(loader)
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

        iterate_rest = iterate_stateful if has_state(loader) else iterate
        return iterate_rest(loader, self.batch, keeps_workers=loop.passes > 0, rewind=rewind, forward=forward)

    def close(self) -> None:
        """Note that the pass is finished."""
        loop = self.loops[self._name]
        self.loops[self._name] = dataclasses.replace(loop, passes=loop.passes + 1)
        self.batch, self.is_open = 0, False


def _refusal(problem: str, hint: str) -> UsageError:
    return UsageError(problem, where="run.steps", hint=hint)


def _loop_name(name: str) -> str:
    return name or "without a name"


def _weak_reference(loader: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(loader)
    except TypeError:  # a list or a range
        return lambda: None


def _are_equal(states: GeneratorStates, saved: GeneratorStates) -> bool:
    return len(states) == len(saved) and all(map(torch.equal, states, saved))


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
    elif last.sampler != loop.sampler:
        change = f"had the sampler {last.sampler}, and this loader has {loop.sampler}"
    else:
        return
    raise _refusal(f"the pass of the loop {_loop_name(name)} in the checkpoint {change}", hint)


_ACCELERATE = "use accelerate's own save_state with a LibraryCheckpoint: docs/guides/resume.md"


def refuse_without_position(loader: Any) -> None:
    """Raise UsageError if a pass over `loader` could not resume where it ended."""
    hint = (
        "give a DataLoader over a map-style dataset, a sequence, or a loader with state_dict and "
        "load_state_dict, such as torchdata's StatefulDataLoader"
    )
    name, problem = type(loader).__name__, ""
    if any(kind.__module__.startswith("accelerate") for kind in type(loader).__mro__):
        problem, hint = f"{name} is a loader that accelerate has prepared", _ACCELERATE
    elif not getattr(loader, "in_order", True) and loader.num_workers:
        problem = f"{name} with in_order=False gives batches as they come"
        hint = f"{name}(..., in_order=True)"
    elif has_state(loader):
        return
    elif not isinstance(loader, DataLoader):
        is_sequence = hasattr(loader, "__getitem__") and hasattr(loader, "__len__")
        problem = "" if is_sequence and not isinstance(loader, Mapping) else name
    elif isinstance(loader.dataset, IterableDataset):
        problem = f"a DataLoader over the IterableDataset {type(loader.dataset).__name__}"
    elif type(loader).__iter__ is not DataLoader.__iter__:
        problem = f"{name} has an __iter__ of its own, which hides its position"
        hint = (
            "use DataLoader itself, with persistent_workers=True to keep the workers, and change batches in "
            "collate_fn or in the loop"
        )
    if problem:
        raise _refusal(f"this loader cannot resume at its sample: {problem}", hint)


def loader_length(loader: Any) -> int:
    """Return the batches of a pass; -1: unknown."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return -1


def _samplers(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]


def sampler_epoch(loader: Any) -> int | None:
    """Return the epoch that a DistributedSampler, or one like it, has been told; None: there is none."""
    epochs = (getattr(sampler, "epoch", None) for sampler in _samplers(loader))
    return next((epoch for epoch in epochs if type(epoch) is int), None)


def lazy_sampler(loader: Any) -> str:
    """Return the class of a sampler of the program whose random numbers no resume could repeat; empty: none.

    One that is seeded by the epoch, or draws from a generator of its own, can repeat them.
    """
    if has_state(loader):
        return ""
    for sampler in _samplers(loader):
        kind, attributes = type(sampler), getattr(sampler, "__dict__", {}).values()
        is_public = kind.__module__.partition(".")[0] in ("builtins", "torch", "torchdata")
        has_generator = any(isinstance(value, torch.Generator) for value in attributes)
        if not (is_public or has_generator or hasattr(sampler, "set_epoch")):
            return kind.__name__
    return ""


def _describe_sampler(loader: Any) -> str:
    """Return the class of the sampler with the options that decide about the order of samples."""
    sampler = getattr(loader, "batch_sampler", None)
    if type(sampler) in (BatchSampler, type(None)):
        sampler = getattr(loader, "sampler", None)
    if sampler is None:
        return ""
    options = []
    for name in ORDER_OPTIONS:
        value = getattr(sampler, name, None)
        if isinstance(value, int):  # or a bool
            options.append(f"{name}={value}")
    return f"{type(sampler).__name__}({', '.join(options)})"


def loader_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a pass uses in this process, each once: of loader, samplers and dataset."""
    owners = [loader, *_samplers(loader)]
    if isinstance(loader, DataLoader) and loader.num_workers == 0:  # workers draw from copies
        owners.append(loader.dataset)
    attributes = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
    return list({id(value): value for value in attributes if isinstance(value, torch.Generator)}.values())


def iterate(
    loader: Any, skip: int, *, keeps_workers: bool, rewind: Callable[[], None], forward: Callable[[], None]
) -> Iterator[Any]:
    """Iterate over `loader` without its first `skip` batches.

    Parameters
    ----------
    keeps_workers : the pass of an undisturbed run goes on with the workers of the one before.
    rewind : sets the random numbers to those at the start of the pass, from which samplers draw.
    forward : sets them to those of now, before the first batch is read. Only called if some are skipped.
    """
    if isinstance(loader, DataLoader):
        starts_workers = keeps_workers and loader.persistent_workers and loader._iterator is None
        if skip or starts_workers:
            return _iterate_rest(loader, skip, starts_workers, rewind, forward)
    if not skip:
        return iter(loader)
    rewind()
    batches: Iterator[Any] = iter(loader)
    for _ in itertools.islice(batches, skip):
        pass
    forward()
    return batches


def _iterate_rest(
    loader: DataLoader[Any],
    skip: int,
    starts_workers: bool,
    rewind: Callable[[], None],
    forward: Callable[[], None],
) -> Iterator[Any]:
    """Let the loader take its indices from a sampler that skips; no skipped sample is read."""
    attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, attribute)
    rest = _Rest(sampler, skip, (loader.prefetch_factor or 0) * loader.num_workers, forward)
    try:
        if starts_workers:
            # That draws a random number, which the pass of an undisturbed run does not draw.
            _set_sampler(loader, attribute, ())
            next(iter(loader), None)
        rewind()
        _set_sampler(loader, attribute, rest)
        batches = iter(loader)
        first = list(itertools.islice(batches, 1))
    finally:
        _set_sampler(loader, attribute, sampler)
    return itertools.chain(first, batches)


def _set_sampler(loader: DataLoader[Any], attribute: str, sampler: Any) -> None:
    vars(loader)[attribute] = sampler  # DataLoader's own __setattr__ refuses this
    if loader._iterator is not None:  # of workers that are kept
        loader._iterator._index_sampler = sampler


class _Rest:
    """A sampler without its first `skip` items; read once.

    Parameters
    ----------
    ahead : items that workers get before the first batch arrives; as many more were drawn before the stop.
    forward : called after these.
    """

    def __init__(self, sampler: Any, skip: int, ahead: int, forward: Callable[[], None]) -> None:
        self._sampler, self._skip, self._ahead, self._forward = sampler, skip, ahead, forward

    def __iter__(self) -> Iterator[Any]:
        # Here, and not at the first item: a sampler may draw before the loader draws a seed for its workers.
        return self._without_first(iter(self._sampler))

    def _without_first(self, items: Iterator[Any]) -> Iterator[Any]:
        for _ in itertools.islice(items, self._skip):
            pass
        if self._skip:
            drawn = list(itertools.islice(items, self._ahead))
            self._forward()
            yield from drawn
        yield from items
