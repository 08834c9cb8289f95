"""imgkit.toml: where it is looked for, its faults with their places, and what decides each value of a job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.job import systems
from imgkit_builder.job.request import Request
from imgkit_builder.project import confirm, toml_file
from imgkit_builder.project.confirm import ForeignValues
from imgkit_builder.project.toml_file import ProjectValues
from imgkit_builder.recipe import targets
from imgkit_builder.recipe.targets import Target
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
    """``call("submit", "--dry-run")`` in an empty folder with a blank."""
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
        ("time = 00:30:00", "1:1", 'time: must be text, not a date or time; quote it: "00:30:00"'),
        ("nodes = true", "1:1", "nodes: must be text, not true or false"),
        ("nodes = '4:2'", "1:1", "nodes: '4:2' is not a range MIN:MAX"),
        ("env = {A = '1'}", "1:1", "env: must be a list of strings, not a table"),
        ("env = ['A=1',\n 2]", "1:1", "env[1]: must be text, not an integer"),
        ("env = ['1A=1']", "1:1", "env[0]: '1A=1' is not a variable"),
        ("env = ['OMP_NUM_THREADS=$(( $(nproc)/4 ))']", "1:1", "env[0]: $((...)) is not executed"),
        ("env = ['API_TOKEN=x9f83hf83hf8']", "1:1", "API_TOKEN holds a secret"),
        ("command = 'dist-hello'", "1:1", "command: must be a list of strings, not text"),
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
    assert toml_file.find(below) is None  # no repository: a file above says nothing
    (tmp_path / "repository/.git").mkdir()
    found = toml_file.find(below)
    assert found is not None
    assert found.file == top
    nearer = written("account = 'nearer'", tmp_path / "repository/src")
    found = toml_file.find(below)
    assert found is not None
    assert found.file == nearer


def sources(out: str) -> dict[str, tuple[str, str]]:
    return {f"{row['name']} {row['value']}": row["source"] for row in json.loads(out)["values"]}


def test_flag_beats_the_file_which_beats_the_recipe(call: Any) -> None:
    Path("mine.yaml").write_text(RECIPE)
    written(WHOLE)
    flags = ("--time", "1h", "--env", "A=2", "--bind", "/x")
    code, out, err = call("submit", "--dry-run", "-v", "--json", *flags, "--", "dist-pi")
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
        code, out, err = call("submit", "--dry-run", "-v", "--json", *words)
        assert code == 0, err
        assert sources(out)[row] == source
    code, _, err = call("submit", "--dry-run", "--code", "src", "--no-code")
    assert code == 2
    assert "--code cannot be combined with --no-code" in err


def test_script_of_a_project_lays_its_code_over_the_image(call: Any) -> None:
    Path("mine.yaml").write_text(RECIPE)
    Path("src").mkdir()
    Path("src/train.py").write_text("print(1)\n")
    written(WHOLE + "time = '1h'\ncode = 'src'\n")
    assert "/deltas/code-" in call("submit", "--dry-run")[1]
    assert "/deltas/code-" not in call("submit", "--dry-run", "--no-code")[1]
    code, out, err = call("submit", "--dry-run", "--sif", "mine.tar")  # runs neither the command nor the code
    assert (code, "/deltas/code-" in out) == (0, False), err
    code, _, err = call("submit", "--dry-run", "--code", "absent")
    assert code == 2
    assert "--code absent: no such directory" in err


def test_missing_value_names_the_line_that_takes_it(call: Any) -> None:
    Path("mine.yaml").write_text(RECIPE.replace("acc_debug", '""'))
    written(WHOLE.replace('"bsc98"', '""') + "time = '1h'\n")
    code, _, err = call("submit", "--dry-run")
    assert code == 2
    assert "needs --account, --qos" in err
    assert (
        'set account = "..." in imgkit.toml:4, qos = "..." in imgkit.toml; or add --account ... --qos ...'
        in err
    )
    code, _, err = call("submit", "--dry-run", "mine.yaml", "--time", "1h", "--", "dist-hello")
    assert "add --account ... --qos ..., or set it in a recipe that extends mine" in err


def test_named_recipe_leaves_the_file_out(call: Any) -> None:
    written("this is not TOML")
    code, out, err = call("submit", "--dry-run", "cpu", "--", "dist-hello")
    assert (code, err) == (0, "")
    assert "dist-hello" in out


def test_job_without_any_recipe_is_refused(call: Any) -> None:
    code, _, err = call("submit", "--dry-run", "--", "dist-hello")
    assert code == 2
    assert "no recipe given, and none set by an imgkit.toml here" in err


def test_run_without_a_remote_names_those_there_are(call: Any) -> None:
    assert call("run", "--", "dist-hello")[2].endswith("-> imgkit remote add NAME USER@HOST:DIR\n")
    call("remote", "add", "far", "me@far")
    assert call("run", "--", "dist-hello")[2].endswith("-> --on NAME; there are: far\n")


def test_plan_of_a_run_says_what_decides(call: Any) -> None:
    Path("mine.yaml").write_text(RECIPE)
    written(WHOLE + "time = '1h'\n")
    call("remote", "add", "mn5", "me@far")
    code, out, _ = call("run", "--dry-run", "--json")
    assert code == 0
    found = sources(out)
    assert found["remote mn5"] == "imgkit.toml:2"
    assert found[f"recipe {Path('mine.yaml').absolute()}"] == "imgkit.toml:3"
    assert found["time 01:00:00"] == "imgkit.toml:11"


def test_run_on_a_remote_keeps_one_file_of_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(RECIPE.replace("queue: {", "queue: {output: separate, "))
    plan = RunPlan(
        word="mine",
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


def test_foreign_values_wait_for_a_person(call: Any) -> None:
    Path("mine.yaml").write_text(RECIPE)
    file = written(WHOLE + "time = '1h'\n")
    call("remote", "add", "mn5", "me@far")
    code, out, err = call("run")
    assert (code, out) == (2, "")
    assert "these values are not confirmed on this machine" in err
    for shown in (
        "remote   mn5",
        "env      A=1\n",
        "env      HOME (with its value from here)",
        "bind     /gpfs/a = b",
        "command  dist-hello",
    ):
        assert shown in err
    digest = err.rpartition("--confirm ")[2].strip()
    assert "are not confirmed" in call("run", "--confirm", digest[:-1] + "x")[2]
    assert digest == foreign(file).digest
    foreign(file).remember()
    file.write_text(file.read_text().replace("nodes = 2", "nodes = 1"))
    assert foreign(file).is_known  # nodes harm nobody
    for before, after in (("HOME", "HOME2"), ("nodes", "code = 'src'\nnodes")):
        file.write_text(file.read_text().replace(before, after))
        assert not foreign(file).is_known
        foreign(file).remember()
    assert ("code", "src") in foreign(file).shown


def foreign(file: Path) -> ForeignValues:
    """What the file and its recipe decide."""
    project = toml_file.read(file)
    return confirm.of_job(project, [targets.find(project.recipe)], stated=True)


def test_file_with_nothing_to_confirm_asks_nothing(tmp_path: Path) -> None:
    assert ForeignValues(file=tmp_path, toml=ProjectValues(account="x", nodes="2")).is_known


FAKE = "#!/bin/sh\n# A fake sbatch.\ncat > /dev/null\necho x >> started\necho 4711\n"
PLAIN = "recipe = './mine.yaml'\naccount = 'a'\nqos = 'acc_debug'\ntime = '10m'\ncommand = ['dist-hello']\n"
MINE = """\
extends: ./base.yaml
image:
  secrets: [{id: token, env: TOKEN}]
  pip: [{packages: [einops], secrets: [token]}]
"""
BASE = """\
extends: mn5
system:
  runtime: {command: singularity, binds: [/data], options: [--no-home], modules: [mine]}
  env: {NCCL_DEBUG: INFO}
  queue: {options: [--exclusive]}
"""


@pytest.fixture
def cloned(call: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``cloned("submit")`` in the folder of a stranger, with a fake sbatch."""
    for name, text in {"mine.yaml": MINE, "base.yaml": BASE}.items():
        Path(name).write_text(text)
    for name in ("bin", "mine.sif"):
        Path(name).mkdir()
    Path("bin/sbatch").write_text(FAKE)
    Path("bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:{os.environ['PATH']}")
    written(PLAIN)
    return call


def asked(call: Any, *words: str) -> str:
    """The digest that a refused submission names."""
    code, out, err = call("submit", *words)
    assert (code, out) == (2, ""), err
    assert "these values are not confirmed on this machine" in err
    return str(err.rpartition("--confirm ")[2].strip())


def test_what_a_recipe_starts_and_mounts_waits_for_a_person(cloned: Any) -> None:
    err = cloned("submit")[2]
    for shown in (
        "command  dist-hello",
        "recipe   image.secrets[0]: the variable TOKEN",
        "recipe   system.env.NCCL_DEBUG: INFO",
        "recipe   system.queue.options[0]: --exclusive",
        "recipe   system.runtime.binds[0]: /data",
        "recipe   system.runtime.command: singularity",
        "recipe   system.runtime.modules[1]: mine",
        "recipe   system.runtime.options[1]: --no-home",
    ):
        assert f"  {shown}\n" in err
    assert "modules[0]" not in err  # the shipped recipe states it
    assert "runtime.kind" not in err
    assert not Path("started").exists()
    code, out, _ = cloned("submit", "--confirm", asked(cloned))
    assert (code, out) == (0, "4711\n")
    assert cloned("submit")[0] == 0


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("base.yaml", "/data", "/home"),
        ("base.yaml", "command: singularity", "command: ./singularity"),
        ("base.yaml", "[mine]", "[mine, other]"),
        ("base.yaml", "--no-home", "--writable"),
        ("base.yaml", "NCCL_DEBUG: INFO", "LD_PRELOAD: /x.so"),
        ("base.yaml", "--exclusive", "--uenv=x"),
        ("base.yaml", "system:", "system:\n  scheduler: slurm"),
        ("mine.yaml", "env: TOKEN", "file: ~/.netrc"),
        ("mine.yaml", "image:", "system: {runtime: {host_libs: [/x]}}\nimage:"),
    ],
)
def test_changed_recipe_of_a_known_folder_is_asked_for_again(
    cloned: Any, file: str, before: str, after: str
) -> None:
    cloned("submit", "--confirm", asked(cloned))
    text = Path(file).read_text()
    assert before in text
    Path(file).write_text(text.replace(before, after))
    again = asked(cloned)
    assert not Path("started").read_text().count("x") > 1
    assert cloned("submit", "--confirm", again)[0] == 0


def test_other_changes_of_a_known_folder_ask_nothing(cloned: Any) -> None:
    cloned("submit", "--confirm", asked(cloned))
    mine = Path("mine.yaml")
    mine.write_text(
        f"# a note\n{mine.read_text()}".replace("einops", "numpy").replace("image:", "image:\n  apt: [git]")
    )
    assert cloned("submit")[0] == 0
    written(PLAIN.replace("10m", "20m"))
    assert cloned("submit")[0] == 0


@pytest.mark.parametrize("word", ["./mine.yaml", "../link.yaml", "mine.json"])
def test_named_recipe_in_such_a_folder_is_asked_for(cloned: Any, word: str) -> None:
    Path("../link.yaml").symlink_to(Path("base.yaml").absolute())
    Path("mine.json").write_text(cloned("show", "./mine.yaml", "--json")[1])
    flags = ("-A", "a", "--qos", "q", "--time", "10m", "--image", "mine.sif", "--", "dist-hello")
    err = cloned("submit", word, *flags)[2]
    assert "system.runtime.binds[0]: /data" in err
    assert ("image.secrets[0]: the variable TOKEN" in err) == (word != "../link.yaml")
    # JSON can claim that its values are those of a shipped recipe.
    assert ("system.runtime.modules[0]: singularity" in err) == (word == "mine.json")
    assert cloned("submit", word, "--confirm", asked(cloned, word, *flags), *flags)[0] == 0
    Path("imgkit.toml").unlink()  # a person's own recipe
    Path("base.yaml").write_text(BASE.replace("/data", "/home"))
    assert cloned("submit", "./mine.yaml", *flags)[0] == 0


def test_system_of_an_image_counts_as_a_whole(tmp_path: Path) -> None:
    image = Target(name="x", system=targets.find("mn5").system, platforms=(), file=tmp_path / "x.sif")
    assert confirm.of_job(None, [image], stated=False).is_known  # in no folder with an imgkit.toml
    found = dict(confirm.of_job(None, [image], stated=True).recipe)
    assert found["system.runtime.modules[0]"] == "singularity"
    assert found["system.queue.sif[0]"] == "--qos=gp_debug"
    assert "system.runtime.command" not in found  # the default


def test_run_asks_for_what_the_recipe_mounts(cloned: Any) -> None:
    cloned("remote", "add", "far", "me@far")
    for words in (("--on", "far"), ("./mine.yaml", "--on", "far")):
        code, _, err = cloned("run", *words)
        assert (code, "system.runtime.binds[0]: /data" in err) == (2, True)


def test_job_that_builds_shows_the_other_recipe(cloned: Any) -> None:
    flags = ("-A", "a", "--qos", "gp_debug", "--time", "1h", "--build", "./mine.yaml")
    code, _, err = cloned("submit", "mn5", *flags)
    assert (code, "image.secrets[0]: the variable TOKEN" in err) == (2, True)
