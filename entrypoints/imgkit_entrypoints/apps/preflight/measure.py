"""Measure the stages of a preflight on this node.

The stage of a single node has dist-doctor's checks and the speed of matrix products. The stage of a pair of
nodes has the bandwidth between them.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from imgkit_entrypoints import facts
from imgkit_entrypoints.apps import ranks
from imgkit_entrypoints.apps.bench import exchange, options, setup
from imgkit_entrypoints.doctor.checks import Check, Verdict
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


def measure(request: MeasureRequest) -> MeasureResult:
    """Measure one stage, and return its figures and the findings of dist-doctor.

    All nodes in ``request.group`` call this function at the same time.

    Raises
    ------
    Exception : of any type, since torch's backends and devices fail with different ones.
    """
    kind = "cpu"
    if os.environ.get("IMGKIT_DEVICE") == "cuda":
        kind = "cuda"
    if len(request.group) > 1:
        return MeasureResult(stage=request.stage, figures=(("bandwidth", measure_pair_GBps(request, kind)),))
    host = facts.gather()
    checks = check_node(host, kind)
    return MeasureResult(
        stage=request.stage,
        figures=(("matmul", measure_matmul_TFLOPs(kind, host.cpus)),),
        failed=describe_checks(checks, "fail"),
        notes=describe_checks(checks, "warn"),
    )


def check_node(host: facts.HostFacts, kind: str) -> Sequence[Check]:
    """Run dist-doctor's checks, and return their results."""
    # 2 stands for several nodes: what stops NCCL between nodes is then a failure, and otherwise a warning.
    # CPUs use gloo, which it does not stop.
    nnodes = 1
    if kind == "cuda":
        nnodes = 2
    reader = facts.Reader(root=facts.root_of(os.environ))
    return examine(host, facts.system_facts(), os.environ, reader=reader, nnodes=nnodes)


def describe_checks(checks: Sequence[Check], verdict: Verdict) -> tuple[str, ...]:
    """Return the checks with a verdict as texts: ``stack: 2097152``."""
    texts = [f"{check.name}: {check.evidence}" for check in checks if check.verdict == verdict]
    return tuple(text[:MAX_CHARACTERS] for text in texts[:MAX_TEXTS])


def measure_matmul_TFLOPs(kind: str, threads: int) -> float:
    """Multiply matrices on all devices at once, and return the speed of the slowest one in TFLOP/s.

    A product of two matrices with n rows has 2 n^3 operations.
    """
    torch.set_num_threads(max(1, threads))
    width = WIDTH[kind]
    dtype = torch.float32
    devices = [torch.device("cpu")]
    if kind == "cuda":
        dtype = torch.bfloat16
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    matrices = [torch.rand(width, width, device=device).to(dtype) for device in devices]
    results = [torch.mm(matrix, matrix) for matrix in matrices]  # the first call allocates
    products = 0
    elapsed_s = 0.0
    start_s = time.monotonic()
    while elapsed_s < MATMUL_S:
        _multiply(matrices, results, PRODUCTS[kind])
        products += PRODUCTS[kind]
        elapsed_s = time.monotonic() - start_s
    return 2 * width**3 * products / elapsed_s / 1e12


def _multiply(matrices: Sequence[torch.Tensor], results: Sequence[torch.Tensor], count: int) -> None:
    """Multiply each matrix by itself `count` times, and wait until all devices are done."""
    for matrix, result in zip(matrices, results, strict=True):
        for _ in range(count):
            torch.mm(matrix, matrix, out=result)
    for result in results:
        if result.is_cuda:  # CUDA only queues the products
            torch.cuda.synchronize(result.device)


def measure_pair_GBps(request: MeasureRequest, kind: str) -> float:
    """Return the bandwidth of each direction between the two nodes of ``request.group``, in GB/s."""
    limit = datetime.timedelta(seconds=request.limit_s)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], request.store, is_master=False, timeout=limit)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", 0)
    with ranks.join_group(
        request.limit_s,
        device=device,
        store=dist.PrefixStore(f"{request.stage}/{request.group[0]}", store),
        rank=request.group.index(int(os.environ["GROUP_RANK"])),
        world_size=len(request.group),
    ) as group:
        argv = ["--timeout", str(request.limit_s), "--seconds", str(EXCHANGE_S), "--no-verify"]
        measurer = setup.set_up(options.read_options(argv), group).measurer
        return exchange.measure_exchange_GBps(measurer, EXCHANGED_BYTES[kind])
