"""A launch on this node, from the command line to its start: options, the workers' command, plan.

The options of a launch are the same for every command; ``IMGKIT_*`` variables stand in for flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_entrypoints import __version__, fabric, facts, files, terminal
from imgkit_entrypoints.arguments import Parser, natural, positive
from imgkit_entrypoints.cli.commands import PREFLIGHT, TORCHRUN, Command
from imgkit_entrypoints.doctor import saved_environment
from imgkit_entrypoints.errors import NoPlan, UsageError
from imgkit_entrypoints.fabric import library_path, sockets
from imgkit_entrypoints.facts import storage
from imgkit_entrypoints.facts.software import absent_files
from imgkit_entrypoints.launch import plan, user_program
from imgkit_entrypoints.launch.plan import FAILURES, LaunchOptions, Request, Timeouts
from imgkit_entrypoints.rollcall import ports, secret
from imgkit_entrypoints.rollcall.messages import MODES
from imgkit_entrypoints.schedulers import resolve
from imgkit_entrypoints.schedulers.placement import Placement, PlacementRequest, Size, size_examples
from imgkit_entrypoints.schedulers.resolve import NAMES
from imgkit_entrypoints.system import HOST_LIBS


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What torchrun starts for each rank."""

    start: tuple[str, ...]
    """Python, and the module or script that it runs."""
    arguments: tuple[str, ...]
    """The arguments."""
    own: bool
    """It is a program of this package, and needs no PYTHONPATH."""

    @property
    def argv(self) -> tuple[str, ...]:
        """The whole command line."""
        return (*self.start, *self.arguments)


def module_worker(module: str, arguments: Sequence[str]) -> Worker:
    """Return `module` of this package with `arguments`; the current folder and PYTHONPATH do not reach it."""
    return Worker(start=(sys.executable, "-I", "-u", "-m", module), arguments=tuple(arguments), own=True)


def parse_app(command: Command, argv: Sequence[str], env: Mapping[str, str]) -> tuple[LaunchOptions, Worker]:
    """Return the options of the launch, and the app of `command` with the rest of `argv`.

    Raises
    ------
    UsageError : an option is unknown, has a wrong value, or contradicts another.
    """
    assert command.app is not None  # noqa: S101 - the caller branches on it
    app = importlib.import_module(command.options or command.app)
    both = launch_parser(command.name, command.summary, env, device=command.device)
    app.add_arguments(both)
    both.formatter_class, both.epilog = argparse.RawDescriptionHelpFormatter, getattr(app, "EXAMPLES", None)
    both.parse_args(argv[1:])  # one check of everything, and --help with all groups
    launch = launch_parser(command.name, command.summary, env, device=command.device)
    parsed, rest = launch.parse_known_args(argv[1:])
    if hasattr(app, "check"):
        app.check(rest, env)
    options = read_options(parsed, tuple(argv))
    refuse_json_alone(options)
    return options, module_worker(command.app, rest)


def parse_user_program(
    command: Command, argv: Sequence[str], env: Mapping[str, str]
) -> tuple[LaunchOptions, Worker]:
    """Return the options of the launch, and the user program that follows them in `argv`.

    Raises
    ------
    UsageError : an option is unknown or has a wrong value, or there is no program.
    """
    usage = "%(prog)s [OPTIONS] SCRIPT|-m MODULE [ARGS]"
    parser = launch_parser(command.name, command.summary, env, usage)
    parser.add_argument("-m", dest="module", action="store_true", help="run a module instead of a script")
    parser.add_argument(
        "--pass-local-rank",
        action="store_true",
        help="pass --local_rank=N to the program, as torch.distributed.launch did",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="your script or module and its arguments")
    parsed = parser.parse_args(argv[1:])
    if not parsed.program:
        raise UsageError("no script given", hint="dist-run [OPTIONS] SCRIPT|-m MODULE [ARGS]")
    flags = (("--pass-local-rank", parsed.pass_local_rank), ("-m", parsed.module))
    given = tuple(flag for flag, on in flags if on)
    start = (sys.executable, "-u", user_program.__file__)
    worker = Worker(start=start, arguments=(*given, *parsed.program), own=False)
    options = read_options(parsed, tuple(argv))
    refuse_json_alone(options)
    return options, worker


DEVICES = ("auto", "cuda", "cpu")


_ALSO: Mapping[str, tuple[str, ...]] = {
    "--nproc": ("--nproc-per-node", "--nproc_per_node"),
    "--node-rank": ("--node_rank",),
    "--head": ("--master-addr", "--master_addr"),
    "--port": ("--master-port", "--master_port"),
    "--max-failures": ("--max-restarts", "--max_restarts"),
}
"""Spellings of torchrun and torch.distributed.launch, for existing command lines."""


def launch_parser(
    name: str,
    summary: str,
    env: Mapping[str, str],
    usage: str | None = None,
    *,
    device: str = "auto",
    json_help: str = "with --dry-run: print one JSON object",
) -> argparse.ArgumentParser:
    """Return a parser with the launch's options; the app adds its own. Its errors are UsageError."""
    parser = Parser(prog=name, description=summary, usage=usage, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"imgkit {__version__}")
    parser.add_argument("--json", action="store_true", help=json_help)
    group = parser.add_argument_group("launch options (--nproc is also read from IMGKIT_NPROC, and so on)")

    def option(flag: str, kind: Callable[[str], object], default: object, metavar: str, text: str) -> None:
        given = env.get(_variable(flag))
        # A string default goes through `type` and its errors like a value on the command line.
        group.add_argument(flag, type=kind, default=given or default, metavar=metavar, help=text)
        if flag in _ALSO:  # hidden, or the help would be twice as long
            dest, hidden = flag.strip("-").replace("-", "_"), argparse.SUPPRESS
            group.add_argument(*_ALSO[flag], dest=dest, type=kind, default=hidden, help=hidden)

    def switch(flag: str, text: str) -> None:
        group.add_argument(flag, action="store_true", default=_on(flag, env), help=text)

    default = "cuda where GPUs are visible" if device == "auto" else device
    option("--device", _one_of(DEVICES), device, "|".join(DEVICES), f"device to run on (default: {default})")
    option("--nproc", _nproc, "auto", "N|auto", "processes on this node; auto: one per GPU (default: auto)")
    option(
        "--scheduler",
        _one_of(NAMES),
        None,
        "NAME",
        f"scheduler or launcher that started this command: {', '.join(NAMES)} (default: detected)",
    )
    option(
        "--nnodes",
        _size,
        None,
        "N|N+S",
        "number of nodes, or N nodes and S spares (default: the scheduler's number)",
    )
    option(
        "--node-rank", natural, None, "RANK", "rank of this node; the head is 0 (default: the scheduler's)"
    )
    option("--head", str, None, "HOST", "name or address by which the other nodes reach node 0")
    option("--port", positive, None, "PORT", "torchrun's port on the head (default: from the job id)")
    option(
        "--max-failures",
        natural,
        None,
        "K",
        f"failures (lost nodes or workers) to survive before the run is aborted (default: {FAILURES} with "
        "spares, else 0)",
    )
    option(
        "--lost-after",
        positive,
        30,
        "S",
        "seconds of silence after which a node counts as lost (default: 30)",
    )
    option(
        "--start",
        _one_of(("auto", "fork", "exec")),
        "auto",
        "METHOD",
        "start method of the workers. fork: torchrun imports torch once for all of them; exec: each is a "
        "separate interpreter (default: fork for imgkit's programs on CPUs, else exec)",
    )
    option("--log-dir", str, None, "DIR", "save the output of each process in DIR, one folder per node")
    option(
        "--rollcall-timeout",
        positive,
        120,
        "S",
        "seconds to wait for all nodes in the roll call, and again in torchrun's rendezvous (default: 120)",
    )
    option(
        "--grace",
        positive,
        60,
        "S",
        "seconds that the program has to save after a stop request (default: 60)",
    )
    option(
        "--hang-after",
        natural,
        60,
        "S",
        "watchdog: report a rank as stuck after S seconds without progress, or three times its longest step "
        "if that is longer; 0: never (default: 60)",
    )
    option(
        "--secret-file",
        str,
        None,
        "FILE",
        "shared secret by which nodes authenticate each other: a private file of at least 32 bytes, the "
        "same on all nodes, or - for a line on standard input (default: the job script's, else "
        "~/.config/imgkit/secret)",
    )
    switch("--require-secret", "refuse multi-node runs without a shared secret")
    # Two options and no value: argparse would take the word after --preflight for it, often the script.
    for flag, mode in zip(("--preflight", "--preflight=full"), MODES, strict=True):
        group.add_argument(
            flag,
            dest="preflight",
            action="store_const",
            const=mode,
            default=_mode(env),
            help="measure all nodes first, for a minute at most, and start without outliers or not at all; "
            "--preflight=full takes longer for each figure"
            if mode == MODES[0]
            else argparse.SUPPRESS,
        )
    switch("--no-network-test", "skip the test of the network between the nodes")
    switch("--direct", "run this process as one rank, without torchrun")
    switch("--dry-run", "show every resolved value and its source, then exit")
    return parser


def json_dry_run(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return whether errors are printed as JSON too, also errors in the options themselves."""
    return "--json" in argv and ("--dry-run" in argv or env.get(_variable("--dry-run")) == "1")


def read_options(parsed: argparse.Namespace, command: tuple[str, ...]) -> LaunchOptions:
    """Return the parsed values; `command` is the whole command line, for errors that show it."""
    return LaunchOptions(
        placement=PlacementRequest(
            scheduler=parsed.scheduler,
            size=parsed.nnodes,
            node_rank=parsed.node_rank,
            head=parsed.head,
            port=parsed.port,
            direct=parsed.direct or None,
            command=command,
        ),
        request=Request(
            nproc=parsed.nproc,
            device=parsed.device,
            max_failures=parsed.max_failures,
            start=parsed.start,
            log_dir=parsed.log_dir,
        ),
        dry_run=parsed.dry_run,
        json=parsed.json,
        network_test=not parsed.no_network_test,
        secret_file=parsed.secret_file,
        require_secret=parsed.require_secret,
        preflight=parsed.preflight,
        timeouts=Timeouts(
            grace_s=parsed.grace,
            rollcall_s=parsed.rollcall_timeout,
            hang_after_s=parsed.hang_after,
            lost_after_s=parsed.lost_after,
        ),
    )


def refuse_json_alone(options: LaunchOptions) -> None:
    """Raise UsageError for ``--json`` where only a dry run prints JSON."""
    if options.json and not options.dry_run:
        raise UsageError("--json needs --dry-run", hint="add --dry-run, or leave --json out")


def _variable(flag: str) -> str:
    return "IMGKIT_" + flag.strip("-").replace("-", "_").upper()


def _on(flag: str, env: Mapping[str, str]) -> bool:
    given = env.get(_variable(flag), "")
    if given not in ("", "0", "1"):
        raise UsageError(f"{given!r} is neither 0 nor 1", where=_variable(flag), hint=f"1 means {flag}")
    return given == "1"


def _mode(env: Mapping[str, str]) -> str:
    """Return the preflight's mode that IMGKIT_PREFLIGHT asks for; empty: none."""
    given = env.get("IMGKIT_PREFLIGHT", "")
    known = {"": "", "0": "", "1": MODES[0], **{mode: mode for mode in MODES}}
    if given not in known:
        hint = "1 means --preflight, full means --preflight=full"
        raise UsageError(f"{given!r} is none of 0, 1, full", where="IMGKIT_PREFLIGHT", hint=hint)
    return known[given]


def _one_of(allowed: tuple[str, ...]) -> Callable[[str], str]:
    # argparse does not apply its own choices to defaults, and IMGKIT_DEVICE is one.
    def check(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(allowed)}")
        return text

    return check


def _nproc(text: str) -> str:
    if text != "auto":
        positive(text)
    return text


def _size(text: str) -> Size:
    try:
        return Size.parse(text)
    except ValueError as error:
        raise UsageError(str(error), where="--nnodes", hint=size_examples(text, "--nnodes ")) from None


def find_placement(request: PlacementRequest, env: Mapping[str, str]) -> Placement:
    """Find this node's rank and the other nodes of the job.

    Raises
    ------
    NoPlan : there is none, or two launchers contradict each other.
    """
    system = facts.system_facts(env=env)
    suffix = system.fabric.head_suffix if system else ""
    return resolve.place(request, env, facts.Reader(root=facts.root_of(env)).text, head_suffix=suffix)


def launch(options: LaunchOptions, worker: Worker, env: Mapping[str, str], placement: Placement) -> int:
    """Launch `worker` on the node `placement`, or with ``--dry-run`` print how; the exit code.

    Raises
    ------
    NoPlan : no launch can be right. UsageError : this Python has no torch, a file prevents the run from
    starting, or the file of the secret is not safe. ToolFailed : see `supervisor.run`.
    """
    host, system = facts.gather(env=env), facts.system_facts(env=env)
    launch_plan = plan.make(
        options.request,
        worker.argv,
        torchrun=TORCHRUN,
        place=placement,
        host=host,
        system=system,
        env=env,
        own=worker.own,
    )
    odd = resolve.warnings(placement, options.placement, env, recipe=system.scheduler if system else "")
    child = {name: value for name, value in env.items() if name not in launch_plan.unset} | dict(
        launch_plan.env
    )
    unread = absent_files(facts.Reader(root=facts.root_of(env)), child)
    absent = (str(fabric.Finding(what=what, fix=fix)) for what, fix in unread)
    warnings = (*odd, *launch_plan.warnings, *absent, *(() if worker.own else _shadows(env)))
    launch_plan = dataclasses.replace(launch_plan, warnings=warnings)
    if options.dry_run:
        meets = placement.nnodes > 1 and launch_plan.mode == "torchrun"
        source = secret.source(options.secret_file, env, shared_home=_shared_home(env)) if meets else ""
        shown = dataclasses.replace(launch_plan, secret=source)
        if options.json:
            terminal.document(json.dumps(shown.to_dict(), indent=2) + "\n")
        else:
            terminal.out(*shown.lines())
        return 0
    if saved_environment.is_replay(env):
        # Variables of a stranger, such as LD_LIBRARY_PATH, must not reach a program.
        raise UsageError(
            "a replay cannot start a run",
            where=f"IMGKIT_ROOT={env['IMGKIT_ROOT']}",
            hint="add --dry-run; to start a run here: unset IMGKIT_ROOT",
        )
    from imgkit_entrypoints.launch import supervisor  # --dry-run prints sooner without them
    from imgkit_entrypoints.launch.stop_protocol import RunFolder
    from imgkit_entrypoints.rollcall import gather
    from imgkit_entrypoints.rollcall.messages import NodeInfo

    if launch_plan.mode == "direct" and options.preflight:
        raise NoPlan(
            "--preflight needs the roll call, and ranks that start without torchrun have none",
            where="--preflight",
            hint="leave out --direct, or start one process per node",
        )
    if log_dir := options.request.log_dir:
        where, hint = f"--log-dir {log_dir}", "name a folder that this node can write"
        files.refuse_unusable_folder(Path(log_dir), "log folder", where=where, hint=hint)
    _require_torch()
    link_host_libraries(launch_plan.links)
    proof = _secret(options, env, placement)
    child.pop(secret.VARIABLE, None)
    if worker.own:
        child.pop("PYTHONPATH", None)  # a json.py in it would end every worker
    if launch_plan.mode == "direct":
        if folder := RunFolder.of(env, say):  # else the supervisor asks
            folder.refuse_unusable()
            folder.refuse_stopped()
        os.execvpe(launch_plan.argv[0], launch_plan.argv, child)  # noqa: S606 - an argv list, no shell
    if placement.node_rank == 0:
        for text in launch_plan.announcements():
            say(text)
    carrier = sockets.selected(host, child) if options.network_test else None
    me = NodeInfo(
        host=host.hostname,
        software=gather.read_software(torch=host.torch_version, nccl=host.nccl_version),
        nproc=launch_plan.nproc,
        gpu=host.gpu_devices[0].model if host.gpu_devices else "",
        address=carrier.addresses[0] if carrier else "",
        interface=carrier.name if carrier else "",
    )
    return supervisor.run(
        launch_plan.argv,
        child,
        place=placement,
        me=me,
        secret=proof,
        say=say,
        timeouts=options.timeouts,
        max_failures=launch_plan.max_failures,
        preflight=options.preflight,
        measures=PREFLIGHT,
        log_dir=options.request.log_dir,
    )


def link_host_libraries(links: Mapping[str, str]) -> None:
    """Make the folder on the library path that has the host's libraries, if a plan uses any.

    Raises
    ------
    UsageError : it cannot be made, or is not as this user would make it.
    """
    if not links:
        return
    folder = Path(library_path.links_folder(links))
    try:
        files.make_links(folder, links)
    except OSError as error:
        hint = f"rm -r {folder}; or without the host's libraries: {HOST_LIBS}=none"
        raise UsageError(f"cannot be used: {error.strerror}", where=str(folder), hint=hint) from error


def _secret(options: LaunchOptions, env: Mapping[str, str], placement: Placement) -> bytes | None:
    """The secret by which the nodes of this start authenticate each other; None: one node, or an open start.

    Raises
    ------
    NoPlan : the start is open, but must not be. UsageError : see `secret.find`.
    """
    if placement.nnodes == 1:
        return None
    if placement.direct is not None:
        if options.require_secret:
            raise NoPlan(
                "--require-secret needs the roll call, and ranks that start without torchrun have none",
                where="--require-secret",
                hint="leave out --direct",
            )
        return None
    if found := secret.find(options.secret_file, env, shared_home=_shared_home(env)):
        return found
    make = secret.MAKE.format(file="FILE")
    if options.require_secret:
        raise NoPlan(
            "no secret is set, so other programs could join this run",
            where="--require-secret",
            hint=f"create one file for all nodes with {make}, and pass --secret-file FILE",
        )
    if placement.node_rank == 0:
        port = ports.rollcall_port(placement.job_id, placement.port)
        # Started by hand, the run has no job id that strangers would have to know, and always the same port.
        by_hand = not placement.job_id and placement.port is None
        instead = f", or at least the same random port to all nodes: --port {ports.any_free()}"
        say(
            f"no secret is set: any program that reaches port {port} of {placement.head} can join this run. "
            f"To prevent that, create one file for all nodes with {make}, and pass --secret-file FILE"
            + (instead if by_hand else "")
        )
    return None


def _shared_home(env: Mapping[str, str]) -> bool:
    own = secret.home_file(env)
    return own is not None and storage.on_network_disk(facts.Reader(root=facts.root_of(env)), str(own))


def say(text: str, *more: str) -> None:
    """Tell the user, in one line or several; results alone go to stdout."""
    terminal.err(f"imgkit: {text}", *more)


def _shadows(env: Mapping[str, str]) -> tuple[str, ...]:
    """Folders of PYTHONPATH, kept for the user program, that hide the image's torch or numpy."""
    found = []
    for folder in filter(None, env.get("PYTHONPATH", "").split(":")):
        for name in ("torch", "numpy"):
            if Path(folder, name).is_dir() or Path(folder, f"{name}.py").is_file():
                found.append(f"PYTHONPATH: {folder} contains another {name}, which shadows that of the image")
    return tuple(found)


def _require_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise UsageError(
            "torch is not installed in this Python, so nothing can be launched",
            where=sys.executable,
            hint="in an image: build it on a base with torch, or add torch to the recipe's image.pip; "
            "elsewhere: pip install torch",
        )
