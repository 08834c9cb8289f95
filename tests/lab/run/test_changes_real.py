"""Changes of the state beside the steps: they resume bit for bit, or are refused by name."""

from __future__ import annotations

import pytest

from .test_run_real import many

pytestmark = pytest.mark.docker

TRAINING = """
from torch.optim import lr_scheduler, swa_utils

data = TensorDataset(torch.arange(24.0)[:, None] / 24)

def network():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def learn(model, optimizer, values):
    optimizer.zero_grad()
    model(values).square().sum().backward()
    optimizer.step()
"""

SCHEDULERS = """
def scheduled(schedulers, track, when="before"):
    model, optimizer = network()
    made = schedulers(optimizer) if when == "before" else []
    with Run.start() as run:
        run.track(model=model, optimizer=optimizer, **{f"part{number}": made[number] for number in track})
        run.restore()
        made = schedulers(optimizer) if when == "after" else made
        for step, (values,) in run.steps(DataLoader(data, batch_size=4), save_every=2):
            if step == {"within": 1, "after a save": 3}.get(when):
                made = schedulers(optimizer)
            learn(model, optimizer, values)
            print("has trained", flush=True)

decay = lambda optimizer: [lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** step)]
plateau = lambda optimizer: [lr_scheduler.ReduceLROnPlateau(optimizer)]
cycle = lambda optimizer: [lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)]
average = lambda optimizer: [lr_scheduler.StepLR(optimizer, 5), swa_utils.SWALR(optimizer, 0.05)]

def nested(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 5)]
    return [lr_scheduler.SequentialLR(optimizer, parts, [3])]

assert start(1, lambda: scheduled(decay, [], "after"), "decay") == [2]
assert start(1, lambda: scheduled(cycle, [], "after"), "cycle") == [2]
assert start(1, lambda: scheduled(average, [0]), "average") == [2]
print("so far nothing has run", flush=True)
assert start(1, lambda: scheduled(decay, [], "within"), "within") == [2]
assert start(1, lambda: scheduled(plateau, [], "after a save"), "late") == [2]
assert start(1, lambda: scheduled(average, [0, 1]), "both") == [0]
assert start(1, lambda: scheduled(nested, [0]), "nested") == [0]
"""


def test_scheduler_that_is_not_tracked_is_refused(standin, tmp_path):
    output = many(standin, tmp_path, TRAINING + SCHEDULERS)
    assert "has trained" not in output.partition("so far nothing has run")[0]
    for kind in ("LambdaLR", "OneCycleLR", "SWALR", "ReduceLROnPlateau"):
        assert (
            f"run.track: optimizer has a {kind} that is not tracked: it would start over after a resume\n"
            "  -> make the scheduler before run.restore, and run.track(scheduler=scheduler, ...)\n"
        ) in output


TOP_OF_AN_EPOCH = """
class Memory:
    def __init__(self):
        self.hidden = torch.zeros(1)
    def state_dict(self):
        return {"hidden": self.hidden}
    def load_state_dict(self, state):
        self.hidden = state["hidden"]

def cyclegan(run, model, optimizer):
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    run.restore()
    for epoch in range(run.epoch, 3):
        if WHERE == "before":
            scheduler.step()
        for step, (values,) in run.steps(DataLoader(data, batch_size=4, shuffle=True), save_every=1):
            if WHERE == "within" and step % 6 == 1:
                scheduler.step()
            learn(model, optimizer, values)

def recurrent(run, model, optimizer):
    memory = Memory()
    run.track(model=model, optimizer=optimizer, memory=memory)
    run.restore()
    for epoch in range(run.epoch, 3):
        if WHERE == "before":
            hidden = memory.hidden = torch.zeros(1)  # loaded again, `memory` would be right, and not `hidden`
        for step, (values,) in run.steps(DataLoader(data, batch_size=4, shuffle=True), save_every=1):
            hidden = torch.zeros(1) if WHERE == "within" and step % 6 == 1 else memory.hidden
            hidden = torch.tanh(hidden + model(values).sum())
            optimizer.zero_grad()
            hidden.square().backward()
            optimizer.step()
            memory.hidden = hidden.detach()

def play(program):
    with Run.start() as run:
        program(run, *network())

def cut(program, folder):
    return start(2, lambda: play(program), folder, at=8, how=signal.SIGTERM)

for program in (cyclegan, recurrent):
    WHERE, name = "before", program.__name__
    assert cut(program, f"{name}-before") == [85, 85]
    assert start(2, lambda: play(program), f"{name}-before") == [2, 2]
    WHERE = "within"
    assert start(2, lambda: play(program), f"{name}-whole") == [0, 0]
    assert cut(program, f"{name}-cut") == [85, 85]
    assert start(2, lambda: play(program), f"{name}-cut") == [0, 0]
    same(f"{name}-whole", f"{name}-cut")
"""


def test_change_at_the_top_of_an_epoch_is_refused_within_a_pass(standin, tmp_path):
    output = many(standin, tmp_path, TRAINING + TOP_OF_AN_EPOCH)
    for changed in ("optimizer, scheduler", "memory"):
        assert (
            f"run.steps: {changed} changed between run.restore and run.steps, where a pass goes on after "
            "2 batches: without a stop, this change comes only before the pass\n"
            "  -> make the change before run.restore, or inside the loop, in the first step of a pass\n"
        ) in output


EARLY_SAVE = """
def early(kill_at=0):
    model, optimizer = network()
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with Run.start() as run:
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)
        run.restore()
        for epoch in range(run.epoch, 3):
            for step, (values,) in run.steps(DataLoader(data, batch_size=4, shuffle=True)):
                learn(model, optimizer, values)
                if step == kill_at:
                    run.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
            run.save()
            scheduler.step()

assert start(1, early, "whole") == [0]
assert start(1, lambda: early(kill_at=8), "cut") == [-9]
assert start(1, early, "cut") == [0]
same("whole", "cut")
"""


def test_save_before_the_last_change_of_an_epoch_keeps_it(standin, tmp_path):
    output = many(standin, tmp_path, TRAINING + EARLY_SAVE)
    assert "run: resumes after step 6: " in output


BREAK = """
def breaks(steps, looks_before=False):
    model, optimizer = network()
    with Run.start() as run:
        run.track(model=model, optimizer=optimizer)
        run.restore()
        for epoch in range(run.epoch, 3):
            if looks_before and run.step >= steps:
                break
            for step, (values,) in run.steps(DataLoader(data, batch_size=4, shuffle=True)):
                learn(model, optimizer, values)
                if step >= steps:
                    break
            else:
                continue
            break

for steps in (8, 12):  # within a pass, and at its last batch
    assert start(1, lambda: breaks(steps), f"{steps}") == [0]
    assert start(1, lambda: breaks(steps), f"{steps}") == [2]
    assert start(1, lambda: breaks(steps, looks_before=True), f"{steps}") == [0]
    assert states(f"{steps}")["step"] == steps
assert start(1, lambda: breaks(14, looks_before=True), "8") == [0]
assert start(1, lambda: breaks(14), "14") == [0]
same("8", "14")
"""


def test_step_after_a_break_that_ended_the_run_is_refused(standin, tmp_path):
    output = many(standin, tmp_path, TRAINING + BREAK)
    for steps in (8, 12):
        assert (
            f"run.steps: this run ended by a break after step {steps}, and the program never read run.step: "
            "it would train one more\n"
            "  -> while run.step < STEPS: around the loop, or if run.step >= STEPS: before it\n"
        ) in output


OTHERS = """
from torch.utils.data import DistributedSampler

def train(sampler=None, dtype=torch.float32):
    model, optimizer = network()
    with Run.start() as run:
        run.track(model=model.to(dtype))
        run.restore()
        options = sampler() if sampler else {"shuffle": True}
        for step, (values,) in run.steps(DataLoader(data, batch_size=4, **options), save_every=1):
            pass

def seeded(seed):
    return {"sampler": DistributedSampler(data, 1, 0, seed=seed)}

for first, then in ((None, lambda: {"shuffle": False}), (lambda: seeded(1), lambda: seeded(2))):
    folder = "seed" if first else "shuffle"
    assert start(1, lambda: train(first), folder, at=3, how=signal.SIGTERM) == [85]
    assert start(1, lambda: train(then), folder) == [2]
    assert start(1, lambda: train(first, torch.bfloat16), folder) == [2]
    assert start(1, lambda: train(first), folder) == [0]
"""


def test_other_sampler_seed_or_dtype_is_refused(standin, tmp_path):
    output = many(standin, tmp_path, TRAINING + OTHERS)
    other_sampler = "run.steps: the pass of the loop without a name in the checkpoint had the sampler "
    for text in (
        other_sampler + "RandomSampler(replacement=False), and this loader has SequentialSampler()\n",
        other_sampler + "DistributedSampler(shuffle=True, seed=1), and this loader has "
        "DistributedSampler(shuffle=True, seed=2)\n"
        "  -> give it the same loader; where an epoch has several loops, name each: run.steps(loader, ",
        ": the checkpoint contains a different model: 0.weight is torch.float32 in the checkpoint and "
        "torch.bfloat16 in the model\n"
        "  -> build the same objects, or start a new run in another folder; nothing was loaded",
    ):
        assert text in output, (text, output)


SEVERAL_LOOPS = """
def lines(run, epoch):
    for _ in run.steps(first): pass
    for _ in run.steps(first): pass

def tutorial(run, epoch):
    for phase in (first, second):
        for _ in run.steps(phase): pass

def tensors(run, epoch):
    for _ in run.steps(values[epoch]): pass

def parts(run, epoch):
    if run.epoch < 2:
        for _ in run.steps(first): pass
    else:
        for _ in run.steps(first): pass

def new_loaders(run, epoch):
    loader = DataLoader(data, batch_size=4)
    loader.cycle = loader
    for _ in run.steps(loader): pass

def renamed(run, epoch):
    for _ in run.steps(first, name="train"): pass

def train(body):
    with Run.start() as run:
        run.track(model=network()[0])
        run.restore()
        for epoch in range(run.epoch, EPOCHS):
            body(run, epoch)
            print(body.__name__, "has done epoch", epoch, flush=True)

first, second = (DataLoader(data, batch_size=4) for _ in range(2))
values = torch.zeros(3, 4).unbind()
EPOCHS = 3
for body, code in ((lines, 2), (tutorial, 2), (tensors, 2), (parts, 0)):
    assert start(1, lambda: train(body), body.__name__) == [code]
EPOCHS = 1
assert start(1, lambda: train(new_loaders), "new_loaders") == [0]
EPOCHS = 4
assert start(1, lambda: train(renamed), "new_loaders") == [2]
assert start(1, lambda: train(new_loaders), "new_loaders") == [0]
"""


def test_second_loop_without_a_name_is_refused(standin, tmp_path):
    output = many(standin, tmp_path, TRAINING + SEVERAL_LOOPS)
    names = "the loops at <string>:17 and <string>:18 have no names"
    loaders = ["the loop at <string>:22 has no name", "the loop at <string>:25 has no name"]
    for problem in (names, *(f"{loop}, and goes over several loaders" for loop in loaders)):
        assert (
            f"run.steps: {problem}: a resume could not tell their passes from each other\n"
            "  -> give each a name: run.steps(loader, name=...); one loop at two lines has the same name at "
            "both\n"
        ) in output
    assert "lines has done epoch" not in output
    assert "tutorial has done epoch" not in output
    assert "run.steps: epoch 1 comes to the loop train before the loop without a name\n" in output


LAZY_SAMPLERS = """
class Pool(torch.utils.data.Sampler):
    def __init__(self, generator=None):
        self.generator = generator
    def __len__(self):
        return 24
    def __iter__(self):
        left = list(range(24))
        while left:
            yield left.pop(int(torch.randint(len(left), (), generator=self.generator)))

def train(sampler):
    model, optimizer = network()
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    with Run.start() as run:
        run.track(model=model, optimizer=optimizer)
        run.restore()
        for epoch in range(run.epoch, 2):
            for step, (values,) in run.steps(loader, save_every=1):
                learn(model, optimizer, values)

own = lambda: train(Pool(torch.Generator().manual_seed(1)))
assert start(1, own, "whole") == [0]
assert start(1, own, "cut", at=8, how=signal.SIGTERM) == [85]
assert start(1, own, "cut") == [0]
same("whole", "cut")
print("so far without a warning", flush=True)
assert start(1, lambda: train(Pool()), "global") == [0]
"""


def test_sampler_that_draws_from_global_numbers_is_reported(standin, tmp_path):
    before, _, after = many(standin, tmp_path, TRAINING + LAZY_SAMPLERS).partition("so far without a warning")
    assert "warning: " not in before
    assert after.count("warning: ") == 1
    assert (
        "run: warning: the sampler Pool has neither set_epoch nor a torch.Generator: if it draws random "
        "numbers while a pass goes on, a resumed pass gets other samples\n"
    ) in after


UNUSED_GRADIENTS = """
def gan():
    generator, critic = network()[0], network()[0]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (generator, critic)]
    with Run.start() as run:
        run.track(generator=generator, critic=critic, optimizer_g=optimizers[0], optimizer_d=optimizers[1])
        run.restore()
        for step, (values,) in run.steps(DataLoader(data.tensors[0].repeat(10, 1).split(4)), save_every=1):
            optimizers[0].zero_grad()
            critic(generator(values[0])).square().sum().backward()
            optimizers[0].step()

assert start(1, gan, "run", at=2, how=signal.SIGTERM) == [85]
"""


def test_save_waits_32_steps_for_gradients_that_nobody_uses(standin, tmp_path):
    output = many(standin, tmp_path, TRAINING + UNUSED_GRADIENTS)
    gradients = "optimizer.step() has used the gradients of optimizer_d"
    assert output.count(f"run: a save waits until an {gradients}, for at most 32 steps\n") == 1
    assert f"run: warning: no {gradients} for 32 steps; the run saves without them\n" in output
    assert "run: stopped after step 33: a signal; the state of step 33 is saved\n" in output
