"""A lock that uv 0.13.9 wrote: what the real uv exports of it, what is refused, and what fits a base.

`my-project/uv.lock` is as written, but for the names of the hosts, the times of upload, and wheels of other
systems and Pythons, which were removed.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from file_tree import write_program

from imgkit_builder.image import inside_uv, install, uv_export
from imgkit_builder.image.context import refuse_unpackable_code
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import UV_STEP, Recipe
from imgkit_entrypoints.errors import ToolMissing, UsageError

RECORDED = Path(__file__).parent / "my-project"
TORCH = "2.14.1a0+1234567890.nv26.06"
DIGEST = "9572fb63046264a862693b0a87088af3bdc8c068fde03de63453cbbde245465f"


def project_recipe(folder: Path, uv_keys: str = "", pip: str = "") -> Recipe:
    """Return a recipe for a copy of the recorded project."""
    shutil.copytree(RECORDED, folder / "my-project")
    text = f"image:\n  base: python:3\n  uv: {{project: my-project{uv_keys}}}\n{pip}"
    (folder / "mine.yaml").write_text(text)
    return load(folder / "mine.yaml")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what uv exports of the recorded project, with all that a recipe may name."""
    pip = "  pip: [{packages: [antlr4_python3.runtime]}]\n"
    recipe = project_recipe(tmp_path_factory.mktemp("uv"), ", extras: [plots], groups: [dev]", pip)
    return uv_export.export_uv_lock(recipe).decode()


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A recipe for a copy of the recorded project, in ``my-project``."""
    return project_recipe(tmp_path)


Fit = Callable[..., str]


@pytest.fixture
def fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Fit:
    """``fit(exported, "torch==2.3\\n", 1)``: the output of the program in a base with these versions.

    It must end with the exit code, by default 0.
    """

    def run(exported: str, base: str, code: int = 0, **changes: object) -> str:
        (tmp_path / "uv.json").write_text(json.dumps({**json.loads(exported), **changes}))
        (tmp_path / "constraint.txt").write_text(base)
        assert inside_uv.main(tmp_path) == code
        return capsys.readouterr().out

    return run


def requirements(folder: Path) -> dict[str, str]:
    lines = (folder / "requirements-uv.txt").read_text().splitlines()
    return {line.partition("==")[0]: line for line in lines if "==" in line}


def edit(recipe: Recipe, file: str, old: str, new: str) -> None:
    """Replace a text in a file of the project."""
    path = recipe.file.parent / "my-project" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def refusal(recipe: Recipe) -> str:
    with pytest.raises(UsageError) as caught:
        uv_export.export_uv_lock(recipe)
    assert (caught.value.where or "").endswith("mine.yaml:3")
    return str(caught.value)


def test_base_keeps_its_torch_and_what_it_needs(exported, tmp_path, fit):
    output = fit(exported, f"torch=={TORCH}\nNVIDIA_nccl.cu13==2.30.7\n")
    lines = requirements(tmp_path)
    assert {"einops", "requests", "pysocks", "torchmetrics", "numpy", "cycler", "iniconfig"} <= lines.keys()
    assert not re.search(r"\b(torch|triton|sympy|my-project|nvidia\S*)\b", " ".join(lines))
    assert f"--hash=sha256:{DIGEST}" in lines["einops"]
    assert f"torch: the base's {TORCH} stays in place of 2.14.1\n" in output


def test_base_without_torch_gets_all_of_it(exported, tmp_path, fit):
    fit(exported, "nvidia-nccl-cu13==2.30.7\n")
    lines = requirements(tmp_path)
    assert {"torch", "triton", "nvidia-cublas"} <= lines.keys()
    assert "nvidia-nccl-cu13" not in lines


def test_later_pip_steps_keep_the_locked_versions(exported, tmp_path, fit):
    fit(exported, f"torch=={TORCH}\n")
    pins = (tmp_path / "constraint.txt").read_text().splitlines()
    assert pins[0] == f"torch=={TORCH}"
    assert {"einops==0.8.0", "numpy==2.2.6", "tomli==2.5.0 ; python_full_version < '3.11'"} <= set(pins)
    # A pip step names it, and installs it in the locked version.
    assert "antlr4-python3-runtime==4.9.3" in pins
    assert "antlr4-python3-runtime" not in requirements(tmp_path)


def test_other_torch_is_named_with_both_versions(exported, tmp_path, fit):
    output = fit(exported, "torch==2.3.0a0+nv24.03\ntriton==3.0.0\n", 1)
    assert (
        "torch: uv.lock has 2.14.1, but the base has 2.3.0a0+nv24.03, which imgkit never replaces" in output
    )
    assert "uv lock --upgrade-package 'torch==2.3.0'" in output
    assert "triton: uv.lock has 3.8.0, but the base has 3.0.0" in output
    assert not (tmp_path / "requirements-uv.txt").exists()


def test_package_of_another_platform_is_no_conflict(exported, fit):
    elsewhere = ["torch==2.3.0 ; sys_platform == 'win32'", "torch==2.4.0 ; sys_platform == 'linux'"]
    fit(exported, "torch==2.4.0a0+x\n", requirements=elsewhere)


def test_python_or_platform_that_the_project_excludes(exported, fit):
    output = fit(exported, "", 1, requires_python=">=3.99")
    assert re.search(r"requires Python >=3\.99, and the base has 3\.", output)
    output = fit(exported, "", 1, environments=["sys_platform == 'darwin'"])
    assert "only for: sys_platform == 'darwin'" in output
    fit(exported, "", environments=["sys_platform == 'linux'"])


def test_base_without_pip_is_named(exported, fit, monkeypatch):
    monkeypatch.setitem(sys.modules, "pip._vendor.packaging.specifiers", None)
    assert "this base has no pip that imgkit can use" in fit(exported, "", 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version = 1\n", "version = 2\n", "unsupported schema version (v2"),
        ('name = "my-project"', 'name = "other"', "Missing workspace member `my-project`"),
        ("[[package]]", "[[package", "TOML parse error at line 16"),
        ('{ name = "einops" }', '{ name = "absent" }', "Dependency `absent` has missing"),
    ],
)
def test_unusable_lock_is_refused_at_its_line(recipe, old, new, message):
    edit(recipe, "uv.lock", old, new)
    problem = refusal(recipe)
    assert "its uv.lock cannot be used: " in problem
    assert message in problem


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("einops==0.8.0", "einops>=0.9", "einops>=0.9, and uv.lock has 0.8.0"),
        ('"torchmetrics",', '"torchmetrics", "Mine_Too",', "Mine_Too, which uv.lock lacks"),
        ("requests[socks]>=2.32", "mine; python_version < '3.12'", "mine; python_version < '3.12', which uv"),
        ('plots = ["cycler"]', 'plots = ["cycler>9"]', "cycler>9, and uv.lock has 0.12.1"),
        ('dev = ["iniconfig"]', 'dev = ["mine"]', "mine, which uv.lock lacks"),
    ],
)
def test_stale_lock_is_refused(tmp_path, old, new, message):
    recipe = project_recipe(tmp_path, ", extras: [plots], groups: [dev]")
    edit(recipe, "pyproject.toml", old, new)
    problem = refusal(recipe)
    assert f"uv.lock is not up to date: pyproject.toml requires {message}" in problem
    assert "uv lock --project" in problem


@pytest.mark.parametrize(
    "edits",
    [
        {"python_version < '3.11'": "python_full_version < '3.11'"},
        {"einops==0.8.0": "einops>=0.8"},
        {'"torchmetrics",': '"torchmetrics", "mine; sys_platform == \'win32\'", "my-project[plots]",'},
        {'"torchmetrics",': '"torchmetrics", "mine; python_version < \'3.10\'",'},
        {
            "[tool.uv]": "[tool.uv]\nenvironments = [\"platform_machine == 'aarch64'\"]",
            '"torchmetrics",': '"torchmetrics", "mine; platform_machine == \'x86_64\'",',
        },
        {
            '"torch==2.14.1", "numpy==2.2.6"]': '"numpy==2.2.6"]\noverride-dependencies = ["einops==0.8.0"]',
            'einops==0.8.0",\n': 'einops==9",\n',
        },
    ],
    ids=["marker", "range", "Windows", "old Python", "environments", "override"],
)
def test_lock_that_still_fits_is_accepted(recipe, edits):
    for old, new in edits.items():
        edit(recipe, "pyproject.toml", old, new)
    uv_export.export_uv_lock(recipe)


def test_nothing_of_the_project_is_executed(recipe, tmp_path):
    project = tmp_path / "my-project"
    for name in ("python", "python3"):
        write_program(project / ".venv/bin" / name, f'touch {tmp_path}/executed\nexec {sys.executable} "$@"')
    (project / ".venv/pyvenv.cfg").write_text("home = /usr/bin\n")
    (project / "backend.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    backend = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n\n[project]'
    edit(recipe, "pyproject.toml", "[project]", backend)
    edit(recipe, "pyproject.toml", 'version = "0.1.0"', 'dynamic = ["version"]')
    refuse_unpackable_code(recipe)
    assert not (tmp_path / "executed").exists()


FakeExport = Callable[..., None]


@pytest.fixture
def fake_export(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> FakeExport:
    """``fake_export(["einops==0.8.0"])``: uv exports these lines for a project without dependencies."""

    def fake(
        lines: list[str], pyproject: str = '[project]\nname = "my-project"\nversion = "0.1.0"\n'
    ) -> None:
        monkeypatch.setattr(uv_export, "_read_export", lambda *_: lines)
        (recipe.file.parent / "my-project/pyproject.toml").write_text(pyproject)

    return fake


@pytest.mark.parametrize(
    "text", ["", "project = 1", "[project]\nname = 'x'\nversion = '1'\n[tool]\nuv = [1]"]
)
def test_project_that_is_none_is_refused(text, recipe, fake_export):
    fake_export([], text)
    assert "its uv.lock cannot be used" in refusal(recipe)


@pytest.mark.parametrize("name", ["pyproject.toml", "uv.lock", "uv.toml"])
def test_nothing_of_a_linked_file_is_quoted(name, recipe, tmp_path):
    (tmp_path / "outside").write_text("secret = of somebody\n")
    (tmp_path / "my-project" / name).unlink(missing_ok=True)
    (tmp_path / "my-project" / name).symlink_to("../outside")
    assert "is a link out of the project" in refusal(recipe)


def test_missing_lock_and_unknown_extra_are_refused(tmp_path):
    recipe = project_recipe(tmp_path, ", extras: [graphs]")
    assert "Extra `graphs` is not defined" in refusal(recipe)
    (tmp_path / "my-project/uv.lock").unlink()
    assert "Unable to find lockfile at `uv.lock`" in refusal(recipe)


def test_git_source_is_named(recipe, tmp_path):
    lock = tmp_path / "my-project/uv.lock"
    git = 'git = "https://example.org/e?rev=main'
    text = re.sub(
        r'(name = "einops"\nversion = .*\n)source.*\n(?:sdist.*\n)?wheels = \[\n(?:.*\n)*?\]\n',
        rf'\1source = {{ {git}#{"0" * 40}" }}\n',
        lock.read_text(),
    )
    lock.write_text(text.replace('"einops", specifier = "==0.8.0"', f'"einops", {git}"'))
    edit(recipe, "pyproject.toml", "einops==0.8.0", "einops")
    sources = '[tool.uv.sources]\neinops = { git = "https://example.org/e", rev = "main" }\n\n[project]'
    edit(recipe, "pyproject.toml", "[project]", sources)
    problem = refusal(recipe)
    assert "uv.lock has einops @ git+https://example.org/e@0000" in problem
    assert "pip: [{packages: [einops]}]" in problem


HASH = f" --hash=sha256:{DIGEST}"


@pytest.mark.parametrize(
    "line",
    [
        "-e ./libs/einops",
        "einops==0.8.0",
        "einops==0.8.0 --hash=md5:00",
        f"einops @ git+https://me:pass-word@example.org/e{HASH}",
        f"einops @ https://me:pass-word@example.org/einops-1-py3-none-any.whl{HASH}",
        f"einops @ file:///srv/einops-1-py3-none-any.whl{HASH}",
        f"einops==0.8.0{HASH} --index-url=https://example.org",
    ],
)
def test_what_is_no_hashed_wheel_is_refused(line, recipe, fake_export):
    fake_export([line])
    problem = refusal(recipe)
    assert "which is not a wheel with a sha256" in problem
    assert "pass-word" not in problem


def test_password_of_a_repository_is_not_exported(recipe, tmp_path, fake_export, fit):
    fake_export(["einops @ git+https://me:pass-word@example.org/e@0123"])
    recipe.file.write_text(recipe.file.read_text() + "  pip: [{packages: [einops]}]\n")
    exported = uv_export.export_uv_lock(load(recipe.file)).decode()
    assert "git+https://example.org/e@0123" in exported
    assert "pass-word" not in exported
    fit(exported, "")
    assert requirements(tmp_path) == {}


def test_wheel_by_its_url_is_accepted(recipe, tmp_path, fake_export, fit):
    line = f"einops @ https://example.org/einops-1-py3-none-any.whl ; sys_platform == 'linux'{HASH}"
    fake_export([line])
    fit(uv_export.export_uv_lock(recipe).decode(), "")
    assert line in (tmp_path / "requirements-uv.txt").read_text()
    assert (tmp_path / "constraint.txt").read_text() == ""


INDEX = (
    '[[tool.uv.index]]\nname = "ours"\nurl = "https://index.example.org/simple"\ndefault = true\n\n[project]'
)


def test_indexes_of_the_project_are_named_to_pip(recipe):
    edit(recipe, "pyproject.toml", "[project]", INDEX)
    assert uv_export.index_options(recipe) == ["--index-url", "https://index.example.org/simple"]
    edit(recipe, "pyproject.toml", "default = true\n", "")
    assert uv_export.index_options(recipe) == ["--extra-index-url", "https://index.example.org/simple"]


@pytest.mark.parametrize(
    ("old", "new", "hidden"),
    [("https://", "https://me:pass-word@", ""), ("simple", "simple?token=pass-word", "?token=*********")],
)
def test_index_with_a_password_is_refused(recipe, old, new, hidden):
    edit(recipe, "pyproject.toml", "[project]", INDEX.replace(old, new))
    problem = refusal(recipe)
    assert f"the index https://index.example.org/simple{hidden} is no plain HTTP URL" in problem
    assert "pass-word" not in problem


def test_index_that_is_a_folder_is_refused(recipe):
    edit(recipe, "pyproject.toml", "[project]", INDEX.replace("https://", "file:///srv/"))
    with pytest.raises(UsageError, match="the index file:///srv/"):
        uv_export.index_options(recipe)


def test_export_has_no_url_of_the_lock(exported):
    assert "://" not in exported


def test_uv_that_is_missing_is_named_with_its_install(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissing) as caught:
        refuse_unpackable_code(recipe)
    assert (caught.value.where or "").endswith("mine.yaml:3")
    assert caught.value.hint == "python3 -m pip install uv"


def test_step_checks_the_hash_of_every_wheel(recipe):
    step = install.pip_step(recipe, UV_STEP)
    assert step.origin == "mine.yaml:3"
    assert "--require-hashes --no-deps --only-binary=:all:" in step.command
    assert "--constraint /opt/imgkit/constraint.txt" in step.command
