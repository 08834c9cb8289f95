from __future__ import annotations

import shlex
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from imgkit_builder.cli.app import BUNDLE_VERBS
from imgkit_builder.cli.bundle import write
from imgkit_builder.workflow import zipapp
from imgkit_entrypoints.errors import ToolFailed, UsageError

JOBS = Path(__file__).parents[3] / "golden/jobs"


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bundle") / "imgkit.pyz").path


def names(path: Path) -> Sequence[str]:
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def output(*words: object) -> str:
    """What the installed imgkit prints."""
    argv = [sys.executable, "-m", "imgkit_builder", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def bare(pyz: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-I", "-S", str(pyz), *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_same_installation_gives_same_bytes(pyz: Path, tmp_path: Path) -> None:
    again = write(tmp_path / "again.pyz")
    assert again.path.read_bytes() == pyz.read_bytes()
    assert again.size_bytes == pyz.stat().st_size


def test_bundle_stays_small(pyz: Path) -> None:
    assert pyz.stat().st_size < 2_250_000


def test_bundle_holds_python_only(pyz: Path) -> None:
    assert not [name for name in names(pyz) if name.endswith((".so", ".c", ".pyc"))]
    assert not [name for name in names(pyz) if name.startswith("imgkit_") and name.endswith(".yaml")]
    assert not [name for name in names(pyz) if name.startswith(("pydantic", "docker", "yaml"))]
    templates = [name for name in names(pyz) if name.endswith(".j2")]
    assert templates
    folders = {str(Path(name).parent) for name in templates}
    assert folders == {"imgkit_recipes/templates", "imgkit_recipes/templates/job"}


def test_every_distribution_brings_its_licence(pyz: Path) -> None:
    folders = {name.partition("/")[0] for name in names(pyz) if ".dist-info/" in name}
    assert len(folders) >= 6
    for folder in folders:
        licences = [name for name in names(pyz) if name.startswith(folder) and "LICEN" in name.upper()]
        assert licences, folder


def test_help_lists_the_bundled_verbs(pyz: Path) -> None:
    shown = bare(pyz, "--help")
    assert shown.returncode == 0
    assert all(verb in shown.stdout for verb in BUNDLE_VERBS)
    assert "render " not in shown.stdout.partition("Commands")[2]


def test_foreign_packages_are_not_imported(pyz: Path, tmp_path: Path) -> None:
    for name in ("typer.py", "imgkit_builder.py", "rich.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')")
    done = subprocess.run(
        [sys.executable, pyz, "--version"], capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.stdout.startswith("imgkit ")


@pytest.mark.parametrize("case", ["mn5", "olivia-eap-pbsdsh", "rcp", "lambda-ssh", "cpu"])
def test_job_is_that_of_an_installed_imgkit(pyz: Path, case: str) -> None:
    words = shlex.split((JOBS / f"{case}.args").read_text())
    done = bare(pyz, "submit", "--dry-run", "--directory", "/home/me/my run", *words)
    assert done.stdout == (JOBS / f"{case}.txt").read_text(), done.stderr


def test_recipe_of_ones_own_comes_as_json(pyz: Path, tmp_path: Path) -> None:
    recipe, asked = tmp_path / "mine.yaml", ("-A", "bsc98", "--qos", "acc_debug", "--time", "1h")
    recipe.write_text("extends: mn5\nsystem: {node: {gpus: 2}, runtime: {binds: [/gpfs]}}\n")
    json = tmp_path / "mine.json"
    json.write_text(output("show", recipe, "--json"))
    job = bare(pyz, "submit", "--dry-run", str(json), *asked, "--", "dist-bench")
    assert job.stdout == output("submit", "--dry-run", recipe, *asked, "--", "dist-bench"), job.stderr
    assert "--gres=gpu:2" in job.stdout
    assert bare(pyz, "show", str(json)).stdout == output("show", recipe)
    refused = bare(pyz, "submit", "--dry-run", str(json), *asked, "--gpus", "4", "--", "dist-bench")
    assert refused.returncode == 2
    assert "mine.yaml:2: --gpus 4, but a node has 2" in refused.stderr


def test_own_template_is_filled(pyz: Path, tmp_path: Path) -> None:
    (tmp_path / "slurm.sh.j2").write_text("{% include 'modules.sh.j2' %}\n# {{ job.recipe.system.title }}\n")
    asked = ("-A", "bsc98", "--qos", "acc_debug", "--time", "1h", "--templates", str(tmp_path))
    done = bare(pyz, "submit", "--dry-run", "mn5", *asked, "--", "dist-bench")
    assert done.stdout.endswith("module load singularity\n# MareNostrum 5 ACC\n"), done.stderr


def test_conversion_job_starts_this_tool(pyz: Path) -> None:
    done = bare(
        pyz,
        "submit",
        "--dry-run",
        "mn5",
        "-A",
        "bsc98",
        "--qos",
        "gp_debug",
        "--time",
        "1h",
        "--sif",
        "/x/mn5.tar",
    )
    assert f"exec {shlex.quote(sys.executable)} {pyz} sif /x/mn5.tar" in done.stdout.replace(" \\\n    ", " ")


def test_kubeflow_job_is_json_without_yaml(pyz: Path) -> None:
    asked = (
        "--image",
        "reg.example.org/rcp:1",
        "--pvc",
        "c:/d",
        "--format",
        "pytorchjob",
        "--",
        "dist-bench",
    )
    done = bare(pyz, "submit", "--dry-run", "rcp", *asked)
    assert yaml.safe_load(done.stdout) == yaml.safe_load(output("submit", "--dry-run", "rcp", *asked)), (
        done.stderr
    )


def test_submission_needs_the_scheduler(pyz: Path, tmp_path: Path) -> None:
    (tmp_path / "mn5.tar").touch()
    asked = ("-A", "bsc98", "--qos", "gp_debug", "--time", "1h", "--sif", str(tmp_path / "mn5.tar"))
    argv = [sys.executable, "-I", "-S", str(pyz), "submit", "mn5", *asked]
    done = subprocess.run(argv, capture_output=True, text=True, env={"PATH": "/nonexistent"})
    assert done.returncode == 3
    assert "'sbatch' is not on PATH" in done.stderr


def test_job_without_record_is_refused(pyz: Path) -> None:
    for verb in ("status", "logs", "cancel"):
        done = bare(pyz, verb, "no-such-job")
        assert done.returncode == 2
        assert "no record of a job 'no-such-job'" in done.stderr


def test_unknown_recipe_is_a_usage_error(pyz: Path) -> None:
    done = bare(pyz, "doctor", "mn6")
    assert done.returncode == 2
    assert "it knows: cpu" in done.stderr


def test_compiled_distribution_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipapp, "ROOTS", ("pydantic",))
    with pytest.raises(UsageError, match=r"pydantic.core .* needed by pydantic .* is compiled"):
        write(tmp_path / "x.pyz")


def test_absent_distribution_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipapp, "ROOTS", ("no-such-distribution",))
    with pytest.raises(UsageError, match="needed by imgkit, is not installed"):
        write(tmp_path / "x.pyz")


def test_newer_syntax_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipapp, "_MAIN", "try: pass\nexcept* OSError: pass\n")
    with pytest.raises(UsageError, match=r"__main__\.py:\d is not Python 3\.10"):
        write(tmp_path / "x.pyz")


def test_tool_that_does_not_run_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipapp, "_MAIN", "import no_such_module\n")
    with pytest.raises(ToolFailed, match="does not run") as caught:
        write(tmp_path / "x.pyz")
    assert "no_such_module" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_absent_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        write(tmp_path / "absent" / "x.pyz")
