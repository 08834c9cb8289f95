"""Keep the position of a run in its data, and the states of the random generators that belong to it.

A resumed pass over a loader draws the order of its samples again, and skips the batches that were done.
"""

from __future__ import annotations

import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from imgkit_entrypoints.run import random_state
from imgkit_entrypoints.run.loaders import (
    UNKNOWN_LENGTH,
    PassRandom,
    RandomNumbers,
    custom_batch_sampler,
    describe_sampler,
    iterate_from,
    list_generators,
    loader_length,
    sampler_epoch,
    steps_error,
)
from imgkit_entrypoints.run.random_state import GeneratorStates, capture_generators, restore_generators
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.stateful_loaders import has_unusable_state, iterate_stateful
from imgkit_entrypoints.run.tracked import has_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop over `Run.steps` in the program, with a description of the loader of its latest pass.

    A pass is one iteration over the loader. An epoch with two loops has two passes, one for each loop.
    """

    passes: int = 0
    """Number of finished passes."""
    batches: int = UNKNOWN_LENGTH
    """Number of batches in a pass. `UNKNOWN_LENGTH` is also used if it may differ between passes."""
    samples: int = UNKNOWN_LENGTH
    """Number of samples in the data set, or in the loader if it is a sequence."""
    batch_size: int | None = None
    """Number of samples in each batch of a rank. None means unknown."""
    sampler_epoch: int | None = None
    sampler: str = ""
    """Class and options of the sampler. Empty if there is none."""

    @classmethod
    def of_loader(cls, loader: Any, passes: int = 0) -> Loop:
        """Describe a loop that iterates over `loader` and has finished `passes` passes."""
        samples = UNKNOWN_LENGTH
        batches = UNKNOWN_LENGTH
        batch_size = 1  # a sequence gives one item in each step
        if isinstance(loader, DataLoader):
            samples = loader_length(loader.dataset)
            batch_size = loader.batch_size
            # A batch sampler of the program may give another number of batches in each pass.
            if custom_batch_sampler(loader) is None:
                batches = loader_length(loader)
        elif not has_state(loader):  # a sequence; a loader with a state continues at its sample by itself
            samples = loader_length(loader)
        return cls(
            passes=passes,
            batches=batches,
            samples=samples,
            batch_size=batch_size,
            sampler_epoch=sampler_epoch(loader),
            sampler=describe_sampler(loader),
        )


@dataclass(slots=True)
class _GeneratorHistory:
    """The random generators that the loader of a loop uses, and their states at several moments."""

    first_states: GeneratorStates
    """The states at the start of the first pass of the whole run."""
    start_states: GeneratorStates
    """The states at the start of the latest pass."""
    checkpoint_states: GeneratorStates = ()
    """The states in the restored checkpoint. Empty after the first pass has begun."""
    generators: Sequence[torch.Generator] = ()
    """The generators of the loader of the latest pass."""

    def list_for_checkpoint(self) -> tuple[GeneratorStates, GeneratorStates, GeneratorStates]:
        """Return the states at the start of the first pass, at the start of the latest pass, and now.

        Between a restore and the next pass, the current states are those in the restored checkpoint.
        """
        states = self.checkpoint_states or capture_generators(self.generators)
        return self.first_states, self.start_states, states


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnnamedPass:
    """The latest pass of a loop without a name."""

    line: str
    """The line of the program that calls `Run.steps`, as FILE:LINE."""
    loop: Loop
    loader: Callable[[], Any]
    """A function that returns the loader, or None if the program has dropped it or it is a list or range."""

    def may_have_used(self, loader: Any, loop: Loop) -> bool:
        """Return whether this pass may have iterated over `loader`, which `loop` describes.

        The result is False if the number or size of the batches differs, or if the loader of this pass still
        exists and is another object. Loaders are not compared by their batches if a length is unknown.
        """
        has_known_lengths = UNKNOWN_LENGTH not in (self.loop.batches, loop.batches)
        has_same_batches = (self.loop.batches, self.loop.batch_size) == (loop.batches, loop.batch_size)
        if has_known_lengths and not has_same_batches:
            return False
        last_loader = self.loader()  # None: it no longer exists, so `loader` may be equal to it
        return last_loader is None or last_loader is loader


@dataclass(slots=True, kw_only=True)
class _Resume:
    """Values of the checkpoint that the first pass after a restore needs."""

    process_states: Mapping[str, Any]
    """The random states of this process when the checkpoint was taken."""
    has_same_ranks: bool
    """Whether the checkpoint was taken with the same number of ranks."""


class DataPosition:
    """The numbers of steps, passes (iterations over a loader) and batches that are done.

    A checkpoint inside a pass contains two random states. The first is from the start of the pass, where
    samplers draw the order of samples. The second is from the moment of the checkpoint. A resumed pass draws
    its order again with the first state, skips the batches that were done, and continues with the second
    state.
    """

    def __init__(self) -> None:
        self.step = 0
        self.is_open = False
        """Whether the program is inside a pass."""
        self.was_left = False
        """Whether the program has left the latest pass with ``break``."""
        self.loops: dict[str, Loop] = {}
        """The loops of an epoch by name. A loop without a name, ``""``, is the only loop."""
        self.batches_done = 0
        """Number of batches of the latest pass that are done. 0 means that the pass is finished."""
        self.repeats_epoch = False
        """Whether the program, after a restore and before its next pass, is repeating work of this epoch that
        it had already done before the checkpoint."""
        # Name of the loop and number of batches of the latest pass.
        self._last_loop = ""
        self._last_length = UNKNOWN_LENGTH
        # The loader of the latest pass, if it has a state.
        self._loader: Any = None
        # The pickled state of this loader when the pass began, until it is compared with a later state.
        self._loader_start: bytes | None = None
        self._histories: dict[str, _GeneratorHistory] = {}
        # The random states of this process at the start of the latest pass.
        self._process_start_states: Mapping[str, Any] = {}
        # The latest pass of a loop without a name.
        self._unnamed_pass: _UnnamedPass | None = None
        # Values of the restored checkpoint, until the first pass after the restore begins.
        self._resume: _Resume | None = None

    @property
    def epoch(self) -> int:
        """Number of finished epochs. An epoch is finished when all its loops have finished their passes."""
        return min((loop.passes for loop in self.loops.values()), default=0)

    @property
    def epoch_progress(self) -> float:
        """Number of finished epochs plus the finished share of the current epoch: ``2.25``."""
        passes = float(sum(loop.passes for loop in self.loops.values()))
        if self._last_length > 0:  # not `UNKNOWN_LENGTH`
            passes += self.batches_done / self._last_length
        return passes / max(1, len(self.loops))

    def count_remaining_steps(self, name: str, length: int) -> int:
        """Return the number of steps of the next pass of the loop `name`. A complete pass has `length` steps.

        The result is smaller if the restored checkpoint was taken inside this pass, and 0 if it was taken
        after this pass.
        """
        if self.was_finished(name):
            return 0
        is_first_pass = self._resume is not None  # after a restore
        if is_first_pass and name == self._last_loop:  # the loop of the latest pass in the checkpoint
            return max(0, length - self.batches_done)
        return length

    def count_step(self) -> None:
        """Count a step as done. Inside a pass, count its batch, too."""
        self.step += 1
        if self.is_open:
            self.batches_done += 1

    def make_values(self, *, at_start: bool = False) -> dict[str, Any]:
        """Return the position in the form that a checkpoint stores and `restore` expects.

        Parameters
        ----------
        at_start : whether the checkpoint is taken directly before a pass of `Run.steps`. A resume then knows
            that the checkpoint contains what the program does before that pass.
        """
        return {
            "step": self.step,
            "name": self._last_loop,
            "batch": self.batches_done,
            "loops": {name: dataclasses.asdict(loop) for name, loop in self.loops.items()},
            "at_start": at_start,
            # Left with ``break``. A resume refuses another step if the program did not check the number of
            # steps.
            "was_left": self.was_left,
        }

    def make_rank_values(self) -> dict[str, Any]:
        """Return the random states of this rank in the form that a checkpoint stores."""
        # If the resumed pass has not begun yet, the states of the restored checkpoint are still valid.
        if self._resume is not None and self.batches_done > 0:
            latest = self._resume.process_states
        else:
            latest = random_state.capture()
        loops = {name: history.list_for_checkpoint() for name, history in self._histories.items()}
        return {"now": latest, "pass": self._process_start_states, "loops": loops}

    def restore(
        self, values: Mapping[str, Any], random: Mapping[str, Any], world_size: int, ranks: Ranks
    ) -> str:
        """Restore the position from a checkpoint.

        Return a warning for the user if some samples of the epoch will be used again, or ``""``.

        Parameters
        ----------
        values : the result of `make_values` when the checkpoint was taken.
        random : the result of `make_rank_values` when the checkpoint was taken.
        world_size : number of ranks when the checkpoint was taken.
        ranks : the ranks of the resumed run.
        """
        self.step = values["step"]
        self.batches_done = values["batch"]
        self._last_loop = values["name"]
        self.loops = {name: Loop(**loop_values) for name, loop_values in values["loops"].items()}
        self._process_start_states = random["pass"]
        # The states of each loop are in the order of `list_for_checkpoint`.
        self._histories = {name: _GeneratorHistory(*states) for name, states in random["loops"].items()}
        random_state.restore(random["now"])
        # A checkpoint directly before a pass already contains what the program does before that pass.
        self.repeats_epoch = values["at_start"]
        has_same_ranks = world_size == ranks.world_size
        warning = ""
        if not has_same_ranks:
            warning = self._adapt_to_ranks(world_size, ranks)
        # The program may use random numbers before its first pass, so keep the states of this moment.
        self._resume = _Resume(process_states=random_state.capture(), has_same_ranks=has_same_ranks)
        return warning

    def _adapt_to_ranks(self, saved_size: int, ranks: Ranks) -> str:
        """Convert the number of batches to another number of ranks, and give each rank other random numbers.

        For example, 6 batches on each of 4 ranks are 12 batches on each of 2 ranks. Return a warning if the
        number must be rounded down, so that some samples are used again, or ``""``. `saved_size` is the
        number of ranks when the checkpoint was taken.
        """
        total_batches = self.batches_done * saved_size
        self.batches_done, remainder = divmod(total_batches, ranks.world_size)
        # All ranks have the random state of rank 0 now, and would draw the same numbers. So each rank gets
        # another seed.
        seed = int(torch.randint(1 << 62, ()).item())
        random_state.seed_everything(seed + ranks.rank)
        if not remainder:
            return ""
        return f"{ranks.world_size} ranks instead of {saved_size}: some samples of this epoch come again"

    def was_finished(self, name: str) -> bool:
        """Return whether the loop had finished its pass of this epoch when the restored checkpoint was taken.

        After a restart, the program reaches this loop again, but must not train the pass again.
        """
        if self._resume is None or name not in self.loops:
            return False
        return self.loops[name].passes > self.epoch

    @property
    def _may_add_loop(self) -> bool:
        """Whether this is the first epoch of a new run, in which loops are new to the run.

        Each loop so far has then finished exactly one pass.
        """
        return self._resume is None and all(loop.passes == 1 for loop in self.loops.values())

    def check_and_add_loop(self, name: str) -> None:
        """Check that the epoch continues with the loop `name`, which begins a pass. If it is new, add it.

        Each epoch must have the same loops in the same order, because a resume finds its position by the
        number of their passes. So only the first epoch of a new run may add loops.

        Raises
        ------
        UsageError : this epoch must continue with another loop.
        """
        expected = self._find_next_loop(name)
        is_new = name not in self.loops and self._may_add_loop
        if name != expected and not is_new:
            raise steps_error(
                f"epoch {self.epoch} comes to the loop {_quote_loop(name)} before the loop "
                f"{_quote_loop(expected)}",
                "go through the same loops in every epoch, in the same order: run.steps(loader, name=...), "
                "with an empty list as the loader where a loop is left out",
            )
        self.loops.setdefault(name, Loop())

    def _find_next_loop(self, default: str) -> str:
        """Return the name of the first loop that has not finished its pass of this epoch, or `default`.

        There is no such loop only before the first pass of a run.
        """
        epoch = self.epoch
        for name, loop in self.loops.items():
            if loop.passes == epoch:
                return name
        return default

    def begin_unnamed_pass(self, loader: Any, line: str, *, is_next_epoch: bool) -> None:
        """Record the start of a pass of a loop without a name, and check that it is the same loop as before.

        The latest pass and the new pass belong to the same loop if both use the same loader. In addition,
        they must begin at the same line of the program or in different epochs.

        Parameters
        ----------
        line : the line of the program that calls `Run.steps`, as FILE:LINE.
        is_next_epoch : whether the program has read `Run.epoch` since the latest pass. Then another line may
            be the next phase of the training.

        Raises
        ------
        UsageError : the passes may belong to different loops, which a resume could not distinguish.
        """
        last = self._unnamed_pass
        loop = Loop.of_loader(loader)
        self._unnamed_pass = _UnnamedPass(line=line, loop=loop, loader=_weak_reference(loader))
        if last is None:
            return
        has_same_loader = _may_share_loader(last, loader, loop)
        if has_same_loader and (line == last.line or is_next_epoch):
            return
        problem = f"the loop at {line} has no name, and goes over several loaders"
        if line != last.line:
            problem = f"the loops at {last.line} and {line} have no names"
        raise steps_error(
            f"{problem}: a resume could not tell their passes from each other",
            "give each a name: run.steps(loader, name=...); one loop at two lines has the same name at both",
        )

    def end_last_pass(self, name: str) -> None:
        """Finish the latest pass, so that the loop `name` can begin a new pass.

        If the program has left the latest pass with ``break`` after its last batch, the pass counts as
        finished.

        Raises
        ------
        UsageError : the program is still inside the latest pass, or has left it before its last batch.
        """
        last_name = _quote_loop(self._last_loop)
        if self.is_open:
            raise steps_error(
                f"the loop {_quote_loop(name)} begins while a pass of the loop {last_name} is under way",
                "let one loader give the batches of both, for example over a StackDataset; an evaluation "
                "iterates over its loader without run.steps",
            )
        has_ended = self.batches_done == 0
        is_to_be_resumed = self._resume is not None
        if has_ended or is_to_be_resumed:
            return
        if self.batches_done != self._last_length:  # left before its last batch
            size = f" of {self._last_length}" if self._last_length > 0 else ""  # not for `UNKNOWN_LENGTH`
            raise steps_error(
                f"the pass of the loop {last_name} was left after {self.batches_done}{size} batches, and "
                "another one begins: a resume would go on with the first",
                "let each pass come to its end, for example over fewer samples or range(STEPS); a break may "
                "only end the program",
            )
        self.finish_pass()

    def open_pass(self, loader: Any, name: str) -> Iterator[Any]:
        """Begin a pass over `loader`, or continue the pass of the checkpoint, and return its batches.

        A pass is one iteration over the loader. If the checkpoint was taken inside a pass, the batches that
        were done before are left out. `name` is the name of the loop in the program, or ``""``.

        Raises
        ------
        UsageError : the checkpoint was taken inside a pass over another loader.
        """
        resume = self._resume  # None unless this is the first pass after a restore
        loop = Loop.of_loader(loader, self.loops[name].passes)
        if resume is not None and self.batches_done > 0:  # the checkpoint was taken inside a pass
            pass_random = self._continue_pass(loader, loop, name, resume)
        else:
            if resume is not None and self.repeats_epoch:
                # The program has repeated work from before the checkpoint, which has used random numbers.
                random_state.restore(resume.process_states)
            pass_random = self._record_start_states(loader, name)
        self._record_open_pass(loader, loop, name)
        is_first_pass = loop.passes == 0  # an uninterrupted run starts the workers of its loader then
        if not has_state(loader):
            return iterate_from(loader, self.batches_done, pass_random, is_first_pass=is_first_pass)
        batches = iterate_stateful(loader, self.batches_done, pass_random, is_first_pass=is_first_pass)
        self._loader = loader
        # `refuse_unchanged_loader_state` compares a later state with this one.
        self._loader_start = pickle.dumps(loader.state_dict())
        return batches

    def _continue_pass(self, loader: Any, loop: Loop, name: str, resume: _Resume) -> PassRandom:
        """Check that `loader` can continue the pass of the checkpoint, and return its random states.

        Convert `batches_done` to the size of the loader's batches. `loop` describes the loader.

        Raises
        ------
        UsageError : the checkpoint was taken inside a pass over another loader.
        """
        saved_loop = self.loops[name]
        _refuse_other_loader(name, saved_loop, loop, self.batches_done, has_same_ranks=resume.has_same_ranks)
        # If the number of ranks has changed, the size of batches may differ. For example, 10 batches of 32
        # samples count as 20 batches of 16 samples.
        if saved_loop.batch_size and loop.batch_size:
            self.batches_done = self.batches_done * saved_loop.batch_size // loop.batch_size
        return self._make_resumed_states(loader, name, resume.process_states)

    def _record_open_pass(self, loader: Any, loop: Loop, name: str) -> None:
        """Record that the program is inside a pass of the loop `name`, which `loop` describes.

        A checkpoint in the pass stores these values. Those of the restored checkpoint are dropped.
        """
        self._resume = None
        self.repeats_epoch = False
        self.loops[name] = loop
        self._last_loop = name
        self._last_length = loader_length(loader)
        self.is_open = True
        self.was_left = False
        self._loader = None
        self._loader_start = None

    def _record_start_states(self, loader: Any, name: str) -> PassRandom:
        """Return the random states at the start of a new pass, and keep them for checkpoints in the pass.

        In the first pass after a restore, the loader's generators first continue with their states in the
        checkpoint.
        """
        history = self._begin_history(name, loader)
        _restore_unless_reseeded(history)
        history.start_states = capture_generators(history.generators)
        self._process_start_states = random_state.capture()
        start = self._make_start_states(history)
        return PassRandom(start=start, latest=start)

    def _make_resumed_states(self, loader: Any, name: str, process_states: Mapping[str, Any]) -> PassRandom:
        """Return the random states of the pass inside which the checkpoint was taken, without restoring them.

        Those of the start and of the moment of the checkpoint are both stored in the checkpoint.

        Parameters
        ----------
        process_states : the random states of this process in the checkpoint.
        """
        history = self._begin_history(name, loader)
        start = self._make_start_states(history)
        latest = RandomNumbers(
            process=process_states, generators=history.generators, states=history.checkpoint_states
        )
        # `latest` has them now. From here on, checkpoints contain the current states.
        history.checkpoint_states = ()
        return PassRandom(start=start, latest=latest)

    def _make_start_states(self, history: _GeneratorHistory) -> RandomNumbers:
        """Return the random states at the start of the latest pass, which `restore` has loaded if needed."""
        return RandomNumbers(
            process=self._process_start_states, generators=history.generators, states=history.start_states
        )

    def _begin_history(self, name: str, loader: Any) -> _GeneratorHistory:
        """Record that the loop `name` begins a pass over `loader`, and return its generators and states.

        The random generators of `loader` replace those of the loop's last pass. The states in the history
        remain those of the loop's earlier passes.
        """
        generators = list_generators(loader)
        if name not in self._histories:  # the first pass of this loop in the whole run
            first_states = capture_generators(generators)
            self._histories[name] = _GeneratorHistory(first_states, start_states=())
        history = self._histories[name]
        history.generators = generators
        return history

    def finish_pass(self) -> None:
        """Count the latest pass as finished."""
        loop = self.loops[self._last_loop]
        self.loops[self._last_loop] = dataclasses.replace(loop, passes=loop.passes + 1)
        self.batches_done = 0
        self.is_open = False

    def has_unusable_loader_state(self) -> bool:
        """Return whether the program is inside a pass that could not be resumed from the loader's state."""
        return self.is_open and self._loader is not None and has_unusable_state(self._loader)

    def refuse_unchanged_loader_state(self) -> None:
        """Raise UsageError if the state of the loader has not changed since its pass began.

        Such a state does not contain the position in the pass. The state is compared only once in each pass,
        at the first checkpoint.
        """
        start_state = self._loader_start
        if start_state is None or not self.is_open:  # no state, already compared, or outside of a pass
            return
        self._loader_start = None  # compare only once
        if pickle.dumps(self._loader.state_dict()) == start_state:
            raise steps_error(
                f"the state of this {type(self._loader).__name__} is the same as at the start of the pass: a "
                "resume would start it over",
                "give a loader whose state_dict has its position, as torchdata's StatefulDataLoader",
            )


def _quote_loop(name: str) -> str:
    """Return the text for a loop in messages."""
    return name or "without a name"


def _may_share_loader(last: _UnnamedPass, loader: Any, loop: Loop) -> bool:
    """Return whether the pass `last` may have iterated over `loader`, which `loop` describes.

    If the program has dropped the last loader, `loader` may have replaced it by an equal one.
    """
    if last.may_have_used(loader, loop):
        return True
    gc.collect()  # a dropped loader may still exist as a part of a reference cycle, so ask again
    return last.may_have_used(loader, loop)


def _weak_reference(loader: Any) -> Callable[[], Any]:
    """Return a function that returns `loader` until the program drops it, and then None."""
    try:
        return weakref.ref(loader)
    except TypeError:  # Python has no weak references to a list or a range
        return lambda: None


def _restore_unless_reseeded(history: _GeneratorHistory) -> None:
    """In the first pass after a restore, let the generators continue with their states in the checkpoint.

    After a restart, the program has created its generators again. If they have the same states as at the very
    first pass, they continue. Otherwise the program has set the states for this pass, for example by a seed
    for the epoch.
    """
    if _are_equal(capture_generators(history.generators), history.first_states):
        restore_generators(history.generators, history.checkpoint_states)
    history.checkpoint_states = ()  # from now on, checkpoints contain the current states


def _are_equal(states: GeneratorStates, other_states: GeneratorStates) -> bool:
    return len(states) == len(other_states) and all(map(torch.equal, states, other_states))


def _refuse_other_loader(name: str, saved: Loop, loop: Loop, batch: int, *, has_same_ranks: bool) -> None:
    """Raise UsageError if a resumed pass would use another loader, and so get other samples.

    Parameters
    ----------
    saved, loop : description of the loop in the checkpoint, and now.
    batch : number of batches of the pass that were done before the checkpoint.
    has_same_ranks : whether the checkpoint was taken with the same number of ranks.
    """
    saved_pass = f"the pass of the loop {_quote_loop(name)} in the checkpoint"
    if saved.sampler_epoch != loop.sampler_epoch:
        epochs = f"the epoch {saved.sampler_epoch}, and this one has {loop.sampler_epoch}"
        raise steps_error(
            f"{saved_pass} had a sampler with {epochs}",
            "for epoch in range(run.epoch, EPOCHS), and sampler.set_epoch(epoch) before run.steps",
        )
    if not has_same_ranks:  # with another number of ranks, batches and samplers always differ
        return
    difference = _find_difference(saved, loop, batch)
    if difference:
        raise steps_error(
            f"{saved_pass} {difference}",
            "give it the same loader; where an epoch has several loops, name each: "
            "run.steps(loader, name=...)",
        )


def _find_difference(saved: Loop, loop: Loop, batch: int) -> str:
    """Return how a loader differs from the loader in the checkpoint, or ``""`` if its samples are equal."""
    if _has_other_samples(saved, loop, batch):
        return f"was over {saved.samples} samples, and this loader has {loop.samples}"
    if (saved.batches, saved.batch_size) != (loop.batches, loop.batch_size):
        sizes = f"{saved.batches} batches of {saved.batch_size}"
        return f"was over {sizes}, and this loader has {loop.batches} of {loop.batch_size}"
    if saved.sampler != loop.sampler:
        return f"had the sampler {saved.sampler}, and this loader has {loop.sampler}"
    return ""


def _has_other_samples(saved: Loop, loop: Loop, batch: int) -> bool:
    """Return whether a loader cannot give the samples that a resumed pass needs."""
    if loop.batches != UNKNOWN_LENGTH:
        return saved.samples != loop.samples
    # A list, or a data set with a batch sampler of the program, may have grown since the checkpoint. But it
    # must not have become smaller.
    return loop.samples != UNKNOWN_LENGTH and loop.samples < max(batch, saved.samples)
