"""``dist-env``: print what this node shows and what it means for a launch."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints import __version__, fabric, facts, json_text, schedulers, terminal
from imgkit_entrypoints.cli import options, start
from imgkit_entrypoints.cli.worker import Worker
from imgkit_entrypoints.errors import ImgkitError
from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.launch import plan
from imgkit_entrypoints.launch.plan import LaunchOptions
from imgkit_entrypoints.schedulers.placement import Placement
from imgkit_entrypoints.system import SystemFacts, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class _Findings:
    host: HostFacts
    system: SystemFacts | None
    place: Placement | ImgkitError
    network: fabric.FabricPlan
    odd: tuple[str, ...]
    """Warnings about the place."""

    def place_dict(self) -> dict[str, object]:
        if isinstance(self.place, ImgkitError):
            error = self.place
            return {"error": {"what": error.what, "where": error.where, "hint": error.hint}}
        return {**dataclasses.asdict(self.place), "source": dict(self.place.source)}


def main(words: Sequence[str], env: Mapping[str, str]) -> int:
    """Print it as text, as JSON or as export lines; the exit code."""
    parser = options.parser("dist-env", "print what this node shows and what it means for a launch", env)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print one JSON object")
    shape.add_argument("--shell", action="store_true", help='print export lines: eval "$(dist-env --shell)"')
    chosen = parser.parse_args(words)
    asked = options.read(chosen, ("dist-env", *words))
    if asked.show_plan:
        nothing = Worker(start=(), words=(), own=True)
        return start.launch(asked, nothing, env, start.place(asked.wanted, env))
    found = _look(asked, env)
    if chosen.shell:
        for name, value in sorted(found.network.env.items()):
            terminal.document(f"export {name}={shlex.quote(value)}\n")
    elif chosen.json:
        terminal.document(json.dumps(_json(found), indent=2) + "\n")
    else:
        terminal.out(*_lines(found))
    return 0


def _look(asked: LaunchOptions, env: Mapping[str, str]) -> _Findings:
    host, system = facts.gather(env=env), facts.system_facts(env=env)
    place: Placement | ImgkitError
    odd: tuple[str, ...] = ()
    nnodes, head = 1, ""
    try:
        place = start.place(asked.wanted, env)
        odd = schedulers.warnings(place, asked.wanted, env, recipe=system.scheduler if system else "")
        nnodes, head = place.nnodes, place.head
    except ImgkitError as error:
        place = error
    network = fabric.choose(host, system, env, nnodes=nnodes, head=head)
    return _Findings(host=host, system=system, place=place, network=network, odd=odd)


def _json(found: _Findings) -> dict[str, object]:
    return {
        "schema": plan.SCHEMA,
        "imgkit": __version__,
        "host": dataclasses.asdict(found.host),
        "system": None if found.system is None else json_text.parse(to_json(found.system)),
        "placement": found.place_dict(),
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
            for name, value in found.place_dict().items()
            if value not in (None, "", (), {})
        ),
        f"fabric     {network.kind}: {network.reason}",
        *(
            f"  {'set ' if decision.used else 'note'} {start.line(decision)}"
            for decision in network.decisions
        ),
        *(f"  warn {text}" for text in (*found.odd, *network.warnings, *network.blockers)),
    ]
