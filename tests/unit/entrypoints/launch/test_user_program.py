"""A user's program below the launcher: its signals, its children's, its path and arguments."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from imgkit_entrypoints.launch import user_program

STOPS = user_program.STOP_SIGNALS
FORK = "import multiprocessing as mp, os, signal, subprocess, sys, time; mp.set_start_method('fork')\n"
CHILD = (
    FORK + "child = mp.Process(target=time.sleep, args=(100,), daemon=True); child.start(); time.sleep(0.3)\n"
)

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``run(code, *arguments)``: a script of that code as torchrun would start it, signals blocked."""

    def started(code: str, *args: str, before: Sequence[str] = (), blocked: bool = True, **env: str):
        script = tmp_path / "script.py"
        script.write_text(code)
        program = () if "-m" in before else (str(script),)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS if blocked else ())
        try:
            process = subprocess.Popen(
                [sys.executable, "-u", user_program.__file__, *before, *program, *args],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=tmp_path,
                env={**os.environ, "LOCAL_RANK": "3", **env},
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            output, _ = process.communicate(timeout=20)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    return started


@pytest.mark.parametrize("number", STOPS)
def test_stop_signal_does_not_end_the_program(run, number):
    result = run(f"import os; os.kill(os.getpid(), {int(number)}); print('alive')")
    assert (result.returncode, result.stdout) == (0, "alive\n")


THIRD_PROCESS = "subprocess.run(['kill', '-TERM', str(child.pid)]); time.sleep(0.3); print(child.is_alive())"


@pytest.mark.parametrize(
    ("code", "output"),
    [
        (FORK + "signal.signal(10, lambda *_: print('mine')); os.kill(os.getpid(), 10)", "mine\n"),
        (CHILD + THIRD_PROCESS, "True\n"),
        (CHILD + "child.terminate(); child.join(); print('joined')", "joined\n"),
        (CHILD + "print('end')", "end\n"),
        (FORK + "p = subprocess.Popen(['sleep', '100']); p.terminate(); print(p.wait())", "-15\n"),
    ],
    ids=["own handler", "forked child outlives a scheduler's signal", "forked child can be terminated",
         "abandoned child does not hold the end", "started command has the usual signals"],
)  # fmt: skip
def test_signals_reach_those_who_should_obey(run, code, output):
    result = run(code)
    assert (result.returncode, result.stdout) == (0, output)


def test_signals_are_left_alone_without_a_launcher(run):
    assert run("import os; os.kill(os.getpid(), 15); print('alive')", blocked=False).returncode == -15


OLD = (
    "import argparse\np = argparse.ArgumentParser()\np.add_argument('--local_rank', type=int)\n"
    "s = p.add_subparsers().add_parser('train')\ns.add_argument('--lr')\nprint(p.parse_args())"
)


@pytest.mark.parametrize(
    ("code", "args", "output"),
    [
        ("import sys; print(sys.argv[1:])", ("--lr", "1"), "['--local_rank=3', '--lr', '1']\n"),
        (OLD, ("train", "--lr", "1"), "Namespace(local_rank=3, lr='1')\n"),
    ],
)
def test_local_rank_comes_before_the_arguments(run, code, args, output):
    assert run(code, *args, before=("--pass-local-rank",)).stdout == output


def test_path_and_name_are_a_scripts(run, tmp_path):
    (tmp_path / "beside.py").write_text("")
    result = run("import beside, sys; print(__name__, sys.argv, sys.path[0])")
    script = tmp_path / "script.py"
    assert result.stdout == f"__main__ {[str(script)]} {tmp_path}\n"


def test_module_is_found_in_the_current_folder(run, tmp_path):
    (tmp_path / "tool.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert run("", "tool", "-m", before=("-m",)).stdout == "__main__ ['-m']\n"


def test_missing_script_is_named(run):
    result = run("", before=("/no/such.py",))
    assert result.returncode == 1
    assert "/no/such.py" in result.stdout


@pytest.mark.parametrize(
    "connect",
    [
        "socket.create_connection(('127.0.0.1', PORT))",
        "urllib.request.urlopen(f'http://127.0.0.1:{PORT}/')",
        "urllib.request.urlopen(f'http://hub.invalid:{PORT}/')",
    ],
)
def test_failed_connection_names_its_host_and_port(run, tmp_path, connect):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"import socket, urllib.request\nPORT = {port}\ntry:\n    {connect}\nexcept OSError as error:\n"
    result = run(code + "    raise RuntimeError('no data') from error\n", **agent_env(tmp_path))
    host = "hub.invalid" if "invalid" in connect else "127.0.0.1"
    record = (tmp_path / "failed-3").read_text().splitlines()
    assert record[1] == f"this node cannot reach {host}:{port} (is there a route to the internet?)", (
        result.stdout
    )
    assert record[-1] == "RuntimeError: no data"


def test_other_error_of_the_system_names_no_host(run, tmp_path):
    run("open('/absent')", **agent_env(tmp_path))
    assert "cannot reach" not in (tmp_path / "failed-3").read_text()


def agent_env(folder: Path) -> dict[str, str]:
    return {"IMGKIT_STOP_DIR": str(folder), "RANK": "3", "IMGKIT_ATTEMPT": "1"}
