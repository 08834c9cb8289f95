"""Speed of the image line against what a user would type by hand; prints tables for docs/benchmarks.md.

    python tests/benchmarks/image/bench.py [--base REF] [--repeat N] [--work DIR] [--json FILE] [PART ...]

Needs an engine, singularity or apptainer, and mksquashfs. The image is built first. Parts: sif archive sqsh
memory files build rebuild save startup. All of them take about 40 minutes with --repeat 3.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from archives import in_parts, many_files, with_packed_layers
from measure import Side, alternate, ratio, spread

PARTS = ("sif", "archive", "sqsh", "memory", "files", "build", "rebuild", "save", "startup")
RECIPE = "mn5"
TAG = "imgkit-bench:latest"
IMGKIT = (sys.executable, "-m", "imgkit_builder")
ZSTD3 = ("-comp", "zstd", "-Xcompression-level", "3", "-b", "256K")
MANY_FILES = 1_000_000
PACKED = {
    "gzip layers": (("gzip", "-c"), False),
    "eight gzip layers": (("gzip", "-c"), True),
    "zstd layers": (("zstd", "-qc"), False),
}
"""Archives with compressed layers: by which command, and whether the large layer is cut into parts."""
SIZES = "| source | imgkit MiB | mksquashfs MiB | both at once |\n|---|---|---|---|"


def main() -> None:
    """Measure the chosen parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="imgkit.local/standin:24.03")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--work", type=Path, help="scratch folder (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every run to FILE")
    parser.add_argument("parts", nargs="*", metavar="PART", help=" ".join(PARTS))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    machine_text = machine()
    print(machine_text)
    run(*IMGKIT, "build", RECIPE, "--base", options.base, "--tag", TAG, "--no-test")
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        bench = Bench(Path(folder), options.base, options.repeat)
        for part in options.parts or PARTS:
            print(f"\n### {part}\n", flush=True)
            bench.results[part] = {}
            getattr(bench, part)(bench.results[part])
            if options.json:
                content = {"schema": 1, "machine": machine_text, "base": options.base, "parts": bench.results}
                options.json.write_text(json.dumps(content, indent=2) + "\n")


def run(*command: str) -> str:
    """Run once, untimed, and return what it printed."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def machine() -> str:
    """Machine and versions, as the tables need them beside them."""
    tools = [run("docker", "version", "--format", "engine {{.Server.Version}}").strip()]
    tools.append(run("singularity", "--version").strip())
    # mksquashfs -version exits with 1 in some releases.
    squash = subprocess.run(["mksquashfs", "-version"], capture_output=True, text=True, check=False)
    tools.append(squash.stdout.splitlines()[0])
    cpus = len(os.sched_getaffinity(0))
    return f"{cpus} processors, Linux {platform.release()}, Python {platform.python_version()}; " + "; ".join(
        tools
    )


def resident_MiB(pid: int) -> float:
    """Return the resident memory of the process now, in MiB; 0 if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    return 0.0


def children(pid: int) -> list[int]:
    """Processes that the main thread of the process has started, and that run."""
    with contextlib.suppress(OSError):
        return [int(child_pid) for child_pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class Bench:
    """The parts, each printing its own table; `found` has every run for ``--json``."""

    def __init__(self, folder: Path, base: str, repeat: int) -> None:
        self.folder, self.base, self.repeat = folder, base, repeat
        self.results: dict[str, dict[str, Any]] = {}

    def table(self, results: dict[str, Any], sides: list[Side], *, against: int = 0, warmup: int = 0) -> None:
        """Run `sides` in alternation; ratios are of the side `against` to each."""
        runs = alternate(sides, self.repeat, warmup=warmup)
        wall = {name: [item.wall_s for item in side_runs] for name, side_runs in runs.items()}
        first = wall[sides[against].name]
        print("| way | wall s | CPU s | largest process MiB | times as fast |\n|---|---|---|---|---|")
        for side in sides:
            side_runs = runs[side.name]
            results[side.name] = [dataclasses.asdict(item) for item in side_runs]
            cells = (
                spread(wall[side.name]),
                spread([item.cpu_s for item in side_runs]),
                f"{max(item.rss_MiB for item in side_runs):.0f}",
                ratio(first, wall[side.name]),
            )
            print(f"| {side.name} | {' | '.join(cells)} |", flush=True)

    def clean(self) -> None:
        """Empty the scratch folder, so that no side finds another's files."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def floor(self, before: Callable[[], None]) -> Side:
        """The engine's export piped into mksquashfs: no check, no record, no .sif."""
        # The names come from this file: no user text gets into this shell.
        squashing = f"mksquashfs - {self.folder}/x.sqfs -tar {' '.join(ZSTD3)} -noappend -quiet"
        command = f"c=$(docker create {TAG} true) && docker export $c | {squashing} && docker rm $c"
        name = "floor: docker export, mksquashfs -tar"
        return Side(name=name, commands=(("bash", "-c", f"set -o pipefail; {command}"),), before=before)

    def sif(self, results: dict[str, Any]) -> None:
        """Image to .sif: the tutorial's two commands, ours by default, the fast path, and its floor."""
        tar, sif = str(self.folder / "x.tar"), str(self.folder / "x.sif")
        env = {"APPTAINER_CACHEDIR": f"{self.folder}/cache", "SINGULARITY_CACHEDIR": f"{self.folder}/cache"}
        env |= {"APPTAINER_TMPDIR": str(self.folder), "SINGULARITY_TMPDIR": str(self.folder)}

        def tutorial(name: str, *options: str) -> Side:
            save = ("docker", "save", TAG, "-o", tar)
            convert = ("singularity", "build", *options, sif, f"docker-archive:{tar}")
            return Side(name=name, commands=(save, convert), before=self.clean, env=env)

        def ours(name: str, *commands: tuple[str, ...]) -> Side:
            imgkit_commands = tuple((*IMGKIT, *command) for command in commands)
            return Side(name=name, commands=imgkit_commands, before=self.clean, env=env)

        sides = [
            tutorial("docker save + singularity build docker-archive:"),
            ours("imgkit save + imgkit sif", ("save", TAG, "-o", tar), ("sif", tar, "-o", sif)),
            ours("imgkit sif", ("sif", TAG, "-o", sif)),
            self.floor(self.clean),
        ]
        if "--mksquashfs-args" in run("singularity", "build", "--help"):
            args = ("--mksquashfs-args", " ".join(ZSTD3))
            sides.insert(1, tutorial("the tutorial's two steps, with zstd level 3", *args))
        self.table(results, sides)
        for way, source in (("imgkit sif of an archive", tar), ("imgkit sif", TAG)):
            self.clean()
            if source == tar:
                run(*IMGKIT, "save", TAG, "-o", tar)
            stages = json.loads(run(*IMGKIT, "sif", source, "-o", sif, "--json"))["seconds"]
            print(
                f"\nstages of {way}: " + ", ".join(f"{name} {float(s):.2f} s" for name, s in stages.items())
            )

    def archives(self) -> dict[str, Path]:
        """An archive of the image: plain, compressed as a whole, and with compressed layers."""
        self.clean()
        paths = {"plain": self.folder / "x.tar", "gzip": self.folder / "x.tar.gz"}
        run(*IMGKIT, "save", TAG, "-o", str(paths["plain"]))
        run(*IMGKIT, "save", TAG, "-o", str(paths["gzip"]), "--compression", "gzip")
        paths |= {name: self.folder / f"{name.replace(' ', '-')}.tar" for name in PACKED}
        parts = self.folder / "parts.tar"
        in_parts(paths["plain"], parts, 8)
        for name, (command, is_parted) in PACKED.items():
            with_packed_layers(parts if is_parted else paths["plain"], paths[name], *command)
        parts.unlink()
        return paths

    def archive(self, results: dict[str, Any]) -> None:
        """Archives to .sif against the floor, which has no archive."""
        sif = self.folder / "x.sif"

        def fresh() -> None:
            for path in (sif, self.folder / "x.sqfs"):
                path.unlink(missing_ok=True)

        sides = [
            Side(
                name=f"imgkit sif, {name}",
                commands=((*IMGKIT, "sif", str(path), "-o", str(sif), "--no-test"),),
                before=fresh,
            )
            for name, path in self.archives().items()
        ]
        self.table(results, [self.floor(fresh), *sides], warmup=1)
        wall = {name: statistics.median(run["wall_s"] for run in runs) for name, runs in results.items()}
        floor = next(iter(wall.values()))
        print("\nof the floor: " + ", ".join(f"{name} {value / floor:.2f}" for name, value in wall.items()))

    def sqsh(self, results: dict[str, Any]) -> None:
        """One archive to a .sif and to a .sqsh, with the same compression: CPU seconds."""
        self.clean()
        tar = str(self.folder / "x.tar")
        run(*IMGKIT, "save", TAG, "-o", tar)
        for compression in ("zstd", "gzip"):
            options = ("--compression", compression, "--no-test", "--force")
            sides = [
                Side(
                    name=f".{form}, {compression}",
                    commands=((*IMGKIT, "sif", tar, "-o", str(self.folder / f"x.{form}"), *options),),
                )
                for form in ("sif", "sqsh")
            ]
            self.table(results, sides, warmup=1)
            cpu = {side.name: [item["cpu_s"] for item in results[side.name]] for side in sides}
            sif_cpu, sqsh_cpu = cpu.values()
            print(f"\nCPU seconds of the .sqsh per one of the .sif: {ratio(sqsh_cpu, sif_cpu)}\n")

    def memory(self, results: dict[str, Any]) -> None:
        """Largest sizes of imgkit and mksquashfs, each at its own moment and both at once."""
        print(SIZES)
        for name, path in self.archives().items():
            self.peaks(results, name, path)

    def files(self, results: dict[str, Any]) -> None:
        """The same for an archive of very many small files."""
        self.clean()
        path = self.folder / "many.tar"
        many_files(path, MANY_FILES)
        print(SIZES)
        self.peaks(results, f"{MANY_FILES} files", path)

    def peaks(self, results: dict[str, Any], name: str, path: Path) -> None:
        """Convert `path` once, look at the sizes twenty times a second, and print a row."""
        command = (*IMGKIT, "sif", str(path), "-o", str(self.folder / "x.sif"), "--no-test", "--force")
        imgkit_peak = child = both = 0.0
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None:
                now = resident_MiB(process.pid), sum(map(resident_MiB, children(process.pid)))
                imgkit_peak, child, both = max(imgkit_peak, now[0]), max(child, now[1]), max(both, sum(now))
                time.sleep(0.05)
        if process.returncode != 0:
            sys.exit(f"{' '.join(command)} failed")
        results[name] = {"imgkit_MiB": imgkit_peak, "child_MiB": child, "both_MiB": both}
        print(f"| {name} | {imgkit_peak:.0f} | {child:.0f} | {both:.0f} |", flush=True)

    def build(self, results: dict[str, Any]) -> None:
        """An unchanged recipe, whose steps the engine has in its cache, against docker build."""
        self.clean()
        context, tar = self.folder / "context", str(self.folder / "context.tar")
        context.mkdir()
        run(*IMGKIT, "render", RECIPE, "--base", self.base, "--context", tar, "-o", str(self.folder / "x"))
        run("tar", "-x", "-C", str(context), "-f", tar)
        ours = (*IMGKIT, "build", RECIPE, "--base", self.base, "--tag", TAG, "--no-test")
        self.table(
            results,
            [
                Side(
                    name="docker build",
                    commands=(("docker", "build", "-t", "imgkit-bench:cli", str(context)),),
                    env={"DOCKER_BUILDKIT": "0"},
                ),
                Side(name="imgkit build, every step cached by the engine", commands=(ours,)),
            ],
            warmup=1,
        )
        run("docker", "rmi", "imgkit-bench:cli")

    def rebuild(self, results: dict[str, Any]) -> None:
        """Bytes of new layers after a change of entry-point code alone."""
        history = json.loads(run("docker", "image", "inspect", TAG))[0]["RootFS"]["Layers"]
        self.clean()
        folder = self.folder / "lib"
        shutil.copytree(
            Path(__file__).parents[3] / "entrypoints" / "imgkit_entrypoints", folder / "imgkit_entrypoints"
        )
        with (folder / "imgkit_entrypoints" / "arguments.py").open("a") as code:
            code.write(f"\n# changed {os.urandom(4).hex()}\n")
        command = (*IMGKIT, "build", RECIPE, "--base", self.base, "--tag", "imgkit-bench:edited", "--no-test")
        subprocess.run(
            command, check=True, env={**os.environ, "PYTHONPATH": str(folder)}, stdout=subprocess.DEVNULL
        )
        edited = json.loads(run("docker", "image", "inspect", "imgkit-bench:edited"))[0]["RootFS"]["Layers"]
        shared = sum(1 for before, after in zip(history, edited, strict=False) if before == after)
        sizes = run(
            "docker", "history", "--human=false", "--format", "{{.Size}}", "imgkit-bench:edited"
        ).split()
        real = [int(size) for size in sizes if int(size)]
        new = sum(real[: len(edited) - shared])
        results.update({"layers_kept": shared, "layers": len(edited), "new_bytes": new})
        print(
            f"{shared} of {len(edited)} layers kept, the other {len(edited) - shared} hold {new / 1e3:.1f} kB"
        )
        run("docker", "rmi", "imgkit-bench:edited")

    def save(self, results: dict[str, Any]) -> None:
        """The archive, against raw ``docker save``."""
        tar = str(self.folder / "x.tar")
        self.table(
            results,
            [
                Side(name="docker save", commands=(("docker", "save", TAG, "-o", tar),), before=self.clean),
                Side(name="imgkit save", commands=((*IMGKIT, "save", TAG, "-o", tar),), before=self.clean),
            ],
            warmup=1,
        )

    def startup(self, results: dict[str, Any]) -> None:
        """CPU time of commands that do almost nothing."""
        many = max(self.repeat, 10)
        for args in (("--help",), ("sif", "--help"), ("render", RECIPE)):
            runs = alternate([Side(name="imgkit " + " ".join(args), commands=((*IMGKIT, *args),))], many)
            for name, command_runs in runs.items():
                results[name] = [dataclasses.asdict(item) for item in command_runs]
                print(
                    f"* `{name}`: CPU {spread([item.cpu_s * 1000 for item in command_runs], 0)} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
