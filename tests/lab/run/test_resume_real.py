"""Nodes that do not see the run's folder, and weights that are tied."""

from __future__ import annotations

import json
import struct

import pytest

from .test_run_real import many

pytestmark = pytest.mark.docker


LOOP = """
from torch import nn

def loop(until=4, tied=False, rows=2):
    torch.manual_seed(0)
    own = TensorDataset(torch.arange(24.0).reshape(12, 2))
    model = nn.Module()
    model.layer = nn.Linear(2, rows)
    before = model.layer.weight.detach().clone()
    if tied:
        model.other = model.layer
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with Run.start() as run:
        run.track(model=model, optimizer=optimizer)
        try:
            run.restore()
        except ImgkitError:
            print("nothing loaded:", torch.equal(before, model.layer.weight), flush=True)
            raise
        assert run.step < until
        for step, (x,) in run.steps(DataLoader(own, batch_size=1), save_every=1):
            optimizer.zero_grad()
            model.layer(x).sum().backward()
            optimizer.step()
            if step == until:
                break
"""

NODES = """
def node(**more):
    folder = f"node{dist.get_rank() // 2}"
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    loop(**more)

assert start(4, loop, "whole") == [0] * 4
assert start(4, lambda: node(until=2), "own") == [0] * 4
assert start(4, node, "own") == [0] * 4
assert not os.path.exists("node1/own")
same("whole", "node0/own")
assert start(4, lambda: node(rows=3), "own") == [2] * 4
"""


def test_node_that_does_not_see_the_folder_gets_the_state(standin, tmp_path):
    output = many(standin, tmp_path, LOOP + NODES)
    assert "run: resumes after step 2: " in output
    assert output.count("nothing loaded: True") == 4


EXPORTED = """
import subprocess, sys
assert start(1, lambda: loop(tied=True), "tied") == [0]
def export(*words):
    done = subprocess.run([sys.executable, "-m", "imgkit_entrypoints", "dist-train", "export", *words])
    return done.returncode
assert export("tied", "weights.safetensors") == 0
assert export("nowhere", "other.safetensors") == 2
assert export("tied", "no/folder/other.safetensors") == 2
assert not os.path.exists("other.safetensors")
with open("weights.raw", "wb") as file:
    model = states("tied")["model"]
    for name in ("layer.bias", "layer.weight"):
        file.write(bytes(model[name].reshape(-1).view(torch.uint8).tolist()))
"""


def test_tied_weights_are_stored_once_and_exported(standin, tmp_path):
    output = many(standin, tmp_path, LOOP + EXPORTED)
    content = (tmp_path / "weights.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    metadata = header.pop("__metadata__")
    assert metadata == {
        "format": "pt",
        "step": "4",
        "other.weight": "layer.weight",
        "other.bias": "layer.bias",
    }
    assert sorted(header) == ["layer.bias", "layer.weight"]
    assert header["layer.weight"] == {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]}
    assert content[8 + size :] == (tmp_path / "weights.raw").read_bytes()
    assert "no valid checkpoint found" in output
    assert "cannot write the weights: No such file or directory" in output


FORMATS = """
def loop():
    model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters())
    with Run.start() as run:
        run.track(model=model, optimizer=optimizer)
        if run.restore():
            moments = optimizer.state_dict()["state"][0]
            assert moments["exp_avg"].stride() == model.weight.stride()
            assert not moments["exp_avg"].is_contiguous()
            print("restored", moments["exp_avg"].abs().sum() > 0)
        for _ in run.steps(range(2)) if run.epoch == 0 else ():
            optimizer.zero_grad()
            model(torch.randn(2, 3, 4, 4)).sum().backward()
            optimizer.step()

assert start(1, loop, "run") == [0]
assert start(1, loop, "run") == [0]
"""


def test_optimizer_gets_its_memory_format_back(standin, tmp_path):
    assert "restored tensor(True)" in many(standin, tmp_path, FORMATS)
