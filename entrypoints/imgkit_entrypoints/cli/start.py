"""One launch on this node: make the plan, then print or run it."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from imgkit_entrypoints import fabric, facts, schedulers, terminal
from imgkit_entrypoints.cli.worker import Worker
from imgkit_entrypoints.doctor import saved_environment
from imgkit_entrypoints.errors import NoPlan, UsageError
from imgkit_entrypoints.fabric import sockets
from imgkit_entrypoints.facts import mounts
from imgkit_entrypoints.facts.software import absent_files
from imgkit_entrypoints.launch import plan
from imgkit_entrypoints.launch.plan import LaunchOptions
from imgkit_entrypoints.rollcall import ports, secret
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
    NoPlan : no launch can be right. UsageError : this Python has no torch, a file keeps the run from
    starting, or the file of the secret is not safe. ToolFailed : see `supervisor.run`.
    """
    host, system = facts.gather(env=env), facts.system_facts(env=env)
    made = plan.make(
        asked.request, worker.argv, place=where, host=host, system=system, env=env, own=worker.own
    )
    odd = schedulers.warnings(where, asked.wanted, env, recipe=system.scheduler if system else "")
    child = {name: value for name, value in env.items() if name not in made.unset} | dict(made.env)
    files = absent_files(facts.Reader(root=facts.root_of(env)), child)
    absent = (str(fabric.Finding(what=what, fix=fix)) for what, fix in files)
    warnings = (*odd, *made.warnings, *absent, *(() if worker.own else _shadows(env)))
    if asked.show_plan:
        meets = where.nnodes > 1 and made.mode == "torchrun"
        source = secret.source(asked.secret_file, env, shared_home=_shared_home(env)) if meets else ""
        found = dataclasses.replace(made, warnings=warnings, secret=source)
        terminal.document(json.dumps(found.to_dict(), indent=2) + "\n")
        return 0
    if saved_environment.is_replay(env):
        # Variables of a stranger, such as LD_LIBRARY_PATH, must not reach a program.
        raise UsageError(
            "a replay starts nothing",
            where=f"IMGKIT_ROOT={env['IMGKIT_ROOT']}",
            hint="add --plan; to start a run here: unset IMGKIT_ROOT",
        )
    from imgkit_entrypoints.launch import supervisor  # --plan prints sooner without them
    from imgkit_entrypoints.launch.stop_protocol import RunFolder
    from imgkit_entrypoints.rollcall import differences
    from imgkit_entrypoints.rollcall.messages import Caller

    if made.mode == "direct" and asked.preflight:
        raise NoPlan(
            "the ranks start without a roll call, so the nodes cannot be measured before",
            where="--preflight",
            hint="leave out --direct, or start one process per node",
        )
    _require_torch()
    proof = _secret(asked, env, where)
    child.pop(secret.VARIABLE, None)
    if worker.own:
        child.pop("PYTHONPATH", None)  # a json.py in it would end every worker
    if made.mode == "direct":
        if folder := RunFolder.of(env, say):  # else the supervisor asks
            folder.refuse_stopped()
        os.execvpe(made.argv[0], made.argv, child)  # noqa: S606 - an argv list, no shell
    if where.node_rank == 0:
        for text in (*(line(decision) for decision in made.decisions if decision.used), *warnings):
            say(text)
    carrier = sockets.selected(host, child) if asked.network_test else None
    me = Caller(
        host=host.hostname,
        identity=differences.identity(torch=host.torch_version, nccl=host.nccl_version),
        nproc=made.nproc,
        gpu=host.gpu_devices[0].model if host.gpu_devices else "",
        address=carrier.addresses[0] if carrier else "",
        interface=carrier.name if carrier else "",
    )
    return supervisor.run(
        made.argv,
        child,
        place=where,
        me=me,
        secret=proof,
        say=say,
        timeouts=asked.timeouts,
        max_failures=made.max_failures,
        goodput=worker.goodput,
        preflight=asked.preflight,
    )


def _secret(asked: LaunchOptions, env: Mapping[str, str], where: Placement) -> bytes | None:
    """The secret that the nodes of this start prove to each other; None: one node, or an open start.

    Raises
    ------
    NoPlan : the start is open, but must not be. UsageError : see `secret.find`.
    """
    if where.nnodes == 1:
        return None
    if where.direct is not None:
        if asked.require_secret:
            raise NoPlan(
                "there is no roll call that could prove a secret, since the ranks start without torchrun",
                where="--require-secret",
                hint="leave out --direct",
            )
        return None
    if found := secret.find(asked.secret_file, env, shared_home=_shared_home(env)):
        return found.value
    make = secret.MAKE.format(file="FILE")
    if asked.require_secret:
        raise NoPlan(
            "this start has no secret, so strangers could join it",
            where="--require-secret",
            hint=f"make one file for all nodes, {make}, and give --secret-file FILE",
        )
    if where.node_rank == 0:
        port = ports.roll_call(where.job_id, where.port)
        _say_once(
            f"this start is open: any program that reaches port {port} of {where.head} can join it. To close "
            f"it, make one file for all nodes, {make}, and give --secret-file FILE"
        )
    return None


def _shared_home(env: Mapping[str, str]) -> bool:
    own = secret.home_file(env)
    return own is not None and mounts.shared(facts.Reader(root=facts.root_of(env)), str(own))


def line(decision: fabric.Decision) -> str:
    """Return one decision as users read it."""
    return f"{decision.variable}={decision.value}: {decision.reason}"


def say(text: str, *more: str) -> None:
    """Tell the user, in one line or several; results alone go to stdout."""
    terminal.err(f"imgkit: {text}", *more)


@functools.cache
def _say_once(text: str) -> None:
    """Tell the user what holds for all launches of a series."""
    say(text)


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
