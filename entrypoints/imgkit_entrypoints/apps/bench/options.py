"""The command line of dist-bench. Reading it needs no torch, so ``--help`` and refusals come at once."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.apps.bench import collectives, sizes, verify
from imgkit_entrypoints.arguments import Need, duration, natural, positive, refuse_unused

GROUPS = ("world", "node", "rail")
LEAST_BYTES = 8
MOST_BYTES = {"gloo": 64 << 20, "nccl": 4 << 30}
"""Default of ``--max``, where memory allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The measurement that was asked for."""

    ops: tuple[str, ...]
    least_bytes: int
    most_bytes: int | None
    """None: the backend and the free memory decide."""
    factor: int
    dtype: str
    iters: int | None
    """None: as many as fit into `seconds`."""
    seconds: float
    warmup_iters: int
    group: str
    redop: str
    out_of_place: bool
    skew: float
    communicators: int
    overlap: bool
    duration_s: int | None
    """None: one sweep over all sizes."""
    verify: bool
    compute: bool
    """Measure each rank's device alone, and no collective."""
    matrix: str
    """"nodes": one rank per node; "rails": each local rank in turn; "": no matrix."""
    timeout_s: int
    line_rate_Gbps: float | None
    require: Requirement | None
    save: str | None
    baseline: str | None
    tolerance: float


EXAMPLES = """examples:
  dist-bench --save run.json                          # all_reduce, 8 bytes to 4 GiB (gloo: 64 MiB)
  dist-bench all --nproc 2 --device cpu               # all nine collectives, on a laptop
  dist-bench all_gather --size 4GB --dtype bf16 --iters 50
  dist-bench alltoallv --skew 1.5                     # experts that are not equally popular
  dist-bench --matrix                                 # find the slow link among many nodes
  dist-bench --compute                                # is one GPU slower than the others?
  dist-bench --matrix rails                           # the same for the network port of each GPU
  dist-bench --size 4G --require 80%                  # exit with 1 below 80 % of the line rate
  dist-bench --size 1G --duration 30m                 # does it stay fast and correct?
  dist-bench report run.json --reference rcp -o report.html

Meaning of the figures: docs/bench.md. The saved file: docs/bench-report.md and dist-bench schema."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of dist-bench."""
    parser.add_argument(
        "op",
        nargs="?",
        choices=(*collectives.NAMES, "all"),
        metavar="OP",
        help=f"{', '.join(collectives.NAMES)}, or all of them except alltoallv: all (default: all_reduce); "
        "`dist-bench report FILE...` draws saved runs",
    )
    _what(parser.add_argument_group("measurement"))
    _variants(parser.add_argument_group("variants"))
    _how_long(parser.add_argument_group("duration"))
    _compared(parser.add_argument_group("comparison and output"))


def _what(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--min",
        type=sizes.size,
        default=str(LEAST_BYTES),
        metavar="SIZE",
        help="smallest size: 4G is 4 GiB, 4GB is 4e9 bytes (default: 8)",
    )
    group.add_argument(
        "--max",
        type=sizes.size,
        metavar="SIZE",
        help="largest size (default: 64M with gloo, 4G with NCCL, or less if memory is short)",
    )
    group.add_argument(
        "--factor", type=_factor, default=2, metavar="N", help="factor between sizes (default: 2)"
    )
    group.add_argument("--size", type=sizes.size, metavar="SIZE", help="measure only this size")
    group.add_argument(
        "--dtype",
        choices=[item.name for item in verify.DTYPES],
        default="fp32",
        help="element type (default: fp32)",
    )
    group.add_argument(
        "--group",
        choices=GROUPS,
        default="world",
        help="ranks that run a collective together: all, those of a node, or those with the same local rank "
        "(default: world)",
    )
    group.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="verify every element of at least 20 iterations per size",
    )
    group.add_argument(
        "--compute",
        action="store_true",
        help="measure matrix products and memory copies on each rank's device instead of collectives",
    )
    group.add_argument(
        "--matrix",
        nargs="?",
        const="nodes",
        default="",
        choices=("nodes", "rails"),
        help="run sendrecv between all pairs of nodes and report slow links; rails: for each local rank in "
        "turn",
    )


def _variants(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--redop",
        choices=collectives.REDOPS,
        default="sum",
        help="reduction of all_reduce, reduce and reduce_scatter (default: sum)",
    )
    group.add_argument(
        "--out-of-place",
        action="store_true",
        help="run all_reduce, broadcast and reduce on a copy of the input, and include the copy in the time",
    )
    group.add_argument(
        "--skew",
        type=_number,
        default=1.0,
        metavar="X",
        help="alltoallv: rank k receives 1/(1+k)^X of what rank 0 receives (default: 1; 0: all the same)",
    )
    group.add_argument(
        "--overlap",
        action="store_true",
        help="run the largest size while the device computes, and report the hidden share",
    )
    group.add_argument(
        "--communicators",
        type=positive,
        default=1,
        metavar="N",
        help="run each operation on N communicators of the same ranks at once (default: 1)",
    )


def _how_long(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--duration",
        dest="duration_s",
        type=duration,
        metavar="TIME",
        help="repeat the largest size for this time (90s, 30m, 12h) and print a timeline",
    )
    amount = group.add_mutually_exclusive_group()
    amount.add_argument(
        "--iters", type=positive, metavar="N", help="iterations of each timing, for every size"
    )
    amount.add_argument(
        "--seconds",
        type=_positive_number,
        default=0.25,
        metavar="S",
        help="time budget of each timing of each size; at least 5 iterations, or 20 verified ones "
        "(default: 0.25)",
    )
    group.add_argument(
        "--warmup-iters",
        type=natural,
        default=5,
        metavar="N",
        help="untimed iterations before each size (default: 5)",
    )
    group.add_argument(
        "--timeout",
        type=positive,
        default=300,
        metavar="S",
        help="time limit of a collective in seconds; with NCCL, of one batch (default: 300)",
    )


def _compared(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--line-rate",
        type=_positive_number,
        metavar="Gbps",
        help="line rate of one node's network (default: the sum of its active ports)",
    )
    group.add_argument(
        "--require",
        type=parse_requirement,
        metavar="RATE",
        help="minimum busbw, in GBps or in percent of the line rate (80%%): exit with 1 if the largest size "
        "of an "
        "operation, or a link of --matrix, is slower",
    )
    group.add_argument("--save", metavar="FILE", help="save all figures as JSON; updated after every size")
    group.add_argument(
        "--baseline", metavar="FILE", help="compare with this saved run, and exit with 1 if slower"
    )
    group.add_argument(
        "--tolerance",
        type=_share,
        default=0.05,
        metavar="X",
        help="fraction by which a size may be slower than the baseline (default: 0.05)",
    )


_MODES: Mapping[str, tuple[str, ...]] = {
    "--compute": ("--seconds",),
    "--matrix": ("--max", "--size", "--dtype", "--iters", "--seconds", "--line-rate", "--require", "--save"),
}
"""Measurements of their own -> the options that mean something there, and ``--timeout``."""
_OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "--redop": tuple(one.name for one in collectives.COLLECTIVES if one.sums),
    "--out-of-place": tuple(one.name for one in collectives.COLLECTIVES if not one.separate),
    "--skew": (collectives.SKEWED,),
}
"""Options -> the operations that have that variant."""
_NEEDS: Mapping[str, tuple[str, Callable[[argparse.Namespace], object]]] = {
    "--tolerance": ("without --baseline FILE", lambda found: found.baseline),
    "--max": ("with --size", lambda found: not found.size),
    "--min": ("with --size or --duration", lambda found: not (found.size or found.duration_s)),
    "--factor": ("with --size or --duration", lambda found: not (found.size or found.duration_s)),
    "--baseline": ("with --duration", lambda found: found.duration_s is None),
    "--overlap": ("with --duration", lambda found: found.duration_s is None),
}
"""Options -> why they have no effect where the condition does not hold."""


def _needs(parser: argparse.ArgumentParser) -> Iterator[Need]:
    """Every option that has no effect without others, or with others."""
    for mode, its_own in _MODES.items():
        dest = mode.strip("-")
        for action in parser._actions:
            name = action.option_strings[-1] if action.option_strings else str(action.metavar)
            if name not in (mode, "--help", "--timeout", *its_own):
                yield Need(option=name, why=f"with {mode}", met=_lacks(dest))
    for name, able in _OPERATIONS.items():
        yield Need(option=name, why=f"without {' or '.join(able)}", met=_measures(able))
    for name, (why, met) in _NEEDS.items():
        yield Need(option=name, why=why, met=met)


def _lacks(dest: str) -> Callable[[argparse.Namespace], bool]:
    return lambda found: not getattr(found, dest)


def _measures(operations: Collection[str]) -> Callable[[argparse.Namespace], bool]:
    return lambda found: any(one in operations for one in _ops(found))


def _ops(found: argparse.Namespace) -> tuple[str, ...]:
    return collectives.EVERY if found.op == "all" else (found.op or "all_reduce",)


def check(words: Sequence[str], _env: Mapping[str, str]) -> None:
    """Refuse options that contradict each other before any worker starts.

    Raises
    ------
    SystemExit, UsageError : as `read`.
    """
    read(words)


def read(words: Sequence[str] | None = None) -> BenchOptions:
    """Read the worker's options.

    Raises
    ------
    SystemExit : code 2; an option is wrong.
    UsageError : options contradict each other, or one has no effect.
    """
    parser = argparse.ArgumentParser(prog="dist-bench", allow_abbrev=False)
    add_arguments(parser)
    found = parser.parse_args(words)
    refuse_unused(parser, found, _needs(parser))
    least, most = found.min, found.max
    if found.size is not None:
        least = most = found.size
    if most is not None and most < least:
        parser.error(f"--max {most} is below --min {least}")
    if found.matrix and found.require and found.require.percent:
        parser.error(
            "--require with --matrix takes GBps: the line rate is that of all ports, a link uses one"
        )
    if found.duration_s == 0:
        parser.error("--duration 0 measures nothing: give a time such as 90s, 30m or 12h")
    return BenchOptions(
        ops=_ops(found),
        least_bytes=least,
        most_bytes=most,
        factor=found.factor,
        dtype=found.dtype,
        iters=found.iters,
        seconds=found.seconds,
        warmup_iters=found.warmup_iters,
        group=found.group,
        redop=found.redop,
        out_of_place=found.out_of_place,
        skew=found.skew,
        communicators=found.communicators,
        overlap=found.overlap,
        duration_s=found.duration_s,
        verify=found.verify,
        compute=found.compute,
        matrix=found.matrix,
        timeout_s=found.timeout,
        line_rate_Gbps=found.line_rate,
        require=found.require,
        save=found.save,
        baseline=found.baseline,
        tolerance=found.tolerance,
    )


def _factor(text: str) -> int:
    value = positive(text)
    if value < 2:
        raise argparse.ArgumentTypeError("a factor of 1 would never reach --max: 2 or more")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _positive_number(text: str) -> float:
    value = _number(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _share(text: str) -> float:
    value = _positive_number(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1: 0.05 is 5 %")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """The least bandwidth of the largest size: a percentage of the line rate, or a bus bandwidth."""

    percent: float | None = None
    GBps: float | None = None

    def __str__(self) -> str:
        return f"{self.percent:g} %" if self.percent is not None else f"{self.GBps:g} GBps"


def parse_requirement(text: str) -> Requirement:
    """Parse ``80%`` of the line rate, or ``300`` or ``300GBps`` of busbw.

    Raises
    ------
    argparse.ArgumentTypeError : the text is neither.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(%|GBps)?", text.strip())
    if not found or not (value := float(found[1])):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a percentage of the line rate (80%) nor a busbw in GBps (300): "
            "1 GBps is 1e9 bytes per second, so 300 Gbps are 37.5 GBps"
        )
    return Requirement(percent=value) if found[2] == "%" else Requirement(GBps=value)
