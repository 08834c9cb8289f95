"""``imgkit run`` with docker on this machine: here, by mpirun, and by ssh through a server of its own."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from file_tree import write_files
from labkit import (
    AS_ROOT,
    IMGKIT,
    TOKEN,
    docker,
    expect_failure,
    expect_success,
    imgkit,
    imgkit_json,
    run,
    split_line,
    until,
)
from remotekit import far_host, sshd

WILLING = "trap 'echo asked; exit 7' TERM INT; echo works; while :; do sleep 0.1; done"
DEAF = "trap '' TERM INT HUP; echo works; while :; do sleep 0.1; done"

pytestmark = pytest.mark.docker


@pytest.fixture
def recipe(tmp_path):
    """The recipe lambda without what this machine may not have: GPUs and a right to lock memory."""
    file = tmp_path / "one.yaml"
    options = "options: [--ipc=host, --network=host]"
    file.write_text(f"extends: cpu\nsystem:\n  scheduler: mpi\n  runtime:\n    {options}\n")
    return file


def argv(recipe, image, folder, *args):
    flags = ("run", recipe, "--image", image, "--directory", folder, *split_line(*args))
    return [str(argument) for argument in (*IMGKIT, *flags)]


def containers(folder):
    """Those that have `folder` mounted."""
    result = run("docker", "ps", "--quiet", "--filter", f"volume={folder}")
    return result.stdout.split()


def test_words_and_exit_code_pass_through(standin_notorch, tmp_path):
    program = 'pwd; printf "<%s>" "$NOTE" "$TOKEN" "$OTHER" "$@"; exit 3'
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.write_text(f"OTHER={TOKEN[::-1]}\n")
    note = "$(reboot) \"a\"  'b'"
    variables = ("--env TOKEN --env-file tokens --env", f"NOTE={note}")
    command = argv("cpu", standin_notorch, tmp_path, *variables, "--", "sh", "-c", program, "sh", "a  b", "*")
    result = expect_failure(run(*command, env={"TOKEN": TOKEN}), 3)
    assert result.stdout.endswith(f"{tmp_path}\n<{note}><{TOKEN}><{TOKEN[::-1]}><a  b><*>")
    # imgkit becomes the docker run that it prints, so these are its arguments.
    assert "imgkit: docker run " in result.stderr
    assert TOKEN not in result.stderr
    assert TOKEN[::-1] not in result.stderr


def test_docker_runs_in_a_copy_of_the_code(mn5_image, tmp_path):
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/c").write_text("sent\n")
    program = 'dist-env --device cpu > /dev/null && pwd && cd "a b" && echo more >> c && cat c && mkdir out'
    command = ("--code", str(tmp_path), "--gpus", "0", "--", "sh", "-c", program)
    for _ in range(2):
        result = expect_success(run(*argv("cpu", mn5_image, tmp_path, *command)))
        assert result.stdout == "/workspace\nsent\nmore\n"
    assert len(list(tmp_path.glob("runs/cpu-*/workspace/a b/out"))) == 2
    assert (tmp_path / "a b/c").read_text() == "sent\n"


def test_interactive_command_has_a_terminal(standin_notorch, tmp_path):
    program = "test -t 0 && test -t 1; exit $((5 + $?))"
    command = argv("cpu", standin_notorch, tmp_path, "-i -- sh -c", program)
    child, terminal = pty.fork()
    if child == 0:
        os.execv(command[0], command)  # noqa: S606 - an argv list, no shell
    with contextlib.suppress(OSError):  # the terminal's end
        while os.read(terminal, 1024):
            pass
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_container(standin_notorch, tmp_path, number):
    command = argv("cpu", standin_notorch, tmp_path, "-- sh -c", WILLING)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        while running.stdout.readline() != "works\n":
            assert running.poll() is None
        running.send_signal(number)
        assert running.stdout.read() == "asked\n"
        assert running.wait(120) == 7
    until(lambda: not containers(tmp_path))


@pytest.mark.cluster  # for mpirun
@pytest.mark.parametrize("form", [(), ("--mpi-start", "ranks")])
def test_mpirun_starts_containers(mn5_image, recipe, tmp_path, form):
    hello = ("--nproc", "2", "--", "dist-hello", "--device", "cpu")
    result = expect_success(
        run(*argv(recipe, mn5_image, tmp_path, "--hosts localhost", *form, *hello), env=AS_ROOT)
    )
    assert "all_reduce of ones: 2" in result.stdout


@pytest.fixture
def ssh():
    """Return an environment whose ``ssh`` reaches this machine under the names ``far`` and ``far2``."""
    with far_host(Path(f"/tmp/imgkit-local-{os.getpid()}")) as host, sshd(host, "PermitRootLogin yes"):
        yield {**os.environ, **host.env}


@pytest.mark.cluster  # for sshd, and root
def test_ssh_starts_a_container(mn5_image, recipe, tmp_path, ssh):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/sent").touch()
    hello = ("--nproc", "2", "--code", str(tmp_path / "code"), "--", "dist-hello", "--device", "cpu")
    result = expect_success(
        run(*argv(recipe, mn5_image, tmp_path, "--hosts far --mpi-start ssh", *hello), env=ssh)
    )
    assert "all_reduce of ones: 2" in result.stdout
    assert len(list(tmp_path.glob("runs/one-*/workspace/sent"))) == 1


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("program", "number", "code"), [(WILLING, signal.SIGINT, 7), (DEAF, signal.SIGKILL, -signal.SIGKILL)]
)
def test_end_of_the_fan_out_ends_containers(
    standin_notorch,
    recipe,
    tmp_path,
    ssh,
    program,
    number,
    code,
):
    hosts = "--hosts far,far2 --mpi-start ssh -- sh -c"
    command = argv(recipe, standin_notorch, tmp_path, hosts, program)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ssh) as running:
        lines = {running.stdout.readline(), running.stdout.readline()}
        assert lines == {"far: works\n", "far2: works\n"}
        running.send_signal(number)
        assert running.wait(120) == code
    until(lambda: not containers(tmp_path))


TOML = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "{0}-project"
version = "1"
[project.scripts]
run-{0} = "{0}:main"
[tool.setuptools.packages.find]
where = ["src"]
"""
PROJECTS = """\
image:
  base: registry.invalid/base:1
  platform: amd64
  pip:
    - {project: linked, editable: /workspace/linked, options: [--no-index, --no-build-isolation]}
    - {project: copied, options: [--no-index, --no-build-isolation]}
system:
  scheduler: standalone
  runtime: {kind: singularity, command: singularity}
"""


@pytest.mark.singularity
def test_sent_code_runs_or_is_refused(standin_notorch, tmp_path):
    """A project that pip has linked is that of ``--code``; of a copy, the job would run what was built."""
    recipe, tag = tmp_path / "two.yaml", f"imgkit-test-code-{os.getpid()}:1"
    recipe.write_text(PROJECTS)
    for name in ("linked", "copied"):
        files = {
            "pyproject.toml": TOML.format(name),
            f"src/{name}/__init__.py": "WHO = 'old'\ndef main(): print(WHO)\n",
            f"src/{name}/__main__.py": f"import {name}; {name}.main()\n",
            "train.py": f"import {name}; {name}.main()\n",
        }
        write_files(tmp_path / name, files)
    try:
        imgkit_json("build", recipe, "--base", standin_notorch, "--no-test", "--tag", tag)
        imgkit_json("sif", tag, "-o", "two.sif", "--no-test", folder=tmp_path)
    finally:
        docker("image rm --force", tag)
    send, jobs = tmp_path / "send", tmp_path / "jobs"
    jobs.mkdir()
    shutil.copytree(tmp_path / "linked", send / "linked")
    (send / "linked/src/linked/__init__.py").write_text("WHO = 'new'\ndef main(): print(WHO)\n")
    job = ("run", "two.sif", "--directory", jobs, "--code")
    commands = "run-linked; python3 -m linked; python3 /workspace/linked/train.py"
    result = imgkit(*job, send, "--", "sh", "-c", commands, folder=tmp_path)
    assert result.stdout == "new\nnew\nnew\n", result.stderr
    expect_failure(
        imgkit(*job, "copied", "--", "run-copied", folder=tmp_path),
        2,
        "copied-project in /workspace, but the image runs its copy in site-packages",
        "set `editable: /workspace` in image.pip[1] of the recipe two",
    )
    config = tmp_path / "config/imgkit/remotes.toml"
    config.parent.mkdir(parents=True)
    config.write_text('[far]\naddress = "nobody@nowhere.invalid"\n')
    (tmp_path / "far.yaml").write_text("extends: two.yaml\nsystem: {scheduler: slurm}\n")
    args = ("run", "far.yaml", "--on", "far", "--code", "copied/src", "--", "run-copied")
    refused = imgkit(*args, folder=tmp_path, env={"XDG_CONFIG_HOME": f"{tmp_path}/config"})
    assert "two.yaml:6: the code is only a part of the project copied-project" in refused.stderr
