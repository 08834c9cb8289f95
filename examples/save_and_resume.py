"""Any program that saves on request and resumes from there; this one only counts.

    imgkit run mn5 --nodes 2 ... -- dist-run --device cpu save_and_resume.py 1000

The three lines that a training loop needs are marked.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main(steps: int) -> None:
    """Count to `steps`."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = Path(os.environ["IMGKIT_RUN_DIR"]) / "state"
    stop = Path(os.environ["IMGKIT_STOP_DIR"])
    step = int(state.read_text()) if state.exists() else 0
    dist.barrier()  # nobody writes before all have read
    if rank == 0:
        print(f"starts at {step}", flush=True)
    while step < steps:
        time.sleep(0.05)  # the work of a step
        step += 1
        asked = torch.tensor([float((stop / "stop").exists())])  # 1: look for the flag
        dist.all_reduce(asked)  # 2: agree, so that all ranks leave at the same step
        if asked.item():
            if rank == 0:
                state.write_text(str(step))
            (stop / "state-saved").write_text(f"{os.environ['IMGKIT_JOB_ID']} {step}\n")  # 3: say so
            break
    else:
        if rank == 0:
            print(f"finished at {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
