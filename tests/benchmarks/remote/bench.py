"""What ``imgkit run --on`` costs between an edit, ``sbatch`` and the output; a table for docs/benchmarks.md.

    PYTHON tests/benchmarks/remote/bench.py [--repeat N] [PART ...]          as root

PYTHON has imgkit and its tests' packages. The parts are `edit` (an edited line of a copied file, until the
first line of the job's output), `code` (the same with ``--code``, over the .sif), `hand` (the same as `code`,
with rsync, sbatch and tail, and no time to type them) and `same` (nothing changed, until `sbatch` has
answered), with a new connection and an open one. Each runs over the wires in turn, which
``tests/lab/remote/wire_proxy.py`` makes. The cluster is the virtual one of ``ci/lab/cluster`` with a real
sshd and a real Slurm, the image the stand-in without torch.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "lab"))
from labkit import IMGKIT, Cluster, output, run, split_line, until
from measure import command_line, spread
from remotekit import FarSite, far_host, login_node

ROOT = Path(__file__).parents[3]
BASE = "imgkit.local/standin:24.03-notorch"
RECIPE = f"""\
image:
  base: {BASE}
  platform: amd64
  copy: [{{source: edited.sh, target: /workspace/}}]
system:
  scheduler: slurm
  runtime: {{kind: singularity, command: singularity}}
  node: {{gpus: 0, cpus: 2}}
"""
WIRES: dict[str, tuple[str, str] | None] = {
    "none": None,
    "20 Mbit/s": ("20", "0"),
    "20 Mbit/s, 30 ms": ("20", "30"),
    "1 Gbit/s, 50 ms": ("1000", "50"),
}
HAND = """\
#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=1 --cpus-per-task=2 --time=5
srun singularity exec --bind "$PWD:/workspace" --pwd /workspace {sif} sh /workspace/edited.sh
"""
"""The job of the part `hand`, which starts in the folder that rsync fills."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One run of ``imgkit run``."""

    wall_s: float
    """Seconds to the first line of output."""
    queue_s: float
    """Seconds between submission and start, which are a part of it; Slurm knows whole seconds."""
    moved_kB: float
    """Bytes on the wire, both directions; nan without one."""


@dataclass(frozen=True, kw_only=True)
class Site(FarSite):
    """A person's folder here and a login node."""

    counts: Path

    def wire(self, name: str) -> None:
        """Reach the login node by the wire `name`, with no connection open."""
        self.far.disconnect()
        proxy = ROOT / "tests/lab/remote/wire_proxy.py"
        speed = WIRES[name]
        login_node(
            self.far, self.cluster, through=(sys.executable, proxy, *speed, self.counts) if speed else ()
        )

    def edit(self, folder: str = "") -> None:
        """Change one line of the file that the recipe copies, or of the one in `folder`."""
        (self.folder / folder / "edited.sh").write_text(f"echo edited {time.monotonic_ns()}\n")

    def moved(self) -> float:
        """Bytes on the wire since its proxy began."""
        return sum(map(int, self.counts.read_text().split())) if self.counts.exists() else 0

    def queued(self, job: str) -> float:
        """Seconds between submission and start of a job, for which this waits."""
        record = ""

        def started() -> bool:
            nonlocal record
            record = output(*self.cluster.argv("exec", "login", "--", "scontrol", "show", "job", job))
            return "StartTime=Unknown" not in record and "JobState=PENDING" not in record

        until(started)
        texts = (re.findall(rf"{name}=(\S+)", record)[0] for name in ("SubmitTime", "StartTime"))
        submitted, started_s = (time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")) for text in texts)
        return started_s - submitted

    def turn(self, part: str, connection: str = "new") -> Turn:
        """Edit, run, and stop the clock at the first line of output."""
        if part != "same":
            self.edit("code" if part in ("code", "hand") else "")
        before = 0.0 if connection == "new" else self.moved()  # each connection has a proxy of its own
        if part == "hand":
            return self.turn_by_hand(before)
        sifs = (file.name for file in self.folder.glob("*.sif"))
        options = (*sifs, "--code", "code") if part == "code" else ("--base", BASE)
        detached = ["--detach"] if part == "same" else []
        argv = (*IMGKIT, *split_line("run --on far --time 5m", *options, *detached))
        start_s = time.monotonic()
        with subprocess.Popen(
            (*argv, "--", "sh", "/workspace/edited.sh"), cwd=self.folder, env={**os.environ, **self.far.env},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as started:  # fmt: skip
            line = started.stdout.readline()
            wall_s = time.monotonic() - start_s
            carried = self.moved() - before
            _, stderr = started.communicate()
        if started.returncode != 0 or not line:
            sys.exit(f"imgkit run failed:\n{stderr[-2000:]}")
        job_id = re.search(r"(\d+)@far", line + stderr)
        assert job_id
        return self.measured(job_id[1], wall_s, carried)

    def measured(self, job: str, wall_s: float, moved: float) -> Turn:
        moved_kB = moved / 1000 if moved else float("nan")
        return Turn(wall_s=wall_s, queue_s=self.queued(job), moved_kB=moved_kB)

    def turn_by_hand(self, before: float) -> Turn:
        """Send the code by rsync, submit, and stop the clock at the first line of output."""
        home = self.folder.parent / "hand"
        if not home.exists():  # the cluster's file systems are this machine's
            home.mkdir()
            sif = max(self.folder.parent.glob("store/images/*/image.sif"), key=os.path.getmtime)
            (home / "job.sh").write_text(HAND.format(sif=sif))
        shared = ("-o", "ControlMaster=auto", "-o", f"ControlPath={self.far.folder}/run/imgkit/%C")
        ssh = (self.far.folder / "bin/ssh", *shared, "-o", "ControlPersist=600")
        start_s = time.monotonic()
        output("rsync", "-a", "-e", shlex.join(map(str, ssh)), f"{self.folder}/code/", f"far:{home}/")
        job_id = output(*ssh, "far", f"cd {home} && sbatch --parsable job.sh").strip()
        tail = f"tail --retry -n +1 -F {home}/slurm-{job_id}.out 2> /dev/null"
        with subprocess.Popen((*ssh, "far", tail), stdout=subprocess.PIPE) as following:
            following.stdout.readline()
            wall_s = time.monotonic() - start_s
            following.terminate()
        return self.measured(job_id, wall_s, self.moved() - before)


@contextmanager
def site() -> Iterator[Site]:
    """The virtual cluster, with the image and its .sif on both sides."""
    folder, name = Path(f"/tmp/imgkit-wire-{os.getpid()}"), f"wire{os.getpid()}"
    cluster = Cluster(state=folder / "c")
    with far_host(folder) as far:
        here, counts = folder / "here", folder / "counts"
        bench_site = Site(far=far, cluster=cluster, folder=here, store=folder / "store", counts=counts)
        (here / "code").mkdir(parents=True)
        bench_site.edit()
        cluster.up(1)
        try:
            with (cluster.state / "etc/sshd_config").open("a") as config:
                config.write("SetEnv SHLVL=2\n")  # else bash reads this machine's ~/.bashrc in each session
            bench_site.add_remote(RECIPE, name)
            bench_site.turn("edit")
            yield bench_site
        finally:
            far.disconnect()
            cluster.down()
            run("docker", "rmi", "--force", f"{name}:latest")


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__, repeat=5)
    parser.add_argument("--wire", action="append", choices=WIRES, help="(default: all)")
    parser.add_argument("--open", action="store_true", help="measure with an open connection only")
    parts = ["edit", "code", "hand", "same"]
    parser.add_argument("parts", nargs="*", metavar="PART", default=parts, help=", ".join(parts))
    options = parser.parse_args()
    print("| part | wire | connection | s | of it in the queue | kB moved |\n|---|---|---|---|---|---|")
    with site() as bench_site:
        turns: dict[tuple[str, str, str], list[Turn]] = {}
        for _ in range(options.repeat):
            for wire in options.wire or WIRES:
                bench_site.wire(wire)
                connections = ["new", "open"]
                if options.open:
                    connections.remove("new")
                    bench_site.turn("same")  # opens it
                for part in options.parts:
                    for connection in connections:
                        if connection == "new":
                            bench_site.far.disconnect()
                        turn = bench_site.turn(part, connection)
                        turns.setdefault((part, wire, connection), []).append(turn)
                        print(part, wire, connection, turn, file=sys.stderr, flush=True)
        for key in sorted(turns):
            columns = zip(*((turn.wall_s, turn.queue_s, turn.moved_kB) for turn in turns[key]), strict=True)
            seconds, queue, moved = (spread(column) for column in columns)
            print(f"| {' | '.join(key)} | {seconds} | {queue} | {moved} |")


if __name__ == "__main__":
    main()
