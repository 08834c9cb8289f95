"""Runs an example on the run library slowly, and lets something happen to it; runs in the image.

``trainer.py PROGRAM``: at the end of step AT, rank 1 kills itself, or with ASK makes the file of that name.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch

from imgkit_entrypoints.run.step_loop import StepLoop

torch.set_num_threads(1)
count_step = StepLoop._count_step


def count_and_act(loop):
    count_step(loop)
    time.sleep(float(os.environ.get("PAUSE", "0")))
    if loop.read_step() == int(os.environ.get("AT", "0")) and os.environ.get("RANK", "1") == "1":
        if os.environ.get("ASK"):
            Path(os.environ["ASK"]).touch()
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def with_dropout():
    """Add random numbers to the model of Lightning's example."""
    from lightning.pytorch.demos.boring_classes import BoringModel

    init = BoringModel.__init__

    def make(model):
        init(model)
        model.layer = torch.nn.Sequential(torch.nn.Dropout(0.1), model.layer)

    BoringModel.__init__ = make


StepLoop._count_step = count_and_act
sys.argv = sys.argv[1:]
if "lightning" in sys.argv[0]:
    with_dropout()
runpy.run_path(sys.argv[0], run_name="__main__")
