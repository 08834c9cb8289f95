"""Systems of plug-ins: the example of docs/extend.md is installed and takes a job, and broken ones are named.

``fakeq``, the scheduler's program, is a fake: it prints its words and what it reads.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_tree import write_files, write_program

from imgkit_builder.base.flags import declared_options
from imgkit_builder.cli import run
from imgkit_builder.jobs import systems
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve_job
from imgkit_builder.recipe import systems as registry
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.problems import RecipeErrors
from imgkit_builder.recipe.targets import load_target
from imgkit_entrypoints.errors import ToolFailed

ROOT = Path(__file__).resolve().parents[4]
FAKEQ = """\
echo "fakeq $*"
if [ "$1" = submit ]; then cat > submitted.sh; echo job-7; fi
"""
RECIPE = "image: {base: 'example.org/torch:1'}\nsystem:\n  scheduler: fakeq\n  title: The fake\n"


def example(language: str) -> str:
    """The first block in that language of the section about schedulers in docs/extend.md."""
    section = (ROOT / "docs/extend.md").read_text(encoding="utf-8").partition("\n## A scheduler\n")[2]
    block = re.search(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert block
    return block[1]


@pytest.fixture(scope="module")
def example_installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built as a distribution and installed into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    (source / "imgkit_fakeq.py").write_text(example("python"))
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "imgkit-fakeq"\nversion = "1.2"\n'
        '[tool.hatch.build.targets.wheel]\ninclude = ["imgkit_fakeq.py"]\n' + example("toml")
    )
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target"]
    pip = [sys.executable, "-m", "pip", "install", *options, target, source]
    result = subprocess.run(pip, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return target


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a recipe for the fake scheduler, and its program."""
    write_program(tmp_path / "bin/fakeq", FAKEQ)
    (tmp_path / "mine.sif").mkdir()  # a sandbox: imgkit does not look inside
    return write_files(tmp_path, {"mine.yaml": RECIPE})


def imgkit(work: Path, plugins: Path, *args: str) -> subprocess.CompletedProcess[str]:
    path = f"{work / 'bin'}:{os.environ['PATH']}"
    env = {"PATH": path, "HOME": str(work), "PYTHONPATH": str(plugins)}
    argv = [sys.executable, "-m", "imgkit_builder", *args]
    return subprocess.run(argv, cwd=work, env=env, capture_output=True, text=True, timeout=60)


JOB = ("./mine.yaml", "--nodes", "2", "--lane", "fast", "--time", "10m", "--", "dist-pi", "a b")


def test_job_of_a_plugin_is_submitted_and_followed(work, example_installed):
    printed = imgkit(work, example_installed, "run", "--dry-run", *JOB).stdout
    result = imgkit(work, example_installed, "run", "--detach", *JOB)
    assert (result.returncode, result.stdout) == (0, "job-7\n")
    assert (work / "submitted.sh").read_text() == printed
    for verb in ("status", "logs", "cancel"):
        result = imgkit(work, example_installed, verb, "job-7")
        assert (result.returncode, result.stdout) == (0, f"fakeq {verb} job-7\n")
    status = json.loads(imgkit(work, example_installed, "status", "job-7", "--json").stdout)
    assert (status["command"], status["output"]) == (["fakeq", "status", "job-7"], "fakeq status job-7\n")


def test_flags_of_a_plugin_are_in_the_help(work, example_installed):
    text = imgkit(work, example_installed, "run", "--dry-run", "-h").stdout
    assert re.search(r"--lane NAME +fakeq: lane of the queue", text)
    assert "--lane" not in imgkit(work, work, "run", "--dry-run", "-h").stdout


def test_flag_of_another_system_is_a_warning(work, example_installed):
    result = imgkit(work, example_installed, "run", "--dry-run", "cpu", "--lane", "fast", "--", "dist-pi")
    assert result.returncode == 0
    assert "--lane is not used: " in result.stderr
    result = imgkit(work, example_installed, "run", "--dry-run", "./mine.yaml", "-A", "me", "--", "dist-pi")
    assert "--account is not used: The fake (fakeq) has no such flag" in result.stderr


def test_plugin_is_a_value_of_the_schema(work, example_installed):
    schema = json.loads(imgkit(work, example_installed, "check", "--schema").stdout)
    assert schema["$defs"]["SystemFacts"]["properties"]["scheduler"]["enum"][-1] == "fakeq"


def test_unknown_system_names_the_nearest(work, example_installed):
    (work / "mine.yaml").write_text(RECIPE.replace("fakeq", "fakq"))
    result = imgkit(work, example_installed, "check", "./mine.yaml")
    assert result.returncode == 2
    assert "mine.yaml:3:14: system.scheduler: 'fakq' is not known; allowed: fakeq, mpi" in result.stderr
    assert "did you mean fakeq?" in result.stderr


def test_job_outlives_its_plugin_with_a_clear_message(work, example_installed):
    assert imgkit(work, example_installed, "run", "--detach", *JOB).returncode == 0
    result = imgkit(work, work, "status", "job-7")
    assert result.returncode == 2
    assert "no system is named 'fakeq'" in result.stderr


def plugin(folder: Path, body: str, *, name: str = "fakeq", distribution: str = "fakeq-dist") -> Path:
    """`folder` with a distribution, as an installer leaves it, whose module has `body`."""
    module = distribution.replace("-", "_")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[imgkit.systems]\n{name} = {module}:SYSTEM\n")
    (folder / f"{module}.py").write_text(body)
    return folder


PLUGIN = example("python")
BROKEN = {
    "import": ("import no_such_module\n", "cannot be loaded: ModuleNotFoundError"),
    "exit": ("raise SystemExit(3)\n", "cannot be loaded: SystemExit: 3"),
    "no object": ("SYSTEMS = 1\n", "cannot be loaded: AttributeError"),
    "another object": ("SYSTEM = 'x'\n", "has no registration"),
    "placement": (PLUGIN.replace('"manual"', '"manuel"'), "names the placement 'manuel'"),
    "uses": (PLUGIN.replace('"queue", "time"', '"queue", "tme"'), "uses 'tme'"),
    "no method": (PLUGIN.replace("def log_source", "def logs"), "cannot be loaded: TypeError"),
    "no System": (PLUGIN.replace("(System):", ":\n    registration = System.registration"), "is no System"),
    "flag taken": (PLUGIN.replace("lane: str", "queue: str"), "has the flag --queue, which is taken"),
    "no default": (
        PLUGIN.replace("lane: str", "x: int\n    lane: str"),
        "declares flags that cannot be read",
    ),
}
for option in declared_options(run._Options):
    flag = option.names[-1]
    BROKEN[f"flag {flag} of the verb"] = (
        PLUGIN.replace('option_field("slow",', f'option_field("slow", "{flag}",'),
        f"has the flag {flag}, which is taken",
    )


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of distributions for this process."""

    def forget() -> None:
        registry._entries.cache_clear()
        registry._plugins.cache_clear()
        for name in ("fakeq_dist", "other_dist"):
            sys.modules.pop(name, None)

    folder = tmp_path / "plugins"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    forget()
    yield folder
    forget()


@pytest.mark.parametrize("case", BROKEN)
def test_broken_plugin_is_named_and_breaks_no_other(work, plugins, case):
    body, message = BROKEN[case]
    plugin(plugins, body)
    installed = systems.load_systems()
    assert set(installed.systems) == set(registry.SHIPPED)
    for error in (*installed.errors, refused(work)):
        assert error.where == "fakeq-dist 1.0"
        assert f"the plug-in for the system 'fakeq' {message}" in error.what


def refused(work: Path) -> ToolFailed:
    """The error for a job of the recipe in `work`."""
    with pytest.raises(ToolFailed) as caught:
        resolve_job(load_target(work / "mine.yaml"), JobRequest.of(command=("dist-pi",)))
    return caught.value


def test_broken_plugin_gives_no_traceback(work, tmp_path):
    broken = plugin(tmp_path / "broken", "import no_such_module\n")
    result = imgkit(work, broken, "run", "--dry-run", "./mine.yaml", "--", "dist-pi")
    assert result.returncode == 4
    assert "fakeq-dist 1.0: the plug-in for the system 'fakeq' cannot be loaded" in result.stderr
    assert "Traceback" not in result.stderr
    result = imgkit(work, broken, "run", "--dry-run", "cpu", "--", "dist-pi")
    assert (result.returncode, result.stdout) == (
        0,
        imgkit(work, work, "run", "--dry-run", "cpu", "--", "dist-pi").stdout,
    )
    assert "pip uninstall fakeq-dist" in result.stderr
    result = imgkit(work, broken, "--help")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name", ["slurm", "standalone", "kubeflow"])
def test_name_of_a_shipped_system_is_refused(plugins, name):
    plugin(plugins, PLUGIN, name=name)
    installed = systems.load_systems()
    assert set(installed.systems) == set(registry.SHIPPED)
    (error,) = installed.errors
    assert f"the plug-in for the system '{name}' is ignored: imgkit ships a system of that name" in error.what
    assert "imgkit_builder.jobs.systems" in type(systems.get_system(name)).__module__


def test_two_plugins_of_one_name_are_refused(work, plugins):
    plugin(plugins, PLUGIN)
    plugin(plugins, PLUGIN, distribution="other-dist")
    error = refused(work)
    assert error.what == "2 plug-ins add a system named 'fakeq'"
    assert sorted((error.where or "").split(" and ")) == ["fakeq-dist 1.0", "other-dist 1.0"]


def test_two_plugins_with_one_flag_are_refused(plugins):
    plugin(plugins, PLUGIN)
    plugin(plugins, PLUGIN, name="other", distribution="other-dist")
    installed = systems.load_systems()
    assert "fakeq" in installed.systems
    (error,) = installed.errors
    assert (error.where, "has the flag --lane" in error.what) == ("other-dist 1.0", True)


CHECKED = """
from imgkit_builder.jobs.systems import Registration, SystemFault


def check(facts):
    if facts.queue.name:
        yield SystemFault(path=("queue", "name"), what="fakeq has no queues", hint="leave it out")


class Checked(Fakeq):
    registration = Registration(aliases=("grid",), check=check)


SYSTEM = Checked()
"""


def test_plugin_checks_the_recipe(work, plugins):
    plugin(plugins, PLUGIN + CHECKED)
    file = work / "mine.yaml"
    assert load(file).warnings == ()
    file.write_text(RECIPE + "  runtime: {kind: docker, command: docker}\n")
    (warning,) = load(file).warnings
    assert warning.what == "fakeq does not start programs by docker: imgkit run refuses it"
    file.write_text(RECIPE + "  queue: {name: fast}\n")
    with pytest.raises(RecipeErrors) as caught:
        load_target(file)
    (problem,) = caught.value.problems
    assert (problem.key, problem.what) == ("system.queue.name", "fakeq has no queues")
    assert (problem.position.line, problem.position.column) == (5, 17)


@pytest.mark.parametrize(("alias", "system"), [("Grid", "fakeq"), ("torque", "pbs"), ("OpenMPI", "mpi")])
def test_alias_names_its_system(work, plugins, alias, system):
    plugin(plugins, PLUGIN + CHECKED)
    (work / "mine.yaml").write_text(RECIPE.replace("fakeq", alias))
    with pytest.raises(RecipeErrors, match=f"did you mean {system}"):
        load_target(work / "mine.yaml")
