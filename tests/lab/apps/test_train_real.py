"""dist-train on real ranks in the stand-in image: resumed bitwise, stopped, damaged, misused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from labkit import ROOT, Done, in_image
from torchkit import run_script

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all runs of this file write to."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copy(Path(__file__).with_name("train_plugins.py"), folder / "own.py")
    shutil.copy(ROOT / "examples/own_model.py", folder)
    return folder


def output_of(result: Done) -> str:
    """What a command printed, which must not fail."""
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    return output


def many(standin: str, runs: Path, script: str) -> str:
    """Run the Python `script`, in which ``train(RANKS, "ARGS")`` is a run without a launcher."""
    return output_of(run_script(standin, runs, "train_many", script))


LAUNCHED = """
train() { exec python3 -I -m imgkit_entrypoints dist-train --device cpu "$@"; }
code() { if ("$@"); then echo "exit code 0"; else echo "exit code $?"; fi; }
"""


def launched(standin: str, runs: Path, script: str) -> str:
    """Run the shell `script`, in which ``train`` is the whole command, with torchrun."""
    options = ("--volume", f"{runs}:/runs", "--workdir", "/runs")
    return output_of(in_image(standin, "bash", "-euc", LAUNCHED + script, options=options))


@pytest.mark.parametrize("world_sizes", [(3,), pytest.param((1, 2, 4), marks=pytest.mark.soak)])
def test_resumed_run_is_bitwise_the_same(standin, runs, world_sizes):
    # Several gradient buckets, dropout, and 3 epochs that each end with a short step.
    script = """
words = "--model gpt --samples 20 --global-batch 12"
for n in WORLD_SIZES:
    assert train(n, f"{words} --steps 7 --run-dir whole{n}") == 0
    assert train(n, f"{words} --steps 4 --run-dir cut{n}") == 0
    assert train(n, f"{words} --steps 7 --run-dir cut{n}") == 0
    same(f"whole{n}", f"cut{n}")
    drawn = [rank["random"]["now"]["torch"] for rank in states(f"whole{n}")["ranks"]]
    assert len(drawn) == n
    assert not torch.equal(drawn[0], drawn[-1]) or n == 1
"""
    output = many(standin, runs, script.replace("WORLD_SIZES", str(world_sizes)))
    assert output.count("resumes after step 4 of 7") == len(world_sizes)


def test_data_workers_change_nothing(standin, runs):
    # Samples that are random at every reading, and BatchNorm, whose buffers count too.
    script = """
words = "--model own.py:model --data own.py:data --batch-size 4 --momentum 0.9 --clip 1"
assert train(2, f"{words} --steps 9 --run-dir alone") == 0
assert train(2, f"{words} --steps 5 --run-dir fetched --workers 2") == 0
assert train(2, f"{words} --steps 9 --run-dir fetched --workers 2") == 0
same("alone", "fetched", "weights", "optimizer")
"""
    assert "resumes after step 5 of 9" in many(standin, runs, script)


def test_batches_of_rows_equal_single_samples(standin, runs):
    script = """
for count in (1, 2):
    words = f"--model own.py:plain --batch-size 8 --global-batch {16 * count} --dtype fp64"
    assert train(count, f"{words} --steps 23 --data own.py:singly --run-dir singly{count}") == 0
    assert train(count, f"{words} --steps 10 --data own.py:rows --run-dir rows{count}") == 0
    assert train(count, f"{words} --steps 23 --data own.py:rows --run-dir rows{count}") == 0
    same(f"singly{count}", f"rows{count}", "weights")
"""
    many(standin, runs, script)


def test_changed_momentum_counts_in_a_resumed_run(standin, runs):
    script = """
assert train(1, "--steps 2 --momentum 0.9 --run-dir slower") == 0
assert train(1, "--steps 4 --momentum 0.5 --lr 0.01 --run-dir slower") == 0
(group,) = states("slower")["optimizer"]["optimizer"]["param_groups"]
assert (group["momentum"], group["lr"]) == (0.5, 0.01)
"""
    assert "momentum was 0.9, now 0.5" in many(standin, runs, script)


def test_ranks_and_accumulation_are_equal(standin, runs):
    # 22 samples in steps of 12: every second step is short, and its 10 samples do not share equally by 4.
    script = """
own = "--model own.py:plain --data own.py:data --dtype fp64 --optimizer adam --lr 0.01"
words = f"{own} --global-batch 12"
assert train(4, f"{words} --steps 8 --run-dir four") == 0
assert train(1, f"{words} --steps 8 --run-dir one --batch-size 3") == 0
assert train(4, f"{words} --steps 3 --run-dir changing --batch-size 3") == 0
assert train(3, f"{words} --steps 5 --run-dir changing --batch-size 3") == 0
assert train(1, f"{words} --steps 8 --run-dir changing --batch-size 3") == 0
# 22 samples in steps of 20: every second step has 2, and two of the ranks have none.
assert train(4, f"{own} --global-batch 20 --steps 8 --run-dir idle") == 0
assert train(1, f"{own} --global-batch 20 --steps 8 --run-dir busy") == 0

def largest_difference(one, other):
    one, other = (states(run)["weights"] for run in (one, other))
    assert all(value.dtype == torch.float64 for value in one.values())
    return max((value - other[key]).abs().max().item() for key, value in one.items())

assert largest_difference("four", "one") < 1e-10
assert largest_difference("four", "changing") < 1e-10
assert largest_difference("idle", "busy") < 1e-10
assert largest_difference("four", "idle") > 1e-3
assert train(5, f"{words} --steps 9 --run-dir changing") == 2
"""
    output = many(standin, runs, script)
    assert "resumes after step 3 of 5" in output
    assert "5 ranks cannot share a global batch of 12 samples equally" in output
    assert "use 4 or 6 ranks" in output


def test_damaged_checkpoint_is_skipped_and_replaced(standin, runs):
    script = """
import re
import shutil
assert train(2, "--steps 6 --save-every 2 --keep 3 --run-dir damaged") == 0
shutil.copytree("damaged", "same")
with open("damaged/checkpoints/step-0000000006/__0_0.distcp", "ab") as file:
    file.write(b"more")
assert train(2, "--steps 6 --run-dir damaged") == 0
assert train(2, "--steps 6 --run-dir same") == 0
same("damaged", "same", "weights", "optimizer")
assert train(2, "--steps 8 --model mlp --run-dir same") == 2
assert train(2, "--steps 8 --resume nowhere --run-dir new") == 2
assert train(2, "--steps 8 --resume never --run-dir same") == 2
for checkpoint in os.listdir("damaged/checkpoints"):
    with open(f"damaged/checkpoints/{checkpoint}/__0_0.distcp", "ab") as file:
        file.write(b"more")
assert train(2, "--steps 8 --run-dir damaged") == 2
assert train(2, "--steps 8 --save-every 4 --run-dir damaged --ignore-checkpoints") == 0
names = sorted(name.partition("-0")[0] for name in os.listdir("damaged/checkpoints"))
assert names == ["skipped-step", "skipped-step", "skipped-step", "step", "step"], names
"""
    output = many(standin, runs, script)
    assert "damaged: none of the checkpoints can be read: damaged/checkpoints/step-0000000006/__0_0" in output
    assert "checkpoint skipped: damaged/checkpoints/step-0000000006/__0_0.distcp has" in output
    assert "resumes after step 4 of 6" in output
    assert "resumes after step 6 of 6" in output
    assert "model is 'mlp', the checkpoint has 'linear'" in output
    assert "nowhere: no valid checkpoint found" in output
    assert "replace the checkpoints of another run" in output


@pytest.mark.soak
def test_checkpoint_of_another_program_is_refused(standin, runs):
    script = """
from imgkit_entrypoints.run import Run

words = "--model mlp --momentum 0.9 --samples 100 --global-batch 12"
with Run.start("other") as run:
    run.track(weights=torch.nn.Linear(1, 1))
    for _ in run.steps(range(6)):
        pass
assert train(2, f"{words} --steps 13 --run-dir other") == 2
"""
    assert "this checkpoint was written by another program" in many(standin, runs, script)


def test_changed_model_is_refused_by_its_first_key(standin, runs):
    script = """
words = "--model grown.py:model --data own.py:data --batch-size 4 --run-dir changed"
text = open("own.py").read()
open("grown.py", "w").write(text)
assert train(1, f"{words} --steps 2") == 0
open("grown.py", "w").write(text.replace("64", "65") + " ")  # another size, else old byte code counts
assert train(1, f"{words} --steps 4") == 2
"""
    output = many(standin, runs, script)
    assert "0.weight is (64, 6) in the checkpoint and (65, 6) in the model" in output


def test_ranks_with_different_options_are_refused_by_name(standin, runs):
    script = """
import os
assert train(2, "--steps 3", folders="unlike0 unlike1", rank_args=("--lr 0.1", "--lr 0.2 --seed 3")) == 2
assert not os.path.exists("unlike0/checkpoints")
"""
    output = many(standin, runs, script)
    assert (
        "the ranks have different options; seed: rank 0: 0, rank 1: 3; lr: rank 0: 0.1, rank 1: 0.2" in output
    )


def test_loss_that_is_no_number_stops_or_is_skipped(standin, runs):
    script = """
words = "--model own.py:plain --data own.py:data --step own.py:breaks --batch-size 2 --steps 12"
assert train(2, f"{words} --save-every 2 --keep 9 --run-dir broken") == 1
assert train(2, f"{words} --on-nan skip --run-dir skipping") == 0
assert train(2, f"{words} --on-nan skip --amp fp16 --run-dir scaled") == 0
"""
    output = many(standin, runs, script)
    assert "a loss is not a number; the state of step 4 is saved" in output
    assert sorted(path.name[-2:] for path in (runs / "broken/checkpoints").iterdir()) == ["02", "04"]
    skipped = [
        json.loads((runs / f"{name}/summary.json").read_text())["skipped"] for name in ("skipping", "scaled")
    ]
    assert skipped[0] == 1 <= skipped[1]  # with fp16 also the steps with which the scale settles


def test_options_do_what_they_say_or_are_refused(standin, runs):
    script = """
assert train(1, "--workers 1 --steps 2") == 2
assert train(1, "--profile 9:1 --steps 2 --run-dir profiled") == 2
assert train(1, "--steps 2 --resume never --run-dir fresh") == 0
# A resumed run keeps its global batch, and accumulates as its number of ranks needs.
words = "--batch-size 3 --global-batch 12 --run-dir accumulating"
assert train(2, f"{words} --steps 2") == 0
assert train(4, f"{words} --steps 4") == 0
assert states("fresh")["step"] == 2
"""
    output = many(standin, runs, script)
    assert "this data gives whole batches, not single samples" in output
    assert "--profile 9:1 would trace nothing: the run has 2 steps" in output
    assert "resumes after step 2 of 4" in output


def test_numbers_of_a_step_are_averaged(standin, runs):
    script = """
own = "--model own.py:plain --data own.py:exact --steps 6 --global-batch 8 --batch-size 2 --step own.py:"
assert train(2, own + "numbers --run-dir numbered --schedule linear") == 0
assert train(1, own + "renamed") == 2
assert train(1, own + "wide") == 2
"""
    output = many(standin, runs, script)
    rows = [json.loads(line) for line in (runs / "numbered/metrics.jsonl").read_text().splitlines()]
    assert [row["numbers"]["rank"] for row in rows] == [0.5] * len(rows)
    assert all(abs(row["numbers"]["half"] - row["loss"] / 2) < 1e-6 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert rows[-1]["lr"] == pytest.approx(0.05 / 6)
    assert "the step returned the numbers number1, but number0 at first" in output
    assert "all must be a tensor with one number, but it is a Tensor of shape" in output


@pytest.mark.soak
def test_every_model_learns(standin, runs):
    script = """
assert train(2, "--model mlp --steps 40 --log-every 40") == 0
assert train(2, "--model resnet18 --samples 8 --batch-size 4 --steps 6") == 0
assert train(1, "--model resnet50 --samples 4 --batch-size 4 --steps 6 --log-every 6") == 0
assert train(2, "--model gpt --batch-size 4 --steps 20 --log-every 20 --amp bf16") == 0
assert train(2, "--model own_model.py:model --data own_model.py:data --epochs 1") == 0
open("text.txt", "w").write("to be or not to be " * 99)
assert train(1, "--model gpt --data text.txt --batch-size 4 --steps 4 --eval-every 4") == 0
open("short.txt", "w").write("x" * 200)
assert train(1, "--model gpt --data short.txt --batch-size 2 --steps 1") == 0
assert train(1, "--model gpt --data short.txt --batch-size 2 --steps 1 --eval-every 1") == 2
assert train(1, "--model mlp --data text.txt --steps 4") == 2
"""
    output = many(standin, runs, script)
    ends = [line.split() for line in output.splitlines() if line.startswith("loss ")]
    assert len(ends) == 7, output
    assert [end for end in ends[:6] if float(end[3].rstrip(",")) >= float(end[1])] == []
    assert "mlp cannot read a text file" in output
    assert "step 4/4  held out: loss " in output
    assert "short.txt: 200 bytes are too few" in output
    assert "eval needs at least 641 bytes" in output


def test_looking_at_held_out_data_changes_nothing(standin, runs):
    # A loss that draws numbers itself, dropout, BatchNorm; the second run also starts over in the middle.
    script = """
words = "--model own.py:model --data own.py:data --step own.py:shaken --batch-size 4 --momentum 0.9"
assert train(2, f"{words} --steps 9 --run-dir blind") == 0
assert train(2, f"{words} --steps 5 --run-dir looking --eval-every 2") == 0
assert train(2, f"{words} --steps 9 --run-dir looking --eval-every 2 --workers 1") == 0
same("blind", "looking", "weights", "optimizer", "ranks")
# The same weights, and samples that do not share equally.
words = "--model own.py:plain --data own.py:exact --dtype fp64 --lr 0 --steps 1 --eval-every 1e"
for count in (1, 3):
    assert train(count, f"{words} --run-dir held{count} --global-batch 12 --batch-size {5 - count}") == 0
"""
    many(standin, runs, script)
    rows = [json.loads(line) for line in (runs / "looking/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 4, 5, 6, 8, 9]
    on_one_rank, on_three_ranks = (
        json.loads((runs / f"held{ranks}/summary.json").read_text()) for ranks in (1, 3)
    )
    assert on_one_rank["eval_loss"] == pytest.approx(on_three_ranks["eval_loss"], rel=1e-12)
    assert "held out" in (runs / "looking/curves.svg").read_text()


def test_steps_are_traced_on_every_rank(standin, runs):
    script = """
import json
assert train(2, "--steps 9 --run-dir traced --profile 4:2") == 0
for rank in (0, 1):
    events = json.load(open(f"traced/traces/rank-{rank}.json"))["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    print(f"rank {rank} steps:", sum("Optimizer.step#SGD.step" in name for name in names))
    print("reduced:", any("all_reduce" in name or "allreduce" in name for name in names))
"""
    output = many(standin, runs, script)
    assert "rank 0 steps: 2\n" in output
    assert "rank 1 steps: 2\n" in output
    assert output.count("reduced: True") == 2


def test_compiled_model_learns_or_is_refused(standin, runs):
    script = """
import re
import shutil
words = "--model mlp --steps 8 --compile"
if shutil.which("g++") or shutil.which("clang++"):
    assert train(2, words) == 0
    print("compiled")
else:
    assert train(2, words) == 2
"""
    output = many(standin, runs, script)
    assert (
        "compiled\n" in output or "--compile needs a compiler (g++ or clang++), but PATH has none" in output
    )


@pytest.mark.soak
def test_folder_of_images_is_learnt(standin, runs):
    script = """
import os
from PIL import Image
words = "--model resnet18 --data pictures --image-size 32 --lr 0.01"
for split in ("train", "val"):
    for name, colour in (("cat", (200, 30, 30)), ("dog", (30, 30, 200))):
        os.makedirs(f"pictures/{split}/{name}", exist_ok=True)
        for number in range(8):
            noise = Image.effect_noise((40 + number, 50), 30).convert("RGB")
            picture = Image.blend(noise, Image.new("RGB", noise.size, colour), 0.6)
            picture.save(f"pictures/{split}/{name}/{number}.png")
assert train(2, f"{words} --batch-size 4 --steps 6 --eval-every 6 --run-dir pictured") == 0
assert train(2, f"{words} --batch-size 4 --steps 6 --workers 1 --run-dir fetching") == 0
same("pictured", "fetching", "weights")
assert train(1, "--model resnet18 --data pictures/train/cat") == 2
assert train(1, "--model resnet18 --data pictures/train --eval-every 1") == 2
open("pictures/train/cat/3.png", "w").write("nothing")
assert train(1, f"{words} --batch-size 16 --steps 1") == 1
"""
    output = many(standin, runs, script)
    assert "pictures/train/cat: 0 classes" in output
    assert "pictures/train: no images are held out" in output
    assert "sample 3 of the data: UnidentifiedImageError" in output
    summary = json.loads((runs / "pictured/summary.json").read_text())
    assert summary["last_loss"] < summary["first_loss"]


def test_stops_save_and_say_so(standin, runs):
    script = """
words="--nproc 2 --samples 500000 --epochs 10 --save-every 0 --log-every 10"
train $words --run-dir flagged & pid=$!
until [ -s flagged/metrics.jsonl ]; do kill -0 $pid; sleep 0.1; done
kill -USR1 $pid; wait $pid || echo "flagged: $?"
train $words --run-dir filed & pid=$!
until [ -s filed/metrics.jsonl ]; do kill -0 $pid; sleep 0.1; done
touch filed/stop; wait $pid; echo "filed: $?"
export IMGKIT_RUN_DIR=shared; train $words & pid=$!
until [ -s shared/metrics.jsonl ]; do kill -0 $pid; sleep 0.1; done
touch shared/stop; wait $pid; echo "shared: $?"
code train $words
"""
    output = launched(standin, runs, script)
    output += many(
        standin,
        runs,
        """
words = "--samples 500000 --epochs 10 --save-every 0 --log-every 10"
assert train(2, f"{words} --stop-after 0 --run-dir timed") == 85
assert train(1, f"{words} --run-dir filed") == 2
assert train(2, f"{words} --stop-after 0") == 1
""",
    )
    assert "--stop-after; the state of step 2 is saved" in output
    assert "flagged: 85" in output
    assert "a stop request from the node agent; the state of step" in output
    assert "filed: 0" in output
    assert "filed/stop: this file prevents the run from starting" in output
    assert "rm filed/stop" in output
    assert "this start saved no state\n" in output
    assert output.count("dist-train: nothing is saved without a run folder: --run-dir DIR\n") == 1
    assert "shared/stop: asked the program to save" in output
    assert "shared: 0" in output
    assert "shared/stop: this file prevents the run from starting" in output
    assert output.count("exit code 2\n") == 1
    for name in ("timed", "flagged", "filed", "shared"):
        summary = json.loads((runs / name / "summary.json").read_text())
        assert summary["saved_step"] == summary["step"] < summary["steps"]


def test_refusal_is_told_though_another_worker_ends_first(standin, runs):
    # The first worker to end makes torchrun end the others, here before local rank 0 has seen the error.
    (runs / "late.py").write_text(
        "import gc, os, time\nif os.environ['LOCAL_RANK'] == '0':\n    time.sleep(1.5)\n"
        "print('collects garbage:', gc.isenabled(), 'passed by:', gc.get_freeze_count() > 100_000)\n"
        "def model(config):\n    return None\nmodel = 3\n"
    )
    output = launched(standin, runs, "code train --nproc 2 --model late.py:model --steps 2")
    assert output.count("collects garbage: True passed by: True") == 2, output
    assert output.count("model is not a function") == 1, output
    assert "exit code 2\n" in output


def test_failing_samples_and_functions_are_named(standin, runs):
    script = """
own="--model own.py:plain --batch-size 4 --steps 12"
code train $own --nproc 1 --data own.py:dies --workers 1
code train --model own.py:modell --nproc 1
code train --model own.py:vector --nproc 1
"""
    output = launched(standin, runs, script)
    output += many(
        standin,
        runs,
        """
own = "--model own.py:plain --batch-size 4 --steps 12"
assert train(1, f"{own} --data own.py:raises --workers 1") == 1
assert train(1, f"{own} --data own.py:data --step own.py:vector") == 2
""",
    )
    assert "sample 17 of the data: ValueError: spoiled" in output
    assert "a data worker died at sample 17 of the data" in output
    assert "the loss must be a tensor with one number, but it is a Tensor of shape (4, 1)" in output
    assert "has no function modell" in output
    assert "vector does not take 1 positional arguments" in output
    assert "def FN(config) -> torch.nn.Module" in output
    assert re.findall(r"(?m)^exit code (\d+)$", output) == ["1", "2", "2"]
