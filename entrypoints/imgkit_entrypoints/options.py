"""Options of the launch, spelled the same for every command; ``IMGKIT_*`` variables stand in for flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from imgkit_entrypoints import __version__
from imgkit_entrypoints.arguments import natural, positive
from imgkit_entrypoints.placement import Wanted
from imgkit_entrypoints.plan import Request
from imgkit_entrypoints.schedulers import NAMES

DEVICES = ("auto", "cuda", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The launch's part of a command line."""

    wanted: Wanted
    request: Request
    show_plan: bool
    rollcall_timeout_s: int
    grace_s: int


def parser(
    name: str, summary: str, env: Mapping[str, str], usage: str | None = None
) -> argparse.ArgumentParser:
    """A parser with the launch's options; the app adds its own."""
    made = argparse.ArgumentParser(prog=name, description=summary, usage=usage, allow_abbrev=False)
    made.add_argument("--version", action="version", version=f"imgkit {__version__}")
    group = made.add_argument_group("options of the launch (each also as IMGKIT_NPROC and the like)")

    def option(flag: str, kind: Callable[[str], object], default: object, metavar: str, text: str) -> None:
        given = env.get("IMGKIT_" + flag.strip("-").replace("-", "_").upper())
        # A string default goes through `type` and its errors like a value on the command line.
        group.add_argument(flag, type=kind, default=given or default, metavar=metavar, help=text)

    option("--device", _one_of(DEVICES), "auto", "|".join(DEVICES), "default: cuda where GPUs are visible")
    option("--nproc", _nproc, "auto", "N|auto", "processes on this node; auto: one a GPU")
    option(
        "--scheduler",
        _one_of(NAMES),
        None,
        "NAME",
        f"who started this: {', '.join(NAMES)}; default: found out",
    )
    option("--nnodes", _nnodes, None, "N|MIN:MAX", "nodes of the run; default: as the scheduler says")
    option("--node-rank", natural, None, "RANK", "which of them this is; the head is 0")
    option("--head", str, None, "HOST", "name or address of node 0, as the others reach it")
    option("--port", positive, None, "PORT", "where the nodes meet on the head; default: from the job id")
    option("--max-restarts", natural, 0, "N", "restarts of failed processes (default 0)")
    option("--log-dir", str, None, "DIR", "keep each process' output there, a folder a node")
    option("--rollcall-timeout", positive, 120, "S", "seconds to wait for all nodes (default 120)")
    option("--grace", positive, 60, "S", "seconds to save in after a stop signal (default 60)")
    group.add_argument(
        "--direct", action="store_true", default=None, help="this process is one rank; do not start torchrun"
    )
    group.add_argument("--plan", action="store_true", help="print what would be run as JSON, and stop")
    return made


def read(parsed: argparse.Namespace, command: tuple[str, ...]) -> Options:
    """The values of what `parser` parsed; `command` are the words typed, for errors that show them."""
    least, most = parsed.nnodes or (None, None)
    return Options(
        wanted=Wanted(
            scheduler=parsed.scheduler,
            nnodes=most,
            min_nnodes=least,
            node_rank=parsed.node_rank,
            head=parsed.head,
            port=parsed.port,
            direct=parsed.direct,
            command=command,
        ),
        request=Request(
            nproc=parsed.nproc,
            device=parsed.device,
            max_restarts=parsed.max_restarts,
            log_dir=parsed.log_dir,
            pass_local_rank=getattr(parsed, "pass_local_rank", False),
        ),
        show_plan=parsed.plan,
        rollcall_timeout_s=parsed.rollcall_timeout,
        grace_s=parsed.grace,
    )


def _one_of(allowed: tuple[str, ...]) -> Callable[[str], str]:
    # Not argparse's choices: they are not applied to defaults, and IMGKIT_DEVICE is one.
    def check(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(allowed)}")
        return text

    return check


def _nproc(text: str) -> str:
    if text != "auto":
        positive(text)
    return text


def _nnodes(text: str) -> tuple[int | None, int]:
    least, colon, most = text.partition(":")
    return (positive(least), positive(most)) if colon else (None, positive(text))
