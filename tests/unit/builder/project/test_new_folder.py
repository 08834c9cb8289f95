"""What imgkit init writes, and what it leaves alone."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.project import toml_file
from imgkit_builder.recipe.load import load

EXAMPLE = Path(__file__).parents[4] / "examples/train.py"
FILES = ["imgkit.toml", "train.py", ".gitignore"]


@pytest.fixture
def call(call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``call("init")`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    return call


def test_new_folder_needs_no_flags(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call("remote", "add", "mn5", "me@far", "--recipe", "mn5")
    code, out, _ = call("init", "My Folder", "-A", "bsc98", "--qos", "acc_debug", "--nodes", "4+1")
    assert code == 0
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
    assert rows["command"] == "dist-run /workspace/train.py --epochs 5"


def test_missing_values_are_named(call: Any) -> None:
    code, out, _ = call("init", "--recipe", "mn5", "x")
    assert code == 0
    assert "imgkit remote add NAME USER@HOST:DIR" in out
    assert "account in imgkit.toml, which mn5 needs" in out
    text = Path("x/imgkit.toml").read_text()
    assert '# remote = "mn5"' in text
    assert 'qos = ""  # fill in: this system needs it' in text


def test_files_that_are_there_are_refused_and_listed(call: Any) -> None:
    Path("train.py").write_text("mine")
    Path(".gitignore").write_text("mine")
    code, out, err = call("init", "--recipe", "mn5")
    assert (code, out) == (2, "")
    assert "these files already exist: train.py, .gitignore" in err
    assert not Path("imgkit.toml").exists()


def test_keep_writes_what_is_missing(call: Any) -> None:
    Path("train.py").write_text("mine")
    code, out, _ = call("init", "--recipe", "mn5", "--keep-existing", "--json")
    assert code == 0
    assert "train.py" not in json.loads(out)["files"]
    assert Path("train.py").read_text() == "mine"
    assert Path("imgkit.toml").exists()


def test_own_program_gets_a_command_that_fits(call: Any) -> None:
    Path("train.py").write_text("mine")
    Path(".gitignore").write_text("*.pyc\n*.sif")
    code, out, _ = call("init", "--recipe", "mn5", "--keep-existing")
    assert code == 0
    assert "added  runs/ *.imgdelta to .gitignore" in out
    assert toml_file.read(Path("imgkit.toml").absolute()).values.command == (
        "dist-run",
        "/workspace/train.py",
    )
    assert Path(".gitignore").read_text() == "*.pyc\n*.sif\nruns/\n*.imgdelta\n"
    Path("imgkit.toml").unlink()
    assert "added" not in call("init", "--recipe", "mn5", "--keep-existing")[1]


def test_recipe_of_the_folder_extends_by_a_relative_path(call: Any, tmp_path: Path) -> None:
    Path("base.yaml").write_text("extends: mn5\n")
    for folder, extends in (("sub/mine", "../../base.yaml"), (".", "./base.yaml")):
        assert call("init", "--recipe", str(tmp_path / "base.yaml"), folder)[0] == 0
        (file,) = (one for one in Path(folder).glob("*.yaml") if one.name != "base.yaml")
        assert f'extends: "{extends}"' in file.read_text()
        assert load(file.absolute()).system.title == "MareNostrum 5 ACC"


@pytest.mark.parametrize("recipe", ["cpu", "rcp", "lambda"])
def test_next_lines_work_as_typed(
    call: Any, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs are rendered; of the commands that need an engine the recipe is read."""
    lines = [
        line.removeprefix("next   ")
        for line in call("init", "--recipe", recipe, "my work")[1].splitlines()
        if line.startswith("next")
    ]
    typed = [shlex.split(one) for line in lines for one in line.split(" && ")]
    assert typed.pop(0) == ["cd", "my work"]
    monkeypatch.chdir(tmp_path / "my work")
    verbs = [words[1] for words in typed]
    assert (
        verbs
        == {
            "cpu": ["build", "run"],
            "rcp": ["build", "push", "run"],
            "lambda": ["build", "run", "push", "run"],
        }[recipe]
    )
    for words in typed:
        assert words[0] == "imgkit"
        given = [word.replace("CLAIM", "claim").replace("REGISTRY", "r.example") for word in words[1:]]
        if words[1] == "run":
            code, out, err = call(*given, "--dry-run")
            assert code == 0, err
            assert "is not used" not in err
            assert "dist-run /workspace/train.py --epochs 5" in " ".join(out.replace("\\\n", "").split())
        else:
            assert load(Path(words[2]).absolute()).name == "my-work"


@pytest.mark.parametrize(
    ("remotes", "hint"),
    [((), "imgkit init --recipe mn5"), (("one", "two"), "imgkit init --on NAME")],
)
def test_system_that_nobody_named_is_not_guessed(call: Any, remotes: tuple[str, ...], hint: str) -> None:
    for name in remotes:
        call("remote", "add", name, f"me@{name}", "--recipe", "mn5")
    code, _, err = call("init")
    assert code == 2
    assert hint in err


def test_wrong_value_is_refused_before_any_file(call: Any) -> None:
    code, _, err = call("init", "--recipe", "mn5", "--time", "soon")
    assert code == 2
    assert "'soon' is not a time limit" in err
    assert not Path("imgkit.toml").exists()
