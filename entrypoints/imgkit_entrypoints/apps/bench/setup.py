"""Set up a run: find out on which nodes ranks are, determine the free memory, check options and files."""

from __future__ import annotations

import datetime
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from imgkit_entrypoints import files
from imgkit_entrypoints.apps.bench import machine, measurement, record, verdict, verify
from imgkit_entrypoints.apps.bench.measurement import ROTATED_BYTES, Measurer
from imgkit_entrypoints.apps.bench.options import BenchOptions
from imgkit_entrypoints.apps.bench.record import RunRecord, World
from imgkit_entrypoints.apps.bench.verify import ExpectedValues, Noise
from imgkit_entrypoints.errors import ImgkitError, UsageError
from imgkit_entrypoints.run.ranks import Ranks

# Name of the file with all results in the folder of the run. ``imgkit scaling`` reads it.
RUN_FILE = "bench.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """All values of a run that are determined before its first collective is timed."""

    options: BenchOptions
    ranks: Ranks
    node_names: tuple[str, ...]
    """Name of the node on which each rank runs."""
    measurer: Measurer
    world: World
    fingerprint: Mapping[str, str]
    line_rate_Gbps: float | None
    """Line rate of a node's network: the value of ``--line-rate``, or the sum of all active ports."""
    free_bytes: float
    """Free memory of the rank that has least, or infinity if it is unknown."""
    run_file: Path | None
    """Path of the file `RUN_FILE`, or None if the run has no folder."""

    def new_record(self) -> RunRecord:
        """Return a record without results, whose start time is now."""
        return RunRecord(
            started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            command=("dist-bench", *sys.argv[1:]),
            world=self.world,
            fingerprint=self.fingerprint,
            line_rate_Gbps=self.line_rate_Gbps,
        )


def set_up(options: BenchOptions, ranks: Ranks) -> RunSetup:
    """Set up the run. All ranks must call this function.

    Raises
    ------
    UsageError : on all ranks, in three cases: the nodes have different numbers of ranks, ``--require`` is a
        percentage but the expected busbw is unknown, or rank 0 cannot write a file.
    """
    node_names = machine.node_names(machine.gather_nodes(ranks))
    hosts = tuple(dict.fromkeys(node_names))
    ranks_on_node = machine.ranks_per_node(node_names)
    node = machine.read_machine(os.environ, len(hosts), ranks_on_node, _read_software_versions(ranks))
    line_rate_Gbps = options.line_rate_Gbps or node.line_rate_Gbps
    run_file = _run_file(os.environ)
    output_paths = {f"{option} FILE": Path(path) for option, path in options.output_paths.items()}
    # `imgkit scaling` reads this additional file in the folder of each run.
    if run_file is not None:
        output_paths["IMGKIT_RUN_DIR=FOLDER"] = run_file
    _refuse_on_rank_0(options, ranks, len(hosts), line_rate_Gbps, output_paths)
    free_bytes = _find_least_free_bytes(ranks, ranks_on_node)
    return RunSetup(
        options=options,
        ranks=ranks,
        node_names=node_names,
        measurer=_create_measurer(options, ranks, free_bytes),
        world=World(
            ranks=ranks.world_size,
            nodes=len(hosts),
            ranks_per_node=ranks_on_node,
            hosts=hosts,
            backend=str(dist.get_backend()),
            device=ranks.device.type,
        ),
        fingerprint=node.fingerprint,
        line_rate_Gbps=line_rate_Gbps,
        free_bytes=free_bytes,
        run_file=run_file,
    )


def _create_measurer(options: BenchOptions, ranks: Ranks, free_bytes: float) -> Measurer:
    """Return the object that times and verifies collectives. `free_bytes` limits the size of its buffers."""
    dtype = verify.dtype_named(options.dtype)
    expected = None
    if options.verify:
        expected = ExpectedValues(dtype, ranks.world_size, ranks.device)
    return Measurer(
        options=options,
        ranks=ranks,
        dtype=dtype,
        expected=expected,
        noise=Noise(dtype, ranks.device),
        rotated_bytes=int(min(ROTATED_BYTES[ranks.device.type], machine.ROTATED_SHARE * free_bytes)),
    )


def _run_file(env: Mapping[str, str]) -> Path | None:
    """Return the path of `RUN_FILE` in the folder of this run, or None if the run has no folder."""
    folder = env.get("IMGKIT_RUN_DIR")
    if not folder:
        return None
    return files.in_job_folder(Path(folder), env) / RUN_FILE


def _find_least_free_bytes(ranks: Ranks, ranks_on_node: int) -> float:
    """Return the free memory of the rank that has least, or infinity if it is unknown on all ranks.

    All ranks must call this function.
    """
    free_bytes: float | None = machine.free_memory_bytes(ranks, ranks_on_node)
    if free_bytes is None:
        free_bytes = math.inf
    # Exchange the minimum, because all ranks must choose the same sizes.
    tensor = torch.tensor([float(free_bytes)], device=ranks.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return float(tensor.item())


def _refuse_on_rank_0(
    options: BenchOptions,
    ranks: Ranks,
    nodes: int,
    line_rate_Gbps: float | None,
    output_paths: Mapping[str, Path],
) -> None:
    """Check options and output files on rank 0, and raise an error on all ranks if rank 0 finds a problem.

    The check runs before the measurements, so that a problem does not show only after an hour.

    Parameters
    ----------
    output_paths : the files that rank 0 writes, by the option that selects the file: ``--save FILE``.
    """
    problem: ImgkitError | None = None
    if ranks.rank == 0:
        try:
            verdict.refuse_requirement(options.requirement, nodes, line_rate_Gbps)
            for usage, path in output_paths.items():
                record.refuse_unwritable(path, usage)
        except ImgkitError as error:
            problem = error
    # The other ranks learn that there is a problem, but not which. They raise an error that refers to rank
    # 0's output.
    (has_problem,) = measurement.broadcast_numbers((float(problem is not None),), ranks)
    if has_problem:
        raise problem or UsageError("rank 0 refused its options; its output says why")


def _read_software_versions(ranks: Ranks) -> Mapping[str, str]:
    """Return the versions of torch, CUDA and NCCL, and the name of the GPU."""
    versions = {"torch": torch.__version__}
    if ranks.device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["gpu"] = torch.cuda.get_device_name(ranks.device)
    return versions
