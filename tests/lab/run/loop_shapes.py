"""Loops as people write them, each cut and resumed, and its weights compared; runs in the image.

``loop_shapes.py CUTS [LOOP...]`` writes ``results.json``: for each loop whether the weights of the run that
was cut are "exact" or "differ", or that it was "refused", and what the run told. CUTS is a list, of the
steps between checkpoints and of [STEP, SIGNAL, WHEN]: a start each, in the same folder, gets the signal.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy
import run_many
import torch
from run_many import Run
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    StackDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from imgkit_entrypoints.run.stepping import RunState

EPOCHS = 3
LOOPS = {}
RANKS = {}
SAVE, KEPT, CUT = {}, {}, {}
"""What cuts this rank: the step, the signal, and where the program is."""


def loop(function=None, *, ranks=1):
    if function is None:
        return lambda inner: loop(inner, ranks=ranks)
    LOOPS[function.__name__], RANKS[function.__name__] = function, ranks
    return function


def cut(step, when):
    if CUT.get("step") == step and CUT["when"] == when:
        os.kill(os.getpid(), CUT["signal"])


def data(size=14, seed=0):
    """Samples for batches of 4, 4, 4 and 2."""
    return TensorDataset(torch.randn(size, 3, generator=torch.Generator().manual_seed(seed)))


def shuffled(samples=None, kind=DataLoader, **options):
    return kind(samples or data(), batch_size=4, shuffle=True, **options)


class Job:
    """A model with dropout and its optimizer, tracked and restored."""

    def __init__(self, run, restores=True, **more):
        Job.latest = self
        torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.run, self.more = run, more
        run.track(model=self.model, optimizer=self.optimizer, **more)
        if restores:
            run.restore()

    @classmethod
    def untracked(cls, run):
        """One that the program tracks by itself."""
        tracked, run.track = run.track, lambda **_: None
        job, run.track = cls(run, restores=False), tracked
        return job

    def backward(self, batch):
        values = batch[0] if isinstance(batch, (list, tuple)) else batch
        values = values if torch.is_tensor(values) else torch.full((2, 3), float(values) / 10)
        self.model(values).square().mean().backward()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def learn(self, batch):
        self.optimizer.zero_grad()
        self.backward(batch)
        self.optimizer.step()


def passes(loader, body=None, *, behind=lambda run, job: None, **options):
    """The usual program, over a loader that `loader` makes."""
    with Run.start() as run:
        job, batches = Job(run, restores=False), loader()
        run.restore()
        for epoch in range(run.epoch, EPOCHS):
            if isinstance(getattr(batches, "sampler", None), (DistributedSampler, Turning)):
                batches.sampler.set_epoch(epoch)
            for step, batch in run.steps(batches, **{"save_every": SAVE["every"], **options}):
                (body or Job.learn)(job, *((step, batch) if body else (batch,)))
            cut(run.step, "behind")
            behind(run, job)


# ---- loaders


@loop
def shuffled_loader():
    passes(shuffled)


@loop
def sequence_of_batches():
    passes(lambda: [torch.full((2, 3), number / 5) for number in range(4)])


@loop
def range_of_steps():
    passes(lambda: range(4))


@loop
def batch_sampler():
    passes(
        lambda: DataLoader(data(), batch_sampler=BatchSampler(RandomSampler(range(14)), 4, drop_last=True))
    )


@loop
def samples_without_batches():
    passes(lambda: DataLoader(data(4), batch_size=None, shuffle=True))


@loop
def weighted_sampler():
    passes(lambda: DataLoader(data(), batch_size=4, sampler=WeightedRandomSampler([1.0, 2.0] * 7, 14)))


class Turning(Sampler):
    """A sampler whose order depends on the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(one + 3 * self.epoch) % 14 for one in range(14)])

    def __len__(self):
        return 14


@loop
def sampler_with_epoch():
    passes(lambda: DataLoader(data(), batch_size=4, sampler=Turning()))


@loop
def two_workers():
    passes(lambda: shuffled(num_workers=2))


@loop
def two_persistent_workers():
    passes(lambda: shuffled(num_workers=2, persistent_workers=True))


def save_behind(run, job):
    run.save()
    cut(run.step, "saved")


@loop
def persistent_workers_saved_between_passes():
    def loader():
        return shuffled(num_workers=2, persistent_workers=True)

    passes(loader, save_every=0, behind=save_behind)


@loop
def generator_of_the_loader():
    passes(lambda: shuffled(generator=torch.Generator().manual_seed(3)))


@loop
def generator_saved_between_passes():
    passes(lambda: shuffled(generator=torch.Generator().manual_seed(3)), save_every=0, behind=save_behind)


class OwnOrder(Sampler):
    def __init__(self):
        self.draw = torch.Generator().manual_seed(5)

    def __iter__(self):
        return iter(torch.randperm(14, generator=self.draw).tolist())

    def __len__(self):
        return 14


@loop
def generator_in_a_sampler():
    passes(lambda: DataLoader(data(), batch_size=4, sampler=OwnOrder()), behind=save_behind)


class Noisy(Dataset):
    """Samples with noise of every global generator."""

    def __init__(self, draw=None):
        self.values, self.draw = data()[:][0], draw

    def __len__(self):
        return len(self.values)

    def noise(self):
        return torch.randn(3) * random.random() + numpy.random.rand()  # noqa: S311

    def __getitem__(self, number):
        return [self.values[number] + 0.1 * self.noise()]


class OwnNoise(Noisy):
    def noise(self):
        return torch.randn(3, generator=self.draw)


class NumpyNoise(Noisy):
    def noise(self):
        return self.draw.random()


@loop
def noise_of_global_generators():
    passes(lambda: shuffled(Noisy()))


@loop
def generator_in_the_dataset():
    passes(lambda: shuffled(OwnNoise(torch.Generator().manual_seed(1))), behind=save_behind)


@loop
def generator_in_the_dataset_of_workers():
    passes(lambda: shuffled(OwnNoise(torch.Generator().manual_seed(1)), num_workers=1))


@loop
def numpy_generator_in_the_dataset():
    passes(lambda: shuffled(NumpyNoise(numpy.random.default_rng(1))))


@loop
def noise_in_workers():
    passes(lambda: shuffled(Noisy(), num_workers=2))


class Scaling(DataLoader):
    def __iter__(self):
        for (values,) in super().__iter__():
            yield [values * (1 + torch.rand(()))]


@loop
def subclass_that_scales():
    passes(lambda: shuffled(kind=Scaling))


@loop
def subclass_that_scales_with_persistent_workers():
    passes(lambda: shuffled(kind=Scaling, num_workers=2, persistent_workers=True))


class Ahead(DataLoader):
    """Reads each batch while the one before is in use."""

    def __iter__(self):
        batches = super().__iter__()
        next_one = next(batches, None)
        while next_one is not None:
            batch, next_one = next_one, next(batches, None)
            yield batch


@loop
def subclass_that_reads_ahead():
    passes(lambda: shuffled(kind=Ahead))


class Every2nd(DataLoader):
    def __iter__(self):
        return itertools.islice(super().__iter__(), 0, None, 2)


@loop
def subclass_that_drops_batches():
    passes(lambda: shuffled(kind=Every2nd))


class Repeat:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class MultiEpochs(DataLoader):
    """The pattern of timm's MultiEpochsDataLoader: one iterator for all passes."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._DataLoader__initialized = False
        self.batch_sampler = Repeat(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


@loop
def subclass_with_one_iterator():
    passes(lambda: shuffled(kind=MultiEpochs))


@loop
def subclass_with_one_iterator_and_workers():
    passes(lambda: shuffled(kind=MultiEpochs, num_workers=1))


class Backwards(list):
    def __iter__(self):
        return iter(self[::-1])


@loop
def sequence_with_its_own_order():
    passes(lambda: Backwards(torch.full((2, 3), number / 5) for number in range(4)))


class Stateful:
    """A loader that keeps its own position."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        while self.number < 4:
            self.number += 1
            yield torch.full((2, 3), self.number / 5)
        self.number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


@loop
def loader_with_a_state():
    with Run.start() as run:
        loader = Stateful()
        job = Job(run, loader=loader)
        for _ in range(run.epoch, EPOCHS):
            for _, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)


@loop
def loader_made_for_each_pass():
    with Run.start() as run:
        job = Job(run)
        for epoch in range(run.epoch, EPOCHS):
            loader = shuffled(generator=torch.Generator().manual_seed(epoch))
            for _, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)
            save_behind(run, job)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data()[:][0])


@loop
def stream():
    passes(lambda: DataLoader(Stream(), batch_size=4))


@loop
def collate_with_noise():
    def collate(samples):
        return [torch.stack([one for (one,) in samples]) + 0.1 * torch.randn(3)]

    passes(lambda: shuffled(collate_fn=collate))


class Wrapper:
    """A loader around a loader, as those that move batches to a device."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)

    def __len__(self):
        return len(self.loader)


@loop
def wrapper_around_a_loader():
    passes(lambda: Wrapper(shuffled()))


@loop
def generator_function():
    passes(lambda: (batch for batch in shuffled()))


@loop
def distributed_sampler():
    passes(lambda: DataLoader(data(28), batch_size=4, sampler=DistributedSampler(data(28), 2, rank=1)))


# ---- passes


@loop
def broken_off():
    with Run.start() as run:
        job, loader = Job(run), shuffled()
        for _ in range(run.epoch, EPOCHS + 1):
            for step, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)
                if step % 3 == 0:
                    break
            cut(run.step, "behind")


@loop
def broken_off_and_saved():
    with Run.start() as run:
        job, loader = Job(run), shuffled()
        for _ in range(run.epoch, EPOCHS + 1):
            for step, batch in run.steps(loader):
                job.learn(batch)
                if step % 3 == 0:
                    break
            save_behind(run, job)


@loop
def broken_off_while_epochs_remain():
    with Run.start() as run:
        job, loader = Job(run), shuffled()
        while run.epoch < EPOCHS + 1:
            for step, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)
                if step % 3 == 0:
                    break


@loop
def broken_off_after_each_step():
    with Run.start() as run:
        job, loader = Job(run), shuffled()
        for _ in range(run.epoch, 12):
            for _, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)
                break


@loop
def broken_off_at_a_number_of_steps():
    with Run.start() as run:
        job, loader = Job(run), shuffled()
        while run.step < 10:
            for step, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)
                if step >= 10:
                    break


@loop(ranks=2)
def broken_off_on_two_ranks():
    with Run.start() as run:
        job, sampler = Job(run), DistributedSampler(data(28))
        model = nn.parallel.DistributedDataParallel(job.model)
        for epoch in range(run.epoch, EPOCHS + 1):
            sampler.set_epoch(epoch)
            for step, (values,) in run.steps(
                DataLoader(data(28), batch_size=4, sampler=sampler), save_every=SAVE["every"]
            ):
                model(values).square().mean().backward()
                job.update()
                if step % 3 == 0:
                    break


@loop
def next_by_hand():
    with Run.start() as run:
        job, loader = Job(run), shuffled()
        for _ in range(run.epoch, EPOCHS):
            steps = run.steps(loader, save_every=SAVE["every"])
            while found := next(steps, None):
                job.learn(found[1])


class Bar:
    """Shows the progress, and keeps what it iterates over, as tqdm does."""

    def __init__(self, steps):
        self.steps = steps

    def __iter__(self):
        yield from self.steps


@loop
def broken_off_under_a_progress_bar():
    with Run.start() as run:
        job, loader = Job(run), shuffled()
        for _ in range(run.epoch, EPOCHS + 1):
            bar = Bar(run.steps(loader, save_every=SAVE["every"]))
            for step, batch in bar:
                job.learn(batch)
                if step % 3 == 0:
                    break


@loop
def error_that_is_caught():
    with Run.start() as run:
        job, loader = Job(run), shuffled()
        for _ in range(run.epoch, EPOCHS + 1):
            with contextlib.suppress(KeyError):
                for step, batch in run.steps(loader, save_every=SAVE["every"]):
                    job.learn(batch)
                    if step % 3 == 0:
                        raise KeyError


@loop
def islice_counts_by_itself():
    with Run.start() as run:
        job, loader = Job(run), shuffled()
        for _ in range(run.epoch, EPOCHS + 1):
            for _, batch in itertools.islice(run.steps(loader, save_every=SAVE["every"]), 3):
                job.learn(batch)


@loop
def epochs_from_zero():
    with Run.start() as run:
        job, loader = Job(run), shuffled()
        for _ in range(EPOCHS):
            for _, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)


@loop
def epochs_from_zero_with_set_epoch():
    with Run.start() as run:
        job, loader = Job(run), DataLoader(data(), batch_size=4, sampler=Turning())
        for epoch in range(EPOCHS):
            loader.sampler.set_epoch(epoch)
            for _, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)


@loop
def random_numbers_before_the_pass():
    with Run.start() as run:
        job, loader = Job(run), shuffled()
        for _ in range(run.epoch, EPOCHS):
            noise = torch.randn(3)
            for _, (values,) in run.steps(loader, save_every=SAVE["every"]):
                job.learn(values + noise)


@loop
def batches_that_are_shuffled_before_the_pass():
    with Run.start() as run:
        job, batches = Job(run), [torch.full((2, 3), number / 5) for number in range(4)]
        for _ in range(run.epoch, EPOCHS):
            random.shuffle(batches)
            for _, batch in run.steps(batches, save_every=SAVE["every"]):
                job.learn(batch)


@loop
def seed_of_each_epoch():
    with Run.start() as run:
        job, loader = Job(run), shuffled()
        for epoch in range(run.epoch, EPOCHS):
            torch.manual_seed(epoch)
            noise = torch.randn(3)
            for _, (values,) in run.steps(loader, save_every=SAVE["every"]):
                job.learn(values + noise)


@loop
def random_numbers_in_the_body():
    def body(job, step, batch):
        job.learn([batch[0] * random.random() + numpy.random.rand() * torch.rand(())])  # noqa: S311

    passes(shuffled, body)


@loop
def own_generator_in_the_body():
    draw = torch.Generator().manual_seed(4)
    passes(shuffled, lambda job, step, batch: job.learn([batch[0] + torch.randn(3, generator=draw)]))


# ---- several loaders


def two_loops(first, second, **names):
    with Run.start() as run:
        job = Job(run, restores=False)
        scheduler = LambdaLR(job.optimizer, decay)
        run.track(scheduler=scheduler)
        run.restore()
        for _ in range(run.epoch, EPOCHS):
            for _, batch in run.steps(
                first, save_every=SAVE["every"], **({"name": "first"} if names else {})
            ):
                job.learn(batch)
            scheduler.step()
            cut(run.step, "behind")
            if names.get("saves"):
                save_behind(run, job)
            for _, batch in run.steps(
                second, save_every=SAVE["every"], **({"name": "second"} if names else {})
            ):
                job.learn(batch)


@loop
def two_loops_without_names():
    two_loops(shuffled(), shuffled(data(14, 1)))


@loop
def two_loops_with_names():
    draw = torch.Generator().manual_seed(2)
    two_loops(shuffled(data(6), generator=draw), shuffled(data(10, 1), generator=draw), names=True)


@loop
def two_loops_with_names_saved_between():
    second = shuffled(data(10, 1), num_workers=1, persistent_workers=True)
    two_loops(shuffled(data(6)), second, names=True, saves=True)


@loop
def loop_left_out_by_an_empty_list():
    with Run.start() as run:
        job, first, second = Job(run), shuffled(data(6)), shuffled(data(10, 1))
        for epoch in range(run.epoch, EPOCHS + 1):
            for _, batch in run.steps(first, save_every=SAVE["every"], name="first"):
                job.learn(batch)
            for _, batch in run.steps(second if epoch % 2 else [], save_every=SAVE["every"], name="second"):
                job.learn(batch)


@loop
def two_loops_in_another_order():
    with Run.start() as run:
        job, loader = Job(run), shuffled()
        for epoch in range(run.epoch, EPOCHS):
            for name in ("a", "b") if epoch != 1 else ("b", "a"):
                for _, batch in run.steps(loader, save_every=SAVE["every"], name=name):
                    job.learn(batch)


@loop
def function_called_for_two_loaders():
    def train(job, loader):
        for _, batch in job.run.steps(loader, save_every=SAVE["every"]):
            job.learn(batch)

    with Run.start() as run:
        job, first, second = Job(run), shuffled(), shuffled(data(14, 1))
        for _ in range(run.epoch, EPOCHS):
            train(job, first)
            train(job, second)


@loop
def two_loaders_in_one_loop_of_unlike_length():
    with Run.start() as run:
        job, loaders = Job(run), (shuffled(), shuffled(data(10, 1)))
        for _ in range(run.epoch, EPOCHS):
            for loader in loaders:
                for _, batch in run.steps(loader, save_every=SAVE["every"]):
                    job.learn(batch)


@loop
def two_loaders_in_one_loop_of_one_length():
    with Run.start() as run:
        job, loaders = Job(run), (shuffled(), shuffled(data(14, 1)))
        for _ in range(run.epoch, EPOCHS):
            for loader in loaders:
                for _, batch in run.steps(loader, save_every=SAVE["every"]):
                    job.learn(batch)


@loop
def loaders_that_alternate():
    with Run.start() as run:
        job, loaders = Job(run), (shuffled(), shuffled(data(10, 1)))
        for epoch in range(run.epoch, EPOCHS):
            for _, batch in run.steps(loaders[epoch % 2], save_every=SAVE["every"]):
                job.learn(batch)


@loop
def two_loops_zipped():
    with Run.start() as run:
        job, first, second = Job(run), shuffled(), shuffled(data(14, 1))
        for _ in range(run.epoch, EPOCHS):
            for (_, one), (_, other) in zip(run.steps(first), run.steps(second), strict=True):
                job.learn(one[0] + other[0])


@loop
def pairs_of_samples():
    with Run.start() as run:
        job, loader = Job(run), shuffled(StackDataset(data(), data(14, 1)))
        for _ in range(run.epoch, EPOCHS):
            for _, ((one,), (other,)) in run.steps(loader, save_every=SAVE["every"]):
                job.learn(one + other)


@loop
def second_loader_without_the_run():
    with Run.start() as run:
        job, first, second = Job(run), shuffled(data(16)), DataLoader(data(16, 1), batch_size=4)
        for _ in range(run.epoch, EPOCHS):
            for (_, one), other in zip(run.steps(first, save_every=SAVE["every"]), second, strict=False):
                job.learn(one[0] + other[0])


@loop
def longer_dataset_after_the_cut():
    passes(lambda: shuffled(data(20 if CUT.get("resumes") else 14)))


# ---- evaluation


@torch.no_grad()
def evaluate(job, loader):
    job.model.eval()
    for (values,) in loader:
        job.model(values)
    job.model.train()


@loop
def evaluation_behind_the_pass():
    held = DataLoader(data(8, 2), batch_size=4)
    passes(shuffled, behind=lambda run, job: evaluate(job, held))


@loop
def evaluation_within_the_pass():
    held = DataLoader(data(8, 2), batch_size=4)

    def body(job, step, batch):
        job.learn(batch)
        if step % 3 == 0:
            evaluate(job, held)

    passes(shuffled, body)


@loop
def evaluation_by_persistent_workers_in_a_pause():
    held = DataLoader(data(8, 2), batch_size=4, num_workers=1, persistent_workers=True)

    def behind(run, job):
        with run.pause():
            evaluate(job, held)

    passes(shuffled, behind=behind)


@loop
def evaluation_by_persistent_workers():
    held = DataLoader(data(8, 2), batch_size=4, num_workers=1, persistent_workers=True)
    passes(shuffled, behind=lambda run, job: evaluate(job, held))


@loop
def evaluation_over_steps():
    with Run.start() as run:
        job, loader, held = Job(run), shuffled(), DataLoader(data(8, 2), batch_size=4)
        for _ in range(run.epoch, EPOCHS):
            for _, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)
            for _, (values,) in run.steps(held):
                job.model(values)


@loop
def evaluation_over_steps_within_the_pass():
    with Run.start() as run:
        job, loader, held = Job(run), shuffled(), DataLoader(data(8, 2), batch_size=4)
        for _ in range(run.epoch, EPOCHS):
            for step, batch in run.steps(loader, save_every=SAVE["every"], name="training"):
                job.learn(batch)
                if step % 3 == 0:
                    for _, (values,) in run.steps(held, name="evaluation"):
                        job.model(values)


# ---- updates


def accumulating(every, *, flushes=False, told=True, **options):
    def body(job, step, batch):
        job.backward(batch)
        if step % every == 0 or (flushes and step % 4 == 0):
            job.update()

    passes(shuffled, body, **({"accumulate": every} if told else {}), **options)


@loop
def accumulation_over_all_steps():
    accumulating(3)


@loop
def accumulation_that_ends_with_the_pass():
    accumulating(3, flushes=True)


@loop
def accumulation_that_the_run_is_not_told():
    accumulating(3, told=False)


@loop
def accumulation_that_ends_behind_the_pass():
    def body(job, step, batch):
        job.backward(batch)
        if (step - 1) % 4 == 2:
            job.update()

    passes(shuffled, body, accumulate=3, behind=lambda run, job: job.update())


@loop
def two_optimizers_of_unlike_pace():
    with Run.start() as run:
        job, slow = Job(run, restores=False), nn.Linear(3, 3)
        optimizer = torch.optim.SGD(slow.parameters(), lr=0.02)
        run.track(slow=slow, slow_optimizer=optimizer)
        run.restore()
        loader = shuffled()
        for _ in range(run.epoch, EPOCHS):
            for step, (values,) in run.steps(loader, save_every=1):
                job.backward(slow(values))
                job.update()
                if step % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()


@loop
def update_by_hand():
    def body(job, step, batch):
        job.optimizer.zero_grad()
        job.backward(batch)
        with torch.no_grad():
            for weight in job.model.parameters():
                weight -= 0.02 * weight.grad

    passes(shuffled, body)


@loop
def update_that_is_left_out():
    def body(job, step, batch):
        job.backward(batch)
        if step % 5 == 0:
            job.optimizer.zero_grad()  # as after a loss that is no number
        else:
            job.update()

    passes(shuffled, body, save_every=1)


def decay(number):
    return 1 / (1 + number)


def scheduled(loader, *, tracks=True, late=False, last=lambda run: -1):
    with Run.start() as run:
        job = Job(run, restores=False)
        if not late:
            scheduler = LambdaLR(job.optimizer, decay)
            if tracks:
                run.track(scheduler=scheduler)
        run.restore()
        if late:
            scheduler = LambdaLR(job.optimizer, decay, last_epoch=last(run))
        for _ in range(run.epoch, EPOCHS):
            for _, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)
                scheduler.step()


@loop
def scheduler_tracked():
    scheduled(shuffled())


@loop
def scheduler_of_epochs():
    with Run.start() as run:
        job, loader = Job(run, restores=False), shuffled()
        scheduler = LambdaLR(job.optimizer, decay)
        run.track(scheduler=scheduler)
        run.restore()
        for _ in range(run.epoch, EPOCHS):
            for _, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)
            cut(run.step, "behind")
            scheduler.step()
            cut(run.step, "behind the scheduler")


@loop
def scheduler_not_tracked():
    scheduled(shuffled(), tracks=False)


@loop
def scheduler_made_after_the_restore():
    scheduled(shuffled(), late=True)


@loop
def scheduler_made_from_the_number_of_steps():
    scheduled(shuffled(), late=True, last=lambda run: run.step - 1)


@loop
def plateau_tracked():
    plateau(tracks=True)


@loop
def plateau_not_tracked():
    plateau(tracks=False)


@loop
def plateau_made_after_the_restore():
    plateau(tracks=False, late=True)


def plateau(*, tracks, late=False):
    """The learning rate falls with the second epoch that is no better than the first one."""
    with Run.start() as run:
        job, loader = Job(run, restores=False), shuffled()

        def scheduler():
            return ReduceLROnPlateau(job.optimizer, factor=0.5, patience=0)

        own = None if late else scheduler()
        if tracks:
            run.track(scheduler=own)
        run.restore()
        own = own or scheduler()
        for _ in range(run.epoch, EPOCHS):
            for _, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)
            own.step(1.0)


@loop
def chain_of_schedulers():
    with Run.start() as run:
        job, loader = Job(run, restores=False), shuffled()
        parts = [LambdaLR(job.optimizer, decay), LambdaLR(job.optimizer, lambda number: 0.5**number)]
        scheduler = SequentialLR(job.optimizer, parts, milestones=[6])
        run.track(scheduler=scheduler)
        run.restore()
        for _ in range(run.epoch, EPOCHS):
            for _, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)
                scheduler.step()


@loop
def second_scheduler_not_tracked():
    with Run.start() as run:
        job, loader = Job(run, restores=False), shuffled()
        scheduler, second = LambdaLR(job.optimizer, decay), LambdaLR(job.optimizer, decay)
        run.track(scheduler=scheduler)
        run.restore()
        for _ in range(run.epoch, EPOCHS):
            for _, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)
                scheduler.step(), second.step()


@loop
def rate_of_the_number_of_the_step():
    def body(job, step, batch):
        for group in job.optimizer.param_groups:
            group["lr"] = 0.02 * decay(step)
        job.learn(batch)

    passes(shuffled, body)


@loop
def rate_of_an_own_counter():
    calls = []

    def body(job, step, batch):
        for group in job.optimizer.param_groups:
            group["lr"] = 0.02 * decay(len(calls))
        job.learn(batch)
        calls.append(step)

    passes(shuffled, body)


class Bundle:
    """The program's own collection of states."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def state_dict(self):
        return {"scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state):
        self.scheduler.load_state_dict(state["scheduler"])


@loop
def scheduler_within_a_tracked_object():
    with Run.start() as run:
        job, loader = Job(run, restores=False), shuffled()
        scheduler = LambdaLR(job.optimizer, decay)
        run.track(bundle=Bundle(scheduler))
        run.restore()
        for _ in range(run.epoch, EPOCHS):
            for _, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)
                scheduler.step()


# ---- what else takes part in updates


@loop
def optimizer_not_tracked():
    with_untracked(optimizer=False)


@loop
def optimizer_not_tracked_without_a_state():
    with_untracked(optimizer=False, momentum=0.0)


@loop
def model_not_tracked():
    with_untracked(model=False)


def with_untracked(*, model=True, optimizer=True, momentum=0.9):
    with Run.start() as run:
        job = Job.untracked(run)
        job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.02, momentum=momentum)
        if model:
            run.track(model=job.model)
        if optimizer:
            run.track(optimizer=job.optimizer)
        run.restore()
        loader = shuffled()
        for _ in range(run.epoch, EPOCHS):
            for _, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)


@loop
def optimizer_within_a_tracked_object():
    with Run.start() as run:
        job = Job.untracked(run)
        run.track(all=Everything(job.model, job.optimizer))
        run.restore()
        loader = shuffled()
        for _ in range(run.epoch, EPOCHS):
            for _, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)


class Everything:
    """The program's own checkpoint."""

    def __init__(self, *parts):
        self.parts = dict(enumerate(parts))

    def state_dict(self):
        return {key: one.state_dict() for key, one in self.parts.items()}

    def load_state_dict(self, state):
        for key, one in self.parts.items():
            one.load_state_dict(state[key])


@loop
def optimizer_made_in_each_step():
    def body(job, step, batch):
        guess = torch.zeros(3, requires_grad=True)
        inner = torch.optim.Adam([guess], lr=0.1)
        for _ in range(2):
            job.model(batch[0] + guess).square().mean().backward()
            inner.step()
        job.optimizer.zero_grad()
        job.learn([batch[0] + guess.detach()])

    passes(shuffled, body)


@loop
def weight_of_no_model():
    with Run.start() as run:
        job, scale = Job(run, restores=False), nn.Parameter(torch.ones(()))
        job.optimizer.add_param_group({"params": [scale]})
        run.restore()
        loader = shuffled()
        for _ in range(run.epoch, EPOCHS):
            for _, (values,) in run.steps(loader, save_every=SAVE["every"]):
                job.learn(values * scale)


class Scale:
    """A weight of no model."""

    def __init__(self):
        self.weight = nn.Parameter(torch.ones(()))

    def state_dict(self):
        return {"weight": self.weight.detach().clone()}

    def load_state_dict(self, state):
        self.weight.data.copy_(state["weight"])


@loop
def weight_of_a_tracked_object():
    with Run.start() as run:
        job, scale = Job(run, restores=False), Scale()
        job.optimizer.add_param_group({"params": [scale.weight]})
        run.track(scale=scale)
        run.restore()
        loader = shuffled()
        for _ in range(run.epoch, EPOCHS):
            for _, (values,) in run.steps(loader, save_every=SAVE["every"]):
                job.learn(values * scale.weight)


@loop
def scaler_tracked():
    scaled(tracks=True)


@loop
def scaler_not_tracked():
    scaled(tracks=False)


@loop
def scaler_that_is_off():
    scaled(tracks=False, enabled=False)


def scaled(*, tracks, **options):
    with Run.start() as run:
        scaler = torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=2, growth_factor=1.3, **options)
        job = Job(run, restores=False, **({"scaler": scaler} if tracks else {}))
        run.restore()
        loader = shuffled()
        for _ in range(run.epoch, EPOCHS):
            for _, (values,) in run.steps(loader, save_every=SAVE["every"]):
                job.optimizer.zero_grad()
                scaler.scale(job.model(values).square().mean()).backward()
                scaler.step(job.optimizer)
                scaler.update()


@loop
def average_tracked():
    averaged(tracks=True)


@loop
def average_not_tracked():
    averaged(tracks=False)


@loop
def copy_that_is_averaged_by_hand():
    averaged(tracks=False, by_hand=True)


@loop
def tracked_copy_that_is_averaged_by_hand():
    averaged(tracks=True, by_hand=True)


def averaged(*, tracks, by_hand=False):
    with Run.start() as run:
        job = Job(run, restores=False)
        average = copy.deepcopy(job.model) if by_hand else AveragedModel(job.model)
        if tracks:
            run.track(average=average)
        run.restore()
        loader = shuffled()
        for _ in range(run.epoch, EPOCHS):
            for _, batch in run.steps(loader, save_every=SAVE["every"]):
                job.learn(batch)
                if by_hand:
                    for own, one in zip(average.parameters(), job.model.parameters(), strict=True):
                        own.data.lerp_(one.data, 0.1)
                else:
                    average.update_parameters(job.model)
        job.model = average


@loop
def optimizer_with_a_closure():
    with Run.start() as run:
        job = Job.untracked(run)
        job.optimizer = torch.optim.LBFGS(job.model.parameters(), lr=0.1, max_iter=2)
        run.track(model=job.model, optimizer=job.optimizer)
        run.restore()
        loader = shuffled()
        for _ in range(run.epoch, EPOCHS):
            for _, (values,) in run.steps(loader, save_every=SAVE["every"]):

                def loss(values=values):
                    job.optimizer.zero_grad()
                    error = job.model(values).square().mean()
                    error.backward()
                    return error

                job.optimizer.step(loss)


@loop
def enumerate_counts_by_itself():
    with Run.start() as run:
        job, loader = Job(run), shuffled()
        for _ in range(run.epoch, EPOCHS):
            for number, (_, (values,)) in enumerate(run.steps(loader, save_every=SAVE["every"])):
                job.learn(values / (1 + number))


@loop
def patience_of_the_programs_own():
    worse = []

    def behind(run, job):
        worse.append(1)
        if len(worse) == 2:
            job.optimizer.param_groups[0]["lr"] *= 0.1

    passes(shuffled, behind=behind)


@loop
def layer_frozen_at_one_step():
    def body(job, step, batch):
        if step == 3:
            job.model[0].requires_grad_(False)
        job.learn(batch)

    passes(shuffled, body)


# ---- saves


@loop
def save_within_a_step():
    def body(job, step, batch):
        if step % 4 == 2:
            job.run.save()
        job.learn(batch)
        if step % 2 == 0:
            job.run.save()

    passes(lambda: shuffled(Noisy()), body, save_every=0)


@loop
def save_at_a_break():
    with Run.start() as run:
        job, loader = Job(run), shuffled()
        for _ in range(run.epoch, EPOCHS + 1):
            for step, batch in run.steps(loader):
                job.learn(batch)
                if step % 3 == 0:
                    run.save()
                    break


def free(body):
    with Run.start() as run:
        job = Job(run)
        while run.step < 12:
            body(run, job, torch.randn(4, 3))


@loop
def due_and_save():
    def body(run, job, batch):
        job.learn(batch)
        if run.due(save_every=SAVE["every"]):
            run.save()

    free(body)


@loop
def due_between_updates():
    def body(run, job, batch):
        job.backward(batch)
        if run.step % 3 == 2:
            job.update()
        if run.due(save_every=SAVE["every"]):
            run.save()

    free(body)


@loop
def loader_read_without_steps():
    loader = shuffled()

    def batches():
        while True:
            yield from loader

    with Run.start() as run:
        job, own = Job(run), batches()
        while run.step < 12:
            job.learn(next(own))
            if run.due(save_every=SAVE["every"]):
                run.save()


@loop
def save_before_due():
    def body(run, job, batch):
        job.learn(batch)
        if run.step % 2 == 1:
            run.save()
        run.due()

    free(body)


@loop
def save_without_steps():
    with Run.start() as run:
        job, loader = Job(run), shuffled()
        for _ in range(EPOCHS):
            for batch in loader:
                job.learn(batch)
            run.save()


# ---- cuts


def start(name, folder, wanted=None, resumes=False):
    """Run a loop in forked ranks, where the first is cut as `wanted`; its weights go to the folder."""

    def program():
        CUT["resumes"] = resumes
        if wanted and os.environ["RANK"] == "0":
            CUT.update(step=wanted[0], signal=getattr(signal, f"SIG{wanted[1]}"), when=wanted[2])
        LOOPS[name]()
        if os.environ["RANK"] == "0":
            torch.save(Job.latest.model.state_dict(), f"{folder}/weights.pt")

    Path(folder).mkdir(parents=True, exist_ok=True)
    with Path(folder, "told").open("ab") as told:
        return run_many.start(RANKS[name], program, folder, told=told)


def attempt(name, cuts):
    KEPT["keep"] = 0  # without a cut, what is saved plays no part
    start(name, f"{name}/whole")
    KEPT.clear()
    for number, wanted in enumerate(cuts):
        start(name, f"{name}/cut", wanted, resumes=number > 0)
    codes = start(name, f"{name}/cut", resumes=True)
    told = "".join(Path(name, part, "told").read_text() for part in ("whole", "cut"))
    if "refused:" in told:
        return {"result": "refused", "told": told}
    if any(codes):
        return {"result": "failed", "told": told}
    whole, own = (torch.load(f"{name}/{part}/weights.pt", weights_only=True) for part in ("whole", "cut"))
    assert all(value.isfinite().all() for value in whole.values()), name
    same = all(torch.equal(value, own[key]) for key, value in whole.items())
    return {"result": "exact" if same else "differ", "told": told}


def watch():
    """Cut where a step was counted. Wait for each checkpoint, so that a cut always leaves the same ones."""
    counted, saved, started = Run._count, RunState.save, Run.start

    def count(run):
        counted(run)
        cut(run._position.step, "step")

    def save(state, here, **options):
        saved(state, here, **options)
        state.wait(here)

    Run._count, RunState.save, Run.start = count, save, lambda: started(**KEPT)


def warm_up():
    """Let torch import and look up once what every rank would else."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    for (values,) in shuffled():
        model(values).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


if __name__ == "__main__":
    watch()
    warm_up()
    SAVE["every"], *cuts = json.loads(sys.argv[1])
    results = {name: attempt(name, cuts) for name in sys.argv[2:] or LOOPS}
    Path("results.json").write_text(json.dumps(results))
