"""The single-file executable on every Python that this machine has, with nothing installed for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from labkit import imgkit_json

from imgkit_builder.cli.app import BUNDLE_VERBS
from imgkit_builder.cli.bundle import write
from imgkit_builder.workflow import zipapp

TAG = f"imgkit-test-bundle:{os.getpid()}"

pytestmark = pytest.mark.xdist_group("bundle")


def _interpreters() -> dict[tuple[int, int], str]:
    """One interpreter of each minor version, from PATH and from pyenv."""
    places = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    places += sorted(Path.home().glob(".pyenv/versions/*/bin"))
    found: dict[tuple[int, int], str] = {}
    for place in places:
        for path in sorted(place.glob("python3.*")):
            version = re.fullmatch(r"python3\.(\d+)", path.name)
            if version is None or (3, int(version[1])) in found:
                continue
            # A pyenv shim is there for versions that are not chosen, and fails.
            if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
                found[3, int(version[1])] = str(path)
    return found


INTERPRETERS = _interpreters()
ABLE = [path for version, path in sorted(INTERPRETERS.items()) if version >= zipapp.FLOOR]
OLD = [path for version, path in sorted(INTERPRETERS.items()) if version < zipapp.FLOOR]
OLDEST = (ABLE or [sys.executable])[0]

# The oldest and the newest; ci/soak runs those between them.
able = pytest.mark.parametrize(
    "python",
    [
        pytest.param(path, marks=pytest.mark.soak if path in ABLE[1:] else ())
        for path in ABLE or [sys.executable]
    ],
    ids=lambda path: Path(path).name,
)


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bundle") / "imgkit.pyz").path


def bare(python: str, pyz: Path, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """No site-packages, no home, no environment but PATH and a place for logs."""
    return subprocess.run(
        [python, "-I", "-S", str(pyz), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={"PATH": os.environ["PATH"], "XDG_STATE_HOME": str(pyz.parent / "state"), **env},
    )


@able
@pytest.mark.parametrize(
    "verbs", [("sif", "submit"), pytest.param(tuple(BUNDLE_VERBS), marks=pytest.mark.soak)]
)
def test_help_works_on_a_bare_interpreter(pyz: Path, python: str, verbs: tuple[str, ...]) -> None:
    for words in ([], *([verb] for verb in verbs)):
        done = bare(python, pyz, *words, "--help")
        assert done.returncode == 0, done.stderr
        assert "Usage" in done.stdout


@able
def test_doctor_knows_recipes_without_yaml(pyz: Path, python: str) -> None:
    done = bare(python, pyz, "doctor", "mn5", "--json", PATH="/nonexistent")
    found = json.loads(done.stdout)
    assert found["recipe"] == "mn5"
    assert (
        "module load singularity"
        in {check["name"]: check["hint"] for check in found["checks"]}["singularity"]
    )


@able
def test_file_that_is_no_archive_is_refused(pyz: Path, python: str) -> None:
    done = bare(python, pyz, "verify", pyz)
    assert done.returncode == 2
    assert "neither an image archive" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not OLD, reason="no Python 3 older than 3.10 here")
def test_older_pythons_are_refused_by_name(pyz: Path) -> None:
    for python in OLD:
        done = bare(python, pyz, "--help")
        assert done.returncode == 1
        assert "needs Python 3.10 or newer" in done.stderr
        assert "Traceback" not in done.stderr


def test_read_only_home_is_enough(pyz: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    assert bare(OLDEST, pyz, "doctor", HOME=str(tmp_path)).stdout.startswith("ok    python")
    assert list(tmp_path.iterdir()) == []


def test_empty_virtual_environment_runs_it(pyz: Path, tmp_path: Path) -> None:
    subprocess.run([OLDEST, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    done = subprocess.run(
        [tmp_path / "venv/bin/python", pyz, "--version"], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("imgkit ")


def test_file_is_its_own_program(pyz: Path) -> None:
    done = subprocess.run([pyz, "--version"], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("imgkit "), done.stderr


@pytest.fixture(scope="module")
def saved(standin_notorch: str, pyz: Path) -> Path:
    """An archive of mn5 on the small stand-in, beside the tool."""
    imgkit_json("build", "mn5", "--base", standin_notorch, "--tag", TAG, "--no-test")
    try:
        imgkit_json("save", TAG, "-o", pyz.parent / "mn5.tar")
    finally:
        subprocess.run(["docker", "rmi", "--force", TAG], capture_output=True, check=False)
    return pyz.parent / "mn5.tar"


@pytest.mark.docker
@able
def test_archive_is_verified_on_every_python(pyz: Path, saved: Path, python: str) -> None:
    done = bare(python, pyz, "verify", saved)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.docker
@pytest.mark.singularity
def test_archive_becomes_a_sif_without_docker(pyz: Path, saved: Path, tmp_path: Path) -> None:
    target, env = tmp_path / "mn5.sif", {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}
    made = bare(OLDEST, pyz, "sif", saved, "-o", target, "--json", **env)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["arch"] in ("amd64", "arm64")
    checked = bare(OLDEST, pyz, "verify", target, "--json", **env)
    found = {check["name"]: check["verdict"] for check in json.loads(checked.stdout)["checks"]}
    assert set(found.values()) == {"ok"}
    assert {"header", "root partition", "manifest"} <= found.keys()
    asked = ("--directory", "/gpfs/me", "-A", "bsc98", "--qos", "acc_debug", "--time", "1h", "--", "dist-pi")
    by_name, by_file = (
        bare(OLDEST, pyz, "submit", "--dry-run", one, "--image", target, *asked) for one in ("mn5", target)
    )
    assert by_name.stdout == by_file.stdout != "", by_file.stderr
    tested = bare(OLDEST, pyz, "test", target, "--json", **env)
    checks = {check["name"]: check for check in json.loads(tested.stdout)["checks"]}
    assert checks["arch"]["verdict"] == checks["python"]["verdict"] == "ok"
    assert [path.name for path in tmp_path.iterdir()] == ["mn5.sif"]


@pytest.mark.docker
@pytest.mark.singularity
@pytest.mark.skipif(os.geteuid() != 0, reason="changing to an ordinary user needs root")
def test_ordinary_user_makes_a_sif(pyz: Path, saved: Path) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv (util-linux)")
    # Not below pytest's own folder: every session that starts makes that one private again.
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shutil.copy(pyz, folder)
        shutil.copy(saved, folder)
        shutil.chown(folder, "nobody")
        user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        done = subprocess.run(
            [*user, "/usr/bin/python3", "-I", "-S", "imgkit.pyz", "sif", saved.name],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "XDG_STATE_HOME": str(folder / "state")},
        )
        assert done.returncode == 0, done.stderr
        assert (folder / "mn5.sif").is_file()
