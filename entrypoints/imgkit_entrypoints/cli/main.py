"""Every ``dist-*`` program: find the command and run it; ``dist-env`` and ``dist-doctor`` run here."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_entrypoints import __version__, fabric, facts, json_text, terminal
from imgkit_entrypoints.cli import start
from imgkit_entrypoints.cli.commands import COMMANDS, Command
from imgkit_entrypoints.cli.start import Worker
from imgkit_entrypoints.doctor import saved_environment
from imgkit_entrypoints.errors import ImgkitError, NoPlan, UsageError
from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.launch import delta_check, plan
from imgkit_entrypoints.launch.plan import LaunchOptions
from imgkit_entrypoints.schedulers import resolve
from imgkit_entrypoints.schedulers.placement import Placement
from imgkit_entrypoints.system import SystemFacts, to_json


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``NAME ARGS`` and exit with its code."""
    argv = tuple(sys.argv[1:] if argv is None else argv)
    try:
        sys.exit(_run(argv, os.environ))
    except ImgkitError as error:
        if start.json_dry_run(argv, os.environ):
            parts = {"what": error.what, "where": error.where, "hint": error.hint}
            terminal.document(json.dumps({"schema": plan.SCHEMA, "error": parts}, indent=2) + "\n")
        terminal.err(*f"{argv[0] if argv else 'imgkit_entrypoints'}: {error}".split("\n"))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def program() -> None:
    """Run the command that this process was started as: pip's ``dist-*`` scripts of an installed package."""
    main((Path(sys.argv[0]).name, *sys.argv[1:]))


def _run(argv: tuple[str, ...], env: Mapping[str, str]) -> int:
    command = _command(argv[0] if argv else "")
    env = saved_environment.replayed(env)
    delta_check.require(env)
    if command.name in _HERE:
        return _HERE[command.name](argv[1:], env)
    if argv[1:] and argv[1] in command.verbs:
        return int(importlib.import_module(command.verbs[argv[1]]).main(argv[2:]))
    parse = start.parse_user_program if command.app is None else start.parse_app
    options, program = parse(command, argv, env)
    return start.launch(options, program, env, start.find_placement(options.placement, env))


def _command(name: str) -> Command:
    for known in COMMANDS:
        if known.name == name:
            return known
    names = ", ".join(known.name for known in COMMANDS)
    raise UsageError(f"unknown command {name!r}", hint=f"one of: {names}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Findings:
    host: HostFacts
    system: SystemFacts | None
    place: Placement | ImgkitError
    network: fabric.FabricPlan
    warnings: tuple[str, ...]
    """Warnings about the placement."""

    def placement_dict(self) -> dict[str, object]:
        if isinstance(self.place, ImgkitError):
            error = self.place
            return {"error": {"what": error.what, "where": error.where, "hint": error.hint}}
        return {**dataclasses.asdict(self.place), "source": dict(self.place.source)}


def _dist_env(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Print it as text, as JSON or as export lines; the exit code."""
    summary = "print the facts of this node and the settings of a launch, with reasons"
    parser = start.launch_parser("dist-env", summary, env, json_help="print one JSON object")
    parser.add_argument("--shell", action="store_true", help='print export lines: eval "$(dist-env --shell)"')
    chosen = parser.parse_args(argv)
    options = start.read_options(chosen, ("dist-env", *argv))
    if chosen.shell and (other := "--json" if options.json else "--dry-run" if options.dry_run else ""):
        raise UsageError(f"--shell cannot be combined with {other}", hint="dist-env --help")
    if options.dry_run:
        nothing = Worker(start=(), arguments=(), own=True)
        return start.launch(options, nothing, env, start.find_placement(options.placement, env))
    found = _look(options, env)
    if chosen.shell:
        start.link_host_libraries(found.network.links)
        for name, value in sorted(found.network.env.items()):
            terminal.document(f"export {name}={shlex.quote(value)}\n")
        for name in found.network.unset:
            if name in env:  # else a variable of the recipe, which nothing has set
                terminal.document(f"unset {name}\n")
    elif options.json:
        terminal.document(json.dumps(_json(found), indent=2) + "\n")
    else:
        terminal.out(*_lines(found))
    return 0


def _look(options: LaunchOptions, env: Mapping[str, str]) -> _Findings:
    host, system = facts.gather(env=env), facts.system_facts(env=env)
    place: Placement | ImgkitError
    warnings: tuple[str, ...] = ()
    nnodes, head = 1, ""
    try:
        place = start.find_placement(options.placement, env)
        warnings = resolve.warnings(place, options.placement, env, recipe=system.scheduler if system else "")
        nnodes, head = place.nnodes, place.head
    except ImgkitError as error:
        place = error
    network = fabric.choose(host, system, env, nnodes=nnodes, head=head)
    return _Findings(host=host, system=system, place=place, network=network, warnings=warnings)


def _json(found: _Findings) -> dict[str, object]:
    return {
        "schema": plan.SCHEMA,
        "imgkit": __version__,
        # Without the image's variables: the decisions name those that matter.
        "host": {
            name: value for name, value in dataclasses.asdict(found.host).items() if name != "image_env"
        },
        "system": None if found.system is None else json_text.parse(to_json(found.system)),
        "placement": found.placement_dict(),
        "fabric": {
            **dataclasses.asdict(dataclasses.replace(found.network, env=dict(found.network.env))),
            "warnings": list(map(str, found.network.warnings)),
            "blockers": list(map(str, found.network.blockers)),
        },
    }


def _lines(found: _Findings) -> list[str]:
    host, system, network = found.host, found.system, found.network
    title = system.title or system.scheduler if system else "no /opt/imgkit/system.json"
    return [
        f"host       {host.hostname}, {host.arch}, Python {host.python}",
        f"           {host.cpus} processors ({host.cpus_source}), {host.gpus} GPUs ({host.gpus_source})",
        f"system     {title}",
        *(
            f"placement  {name}: {value}"
            for name, value in found.placement_dict().items()
            if value not in (None, "", (), {})
        ),
        *((f"image      unknown: {network.image}",) if network.image else ()),
        f"fabric     {network.kind}: {network.reason}",
        *(f"  {'set ' if decision.used else 'note'} {decision}" for decision in network.decisions),
        *(f"  warn {text}" for text in (*found.warnings, *network.warnings, *network.blockers)),
    ]


_ALL_NODES = "imgkit_entrypoints.apps.doctor"


def _dist_doctor(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Check this node, or all nodes of the job with one collective between them; the exit code."""
    from imgkit_entrypoints.doctor import node  # no other command needs its checks

    summary = (
        "check the network, limits and libraries of this node, or of all nodes of a job, and print the fixes"
    )
    both = start.launch_parser("dist-doctor", summary, env, json_help="print one JSON object")
    node.add_arguments(both)
    both.add_argument(
        "--bundle",
        metavar="FILE",
        help="save the files that the checks read, without secrets, to replay the checks on another machine",
    )
    both.parse_args(argv)
    parsed, rest = start.launch_parser("dist-doctor", summary, env).parse_known_args(argv)
    options = start.read_options(parsed, ("dist-doctor", *argv))
    if options.dry_run:
        place = start.find_placement(options.placement, env)
        return start.launch(options, start.module_worker(_ALL_NODES, rest), env, place)
    rest = [*rest, *(["--json"] if options.json else [])]
    if not any(word.startswith("--bundle") for word in rest) and not saved_environment.is_replay(env):
        try:
            place = start.find_placement(options.placement, env)
        except NoPlan as error:
            start.say(*f"this node only: {error}".split("\n"))
        else:
            if place.nnodes > 1 or options.request.nproc != "auto":
                request = dataclasses.replace(options.request, prefix=False)
                options = dataclasses.replace(options, request=request)
                return start.launch(options, start.module_worker(_ALL_NODES, rest), env, place)
    return node.main(rest, {**env, "IMGKIT_DEVICE": options.request.device})


_HERE: Mapping[str, Callable[[Sequence[str], Mapping[str, str]], int]] = {
    "dist-env": _dist_env,
    "dist-doctor": _dist_doctor,
}
"""Commands that run in this process, and launch workers only if they need them."""
