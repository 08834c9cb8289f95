"""What the proof of the secret costs a roll call; a table for docs/benchmarks.md.

    PYTHON tests/benchmarks/rollcall/bench.py [--repeat N] [--nodes N ...]

PYTHON has imgkit. Open starts and starts with a secret take turns. The head is the real one, in this process.
The other nodes are one process: with 2 nodes it is a real node, with more it answers for all of them.
"""

from __future__ import annotations

import argparse
import os
import platform
import selectors
import socket
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "lab"))
from measure import spread
from simulated_nodes import await_listener

from imgkit_entrypoints.rollcall import gather, messages
from imgkit_entrypoints.rollcall.connection import Handshake
from imgkit_entrypoints.rollcall.messages import JoinRequest, NodeInfo, Software
from imgkit_entrypoints.schedulers.placement import Placement, job_port

SECRET = os.urandom(32)
ME = NodeInfo(
    host="node", software=Software(image="0" * 12, torch="2.13.0", nccl="2.27.5"), nproc=4, gpu="H100"
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--nodes", type=int, nargs="*", default=[2, 4096])
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, median (range) in ms")
    print("| nodes | time | open | with a secret | median of the differences |\n|---|---|---|---|---|")
    for nnodes in options.nodes:
        turns = [(once(nnodes, None), once(nnodes, SECRET)) for _ in range(1 + options.repeat)][1:]
        for position, kind in enumerate(("wall", "CPU of the head")):
            bare, proven = (
                [1000 * seconds[position] for seconds in side] for side in zip(*turns, strict=True)
            )
            difference = statistics.median(b - a for a, b in zip(bare, proven, strict=True))
            print(
                f"| {nnodes:,} | {kind} | {spread(bare)} | {spread(proven)} | {difference:+.2f} |", flush=True
            )


def once(nnodes: int, secret: bytes | None) -> tuple[float, float]:
    """Seconds of one roll call, at the node where there is one and else at the head, and CPU of the head."""
    placement = Placement(
        scheduler="manual", nnodes=nnodes, node_rank=0, hosts=(), head="127.0.0.1", port=None,
        job_id=f"bench {time.monotonic_ns()}", source={},
    )  # fmt: skip
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            call_as_others(placement, secret, writer)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    start_s, cpu_began = time.perf_counter(), time.process_time()
    roll = gather.meet_nodes(placement, ME, timeout_s=60, log=lambda _: None, secret=secret)
    head_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_began
    answer = os.read(reader, 100)
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit("the other nodes failed")
    roll.close()
    return float(answer) if nnodes == 2 else head_s, cpu_s


def call_as_others(placement: Placement, secret: bytes | None, result: int) -> None:
    """Be all nodes but the head."""
    port = job_port(placement.job_id)
    await_listener(port)
    if placement.nnodes == 2:
        start_s = time.perf_counter()
        member = replace(placement, node_rank=1)
        gather.meet_nodes(member, ME, timeout_s=60, log=lambda _: None, secret=secret)
        os.write(result, str(time.perf_counter() - start_s).encode())
    else:
        call_as_many(placement, port, secret)
        os.write(result, b"0")


def call_as_many(placement: Placement, port: int, secret: bytes | None) -> None:
    """Call as every node but the head, and leave when the head has started all of them."""
    waiting = selectors.DefaultSelector()
    handshakes: dict[int, Handshake] = {}
    for rank in range(1, placement.nnodes):
        connection = socket.create_connection(("127.0.0.1", port))
        if secret is None:
            connection.sendall(call(placement, rank) + b"\n")
        else:
            handshakes[rank] = Handshake(secret=secret, job_id=placement.job_id, node_rank=rank)
            connection.sendall(handshakes[rank].opening + b"\n")
        waiting.register(connection, selectors.EVENT_READ, rank)
    started = 0
    while started < placement.nnodes - 1:
        for key, _ in waiting.select():
            assert isinstance(key.fileobj, socket.socket)
            heard = key.fileobj.recv(4096)
            assert heard, "the head closed a connection"
            if handshake := handshakes.pop(key.data, None):
                confirmed = handshake.confirm(heard.rstrip(b"\n"))
                assert confirmed
                key.fileobj.sendall(confirmed.sign(call(placement, key.data)) + b"\n")
            started += heard.count(b'"RunStart"')


def call(placement: Placement, rank: int) -> bytes:
    """The first message of node `rank`."""
    return messages.encode(
        JoinRequest(job=placement.job_id, node_rank=rank, nnodes=placement.nnodes, node=ME)
    )


if __name__ == "__main__":
    main()
