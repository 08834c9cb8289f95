"""Launch a program on this node, from the command line to the node agent.

`parse_app` and `parse_user_program` return the options and the workers' command. `launch_worker` finds the
placement of this node, makes the plan with all its warnings, and runs the node agent. With ``--direct``, or
if the launcher has already started every rank, there is no node agent: this process becomes the rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path, PurePath

from imgkit_entrypoints import fabric, facts, files, terminal
from imgkit_entrypoints.arguments import refuse_unused
from imgkit_entrypoints.cli.commands import PREFLIGHT, TORCHRUN, Command
from imgkit_entrypoints.cli.options import PER_NODE_NEEDS, RUN_OPTIONS, launch_parser, read_options
from imgkit_entrypoints.errors import NoPlan, UsageError
from imgkit_entrypoints.fabric import library_path, sockets
from imgkit_entrypoints.facts import HostFacts, storage
from imgkit_entrypoints.facts.software import MANIFEST_JSON, absent_files
from imgkit_entrypoints.launch import (
    compile_cache,
    gpu_use,
    host_leaks,
    internet,
    per_node,
    plan,
    user_program,
)
from imgkit_entrypoints.launch.plan import LaunchOptions, LaunchPlan, NodeSetup, StartMessages
from imgkit_entrypoints.rollcall import ports, secret
from imgkit_entrypoints.schedulers import resolve
from imgkit_entrypoints.schedulers.placement import Placement, PlacementRequest
from imgkit_entrypoints.system import HOST_LIBS

# The name of a Python interpreter: "python", "python3" or "python3.11".
_PYTHON = re.compile(r"python(3(\.[0-9]+)?)?")
_USAGE = "dist-run [OPTIONS] SCRIPT|-m MODULE [ARGS]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The command that torchrun starts for each rank."""

    argv: tuple[str, ...]
    is_imgkits: bool
    """True for a program of this package, which imports nothing from the current folder or PYTHONPATH."""


def parse_app(command: Command, argv: Sequence[str], env: Mapping[str, str]) -> tuple[LaunchOptions, Worker]:
    """Return the options of the launch, and the worker that runs the app of `command`.

    An app is a program of imgkit, such as dist-train. It gets all arguments that are not options of the
    launch. Each worker parses these arguments again.

    Raises
    ------
    UsageError : an option is unknown, has a wrong value, or contradicts another.
    """
    assert command.app is not None  # noqa: S101 - the caller branches on it
    # Some apps have their options in a module of their own, which can be imported without torch.
    options_module = importlib.import_module(command.options or command.app)
    full_parser = launch_parser(command, env, options_module.OPTIONS)
    full_parser.formatter_class = argparse.RawDescriptionHelpFormatter
    full_parser.epilog = getattr(options_module, "EXAMPLES", None)
    # This parser has all options. It refuses a wrong command line, and prints --help with all groups.
    full_parser.parse_args(argv[1:])
    # This parser has only the options of the launch, and returns the app's arguments unparsed.
    parsed, app_args = launch_parser(command, env).parse_known_args(argv[1:])
    if hasattr(options_module, "check"):
        options_module.check(app_args, env)  # raises UsageError if two arguments contradict each other
    options = read_options(parsed, command, argv)
    # --json is an option of the launch, but an app that prints JSON needs it as well.
    if command.prints_json and options.json:
        app_args.append("--json")
    # -I: a file in the current folder, such as json.py, must not replace a module. -u: Python must not hold
    # the output back while it is a pipe.
    worker_argv = (sys.executable, "-I", "-u", "-m", command.app, *app_args)
    return options, Worker(argv=worker_argv, is_imgkits=True)


def parse_user_program(
    command: Command, argv: Sequence[str], env: Mapping[str, str]
) -> tuple[LaunchOptions, Worker]:
    """Return the options of the launch, and the command that runs the user's program in each worker.

    The program follows the options in `argv`. With ``--per-node``, it may be any command, which runs
    unchanged. Otherwise it must be a Python program, and user_program.py runs it in each worker.

    Raises
    ------
    UsageError : an option is unknown or has a wrong value, or there is no program.
    """
    parser = launch_parser(command, env, RUN_OPTIONS)
    parser.usage = _USAGE
    try:
        parsed = parser.parse_args(argv[1:])
    except UsageError as error:
        # The option may be one of the program, typed before the program's name.
        if "unknown option" in error.what:
            error.hint = _suggest_argument_order(command, argv, env) or error.hint
        raise
    program = parsed.program
    if program[:1] == ["--"]:  # it only separates the options of dist-run from the program
        program = program[1:]
    if not program:
        raise UsageError("no script given", hint=_USAGE)
    # Some options have an effect only with --per-node, and some only without it.
    refuse_unused(parser, parsed, PER_NODE_NEEDS)
    options = read_options(parsed, command, argv)
    if parsed.per_node:
        _refuse_missing_run_folder((*program, *parsed.worker_arg), env)
        return options, Worker(argv=tuple(program), is_imgkits=False)
    if not parsed.module:
        _refuse_python(command, argv, program)
    return options, Worker(argv=(*_build_python_argv(parsed), *program), is_imgkits=False)


def _build_python_argv(parsed: argparse.Namespace) -> list[str]:
    """Return the first arguments of a worker's command. The user's program and its arguments follow them."""
    # Without -u, Python would hold the program's output back while it is a pipe. There is no -I, as there is
    # for imgkit's own apps, because the program may need PYTHONPATH.
    python_argv = [sys.executable, "-u", user_program.__file__]
    if parsed.pass_local_rank:
        python_argv.append("--pass-local-rank")
    if parsed.module:
        python_argv.append("-m")
    return python_argv


def _refuse_python(command: Command, argv: Sequence[str], program: Sequence[str]) -> None:
    """Raise UsageError if `program` begins with a Python interpreter, as in ``dist-run python train.py``.

    Otherwise, dist-run would run the interpreter as if it were a Python script. `program` is the end of
    `argv`.
    """
    interpreter, *program_args = program
    if not _PYTHON.fullmatch(PurePath(interpreter).name):
        return
    # The hint is the user's command line without the interpreter and its common option -u.
    program_start = len(argv) - len(program)
    launch_args = [arg for arg in argv[1:program_start] if arg != "--"]
    script_args = [arg for arg in program_args if arg != "-u"]
    raise UsageError(
        f"{interpreter} is not needed: dist-run starts Python once for each rank",
        hint=shlex.join([command.name, *launch_args, *script_args]),
    )


def _refuse_missing_run_folder(node_command: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise UsageError if the command uses ``{run_dir}``, but the run has no run folder.

    `node_command` is the user's command for ``--per-node``.
    """
    if not env.get("IMGKIT_RUN_DIR") and per_node.uses_placeholder(node_command, "run_dir"):
        raise UsageError(
            "the command uses {run_dir}, but this run has no run folder",
            where="IMGKIT_RUN_DIR",
            hint="start it with imgkit run, or set IMGKIT_RUN_DIR to a folder that all nodes share",
        )


def _suggest_argument_order(command: Command, argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return a hint with the user's command line in the right order, for an error about an unknown option.

    Unknown options before a ``.py`` file most likely belong to the program. For example, ``dist-run --lr 1
    train.py`` becomes ``dist-run train.py --lr 1``. If no argument ends with ``.py``, return "".
    """
    script = next((arg for arg in argv[1:] if arg.endswith(".py")), None)
    if script is None:
        return ""
    script_index = argv.index(script, 1)
    launch_args, program_args = list(argv[1:script_index]), argv[script_index + 1 :]
    # For "dist-run --nproc 1 --lr 1 train.py", `unknown` is --lr and 1, and `launch_args` becomes --nproc 1.
    _, unknown = launch_parser(command, env).parse_known_args(launch_args)
    # Of equal arguments, the last one is removed: an earlier one may be the value of a known option.
    launch_args.reverse()
    for arg in reversed(unknown):
        launch_args.remove(arg)
    launch_args.reverse()
    line = shlex.join([command.name, *launch_args, script, *unknown, *program_args])
    return f"options of the program follow the program: {line}"


def find_placement(request: PlacementRequest, env: Mapping[str, str]) -> Placement:
    """Return the placement of this process: the node on which it runs, and the address of node 0.

    Raises
    ------
    NoPlan : no placement can be right, or two launchers contradict each other.
    """
    system = facts.system_facts(env=env)
    suffix = system.fabric.head_suffix if system else ""
    read = facts.Reader(root=facts.root_of(env)).text
    return resolve.find_placement(request, env, read, head_suffix=suffix)


def launch_worker(options: LaunchOptions, worker: Worker, env: Mapping[str, str]) -> int:
    """Launch `worker` on this node, and return the exit code. With ``--dry-run``, only print the plan.

    Raises
    ------
    NoPlan : no launch can work.
    UsageError : this Python has no torch, a stop file forbids the run to start, the working directory was
        deleted, or other users have access to the file of the secret.
    ToolFailed : the command cannot be started.
    """
    # This comes first, because later errors about a missing folder would not name the cause.
    _refuse_deleted_folder(env)
    # The placement says which node this is, how many nodes there are, and which is the head (node 0).
    placement, host = find_placement(options.placement, env), facts.gather(env=env)
    launch_plan, child_env = make_plan(options, worker, env, placement, host)
    if options.dry_run:
        _print_plan(options, launch_plan, env)
        return 0
    # The calls below change this node or this process, so these checks come before them.
    _refuse_impossible_launch(options, launch_plan)
    setup = launch_plan.setup
    link_host_libraries(setup.links)
    setup.environment.apply()
    if setup.cache:
        setup.cache.make_folders()
    run_secret = _find_secret(options, env, placement)
    if launch_plan.mode == "direct":
        return _run_rank(launch_plan, child_env, env)
    return _run_agent(options, launch_plan, child_env, host, run_secret)


def _print_plan(options: LaunchOptions, launch_plan: LaunchPlan, env: Mapping[str, str]) -> None:
    """Print the plan for ``--dry-run``, as lines of text or with ``--json`` as one JSON object."""
    if launch_plan.placement.nnodes > 1 and launch_plan.mode != "direct":
        # A dry run shows the source of the secret, but does not read or create the secret.
        source = secret.describe_source(options.secret_file, env, shared_home=_is_home_shared(env))
        launch_plan = dataclasses.replace(launch_plan, secret=source)
    if options.json:
        terminal.print_document(json.dumps(launch_plan.to_dict(), indent=2) + "\n")
    else:
        terminal.print_results(*launch_plan.lines())


def _refuse_impossible_launch(options: LaunchOptions, launch_plan: LaunchPlan) -> None:
    """Raise an error if options and plan contradict each other, or if this node lacks what the launch needs.

    Raises
    ------
    NoPlan : an option needs a node agent, but the launch has none.
    UsageError : torch is missing, or a folder cannot be used.
    """
    if launch_plan.mode == "direct":
        _refuse_agent_options(options, launch_plan.placement.nnodes)
    if options.compile_cache is not None and launch_plan.setup.cache is None:
        raise UsageError(
            "no folder on this node's own disk or in its memory can hold compiled code",
            where="--compile-cache",
            hint="set TMPDIR to a folder of this node that you can write",
        )
    log_dir = options.request.log_dir
    if log_dir:
        where, hint = f"--log-dir {log_dir}", "name a folder that this node can write"
        files.refuse_unusable_folder(Path(log_dir), "log folder", where=where, hint=hint)
    # With --per-node, the command need not use torch. find_spec only looks for torch. An import would take
    # seconds.
    if launch_plan.mode != "per-node" and find_spec("torch") is None:
        raise UsageError(
            "torch is not installed in this Python, so nothing can be launched",
            where=sys.executable,
            hint="in an image: build it on a base with torch, or add torch to the recipe's image.pip; "
            "elsewhere: pip install torch",
        )


def _refuse_agent_options(options: LaunchOptions, nnodes: int) -> None:
    """Raise NoPlan if an option needs a node agent. In direct mode, there is none.

    In this mode, the launcher has already started every rank, and this process becomes one of them.
    """
    needing_agent = {
        "--per-node": options.request.is_per_node,
        "--preflight": options.preflight,
        # On one node, --require-secret has no effect, so it is accepted.
        "--require-secret": options.require_secret and nnodes > 1,
        "--compile-cache": options.compile_cache is not None,
    }
    for flag, is_given in needing_agent.items():
        if is_given:
            raise NoPlan(
                f"{flag} needs a node agent, and ranks that start without torchrun have none",
                hint="leave out --direct, or start one process per node",
            )


def _refuse_deleted_folder(env: Mapping[str, str]) -> None:
    """Raise UsageError if the working directory was deleted.

    torch would fail later, with an error that does not name this cause.
    """
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(
            f"the working directory was deleted, or cannot be reached: {error.strerror}",
            where=env.get("PWD") or ".",
            hint="cd to a folder that exists; if it is there again under the same name: cd .",
        ) from error


def make_plan(
    options: LaunchOptions, worker: Worker, env: Mapping[str, str], placement: Placement, host: HostFacts
) -> tuple[LaunchPlan, dict[str, str]]:
    """Return the plan with all its warnings and notes, and the complete environment of the workers.

    Nothing is changed on this node, because a dry run calls this function, too.
    """
    system, reader = facts.system_facts(env=env), facts.Reader(root=facts.root_of(env))
    launch_plan = plan.decide_launch(
        options.request,
        worker.argv,
        torchrun=TORCHRUN,
        placement=placement,
        host=host,
        system=system,
        env=env,
        is_own_program=worker.is_imgkits,
    )
    environment = host_leaks.clean_environment(
        env,
        host.image_env,
        keep=options.keep_env,
        prefix=sys.prefix,
        is_mpi_rank=placement.direct is not None,
    )
    cache = _find_compile_cache(options, env, host, reader)
    cache_variables = compile_cache.cache_variables(cache.folder, env) if cache else {}
    offline = internet.OfflineSettings(env={}, notes=())
    if not worker.is_imgkits:
        offline = internet.offline_settings(
            {**env, **environment.env, **launch_plan.env},
            has_package=lambda name: find_spec(name) is not None,
            can_connect=internet.can_connect,
            is_shared=partial(storage.on_network_disk, reader),
        )
    launch_plan = dataclasses.replace(
        launch_plan,
        unset=tuple(dict.fromkeys((*launch_plan.unset, *environment.unset))),  # each name once, in order
        # If several of these set the same variable, the last one takes precedence.
        env={**environment.env, **cache_variables, **offline.env, **launch_plan.env},
        setup=NodeSetup(links=launch_plan.setup.links, environment=environment, cache=cache),
    )
    child_env = _build_child_env(launch_plan, worker, env)
    recipe_scheduler = system.scheduler if system else ""
    placement_warnings = resolve.placement_warnings(
        placement, options.placement, env, recipe=recipe_scheduler
    )
    messages = StartMessages(
        warnings=(
            *placement_warnings,
            *launch_plan.messages.warnings,
            *_warn_about_program(worker, child_env, reader),
        ),
        notes=(environment.text, *offline.notes) if environment.text else offline.notes,
        hidden=launch_plan.messages.hidden | _select_hidden_messages(placement_warnings, environment, host),
    )
    return dataclasses.replace(launch_plan, messages=messages), child_env


def _build_child_env(launch_plan: LaunchPlan, worker: Worker, env: Mapping[str, str]) -> dict[str, str]:
    """Return the complete environment of the workers: `env` with the changes of the plan."""
    child_env = {name: value for name, value in env.items() if name not in launch_plan.unset}
    child_env |= launch_plan.env
    child_env.pop(secret.VARIABLE, None)  # only the node agent needs the secret
    if worker.is_imgkits:
        child_env.pop("PYTHONPATH", None)  # a user's module named json, for example, would break every worker
    return child_env


def _warn_about_program(worker: Worker, child_env: Mapping[str, str], reader: facts.Reader) -> list[str]:
    """Return warnings about missing files of NCCL, and about folders that hide modules of the image."""
    absent = absent_files(reader, child_env)
    warnings = [str(fabric.Finding(what=problem, fix=fix)) for problem, fix in absent]
    if not worker.is_imgkits:
        warnings += _warn_shadowing_folders(child_env)
    return warnings


def _select_hidden_messages(
    placement_warnings: Sequence[str], environment: host_leaks.CleanEnvironment, host: HostFacts
) -> set[str]:
    """Return the messages of a start that do not matter on this node, so that only ``-v`` prints them."""
    hidden: set[str] = set()
    # Without GPUs or a fast network, this is most likely a laptop. A warning about the scheduler is useless
    # there.
    is_cluster_node = bool(host.gpus or host.rdma or host.cxi)
    if not is_cluster_node:
        hidden.update(placement_warnings)
    # Containers allow core dumps by default. So a note that is only about core dumps would appear at every
    # start.
    if not environment.changes_variables:
        hidden.add(environment.text)
    return hidden


def _find_compile_cache(
    options: LaunchOptions, env: Mapping[str, str], host: HostFacts, reader: facts.Reader
) -> compile_cache.CompileCache | None:
    """Return this node's cache of compiled code, or None if no folder of this node can hold it.

    Programs such as Triton compile code at their start. With the cache, they find the compiled code at the
    next start on this node. The option ``--compile-cache`` names a file that carries the code to later runs
    on any node. Without it, the `file` of the result is None.
    """
    # The key is made from the image's manifest. Outside of an image, the version of torch and the path of the
    # Python environment replace the manifest.
    key = compile_cache.make_key(reader.text(MANIFEST_JSON) or f"{host.torch_version} {sys.prefix}")
    folder = compile_cache.find_folder(env, key, is_shared=partial(storage.on_network_disk, reader))
    if folder is None:
        return None
    shared_file = None
    if options.compile_cache:
        shared_file = files.in_job_folder(Path(options.compile_cache), env).absolute()
    return compile_cache.CompileCache(folder=folder, key=key, packed_file=shared_file)


def _run_rank(launch_plan: LaunchPlan, child_env: Mapping[str, str], env: Mapping[str, str]) -> int:
    """Replace this process by one rank of the program, in direct mode.

    In direct mode, the launcher has already started every rank, and torchrun is not used.

    Raises
    ------
    UsageError : the run folder cannot be used, or contains a file that forbids the run to start.
    """
    from imgkit_entrypoints.launch.stop_protocol import RunFolder

    # In the other modes, the node agent (imgkit's process on each node) does these two checks.
    folder = RunFolder.from_env(env, print_message)
    if folder:
        folder.refuse_if_unusable()
        folder.refuse_if_stopped()
    os.execvpe(launch_plan.argv[0], launch_plan.argv, child_env)  # noqa: S606 - an argv list, no shell


def _run_agent(
    options: LaunchOptions,
    launch_plan: LaunchPlan,
    child_env: Mapping[str, str],
    host: HostFacts,
    run_secret: bytes | None,
) -> int:
    """Run the node agent, which starts torchrun and supervises it, and return its exit code.

    Before that, the head (node 0) prints the plan.
    """
    # These modules are imported here, because --dry-run is faster without them.
    from imgkit_entrypoints.launch.agent import NodeAgent
    from imgkit_entrypoints.launch.node_attempt import NodeCommand, NodeConfig
    from imgkit_entrypoints.rollcall import gather
    from imgkit_entrypoints.rollcall.messages import NodeInfo

    if launch_plan.placement.node_rank == 0:
        for text in launch_plan.announcements(verbose=options.verbose):
            print_message(text)
    # The network interface whose address the other nodes test. With None, the node takes no part in the test.
    # `child_env` decides, because the workers must use the interface that is tested.
    interface = sockets.selected_interface(host, child_env) if options.network_test else None
    node = NodeInfo(
        host=host.hostname,
        software=gather.read_software(torch=host.torch_version, nccl=host.nccl_version),
        nproc=launch_plan.nproc,
        gpu=host.gpu_devices[0].model if host.gpu_devices else "",
        address=interface.addresses[0] if interface else "",
        interface=interface.name if interface else "",
    )
    # With --compile-cache, the cache is filled from a file, and packed into the file after the run. Otherwise
    # the compiled code just stays on this node.
    cache = launch_plan.setup.cache if options.compile_cache else None
    if cache:
        problem = cache.unpack()
        if problem and launch_plan.placement.node_rank == 0:
            print_message(problem)
    uses_gpus = launch_plan.env["IMGKIT_DEVICE"] == "cuda"
    command = NodeCommand(
        argv=launch_plan.argv,
        env=child_env,
        is_per_node=launch_plan.mode == "per-node",
        gpu_query=gpu_use.query_argv(host.worker_gpus) if uses_gpus else (),
    )
    config = NodeConfig(
        command=command,
        placement=launch_plan.placement,
        node=node,
        timeouts=options.timeouts,
        log=print_message,
        max_failures=launch_plan.max_failures,
        secret=run_secret,
        preflight=PREFLIGHT if options.preflight else None,
        log_dir=options.request.log_dir,
        on_success=partial(_pack_cache, cache) if cache else None,
        plan_text="".join(f"{line}\n" for line in launch_plan.lines()),
    )
    return NodeAgent(config).run()


def _pack_cache(cache: compile_cache.CompileCache) -> None:
    """Pack the compiled code after a successful run, and print what was packed."""
    message = cache.pack()
    if message:
        print_message(message)


def link_host_libraries(links: Mapping[str, str]) -> None:
    """Create the folder with links to the libraries of the host that the workers load.

    The folder is on the workers' library path. If the plan uses no library of the host, do nothing.

    Raises
    ------
    UsageError : the folder cannot be created, or its content may come from another user.
    """
    if not links:
        return
    folder = Path(library_path.links_folder(links))
    try:
        files.make_links(folder, links)
    except OSError as error:
        hint = f"rm -r {folder}; or without the host's libraries: {HOST_LIBS}=none"
        raise UsageError(f"cannot be used: {error.strerror}", where=str(folder), hint=hint) from error


def _find_secret(options: LaunchOptions, env: Mapping[str, str], placement: Placement) -> bytes | None:
    """Return the secret with which the nodes authenticate each other, or None if none is needed or set.

    A run on one node needs no secret. If a run on several nodes has none, the head prints how to set one.

    Raises
    ------
    NoPlan : no secret is set, but ``--require-secret`` is given.
    UsageError : the file of the secret cannot be read, or other users have access to it.
    """
    # In direct mode, there are no node agents that could authenticate each other.
    if placement.nnodes == 1 or placement.direct is not None:
        return None
    run_secret = secret.find_secret(options.secret_file, env, shared_home=_is_home_shared(env))
    if run_secret:
        return run_secret
    make = secret.MAKE.format(file="FILE")
    remedy = f"create one file for all nodes with {make}, and pass --secret-file FILE"
    if options.require_secret:
        raise NoPlan(
            "no secret is set, so other programs could join this run", where="--require-secret", hint=remedy
        )
    if placement.node_rank == 0:  # one warning is enough for the whole run
        _warn_without_secret(placement, remedy)
    return None


def _warn_without_secret(placement: Placement, remedy: str) -> None:
    """Print that other programs can join this run because it has no secret, and how to prevent that.

    The other nodes connect to a port of the head (node 0), the rollcall port. `remedy` is the beginning of
    the advice: how to create a secret for all nodes.
    """
    # The default port is computed from the job id. A run that was started by hand has no id, so everybody
    # knows its default port. A random port is some protection.
    is_started_by_hand = not placement.job_id
    has_default_port = placement.port is None
    if is_started_by_hand and has_default_port:
        remedy += f", or at least the same random port to all nodes: --port {ports.any_free()}"
    port = ports.rollcall_port(placement.job_id, placement.port)
    print_message(
        f"no secret is set: any program that reaches port {port} of {placement.head} can join this run. "
        f"To prevent that, {remedy}"
    )


def _is_home_shared(env: Mapping[str, str]) -> bool:
    """Return whether the secret file in the user's home folder would be on a network disk.

    Other nodes share such a disk.
    """
    path = secret.home_file(env)
    return path is not None and storage.on_network_disk(facts.Reader(root=facts.root_of(env)), str(path))


def print_message(text: str, *more_lines: str) -> None:
    """Print a message to standard error. Standard output is only for results."""
    terminal.print_messages(f"imgkit: {text}", *more_lines)


def _warn_shadowing_folders(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return warnings about folders in PYTHONPATH that contain torch or numpy, and so hide the image's.

    PYTHONPATH is not changed, because the user's program may need its own modules from there.
    """
    warnings = []
    for folder in filter(None, env.get("PYTHONPATH", "").split(":")):
        for name in ("torch", "numpy"):
            if _has_module(Path(folder), name):
                problem = f"contains another {name}, which shadows that of the image"
                warnings.append(f"PYTHONPATH: {folder} {problem}")
    return tuple(warnings)


def _has_module(folder: Path, name: str) -> bool:
    """Return whether `folder` contains a package or module `name` that Python would import."""
    try:
        return (folder / name).is_dir() or (folder / f"{name}.py").is_file()
    except OSError:  # this user may not enter the folder
        return False
