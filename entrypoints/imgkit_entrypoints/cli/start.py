"""One launch on this node: make the plan, then print or run it."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from imgkit_entrypoints import fabric, facts, schedulers
from imgkit_entrypoints.cli.worker import Worker
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.fabric import sockets
from imgkit_entrypoints.facts.software import absent_files
from imgkit_entrypoints.launch import plan
from imgkit_entrypoints.launch.request import LaunchOptions
from imgkit_entrypoints.schedulers.placement import Placement, Wanted


def place(wanted: Wanted, env: Mapping[str, str]) -> Placement:
    """Find this node's place in the job.

    Raises
    ------
    NoPlan : there is none, or two launchers contradict each other.
    """
    return schedulers.place(wanted, env, facts.Reader(root=facts.root_of(env)).text)


def launch(asked: LaunchOptions, worker: Worker, env: Mapping[str, str], where: Placement) -> int:
    """Launch `worker` on the node `where`, or with ``--plan`` print how; the exit code.

    Raises
    ------
    NoPlan : no launch can be right. UsageError : this Python has no torch, or a file keeps the run from
    starting. ToolFailed : see `supervisor.run`.
    """
    host, system = facts.gather(env=env), facts.system_facts(env=env)
    made = plan.make(asked.request, worker.argv, place=where, host=host, system=system, env=env)
    odd = schedulers.warnings(where, asked.wanted, env, recipe=system.scheduler if system else "")
    child = {name: value for name, value in env.items() if name not in made.unset} | dict(made.env)
    files = absent_files(facts.Reader(root=facts.root_of(env)), child)
    absent = (str(fabric.Finding(what=what, fix=fix)) for what, fix in files)
    warnings = (*odd, *made.warnings, *absent, *(() if worker.own else _shadows(env)))
    if asked.show_plan:
        print(json.dumps(dataclasses.replace(made, warnings=warnings).to_dict(), indent=2))
        return 0
    from imgkit_entrypoints.launch import supervisor  # --plan prints sooner without them
    from imgkit_entrypoints.launch.run_folder import RunFolder
    from imgkit_entrypoints.rollcall import gather

    _require_torch()
    if worker.own:
        child.pop("PYTHONPATH", None)  # a json.py in it would end every worker
    if made.mode == "direct":
        if folder := RunFolder.of(env):  # else the supervisor asks
            folder.refuse_stopped()
        os.execvpe(made.argv[0], made.argv, child)  # noqa: S606 - an argv list, no shell
    if where.node_rank == 0:
        for text in (*(line(decision) for decision in made.decisions if decision.used), *warnings):
            say(text)
    carrier = sockets.selected(host, child) if asked.network_test else None
    me = gather.Caller(
        host=host.hostname,
        identity=gather.identity(torch=host.torch_version, nccl=host.nccl_version),
        nproc=made.nproc,
        gpu=host.gpu_devices[0].model if host.gpu_devices else "",
        address=carrier.addresses[0] if carrier else "",
        interface=carrier.name if carrier else "",
    )
    return supervisor.run(made.argv, child, place=where, me=me, say=say, timeouts=asked.timeouts)


def line(decision: fabric.Decision) -> str:
    """Return one decision as users read it."""
    return f"{decision.variable}={decision.value}: {decision.reason}"


def say(text: str) -> None:
    """Tell the user; results alone go to stdout."""
    print(f"imgkit: {text}", file=sys.stderr, flush=True)


def _shadows(env: Mapping[str, str]) -> tuple[str, ...]:
    """Folders of PYTHONPATH, kept for the user program, that hide the image's torch or numpy."""
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
            "this Python has no torch, so nothing can be launched",
            where=sys.executable,
            hint="in an image: build it on a base with torch, or add torch to the recipe's image.pip; "
            "elsewhere: pip install torch",
        )
