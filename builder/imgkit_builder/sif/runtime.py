"""Singularity and Apptainer: find one, probe what it can do, run it. The only importer of spython.

Notes
-----
Every run goes through ``spython.utils.stream_command``, spython's public function that streams the output of
a command. Its larger public functions do not serve, as running spython 0.3.14 shows. ``Client.build`` runs
sudo by default, drops the exit code and returns a stale file as success; with ``stream=True`` it hangs once
the runtime has written 64 KiB to stderr. No function takes a working folder or ends the processes that the
runtime starts, and there is none for ``sif new``, ``sif add`` and ``sif del``. All of them run whatever is
called ``singularity`` on PATH, not the runtime that the user chose.

``stream_command`` itself takes neither a working folder nor variables. ``supervisor`` runs between it and the
runtime and adds both, so that nothing changes in the environment of this process.
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
"""Tried in this order; an Apptainer installs both names."""
FLOOR = "Singularity 3.8 or later, or any Apptainer"
"""The runtimes that the files of imgkit are made for."""
_OLDEST_SINGULARITY = (3, 8)

_FLAVOUR = re.compile(
    r"^(apptainer|singularity-ce|singularitypro|singularity)\s+version\s+(\S+)", re.IGNORECASE
)
_KEPT_LINES = 2000  # of a runtime's output, for messages
_END_GRACE_S = 3.0
"""How long a group of processes may take to end after SIGTERM, and again after SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Options of ``build`` that only some runtimes have, as their help lists them."""

    mksquashfs_args: bool
    """``build --mksquashfs-args``: Apptainer from 1.4."""
    disable_cache: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeTool:
    """A runtime on this machine."""

    path: Path
    flavour: str
    """``apptainer``, ``singularity-ce``, ``singularitypro`` or ``singularity``."""
    version: str
    capabilities: Capabilities

    def __str__(self) -> str:
        return f"{self.flavour} {self.version}"

    @property
    def below_floor(self) -> bool:
        """Whether the runtime is older than `FLOOR` demands."""
        match = re.match(r"(\d{1,6})\.(\d{1,6})", self.version)
        if match is None or self.flavour == "apptainer":
            return False
        return (int(match[1]), int(match[2])) < _OLDEST_SINGULARITY


def find_runtime(command: str | None = None, *, module_hint: str | None = None) -> RuntimeTool:
    """Find Singularity or Apptainer on this machine, and ask it for its version and its options.

    Parameters
    ----------
    command : name or path of the runtime; None looks for ``singularity``, then ``apptainer``, on PATH.
    module_hint : the command that makes the runtime available on the user's cluster, for the error's hint:
        ``module load singularity``.

    Raises
    ------
    ToolMissing : there is none, or the program of that name is neither of the two.
    """
    names = (command,) if command else COMMANDS
    programs = [program for program in map(shutil.which, names) if program]
    if not programs:
        load = module_hint or "module avail singularity apptainer   (then: module load ...)"
        raise ToolMissing(
            f"{' or '.join(names)} is not on PATH: a .sif is made and run by one of them",
            hint=f"on a cluster: {load}; elsewhere: https://apptainer.org/docs/admin/latest/installation.html",
        )
    # Links are not resolved: Apptainer may find its own files by the path under which it is called.
    path = Path(programs[0]).absolute()
    answer = _ask(path, "--version")
    output = answer.output.strip()
    match = _FLAVOUR.match(output)
    if answer.returncode != 0 or match is None:
        # Debian's package "singularity" is a game.
        first_line = "(no output)"
        if output:
            first_line = output.splitlines()[0]
        raise ToolMissing(
            f"{path} is not Singularity 3.x or Apptainer: its --version prints {first_line!r}",
            hint=module_hint or "choose another: --runtime-command COMMAND",
        )
    build_help = _ask(path, "build", "--help").output
    return RuntimeTool(
        path=path,
        flavour=match[1].lower(),
        version=match[2],
        capabilities=Capabilities(
            mksquashfs_args="--mksquashfs-args" in build_help,
            disable_cache="--disable-cache" in build_help,
        ),
    )


def setting(tool: RuntimeTool, name: str) -> str:
    """Return the value of the setting `name` in the runtime's configuration file, such as ``mount proc``.

    Return ``""`` if the file or the setting is missing. The file is read because an ordinary user may not run
    ``config global --get`` of a setuid runtime.
    """
    build_config = _ask(tool.path, "buildcfg").output
    # "APPTAINER_CONF_FILE=/etc/apptainer/apptainer.conf"
    match = re.search(r"^[A-Z]+_CONF_FILE=(.+)$", build_config, re.MULTILINE)
    if match is None:
        return ""
    try:
        text = files.read_text(Path(match[1]), errors="replace")
    except OSError:
        return ""
    values = re.findall(rf"^\s*{re.escape(name)}\s*=\s*(.*?)\s*$", text, re.MULTILINE)
    if not values:
        return ""
    return str(values[-1])  # the last of several lines counts


def runtime_if_any(command: str | None) -> RuntimeTool | None:
    """Find a runtime as `find_runtime` does, but return None if there is none.

    Raises
    ------
    ToolMissing : the user asked for the runtime `command`, and it is not there.
    """
    try:
        return find_runtime(command)
    except ToolMissing:
        if command:
            raise
        return None


def attempt(tool: RuntimeTool, arguments: Sequence[str]) -> Finished:
    """Run the runtime to its end with `arguments`, whatever its exit code."""
    return _ask(tool.path, *arguments)


def _ask(path: Path, *arguments: str) -> Finished:
    """Run the program `path` with `arguments`, and return its exit code and the end of its output."""
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
    """Run the runtime with `arguments`, and wait for its end.

    An exception in this process, such as that of Ctrl-C, first ends the runtime and all that it has started.

    Parameters
    ----------
    folder : its working folder; None stands for the current one.
    env : variables to add to this process's environment, or to replace in it.
    on_line : receives each line of its output, with secrets masked.
    log : a file that receives the output.
    namespace : run it in a user namespace that ``namespace.py`` makes for root.

    Raises
    ------
    ToolFailed : the exit code is not 0. The error quotes the last lines and names the log.
    """
    lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)

    def keep_line(line: str) -> None:
        lines.append(line)
        if log:
            log.write(line)
        if on_line:
            on_line(secret_patterns.mask_secrets(line.rstrip("\n")))

    argv = (str(tool.path), *arguments)
    full_argv = argv
    if namespace:
        full_argv = (sys.executable, "-I", "-S", "-c", _source("namespace.py"), *argv)
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

    Parameters
    ----------
    path : the runtime that `argv` starts. Its folder is put on PATH, since its programs often lie there.
    folder : the working folder.
    env : variables to add.
    on_line : receives each line of the output, with its line break.
    """
    from spython.utils import stream_command

    # TMPDIR as the runtime gets it: in a conversion, this is the workspace, which is removed in any case.
    # `tempfile` alone would use the folder that it has remembered from this process's environment.
    tmpdir = env.get("TMPDIR") or os.environ.get("TMPDIR")
    if tmpdir and not Path(tmpdir).is_dir():
        tmpdir = None
    with tempfile.TemporaryDirectory(prefix="imgkit-run-", dir=tmpdir) as scratch:
        pid_file = Path(scratch) / "pid"
        # For mksquashfs, for example, which the runtime starts.
        search_path = f"{path.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        supervised_argv = _supervisor_argv(argv, pid_file, folder=folder, env={"PATH": search_path, **env})
        try:
            # A pattern that matches nothing: spython's default one drops every line with "Progess" in it.
            for line in stream_command(supervised_argv, output_type="both", no_newline_regexp=r"(?!)"):
                on_line(line)
        except subprocess.CalledProcessError as error:
            return int(error.returncode)
        except BaseException:
            _kill_group(pid_file)
            raise
    return 0


def _supervisor_argv(
    argv: Sequence[str], pid_file: Path, *, folder: Path, env: Mapping[str, str]
) -> list[str]:
    """Return the command that runs `argv` under ``supervisor.py``, in `folder` and with `env` added."""
    encoding = locale.getpreferredencoding(False)
    variables = [f"{name}={value}" for name, value in env.items()]
    supervisor = [sys.executable, "-I", "-S", "-c", _source("supervisor.py")]
    return [*supervisor, str(pid_file), encoding, str(folder), *variables, "--", *argv]


def _source(module: str) -> str:
    """Return the source of the file `module` of this package, to be run as ``python -c SOURCE``."""
    return importlib.resources.files(__package__).joinpath(module).read_text(encoding="utf-8")


def _kill_group(pid_file: Path) -> None:
    """End the runtime and all processes that it has started, and wait until they are gone.

    They are one process group, whose number the supervisor has written to `pid_file`. They get SIGTERM first,
    and after 3 s SIGKILL.
    """
    try:
        group = int(pid_file.read_text())
    except (OSError, ValueError):
        return  # the supervisor has not started anything yet
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _END_GRACE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                # A dead process stays a member of its group until its parent, this process, waits for it.
                os.waitpid(group, os.WNOHANG)
            try:
                # In a loop, since a process may start another one before the signal reaches it.
                os.killpg(group, number)
            except ProcessLookupError:
                return
            time.sleep(0.02)


def scratch_env(folder: Path) -> dict[str, str]:
    """Return variables that make the runtime write its temporary files and its cache below `folder`.

    Singularity and Apptainer read variables of their own. Both get the same values: Apptainer 1.0 warns if
    ``SINGULARITY_TMPDIR`` and ``APPTAINER_TMPDIR`` differ.
    """
    temporary = folder / "tmp"
    cache = folder / "cache"
    temporary.mkdir(exist_ok=True)
    cache.mkdir(exist_ok=True)
    values = {"TMPDIR": str(temporary)}
    for prefix in ("APPTAINER", "SINGULARITY"):
        values[f"{prefix}_TMPDIR"] = str(temporary)
        values[f"{prefix}_CACHEDIR"] = str(cache)
    return values


@dataclass(frozen=True, slots=True)
class Isolation:
    """How a program of an image runs: without this machine's home, /tmp, variables and processes."""

    network: bool
    """Whether the program shares this machine's network, because the runtime cannot take it away."""

    @property
    def options(self) -> tuple[str, ...]:
        """Options of ``exec`` and ``shell``."""
        if self.network:
            return ("--containall", "--no-home")
        return ("--containall", "--no-home", "--net", "--network", "none")

    def description(self, program: str) -> str:
        """Return one line for the user: what of the image runs, and what it can reach."""
        network = "no network"
        if self.network:
            network = "with this machine's network, which the runtime cannot take away"
        return f"{program} runs in the image: no home folder, {network}"


def isolation(tool: RuntimeTool) -> Isolation:
    """Find out whether the runtime `tool` can start a container without a network for this user.

    A setuid installation or the kernel may refuse that. To find out, an empty folder is started as a
    container. It has no programs, so the attempt always fails, but the message speaks of the network only if
    that is what was refused.
    """
    without_network = Isolation(network=False)
    with tempfile.TemporaryDirectory(prefix="imgkit-empty-") as empty:
        for name in ("dev", "proc", "sys", "tmp"):
            (Path(empty) / name).mkdir()
        answer = _ask(tool.path, "exec", *without_network.options, empty, "/nothing")
    is_refused = "network" in answer.output.lower()
    return Isolation(network=is_refused)


def exec_arguments(image: Path, argv: Sequence[str], isolated: Isolation) -> tuple[str, ...]:
    """Return the arguments of the runtime that run `argv` inside `image`: ``exec OPTIONS IMAGE ARGV``."""
    return ("exec", *isolated.options, str(image.absolute()), *argv)


@contextlib.contextmanager
def log_file(stem: str) -> Iterator[TextIO]:
    """Open a new log file, ``$XDG_STATE_HOME/imgkit/sif/TIME-STEM-TOKEN.log``.

    It goes to the folder for temporary files if the home folder cannot be written. Secrets are masked in it.
    """
    name = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{stem}-{secrets.token_hex(4)}.log"
    try:
        folder = files.state_dir() / "sif"
        folder.mkdir(parents=True, exist_ok=True)
        stream = files.create_file(folder / name)
    except (OSError, RuntimeError):  # RuntimeError: no home folder at all
        stream = files.create_file(Path(tempfile.gettempdir()) / name)
    with stream, _Log(stream, encoding="utf-8", errors="replace") as log:
        yield log


class _Log(io.TextIOWrapper):
    """A text file in which secrets are replaced by stars, because users send their logs to others."""

    def write(self, text: str) -> int:
        return super().write(secret_patterns.mask_secrets(text))
