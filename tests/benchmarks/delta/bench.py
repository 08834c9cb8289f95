"""Time the way from an edit to a running container, by deltas and by the tutorial; print tables.

    python tests/benchmarks/delta/bench.py [--base REF] [--repeat N] [--work DIR] [--user NAME] [PART ...]

Needs root, a local engine, singularity or apptainer, and mksquashfs. Parts: edit bytes start pip.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from measure import Side, alternate, ratio, spread

PARTS = ("edit", "bytes", "start", "pip")
IMGKIT = (sys.executable, "-m", "imgkit_builder")
TAG = "imgkit-bench-delta"
CODE = "/workspace/code/code.py"


def main() -> None:
    """Measure the chosen parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="imgkit.local/standin:24.03")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("/var/tmp"), help="scratch folder, open to all")
    parser.add_argument("--user", default="nobody", help="the ordinary user of the part start")
    parser.add_argument("parts", nargs="*", metavar="PART", help=" ".join(PARTS))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    version = subprocess.run(["singularity", "--version"], check=True, capture_output=True, text=True).stdout
    print(f"{len(os.sched_getaffinity(0))} processors, Linux {platform.release()}; {version.strip()}")
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        Path(folder).chmod(0o755)
        bench = Bench(Path(folder), options)
        try:
            for part in options.parts or PARTS:
                print(f"\n### {part}\n", flush=True)
                getattr(bench, part)()
        finally:
            subprocess.run(["docker", "rmi", "-f", TAG, f"{TAG}:pip"], capture_output=True, check=False)


class Bench:
    """The parts, each printing its own table."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options, self.number = folder, options, 0
        self.sif, self.delta = folder / "base.sif", folder / "x.imgdelta"
        self.recipe("mine.yaml")
        self.source = folder / "src"
        self.source.mkdir()
        (self.source / "weights").write_bytes(os.urandom(1 << 20))
        self.edit_source()
        self.run(*self.build())
        self.run(*IMGKIT, "sif", TAG, "-o", self.sif)
        self.sif.chmod(0o644)

    def recipe(self, name: str, **image: object) -> None:
        copy = [{"source": "src", "target": "/workspace/code"}]
        text = json.dumps({"extends": "mn5", "image": {"copy": copy, **image}})
        (self.folder / name).write_text(text)

    def build(self, recipe: str = "mine.yaml", tag: str = TAG) -> tuple[str, ...]:
        path = str(self.folder / recipe)
        return (*IMGKIT, "build", path, "--base", self.options.base, "--tag", tag, "--no-test")

    def run(self, *words: str | Path) -> str:
        """Run once, untimed, and return what it printed."""
        argv = [str(word) for word in words]
        return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, cwd=self.folder).stdout

    def edit_source(self) -> None:
        """One source file changes; nothing is left of the run before."""
        self.number += 1
        (self.source / "code.py").write_text(f"print({self.number})\n")
        for path in (self.folder / "x.tar", self.folder / "x.sif", self.delta):
            path.unlink(missing_ok=True)

    def edit(self) -> None:
        """One source file changed -> new image -> the container runs with it."""
        context, tar, sif = self.folder / "context", str(self.folder / "x.tar"), str(self.folder / "x.sif")
        self.run(
            *(*IMGKIT, "render", self.folder / "mine.yaml", "--base", self.options.base),
            *("--context", self.folder / "context.tar", "-o", self.folder / "Dockerfile"),
        )
        context.mkdir()
        self.run("tar", "-x", "-C", context, "-f", self.folder / "context.tar")

        def edit_context() -> None:
            self.edit_source()
            shutil.copy(self.source / "code.py", context / "copy/0/code.py")

        scratch = {f"{name}_{kind}": str(self.folder) for name in ("APPTAINER", "SINGULARITY")
                   for kind in ("TMPDIR", "CACHEDIR")}  # fmt: skip
        runs = ("singularity", "exec", "--overlay", f"{self.delta}:ro", str(self.sif), "python3", CODE)
        over = ("--against", str(self.sif), "-o", str(self.delta))
        tutorial = Side(
            name="docker build + save + singularity build",
            commands=(
                ("docker", "build", "-q", "-t", TAG, str(context)),
                ("docker", "save", TAG, "-o", tar),
                ("singularity", "build", sif, f"docker-archive:{tar}"),
                ("singularity", "exec", sif, "python3", CODE),
            ),
            before=edit_context,
            env={"DOCKER_BUILDKIT": "0", **scratch},
        )
        ours = Side(
            name="imgkit build + delta",
            commands=(self.build(), (*IMGKIT, "delta", TAG, *over), runs),
            before=self.edit_source,
        )
        done = alternate([tutorial, ours], self.options.repeat, warmup=0)
        print("| way | wall s | CPU s | times as fast |\n|---|---|---|---|")
        first = [item.wall_s for item in done[tutorial.name]]
        for name, items in done.items():
            wall, cpu = ([getattr(item, key) for item in items] for key in ("wall_s", "cpu_s"))
            print(f"| {name} | {spread(wall)} | {spread(cpu)} | {ratio(first, wall)} |")

    def make(self, recipe: str = "mine.yaml", tag: str = TAG) -> None:
        self.run(*self.build(recipe, tag))
        self.run(*IMGKIT, "delta", tag, "--against", self.sif, "-o", self.delta)
        self.delta.chmod(0o644)

    def bytes(self) -> None:
        """What is to be shipped."""
        self.edit_source()
        self.make()
        changed = subprocess.run(
            ["zstd", "-3", "-c", str(self.source / "code.py")], check=True, capture_output=True
        ).stdout
        print("| | bytes |\n|---|---|")
        print(f"| changed file, zstd | {len(changed)} |\n| delta | {self.delta.stat().st_size} |")
        print(f"| allowed | {len(changed) + 65536} |\n| .sif | {self.sif.stat().st_size} |")

    def start(self) -> None:
        """What a delta costs at each start."""
        self.edit_source()
        self.make()
        program = Path(shutil.which("singularity") or "").resolve()
        config = next(
            path for parent in program.parents if (path := parent / "etc/apptainer/apptainer.conf").is_file()
        )
        driver = self.folder / "driver.conf"
        lines = config.read_text().splitlines()
        driver.write_text("\n".join(
            "enable overlay = driver" if line.startswith("enable overlay =") else line for line in lines
        ))  # fmt: skip
        user = ("runuser", "-u", self.options.user, "--")
        print("| mount | without ms | with ms | more ms |\n|---|---|---|---|")
        for name, before in {
            "root: kernel": ("singularity",),
            "user: kernel over squashfuse": (*user, "singularity"),
            "user: fuse-overlayfs": (*user, "singularity", "--config", str(driver)),
        }.items():
            os.chdir("/")
            plain, laid = (
                Side(name=text, commands=((*before, "--silent", "exec", *over, str(self.sif), "true"),))
                for text, over in (("plain", ()), ("over", ("--overlay", f"{self.delta}:ro")))
            )
            done = alternate([plain, laid], max(self.options.repeat, 15))
            one, other = ([item.wall_s * 1000 for item in done[side]] for side in ("plain", "over"))
            more = statistics.median(b - a for a, b in zip(one, other, strict=True))
            print(f"| {name} | {spread(one, 0)} | {spread(other, 0)} | {more:.0f} |", flush=True)

    def pip(self) -> None:
        """One more pip package."""
        self.recipe("more.yaml", pip=[{"packages": ["einops"]}])
        self.edit_source()
        build = Side(name="imgkit build", commands=(self.build("more.yaml", f"{TAG}:pip"),))
        over = ("--against", str(self.sif), "-o", str(self.delta))
        make = Side(name="imgkit delta", commands=((*IMGKIT, "delta", f"{TAG}:pip", *over),))
        done = alternate([build, make], 1, warmup=0)
        layers = json.loads(self.run("docker", "image", "inspect", f"{TAG}:pip"))[0]["GraphDriver"]["Data"]
        folders = [layers["UpperDir"], *layers["LowerDir"].split(":")]
        base = json.loads(self.run("docker", "image", "inspect", self.options.base))[0]["RootFS"]["Layers"]
        new = folders[: len(folders) - len(base)]
        packed = sum(
            len(subprocess.run(["sh", "-c", 'tar -C "$1" -c . | zstd -3 -q', "sh", folder],
                               check=True, capture_output=True).stdout) for folder in new
        )  # fmt: skip
        print("| step | wall s |\n|---|---|")
        for name, items in done.items():
            print(f"| {name} | {items[0].wall_s:.1f} |")
        print(
            f"\nlayers beyond the base, each zstd: {packed} bytes; delta: {self.delta.stat().st_size} bytes"
        )


if __name__ == "__main__":
    main()
