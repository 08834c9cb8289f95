"""One run of dist-train on one rank, read from top to bottom."""

from __future__ import annotations

import dataclasses
import itertools
import os
import resource
import sys
import time

import torch

from imgkit_entrypoints.apps import ranks
from imgkit_entrypoints.apps.train import options, parts
from imgkit_entrypoints.apps.train.config import Config, every, held_against, total_steps
from imgkit_entrypoints.apps.train.feed import Feed
from imgkit_entrypoints.apps.train.loop import Trainer
from imgkit_entrypoints.apps.train.order import Position, arrange
from imgkit_entrypoints.apps.train.report import Gauges, Report
from imgkit_entrypoints.apps.train.snapshot import Keeper, find
from imgkit_entrypoints.apps.train.watch import Watch, refuse_stopped, tell_saved
from imgkit_entrypoints.errors import EXIT_NO, EXIT_SAVED, CheckFailed, ImgkitError


def main() -> None:
    """Train to the last step, or until asked to stop; the state is saved either way."""
    began = time.monotonic()
    try:
        config = options.read(sys.argv[1:], os.environ)
        refuse_stopped(config)
        torch.use_deterministic_algorithms(config.deterministic)
        own = parts.load(config)  # a mistake in it ends here, before anyone waits for anyone
        with ranks.opened() as here:
            sys.exit(train(config, own, here, began))
    except ImgkitError as error:
        if isinstance(error, CheckFailed):  # in training: only this rank knows
            say(str(error))
            sys.exit(error.exit_code)
        ranks.refuse(f"dist-train: {error}", error.exit_code)


def train(config: Config, own: parts.Parts, here: ranks.Ranks, began: float) -> int:
    """The run; its exit code."""
    watch = Watch(config, here, os.environ, began)
    found = find(config, here, say)
    changes: tuple[str, ...] = ()
    if found is not None:
        config, changes = held_against(config, found.config, found.where)
    samples = own.data(config, "train")
    order = arrange(
        size=len(samples),
        world_size=here.world_size,
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        global_batch=config.global_batch,
    )
    config = dataclasses.replace(config, global_batch=order.global_batch)
    steps, saves = total_steps(config, order.steps_per_epoch), every(config.save_every, order.steps_per_epoch)
    position = start = Position() if found is None else found.position
    if found is not None and here.rank == 0:
        for text in (f"goes on after step {start.step} of {steps}: {found.where}", *changes):
            say(text)
    if start.step >= steps:
        return 0

    trainer = Trainer(config, own.model(config), own.loss, steps, here)
    feed = Feed(samples, order, config, here, channels_last=trainer.channels_last)
    batches = feed.steps(start, steps)
    first = next(batches)
    trainer.settle(first[1][0])
    if found is not None:
        trainer.restore(found, here)
    report = None
    if here.rank == 0:
        report = Report(
            config, start=start.step, steps=steps, ranks=here.world_size, gauges=_gauges(feed, here), say=say
        )
        report.first_loss = found.first_loss if found else report.first_loss
    keeper = None if config.run_dir is None else Keeper(config.run_dir, config.keep, here, say)
    with watch.signals():
        watch.begin(start.step)
        for position, micro_batches in itertools.chain((first,), batches):
            trainer.step(position.step - 1, micro_batches)
            news = watch.after(position.step, trainer.window)
            save = bool(watch.stop) or position.step == steps or (saves > 0 and position.step % saves == 0)
            if save:  # what is kept must be known to be sound
                news += watch.after(position.step, trainer.window, everything=True)
            if report:
                report.note(*news)
            if save and keeper and not watch.broken:
                keeper.save(config, position, report.first_loss if report else 0.0, trainer.state)
            if watch.stop or watch.broken:
                break
    return _end(watch, position.step, steps, keeper, report, here)


def _end(
    watch: Watch, step: int, steps: int, keeper: Keeper | None, report: Report | None, here: ranks.Ranks
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


def _gauges(feed: Feed, here: ranks.Ranks) -> Gauges:
    def memory_MiB() -> float:
        if here.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(here.device)) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    return Gauges(waited_s=lambda: feed.waited_s, memory_MiB=memory_MiB)


def say(text: str) -> None:
    """Tell the user; results alone go to stdout."""
    print(f"dist-train: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    ranks.run_worker(main)
