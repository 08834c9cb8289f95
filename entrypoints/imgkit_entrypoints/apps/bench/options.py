"""Read the command line of dist-bench without importing torch, so that help and errors appear immediately."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.apps.bench import collectives, sizes, verify
from imgkit_entrypoints.arguments import (
    Need,
    Parser,
    add_options,
    declared_options,
    option,
    parse_natural,
    parse_positive,
    refuse_unused,
)

# Default of ``--max`` by backend, where memory allows it.
MAX_BYTES = {"gloo": 64 << 20, "nccl": 4 << 30}
_DTYPES = tuple(dtype.name for dtype in verify.DTYPES)
EXAMPLES = """examples:
  dist-bench --save run.json --plot run.svg           # all_reduce, 8 bytes to 4 GiB (gloo: 64 MiB)
  dist-bench all --nproc 2 --device cpu               # all collectives, on a laptop
  dist-bench all_gather --size 4GB --dtype bf16 --iters 50
  dist-bench --size 4G --require 80%                  # exit with 1 below 80 % of the expected busbw

Meaning of the figures, and fields of the saved file: docs/guides/bench.md."""


def _parse_factor(text: str) -> int:
    value = parse_positive(text)
    if value < 2:
        raise argparse.ArgumentTypeError("a factor of 1 would never reach --max: 2 or more")
    return value


def _parse_positive_number(text: str) -> float:
    """Parse a number above 0, such as a line rate."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """The lowest acceptable bus bandwidth (busbw) at the largest size, as in ``--require``.

    It is either a percentage of the expected busbw, or a value in GBps.
    """

    percent: float | None = None
    GBps: float | None = None

    def __str__(self) -> str:
        if self.percent is not None:
            return f"{self.percent:g} %"
        return f"{self.GBps:g} GBps"


def parse_requirement(text: str) -> Requirement:
    """Parse a value of ``--require``: ``80%`` of the expected busbw, or ``300`` or ``300GBps`` of busbw.

    Raises
    ------
    argparse.ArgumentTypeError : the text is neither a percentage nor a value in GBps.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(%|GBps)?", text.strip())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a percentage of the expected busbw (80%) nor a busbw in GBps (300): "
            "1 GBps is 1e9 bytes per second, so 300 Gbps are 37.5 GBps"
        )
    amount = float(match[1])
    if match[2] == "%":
        return Requirement(percent=amount)
    return Requirement(GBps=amount)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of one run."""

    collective: str = option(
        "collective",
        f"{', '.join(collectives.NAMES)}, or all of them: all",
        (*collectives.NAMES, "all"),
        "COLLECTIVE",
        default="all_reduce",
        nargs="?",
    )
    min_bytes: int = option(
        "--min",
        "smallest size: 4G is 4 GiB, 4GB is 4e9 bytes",
        sizes.parse_size,
        "SIZE",
        default="8",
        heading="measurement",
    )
    max_bytes: int | None = option(
        "--max",
        "largest size",
        sizes.parse_size,
        "SIZE",
        unset="64M with gloo, 4G with NCCL, or less if memory is short",
    )
    """None: the backend and the free memory decide."""
    factor: int = option("--factor", "factor between sizes", _parse_factor, "N", default=2)
    size_bytes: int | None = option("--size", "measure only this size", sizes.parse_size, "SIZE")
    """It is the smallest size and the largest, too."""
    dtype: str = option("--dtype", "element type", _DTYPES, default="fp32")
    verify: bool = option(
        "--verify",
        "verify every element of at least 20 iterations per size",
        action=argparse.BooleanOptionalAction,
        default=True,
    )
    iters: int | None = option(
        "--iters", "timed iterations of each size", parse_positive, "N", heading="iterations", one_of="amount"
    )
    """None: as many as fit into `seconds`."""
    seconds: float = option(
        "--seconds",
        "time budget of each size; at least 5 iterations",
        _parse_positive_number,
        "S",
        default=0.25,
        one_of="amount",
    )
    warmup_iters: int = option(
        "--warmup-iters", "untimed iterations before each size", parse_natural, "N", default=5
    )
    timeout_s: int = option(
        "--timeout",
        "time limit of a collective in seconds; with NCCL, of one batch",
        parse_positive,
        "S",
        default=300,
    )
    line_rate_Gbps: float | None = option(
        "--line-rate",
        "line rate of one node's network",
        _parse_positive_number,
        "Gbps",
        unset="the sum of its active ports",
        heading="verdict and output",
    )
    requirement: Requirement | None = option(
        "--require",
        "minimum busbw at the largest size, in GBps or in percent of what the line rate lets expect (80%%): "
        "exit with 1 if a collective is slower",
        parse_requirement,
        "RATE",
    )
    json_path: str | None = option(
        "--save", "save all figures as JSON; updated after every size", metavar="FILE"
    )
    csv_path: str | None = option("--csv", "save the table as CSV; updated after every size", metavar="FILE")
    plot_path: str | None = option(
        "--plot", "draw busbw over size as SVG; updated after every size", metavar="FILE"
    )

    @property
    def collectives(self) -> tuple[str, ...]:
        """The names of the collectives to measure."""
        if self.collective == "all":
            return collectives.NAMES
        return (self.collective,)

    @property
    def output_paths(self) -> dict[str, str]:
        """The paths of the files that rank 0 writes, by the option that sets the path."""
        paths = {"--save": self.json_path, "--csv": self.csv_path, "--plot": self.plot_path}
        return {option: path for option, path in paths.items() if path is not None}


OPTIONS = tuple(declared_options(BenchOptions))
# Options that have no effect if --size is given.
NEEDS = tuple(
    Need(option=name, reason="with --size", met=lambda parsed: parsed.size_bytes is None)
    for name in ("--min", "--max", "--factor")
)


def check(args: Sequence[str], _env: Mapping[str, str]) -> None:
    """Check the options before any worker starts.

    Raises
    ------
    UsageError : an option is wrong or has no effect.
    """
    read_options(args)


def read_options(args: Sequence[str] | None = None) -> BenchOptions:
    """Parse the options of a worker from `args`, or from this process's command line.

    Raises
    ------
    UsageError : an option is wrong or has no effect.
    """
    parser = Parser(prog="dist-bench", allow_abbrev=False)
    add_options(parser, OPTIONS)
    parsed = parser.parse_args(args)
    refuse_unused(parser, parsed, NEEDS)
    if parsed.size_bytes is not None:  # a single size is a range of one size
        parsed.min_bytes = parsed.max_bytes = parsed.size_bytes
    if parsed.max_bytes is not None and parsed.max_bytes < parsed.min_bytes:
        parser.error(f"--max {parsed.max_bytes} is below --min {parsed.min_bytes}")
    return BenchOptions(**vars(parsed))
