"""Examples with Lightning, Hugging Face's Trainer and accelerate on two ranks: killed, stopped, resumed."""

from __future__ import annotations

import ast
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
ls /runs/cut/state-saved
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
ls /runs/torchrun/state-saved
(start torchrun torchrun); echo "resumed: $?"
ls /runs/torchrun/state-saved
(start alone alone AT=-1); echo "whole: $?"
ask asked alone USR1; echo "stopped: $?"
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_example_is_short_and_on_the_page(name: str) -> None:
    text = (ROOT / f"examples/{name}.py").read_text()
    assert len(text.splitlines()) <= 45
    ast.parse(text)
    shown = f"```{{literalinclude}} ../../examples/{name}.py\n"
    assert shown in (ROOT / "docs/guides/resume.md").read_text()


@pytest.fixture(scope="session")
def trainers(standin: str) -> str:
    """The stand-in with the real libraries; the engine keeps the layer for the next run."""
    # Byte code of all packages: each start in a new container would else compile hundreds of modules.
    compiled = "python3 -m compileall -q -j 0 /usr/local/lib/python3.11/dist-packages"
    install = f"pip install -q --root-user-action ignore {PACKAGES} && {{ {compiled} || true; }}"
    output(
        "docker", "build", "-q", "-t", IMAGE, "-", given=f"FROM {standin}\nRUN {install}\n", timeout_s=1800
    )
    return IMAGE


def told(trainers: str, runs: Path, name: str, script: str) -> str:
    mounted = ("--volume", f"{HERE.parent}:/lab:ro", "--volume", f"{ROOT}/examples:/examples:ro")
    here = (
        *mounted,
        "--volume",
        f"{runs}:/runs",
        "--workdir",
        "/runs",
        "--env",
        "HOME=/tmp",
        "--env",
        "PYTHONPATH=/lab",
    )
    done = in_image(trainers, "bash", "-c", STARTS + script, "bash", name, options=here, timeout_s=1800)
    return done.stdout + done.stderr


LAST_STEP = """
from pathlib import Path

text = Path("/examples/accelerate_loop.py").read_text()
assert text.count("save_every=15") == 1
Path("loop.py").write_text(text.replace("save_every=15", "save_every=20"))
each = 80 // RANKS
assert start(RANKS, "loop.py", "whole") == [0] * RANKS
# The checkpoint of the step before has to be whole.
assert -9 in start(RANKS, "loop.py", "cut", at=each + 5, rank=RANKS - 1, pause=0.05)
assert start(RANKS, "loop.py", "cut") == [0] * RANKS

def newest(folder):
    path = Path(folder, states(folder)["library_checkpoint"]["path"])
    return {file.name: file for file in path.iterdir()}

def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if torch.is_tensor(one) else one == other

whole, cut = newest("whole"), newest("cut")
assert whole.keys() == cut.keys()
for name in whole:
    if name in ("state.pt", "optimizer.bin", "custom_checkpoint_0.pkl"):
        states = [torch.load(files[name], weights_only=True) for files in (whole, cut)]
        print(name, "is the same:", same(*states))
    elif name == "model.safetensors":
        print(name, "is the same:", whole[name].read_bytes() == cut[name].read_bytes())
"""


@pytest.mark.docker
@pytest.mark.parametrize("package", ["stub", pytest.param("accelerate", marks=pytest.mark.soak)])
def test_checkpoint_of_an_epochs_last_step_keeps_its_end(
    request: pytest.FixtureRequest, tmp_path: Path, package: str
) -> None:
    # The end of the epoch lowers the learning rate; it comes after this checkpoint.
    image = request.getfixturevalue("standin" if package == "stub" else "trainers")
    ranks, files = ("1", 1) if package == "stub" else ("2", 3)
    first = "import accelerate_stub\n" if package == "stub" else ""
    found = many(image, tmp_path, first + LAST_STEP.replace("RANKS", ranks))
    assert found.count(" is the same: True") == files, found
    assert f"run: resumes after step {80 // int(ranks)}: " in found


@pytest.mark.docker
@pytest.mark.soak
@pytest.mark.parametrize("name", PROGRAMS)
def test_killed_and_stopped_program_resumes_bitwise(trainers: str, tmp_path: Path, name: str) -> None:
    found = told(trainers, tmp_path, name, UNDER_DIST_RUN)
    for text in (
        "whole: 0",
        "killed: 1",
        "stopped: 85",
        "/runs/cut/state-saved",
        "resumed: 0",
        "steps, weights and optimizer are equal: True True True",
    ):
        assert f"\n{text}\n" in f"\n{found}", (text, found)
    assert found.count("run: resumes after step ") == 2
    assert found.count("run: stopped after step ") == 1


@pytest.mark.docker
@pytest.mark.soak
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_stops_without_imgkits_launcher(trainers: str, tmp_path: Path, name: str) -> None:
    found = told(trainers, tmp_path, name, WITHOUT_LAUNCHER)
    for text in ("resumed: 0", "whole: 0", "stopped: 85"):
        assert f"\n{text}\n" in f"\n{found}", (text, found)
    assert f"\n{found}".count("\n/runs/torchrun/state-saved\n") == 1, (
        found
    )  # the start that follows removes it
    assert found.count("run: stopped after step ") == 2
    assert found.count("run: resumes after step ") == 1
