"""Hold a request against a recipe's system: all values found, every known limit kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from imgkit_builder.delta import descriptor
from imgkit_builder.job import fields
from imgkit_builder.job.request import Job, Request, RunBy
from imgkit_builder.job.systems import pods
from imgkit_builder.recipe.model import Recipe
from imgkit_builder.recipe.problems import choices
from imgkit_builder.sif import image as sif
from imgkit_entrypoints.cli.commands import COMMANDS
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import delta_check

FLAGS: Mapping[str, frozenset[str]] = {
    "slurm": frozenset({"account", "queue", "qos", "time", "cpus", "stop-before"}),
    "pbs": frozenset({"account", "queue", "time", "cpus", "pbs-start"}),
    "runai": frozenset({"queue", "cpus", "pvc", "format"}),
    "mpi": frozenset({"hosts", "direct", "ssh"}),
    "standalone": frozenset(),
}
"""Flags that mean something on a system, beside those of every job."""

RUN_BY: Mapping[str, tuple[RunBy, ...]] = {
    "slurm": ("singularity", "host"),
    "pbs": ("singularity", "docker", "host"),
    "runai": ("kubernetes",),
    "mpi": ("docker", "singularity", "host"),
    "standalone": ("docker", "singularity", "host"),
}
STOP_BEFORE_S = 120
"""Grace of the launcher, and as much again: Slurm's signal may come up to a minute early."""
SHORT_S = 600
"""Jobs shorter than this are not asked to save before their end, unless told to."""


def resolve(recipe: Recipe, request: Request) -> Job:
    """The job that `request` comes to on the system of `recipe`.

    Raises
    ------
    UsageError : a value that the system cannot do; where it is the recipe that says so, with its line.
    """
    system = recipe.system
    warnings = _unused(recipe, request)
    hosts = request.hosts if system.scheduler == "mpi" else ()
    least, most = _nodes(request.nodes or str(len(hosts) or 1))
    gpus = _gpus(recipe, request)
    cpus = _cpus(recipe, request, gpus)
    time = _time(recipe, request)
    values = {
        "account": fields.check("--account", request.account or system.queue.account),
        "name": fields.check("--queue", request.queue or system.queue.name),
        "qos": fields.check("--qos", request.qos or system.queue.qos),
        "time": time,
    }
    if not request.interactive or system.scheduler != "runai":
        _required(recipe, values)
    command = _command(request)
    warnings += _doubts(recipe, request, command, gpus=gpus, nodes=most)
    if warnings and request.strict:
        raise UsageError("; ".join(warnings), where="--strict")
    run_by = _run_by(recipe, request)
    directory = request.directory.absolute()
    fields.check("--directory", str(directory))
    image = _image(recipe, request, run_by, directory)
    return Job(
        recipe=recipe,
        request=request,
        command=command,
        name=fields.check("--name", request.name or recipe.name),
        min_nodes=least,
        nodes=most,
        gpus=gpus,
        cpus=cpus,
        time=values["time"],
        account=values["account"],
        queue=values["name"],
        qos=values["qos"],
        image=image,
        overlay=_overlay(request, run_by, directory),
        run_by=run_by,
        binds=_binds(recipe, request, run_by),
        env={**_delta(request, run_by, Path(image)), **dict(_variable(text) for text in request.env)},
        settings=_settings(recipe, request, gpus=gpus, least=least, most=most),
        directory=directory,
        stop_before_s=_stop_before(recipe, request, time),
        warnings=tuple(warnings),
    )


def _unused(recipe: Recipe, request: Request) -> list[str]:
    """A warning for each flag that the system does not have."""
    default = Request()
    given = {
        "account": request.account,
        "queue": request.queue,
        "qos": request.qos,
        "time": request.time,
        "cpus": request.cpus,
        "stop-before": request.stop_before_s,
        "pbs-start": request.pbs_start != default.pbs_start,
        "pvc": request.pvcs,
        "format": request.format != default.format,
        "hosts": request.hosts,
        "direct": request.direct,
        "ssh": request.ssh,
    }
    known = FLAGS[recipe.system.scheduler]
    unused = [name for name, value in given.items() if value and name not in known]
    title = recipe.system.title or recipe.name
    return [f"--{name} is not used: {title} ({recipe.system.scheduler}) has no such thing" for name in unused]


def _nodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(?:(\d{1,5}):)?(\d{1,5})", text)
    least, most = (int(match[1] or match[2]), int(match[2])) if match else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(f"{text!r} nodes", where="--nodes", hint="N, or MIN:MAX with MIN from 1")
    return least, most


def _gpus(recipe: Recipe, request: Request) -> int:
    limit = recipe.system.node.gpus
    if request.gpus is None:
        return limit
    if request.gpus < 0:
        raise UsageError(f"{request.gpus} GPUs", where="--gpus", hint="a number from 0")
    stated = ("system", "node", "gpus") in recipe.positions
    if stated and request.gpus > limit:
        raise UsageError(
            f"--gpus {request.gpus}, and a node has {limit}",
            where=recipe.where("system", "node", "gpus"),
            hint=f"--gpus {limit} with more --nodes"
            if limit
            else "this system has no GPUs; leave --gpus out",
        )
    return request.gpus


def _cpus(recipe: Recipe, request: Request, gpus: int) -> int | None:
    node = recipe.system.node
    share = node.cpus_per_gpu
    if request.cpus is None:
        return gpus * share if gpus and share else request.nproc or node.cpus
    if request.cpus < 1:
        raise UsageError(f"{request.cpus} CPUs", where="--cpus", hint="a number from 1")
    if gpus and share and request.cpus != gpus * share:
        raise UsageError(
            f"--cpus {request.cpus}, and {gpus} GPUs come with {gpus * share} CPUs ({share} each)",
            where=recipe.where("system", "node", "cpus_per_gpu"),
            hint=f"leave --cpus out, or --cpus {gpus * share}",
        )
    if node.cpus is not None and request.cpus > node.cpus:
        raise UsageError(
            f"--cpus {request.cpus}, and a node has {node.cpus}",
            where=recipe.where("system", "node", "cpus"),
            hint=f"--cpus {node.cpus} with more --nodes",
        )
    return request.cpus


def _time(recipe: Recipe, request: Request) -> str:
    queue = recipe.system.queue
    text = request.time or queue.time
    if not text:
        return ""
    wanted = fields.seconds(text, where="--time" if request.time else recipe.where("system", "queue", "time"))
    for name in (request.qos or queue.qos, request.queue or queue.name):
        limit = queue.limits.get(name, "")
        if limit and wanted > fields.seconds(limit, where=recipe.where("system", "queue", "limits", name)):
            raise UsageError(
                f"--time {fields.clock(wanted)}, and {name} ends jobs after {limit}",
                where=recipe.where("system", "queue", "limits", name),
                hint=f"--time {limit}, or another queue; dist-train resumes where a job left off",
            )
    return fields.clock(wanted)


def _required(recipe: Recipe, values: Mapping[str, str]) -> None:
    flags = {"name": "--queue"}
    missing = [flags.get(name, f"--{name}") for name in recipe.system.queue.required if not values.get(name)]
    if missing:
        raise UsageError(
            f"{recipe.system.title or recipe.name} needs {', '.join(missing)}",
            where=recipe.where("system", "queue", "required"),
            hint=f"give {' '.join(f'{flag} ...' for flag in missing)}, or state it in a recipe that "
            f"extends {recipe.name} (system.queue)",
        )


def _command(request: Request) -> tuple[str, ...]:
    names = [command.name for command in COMMANDS]
    command = request.command
    if request.archive is not None:
        if command:
            raise UsageError(f"--sif and the command {command[0]}", where="--sif", hint="one of the two")
        return ()
    if not command:
        if request.interactive:
            return ()
        raise UsageError(
            "what is to run?", where="COMMAND", hint="imgkit job RECIPE -- dist-bench; or --interactive"
        )
    if any("\n" in word or "\0" in word for word in command):
        raise UsageError("a word of the command holds a line break", where="COMMAND", hint="put it in a file")
    if command[0].startswith("dist-") and command[0] not in names:
        raise UsageError(f"there is no {command[0]}", where="COMMAND", hint=choices(command[0], names))
    return command


def _doubts(
    recipe: Recipe, request: Request, command: tuple[str, ...], *, gpus: int, nodes: int
) -> list[str]:
    doubts = []
    if command and not command[0].startswith("dist-") and not request.direct:
        doubts.append(f"{command[0]} is started once a node, as it is: dist-run makes ranks of a program")
    if 0 < gpus < recipe.system.node.gpus and nodes > 1:
        note = ": pods may share a node" if recipe.system.scheduler == "runai" else ""
        doubts.append(
            f"{nodes} nodes with {gpus} of {recipe.system.node.gpus} GPUs each{note}; whole nodes are faster"
        )
    return doubts + (pods.doubts(request, command) if recipe.system.scheduler == "runai" else [])


def _run_by(recipe: Recipe, request: Request) -> RunBy:
    allowed = RUN_BY[recipe.system.scheduler]
    if request.runtime is None:
        return recipe.system.runtime.kind
    if request.runtime not in allowed:
        raise UsageError(
            f"{request.runtime} cannot be used on {recipe.system.title or recipe.name}",
            where="--runtime",
            hint=choices(request.runtime, allowed),
        )
    return request.runtime


def _image(recipe: Recipe, request: Request, run_by: RunBy, directory: Path) -> str:
    image = request.image
    if any(ord(letter) < 32 for letter in image):
        raise UsageError(f"{image!r} holds a control character", where="--image")
    if run_by == "singularity":
        return str(directory / (image or f"{recipe.name}.sif"))
    if run_by == "kubernetes" and not image:
        raise UsageError(
            "pods pull their image from a registry, and none is named",
            where="--image",
            hint=f"imgkit push {recipe.name} REGISTRY/{recipe.name}:1, then --image REGISTRY/{recipe.name}:1",
        )
    if run_by == "host":
        return str(directory / image) if image else ""
    if image.startswith("-"):
        raise UsageError(f"{image!r} is no image", where="--image")
    return image or f"{recipe.name}:latest"


def _overlay(request: Request, run_by: RunBy, directory: Path) -> str:
    if request.overlay is None:
        return ""
    if run_by != "singularity":
        raise UsageError(
            f"a delta lies over a .sif, and {run_by} runs none", where="--delta", hint="leave it out"
        )
    return fields.check("--delta", str(directory / request.overlay.path))


def _delta(request: Request, run_by: RunBy, image: Path) -> Mapping[str, str]:
    """What the commands of the image look for, where deltas are given or are in the .sif that is here.

    Set inside the container: a runtime's --cleanenv must not switch the check off.
    """
    if request.overlay is not None:
        return {delta_check.VARIABLE: request.overlay.delta.image_id}
    if run_by != "singularity" or not sif.is_sif(image):
        return {}
    record = sif.read(image).record
    if record is None or not record.deltas:
        return {}
    return {delta_check.VARIABLE: descriptor.stack(image).base.image_id}


def _binds(recipe: Recipe, request: Request, run_by: RunBy) -> tuple[str, ...]:
    from imgkit_builder.recipe import rules

    for text in request.binds:
        for what, hint in (*rules.printable(text), *rules.bind(text)):
            raise UsageError(what, where="--bind", hint=hint)
    return (*recipe.system.runtime.binds, *request.binds)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(f"{text!r} is no variable", where="--env", hint="NAME=VALUE")
    if any(ord(letter) < 32 and letter != "\t" for letter in value):
        raise UsageError(f"{name} holds a line break or control character", where="--env")
    return name, value


def _settings(recipe: Recipe, request: Request, *, gpus: int, least: int, most: int) -> Mapping[str, str]:
    """Options of the launcher that follow from the request, as its variables."""
    settings = {}
    if gpus == 0 and recipe.system.node.gpus:
        settings["IMGKIT_DEVICE"] = "cpu"  # the image's launcher refuses to go on without the node's GPUs
    if request.nproc is not None:
        if request.nproc < 1:
            raise UsageError(f"{request.nproc} processes", where="--nproc", hint="a number from 1")
        settings["IMGKIT_NPROC"] = str(request.nproc)
    elif request.gpus and recipe.system.scheduler in ("mpi", "standalone"):
        settings["IMGKIT_NPROC"] = str(request.gpus)  # no scheduler hides the node's other GPUs
    if least != most:
        settings["IMGKIT_NNODES"] = f"{least}:{most}"
    return settings


def _stop_before(recipe: Recipe, request: Request, time: str) -> int:
    limit = fields.seconds(time, where="--time") if time else None
    if request.stop_before_s is None:
        return 0 if limit is not None and limit < SHORT_S else STOP_BEFORE_S
    if request.stop_before_s < 0 or (limit is not None and request.stop_before_s >= limit):
        raise UsageError(
            f"{request.stop_before_s} s before the end of a job of {time or 'no length'}",
            where="--stop-before",
            hint="less than --time; 0 for never",
        )
    return request.stop_before_s
