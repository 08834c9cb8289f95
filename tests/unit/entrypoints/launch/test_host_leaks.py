"""What of the host reaches the workers."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import host_leaks
from imgkit_entrypoints.launch.host_leaks import CleanEnvironment

IMAGE = {"PATH": "/usr/bin", "OMPI_MCA_coll_hcoll_enable": "0", "PYTHONPATH": "/opt/site-packages"}


@pytest.fixture(autouse=True)
def no_core_dumps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (0, 0))


def clean(env: Mapping[str, str], *keep: str, **changes: Any) -> CleanEnvironment:
    values = {
        "image_env": IMAGE,
        "prefix": "/usr",
        "exists": lambda path: path.startswith("/usr/"),
        **changes,
    }
    return host_leaks.clean_environment({**IMAGE, **env}, keep=keep, **values)


def test_nothing_to_remove_is_no_line():
    env = {"HOME": "/home/me", "LD_PRELOAD": "/usr/lib/libjemalloc.so.2", "TMPDIR": "/tmp/job.7"}
    assert clean(env) == CleanEnvironment()


@pytest.mark.parametrize(
    ("env", "unset", "changed"),
    [
        ({"PMIX_RANK": "0", "PMI_FD": "5", "OMPI_COMM_WORLD_SIZE": "4"}, "all", {}),
        ({"LD_PRELOAD": "/opt/xalt/lib64/libxalt_init.so"}, "all", {}),
        ({"LD_PRELOAD": "/usr/lib/libxalt_init.so:/usr/lib/libjemalloc.so"}, (), "/usr/lib/libjemalloc.so"),
        ({"PYTHONPATH": "/cluster/python/lib/python3.11/site-packages"}, "all", {}),
        (
            {"PYTHONPATH": "/home/me/src:/cluster/py/site-packages:/opt/site-packages"},
            (),
            "/home/me/src:/opt/site-packages",
        ),
        ({"CONDA_PREFIX": "/home/me/conda", "PYTHONHOME": "/cluster/python"}, "all", {}),
        ({"VIRTUAL_ENV": "/usr"}, (), {}),
        ({"OMPI_MCA_btl": "tcp,self"}, (), {}),
    ],
)
def test_variables_of_the_host_are_removed(env, unset, changed):
    result = clean(env)
    assert set(result.unset) == (set(env) if unset == "all" else set(unset))
    assert result.env == ({next(iter(env)): changed} if changed else {})
    assert bool(result.text) == bool(unset or changed)
    assert "\n" not in result.text


def test_programs_of_a_virtual_environment_of_the_host_leave_the_path():
    result = clean({"VIRTUAL_ENV": "/home/me/venv", "PATH": "/home/me/venv/bin:/usr/bin"})
    assert result.env == {"PATH": "/usr/bin"}
    assert result.unset == ("VIRTUAL_ENV",)


def test_empty_virtual_environment_changes_no_path():
    assert clean({"VIRTUAL_ENV": "", "PATH": "/bin:/usr/bin"}) == CleanEnvironment()


def test_one_line_counts_what_is_removed():
    env = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "7", "OMPI_APP_CTX": "0", "LD_PRELOAD": "/opt/xalt/x.so"}
    assert clean(env).text == (
        "workers start without PMIX_* (2), OMPI_* (1), LD_PRELOAD of the host (to keep one: --keep-env NAME)"
    )


@pytest.mark.parametrize("keep", ["PMIX_RANK", "PMIX_*"])
def test_keep_env_keeps_a_variable(keep):
    result = clean({"PMIX_RANK": "0", "OMPI_APP_CTX": "0"}, keep)
    assert result.unset == ("OMPI_APP_CTX",)


def test_variables_that_are_not_of_the_host_stay():
    assert clean({"PMI_RANK": "0"}).unset == ("PMI_RANK",)  # and not those of MPI that the image sets
    assert clean({"PMIX_RANK": "0"}, is_mpi_rank=True) == CleanEnvironment()
    env = {"VIRTUAL_ENV": "/home/me/venv", "PYTHONPATH": "/cluster/site-packages"}
    assert clean(env, image_env=None) == CleanEnvironment(), "there is no container"
    env["APPTAINER_CONTAINER"] = "/x.sif"
    assert clean(env, image_env=None).unset == ("PYTHONPATH", "VIRTUAL_ENV")


def test_long_tmpdir_gets_a_name_that_a_socket_can_have(tmp_path):
    long = tmp_path / ("pbs.123456.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov" * 2)
    long.mkdir()
    result = clean({"TMPDIR": str(long)})
    try:
        result.apply()
        short = result.env["TMPDIR"]
        assert len(short) <= host_leaks.MAX_TMPDIR
        assert Path(short).samefile(long)
        folder = tempfile.mkdtemp(prefix="pymp-", dir=short)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/listener-XXXXXXXX")
        with socket.socket(socket.AF_UNIX) as listener, pytest.raises(OSError, match="too long"):
            listener.bind(f"{long}/{Path(folder).name}/listener-YYYYYYYY")
        result.apply()  # the next start on this node
        Path(short).unlink()
        Path(short).symlink_to("/etc")
        with pytest.raises(UsageError, match="no short name for TMPDIR"):
            result.apply()
    finally:
        Path(result.env["TMPDIR"]).unlink(missing_ok=True)
        Path(result.env["TMPDIR"]).parent.rmdir()
    assert clean({"TMPDIR": str(long)}, "TMPDIR") == CleanEnvironment()


@pytest.mark.parametrize(("keep", "limit"), [("", "0"), (host_leaks.CORE, "4096")])
def test_core_dumps_are_off_unless_they_are_kept(keep, limit):
    program = (
        "import resource; from imgkit_entrypoints.launch import host_leaks;"
        "resource.setrlimit(resource.RLIMIT_CORE, (4096, resource.getrlimit(resource.RLIMIT_CORE)[1]));"
        f"clean = host_leaks.clean_environment({{}}, {{}}, keep=[{keep!r}], prefix='/usr'); clean.apply();"
        "print(clean.text); print(resource.getrlimit(resource.RLIMIT_CORE)[0])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ), timeout=60
    )
    text, seen = result.stdout.splitlines()
    assert seen == limit, result.stderr
    assert ("core dumps" in text) == (not keep)
