"""The options of a launch, the same for every command; ``IMGKIT_*`` variables stand in for flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from imgkit_entrypoints import __version__
from imgkit_entrypoints.arguments import Parser, natural, positive
from imgkit_entrypoints.cli.commands import Command
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch.plan import DEFAULT_FAILURES, LaunchOptions, Request, Timeouts
from imgkit_entrypoints.schedulers.placement import PlacementRequest, Size, size_examples
from imgkit_entrypoints.schedulers.resolve import NAMES

DEVICES = ("auto", "cuda", "cpu")
ROLLCALL_HELP = "time for all nodes to join, and then for all ranks to connect (default: 120 s)"
HANG_HELP = (
    "report a rank as stuck after S seconds without progress, or three times its longest step if that is "
    "longer; 0: never (default: 60)"
)
KEY_FILE_HELP = (
    "shared secret by which nodes authenticate each other: a private file of at least 32 bytes, the same on "
    "all nodes, or - for a line on standard input (default: the job script's, else ~/.config/imgkit/secret)"
)


def choice(*allowed: str) -> Callable[[str], str]:
    """Return a type that takes one of `allowed`; argparse does not apply its own choices to defaults."""

    def check(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(allowed)}")
        return text

    return check


def processes(text: str) -> str:
    """Check a number of processes, or ``auto``."""
    if text != "auto":
        positive(text)
    return text


def port(text: str) -> int:
    """Parse a number of a port."""
    number = positive(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port from 1 to 65535")
    return number


def size(text: str) -> Size:
    """Parse ``N`` or ``N+S`` nodes."""
    try:
        return Size.parse(text)
    except ValueError as error:
        raise UsageError(str(error), where="--nnodes", hint=size_examples(text, "--nnodes ")) from None


class Option(NamedTuple):
    """One option that takes a value."""

    flag: str
    type: Callable[[str], object]
    default: object
    metavar: str
    help: str


OPTIONS = (
    Option("--device", choice(*DEVICES), "auto", "|".join(DEVICES), "device to run on (default: {device})"),
    Option("--nproc", processes, "auto", "N|auto", "processes on this node (default: auto, one per GPU)"),
    Option("--scheduler", choice(*NAMES), None, "NAME", f"launcher: {', '.join(NAMES)} (default: detected)"),
    Option("--nnodes", size, None, "N|N+S", "nodes, or nodes and spares (default: the scheduler's number)"),
    Option(
        "--node-rank", natural, None, "RANK", "rank of this node; the head is 0 (default: the scheduler's)"
    ),
    Option("--head", str, None, "HOST", "name or address by which the other nodes reach the head"),
    Option("--port", port, None, "PORT", "torchrun's port on the head (default: from the job id)"),
    Option(
        "--max-failures",
        natural,
        None,
        "K",
        f"lost nodes and failed workers to survive (default: {DEFAULT_FAILURES} with spares, else 0)",
    ),
    Option("--lost-after", positive, 30, "S", "silence after which a node counts as lost (default: 30 s)"),
    Option(
        "--start",
        choice("auto", "fork", "exec"),
        "auto",
        "METHOD",
        "start method of the workers. fork: torchrun imports torch once for all of them; exec: each is a "
        "separate interpreter (default: fork for imgkit's programs on CPUs, else exec)",
    ),
    Option("--log-dir", str, None, "DIR", "save the output of each process in DIR, one folder per node"),
    Option("--rollcall-timeout", positive, 120, "S", ROLLCALL_HELP),
    Option("--grace", positive, 60, "S", "time to save in after a stop request (default: 60 s)"),
    Option("--hang-after", natural, 60, "S", HANG_HELP),
    Option("--secret-file", str, None, "FILE", KEY_FILE_HELP),
    Option(
        "--compile-cache",
        str,
        None,
        "FILE",
        "start with the compiled code of FILE, and pack what is compiled into it at the end",
    ),
)
ALIASES = {
    "--nproc": ("--nproc-per-node", "--nproc_per_node"),
    "--node-rank": ("--node_rank",),
    "--head": ("--master-addr", "--master_addr"),
    "--port": ("--master-port", "--master_port"),
    "--max-failures": ("--max-restarts", "--max_restarts"),
}
"""Spellings of torchrun and torch.distributed.launch, for existing command lines; the help hides them."""
SWITCHES = {
    "--require-secret": "refuse multi-node runs without a shared secret",
    "--preflight": "measure all nodes first, for a minute at most, and leave slow ones out",
    "--no-network-test": "skip the test of the network between the nodes",
    "--direct": "run this process as one rank, without torchrun",
    "--dry-run": "show every resolved value and its source, then exit",
    "--verbose": "print the reasons for all settings at the start, too (-v)",
}


def launch_parser(command: Command, env: Mapping[str, str], usage: str | None = None) -> Parser:
    """Return a parser with the launch's options; the app adds its own. Its errors are UsageError."""
    parser = Parser(prog=command.name, description=command.summary, usage=usage, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"imgkit {__version__}")
    json_help = "print one JSON object" if command.prints_json else "with --dry-run: print one JSON object"
    parser.add_argument("--json", action="store_true", help=json_help)
    group = parser.add_argument_group("launch options (--nproc is also read from IMGKIT_NPROC, and so on)")
    for option in OPTIONS:
        default = command.device if option.flag == "--device" else option.default
        device = "cuda where GPUs are visible" if command.device == "auto" else command.device
        text = option.help.format(device=device)
        # A string default goes through `type` and its errors like a value on the command line.
        default = env.get(variable(option.flag)) or default
        group.add_argument(option.flag, type=option.type, default=default, metavar=option.metavar, help=text)
        if aliases := ALIASES.get(option.flag):
            dest, hidden = option.flag.strip("-").replace("-", "_"), argparse.SUPPRESS
            group.add_argument(*aliases, dest=dest, type=option.type, default=hidden, help=hidden)
    group.add_argument(
        "--keep-env",
        action="append",
        default=[name for name in env.get(variable("--keep-env"), "").split(",") if name],
        metavar="NAME",
        help="keep this variable of the host for the workers, which start without those of MPI, XALT and the "
        "host's Python; PMIX_*: all that begin so; core: core dumps (repeatable)",
    )
    for flag, text in SWITCHES.items():
        names = (flag, "-v") if flag == "--verbose" else (flag,)
        group.add_argument(*names, action="store_true", default=_is_on(flag, env), help=text)
    return parser


def read_options(parsed: argparse.Namespace, command: Command, argv: Sequence[str]) -> LaunchOptions:
    """Return the parsed values; `argv` is the whole command line, for errors that show it.

    Raises
    ------
    UsageError : ``--json`` is given where only a dry run prints JSON.
    """
    if parsed.json and not parsed.dry_run and not command.prints_json:
        raise UsageError("--json needs --dry-run", hint="add --dry-run, or leave --json out")
    placement = PlacementRequest(
        scheduler=parsed.scheduler,
        size=parsed.nnodes,
        node_rank=parsed.node_rank,
        head=parsed.head,
        port=parsed.port,
        direct=parsed.direct,
        command=tuple(argv),
    )
    request = Request(
        nproc=parsed.nproc,
        device=parsed.device,
        max_failures=parsed.max_failures,
        start=parsed.start,
        log_dir=parsed.log_dir,
    )
    timeouts = Timeouts(
        grace_s=parsed.grace,
        rollcall_s=parsed.rollcall_timeout,
        hang_after_s=parsed.hang_after,
        lost_after_s=parsed.lost_after,
    )
    return LaunchOptions(
        placement=placement,
        request=request,
        timeouts=timeouts,
        dry_run=parsed.dry_run,
        json=parsed.json,
        verbose=parsed.verbose,
        network_test=not parsed.no_network_test,
        secret_file=parsed.secret_file,
        require_secret=parsed.require_secret,
        preflight=parsed.preflight,
        compile_cache=parsed.compile_cache,
        keep_env=tuple(parsed.keep_env),
    )


def variable(flag: str) -> str:
    """Return the variable that stands in for `flag`."""
    return "IMGKIT_" + flag.strip("-").replace("-", "_").upper()


def _is_on(flag: str, env: Mapping[str, str]) -> bool:
    value = env.get(variable(flag), "")
    if value not in ("", "0", "1"):
        raise UsageError(f"{value!r} is neither 0 nor 1", where=variable(flag), hint=f"1 means {flag}")
    return value == "1"
