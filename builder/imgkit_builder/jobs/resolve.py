"""Resolve a request on a recipe's system: choose the value of each field, and check it.

A value is that of the request, or else that of the recipe, or else a default. It is checked against the
limits that the recipe states for its queues and nodes. Nothing is written or run.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath

from imgkit_builder.base.flags import declared_options, flags_in
from imgkit_builder.jobs import contents, quoting, runtimes, systems
from imgkit_builder.jobs.job import Allocation, Container, Job
from imgkit_builder.jobs.memory import Memory, parse_size, size_text
from imgkit_builder.jobs.request import (
    AllocationRequest,
    JobRequest,
    ProjectSource,
    QueueRequest,
    RuntimeName,
)
from imgkit_builder.jobs.runtimes import Runtime, runtime_of
from imgkit_builder.jobs.runtimes.docker import Docker
from imgkit_builder.jobs.runtimes.host import Host
from imgkit_builder.jobs.systems import OPTIONAL, System
from imgkit_builder.recipe import bases
from imgkit_builder.recipe.problems import allowed_hint, shorten_path
from imgkit_builder.recipe.systems import is_podman
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints.cli.commands import COMMANDS
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import explain, host_leaks
from imgkit_entrypoints.schedulers.placement import Size, size_examples
from imgkit_entrypoints.system import CUDA_COMPAT, HOST_LIBS


def resolve_job(recipe: Target, request: JobRequest) -> Job:
    """Return the job that `request` becomes on the system of `recipe`.

    Raises
    ------
    UsageError : the system cannot satisfy a value. The error names the recipe's line if the recipe sets the
        limit.
    ToolFailed : the system is a plug-in that cannot be loaded.
    """
    # First of all, because the limits below are those of the partition's nodes.
    recipe = _select_partition(recipe, request.allocation.queue or recipe.system.queue.name)
    scheduler = recipe.system.scheduler
    system = systems.get_system(scheduler)
    allocation = _queue_allocation(recipe, request, system)
    contents.refuse_secrets(recipe, request)
    directory = request.directory.absolute()
    quoting.check_flag_value("--directory", str(directory))
    runtime = _select_runtime(recipe, request.container.runtime, system)
    command = _job_command(request)
    image = runtime.image(contents.requested_image(request), recipe.name, directory)
    job = Job(
        recipe=recipe,
        request=request,
        system=request.flags(system.flags).system or scheduler,
        name=quoting.check_flag_value("--name", request.name or recipe.name),
        directory=directory,
        allocation=allocation,
        container=Container(image=image, runtime=runtime.kind),
        command=command,
        warnings=(
            *_unused_flag_warnings(recipe, request, system, runtime),
            *_unlisted_queue_warnings(recipe, allocation.queue),
        ),
    )
    if request.container.code is not None and not system.code_copier:
        raise UsageError(
            f"{recipe.title} has no folder into which a run could copy its code",
            where="--code",
            hint="build it into the image (image.copy), and leave --code out, or add --no-code",
        )
    job = _with_nodes(job, system)
    job = dataclasses.replace(job, settings=_agent_settings(job, system))
    job = contents.with_mounts_and_variables(job, passes_names=system.abilities.passes_names)
    runtime.check(job)
    _refuse_amd(job)
    warnings = (*job.warnings, *system.check(job), *runtime.warnings(job))
    return dataclasses.replace(job, warnings=warnings)


def resolve_conversion(recipe: Target, request: JobRequest, image: Path) -> Job:
    """Return the job that makes the file `image`.

    The command of `request` makes it. That is ``imgkit sif`` or ``imgkit build``.

    The job takes one node without GPUs, from the queue that ``queue.sif`` of the recipe names.

    Raises
    ------
    UsageError : a value is not valid, the recipe requires a field that nobody states, or the job would show a
        secret.
    ToolFailed : the system is a plug-in that cannot be loaded.
    """
    system = systems.get_system(recipe.system.scheduler)
    warnings = (
        *_unused_flag_warnings(recipe, request, system),
        *_unlisted_queue_warnings(recipe, request.allocation.queue),
    )
    recipe = _with_sif_queue(recipe, system)
    contents.refuse_secrets(recipe, request)
    return Job(
        recipe=recipe,
        request=request,
        system=recipe.system.scheduler,
        name=quoting.check_flag_value("--name", request.name or f"{recipe.name}-sif"),
        directory=Path(quoting.check_flag_value("--directory", str(request.directory.absolute()))),
        allocation=_queue_allocation(recipe, request, system),
        container=Container(image=str(image), runtime="no-container"),
        command=request.launch.command,
        warnings=warnings,
    )


def _with_sif_queue(recipe: Target, system: System) -> Target:
    """Return `recipe` with the queue, QoS and options of ``queue.sif`` in place of those of its jobs.

    ``["--qos=gp_debug", "--exclusive"]`` -> the QoS ``gp_debug``, no queue, and the option ``--exclusive``.
    """
    queue = recipe.system.queue
    names = {"name": "", "qos": ""}
    options: list[str] = []
    positions = dict(recipe.positions)
    remaining = iter(enumerate(queue.sif))  # an iterator, because an option can take the next argument too
    for index, argument in remaining:
        option, _, value = argument.partition("=")
        if option in system.queue.fields:
            # "--qos=gp_debug" of Slurm, and "-q", "debug" of PBS
            if not value:
                _, value = next(remaining, (0, ""))
            names[system.queue.fields[option]] = value
            continue
        position = positions.get(("system", "queue", "sif", index))
        if position is not None:
            positions["system", "queue", "options", len(options)] = position
        options.append(argument)
    queue = dataclasses.replace(queue, name=names["name"], qos=names["qos"], options=tuple(options))
    facts = dataclasses.replace(recipe.system, queue=queue)
    return dataclasses.replace(recipe, system=facts, positions=positions)


# The smallest number that each field of a request may have. With 0 GPUs, a job runs on CPUs.
_MINIMA = {"nproc": 1, "cpus": 1, "gpus": 0, "max_failures": 0, "stop_before_s": 0}


def _refuse_small_numbers(request: JobRequest) -> None:
    """Raise UsageError for a number in the request that is below its minimum."""
    for flag in declared_options(JobRequest):
        minimum = _MINIMA.get(flag.field)
        value = flag.value(request)
        if minimum is None or value is None or value >= minimum:
            continue
        name = flag.names[0]
        raise UsageError(f"must be at least {minimum} (got {value})", where=name)


def _select_partition(recipe: Target, name: str) -> Target:
    """Return `recipe` with the partition's nodes as ``system.node``, and its options in ``system.queue``.

    Messages about these values name their lines below ``system.partitions``. The recipe is returned unchanged
    if it does not list the partition.
    """
    partition = recipe.system.partitions.get(name)
    if partition is None:
        return recipe
    system = recipe.system.in_partition(name)
    # The options of the partition are the last ones.
    first_option = len(system.queue.options) - len(partition.options)
    partition_path = ("system", "partitions", name)
    positions = dict(recipe.positions)
    for path, position in recipe.positions.items():
        if path[:-1] == partition_path:
            positions["system", "node", path[-1]] = position
        elif path[:-1] == (*partition_path, "options"):
            positions["system", "queue", "options", first_option + int(path[-1])] = position
    return dataclasses.replace(recipe, system=system, positions=positions)


def _unlisted_queue_warnings(recipe: Target, queue: str) -> Iterator[str]:
    """Yield a warning about a queue that the system does not list, because its nodes may differ.

    Raises
    ------
    UsageError : the system does not list the queue, and its list is complete.
    """
    facts = recipe.system
    names = {facts.queue.name, *facts.partitions, *facts.queue.limits}
    is_complete = facts.partition_list == "complete"
    # A system that states neither partitions nor limits of queues has no list.
    has_list = is_complete or bool(facts.partitions) or facts.queue.name in facts.queue.limits
    if not has_list or not queue or queue in names:
        return
    names.discard("")
    if is_complete:
        raise UsageError(
            f"--queue {queue}, but {recipe.title} has no such queue",
            where=recipe.where("system", "partition_list"),
            hint=allowed_hint(queue, names),
        )
    yield (
        f"--queue {queue}: {recipe.title} lists only {', '.join(sorted(names))}; the job is written for the "
        "nodes of system.node"
    )


def _queue_allocation(recipe: Target, request: JobRequest, system: System) -> Allocation:
    """Return an allocation with the account, queue, QoS and time limit. `_with_nodes` adds the nodes.

    Raises
    ------
    UsageError : a value is not valid, or the recipe requires one that neither it nor the request states.
    """
    requested, defaults = request.allocation, recipe.system.queue
    allocation = Allocation(
        account=quoting.check_flag_value("--account", requested.account or defaults.account),
        queue=quoting.check_flag_value("--queue", requested.queue or defaults.name),
        qos=quoting.check_flag_value("--qos", requested.qos or defaults.qos),
        time=_time_limit(recipe, requested),
    )
    if request.launch.interactive and not system.needs_fields_for_shells:
        return allocation
    missing_keys = []
    for field in defaults.required:
        # The field system.queue.name of a recipe is the queue of a request.
        key = "queue" if field == "name" else field
        if not getattr(allocation, key):
            missing_keys.append(key)
    if missing_keys:
        raise _missing_fields_error(recipe, missing_keys, request.project)
    return allocation


def _with_nodes(job: Job, system: System) -> Job:
    """Return `job` with the number of its nodes, and the GPUs, CPUs and memory of each node.

    The job requests no memory if neither its system nor its runtime has an option for that.

    Raises
    ------
    UsageError : a number is below its minimum, or a node has fewer GPUs or CPUs, or less memory.
    """
    recipe, request = job.recipe, job.request
    _refuse_small_numbers(request)
    gpus = _gpus_per_node(recipe, request)
    default_nodes = request.flags(system.flags).default_nodes
    memory = _memory_per_node(recipe, request.allocation, gpus)
    if "mem" not in (*system.uses, *runtime_of(job).used_flags()):
        memory = None
    return job.with_allocation(
        size=parse_nodes(request.allocation.nodes or str(default_nodes)),
        gpus=gpus,
        cpus=_cpus_per_node(recipe, request, gpus),
        memory=memory,
        stop_before_s=_stop_before(request, job.allocation.time),
    )


def _unused_flag_warnings(
    recipe: Target, request: JobRequest, system: System, runtime: Runtime | None = None
) -> Iterator[str]:
    """Yield a warning for each flag of the request that neither the system nor the runtime uses.

    Flags of another system are among them.
    """
    used_names = set(system.uses)
    if runtime is not None:
        used_names.update(runtime.used_flags())
    unused_names = {f"--{name}" for name in OPTIONAL if name not in used_names}
    ignored_names = [name for name in flags_in(request) if name in unused_names]
    for flags in request.system_flags:
        if type(flags) is not system.flags:
            ignored_names += flags_in(flags)
    scheduler = recipe.system.scheduler
    for name in ignored_names:
        yield f"{name} is not used: {recipe.title} ({scheduler}) has no such flag"


def _missing_fields_error(recipe: Target, keys: Sequence[str], project: ProjectSource | None) -> UsageError:
    """Return the error for fields of ``system.queue`` that the recipe requires and nobody states.

    Parameters
    ----------
    keys : the fields, as in imgkit.toml, for example ``["account"]``. Their flags have the same names.
    project : the imgkit.toml of the request, if there is one. The hint names its lines.
    """
    flags = " ".join(f"--{key} ..." for key in keys)
    if project:
        file_name = shorten_path(project.file).name
        lines = [f'{key} = "..." in {project.lines.get(key, file_name)}' for key in keys]
        hint = f"set {', '.join(lines)}; or add {flags}"
    else:
        hint = f"add {flags}, or set it in a recipe that extends {recipe.name} (system.queue)"
    queues = sorted(recipe.system.partitions)
    if "queue" in keys and queues:
        hint += f"; queues: {', '.join(queues)}"
    return UsageError(
        f"{recipe.title} needs {', '.join(f'--{key}' for key in keys)}",
        where=recipe.where("system", "queue", "required"),
        hint=hint,
    )


def _job_command(request: JobRequest) -> tuple[str, ...]:
    """Return the command of the job, which is empty for an interactive shell.

    Raises
    ------
    UsageError : the command is missing, contains a line break or a null byte, or is an unknown ``dist-*``
        command.
    """
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
    program = command[0]
    entry_points = [command.name for command in COMMANDS]
    if program.startswith("dist-") and program not in entry_points:
        raise UsageError(f"there is no {program}", where="COMMAND", hint=allowed_hint(program, entry_points))
    return command


def _select_runtime(recipe: Target, requested: RuntimeName | None, system: System) -> Runtime:
    """Return the runtime that starts the command on each node.

    It is that of ``--runtime``, or else that of the recipe.

    Raises
    ------
    UsageError : jobs of this system cannot use the runtime.
    """
    runtime = runtimes.get_runtime(requested or recipe.system.runtime.kind)
    # A Docker container is a child of Docker's daemon: the scheduler would neither count its CPUs and memory
    # nor end it with the job. Podman's containers are processes of the job.
    starts_docker = runtime.kind == Docker.kind and not is_podman(runtime.program(recipe))
    needs_podman = system.registration.by_podman and starts_docker
    if runtime.kind in system.registration.runtimes and not needs_podman:
        return runtime
    raise _unsupported_runtime_error(
        recipe, runtime, system, needs_podman=needs_podman, is_requested=requested is not None
    )


def _unsupported_runtime_error(
    recipe: Target, runtime: Runtime, system: System, *, needs_podman: bool, is_requested: bool
) -> UsageError:
    """Return the error for a runtime that the system's jobs cannot use.

    Parameters
    ----------
    needs_podman : whether Podman would work instead of Docker.
    is_requested : whether the user named the runtime by ``--runtime``. If not, the recipe named it.
    """
    scheduler, program = recipe.system.scheduler, runtime.program(recipe)
    supported = system.registration.runtimes
    reason, key = "", "kind"
    hint = allowed_hint(runtime.kind, supported)
    if needs_podman:
        reason = (
            f": containers of {program} belong to its service on each node, and {scheduler} neither counts "
            "nor ends them"
        )
        key = "command"
        hint = "system.runtime with kind: docker and command: podman (or podman-hpc) in the recipe"
    elif runtime.environment_by_options and Host.kind in supported:
        # A system without the host runtime starts pods, which get their variables from Kubernetes.
        reason = (
            f": {program} does not pass {scheduler}'s variables into the container, so each node would run "
            "alone"
        )
    where = "--runtime"
    if not is_requested:
        where = recipe.where("system", "runtime", key)
        hint += "; change system.runtime in the recipe, or give --runtime"
    return UsageError(f"{runtime.kind} cannot be used on {recipe.title}{reason}", where=where, hint=hint)


def chooses_cpus(request: JobRequest) -> bool:
    """Return whether the user chooses to run on CPUs.

    That is so with ``--gpus 0``, or with ``--device cpu`` in the command.
    """
    if request.allocation.gpus == 0:
        return True
    command_line = " ".join(request.launch.command)
    command_line = command_line.replace("=", " ")  # --device=cpu
    return re.search(r"(?:^| )--device cpu(?: |$)", command_line) is not None


def _refuse_amd(job: Job) -> None:
    """Raise UsageError if the image or the nodes are for AMD GPUs, unless the request chooses CPUs.

    The node agent refuses to start there, too, and any other program would find no GPU.
    """
    if chooses_cpus(job.request):
        return
    evidence, where = _amd_evidence(job)
    if evidence:
        message, hint = bases.amd_warning(evidence)
        raise UsageError(message, where=where, hint=hint)


def _amd_evidence(job: Job) -> tuple[str, str]:
    """Return what shows that the image or the nodes are for AMD GPUs, and the flag or line that states it.

    Both texts are empty if nothing shows it.
    """
    recipe = job.recipe
    image = job.request.container.image
    evidence, where = "", ""
    if runtime_of(job).has_container:
        # A .sif can be its own recipe: then its base is known, and the name of the file tells less.
        if image and Path(image) != recipe.file.absolute():
            is_file = job.container.image.startswith("/")
            # The folders of a file say nothing about its content, but those of a registry do: rocm/pytorch.
            name = PurePath(image).name if is_file else image
            evidence, where = bases.amd_image_evidence(name), "--image"
        else:
            evidence = bases.amd_image_evidence(recipe.base, recipe.base_env)
            where = recipe.where("image", "base")
    if not evidence and job.allocation.gpus:
        evidence = bases.amd_node_evidence(recipe.system)
        where = recipe.where("system", "node", "gpu_model")
    return evidence, where


def _agent_settings(job: Job, system: System) -> Mapping[str, str]:
    """Return the variables that pass options of the request to the node agent.

    An option that has no effect in this job, or that the node agent knows without it, has no variable.
    """
    request, runtime = job.request, runtime_of(job)
    facts = job.recipe.system
    launch, allocation = request.launch, job.allocation
    settings: dict[str, str] = {}
    # The node agent refuses to start without the GPUs that its system.json states, unless it is told to use
    # CPUs.
    if allocation.gpus == 0 and (facts.node.gpus > 0 or request.allocation.gpus == 0):
        settings["IMGKIT_DEVICE"] = "cpu"
    # No system.json states the GPUs if there is no container, or if the recipe's nodes have none.
    is_gpu_count_stated = runtime.has_container and facts.node.gpus > 0
    if allocation.gpus and not is_gpu_count_stated:
        settings["IMGKIT_GPUS"] = str(allocation.gpus)
    nproc = launch.nproc
    if not nproc and not system.abilities.hides_gpus:
        # Programs see all GPUs of a node, so the number of workers limits the GPUs that they use.
        nproc = request.allocation.gpus
    if nproc:
        settings["IMGKIT_NPROC"] = str(nproc)
    if allocation.memory:
        settings[explain.MEMORY] = allocation.memory.option
    if allocation.size.spares:
        settings["IMGKIT_NNODES"] = str(allocation.size)
    if facts.fabric.host_libs == "auto" and runtime.mounts_folders:
        settings[HOST_LIBS] = ":".join(("auto", *facts.runtime.host_libs))
    # "major" is the node agent's default, which it uses in an image that imgkit did not build, too.
    if facts.runtime.cuda_compat != "major" and runtime.has_container:
        settings[CUDA_COMPAT] = facts.runtime.cuda_compat
    # The node agent removes some variables that leak from the host, but none that the user has set.
    user_names = [text.partition("=")[0] for text in request.container.env]
    kept_names = filter(host_leaks.may_remove, user_names)
    settings["IMGKIT_KEEP_ENV"] = ",".join(kept_names)
    if launch.preflight:
        settings["IMGKIT_PREFLIGHT"] = "1"
    if launch.max_failures is not None:
        settings["IMGKIT_MAX_FAILURES"] = str(launch.max_failures)
    if allocation.nodes > 1:
        settings["IMGKIT_SCHEDULER"] = system.placement
    return {name: value for name, value in settings.items() if value}


# How long before the time limit a program is asked to save, unless "--stop-before" is given. This is twice
# the node agent's grace period of a minute: Slurm's signal can come up to a minute early.
STOP_BEFORE_S = 120
# Jobs of less than 10 minutes are not asked to save before their end unless "--stop-before" is given.
SHORT_S = 600


def parse_nodes(text: str) -> Size:
    """Return the number of nodes and spares that a value of ``--nodes`` means: ``16+1`` -> 16 and 1.

    Raises
    ------
    UsageError : `text` is not ``N`` or ``N+SPARES``.
    """
    try:
        return Size.parse(text)
    except ValueError as error:
        raise UsageError(str(error), where="--nodes", hint=size_examples(text, "--nodes ")) from None


def _gpus_per_node(recipe: Target, request: JobRequest) -> int:
    """Return the requested number of GPUs per node, or else the number that a node has.

    Raises
    ------
    UsageError : a node has fewer GPUs than requested.
    """
    node_gpus = recipe.system.node.gpus
    gpus = request.allocation.gpus
    if gpus is None:
        return node_gpus
    # The system that an image records has no positions. Its 0 may mean that nobody stated a number.
    is_limit = node_gpus or ("system", "node", "gpus") in recipe.positions
    if is_limit and gpus > node_gpus:
        raise _node_limit_error(recipe, "gpus", gpus, node_gpus)
    return gpus


def _node_limit_error(recipe: Target, key: str, number: int, limit: int) -> UsageError:
    """Return the error for a request of more GPUs or CPUs per node than a node has.

    Parameters
    ----------
    key : the field of ``system.node``, ``gpus`` or ``cpus``. The flag has the same name.
    """
    hint = f"--{key} {limit} with more --nodes" if limit else f"leave --{key} out"
    where = recipe.where("system", "node", key)
    return UsageError(f"--{key} {number}, but a node has {limit}", where=where, hint=hint)


def _cpus_per_node(recipe: Target, request: JobRequest, gpus: int) -> int | None:
    """Return the CPUs per node for a job with `gpus` GPUs per node.

    Without ``--cpus``, the job gets the CPUs that belong to its GPUs. Without GPUs, it gets a CPU for each
    process of ``--nproc``, or else all CPUs of a node. None leaves the number to the system.

    Raises
    ------
    UsageError : a node has fewer CPUs than requested, or the system fixes another number for these GPUs.
    """
    node, cpus = recipe.system.node, request.allocation.cpus
    cpus_of_gpus = gpus * (node.cpus_per_gpu or 0)
    share = f"{node.cpus_per_gpu} each"
    if node.cpus is not None and cpus_of_gpus > node.cpus:
        # A partition may have fewer CPUs than all of its GPUs bring by `cpus_per_gpu` of `system.node`.
        cpus_of_gpus = node.cpus
        share = "all of a node"
    if cpus is None:
        return cpus_of_gpus or _cpus_of_processes(request, node.cpus)
    if cpus_of_gpus and cpus != cpus_of_gpus:
        raise UsageError(
            f"--cpus {cpus}, but {gpus} GPUs come with {cpus_of_gpus} CPUs ({share})",
            where=recipe.where("system", "node", "cpus_per_gpu"),
            hint=f"leave --cpus out, or --cpus {cpus_of_gpus}",
        )
    if node.cpus is not None and cpus > node.cpus:
        raise _node_limit_error(recipe, "cpus", cpus, node.cpus)
    return cpus


def _cpus_of_processes(request: JobRequest, node_cpus: int | None) -> int | None:
    """Return the number of processes of ``--nproc``, but at most that of the CPUs of a node.

    Without ``--nproc``, the result is the number of CPUs of a node, or None if the recipe states none.
    """
    nproc = request.launch.nproc
    if nproc is None or node_cpus is None:
        return nproc or node_cpus
    return min(nproc, node_cpus)


def _memory_per_node(recipe: Target, requested: AllocationRequest, gpus: int) -> Memory | None:
    """Return the memory per node for a job with `gpus` GPUs per node.

    It is the value of ``--mem`` or ``--mem-per-gpu``, or else the default of the recipe. None leaves it to
    the scheduler, for example because an option of the scheduler states the memory.

    Raises
    ------
    UsageError : a size is not valid, a node has less memory, or the flags contradict each other or the GPUs.
    """
    node = recipe.system.node
    if requested.mem and requested.mem_per_gpu:
        raise UsageError(
            "--mem cannot be combined with --mem-per-gpu", where="--mem-per-gpu", hint="use only one of them"
        )
    if requested.mem_per_gpu and not gpus:
        raise UsageError(
            f"--mem-per-gpu {requested.mem_per_gpu}, but the job has no GPUs",
            where="--mem-per-gpu",
            hint=f"--mem {requested.mem_per_gpu}",
        )
    if requested.mem:
        memory = Memory(size_MiB=parse_size(requested.mem, where="--mem"))
    elif requested.mem_per_gpu:
        memory = Memory(size_MiB=parse_size(requested.mem_per_gpu, where="--mem-per-gpu"), gpus=gpus)
    elif _states_memory(recipe, requested):
        return None  # Slurm refuses two options for memory
    elif gpus and node.memory_per_gpu_GB:
        memory = Memory(size_MiB=node.memory_per_gpu_GB << 10, gpus=gpus)
    elif node.default_memory_GB:
        memory = Memory(size_MiB=node.default_memory_GB << 10)
    else:
        return None
    if node.memory_GB is not None and memory.node_MiB > node.memory_GB << 10:
        raise _memory_limit_error(recipe, memory, node.memory_GB << 10)
    return memory


def _states_memory(recipe: Target, requested: AllocationRequest) -> bool:
    """Return whether an option for the scheduler requests memory.

    Such options are ``--mem-per-cpu=8G`` of Slurm and ``mem=64gb`` of PBS.
    """
    queue = recipe.system.queue
    options = (*queue.options, *queue.chunk, *requested.options)
    return any(re.match("(?:--|--cpu-)?mem", option) for option in options)


def _memory_limit_error(recipe: Target, memory: Memory, limit_MiB: int) -> UsageError:
    """Return the error for a request of more than `limit_MiB` of memory per node."""
    request = memory.option
    largest_MiB = limit_MiB
    if memory.gpus:
        request += f" with {memory.gpus} GPUs is {size_text(memory.node_MiB)}"
        largest_MiB //= memory.gpus
    return UsageError(
        f"{request}, but a node has {size_text(limit_MiB)}",
        where=recipe.where("system", "node", "memory_GB"),
        hint=f"{memory.flag} {size_text(largest_MiB)} with more --nodes",
    )


def _time_limit(recipe: Target, requested: QueueRequest) -> str:
    """Return the time limit as ``HH:MM:SS``, or "" if neither the request nor the recipe states one.

    Raises
    ------
    UsageError : the time is not valid, or longer than the limit of the QoS or queue.
    """
    queue = recipe.system.queue
    text = requested.time or queue.time
    if not text:
        return ""
    where = "--time"
    if not requested.time:
        where = recipe.where("system", "queue", "time")
    time_s = quoting.parse_time_limit(text, where=where)
    # The limit of a QoS replaces that of the queue: it is shorter for tests, or longer for a few users.
    name = requested.qos or queue.qos
    if name not in queue.limits:
        name = requested.queue or queue.name
    if name in queue.limits:
        where = recipe.where("system", "queue", "limits", name)
        if time_s > quoting.parse_time_limit(queue.limits[name], where=where):
            raise _time_limit_error(queue.limits, name, time_s, where)
    return quoting.format_time_limit(time_s)


def _time_limit_error(limits: Mapping[str, str], name: str, time_s: int, where: str) -> UsageError:
    """Return the error for a job that is longer than the limit of the queue or QoS `name`.

    Parameters
    ----------
    limits : the limits of all queues and QoS. The hint names the others.
    where : the recipe's line with the limit.
    """
    other_queue = "another queue"
    other_limits = [f"{key} {limit}" for key, limit in limits.items() if key != name]
    if other_limits:
        other_queue += f" ({', '.join(other_limits)})"
    return UsageError(
        f"--time {quoting.format_time_limit(time_s)}, but {name} ends jobs after {limits[name]}",
        where=where,
        hint=f"--time {limits[name]}, or {other_queue}; dist-train resumes where a job left off",
    )


def _stop_before(request: JobRequest, time_limit: str) -> int:
    """Return how many seconds before the time limit the program is asked to save. 0 means never.

    Parameters
    ----------
    time_limit : the limit as ``HH:MM:SS``, or "" if the job has none.

    Raises
    ------
    UsageError : ``--stop-before`` is not shorter than the time limit.
    """
    stop_before_s = request.launch.stop_before_s
    limit_s = math.inf
    if time_limit:
        limit_s = quoting.parse_time_limit(time_limit, where="--time")
    if stop_before_s is None:
        return STOP_BEFORE_S if limit_s >= SHORT_S else 0
    if stop_before_s >= limit_s:
        raise UsageError(
            f"{stop_before_s} s must be less than the job's time limit, {time_limit}",
            where="--stop-before",
            hint=f"a longer --time, or --stop-before {limit_s // 2}; 0: never",
        )
    return stop_before_s
