"""dist-train on real ranks in the stand-in image: resumed bitwise, stopped, damaged, misused."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "entrypoints/imgkit_entrypoints"
PLACE = "/usr/local/lib/python3.11/dist-packages/imgkit_entrypoints"

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all runs of this file write to."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copy(Path(__file__).with_name("train_plugins.py"), folder / "own.py")
    shutil.copy(Path(__file__).with_name("train_many.py"), folder)
    shutil.copy(ROOT / "examples/own_model.py", folder)
    return folder


def inside(standin: str, runs: Path, *words: str, given: str = "") -> str:
    """What a command printed in the image, without a network; it must not fail."""
    done = subprocess.run(
        [
            *("docker", "run", "--rm", "--interactive", "--network", "none", "--tmpfs", "/tiny:size=3m"),
            *("--volume", f"{PACKAGE}:{PLACE}:ro", "--volume", f"{runs}:/runs", "--workdir", "/runs"),
            *("--env", "GLOO_SOCKET_IFNAME=lo", "--env", "OMP_NUM_THREADS=1", standin, *words),
        ],
        input=given,
        capture_output=True,
        text=True,
        timeout=170,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    return told


def many(standin: str, runs: Path, script: str) -> str:
    """What `script` printed, in which ``train(RANKS, "WORDS")`` is a run without a launcher."""
    return inside(standin, runs, "python3", "train_many.py", given=script)


LAUNCHED = """
train() { exec python3 -I -m imgkit_entrypoints dist-train --device cpu "$@"; }
code() { if ("$@"); then echo "exit code 0"; else echo "exit code $?"; fi; }
"""


def launched(standin: str, runs: Path, script: str) -> str:
    """What the shell's `script` printed, in which ``train`` is the whole command, with torchrun."""
    return inside(standin, runs, "bash", "-euc", LAUNCHED + script)


def kept(run: Path, step: int) -> dict[str, str]:
    """Checksums of a snapshot's files; torch.save of equal state gives equal bytes."""
    manifest = json.loads((run / f"snapshots/step-{step:010d}/manifest.json").read_text())
    return {name: said["sha256"] for name, said in manifest["files"].items() if name != "config.json"}


def test_resumed_run_is_bitwise_the_same(standin: str, runs: Path) -> None:
    # Several gradient buckets, dropout, and 4 epochs of which each ends with a short step.
    script = """
words = "--model gpt --samples 20 --global-batch 12"
for n in (1, 2, 3, 4):
    assert train(n, f"{words} --steps 9 --run-dir whole{n}") == 0
    assert train(n, f"{words} --steps 4 --run-dir cut{n}") == 0
    assert train(n, f"{words} --steps 9 --run-dir cut{n}") == 0
    one, other = (torch.load(f"{run}{n}/snapshots/step-0000000009/random.pt") for run in ("whole", "cut"))
    assert len(one) == len(other) == n
    for a, b in zip(one, other):
        assert torch.equal(a["torch"], b["torch"]) and a["python"] == b["python"]
    assert not torch.equal(one[0]["torch"], one[-1]["torch"]) or n == 1
"""
    told = many(standin, runs, script)
    assert told.count("goes on after step 4 of 9") == 4
    for ranks in (1, 2, 3, 4):
        whole, cut = kept(runs / f"whole{ranks}", 9), kept(runs / f"cut{ranks}", 9)
        assert (whole["weights.pt"], whole["optimizer.pt"]) == (cut["weights.pt"], cut["optimizer.pt"])


def test_data_workers_change_nothing(standin: str, runs: Path) -> None:
    # Samples that are random at every reading, and BatchNorm, whose buffers count too.
    script = """
words = "--model own.py:model --data own.py:data --batch-size 4 --momentum 0.9 --clip 1"
assert train(2, f"{words} --steps 9 --run-dir alone") == 0
assert train(2, f"{words} --steps 5 --run-dir fetched --workers 2") == 0
assert train(2, f"{words} --steps 9 --run-dir fetched --workers 2") == 0
"""
    assert "goes on after step 5 of 9" in many(standin, runs, script)
    alone, fetched = kept(runs / "alone", 9), kept(runs / "fetched", 9)
    assert (alone["weights.pt"], alone["optimizer.pt"]) == (fetched["weights.pt"], fetched["optimizer.pt"])


def test_ranks_and_accumulation_are_equal(standin: str, runs: Path) -> None:
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
    one, other = (torch.load(f"{run}/snapshots/step-0000000008/weights.pt") for run in (one, other))
    assert all(value.dtype == torch.float64 for value in one.values())
    return max((value - other[key]).abs().max().item() for key, value in one.items())

assert largest_difference("four", "one") < 1e-10
assert largest_difference("four", "changing") < 1e-10
assert largest_difference("idle", "busy") < 1e-10
assert largest_difference("four", "idle") > 1e-3
assert train(5, f"{words} --steps 9 --run-dir changing") == 2
"""
    told = many(standin, runs, script)
    assert "goes on after step 3 of 5" in told
    assert "12 samples cannot be shared equally by 5 ranks" in told
    assert "nearest that work: 4 or 6 ranks" in told


def test_damaged_snapshot_is_skipped_and_replaced(standin: str, runs: Path) -> None:
    script = """
import shutil
assert train(2, "--steps 6 --save-every 2 --keep 3 --run-dir damaged") == 0
shutil.copytree("damaged", "same")
with open("damaged/snapshots/step-0000000006/weights.pt", "ab") as file:
    file.write(b"more")
assert train(2, "--steps 6 --run-dir damaged") == 0
assert train(2, "--steps 6 --run-dir same") == 0
assert train(2, "--steps 8 --model mlp --run-dir same") == 2
assert train(2, "--steps 8 --resume nowhere --run-dir new") == 2
assert train(2, "--steps 8 --resume never --run-dir same") == 2
"""
    told = many(standin, runs, script)
    assert "snapshot skipped: damaged/snapshots/step-0000000006/weights.pt has" in told
    assert "goes on after step 4 of 6" in told
    one, other = kept(runs / "damaged", 6), kept(runs / "same", 6)
    assert (one["weights.pt"], one["optimizer.pt"]) == (other["weights.pt"], other["optimizer.pt"])
    assert "goes on after step 6 of 6" in told
    assert "model is 'mlp', the snapshot has 'linear'" in told
    assert "nowhere: no valid snapshot is there" in told
    assert "snapshots of another run are here" in told


def test_changed_model_is_refused_by_its_first_key(standin: str, runs: Path) -> None:
    script = """
words = "--model grown.py:model --data own.py:data --batch-size 4 --run-dir changed"
text = open("own.py").read()
open("grown.py", "w").write(text)
assert train(1, f"{words} --steps 2") == 0
open("grown.py", "w").write(text.replace("64", "65"))
assert train(1, f"{words} --steps 4") == 2
"""
    told = many(standin, runs, script)
    assert "0.weight is (64, 6) in the snapshot and (65, 6) in the model" in told


def test_loss_that_is_no_number_stops_or_is_skipped(standin: str, runs: Path) -> None:
    script = """
words = "--model own.py:plain --data own.py:data --step own.py:breaks --batch-size 2 --steps 12"
assert train(2, f"{words} --save-every 2 --keep 9 --run-dir broken") == 1
assert train(2, f"{words} --on-nan skip --run-dir skipping") == 0
"""
    told = many(standin, runs, script)
    assert "a loss is no number; the state of step 4 is kept" in told
    assert sorted(path.name[-2:] for path in (runs / "broken/snapshots").iterdir()) == ["02", "04"]
    assert json.loads((runs / "skipping/summary.json").read_text())["skipped"] == 1


def test_full_disk_leaves_the_older_snapshots(standin: str, runs: Path) -> None:
    # A snapshot of mlp has 0.3 MB, so some find their place on a file system of 3 MB.
    script = """
import os
assert train(2, "--model mlp --steps 40 --save-every 2 --keep 99 --run-dir /tiny/run") == 1
print("there:", *sorted(os.listdir("/tiny/run/snapshots")))
"""
    told = many(standin, runs, script)
    assert "No space left on device; the newest is of step" in told
    assert "step 40/40" in told
    assert "there: step-0000000002 " in told


def test_every_model_learns(standin: str, runs: Path) -> None:
    script = """
assert train(2, "--model mlp --steps 40 --log-every 40") == 0
assert train(2, "--model resnet18 --samples 16 --batch-size 4 --lr 0.01 --steps 6") == 0
assert train(2, "--model gpt --batch-size 4 --steps 20 --log-every 20 --amp bf16") == 0
assert train(2, "--model own_model.py:model --data own_model.py:data --epochs 1") == 0
open("text.txt", "w").write("to be or not to be " * 99)
assert train(1, "--model gpt --data text.txt --batch-size 4 --steps 4") == 0
assert train(1, "--model mlp --data text.txt --steps 4") == 2
"""
    told = many(standin, runs, script)
    ends = [line.split() for line in told.splitlines() if line.startswith("loss ")]
    assert len(ends) == 5, told
    assert [end for end in ends if float(end[3].rstrip(",")) >= float(end[1])] == []
    assert "mlp cannot read a text file" in told


def test_stops_save_and_say_so(standin: str, runs: Path) -> None:
    script = """
words="--nproc 2 --samples 500000 --epochs 10 --save-every 0 --log-every 10"
code train $words --stop-after 0 --run-dir timed
train $words --run-dir flagged & pid=$!
until [ -s flagged/metrics.jsonl ]; do sleep 0.1; done
kill -USR1 $pid; wait $pid || echo "flagged: $?"
train $words --run-dir filed & pid=$!
until [ -s filed/metrics.jsonl ]; do sleep 0.1; done
touch filed/STOP; wait $pid || echo "filed: $?"
code train $words --run-dir filed
code train $words --stop-after 0
"""
    told = launched(standin, runs, script)
    assert "--stop-after; the state of step 2 is kept" in told
    assert "exit code 85" in told
    assert "flagged: 85" in told
    assert "the launcher asked for it; the state of step" in told
    assert "filed: 85" in told
    assert "filed/STOP: this file keeps the run from starting" in told
    assert "nothing of this start is kept: no --run-dir" in told
    assert told.count("exit code 1\n") == 2
    for name in ("timed", "flagged", "filed"):
        summary = json.loads((runs / name / "summary.json").read_text())
        assert summary["saved_step"] == summary["step"] < summary["steps"]


def test_refusal_is_told_though_another_worker_ends_first(standin: str, runs: Path) -> None:
    # The first one that ends has the others ended, here before local rank 0 knows what is wrong.
    (runs / "late.py").write_text(
        "import os, time\nif os.environ['LOCAL_RANK'] == '0':\n    time.sleep(1.5)\n"
        "def model(config):\n    return None\nmodel = 3\n"
    )
    told = launched(standin, runs, "code train --nproc 2 --model late.py:model --steps 2")
    assert told.count("model is not a function") == 1, told
    assert "exit code 1\n" in told


def test_failing_samples_and_functions_are_named(standin: str, runs: Path) -> None:
    script = """
own="--model own.py:plain --batch-size 4 --steps 12"
code train $own --nproc 2 --data own.py:raises
code train $own --nproc 1 --data own.py:dies --workers 1
code train --model own.py:modell --nproc 1
code train --model own.py:vector --nproc 1
"""
    told = launched(standin, runs, script)
    told += many(
        standin,
        runs,
        """
own = "--model own.py:plain --batch-size 4 --steps 12"
assert train(1, f"{own} --data own.py:raises --workers 1") == 1
assert train(1, f"{own} --data own.py:data --step own.py:vector") == 2
""",
    )
    assert told.count("sample 17 of the data: ValueError: spoiled") == 2
    assert "a process that fetches samples died" in told
    assert "the loss must be a tensor with one number, this is a tensor of shape (4, 1)" in told
    assert "has no function modell" in told
    assert "vector does not take 1 positional arguments" in told
    assert "def FN(config) -> torch.nn.Module" in told
    assert told.count("exit code 1\n") == 2
    assert told.count("exit code 2\n") == 2
