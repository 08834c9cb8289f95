"""The command line of dist-bench; read without torch, so that --help and errors come at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from imgkit_entrypoints.apps.bench import compare, sizes
from imgkit_entrypoints.apps.bench.measure import collectives, dtypes
from imgkit_entrypoints.arguments import natural, positive

GROUPS = ("world", "node", "rail")
LEAST_BYTES = 8
MOST_BYTES = {"gloo": 64 << 20, "nccl": 4 << 30}
"""Where --max is not given, and memory allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is to be measured."""

    ops: tuple[str, ...]
    least_bytes: int
    most_bytes: int | None
    """None: by the backend and the free memory."""
    factor: int
    dtype: str
    iters: int | None
    """None: as many as fit into `seconds`."""
    seconds: float
    warmup: int
    group: str
    check: bool
    matrix: bool
    compare: tuple[str, str] | None
    rounds: int
    timeout_s: int
    line_rate_Gbps: float | None
    save: str | None
    baseline: str | None
    tolerance: float


EXAMPLES = """examples:
  dist-bench --save run.json                          # all_reduce, 8 bytes to 4 GiB (gloo: 64 MiB)
  dist-bench all --nproc 2 --device cpu               # all nine, on a laptop
  dist-bench all_gather --size 4GB --dtype bf16 --iters 50
  dist-bench --matrix                                 # which of many nodes has the slow link
  dist-bench --compare rdma,tcp --save run.json       # what RDMA is worth here
  dist-bench report run.rdma.json run.tcp.json --reference rcp -o report.html

What the figures mean: docs/bench.md. The saved file: docs/bench-report.md, dist-bench schema."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of dist-bench."""
    parser.add_argument(
        "op",
        nargs="?",
        default="all_reduce",
        choices=(*collectives.NAMES, "all"),
        metavar="OP",
        help=f"{', '.join(collectives.NAMES)} or all (default all_reduce); "
        "`dist-bench report FILE...` draws what --save kept",
    )
    _what(parser.add_argument_group("what is measured"))
    _how_long(parser.add_argument_group("how long"))
    _compared(parser.add_argument_group("what it is held against, what is kept"))


def _what(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--min",
        type=sizes.size,
        default=str(LEAST_BYTES),
        metavar="SIZE",
        help="first size: 4G is 4 GiB, 4GB is 4e9 bytes (default 8)",
    )
    group.add_argument(
        "--max", type=sizes.size, metavar="SIZE", help="last size (default: gloo 64M, NCCL 4G, or what fits)"
    )
    group.add_argument("--factor", type=_factor, default=2, metavar="N", help="between sizes (default 2)")
    group.add_argument("--size", type=sizes.size, metavar="SIZE", help="this size only")
    group.add_argument(
        "--dtype",
        choices=[item.name for item in dtypes.DTYPES],
        default="fp32",
        help="element type (default fp32)",
    )
    group.add_argument(
        "--group",
        choices=GROUPS,
        default="world",
        help="who works together: all ranks, those of a node, or those of one local rank (default world)",
    )
    group.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="verify every element of 20 or more iterations a size",
    )
    group.add_argument(
        "--matrix", action="store_true", help="sendrecv between every two nodes: names a slow link"
    )


def _how_long(group: argparse._ArgumentGroup) -> None:
    amount = group.add_mutually_exclusive_group()
    amount.add_argument("--iters", type=positive, metavar="N", help="of each timing, at every size")
    amount.add_argument(
        "--seconds",
        type=_positive_number,
        default=0.25,
        metavar="S",
        help="for each timing of each size; never less than 5 iterations, or 20 verified ones (default 0.25)",
    )
    group.add_argument("--warmup", type=natural, default=5, metavar="N", help="not timed (default 5)")
    group.add_argument(
        "--timeout",
        type=positive,
        default=300,
        metavar="S",
        help="of one collective, with NCCL of one batch (default 300)",
    )


def _compared(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--line-rate",
        type=_positive_number,
        metavar="Gbps",
        help="of one node's network (default: as its active ports say)",
    )
    group.add_argument(
        "--compare",
        type=compare.arms,
        metavar="A,B",
        help="rdma,tcp: the same by both in one job, in turn; each proven, the ratio for every size",
    )
    group.add_argument(
        "--rounds", type=positive, default=2, metavar="N", help="of --compare (default 2: A B A B)"
    )
    group.add_argument("--save", metavar="FILE", help="keep every figure as JSON, after every size")
    group.add_argument("--baseline", metavar="FILE", help="compare with this one; slower exits with 1")
    group.add_argument(
        "--tolerance", type=_share, default=0.05, metavar="X", help="slower by this share is slower (0.05)"
    )


def read(words: Sequence[str] | None = None) -> Options:
    """The worker's options.

    Raises
    ------
    SystemExit : with 2, the words are wrong.
    """
    parser = argparse.ArgumentParser(prog="dist-bench", allow_abbrev=False)
    add_arguments(parser)
    found = parser.parse_args(words)
    least, most = found.min, found.max
    if found.size is not None:
        least = most = found.size
    if most is not None and most < least:
        parser.error(f"--max {most} is below --min {least}")
    return Options(
        ops=collectives.NAMES if found.op == "all" else (found.op,),
        least_bytes=least,
        most_bytes=most,
        factor=found.factor,
        dtype=found.dtype,
        iters=found.iters,
        seconds=found.seconds,
        warmup=found.warmup,
        group=found.group,
        check=found.check,
        matrix=found.matrix,
        compare=found.compare,
        rounds=found.rounds,
        timeout_s=found.timeout,
        line_rate_Gbps=found.line_rate,
        save=found.save,
        baseline=found.baseline,
        tolerance=found.tolerance,
    )


def _factor(text: str) -> int:
    value = positive(text)
    if value < 2:
        raise argparse.ArgumentTypeError("a factor of 1 would never reach --max: 2 or more")
    return value


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _share(text: str) -> float:
    value = _positive_number(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1: 0.05 is 5 %")
    return value
