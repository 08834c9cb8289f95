"""Format the printed table. It has the columns of nccl-tests, and the range of the measured times."""

from __future__ import annotations

from collections.abc import Sequence

from imgkit_entrypoints.apps.bench.collectives import Collective
from imgkit_entrypoints.apps.bench.record import Result, World, mean_busbw_GBps
from imgkit_entrypoints.apps.bench.verify import dtype_named

# The columns of nccl-tests come first, so that programs that read its table can also read this table.
HEADER = (
    "#       size         count      type   redop    root       time    algbw    busbw  #wrong"
    "        low       high",
    "#        (B)    (elements)                             (us)   (GB/s)   (GB/s)        "
    "           (us)       (us)",
)


def format_title(collective: Collective, dtype: str, world: World) -> str:
    """Return the line above the table of one collective."""
    operation = f"{collective.name} {dtype_named(dtype).torch}"
    if collective.adds_values:
        operation += " sum"
    ranks = "1 rank" if world.ranks == 1 else f"{world.ranks} ranks"
    title = f"# {operation}, {ranks}, {world.backend}"
    if world.nodes > 1:
        title += f", {world.nodes} nodes"
    return title


def format_row(result: Result) -> str:
    """Return the row of the table for one size. 1 GB/s is 1e9 B/s, as in nccl-tests."""
    wrong = "N/A" if result.wrong is None else str(result.wrong)
    return (
        f"{result.size_bytes:12}  {result.count:12}  {result.type:>8}  {result.redop:>6}  {result.root:6}  "
        f"{result.time_us:9.2f}  {result.algbw_GBps:7.3f}  {result.busbw_GBps:7.3f}  {wrong:>6}  "
        f"{result.low_us:9.2f}  {result.high_us:9.2f}"
    )


def format_summary(results: Sequence[Result]) -> tuple[str, ...]:
    """Return the lines after the table. They equal those of nccl-tests, because other programs read them."""
    if not results:
        return ()
    wrong = "N/A"
    verified = [result.wrong for result in results if result.wrong is not None]
    if any(verified):
        wrong = f"{sum(verified)} FAILED"
    elif verified:
        wrong = "0 OK"
    return (
        f"# Out of bounds values : {wrong}",
        f"# Avg bus bandwidth    : {mean_busbw_GBps(results):g}",
    )
