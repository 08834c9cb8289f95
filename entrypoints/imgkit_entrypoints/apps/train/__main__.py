"""Run dist-train on one rank."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import platform
import resource
import sys
from typing import Any, NamedTuple, NoReturn

import torch

# DDP and the optimizers import this module anyway. The import is faster here, because the garbage collector
# is off.
import torch._dynamo
from torch import nn

from imgkit_entrypoints import terminal
from imgkit_entrypoints.apps import ranks as workers
from imgkit_entrypoints.apps.train import datasets, main_loop, models, options, plugins
from imgkit_entrypoints.apps.train.batches import BadSample, Batches
from imgkit_entrypoints.apps.train.config import Config, parse_interval, steps_per_line, total_steps
from imgkit_entrypoints.apps.train.main_loop import Course, MainLoop, RunEnd, Steps
from imgkit_entrypoints.apps.train.order import Order, plan_order, seed_of
from imgkit_entrypoints.apps.train.profiling import WorkClock, trace_steps
from imgkit_entrypoints.apps.train.run_log import RunLog, Workload
from imgkit_entrypoints.apps.train.stragglers import RankOnNode
from imgkit_entrypoints.apps.train.trainer import Evaluation, StepSums, Trainer
from imgkit_entrypoints.errors import EXIT_NO, CheckFailed, ImgkitError, UsageError
from imgkit_entrypoints.launch import user_program
from imgkit_entrypoints.launch.start_up import StartUp
from imgkit_entrypoints.run import Run
from imgkit_entrypoints.run.checkpoint import Checkpoint
from imgkit_entrypoints.run.random_state import seed_everything
from imgkit_entrypoints.run.ranks import Ranks, ranks_by_value

# Options that may differ between ranks. All others must be equal on all ranks.
PER_RANK = ("run_dir", "stop_after_s", "log_to")


def main() -> None:
    """Run one worker: train to the last step or until a request to stop, save the state, and exit."""
    start_up = StartUp.from_env(os.environ)
    start_up.record("imports")
    try:
        config = options.read_config(sys.argv[1:], os.environ)
        run = _start_run(config)
        torch.use_deterministic_algorithms(config.deterministic)
        # Import the user's functions early. If one has a mistake, the run ends before ranks wait for each
        # other.
        _load_function(config.model, plugins.MODEL)
        _load_function(config.data, plugins.DATA)
        _load_function(config.step, plugins.STEP)
        with workers.join_group() as ranks:
            start_up.record("process_group")
            sys.exit(train(config, run, ranks, start_up))
    # Both functions below end this process. A CheckFailed, which is an ImgkitError, may concern only this
    # rank, so its message is printed in any case.
    except CheckFailed as error:
        _exit_with_failure(error)
    # All ranks raise any other ImgkitError, such as one about an option. One message per node is enough.
    except ImgkitError as error:
        workers.refuse(_describe_refusal(error), error.exit_code)


def _start_run(config: Config) -> Run:
    """Start a run of the run library, which saves checkpoints if the options name a run folder."""
    stop_after_s = math.inf
    if config.stop_after_s is not None:
        stop_after_s = config.stop_after_s
    return Run.start(
        config.run_dir,
        keep=config.keep if config.run_dir else 0,
        stop_after_s=stop_after_s,
        ignore_checkpoints=config.ignore_checkpoints,
        say=say,
    )


def _describe_refusal(error: ImgkitError) -> str:
    """Return the message for an error.

    If the import of a user's function has failed, the message includes the traceback in the user's code.
    """
    text = f"dist-train: {error}"
    cause = error.__cause__
    if cause is not None and user_program.user_frames(cause.__traceback__):
        text += f"\n{user_program.format_error(cause, cause.__traceback__)}"
    return text


def _exit_with_failure(error: CheckFailed) -> NoReturn:
    """Report an error that this rank has raised during training, and end this worker."""
    text = f"dist-train: {error}"
    trace = ""
    if isinstance(error, BadSample):
        trace = f"\n{error.trace}"
    if not user_program.record_error(text + trace):
        terminal.print_messages(*text.split("\n"))
    sys.exit(error.exit_code)


def train(config: Config, run: Run, ranks: Ranks, start_up: StartUp) -> int:
    """Run the training on this rank, and return the exit code.

    The model, the data and the optimizer are created first. Then the state of the latest checkpoint is
    restored, if there is one, and the remaining steps are taken.
    """
    run.connect(ranks)
    _refuse_other_options(config, ranks)
    if ranks.rank == 0 and config.run_dir is None:
        say("nothing is saved without a run folder: --run-dir DIR")
    plan = _plan_run(config, run, ranks)
    if plan.course.position.step >= plan.steps:  # an earlier start has done all steps
        return 0
    held_out = None
    if parse_interval(plan.config.eval_every, 1):  # 0 means no evaluation
        held_out = load_data(plan.config, "eval")
    start_up.record("data")
    training = _prepare_training(plan, run, ranks, start_up)
    trainer = training.trainer
    report = None
    evaluation = None
    if ranks.rank == 0:
        report = RunLog(plan.config, training.workload, start_up, say, plan.course.first_loss)
    if held_out is not None:
        evaluation = Evaluation(held_out, plan.order, plan.config, trainer, ranks)
    loop = MainLoop(run, trainer, plan.course, report, evaluation, start_up)
    run.add_up(StepSums(trainer, training.clock, ranks, loop.log_steps), every=plan.config.log_every)
    end = loop.run_to_end(training.steps, plan.config, training.workload)
    _write_summary(end, run, report, plan.steps)
    return end.exit_code


class _Plan(NamedTuple):
    """The options, the data and the length of a run, and the state from which this start continues."""

    config: Config
    samples: Any
    order: Order
    steps: int
    """Number of steps of the whole run, including those of earlier starts."""
    course: Course
    checkpoint: Checkpoint | None
    """The state to restore, or None if the run begins."""


def _plan_run(config: Config, run: Run, ranks: Ranks) -> _Plan:
    """Load the training data, and return the plan of a new run, or of the run in the latest checkpoint.

    If a run resumes, rank 0 reports this, and the options and the data that have changed.
    """
    checkpoint = main_loop.find_checkpoint(config, run)
    course = Course()
    changes = list[str]()
    if checkpoint is not None:
        course = main_loop.read_course(checkpoint)
        config, changes = config.merge_saved(course.config, checkpoint.folder)
    samples = load_data(config, "train")
    if checkpoint is not None and course.samples != len(samples):
        changes.append(f"the data had {course.samples} samples, and has {len(samples)} now")
    order = plan_order(len(samples), ranks.world_size, config.batch_size, config.global_batch)
    steps = total_steps(config, order.steps_per_epoch)
    _refuse_late_trace(config, steps)
    log_every = config.log_every or steps_per_line(steps)
    config = dataclasses.replace(config, global_batch=order.global_batch, log_every=log_every)
    course.samples = len(samples)
    course.config = _list_shared_options(config)
    if checkpoint is not None and ranks.rank == 0:
        say(f"resumes after step {course.position.step} of {steps}: {checkpoint.folder}")
        for change in changes:
            say(change)
    return _Plan(config, samples, order, steps, course, checkpoint)


class _Training(NamedTuple):
    """The objects with which this rank takes the remaining steps."""

    trainer: Trainer
    clock: WorkClock
    steps: Steps
    workload: Workload


def _prepare_training(plan: _Plan, run: Run, ranks: Ranks, start_up: StartUp) -> _Training:
    """Create the model and the optimizer, and warm them up with the first batch.

    If there is a checkpoint, restore their state from it.
    """
    config = plan.config
    start = plan.course.position
    clock = WorkClock(ranks)
    loss = _load_function(config.step, plugins.STEP, models.mean_loss)
    trainer = Trainer(config, create_model(config), loss, plan.steps, ranks, clock)
    start_up.record("model")
    feed = Batches(plan.samples, plan.order, config, ranks, channels_last=trainer.channels_last)
    batches = feed.iterate_steps(start, plan.steps)
    # The warm-up needs a batch, so take the first one here. `all_steps` below puts it back in front.
    first_step = next(batches)
    _, first_micro_batches = first_step
    start_up.record("data")
    trainer.warm_up(first_micro_batches[0])
    start_up.record("first_step")
    run.track(weights=trainer.plain, optimizer=trainer, course=plan.course)
    if plan.checkpoint is not None:
        run.restore(plan.checkpoint)
    start_up.record("model")
    workload = Workload(
        start=start.step,
        steps=plan.steps,
        steps_per_epoch=plan.order.steps_per_epoch,
        placements=ranks.gather(RankOnNode(node=platform.node(), local_rank=ranks.local_rank)),
        waited_s=lambda: feed.waited_s,
        memory_MiB=lambda: _peak_memory_MiB(ranks),
        tokens_per_sample=_count_tokens(first_micro_batches[0].batch),
        names=trainer.number_names,
    )
    all_steps = trace_steps(itertools.chain((first_step,), batches), config, ranks)
    return _Training(trainer, clock, all_steps, workload)


def _refuse_late_trace(config: Config, steps: int) -> None:
    """Raise UsageError if ``--profile`` begins after the last step of the run."""
    traced_steps = config.traced_steps()
    if traced_steps and traced_steps.start > steps:
        raise UsageError(
            f"--profile {config.profile} would trace nothing: the run has {steps} steps",
            hint="a smaller START, or more --steps",
        )


def _list_shared_options(config: Config) -> dict[str, Any]:
    """Return the options that must be equal on all ranks."""
    return {name: value for name, value in config.values().items() if name not in PER_RANK}


def _refuse_other_options(config: Config, ranks: Ranks) -> None:
    """Raise UsageError on every rank if the ranks have different options.

    With different options, the ranks would train different models, or wait for each other forever.
    """
    options_by_rank = ranks.gather(_list_shared_options(config))
    differences = []
    for name in options_by_rank[0]:
        values = [str(rank_options[name]) for rank_options in options_by_rank]
        if len(set(values)) > 1:
            differences.append(f"{name}: {ranks_by_value(values)}")
    if differences:
        raise UsageError(
            f"the ranks have different options; {'; '.join(differences)}",
            hint="start all nodes with the same options",
        )


def _write_summary(end: RunEnd, run: Run, report: RunLog | None, steps: int) -> None:
    """Wait until all checkpoints are saved, and write the summary of this start on rank 0.

    All ranks must call this function.
    """
    writer = run.wait()
    if report is None:  # only rank 0 has a log
        return
    report.close(
        step=run.step,
        reason=end.reason,
        saved_step=writer.saved_step,
        saving_s=writer.stalled_s,
        stall_s=writer.longest_stall_s,
    )
    if end.exit_code == EXIT_NO:
        state = "this start saved no state"
        if writer.saved_step >= 0:
            state = f"the state of step {writer.saved_step} is saved"
        message = f"{run.step} of {steps} steps are done: {end.reason}; {state}"
        if end.hint:
            message += f"; {end.hint}"
        say(message)


def _peak_memory_MiB(ranks: Ranks) -> float:
    """Return the peak memory so far: that of tensors on the GPU, or that of this process on a CPU."""
    if ranks.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(ranks.device)) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux reports KiB


def _count_tokens(batch: Any) -> int | None:
    """Return the number of tokens in a sample, or None if the samples are not rows of tokens.

    The first tensor of the batch counts as rows of tokens if it has two dimensions and integers.
    """
    tensors = batch  # a batch is a tuple or a dict of tensors
    if isinstance(batch, dict):
        tensors = batch.values()
    inputs, *_ = tensors
    if inputs.is_floating_point() or inputs.dim() != 2:
        return None
    return int(inputs.shape[1])


def say(text: str) -> None:
    """Print a message on stderr, because stdout is for results."""
    terminal.print_messages(f"dist-train: {text}")


def _load_function(name: str, contract: plugins.Contract, built_in: Any = None) -> Any:
    """Return the user's function that an option names, or the built-in function for other values.

    Parameters
    ----------
    name : value of the option. It names a function of the user if it contains a colon.
    contract : the signature that the user's function must have.
    """
    if plugins.is_plugin(name):
        return plugins.load(name, contract)
    return built_in


def _make_built_in_model(config: Config) -> nn.Module:
    """Return the built-in model of ``--model``, with as many classes as the data has."""
    return models.BUILT_IN[config.model](datasets.count_classes(config))


def create_model(config: Config) -> nn.Module:
    """Return the model of ``--model``, whose initial weights depend only on ``--seed``."""
    seed_everything(config.seed)
    build = _load_function(config.model, plugins.MODEL, _make_built_in_model)
    model = build(config)
    if not isinstance(model, nn.Module):
        raise _make_type_error(config.model, model, plugins.MODEL)
    return model


def load_data(config: Config, split: str) -> Any:
    """Return the samples of a split, which is ``train`` or ``eval``.

    If samples are generated at random, they are the same on every rank but differ between splits.
    """
    # A function of the user may draw random numbers, so set the seed before it is called.
    seed = config.seed if split == "train" else seed_of(config.seed, split)
    seed_everything(seed)
    load = _load_function(config.data, plugins.DATA, datasets.load_built_in)
    samples = load(config, split)
    has_samples = hasattr(samples, "__getitem__") or hasattr(samples, "batch")
    if not hasattr(samples, "__len__") or not has_samples:
        raise _make_type_error(config.data, samples, plugins.DATA)
    return samples


def _make_type_error(name: str, value: object, contract: plugins.Contract) -> UsageError:
    """Return the error for a user's function `name` that has returned a value of a wrong type."""
    return UsageError(
        f"the function returned a {type(value).__name__}", where=name, hint=f"expected {contract.signature}"
    )


if __name__ == "__main__":
    workers.run_worker(main)
