"""What a run of ``ci/check`` leaves on the machine, and the removal of the images and build cache among it.

    leftovers.py machine FILE              note what is on the machine, before the run
    leftovers.py engine FILE               note what the engine has, as soon as one answers
    leftovers.py compare MACHINE ENGINE    remove what the run has made, and print what stays

Only what is new since the notes can be the run's. Somebody else may use the engine meanwhile. So a dangling
image is removed if it is made from the stand-in base image, or with ``--alone``, which says that nobody else
uses the engine. Build cache does not tell who made it: all that is new goes, and the next build of somebody
else takes longer. Containers and images with names are printed, and not removed.

Standard library only: it runs before there is a virtual environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STANDIN = "imgkit.local/standin"
"""The base image of ci/lab/base-image, which stays for the next run. Images made from it have its label."""

STANDIN_LABEL = "imgkit.standin"
ENGINE_NOTE = Path("/run/imgkit-lab/engine/started")
"""The pid of the engine that ci/lab/engine has started. It is stopped after the comparison."""

TEMPORARY_FILES = ("imgkit*", "20*-*.log")
CACHES = ("imgkit-cache-*", "imgkit-tmp-*")
"""What a node keeps in /tmp for its next start: compiled code, and the short name of a long TMPDIR."""

END_LIMIT_S = 10
"""How long a process may take to end after the test that started it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What a Docker engine has."""

    containers: Sequence[str] = ()
    image_names: Sequence[str] = ()
    image_ids: Sequence[str] = ()
    dangling_ids: Sequence[str] = ()
    """Images without a name from which no other image is made."""
    standin_ids: Sequence[str] = ()
    """Images made from the stand-in base image."""
    cache_ids: Sequence[str] = ()
    """Records of the build cache, newest first: a record is newer than those that it is made from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of the machine."""

    parent: int
    argv: str
    environ: str


# --- decisions ---------------------------------------------------------------


def removable_images(before: EngineState, after: EngineState, *, is_alone: bool) -> list[str]:
    """Return the ids of dangling images that the run has made.

    An image that was there before is never among them, even if it has lost its name since.

    Parameters
    ----------
    is_alone : nobody else uses the engine
    """
    candidates = new_items(before.image_ids, after.dangling_ids)
    if is_alone:
        return candidates
    return [image_id for image_id in candidates if image_id in after.standin_ids]


def removable_cache(before: EngineState, after: EngineState) -> list[str]:
    """Return the ids of new records of the build cache, each before those that it is made from."""
    return new_items(before.cache_ids, after.cache_ids)


def engine_leftovers(before: EngineState, after: EngineState) -> list[str]:
    """Return a line for everything that the engine has now and had not before."""
    lines = [f"container {text}" for text in new_items(before.containers, after.containers)]
    lines += [f"image {name}" for name in new_items(before.image_names, after.image_names)]
    lines += [f"dangling image {image_id}" for image_id in new_items(before.image_ids, after.dangling_ids)]
    lines += [f"build cache {record_id}" for record_id in removable_cache(before, after)]
    return lines


def new_items(before: Iterable[str], after: Iterable[str]) -> list[str]:
    """Return the items of `after` that are not in `before`, in their order."""
    old = set(before)
    return [item for item in after if item not in old]


def left_processes(
    processes: Mapping[int, Process], variable: str, own_pid: int, engine_pid: int
) -> list[str]:
    """Return a line for each process that the run has started and that still runs.

    Parameters
    ----------
    variable : ``NAME=VALUE`` in the environment of the run, which all of its processes inherit
    own_pid : this process; it and its parents, such as ci/check, may run
    engine_pid : the engine that the run has started; it and its children may run
    """
    callers = _with_parents(processes, own_pid)
    lines = []
    for pid, process in processes.items():
        is_of_engine = engine_pid in _with_parents(processes, pid)
        if variable in process.environ.split("\0") and pid not in callers and not is_of_engine:
            lines.append(f"process {pid} {process.argv}")
    return lines


def _with_parents(processes: Mapping[int, Process], pid: int) -> list[int]:
    """Return a process, its parent, the parent's parent and so on."""
    pids = []
    while pid in processes:
        pids.append(pid)
        pid = processes[pid].parent
    return pids


# --- the machine and its engine ----------------------------------------------


def read_machine() -> list[str]:
    """Return a line for each network interface and temporary file that a test could have made."""
    links = [path.name for path in Path("/sys/class/net").iterdir()]
    lines = [f"link {name}" for name in links if "veth" not in name and "docker0" not in name]
    for pattern in TEMPORARY_FILES:
        lines += map(str, Path("/tmp").glob(pattern))
    return sorted(lines)


def read_mounts() -> list[str]:
    """Return a line for each mount that is not a container's."""
    points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return sorted(f"mount {point}" for point in points if "/docker/" not in point)


def read_processes() -> dict[int, Process]:
    """Return all processes by their pids."""
    processes = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            argv = (folder / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
            environ = (folder / "environ").read_text(errors="replace")
        except OSError:  # it has ended, or is not ours to read
            continue
        processes[int(folder.name)] = Process(parent=int(parent), argv=argv, environ=environ)
    return processes


def read_engine() -> EngineState:
    """Return what the engine has."""
    image_format = "{{.Repository}}:{{.Tag}}"
    names = [name for name in docker("images", "--format", image_format) if "<none>" not in name]
    return EngineState(
        containers=docker("ps", "--all", "--no-trunc", "--format", "{{.ID}} {{.Image}} {{.Names}}"),
        image_names=[name for name in names if not name.startswith(f"{STANDIN}:")],
        image_ids=_image_ids("--all"),
        dangling_ids=_image_ids("--filter", "dangling=true"),
        standin_ids=_image_ids("--filter", f"label={STANDIN_LABEL}"),
        cache_ids=_cache_ids(),
    )


def _image_ids(*options: str) -> list[str]:
    return docker("images", "--quiet", "--no-trunc", *options)


def _cache_ids() -> list[str]:
    """Return the ids of the build cache's records, newest first."""
    output = docker("system", "df", "--verbose", "--format", "{{json .BuildCache}}")
    records = json.loads("".join(output) or "[]") or []
    records.sort(key=lambda record: str(record["CreatedAt"]), reverse=True)
    return [str(record["ID"]).rstrip("*") for record in records]  # a star: in use


def docker(*args: str, check: bool = True) -> list[str]:
    """Return the lines that the program docker prints. With `check`, raise an error if it fails.

    An engine that does not answer must not look like an empty one: all that it has later would be new.
    """
    argv = ["docker", *args]
    result = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=check)
    return result.stdout.splitlines()


def remove_from_engine(before: EngineState, *, is_alone: bool) -> None:
    """Remove the dangling images and the build cache that the run has made."""
    after = read_engine()
    for image_id in removable_images(before, after, is_alone=is_alone):
        docker("image", "rm", image_id, check=False)  # a container may have it, so not by force
    for record_id in removable_cache(before, after):
        docker("builder", "prune", "--force", "--all", "--filter", f"id={record_id}", check=False)


def remove_caches(since_s: float) -> None:
    """Remove the caches in /tmp that have changed since a time in seconds of the epoch."""
    for pattern in CACHES:
        for path in Path("/tmp").glob(pattern):
            if path.lstat().st_mtime <= since_s:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def wait_for_processes(variable: str) -> list[str]:
    """Wait for the run's processes to end, and return a line for each that does not."""
    engine_pid = int(ENGINE_NOTE.read_text().split()[0]) if ENGINE_NOTE.exists() else 0
    deadline = time.monotonic() + END_LIMIT_S
    while True:
        lines = left_processes(read_processes(), variable, os.getpid(), engine_pid)
        if not lines or time.monotonic() > deadline:
            return lines
        time.sleep(0.2)


# --- the command -------------------------------------------------------------


def compare(machine_file: Path, engine_file: Path, *, is_alone: bool, variable: str) -> list[str]:
    """Remove what the run has made on the engine and in /tmp, and return a line for each thing that stays."""
    machine_before = json.loads(machine_file.read_text())
    noted_engine = json.loads(engine_file.read_text())
    engine_before = EngineState(**noted_engine["engine"])
    lines = wait_for_processes(variable) if variable else []
    remove_caches(machine_file.stat().st_mtime)
    remove_from_engine(engine_before, is_alone=is_alone)
    lines += new_items(machine_before, read_machine())
    lines += new_items(noted_engine["mounts"], read_mounts())
    return lines + engine_leftovers(engine_before, read_engine())


def main(argv: Sequence[str] | None = None) -> int:
    """Write a note, or compare with two notes. The exit status is 1 if the run has left something."""
    options = _parse_arguments(argv)
    if options.verb == "machine":
        options.file.write_text(json.dumps(read_machine()))
        return 0
    if options.verb == "engine":
        note = {"mounts": read_mounts(), "engine": dataclasses.asdict(read_engine())}
        options.file.write_text(json.dumps(note))
        return 0
    lines = compare(options.machine, options.engine, is_alone=options.alone, variable=options.variable)
    print("\n".join(lines) or "nothing")
    return 1 if lines else 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Find what a run of ci/check leaves on the machine.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("machine", "engine"):
        verbs.add_parser(verb).add_argument("file", type=Path)
    comparison = verbs.add_parser("compare")
    comparison.add_argument("machine", type=Path)
    comparison.add_argument("engine", type=Path)
    comparison.add_argument("--alone", action="store_true", help="nobody else uses the engine")
    comparison.add_argument("--variable", default="", help="NAME=VALUE of the run's processes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
