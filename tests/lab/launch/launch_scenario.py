"""Two nodes' launchers on one machine, with real torchrun and gloo workers; run where torch is.

``launch_scenario.py NODE.PY SCENARIO`` prints one JSON object: exit codes, output, and what is left.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from imgkit_entrypoints.launch import user_program

WORKER = """
import os, time, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
rank, stop = dist.get_rank(), Path(os.environ["IMGKIT_STOP_DIR"])
step = 0
while True:
    asked = torch.tensor([float((stop / "stop").exists())])
    dist.all_reduce(asked)
    step += 1
    if step == 3:
        past = "past the rendezvous" if (stop / "torchrun").read_text() == "workers" else "still in it"
        print("rank", rank, "of", dist.get_world_size(), "works,", past, flush=True)
    if step == 5 and SCENARIO == "finish":
        break
    if step == 5 and SCENARIO == "worker fails" and rank == 3:
        raise RuntimeError("this rank is broken")
    if step == 5 and SCENARIO == "worker fails, others hang":
        time.sleep(0.1 if rank == 3 else 1000)
        raise RuntimeError("this rank is broken")
    if asked.item() and SCENARIO != "deaf":
        (stop / "state-saved").write_text(os.environ["IMGKIT_JOB_ID"] + f" {step}")
        break
    time.sleep(0.02)
os._exit(0)  # gloo's threads can abort an interpreter that is being finalized
"""


def processes(mark: str) -> dict[int, str]:
    command_lines = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                command_lines[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                )
        except OSError:
            continue
    return command_lines


def workers(scenario: str) -> int:
    """The number of workers on each node: two where they do not all do the same."""
    return 2 if scenario == "finish" or scenario.startswith("worker fails") else 1


def start(node: str, folder: Path, scenario: str, rank: int) -> "subprocess.Popen[bytes]":
    worker = folder / "worker.py"
    worker.write_text(WORKER.replace("SCENARIO", repr(scenario)))
    options = {
        "nnodes": 2,
        "rank": rank,
        "job": str(folder),
        "hosts": ["host0", "host1"],
        "lost_s": 20.0,
        "beat_s": 1.0,
        "grace_s": 3.0 if scenario == "deaf" else 30.0,
        "timeout_s": 60.0,
    }
    # -u: torchrun's copy of the workers' output would else stay in its buffer until it ends.
    module = "imgkit_entrypoints.apps.torchrun"
    torchrun = [sys.executable, "-I", "-u", "-m", module, "--rdzv-backend", "static"]
    torchrun += ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1"]
    torchrun += ["--master-port", "<port from the roll call>", "--tee", "3"]
    torchrun += ["--nproc-per-node", str(workers(scenario))]
    torchrun += ["--log-dir", str(folder / f"logs{rank}"), "--no-python", sys.executable, "-u"]
    torchrun += [user_program.__file__, str(worker)]
    log = (folder / f"node{rank}.log").open("wb")
    return subprocess.Popen(
        [sys.executable, node, json.dumps(options), *torchrun],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={
            **os.environ,
            "SCENARIO_MARK": folder.name,
            "OMP_NUM_THREADS": "1",
            "IMGKIT_RUN_DIR": str(folder / "run"),
        },
        start_new_session=True,
    )


def main() -> None:
    node, scenario = sys.argv[1:]
    folder = Path(tempfile.mkdtemp())
    mark = f"SCENARIO_MARK={folder.name}"

    def output() -> str:
        return "".join(path.read_text() for path in sorted(folder.glob("node*.log")))

    launchers = [start(node, folder, scenario, rank) for rank in (0, 1)]
    end = time.monotonic() + 90
    while (
        output().count("works") < 2 * workers(scenario)
        and time.monotonic() < end
        and launchers[0].poll() is None
    ):
        time.sleep(0.1)
    if scenario in ("terminate one launcher", "deaf"):
        launchers[1].terminate()
    elif scenario in ("SIGUSR1 to every process", "SIGTERM to every process"):
        for pid in processes(mark):
            os.kill(pid, getattr(signal, scenario.split()[0]))
    elif scenario == "kill the head's launcher":
        launchers[0].kill()
    start_s = time.monotonic()
    codes = [launcher.wait(timeout=120) for launcher in launchers]
    ended_s = time.monotonic() - start_s
    while processes(mark) and time.monotonic() - start_s < ended_s + 10:
        time.sleep(0.1)
    remaining = list(processes(mark).values())
    logs = "".join(path.read_text() for path in sorted(folder.glob("run/errors-*.log")))
    result = {"codes": codes, "ended_s": ended_s, "left": remaining, "output": output(), "logs": logs}
    print(json.dumps(result))


main()
