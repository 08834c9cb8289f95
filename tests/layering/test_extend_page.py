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
FILES = ("docs/reference/recipes.md", "docs/guides/own-cluster.md", "pyproject.toml")
CONFTESTS = ("tests/conftest.py", "tests/unit/entrypoints/conftest.py")
RECIPE = "image:\n  base: example.org/torch:1\n  timezone: Europe/Madrid\nsystem: fakecluster\n"


def blocks(heading, language):
    """Return the blocks in that language below a heading of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """Return a copy of the packages and of some tests, with every example of the page applied to it."""
    copy = tmp_path_factory.mktemp("code")
    for name in (*CODE, RECIPE_TESTS, ISSUE_TESTS, "tests/golden", "tests/kit"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*FILES, *CONFTESTS):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    (copy / RECIPE_TESTS / "test_time_zone.py").write_text(blocks("A recipe key", "python")[0])
    (file,) = re.findall(r"^`(recipes/\S+\.yaml)`", PAGE, re.MULTILINE)
    (copy / file).write_text(blocks("A system", "yaml")[0])
    for diff in re.findall(r"^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        result = subprocess.run(
            ["git", "apply", "-"], cwd=copy, input=diff, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, f"{result.stderr}\n{diff}"
    return copy


@pytest.fixture
def work(tmp_path):
    """Return a folder with a recipe that uses the new key and the new system."""
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "mine.sif").mkdir()  # a sandbox: imgkit does not look inside
    return tmp_path


def run(code, work, *argv, **env):
    path = os.pathsep.join(str(code / name) for name in CODE)
    env = {"PATH": os.environ["PATH"], "HOME": str(work), "PYTHONPATH": path, **env}
    return subprocess.run(
        [sys.executable, *argv], cwd=work, env=env, capture_output=True, text=True, timeout=600
    )


def imgkit(code, work, *arguments):
    return run(code, work, "-m", "imgkit_builder", *arguments)


def dist(code, work, *arguments, **env):
    return run(code, work, "-m", "imgkit_entrypoints", *arguments, **env)


def pass_tests(code, tests, *options):
    argv = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir", code, tests, *options)
    result = run(code, code, *argv)
    assert result.returncode == 0, result.stdout[-6000:]


def test_new_system_is_listed_and_renders(code, work):
    systems = imgkit(code, work, "list", "--systems").stdout
    assert re.search(r"^fakecluster +slurm +documented +Fakecluster$", systems, re.MULTILINE)
    job = ("./mine.yaml", "-A", "me", "--nodes", "2", "--", "dist-hello")
    script = imgkit(code, work, "run", "--dry-run", *job)
    assert script.returncode == 0, script.stderr
    assert {"#SBATCH --gres=gpu:4", "#SBATCH --partition=gpu"} <= set(script.stdout.splitlines())


def test_job_without_the_required_account_is_refused(code, work):
    result = imgkit(code, work, "run", "--dry-run", "./mine.yaml", "--", "dist-hello")
    assert (result.returncode, "--account" in result.stderr) == (2, True)


def test_new_key_becomes_a_variable(code, work):
    dockerfile = imgkit(code, work, "render", "./mine.yaml").stdout
    assert '\nENV TZ="Europe/Madrid" PYTHONNOUSERSITE="1"\n' in dockerfile
    definition = imgkit(code, work, "render", "--format", "def", "./mine.yaml").stdout
    assert "\n    export TZ=Europe/Madrid\n" in definition


def test_wrong_value_of_the_new_key_is_refused(code, work):
    (work / "mine.yaml").write_text(RECIPE.replace("Europe/Madrid", "CEST+1"))
    result = imgkit(code, work, "check", "mine.yaml")
    assert [result.stderr] == blocks("A recipe key", "text")
    assert result.returncode == 2


def test_unit_tests_of_recipes_pass_with_the_new_key(code):
    slow = ("test_recipe_fuzz.py", "test_sources.py", "test_extends_merge.py")  # they read no key
    ignored = (f"--ignore={code / RECIPE_TESTS / name}" for name in slow)
    # Messages name all keys and systems: as the page says, the new ones are added to them.
    messages = code / RECIPE_TESTS / "malformed.txt"
    text = messages.read_text().replace("secrets, uv, ", "secrets, timezone, uv, ")
    messages.write_text(text.replace("cpu, jupiter, ", "cpu, fakecluster, jupiter, "))
    pass_tests(code, code / RECIPE_TESTS, *ignored)


def test_new_launcher_places_a_node(code, work):
    (line,) = re.findall(r"^    (FAKERUN_.*) dist-hello --dry-run$", PAGE, re.MULTILINE)
    env = dict(variable.split("=", 1) for variable in line.split())
    plan = json.loads(dist(code, work, "dist-hello", "--dry-run", "--json", **env).stdout)
    assert (plan["scheduler"], plan["source"]["node_rank"]) == ("fakerun", "FAKERUN_RANK")
    placement = plan["placement"]
    assert (placement["nnodes"], placement["node_rank"], placement["head"]) == (2, 1, "n1")


@pytest.mark.parametrize(
    ("env", "hint"),
    [
        (
            {"FAKERUN_SIZE": "1", "FAKERUN_LOCAL_SIZE": "1", "IMGKIT_NODES": "n1,n2"},
            "fakerun -n 2 --per-node 1 --no-bind --set IMGKIT_NODES=n1,n2 dist-hello",
        ),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "--scheduler fakerun"),
    ],
    ids=["one-node-of-two", "two-launchers"],
)
def test_wrong_start_of_the_new_launcher_is_refused(code, work, env, hint):
    result = dist(code, work, "dist-hello", "--dry-run", "--json", FAKERUN_RANK="0", **env)
    assert (result.returncode, hint in result.stderr) == (5, True)


def test_new_collective_is_listed_with_its_factor(code, work):
    assert re.search(
        r"\bscatter, all_gather_list\b", dist(code, work, "dist-bench", "--help", COLUMNS="200").stdout
    )
    program = (
        "from imgkit_entrypoints.apps.bench.collectives import find_collective\n"
        "print(find_collective({!r}).factor(4))"
    )
    assert run(code, work, "-c", program.format("all_gather_list")).stdout == "0.75\n"


def test_new_known_issue_passes_its_fixtures(code):
    pass_tests(code, code / ISSUE_TESTS / "test_known_issues.py")


def test_new_known_issue_is_listed_with_its_condition(code, work):
    listing = dist(code, work, "dist-doctor", "--known-issues", IMGKIT_ROOT=str(work)).stdout
    (line,) = (line for line in listing.splitlines() if "fakefabric-checksums" in line)
    assert line.split(maxsplit=3)[3] == "needs fabric == slingshot (fabric tcp)"
