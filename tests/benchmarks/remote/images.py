"""What a new version of a large image costs on its way to a cluster; a table for docs/benchmarks.md.

    PYTHON tests/benchmarks/remote/images.py [--repeat N]          as root

PYTHON has imgkit and its tests' packages. The base is the image of
``tests/benchmarks/image/large_image.py``, about 6 GB, which is built if it is missing. The cluster is the
virtual one of ``ci/lab/cluster`` with a real sshd and a real Slurm. Each change is converted and sent once
with an older image there and, for comparison, without one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "lab"))
from labkit import Cluster, run
from measure import command_line, spread
from remotekit import FarHost, far_host, login_node

ROOT = Path(__file__).parents[3]
BASE = "imgkit.test/large:1"
PACKAGES = ("tensorboard", "grpcio", "markdown")
RECIPE = f"""\
image:
  base: {BASE}
  platform: amd64
  copy: [{{source: code, target: /opt/code}}]
system:
  scheduler: slurm
  runtime: {{kind: singularity, command: singularity}}
  node: {{gpus: 0, cpus: 2}}
"""


@dataclass(frozen=True, kw_only=True)
class Project:
    """A recipe and its code on the laptop."""

    folder: Path
    far: FarHost

    @property
    def recipe(self) -> Path:
        return self.folder / f"{self.folder.name}.yaml"

    def imgkit(self, *args: object) -> str:
        """Run imgkit and return what it prints."""
        result = self.far.imgkit(*args, folder=self.folder)
        if result.returncode != 0:
            sys.exit(f"imgkit {' '.join(map(str, args))} failed:\n{result.stderr}")
        return result.stdout + result.stderr

    def deliver(self) -> tuple[float, float, str]:
        """Build, convert and send; return the seconds of the last two, and what was sent."""
        self.imgkit("build", self.recipe, "--base", BASE, "--no-test")
        start_s = time.perf_counter()
        self.imgkit("sif", self.recipe, "--no-test")
        converted_s = time.perf_counter()
        job = "run --on far --time 5m --detach --base"
        text = self.imgkit(job, BASE, self.recipe, "--", "true")
        match = re.search(r"imgkit: sent: (.+)", text)
        return converted_s - start_s, time.perf_counter() - converted_s, match[1] if match else text


@contextmanager
def site(folder: Path) -> Iterator[FarHost]:
    cluster = Cluster(state=folder / "c")
    with far_host(folder) as far:
        cluster.up(1)
        try:
            login_node(far, cluster)
            yield far
        finally:
            far.disconnect()
            cluster.down()


def new_project(far: FarHost, name: str) -> Project:
    project = Project(folder=far.folder / "here" / name, far=far)
    (project.folder / "code").mkdir(parents=True)
    (project.folder / "code/train.py").write_text("print(1)\n")
    project.recipe.write_text(RECIPE)
    return project


def main() -> None:
    """Measure, and print a table."""
    repeat = command_line(__doc__, repeat=3).parse_args().repeat
    if run("docker", "image", "inspect", BASE).returncode != 0:
        subprocess.run([sys.executable, ROOT / "tests/benchmarks/image/large_image.py", BASE], check=True)
    rows: dict[str, list[tuple[float, float, str]]] = {}
    with site(Path(f"/tmp/imgkit-images-{os.getpid()}")) as far:
        store = far.folder / "store"
        far.imgkit("remote", "add", "far", f"far:{store}")
        project, other = new_project(far, "letters"), new_project(far, "digits")
        rows.setdefault("first image", []).append(project.deliver())
        size = (project.folder / "letters.sif").stat().st_size
        for count in range(repeat):
            (project.folder / "code/train.py").write_text(f"print({count + 2})\n")
            rows.setdefault("one edited line", []).append(project.deliver())
        packages = project.folder / "code/packages"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", packages, *PACKAGES]
        subprocess.run(pip, check=True)
        rows.setdefault("three pip packages", []).append(project.deliver())
        rows.setdefault("first image of another project", []).append(other.deliver())
        kept = [path.name for path in (store / "images").iterdir() if path.is_dir()]
        shutil.rmtree(far.folder / "here")
    table = {
        name: {
            "convert_s": spread([convert_s for convert_s, _, _ in runs], 1),
            "send_s": spread([send_s for _, send_s, _ in runs], 1),
            "sent": [sent for _, _, sent in runs],
        }
        for name, runs in rows.items()
    }
    print(json.dumps({"sif_bytes": size, "images left": len(kept), "rows": table}, indent=1))


if __name__ == "__main__":
    main()
