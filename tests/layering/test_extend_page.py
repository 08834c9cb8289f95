"""The examples of docs/extend.md, applied to a copy of the code: each new thing works as the page says.

The cluster, the launcher and the scheduler of the page are made up: no program of theirs runs. The unit tests
of recipes run on the copy too: an example that breaks one of them is not complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
CODE = ("builder", "recipes", "entrypoints")
RECIPE_TESTS = "tests/unit/builder/recipe"
ISSUE_TESTS = "tests/unit/entrypoints/fabric"
DIFFS = ("A recipe key", "A launcher", "A collective", "A known issue")
RECIPE = "image:\n  base: example.org/torch:1\n  timezone: Europe/Madrid\nsystem: fakecluster\n"


def blocks(heading: str, language: str) -> list[str]:
    """The blocks in that language below a heading of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages and of the tests of recipes with every example of the page applied to it."""
    copy = tmp_path_factory.mktemp("code")
    for name in (*CODE, RECIPE_TESTS, ISSUE_TESTS, "tests/golden"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    pages = ("docs/reference/recipes.md", "docs/guides/own-cluster.md")
    for name in (*pages, "tests/conftest.py", "tests/unit/entrypoints/conftest.py", "pyproject.toml"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    (copy / RECIPE_TESTS / "test_time_zone.py").write_text(blocks("A recipe key", "python")[0])
    (file,) = re.findall(r"^`(recipes/\S+\.yaml)`", PAGE, re.MULTILINE)
    (copy / file).write_text(blocks("A system", "yaml")[0])
    for heading in DIFFS:
        (diff,) = blocks(heading, "diff")
        done = subprocess.run(
            ["git", "apply", "-"], cwd=copy, input=diff, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{heading}: {done.stderr}"
    return copy


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a recipe that uses the new key and the new system."""
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "mine.sif").mkdir()  # a sandbox: imgkit does not look inside
    return tmp_path


def run(code: Path, work: Path, module: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(code / name) for name in CODE)
    env = {"PATH": os.environ["PATH"], "HOME": str(work), "PYTHONPATH": path, **env}
    argv = [sys.executable, "-m", module, *words]
    return subprocess.run(argv, cwd=work, env=env, capture_output=True, text=True, timeout=600)


def imgkit(code: Path, work: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(code, work, "imgkit_builder", *words)


def test_every_diff_of_the_page_is_applied() -> None:
    applied = sum(len(blocks(heading, "diff")) for heading in DIFFS)
    assert applied == PAGE.count("```diff\n")


def test_new_system_is_listed_and_renders(code: Path, work: Path) -> None:
    listed = imgkit(code, work, "list", "--systems")
    assert re.search(r"^fakecluster +slurm +documented +Fakecluster$", listed.stdout, re.MULTILINE)
    job = ("./mine.yaml", "-A", "me", "--nodes", "2", "--", "dist-hello")
    script = imgkit(code, work, "run", "--dry-run", *job)
    assert script.returncode == 0, script.stderr
    assert {"#SBATCH --gres=gpu:4", "#SBATCH --partition=gpu"} <= set(script.stdout.splitlines())


def test_job_without_the_required_account_is_refused(code: Path, work: Path) -> None:
    done = imgkit(code, work, "run", "--dry-run", "./mine.yaml", "--", "dist-hello")
    assert (done.returncode, "--account" in done.stderr) == (2, True)


def test_new_key_becomes_a_variable(code: Path, work: Path) -> None:
    done = imgkit(code, work, "render", "./mine.yaml")
    assert done.returncode == 0, done.stderr
    assert '\nENV TZ="Europe/Madrid" PYTHONNOUSERSITE="1"\n' in done.stdout
    done = imgkit(code, work, "render", "--format", "def", "./mine.yaml")
    assert "\n    export TZ=Europe/Madrid\n" in done.stdout


def test_wrong_value_of_the_new_key_is_refused(code: Path, work: Path) -> None:
    (work / "mine.yaml").write_text(RECIPE.replace("Europe/Madrid", "CEST+1"))
    done = imgkit(code, work, "check", "mine.yaml")
    (shown,) = blocks("A recipe key", "text")
    assert (done.returncode, done.stderr) == (2, shown)


def test_unit_tests_of_recipes_pass_with_the_new_key(code: Path) -> None:
    slow = ("test_recipe_fuzz.py", "test_sources.py", "test_extends_merge.py")  # they read no key
    words = ("-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(code), str(code / RECIPE_TESTS))
    ignored = (f"--ignore={code / RECIPE_TESTS / name}" for name in slow)
    # Messages name all keys: as the page says, the new one is recorded.
    done = run(code, code, "pytest", *words, *ignored, IMGKIT_UPDATE_GOLDEN="1")
    assert done.returncode == 0, done.stdout[-6000:]


def hello(code: Path, work: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return run(code, work, "imgkit_entrypoints", "dist-hello", "--dry-run", "--json", **env)


def test_new_launcher_places_a_node(code: Path, work: Path) -> None:
    (line,) = re.findall(r"^    (FAKERUN_.*) dist-hello --dry-run$", PAGE, re.MULTILINE)
    env = dict(word.split("=", 1) for word in line.split())
    plan = json.loads(hello(code, work, **env).stdout)
    assert (plan["scheduler"], plan["source"]["node_rank"]) == ("fakerun", "FAKERUN_RANK")
    place = plan["placement"]
    assert (place["nnodes"], place["node_rank"], place["head"]) == (2, 1, "n1")


def test_start_on_one_node_shows_the_launchers_line(code: Path, work: Path) -> None:
    env = {"FAKERUN_RANK": "0", "FAKERUN_SIZE": "1", "FAKERUN_LOCAL_SIZE": "1", "IMGKIT_NODES": "n1,n2"}
    done = hello(code, work, **env)
    line = "fakerun -n 2 --per-node 1 --no-bind --set IMGKIT_NODES=n1,n2 dist-hello"
    assert (done.returncode, line in done.stderr) == (5, True)


def test_two_launchers_at_once_are_refused(code: Path, work: Path) -> None:
    done = hello(code, work, FAKERUN_RANK="0", OMPI_COMM_WORLD_RANK="0")
    assert (done.returncode, "--scheduler fakerun" in done.stderr) == (5, True)


def test_new_collective_is_listed_with_its_factor(code: Path, work: Path) -> None:
    shown = run(code, work, "imgkit_entrypoints", "dist-bench", "--help", COLUMNS="200")
    assert re.search(r"\bscatter, all_gather_list\b", shown.stdout)
    (work / "ask.py").write_text(
        "from imgkit_entrypoints.apps.bench.collectives import named\n"
        "print(named('all_gather_list').factor(4))\n"
    )
    assert run(code, work, "ask").stdout == "0.75\n"


def test_new_known_issue_passes_its_fixtures(code: Path) -> None:
    tests = str(code / ISSUE_TESTS / "test_known_issues.py")
    done = run(code, code, "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(code), tests)
    assert done.returncode == 0, done.stdout[-6000:]


def test_new_known_issue_is_listed_with_its_condition(code: Path, work: Path) -> None:
    listed = run(code, work, "imgkit_entrypoints", "dist-doctor", "--known-issues", IMGKIT_ROOT=str(work))
    (line,) = (line for line in listed.stdout.splitlines() if "fakefabric-checksums" in line)
    assert line.split(maxsplit=3)[3] == "needs fabric == slingshot (fabric tcp)"
