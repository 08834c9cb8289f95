"""The memory of a job: sizes, defaults of systems and partitions, and how each system requests it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.jobs import systems
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.memory import Memory, parse_size, size_text
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve_job
from imgkit_builder.recipe.targets import load_target
from imgkit_entrypoints.errors import UsageError

REQUEST = JobRequest.of(command=("dist-bench",), time="10m", directory=Path("/w"))
OWN = """\
image: {base: "python:3.12-slim"}
system:
  scheduler: %s
  runtime: %s
  node: {gpus: 4, memory_GB: 512, default_memory_GB: 32, memory_per_gpu_GB: 120}
"""
PARTITIONS = """\
  partitions:
    shared: {memory_per_gpu_GB: 60}
    whole: {default_memory_GB: 500}
    cpu: {gpus: 0}
    fixed: {default_memory_GB: 0}
"""
SINGULARITY = "{options: [--nv]}"
DOCKER = "{kind: docker, command: docker, options: [--gpus=all]}"


def job(folder: Path, text: str, **options: Any) -> Job:
    file = folder / "mine.yaml"
    file.write_text(text)
    return resolve_job(load_target(file), REQUEST.changed(**options))


@pytest.mark.parametrize(
    ("text", "size_MiB", "normalized"),
    [
        ("110G", 112_640, "110G"),
        ("440GB", 450_560, "440G"),
        ("64gb", 65_536, "64G"),
        ("1TiB", 1_048_576, "1024G"),
        ("512M", 512, "512M"),
        ("1536m", 1536, "1536M"),
    ],
)
def test_size_counts_in_powers_of_1024(text: str, size_MiB: int, normalized: str) -> None:
    assert parse_size(text, where="--mem") == size_MiB
    assert size_text(size_MiB) == normalized


@pytest.mark.parametrize(
    "text", ["", "110", "0G", "-1G", "1.5T", "110 G", "G", "110GG", "1e3G", "110K", "1G\n"]
)
def test_other_text_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size of memory") as caught:
        parse_size(text, where="--mem")
    assert (caught.value.where, caught.value.hint) == ("--mem", "write 110G, 440GB or 512M")


@pytest.mark.parametrize(
    ("options", "directive"),
    [
        ({}, "--mem-per-gpu=120G"),
        ({"gpus": 0}, "--mem=32G"),
        ({"mem": "100GB"}, "--mem=100G"),
        ({"mem_per_gpu": "1024M"}, "--mem-per-gpu=1G"),
        ({"queue": "shared"}, "--mem-per-gpu=60G"),
        ({"queue": "whole"}, "--mem=500G"),
        ({"queue": "cpu"}, "--mem=32G"),
        ({"queue": "fixed"}, ""),
        ({"options": ("--mem-per-cpu=8G",)}, "--mem-per-cpu=8G"),
    ],
)
def test_partition_and_request_decide_on_memory(
    tmp_path: Path, options: dict[str, Any], directive: str
) -> None:
    own = job(tmp_path, OWN % ("slurm", SINGULARITY) + PARTITIONS, **options)
    lines = systems.get_system("slurm").script(own).text.splitlines()
    assert [line for line in lines if "--mem" in line and line.startswith("#SBATCH")] == (
        [f"#SBATCH {directive}"] if directive else []
    )
    is_of_imgkit = bool(directive) and "options" not in options
    assert (f"export IMGKIT_MEM='{directive.replace('=', ' ')}'" in lines) == is_of_imgkit


def test_chunk_of_pbs_has_the_memory_of_its_gpus(tmp_path: Path) -> None:
    script = systems.get_system("pbs").script(job(tmp_path, OWN % ("pbs", SINGULARITY), gpus=2)).text
    assert "select=1:ngpus=2:mem=240gb:mpiprocs=1" in script


@pytest.mark.parametrize(("runtime", "is_limited"), [(DOCKER, True), (SINGULARITY, False)])
@pytest.mark.parametrize("scheduler", ["standalone", "mpi"])
def test_only_docker_limits_memory_without_a_scheduler(
    tmp_path: Path, scheduler: str, runtime: str, is_limited: bool
) -> None:
    own = job(tmp_path, OWN % (scheduler, runtime), mem="64G")
    assert own.allocation.memory == (Memory(size_MiB=64 << 10) if is_limited else None)
    assert ("--memory=64g" in systems.get_system(scheduler).script(own).text) == is_limited
    warning = f"--mem is not used: mine ({scheduler}) has no such flag"
    assert (warning in own.warnings) == (not is_limited)
