"""One rank whose collective waits behind a kernel for longer than NCCL's watchdog allows."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

torch.cuda.set_device(0)
dist.init_process_group("nccl", timeout=timedelta(seconds=5))
ones = torch.ones(1, device="cuda")
dist.all_reduce(ones)  # connects, and is recorded
torch.cuda.synchronize()
torch.cuda._sleep(60 * 2_000_000_000)  # clock cycles: about a minute
dist.all_reduce(ones)
torch.cuda.synchronize()
