"""``--start fork``: workers that are forks of a real torchrun behave as interpreters of their own do."""

from __future__ import annotations

import sys

import pytest
from labkit import in_image, run

pytestmark = pytest.mark.docker

PROGRAM = """
import atexit, os, sys, threading, time
import mod_beside
import mod_of_pythonpath

rank = int(os.environ["RANK"])
print(f"rank {rank} of {__name__}: {sys.argv[1:]}", flush=True)
if sys.argv[1] == "ends":
    os._exit(0)  # torch would wait for ever for a value that the worker returns
if rank == 0:
    time.sleep(1000)
if sys.argv[1] == "raises":
    raise RuntimeError("this rank is broken")
atexit.register(print, "atexit was called", flush=True)
threading.Thread(target=lambda: (time.sleep(0.3), print("the thread ended", flush=True))).start()
sys.exit("no more")
"""
RUN = """
mkdir /tmp/beside /tmp/path
touch /tmp/beside/mod_beside.py /tmp/path/mod_of_pythonpath.py
cat > /tmp/beside/program.py
export PYTHONPATH=/tmp/path
cd /tmp/beside
for how in "$@"; do
    timeout 60 python3 -I -m imgkit_entrypoints dist-run --start fork --nproc 2 program.py "$how"
    echo "$how: $?"
done
"""


@pytest.mark.soak
def test_other_program_ends_as_under_torchrun(standin):
    result = in_image(standin, "bash", "-c", RUN, "run", "ends", "raises", "exits", stdin=PROGRAM)
    assert result.stdout.count("of __main__: ['ends']") == 2
    assert "ends: 0\n" in result.stdout
    assert "raises: 1\n" in result.stdout  # 124: the other worker was not ended
    assert "RuntimeError: this rank is broken" in result.stderr
    assert "exits: 1\n" in result.stdout
    assert result.stderr.endswith("\nno more\n")
    assert result.stdout.count("]: the thread ended\n") == result.stdout.count("]: atexit was called\n") == 1


TRAINS = """
import numpy, torch, torch.distributed as dist
from numba import njit, prange
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

@njit(parallel=True)
def total(values):
    found = 0.0
    for place in prange(len(values)):
        found += values[place]
    return found

class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = numpy.full(8, float(index % 7))
        return torch.from_numpy(row).float(), torch.tensor([total(row)]).float()

def main():
    dist.init_process_group()
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = Rows()
    for how in ("fork", "spawn", "forkserver"):
        sampler = DistributedSampler(data)
        workers = {"num_workers": 1, "multiprocessing_context": how}
        for rows, totals in DataLoader(data, batch_size=4, sampler=sampler, **workers):
            loss = torch.nn.functional.mse_loss(model(rows), totals)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("weights", total(numpy.ones(9)), [one.tolist() for one in model.parameters()], flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
BOTH = """
pip install -q --no-index --find-links /wheels --root-user-action ignore numba || exit
cat > /tmp/trains.py
for how in exec fork; do
    timeout 300 python3 -I -m imgkit_entrypoints dist-run --start $how --nproc 2 /tmp/trains.py || exit
done
"""


@pytest.mark.soak  # it fetches 80 MB of packages
def test_forks_train_with_gloo_data_workers_and_numba(standin, tmp_path):
    platforms = [f"--platform={name}_x86_64" for name in ("manylinux_2_28", "manylinux_2_27")]
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--python-version=3.11"]
    abis = ("--implementation=cp", "--abi=cp311", "--abi=none")
    fetched = run(*fetch, *abis, *platforms, "-d", tmp_path, "numba", "numpy==2.3.5")
    assert fetched.returncode == 0, fetched.stderr
    mounted = ("--volume", f"{tmp_path}:/wheels:ro")
    result = in_image(standin, "bash", "-c", BOTH, options=mounted, stdin=TRAINS)
    assert result.returncode == 0, result.stderr
    weights = [line.partition("weights ")[2] for line in result.stdout.splitlines() if "weights 9.0 " in line]
    assert len(weights) == 4  # two ranks by each way to start
    assert len(set(weights)) == 1
    assert "leaked" not in result.stderr


def test_unknown_way_to_start_is_refused(standin_notorch):
    result = in_image(
        standin_notorch, "python3", "-I", "-m", "imgkit_entrypoints", "dist-hello", "--start", "spawn"
    )
    assert result.returncode == 2
    assert "'spawn' is none of auto, fork, exec" in result.stderr
