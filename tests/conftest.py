"""Which tests can run here: every marker is a capability that is probed, never assumed from a version.

``IMGKIT_REQUIRE=docker,singularity`` (``ci/check`` sets it in CI) makes a missing capability a failure: a
test that did not run can never pass for one that did.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")

# A shell without job control has what it starts by `&` ignore Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
STANDIN = "imgkit.local/standin:24.03"
STANDIN_NOTORCH = "imgkit.local/standin:24.03-notorch"
STANDIN_ARM64 = "imgkit.local/standin:24.03-arm64"
STANDIN_ARM64_NOTORCH = "imgkit.local/standin:24.03-arm64-notorch"


def probe(argv, timeout_s=60):
    """Return None if the command succeeds, else its last line, or why it could not be run."""
    try:
        result = subprocess.run(
            [str(argument) for argument in argv],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if result.returncode == 0:
        return None
    lines = (result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}").splitlines()
    return lines[-1]


def _docker():
    reason = probe(["docker", "version", "--format", "{{.Server.Version}}"])
    return reason and f"no Docker engine answers ({reason}); as root: ci/lab/engine start"


def _podman():
    return missing_programs(("podman", "busybox")) or probe(["podman", "--version"])


def _buildx():
    reason = _docker() or probe(["docker", "buildx", "version"])
    return reason and f"the docker program has no buildx ({reason}); as root: ci/lab/engine buildx"


def _singularity():
    command = shutil.which("singularity") or shutil.which("apptainer")
    if command is None:
        return "neither singularity nor apptainer is on PATH; as root: ci/lab/install-singularity"
    reason = probe([command, "--version"])
    return reason and f"{command} does not run ({reason}); as root: ci/lab/install-singularity --force"


def _charliecloud():
    reason = probe(["env", "USER=me", "ch-run", "--version"])
    return reason and f"ch-run does not run ({reason}); as root: apt-get install charliecloud"


def _qemu():
    reason = probe([ROOT / "ci/lab/binfmt", "status", "arm64"])
    return reason and "arm64 programs do not run here; as root: ci/lab/binfmt register"


def _sshd():
    return missing_programs(("ssh", "sshd", "ssh-keygen"))


def _cluster():
    if os.geteuid() != 0:
        return "the virtual cluster needs root"
    return missing_programs(("sshd", "mpirun", "ip"))


def _slurm():
    # Fetched once, if it is not in the cache. This takes a minute.
    return _cluster() or probe([ROOT / "ci/lab/cluster", "fetch", "trixie"], timeout_s=900)


def _torch_arm64():
    if os.environ.get("IMGKIT_TEST_TORCH_ARM64") == "1":
        return None
    return "takes minutes under qemu; asked for by IMGKIT_TEST_TORCH_ARM64=1"


CAPABILITIES: dict[str, Callable[[], str | None]] = {
    name: functools.cache(function)
    for name, function in {
        "docker": _docker,
        "podman": _podman,
        "buildx": _buildx,
        "singularity": _singularity,
        "charliecloud": _charliecloud,
        "qemu": _qemu,
        "sshd": _sshd,
        "cluster": _cluster,
        "slurm": _slurm,
        "torch_arm64": _torch_arm64,
    }.items()
}
"""Marker -> a function that returns why the capability is missing, or None."""

PACKAGES = {
    "busybox": "busybox-static",
    "cc": "build-essential",
    "ip": "iproute2",
    "mksquashfs": "squashfs-tools",
    "mpirun": "openmpi-bin",
    "readelf": "binutils",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "unsquashfs": "squashfs-tools",
}
"""Program -> its Debian package, where that has another name."""


def missing_programs(names):
    """Say which programs are not on PATH, and what installs them."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [name for name in names if shutil.which(name, path=path) is None]
    packages = dict.fromkeys(PACKAGES.get(name, name) for name in absent)
    return f"no {', '.join(absent)}; as root: apt-get install {' '.join(packages)}" if absent else None


def required():
    """The capabilities whose absence is a failure."""
    names = frozenset(re.findall(r"[\w-]+", os.environ.get("IMGKIT_REQUIRE", "")))
    supported = {*CAPABILITIES, "programs"}
    if unknown := names - supported:
        raise pytest.UsageError(f"IMGKIT_REQUIRE: unknown {sorted(unknown)}; there are {sorted(supported)}")
    return names


def missing(name, reason):
    """Skip the running test, or fail it where `name` is required."""
    if name in required():
        pytest.fail(f"{name} is required by IMGKIT_REQUIRE: {reason}", pytrace=False)
    pytest.skip(f"{name}: {reason}")


def _is_worker(config):
    """True in a process that pytest-xdist started to run a share of the tests."""
    return hasattr(config, "workerinput")


def _mark_folders():
    """Folders that launchers keep their marks in."""
    patterns = ("imgkit-stop-*", "imgkit-ray-*")
    parents = (Path("/tmp"), Path("/dev/shm"))
    return {folder for parent in parents for pattern in patterns for folder in parent.glob(pattern)}


def _used_folders():
    """Folders of launchers that run, perhaps for another pytest on this machine."""
    folders = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            values = dict(field.partition(b"=")[::2] for field in environ.read_bytes().split(b"\0"))
            for name in (b"IMGKIT_STOP_DIR", b"RAY_TMPDIR"):
                folders.add(Path(os.fsdecode(values.get(name, b"/"))))
    return folders


def _log_folders():
    """Folders of the logs of failed runs without a run folder: those of virtual nodes lie in this /tmp."""
    # Not Path.glob: it fails where another run removes a folder meanwhile.
    return {Path(log).parent for log in glob.glob("/tmp/imgkit-*/errors-*.log")}  # noqa: PTH207


_folders_before = _mark_folders() | _log_folders()


def pytest_configure(config):
    required()
    if not _is_worker(config):
        # Workers inherit it: lab tests keep there what they make for all of them (lab/labkit.py).
        os.environ["IMGKIT_TEST_SHARED"] = f"/tmp/imgkit-shared-{os.getpid()}"


def pytest_assertrepr_compare(op, left, right):
    """Describe unequal files by size and first difference; pytest's own way takes half an hour."""
    if op != "==" or not (isinstance(left, bytes) and isinstance(right, bytes)):
        return None
    if max(len(left), len(right)) < 10_000:
        return None
    pairs = enumerate(zip(left, right, strict=False))
    offset = next((offset for offset, (expected, actual) in pairs if expected != actual), None)
    if offset is None:
        difference = "one is the beginning of the other"
    else:
        difference = f"the first difference is at byte {offset}"
    return [f"{len(left)} bytes == {len(right)} bytes", difference]


def pytest_addoption(parser):
    parser.addoption("--soak", action="store_true", help="run the tests marked soak, too (ci/soak does)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("--soak"):
        return
    if left_out := [item for item in items if item.get_closest_marker("soak")]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_unconfigure(config):
    """Remove what lab tests shared, mark folders of node agents that they killed, and logs of failed runs."""
    shared = Path(os.environ["IMGKIT_TEST_SHARED"])
    if _is_worker(config):
        return
    for tags in shared.glob("tags*"):
        subprocess.run(["docker", "rmi", "--force", *tags.read_text().split()], capture_output=True)
    for folder in (shared, *((_mark_folders() | _log_folders()) - _folders_before - _used_folders())):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    for name, capability in CAPABILITIES.items():
        if item.get_closest_marker(name) and (reason := capability()):
            missing(name, reason)
    for marker in item.iter_markers("programs"):
        if reason := missing_programs(marker.args):
            missing("programs", reason)


def _standin(name, *options):
    # ci/check makes the images beside the tests: the file that it names is there until they are ready.
    making = Path(os.environ.get("IMGKIT_TEST_MAKING", "/nonexistent"))
    while making.exists() and probe(["docker", "image", "inspect", name]):
        time.sleep(1)
    if reason := probe(["docker", "image", "inspect", name]):
        missing("docker", f"{reason}; it is made by: ci/lab/base-image {' '.join(options)}".rstrip())
    return name


@pytest.fixture(scope="session")
def standin():
    """Name of the local stand-in base with CPU torch, for this machine's architecture."""
    return _standin(STANDIN)


@pytest.fixture(scope="session")
def standin_notorch():
    """Name of the small local stand-in base without torch."""
    return _standin(STANDIN_NOTORCH, "--no-torch")


@pytest.fixture(scope="session")
def standin_arm64_notorch():
    """Name of the local arm64 stand-in base without torch; tests that run it are marked ``qemu`` too."""
    return _standin(STANDIN_ARM64_NOTORCH, "--arch arm64", "--no-torch")


@pytest.fixture(scope="session")
def standin_arm64():
    """Name of the local arm64 stand-in base with torch; only for tests marked ``torch_arm64``."""
    return _standin(STANDIN_ARM64, "--arch arm64")


@pytest.fixture
def call(monkeypatch, capsys):
    """``call("build", "mn5")``: exit code, stdout and stderr of the command line."""

    from imgkit_builder.cli import app

    def run(*args):
        monkeypatch.setattr("sys.argv", ["imgkit", *args])
        with pytest.raises(SystemExit) as exited:
            app.main()
        output = capsys.readouterr()
        return exited.value.code, output.out, output.err

    return run
