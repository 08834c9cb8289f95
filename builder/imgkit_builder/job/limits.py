"""Numbers of a request, checked against the recipe's limits; an error names the recipe's line."""

from __future__ import annotations

from imgkit_builder.job import fields
from imgkit_builder.job.request import Request
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.schedulers.placement import Size

STOP_BEFORE_S = 120
"""The launcher's grace period, and as much again: Slurm's signal can come up to a minute early."""
SHORT_S = 600
"""Shorter jobs are not asked to save before their end unless ``--stop-before`` is given."""


def nodes(text: str) -> Size:
    """Nodes that ``N``, ``MIN:MAX`` or ``N+SPARES`` asks for."""
    try:
        return Size.parse(text)
    except ValueError as error:
        raise UsageError(
            str(error), where="--nodes", hint="a number, MIN:MAX, or N+SPARES such as 16+1"
        ) from None


def failures(request: Request) -> int | None:
    """Failures that the run survives; None leaves the number to the launcher."""
    if request.max_failures is not None and request.max_failures < 0:
        raise UsageError(
            f"{request.max_failures} failures",
            where="--max-failures",
            hint="a number; 0: the first ends the run",
        )
    return request.max_failures


def gpus(recipe: Target, request: Request) -> int:
    """GPUs per node."""
    limit = recipe.system.node.gpus
    if request.gpus is None:
        return limit
    if request.gpus < 0:
        raise UsageError(f"{request.gpus} GPUs", where="--gpus", hint="a number from 0")
    stated = limit or ("system", "node", "gpus") in recipe.positions  # an image has no positions
    if stated and request.gpus > limit:
        raise UsageError(
            f"--gpus {request.gpus}, but a node has {limit}",
            where=recipe.where("system", "node", "gpus"),
            hint=f"--gpus {limit} with more --nodes"
            if limit
            else "this system has no GPUs: leave --gpus out",
        )
    return request.gpus


def cpus(recipe: Target, request: Request, gpus: int) -> int | None:
    """CPUs per node; None leaves the number to the system."""
    node = recipe.system.node
    share = node.cpus_per_gpu
    if request.cpus is None:
        return gpus * share if gpus and share else request.nproc or node.cpus
    if request.cpus < 1:
        raise UsageError(f"{request.cpus} CPUs", where="--cpus", hint="a number from 1")
    if gpus and share and request.cpus != gpus * share:
        raise UsageError(
            f"--cpus {request.cpus}, but {gpus} GPUs come with {gpus * share} CPUs ({share} each)",
            where=recipe.where("system", "node", "cpus_per_gpu"),
            hint=f"leave --cpus out, or --cpus {gpus * share}",
        )
    if node.cpus is not None and request.cpus > node.cpus:
        raise UsageError(
            f"--cpus {request.cpus}, but a node has {node.cpus}",
            where=recipe.where("system", "node", "cpus"),
            hint=f"--cpus {node.cpus} with more --nodes",
        )
    return request.cpus


def time(recipe: Target, request: Request) -> str:
    """The time limit as ``HH:MM:SS``; empty if neither the request nor the recipe has one."""
    queue = recipe.system.queue
    text = request.time or queue.time
    if not text:
        return ""
    wanted = fields.seconds(text, where="--time" if request.time else recipe.where("system", "queue", "time"))
    for name in (request.qos or queue.qos, request.queue or queue.name):
        limit = queue.limits.get(name, "")
        if limit and wanted > fields.seconds(limit, where=recipe.where("system", "queue", "limits", name)):
            raise UsageError(
                f"--time {fields.clock(wanted)}, but {name} ends jobs after {limit}",
                where=recipe.where("system", "queue", "limits", name),
                hint=f"--time {limit}, or another queue; dist-train resumes where a job left off",
            )
    return fields.clock(wanted)


def stop_before(request: Request, time: str) -> int:
    """Seconds before the time limit at which the program is asked to save; 0: never."""
    limit = fields.seconds(time, where="--time") if time else None
    if request.stop_before_s is None:
        return 0 if limit is not None and limit < SHORT_S else STOP_BEFORE_S
    if request.stop_before_s < 0 or (limit is not None and request.stop_before_s >= limit):
        raise UsageError(
            f"{request.stop_before_s} s before the end of a job of {time or 'unlimited time'}",
            where="--stop-before",
            hint="less than --time; 0: never",
        )
    return request.stop_before_s
