"""Speed of the image line against what a user would type by hand; prints tables for docs/benchmarks.md.

    python tests/benchmarks/image/bench.py [--base REF] [--repeat N] [--work DIR] [PART ...]

Needs an engine, singularity or apptainer, and mksquashfs. The image is built first. Parts: sif archive
squash build rebuild save startup.
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

PARTS = ("sif", "archive", "squash", "build", "rebuild", "save", "startup")
RECIPE = "mn5"
TAG = "imgkit-bench:latest"
IMGKIT = (sys.executable, "-m", "imgkit_builder")
ZSTD3 = ("-comp", "zstd", "-Xcompression-level", "3", "-b", "256K")


def main() -> None:
    """Measure the chosen parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="imgkit.local/standin:24.03")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--work", type=Path, help="scratch folder (default: a temporary one)")
    parser.add_argument("parts", nargs="*", metavar="PART", help=" ".join(PARTS))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    print(machine())
    run(*IMGKIT, "build", RECIPE, "--base", options.base, "--tag", TAG, "--no-test")
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        bench = Bench(Path(folder), options.base, options.repeat)
        for part in options.parts or PARTS:
            print(f"\n### {part}\n", flush=True)
            getattr(bench, part)()


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


class Bench:
    """The parts, each printing its own table."""

    def __init__(self, folder: Path, base: str, repeat: int) -> None:
        self.folder, self.base, self.repeat = folder, base, repeat

    def table(self, sides: list[Side], *, against: int = 0, warmup: int = 0) -> dict[str, list[float]]:
        """Run `sides` in alternation; ratios are of the side `against` to each."""
        runs = alternate(sides, self.repeat, warmup=warmup)
        wall = {name: [item.wall_s for item in done] for name, done in runs.items()}
        first = wall[sides[against].name]
        print("| way | wall s | CPU s | largest process MiB | times as fast |\n|---|---|---|---|---|")
        for side in sides:
            done = runs[side.name]
            cells = (
                spread(wall[side.name]),
                spread([item.cpu_s for item in done]),
                f"{max(item.rss_MiB for item in done):.0f}",
                ratio(first, wall[side.name]),
            )
            print(f"| {side.name} | {' | '.join(cells)} |", flush=True)
        return {name: [item.cpu_s for item in done] for name, done in runs.items()}

    def clean(self) -> None:
        """Empty the scratch folder, so that no side finds another's files."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def sif(self) -> None:
        """Image to .sif: the tutorial's two commands, ours by default, the fast path, and its floor."""
        tar, sif, squash = (str(self.folder / name) for name in ("x.tar", "x.sif", "x.sqfs"))
        env = {"APPTAINER_CACHEDIR": f"{self.folder}/cache", "SINGULARITY_CACHEDIR": f"{self.folder}/cache"}
        env |= {"APPTAINER_TMPDIR": str(self.folder), "SINGULARITY_TMPDIR": str(self.folder)}
        # The names come from this file: no user text gets into this shell.
        squashing = f"mksquashfs - {squash} -tar {' '.join(ZSTD3)} -quiet"
        floor = f"c=$(docker create {TAG} true) && docker export $c | {squashing}"
        self.table(
            [
                Side(
                    name="docker save + singularity build docker-archive:",
                    commands=(
                        ("docker", "save", TAG, "-o", tar),
                        ("singularity", "build", sif, f"docker-archive:{tar}"),
                    ),
                    before=self.clean,
                    env=env,
                ),
                Side(
                    name="imgkit save + imgkit sif",
                    commands=((*IMGKIT, "save", TAG, "-o", tar), (*IMGKIT, "sif", tar, "-o", sif)),
                    before=self.clean,
                    env=env,
                ),
                Side(
                    name="imgkit sif --from daemon",
                    commands=((*IMGKIT, "sif", TAG, "--from", "daemon", "-o", sif),),
                    before=self.clean,
                    env=env,
                ),
                Side(
                    name="floor: docker export, mksquashfs -tar",
                    commands=(("bash", "-c", f"set -o pipefail; {floor} && docker rm $c"),),
                    before=self.clean,
                ),
            ]
        )
        for way, source in (("imgkit sif of an archive", tar), ("imgkit sif --from daemon", TAG)):
            self.clean()
            if source == tar:
                run(*IMGKIT, "save", TAG, "-o", tar)
            extra = () if source == tar else ("--from", "daemon")
            stages = json.loads(run(*IMGKIT, "sif", source, *extra, "-o", sif, "--json"))["seconds"]
            print(
                f"\nstages of {way}: " + ", ".join(f"{name} {float(s):.2f} s" for name, s in stages.items())
            )

    def archive(self) -> None:
        """An archive to .sif, plain and with gzip layers, against the floor that has no archive."""
        tar, packed, sif, squash = (str(self.folder / f"x.{end}") for end in ("tar", "tar.gz", "sif", "sqfs"))
        run(*IMGKIT, "save", TAG, "-o", tar)
        run(*IMGKIT, "save", TAG, "-o", packed, "--compress", "gzip")
        squashing = f"mksquashfs - {squash} -tar {' '.join(ZSTD3)} -noappend -quiet"
        floor = f"c=$(docker create {TAG} true) && docker export $c | {squashing}"

        def fresh() -> None:
            for path in (sif, squash):
                Path(path).unlink(missing_ok=True)

        sides = [
            Side(
                name="floor: docker export, mksquashfs -tar",
                commands=(("bash", "-c", f"set -o pipefail; {floor} && docker rm $c"),),
                before=fresh,
            )
        ]
        for name, source in (("imgkit sif of an archive", tar), ("of a gzip archive", packed)):
            command = (*IMGKIT, "sif", source, "-o", sif, "--no-test")
            sides.append(Side(name=name, commands=(command,), before=fresh))
        self.table(sides)

    def squash(self) -> None:
        """The squash step alone: the runtime's default against zstd level 3."""
        self.clean()
        root = self.folder / "root"
        root.mkdir()
        container = run("docker", "create", TAG, "true").strip()
        subprocess.run(f"docker export {container} | tar -x -C {root}", shell=True, check=True)  # noqa: S602 - own names
        run("docker", "rm", container)
        default, ours = (str(self.folder / name) for name in ("default.sqfs", "zstd.sqfs"))

        def before() -> None:
            for path in (default, ours):
                Path(path).unlink(missing_ok=True)

        sizes = {}
        cpu = {}
        for name, out, options in (("default (gzip 9)", default, ()), ("zstd level 3", ours, ZSTD3)):
            runs = alternate(
                [
                    Side(
                        name=name,
                        commands=(("mksquashfs", str(root), out, "-quiet", *options),),
                        before=before,
                    )
                ],
                self.repeat,
                warmup=0,
            )
            cpu[name] = [item.cpu_s for item in runs[name]]
            sizes[name] = Path(out).stat().st_size
        print("| compressor | CPU s | MB |\n|---|---|---|")
        for name, seconds in cpu.items():
            print(f"| {name} | {spread(seconds)} | {sizes[name] / 1e6:.1f} |")
        first, second = cpu.values()
        print(f"\nCPU ratio {statistics.median(first) / statistics.median(second):.1f}", end="")
        print(f", size ratio {sizes['zstd level 3'] / sizes['default (gzip 9)']:.3f}")

    def build(self) -> None:
        """A build with everything cached, against the docker client's own build of the same context."""
        self.clean()
        context, tar = self.folder / "context", str(self.folder / "context.tar")
        context.mkdir()
        run(*IMGKIT, "render", RECIPE, "--base", self.base, "--context", tar, "-o", str(self.folder / "x"))
        run("tar", "-x", "-C", str(context), "-f", tar)
        ours = (*IMGKIT, "build", RECIPE, "--base", self.base, "--tag", TAG, "--no-test")
        self.table(
            [
                Side(
                    name="docker build",
                    commands=(("docker", "build", "-t", "imgkit-bench:cli", str(context)),),
                    env={"DOCKER_BUILDKIT": "0"},
                ),
                Side(name="imgkit build", commands=(ours,)),
            ],
            warmup=1,
        )
        run("docker", "rmi", "imgkit-bench:cli")

    def rebuild(self) -> None:
        """What a change of entry-point code alone re-runs, in bytes of new layers."""
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
        shared = sum(1 for one, other in zip(history, edited, strict=False) if one == other)
        sizes = run(
            "docker", "history", "--human=false", "--format", "{{.Size}}", "imgkit-bench:edited"
        ).split()
        real = [int(size) for size in sizes if int(size)]
        new = sum(real[: len(edited) - shared])
        print(
            f"{shared} of {len(edited)} layers kept, the other {len(edited) - shared} hold {new / 1e3:.1f} kB"
        )
        run("docker", "rmi", "imgkit-bench:edited")

    def save(self) -> None:
        """The archive, against raw ``docker save``."""
        tar = str(self.folder / "x.tar")
        self.table(
            [
                Side(name="docker save", commands=(("docker", "save", TAG, "-o", tar),), before=self.clean),
                Side(name="imgkit save", commands=((*IMGKIT, "save", TAG, "-o", tar),), before=self.clean),
            ],
            warmup=1,
        )

    def startup(self) -> None:
        """What every command costs before it does anything."""
        many = max(self.repeat, 10)
        for words in (("--help",), ("sif", "--help"), ("render", RECIPE)):
            runs = alternate([Side(name="imgkit " + " ".join(words), commands=((*IMGKIT, *words),))], many)
            for name, done in runs.items():
                print(f"* `{name}`: CPU {spread([item.cpu_s * 1000 for item in done], 0)} ms", flush=True)


if __name__ == "__main__":
    main()
