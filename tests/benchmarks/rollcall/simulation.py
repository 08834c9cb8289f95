"""The head of many nodes, which are simulated; tables for docs/benchmarks.md.

    PYTHON tests/benchmarks/rollcall/simulation.py [--nodes N ...] [--seconds S]

PYTHON has imgkit. The head is a real launcher with a secret and the network test; its program is `sleep`.
One other process speaks for all other nodes. It calls for each as fast as the head takes the calls, then
beats for each every 5 s. "After the last call" ends when the last node has its start. The processor time of
the head is the kernel's count, in nanoseconds, for the launcher alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "lab"))
from simulated_nodes import HERE, ME, SECRET, SimulatedNodes

from imgkit_entrypoints.launch.agent import NodeAgent
from imgkit_entrypoints.launch.node_attempt import NodeCommand, NodeConfig
from imgkit_entrypoints.launch.plan import Timeouts
from imgkit_entrypoints.schedulers.placement import Placement

TARGETS = {1000: 0.5, 4096: 2.0}
"""Percent of a core for the heartbeat."""
GATHERED_S = 1.0
"""Target from the last call to the start."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="*", default=[64, 256, 1000, 4096])
    parser.add_argument("--seconds", type=float, default=20.0, help="of heartbeat to measure")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(
        f"Simulation. Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores"
    )
    print("| nodes | all calls s | after the last call s | CPU of the head s | heartbeat % of a core |")
    print("|---|---|---|---|---|")
    for nnodes in options.nodes:
        print(once(nnodes, options.seconds), flush=True)


def once(nnodes: int, seconds: float) -> str:
    """One run, as a row of the table."""
    placement = Placement(
        scheduler="manual", nnodes=nnodes, node_rank=0, hosts=(), head=HERE, port=None,
        job_id=f"simulation {time.monotonic_ns()}", source={},
    )  # fmt: skip
    folder = tempfile.TemporaryDirectory(prefix="imgkit-")
    head = os.fork()
    if not head:
        tempfile.tempdir, code = folder.name, 1  # it is killed, and would leave its stop folder in /tmp
        try:
            code = launcher(placement, seconds)
        finally:
            os._exit(code)
    simulated_nodes = SimulatedNodes(placement)
    try:
        simulated_nodes.call()
        simulated_nodes.start()
        start_s, used = time.monotonic(), cpu_s(head)
        simulated_nodes.beat(seconds)
        percent = 100 * (cpu_s(head) - used) / (time.monotonic() - start_s)
    finally:
        os.kill(head, signal.SIGKILL)
        os.waitpid(head, 0)
        folder.cleanup()
        simulated_nodes.close()
    verdicts = (_verdict(simulated_nodes.after_last_s, GATHERED_S), _verdict(percent, TARGETS.get(nnodes)))
    calls = f"{simulated_nodes.calling_s:.2f}"
    after = f"{simulated_nodes.after_last_s:.2f}{verdicts[0]}"
    return f"| {nnodes:,} | {calls} | {after} | {used:.2f} | {percent:.2f}{verdicts[1]} |"


def _verdict(value: float, target: float | None) -> str:
    return "" if target is None else f"; target {target:g}: {'met' if value <= target else '**missed**'}"


def launcher(placement: Placement, seconds: float) -> int:
    """Be the head's launcher."""
    config = NodeConfig(
        command=NodeCommand(
            argv=["sleep", str(seconds + 60)],
            env=dict(os.environ),
        ),
        placement=placement,
        node=ME,
        log=lambda _: None,
        timeouts=Timeouts(rollcall_s=120),
        secret=SECRET,
    )
    return NodeAgent(config).run()


def cpu_s(pid: int) -> float:
    """Processor time of one process, without its children."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


if __name__ == "__main__":
    sys.exit(main())
