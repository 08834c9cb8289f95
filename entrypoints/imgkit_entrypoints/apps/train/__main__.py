"""One run of dist-train on one rank, from top to bottom."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # DDP and the optimizers do; here the garbage collector still rests
from torch import nn

from imgkit_entrypoints import terminal
from imgkit_entrypoints.apps import ranks as workers
from imgkit_entrypoints.apps.train import datasets, main_loop, models, options, plugins, run_log
from imgkit_entrypoints.apps.train.batches import BadSample, Batches
from imgkit_entrypoints.apps.train.config import Config, every, steps_per_line, total_steps
from imgkit_entrypoints.apps.train.main_loop import Course, MainLoop, RunEnd
from imgkit_entrypoints.apps.train.order import arrange, seed_of
from imgkit_entrypoints.apps.train.profiling import WorkClock, traced
from imgkit_entrypoints.apps.train.run_log import Gauges, RunLog
from imgkit_entrypoints.apps.train.stragglers import RankOnNode, Stragglers
from imgkit_entrypoints.apps.train.trainer import Evaluation, StepSums, Trainer
from imgkit_entrypoints.errors import EXIT_NO, CheckFailed, ImgkitError, UsageError
from imgkit_entrypoints.launch import user_program
from imgkit_entrypoints.launch.start_up import StartUp
from imgkit_entrypoints.run import Run
from imgkit_entrypoints.run.random_state import seed_everything
from imgkit_entrypoints.run.ranks import Ranks, ranks_by_value

OF_A_RANK = ("run_dir", "stop_after_s", "log_to")
"""Options that may differ between nodes."""


def main() -> None:
    """Train to the last step, or until a stop request; the state is saved in both cases."""
    started = StartUp.of_worker(os.environ)
    started.ends("imports")
    try:
        config = options.read(sys.argv[1:], os.environ)
        run = Run.start(
            config.run_dir,
            keep=config.keep if config.run_dir else 0,
            stop_after_s=math.inf if config.stop_after_s is None else config.stop_after_s,
            say=say,
        )
        torch.use_deterministic_algorithms(config.deterministic)
        components = load_components(
            config
        )  # mistakes in user code end the run here, before ranks wait for each other
        with workers.opened() as ranks:
            started.ends("process_group")
            sys.exit(train(config, components, run, ranks, started))
    except ImgkitError as error:
        if isinstance(error, CheckFailed):  # raised while training, on this rank alone
            text = f"dist-train: {error}"
            trace = f"\n{error.trace}" if isinstance(error, BadSample) else ""
            if not user_program.report(text + trace):
                terminal.err(*text.split("\n"))
            sys.exit(error.exit_code)
        cause = error.__cause__  # of a function of the user that cannot be imported
        of_user = cause and user_program.own_frames(cause.__traceback__)
        trace = f"\n{user_program.described(cause, cause.__traceback__)}" if cause and of_user else ""
        workers.refuse(f"dist-train: {error}{trace}", error.exit_code)


def _common(config: Config) -> dict[str, Any]:
    """The options that are equal on all ranks."""
    return {name: value for name, value in config.values().items() if name not in OF_A_RANK}


def _refuse_other_options(config: Config, ranks: Ranks) -> None:
    """Raise UsageError, on every rank, if the ranks were given different options; names them."""
    options_of_rank = _common(config)
    rows = ranks.gather(options_of_rank)
    columns = {name: [str(row[name]) for row in rows] for name in options_of_rank}
    differences = []
    for name, values in columns.items():
        if len(set(values)) > 1:
            differences.append(f"{name}: {ranks_by_value(values)}")
    if differences:
        raise UsageError(
            f"the ranks have different options; {'; '.join(differences)}",
            hint="start all nodes with the same options",
        )


def train(config: Config, components: Components, run: Run, ranks: Ranks, started: StartUp) -> int:
    """Run the training; returns the exit code."""
    run.connect(ranks)
    _refuse_other_options(config, ranks)
    checkpoint = main_loop.find(config, run)
    course = Course()
    changes: tuple[str, ...] = ()
    if checkpoint is not None:
        course = main_loop.course_of(checkpoint)
        config, changes = config.resumed(course.config, checkpoint.folder)
    samples = components.data(config, "train")
    if checkpoint is not None and course.samples != len(samples):
        changes = (*changes, f"the data had {course.samples} samples, and has {len(samples)} now")
    course.samples = len(samples)
    order = arrange(
        size=len(samples),
        world_size=ranks.world_size,
        batch_size=config.batch_size,
        global_batch=config.global_batch,
    )
    steps = total_steps(config, order.steps_per_epoch)
    if config.profiled() and config.profiled().start > steps:
        raise UsageError(
            f"--profile {config.profile} would trace nothing: the run has {steps} steps",
            hint="a smaller START, or more --steps",
        )
    config = dataclasses.replace(
        config, global_batch=order.global_batch, log_every=config.log_every or steps_per_line(steps)
    )
    saves, looks = (every(text, order.steps_per_epoch) for text in (config.save_every, config.eval_every))
    held_out_samples = components.data(config, "eval") if looks else None
    start, course.config = course.position, _common(config)
    if checkpoint is not None and ranks.rank == 0:
        for text in (f"resumes after step {start.step} of {steps}: {checkpoint.folder}", *changes):
            say(text)
    if checkpoint is not None and start.step >= steps:
        return 0
    started.ends("data")
    work = WorkClock(ranks)
    trainer = Trainer(config, components.model(config), components.loss, steps, ranks, work)
    started.ends("model")
    feed = Batches(samples, order, config, ranks, channels_last=trainer.channels_last)
    held_out = Evaluation(held_out_samples, order, config, trainer, ranks) if looks else None
    batches = feed.steps(start, steps)
    first = next(batches)
    started.ends("data")
    trainer.settle(first[1][0])
    started.ends("first_step")
    gauges = _gauges(config, feed, trainer, first[1][0].batch, ranks)
    run.track(weights=trainer.plain, optimizer=trainer, course=course)
    if checkpoint is not None:
        run.restore(checkpoint)
    started.ends("model")
    report = _report(config, start.step, steps, order.steps_per_epoch, gauges, started, ranks)
    if report:
        report.first_loss = course.first_loss
    loop = MainLoop(
        run, trainer, course, report, held_out, started, steps=steps, save_every=saves, eval_every=looks
    )
    run.add_up(StepSums(trainer, work, ranks, loop.note), every=config.log_every)
    end = loop.end(traced(itertools.chain((first,), batches), config, ranks))
    _write_summary(end, run, report, steps, config, ranks)
    return end.exit_code


def _report(
    config: Config,
    start: int,
    steps: int,
    steps_per_epoch: int,
    gauges: Gauges,
    started: StartUp,
    ranks: Ranks,
) -> RunLog | None:
    """Open the log of the run on rank 0; a collective call."""
    placements = ranks.gather(RankOnNode(node=platform.node(), local_rank=ranks.local_rank))
    if ranks.rank != 0:
        return None
    return RunLog(
        config,
        start=start,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        ranks=ranks.world_size,
        gauges=gauges,
        slow=Stragglers(placements, say),
        started=started,
        say=say,
    )


def _write_summary(
    end: RunEnd, run: Run, report: RunLog | None, steps: int, config: Config, ranks: Ranks
) -> None:
    """Write the summary of this start; a collective call."""
    saved = run.wait()
    if report:
        report.close(
            step=run.step,
            reason=end.reason,
            saved_step=saved.saved_step,
            saving_s=saved.stalled_s,
            stall_s=saved.longest_stall_s,
        )
    if ranks.rank == 0 and end.exit_code == EXIT_NO:
        nothing = f"this start saved no state{'' if config.run_dir else ' (no --run-dir)'}"
        state = f"the state of step {saved.saved_step} is saved" if saved.saved_step >= 0 else nothing
        hint = f"; {end.hint}" if end.hint else ""
        say(f"{run.step} of {steps} steps are done: {end.reason}; {state}{hint}")


def _gauges(config: Config, feed: Batches, trainer: Trainer, batch: Any, ranks: Ranks) -> Gauges:
    cuda = ranks.device.type == "cuda"

    def memory_MiB() -> float:
        if cuda:
            return float(torch.cuda.max_memory_allocated(ranks.device)) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    peak = run_log.peak(torch.cuda.get_device_name(ranks.device), config.amp) if cuda else None
    # The FLOP counter may not know all operations of a user's model.
    is_counted = ranks.rank == 0 and not plugins.is_plugin(config.model)
    at_peak = peak / trainer.flops_a_sample(batch) if peak and is_counted else None
    inputs = next(iter(batch.values() if isinstance(batch, dict) else batch))
    tokens = not inputs.is_floating_point() and inputs.dim() == 2
    return Gauges(
        waited_s=lambda: feed.waited_s,
        memory_MiB=memory_MiB,
        samples_per_s_at_peak=at_peak,
        tokens_a_sample=inputs.shape[1] if tokens else None,
        names=trainer.names,
    )


def say(text: str) -> None:
    """Print a message on stderr; stdout is for results."""
    terminal.err(f"dist-train: {text}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Functions that make the model and the data, and the loss."""

    model: Callable[[Config], nn.Module]
    data: Callable[[Config, str], Any]
    loss: Callable[[nn.Module, Any], Any]


def load_components(config: Config) -> Components:
    """Find the functions that `config` names, without calling them.

    Raises
    ------
    UsageError : a function of the user cannot be imported.
    """
    model: Callable[[Config], Any] = (
        plugins.load(config.model, plugins.MODEL) if plugins.is_plugin(config.model) else _built_in
    )
    samples = plugins.load(config.data, plugins.DATA) if plugins.is_plugin(config.data) else datasets.built_in
    loss = models.loss_of if config.step == "builtin" else plugins.load(config.step, plugins.STEP)

    def seeded_model(config: Config) -> nn.Module:
        seed_everything(config.seed)
        model_built = model(config)
        if not isinstance(model_built, nn.Module):
            raise _wrong(config.model, model_built, plugins.MODEL)
        return model_built

    def seeded_data(config: Config, split: str) -> Any:
        # Random data is the same on every rank, and differs between the splits.
        seed_everything(config.seed if split == "train" else seed_of(config.seed, split))
        dataset = samples(config, split)
        if not hasattr(dataset, "__len__") or not (
            hasattr(dataset, "__getitem__") or hasattr(dataset, "batch")
        ):
            raise _wrong(config.data, dataset, plugins.DATA)
        return dataset

    return Components(model=seeded_model, data=seeded_data, loss=loss)


def _built_in(config: Config) -> nn.Module:
    return models.BUILT_IN[config.model](datasets.classes(config))


def _wrong(function_name: str, value: object, contract: plugins.Contract) -> UsageError:
    return UsageError(
        f"the function returned a {type(value).__name__}",
        where=function_name,
        hint=f"expected {contract.signature}",
    )


if __name__ == "__main__":
    workers.run_worker(main)
