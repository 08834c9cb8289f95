"""What checkpoints cost: ``checkpoints.py [rows] [stall] [restore]``; needs torch, and this checkout alone.

rows: the exchange of 512 ranks at a save, with fake rows, on rank 0 and another. stall: how long a save of
2 ranks with 100 MB keeps the training waiting, and a plain copy of as much in turn. restore: the most
anonymous memory of a rank of 3 with a state of 1 GB, at a restore, at its rehearsal, and without a stop.
"""

from __future__ import annotations

import os
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

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "entrypoints"))

import torch
import torch._dynamo  # the first step of an optimizer imports it
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from imgkit_entrypoints.run import Run, random_state
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.tracked import Tracked

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
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
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
    """One of many ranks, whose exchanges return its own row for each of them."""

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        return mine.expand(self.world_size, -1).contiguous()

    def _at_rank_0(self, mine: torch.Tensor) -> torch.Tensor | None:
        return None if self.rank else self._gathered(mine)


def rows(count: int = 512) -> None:
    """Median CPU time of what a rank does for the states of all ranks at one save."""
    torch.set_num_threads(1)
    model = nn.Linear(2, 2)
    tracked = Tracked()
    tracked.add("model", model)
    tracked.add("optimizer", torch.optim.AdamW(model.parameters()))
    for rank in (0, 1):
        here = FakeRanks(rank=rank, local_rank=rank, world_size=count, device=torch.device("cpu"))
        spent = []
        for _ in range(TURNS):
            began = time.process_time()
            tracked.agreed(here, "run.save")
            row = random_state.written(random_state.current())
            here.collect({"pass.ranks.pt": row, "random.ranks.pt": row}, call="run.save")
            spent.append(time.process_time() - began)
        size = count * 2 * len(row)
        print(
            f"rank {rank} of {count}: {statistics.median(spent) * 1e3:.1f} ms of CPU for a save's exchange "
            f"({min(spent) * 1e3:.1f} to {max(spent) * 1e3:.1f}); rows of {size / MB:.1f} MB together"
        )


def stall(folder: str) -> None:
    """Median time for which `run.save` keeps the training waiting, and of a plain copy in turn."""

    def main(rank: int) -> None:
        model = layers(100 * MB)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weights = [one.detach() for one in model.parameters()]
        copies = [torch.empty_like(one) for one in weights]
        saves, plain, cpu = [], [], []
        with Run.start(folder, say=lambda _: None) as run:
            run.track(model=model, optimizer=optimizer)
            run.restore()
            for turn in range(TURNS + 2):
                run.due()
                dist.barrier()
                began, used = time.perf_counter(), time.thread_time()
                run.save()
                saved_s, used_s = time.perf_counter() - began, time.thread_time() - used
                run.wait()
                dist.barrier()
                began, used = time.perf_counter(), time.thread_time()
                for copy, one in zip(copies, weights, strict=True):
                    copy.copy_(one)
                if turn >= 2:
                    saves.append(saved_s)
                    plain.append(time.perf_counter() - began)
                    cpu.append((used_s, time.thread_time() - used))
        if rank == 0:
            save_s, plain_s = statistics.median(saves), statistics.median(plain)
            limit_s = 1.3 * plain_s + 0.020
            save_cpu_s, plain_cpu_s = (statistics.median(one) for one in zip(*cpu, strict=True))
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
    found, done = [anonymous()], threading.Event()

    def look() -> None:
        while not done.wait(0.002):
            found[0] = max(found[0], anonymous())

    thread = threading.Thread(target=look)
    thread.start()
    yield found
    done.set()
    thread.join()


def restore(folder: str) -> None:
    """Memory of a run without a stop, and of one that resumes; a third of the state are weights."""
    size = 1000 * MB // 3
    known: dict[str, float] = {}
    told = os.pipe()

    def main(rank: int) -> None:
        dist.barrier()
        base = anonymous()
        model = DistributedDataParallel(layers(size), gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        state = 3 * sum(one.numel() * 4 for one in model.parameters()) / MB
        with Run.start(folder, say=lambda _: None) as run:
            run.track(model=model, optimizer=optimizer)
            before = anonymous()
            with peak() as restoring:
                began = time.perf_counter()
                resumed = run.restore()
                restore_s = time.perf_counter() - began
            with peak() as stepping:
                for step, batch in run.steps([torch.ones(1, 1000)] * (run.step + 1)):
                    optimizer.zero_grad()
                    model(batch).sum().backward()
                    optimizer.step()
                    if step == run.step + 1:
                        stepping.append(stepping[0])
        name = "resumed" if resumed else "undisturbed"
        if rank == 1:  # rank 0 has the copy that it writes
            line = f"{name} {state} {restoring[0] - before} {stepping[1] - base} {restore_s}\n"
            os.write(told[1], line.encode())

    for _ in range(2):
        started(3, main)
    for line in os.read(told[0], 4096).decode().splitlines():
        name, *numbers = line.split()
        state, restoring, stepping, seconds = map(float, numbers)
        known[name] = stepping
        print(
            f"{name}: state {state:.0f} MB, {state / 3:.0f} MB of it weights; anonymous memory: "
            f"restore adds {restoring:.0f} MB at most in {seconds:.1f} s, "
            f"{stepping:.0f} MB in all to the first step"
        )
    over = known["resumed"] - known["undisturbed"]
    fits = restoring <= state * 2 / 3 + 64 and over <= 64
    print(f"rehearsal: {over:+.0f} MB over a first step without one; limit 64: {'met' if fits else 'MISSED'}")


if __name__ == "__main__":
    place = tempfile.mkdtemp(prefix="imgkit-checkpoints-")
    try:
        for name in sys.argv[1:] or ["rows", "stall", "restore"]:
            {"rows": rows, "stall": lambda: stall(f"{place}/s"), "restore": lambda: restore(f"{place}/r")}[
                name
            ]()
    finally:
        shutil.rmtree(place)
