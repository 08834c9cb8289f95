"""Measure this node before a run starts (preflight).

The preflight has two kinds of stages. In the stage of a single node, dist-doctor's checks run and the speed
of matrix products is measured. In the stage of two nodes, the bandwidth between them is measured.
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
"""Duration of the matrix products. It is long enough for a device to get warm and to reduce its clock."""
WIDTH = {"cpu": 1024, "cuda": 8192}
"""Rows of the square matrices. They are large enough to keep the whole device busy."""
PRODUCTS = {"cpu": 1, "cuda": 20}
"""Number of products after which the elapsed time is checked."""
# Duration of the exchange between two nodes in seconds.
EXCHANGE_S = 1.0
EXCHANGED_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
"""Message size. It is small enough that even a link of 20 Mbit/s finishes within the time limit."""
MAX_TEXTS, MAX_CHARACTERS = 16, 500
"""Most failed checks, and most warnings, in a message to the node agent, and most characters of each."""


def measure(request: MeasureRequest) -> MeasureResult:
    """Measure one stage, and return the results.

    If ``request.group`` has one node, the results are the speed of matrix products and the problems that
    dist-doctor's checks found. If the group has two nodes, both call this function at the same time, and the
    result is the bandwidth between them.

    Raises
    ------
    Exception : of any type, because each of torch's backends and devices has its own errors.
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
    """Run dist-doctor's checks on this node, and return their results."""
    # A run on CPUs uses Gloo, so problems of NCCL between nodes are only warnings for it.
    uses_nccl = kind == "cuda"
    reader = facts.Reader(root=facts.root_of(os.environ))
    return examine(host, facts.system_facts(), os.environ, reader=reader, has_several_nodes=uses_nccl)


def describe_checks(checks: Sequence[Check], verdict: Verdict) -> tuple[str, ...]:
    """Return the results that have a verdict such as ``fail`` as short texts: ``stack: 2097152``."""
    texts = [f"{check.name}: {check.evidence}" for check in checks if check.verdict == verdict]
    return tuple(text[:MAX_CHARACTERS] for text in texts[:MAX_TEXTS])


def measure_matmul_TFLOPs(kind: str, threads: int) -> float:
    """Multiply matrices on all devices at the same time, and return the speed of one device in TFLOP/s.

    All devices compute the same number of products, so the slowest device determines the result. A product of
    two square matrices with n rows has 2 n^3 operations.
    """
    torch.set_num_threads(max(1, threads))
    width = WIDTH[kind]
    dtype = torch.float32
    devices = [torch.device("cpu")]
    if kind == "cuda":
        dtype = torch.bfloat16
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    matrices = [torch.rand(width, width, device=device).to(dtype) for device in devices]
    results = [torch.mm(matrix, matrix) for matrix in matrices]  # allocates the memory, so it is not timed
    products = 0
    elapsed_s = 0.0
    start_s = time.monotonic()
    while elapsed_s < MATMUL_S:
        # This waits until all devices have finished, so the time includes the slowest.
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
        if result.is_cuda:  # torch.mm only queues the product on a GPU
            torch.cuda.synchronize(result.device)


def measure_pair_GBps(request: MeasureRequest, kind: str) -> float:
    """Measure the bandwidth between the two nodes of ``request.group``, for each direction, in GB/s.

    Both nodes call this function at the same time. They find each other over a key-value store, which a
    process on node 0 serves at the port ``request.store``.

    Parameters
    ----------
    kind : ``cuda`` to exchange data between the first GPU of each node, or ``cpu``.
    """
    limit = datetime.timedelta(seconds=request.limit_s)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], request.store, is_master=False, timeout=limit)
    # All pairs of all stages use the same store, so each has a prefix for its keys.
    pair_store = dist.PrefixStore(f"{request.stage}/{request.group[0]}", store)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", 0)
    with ranks.join_group(
        request.limit_s,
        device=device,
        store=pair_store,
        rank=request.group.index(int(os.environ["GROUP_RANK"])),
        world_size=len(request.group),
    ) as pair_ranks:
        # The measurer of dist-bench, with its options as on a command line. All others have their defaults.
        argv = ["--timeout", str(request.limit_s), "--seconds", str(EXCHANGE_S), "--no-verify"]
        measurer = setup.set_up(options.read_options(argv), pair_ranks).measurer
        return exchange.measure_exchange_GBps(measurer, EXCHANGED_BYTES[kind])
