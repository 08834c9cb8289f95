"""Resolve a request on a recipe's system: find all values, and check them against the limits of the
recipe.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from imgkit_builder.base.flags import declared, flags_in
from imgkit_builder.jobs import container, contents, pyxis, quoting, systems
from imgkit_builder.jobs.job import Allocation, Container, Job, RuntimeKind
from imgkit_builder.jobs.request import JobRequest, ProjectSource, refuse_mixed
from imgkit_builder.jobs.systems import OPTIONAL, System
from imgkit_builder.recipe import bases
from imgkit_builder.recipe.problems import choices, shown
from imgkit_builder.recipe.systems import is_podman
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints.cli.commands import COMMANDS
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import host_leaks
from imgkit_entrypoints.schedulers.placement import Size, size_examples
from imgkit_entrypoints.system import CUDA_COMPAT, HOST_LIBS

_CLEAN = re.compile(r"--(cleanenv|containall)(=.*)?|-[cfinpuw]*[eC].*")
"""Options of singularity that keep the node's variables out of the container; short ones can be combined."""


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
    queue = _queue(recipe, request, () if is_free else facts.queue.required)
    contents.refuse_secrets(recipe, request)
    directory = request.directory.absolute()
    quoting.check("--directory", str(directory))
    run_by = _run_by(recipe, request.container.runtime, system)
    if makes_image:
        image, command = contents.image_to_make(recipe, request, directory)
    else:
        command, image = _command(request), contents.image(recipe, request, run_by, directory)
    job = Job(
        recipe=recipe,
        request=request,
        system=system_flags.system or facts.scheduler,
        name=quoting.check("--name", request.name or recipe.name),
        directory=directory,
        allocation=Allocation(
            time=queue["time"], account=queue["account"], queue=queue["queue"], qos=queue["qos"]
        ),
        container=Container(image=image, runtime=run_by),
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
    job = contents.filled(job, passes_names=system.passes_names)
    _refuse_clean(job)
    _refuse_amd(job)
    if run_by == "pyxis":
        pyxis.refuse(job)
    return dataclasses.replace(job, warnings=(*ignored, *system.check(job), *contents.doubts(job)))


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


def _queue(recipe: Target, request: JobRequest, required: tuple[str, ...]) -> Mapping[str, str]:
    """The fields of ``system.queue`` of the job."""
    defaults = recipe.system.queue
    queue = {
        "account": quoting.check("--account", request.allocation.account or defaults.account),
        "queue": quoting.check("--queue", request.allocation.queue or defaults.name),
        "qos": quoting.check("--qos", request.allocation.qos or defaults.qos),
        "time": _time(recipe, request),
    }
    _require(recipe, required, queue, request.project)
    return queue


def _unused(recipe: Target, request: JobRequest, system: System) -> Iterator[str]:
    """A warning for each flag that the system does not have."""
    unused = {f"--{name}" for name in OPTIONAL if name not in system.uses}
    ignored = [name for name in flags_in(request) if name in unused]
    for flags in request.system_flags:
        if type(flags) is not system.flags:
            ignored += flags_in(flags)
    title = recipe.system.title or recipe.name
    return (f"{name} is not used: {title} ({recipe.system.scheduler}) has no such flag" for name in ignored)


def _require(
    recipe: Target, required: tuple[str, ...], queue: Mapping[str, str], project: ProjectSource | None
) -> None:
    keys = ["queue" if field == "name" else field for field in required]
    keys = [key for key in keys if not queue[key]]
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
        f"{recipe.system.title or recipe.name} needs {', '.join(f'--{key}' for key in keys)}",
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


def _run_by(recipe: Target, requested: RuntimeKind | None, system: System) -> RuntimeKind:
    """What starts the program on a node.

    Raises
    ------
    UsageError : the system cannot start programs by it, or its containers would lack the node's variables.
    """
    runtime, registration = recipe.system.runtime, system.registration
    kind = requested or runtime.kind
    program = runtime.command if kind == runtime.kind else kind
    needs_podman = kind == "docker" and registration.by_podman and not is_podman(program)
    if kind in registration.runtimes and not needs_podman:
        return kind
    message = f"{kind} cannot be used on {recipe.system.title or recipe.name}"
    hint, key, scheduler = choices(kind, registration.runtimes), "kind", recipe.system.scheduler
    if needs_podman:
        message += f": containers of {program} belong to its service on each node, and {scheduler} "
        message += "neither counts nor ends them"
        hint = "system.runtime with kind: docker and command: podman (or podman-hpc) in the recipe"
        key = "command"
    elif kind == "docker" and "host" in registration.runtimes:
        message += f": {program} does not pass {scheduler}'s variables into the container, so each "
        message += "node would run alone"
    if requested:
        raise UsageError(message, where="--runtime", hint=hint)
    hint += "; change system.runtime in the recipe, or give --runtime"
    raise UsageError(message, where=recipe.where("system", "runtime", key), hint=hint)


def _refuse_clean(job: Job) -> None:
    """Raise UsageError if the runtime keeps from the container what the node or the job sets for it."""
    options = container.options(job) if job.container.runtime == "singularity" else ()
    cleans = next((option for option in options if _CLEAN.fullmatch(option)), "")
    if cleans and (
        job.system != "standalone" or job.settings or job.container.names or job.container.env_file
    ):
        raise UsageError(
            f"with {cleans}, the container receives no variable of the node and the job: the node agent "
            "would find neither the other nodes nor the job's settings",
            where=job.recipe.where("system", "runtime", "options"),
            hint=f"remove {cleans} from system.runtime.options; --contain and --no-home keep the variables",
        )


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
    evidence, where = "", ""
    if named_image and job.container.runtime != "host":
        name = Path(named_image).name if job.container.runtime == "singularity" else named_image
        evidence, where = bases.amd_image(name), "--image"
    elif job.container.runtime != "host":
        evidence, where = bases.amd_image(recipe.base, recipe.base_env), recipe.where("image", "base")
    if not evidence and job.allocation.gpus:
        evidence, where = bases.amd_nodes(recipe.system), recipe.where("system", "node", "gpu_model")
    if evidence:
        message, hint = bases.for_amd(evidence)
        raise UsageError(message, where=where, hint=hint)


def _settings(job: Job, system: System) -> Mapping[str, str]:
    """Options of the node agent that follow from the request, as its variables."""
    recipe, request, run_by, gpus, size = (
        job.recipe,
        job.request,
        job.container.runtime,
        job.allocation.gpus,
        job.allocation.size,
    )
    nproc = request.launch.nproc or (0 if system.hides_gpus else request.allocation.gpus or 0)
    # The image's node agent refuses to start without the node's GPUs.
    on_cpus = gpus == 0 and (recipe.system.node.gpus or request.allocation.gpus == 0)
    # Without a container, and for nodes without GPUs by their system, no system.json says to expect them.
    expects_gpus = gpus and (run_by == "host" or not recipe.system.node.gpus)
    by_rule = recipe.system.fabric.host_libs == "auto" and run_by in ("singularity", "docker", "pyxis")
    compat = recipe.system.runtime.cuda_compat == "auto" and run_by != "host"
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
    if request.allocation.gpus is None:
        return limit
    is_limit = limit or ("system", "node", "gpus") in recipe.positions  # an image has no positions
    if is_limit and request.allocation.gpus > limit:
        raise _more_than_a_node(recipe, "gpus", request.allocation.gpus, limit)
    return request.allocation.gpus


def _more_than_a_node(recipe: Target, key: str, number: int, limit: int) -> UsageError:
    return UsageError(
        f"--{key} {number}, but a node has {limit}",
        where=recipe.where("system", "node", key),
        hint=f"--{key} {limit} with more --nodes" if limit else f"leave --{key} out",
    )


def _cpus(recipe: Target, request: JobRequest, gpus: int) -> int | None:
    """Return the CPUs per node beside `gpus`; None leaves the number to the system."""
    node = recipe.system.node
    share = node.cpus_per_gpu
    if request.allocation.cpus is None:
        return gpus * share if gpus and share else request.launch.nproc or node.cpus
    if gpus and share and request.allocation.cpus != gpus * share:
        raise UsageError(
            f"--cpus {request.allocation.cpus}, but {gpus} GPUs come with {gpus * share} CPUs ({share} each)",
            where=recipe.where("system", "node", "cpus_per_gpu"),
            hint=f"leave --cpus out, or --cpus {gpus * share}",
        )
    if node.cpus is not None and request.allocation.cpus > node.cpus:
        raise _more_than_a_node(recipe, "cpus", request.allocation.cpus, node.cpus)
    return request.allocation.cpus


def _time(recipe: Target, request: JobRequest) -> str:
    """The time limit as ``HH:MM:SS``; empty if neither the request nor the recipe has one."""
    queue = recipe.system.queue
    text = request.allocation.time or queue.time
    if not text:
        return ""
    time_s = quoting.seconds(
        text, where="--time" if request.allocation.time else recipe.where("system", "queue", "time")
    )
    # A QoS with a limit of its own is there to change that of the queue: shorter for tests, longer for a few.
    names = [
        name
        for name in (request.allocation.qos or queue.qos, request.allocation.queue or queue.name)
        if name in queue.limits
    ]
    if not names:
        return quoting.clock(time_s)
    name, limit = names[0], queue.limits[names[0]]
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
