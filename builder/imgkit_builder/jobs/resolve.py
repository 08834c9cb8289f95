"""Turn a user's request into a job: choose the value of each field, and check it.

A value comes from the request if the user has set it there. Otherwise it comes from the recipe, and otherwise
it is a default. Each value is checked against the limits that the recipe sets for its queues and nodes. The
functions here write no files and run no commands.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from imgkit_builder.base.flags import declared_options, flags_in
from imgkit_builder.jobs import container_setup, quoting, runtimes, systems
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
from imgkit_builder.recipe.problems import KeyPath, allowed_hint, shorten_path
from imgkit_builder.recipe.systems import is_podman
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints.cli.commands import COMMANDS
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import explain, host_leaks
from imgkit_entrypoints.schedulers.placement import Size, size_examples
from imgkit_entrypoints.system import CUDA_COMPAT, HOST_LIBS, Node


def resolve_job(recipe: Target, request: JobRequest) -> Job:
    """Return the job that runs `request` on the system of `recipe`, with all values chosen and checked.

    A value of the request takes precedence over the value in the recipe. A value in the recipe takes
    precedence over a default.

    Raises
    ------
    UsageError : the system cannot satisfy a value. If the recipe sets the limit, the error names the line of
        the recipe.
    ToolFailed : the system is a plug-in that cannot be loaded.
    """
    # The partition must be selected first, because all later checks need the limits of its nodes.
    recipe = _select_partition(recipe, request.allocation.queue or recipe.system.queue.name)
    system = systems.get_system(recipe.system.scheduler)
    job = _job_without_nodes(recipe, request, system)
    if request.container.code is not None and not system.code_copier:
        raise UsageError(
            f"{recipe.title} has no folder into which a run could copy its code",
            where="--code",
            hint="build it into the image (image.copy), and leave --code out, or add --no-code",
        )
    # Each step reads what the one before has added: the settings depend on the nodes, and the checks on all
    # of it.
    job = _with_nodes(job, system)
    job = dataclasses.replace(job, settings=_agent_settings(job, system))
    job = container_setup.with_mounts_and_variables(job, passes_names=system.abilities.passes_names)
    runtime = runtime_of(job)
    runtime.check(job)
    _refuse_amd(job)
    warnings = (*job.warnings, *system.check(job), *runtime.warnings(job))
    return dataclasses.replace(job, warnings=warnings)


def _job_without_nodes(recipe: Target, request: JobRequest, system: System) -> Job:
    """Return a job with its command, image and queue, to which `_with_nodes` adds the nodes.

    Its warnings name flags that have no effect in this job, and a queue that the recipe does not list.

    Raises
    ------
    UsageError : a value is not valid, or would reveal a secret, or the system cannot use the runtime.
    """
    allocation = _queue_allocation(recipe, request, system)
    container_setup.refuse_secrets(recipe, request)
    directory = request.directory.absolute()
    quoting.check_flag_value("--directory", str(directory))
    runtime = _select_runtime(recipe, request.container.runtime, system)
    command = _job_command(request)
    image = runtime.image(container_setup.requested_image(request), recipe.name, directory)
    return Job(
        recipe=recipe,
        request=request,
        # A flag of the system can choose another one: `--format` gives jobs of RunAI to Kubeflow.
        system=request.flags(system.flags).system or recipe.system.scheduler,
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


def resolve_conversion(recipe: Target, request: JobRequest, image: Path) -> Job:
    """Return a job that creates the image file `image` on a node, instead of running a program in an image.

    The command of `request` is ``imgkit sif`` or ``imgkit build``. The job uses one node without GPUs, in the
    queue that the recipe sets for such jobs (``queue.sif``).

    Raises
    ------
    UsageError : a value is not valid, a field that the recipe requires is not set, or the job would reveal a
        secret.
    ToolFailed : the system is a plug-in that cannot be loaded.
    """
    system = systems.get_system(recipe.system.scheduler)
    # The warnings come first, because they compare the flags with the queues of the original recipe.
    warnings = (
        *_unused_flag_warnings(recipe, request, system),
        *_unlisted_queue_warnings(recipe, request.allocation.queue),
    )
    recipe = _with_sif_queue(recipe, system)
    container_setup.refuse_secrets(recipe, request)
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
    """Return `recipe` with its queue, QoS and scheduler options replaced by those in ``queue.sif``.

    ``queue.sif`` is a list of scheduler options for jobs that create image files. For example,
    ``["--qos=gp_debug", "--exclusive"]`` sets the QoS to ``gp_debug``, clears the queue, and keeps
    ``--exclusive`` as an option.

    The recipe also records the line of each key. These records are moved together with the options, so that
    an error about an option still names its line in ``queue.sif``.
    """
    queue = recipe.system.queue
    fields, option_indices = _parse_sif_arguments(queue.sif, system.queue.fields)
    options = tuple(queue.sif[index] for index in option_indices)
    new_keys: dict[KeyPath, KeyPath] = {}
    for new_index, index in enumerate(option_indices):
        new_keys["system", "queue", "sif", index] = ("system", "queue", "options", new_index)
    sif_queue = dataclasses.replace(queue, name=fields["name"], qos=fields["qos"], options=options)
    system_facts = dataclasses.replace(recipe.system, queue=sif_queue)
    return _with_copied_positions(dataclasses.replace(recipe, system=system_facts), new_keys)


class _SifArguments(NamedTuple):
    """What `_parse_sif_arguments` reads from ``queue.sif``."""

    fields: Mapping[str, str]
    """The values of the fields ``name`` (the queue) and ``qos``, or "" if ``queue.sif`` does not set them."""
    option_indices: Sequence[int]
    """The positions in ``queue.sif`` of all other arguments, which the scheduler gets unchanged."""


def _parse_sif_arguments(arguments: Sequence[str], field_by_option: Mapping[str, str]) -> _SifArguments:
    """Separate the arguments of ``queue.sif`` that set the queue or the QoS from all others.

    Parameters
    ----------
    field_by_option : the scheduler's options that set a field, for example ``{"--qos": "qos"}``.
    """
    # Both begin empty, because the queue and the QoS of other jobs must not be kept.
    fields = {"name": "", "qos": ""}
    option_indices = []
    next_field = ""  # the field whose value is the next argument
    for index, argument in enumerate(arguments):
        if next_field:  # PBS has the value in an argument of its own: "-q", "debug"
            fields[next_field] = argument
            next_field = ""
            continue
        option, _, value = argument.partition("=")
        if option not in field_by_option:
            option_indices.append(index)
        elif value:
            fields[field_by_option[option]] = value
        else:
            next_field = field_by_option[option]
    return _SifArguments(fields, option_indices)


def _with_copied_positions(recipe: Target, new_keys: Mapping[KeyPath, KeyPath]) -> Target:
    """Return `recipe` with the positions of some keys recorded under further keys as well.

    A position is the line of a recipe that an error message names. When a value is copied to another key, its
    position must be copied too.

    Parameters
    ----------
    new_keys : maps each old key, such as ``("system", "queue", "sif", 1)``, to the key that received its
        value.
    """
    positions = dict(recipe.positions)
    for key, new_key in new_keys.items():
        if key in recipe.positions:
            positions[new_key] = recipe.positions[key]
    return dataclasses.replace(recipe, positions=positions)


# The smallest number that is allowed in each field of a request. A job with 0 GPUs runs on CPUs.
_SMALLEST_NUMBERS = {"nproc": 1, "cpus": 1, "gpus": 0, "max_failures": 0, "stop_before_s": 0}


def _refuse_small_numbers(request: JobRequest) -> None:
    """Raise UsageError if a number in the request is below the minimum of its field."""
    for flag in declared_options(JobRequest):
        # None means that the user has not given the flag. Fields without a minimum, such as texts, are
        # skipped below.
        minimum = _SMALLEST_NUMBERS.get(flag.field)
        value = flag.value(request)
        if minimum is not None and value is not None and value < minimum:
            raise UsageError(f"must be at least {minimum} (got {value})", where=flag.names[0])


def _select_partition(recipe: Target, name: str) -> Target:
    """Return `recipe` with the nodes and options of the partition `name` in place of the general ones.

    The nodes of the partition become ``system.node``, and its options become part of
    ``system.queue.options``. An error about one of these values still names its line under
    ``system.partitions.NAME``. If the recipe does not list the partition, it is returned unchanged.
    """
    partition = recipe.system.partitions.get(name)
    if partition is None:
        return recipe
    system_facts = recipe.system.in_partition(name)
    new_keys = _node_keys(recipe, name)
    # `in_partition` has appended the options of the partition to those of the queue.
    first_index = len(system_facts.queue.options) - len(partition.options)
    for index in range(len(partition.options)):
        old_key = ("system", "partitions", name, "options", index)
        new_keys[old_key] = ("system", "queue", "options", first_index + index)
    return _with_copied_positions(dataclasses.replace(recipe, system=system_facts), new_keys)


def _node_keys(recipe: Target, partition_name: str) -> dict[KeyPath, KeyPath]:
    """Return the key under ``system.node`` for each key of a partition in the recipe's file.

    For example, ``system.partitions.NAME.gpus`` -> ``system.node.gpus``. A recipe from an image has no file,
    so the result is empty.
    """
    partition_key = ("system", "partitions", partition_name)
    new_keys: dict[KeyPath, KeyPath] = {}
    for key in recipe.positions:  # the keys in the recipe's file, with the line of each
        *parent_key, field = key
        if tuple(parent_key) == partition_key:
            new_keys[key] = ("system", "node", field)
    return new_keys


def _unlisted_queue_warnings(recipe: Target, queue: str) -> Iterator[str]:
    """Yield a warning if the recipe does not list `queue`, because the nodes of that queue may differ.

    A recipe that lists no queues causes no warning. Such a recipe has neither partitions nor a limit for its
    default queue.

    Raises
    ------
    UsageError : the recipe does not list the queue, and declares its list as complete.
    """
    system_facts = recipe.system
    default_queue = system_facts.queue.name
    # A recipe without a default queue has the empty name, which is not a queue.
    listed = {default_queue, *system_facts.partitions, *system_facts.queue.limits} - {""}
    if not queue or queue in listed:
        return
    if system_facts.partition_list == "complete":
        raise UsageError(
            f"--queue {queue}, but {recipe.title} has no such queue",
            where=recipe.where("system", "partition_list"),
            hint=allowed_hint(queue, listed),
        )
    # Without any list, the recipe says nothing about queues, and the user's queue needs no warning.
    if system_facts.partitions or default_queue in system_facts.queue.limits:
        names = ", ".join(sorted(listed))
        yield (
            f"--queue {queue}: {recipe.title} lists only {names}; the job is written for the nodes of "
            "system.node"
        )


def _queue_allocation(recipe: Target, request: JobRequest, system: System) -> Allocation:
    """Return an allocation with the account, queue, QoS and time limit of the job.

    Each value comes from the request, or otherwise from the recipe. `_with_nodes` adds the number of nodes
    and their GPUs later.

    Raises
    ------
    UsageError : a value is not valid, or the recipe requires a value that is not set, such as an account.
    """
    requested, defaults = request.allocation, recipe.system.queue
    allocation = Allocation(
        account=quoting.check_flag_value("--account", requested.account or defaults.account),
        queue=quoting.check_flag_value("--queue", requested.queue or defaults.name),
        qos=quoting.check_flag_value("--qos", requested.qos or defaults.qos),
        time=_time_limit(recipe, requested),
    )
    # An interactive shell in pods needs none of the required fields. Every other job needs them all.
    if system.needs_fields_for_shells or not request.launch.interactive:
        _refuse_missing_fields(recipe, allocation, request.project)
    return allocation


def _refuse_missing_fields(recipe: Target, allocation: Allocation, project: ProjectSource | None) -> None:
    """Raise UsageError if `allocation` has no value for a field that the recipe requires.

    The list ``system.queue.required`` of a recipe names these fields. For example, a computing center may
    require an account or a QoS, and its scheduler would refuse a job without it.

    Parameters
    ----------
    project : the imgkit.toml of the request, or None without such a file. The hint names its lines.
    """
    missing_keys = []
    for field in recipe.system.queue.required:
        # The queue is the field "name" of system.queue in a recipe, and the field "queue" in a request.
        key = "queue" if field == "name" else field
        # `Allocation` names its attributes like the flags. An empty value means that the field is not set.
        if not getattr(allocation, key):
            missing_keys.append(key)
    if not missing_keys:
        return
    flags = ", ".join(f"--{key}" for key in missing_keys)
    hint = _missing_fields_hint(recipe, missing_keys, project)
    where = recipe.where("system", "queue", "required")
    raise UsageError(f"{recipe.title} needs {flags}", where=where, hint=hint)


def _with_nodes(job: Job, system: System) -> Job:
    """Return `job` with its number of nodes, and with the GPUs, CPUs and memory of each node.

    Raises
    ------
    UsageError : a number is below its minimum, or exceeds the GPUs, CPUs or memory of a node.
    """
    recipe, request = job.recipe, job.request
    _refuse_small_numbers(request)
    default_nodes = request.flags(system.flags).default_nodes  # for example one node for each of --hosts
    gpus = _gpus_per_node(recipe, request)
    memory = _memory_per_node(recipe, request.allocation, gpus)
    # Some systems have no option for memory. The flags are checked there as well, but no memory is requested.
    has_memory_option = "mem" in (*system.uses, *runtime_of(job).used_flags())
    return job.with_allocation(
        size=parse_nodes(request.allocation.nodes or str(default_nodes)),
        gpus=gpus,
        cpus=_cpus_per_node(recipe, request, gpus),
        memory=memory if has_memory_option else None,
        # `_queue_allocation` has set the time limit before.
        stop_before_s=_seconds_before_limit(request, job.allocation.time),
    )


def _unused_flag_warnings(
    recipe: Target, request: JobRequest, system: System, runtime: Runtime | None = None
) -> Iterator[str]:
    """Yield a warning for each flag of the request that neither the system nor the runtime uses.

    For example, PBS has no QoS, so it ignores ``--qos``. The job is submitted without that value.

    Parameters
    ----------
    runtime : the runtime that starts the command, such as Docker. None stands for a job that creates an image
        file.
    """
    used_names = set(system.uses)
    if runtime is not None:
        used_names.update(runtime.used_flags())
    # `OPTIONAL` lists the flags that only some systems or runtimes use. The others always have an effect.
    unused_flags = {f"--{name}" for name in OPTIONAL if name not in used_names}
    ignored_flags = [flag for flag in flags_in(request) if flag in unused_flags]
    for flags in request.system_flags:
        if type(flags) is not system.flags:  # these flags belong to another system
            ignored_flags += flags_in(flags)
    scheduler = recipe.system.scheduler
    for flag in ignored_flags:
        yield f"{flag} is not used: {recipe.title} ({scheduler}) has no such flag"


def _missing_fields_hint(recipe: Target, keys: Sequence[str], project: ProjectSource | None) -> str:
    """Return a hint about how to set fields of ``system.queue`` that the recipe requires.

    For example, the hint begins with ``add --account ...``.

    Parameters
    ----------
    keys : the names of the missing fields in imgkit.toml, for example ``["account"]``. The flags have the
        same names.
    project : the imgkit.toml of the request, or None without such a file.
    """
    flags = " ".join(f"--{key} ..." for key in keys)
    if project:
        file_name = shorten_path(project.file).name
        lines = [f'{key} = "..." in {project.lines.get(key, file_name)}' for key in keys]
        hint = f"set {', '.join(lines)}; or add {flags}"
    else:
        hint = f"add {flags}, or set it in a recipe that extends {recipe.name} (system.queue)"
    if "queue" in keys and recipe.system.partitions:
        hint += f"; queues: {', '.join(sorted(recipe.system.partitions))}"
    return hint


def _job_command(request: JobRequest) -> tuple[str, ...]:
    """Return the command of the job. It is empty for an interactive shell.

    A faulty command is refused here. Otherwise the job would wait in the queue and then fail.

    Raises
    ------
    UsageError : the command is missing, contains a line break or a null byte, or is an unknown ``dist-*``
        command.
    """
    command = request.launch.command
    if not command and request.launch.interactive:
        return ()
    if not command:
        raise UsageError(
            "no command given",
            where="COMMAND",
            hint="imgkit run RECIPE -- dist-bench; or --interactive",
        )
    for argument in command:
        if "\n" in argument or "\0" in argument:
            raise UsageError(
                "an argument of the command contains a line break", where="COMMAND", hint="put it in a file"
            )
    _refuse_unknown_entry_point(command[0])
    return command


def _refuse_unknown_entry_point(program: str) -> None:
    """Raise UsageError for a program ``dist-*`` that imgkit does not have.

    Only imgkit's commands in the image begin with ``dist-``, so an unknown one is a typing error.
    """
    entry_points = [entry_point.name for entry_point in COMMANDS]
    if program.startswith("dist-") and program not in entry_points:
        raise UsageError(f"there is no {program}", where="COMMAND", hint=allowed_hint(program, entry_points))


def _select_runtime(recipe: Target, requested: RuntimeName | None, system: System) -> Runtime:
    """Return the runtime that starts the command on each node.

    A runtime is, for example, Singularity, pyxis or Docker, or the node itself without a container.
    ``--runtime`` chooses it, or otherwise the recipe.

    Raises
    ------
    UsageError : jobs on this system cannot use the runtime.
    """
    runtime = runtimes.get_runtime(requested or recipe.system.runtime.kind)
    program = runtime.program(recipe)
    # On such a system (Slurm), "docker" is allowed only with Podman as its program.
    if system.registration.by_podman and runtime.kind == Docker.kind and not is_podman(program):
        # A Docker container is a child process of Docker's daemon. So the scheduler would neither account for
        # its CPUs and memory nor end it with the job. The containers of Podman are processes of the job.
        raise _runtime_error(
            recipe,
            f"{runtime.kind} cannot be used on {recipe.title}: containers of {program} belong to its service "
            f"on each node, and {recipe.system.scheduler} neither counts nor ends them",
            key="command",
            hint="system.runtime with kind: docker and command: podman (or podman-hpc) in the recipe",
            is_requested=requested is not None,
        )
    supported_runtimes = system.registration.runtimes
    if runtime.kind not in supported_runtimes:
        raise _runtime_error(
            recipe,
            _unsupported_runtime_message(recipe, runtime, supported_runtimes),
            key="kind",
            hint=allowed_hint(runtime.kind, supported_runtimes),
            is_requested=requested is not None,
        )
    return runtime


def _unsupported_runtime_message(recipe: Target, runtime: Runtime, supported_kinds: Collection[str]) -> str:
    """Return the message about a runtime that jobs on the recipe's system cannot use."""
    message = f"{runtime.kind} cannot be used on {recipe.title}"
    starts_pods = Host.kind not in supported_kinds  # Kubernetes passes the variables to pods
    if runtime.passes_variables_as_options and not starts_pods:
        message += (
            f": {runtime.program(recipe)} does not pass {recipe.system.scheduler}'s variables into the "
            "container, so each node would run alone"
        )
    return message


def _runtime_error(recipe: Target, message: str, *, key: str, hint: str, is_requested: bool) -> UsageError:
    """Return the error for a runtime, such as Docker, that jobs on this system cannot use.

    Parameters
    ----------
    key : the key under ``system.runtime`` of the recipe that the user has to change.
    is_requested : whether ``--runtime`` names the runtime. If not, the recipe names it.
    """
    if is_requested:
        return UsageError(message, where="--runtime", hint=hint)
    return UsageError(
        message,
        where=recipe.where("system", "runtime", key),
        hint=f"{hint}; change system.runtime in the recipe, or give --runtime",
    )


def chooses_cpus(request: JobRequest) -> bool:
    """Return whether the user asks for a run on CPUs.

    The user does so by ``--gpus 0``, or by ``--device cpu`` or ``--device=cpu`` in the command.
    """
    if request.allocation.gpus == 0:
        return True
    # Joined and split again, so that an argument such as 'dist-train --device cpu' of "bash -c" counts as
    # well.
    command_line = " ".join(request.launch.command)
    arguments = command_line.replace("=", " ").split(" ")
    return ("--device", "cpu") in itertools.pairwise(arguments)


def _refuse_amd(job: Job) -> None:
    """Raise UsageError for a job on AMD GPUs, which imgkit does not support. Jobs on CPUs are accepted.

    Without this check, the job would wait in the queue and then fail. The node agent, imgkit's process on
    each node, refuses to start on such nodes, and any other program would find no GPU.
    """
    if chooses_cpus(job.request):
        return
    if runtime_of(job).has_container:
        _refuse_amd_image(job)
    if job.allocation.gpus:
        evidence = bases.amd_node_evidence(job.recipe.system)
        _refuse_amd_evidence(evidence, job.recipe.where("system", "node", "gpu_model"))


def _refuse_amd_image(job: Job) -> None:
    """Raise UsageError if the image of the job is for AMD GPUs, judging by its name or its base image."""
    recipe = job.recipe
    requested_image = job.request.container.image  # the value of --image, or "" for the recipe's own image
    # A .sif can take the place of the recipe. `recipe` is then the record in that .sif.
    describes_image = not requested_image or Path(requested_image) == recipe.file.absolute()
    if describes_image:  # the base image in it says more than the name of the image
        evidence = bases.amd_image_evidence(recipe.base, recipe.base_env)
        _refuse_amd_evidence(evidence, recipe.where("image", "base"))
        return
    # The folders in the path of a file say nothing about its content. In the name of a registry image they
    # do: "rocm/pytorch".
    is_file = job.container.image.startswith("/")
    name = PurePath(requested_image).name if is_file else requested_image
    _refuse_amd_evidence(bases.amd_image_evidence(name), "--image")


def _refuse_amd_evidence(evidence: str, where: str) -> None:
    """Raise UsageError if there is evidence for AMD GPUs.

    Parameters
    ----------
    evidence : a text that names the evidence, or "" if there is none.
    where : the flag or the line of the recipe that the error names.
    """
    if evidence:
        message, hint = bases.amd_warning(evidence)
        raise UsageError(message, where=where, hint=hint)


def _agent_settings(job: Job, system: System) -> Mapping[str, str]:
    """Return the variables that pass options of the request to the node agent, imgkit's process on each node.

    For example, ``--max-failures 3`` becomes ``IMGKIT_MAX_FAILURES=3``. An option gets no variable if it has
    no effect in this job. It gets none either if the node agent finds the value in the image, or if the value
    is the node agent's own default.
    """
    launch, allocation = job.request.launch, job.allocation
    settings = _worker_settings(job, system)
    if allocation.memory:
        # Only for messages: after a lack of memory, the node agent names what the job had requested.
        settings[explain.MEMORY] = allocation.memory.option
    if allocation.size.spares:
        # For example "16+1". The scheduler counts 17 nodes, and does not know that one of them is a spare.
        settings["IMGKIT_NNODES"] = str(allocation.size)
    settings.update(_library_settings(job))
    # The node agent removes variables that leak from the host into the container. It must keep the variables
    # that the user has set with --env, so their names are passed on.
    user_names = [assignment.partition("=")[0] for assignment in job.request.container.env]
    settings["IMGKIT_KEEP_ENV"] = ",".join(filter(host_leaks.may_remove, user_names))
    if launch.preflight:
        settings["IMGKIT_PREFLIGHT"] = "1"
    if launch.max_failures is not None:
        settings["IMGKIT_MAX_FAILURES"] = str(launch.max_failures)
    if allocation.nodes > 1:
        settings["IMGKIT_SCHEDULER"] = system.placement
    # A value above can be empty: no variable has to be kept, or the node agent recognizes the scheduler by
    # itself.
    return {name: value for name, value in settings.items() if value}


def _worker_settings(job: Job, system: System) -> dict[str, str]:
    """Return the variables that tell the node agent its device, its GPUs and how many workers to start.

    A worker is one process of the program. Usually each GPU has one worker.
    """
    gpus = job.allocation.gpus
    requested_gpus = job.request.allocation.gpus
    nodes_have_gpus = job.recipe.system.node.gpus > 0
    settings = {}
    if gpus:
        # The node agent usually reads the number of GPUs from system.json in the image. That file is missing
        # without a container, and names no GPUs if the recipe's nodes have none.
        if not nodes_have_gpus or not runtime_of(job).has_container:
            settings["IMGKIT_GPUS"] = str(gpus)
    elif nodes_have_gpus or requested_gpus == 0:
        # The node agent refuses to start without the GPUs that its system.json names, unless this variable
        # selects the CPU. `--gpus 0` also applies to GPUs that the recipe does not name.
        settings["IMGKIT_DEVICE"] = "cpu"
    nproc = job.request.launch.nproc
    if not nproc and not system.abilities.hides_gpus:
        # Programs see all GPUs of the node here, so the number of workers must limit how many GPUs they use.
        nproc = requested_gpus
    if nproc:  # otherwise the node agent chooses the number
        settings["IMGKIT_NPROC"] = str(nproc)
    return settings


def _library_settings(job: Job) -> dict[str, str]:
    """Return the variables that select libraries of the host and the CUDA compatibility package.

    Both are for programs in a container.
    """
    system_facts, runtime = job.recipe.system, runtime_of(job)
    settings = {}
    if system_facts.fabric.host_libs == "auto" and runtime.mounts_folders:
        settings[HOST_LIBS] = ":".join(("auto", *system_facts.runtime.host_libs))
    # "major" is the default of the node agent, also in an image that imgkit did not build. So it needs no
    # variable.
    if system_facts.runtime.cuda_compat != "major" and runtime.has_container:
        settings[CUDA_COMPAT] = system_facts.runtime.cuda_compat
    return settings


# Seconds before the time limit at which a program is asked to save its state, unless --stop-before is given.
# This is twice the minute that the node agent gives the program to save, because Slurm's signal may come up
# to a minute early.
STOP_BEFORE_S = 120
# Shorter jobs, of less than 10 minutes, are not asked to save before their end unless --stop-before is given.
SHORT_JOB_S = 600


def parse_nodes(text: str) -> Size:
    """Parse a value of ``--nodes``: ``16+1`` means 16 nodes that train and 1 spare node.

    A spare node replaces a node that fails.

    Raises
    ------
    UsageError : `text` is not ``N`` or ``N+SPARES``.
    """
    try:
        return Size.parse(text)
    except ValueError as error:
        raise UsageError(str(error), where="--nodes", hint=size_examples(text, "--nodes ")) from None


def _gpus_per_node(recipe: Target, request: JobRequest) -> int:
    """Return the number of GPUs per node: the requested number, or otherwise all GPUs of a node.

    Raises
    ------
    UsageError : a node has fewer GPUs than requested.
    """
    node_gpus = recipe.system.node.gpus
    gpus = request.allocation.gpus
    if gpus is None:
        return node_gpus
    # 0 GPUs can mean two things. In a recipe's file, which records positions, it is the true number. In an
    # image, which has no positions, it can also mean that the number is unknown, and then no limit applies.
    states_gpus = node_gpus > 0 or ("system", "node", "gpus") in recipe.positions
    if states_gpus and gpus > node_gpus:
        raise _node_limit_error(recipe, "gpus", gpus, node_gpus)
    return gpus


def _node_limit_error(recipe: Target, key: str, number: int, limit: int) -> UsageError:
    """Return the error for a request of more GPUs or CPUs per node than a node has.

    Parameters
    ----------
    key : ``gpus`` or ``cpus``. The field of ``system.node`` and the flag both have this name.
    number : the requested number.
    limit : the number that a node has.
    """
    hint = f"--{key} {limit} with more --nodes" if limit else f"leave --{key} out"
    where = recipe.where("system", "node", key)
    return UsageError(f"--{key} {number}, but a node has {limit}", where=where, hint=hint)


def _cpus_per_node(recipe: Target, request: JobRequest, gpus: int) -> int | None:
    """Return the number of CPUs per node for a job with `gpus` GPUs per node, or None.

    None leaves the number to the scheduler. Without ``--cpus``, a job with GPUs gets the CPUs that belong to
    these GPUs. A job without GPUs gets one CPU for each process of ``--nproc``, or otherwise all CPUs of a
    node.

    Raises
    ------
    UsageError : a node has fewer CPUs than requested, or the system assigns another number of CPUs to these
        GPUs.
    """
    node, cpus = recipe.system.node, request.allocation.cpus
    cpus_of_gpus = _cpus_of_gpus(node, gpus)  # 0 if the recipe sets no number, or the job has no GPUs
    if cpus is None:
        return cpus_of_gpus or _cpus_of_processes(request, node.cpus)
    if cpus_of_gpus and cpus != cpus_of_gpus:
        raise _cpus_of_gpus_error(recipe, cpus, gpus)
    if node.cpus is not None and cpus > node.cpus:
        raise _node_limit_error(recipe, "cpus", cpus, node.cpus)
    return cpus


def _cpus_of_gpus(node: Node, gpus: int) -> int:
    """Return how many CPUs belong to `gpus` GPUs of a node, or 0 if the recipe sets no such number."""
    cpus = gpus * (node.cpus_per_gpu or 0)
    if node.cpus is None:
        return cpus
    # `cpus_per_gpu` is set for all partitions. A node of this partition may have fewer CPUs than that would
    # give.
    return min(cpus, node.cpus)


def _cpus_of_gpus_error(recipe: Target, cpus: int, gpus: int) -> UsageError:
    """Return the error for a value of ``--cpus`` that differs from the number of CPUs of the job's GPUs."""
    node = recipe.system.node
    cpus_of_gpus = _cpus_of_gpus(node, gpus)
    share_text = f"{node.cpus_per_gpu} each"
    # `_cpus_of_gpus` has limited the number to the CPUs of a node.
    if cpus_of_gpus < gpus * (node.cpus_per_gpu or 0):
        share_text = "all of a node"
    return UsageError(
        f"--cpus {cpus}, but {gpus} GPUs come with {cpus_of_gpus} CPUs ({share_text})",
        where=recipe.where("system", "node", "cpus_per_gpu"),
        hint=f"leave --cpus out, or --cpus {cpus_of_gpus}",
    )


def _cpus_of_processes(request: JobRequest, node_cpus: int | None) -> int | None:
    """Return the number of CPUs for a job without GPUs: one for each process, but at most `node_cpus`.

    Without ``--nproc``, the job gets all CPUs of a node, `node_cpus`. That number is None if the recipe does
    not set it.
    """
    nproc = request.launch.nproc
    if nproc is None:
        return node_cpus
    if node_cpus is None:  # there is no known limit
        return nproc
    return min(nproc, node_cpus)


def _memory_per_node(recipe: Target, requested: AllocationRequest, gpus: int) -> Memory | None:
    """Return the memory per node that a job with `gpus` GPUs per node requests, or None if it requests none.

    The job requests no memory if no size is set anywhere. It requests none either if an option for the
    scheduler, such as ``--mem-per-cpu``, sets the size already.

    Raises
    ------
    UsageError : a size is not valid, a node has less memory, or the flags contradict each other or the GPUs.
    """
    memory = _requested_memory(requested, gpus)
    # Slurm refuses a job with two options for memory. So the default of the recipe is left out if the user or
    # the recipe passes such an option to the scheduler.
    if memory is None and not _states_memory(recipe, requested):
        memory = _default_memory(recipe.system.node, gpus)
    if memory is None:
        return None
    node_GB = recipe.system.node.memory_GB
    if node_GB is not None and memory.node_MiB > node_GB * 1024:
        raise _memory_limit_error(recipe, memory, node_GB * 1024)
    return memory


def _requested_memory(requested: AllocationRequest, gpus: int) -> Memory | None:
    """Return the memory of ``--mem`` or ``--mem-per-gpu``, or None if neither flag is given.

    Raises
    ------
    UsageError : a size is not valid, both flags are given, or ``--mem-per-gpu`` is given for a job without
        GPUs.
    """
    if requested.mem and requested.mem_per_gpu:
        raise UsageError(
            "--mem cannot be combined with --mem-per-gpu", where="--mem-per-gpu", hint="use only one of them"
        )
    if requested.mem:
        return Memory(size_MiB=parse_size(requested.mem, where="--mem"))
    if not requested.mem_per_gpu:
        return None
    if not gpus:
        raise UsageError(
            f"--mem-per-gpu {requested.mem_per_gpu}, but the job has no GPUs",
            where="--mem-per-gpu",
            hint=f"--mem {requested.mem_per_gpu}",
        )
    return Memory(size_MiB=parse_size(requested.mem_per_gpu, where="--mem-per-gpu"), gpus=gpus)


def _default_memory(node: Node, gpus: int) -> Memory | None:
    """Return the memory that the recipe sets for a job, or None if the recipe sets none.

    In a job with GPUs, the recipe's memory per GPU takes precedence over its memory per node.
    """
    if gpus and node.memory_per_gpu_GB:
        return Memory(size_MiB=node.memory_per_gpu_GB * 1024, gpus=gpus)
    if node.default_memory_GB:
        return Memory(size_MiB=node.default_memory_GB * 1024)
    return None


def _states_memory(recipe: Target, requested: AllocationRequest) -> bool:
    """Return whether an option for the scheduler, in the recipe or from the user, requests memory.

    For example, ``--mem-per-cpu=8G`` of Slurm and ``mem=64gb`` of PBS do so.
    """
    queue = recipe.system.queue
    for option in (*queue.options, *queue.chunk, *requested.options):
        if option.startswith(("--mem", "--cpu-mem", "mem")):
            return True
    return False


def _memory_limit_error(recipe: Target, memory: Memory, limit_MiB: int) -> UsageError:
    """Return the error for a request of more than `limit_MiB` of memory per node."""
    requested = memory.option
    largest_MiB = limit_MiB
    if memory.gpus:  # the size is for each GPU, so the hint must be as well
        requested = f"{memory.option} with {memory.gpus} GPUs is {size_text(memory.node_MiB)}"
        largest_MiB = limit_MiB // memory.gpus
    return UsageError(
        f"{requested}, but a node has {size_text(limit_MiB)}",
        where=recipe.where("system", "node", "memory_GB"),
        hint=f"{memory.flag} {size_text(largest_MiB)} with more --nodes",
    )


def _time_limit(recipe: Target, requested: QueueRequest) -> str:
    """Return the time limit as ``HH:MM:SS``, or "" if neither the request nor the recipe sets one.

    Raises
    ------
    UsageError : the time is not valid, or longer than the limit of the QoS or queue.
    """
    queue = recipe.system.queue
    if requested.time:
        time_s = quoting.parse_time_limit(requested.time, where="--time")
    elif queue.time:
        time_s = quoting.parse_time_limit(queue.time, where=recipe.where("system", "queue", "time"))
    else:
        return ""
    # The limit of a QoS replaces the limit of the queue. A QoS for tests has a shorter limit, and a QoS for a
    # few users can have a longer one.
    name = requested.qos or queue.qos
    if name not in queue.limits:
        name = requested.queue or queue.name
    if name in queue.limits:
        _refuse_long_job(recipe, name, time_s)
    return quoting.format_time_limit(time_s)


def _refuse_long_job(recipe: Target, name: str, time_s: int) -> None:
    """Raise UsageError if a job of `time_s` seconds exceeds the time limit of the queue or QoS `name`.

    The hint lists the limits of other queues and QoS.
    """
    limits = recipe.system.queue.limits
    where = recipe.where("system", "queue", "limits", name)
    if time_s <= quoting.parse_time_limit(limits[name], where=where):
        return
    queues = "another queue"
    other_limits = [f"{queue} {limit}" for queue, limit in limits.items() if queue != name]
    if other_limits:
        queues = f"another queue ({', '.join(other_limits)})"
    raise UsageError(
        f"--time {quoting.format_time_limit(time_s)}, but {name} ends jobs after {limits[name]}",
        where=where,
        hint=f"--time {limits[name]}, or {queues}; dist-train resumes where a job left off",
    )


def _seconds_before_limit(request: JobRequest, time_limit: str) -> int:
    """Return how many seconds before the time limit the program is asked to save its state. 0 means never.

    ``--stop-before`` sets the number. Without it, a job of ten minutes or more is asked `STOP_BEFORE_S`
    seconds before the limit, and a shorter job is not asked. A job without a time limit counts as long,
    because the scheduler's default limit applies to it.

    Parameters
    ----------
    time_limit : the limit as ``HH:MM:SS``, or "" if the job has none.

    Raises
    ------
    UsageError : ``--stop-before`` is not shorter than the time limit.
    """
    requested_s = request.launch.stop_before_s
    limit_s = math.inf  # without a time limit, the job counts as long
    if time_limit:
        limit_s = quoting.parse_time_limit(time_limit, where="--time")
    if requested_s is None:
        return STOP_BEFORE_S if limit_s >= SHORT_JOB_S else 0
    if requested_s >= limit_s:
        raise UsageError(
            f"{requested_s} s must be less than the job's time limit, {time_limit}",
            where="--stop-before",
            hint=f"a longer --time, or --stop-before {limit_s // 2}; 0: never",
        )
    return requested_s
