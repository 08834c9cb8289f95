"""One run of dist-train on one rank, from top to bottom."""

from __future__ import annotations

import dataclasses
import itertools
import os
import platform
import resource
import sys
import time
from typing import Any

import torch
import torch._dynamo  # DDP and the optimizers do; here the garbage collector still rests

from imgkit_entrypoints.apps import ranks
from imgkit_entrypoints.apps.train import components, options, plugins
from imgkit_entrypoints.apps.train.config import Config, due, every, resumed, steps_a_line, total_steps
from imgkit_entrypoints.apps.train.data.batches import Batches
from imgkit_entrypoints.apps.train.data.order import Order, Position, arrange
from imgkit_entrypoints.apps.train.evaluation import Evaluation
from imgkit_entrypoints.apps.train.loop import Trainer
from imgkit_entrypoints.apps.train.report import utilization
from imgkit_entrypoints.apps.train.report.metrics import Gauges, Pauses
from imgkit_entrypoints.apps.train.report.run_log import RunLog
from imgkit_entrypoints.apps.train.report.slow_ranks import RankPlace, SlowRanks
from imgkit_entrypoints.apps.train.report.tracing import traced
from imgkit_entrypoints.apps.train.state import snapshot
from imgkit_entrypoints.apps.train.state.export import export
from imgkit_entrypoints.apps.train.watch import Watch, refuse_stopped, tell_counts
from imgkit_entrypoints.apps.train.work_clock import WorkClock
from imgkit_entrypoints.errors import EXIT_NO, EXIT_SAVED, CheckFailed, ImgkitError
from imgkit_entrypoints.launch.start_up import StartUp
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.snapshots import SnapshotWriter
from imgkit_entrypoints.run.stop_requests import FOR_GOOD, tell_saved


def main() -> None:
    """Train to the last step, or until a stop request; the state is saved in both cases."""
    began, started = time.monotonic(), StartUp.of_worker(os.environ)
    started.ends("imports")
    try:
        config = options.read(sys.argv[1:], os.environ)
        refuse_stopped(config, os.environ)
        torch.use_deterministic_algorithms(config.deterministic)
        own = components.load(
            config
        )  # mistakes in user code end the run here, before ranks wait for each other
        with ranks.opened() as here:
            started.ends("process_group")
            sys.exit(train(config, own, here, began, started))
    except ImgkitError as error:
        if isinstance(error, CheckFailed):  # raised while training, on this rank alone
            say(str(error))
            sys.exit(error.exit_code)
        ranks.refuse(f"dist-train: {error}", error.exit_code)


def train(config: Config, own: components.Components, here: Ranks, began: float, started: StartUp) -> int:
    """Run the training; returns the exit code."""
    work = WorkClock(here)
    watch = Watch(config, here, os.environ, began, work)
    found = snapshot.find(config, here, say)
    changes: tuple[str, ...] = ()
    if found is not None:
        config, changes = resumed(config, found.config, found.where)
    samples = own.data(config, "train")
    order = _order(config, len(samples), here)
    tell_counts(order.global_batch, here, os.environ)
    steps = total_steps(config, order.steps_per_epoch)
    config = dataclasses.replace(
        config, global_batch=order.global_batch, log_every=config.log_every or steps_a_line(steps)
    )
    saves, looks = (every(text, order.steps_per_epoch) for text in (config.save_every, config.eval_every))
    held_out_samples = own.data(config, "eval") if looks else None
    position = start = Position() if found is None else found.position
    if found is not None and here.rank == 0:
        for text in (f"resumes after step {start.step} of {steps}: {found.where}", *changes):
            say(text)
    if found is not None and start.step >= steps:
        export(config, found.weights, here)
        return 0
    started.ends("data")
    trainer = Trainer(config, own.model(config), own.loss, steps, here, work)
    started.ends("model")
    feed = Batches(samples, order, config, here, channels_last=trainer.channels_last)
    held_out = Evaluation(held_out_samples, order, config, trainer, here) if looks else None
    batches = feed.steps(start, steps)
    first = next(batches)
    started.ends("data")
    trainer.settle(first[1][0])
    started.ends("first_step")
    gauges = _gauges(config, feed, trainer, first[1][0].batch, here)
    if found is not None:
        trainer.restore(found, here)
    started.ends("model")
    places = here.gather(RankPlace(node=platform.node(), local_rank=here.local_rank), RankPlace)
    report = None
    if here.rank == 0:
        report = RunLog(
            config,
            start=start.step,
            steps=steps,
            steps_per_epoch=order.steps_per_epoch,
            ranks=here.world_size,
            gauges=gauges,
            slow=SlowRanks(places, say),
            started=started,
            say=say,
        )
        report.first_loss = found.first_loss if found else report.first_loss
    keeper = None
    if config.run_dir is not None:
        keeper = SnapshotWriter(config.run_dir, config.keep, here, say, watch.progress.keeps)
    pauses = Pauses()
    with watch.signals():
        watch.begin(start.step, config.log_every)
        watch.progress.trains()
        for position, micro_batches in traced(itertools.chain((first,), batches), config, here):
            watch.enters(position.step)
            look, save = due(position.step, looks, steps), due(position.step, saves, steps)
            measured = look or save or watch.looks(position.step)
            trainer.step(position.step - 1, micro_batches, measured=measured)
            if position.step == start.step + 1:
                started.ends("first_step")
            news = watch.after(position.step, trainer.window)
            if look or save or watch.stop:  # before saving, check every step for NaN
                news += watch.after(position.step, trainer.window, everything=True)
            if report:
                report.note(*news)
            if look and held_out and not (watch.stop or watch.broken):
                with pauses.evaluation():
                    loss = held_out.loss(watch.lives)
                if report:
                    report.held_out(position.step, loss)
            if (save or watch.stop) and keeper and not watch.broken:
                with pauses.saving(), watch.progress.saving(position.step):
                    first_loss = report.first_loss if report else 0.0
                    snapshot.save(keeper, config, position, first_loss, trainer.state)
            if watch.stop or watch.broken:
                break
            if look or save:
                watch.begin(position.step, config.log_every)  # neither counts as training time
    code = _end(watch, position.step, steps, keeper, report, pauses, here)
    if code == 0:
        with watch.progress.saving():
            export(config, trainer.plain.state_dict(), here)
    return code


def _order(config: Config, samples: int, here: Ranks) -> Order:
    return arrange(
        size=samples,
        world_size=here.world_size,
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        global_batch=config.global_batch,
    )


def _end(
    watch: Watch,
    step: int,
    steps: int,
    keeper: SnapshotWriter | None,
    report: RunLog | None,
    pauses: Pauses,
    here: Ranks,
) -> int:
    with pauses.saving(), watch.progress.saving():
        saved = keeper.close() if keeper else -1
    reason = "a loss is not a number" if watch.broken else watch.stop or "all steps are done"
    if report:
        report.close(
            step=step,
            reason=reason,
            saved_step=saved,
            stall_s=keeper.longest_stall_s if keeper else 0.0,
            pauses=pauses,
        )
    if step == steps and not watch.broken and (keeper is None or saved == step):
        return 0
    safe = watch.stop and saved == step
    if here.rank == 0:
        kept = f"the state of step {saved} is saved" if saved >= 0 else "this start saved no state"
        hint = "; try a smaller --lr, --clip 1, or --on-nan skip" if watch.broken else ""
        say(
            f"stopped after step {step} of {steps}: {reason}; {kept}{hint}"
            + ("" if keeper else " (no --run-dir)")
        )
    if not safe:
        return EXIT_NO
    if watch.stop == FOR_GOOD:
        return 0
    return 0 if tell_saved(step, here.local_rank, os.environ) else EXIT_SAVED


def _gauges(config: Config, feed: Batches, trainer: Trainer, batch: Any, here: Ranks) -> Gauges:
    cuda = here.device.type == "cuda"

    def memory_MiB() -> float:
        if cuda:
            return float(torch.cuda.max_memory_allocated(here.device)) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    peak = utilization.peak(torch.cuda.get_device_name(here.device), config.amp) if cuda else None
    # The FLOP counter may not know all operations of a user's model.
    known = here.rank == 0 and not plugins.is_plugin(config.model)
    at_peak = peak / trainer.flops_a_sample(batch) if peak and known else None
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
    print(f"dist-train: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    ranks.run_worker(main)
