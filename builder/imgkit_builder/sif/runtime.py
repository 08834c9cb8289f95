"""Find Singularity or Apptainer, read its version and options, and run it. Only this module imports spython.

Notes
-----
Every run goes through ``spython.utils.stream_command``, spython's public function that streams the output of
a command. The larger public functions of spython 0.3.14 are not suitable:

* ``Client.build`` runs sudo by default, drops the exit code, and returns a stale file as success. With
  ``stream=True`` it hangs once the runtime has written 64 KiB to stderr.
* No function takes a working folder, or ends the processes that the runtime starts.
* There is no function for ``sif new``, ``sif add`` and ``sif del``.
* All functions run the program called ``singularity`` on PATH, not the runtime that the user chose.

``stream_command`` itself takes neither a working folder nor variables. ``supervisor`` runs between it and the
runtime and adds both, so that the environment of this process does not change.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import importlib.resources
import io
import locale
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from imgkit_builder.base import files
from imgkit_builder.base.process import Finished, kill_hint
from imgkit_entrypoints import secret_patterns
from imgkit_entrypoints.errors import ToolFailed, ToolMissing
from imgkit_entrypoints.terminal import strip_styles

COMMANDS = ("singularity", "apptainer")
"""Names of the runtimes on PATH, tried in this order. Apptainer installs itself under both names."""
FLOOR = "Singularity 3.8 or later, or any Apptainer"
"""The runtimes that can start the files which imgkit writes."""
_OLDEST_SINGULARITY = (3, 8)

_FLAVOUR = re.compile(
    r"^(apptainer|singularity-ce|singularitypro|singularity)\s+version\s+(\S+)", re.IGNORECASE
)
_KEPT_LINES = 2000  # the last lines of a runtime's output, for error messages
_END_GRACE_S = 3.0
"""How long a group of processes may take to end after SIGTERM, and again after SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Options of ``build`` that only some runtimes have. ``build --help`` lists them."""

    mksquashfs_args: bool
    """``build --mksquashfs-args``: Apptainer from 1.4."""
    disable_cache: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeTool:
    """A container runtime on this machine: Singularity or Apptainer."""

    path: Path
    flavour: str
    """``apptainer``, ``singularity-ce``, ``singularitypro`` or ``singularity``."""
    version: str
    capabilities: Capabilities

    def __str__(self) -> str:
        return f"{self.flavour} {self.version}"

    @property
    def below_floor(self) -> bool:
        """Whether the runtime is older than the minimum version in `FLOOR`."""
        match = re.match(r"(\d{1,6})\.(\d{1,6})", self.version)
        # Every version of Apptainer is new enough. An unknown version is not refused.
        if match is None or self.flavour == "apptainer":
            return False
        return (int(match[1]), int(match[2])) < _OLDEST_SINGULARITY


def find_runtime(command: str | None = None, *, module_hint: str | None = None) -> RuntimeTool:
    """Find Singularity or Apptainer on this machine, and ask it for its version and its options.

    Parameters
    ----------
    command : name or path of the runtime. If None, look for ``singularity`` and then ``apptainer`` on PATH.
    module_hint : the command that makes the runtime available on the user's cluster, such as
        ``module load singularity``. It is part of the error's hint.

    Raises
    ------
    ToolMissing : no runtime was found, or the program is neither Singularity nor Apptainer.
    """
    path = _find_program((command,) if command else COMMANDS, module_hint)
    flavour, version = _ask_version(path, module_hint)
    # Only some versions have these options. The help shows which ones.
    build_help = _run_and_capture(path, "build", "--help").output
    return RuntimeTool(
        path=path,
        flavour=flavour,
        version=version,
        capabilities=Capabilities(
            mksquashfs_args="--mksquashfs-args" in build_help,
            disable_cache="--disable-cache" in build_help,
        ),
    )


def _find_program(names: tuple[str, ...], module_hint: str | None) -> Path:
    """Return the path of the first of the programs `names` that is on PATH.

    If there is none, raise ToolMissing with `module_hint`, or with a general hint if that is None.
    """
    programs = [program for program in map(shutil.which, names) if program]
    if not programs:
        load_command = module_hint or "module avail singularity apptainer   (then: module load ...)"
        raise ToolMissing(
            f"{' or '.join(names)} is not on PATH: a .sif is made and run by one of them",
            hint=f"on a cluster: {load_command}; elsewhere: https://apptainer.org/docs/admin/latest/installation.html",
        )
    # `absolute` does not resolve links: Apptainer may find its own files by the path that starts it.
    return Path(programs[0]).absolute()


def _ask_version(path: Path, module_hint: str | None) -> tuple[str, str]:
    """Return the flavour of the runtime `path` and its version: ``("apptainer", "1.4.5")``.

    If it is no runtime, raise ToolMissing with `module_hint`, or with a general hint if that is None.
    """
    version_result = _run_and_capture(path, "--version")
    output = version_result.output.strip()
    match = _FLAVOUR.match(output)
    if version_result.returncode == 0 and match is not None:
        return match[1].lower(), match[2]
    # Debian's package "singularity" is a game, so the message shows what the program printed.
    first_line = "(no output)"
    if output:
        first_line = output.splitlines()[0]
    raise ToolMissing(
        f"{path} is not Singularity 3.x or Apptainer: its --version prints {first_line!r}",
        hint=module_hint or "choose another: --runtime-command COMMAND",
    )


def runtime_if_any(command: str | None) -> RuntimeTool | None:
    """Find a runtime as `find_runtime` does, but return None if there is none.

    Raises
    ------
    ToolMissing : the user chose the runtime `command`, but it was not found.
    """
    try:
        return find_runtime(command)
    except ToolMissing:
        if command:
            raise
        return None


def attempt(tool: RuntimeTool, arguments: Sequence[str]) -> Finished:
    """Run the runtime with `arguments` and return the result, without an error if it fails."""
    return _run_and_capture(tool.path, *arguments)


def _run_and_capture(path: Path, *arguments: str) -> Finished:
    """Run the program `path` with `arguments`, and return its exit code and its last 2000 lines of output."""
    lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
    argv = (str(path), *arguments)
    code = _stream_output(path, argv, folder=Path.cwd(), env={}, on_line=lines.append)
    return Finished(argv=argv, returncode=code, output="".join(lines))


def run(
    tool: RuntimeTool,
    arguments: Sequence[str],
    *,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    log: TextIO | None = None,
    namespace: bool = False,
) -> Finished:
    """Run the runtime with `arguments`, and wait until it ends.

    If this process gets an exception meanwhile, such as that of Ctrl-C, the runtime and all processes that it
    has started are ended before the exception is passed on.

    Parameters
    ----------
    folder : working folder of the runtime. None means the current folder.
    env : variables that the runtime gets in addition to, or instead of, those of this process.
    on_line : receives each line of the output, with secrets masked.
    log : a file that receives the output.
    namespace : run the runtime in a new user namespace for root, which ``namespace.py`` creates.

    Raises
    ------
    ToolFailed : the exit code is not 0. The error quotes the last lines and names the log.
    """
    lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)

    def keep_line(line: str) -> None:
        lines.append(line)
        if log:
            log.write(line)  # the log from `log_file` masks secrets itself
        if on_line:
            on_line(secret_patterns.mask_secrets(line.rstrip("\n")))

    argv = (str(tool.path), *arguments)
    # Messages quote the command as the user would type it, without the Python program around it.
    full_argv = argv
    if namespace:
        full_argv = (sys.executable, "-I", "-S", "-c", _read_source("namespace.py"), *argv)
    code = _stream_output(tool.path, full_argv, folder=folder or Path.cwd(), env=env or {}, on_line=keep_line)
    finished = Finished(argv=argv, returncode=code, output="".join(lines))
    if code != 0:
        tail = secret_patterns.mask_secrets(strip_styles(finished.tail())) or "(no output)"
        hint = f"its last lines:\n{tail}"
        if log:  # only a conversion or a build has a log
            log.flush()
            hint += f"\nthe full log: {log.name}{kill_hint(code, finished.output)}"
        raise ToolFailed(f"{tool} failed with exit code {code}: {' '.join(argv[:2])}", hint=hint)
    return finished


def _stream_output(
    path: Path, argv: Sequence[str], *, folder: Path, env: Mapping[str, str], on_line: Callable[[str], None]
) -> int:
    """Run `argv` through spython, and return the exit code.

    Between them is ``supervisor.py``, which puts the runtime into its own process group, so that all its
    processes can be ended together.

    Parameters
    ----------
    path : the runtime that `argv` starts. Its folder is added to PATH, because the runtime's other programs
        are often in the same folder.
    folder : the working folder.
    env : variables to add.
    on_line : receives each line of the output, with its line break.
    """
    from spython.utils import stream_command

    # Use the runtime's TMPDIR: in a conversion, it is a temporary folder that is always removed at the end.
    # Without `dir=`, `tempfile` would use the folder of this process's environment, which it caches.
    tmpdir = env.get("TMPDIR") or os.environ.get("TMPDIR")
    if tmpdir and not Path(tmpdir).is_dir():
        tmpdir = None  # then `tempfile` chooses
    with tempfile.TemporaryDirectory(prefix="imgkit-run-", dir=tmpdir) as scratch:
        pid_file = Path(scratch) / "pid"  # the supervisor writes it, and `_kill_group` reads it
        # The runtime finds other programs on PATH, for example mksquashfs.
        search_path = f"{path.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        supervised_argv = _make_supervisor_argv(
            argv, pid_file, folder=folder, env={"PATH": search_path, **env}
        )
        try:
            # The pattern matches nothing. spython's default pattern drops every line that contains "Progess".
            for line in stream_command(supervised_argv, output_type="both", no_newline_regexp=r"(?!)"):
                on_line(line)
        except subprocess.CalledProcessError as error:
            return int(error.returncode)
        except BaseException:  # also KeyboardInterrupt: no process may be left behind
            _kill_group(pid_file)
            raise
    return 0


def _make_supervisor_argv(
    argv: Sequence[str], pid_file: Path, *, folder: Path, env: Mapping[str, str]
) -> list[str]:
    """Return the command that runs `argv` under ``supervisor.py``, in `folder` and with `env` added."""
    # spython decodes the output with this encoding, so the supervisor must write it with the same one.
    encoding = locale.getpreferredencoding(False)
    variables = [f"{name}={value}" for name, value in env.items()]
    supervisor = [sys.executable, "-I", "-S", "-c", _read_source("supervisor.py")]
    return [*supervisor, str(pid_file), encoding, str(folder), *variables, "--", *argv]


def _read_source(module: str) -> str:
    """Return the source code of the file `module` of this package, to be run as ``python -c SOURCE``."""
    return importlib.resources.files(__package__).joinpath(module).read_text(encoding="utf-8")


def _kill_group(pid_file: Path) -> None:
    """End the runtime and all processes that it has started, and wait until they are gone.

    All these processes are in one process group. The supervisor has written its number to `pid_file`. The
    processes get SIGTERM, and after 3 s SIGKILL. Processes that still exist after another 3 s, because they
    hang in the kernel, are left.
    """
    # The supervisor leads the group, so its pid is also the number of the group.
    try:
        group = int(pid_file.read_text())
    except (OSError, ValueError):  # there is no file, or nothing in it yet
        return  # the supervisor has not started anything
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _END_GRACE_S
        while time.monotonic() < deadline:
            # The signal is sent repeatedly, since a process may start another before it gets the signal.
            if not _signal_group(group, signal_number):
                return
            time.sleep(0.02)


def _signal_group(group: int, signal_number: int) -> bool:
    """Send a signal to the process group of a supervisor. Return False if the group has no process left."""
    with contextlib.suppress(ChildProcessError):
        # A dead process stays a member of its group until its parent, this process, waits for it.
        os.waitpid(group, os.WNOHANG)
    try:
        os.killpg(group, signal_number)
    except ProcessLookupError:
        return False
    return True


def scratch_env(folder: Path) -> dict[str, str]:
    """Return variables that make the runtime write its temporary files and its cache below `folder`.

    Singularity and Apptainer read variables with different prefixes. Both sets get the same values, because
    Apptainer 1.0 warns if ``SINGULARITY_TMPDIR`` and ``APPTAINER_TMPDIR`` differ.
    """
    temporary = folder / "tmp"
    cache = folder / "cache"
    temporary.mkdir(exist_ok=True)
    cache.mkdir(exist_ok=True)
    variables = {"TMPDIR": str(temporary)}
    for prefix in ("APPTAINER", "SINGULARITY"):
        variables[f"{prefix}_TMPDIR"] = str(temporary)
        variables[f"{prefix}_CACHEDIR"] = str(cache)
    return variables


@dataclass(frozen=True, slots=True)
class Isolation:
    """How a program of an image is isolated from the home, /tmp, variables and processes of this machine."""

    has_network: bool
    """Whether the program shares this machine's network, because the runtime cannot disable it."""

    @property
    def options(self) -> tuple[str, ...]:
        """Options of ``exec`` and ``shell``."""
        if self.has_network:
            return ("--containall", "--no-home")
        return ("--containall", "--no-home", "--net", "--network", "none")

    def description(self, program: str) -> str:
        """Return a line that tells the user which program of the image runs, and what it can access."""
        network = "no network"
        if self.has_network:
            network = "with this machine's network, which the runtime cannot take away"
        return f"{program} runs in the image: no home folder, {network}"


def choose_isolation(tool: RuntimeTool) -> Isolation:
    """Return an isolation without a network, or with this machine's network if `tool` cannot disable it.

    A setuid installation or the kernel may refuse to disable the network. To find out, the function starts an
    empty folder as a container. The folder has no programs, so the attempt always fails. The message mentions
    the network only if disabling it was refused.
    """
    without_network = Isolation(has_network=False)
    with tempfile.TemporaryDirectory(prefix="imgkit-empty-") as empty:
        for name in ("dev", "proc", "sys", "tmp"):
            (Path(empty) / name).mkdir()
        attempt = _run_and_capture(tool.path, "exec", *without_network.options, empty, "/nothing")
    is_refused = "network" in attempt.output.lower()
    return Isolation(has_network=is_refused)


def exec_arguments(image: Path, argv: Sequence[str], isolated: Isolation) -> tuple[str, ...]:
    """Return the arguments of the runtime that run `argv` inside `image`: ``exec OPTIONS IMAGE ARGV``."""
    return ("exec", *isolated.options, str(image.absolute()), *argv)


@contextlib.contextmanager
def log_file(stem: str) -> Iterator[TextIO]:
    """Open a new log file, ``$XDG_STATE_HOME/imgkit/sif/TIME-STEM-TOKEN.log``. TIME is the local time.

    If the home folder is not writable, the file is created in the folder for temporary files. Secrets in the
    log are masked.
    """
    name = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{stem}-{secrets.token_hex(4)}.log"
    try:
        folder = files.state_dir() / "sif"
        folder.mkdir(parents=True, exist_ok=True)
        stream = files.create_file(folder / name)
    except (OSError, RuntimeError):  # RuntimeError: no home folder at all
        stream = files.create_file(Path(tempfile.gettempdir()) / name)
    # `_Log` is a text file on top of the open file `stream`. Its `write` masks secrets.
    with stream, _Log(stream, encoding="utf-8", errors="replace") as log:
        yield log


class _Log(io.TextIOWrapper):
    """A text file in which secrets are replaced by stars, because users send their logs to others."""

    def write(self, text: str) -> int:
        return super().write(secret_patterns.mask_secrets(text))
