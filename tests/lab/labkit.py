"""What tests of several folders use: commands, containers of the stand-in, the virtual cluster, waiting.

pytest finds this module by `pythonpath` in pyproject.toml.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Done = subprocess.CompletedProcess[str]

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "ci/lab"
PACKAGE = ROOT / "entrypoints/imgkit_entrypoints"
PLACE = "/usr/local/lib/python3.11/dist-packages/imgkit_entrypoints"
"""Where `PACKAGE` goes in the stand-in image."""
IMGKIT = (sys.executable, "-m", "imgkit_builder")
# Without a network no host name resolves: Gloo finds lo by itself, but warns first.
QUIET = ("--env", "GLOO_SOCKET_IFNAME=lo", "--env", "OMP_NUM_THREADS=1")
TOKEN = "hf_ThisIsNoTokenButLooksLikeOne0123456"  # noqa: S105
LOOK = Path(__file__).parent / "job/look_for_secrets.py"
LOOKED = re.compile(r"looked: (\[.*\]) found (\[.*\]) with True True$", re.MULTILINE)
"""What `LOOK` prints: modes of secret files, and what it found."""
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""The test nodes' only user is root, and mpirun refuses root without these."""

PYXIS = os.environ.get("IMGKIT_PYXIS", "")
"""A folder with bin/enroot and lib/slurm/spank_pyxis.so, for this machine's Slurm; empty: there is none."""

cluster_marks = [pytest.mark.cluster, pytest.mark.docker, pytest.mark.singularity]
slurm_marks = [*cluster_marks, pytest.mark.slurm]


def soak(*values: object) -> list[Any]:
    """Return values of a parameter that only the soak tries."""
    return [pytest.param(value, marks=pytest.mark.soak) for value in values]


SLURMS = ["trixie", *soak("own", "sid")]
"""Releases of Debian whose Slurm the nodes have; "own" is what this machine has installed."""


def run(
    *argv: object,
    folder: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout_s: float = 600,
) -> Done:
    """Run a command with the text `stdin`; `env` is added to this process's variables."""
    return subprocess.run(
        list(map(str, argv)),
        cwd=folder,
        env={**os.environ, **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def expect_success(result: Done) -> Done:
    """Return the result of a command, or fail with its messages if it failed."""
    assert result.returncode == 0, result.stderr[-4000:] + result.stdout[-4000:]
    return result


def expect_failure(result: Done, code: int, *messages: str) -> Done:
    """Return the result of a command, which must fail with `code` and print `messages` as errors."""
    assert result.returncode == code, result.stderr[-4000:] + result.stdout[-4000:]
    for message in messages:
        assert message in result.stderr, result.stderr
    return result


def output(*args: object, **options: Any) -> str:
    """Run a command that must succeed, and return its output."""
    return expect_success(run(*args, **options)).stdout


def split_line(line: object, *args: object) -> tuple[object, ...]:
    """Return an argv from its first words on one line and the rest, which may have blanks, one by one."""
    words = line.split() if isinstance(line, str) else [line]
    return (*words, *args)


def imgkit(*args: object, **options: Any) -> Done:
    """Run imgkit; the first of `args` may be several words."""
    return run(*IMGKIT, *split_line(*args), **options)


def imgkit_json(*args: object, **options: Any) -> dict[str, Any]:
    """Run a verb that must succeed with ``--json``, and return its document."""
    return json.loads(expect_success(imgkit(*args, "--json", **options)).stdout)


def docker(*args: object, **options: Any) -> str:
    return output("docker", *split_line(*args), **options).strip()


def inspect_image(name: str) -> dict[str, Any]:
    """Return the engine's description of an image."""
    return json.loads(docker("image", "inspect", name))[0]


def verdicts(path: Path) -> dict[str, str]:
    """Return the verdict of each check of `imgkit verify`, which must pass."""
    return {check["name"]: check["verdict"] for check in imgkit_json("verify", path)["checks"]}


def host_address() -> str:
    """This machine's address as containers on Docker's default network see it.

    The first daemon on a machine states a subnet and no gateway for the bridge that it has made.
    """
    subnet = docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Subnet}}")
    return str(ipaddress.ip_network(subnet)[1])


def in_image(
    image: str, *argv: object, options: Sequence[object] = (), stdin: str = "", timeout_s: float = 600
) -> Done:
    """Run a command in a new container of a stand-in image, with this checkout's package and no network."""
    start = ("docker", "run", "--rm", "--interactive", "--network", "none")
    mounted = ("--volume", f"{PACKAGE}:{PLACE}:ro", *QUIET)
    return run(*start, *mounted, *options, image, *argv, stdin=stdin, timeout_s=timeout_s)


def until(
    condition: Callable[[], object], *, within_s: float = 240, describe: Callable[[], str] = lambda: ""
) -> None:
    """Wait until `condition` holds; after `within_s` the test fails with the text of `describe`.

    Many a condition starts programs, so the pauses grow; else waiting takes half a processor.
    """
    start_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - start_s
        assert waited_s < within_s, describe()
        time.sleep(min(max(0.1, waited_s / 5), 0.5))


def shared_folder() -> Path:
    """The folder that all workers of this run share; tests/conftest.py names it and removes it at the end.

    Ordinary users can enter it, unlike pytest's own folders.
    """
    folder = Path(os.environ["IMGKIT_TEST_SHARED"])
    folder.mkdir(mode=0o755, exist_ok=True)
    return folder


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Let one worker of this run at a time do what `name` stands for."""
    with (shared_folder() / f"{name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def afterwards(script: str, *args: object) -> Iterator[None]:
    """Run a shell script with `args` at the end, also where the tests are killed before."""
    waiting = f'trap "" HUP INT TERM; cat >/dev/null; {script}'
    with subprocess.Popen(
        ["sh", "-c", waiting, "sh", *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ):
        yield


@contextlib.contextmanager
def ordinary_user() -> Iterator[str]:
    """A new user of this machine with a home folder; needs root."""
    name = f"imgkit-{secrets.token_hex(4)}"
    with afterwards('userdel --force --remove "$1"', name):
        output("useradd", "--create-home", "--shell", "/bin/sh", name)
        yield name


def public_folder(name: str) -> Path:
    """A new folder that ordinary users can enter; pytest's own folders are closed to them."""
    folder = Path("/tmp") / f"imgkit-{name}-{os.getpid()}"
    folder.mkdir(mode=0o755)
    return folder


@contextlib.contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[Path]:
    """Mount a file system of `kib` KiB on `folder`, which is created; skips the test where nobody may."""
    folder.mkdir()
    if run("mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder).returncode != 0:
        pytest.skip("a small file system cannot be mounted here: not root")
    try:
        yield folder
    finally:
        output("umount", "--lazy", folder)  # after a failure, a program may still have a file open there


def imgkit_as(prefix: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """The argv that starts imgkit as an ordinary user with only these variables; skips the test if none can.

    `prefix` is the argv before a command that makes it that user's. The tests' Python may lie in root's home.
    Another one of its version then takes its packages.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    pythons = (sys.executable, shutil.which(version, path="/usr/bin:/usr/local/bin") or "")
    path = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(os.path.exists, sys.path))}
    variables = [f"{name}={value}" for name, value in {**env, **path}.items()]
    for python in pythons:
        argv = (*prefix, "env", "-i", *variables, python, "-P", "-m", "imgkit_builder")
        if run(*argv, "--version", folder="/").returncode == 0:
            return argv
    pytest.skip("an ordinary user can read neither this checkout nor a Python of this version")


NEW_STORE = ("--store", "containerd", "--debian")
PRIVATE_ENGINES: Mapping[str, Sequence[str]] = {
    "sid": (*NEW_STORE, "sid"),
    "trixie": (*NEW_STORE, "trixie"),
    "podman": ("--podman",),
    "trixie-podman": ("--podman", "--debian", "trixie"),
    "ahead": ("--ahead", "400"),
    "rootless": ("--rootless",),
    "rootless-podman": ("--podman", "--rootless"),
}
"""Engines beside the machine's own, and what ``ci/lab/engine`` makes of them."""


@dataclass(frozen=True, kw_only=True)
class PrivateEngine:
    """A second engine; `private_engine` starts it."""

    kind: str
    folder: Path
    owner: str = ""
    """The ordinary user who runs it; empty: root."""

    @property
    def env(self) -> dict[str, str]:
        """Variables under which programs of root use it; podman then shares the storage of root's Podman."""
        return {"DOCKER_HOST": f"unix://{self.folder}/docker.sock", **({} if self.owner else self._podman())}

    @property
    def as_owner(self) -> tuple[str, ...]:
        """The argv that starts imgkit as that ordinary user; skips the test where the user cannot."""
        home = {"HOME": f"{self.folder}", "XDG_RUNTIME_DIR": f"{self.folder}"}
        return imgkit_as(("runuser", "-u", self.owner, "--"), {**self.env, **self._podman(), **home})

    def _podman(self) -> dict[str, str]:
        file = self.folder / "env"
        rows = file.read_text().splitlines() if "podman" in self.kind else ()
        return dict(row.split("=", 1) for row in rows)

    @property
    def enter(self) -> tuple[str, ...]:
        """The argv before a command that shall run in its network."""
        if "podman" in self.kind:
            return ()
        return ("nsenter", f"--net={self.folder}/net")


@contextlib.contextmanager
def private_engine(kind: str) -> Iterator[PrivateEngine]:
    """Start an engine of `PRIVATE_ENGINES`; needs root."""
    # Short: a socket's path is limited.
    folder = Path(f"/tmp/imgkit-{kind}-{os.getpid()}")
    with contextlib.ExitStack() as stack:
        owner = (stack.enter_context(ordinary_user()),) if "rootless" in kind else ()
        # A process of Podman may still write after the first removal.
        stack.enter_context(
            afterwards('"$1" stop --private "$2"; rm -rf "$2"; sleep 1; rm -rf "$2"', LAB / "engine", folder)
        )
        output(LAB / "engine", "start", "--private", folder, *PRIVATE_ENGINES[kind], *owner)
        yield PrivateEngine(kind=kind, folder=folder, owner="".join(owner))


@contextlib.contextmanager
def registry(folder: Path, enter: Sequence[str] = (), *, port: int = 0) -> Iterator[str]:
    """A registry at the yielded address with its files in `folder`; `enter` chooses its network."""
    if shutil.which("docker-registry") is None:
        pytest.skip("docker-registry is not installed: apt-get install docker-registry")
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{port or reserved.getsockname()[1]}"
    config = folder / "registry.yml"
    config.write_text(
        "version: 0.1\nlog: {level: error}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder}/registry}}}}\nhttp: {{addr: '{address}'}}\n"
    )
    listens = f":{int(address.partition(':')[2]):04X} .* 0A "
    with subprocess.Popen(
        [*enter, "docker-registry", "serve", config], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            until(lambda: run(*enter, "grep", "-q", listens, "/proc/net/tcp").returncode == 0)
            yield address
        finally:
            server.terminate()


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A virtual cluster of ``ci/lab/cluster``; a ``with`` statement ends it.

    `state` must lie outside of pytest's folders, which are closed to the cluster's ordinary user.
    """

    state: Path

    def argv(self, *args: object) -> list[str]:
        command = (sys.executable, "-S", LAB / "cluster", "--state", self.state)
        return list(map(str, (*command, *split_line(*args))))

    def __call__(self, *args: object, timeout_s: float = 240, **options: Any) -> Done:
        return run(*self.argv(*args), timeout_s=timeout_s, **options)

    def up(self, nodes: int, *options: str, release: str = "") -> None:
        """Start it, with the Slurm of a Debian `release`; "own" is what this machine has installed."""
        release = release or ("own" if "--no-slurm" in options else "trixie")
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        programs = ("slurmctld", "slurmd", "srun", "munged")
        missing = [name for name in programs if not shutil.which(name, path=path)]
        if release == "own" and "--no-slurm" not in options and missing:
            pytest.skip(f"not installed: {', '.join(missing)}; ci/soak installs them")
        newer = () if release == "own" else ("--debian", release)
        result = self("up", nodes, *options, *newer, "--die-with", os.getpid(), timeout_s=900)
        assert result.returncode == 0, result.stderr

    def down(self) -> None:
        self("down")

    def start_again(self, job: str) -> None:
        """Start a requeued job now: Slurm holds it back for two minutes.

        A start in the second of the requeue would fail, since slurmd takes the old start's revoked credential
        for the new one's ("already killed, do not launch").
        """
        until(lambda: " PD " in self("squeue", f"--jobs={job}").stdout)
        time.sleep(2)
        self("scontrol", "update", f"JobId={job}", "StartTime=now")

    def ps(self, columns: str, *nodes: str) -> list[str]:
        """Lines of ``ps`` on each of these nodes."""
        texts = (self("exec", node, "--", "ps", "-eo", columns).stdout for node in nodes)
        return [line for text in texts for line in text.splitlines()]


@contextlib.contextmanager
def pbs_standin(cluster: Cluster) -> Iterator[None]:
    """Serve the stand-in for PBS on a cluster without Slurm."""
    argv = [sys.executable, LAB / "pbs-standin", cluster.state]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout.readline() == "serving\n"
            yield
        finally:
            serving.terminate()


@dataclass(frozen=True, kw_only=True)
class SlurmSite(Cluster):
    """A cluster with Slurm, and the folder in which its jobs run and leave their output."""

    folder: Path

    def output_of(self, job: str) -> str:
        """Return what a job has printed so far."""
        return "".join(file.read_text() for file in self.folder.glob(f"*-{job}.out"))

    def is_queued(self, job: str) -> bool:
        """True until the job has ended."""
        return bool(self("squeue", "--noheader", f"--jobs={job}").stdout.strip())

    def until(self, condition: Callable[[], bool], job: str) -> None:
        """Wait until `condition` holds; a failure shows what the job has printed."""
        until(condition, describe=lambda: self.output_of(job))

    def wait_for_text(self, job: str, text: str, count: int = 1) -> None:
        """Wait until a job has printed `text` so often."""
        self.until(lambda: self.output_of(job).count(text) >= count, job)

    def wait_for_end(self, job: str) -> str:
        """Return all that a job prints."""
        self.until(lambda: not self.is_queued(job), job)
        return self.output_of(job)
