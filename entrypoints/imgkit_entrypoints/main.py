"""The launcher behind every ``dist-*`` command: read the options, make the plan, become torchrun."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from imgkit_entrypoints import __version__, facts, plan
from imgkit_entrypoints.arguments import natural, positive
from imgkit_entrypoints.errors import ImgkitError, UsageError
from imgkit_entrypoints.registry import COMMANDS, Command

DEVICES = ("auto", "cuda", "cpu")


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``NAME ARGS``; never returns on success, since torchrun takes the process over."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _run(words, os.environ)
    except ImgkitError as error:
        print(f"{words[0] if words else 'imgkit_entrypoints'}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(words: list[str], env: Mapping[str, str]) -> None:
    command = next((known for known in COMMANDS if words and known.name == words[0]), None)
    if command is None:
        names = ", ".join(known.name for known in COMMANDS)
        raise UsageError(f"unknown command {words[0] if words else ''!r}", hint=f"one of: {names}")
    rest = words[1:]
    if command.name == "dist-env":
        _print_env(rest, env)
        return
    request, show_plan, worker = (
        _dist_run(command, rest, env) if command.app is None else _app(command, rest, env)
    )
    made = plan.make(request, worker, host=facts.gather(env=env), facts=facts.system_facts(), env=env)
    if show_plan:
        print(json.dumps(made.to_dict(), indent=2))
        return
    _become(made, env, keep_pythonpath=command.app is None)


def _app(
    command: Command, rest: list[str], env: Mapping[str, str]
) -> tuple[plan.Request, bool, tuple[str, ...]]:
    assert command.app is not None  # noqa: S101 - the caller branches on it
    app = importlib.import_module(f"{command.app}.options" if command.app.endswith("train") else command.app)
    both = _parser(command.name, command.summary, env)
    app.add_arguments(both.add_argument_group("options of the program"))
    both.parse_args(rest)  # one check of everything, and --help with both groups
    options, app_argv = _parser(command.name, command.summary, env).parse_known_args(rest)
    return _request(options), options.plan, (sys.executable, "-I", "-u", "-m", command.app, *app_argv)


def _dist_run(
    command: Command, rest: list[str], env: Mapping[str, str]
) -> tuple[plan.Request, bool, tuple[str, ...]]:
    parser = _parser(command.name, command.summary, env, usage="%(prog)s [OPTIONS] SCRIPT|-m MODULE [ARGS]")
    parser.add_argument(
        "-m", dest="module", action="store_true", help="the next word is a module, not a script"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="your script or module and its arguments")
    options = parser.parse_args(rest)
    if not options.program:
        raise UsageError("no script given", hint="dist-run [OPTIONS] SCRIPT|-m MODULE [ARGS]")
    flags = ("-u", "-m") if options.module else ("-u",)
    return _request(options), options.plan, (sys.executable, *flags, *options.program)


def _parser(
    name: str, summary: str, env: Mapping[str, str], usage: str | None = None
) -> argparse.ArgumentParser:
    """Options of the launch, spelled the same for every command; IMGKIT_* variables are their defaults."""
    parser = argparse.ArgumentParser(prog=name, description=summary, usage=usage, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"imgkit {__version__}")
    group = parser.add_argument_group("options of the launch (each also as IMGKIT_NPROC and the like)")

    def option(
        flag: str, *, kind: Callable[[str], object] = str, default: object = None, **more: object
    ) -> None:
        text = env.get("IMGKIT_" + flag.strip("-").replace("-", "_").upper())
        # A string default goes through `type` and its errors like a value on the command line.
        group.add_argument(flag, type=kind, default=default if text in (None, "") else text, **more)  # type: ignore[arg-type]

    option(
        "--device",
        kind=_device,
        default="auto",
        metavar="|".join(DEVICES),
        help="default: cuda where GPUs are visible",
    )
    option(
        "--nproc", kind=_nproc, default="auto", metavar="N|auto", help="workers on this node; auto: one a GPU"
    )
    option(
        "--nnodes",
        kind=positive,
        metavar="N",
        help="nodes of the run, this command being started once on each",
    )
    option("--node-rank", kind=natural, metavar="RANK", help="which of them this is; the head is 0")
    option("--head", metavar="HOST", help="name or address of node 0, as the others reach it")
    option(
        "--port",
        kind=positive,
        metavar="PORT",
        help=f"rendezvous port on the head (default {plan.DEFAULT_PORT})",
    )
    option(
        "--max-restarts", kind=natural, default=0, metavar="N", help="restarts of failed workers (default 0)"
    )
    group.add_argument("--plan", action="store_true", help="print what would be run as JSON, and stop")
    return parser


def _nproc(text: str) -> str:
    if text != "auto":
        positive(text)
    return text


def _device(text: str) -> str:
    # Not argparse's choices: they are not applied to defaults, and IMGKIT_DEVICE is one.
    if text not in DEVICES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(DEVICES)}")
    return text


def _request(options: argparse.Namespace) -> plan.Request:
    return plan.Request(
        **{item.name: getattr(options, item.name) for item in dataclasses.fields(plan.Request)}
    )


def _become(made: plan.LaunchPlan, env: Mapping[str, str], *, keep_pythonpath: bool) -> NoReturn:
    if not _has_torch():
        raise UsageError(
            "this image has no torch, so there is nothing to launch",
            where=sys.executable,
            hint="build the image on a base with torch, or add it to the recipe's image.pip",
        )
    child = {name: value for name, value in env.items() if name not in made.unset}
    if not keep_pythonpath:
        child.pop("PYTHONPATH", None)
    os.execvpe(made.argv[0], made.argv, {**child, **made.env})  # noqa: S606 - an argv list, no shell


def _has_torch() -> bool:
    from importlib.util import find_spec

    return find_spec("torch") is not None


def _print_env(rest: list[str], env: Mapping[str, str]) -> None:
    parser = argparse.ArgumentParser(
        prog="dist-env", description="Print what was found here.", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(rest)
    host, known = facts.gather(env=env), facts.system_facts()
    found = {
        "schema": plan.SCHEMA,
        "imgkit": __version__,
        "host": dataclasses.asdict(host),
        "system": None
        if known is None
        else dataclasses.asdict(dataclasses.replace(known, env=dict(known.env))),
    }
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for title, values in (
        ("host", found["host"]),
        ("system", found["system"] or {"": "no /opt/imgkit/system.json"}),
    ):
        print(title)
        for key, value in values.items():  # type: ignore[attr-defined]
            print(f"  {key:14} {value}")
