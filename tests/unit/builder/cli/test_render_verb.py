"""``imgkit render`` as it is typed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

MINE = """\
image:
  base: example.org/base:1
  env:
    GREETING: grüße
"""

# The verb alone: what other verbs need at import is not under test here.
RUN = "import sys; from imgkit_builder.cli.app import main; main()"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(MINE, encoding="utf-8")
    return tmp_path


def imgkit(folder: Path, *args: str) -> subprocess.CompletedProcess[bytes]:
    # A locale that cannot say what the recipe says must not change or stop the output.
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    return subprocess.run([sys.executable, "-c", RUN, *args], cwd=folder, env=env, capture_output=True)


def test_stdout_and_file_are_equal(folder):
    printed = imgkit(folder, "render", "./mine.yaml")
    written = imgkit(folder, "render", "./mine.yaml", "-o", "Dockerfile")
    assert (printed.returncode, printed.stderr, written.returncode) == (0, b"", 0)
    assert (folder / "Dockerfile").read_bytes() == printed.stdout
    assert 'GREETING="grüße"' in printed.stdout.decode()


def test_definition_with_its_context(folder):
    result = imgkit(folder, "render", "./mine.yaml", "--format", "def", "--context", "c.tar")
    assert result.returncode == 0, result.stderr
    section = result.stdout.decode().split("\n%files\n")[1].split("\n%")[0]
    members = re.findall(r"^    ([^#\s]\S*) ", section, re.MULTILINE)
    with tarfile.open(folder / "c.tar") as archive:
        assert set(members) <= set(archive.getnames())


def test_context_without_files_of_the_folder_names_no_commit(folder):
    git = ("git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    contexts = []
    for message in ("first", "second"):
        for words in (("init", "-q"), ("add", "mine.yaml"), ("commit", "-qm", message, "--allow-empty")):
            subprocess.run([*git, *words], check=True)
        assert imgkit(folder, "render", "./mine.yaml", "--context", "c.tar").returncode == 0
        contexts.append((folder / "c.tar").read_bytes())
    assert contexts[0] == contexts[1]


def test_rendering_imports_no_engine(folder):
    code = (
        "import sys; from imgkit_builder.cli.recipes import verb_render; "
        "verb_render('mn5', 'dockerfile', None, None, None, None, []); "
        "heavy = {'docker', 'spython', 'rich', 'torch', 'pathspec'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_lock_beside_recipe_is_followed_unless_told_otherwise(tmp_path):
    golden = Path(__file__).parents[3] / "golden" / "recipes"
    shutil.copytree(golden, tmp_path, dirs_exist_ok=True)
    for options, base in (((), "@sha256:"), (("--no-lock",), ":24.03-py3")):
        text = imgkit(tmp_path, "render", "./locked.yaml", *options).stdout.decode()
        assert f"FROM nvcr.io/nvidia/pytorch{base}" in text
