"""One run of dist-train on one rank, read from top to bottom."""

from __future__ import annotations

import dataclasses
import itertools
import os
import resource
import sys
import time
from typing import Any

import torch

from imgkit_entrypoints.apps import ranks
from imgkit_entrypoints.apps.train import components, options, plugins
from imgkit_entrypoints.apps.train.config import Config, due, every, resumed, steps_a_line, total_steps
from imgkit_entrypoints.apps.train.data.batches import Batches
from imgkit_entrypoints.apps.train.data.order import Position, arrange
from imgkit_entrypoints.apps.train.evaluation import Evaluation
from imgkit_entrypoints.apps.train.loop import Trainer
from imgkit_entrypoints.apps.train.report import utilization
from imgkit_entrypoints.apps.train.report.metrics import Gauges, RunLog
from imgkit_entrypoints.apps.train.report.tracing import traced
from imgkit_entrypoints.apps.train.state.export import export
from imgkit_entrypoints.apps.train.state.snapshot import SnapshotWriter, find
from imgkit_entrypoints.apps.train.watch import Watch, refuse_stopped, tell_saved
from imgkit_entrypoints.errors import EXIT_NO, EXIT_SAVED, CheckFailed, ImgkitError


def main() -> None:
    """Train to the last step, or until asked to stop; the state is saved either way."""
    began = time.monotonic()
    try:
        config = options.read(sys.argv[1:], os.environ)
        refuse_stopped(config)
        torch.use_deterministic_algorithms(config.deterministic)
        own = components.load(config)  # a mistake in it ends here, before anyone waits for anyone
        with ranks.opened() as here:
            sys.exit(train(config, own, here, began))
    except ImgkitError as error:
        if isinstance(error, CheckFailed):  # in training: only this rank knows
            say(str(error))
            sys.exit(error.exit_code)
        ranks.refuse(f"dist-train: {error}", error.exit_code)


def train(config: Config, own: components.Components, here: ranks.Ranks, began: float) -> int:
    """The run; its exit code."""
    watch = Watch(config, here, os.environ, began)
    found = find(config, here, say)
    changes: tuple[str, ...] = ()
    if found is not None:
        config, changes = resumed(config, found.config, found.where)
    samples = own.data(config, "train")
    order = arrange(
        size=len(samples),
        world_size=here.world_size,
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        global_batch=config.global_batch,
    )
    steps = total_steps(config, order.steps_per_epoch)
    config = dataclasses.replace(
        config, global_batch=order.global_batch, log_every=config.log_every or steps_a_line(steps)
    )
    saves, looks = (every(text, order.steps_per_epoch) for text in (config.save_every, config.eval_every))
    held_out_samples = own.data(config, "eval") if looks else None
    position = start = Position() if found is None else found.position
    if found is not None and here.rank == 0:
        for text in (f"goes on after step {start.step} of {steps}: {found.where}", *changes):
            say(text)
    if found is not None and start.step >= steps:
        export(config, found.weights, here)
        return 0

    trainer = Trainer(config, own.model(config), own.loss, steps, here)
    feed = Batches(samples, order, config, here, channels_last=trainer.channels_last)
    held_out = Evaluation(held_out_samples, order, config, trainer, here) if looks else None
    batches = feed.steps(start, steps)
    first = next(batches)
    gauges = _gauges(config, feed, trainer, first[1][0].batch, here)
    trainer.settle(first[1][0])
    if found is not None:
        trainer.restore(found, here)
    report = None
    if here.rank == 0:
        report = RunLog(config, start=start.step, steps=steps, ranks=here.world_size, gauges=gauges, say=say)
        report.first_loss = found.first_loss if found else report.first_loss
    keeper = None if config.run_dir is None else SnapshotWriter(config.run_dir, config.keep, here, say)
    with watch.signals():
        watch.begin(start.step, config.log_every)
        for position, micro_batches in traced(itertools.chain((first,), batches), config, here):
            watch.enters(position.step)
            trainer.step(position.step - 1, micro_batches)
            news = watch.after(position.step, trainer.window)
            look, save = due(position.step, looks, steps), due(position.step, saves, steps)
            if look or save or watch.stop:  # what is kept must be known to be sound
                news += watch.after(position.step, trainer.window, everything=True)
            if report:
                report.note(*news)
            if look and held_out and not (watch.stop or watch.broken):
                loss = held_out.loss(watch.lives)
                watch.begin(position.step, config.log_every)  # the time of it is not the training's
                if report:
                    report.held_out(position.step, loss)
            if (save or watch.stop) and keeper and not watch.broken:
                keeper.save(config, position, report.first_loss if report else 0.0, trainer.state)
            if watch.stop or watch.broken:
                break
    code = _end(watch, position.step, steps, keeper, report, here)
    if code == 0:
        export(config, trainer.plain.state_dict(), here)
    return code


def _end(
    watch: Watch,
    step: int,
    steps: int,
    keeper: SnapshotWriter | None,
    report: RunLog | None,
    here: ranks.Ranks,
) -> int:
    saved = keeper.close() if keeper else -1
    reason = "a loss is no number" if watch.broken else watch.stop or "all steps are done"
    if report:
        report.close(
            step=step, reason=reason, saved_step=saved, stall_s=keeper.longest_stall_s if keeper else 0.0
        )
    if step == steps and not watch.broken and (keeper is None or saved == step):
        return 0
    safe = watch.stop and saved == step
    if here.rank == 0:
        kept = f"the state of step {saved} is kept" if saved >= 0 else "nothing of this start is kept"
        hint = "; try a smaller --lr, --clip 1, or --on-nan skip" if watch.broken else ""
        say(
            f"stopped after step {step} of {steps}: {reason}; {kept}{hint}"
            + ("" if keeper else ": no --run-dir")
        )
    if not safe:
        return EXIT_NO
    return 0 if tell_saved(step, here, os.environ) else EXIT_SAVED


def _gauges(config: Config, feed: Batches, trainer: Trainer, batch: Any, here: ranks.Ranks) -> Gauges:
    cuda = here.device.type == "cuda"

    def memory_MiB() -> float:
        if cuda:
            return float(torch.cuda.max_memory_allocated(here.device)) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    peak = utilization.peak(torch.cuda.get_device_name(here.device), config.amp) if cuda else None
    # Of the user's models nobody knows whether all their operations can be counted.
    known = here.rank == 0 and not plugins.is_plugin(config.model)
    at_peak = peak / trainer.flops_a_sample(batch) if peak and known else None
    return Gauges(waited_s=lambda: feed.waited_s, memory_MiB=memory_MiB, samples_per_s_at_peak=at_peak)


def say(text: str) -> None:
    """Tell the user; results alone go to stdout."""
    print(f"dist-train: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    ranks.run_worker(main)
