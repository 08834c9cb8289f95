"""What is made once for a whole run of the lab tests, and the order in which workers take the tests."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd

import pytest
from labkit import (
    LAB,
    ROOT,
    PrivateEngine,
    imgkit_json,
    locked,
    ordinary_user,
    output,
    private_engine,
    shared_folder,
)

LONGEST_FIRST = (
    "test_start_pages_real",
    "test_action_real",
    "test_spare_pod",
    "test_training_survives",
    "test_submit_slurm_real",
    "test_transfer_real",
    "test_run_real",
    "test_mpi_job_real",
    "test_pods_real",
    "test_line_real",
    "test_pbs_real",
    "test_slurm_sif_real",
    "test_train_real",
    "test_train_faults_real",
    "test_sif_real",
    "test_quickstart_real",
)
"""Parts of test names, in the order in which workers take the tests: a long one never begins last."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    def turn(item):
        positions = [number for number, part in enumerate(LONGEST_FIRST) if part in item.nodeid]
        # The images for arm64 are ready last, and a quiet test waits until no other test runs.
        last = (item.get_closest_marker(name) is not None for name in ("quiet", "qemu"))
        return (*last, min(positions, default=len(LONGEST_FIRST)))

    items.sort(key=turn)
    for item in items:
        if item.get_closest_marker("quiet"):
            item.add_marker(pytest.mark.xdist_group("quiet"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Let a test marked quiet run when no other worker runs a test."""
    with (shared_folder() / "quiet.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if item.get_closest_marker("quiet") else fcntl.LOCK_SH)
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _shared():
    """The folder is there, so that the end of the run cleans up."""
    shared_folder()


@pytest.fixture(scope="session")
def public_imgkit():
    """The program imgkit in an environment of the machine's Python, which every user can enter; made once."""
    folder = shared_folder() / "venv"
    with locked("venv"):
        if not folder.exists():
            output(LAB / "venv", "--python", "/usr/bin/python3", folder)
            # That install is an editable one of the checkout, which not every user can enter.
            pip = (folder / "bin/python", "-m", "pip", "install", "--quiet", "--force-reinstall")
            output(*pip, "--no-deps", "--no-build-isolation", ROOT)
    return folder / "bin/imgkit"


@pytest.fixture(scope="session")
def mn5_image(standin):
    """Name of the shipped recipe mn5's image on the stand-in; the first worker that needs it builds it."""
    tags = shared_folder() / "tags"
    tag = f"imgkit-test-mn5-{shared_folder().name}:latest"
    with locked("mn5"):
        if not tags.exists():
            imgkit_json("build", "mn5", "--base", standin, "--tag", tag, "--no-test")
            tags.write_text(tag)
    return tag


@pytest.fixture(scope="session")
def mn5_sif(mn5_image):
    """The image as a .sif, squashed straight from the engine, which is the fast way."""
    sif = shared_folder() / "mn5.sif"
    with locked("mn5"):
        if not sif.exists():
            imgkit_json("sif", mn5_image, "--no-test", "-o", sif)
    return sif


@pytest.fixture(scope="session")
def started():
    """Gives an engine of `labkit.PRIVATE_ENGINES`; a worker starts each once, so its tests are one group."""
    if os.geteuid() != 0:
        pytest.skip("starting an engine needs root")
    engines: dict[str, PrivateEngine] = {}
    with contextlib.ExitStack() as stack:

        def get(kind):
            if kind not in engines:
                engines[kind] = stack.enter_context(private_engine(kind))
            return engines[kind]

        yield get


@pytest.fixture(scope="session", params=["sid", pytest.param("trixie", marks=pytest.mark.soak)])
def containerd_engine(request, started):
    """Debian's newest engine with containerd's store; tests that use it are in the group "containerd"."""
    return started(request.param)


@pytest.fixture(scope="session")
def user():
    """An ordinary user of this machine: a new one where root runs the tests, else the user who does."""
    if os.geteuid() != 0:
        yield pwd.getpwuid(os.geteuid()).pw_name
        return
    with ordinary_user() as name:
        yield name
