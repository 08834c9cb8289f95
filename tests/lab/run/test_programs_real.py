"""Programs of public shapes, killed and stopped: they end with the same state, or are refused by name."""

from __future__ import annotations

import pytest

from .test_run_real import many

pytestmark = pytest.mark.docker
PROGRAMS = ("nanogpt", "mingpt", "multinode", "imagenet", "gan", "dino", "ppo", "ddpm", "litgpt")
ON_THREE = ("nanogpt", "imagenet", "gan", "litgpt")
"""Programs that the check runs on three ranks, where DDP's order of sums matters; the others run on two."""

CUT = """
import programs

def cut_and_compare(name, ranks):
    play, folder = (lambda: programs.play(name)), f"cut-{name}-{ranks}"
    assert start(ranks, play, f"whole-{name}-{ranks}") == [0] * ranks
    assert -9 in start(ranks, play, folder, at=6, rank=ranks - 1, pause=0.03)
    assert start(ranks, play, folder, at=9, how=signal.SIGTERM, pause=0.03) == [85] * ranks
    assert start(ranks, play, folder) == [0] * ranks
    same(f"whole-{name}-{ranks}", folder)
    print("equal:", name, ranks, flush=True)

"""


def test_program_resumes_bitwise(standin, tmp_path):
    names = [(name, 3 if name in ON_THREE else 2) for name in PROGRAMS]
    output = many(standin, tmp_path, CUT + f"for name, ranks in {names}:\n    cut_and_compare(name, ranks)\n")
    assert output.count("equal: ") == len(PROGRAMS), output
    assert "warning: " not in output


@pytest.mark.soak
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_resumes_bitwise_wherever_it_is_cut(standin, tmp_path, name):
    script = """
for ranks in (2, 3):
    cut_and_compare(NAME, ranks)
    for step in range(1, 12):
        folder, play = f"{ranks}-{step}", lambda: programs.play(NAME)
        assert -9 in start(ranks, play, folder, at=step, rank=step % ranks, pause=0.02)
        assert start(ranks, play, folder) == [0] * ranks
        same(f"whole-{NAME}-{ranks}", folder)
"""
    output = many(standin, tmp_path, CUT + script.replace("NAME", repr(name)))
    assert "warning: " not in output


def test_missing_backward_pass_on_three_ranks_is_reported(standin, tmp_path):
    script = """
programs.settle = lambda *losses, optimizers: None
for ranks in (2, 3):
    assert start(ranks, lambda: programs.play("multinode"), f"{ranks}") == [0] * ranks
"""
    output = many(standin, tmp_path, CUT + script)
    assert output.count("warning: a DDP model has had no backward pass: on 3 ranks or more") == 1, output


def test_loader_that_accelerate_has_prepared_is_refused(standin, tmp_path):
    script = """
Loader = type("Loader", (DataLoader,), {"__module__": "accelerate.data_loader"})

def loop():
    loader = Loader(range(8))
    with Run.start() as run:
        run.track(model=torch.nn.Linear(1, 1))
        run.restore()
        for step, batch in run.steps(loader):
            raise AssertionError("not refused")

assert start(1, loop, "run") == [2]
"""
    output = many(standin, tmp_path, script)
    assert (
        "this loader cannot resume at its sample: Loader is a loader that accelerate has prepared" in output
    )
    assert "use accelerate's own save_state with a LibraryCheckpoint" in output
