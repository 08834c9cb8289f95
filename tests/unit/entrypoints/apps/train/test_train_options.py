"""The options of dist-train: flags, files of options, the user's functions, resumed runs."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import pytest

from imgkit_entrypoints import arguments
from imgkit_entrypoints.apps.train import config as config_module
from imgkit_entrypoints.apps.train import options, plugins
from imgkit_entrypoints.apps.train.config import due, every, steps_per_line, total_steps
from imgkit_entrypoints.cli import start
from imgkit_entrypoints.cli.commands import COMMANDS
from imgkit_entrypoints.errors import UsageError

OWN = """
import torch_that_is_not_there
from elsewhere import borrowed

def model(config): ...
def data(config, split="train", *, cache=True): ...
def step(model, batch, extra): ...
class Net: ...
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_defaults_follow_the_model() -> None:
    linear, gpt = options.read([], {}), options.read(["--model", "gpt"], {})
    assert (linear.optimizer, linear.lr, linear.steps) == ("sgd", 0.05, 100)
    assert (gpt.optimizer, gpt.lr) == ("adamw", 0.001)
    assert options.read(["--model", "gpt", "--lr", "1"], {}).lr == 1.0
    assert options.read(["--epochs", "2"], {}).steps is None
    resnet = ["--model", "resnet50"]
    assert (linear.warmup_steps, options.read(resnet, {}).warmup_steps) == (0, 20)
    assert options.read([*resnet, "--warmup-steps", "0"], {}).warmup_steps == 0


def test_run_folder_comes_from_the_job() -> None:
    assert options.read([], {}).run_dir is None
    assert options.read([], {"IMGKIT_RUN_DIR": "/runs/7"}).run_dir == Path("/runs/7")
    assert options.read(["--run-dir", "mine"], {"IMGKIT_RUN_DIR": "/runs/7"}).run_dir == Path("mine")
    assert options.read(["--run-dir", "mine"], {"IMGKIT_JOB_DIR": "/job"}).run_dir == Path("/job/mine")
    assert options.read(["--run-dir", "/a"], {"IMGKIT_JOB_DIR": "/job"}).run_dir == Path("/a")


def test_run_folder_that_no_run_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/below", "x" * 300):
        with pytest.raises(UsageError, match="the run folder cannot be written") as caught:
            options.check(["--run-dir", str(tmp_path / name)], {})
        assert caught.value.where == str(tmp_path / name)
    assert options.read(["--run-dir", str(tmp_path / "new/run")], {}).run_dir == tmp_path / "new/run"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # nothing is made


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"lr": 0.5, "batch_size": 8, "clip": null, "deterministic": true}')
    config = options.read(["--config", str(file), "--lr", "0.25"], {})
    assert (config.lr, config.batch_size, config.clip, config.deterministic) == (0.25, 8, None, True)
    assert not options.read(["--config", str(file), "--no-deterministic"], {}).deterministic


def test_kept_config_can_be_given_again(tmp_path: Path) -> None:
    words = ["--steps", "7", "--stop-after", "1h30m", "--save-every", "2e", "--run-dir", str(tmp_path)]
    config = options.read([*words, "--clip", "1", "--model", "mlp"], {})
    file = tmp_path / "config.json"
    file.write_text(config.to_json())
    assert options.read(["--config", str(file)], {}) == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"lr": "fast"}', "'fast' is not a number"),
        ('{"learning_rate": 1}', "--learning-rate=1"),
        ('{"config": "run.json"}', "names another file with `config`"),
        ("[1]", "contains no table"),
        ("{", "Expecting"),
        (None, "No such file"),
    ],
)
def test_wrong_file_is_refused_like_flags(
    tmp_path: Path, text: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit):
        options.read(["--config", str(file)], {})
    message = capsys.readouterr().err
    assert said in message
    assert str(file) in message


def test_all_errors_of_a_file_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"lr": "fast", "steps": 0, "epochs": 3, "model": "resnet19", "learning_rate": 1}')
    with pytest.raises(SystemExit):
        options.read(["--config", str(file)], {})
    message = capsys.readouterr().err
    for said in (
        "'fast' is not a number",
        "'0' is not a whole",
        "'resnet19' is neither",
        "--learning-rate=1",
    ):
        assert said in message
    assert "epochs" not in message.split(str(file), 1)[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "-1"], "'-1' is not a number of at least 0"),
        (["--lr", "nan"], "not a number"),
        (["--save-every", "0e"], "neither a number of steps (500) nor of epochs"),
        (["--stop-after", "soon"], "is not a time"),
        (["--stop-after", ""], "is not a time"),
        (["--model", "resnet19"], "neither one of gpt, linear, mlp, resnet18, resnet50"),
        (["--data", "no-such-file"], "def FN(config, split)"),
        (["--on-nan", "cry"], "invalid choice: 'cry'"),
        (["--amp", "fp8"], "invalid choice: 'fp8'"),
        (["--profile", "5"], "is not START:STEPS"),
        (["--profile", "5:0"], "is not START:STEPS"),
        (["--eval-every", "-1"], "neither a number of steps"),
    ],
)
def test_wrong_values_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options.read(words, {})
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_traces_need_a_run_folder() -> None:
    with pytest.raises(UsageError, match="--run-dir"):
        options.read(["--profile", "5:2"], {})
    config = options.read(["--profile", "5:2", "--run-dir", "r"], {})
    assert list(config.profiled()) == [6, 7]


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(options, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"a compiler \(g\+\+ or clang\+\+\), but PATH has none"):
        options.read(["--compile"], {})
    with pytest.raises(UsageError, match=r"Triton"):
        options.read(["--compile"], {"IMGKIT_DEVICE": "cuda"})
    (tmp_path / "clang++").touch(mode=0o755)
    assert options.read(["--compile"], {}).compile


def test_folder_of_images_needs_pillow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(config_module, "find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        options.read(["--model", "resnet18", "--data", str(tmp_path)], {})
    assert "reading images needs Pillow" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("50m", 3000), ("1h30m", 5400), ("1h5s", 3605), ("0", 0)]
)
def test_times_are_seconds(text: str, seconds: float) -> None:
    assert arguments.duration(text) == seconds


@pytest.mark.parametrize("place", ["own.py", "own", "pkg.deep"])
def test_functions_are_found_without_running(own: Path, place: str) -> None:
    (own.parent / "pkg").mkdir()
    (own.parent / "pkg/deep.py").write_text(OWN)
    assert plugins.check(f"{place}:model", plugins.MODEL) == f"{place}:model"
    plugins.check(f"{place}:data", plugins.DATA)
    plugins.check(f"{place}:borrowed", plugins.DATA)
    plugins.check(f"{place}:Net", plugins.MODEL)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("own.py:modell", "has no function modell; its functions: model, data, step"),
        ("own.py:step", "step does not take 2 positional arguments"),
        ("gone.py:step", "cannot read gone.py: No such file"),
        ("gone.deep:step", "no module gone.deep found"),
        ("own.py:", "not of the form MOD:FN"),
        (":step", "not of the form MOD:FN"),
        ("own.py", "not of the form MOD:FN"),
    ],
)
def test_wrong_function_shows_the_signature(own: Path, text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        plugins.check(text, plugins.STEP)
    assert said in str(caught.value)
    assert "def FN(model, batch)" in str(caught.value)


def test_broken_file_is_refused_with_its_line(own: Path) -> None:
    own.write_text("x = 1\ndef model(config:\n")
    with pytest.raises(argparse.ArgumentTypeError, match=r"own\.py:2"):
        plugins.check("own.py:model", plugins.MODEL)


def test_failing_import_is_told(own: Path) -> None:
    for function in ("own.py:model", "own.py:data"):  # a failed import leaves no module behind
        with pytest.raises(UsageError, match="No module named 'torch_that_is_not_there'") as caught:
            plugins.load(function, plugins.MODEL)
        assert caught.value.where == function


def test_one_file_is_imported_once(own: Path) -> None:
    own.write_text("made = []\ndef model(config): return made\ndef data(config, split): return made\n")
    model, data = plugins.load("own.py:model", plugins.MODEL), plugins.load("own.py:data", plugins.DATA)
    assert model(None) is data(None, "train")


def test_contradicting_run_is_refused_key_by_key() -> None:
    saved = json.loads(options.read(["--global-batch", "64"], {}).to_json())
    with pytest.raises(UsageError) as caught:
        options.read(["--seed", "1", "--global-batch", "32"], {}).resumed(saved, Path("s"))
    assert "seed is 1, the checkpoint has 0" in str(caught.value)
    assert "global_batch is 32, the checkpoint has 64" in str(caught.value)
    assert "lr" not in caught.value.what


def test_going_on_keeps_the_global_batch_and_tells_changes() -> None:
    saved = json.loads(options.read(["--global-batch", "64"], {}).to_json())
    config, changed = options.read(["--lr", "0.5", "--steps", "9"], {}).resumed(saved, Path("s"))
    assert config.global_batch == 64
    assert changed == ("lr was 0.05, now 0.5",)


def test_run_ends_at_what_comes_first() -> None:
    both = options.read(["--steps", "100", "--epochs", "3"], {})
    assert (total_steps(both, 10), total_steps(both, 50)) == (30, 100)
    assert (every("25", 10), every("2e", 10), every("0", 10)) == (25, 20, 0)
    assert [step for step in range(1, 9) if due(step, 3, steps=8)] == [3, 6, 8]
    assert [step for step in range(1, 9) if due(step, 0, steps=8)] == [8]


@pytest.mark.parametrize(("steps", "line"), [(1, 1), (25, 2), (100, 10), (4999, 200), (10**6, 1000)])
def test_lines_come_at_a_round_tenth(steps: int, line: int) -> None:
    assert steps_per_line(steps) == line


def test_logger_that_the_image_lacks_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(own.parent)])
    refused = "no wandb; add it to the recipe: image.pip: "
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(f"{refused}[{{packages: [wandb]}}]")):
        config_module._loggers("wandb")
    (own.parent / "wandb.py").touch()
    assert config_module._loggers("wandb") == "wandb"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mlflow", "neither one of"),
        ("own.py:step", "positional"),
        ("own.py:model,", "''"),
        ("wandb", r"the image has no wandb; add it to the recipe: image.pip: \[{packages: \[wandb\]}\]"),
    ],
)
def test_unusable_logger_is_refused(own: Path, text: str, why: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=why):
        config_module._loggers(text)


def test_loggers_need_a_run_folder(own: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--log-to would have no effect without a run folder \(--run-dir DIR\)"
    ):
        options.read(["--log-to", "own.py:model"], {})
    assert options.read(["--log-to", "own.py:model", "--run-dir", "r"], {}).log_to == "own.py:model"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--optimizer adam --momentum 0.9", "--momentum would have no effect without --optimizer sgd"),
        ("--model gpt --momentum 0.9", "--momentum would have no effect without --optimizer sgd"),
        ("--amp bf16 --dtype fp64", "--amp would have no effect with --dtype fp64"),
        ("--model gpt --data own.py --samples 9", "--samples would have no effect without built-in data"),
        ("--model resnet18 --image-size 64", "--image-size would have no effect without a folder of images"),
        ("--keep 3 --save-every 10", "--save-every, --keep would have no effect without a run folder"),
        ("--profile 1:2", "--profile would have no effect without a run folder"),
        ("--config run.json", "--momentum would have no effect without --optimizer sgd"),
    ],
)
def test_option_without_effect_is_refused(own: Path, words: str, said: str) -> None:
    Path("run.json").write_text('{"optimizer": "adam", "momentum": 0.9}')
    with pytest.raises(UsageError) as caught:
        options.check(words.split(), {})
    assert said in caught.value.what


def test_launcher_refuses_before_torchrun_starts() -> None:
    words = ("dist-train", "--amp", "bf16", "--dtype", "fp64", "--device", "cpu")
    with pytest.raises(UsageError, match="--amp would have no effect with --dtype fp64"):
        start.parse_app(next(one for one in COMMANDS if one.name == "dist-train"), words, {})


@pytest.mark.parametrize(
    "words",
    [
        "--momentum 0.9 --weight-decay 0.1",
        "--model gpt --optimizer sgd --momentum 0.9",
        "--amp bf16 --dtype fp32",
        "--data own.py:data --model own.py:model --samples 9 --image-size 64",
        "--keep 3 --save-every 10 --run-dir r",
        "--save-every 0 --keep 2",
    ],
)
def test_options_that_belong_together_are_read(own: Path, words: str) -> None:
    assert options.check(words.split(), {})
    assert options.check(["--keep", "9"], {"IMGKIT_RUN_DIR": "r"})
