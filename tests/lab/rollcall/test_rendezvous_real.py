"""Attacks on a real torchrun of one node and of two, by another user of the same network."""

from __future__ import annotations

import pytest
from labkit import in_image

pytestmark = pytest.mark.docker

# The program runs until the stranger has set his pickle in torch's store, and a little longer: torchrun looks
# there ten times a second.
ATTACKED = """
cat > /stranger.py <<'PYTHON'
import base64, contextlib, datetime, os, pickle, threading, time
from pathlib import Path
os.setgroups([]); os.setgid(12345); os.setuid(12345)
import torch.distributed as dist

class Called:
    def __reduce__(self):
        return os.system, ("id -u >> /tmp/ran",)

def listening():
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                yield int(fields[1].rpartition(":")[2], 16)

forged = base64.b64encode(pickle.dumps(Called())).decode()

def attack(port):
    while True:
        with contextlib.suppress(Exception):
            store = dist.TCPStore("127.0.0.1", port, timeout=datetime.timedelta(seconds=1))
            known = [name.removeprefix("/") for name in store.list_keys() if "torch.rendezvous" in name]
            for name in ("torch.rendezvous.imgkit", *known):
                store.set(name, forged)
            Path("/tmp/forged").touch()
        time.sleep(0.1)

# Each port has a thread of its own: a listener of gloo accepts a store's client and never answers it.
attacked = set()
while not Path("/tmp/over").exists():
    for port in set(listening()) - attacked:
        attacked.add(port)
        threading.Thread(target=attack, args=[port], daemon=True).start()
    time.sleep(0.1)
os._exit(0)
PYTHON
cat > /program.py <<'PYTHON'
import os, time
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
while not Path("/tmp/forged").exists():
    time.sleep(0.1)
time.sleep(2)
dist.barrier()
print("rank", dist.get_rank(), "of", dist.get_world_size(), flush=True)
PYTHON
chmod 1777 /tmp
python3 /stranger.py & stranger=$!
start() { python3 -I -m imgkit_entrypoints dist-run --device cpu "$@" /program.py; echo "ended with $?"; }
WAYS
wait $(jobs -p | grep -v "^$stranger$")
touch /tmp/over
wait $stranger
echo "code of the stranger ran as: $(sort -u /tmp/ran 2>&1)"
"""


TWO = """
for rank in 0 1; do start --nnodes 2 --head 127.0.0.1 --port 15555 --node-rank $rank & done
"""
ALONE = "start --nproc 2 &"


@pytest.mark.parametrize(
    "ways", [TWO, pytest.param(ALONE, marks=pytest.mark.soak)], ids=["two nodes", "one node"]
)
def test_forged_state_of_the_rendezvous_runs_no_code(standin, ways):
    result = in_image(standin, "bash", "-s", stdin=ATTACKED.replace("WAYS", ways))
    output = result.stdout
    assert "code of the stranger ran as: sort: cannot read: /tmp/ran" in output, output + result.stderr
    assert {f"rank {rank} of 2" in output for rank in (0, 1)} == {True}, output + result.stderr
    assert output.count("ended with 0") == (2 if ways == TWO else 1)


# Of three nodes, torchrun of the last one to come waits for all, and reads the keys of the others after that.
# So a stranger has the time to delete one. What it sends is what a client of torch's TCPStore sends.
STALLED = """
cat > /stranger.py <<'PYTHON'
import contextlib, os, socket, struct, time
from pathlib import Path
os.setgroups([]); os.setgid(12345); os.setuid(12345)
deletions = b""
for rank in (1, 2):
    key = b"/none/torchelastic/role_info/%d" % rank
    deletions += b"\\x08" + struct.pack("Q", len(key)) + key
while not Path("/tmp/over").exists():
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", 15555)) as store:
        store.sendall(b"\\x00" + struct.pack("I", 0x3C85F7CE))
        while True:
            store.sendall(deletions)
            if any(store.recv(16, socket.MSG_WAITALL)):
                print("the stranger deleted a key", flush=True)
    time.sleep(0.001)
PYTHON
cat > /usr/lib/python3/dist-packages/sitecustomize.py <<'PYTHON'
import os, sys, time
if "imgkit_entrypoints.apps.torchrun" in sys.orig_argv:
    time.sleep(float(os.environ.get("READ_FOR", "0")))
PYTHON
echo 'import torch.distributed as dist; dist.init_process_group("gloo")' > /program.py
chmod 1777 /tmp
ATTACK
start() {
    python3 -I -m imgkit_entrypoints dist-run --device cpu --rollcall-timeout 4 --nnodes 3 --head 127.0.0.1 \
        --port 15555 --node-rank $1 /program.py
    echo "node $1 ended with $?"
}
for rank in 0 1 2; do READ_FOR=$((rank * SLOW)) start $rank & pids="$pids $!"; done
wait $pids
touch /tmp/over
"""


@pytest.mark.soak
def test_start_that_a_stranger_stalls_ends_in_time(standin):
    attacked = STALLED.replace("ATTACK", "python3 /stranger.py &").replace("SLOW", "0")
    result = in_image(standin, "bash", "-s", stdin=attacked, timeout_s=120)
    output = result.stdout + result.stderr
    assert "the stranger deleted a key" in output
    assert (
        "rendezvous did not complete within 10 s (--rollcall-timeout); without workers: node 1 of 3" in output
    ), output
    assert "node 0 ended with 4" in output
    assert {f"node {rank} ended with 0" in output for rank in (1, 2)} == {False}


@pytest.mark.soak
def test_slow_file_system_of_a_node_ends_no_start(standin):
    """Torchrun of node 2 is read for 16 s, longer than the limit of the rendezvous."""
    result = in_image(standin, "bash", "-s", stdin=STALLED.replace("ATTACK", "").replace("SLOW", "8"))
    assert {f"node {rank} ended with 0" in result.stdout for rank in range(3)} == {True}, (
        result.stdout + result.stderr
    )
