"""`dist-train export` of sharded checkpoints: one process, one file, the bytes of `full_tensor()`."""

from __future__ import annotations

import pytest

from .test_run_real import many
from .test_sharded_real import PROGRAM

pytestmark = pytest.mark.docker

EXPORT = """
import contextlib, io, json
from imgkit_entrypoints.cli.main import main

def exported(*words):
    '''Exit code and messages.'''
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            main(("dist-train", "export", *map(str, words)))
        except SystemExit as end:
            code = end.code
    print(told.getvalue(), flush=True)
    return code, told.getvalue()

def content(path):
    data = Path(path).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:begin])
    def values(row):
        first, last = row["data_offsets"]
        return row["dtype"], row["shape"], data[begin + first : begin + last]
    return table.pop("__metadata__"), {name: values(row) for name, row in table.items()}

def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

def same(path, full, ties=()):
    about, found = content(path)
    wholes = {name: one for name, one in torch.load(full + ".pt").items() if name not in ties}
    wholes = {name: one for name, one in wholes.items() if not name.split(".")[0].isdigit() or name in found}
    assert found.keys() == wholes.keys(), (found.keys() ^ wholes.keys())
    for name, one in wholes.items():
        assert found[name][1:] == ([*one.shape], raw(one)), name
    return about
"""

TIED = """
from torch.distributed.tensor import Shard

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(40, 12)
        self.wide = torch.nn.Linear(12, 9)  # 9 rows over 2 shards: uneven
        self.across = torch.nn.Linear(8, 6, bias=False)  # divided by columns
        self.out = torch.nn.Linear(12, 40, bias=False)
        self.out.weight = self.words.weight
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.tensor(7))
        self.register_buffer("none", torch.empty(0, 3, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.arange(5) % 2 == 0)

def tied(hybrid, folder):
    torch.manual_seed(0)
    ranks, net = dist.get_world_size(), Net()
    names = {"mesh_dim_names": ("replicas", "shards")} if hybrid else {}
    mesh = init_device_mesh("cpu", (2, ranks // 2) if hybrid else (ranks,), **names)
    by_columns = lambda one: Shard(1) if one.shape == (6, 8) else None
    fully_shard(net, mesh=mesh, shard_placement_fn=by_columns)
    with Run.start(folder) as run:
        run.track(model=net)
        run.restore()
        if not run.step:
            for step, _ in run.steps(range(1), save_every=1):
                pass
    keep(net, torch.optim.SGD(net.parameters(), 0.1), folder + f"-{ranks}")

for ranks, hybrid in ((4, True), (2, False)):
    folder = f"tied{ranks}"
    assert start(ranks, lambda: tied(hybrid, folder), "x") == [0] * ranks
    assert exported(folder, folder + ".safetensors")[0] == 0
    about = same(folder + ".safetensors", f"{folder}-{ranks}", ties=("out.weight",))
    assert about == {"format": "pt", "step": "1", "out.weight": "words.weight"}
files = [Path(one).read_bytes() for one in ("tied2.safetensors", "tied4.safetensors")]
assert files[0] == files[1]
assert start(4, lambda: tied(False, "tied2"), "x") == [0] * 4
equal("tied2-2", "tied2-4")
"""


def test_exported_tensors_are_the_full_ones_bit_for_bit(standin, tmp_path):
    many(standin, tmp_path, PROGRAM + EXPORT + TIED)


REFUSED = """
def flipped(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)

def refused(text, *words):
    code, told = exported(*words)
    assert code == 2 and text in told, (code, told)
    assert not Path("other").exists() and not list(Path(".").glob(".imgkit-*"))

assert start(2, lambda: train(6), "run") == [0, 0]
newest = Path("run/checkpoints/step-0000000006")
shutil.copytree("run/checkpoints", "damaged")
flipped(Path("damaged/step-0000000006/__1_0.distcp"))
refused("__1_0.distcp is damaged: its sha256 differs", "damaged/step-0000000006", "other")
assert exported("damaged", "older")[0] == 0  # of step 3
assert content("older")[0] == {"format": "pt", "step": "3"}
refused("optimizer is not the state of a model", newest, "other", "--part", "optimizer")
refused("contains no net: it has model, optimizer, scheduler", newest, "other", "--part", "net")
refused("cannot write the weights: No space left on device", newest, "/full/other")
assert os.listdir("/full") == []
Path("there").write_text("mine")
refused("there: the file exists already", newest, "there")
assert Path("there").read_text() == "mine"
"""


def test_damaged_shard_and_full_disk_leave_no_file(standin, tmp_path):
    many(standin, tmp_path, PROGRAM + EXPORT + REFUSED)
