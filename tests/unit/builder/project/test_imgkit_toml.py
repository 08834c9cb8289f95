"""imgkit.toml: where it is looked for, and what decides each value of a job."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.jobs import systems
from imgkit_builder.jobs.image_source import ImageSource
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.project import toml_file
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
PLAN = JobRequest.of(command=("dist-hello",), account="a", time="1h")
RECIPE = "extends: mn5\nsystem:\n  queue: {qos: acc_debug}\n"


@pytest.fixture
def call(call: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``call("run", "--dry-run")`` in an empty folder with a blank."""
    (home / "a b").mkdir()
    monkeypatch.chdir(home / "a b")
    return call


def written(text: str, folder: Path = Path()) -> Path:
    file = folder / toml_file.NAME
    file.write_text(text)
    return file.absolute()


def test_every_key_is_read_with_its_line(tmp_path: Path) -> None:
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
    assert {key: position.line for key, position in project.positions.items()} == {
        "remote": 2,
        "recipe": 3,
        "account": 4,
        "nodes": 5,
        "binds": 6,
        "env": 9,
        "command": 10,
        "group_readable": 11,
    }


def test_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        toml_file.read_file(written("\n" * 501, tmp_path))
    assert caught.value.what == "cannot be read: it has more than 500 lines"


def test_nearest_file_of_the_repository_counts(tmp_path: Path) -> None:
    below = tmp_path / "repository/src/deep"
    below.mkdir(parents=True)
    written("account = 'outside'", tmp_path)
    top = written("account = 'top'", tmp_path / "repository")
    assert toml_file.find_file(below) is None  # no repository: a file above says nothing
    (tmp_path / "repository/.git").mkdir()
    assert toml_file.find_file(below) == top
    nearer = written("account = 'nearer'", tmp_path / "repository/src")
    assert toml_file.find_file(below) == nearer


def sources(out: str) -> dict[str, tuple[str, str]]:
    return {f"{row['name']} {row['value']}": row["source"] for row in json.loads(out)["values"]}


def test_flag_beats_the_file_which_beats_the_recipe(call: Any) -> None:
    Path("mine.yaml").write_text(RECIPE)
    written(FULL)
    flags = ("--time", "1h", "--env", "A=2", "--bind", "/x")
    code, out, err = call("run", "--on", "here", "--dry-run", "-v", "--json", *flags, "--", "dist-pi")
    assert (code, err) == (0, "imgkit: values from imgkit.toml\n")
    origins = sources(out)
    assert origins["account bsc98"] == "imgkit.toml:4"
    assert origins["nodes 2"] == "imgkit.toml:5"
    assert origins["qos acc_debug"] == "mine.yaml:3"
    assert origins["gpus 4"].startswith("mn5.yaml:")
    assert origins["time 01:00:00"] == "--time"
    assert origins["bind /gpfs/a = b"] == "imgkit.toml:6"
    assert origins["bind /x"] == "--bind"
    assert origins["env A=2"] == "--env"
    assert "env A=1" not in origins
    assert origins["env HOME (with its value from here)"] == "imgkit.toml:9"
    assert origins["command dist-pi"] == "--"
    assert origins["name mine"] == "default"


def test_options_add_to_those_of_the_recipe(call: Any) -> None:
    Path("mine.yaml").write_text(
        RECIPE.replace("{qos: acc_debug}", "{qos: acc_debug, options: [--exclusive]}")
    )
    written(FULL + "time = '1h'\noptions = ['--dependency=afterok:13']\n")
    code, out, _ = call("run", "--on", "here", "--dry-run", "-v", "--json", "--option=--nice")
    assert code == 0
    lines = "\n#SBATCH --exclusive\n#SBATCH --dependency=afterok:13\n#SBATCH --nice\n"
    assert lines in json.loads(out)["script"]
    origins = sources(out)
    assert origins["option --exclusive"] == "mine.yaml:3"
    assert origins["option --dependency=afterok:13"] == "imgkit.toml:13"
    assert origins["option --nice"] == "--option"


def test_flag_beats_the_folder_of_code(call: Any) -> None:
    Path("mine.yaml").write_text(RECIPE)
    for folder in ("src", "other"):
        Path(folder).mkdir()
        Path(folder, "train.py").touch()
    written(FULL + "time = '1h'\ncode = 'src'\n")
    for args, row, source in (
        ((), f"code {Path('src').absolute()}", "imgkit.toml:13"),
        (("--code", "other"), "code other", "--code"),
        (("--no-code",), "code ", "--no-code"),
    ):
        code, out, err = call("run", "--on", "here", "--dry-run", "-v", "--json", *args)
        assert code == 0, err
        assert sources(out)[row] == source


def test_script_of_a_project_lays_its_code_over_the_image(call: Any) -> None:
    Path("mine.yaml").write_text(RECIPE)
    Path("src").mkdir()
    Path("src/train.py").write_text("print(1)\n")
    written(FULL + "time = '1h'\ncode = 'src'\n")
    assert "/.imgkit-code/" in call("run", "--on", "here", "--dry-run")[1]
    assert "/.imgkit-code/" not in call("run", "--on", "here", "--dry-run", "--no-code")[1]


def test_shell_leaves_the_command_of_the_file_out(call: Any) -> None:
    Path("mine.yaml").write_text(RECIPE)
    written(FULL + "time = '1h'\n")
    shell = call("run", "--on", "here", "--dry-run", "--interactive")[1]
    assert ("--pty" in shell, "dist-hello" in shell) == (True, False), shell
    command = call("run", "--on", "here", "--dry-run", "--interactive", "--", "dist-pi")[1]
    assert ("--pty" in command, "dist-pi" in command) == (False, True), command


def test_named_recipe_leaves_the_file_out(call: Any) -> None:
    written("this is not TOML")
    code, out, err = call("run", "--dry-run", "cpu", "--", "dist-hello")
    assert (code, err) == (0, "")
    assert "dist-hello" in out


def test_plan_of_a_run_says_what_decides(call: Any) -> None:
    Path("mine.yaml").write_text(RECIPE)
    written(FULL + "time = '1h'\n")
    call("remote", "add", "mn5", "me@far")
    code, out, _ = call("run", "--dry-run", "-v", "--json")
    assert code == 0
    origins = sources(out)
    assert origins["remote mn5"] == "imgkit.toml:2"
    assert origins[f"recipe {Path('mine.yaml').absolute()}"] == "imgkit.toml:3"
    assert origins["group-readable True"] == "imgkit.toml:11"
    assert origins["time 01:00:00"] == "imgkit.toml:12"
    assert '&& mkdir -m 750 "$dir"' in call("run", "--dry-run")[1]


def test_run_on_a_remote_keeps_one_file_of_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(RECIPE.replace("queue: {", "queue: {output: separate, "))
    source = ImageSource(
        title="mine",
        target=targets.load_target("./mine.yaml"),
        recipe="./mine.yaml",
        sif=Path("mine.sif"),
        request=PLAN,
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
def test_either_flag_replaces_the_memory_of_the_file(
    call: Any, flags: tuple[str, ...], directive: str, source: str
) -> None:
    written('recipe = "mn5"\nmem_per_gpu = "100G"\n')
    site = ("-A", "a1", "--qos", "q", "--time", "10m")
    code, out, err = call("run", "--dry-run", "-v", *site, *flags, "--", "dist-hello")
    assert code == 0, err
    assert [line for line in out.splitlines() if line.startswith("#SBATCH --mem")] == [f"#SBATCH {directive}"]
    name, _, value = directive.lstrip("-").partition("=")
    assert re.search(rf"^ *{name} +{value} +{source}$", err, re.MULTILINE), err
