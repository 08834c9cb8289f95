"""Check that image and host fit together: scheduler, glibc, variables and the mount of the image."""

from __future__ import annotations

import re
from collections.abc import Iterator

from imgkit_entrypoints.doctor.checks.check import Check, CheckedNode
from imgkit_entrypoints.fabric import lint
from imgkit_entrypoints.facts import HostFacts, Reader
from imgkit_entrypoints.facts.software import absent_files
from imgkit_entrypoints.schedulers.resolve import launcher_variables, missing_launcher_clause

# Where Linux distributions install the C library, such as /usr/lib/x86_64-linux-gnu/libc.so.6 on Ubuntu.
LIBC = (
    "/usr/lib/{machine}-linux-gnu/libc.so.6",
    "/usr/lib64/libc.so.6",
    "/lib/{machine}-linux-gnu/libc.so.6",
)


def check_scheduler(node: CheckedNode) -> Iterator[Check]:
    """Check that the environment contains the variables of the scheduler in the recipe, such as Slurm.

    If the container was started with ``--cleanenv``, they are missing. Nodes then do not know of each other,
    and each would start a run of its own.
    """
    problem = missing_launcher_clause(node.system.scheduler, node.env)
    if problem:
        fix = "in a job: start the container without --cleanenv and --containall; elsewhere this is expected"
        yield Check("scheduler", "warn", problem, fix)
        return
    names = launcher_variables(node.env)
    if names:
        yield Check("scheduler", "ok", ", ".join(names))


def check_glibc(node: CheckedNode) -> Iterator[Check]:
    """Check that the image's glibc is new enough for the host's libraries that workers load.

    For example, a library that needs ``GLIBC_2.38`` cannot be loaded with an older glibc. NCCL then uses TCP
    or exits.
    """
    path, version = image_glibc(node.facts, node.reader)
    needed = needed_glibc(node.facts, node.reader)
    if not version or not needed:
        return
    evidence = f"{path} has GLIBC_2.{version}"
    too_new = [f"{name} needs GLIBC_2.{newest}" for name, newest in needed.items() if newest > version]
    if too_new:
        fix = "use a newer base image, or a library built in the image instead of the host's"
        evidence += f", {', '.join(too_new)}, so it cannot be loaded"
        yield Check("glibc", node.network_verdict, evidence, fix)
    else:
        evidence += f", the fabric's libraries need up to GLIBC_2.{max(needed.values())}"
        yield Check("glibc", "ok", evidence)


def image_glibc(facts: HostFacts, reader: Reader) -> tuple[str, int]:
    """Return the path of the image's C library and its version, which is 34 for ``GLIBC_2.34``.

    If the library is not found, return ``("", 0)``.
    """
    for template in LIBC:
        path = template.format(machine=facts.arch)
        version = newest_glibc(reader, path)
        if version:
            return path, version
    return "", 0


def needed_glibc(facts: HostFacts, reader: Reader) -> dict[str, int]:
    """Return which version of glibc each library of the fabric needs.

    For example, ``{"/usr/lib/libfabric.so.1.2": 34}`` means that this library needs ``GLIBC_2.34``.
    """
    # NCCL is left out: it always comes from the image, and reading hundreds of megabytes would take long.
    paths = [library.target for library in facts.libraries if library.name != "libnccl.so.2"]
    versions = {path: newest_glibc(reader, path) for path in paths}
    return {path: version for path, version in versions.items() if version}


def newest_glibc(reader: Reader, path: str) -> int:
    """Return N of the newest ``GLIBC_2.N`` in the file of a library, or 0 if there is none.

    Versions are stored as plain text, so the file can be searched without parsing it.
    """
    versions = re.findall(r"\bGLIBC_2\.([0-9]{1,3})\b", reader.text(path) or "")
    return max(map(int, versions), default=0)


def check_variables(node: CheckedNode) -> Iterator[Check]:
    """Check that files in variables exist, and that the names of NCCL's and Gloo's variables are known.

    A misspelled variable has no effect, and no library reports it.
    """
    settings = {setting.name: setting.value for setting in node.facts.nccl_settings}
    # The last value of a name counts: the environment overrides nccl.conf, which overrides the recipe.
    env = {**node.system.env, **settings, **node.env}
    for problem, fix in absent_files(node.reader, env):
        yield Check("variables", "warn", problem, fix)
    for name in lint.unknown_names(env):
        if name.startswith("TORCH_"):  # other packages use this prefix, too
            continue
        if lint.similar_name(name):  # probably misspelled, which `report_network` reports
            continue
        evidence = f"{name}={env[name]}: neither NCCL (2.10 to 2.30) nor Gloo reads this variable"
        fix = f"unset {name}, unless a plug-in of this site reads it"
        yield Check("variables", "unknown", evidence, fix)


def check_image_mount(node: CheckedNode) -> Iterator[Check]:
    """Check that the image is not mounted by a squashfuse process that belongs to this Slurm job step.

    Squashfuse serves the files of the image. Slurm sends signals to all processes of a job step. If such a
    signal ends squashfuse, the program that runs from the image ends, too.
    """
    if "SLURM_JOB_ID" not in node.env:
        return
    # The process that started the container is the parent of squashfuse, and an ancestor of this process.
    ancestors = set(_list_ancestors(node.reader))
    for pid in node.reader.names("/proc", "[0-9]{1,9}"):
        name = node.reader.text(f"/proc/{pid}/comm") or ""
        if name.startswith("squashfuse") and _find_parent(node.reader, pid) in ancestors:
            evidence = f"/proc/{pid}/comm: {name} serves this image's files and belongs to the job step: "
            evidence += "a signal to the step (scancel, --signal=USR1@120) ends it and the program"
            fix = "use #SBATCH --signal=B:USR1@120 and a trap in the script. The site can install apptainer "
            fix += "with setuid, which mounts through the kernel"
            yield Check("image mount", "warn", evidence, fix)


def _list_ancestors(reader: Reader) -> Iterator[str]:
    """Yield the ids of this process and of all its ancestors. The first id is ``self``, as in /proc/self."""
    pid = "self"
    while pid not in ("", "0"):  # the parent of the first process of a system is 0
        yield pid
        pid = _find_parent(reader, pid)


def _find_parent(reader: Reader, pid: str) -> str:
    """Return the id of a process's parent as a text, or an empty text if it is unknown."""
    status = reader.text(f"/proc/{pid}/status") or ""
    match = re.search(r"^PPid:\s*([0-9]{1,9})$", status, re.MULTILINE)
    return match[1] if match else ""
