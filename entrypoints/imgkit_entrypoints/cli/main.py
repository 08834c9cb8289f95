"""The entry point of every ``dist-*`` program: find the command, run it, and print its error.

Most commands start workers (start.py). ``dist-env`` does its work in this process. So does ``dist-doctor`` if
it checks only one node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from imgkit_entrypoints import __version__, fabric, facts, json_text, terminal
from imgkit_entrypoints.cli import start
from imgkit_entrypoints.cli.commands import COMMANDS, Command
from imgkit_entrypoints.cli.options import ENV_OPTIONS, flag_variable, launch_parser, read_options
from imgkit_entrypoints.cli.start import Worker
from imgkit_entrypoints.errors import EXIT_NO, ImgkitError, NoPlan, UsageError
from imgkit_entrypoints.launch import plan, run_code
from imgkit_entrypoints.launch.plan import LaunchOptions
from imgkit_entrypoints.rules import VARIABLE_NAME
from imgkit_entrypoints.schedulers import resolve
from imgkit_entrypoints.schedulers.placement import PlacementRequest
from imgkit_entrypoints.system import SystemFacts, to_json


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``NAME ARGS`` and exit with its exit code.

    If standard output cannot be flushed, report that, and do not exit with 0.
    """
    argv = tuple(sys.argv[1:] if argv is None else argv)
    # This comes first. If a stream is closed, the next file that is opened would get its number, and messages
    # would be written to that file.
    terminal.open_closed_streams()
    code = _run_and_report(argv)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            # When Python exits, it flushes the stream again. That would fail as well, and end with code 120.
            # So replace the stream by /dev/null.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # noqa: TID251 - a device of the system
            if stream is sys.stdout and code == 0:
                code = _report_lost_output(error)
    sys.exit(code)


def _run_and_report(argv: tuple[str, ...]) -> int | str | None:
    """Run ``NAME ARGS``, print the error if one is raised, and return the exit code for `sys.exit`."""
    try:
        return _run_command(argv, os.environ)
    except SystemExit as error:  # argparse exits after --help and --version
        return error.code
    except terminal.OutputLost as error:
        return _report_lost_output(error)
    except ImgkitError as error:
        _print_error(argv, error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130  # 128 plus the number of SIGINT, as a shell reports it


def _print_error(argv: tuple[str, ...], error: ImgkitError) -> None:
    """Print the error of a command for the user.

    A dry run with ``--json`` also prints the error as JSON, for a program that reads the output.
    """
    # The error may be that the options cannot be parsed, so look for the flags in `argv`. A variable has the
    # same effect as --dry-run.
    is_dry_run = "--dry-run" in argv or os.environ.get(flag_variable("--dry-run")) == "1"
    if "--json" in argv and is_dry_run:
        document = {"schema": plan.SCHEMA, "error": _build_error_dict(error)}
        with contextlib.suppress(terminal.OutputLost):
            terminal.print_document(json.dumps(document, indent=2) + "\n")
    name = argv[0] if argv else "imgkit_entrypoints"
    terminal.print_messages(*f"{name}: {error}".split("\n"))


def _report_lost_output(error: OSError) -> int:
    """Print that standard output is lost, and return the exit code for that."""
    start.print_message(f"standard output is closed or full ({error.strerror}): output is lost")
    return EXIT_NO


def run_as_named() -> None:
    """Run the command whose name this process has, which is the entry point of pip's ``dist-*`` scripts."""
    main((Path(sys.argv[0]).name, *sys.argv[1:]))


def _run_command(argv: tuple[str, ...], env: Mapping[str, str]) -> int:
    """Run ``NAME ARGS``, such as ``dist-run train.py``, and return the exit code.

    Raises
    ------
    ImgkitError : the command is unknown, an option is wrong, or the run cannot start.
    """
    name, *arguments = argv or ("",)
    command = _find_command(name)
    # If the run's copy of the user's code is not mounted here, an older copy in the image would run instead.
    run_code.refuse_missing_code(env)
    if command.name == "dist-env":
        return _run_dist_env(command, argv, env)
    if arguments and arguments[0] in command.verbs:  # "dist-train export ...": a subcommand without a launch
        module = importlib.import_module(command.verbs[arguments[0]])
        return int(module.main(arguments[1:]))
    if command.app is None:  # dist-run, whose program comes from the user
        options, worker = start.parse_user_program(command, argv, env)
    else:
        options, worker = start.parse_app(command, argv, env)
    # dist-doctor checks a single node in this process. It launches workers only to check the nodes of a job
    # together.
    if command.name == "dist-doctor" and not options.dry_run:
        return _run_dist_doctor(options, worker, env)
    return start.launch_worker(options, worker, env)


def _find_command(name: str) -> Command:
    """Return the command with this name, such as ``dist-run``.

    Raises
    ------
    UsageError : there is no such command. The hint lists all names.
    """
    for command in COMMANDS:
        if command.name == name:
            return command
    names = ", ".join(command.name for command in COMMANDS)
    raise UsageError(f"unknown command {name!r}", hint=f"one of: {names}")


def _build_error_dict(error: ImgkitError) -> dict[str, str | None]:
    """Return the JSON form of an error."""
    return {"what": error.what, "where": error.where, "hint": error.hint}


def _run_dist_env(command: Command, argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run ``dist-env``: print the facts of this node and the settings of a launch, and return the exit code.

    The form is text, JSON (``--json``) or export lines for a shell (``--shell``). With ``--dry-run``, print
    the plan of a launch instead, as any other command does.

    Raises
    ------
    UsageError : an option is wrong, or two of these forms are requested.
    """
    parsed = launch_parser(command, env, ENV_OPTIONS).parse_args(argv[1:])
    options = read_options(parsed, command, argv)
    other_forms = {"--json": options.json, "--dry-run": options.dry_run}
    for flag, is_given in other_forms.items():
        if parsed.shell and is_given:
            raise UsageError(f"--shell cannot be combined with {flag}", hint="dist-env --help")
    if options.dry_run:
        return start.launch_worker(options, Worker(argv=(), is_imgkits=True), env)
    host, system = facts.gather(env=env), facts.system_facts(env=env)
    placement = _report_placement(options.placement, system, env)
    network = fabric.choose_fabric(host, system, env, nnodes=placement.nnodes, head=placement.head)
    if parsed.shell:
        _print_exports(network, env)
    elif options.json:
        document = _build_node_document(host, system, placement.fields, network)
        terminal.print_document(json.dumps(document, indent=2) + "\n")
    else:
        terminal.print_results(*_describe_node(host, system, placement, network))
    return 0


class _PlacementReport(NamedTuple):
    """What ``dist-env`` prints about the placement of this node, and what the network depends on."""

    fields: Mapping[str, object]
    """The fields of a `Placement` (which node of which run this is), or only ``error`` if there is none."""
    warnings: tuple[str, ...] = ()
    nnodes: int = 1
    head: str = ""
    """The address of the head (node 0). Empty if there is no placement."""


def _report_placement(
    request: PlacementRequest, system: SystemFacts | None, env: Mapping[str, str]
) -> _PlacementReport:
    """Return the placement of this node with warnings about it, or the error if there is no placement.

    The error is not raised, because the other facts of this node are useful even without a placement.
    """
    try:
        placement = start.find_placement(request, env)
        recipe_scheduler = system.scheduler if system else ""
        warnings = resolve.placement_warnings(placement, request, env, recipe=recipe_scheduler)
    except ImgkitError as error:
        return _PlacementReport({"error": _build_error_dict(error)})
    fields = {**dataclasses.asdict(placement), "source": dict(placement.source)}
    return _PlacementReport(fields, warnings, placement.nnodes, placement.head)


def _build_node_document(
    host: facts.HostFacts,
    system: SystemFacts | None,
    placement: Mapping[str, object],
    network: fabric.FabricPlan,
) -> dict[str, object]:
    """Return the JSON document that ``dist-env --json`` prints.

    Parameters
    ----------
    system : what the image's recipe says about the cluster, or None outside of an image.
    placement : the fields of a `Placement` (which node of which run this is), or only ``error``.
    network : the fabric (the kind of network) of this node, and the variables for it.
    """
    host_facts = dataclasses.asdict(host)
    # The image has many variables. The relevant ones are in the decisions of the network.
    del host_facts["image_env"]
    matches = tuple(result for result in network.issues if result.state == "match")
    fabric_values = dataclasses.asdict(dataclasses.replace(network, issues=matches))
    # Each finding is one text, as in the other forms of output, and not a dict of its fields.
    for key in ("warnings", "blockers", "refusals"):
        fabric_values[key] = [str(finding) for finding in getattr(network, key)]
    return {
        "schema": plan.SCHEMA,
        "imgkit": __version__,
        "host": host_facts,
        # The same keys in the same order as in the image's system.json.
        "system": None if system is None else json_text.parse(to_json(system)),
        "placement": placement,
        "fabric": fabric_values,
    }


def _describe_node(
    host: facts.HostFacts,
    system: SystemFacts | None,
    placement: _PlacementReport,
    network: fabric.FabricPlan,
) -> Iterator[str]:
    """Yield the lines of text that ``dist-env`` prints about this node.

    Parameters
    ----------
    system : what the image's recipe says about the cluster, or None outside of an image.
    placement : which node of which run this is, or why that is unknown.
    network : the fabric (the kind of network) of this node, and the variables for it.
    """
    yield f"host       {host.hostname}, {host.arch}, Python {host.python}"
    yield f"           {host.cpus} processors ({host.cpus_source}), {host.gpus} GPUs ({host.gpus_source})"
    if system is None:
        yield "system     no /opt/imgkit/system.json"
    else:
        yield f"system     {system.title or system.scheduler}"
    for key, value in placement.fields.items():
        # Skip values that are not set or unknown.
        if value not in (None, "", (), {}):
            yield f"placement  {key}: {value}"
    if network.image:
        yield f"image      unknown: {network.image}"
    yield f"fabric     {network.kind}: {network.reason}"
    for decision in network.decisions:
        # A decision that is not used is only information: the workers do not get this value.
        yield f"  {'set ' if decision.used else 'note'} {decision}"
    for text in (*placement.warnings, *network.warnings, *network.blockers):
        yield f"  warn {text}"
    for finding in network.refusals:
        yield f"  refuse {finding}"


def _print_exports(network: fabric.FabricPlan, env: Mapping[str, str]) -> None:
    """Print the variables of the network as lines for ``eval "$(dist-env --shell)"``.

    Some variables name a folder that contains links to libraries of the host, so this folder is created as
    well.
    """
    start.link_host_libraries(network.links)
    lines = {name: f"export {name}={shlex.quote(value)}\n" for name, value in sorted(network.env.items())}
    # A variable needs a line that removes it only if it is set.
    lines |= {name: f"unset {name}\n" for name in network.unset if name in env}
    for name, line in lines.items():
        # The names come from the recipe or the user. In any other name, a shell could find a command and run
        # it.
        if re.fullmatch(VARIABLE_NAME, name):
            terminal.print_document(line)
        else:
            start.print_message(f"warning: {name!r} is not a variable name, so it is not in these lines")


def _run_dist_doctor(options: LaunchOptions, worker: Worker, env: Mapping[str, str]) -> int:
    """Run ``dist-doctor``: check only this node, or all nodes of the job together. Return the exit code.

    If the job has several nodes, or ``--nproc`` is given, all nodes are checked, including a collective
    between them.
    """
    from imgkit_entrypoints.doctor import node  # imported here because no other command needs it

    # The worker's argv is "python3 -I -u -m MODULE ARGS". The checks in this process take the same ARGS.
    module_index = worker.argv.index("-m") + 1
    arguments = worker.argv[module_index + 1 :]
    # The table of known issues is always about this node only.
    if "--known-issues" in arguments or not _should_check_all_nodes(options, env):
        return node.main(arguments, {**env, "IMGKIT_DEVICE": options.request.device})
    # One worker prints the report, so its lines need no prefix with the rank.
    request = dataclasses.replace(options.request, prefix=False)
    return start.launch_worker(dataclasses.replace(options, request=request), worker, env)


def _should_check_all_nodes(options: LaunchOptions, env: Mapping[str, str]) -> bool:
    """Return whether dist-doctor checks all nodes of the job together.

    If the command was started in a wrong way, for example on only one of several nodes, this node can still
    be checked. In this case, print the error and return False.
    """
    try:
        placement = start.find_placement(options.placement, env)
    except NoPlan as error:
        start.print_message(*f"this node only: {error}".split("\n"))
        return False
    has_several_nodes = placement.nnodes > 1
    # Several processes on a single node can test a collective, too, but only if the user asks for them.
    has_nproc_option = options.request.nproc != "auto"
    return has_several_nodes or has_nproc_option
