"""Every way of launching, as real commands, over a torchrun that has the flags of torch 2.3 only."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

from imgkit_entrypoints.rollcall import ports

HERE = Path(__file__).resolve().parent
ENTRYPOINTS = HERE.parents[3] / "entrypoints"
# One write a line: the workers share the pipe.
PROGRAM = """
import os, sys
ranks = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
sys.stdout.write(" ".join([*ranks, *sys.argv[1:]]) + "\\n")
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has imgkit and the stub as its torch, also with -I."""
    folder = tmp_path_factory.mktemp("torch-2.3")
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    (site / "imgkit.pth").write_text(f"{ENTRYPOINTS}\n")
    texts = {
        "__init__": "",
        "version": "__version__ = '2.3.1+cu121'\n",
        "distributed/__init__": "",
        "distributed/run": (HERE / "stub_torch_2_3.py").read_text(),
        "distributed/elastic/__init__": "",
        "distributed/elastic/agent/server/api": (
            "class SimpleElasticAgent:\n    _rendezvous = _exit_barrier = None\n"
        ),
        "distributed/elastic/multiprocessing/__init__": "",
        "distributed/elastic/multiprocessing/api": "class SignalException(Exception): ...\n",
        "distributed/elastic/multiprocessing/errors": "class ChildFailedError(Exception): ...\n",
    }
    for name, text in texts.items():
        path = site / "torch" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder / "bin/python")


def start(python: str, folder: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    dist_run = [python, "-I", "-m", "imgkit_entrypoints", "dist-run", "--device", "cpu"]
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(folder), **variables}
    return subprocess.Popen(
        [*dist_run, *options, "program.py", "--lr", "a b"],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(*nodes: subprocess.Popen[str]) -> list[str]:
    """What the programs printed, sorted; every node has ended with 0."""
    outputs = [node.communicate(timeout=60)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0] * len(nodes), outputs
    return sorted(line for text in outputs for line in text.splitlines() if line[0].isdigit())


def free_port() -> str:
    return str(ports.first_free(os.getpid() % 10000 + 15000))


@pytest.mark.parametrize(("nnodes", "started"), [("2", 2), ("2+1", 3)])
def test_several_nodes(python, tmp_path, nnodes, started):
    options = ("--nnodes", nnodes, "--head", "127.0.0.1", "--port", free_port(), "--node-rank")
    nodes = [start(python, tmp_path, *options, str(rank)) for rank in range(started)]
    assert ended(*nodes) == ["0 0 2 --lr a b", "1 0 2 --lr a b"]


def test_pods_with_a_local_rank_train_together(python, tmp_path):
    job = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": free_port()}
    pods = [start(python, tmp_path, **job, PET_NODE_RANK=str(rank), LOCAL_RANK="0") for rank in range(2)]
    assert ended(*pods) == ["0 0 2 --lr a b", "1 0 2 --lr a b"]


def test_all_options_of_the_launch(python, tmp_path):
    args = ("--max-restarts", "2", "--log-dir", str(tmp_path / "logs"), "--pass-local-rank", "--nproc", "2")
    lines = ["0 0 2 --local_rank=0 --lr a b", "1 1 2 --local_rank=1 --lr a b"]
    assert ended(start(python, tmp_path, *args)) == lines


def test_stub_refuses_a_later_flag(python):
    code = "from torch.distributed.run import main; main()"
    result = subprocess.run(
        [python, "-I", "-c", code, "--shutdown-timeout", "3", "x.py"], capture_output=True
    )
    assert result.returncode == 2
