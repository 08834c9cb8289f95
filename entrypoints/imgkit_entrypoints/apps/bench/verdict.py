"""Compare the bus bandwidth (busbw) of collectives at their largest size with what the network can carry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.apps.bench import sizes
from imgkit_entrypoints.apps.bench.collectives import find_collective
from imgkit_entrypoints.apps.bench.options import Requirement
from imgkit_entrypoints.apps.bench.record import Result, World
from imgkit_entrypoints.errors import UsageError

# Below this percentage of the expected busbw, something is probably broken, and not just inefficient.
LOW_PERCENT = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BusbwVerdict:
    """The measured and the expected bus bandwidth of one collective at its largest size."""

    collective: str
    size_bytes: int
    algbw_GBps: float
    busbw_GBps: float
    expected_busbw_GBps: float | None
    """The busbw at which a node's network is full. None for one node, or if the line rate is unknown."""

    @property
    def percent(self) -> float | None:
        """The measured busbw as a percentage of the expected busbw, or None if no busbw is expected."""
        if not self.expected_busbw_GBps:
            return None
        return 100 * self.busbw_GBps / self.expected_busbw_GBps


def judge_busbw(results: Sequence[Result], world: World, line_rate_Gbps: float | None) -> list[BusbwVerdict]:
    """Return the measured and the expected bus bandwidth of each collective at its largest size.

    The expected bandwidth is the one at which a node's network is full. It is None if the run has only one
    node, or if the line rate of the network is unknown.
    """
    # Sizes are in ascending order, so the last result of each collective is for its largest size.
    largest = {result.collective: result for result in results}
    verdicts = []
    for result in largest.values():
        expected = None
        if world.nodes > 1 and line_rate_Gbps:
            collective = find_collective(result.collective)
            expected = collective.expected_busbw_GBps(line_rate_Gbps, world.nodes, world.ranks_per_node)
        verdicts.append(
            BusbwVerdict(
                collective=result.collective,
                size_bytes=result.size_bytes,
                algbw_GBps=result.algbw_GBps,
                busbw_GBps=result.busbw_GBps,
                expected_busbw_GBps=expected,
            )
        )
    return verdicts


def describe_verdicts(
    verdicts: Sequence[BusbwVerdict], world: World, line_rate_Gbps: float | None
) -> list[str]:
    """Return sentences for the report about each collective, or about why there is no expected busbw."""
    if world.ranks == 1:
        return ["One rank: bandwidth between ranks needs two ranks. Give --nproc 2, or two nodes."]
    if world.nodes == 1:
        return [f"All {world.ranks} ranks are on {world.hosts[0]}: this is one node, not the network."]
    if not line_rate_Gbps:
        return ["The line rate of the network is unknown, so no busbw is expected. Give --line-rate Gbps."]
    lines = []
    for verdict in verdicts:
        percent = verdict.percent or 0.0  # not None here, because the line rate is known
        lines.append(_describe_verdict(verdict, percent, line_rate_Gbps))
        if percent < LOW_PERCENT and find_collective(verdict.collective).fills_network:
            lines.append(f"{verdict.collective} is slow on this network. Run dist-doctor to see why.")
    return lines


def _describe_verdict(verdict: BusbwVerdict, percent: float, line_rate_Gbps: float) -> str:
    """Return a sentence that compares the measured busbw of a collective with the expected busbw."""
    size = sizes.format_size(verdict.size_bytes)
    return (
        f"{verdict.collective} of {size}: {verdict.busbw_GBps:.4g} GBps of "
        f"busbw, {percent:.0f} % of the {verdict.expected_busbw_GBps:.4g} GBps that "
        f"{line_rate_Gbps:g} Gbps per node let expect."
    )


def refuse_requirement(requirement: Requirement | None, nodes: int, line_rate_Gbps: float | None) -> None:
    """Raise an error if ``--require`` is a percentage, such as ``80%``, but the expected busbw is unknown.

    Raises
    ------
    UsageError : all ranks are on one node, or the line rate is unknown.
    """
    if requirement is None or requirement.percent is None:
        return
    where = f"--require {requirement.percent:g}%"
    if nodes == 1:
        raise UsageError(
            "nothing crosses the network within a node", where=where, hint="give a busbw: --require GBPS"
        )
    if not line_rate_Gbps:
        raise UsageError(
            "the line rate of the network is unknown", where=where, hint="give it: --line-rate Gbps"
        )


def find_shortfalls(requirement: Requirement | None, verdicts: Sequence[BusbwVerdict]) -> Iterator[str]:
    """Yield a reason for each collective that does not reach `requirement`, the value of ``--require``.

    For example ``all_reduce of 4GiB (4.29GB) reached 30 GBps of busbw, --require asks for 40 GBps``.
    """
    if requirement is None:
        return
    if not verdicts:
        yield f"nothing was measured that could reach the {requirement} of --require"
    for verdict in verdicts:
        subject = f"{verdict.collective} of {sizes.format_size(verdict.size_bytes)} reached"
        # The percentage is None if the line rate is unknown. `refuse_requirement` has refused a required
        # percentage in this case.
        percent = verdict.percent or 0.0
        if requirement.GBps is not None and verdict.busbw_GBps < requirement.GBps:
            yield f"{subject} {verdict.busbw_GBps:.4g} GBps of busbw, --require asks for {requirement}"
        if requirement.percent is not None and percent < requirement.percent:
            yield f"{subject} {percent:.3g} % of the expected busbw, --require asks for {requirement}"
