"""What imgkit init writes, and what it leaves alone."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from file_tree import write_files

from imgkit_builder.project import toml_file
from imgkit_builder.recipe.load import load

EXAMPLE = Path(__file__).parents[4] / "examples/train.py"
FILES = ["imgkit.toml", "train.py", ".gitignore"]


Init = Callable[..., str]


@pytest.fixture
def init(call: Any, home: Path) -> Init:
    """``init("--recipe", "mn5")`` in an empty folder returns the output."""

    def run(*args: str) -> str:
        code, out, err = call("init", *args)
        assert code == 0, err
        return str(out)

    return run


def recipe_here() -> Path:
    """The recipe that a test has made."""
    (file,) = Path().absolute().glob("*.yaml")
    return file


def test_new_folder_needs_no_flags(call, init, monkeypatch):
    call("remote", "add", "mn5", "me@far", "--recipe", "mn5")
    out = init("My Folder", "-A", "bsc98", "--qos", "acc_debug", "--nodes", "4+1")
    assert "next   cd 'My Folder' && imgkit run --dry-run && imgkit run" in out
    folder = Path("My Folder")
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "my-folder.yaml"])
    assert load(folder.absolute() / "my-folder.yaml").system.title == "MareNostrum 5 ACC"
    program = (folder / "train.py").read_text()
    assert program == EXAMPLE.read_text()  # one text, in two places
    assert len(program.splitlines()) <= 150
    monkeypatch.chdir(folder)
    code, out, _ = call("run", "--dry-run", "-v", "--json")
    assert code == 0
    rows = {row["name"]: row["value"] for row in json.loads(out)["values"]}
    assert (rows["remote"], rows["nodes"], rows["time"]) == ("mn5", "4+1", "00:30:00")
    assert rows["command"] == "dist-run train.py --epochs 5"


def test_missing_values_are_named(init):
    out = init("--recipe", "mn5", "x")
    assert "imgkit remote add NAME USER@HOST:DIR" in out
    assert "account in imgkit.toml, which mn5 needs" in out
    text = Path("x/imgkit.toml").read_text()
    assert '# remote = "mn5"' in text
    assert '# queue = ""' in text
    init("--recipe", "cpu", "y")
    assert "queue = " not in Path("y/imgkit.toml").read_text()  # it has no scheduler
    assert 'qos = ""  # fill in: this system needs it' in text


def test_existing_files_are_kept(init):
    Path("train.py").write_text("mine")
    Path(".gitignore").write_text("*.pyc\n*.sif\n*.sqsh")
    out = init("--recipe", "mn5")
    assert Path("train.py").read_text() == "mine"
    assert "kept   .gitignore" in out
    assert "added  runs/ to .gitignore" in out
    assert command_here() == ("dist-run", "train.py")
    assert Path(".gitignore").read_text() == "*.pyc\n*.sif\n*.sqsh\nruns/\n"
    Path("imgkit.toml").unlink()
    assert json.loads(init("--recipe", "mn5", "--json"))["files"] == ["imgkit.toml"]


def test_data_that_jobs_would_not_see_is_named(init):
    write_files(Path(), {"train.py": "", ".gitignore": "*.bin", "data/x/train.bin": "x" * 2_000_000})
    out = init("--recipe", "mn5")
    assert "note   not sent: data/x/train.bin (git, Docker or imgkit ignores it)" in out
    assert 'data = ["data/x"] in imgkit.toml\n' in out
    write_files(Path(), {".env": "TOKEN=1"})  # a run refuses it, and this does not
    Path("imgkit.toml").unlink()
    init("--recipe", "mn5")


def command_here() -> tuple[str, ...]:
    return toml_file.read_file(Path("imgkit.toml").absolute()).values.command


STARTS = 'if __name__ == "__main__":\n'


@pytest.mark.parametrize(
    ("programs", "started"),
    [
        ({"main.py": "", "eval.py": STARTS}, "main.py"),
        (
            {"multinode.py": STARTS, "model.py": "", "setup.py": STARTS, "test_model.py": STARTS},
            "multinode.py",
        ),
        ({"src/train.py": "", "setup.py": ""}, "src/train.py"),
    ],
)
def test_command_starts_the_program_of_the_folder(init, programs, started):
    write_files(Path(), programs)
    init("--recipe", "mn5")
    assert command_here() == ("dist-run", started)
    assert {str(path) for path in Path().rglob("*.py")} == {*programs}


def test_program_is_not_guessed_among_several(init):
    write_files(Path(), {"a.py": STARTS, "b.py": STARTS})
    out = init("--recipe", "mn5")
    assert "next   command in imgkit.toml: the one that starts a.py or b.py" in out
    assert command_here() == ()


PROJECT = '[project]\nname = "p"\nversion = "1"\ndependencies = ["einops", "torchvision==0.16"]\n'
PROJECT_STEP = {"project": True, "editable": "/workspace"}
CONDA = """\
dependencies:
  - python=3.10
  - pytorch::pytorch=2.1
  - numpy=1.26
  - conda-forge::scipy>=1.10,<2
  - tqdm=4.66.1=py_0
  - git
  - pip: [einops, -e .]
"""


@pytest.mark.parametrize(
    ("texts", "steps", "omitted"),
    [
        ({"requirements.txt": "# x\ntqdm\n--extra-index-url https://x\n"}, [{"requirements": True}], ()),
        (
            {"requirements.txt": "torch==2.1\nnumpy<2\n-r more.txt\ngit+https://h/a@main\n"},
            [{"packages": ("numpy<2",)}],
            ("torch==2.1", "-r more.txt", "git+https://h/a@main"),
        ),
        ({"pyproject.toml": PROJECT}, [{"packages": ("einops",)}], ("torchvision==0.16",)),
        (
            {
                "pyproject.toml": PROJECT.replace("torchvision==0.16", "tqdm") + "[build-system]\n",
                "requirements.txt": "x",
            },
            [PROJECT_STEP],
            (),
        ),
        (
            {"pyproject.toml": PROJECT + "[build-system]\n"},
            [{"packages": ("einops",)}, {**PROJECT_STEP, "options": ("--no-deps",)}],
            ("torchvision==0.16",),
        ),
        (
            {"pyproject.toml": "[build-system]\n", "setup.py": "", "requirements.txt": "tqdm"},
            [{"requirements": True}, PROJECT_STEP],
            (),
        ),
        (
            {"pyproject.toml": "[build-system]\n[project]\n", "setup.py": "import numpy"},
            [{"project": True}],
            (),
        ),
        ({"pyproject.toml": "[tool.ruff]\n", "requirements.txt": "x\n"}, [{"requirements": True}], ()),
        (
            {"environment.yml": CONDA},
            [{"packages": ("numpy==1.26.*", "scipy>=1.10,<2", "tqdm==4.66.1", "einops")}],
            ("conda:python=3.10", "conda:pytorch::pytorch=2.1", "conda:git", "-e ."),
        ),
        ({"environment.yml": "dependencies: [*x\n", "requirements.txt": ""}, [], ()),
        ({"requirements.txt": "torch==2.1\n"}, [], ("torch==2.1",)),
        ({"environment.yml": "dependencies: [{pip: tqdm}, git]\n"}, [], ("conda:git",)),
    ],
)
def test_recipe_installs_what_the_program_needs(init, texts, steps, omitted):
    """The recipe is read as ``imgkit build`` reads it; no line may replace the base's torch."""
    write_files(Path(), {"train.py": "", **texts})
    out = init("--recipe", "mn5")
    pip = load(recipe_here()).image.pip
    assert len(pip) == len(steps)
    defaults = dict.fromkeys(("packages", "requirements", "project", "editable", "options"), False)
    for pip_step, step in zip(pip, steps, strict=True):
        for key, value in {**defaults, **step}.items():
            assert getattr(pip_step, key) == value or bool(getattr(pip_step, key)) is value
    assert re.findall(r"^omits  (.*)$", out, re.MULTILINE) == ([", ".join(omitted)] if omitted else [])
    for line in omitted:
        assert f"also has: {line}\n" in recipe_here().read_text()


@pytest.mark.parametrize(
    ("recipe", "setup_py", "copies"), [("mn5", "", False), ("mn5", "import numpy", True), ("rcp", "", True)]
)
def test_code_is_in_the_image_only_where_a_run_cannot_bring_it(init, recipe, setup_py, copies, tmp_path):
    pyproject = PROJECT.replace("torchvision==0.16", "tqdm") + "[build-system]\n"
    write_files(Path(), {"train.py": "", "pyproject.toml": pyproject, "setup.py": setup_py})
    init("--recipe", recipe)
    file = recipe_here()
    image, values = load(file).image, toml_file.read_file(tmp_path / "imgkit.toml").values
    assert (bool(image.copy), bool(values.code)) == (copies, not copies)
    assert image.pip[0].editable == (None if copies else "/workspace")
    assert values.command == ("dist-run", "/workspace/train.py" if copies else "train.py")
    is_explained = "# Each edit builds the image again: its setup.py is a program." in file.read_text()
    assert is_explained == bool(setup_py)


def test_line_of_a_project_adds_no_key_to_the_recipe(init):
    project = '[project]\ndependencies = ["torch\\r  run: [x]", "tqdm"]\n'
    write_files(Path(), {"train.py": "", "pyproject.toml": project})
    init("--recipe", "mn5")
    assert load(recipe_here()).image.run == ()


def test_recipe_of_the_folder_extends_by_a_relative_path(init, tmp_path):
    Path("base.yaml").write_text("extends: mn5\n")
    for folder, extends in (("sub/mine", "../../base.yaml"), (".", "./base.yaml")):
        init("--recipe", str(tmp_path / "base.yaml"), folder)
        (file,) = (path for path in Path(folder).glob("*.yaml") if path.name != "base.yaml")
        assert f'extends: "{extends}"' in file.read_text()
        assert load(file.absolute()).system.title == "MareNostrum 5 ACC"


@pytest.mark.parametrize(
    ("recipe", "verbs"),
    [
        ("cpu", ["build", "run"]),
        ("rcp", ["build", "push", "run"]),
        ("lambda", ["build", "run", "push", "run"]),
    ],
)
def test_next_lines_work_as_typed(call, init, recipe, verbs, tmp_path, monkeypatch):
    """Jobs are rendered; of the commands that need an engine the recipe is read."""
    lines = re.findall(r"^next   (.*)$", init("--recipe", recipe, "my work"), re.MULTILINE)
    typed = [shlex.split(command) for line in lines for command in line.split(" && ")]
    assert typed.pop(0) == ["cd", "my work"]
    monkeypatch.chdir(tmp_path / "my work")
    assert [argv[1] for argv in typed] == verbs
    for argv in typed:
        assert argv[0] == "imgkit"
        args = [arg.replace("CLAIM", "claim").replace("REGISTRY", "r.example") for arg in argv[1:]]
        if argv[1] == "run":
            code, out, err = call(*args, "--dry-run")
            assert code == 0, err
            assert "is not used" not in err
            program = (
                "/workspace/train.py" if recipe == "rcp" else "train.py"
            )  # a pod has no copy of the code
            assert f"dist-run {program} --epochs 5" in " ".join(out.replace("\\\n", "").split())
        else:
            assert load(Path(argv[2]).absolute()).name == "my-work"
