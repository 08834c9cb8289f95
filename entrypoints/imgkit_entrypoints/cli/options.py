"""The options of a launch, which are the same for every command.

Each option can also be set by a variable: IMGKIT_ROLLCALL_TIMEOUT=60 means ``--rollcall-timeout 60``. An
option on the command line takes precedence, and the variable is then not even parsed. Switches are an
exception: their variables must always be 0 or 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from imgkit_entrypoints import __version__
from imgkit_entrypoints.arguments import Need, Option, Parser, add_options, parse_natural, parse_positive
from imgkit_entrypoints.cli.commands import Command
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import per_node
from imgkit_entrypoints.launch.plan import DEFAULT_FAILURES, LaunchOptions, Request, Timeouts
from imgkit_entrypoints.schedulers.placement import PlacementRequest, Size, size_examples
from imgkit_entrypoints.schedulers.resolve import NAMES


def choice_type(*allowed: str) -> Callable[[str], str]:
    """Return a function for `Option.type` that accepts only the texts in `allowed`.

    argparse does not check default values against its own choices. Here the values of variables such as
    IMGKIT_DEVICE become defaults, and they must be checked.
    """

    def check(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(allowed)}")
        return text

    return check


def parse_processes(text: str) -> str:
    """Return `text` if it is a number of processes, at least 1, or ``auto``."""
    if text != "auto":
        parse_positive(text)
    return text


def parse_port(text: str) -> int:
    """Return the port number in `text`, which must be from 1 to 65535."""
    number = parse_positive(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port from 1 to 65535")
    return number


def parse_size(text: str) -> Size:
    """Return the number of nodes in ``N`` or ``N+S``.

    For any other text, the hint of the error says what to type instead.
    """
    try:
        return Size.parse(text)
    except ValueError as error:
        raise UsageError(str(error), where="--nnodes", hint=size_examples(text, "--nnodes ")) from None


OPTIONS = (
    Option(
        "--nproc",
        "processes on this node",
        parse_processes,
        "N|auto",
        default="auto",
        unset="auto, one per GPU",
        aliases=("--nproc-per-node", "--nproc_per_node"),
    ),
    Option("--scheduler", f"launcher: {', '.join(NAMES)}", choice_type(*NAMES), "NAME", unset="detected"),
    Option("--nnodes", "nodes, or nodes and spares", parse_size, "N|N+S", unset="the scheduler's number"),
    Option(
        "--node-rank",
        "rank of this node; the head is 0",
        parse_natural,
        "RANK",
        unset="the scheduler's",
        aliases=("--node_rank",),
    ),
    Option(
        "--head",
        "name or address by which the other nodes reach the head",
        metavar="HOST",
        aliases=("--master-addr", "--master_addr"),
    ),
    Option(
        "--port",
        "torchrun's port on the head",
        parse_port,
        "PORT",
        unset="from the job id",
        aliases=("--master-port", "--master_port"),
    ),
    Option(
        "--max-failures",
        "lost nodes and failed workers to survive",
        parse_natural,
        "K",
        unset=f"{DEFAULT_FAILURES} with spares, else 0",
        aliases=("--max-restarts", "--max_restarts"),
    ),
    Option(
        "--lost-after",
        "silence after which a node counts as lost",
        parse_positive,
        "S",
        default=30,
        unset="30 s",
    ),
    Option(
        "--start",
        "start method of the workers. fork: torchrun imports torch once for all of them; exec: each is a "
        "separate interpreter",
        choice_type("auto", "fork", "exec"),
        "METHOD",
        default="auto",
        unset="fork for imgkit's programs on CPUs, else exec",
    ),
    Option("--log-dir", "save the output of each process in DIR, one folder per node", metavar="DIR"),
    Option(
        "--rollcall-timeout",
        "time for all nodes to join, and then for all ranks to connect",
        parse_positive,
        "S",
        default=120,
        unset="120 s",
    ),
    Option("--grace", "time to save in after a stop request", parse_positive, "S", default=60, unset="60 s"),
    Option(
        "--hang-after",
        "report a rank as stuck after S seconds without progress, or three times its longest step if that is "
        "longer; 0: never",
        parse_natural,
        "S",
        default=60,
    ),
    Option(
        "--secret-file",
        "shared secret by which nodes authenticate each other: a private file of at least 32 bytes, the same "
        "on all nodes, or - for a line on standard input",
        metavar="FILE",
        unset="the job script's, else ~/.config/imgkit/secret",
    ),
    Option(
        "--compile-cache",
        "start with the compiled code of FILE, and pack what is compiled into it at the end",
        metavar="FILE",
    ),
    Option(
        "--keep-env",
        "keep this variable of the host for the workers, which start without those of MPI, XALT and the "
        "host's Python; PMIX_*: all that begin so; core: core dumps (repeatable)",
        metavar="NAME",
        action="append",
        default=[],
    ),
    Option("--require-secret", "refuse multi-node runs without a shared secret", action="store_true"),
    Option(
        "--preflight",
        "measure all nodes first, for a minute at most, and leave slow ones out",
        action="store_true",
    ),
    Option(
        "--no-cpu-binding",
        "let each worker run on all processors of the job, not only on those beside its GPU",
        action="store_true",
    ),
    Option("--no-network-test", "skip the test of the network between the nodes", action="store_true"),
    Option("--direct", "run this process as one rank, without torchrun", action="store_true"),
    Option("--dry-run", "show every resolved value and its source, then exit", action="store_true"),
    Option("--verbose -v", "print the reasons for all settings at the start, too (-v)", action="store_true"),
)
"""The options of every launch.

The aliases are spellings of torchrun and torch.distributed.launch, so that existing command lines work.
"""
RUN_OPTIONS = (
    Option("-m", "run a module instead of a script", action="store_true", dest="module"),
    Option(
        "--pass-local-rank",
        "pass --local_rank=N to the program, as torch.distributed.launch did",
        action="store_true",
    ),
    Option(
        "--per-node",
        "start any command once on each node, in place of torchrun. In its arguments, "
        f"{{{'}, {'.join(per_node.PLACEHOLDERS)}}} are replaced",
        action="store_true",
    ),
    Option(
        "--worker-arg",
        "with --per-node: add ARG to the command on every node but the head (repeatable)",
        metavar="ARG",
        action="append",
        default=[],
    ),
    Option("program", "your script or module and its arguments", nargs=argparse.REMAINDER),
)
"""The options that only dist-run has."""
# With --per-node, torchrun starts no workers to which these options could apply.
_TORCHRUN_ONLY = (
    "--nproc",
    "--start",
    "--hang-after",
    "--log-dir",
    "--direct",
    "-m",
    "--pass-local-rank",
    "--no-cpu-binding",
)
PER_NODE_NEEDS = (
    *(
        Need(option=flag, reason="with --per-node", met=lambda options: not options.per_node)
        for flag in _TORCHRUN_ONLY
    ),
    Need(option="--worker-arg", reason="without --per-node", met=lambda options: options.per_node),
)
"""The options of dist-run that have no effect with ``--per-node``, or without it. Using them is an error."""
ENV_OPTIONS = (Option("--shell", 'print export lines: eval "$(dist-env --shell)"', action="store_true"),)
"""The options that only dist-env has."""


class _VariableValue(NamedTuple):
    """The text of a variable that sets an option, before it is parsed.

    The parser gets it as the default of the option. If the option is on the command line, the text is never
    parsed.
    """

    option: Option
    text: str

    def parse(self, help_command: str) -> object:
        """Return the value of the option that results from the variable's text.

        Parameters
        ----------
        help_command : the command that shows the allowed values, for the hint of the error.

        Raises
        ------
        UsageError : the text is not a value of the option. The error names the variable.
        """
        flag = self.option.names
        name = flag_variable(flag)
        assert callable(self.option.type)  # noqa: S101 - no option of a launch has a tuple of values as its type
        try:
            return self.option.type(self.text)
        except argparse.ArgumentTypeError as error:
            hint = f"its values are those of {flag}: {help_command}"
            raise UsageError(str(error), where=name, hint=hint) from None
        except UsageError as error:
            # The hint mentions the flag, but the user has set the variable. So "--nnodes 4" becomes
            # "IMGKIT_NNODES=4".
            hint = (error.hint or "").replace(f"{flag} ", f"{name}=")
            raise UsageError(error.what, where=name, hint=hint) from None


def launch_parser(command: Command, env: Mapping[str, str], options: Sequence[Option] = ()) -> Parser:
    """Return a parser with the options of a launch, and with the further `options` of this command.

    The defaults come from variables in `env`, such as IMGKIT_NNODES for ``--nnodes``.
    """
    parser = Parser(prog=command.name, description=command.summary, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"imgkit {__version__}")
    json_help = "print one JSON object" if command.prints_json else "with --dry-run: print one JSON object"
    # --device is not in OPTIONS because its default differs between commands.
    device = Option(
        "--device",
        "device to run on",
        choice_type("auto", "cuda", "cpu"),
        "auto|cuda|cpu",
        default=command.device,
        unset="cuda where GPUs are visible" if command.device == "auto" else command.device,
        heading="launch options (--nproc is also read from IMGKIT_NPROC, and so on)",
    )
    # Only these options can also be set by variables.
    launch_options = (device, *OPTIONS)
    add_options(parser, (Option("--json", json_help, action="store_true"), *launch_options))
    add_options(parser, options)
    parser.set_defaults(**_read_variables(launch_options, env))
    return parser


def _read_variables(options: Iterable[Option], env: Mapping[str, str]) -> dict[str, object]:
    """Return the values of the ``IMGKIT_*`` variables for `options`, as new defaults of the parser.

    The keys are the names of the parser's attributes. Options whose variable is not set are left out, so that
    they keep their defaults.

    Single values are not parsed yet, because an option on the command line replaces its variable, whose text
    may then even be wrong. `read_options` parses the values that remain.

    Raises
    ------
    UsageError : the variable of a switch is neither 0 nor 1.
    """
    defaults: dict[str, object] = {}
    for option in options:
        # In "--verbose -v", the name of the variable and argparse's attribute come from the first spelling.
        flag = option.names.split()[0]
        attribute = flag.strip("-").replace("-", "_")
        variable_text = env.get(flag_variable(flag), "")
        if option.action == "store_true":  # a switch, such as --verbose
            defaults[attribute] = _is_on(flag, env)
        elif option.action == "append":
            # If an option can be repeated, its variable contains the values separated by commas.
            defaults[attribute] = [part for part in variable_text.split(",") if part]
        elif variable_text:
            defaults[attribute] = _VariableValue(option, variable_text)
    return defaults


def read_options(parsed: argparse.Namespace, command: Command, argv: Sequence[str]) -> LaunchOptions:
    """Return the options of the launch from a parsed command line.

    Parameters
    ----------
    parsed : the result of the parser. Values from variables are still texts, which are parsed here.
    argv : the whole command line, for errors that show it.

    Raises
    ------
    UsageError : a variable has a wrong value. Or ``--json`` is given without ``--dry-run`` to a command that
        does not print JSON.
    """
    for attribute, option_value in vars(parsed).items():
        if isinstance(option_value, _VariableValue):
            setattr(parsed, attribute, option_value.parse(f"{command.name} --help"))
    if parsed.json and not parsed.dry_run and not command.prints_json:
        raise UsageError("--json needs --dry-run", hint="add --dry-run, or leave --json out")
    return LaunchOptions(
        placement=_read_placement_request(parsed, argv),
        request=_read_worker_request(parsed),
        timeouts=Timeouts(
            grace_s=parsed.grace,
            rollcall_s=parsed.rollcall_timeout,
            hang_after_s=parsed.hang_after,
            lost_after_s=parsed.lost_after,
        ),
        dry_run=parsed.dry_run,
        json=parsed.json,
        verbose=parsed.verbose,
        network_test=not parsed.no_network_test,
        secret_file=parsed.secret_file,
        require_secret=parsed.require_secret,
        preflight=parsed.preflight,
        compile_cache=parsed.compile_cache,
        keep_env=tuple(parsed.keep_env),
    )


def _read_placement_request(parsed: argparse.Namespace, argv: Sequence[str]) -> PlacementRequest:
    """Return the options about the nodes of the launch. `argv` is the whole command line, for errors."""
    return PlacementRequest(
        scheduler=parsed.scheduler,
        size=parsed.nnodes,
        node_rank=parsed.node_rank,
        head=parsed.head,
        port=parsed.port,
        direct=parsed.direct,
        command=tuple(argv),
    )


def _read_worker_request(parsed: argparse.Namespace) -> Request:
    """Return the options about the processes on each node."""
    return Request(
        nproc=parsed.nproc,
        device=parsed.device,
        max_failures=parsed.max_failures,
        start=parsed.start,
        log_dir=parsed.log_dir,
        binds_cpus=not parsed.no_cpu_binding,
        # Only dist-run has these two options.
        is_per_node=getattr(parsed, "per_node", False),
        worker_args=tuple(getattr(parsed, "worker_arg", ())),
    )


def flag_variable(flag: str) -> str:
    """Return the variable that sets the option `flag`, such as IMGKIT_LOG_DIR for ``--log-dir``."""
    return "IMGKIT_" + flag.strip("-").replace("-", "_").upper()


def _is_on(flag: str, env: Mapping[str, str]) -> bool:
    """Return whether the variable of a switch is 1, such as IMGKIT_VERBOSE for ``--verbose``.

    Raises
    ------
    UsageError : the value is neither 1 nor 0 nor empty.
    """
    value = env.get(flag_variable(flag), "")
    if value not in ("", "0", "1"):
        raise UsageError(
            f"{value!r} is neither 0 nor 1",
            where=flag_variable(flag),
            hint=f"{flag_variable(flag)}=1 for {flag}, else 0",
        )
    return value == "1"
