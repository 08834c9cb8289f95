"""Changes of the state beside the steps: they resume bit for bit, or are refused by name."""

from __future__ import annotations

from pathlib import Path

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
            made = schedulers(optimizer) if step == 1 and when == "within" else made
            learn(model, optimizer, values)
            print("has trained", flush=True)

decay = lambda optimizer: [lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** step)]
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
assert start(1, lambda: scheduled(average, [0, 1]), "both") == [0]
assert start(1, lambda: scheduled(nested, [0]), "nested") == [0]
"""


def test_scheduler_that_is_not_tracked_is_refused(standin: str, tmp_path: Path) -> None:
    output = many(standin, tmp_path, TRAINING + SCHEDULERS)
    assert "has trained" not in output.partition("so far nothing has run")[0]
    for kind in ("LambdaLR", "OneCycleLR", "SWALR"):
        assert (
            f"run.track: optimizer has a {kind} that is not tracked: it would start over after a resume\n"
            "  -> make the scheduler before run.restore, and run.track(scheduler=scheduler, ...)\n"
        ) in output
