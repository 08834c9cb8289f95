"""Behind every ``dist-*`` command: read the options, find the place, make the plan, run it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from imgkit_entrypoints import __version__, fabric, facts, schedulers
from imgkit_entrypoints.cli import options
from imgkit_entrypoints.cli.commands import COMMANDS, Command
from imgkit_entrypoints.errors import ImgkitError, NoPlan, UsageError
from imgkit_entrypoints.launch import delta_check, plan, supervisor, user_program
from imgkit_entrypoints.rollcall import gather
from imgkit_entrypoints.schedulers.placement import Placement, Wanted
from imgkit_entrypoints.system import to_json


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``NAME ARGS`` and exit with its code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        sys.exit(_run(words, os.environ))
    except ImgkitError as error:
        if options.plan_wanted(words, os.environ):
            told = {"what": error.what, "where": error.where, "hint": error.hint}
            print(json.dumps({"schema": plan.SCHEMA, "error": told}, indent=2))
        print(f"{words[0] if words else 'imgkit_entrypoints'}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(words: list[str], env: Mapping[str, str]) -> int:
    command = next((known for known in COMMANDS if words and known.name == words[0]), None)
    if command is None:
        names = ", ".join(known.name for known in COMMANDS)
        raise UsageError(f"unknown command {words[0] if words else ''!r}", hint=f"one of: {names}")
    delta_check.require(env)
    if command.name in _WITHOUT_LAUNCH:
        return _WITHOUT_LAUNCH[command.name](words[1:], env)
    if words[1:] and words[1] in command.verbs:
        return int(importlib.import_module(command.verbs[words[1]]).main(words[2:]))
    asked, worker = _user_program(command, words, env) if command.app is None else _app(command, words, env)
    place, own = _place(asked.wanted, env), command.app is not None
    if command.series is None:
        return _launch(asked, worker, env, place, own=own)

    def start(given: Sequence[str], variables: Mapping[str, str]) -> int:
        again = (*worker[:_BEFORE_OWN_WORDS], *given)
        return _launch(asked, again, {**env, **variables}, place, own=own)

    series = importlib.import_module(command.series).series
    return int(series(worker[_BEFORE_OWN_WORDS:], words, asked, place, env, start, _say))


_BEFORE_OWN_WORDS = 5
"""Of an app's worker: how it is started."""


def _app(
    command: Command, words: list[str], env: Mapping[str, str]
) -> tuple[options.Options, tuple[str, ...]]:
    assert command.app is not None  # noqa: S101 - the caller branches on it
    app = importlib.import_module(command.options or command.app)
    both = options.parser(command.name, command.summary, env, device=command.device)
    app.add_arguments(both)
    both.formatter_class, both.epilog = argparse.RawDescriptionHelpFormatter, getattr(app, "EXAMPLES", None)
    both.parse_args(words[1:])  # one check of everything, and --help with all groups
    parsed, rest = options.parser(command.name, command.summary, env, device=command.device).parse_known_args(
        words[1:]
    )
    return options.read(parsed, tuple(words)), (sys.executable, "-I", "-u", "-m", command.app, *rest)


def _user_program(
    command: Command, words: list[str], env: Mapping[str, str]
) -> tuple[options.Options, tuple[str, ...]]:
    usage = "%(prog)s [OPTIONS] SCRIPT|-m MODULE [ARGS]"
    parser = options.parser(command.name, command.summary, env, usage)
    parser.add_argument(
        "-m", dest="module", action="store_true", help="the next word is a module, not a script"
    )
    parser.add_argument(
        "--pass-local-rank",
        action="store_true",
        help="give the program --local_rank=N, as torch.distributed.launch did",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="your script or module and its arguments")
    parsed = parser.parse_args(words[1:])
    if not parsed.program:
        raise UsageError("no script given", hint="dist-run [OPTIONS] SCRIPT|-m MODULE [ARGS]")
    flags = (("--pass-local-rank", parsed.pass_local_rank), ("-m", parsed.module))
    first = (sys.executable, "-u", user_program.__file__)
    given = tuple(flag for flag, wanted in flags if wanted)
    return options.read(parsed, tuple(words)), (*first, *given, *parsed.program)


def _place(wanted: Wanted, env: Mapping[str, str]) -> Placement:
    return schedulers.place(wanted, env, facts.Reader(root=facts.root_of(env)).text)


def _launch(
    asked: options.Options, worker: tuple[str, ...], env: Mapping[str, str], place: Placement, *, own: bool
) -> int:
    host, system = facts.gather(env=env), facts.system_facts(env=env)
    made = plan.make(asked.request, worker, place=place, host=host, system=system, env=env)
    odd = schedulers.warnings(place, asked.wanted, env, recipe=system.scheduler if system else "")
    warnings = (*odd, *made.warnings, *(() if own else _shadows(env)))
    if asked.show_plan:
        print(json.dumps(dataclasses.replace(made, warnings=warnings).to_dict(), indent=2))
        return 0
    _require_torch()
    child = {name: value for name, value in env.items() if name not in made.unset} | dict(made.env)
    if own:
        child.pop("PYTHONPATH", None)  # a json.py in it would end every worker
    if made.mode == "direct":
        os.execvpe(made.argv[0], made.argv, child)  # noqa: S606 - an argv list, no shell
    if place.node_rank == 0:
        for text in (*(_told(decision) for decision in made.decisions if decision.used), *warnings):
            _say(text)
    me = gather.Caller(
        host=host.hostname,
        identity=gather.identity(torch=host.torch_version, nccl=host.nccl_version),
        nproc=made.nproc,
        gpu=host.gpu_devices[0].model if host.gpu_devices else "",
    )
    return supervisor.run(
        made.argv,
        child,
        place=place,
        me=me,
        say=_say,
        grace_s=asked.grace_s,
        rollcall_timeout_s=asked.rollcall_timeout_s,
        hang_after_s=asked.hang_after_s,
        stop_dir=Path(env["IMGKIT_STOP_DIR"]) if env.get("IMGKIT_STOP_DIR") else None,
        # An elastic run counts its nodes by itself.
        meet=place.min_nnodes is None,
    )


def _told(decision: fabric.Decision) -> str:
    return f"{decision.variable}={decision.value}: {decision.reason}"


def _say(text: str) -> None:
    print(f"imgkit: {text}", file=sys.stderr, flush=True)


def _shadows(env: Mapping[str, str]) -> tuple[str, ...]:
    """Folders of PYTHONPATH, kept for the user's program, that hide the image's torch or numpy."""
    found = []
    for folder in filter(None, env.get("PYTHONPATH", "").split(":")):
        for name in ("torch", "numpy"):
            if Path(folder, name).is_dir() or Path(folder, f"{name}.py").is_file():
                found.append(f"PYTHONPATH: {folder} holds another {name}, which hides the image's")
    return tuple(found)


def _require_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise UsageError(
            "this image has no torch, so there is nothing to launch",
            where=sys.executable,
            hint="build the image on a base with torch, or add it to the recipe's image.pip",
        )


def _print_env(words: Sequence[str], env: Mapping[str, str]) -> int:
    parser = options.parser("dist-env", "print what was found here and what it means for a launch", env)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one JSON object")
    shape.add_argument("--shell", action="store_true", help='export lines: eval "$(dist-env --shell)"')
    chosen = parser.parse_args(words)
    asked = options.read(chosen, ("dist-env", *words))
    if asked.show_plan:
        return _launch(asked, (), env, _place(asked.wanted, env), own=True)
    host, system = facts.gather(env=env), facts.system_facts(env=env)
    place: dict[str, object] = {}
    nnodes, head = 1, ""
    odd: tuple[str, ...] = ()
    try:
        found = _place(asked.wanted, env)
        odd = schedulers.warnings(found, asked.wanted, env, recipe=system.scheduler if system else "")
        place = {**dataclasses.asdict(found), "source": dict(found.source)}
        nnodes, head = found.nnodes, found.head
    except ImgkitError as error:
        place = {"error": {"what": error.what, "where": error.where, "hint": error.hint}}
    network = fabric.choose(host, system, env, nnodes=nnodes, head=head)
    if chosen.shell:
        for name, value in sorted(network.env.items()):
            print(f"export {name}={shlex.quote(value)}")
        return 0
    found_all = {
        "schema": plan.SCHEMA,
        "imgkit": __version__,
        "host": dataclasses.asdict(host),
        "system": None if system is None else json.loads(to_json(system)),
        "placement": place,
        "fabric": dataclasses.asdict(dataclasses.replace(network, env=dict(network.env))),
    }
    if chosen.json:
        print(json.dumps(found_all, indent=2))
        return 0
    print(f"host       {host.hostname}, {host.arch}, Python {host.python}")
    print(f"           {host.cpus} processors ({host.cpus_source}), {host.gpus} GPUs ({host.gpus_source})")
    print(f"system     {system.title or system.scheduler if system else 'no /opt/imgkit/system.json'}")
    for field, said in place.items():
        if said not in (None, "", (), {}):
            print(f"placement  {field}: {said}")
    print(f"fabric     {network.kind}: {network.reason}")
    for decision in network.decisions:
        print(f"  {'set ' if decision.used else 'note'} {_told(decision)}")
    for text in (*odd, *network.warnings, *network.blockers):
        print(f"  warn {text}")
    return 0


def _doctor(words: Sequence[str], env: Mapping[str, str]) -> int:
    """This node alone, or all nodes of the job, each checking itself and one collective between them."""
    from imgkit_entrypoints.doctor import node

    summary = "check this node, and under a launcher all nodes, for distributed runs"
    both = options.parser("dist-doctor", summary, env)
    node.add_arguments(both)
    both.add_argument("--bundle", metavar="FILE", help="save what was read here, to replay it elsewhere")
    both.parse_args(words)
    parsed, rest = options.parser("dist-doctor", summary, env).parse_known_args(words)
    asked = options.read(parsed, ("dist-doctor", *words))
    if not any(word.startswith("--bundle") for word in rest):
        try:
            place = _place(asked.wanted, env)
        except NoPlan as error:
            _say(f"this node only: {error}")
        else:
            if place.nnodes > 1 or asked.request.nproc != "auto":
                request = dataclasses.replace(asked.request, prefix=False)
                worker = (sys.executable, "-I", "-u", "-m", "imgkit_entrypoints.apps.doctor", *rest)
                return _launch(dataclasses.replace(asked, request=request), worker, env, place, own=True)
    return node.main(rest, {**env, "IMGKIT_DEVICE": asked.request.device})


_WITHOUT_LAUNCH: Mapping[str, Callable[[Sequence[str], Mapping[str, str]], int]] = {
    "dist-env": _print_env,
    "dist-doctor": _doctor,
}
