"""What a resume reads and names: nodes without the folder, a changed program, other data, tied weights."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest
from labkit import in_image

pytestmark = pytest.mark.docker


def many(standin: str, runs: Path, script: str) -> str:
    mounted = ("--volume", f"{Path(__file__).parent}:/test:ro", "--volume", f"{runs}:/runs")
    options = (*mounted, "--workdir", "/runs")
    done = in_image(standin, "python3", "/test/run_many.py", options=options, given=script)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    return told


LOOP = """
import glob, platform, shutil, tempfile
import imgkit_entrypoints.run.ranks as exchange
from imgkit_entrypoints.run import checkpoints
from torch import nn

def loop(lr=0.1, name="layer", size=12, offset=0.0, until=4, tied=False, call=None):
    torch.manual_seed(0)
    own = TensorDataset(torch.arange(2.0 * size).reshape(size, 2) + offset)
    model = nn.Module()
    setattr(model, name, nn.Linear(2, 2))
    before = getattr(model, name).weight.detach().clone()
    if tied:
        model.other = getattr(model, name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with Run.start() as run:
        run.track(model=model, optimizer=optimizer)
        if call:
            run.checkpoint_done(call)
        try:
            run.restore()
        except ImgkitError:
            print("nothing loaded:", torch.equal(before, getattr(model, name).weight), flush=True)
            raise
        for step, (x,) in run.steps(DataLoader(own, batch_size=1), save_every=1):
            optimizer.zero_grad()
            getattr(model, name)(x).sum().backward()
            optimizer.step()
            if step == until:
                break
        run.save()
"""

NODES = """
def node(**more):
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = str(rank % 2)
    os.makedirs(f"node{rank // 2}/tmp", exist_ok=True)
    os.chdir(f"node{rank // 2}")
    tempfile.tempdir = os.path.abspath("tmp")
    platform.node = lambda: f"node{rank // 2}"
    sent = exchange.Delivery._send
    def send(*words):
        print("sent", words[1].name, flush=True)
        return sent(*words)
    exchange.Delivery._send = send
    loop(**more)

assert start(4, node, "own") == [0] * 4
assert start(4, lambda: node(until=6), "own") == [0] * 4
assert glob.glob("node*/tmp/*") + glob.glob("node*/tmp/.*") + glob.glob("node1/own/*") == []

create = exchange.files.create
def full(path, mode=0o666):
    if "tmp" in str(path):
        raise OSError(28, "No space left on device")
    return create(path, mode=mode)
def on_full_disk():
    exchange.files.create = full
    node(until=8)
assert start(4, on_full_disk, "own") == [4] * 4

def changed_on_the_way():
    broadcast = exchange.dist.broadcast
    def changes(tensor, *words, **options):
        broadcast(tensor, *words, **options)
        if dist.get_rank() == 2 and tensor.numel() > 1000:
            tensor[0] += 1
    exchange.dist.broadcast = changes
    node(until=8)
assert start(4, changed_on_the_way, "own") == [4] * 4
assert glob.glob("node*/tmp/*") + glob.glob("node*/tmp/.*") == []
assert start(4, lambda: node(until=8), "own") == [0] * 4

def apart():  # on one disk, all read for themselves
    os.makedirs("shared", exist_ok=True)
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = str(rank % 2)
    platform.node = lambda: f"node{rank // 2}"
    checkpoints.Delivery = None
    loop(until=6)
assert start(4, apart, "shared") == [0] * 4
assert start(4, apart, "shared") == [0] * 4
"""


def test_node_that_does_not_see_the_folder_gets_the_state(standin: str, tmp_path: Path) -> None:
    told = many(standin, tmp_path, LOOP + NODES)
    first = re.findall("sent (.*)", told)[:5]
    assert first == ["state.json", "model.pt", "optimizer.pt", "random.ranks.pt", "pass.ranks.pt"]
    assert "rank 2: " in told
    assert "No space left on device" in told
    assert "rank 2: its bytes arrived with another sha256 than its manifest has" in told
    assert "set TMPDIR, on each node, to a folder with room for the checkpoint" in told
    assert told.count("nothing loaded: True") == 8


CHANGED = """
assert start(2, loop, "changed") == [0, 0]
sys.argv = ["program", "--lr", "0.2", "--api-token", "abc123def456ghi789"]
assert start(2, lambda: loop(lr=0.2, offset=1.0, until=6), "changed") == [0, 0]
assert start(2, lambda: loop(lr=0.2, size=14, until=8), "changed") == [0, 0]
assert start(2, lambda: loop(name="renamed"), "changed") == [2, 2]
state = (max(Path("changed/checkpoints").glob("step-*")) / "state.json").read_text()
assert '"--lr": "0.2"' in state and "abc123" not in state, state
"""


def test_change_of_the_program_is_named(standin: str, tmp_path: Path) -> None:
    told = many(standin, tmp_path, LOOP + CHANGED)
    for text in (
        "warning: --lr was not given, and is 0.2 now",
        "warning: optimizer lr was 0.1, and the program builds it with 0.2 now",
        "warning: the data set is not the one in the checkpoint: it has as many samples as before, but other",
        "warning: the data set is not the one in the checkpoint: it has 14 samples, and had 12",
    ):
        assert told.count(text) == 1, (text, told)
    assert (
        told.count("layer.weight, layer.bias only in the checkpoint, renamed.weight, renamed.bias only") == 2
    )
    assert told.count("nothing loaded: True") == 2


CALLS = """
def upload(path, step):
    time.sleep(0.5)
    assert (path / "manifest.json").exists()
    print("uploaded", step, flush=True)
    if step < 6:
        raise OSError("no network")
assert start(2, lambda: loop(call=upload, until=6), "calls") == [0, 0]
"""


def test_slow_upload_keeps_its_checkpoint_and_stalls_nothing(standin: str, tmp_path: Path) -> None:
    told = many(standin, tmp_path, LOOP + CALLS)
    steps = [int(step) for step in re.findall(r"uploaded (\d+)", told)]
    assert (steps[0], steps[-1]) == (1, 6), told
    assert len(steps) < 6, "those between are passed over"
    assert "checkpoint_done failed for the checkpoint of step 1: OSError: no network" in told


EXPORTED = """
import subprocess
assert start(1, lambda: loop(tied=True), "tied") == [0]
def export(*words):
    done = subprocess.run([sys.executable, "-m", "imgkit_entrypoints", "dist-train", "export", *words])
    return done.returncode
assert export("tied", "weights.safetensors") == 0
assert export("tied", "other.safetensors", "--part", "optimizer") == 2
assert export("tied", "other.safetensors", "--part", "nothing") == 2
assert export("nowhere", "other.safetensors") == 2
assert export("tied", "no/folder/other.safetensors") == 2
assert not os.path.exists("other.safetensors")
with open("weights.raw", "wb") as file:
    model = weights("tied")["model.pt"]
    for name in ("layer.bias", "layer.weight"):
        file.write(bytes(model[name].reshape(-1).view(torch.uint8).tolist()))
"""


def test_tied_weights_are_stored_once_and_exported(standin: str, tmp_path: Path) -> None:
    told = many(standin, tmp_path, LOOP + EXPORTED)
    content = (tmp_path / "weights.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    about = header.pop("__metadata__")
    assert about == {"format": "pt", "step": "4", "other.weight": "layer.weight", "other.bias": "layer.bias"}
    assert sorted(header) == ["layer.bias", "layer.weight"]
    assert header["layer.weight"] == {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]}
    assert content[8 + size :] == (tmp_path / "weights.raw").read_bytes()
    assert "the checkpoint contains no nothing: it has model, optimizer" in told
    assert "state is of the type dict, which a safetensors file cannot hold" in told
    assert "no valid checkpoint found" in told
    assert "cannot write the weights: No such file or directory" in told
