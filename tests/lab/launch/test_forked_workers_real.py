"""``--start fork``: workers that are forks of a real torchrun behave as interpreters of their own do."""

from __future__ import annotations

import pytest
from labkit import in_image

pytestmark = pytest.mark.docker

PROGRAM = """
import os, sys, time
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


def test_other_program_ends_as_under_torchrun(standin: str) -> None:
    done = in_image(standin, "bash", "-c", RUN, "run", "ends", "raises", "exits", given=PROGRAM)
    assert done.stdout.count("of __main__: ['ends']") == 2
    assert "ends: 0\n" in done.stdout
    assert "raises: 1\n" in done.stdout  # 124: the other worker was not ended
    assert "RuntimeError: this rank is broken" in done.stderr
    assert "exits: 1\n" in done.stdout
    assert "]: no more" in done.stderr


def test_unknown_way_to_start_is_refused(standin_notorch: str) -> None:
    done = in_image(
        standin_notorch, "python3", "-I", "-m", "imgkit_entrypoints", "dist-hello", "--start", "spawn"
    )
    assert done.returncode == 2
    assert "'spawn' is none of auto, fork, exec" in done.stderr
