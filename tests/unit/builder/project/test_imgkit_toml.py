"""imgkit.toml: where it is looked for, and what decides each value of a job."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from file_tree import write_files

from imgkit_builder.jobs import systems
from imgkit_builder.jobs.image_source import ImageSource
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.project import origins, toml_file
from imgkit_builder.project.toml_file import ProjectValues
from imgkit_builder.recipe import targets
from imgkit_entrypoints.errors import UsageError

FULL = """\
# a comment
remote = "mn5"
recipe = "./mine.yaml"
account = "bsc98"
nodes = 2
binds = [
  "/gpfs/a = b",  # no key
]
env = ["A=1", "HOME"]
command = ["dist-hello"]
group_readable = true
"""
RECIPE = "extends: mn5\nsystem:\n  queue: {qos: acc_debug}\n"


@pytest.fixture
def call(call: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``call("run", "--dry-run")`` in an empty folder with a blank."""
    (home / "a b").mkdir()
    monkeypatch.chdir(home / "a b")
    return call


def written(text: str, folder: Path = Path(), recipe: str = RECIPE) -> Path:
    """Write an imgkit.toml and the recipe that it names."""
    (folder / "mine.yaml").write_text(recipe)
    file = folder / toml_file.NAME
    file.write_text(text)
    return file.absolute()


def test_every_key_is_read_with_its_line(tmp_path):
    project = toml_file.read_file(written(FULL, tmp_path))
    assert project.values == ProjectValues(
        remote="mn5",
        recipe="./mine.yaml",
        account="bsc98",
        nodes="2",
        binds=("/gpfs/a = b",),
        env=("A=1", "HOME"),
        command=("dist-hello",),
        group_readable=True,
    )
    assert project.code is None
    assert project.recipe == str(tmp_path / "mine.yaml")
    keys = ("remote", "recipe", "account", "nodes", "binds", "env", "command", "group_readable")
    lines = dict(zip(keys, (2, 3, 4, 5, 6, 9, 10, 11), strict=True))
    assert {key: position.line for key, position in project.positions.items()} == lines


def test_variable_of_a_flag_replaces_that_of_the_file(tmp_path):
    project = toml_file.read_file(written(FULL, tmp_path))
    request = origins.fill_from_file(JobRequest.of(env=("HOME=/x", "B")), project)
    assert request.container.env == ("A=1", "HOME=/x", "B")  # and not the value of HOME from here


def test_huge_file_is_refused(tmp_path):
    with pytest.raises(UsageError) as caught:
        toml_file.read_file(written("\n" * 501, tmp_path))
    assert caught.value.what == "cannot be read: it has more than 500 lines"


def test_nearest_file_of_the_repository_counts(tmp_path):
    below = tmp_path / "repository/src/deep"
    below.mkdir(parents=True)
    written("account = 'outside'", tmp_path)
    top = written("account = 'top'", tmp_path / "repository")
    assert toml_file.find_file(below) is None  # no repository: a file above says nothing
    (tmp_path / "repository/.git").mkdir()
    assert toml_file.find_file(below) == top
    nearer = written("account = 'nearer'", tmp_path / "repository/src")
    assert toml_file.find_file(below) == nearer


@pytest.fixture
def plan(call: Any) -> Callable[..., tuple[dict[str, str], str]]:
    """``plan("--time", "1h")`` returns what sets each value of a job on this machine, and its script."""

    def run(*args: str, on: Sequence[str] = ("--on", "here")) -> tuple[dict[str, str], str]:
        code, out, err = call("run", *on, "--dry-run", "-v", "--json", *args)
        messages = [line for line in err.splitlines() if not line.startswith('{"event":')]
        remote_messages = [] if on else ["imgkit: /imgkit stands for the folder on mn5"]
        assert (code, messages) == (0, ["imgkit: values from imgkit.toml", *remote_messages])
        data = json.loads(out)
        return {f"{row['name']} {row['value']}": row["source"] for row in data["values"]}, data["script"]

    return run


def test_flag_beats_the_file_which_beats_the_recipe(plan):
    written(FULL)
    sources, _ = plan("--time", "1h", "--env", "A=2", "--bind", "/x", "--", "dist-pi")
    assert sources.pop("gpus 4").startswith("mn5.yaml:")
    assert "env A=1" not in sources
    expected = {
        "account bsc98": "imgkit.toml:4",
        "nodes 2": "imgkit.toml:5",
        "qos acc_debug": "mine.yaml:3",
        "time 01:00:00": "--time",
        "bind /gpfs/a = b": "imgkit.toml:6",
        "bind /x": "--bind",
        "env A=2": "--env",
        "env HOME (with its value from here)": "imgkit.toml:9",
        "command dist-pi": "--",
        "name mine": "default",
    }
    assert {name: sources[name] for name in expected} == expected


def test_options_add_to_those_of_the_recipe(plan):
    recipe = RECIPE.replace("{qos: acc_debug}", "{qos: acc_debug, options: [--exclusive]}")
    written(FULL + "time = '1h'\noptions = ['--dependency=afterok:13']\n", recipe=recipe)
    sources, script = plan("--option=--nice")
    assert "\n#SBATCH --exclusive\n#SBATCH --dependency=afterok:13\n#SBATCH --nice\n" in script
    assert sources["option --exclusive"] == "mine.yaml:3"
    assert sources["option --dependency=afterok:13"] == "imgkit.toml:13"
    assert sources["option --nice"] == "--option"


@pytest.mark.parametrize(
    ("args", "row", "source"),
    [
        ((), "code {}/src", "imgkit.toml:13"),
        (("--code", "other"), "code other", "--code"),
        (("--no-code",), "code ", "--no-code"),
    ],
)
def test_flag_beats_the_folder_of_code(plan, args, row, source):
    write_files(Path(), {"src/train.py": "", "other/train.py": ""})
    written(FULL + "time = '1h'\ncode = 'src'\n")
    sources, script = plan(*args)
    assert sources[row.format(Path().absolute())] == source
    assert ("/.imgkit-code/" in script) == (source != "--no-code")


def test_shell_leaves_the_command_of_the_file_out(plan):
    written(FULL + "time = '1h'\n")
    _, shell = plan("--interactive")
    assert ("--pty" in shell, "dist-hello" in shell) == (True, False), shell
    _, command = plan("--interactive", "--", "dist-pi")
    assert ("--pty" in command, "dist-pi" in command) == (False, True), command


def test_named_recipe_leaves_the_file_out(call):
    written("this is not TOML")
    code, out, err = call("run", "--dry-run", "cpu", "--", "dist-hello")
    assert (code, err) == (0, "")
    assert "dist-hello" in out


def test_plan_of_a_run_says_what_decides(call, plan):
    written(FULL + "time = '1h'\n")
    call("remote", "add", "mn5", "me@far")
    sources, script = plan(on=())
    assert sources["remote mn5"] == "imgkit.toml:2"
    assert sources[f"recipe {Path('mine.yaml').absolute()}"] == "imgkit.toml:3"
    assert sources["group-readable True"] == "imgkit.toml:11"
    assert sources["time 01:00:00"] == "imgkit.toml:12"
    assert '&& mkdir -m 750 "$dir"' in script


def test_run_on_a_remote_keeps_one_file_of_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(RECIPE.replace("queue: {", "queue: {output: separate, "))
    source = ImageSource(
        title="mine",
        target=targets.load_target("./mine.yaml"),
        recipe="./mine.yaml",
        sif=Path("mine.sif"),
        request=JobRequest.of(command=("dist-hello",), account="a", time="1h"),
    )
    (warning,) = source.provisional_job.warnings
    assert warning == "mine.yaml:3: imgkit follows one file of a remote job: joined"
    script = systems.get_system("slurm").script(source.provisional_job).text
    assert "#SBATCH --output=" in script
    assert "--error" not in script


@pytest.mark.parametrize(
    ("flags", "directive", "source"),
    [
        ((), "--mem-per-gpu=100G", "imgkit.toml:2"),
        (("--mem", "320G"), "--mem=320G", "--mem"),
        (("--mem-per-gpu", "90G"), "--mem-per-gpu=90G", "--mem-per-gpu"),
    ],
)
def test_either_flag_replaces_the_memory_of_the_file(call, flags, directive, source):
    written('recipe = "mn5"\nmem_per_gpu = "100G"\n')
    site = ("-A", "a1", "--qos", "q", "--time", "10m")
    code, out, err = call("run", "--dry-run", "-v", *site, *flags, "--", "dist-hello")
    assert code == 0, err
    assert [line for line in out.splitlines() if line.startswith("#SBATCH --mem")] == [f"#SBATCH {directive}"]
    name, _, value = directive.lstrip("-").partition("=")
    assert re.search(rf"^ *{name} +{value} +{source}$", err, re.MULTILINE), err
