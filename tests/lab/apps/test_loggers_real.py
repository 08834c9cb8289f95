"""``dist-train --log-to`` with the real libraries in the stand-in image; it needs a package index."""

from __future__ import annotations

import sys

import pytest
from labkit import in_image, run

TRAIN = "python3 -I -m imgkit_entrypoints dist-train --nproc 2 --run-dir /tmp/run --log-to tensorboard,wandb"
KILLED_AND_RESUMED = f"""
pip install -q --no-index --find-links /wheels --root-user-action ignore tensorboard wandb || exit
{TRAIN} --steps 1000000 --log-every 10 --save-every 500 &
until [ -e /tmp/run/checkpoints/step-0000001000 ]; do sleep 0.2; done
kill -KILL $!
wait
sleep 1 # its guard ends the workers
last=$(ls /tmp/run/checkpoints | sort | tail -n 1)
{TRAIN} --steps $((10#${{last#step-}} + 1000)) --log-every 10 --save-every 500 --eval-every 500
grep -l samples_per_s -a -r /tmp/run/wandb --include 'run-*.wandb'
python3 - <<'END'
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator("/tmp/run/tensorboard", size_guidance={{"scalars": 0}})
events.Reload()
steps = [event.step for event in events.Scalars("loss")]
print("steps once, in order:", steps == sorted(set(steps)), len(steps) > 50)
print("held out:", bool(events.Scalars("eval_loss")))
END
"""


@pytest.mark.docker
@pytest.mark.soak  # it fetches 60 MB of packages
def test_curves_go_on_after_a_kill(standin, tmp_path):
    platforms = [
        f"--platform={name}_x86_64" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
    ]
    abis = [f"--abi={name}" for name in ("cp311", "abi3", "none")]
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--python-version=3.11"]
    result = run(*fetch, "--implementation=cp", *abis, *platforms, "-d", tmp_path, "tensorboard", "wandb")
    assert result.returncode == 0, result.stderr
    result = in_image(
        standin, "bash", "-c", KILLED_AND_RESUMED, options=("--volume", f"{tmp_path}:/wheels:ro")
    )
    assert "resumes after step" in result.stderr + result.stdout
    assert "steps once, in order: True True" in result.stdout
    assert "held out: True" in result.stdout
    assert result.stdout.count("/run-") == 2  # one file for each start
