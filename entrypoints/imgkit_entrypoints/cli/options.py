"""Options of the launch, the same for every command; ``IMGKIT_*`` variables stand in for flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

from imgkit_entrypoints import __version__
from imgkit_entrypoints.arguments import Parser, natural, positive
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch.plan import FAILURES, LaunchOptions, Request, Timeouts
from imgkit_entrypoints.rollcall.messages import MODES
from imgkit_entrypoints.schedulers import NAMES
from imgkit_entrypoints.schedulers.placement import Size, Wanted

DEVICES = ("auto", "cuda", "cpu")


_ALSO: Mapping[str, tuple[str, ...]] = {
    "--nproc": ("--nproc-per-node", "--nproc_per_node"),
    "--node-rank": ("--node_rank",),
    "--head": ("--master-addr", "--master_addr"),
    "--port": ("--master-port", "--master_port"),
    "--max-failures": ("--max-restarts", "--max_restarts"),
}
"""Spellings of torchrun and torch.distributed.launch, for existing command lines."""


def parser(
    name: str, summary: str, env: Mapping[str, str], usage: str | None = None, *, device: str = "auto"
) -> argparse.ArgumentParser:
    """Return a parser with the launch's options; the app adds its own. Its errors are UsageError."""
    made = Parser(prog=name, description=summary, usage=usage, allow_abbrev=False)
    made.add_argument("--version", action="version", version=f"imgkit {__version__}")
    group = made.add_argument_group("options of the launch (each also as IMGKIT_NPROC and the like)")

    def option(flag: str, kind: Callable[[str], object], default: object, metavar: str, text: str) -> None:
        given = env.get(_variable(flag))
        # A string default goes through `type` and its errors like a value on the command line.
        group.add_argument(flag, type=kind, default=given or default, metavar=metavar, help=text)
        if flag in _ALSO:  # hidden, or the help would be twice as long
            dest, hidden = flag.strip("-").replace("-", "_"), argparse.SUPPRESS
            group.add_argument(*_ALSO[flag], dest=dest, type=kind, default=hidden, help=hidden)

    def switch(flag: str, text: str) -> None:
        group.add_argument(flag, action="store_true", default=_on(flag, env), help=text)

    default = "cuda where GPUs are visible" if device == "auto" else device
    option("--device", _one_of(DEVICES), device, "|".join(DEVICES), f"device to run on (default: {default})")
    option("--nproc", _nproc, "auto", "N|auto", "processes on this node; auto: one per GPU (default: auto)")
    option(
        "--scheduler",
        _one_of(NAMES),
        None,
        "NAME",
        f"launcher that started this command: {', '.join(NAMES)} (default: detected)",
    )
    option(
        "--nnodes",
        _size,
        None,
        "N|MIN:MAX|N+S",
        "number of nodes, a range, or N nodes and S spares (default: the scheduler's number)",
    )
    option(
        "--node-rank", natural, None, "RANK", "rank of this node; the head is 0 (default: the scheduler's)"
    )
    option("--head", str, None, "HOST", "name or address of node 0, as the other nodes reach it")
    option("--port", positive, None, "PORT", "torchrun's port on the head (default: from the job id)")
    option(
        "--max-failures",
        natural,
        None,
        "K",
        "lost nodes and failed workers that the run survives by a new attempt (default: 0; with a range or "
        f"spares {FAILURES})",
    )
    option(
        "--lost-after",
        positive,
        30,
        "S",
        "seconds of silence after which a node counts as lost (default: 30)",
    )
    option(
        "--start",
        _one_of(("auto", "fork", "exec")),
        "auto",
        "HOW",
        "fork: torchrun imports torch once for all workers; exec: each worker is an interpreter of its own "
        "(default: fork for imgkit's programs on CPUs)",
    )
    option("--log-dir", str, None, "DIR", "keep each process' output in DIR, one folder per node")
    option(
        "--rollcall-timeout",
        positive,
        120,
        "S",
        "seconds to wait for all nodes, in the roll call and again in torchrun's rendezvous (default: 120)",
    )
    option("--grace", positive, 60, "S", "seconds to save after a stop request (default: 60)")
    option(
        "--hang-after",
        natural,
        60,
        "S",
        "report a rank of dist-train as stuck after S seconds or three times its longest step, whichever is "
        "longer (default: 60); 0: never",
    )
    option(
        "--secret-file",
        str,
        None,
        "FILE",
        "secret that the nodes prove to each other, a private file of at least 32 bytes, the same on all; "
        "-: a line on standard input (default: the job script's, else ~/.config/imgkit/secret)",
    )
    switch("--require-secret", "several nodes: refuse a start without a secret, in which strangers can join")
    # Two options and no value: argparse would take the word after --preflight for it, often the script.
    for flag, mode in zip(("--preflight", "--preflight=full"), MODES, strict=True):
        group.add_argument(
            flag,
            dest="preflight",
            action="store_const",
            const=mode,
            default=_mode(env),
            help="measure all nodes for a minute at most, and start without outliers or not at all; "
            "--preflight=full measures each figure longer"
            if mode == MODES[0]
            else argparse.SUPPRESS,
        )
    switch("--no-network-test", "start without testing the network between the nodes")
    switch("--direct", "this process is one rank: do not start torchrun")
    switch("--plan", "print the plan as JSON and stop")
    return made


def plan_wanted(words: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return whether errors are printed as JSON too, also errors in the options themselves."""
    return "--plan" in words or env.get(_variable("--plan")) == "1"


def read(parsed: argparse.Namespace, command: tuple[str, ...]) -> LaunchOptions:
    """Return the parsed values; `command` holds the words typed, for errors that show them."""
    return LaunchOptions(
        wanted=Wanted(
            scheduler=parsed.scheduler,
            size=parsed.nnodes,
            node_rank=parsed.node_rank,
            head=parsed.head,
            port=parsed.port,
            direct=parsed.direct or None,
            command=command,
        ),
        request=Request(
            nproc=parsed.nproc,
            device=parsed.device,
            max_failures=parsed.max_failures,
            start=parsed.start,
            log_dir=parsed.log_dir,
        ),
        show_plan=parsed.plan,
        network_test=not parsed.no_network_test,
        secret_file=parsed.secret_file,
        require_secret=parsed.require_secret,
        preflight=parsed.preflight,
        timeouts=Timeouts(
            grace_s=parsed.grace,
            rollcall_s=parsed.rollcall_timeout,
            hang_after_s=parsed.hang_after,
            lost_after_s=parsed.lost_after,
        ),
    )


def _variable(flag: str) -> str:
    return "IMGKIT_" + flag.strip("-").replace("-", "_").upper()


def _on(flag: str, env: Mapping[str, str]) -> bool:
    given = env.get(_variable(flag), "")
    if given not in ("", "0", "1"):
        raise UsageError(f"{given!r} is neither 0 nor 1", where=_variable(flag), hint=f"1 means {flag}")
    return given == "1"


def _mode(env: Mapping[str, str]) -> str:
    """Return the preflight's mode that IMGKIT_PREFLIGHT asks for; empty: none."""
    given = env.get("IMGKIT_PREFLIGHT", "")
    known = {"": "", "0": "", "1": MODES[0], **{mode: mode for mode in MODES}}
    if given not in known:
        hint = "1 means --preflight, full means --preflight=full"
        raise UsageError(f"{given!r} is none of 0, 1, full", where="IMGKIT_PREFLIGHT", hint=hint)
    return known[given]


def _one_of(allowed: tuple[str, ...]) -> Callable[[str], str]:
    # argparse does not apply its own choices to defaults, and IMGKIT_DEVICE is one.
    def check(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(allowed)}")
        return text

    return check


def _nproc(text: str) -> str:
    if text != "auto":
        positive(text)
    return text


def _size(text: str) -> Size:
    try:
        return Size.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
