"""Checks of image and host together: scheduler, glibc, NCCL's host memory, mounted image."""

from __future__ import annotations

import re
from collections.abc import Iterator

from imgkit_entrypoints.doctor.checks.check import Check, Subject
from imgkit_entrypoints.fabric import lint
from imgkit_entrypoints.facts import HostFacts, Reader
from imgkit_entrypoints.facts.software import absent_files
from imgkit_entrypoints.schedulers.resolve import claims, unseen

LIBC = (
    "/usr/lib/{machine}-linux-gnu/libc.so.6",
    "/usr/lib64/libc.so.6",
    "/lib/{machine}-linux-gnu/libc.so.6",
)
CAP_SYS_NICE = 1 << 23
"""Linux, include/uapi/linux/capability.h."""
CUMEM_DRIVER = 560
"""Driver of CUDA 12.6; from then on NCCL allocates host memory with cuMem."""
CUMEM_HOST = ((2, 24), (2, 26, 5))
"""First and end of NCCL's versions without a fallback if cuMem fails (pytorch/pytorch issue 152302)."""


def scheduler(subject: Subject) -> Iterator[Check]:
    """The job is visible; a container with --cleanenv hides it."""
    name = subject.system.scheduler if subject.system else ""
    if text := unseen(name, subject.env):
        fix = "in a job: start the container without --cleanenv and --containall; elsewhere this is expected"
        yield Check(name="scheduler", verdict="warn", evidence=text, fix=fix)
    elif shown := claims(subject.env):
        yield Check(name="scheduler", verdict="ok", evidence=", ".join(shown))


def glibc(subject: Subject) -> Iterator[Check]:
    """The image's glibc is new enough for libraries that are bound from the host."""
    path, own = image_glibc(subject.facts, subject.reader)
    needed = needed_glibc(subject.facts, subject.reader)
    if not own or not needed:
        return
    evidence = f"{path} has GLIBC_2.{own}"
    lacking = [f"{name} needs GLIBC_2.{newest}" for name, newest in needed.items() if newest > own]
    if lacking:
        yield Check(
            name="glibc",
            verdict=subject.between,
            evidence=f"{evidence}, {', '.join(lacking)}, so it cannot be loaded",
            fix="use a newer base image, or a library built in the image instead of the host's",
        )
    else:
        evidence = f"{evidence}, the fabric's libraries need up to GLIBC_2.{max(needed.values())}"
        yield Check(name="glibc", verdict="ok", evidence=evidence)


def image_glibc(facts: HostFacts, reader: Reader) -> tuple[str, int]:
    """Path of the C library and N of its newest ``GLIBC_2.N``; 0 if there is none."""
    for place in LIBC:
        path = place.format(machine=facts.arch)
        if newest := newest_glibc(reader, path):
            return path, newest
    return "", 0


def needed_glibc(facts: HostFacts, reader: Reader) -> dict[str, int]:
    """N of the newest ``GLIBC_2.N`` that each library of the fabric needs, by the library's path."""
    # NCCL is always the image's own, and has hundreds of megabytes.
    paths = [library.target for library in facts.libraries if library.name != "libnccl.so.2"]
    return {path: newest for path in paths if (newest := newest_glibc(reader, path))}


def newest_glibc(reader: Reader, path: str) -> int:
    """N of the newest ``GLIBC_2.N`` among the symbol versions of a library; 0 if there is none."""
    found = re.findall(r"\bGLIBC_2\.([0-9]{1,3})\b", reader.text(path) or "")
    return max(map(int, found), default=0)


def cumem(subject: Subject) -> Iterator[Check]:
    """NCCL can allocate host memory: cuMem needs NUMA calls, which docker's system call filter refuses."""
    version = re.search(r"\b([0-9]{3,9})\.[0-9]+", subject.facts.driver)
    concerned = version is not None and int(version[1]) >= CUMEM_DRIVER
    if not subject.facts.gpus or not concerned or subject.env.get("NCCL_CUMEM_HOST_ENABLE") == "0":
        return
    if subject.facts.nccl is None or not CUMEM_HOST[0] <= subject.facts.nccl < CUMEM_HOST[1]:
        return
    status = subject.reader.text("/proc/self/status") or ""
    filtered = re.search(r"^Seccomp:\s*2$", status, re.MULTILINE)
    granted = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if filtered and granted and not int(granted[1], 16) & CAP_SYS_NICE:
        yield Check(
            name="cumem",
            verdict="warn",
            evidence=f"NCCL {subject.facts.nccl_version}, and /proc/self/status: {filtered[0]}, {granted[0]} "
            "(without CAP_SYS_NICE), so allocating host memory may fail".replace("\t", " "),
            fix="docker: --cap-add SYS_NICE. Or set NCCL_CUMEM_HOST_ENABLE=0, or use NCCL 2.26.5 or later",
        )


def variables(subject: Subject) -> Iterator[Check]:
    """Every variable names a file that exists, and is one that NCCL or Gloo knows."""
    settings = {item.name: item.value for item in subject.facts.nccl_settings}
    known = {**(subject.system.env if subject.system else {}), **settings, **subject.env}
    for text, fix in absent_files(subject.reader, known):
        yield Check(name="variables", verdict="warn", evidence=text, fix=fix)
    for name in lint._unknown(known):
        # A name that is like a known one is among the network's warnings; torch's prefix is anybody's.
        if not name.startswith("TORCH_") and not lint.meant(name):
            yield Check(
                name="variables",
                verdict="unknown",
                evidence=f"{name}={known[name]}: neither NCCL (2.10 to 2.30) nor Gloo reads this variable",
                fix=f"unset {name}, unless a plug-in of this site reads it",
            )


def fuse(subject: Subject) -> Iterator[Check]:
    """The image is not mounted by a process of the job, which the scheduler's signal would end."""
    if "SLURM_JOB_ID" not in subject.env:
        return
    above = set(_ancestors(subject.reader))
    for number in subject.reader.names("/proc", "[0-9]{1,9}"):
        name = subject.reader.text(f"/proc/{number}/comm") or ""
        if name.startswith("squashfuse") and _parent(subject.reader, number) in above:
            yield Check(
                name="image mount",
                verdict="warn",
                evidence=f"/proc/{number}/comm: {name} serves this image's files and belongs to the job "
                "step: a signal to the step (scancel, --signal=USR1@120) ends it and the program",
                fix="use #SBATCH --signal=B:USR1@120 and a trap in the script. The site can install "
                "apptainer with setuid, which mounts through the kernel",
            )


def _ancestors(reader: Reader) -> Iterator[str]:
    number = "self"
    while number not in ("", "0"):
        yield number
        number = _parent(reader, number)


def _parent(reader: Reader, number: str) -> str:
    found = re.search(r"^PPid:\s*([0-9]{1,9})$", reader.text(f"/proc/{number}/status") or "", re.MULTILINE)
    return found[1] if found else ""
