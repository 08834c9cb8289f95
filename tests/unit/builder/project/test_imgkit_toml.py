"""imgkit.toml: where it is looked for, its faults with their places, and what decides each value of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.job import systems
from imgkit_builder.job.request import Request
from imgkit_builder.project import toml_file
from imgkit_builder.project.toml_file import ProjectValues
from imgkit_builder.recipe import targets
from imgkit_builder.workflow.remote_run import RunPlan
from imgkit_entrypoints.errors import UsageError

WHOLE = """\
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
"""
PLAN = Request(command=("dist-hello",), account="a", time="1h")
RECIPE = "extends: mn5\nsystem:\n  queue: {qos: acc_debug}\n"


@pytest.fixture
def call(call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``call("run", "--dry-run")`` in an empty folder with a blank."""
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    for name in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    return call


def written(text: str, folder: Path = Path()) -> Path:
    file = folder / toml_file.NAME
    file.write_text(text)
    return file.absolute()


def test_every_key_is_read_with_its_line(tmp_path: Path) -> None:
    found = toml_file.read(written(WHOLE, tmp_path))
    assert found.values == ProjectValues(
        remote="mn5",
        recipe="./mine.yaml",
        account="bsc98",
        nodes="2",
        binds=("/gpfs/a = b",),
        env=("A=1", "HOME"),
        command=("dist-hello",),
    )
    assert found.code is None
    assert found.recipe == str(tmp_path / "mine.yaml")
    assert {key: place.line for key, place in found.positions.items()} == {
        "remote": 2,
        "recipe": 3,
        "account": 4,
        "nodes": 5,
        "binds": 6,
        "env": 9,
        "command": 10,
    }


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("acount = 'x'", "1:1", "acount: unknown key; allowed: account"),
        ("\n  [job]\naccount = 'x'", "2:1", "job: unknown key"),
        ("time = 00:30:00", "1:1", 'time: must be text; write "TEXT"'),
        ("nodes = true", "1:1", "nodes: must be text"),
        ("nodes = '4:2'", "1:1", "nodes: '4:2' is a range"),
        ("env = {A = '1'}", "1:1", 'env: must be a list; write ["ONE", "TWO"]'),
        ("env = ['A=1',\n 2]", "1:1", "env[1]: must be text"),
        ("env = ['1A=1']", "1:1", "env[0]: '1A=1' is not a variable"),
        ("env = ['OMP_NUM_THREADS=$(( $(nproc)/4 ))']", "1:1", "env[0]: $((...)) is not executed"),
        ("env = ['API_TOKEN=x9f83hf83hf8']", "1:1", "API_TOKEN holds a secret"),
        ("command = 'dist-hello'", "1:1", "command: must be a list"),
        ('command = ["a\\u001bb"]', "1:1", "command[0]: contains the control character U+001B"),
        ('code = "a\\u001bb"', "1:1", "code: contains the control character U+001B"),
        ("account = 'a b'", "1:1", "account: 'a b' cannot be used in a job"),
        ("binds = ['relative']", "1:1", "binds[0]: "),
        ("remote = 'a'\nremote = 'b'\n", "2:13", "it is not TOML: Cannot overwrite a value"),
        ("\nremote = x\n", "2:10", "it is not TOML: Invalid value; write KEY"),
    ],
)
def test_fault_is_named_with_its_place(tmp_path: Path, text: str, place: str, message: str) -> None:
    file = written(text, tmp_path)
    with pytest.raises(UsageError) as caught:
        toml_file.read(file)
    assert str(caught.value).startswith(f"{file}:{place}: ")
    assert message in str(caught.value)


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"3 problems in imgkit\.toml:"):
        toml_file.read(written("a = 1\nqos = 2\nenv = 3\n", tmp_path))


def test_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="more than 500 lines"):
        toml_file.read(written("\n" * 501, tmp_path))


def test_nearest_file_of_the_repository_counts(tmp_path: Path) -> None:
    below = tmp_path / "repository/src/deep"
    below.mkdir(parents=True)
    written("account = 'outside'", tmp_path)
    top = written("account = 'top'", tmp_path / "repository")
    assert toml_file.locate(below) is None  # no repository: a file above says nothing
    (tmp_path / "repository/.git").mkdir()
    assert toml_file.locate(below) == top
    nearer = written("account = 'nearer'", tmp_path / "repository/src")
    assert toml_file.locate(below) == nearer


def sources(out: str) -> dict[str, tuple[str, str]]:
    return {f"{row['name']} {row['value']}": row["source"] for row in json.loads(out)["values"]}


def test_flag_beats_the_file_which_beats_the_recipe(call: Any) -> None:
    Path("mine.yaml").write_text(RECIPE)
    written(WHOLE)
    flags = ("--time", "1h", "--env", "A=2", "--bind", "/x")
    code, out, err = call("run", "--on", "here", "--dry-run", "-v", "--json", *flags, "--", "dist-pi")
    assert (code, err) == (0, "imgkit: values from imgkit.toml\n")
    found = sources(out)
    assert found["account bsc98"] == "imgkit.toml:4"
    assert found["nodes 2"] == "imgkit.toml:5"
    assert found["qos acc_debug"] == "mine.yaml:3"
    assert found["gpus 4"].startswith("mn5.yaml:")
    assert found["time 01:00:00"] == "--time"
    assert found["bind /gpfs/a = b"] == "imgkit.toml:6"
    assert found["bind /x"] == "--bind"
    assert found["env A=2"] == "--env"
    assert "env A=1" not in found
    assert found["env HOME (with its value from here)"] == "imgkit.toml:9"
    assert found["command dist-pi"] == "--"
    assert found["name mine"] == "default"


def test_flag_beats_the_folder_of_code(call: Any) -> None:
    Path("mine.yaml").write_text(RECIPE)
    for folder in ("src", "other"):
        Path(folder).mkdir()
        Path(folder, "train.py").touch()
    written(WHOLE + "time = '1h'\ncode = 'src'\n")
    for words, row, source in (
        ((), f"code {Path('src').absolute()}", "imgkit.toml:12"),
        (("--code", "other"), "code other", "--code"),
        (("--no-code",), "code ", "--no-code"),
    ):
        code, out, err = call("run", "--on", "here", "--dry-run", "-v", "--json", *words)
        assert code == 0, err
        assert sources(out)[row] == source
    code, _, err = call("run", "--on", "here", "--dry-run", "--code", "src", "--no-code")
    assert code == 2
    assert "--code cannot be combined with --no-code" in err


def test_script_of_a_project_lays_its_code_over_the_image(call: Any) -> None:
    Path("mine.yaml").write_text(RECIPE)
    Path("src").mkdir()
    Path("src/train.py").write_text("print(1)\n")
    written(WHOLE + "time = '1h'\ncode = 'src'\n")
    assert "/.imgkit-code/" in call("run", "--on", "here", "--dry-run")[1]
    assert "/.imgkit-code/" not in call("run", "--on", "here", "--dry-run", "--no-code")[1]
    # A conversion runs neither the command nor the code.
    code, out, err = call("run", "--on", "here", "--dry-run", "--sif", "mine.tar")
    assert (code, "/.imgkit-code/" in out) == (0, False), err
    code, _, err = call("run", "--on", "here", "--dry-run", "--code", "absent")
    assert code == 2
    assert "--code absent: no such directory" in err


def test_missing_value_names_the_line_that_takes_it(call: Any) -> None:
    Path("mine.yaml").write_text(RECIPE.replace("acc_debug", '""'))
    written(WHOLE.replace('"bsc98"', '""') + "time = '1h'\n")
    code, _, err = call("run", "--on", "here", "--dry-run")
    assert code == 2
    assert "needs --account, --qos" in err
    assert (
        'set account = "..." in imgkit.toml:4, qos = "..." in imgkit.toml; or add --account ... --qos ...'
        in err
    )
    code, _, err = call("run", "--dry-run", "mine.yaml", "--time", "1h", "--", "dist-hello")
    assert "add --account ... --qos ..., or set it in a recipe that extends mine" in err


def test_named_recipe_leaves_the_file_out(call: Any) -> None:
    written("this is not TOML")
    code, out, err = call("run", "--dry-run", "cpu", "--", "dist-hello")
    assert (code, err) == (0, "")
    assert "dist-hello" in out


def test_job_without_any_recipe_is_refused(call: Any) -> None:
    code, _, err = call("run", "--dry-run", "--", "dist-hello")
    assert code == 2
    assert "no recipe given, and none set by an imgkit.toml here" in err


def test_plan_of_a_run_says_what_decides(call: Any) -> None:
    Path("mine.yaml").write_text(RECIPE)
    written(WHOLE + "time = '1h'\n")
    call("remote", "add", "mn5", "me@far")
    code, out, _ = call("run", "--dry-run", "-v", "--json")
    assert code == 0
    found = sources(out)
    assert found["remote mn5"] == "imgkit.toml:2"
    assert found[f"recipe {Path('mine.yaml').absolute()}"] == "imgkit.toml:3"
    assert found["time 01:00:00"] == "imgkit.toml:11"


def test_run_on_a_remote_keeps_one_file_of_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(RECIPE.replace("queue: {", "queue: {output: separate, "))
    plan = RunPlan(
        source="mine",
        target=targets.find("./mine.yaml"),
        recipe="./mine.yaml",
        sif=Path("mine.sif"),
        request=PLAN,
    )
    (told,) = plan.early.warnings
    assert told == "mine.yaml:3: imgkit follows one file of a remote job: joined"
    script = systems.named("slurm").script(plan.early).text
    assert "#SBATCH --output=" in script
    assert "--error" not in script
