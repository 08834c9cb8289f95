"""The system facts, which are the part of a recipe that every image contains in ``/opt/imgkit/system.json``.

Both halves of imgkit read the facts into these dataclasses, and apply the rules in the annotations. The half
in the image only uses the standard library for that (json_text.py). The half on the host uses pydantic for
what a person has written, with the docstrings of the fields as descriptions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.known_issues import KnownIssue
from imgkit_entrypoints.rules import (
    EnvName,
    Line,
    Rule,
    SiteValue,
    Text,
    Walltime,
    Word,
    at_least,
    bind_mount,
    expand_variables,
    host_folder,
    pattern_rule,
    site_value,
    srun_option,
)

# Version of the format of system.json.
SCHEMA = 1
PARTITION = "SLURM_JOB_PARTITION"
"""Variable with the name of the partition in which a job runs."""
SYSTEM_JSON = Path("/opt/imgkit/system.json")
JOB_FOLDER = "IMGKIT_JOB_DIR"
"""Variable with the job's folder. It is not set if that is the current folder of the container."""
WORKSPACE = "workspace"
"""Folder in the run folder with the run's copy of the code. It is mounted in the container's root folder."""

HOST = "/run/imgkit/host"
"""Folder in the container below which folders of the host are bound. /usr becomes /run/imgkit/host/usr."""
HOST_FOLDERS = ("/usr", "/opt")
"""Folders of the host that are always bound below `HOST`. They exist on every host."""
HOST_LIBS = "IMGKIT_HOST_LIBS"
"""Variable that replaces the recipe's ``fabric.host_libs``: ``none``, ``auto``, or ``auto:FOLDER:FOLDER``.

The folders are paths on the host, and are searched first.
"""
CUDA_COMPAT = "IMGKIT_CUDA_COMPAT"
"""Variable that replaces the recipe's ``runtime.cuda_compat``. Its value is a `CompatRule`."""

# Allowed values of the recipe's settings. The docstrings of the fields below explain them.
RuntimeKind = Literal["singularity", "docker", "pyxis", "kubernetes"]
CompressionChoice = Literal["auto", "zstd", "gzip"]
FabricKind = Literal["infiniband", "roce", "slingshot", "tcp"]
Arch = Literal["amd64", "arm64"]
ByRule = Literal["none", "auto"]
CompatRule = Literal["none", "major", "auto"]


JobField = Literal["account", "name", "qos", "time"]

Bind = Annotated[Line, Rule(bind_mount), Rule(site_value)]
HostFolder = Annotated[Line, Rule(host_folder)]
SrunOption = Annotated[Text, Rule(srun_option)]
# "535.129.03" or "580"
_DRIVER = r"(?:[0-9]{3,4}(?:\.[0-9]{1,3}){0,2})?"
_DRIVER_HINT = 'write what nvidia-smi shows: "535.129.03"'
DriverVersion = Annotated[Line, pattern_rule(_DRIVER, "is not a version of NVIDIA's driver", _DRIVER_HINT)]
_PARTITION_HINT = "write one name as sinfo prints it, without *"
PartitionName = Annotated[
    Line, pattern_rule(r"[A-Za-z0-9][A-Za-z0-9_.-]*", "is not the name of a partition", _PARTITION_HINT)
]
# "gpu" or "gpu:h100"
_GRES_HINT = "write gpu:TYPE as sinfo -o %G prints it, without the number"
Gres = Annotated[
    Line, pattern_rule(r"(?:gpu(?::[A-Za-z0-9][A-Za-z0-9_.-]*)?)?", "is not Slurm's name of GPUs", _GRES_HINT)
]
_POOL_HINT = "write one name as runai nodepool list prints it"
NodePool = Annotated[
    Line, pattern_rule(r"[A-Za-z0-9][A-Za-z0-9_.-]*", "is not the name of a node pool", _POOL_HINT)
]
# Linux limits the name of an interface to 15 characters.
_INTERFACE_HINT = "write one whole name as ip link prints it, such as ib0, without = ^ and commas"
Interface = Annotated[
    Line,
    pattern_rule(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,14}", "is not the name of an interface", _INTERFACE_HINT),
]
_SUFFIX_HINT = "allowed: letters, digits, - and ."
HostSuffix = Annotated[Line, pattern_rule(r"[A-Za-z0-9.-]*", "cannot end a host name", _SUFFIX_HINT)]
# "HOST", "USER@HOST", or nothing
_HOST = r"(?:(?:[A-Za-z0-9._-]+@)?[A-Za-z0-9][A-Za-z0-9._-]*)?"
_HOST_HINT = "write HOST or USER@HOST; the folder belongs in `directory`"
Host = Annotated[Line, pattern_rule(_HOST, "is not a host", _HOST_HINT)]
Count = Annotated[int, at_least(0)]
OptionalCount = Annotated[int | None, at_least(0)]
OptionalSize = Annotated[int | None, at_least(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Start of a container on the system."""

    kind: RuntimeKind = "singularity"
    """Kind of container runtime."""
    command: Word = "singularity"
    """The runtime's program; required for ``docker`` and ``kubernetes``, and not used by ``pyxis``."""
    modules: tuple[Word, ...] = ()
    """Environment modules that provide `command` and the variables in `binds`, in load order."""
    options: tuple[Text, ...] = ()
    """Options of every container start, for example ``--nv``."""
    binds: tuple[Bind, ...] = ()
    """Mounts of every container start, each ``SRC[:DEST[:ro]]``; ``$NAME`` is a variable of a module."""
    host_libs: tuple[HostFolder, ...] = ()
    """Folders of the host's NCCL, network plugin and libfabric, which are searched before the image's."""
    cuda_compat: CompatRule = "major"
    """When to use the image's CUDA forward compatibility on data-centre GPUs.

    ``major``: if the image's CUDA is of a newer major version than the driver supports, and so would not
    start otherwise. ``auto``: if it is newer at all. ``none``: never.
    """
    host_modules: tuple[Word, ...] = ()
    """Environment modules of a run without a container, in load order."""
    compression: CompressionChoice = "auto"
    """Compression of a .sif or .sqsh, as ``imgkit sif --compression``: ``zstd`` where all nodes read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One compute node."""

    gpus: Count = 0
    """GPUs per node."""
    gpu_model: Line = ""
    """Model of the GPUs, for example ``NVIDIA H100 64GB``."""
    cpus: OptionalSize = None
    """CPUs per node."""
    cpus_per_gpu: OptionalSize = None
    """CPUs that the scheduler gives a job with each GPU."""
    memory_GB: OptionalSize = None
    """Memory of a node that jobs can request. Here and below, 1 GB is 1024 MB of 1024 kB, as Slurm counts."""
    default_memory_GB: OptionalCount = None
    """Memory that a job requests on each node, unless it states another size; 0: none."""
    memory_per_gpu_GB: OptionalCount = None
    """The same for each GPU; a job with GPUs does not use `default_memory_GB` then."""
    driver: DriverVersion = ""
    """Version of the NVIDIA driver, for example ``535.129.03``; empty: unknown."""
    gres: Gres = ""
    """Slurm's name of the GPUs where it has types of them, for example ``gpu:h100``; empty: ``gpu``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """What the nodes of one Slurm partition have; a value that is not set is that of `node`."""

    gpus: OptionalCount = None
    """GPUs per node."""
    gpu_model: Line = ""
    """Model of the GPUs."""
    cpus: OptionalSize = None
    """CPUs per node."""
    cpus_per_gpu: OptionalSize = None
    """CPUs that the scheduler gives a job with each GPU."""
    memory_GB: OptionalSize = None
    """Memory of a node that jobs can request."""
    default_memory_GB: OptionalCount = None
    """Memory that a job requests on each node; replaces both defaults of `node`."""
    memory_per_gpu_GB: OptionalCount = None
    """Memory that a job requests with each GPU."""
    driver: DriverVersion = ""
    """Version of the NVIDIA driver."""
    gres: Gres = ""
    """Slurm's name of the GPUs."""
    options: tuple[Text, ...] = ()
    """Scheduler options of jobs in the partition, after those of `queue`; one word each."""
    interfaces: tuple[Interface, ...] = ()
    """Network interfaces of NCCL's sockets by their whole names; Gloo uses the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Network between nodes; device names and GIDs are never set here but read from sysfs at run time."""

    kind: FabricKind = "tcp"
    """Kind of network between nodes."""
    nics: OptionalSize = None
    """Network adapters per node."""
    line_rate_Gbps: OptionalSize = None
    """Line rate of all NICs of a node together, in 1e9 bit/s."""
    host_libs: ByRule = "none"
    """``auto``: use the host's libfabric, libcxi and aws-ofi-nccl where the image's glibc can load them."""
    head_suffix: HostSuffix = ""
    """End of the head's host name on the fast network, if Slurm's node list lacks it, for example ``i``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Defaults and required fields of a job on the system; an empty string means "not set"."""

    name: Line = ""
    """Queue, partition or pool."""
    account: Line = ""
    """Account or project that pays for jobs."""
    qos: Line = ""
    """Slurm's quality of service."""
    time: Walltime = ""
    """``HH:MM:SS``."""
    required: tuple[JobField, ...] = ()
    """Fields that every job must set, for example ``account``."""
    limits: Mapping[Line, Walltime] = field(default_factory=dict)
    """Time limit of each queue or QoS by its name, ``HH:MM:SS``."""
    sif: tuple[Text, ...] = ()
    """Scheduler options of a job that converts or builds an image, with its queue and QoS."""
    options: tuple[Text, ...] = ()
    """Further scheduler options of every job, one word each; not in a partition with ``gpus: 0``."""
    srun: tuple[SrunOption, ...] = ()
    """Options of ``srun`` alone, which starts the command on each node: ``--cpu-bind=none``."""
    output: Literal["joined", "separate"] = "joined"
    """``separate``: Slurm writes a batch job's stderr to a file of its own, ``NAME-ID.err``."""
    chunk: tuple[Word, ...] = ()
    """Further PBS resources of every chunk of ``select``, for example ``sales_op=blanca``."""
    client: Literal["", "v1", "v2"] = ""
    """RunAI's client: ``v1`` (``runai submit``) or ``v2`` (``runai training submit``); empty: on PATH."""
    node_pools: tuple[NodePool, ...] = ()
    """RunAI's node pools for a job, for example ``h100``; the first one with room takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Destination of an archive: ``rsync ARCHIVE host:directory``."""

    host: Host = ""
    """``[USER@]HOST`` that archives are copied to."""
    directory: Line = ""
    """Folder on that host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFacts:
    """Facts of a recipe about the system that the image is for."""

    title: Line = ""
    """Name of the system, for people."""
    scheduler: Line = "standalone"
    """slurm, pbs, runai, mpi, standalone, or the name of a plug-in's system."""
    runtime: Runtime = Runtime()
    node: Node = Node()
    partitions: Mapping[PartitionName, Partition] = field(default_factory=dict)
    """Slurm partitions by their names, with the values that differ from `node`."""
    partition_list: Literal["partial", "complete"] = "partial"
    """``complete``: `partitions`, `queue.name` and `queue.limits` name all of them; others are refused."""
    fabric: Fabric = Fabric()
    queue: Queue = Queue()
    transfer: Transfer = Transfer()
    env: Mapping[EnvName, SiteValue] = field(default_factory=dict)
    """Variables of each command, unless the user sets them; ``$NAME`` in one is replaced on the node.

    The entry point sets them, or ``imgkit run`` for other programs. They are never baked as ENV."""
    known_issues: tuple[KnownIssue, ...] = ()
    """Faults of versions and settings that nodes and ``imgkit check`` look for, besides imgkit's own rows."""

    def in_partition(self, partition: str) -> SystemFacts:
        """Return these facts for jobs in `partition`, with its values in `node` and its options in `queue`.

        If the recipe does not list the partition, `node` and `queue` stay unchanged.
        """
        listed = self.partitions.get(partition, Partition())  # the default has no values
        options = (*self.queue.options, *listed.options)
        if listed.gpus == 0 and self.node.gpus:
            # The options of `queue` are for nodes with GPUs. One of them may be a constraint that this
            # partition's nodes do not meet.
            options = listed.options
        return dataclasses.replace(
            self,
            node=_apply_partition(self.node, listed),
            queue=dataclasses.replace(self.queue, options=options),
        )

    def on_node(self, env: Mapping[str, str]) -> SystemFacts:
        """Return these facts with the values of `self.env` as they are on this node.

        Variables of the site in the values are replaced: ``$EBROOTNCCL/lib`` becomes
        ``/apps/NCCL/2.20.5/lib``. If the variable with the job's folder (`JOB_FOLDER`) is not set, the
        current folder is used. A variable of the site may be missing if the user has set the recipe's
        variable, because the recipe's value is not used then.

        Parameters
        ----------
        env : the environment on the node.

        Raises
        ------
        UsageError : a variable of the site is not set on this node.
        """
        site_env = {JOB_FOLDER: env.get("PWD", ""), **env}
        expanded_env = dict(self.env)
        for name, value in self.env.items():
            try:
                expanded_env[name] = expand_variables(value, site_env)
            except KeyError as error:
                if name in env:  # the user's value takes precedence, and the recipe's is not used
                    continue
                (missing,) = error.args
                raise UsageError(
                    f"system.env sets {name}={value}, but ${missing} is not set on this node",
                    where=str(SYSTEM_JSON),
                    hint=f"load the module that sets it (system.runtime.modules), or set {name} yourself",
                ) from None
        return dataclasses.replace(self, env=expanded_env)


def _apply_partition(node: Node, partition: Partition) -> Node:
    """Return `node` with the values of its fields that `partition` sets. None and "" mean "not set"."""
    changes = {}
    for node_field in dataclasses.fields(Node):
        value = getattr(partition, node_field.name)  # a partition has all fields of a node
        if value not in (None, ""):
            changes[node_field.name] = value
    # A default memory of the partition replaces both defaults of the node. So the one for each GPU is
    # removed, unless the partition sets it as well.
    if "default_memory_GB" in changes and "memory_per_gpu_GB" not in changes:
        changes["memory_per_gpu_GB"] = None
    return dataclasses.replace(node, **changes)


def to_json(facts: SystemFacts) -> str:
    """Return the text of system.json for `facts`. The same facts always result in the same text."""
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(facts)}, indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> SystemFacts:
    """Return the facts in the text of a system.json. Unknown keys, from a later version, are ignored.

    Raises
    ------
    ValueError : the text is not JSON, or a value has the wrong type or breaks a rule. The message names the
        field.
    """
    facts: SystemFacts = json_text.build_value(SystemFacts, json_text.parse(text), "system")
    return facts
