"""What imgkit init writes, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.project import confirm, toml_file
from imgkit_builder.recipe import targets
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
    code, out, _ = call("init", "My Folder", "-A", "bsc98", "--qos", "acc_debug", "--nodes", "2:4")
    assert code == 0
    assert "next   cd My Folder; imgkit run --dry-run; imgkit run" in out
    folder = Path("My Folder")
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "my-folder.yaml"])
    assert load(folder.absolute() / "my-folder.yaml").system.title == "MareNostrum 5 ACC"
    program = (folder / "train.py").read_text()
    assert program == EXAMPLE.read_text()  # one text, in two places
    assert len(program.splitlines()) <= 150
    found = toml_file.read((folder / "imgkit.toml").absolute())
    own = targets.find(found.recipe)
    assert confirm.of_job(found, [own], stated=True).is_known  # its author needs no question
    monkeypatch.chdir(folder)
    code, out, _ = call("run", "--dry-run", "--json")
    assert code == 0
    rows = {row["name"]: row["value"] for row in json.loads(out)["values"]}
    assert (rows["remote"], rows["nodes"], rows["time"]) == ("mn5", "2:4", "00:30:00")
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
