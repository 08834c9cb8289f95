"""What checkpoints cost: ``checkpoints.py [plan] [stall] [restore]``; needs torch, and this checkout alone.

plan: the CPU time of rank 0 for a save of DDP on 512 fake ranks with 500 small tensors. stall: how long a
save of 2 ranks with 100 MB keeps the training waiting, and a plain copy of as much in turn. restore: the most
anonymous memory of a rank of 3 with a state of 1 GB, at a restore.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "entrypoints"))

import torch
import torch._dynamo  # the first step of an optimizer imports it
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from imgkit_entrypoints.run import Run, random_state
from imgkit_entrypoints.run.checkpoint import CheckpointWriter
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.tracked import TrackedObjects

MB = 10**6
TURNS = 15


def started(count: int, main: Callable[[int], None]) -> None:
    """Run `main` on `count` forked ranks over gloo."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
            os.environ.update(
                {name: str(value) for name, value in environment.items()}, MASTER_ADDR="127.0.0.1"
            )
            code = 1
            try:
                torch.set_num_threads(1)
                dist.init_process_group("gloo")
                main(rank)
                code = 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        sys.exit("a rank failed")


def layers(size_bytes: int) -> nn.Sequential:
    """A model with weights of that size, in layers of 4 MB."""
    return nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(size_bytes // (4 * MB))))


class FakeRanks(Ranks):
    """Rank 0 of many, which all send what it sends."""

    def gather(self, value: Any, *, call: str = "") -> list[Any]:
        return [value] * self.world_size

    def gather_on_rank_0(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def broadcast(self, value: Any) -> Any:
        return value


def plan(folder: str, count: int = 512) -> None:
    """CPU time of rank 0 for a save, with all that it does in the background."""
    torch.set_num_threads(1)
    ranks = FakeRanks(rank=0, local_rank=0, world_size=count, device=torch.device("cpu"))
    writer = CheckpointWriter(Path(folder), 2, ranks, print, ())
    tracked = TrackedObjects()
    tracked.add("model", nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(500)), per_rank=False)
    row = pickle.dumps({"random": {"now": random_state.capture(), "pass": random_state.capture()}})
    spent = []
    for step in range(TURNS):
        start = time.process_time()
        snapshot = tracked.snapshot(ranks, "run.save")
        writer.save(step, pickle.dumps(({}, snapshot.trees)), snapshot.tensors, row)
        writer.close()
        spent.append(time.process_time() - start)
    median_s = statistics.median(spent)
    print(
        f"DDP on {count} ranks, 500 tensors: a save takes rank 0 {median_s * 1e3:.0f} ms of CPU "
        f"({min(spent) * 1e3:.0f} to {max(spent) * 1e3:.0f}); limit 500: "
        f"{'met' if median_s <= 0.5 else 'MISSED'}"
    )


def stall(folder: str) -> None:
    """Median time for which `run.save` keeps the training waiting, and of a plain copy in turn."""

    def main(rank: int) -> None:
        model = layers(100 * MB)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weights = [parameter.detach() for parameter in model.parameters()]
        copies = [torch.empty_like(weight) for weight in weights]
        saves, plain, cpu = [], [], []
        with Run.start(folder, say=lambda _: None) as run:
            run.track(model=model, optimizer=optimizer)
            run.restore()
            for turn in range(TURNS + 2):
                run.due()
                dist.barrier()
                start_s, used = time.perf_counter(), time.thread_time()
                run.save()
                saved_s, used_s = time.perf_counter() - start_s, time.thread_time() - used
                run.wait()
                dist.barrier()
                start_s, used = time.perf_counter(), time.thread_time()
                for copy, weight in zip(copies, weights, strict=True):
                    copy.copy_(weight)
                if turn >= 2:
                    saves.append(saved_s)
                    plain.append(time.perf_counter() - start_s)
                    cpu.append((used_s, time.thread_time() - used))
        if rank == 0:
            save_s, plain_s = statistics.median(saves), statistics.median(plain)
            limit_s = 1.3 * plain_s + 0.020
            save_cpu_s, plain_cpu_s = (statistics.median(seconds) for seconds in zip(*cpu, strict=True))
            print(
                f"2 ranks with 100 MB: a save stalls {save_s * 1e3:.1f} ms ({min(saves) * 1e3:.1f} to "
                f"{max(saves) * 1e3:.1f}), a plain copy {plain_s * 1e3:.1f} ms; "
                f"limit {limit_s * 1e3:.1f} ms: {'met' if save_s <= limit_s else 'MISSED'}; "
                f"CPU time of the training's thread {save_cpu_s * 1e3:.1f} and {plain_cpu_s * 1e3:.1f} ms"
            )

    started(2, main)


def anonymous() -> float:
    """Anonymous memory of this process, in MB."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024 / MB


@contextmanager
def peak() -> Iterator[list[float]]:
    """Yield a list whose one number is the most anonymous memory up to the end, every 2 ms."""
    maximum, stop = [anonymous()], threading.Event()

    def look() -> None:
        while not stop.wait(0.002):
            maximum[0] = max(maximum[0], anonymous())

    thread = threading.Thread(target=look)
    thread.start()
    yield maximum
    stop.set()
    thread.join()


def restore(folder: str) -> None:
    """Memory of a run that resumes; a third of the state are weights."""
    size = 1000 * MB // 3

    def main(rank: int) -> None:
        model = DistributedDataParallel(layers(size), gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        state = 3 * sum(weight.numel() * 4 for weight in model.parameters()) / MB
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.zero_grad()
        with Run.start(folder, say=lambda _: None) as run:
            run.track(model=model, optimizer=optimizer)
            before = anonymous()
            with peak() as restoring:
                start = time.perf_counter()
                is_resumed = run.restore()
                restore_s = time.perf_counter() - start
            for _, batch in run.steps([torch.ones(1, 1000)] * (run.step + 1)):
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
        if is_resumed and rank == 1:  # rank 0 has the copy that it writes
            print(
                f"state of {state:.0f} MB, {state / 3:.0f} MB of it weights: a restore adds at most "
                f"{restoring[0] - before:.0f} MB of anonymous memory, in {restore_s:.1f} s"
            )

    for _ in range(2):
        started(3, main)


if __name__ == "__main__":
    root = tempfile.mkdtemp(prefix="imgkit-checkpoints-")
    measurements = {"plan": plan, "stall": stall, "restore": restore}
    try:
        for name in sys.argv[1:] or measurements:
            measurements[name](f"{root}/{name}")
    finally:
        shutil.rmtree(root)
