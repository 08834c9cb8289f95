"""Resolve a request on a recipe's system: find all values, and check them against the limits of the
recipe.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from imgkit_builder.base.flags import declared, flags_in
from imgkit_builder.jobs import contents, quoting, runtimes, systems
from imgkit_builder.jobs.job import Allocation, Container, Job
from imgkit_builder.jobs.request import (
    AllocationRequest,
    JobRequest,
    ProjectSource,
    RuntimeName,
    refuse_mixed,
)
from imgkit_builder.jobs.runtimes import Runtime, runtime_of
from imgkit_builder.jobs.runtimes.host import Host
from imgkit_builder.jobs.systems import OPTIONAL, System
from imgkit_builder.recipe import bases
from imgkit_builder.recipe.problems import choices, shown
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints.cli.commands import COMMANDS
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import host_leaks
from imgkit_entrypoints.schedulers.placement import Size, size_examples
from imgkit_entrypoints.system import CUDA_COMPAT, HOST_LIBS


def resolve(recipe: Target, request: JobRequest) -> Job:
    """The job that `request` becomes on the system of `recipe`.

    Raises
    ------
    UsageError : a value that the system cannot satisfy; where the recipe sets the limit, with its line.
    ToolFailed : the system is a plug-in that cannot be used.
    """
    refuse_mixed(request)
    recipe = _in_partition(recipe, request.allocation.queue or recipe.system.queue.name)
    facts, makes_image = recipe.system, bool(request.image_flag)
    system = systems.named(facts.scheduler)
    system_flags = request.flags(system.flags)
    is_free = request.launch.interactive and not system.needs_fields_for_shells
    allocation = _queue(recipe, request, () if is_free else facts.queue.required)
    contents.refuse_secrets(recipe, request)
    directory = request.directory.absolute()
    quoting.check("--directory", str(directory))
    runtime = _runtime(recipe, request.container.runtime, system)
    if makes_image:
        image, command = contents.image_to_make(recipe, request, directory)
    else:
        command = _command(request)
        image = runtime.image(contents.requested_image(request), recipe.name, directory)
    job = Job(
        recipe=recipe,
        request=request,
        system=system_flags.system or facts.scheduler,
        name=quoting.check("--name", request.name or recipe.name),
        directory=directory,
        allocation=allocation,
        container=Container(image=image, runtime=runtime.kind),
        command=command,
    )
    ignored = tuple(_unused(recipe, request, system))
    if makes_image:
        return dataclasses.replace(job, warnings=ignored)
    _refuse_small(request)
    gpus = _gpus(recipe, request)
    job = job.with_allocation(
        size=parse_nodes(request.allocation.nodes or str(system_flags.default_nodes)),
        gpus=gpus,
        cpus=_cpus(recipe, request, gpus),
        stop_before_s=_stop_before(request, job.allocation.time),
    )
    job = dataclasses.replace(job, settings=_settings(job, system))
    job = contents.with_mounts_and_variables(job, passes_names=system.passes_names)
    runtime.check(job)
    _refuse_amd(job)
    return dataclasses.replace(job, warnings=(*ignored, *system.check(job), *runtime.warnings(job)))


_LEAST = {"nproc": 1, "cpus": 1, "gpus": 0, "max_failures": 0, "stop_before_s": 0}
"""Fields of a request with a number -> the smallest one."""


def _refuse_small(request: JobRequest) -> None:
    for flag in declared(JobRequest):
        least, value = _LEAST.get(flag.field), flag.value(request)
        if least is not None and value is not None and value < least:
            name = flag.names[0]
            raise UsageError(f"{name} must be at least {least} (got {value})", where=name)


def _in_partition(recipe: Target, name: str) -> Target:
    """`recipe` with the nodes of the partition `name` as those of the system."""
    above, positions = ("system", "partitions", name), dict(recipe.positions)
    for path, position in recipe.positions.items():
        if path[:-1] == above:
            positions["system", "node", path[-1]] = position
    return dataclasses.replace(recipe, system=recipe.system.in_partition(name), positions=positions)


def _queue(recipe: Target, request: JobRequest, required: tuple[str, ...]) -> Allocation:
    """Return an allocation with the fields of ``system.queue``, and without its nodes."""
    requested, defaults = request.allocation, recipe.system.queue
    allocation = Allocation(
        account=quoting.check("--account", requested.account or defaults.account),
        queue=quoting.check("--queue", requested.queue or defaults.name),
        qos=quoting.check("--qos", requested.qos or defaults.qos),
        time=_time(recipe, requested),
    )
    _require(recipe, required, allocation, request.project)
    return allocation


def _unused(recipe: Target, request: JobRequest, system: System) -> Iterator[str]:
    """A warning for each flag that the system does not have."""
    unused = {f"--{name}" for name in OPTIONAL if name not in system.uses}
    ignored = [name for name in flags_in(request) if name in unused]
    for flags in request.system_flags:
        if type(flags) is not system.flags:
            ignored += flags_in(flags)
    scheduler = recipe.system.scheduler
    return (f"{name} is not used: {recipe.title} ({scheduler}) has no such flag" for name in ignored)


def _require(
    recipe: Target, required: tuple[str, ...], allocation: Allocation, project: ProjectSource | None
) -> None:
    keys = ["queue" if field == "name" else field for field in required]
    keys = [key for key in keys if not getattr(allocation, key)]
    if not keys:
        return
    hint = f"add {' '.join(f'--{key} ...' for key in keys)}"
    if project:
        name = shown(project.file).name
        assignments = ", ".join(f'{key} = "..." in {project.lines.get(key, name)}' for key in keys)
        hint = f"set {assignments}; or {hint}"
    else:
        hint += f", or set it in a recipe that extends {recipe.name} (system.queue)"
    if "queue" in keys and (names := sorted(recipe.system.partitions)):
        hint += f"; queues: {', '.join(names)}"
    raise UsageError(
        f"{recipe.title} needs {', '.join(f'--{key}' for key in keys)}",
        where=recipe.where("system", "queue", "required"),
        hint=hint,
    )


def _command(request: JobRequest) -> tuple[str, ...]:
    names = [command.name for command in COMMANDS]
    command = request.launch.command
    if not command:
        if request.launch.interactive:
            return ()
        raise UsageError(
            "no command given",
            where="COMMAND",
            hint="imgkit run RECIPE -- dist-bench; or --interactive",
        )
    if any("\n" in argument or "\0" in argument for argument in command):
        raise UsageError(
            "an argument of the command contains a line break", where="COMMAND", hint="put it in a file"
        )
    if command[0].startswith("dist-") and command[0] not in names:
        raise UsageError(f"there is no {command[0]}", where="COMMAND", hint=choices(command[0], names))
    return command


def _runtime(recipe: Target, requested: RuntimeName | None, system: System) -> Runtime:
    """Return what starts the program on a node.

    Raises
    ------
    UsageError : the system cannot start programs by it, or its containers would lack the node's variables.
    """
    kind, registration = requested or recipe.system.runtime.kind, system.registration
    runtime = runtimes.named(kind)
    program = runtime.program(recipe)
    needs_podman = registration.by_podman and runtime.belongs_to_service(program)
    if kind in registration.runtimes and not needs_podman:
        return runtime
    message = f"{kind} cannot be used on {recipe.title}"
    hint, key, scheduler = choices(kind, registration.runtimes), "kind", recipe.system.scheduler
    if needs_podman:
        message += f": containers of {program} belong to its service on each node, and {scheduler} "
        message += "neither counts nor ends them"
        hint = "system.runtime with kind: docker and command: podman (or podman-hpc) in the recipe"
        key = "command"
    elif runtime.environment_by_options and Host.kind in registration.runtimes:  # it starts no pods
        message += f": {program} does not pass {scheduler}'s variables into the container, so each "
        message += "node would run alone"
    if requested:
        raise UsageError(message, where="--runtime", hint=hint)
    hint += "; change system.runtime in the recipe, or give --runtime"
    raise UsageError(message, where=recipe.where("system", "runtime", key), hint=hint)


def chooses_cpus(request: JobRequest) -> bool:
    """Whether the user asks for work on CPUs, whatever GPUs the nodes have."""
    chosen = " ".join(request.launch.command).replace("=", " ")
    return request.allocation.gpus == 0 or re.search(r"(?:^| )--device cpu(?: |$)", chosen) is not None


def _refuse_amd(job: Job) -> None:
    """Raise UsageError for AMD's GPUs or image, unless the request chooses CPUs.

    The node agent refuses such a start, too; any other program would find no GPU.
    """
    request, recipe = job.request, job.recipe
    if chooses_cpus(request):
        return
    # A .sif that names its own system is the recipe's image, and no other.
    named_image = request.container.image if Path(request.container.image) != recipe.file.absolute() else ""
    evidence, where, runtime = "", "", runtime_of(job)
    if named_image and runtime.has_container:
        evidence, where = bases.amd_image(runtime.image_title(named_image)), "--image"
    elif runtime.has_container:
        evidence, where = bases.amd_image(recipe.base, recipe.base_env), recipe.where("image", "base")
    if not evidence and job.allocation.gpus:
        evidence, where = bases.amd_nodes(recipe.system), recipe.where("system", "node", "gpu_model")
    if evidence:
        message, hint = bases.for_amd(evidence)
        raise UsageError(message, where=where, hint=hint)


def _settings(job: Job, system: System) -> Mapping[str, str]:
    """Options of the node agent that follow from the request, as its variables."""
    recipe, request, runtime = job.recipe, job.request, runtime_of(job)
    gpus, size = job.allocation.gpus, job.allocation.size
    nproc = request.launch.nproc or (0 if system.hides_gpus else request.allocation.gpus or 0)
    # The image's node agent refuses to start without the node's GPUs.
    on_cpus = gpus == 0 and (recipe.system.node.gpus or request.allocation.gpus == 0)
    # Without a container, and for nodes without GPUs by their system, no system.json says to expect them.
    expects_gpus = gpus and not (runtime.has_container and recipe.system.node.gpus)
    by_rule = recipe.system.fabric.host_libs == "auto" and runtime.mounts_folders
    compat = recipe.system.runtime.cuda_compat == "auto" and runtime.has_container
    failures = request.launch.max_failures
    names = (text.partition("=")[0] for text in request.container.env)
    settings = {
        "IMGKIT_DEVICE": "cpu" if on_cpus else "",
        "IMGKIT_GPUS": str(gpus) if expects_gpus else "",
        "IMGKIT_NPROC": str(nproc) if nproc else "",
        "IMGKIT_NNODES": str(size) if size.spares else "",
        HOST_LIBS: ":".join(("auto", *recipe.system.runtime.host_libs)) if by_rule else "",
        CUDA_COMPAT: "auto" if compat else "",
        "IMGKIT_KEEP_ENV": ",".join(filter(host_leaks.may_remove, names)),
        "IMGKIT_PREFLIGHT": "1" if request.launch.preflight else "",
        "IMGKIT_MAX_FAILURES": "" if failures is None else str(failures),
        "IMGKIT_SCHEDULER": system.placement if size.started > 1 else "",
    }
    return {name: value for name, value in settings.items() if value}


STOP_BEFORE_S = 120
"""The node agent's grace period, and as much again: Slurm's signal can come up to a minute early."""
SHORT_S = 600
"""Shorter jobs are not asked to save before their end unless ``--stop-before`` is given."""


def parse_nodes(text: str) -> Size:
    """Return the nodes that ``N`` or ``N+SPARES`` asks for."""
    try:
        return Size.parse(text)
    except ValueError as error:
        raise UsageError(str(error), where="--nodes", hint=size_examples(text, "--nodes ")) from None


def _gpus(recipe: Target, request: JobRequest) -> int:
    """Return the GPUs per node."""
    limit = recipe.system.node.gpus
    gpus = request.allocation.gpus
    if gpus is None:
        return limit
    is_limit = limit or ("system", "node", "gpus") in recipe.positions  # an image has no positions
    if is_limit and gpus > limit:
        raise _more_than_a_node(recipe, "gpus", gpus, limit)
    return gpus


def _more_than_a_node(recipe: Target, key: str, number: int, limit: int) -> UsageError:
    return UsageError(
        f"--{key} {number}, but a node has {limit}",
        where=recipe.where("system", "node", key),
        hint=f"--{key} {limit} with more --nodes" if limit else f"leave --{key} out",
    )


def _cpus(recipe: Target, request: JobRequest, gpus: int) -> int | None:
    """Return the CPUs per node beside `gpus`; None leaves the number to the system."""
    node, cpus = recipe.system.node, request.allocation.cpus
    share = node.cpus_per_gpu
    gpus_cpus = gpus * share if share else 0
    if cpus is None:
        return gpus_cpus or request.launch.nproc or node.cpus
    if gpus_cpus and cpus != gpus_cpus:
        raise UsageError(
            f"--cpus {cpus}, but {gpus} GPUs come with {gpus_cpus} CPUs ({share} each)",
            where=recipe.where("system", "node", "cpus_per_gpu"),
            hint=f"leave --cpus out, or --cpus {gpus_cpus}",
        )
    if node.cpus is not None and cpus > node.cpus:
        raise _more_than_a_node(recipe, "cpus", cpus, node.cpus)
    return cpus


def _time(recipe: Target, requested: AllocationRequest) -> str:
    """The time limit as ``HH:MM:SS``; empty if neither the request nor the recipe has one."""
    queue = recipe.system.queue
    text = requested.time or queue.time
    if not text:
        return ""
    where = "--time" if requested.time else recipe.where("system", "queue", "time")
    time_s = quoting.seconds(text, where=where)
    # A QoS with a limit of its own is there to change that of the queue: shorter for tests, longer for a few.
    name = requested.qos or queue.qos
    if name not in queue.limits:
        name = requested.queue or queue.name
    if name not in queue.limits:
        return quoting.clock(time_s)
    limit = queue.limits[name]
    where = recipe.where("system", "queue", "limits", name)
    if time_s > quoting.seconds(limit, where=where):
        alternatives = ", ".join(f"{key} {most}" for key, most in queue.limits.items() if key != name)
        raise UsageError(
            f"--time {quoting.clock(time_s)}, but {name} ends jobs after {limit}",
            where=where,
            hint=f"--time {limit}, or another queue{f' ({alternatives})' if alternatives else ''}; "
            "dist-train resumes where a job left off",
        )
    return quoting.clock(time_s)


def _stop_before(request: JobRequest, time_limit: str) -> int:
    """Return how many seconds before `time_limit` the program is asked to save; 0: never.

    Parameters
    ----------
    time_limit : ``HH:MM:SS``; empty: the job has none.
    """
    stop_before_s = request.launch.stop_before_s
    limit_s = quoting.seconds(time_limit, where="--time") if time_limit else None
    if stop_before_s is None:
        return 0 if limit_s is not None and limit_s < SHORT_S else STOP_BEFORE_S
    if limit_s is not None and stop_before_s >= limit_s:
        raise UsageError(
            f"{stop_before_s} s must be less than the job's time limit, {time_limit}",
            where="--stop-before",
            hint=f"a longer --time, or --stop-before {limit_s // 2}; 0: never",
        )
    return stop_before_s
