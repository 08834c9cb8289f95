"""Set up a run: find the ranks' nodes, form the groups, agree on the free memory, and open the files."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from imgkit_entrypoints.apps.bench import collectives, measurement, record, verdict, verify
from imgkit_entrypoints.apps.bench.machine import (
    SHARE_ROTATED,
    Machine,
    RankGroup,
    RankLocation,
    first_ranks,
    free_memory_bytes,
    group_members,
    join_groups,
    locate_ranks,
    read_machine,
)
from imgkit_entrypoints.apps.bench.measurement import ROTATED_BYTES, Measurer
from imgkit_entrypoints.apps.bench.options import BenchOptions
from imgkit_entrypoints.apps.bench.record import BenchRun, World
from imgkit_entrypoints.apps.bench.verify import ExpectedValues, Noise
from imgkit_entrypoints.errors import ImgkitError, UsageError

if TYPE_CHECKING:
    from imgkit_entrypoints.run.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """Everything about a run that is known before its first collective is timed."""

    options: BenchOptions
    here: Ranks
    locations: tuple[RankLocation, ...]
    hosts: tuple[str, ...]
    """Name of each node."""
    speaks: bool
    """True on one rank per node, which reads the node's files."""
    measurer: Measurer
    world: World
    machine: Machine
    baseline: BenchRun | None
    """The run of ``--baseline``; only rank 0 has it."""
    free_bytes: float
    """Free memory per rank, on the rank that has least."""
    late_from_s: float
    """Least lateness of a rank that is reported."""
    rails: tuple[tuple[int, ...], ...]
    """The ranks that represent the nodes, once for each matrix of ``--matrix``."""

    @property
    def group(self) -> RankGroup:
        """The ranks that run a collective together with this one."""
        return self.measurer.group

    @property
    def dtype(self) -> verify.Dtype:
        """The element type."""
        return self.measurer.dtype

    @property
    def line_rate_Gbps(self) -> float | None:
        """Line rate of a node's network: ``--line-rate``, or the sum of its active ports."""
        return self.options.line_rate_Gbps or self.machine.line_rate_Gbps

    def collective(self, name: str) -> collectives.Collective:
        """The collective with this name, in the variant that was asked for."""
        asked = self.options
        return collectives.variant(name, redop=asked.redop, out_of_place=asked.out_of_place, skew=asked.skew)

    def variant(self, op: collectives.Collective) -> str:
        """What differs from the plain run of `op`, in words; empty for the plain one."""
        many = self.options.communicators
        parts = (op.variant, f"{many} communicators at once" if many > 1 else "")
        return ", ".join(part for part in parts if part)

    def new_record(self) -> record.Record:
        """A record without results, started now."""
        return record.Record(
            started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            command=("dist-bench", *sys.argv[1:]),
            world=self.world,
            fingerprint=self.machine.fingerprint,
            line_rate_Gbps=self.line_rate_Gbps,
        )


def set_up(options: BenchOptions, here: Ranks) -> RunSetup:
    """Set up the run; a collective call.

    Raises
    ------
    UsageError : on all ranks: the nodes or the groups differ in size, there is no line rate for the
        percentage of ``--require``, or rank 0 cannot use the files of ``--save`` and ``--baseline``.
    """
    locations = locate_ranks(here)
    joined = join_groups(options.group, locations, here, options.communicators)
    dtype = verify.dtype_named(options.dtype)
    nodes = 1 + max(one.node for one in locations)
    hosts = tuple(next(one.host for one in locations if one.node == node) for node in range(nodes))
    _refuse_unequal([sum(one.node == node for one in locations) for node in range(nodes)], hosts)
    speaks = here.rank == min(one.rank for one in locations if one.node == locations[here.rank].node)
    ranks_per_node = -(-here.world_size // nodes)
    found = read_machine(os.environ, nodes, ranks_per_node, _software(here))
    free_bytes = _least_free_bytes(here, ranks_per_node)
    shared = ranks_per_node > found.cpus
    rails = group_members("rail", locations, "--matrix rails") if options.matrix == "rails" else ()
    return RunSetup(
        options=options,
        here=here,
        locations=locations,
        hosts=hosts,
        speaks=speaks,
        measurer=Measurer(
            options=options,
            here=here,
            groups=joined,
            dtype=dtype,
            expected=ExpectedValues(dtype, joined[0].size, here.device, options.redop)
            if options.verify
            else None,
            counting=nodes > 1 and speaks,
            nodes=nodes,
            noise=Noise(dtype, here.device),
            rotated_bytes=int(min(ROTATED_BYTES[here.device.type], SHARE_ROTATED * free_bytes)),
        ),
        world=World(
            ranks=here.world_size,
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            hosts=hosts,
            backend=str(dist.get_backend()),
            device=here.device.type,
        ),
        machine=found,
        baseline=_usable(options, here, nodes, options.line_rate_Gbps or found.line_rate_Gbps),
        free_bytes=free_bytes,
        late_from_s=verdict.LATE_FROM_SHARED_S if shared else verdict.LATE_FROM_S,
        rails=rails or (tuple(first_ranks(locations)),),
    )


def _refuse_unequal(counts: Sequence[int], hosts: Sequence[str]) -> None:
    """Raise UsageError if the nodes have different numbers of ranks: no line rate would fit all of them."""
    if len(set(counts)) > 1:
        odd = next(node for node, count in enumerate(counts) if count != counts[0])
        shown = f"{counts[0]} on {hosts[0]}, {counts[odd]} on {hosts[odd]}"
        raise UsageError(
            f"the nodes have different numbers of ranks: {shown}",
            where="--nproc",
            hint=f"--nproc {min(counts)} starts the same number on each node",
        )


def _least_free_bytes(here: Ranks, ranks_per_node: int) -> float:
    free = free_memory_bytes(here, ranks_per_node)
    least = torch.tensor([float("inf") if free is None else float(free)], device=here.device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float(least.item())


def _usable(options: BenchOptions, here: Ranks, nodes: int, line_rate_Gbps: float | None) -> BenchRun | None:
    """Check options and files now, not after an hour of measuring; returns the baseline, on rank 0."""
    problem: ImgkitError | None = None
    baseline: BenchRun | None = None
    if here.rank == 0:
        try:
            _require_line_rate(options, nodes, line_rate_Gbps)
            if options.save:
                record.writable(Path(options.save))
            if options.baseline:
                baseline = record.load(Path(options.baseline))
        except ImgkitError as error:
            problem = error
    if measurement.agreed(lambda: (float(problem is not None),), 1, here)[0]:
        raise problem or UsageError("rank 0 cannot use --save, --baseline or --require; its output says why")
    return baseline


def _require_line_rate(options: BenchOptions, nodes: int, line_rate_Gbps: float | None) -> None:
    """Raise UsageError if ``--require 80%`` has no line rate, or nothing that could reach it."""
    if options.require is None or options.require.percent is None:
        return
    where = f"--require {options.require.percent:g}%"
    if nodes == 1 or options.group == "node":
        raise UsageError(
            "nothing crosses the network within a node", where=where, hint="give a busbw: --require GBPS"
        )
    if not line_rate_Gbps:
        raise UsageError(
            "the line rate of the network is unknown here", where=where, hint="give it: --line-rate Gbps"
        )


def _software(here: Ranks) -> Mapping[str, str]:
    versions = {"torch": torch.__version__}
    if here.device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["gpu"] = torch.cuda.get_device_name(here.device)
    return versions
