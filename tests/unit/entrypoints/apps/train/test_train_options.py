"""The options of dist-train: flags, files of options, the user's functions, resumed runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from imgkit_entrypoints import arguments
from imgkit_entrypoints.apps.train import config as config_module
from imgkit_entrypoints.apps.train import options, plugins
from imgkit_entrypoints.apps.train.config import Config, is_due, parse_interval, steps_per_line, total_steps
from imgkit_entrypoints.errors import UsageError

OWN = """
import torch_that_is_not_there
from elsewhere import borrowed

def model(config): ...
def data(config, split="train", *, cache=True): ...
def step(model, batch, extra): ...
class Net: ...
"""


def read(args: str = "", **env: str) -> Config:
    return options.read_config(args.split(), env)


@pytest.fixture
def plugin_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_defaults_follow_the_model():
    linear, gpt = read(), read("--model gpt")
    assert (linear.optimizer, linear.lr, linear.steps, linear.warmup_steps) == ("sgd", 0.05, 100, 0)
    assert (gpt.optimizer, gpt.lr) == ("adamw", 0.001)
    assert read("--model gpt --lr 1").lr == 1.0
    assert read("--epochs 2").steps is None
    assert read("--model resnet50").warmup_steps == 20
    assert read("--model resnet50 --warmup-steps 0").warmup_steps == 0


def test_run_folder_comes_from_the_job_and_is_not_created(tmp_path):
    assert read().run_dir is None
    assert read(IMGKIT_RUN_DIR="/runs/7").run_dir == Path("/runs/7")
    assert read("--run-dir mine", IMGKIT_RUN_DIR="/runs/7").run_dir == Path("mine")
    assert read("--run-dir mine", IMGKIT_JOB_DIR="/job").run_dir == Path("/job/mine")
    assert read(f"--run-dir {tmp_path}/new/run").run_dir == tmp_path / "new/run"
    assert not any(tmp_path.iterdir())


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "run.json"
    file.write_text('{"lr": 0.5, "batch_size": 8, "clip": null, "deterministic": true}')
    config = read(f"--config {file} --lr 0.25")
    assert (config.lr, config.batch_size, config.clip, config.deterministic) == (0.25, 8, None, True)
    assert not read(f"--config {file} --no-deterministic").deterministic


def test_config_of_a_run_folder_can_be_given_again(tmp_path):
    argv = f"--steps 7 --stop-after 1h30m --save-every 2e --run-dir {tmp_path} --clip 1 --model mlp"
    file = tmp_path / "config.json"
    file.write_text(read(argv).to_json())
    assert read(f"--config {file}") == read(argv)


def test_profile_names_steps_from_one():
    assert list(read("--profile 5:2 --run-dir r").traced_steps()) == [6, 7]


def test_compiling_needs_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(options, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"a compiler \(g\+\+ or clang\+\+\), but PATH has none"):
        read("--compile")
    with pytest.raises(UsageError, match=r"Triton"):
        read("--compile", IMGKIT_DEVICE="cuda")
    (tmp_path / "clang++").touch(mode=0o755)
    assert read("--compile").compile


def test_folder_of_images_needs_pillow(tmp_path, monkeypatch):
    monkeypatch.setattr(config_module, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="reading images needs Pillow"):
        read(f"--model resnet18 --data {tmp_path}")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("50m", 3000), ("1h30m", 5400), ("1h5s", 3605), ("0", 0)]
)
def test_times_are_seconds(text, seconds):
    assert arguments.parse_duration(text) == seconds


@pytest.mark.parametrize("module", ["own.py", "own", "pkg.deep"])
def test_functions_are_found_without_running(plugin_file, module):
    (plugin_file.parent / "pkg").mkdir()
    (plugin_file.parent / "pkg/deep.py").write_text(OWN)
    for name, contract in {
        "model": plugins.MODEL,
        "data": plugins.DATA,
        "borrowed": plugins.DATA,
        "Net": plugins.MODEL,
    }.items():
        assert plugins.check(f"{module}:{name}", contract) == f"{module}:{name}"


def test_failing_import_is_reported(plugin_file):
    for function in ("own.py:model", "own.py:data"):  # a failed import leaves no module behind
        with pytest.raises(UsageError, match="No module named 'torch_that_is_not_there'") as caught:
            plugins.load(function, plugins.MODEL)
        assert caught.value.where == function


def test_one_file_is_imported_once(plugin_file):
    plugin_file.write_text(
        "state = []\ndef model(config): return state\ndef data(config, split): return state\n"
    )
    model, data = plugins.load("own.py:model", plugins.MODEL), plugins.load("own.py:data", plugins.DATA)
    assert model(None) is data(None, "train")


def test_resumed_run_keeps_its_options_or_is_refused_key_by_key():
    saved = json.loads(read("--global-batch 64").to_json())
    config, changes = read("--lr 0.5 --steps 9").merge_saved(saved, Path("s"))
    assert config.global_batch == 64
    assert changes == ["lr was 0.05, now 0.5"]
    with pytest.raises(UsageError) as caught:
        read("--seed 1 --global-batch 32").merge_saved(saved, Path("s"))
    assert "seed is 1, the checkpoint has 0" in caught.value.what
    assert "global_batch is 32, the checkpoint has 64" in caught.value.what
    assert "lr" not in caught.value.what


def test_run_ends_at_what_comes_first():
    both = read("--steps 100 --epochs 3")
    assert (total_steps(both, 10), total_steps(both, 50)) == (30, 100)
    assert (parse_interval("25", 10), parse_interval("2e", 10), parse_interval("0", 10)) == (25, 20, 0)
    assert [step for step in range(1, 9) if is_due(step, 3, steps=8)] == [3, 6, 8]
    assert [step for step in range(1, 9) if is_due(step, 0, steps=8)] == [8]


@pytest.mark.parametrize(("steps", "line"), [(1, 1), (25, 2), (100, 10), (4999, 200), (10**6, 1000)])
def test_lines_come_at_a_round_tenth(steps, line):
    assert steps_per_line(steps) == line


@pytest.mark.usefixtures("plugin_file")
@pytest.mark.parametrize(
    "args",
    [
        "--momentum 0.9 --weight-decay 0.1",
        "--model gpt --optimizer sgd --momentum 0.9",
        "--amp bf16 --dtype fp32",
        "--data own.py:data --model own.py:model --samples 9 --image-size 64",
        "--keep 3 --save-every 10 --log-to own.py:model --run-dir r --ignore-checkpoints",
        "--save-every 0 --keep 2",
    ],
)
def test_options_that_belong_together_are_read(args):
    assert options.parse_options(args.split(), {})
    assert options.parse_options(["--keep", "9"], {"IMGKIT_RUN_DIR": "r"})
