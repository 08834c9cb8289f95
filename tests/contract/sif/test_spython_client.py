"""What fails in the functions of spython's Client, in the installed version: the reasons for workarounds.

If a test fails here, spython has changed: docs/adr/0021-spython.md names the workaround that can go.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from file_tree import write_program
from spython.main import Client
from spython.utils import stream_command

ADR = Path(__file__).resolve().parents[3] / "docs/adr/0021-spython.md"


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called ``singularity``, alone on PATH, that prints its arguments and fails."""
    program = tmp_path / "bin" / "singularity"
    program.parent.mkdir()
    write_program(program, 'echo "$@"; echo failed >&2; exit 3')
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return program


def test_build_starts_sudo_by_default():
    assert inspect.signature(Client.build).parameters["sudo"].default is True


def test_failed_build_returns_a_stale_file_as_success(runtime, tmp_path):
    (tmp_path / "x.sif").write_bytes(b"of an earlier build")
    assert Client.build(recipe="x.def", image="x.sif", sudo=False, quiet=True) == "x.sif"
    (tmp_path / "x.sif").unlink()
    assert Client.build(recipe="x.def", image="x.sif", sudo=False, quiet=True) is None


def test_failed_pull_returns_the_name_of_the_file(runtime):
    path = Client.pull("docker://busybox", name="x.sif", quiet=True)
    assert (Path(path).name, Path(path).exists()) == ("x.sif", False)


def test_streamed_build_hangs_once_standard_error_is_full(runtime):
    """The runtimes write all that they report to standard error, and nobody reads it."""
    write_program(runtime, "head -c 200000 /dev/zero | tr '\\0' e >&2; echo done")
    code = (
        "from spython.main import Client\n"
        "_, lines = Client.build(recipe='x.def', image='x.sif', sudo=False, stream=True)\n"
        "list(lines)\n"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=3, check=False)


def test_execute_returns_a_text_or_a_dictionary(runtime):
    """Only a failure has an exit code, and a list may begin with either stream."""
    failed = Client.execute("x.sif", ["true"], quiet=True)
    assert failed == {"message": ["exec x.sif true\n", "failed\n"], "return_code": 3}
    write_program(runtime, "echo only standard error >&2")
    result = Client.execute("x.sif", ["true"], quiet=True, return_result=True)
    assert result["message"] in ("only standard error\n", ["only standard error\n"])
    write_program(runtime, "echo done")
    assert Client.execute("x.sif", ["true"], quiet=True) == "done\n"


def test_execute_ignores_variables_where_it_streams(runtime):
    write_program(runtime, 'echo "${MINE-unset}"')
    lines = Client.execute("x.sif", ["true"], stream=True, environ={**os.environ, "MINE": "1"})
    assert "unset" in "".join(lines)


def test_client_runs_whatever_is_called_singularity(runtime):
    """Not the runtime that the user chose: no function takes a program."""
    assert Client._init_command("build")[0] == "singularity"
    for function in (Client.build, Client.pull, Client.execute, Client.inspect):
        assert not {"program", "cwd"} & set(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", ["sign", "verify", "sif", "overlay", "config"])
def test_client_has_no_function_for(name):
    assert not hasattr(Client, name)


def test_stream_command_takes_no_folder_and_no_variables():
    assert not {"cwd", "env", "environ"} & set(inspect.signature(stream_command).parameters)


def test_stream_command_fails_on_a_stray_byte(runtime):
    """Program output is decoded strictly: `supervisor` decodes it first."""
    write_program(runtime, "printf '\\377\\n'")
    with pytest.raises(UnicodeDecodeError):
        list(stream_command([str(runtime)], output_type="both"))


def test_stream_command_drops_lines_with_progess_by_default(runtime):
    write_program(runtime, "echo Progess 1; echo kept")
    assert list(stream_command([str(runtime)], output_type="both")) == ["kept\n"]


def test_stream_command_leaves_children_of_an_interrupted_run(runtime, tmp_path):
    """`supervisor` makes a group of processes that can be ended as a whole."""
    write_program(runtime, "sleep 60 & echo $!; wait")
    lines = stream_command([str(runtime)], output_type="both")
    child = int(next(lines))
    lines.close()
    try:
        os.kill(child, 0)  # it still runs
    finally:
        os.kill(child, 9)


def test_every_fault_is_in_the_decision():
    """The table of the decision names each test of this file."""
    text = ADR.read_text(encoding="utf-8")
    tests = [name for name in globals() if name.startswith("test_") and "decision" not in name]
    assert [name for name in tests if f"`{name}`" not in text] == []
