from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from imgkit_builder.cli import zipapp
from imgkit_builder.cli.app import BUNDLE_VERBS
from imgkit_entrypoints.errors import ToolFailed, UsageError


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zipapp.bundle(tmp_path_factory.mktemp("bundle") / "imgkit.pyz").path


def names(path: Path) -> Sequence[str]:
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def bare(pyz: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-I", "-S", str(pyz), *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_same_installation_gives_same_bytes(pyz: Path, tmp_path: Path) -> None:
    again = zipapp.bundle(tmp_path / "again.pyz")
    assert again.path.read_bytes() == pyz.read_bytes()
    assert again.size_bytes == pyz.stat().st_size


def test_bundle_stays_small(pyz: Path) -> None:
    assert pyz.stat().st_size < 1_500_000


def test_bundle_holds_python_only(pyz: Path) -> None:
    assert not [name for name in names(pyz) if name.endswith((".so", ".pyc", ".yaml.j2", ".j2"))]
    assert not [name for name in names(pyz) if name.startswith(("pydantic", "docker", "yaml", "jinja2"))]


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
    assert "build " not in shown.stdout.partition("Commands")[2]


def test_foreign_packages_are_not_imported(pyz: Path, tmp_path: Path) -> None:
    for name in ("typer.py", "imgkit_builder.py", "rich.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')")
    done = subprocess.run(
        [sys.executable, pyz, "--version"], capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.stdout.startswith("imgkit ")


def test_unknown_recipe_is_a_usage_error(pyz: Path) -> None:
    done = bare(pyz, "doctor", "mn6")
    assert done.returncode == 2
    assert "it knows: cpu" in done.stderr


def test_compiled_distribution_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipapp, "ROOTS", ("pydantic",))
    with pytest.raises(UsageError, match=r"pydantic.core .* needed by pydantic .* is compiled"):
        zipapp.bundle(tmp_path / "x.pyz")


def test_absent_distribution_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipapp, "ROOTS", ("no-such-distribution",))
    with pytest.raises(UsageError, match="needed by imgkit, is not installed"):
        zipapp.bundle(tmp_path / "x.pyz")


def test_newer_syntax_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipapp, "_MAIN", "try: pass\nexcept* OSError: pass\n")
    with pytest.raises(UsageError, match=r"__main__\.py:\d is not Python 3\.10"):
        zipapp.bundle(tmp_path / "x.pyz")


def test_tool_that_does_not_run_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipapp, "_MAIN", "import no_such_module\n")
    with pytest.raises(ToolFailed, match="does not run") as caught:
        zipapp.bundle(tmp_path / "x.pyz")
    assert "no_such_module" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_absent_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        zipapp.bundle(tmp_path / "absent" / "x.pyz")
