"""Examples with Lightning, Hugging Face's Trainer and accelerate on two ranks: killed, stopped, resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from labkit import ROOT, in_image, output

from .test_run_real import many

PROGRAMS = ("lightning_trainer", "hf_trainer", "accelerate_loop")
HERE = Path(__file__).parent
IMAGE = "imgkit.local/standin:24.03-trainers"
PACKAGES = "accelerate==1.15.0 lightning==2.6.6 torchdata==0.11.0 transformers==5.23.0"

STARTS = """
set -u
program="/lab/run/trainer.py /examples/$1.py"
dist_run() { exec python3 -I -m imgkit_entrypoints dist-run --device cpu --nproc 2 $program; }
torchrun() { exec torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 $program; }
alone() { exec python3 $program; }
start() { # folder, launcher, variables...
  export IMGKIT_RUN_DIR=/runs/$1
  local how=$2
  shift 2
  [ $# = 0 ] || export "$@"
  $how
}
ask() { # folder, launcher, signal: the launcher gets the signal in the middle of an epoch
  rm -f /tmp/now
  start $1 $2 AT=70 ASK=/tmp/now PAUSE=0.1 &
  until [ -e /tmp/now ] || ! kill -0 $!; do sleep 0.1; done
  kill -$3 $!
  wait $!
}
"""
UNDER_DIST_RUN = """
(start whole dist_run); echo "whole: $?"
(start cut dist_run AT=65 PAUSE=0.1); echo "killed: $?"  # after 60, the last step of an epoch of Lightning
ask cut dist_run USR1; echo "stopped: $?"
ls /runs/cut/requeue
(start cut dist_run); echo "resumed: $?"
python3 - <<'END'
import sys, torch
from pathlib import Path
from safetensors.torch import load_file
from saved_states import states

def newest(folder):
    checkpoint = max(Path(folder, "checkpoints").glob("step-*"))
    path = Path(folder, states(folder)["library_checkpoint"]["path"])
    if path.is_file():
        found = torch.load(path, weights_only=True)
        return found["global_step"], found["state_dict"], found["optimizer_states"][0]["state"]
    (optimizer,) = [*path.glob("optimizer.*")]
    return checkpoint.name, load_file(path / "model.safetensors"), torch.load(optimizer)["state"]

def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return torch.equal(one, other) if torch.is_tensor(one) else one == other

one, other = newest("/runs/whole"), newest("/runs/cut")
print("steps, weights and optimizer are equal:", *(same(*pair) for pair in zip(one, other)))
END
"""
WITHOUT_LAUNCHER = """
ask torchrun torchrun TERM
ls /runs/torchrun/requeue
(start torchrun torchrun); echo "resumed: $?"
ls /runs/torchrun/requeue
(start alone alone AT=-1); echo "whole: $?"
ask asked alone USR1; echo "stopped: $?"
"""


@pytest.fixture(scope="session")
def trainers(standin: str) -> str:
    """The stand-in with the real libraries; the engine keeps the layer for the next run."""
    # Byte code of all packages: each start in a new container would else compile hundreds of modules.
    compiled = "python3 -m compileall -q -j 0 /usr/local/lib/python3.11/dist-packages"
    install = f"pip install -q --root-user-action ignore {PACKAGES} && {{ {compiled} || true; }}"
    output(
        "docker", "build", "-q", "-t", IMAGE, "-", stdin=f"FROM {standin}\nRUN {install}\n", timeout_s=1800
    )
    return IMAGE


def run_program(trainers: str, runs: Path, name: str, script: str) -> str:
    mounted = ("--volume", f"{HERE.parent}:/lab:ro", "--volume", f"{ROOT}/examples:/examples:ro")
    folder = ("--volume", f"{runs}:/runs", "--workdir", "/runs")
    options = (*mounted, *folder, "--env", "HOME=/tmp", "--env", "PYTHONPATH=/lab")
    result = in_image(trainers, "bash", "-c", STARTS + script, "bash", name, options=options, timeout_s=1800)
    return result.stdout + result.stderr


LAST_STEP = """
text = Path("/examples/accelerate_loop.py").read_text()
assert text.count("save_every=15") == 1
Path("loop.py").write_text(text.replace("save_every=15", "save_every=20"))
assert start(2, "loop.py", "whole") == [0, 0]
# The checkpoint of the step before has to be whole.
assert -9 in start(2, "loop.py", "cut", at=45, rank=1, pause=0.05)
assert start(2, "loop.py", "cut") == [0, 0]
paths = [Path(folder, states(folder)["library_checkpoint"]["path"]) for folder in ("whole", "cut")]

def equal(value, other):
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(equal(value[key], other[key]) for key in value)
    return torch.equal(value, other) if torch.is_tensor(value) else value == other

for name in ("model.safetensors", "optimizer.bin", "custom_checkpoint_0.pkl"):
    whole, cut = (path / name for path in paths)
    is_equal = whole.read_bytes() == cut.read_bytes()
    if name != "model.safetensors":
        is_equal = equal(torch.load(whole, weights_only=True), torch.load(cut, weights_only=True))
    print(name, "is the same:", is_equal)
"""


@pytest.mark.docker
@pytest.mark.soak
def test_checkpoint_of_an_epochs_last_step_keeps_its_end(trainers, tmp_path):
    # The end of the epoch lowers the learning rate; it comes after this checkpoint.
    output = many(trainers, tmp_path, LAST_STEP)
    assert output.count(" is the same: True") == 3, output
    assert "run: resumes after step 40: " in output


PREPARED = """
from accelerate import Accelerator

def loop():
    loader = Accelerator(cpu=True).prepare(DataLoader(data, batch_size=2))
    with Run.start() as run:
        run.track(model=torch.nn.Linear(1, 1))
        run.restore()
        for step, batch in run.steps(loader):
            raise AssertionError("not refused")

data = TensorDataset(torch.arange(24.0)[:, None])
assert start(2, loop, "run") == [2, 2]
"""


@pytest.mark.docker
@pytest.mark.soak
def test_loader_of_real_accelerate_is_refused(trainers, tmp_path):
    output = many(trainers, tmp_path, PREPARED)
    assert output.count("DataLoaderShard is a loader that accelerate has prepared") == 2, output
    assert "use accelerate's own save_state with a LibraryCheckpoint" in output


@pytest.mark.docker
@pytest.mark.soak
@pytest.mark.parametrize("name", PROGRAMS)
def test_killed_and_stopped_program_resumes_bitwise(trainers, tmp_path, name):
    output = run_program(trainers, tmp_path, name, UNDER_DIST_RUN)
    for text in (
        "whole: 0",
        "killed: 1",
        "stopped: 85",
        "/runs/cut/requeue",
        "resumed: 0",
        "steps, weights and optimizer are equal: True True True",
    ):
        assert f"\n{text}\n" in f"\n{output}", (text, output)
    assert output.count("run: resumes after step ") == 2
    assert output.count("run: stopped after step ") == 1


@pytest.mark.docker
@pytest.mark.soak
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_stops_without_imgkits_launcher(trainers, tmp_path, name):
    output = run_program(trainers, tmp_path, name, WITHOUT_LAUNCHER)
    for text in ("resumed: 0", "whole: 0", "stopped: 85"):
        assert f"\n{text}\n" in f"\n{output}", (text, output)
    assert f"\n{output}".count("\n/runs/torchrun/requeue\n") == 1, output  # the start that follows removes it
    assert output.count("run: stopped after step ") == 2
    assert output.count("run: resumes after step ") == 1
