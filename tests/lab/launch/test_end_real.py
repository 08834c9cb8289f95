"""How a failed run ends, with real torchrun, torch and gloo: the cause comes last, once, with rank and node.

Runs in the stand-in image, or with the Python named in IMGKIT_TEST_TORCH_PYTHON, which has imgkit too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from labkit import PACKAGE, in_image, run

PYTHON = os.environ.get("IMGKIT_TEST_TORCH_PYTHON", "")
pytestmark = [] if PYTHON else [pytest.mark.docker]

PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

dist.init_process_group("gloo")
rank, how = dist.get_rank(), sys.argv[1]

class Rows(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 7 and rank == 1:
            raise ValueError("the file of this sample is cut")
        return torch.ones(3)

def inner(step):
    if rank == 1 and step == 3:
        raise ValueError("bad value at step 3")

if how in "02":
    for batch in DataLoader(Rows(), batch_size=4, num_workers=int(how)):
        dist.all_reduce(batch)
if how == "fails-late":
    print("x" * 200_000, flush=True)
    raise ValueError("the output is long")
if how == "prints":
    for line in range(1000):
        print("x" * 200, flush=True)
    open(f"finished-{rank}", "w").close()
    sys.exit()
for step in range(1000):
    if how == "raises":
        inner(step)
    if how == "is killed" and rank == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
"""
OWN = """
import torch
from torch.utils.data import Dataset

class Rows(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 7:
            raise ValueError("the file of this sample is cut")
        return torch.ones(20), torch.ones(1)

def data(config, split):
    return Rows()
"""
SETUP = """
cd "$(mktemp -d)"
cat > program.py
cat > own.py <<'END'
OWN
END
dist() { timeout 120 "${PYTHON:-python3}" -I -m imgkit_entrypoints "$@"; }
"""
TWO_NODES = """
for rank in 1 0; do
    dist dist-run --nnodes 2 --node-rank $rank --head 127.0.0.1 --no-network-test program.py "$HOW" \\
        2> node$rank & nodes[$rank]=$!
done
for rank in 0 1; do wait ${nodes[$rank]}; echo "node $rank: $?"; done
cat node1; echo "-- head"; cat node0
"""
NOISE = ("ChildFailedError", "spawn.py", "frame #", "Connection closed by peer", "user_program.py", "runpy")


@pytest.fixture
def end(request):
    return End("" if PYTHON else request.getfixturevalue("standin"))


class End:
    """Runs a script of bash next to program.py and own.py."""

    def __init__(self, image):
        self._image = image

    def __call__(self, script, how=""):
        script = SETUP.replace("OWN", OWN) + script
        if self._image:
            options = ("--env", f"HOW={how}")
            return in_image(self._image, "bash", "-c", script, options=options, stdin=PROGRAM)
        return run("bash", "-c", script, stdin=PROGRAM, env={**os.environ, "PYTHON": PYTHON, "HOW": how})


def log_of(stderr):
    match = re.search(r"full log on that node: (\S+)", stderr)
    assert match, stderr
    return match[1]


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_own_traceback_comes_last_and_once(end, start):
    done = end(
        f"dist dist-run --start {start} --nproc 2 --log-dir logs program.py raises; code=$?\n"
        "cat logs/*/errors-*.log; exit $code"
    )
    said = done.stderr
    assert done.returncode == 1
    assert said.count("ValueError: bad value at step 3") == said.count("Traceback") == 1
    assert said.splitlines()[-1] == "ValueError: bad value at step 3"
    assert re.search(r"imgkit: rank 1 on node 1 of 1 \(.+\) failed first: exit code 1\n", said)
    assert re.search(r"/logs/([^/]+)/errors-\1\.log$", log_of(said))
    assert not [word for word in NOISE if word in said]
    # That rank 0 lost its peer is in it only if torchrun did not end that rank first.
    for word in ("ChildFailedError", "bad value at step 3"):
        assert word in done.stdout, "the full log has it"


def test_end_by_force_prints_no_traceback_of_torchrun(end):
    """Nobody reads the output: torchrun waits for its own copy of it when the node agent ends it."""
    done = end(
        "exec 3> >(until [ -e ended ]; do sleep 0.1; done; cat > /dev/null)\n"
        'timeout 120 "${PYTHON:-python3}" -I -m imgkit_entrypoints dist-run --grace 1 --device cpu '
        "program.py fails-late >&3 2> said & agent=$!\n"
        "until grep -q 'has not ended after' said; do sleep 0.2; done\n"
        "kill -TERM $agent; wait $agent; touch ended; cat said"
    )
    assert "tail_log" not in done.stdout
    assert done.stdout.count("\nValueError: the output is long\n") == 2  # at once, and last
    assert done.stdout.endswith("\nValueError: the output is long\n")


@pytest.mark.parametrize("output", ["> >(head -1)", "> /dev/full", ">&-"])
def test_lost_output_is_reported_once_and_ends_with_one(end, output):
    done = end(f"dist dist-run --nproc 2 --device cpu program.py prints {output}; code=$?; ls; exit $code")
    assert done.returncode == 1
    assert done.stderr.count("imgkit: standard output is closed or full (") == 1
    assert "Traceback" not in done.stderr
    assert {"finished-0", "finished-1"} <= set(done.stdout.split())


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.soak), "2"])
def test_bad_sample_of_own_loader_names_its_index(end, workers):
    stderr = end(f"dist dist-run --start fork --nproc 2 program.py {workers}").stderr
    assert "sample 7 of the data set" in stderr
    assert stderr.splitlines()[-1] == "ValueError: the file of this sample is cut"


def test_bad_sample_of_a_plug_in_names_index_and_line(end):
    run_it = "dist dist-train --nproc 2 --device cpu --data own.py:data --workers 2 --batch-size 8"
    result = end(f"{run_it} --steps 40")
    assert result.returncode == 1
    assert re.search(
        r"dist-train: rank \d: sample 7 of the data: ValueError: the file of this sample is cut "
        r"\(.*own.py:10\)\nTraceback \(most recent call last\):\n"
        r"  File \".*own.py\", line 10, in __getitem__\n.*\n"
        r"ValueError: the file of this sample is cut\n$",
        result.stderr,
    ), result.stderr


@pytest.mark.parametrize("how", ["raises", pytest.param("is killed", marks=pytest.mark.soak)])
def test_head_prints_the_cause_of_another_node(end, how):
    result = end(TWO_NODES, how)
    other_output, _, head = result.stdout.partition("-- head\n")
    assert "node 0: 1\nnode 1: 1\n" in other_output
    ending = "exit code 1" if how == "raises" else "killed by SIGKILL"
    assert re.search(rf"imgkit: rank 1 on node 2 of 2 \(.+\) failed first: {ending}\n", head), head
    assert "Traceback" not in other_output
    assert re.search(rf"imgkit: rank 1 on node 2 of 2 \(.+\) failed, {ending}.*\n$", other_output), (
        other_output
    )
    last = "ValueError: bad value at step 3" if how == "raises" else "it left no traceback"
    assert head.splitlines()[-1].startswith(last)
    assert not [noise for noise in NOISE if noise in head + other_output]


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount over /proc needs root")
def test_guard_ends_all_where_no_path_leads_to_proc():
    """So it is in a container whose files another process serves, when Slurm has ended that one first."""
    (control, agent), (status_reader, status) = os.pipe(), os.pipe()
    program = "setsid sleep 500 & mount -t tmpfs none /proc && echo $! && wait"
    guard = (
        sys.executable,
        "-I",
        "-S",
        PACKAGE / "launch/guard.py",
        str(control),
        str(status),
        "1024",
        "torchrun",
    )
    with subprocess.Popen(
        ["unshare", "--mount", *guard, "sh", "-c", program],
        pass_fds=(control, status),
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        os.close(control)
        os.close(status)
        worker = int(child.stdout.readline())
        os.kill(worker, 0)
        os.close(agent)
        child.wait()
    assert os.read(status_reader, 4096).decode().splitlines()[-1].startswith("clean ")
    os.close(status_reader)
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
