"""The command line of dist-bench. Reading it needs no torch, so ``--help`` and refusals come at once."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.apps.bench import collectives, sizes, verify
from imgkit_entrypoints.arguments import Need, Parser, natural, positive, refuse_unused

MIN_BYTES = 8
MAX_BYTES = {"gloo": 64 << 20, "nccl": 4 << 30}
"""Default of ``--max`` by backend, where memory allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of one run."""

    collectives: tuple[str, ...]
    min_bytes: int
    max_bytes: int | None
    """None: the backend and the free memory decide."""
    factor: int
    dtype: str
    iters: int | None
    """None: as many as fit into `seconds`."""
    seconds: float
    warmup_iters: int
    verify: bool
    timeout_s: int
    line_rate_Gbps: float | None
    requirement: Requirement | None
    json_path: str | None
    csv_path: str | None
    plot_path: str | None

    @property
    def output_paths(self) -> dict[str, str]:
        """The files that rank 0 writes, by option."""
        paths = {"--save": self.json_path, "--csv": self.csv_path, "--plot": self.plot_path}
        return {option: path for option, path in paths.items() if path is not None}


EXAMPLES = """examples:
  dist-bench --save run.json --plot run.svg           # all_reduce, 8 bytes to 4 GiB (gloo: 64 MiB)
  dist-bench all --nproc 2 --device cpu               # all collectives, on a laptop
  dist-bench all_gather --size 4GB --dtype bf16 --iters 50
  dist-bench --size 4G --require 80%                  # exit with 1 below 80 % of the expected busbw

Meaning of the figures, and fields of the saved file: docs/guides/bench.md."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of dist-bench."""
    parser.add_argument(
        "collective",
        nargs="?",
        choices=(*collectives.NAMES, "all"),
        metavar="COLLECTIVE",
        default="all_reduce",
        help=f"{', '.join(collectives.NAMES)}, or all of them: all (default: all_reduce)",
    )
    _add_sizes(parser.add_argument_group("measurement"))
    _add_iterations(parser.add_argument_group("iterations"))
    _add_outputs(parser.add_argument_group("verdict and output"))


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--min",
        type=sizes.size,
        default=str(MIN_BYTES),
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
        choices=[dtype.name for dtype in verify.DTYPES],
        default="fp32",
        help="element type (default: fp32)",
    )
    group.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="verify every element of at least 20 iterations per size",
    )


def _add_iterations(group: argparse._ArgumentGroup) -> None:
    amount = group.add_mutually_exclusive_group()
    amount.add_argument("--iters", type=positive, metavar="N", help="timed iterations of each size")
    amount.add_argument(
        "--seconds",
        type=_positive_number,
        default=0.25,
        metavar="S",
        help="time budget of each size; at least 5 iterations (default: 0.25)",
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


def _add_outputs(group: argparse._ArgumentGroup) -> None:
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
        help="minimum busbw at the largest size, in GBps or in percent of what the line rate lets expect "
        "(80%%): exit with 1 if a collective is slower",
    )
    group.add_argument("--save", metavar="FILE", help="save all figures as JSON; updated after every size")
    group.add_argument("--csv", metavar="FILE", help="save the table as CSV; updated after every size")
    group.add_argument("--plot", metavar="FILE", help="draw busbw over size as SVG; updated after every size")


def _needs() -> list[Need]:
    """Return the options that have no effect with ``--size``."""
    return [
        Need(option=option, reason="with --size", met=lambda parsed: parsed.size is None)
        for option in ("--min", "--max", "--factor")
    ]


def check(args: Sequence[str], _env: Mapping[str, str]) -> None:
    """Refuse contradictory options before a worker starts.

    Raises
    ------
    UsageError : as `read`.
    """
    read(args)


def read(args: Sequence[str] | None = None) -> BenchOptions:
    """Read the worker's options.

    Raises
    ------
    UsageError : an option is wrong or has no effect.
    """
    parser = Parser(prog="dist-bench", allow_abbrev=False)
    add_arguments(parser)
    parsed = parser.parse_args(args)
    refuse_unused(parser, parsed, _needs())
    min_bytes, max_bytes = parsed.min, parsed.max
    if parsed.size is not None:
        min_bytes = max_bytes = parsed.size
    if max_bytes is not None and max_bytes < min_bytes:
        parser.error(f"--max {max_bytes} is below --min {min_bytes}")
    return BenchOptions(
        collectives=collectives.NAMES if parsed.collective == "all" else (parsed.collective,),
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        factor=parsed.factor,
        dtype=parsed.dtype,
        iters=parsed.iters,
        seconds=parsed.seconds,
        warmup_iters=parsed.warmup_iters,
        verify=parsed.verify,
        timeout_s=parsed.timeout,
        line_rate_Gbps=parsed.line_rate,
        requirement=parsed.require,
        json_path=parsed.save,
        csv_path=parsed.csv,
        plot_path=parsed.plot,
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
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """The least busbw of the largest size: a percentage of the expected one, or a value in GBps."""

    percent: float | None = None
    GBps: float | None = None

    def __str__(self) -> str:
        return f"{self.percent:g} %" if self.percent is not None else f"{self.GBps:g} GBps"


def parse_requirement(text: str) -> Requirement:
    """Parse ``80%`` of the expected busbw, or ``300`` or ``300GBps`` of busbw.

    Raises
    ------
    argparse.ArgumentTypeError : the text is neither.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(%|GBps)?", text.strip())
    value = float(match[1]) if match else 0.0
    if match is None or not value:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a percentage of the expected busbw (80%) nor a busbw in GBps (300): "
            "1 GBps is 1e9 bytes per second, so 300 Gbps are 37.5 GBps"
        )
    return Requirement(percent=value) if match[2] == "%" else Requirement(GBps=value)
