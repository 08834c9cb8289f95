"""Programs in the shapes of public ones, ported by docs/guides/resume.md alone; run_many.py runs them.

Each is small, and keeps what makes its model hard to resume: batches that are fetched ahead, schedules as
arrays, two optimizers, accumulation over `no_sync`, an average of the weights, an environment that goes on.
"""

from __future__ import annotations

import contextlib
import copy
import math

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from imgkit_entrypoints.run import Run

SAVE_EVERY = 4
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def play(name):
    torch.manual_seed(0)
    numpy.random.seed(dist.get_rank())
    with Run.start() as run:
        PROGRAMS[name](run)


class Values:
    """Values of a loop that belong to its state."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def state_dict(self):
        return dict(self.__dict__)

    def load_state_dict(self, state):
        self.__dict__.update(state)


def net(width=6, out=4):
    return nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, out))


def images(size=36):
    draw = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(size, 6, generator=draw), torch.randint(4, (size,), generator=draw))


def settle(*losses, optimizers):
    """One synchronised backward pass before `restore`, as the page says for three ranks and more."""
    for loss in losses:
        loss.backward()
    for optimizer in optimizers:
        optimizer.zero_grad()


@program
def nanogpt(run):
    """Random blocks of a text, the next one fetched ahead; micro-steps, a cosine, clipping, evaluation."""
    text = torch.arange(200) * 7 % 16

    def get_batch():
        starts = torch.randint(180, (3,))
        blocks = torch.stack([text[start : start + 9] for start in starts])
        return blocks[:, :-1], blocks[:, 1:]

    raw = nn.Sequential(nn.Embedding(16, 24), nn.Dropout(0.1), nn.Linear(24, 16))
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2, betas=(0.9, 0.95))
    model = DDP(raw)
    torch.manual_seed(1337 + dist.get_rank())

    def loss_of(x, y):
        return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    settle(loss_of(*get_batch()), optimizers=[optimizer])
    fetched, best = Values(x=None, y=None), Values(loss=1e9)
    run.track(model=model, optimizer=optimizer, best=best)
    run.track_per_rank(fetched=fetched)
    if not run.restore():
        fetched.x, fetched.y = get_batch()
    for step, _ in run.steps(range(14), save_every=SAVE_EVERY):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / 14))
        if step % 5 == 0:
            with run.pause(), torch.no_grad():
                losses = torch.stack([loss_of(*get_batch()) for _ in range(2)]).mean()
                dist.all_reduce(losses)
            best.loss = min(best.loss, losses.item())
        for micro in range(3):
            model.require_backward_grad_sync = micro == 2
            loss = loss_of(fetched.x, fetched.y) / 3
            fetched.x, fetched.y = get_batch()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.log(loss=loss)


@program
def mingpt(run):
    """A loader that draws with replacement, and a loop that ends at a number of steps."""
    data, steps = images(), 14
    sampler = RandomSampler(data, replacement=True, num_samples=60)
    loader = DataLoader(data, sampler=sampler, batch_size=4, num_workers=0)
    model = DDP(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(3 + dist.get_rank())
    settle(model(torch.randn(4, 6)).sum(), optimizers=[optimizer])
    run.track(model=model, optimizer=optimizer, loader=loader)
    run.restore()
    for step, (x, y) in run.steps(loader, save_every=SAVE_EVERY):
        loss = functional.cross_entropy(model(x), y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= steps:
            break


class Trainer:
    """The class of the DDP tutorial's multinode.py."""

    def __init__(self, run, model, loader, optimizer):
        self.run, self.model, self.loader, self.optimizer = run, DDP(model), loader, optimizer
        settle(self.model(torch.randn(4, 6)).sum(), optimizers=[optimizer])
        run.track(model=self.model, optimizer=optimizer, loader=loader)
        run.restore()

    def train(self, epochs):
        for epoch in range(self.run.epoch, epochs):
            self.loader.sampler.set_epoch(epoch)
            for _, (x, y) in self.run.steps(self.loader, save_every=SAVE_EVERY):
                self.optimizer.zero_grad()
                functional.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()


@program
def multinode(run):
    data = images()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    Trainer(run, model, loader, optimizer).train(4)


@program
def imagenet(run):
    """Epochs with workers and a scheduler; the best accuracy of the evaluations."""
    data = images()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1, persistent_workers=True)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    best = Values(accuracy=0.0)
    settle(model(torch.randn(4, 6)).sum(), optimizers=[optimizer])
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, best=best)
    run.restore()
    for epoch in range(run.epoch, 4):
        sampler.set_epoch(epoch)
        model.train()
        for _, (x, y) in run.steps(loader, save_every=SAVE_EVERY):
            loss = functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            x, y = data.tensors
            right = (model.module(x).argmax(1) == y).float().mean()
        dist.all_reduce(right)
        best.accuracy = max(best.accuracy, right.item())
        scheduler.step()


@program
def gan(run):
    """Two networks with an optimizer each, which take turns in a step."""
    data = images()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    generator, critic = DDP(net(5, 6)), DDP(net(6, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.999))
    torch.manual_seed(dist.get_rank())
    settle(critic(generator(torch.randn(4, 5))).sum(), optimizers=[optimizer_g, optimizer_d])
    run.track(generator=generator, critic=critic, optimizer_g=optimizer_g, optimizer_d=optimizer_d)
    run.restore()
    for epoch in range(run.epoch, 4):
        sampler.set_epoch(epoch)
        for _, (real, _) in run.steps(loader, save_every=SAVE_EVERY):
            optimizer_d.zero_grad()
            fake = generator(torch.randn(len(real), 5))
            both = critic(torch.cat([real, fake.detach()])).flatten()
            target = torch.cat([torch.ones(len(real)), torch.zeros(len(real))])
            functional.binary_cross_entropy_with_logits(both, target).backward()
            optimizer_d.step()
            optimizer_g.zero_grad()
            score = critic(fake).flatten()
            functional.binary_cross_entropy_with_logits(score, torch.ones(len(real))).backward()
            optimizer_g.step()


class Center(nn.Module):
    """The loss of DINO, with the running center of the teacher's outputs as a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 4))

    def forward(self, student, teacher):
        target = functional.softmax((teacher - self.center) / 0.04, dim=-1)
        loss = -(target * functional.log_softmax(student / 0.1, dim=-1)).sum(1).mean()
        total = teacher.mean(0, keepdim=True)
        dist.all_reduce(total)
        self.center.mul_(0.9).add_(total / dist.get_world_size(), alpha=0.1)
        return loss


@program
def dino(run):
    """Student and teacher; learning rate, weight decay and momentum come from arrays by the step."""
    data = images()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    student, teacher, loss_of = DDP(net()), net(), Center()
    teacher.load_state_dict(student.module.state_dict())
    teacher.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(student.parameters())
    steps = 4 * len(loader)
    rates = 1e-2 * numpy.cos(numpy.linspace(0, 1.5, steps))
    decays = numpy.linspace(0.04, 0.4, steps)
    momenta = numpy.linspace(0.99, 1.0, steps)
    torch.manual_seed(dist.get_rank())
    settle(student(torch.randn(4, 6)).sum(), optimizers=[optimizer])
    run.track(student=student, teacher=teacher, optimizer=optimizer, loss=loss_of)
    run.restore()
    for epoch in range(run.epoch, 4):
        sampler.set_epoch(epoch)
        for step, (x, _) in run.steps(loader, save_every=SAVE_EVERY):
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = rates[step - 1], decays[step - 1]
            noisy = x + 0.1 * torch.randn(x.shape)
            loss = loss_of(student(noisy), teacher(x).detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for ours, theirs in zip(student.module.parameters(), teacher.parameters(), strict=True):
                    theirs.mul_(momenta[step - 1]).add_((1 - momenta[step - 1]) * ours)


class Cart:
    """An environment that goes on from one rollout to the next, with NumPy's random numbers."""

    def __init__(self):
        self.position, self.speed = numpy.random.randn(2)

    def observe(self):
        return torch.tensor([self.position, self.speed, 1.0], dtype=torch.float32)

    def step(self, action):
        self.speed += (action - 0.5) * 0.2 + 0.01 * numpy.random.randn()
        self.position += self.speed
        reward = -abs(self.position)
        if abs(self.position) > 3:
            self.position, self.speed = numpy.random.randn(2)
        return reward

    def state_dict(self):
        return {"position": self.position, "speed": self.speed}

    def load_state_dict(self, state):
        self.position, self.speed = state["position"], state["speed"]


@program
def ppo(run):
    """Rollouts in an environment, and epochs of shuffled minibatches in each update."""
    model = DDP(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5)
    torch.manual_seed(dist.get_rank())
    settle(model(torch.randn(2, 3)).sum(), optimizers=[optimizer])
    cart = Cart()
    run.track(model=model, optimizer=optimizer)
    run.track_per_rank(cart=cart)
    run.restore()
    for update, _ in run.steps(range(12), save_every=SAVE_EVERY):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - (update - 1) / 12)
        seen, actions, rewards = [], [], []
        with torch.no_grad():
            for _ in range(8):
                seen.append(cart.observe())
                logits = model.module(seen[-1])[:2]
                actions.append(torch.distributions.Categorical(logits=logits).sample())
                rewards.append(cart.step(int(actions[-1])))
        observed, actions_taken = torch.stack(seen), torch.stack(actions)
        returns = torch.tensor(numpy.cumsum(rewards[::-1])[::-1].copy(), dtype=torch.float32)
        indices = numpy.arange(8)
        for _ in range(2):
            numpy.random.shuffle(indices)
            for start in (0, 4):
                batch = torch.from_numpy(indices[start : start + 4])
                out = model(observed[batch])
                advantage = returns[batch] - out[:, 2]
                policy = torch.distributions.Categorical(logits=out[:, :2]).log_prob(actions_taken[batch])
                loss = (-policy * advantage.detach()).mean() + advantage.square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()


@program
def ddpm(run):
    """A trainer of a diffusion model: it counts steps over a loader, and keeps an average."""
    data = images()
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=1)  # its `cycle(loader)` goes
    model = DDP(net(7, 6))
    average = copy.deepcopy(model.module)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    settle(model(torch.randn(4, 7)).sum(), optimizers=[optimizer])
    run.track(model=model, average=average, optimizer=optimizer)
    run.restore()
    while run.step < 20:
        for step, (x, _) in run.steps(loader, save_every=SAVE_EVERY):
            levels, noise = torch.rand(len(x), 1), torch.randn(x.shape)
            noisy = x * (1 - levels) + noise * levels
            functional.mse_loss(model(torch.cat([noisy, levels], 1)), noise).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.module.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)
            if step >= 20:
                break


@program
def litgpt(run):
    """Accumulation over batches of the loader, without synchronisation but for the last one."""
    data, accumulate = images(48), 3
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    model = DDP(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    settle(model(torch.randn(4, 6)).sum(), optimizers=[optimizer])
    run.track(model=model, optimizer=optimizer)
    run.restore()
    for epoch in range(run.epoch, 3):
        sampler.set_epoch(epoch)
        for step, (x, y) in run.steps(loader, save_every=SAVE_EVERY):
            is_accumulating = step % accumulate != 0
            with model.no_sync() if is_accumulating else contextlib.nullcontext():
                (functional.cross_entropy(model(x), y) / accumulate).backward()
            if not is_accumulating:
                optimizer.step()
                optimizer.zero_grad()
