"""Measure the stages of a preflight on this node.

The stage of a single node has dist-doctor's checks and the speed of matrix products. The stage of a pair of
nodes has the bandwidth between them.
"""

from __future__ import annotations

import datetime
import os
import time

import torch
import torch.distributed as dist

from imgkit_entrypoints import facts
from imgkit_entrypoints.apps import ranks
from imgkit_entrypoints.apps.bench import exchange, options, setup
from imgkit_entrypoints.doctor.node import examine
from imgkit_entrypoints.rollcall.messages import MeasureRequest, MeasureResult

MATMUL_S = 10.0
"""Duration of the matrix products. A device that throttles when it gets warm shows it in this time."""
WIDTH = {"cpu": 1024, "cuda": 8192}
"""Rows of the square matrices, which are so large that a product keeps the whole device busy."""
PRODUCTS = {"cpu": 1, "cuda": 20}
"""Number of products between two readings of the clock."""
# Duration of the exchange between two nodes.
EXCHANGE_S = 1.0
EXCHANGED_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
"""Message size, so small that a link of 20 Mbit/s still gives a figure within the limit of its stage."""
MAX_TEXTS, MAX_CHARACTERS = 16, 500
"""How many failed checks, and how many warnings, a message has, and how many characters of each."""


def measure(order: MeasureRequest) -> MeasureResult:
    """Measure one stage, and return its figures and the findings of dist-doctor.

    All nodes in ``order.group`` call this function at the same time.

    Raises
    ------
    Exception : of any type, since torch's backends and devices fail with different ones.
    """
    kind = "cuda" if os.environ.get("IMGKIT_DEVICE") == "cuda" else "cpu"
    if len(order.group) > 1:
        return MeasureResult(stage=order.stage, figures=(("bandwidth", exchange_GBps(order, kind)),))
    host, reader = facts.gather(), facts.Reader(root=facts.root_of(os.environ))
    # A problem that stops NCCL between nodes does not stop gloo, which CPUs use.
    nnodes = 2 if kind == "cuda" else 1
    checks = examine(host, facts.system_facts(), os.environ, reader=reader, nnodes=nnodes)

    def texts(verdict: str) -> tuple[str, ...]:
        rows = (f"{check.name}: {check.evidence}" for check in checks if check.verdict == verdict)
        return tuple(row[:MAX_CHARACTERS] for row in rows)[:MAX_TEXTS]

    figures = (("matmul", matmul_TFLOPs(kind, host.cpus)),)
    return MeasureResult(stage=order.stage, figures=figures, failed=texts("fail"), notes=texts("warn"))


def matmul_TFLOPs(kind: str, threads: int) -> float:
    """Multiply matrices on all devices at once, and return the speed of the slowest one in TFLOP/s.

    A product of two matrices with n rows has 2 n^3 operations.
    """
    torch.set_num_threads(max(1, threads))
    width, dtype = WIDTH[kind], torch.bfloat16 if kind == "cuda" else torch.float32
    count = torch.cuda.device_count() if kind == "cuda" else 1
    devices = [torch.device(kind, index) for index in range(count)]
    matrices = [torch.rand(width, width, device=device).to(dtype) for device in devices]
    results = [torch.mm(matrix, matrix) for matrix in matrices]  # the first call allocates
    products, start = 0, time.monotonic()
    while (elapsed_s := time.monotonic() - start) < MATMUL_S:
        for matrix, result in zip(matrices, results, strict=True):
            for _ in range(PRODUCTS[kind]):
                torch.mm(matrix, matrix, out=result)
        # CUDA only queues the products, so the clock is read after all devices are done.
        for device in devices if kind == "cuda" else ():
            torch.cuda.synchronize(device)
        products += PRODUCTS[kind]
    return 2 * width**3 * products / elapsed_s / 1e12


def exchange_GBps(order: MeasureRequest, kind: str) -> float:
    """Return the bandwidth of each direction between the two nodes of ``order.group``, in GB/s."""
    limit = datetime.timedelta(seconds=order.limit_s)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], order.store, is_master=False, timeout=limit)
    with ranks.opened(
        order.limit_s,
        device=torch.device(kind, 0) if kind == "cuda" else torch.device(kind),
        store=dist.PrefixStore(f"{order.stage}/{order.group[0]}", store),
        rank=order.group.index(int(os.environ["GROUP_RANK"])),
        world_size=len(order.group),
    ) as group:
        argv = ["--timeout", str(order.limit_s), "--seconds", str(EXCHANGE_S), "--no-verify"]
        measurer = setup.set_up(options.read_options(argv), group).measurer
        return exchange.measure_exchange_GBps(measurer, EXCHANGED_BYTES[kind])
