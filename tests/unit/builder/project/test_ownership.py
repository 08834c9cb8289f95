"""An imgkit.toml that nobody named, and what it names: who may be able to change them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from file_tree import write_files

from imgkit_builder.project import ownership

SBATCH = "#!/bin/sh\n# A fake sbatch.\ncat > /dev/null\ntouch started\necho 4711\n"
TOML = """\
recipe = './mine.yaml'
account = 'a'
qos = 'acc_debug'
time = '10m'
code = 'src'
command = ['dist-run', 'train.py']
"""
FILES = {
    "imgkit.toml": TOML,
    "mine.yaml": "extends: ./base.yaml\nsystem: ./system.yaml\nimage: {pip: [{requirements: needs.txt}]}\n",
    "needs.txt": "einops\n",
    "base.yaml": "extends: mn5\n",
    "system.yaml": "extends: mn5\nruntime: {binds: [/data]}\n",
    "mine.lock": "",
    "hf.lock": "",
    "src/train.py": "",
    "bin/sbatch": SBATCH,
}
STRANGER = 4711
Refusal = Callable[..., str]
Submit = Callable[..., None]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, a project, with a fake sbatch."""
    project = write_files(home / "project", FILES)
    for name in FILES:  # whatever the umask
        (project / name).chmod(0o755 if name == "bin/sbatch" else 0o644)
    (project / "mine.sif").mkdir()  # an image as a folder, which nothing looks into
    monkeypatch.chdir(project)
    monkeypatch.setenv("PATH", f"{project / 'bin'}:{os.environ['PATH']}")
    return project


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def open_to_all(path: Path) -> None:
    path.chmod(0o777 if path.is_dir() else 0o666)


@pytest.fixture
def refusal(call: Any) -> Refusal:
    """``refusal()`` returns the message of a run that is refused."""

    def run(*args: str) -> str:
        code, out, err = call("run", *args)
        assert (code, out) == (2, ""), err
        assert not Path("started").exists()
        assert "--trust-folder" in err
        return re.sub(r"\s+", " ", err)

    return run


@pytest.fixture
def submit(call: Any) -> Submit:
    """``submit()`` runs a job that is not refused."""

    def run(*args: str) -> None:
        code, out, err = call("run", "--detach", "--no-code", *args)
        assert (code, out) == (0, "4711\n"), err
        assert "--trust-folder" not in err
        Path("started").unlink()

    return run


def test_own_folder_is_used_without_a_question(folder, call, submit):
    code, _, err = call("run", "--dry-run")
    assert code == 0, err
    submit()


NAMED = ["imgkit.toml", "mine.yaml", "base.yaml", "system.yaml", "needs.txt", "mine.lock", "hf.lock", "src"]


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param(
            give_away,
            rf"belongs to user {STRANGER} \(mode {{}}\), not to you, root or the owner",
            marks=as_root,
        ),
        (open_to_all, r"every user can write it \(owner \w+, mode {}\) -> chmod o-w {} or "),
    ],
)
def test_project_file_that_others_can_change_is_refused(folder, refusal, name, change, problem):
    change(folder / name)
    mode = f"{stat.S_IMODE((folder / name).stat().st_mode):04o}"
    assert re.search(f"{folder}/{name}: {problem.format(mode, folder / name)}", refusal())


@pytest.mark.parametrize("above", [Path(), Path("..")])
def test_folder_in_which_every_user_can_replace_it_is_refused(folder, refusal, submit, above):
    parent = (folder / above).resolve()
    parent.chmod(0o777)
    err = refusal()
    assert f"{folder}/imgkit.toml: every user can replace it in {parent} (owner " in err
    assert f"-> chmod o-w {parent} " in err
    parent.chmod(0o1777)
    submit()


@as_root
@pytest.mark.parametrize("name", ["imgkit.toml", "src"])
def test_both_ends_of_a_link_count(folder, refusal, submit, name):
    file = folder / name
    elsewhere = folder.parent / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    submit()
    give_away(file)
    assert f"{file}: belongs to" in refusal()
    os.lchown(file, 0, 0)
    give_away(elsewhere)
    assert f"{elsewhere}: belongs to" in refusal()


@as_root
@pytest.mark.parametrize("change", [give_away, open_to_all])
def test_trusted_folder_is_used(folder, submit, change):
    for name in ("", *NAMED):
        change(folder / name)
    submit("--trust-folder")


@as_root
def test_typed_path_is_consent(folder, submit):
    for name in NAMED:
        give_away(folder / name)
    flags = ("-A", "a", "--qos", "acc_debug", "--time", "10m", "--image", "mine.sif", "--", "dist-hello")
    submit("./mine.yaml", *flags)


@as_root
@pytest.mark.parametrize("args", [(), ("./mine.yaml",)])
def test_run_refuses_a_foreign_file(folder, call, refusal, args):
    call("remote", "add", "far", "me@far", "--recipe", "mn5")
    give_away(folder / "imgkit.toml")
    for options in ((), ("--dry-run",)):
        assert "/imgkit.toml: belongs to" in refusal(*args, "--on", "far", *options)
    assert call("run", *args, "--on", "far", "--dry-run", "--trust-folder")[0] == 0


@as_root
def test_run_takes_a_foreign_recipe_that_is_named(folder, call, refusal):
    call("remote", "add", "far", "me@far")
    give_away(folder / "mine.yaml")
    assert "/mine.yaml: belongs to" in refusal("--on", "far", "--dry-run")
    assert call("run", "./mine.yaml", "--on", "far", "--dry-run")[0] == 0


@as_root
def test_owner_of_the_installation_counts_as_root(tmp_path, monkeypatch):
    file, installed = tmp_path / "imgkit.toml", tmp_path / "__init__.py"
    for path in (file, installed):
        path.touch(mode=0o644)
        give_away(path)
    monkeypatch.setattr(ownership, "__file__", str(installed))
    ownership.refuse_foreign(file)
