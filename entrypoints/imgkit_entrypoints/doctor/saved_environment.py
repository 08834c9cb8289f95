"""The variables in a doctor bundle: an allow-list decides what it holds; a replay runs nothing of it.

A name that is not on the list stays out, whatever it looks like: sites and plug-ins put secrets under every
prefix. Values lose passwords and tokens of known formats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from imgkit_entrypoints import facts, files, secret_patterns
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.fabric import lint
from imgkit_entrypoints.fabric.lint import KNOWN_NAMES

ENVIRONMENT = "environment"
"""Member of a bundle with one ``NAME=VALUE`` a line."""
_FAMILIES = re.compile(
    r"(NCCL|FI|GLOO|TORCH|TORCHELASTIC|CUDA|NVIDIA|OMP|IMGKIT|SLURM|SLURMD|PBS|PALS|PMI|PMIX|OMPI|PRTE|MPI|PET|"
    r"RUNAI|UCX|MASTER|LOCAL)_.*|LD_LIBRARY_PATH|RANK|WORLD_SIZE|NCPUS|LSB_DJOB_HOSTFILE"
)
"""Variables about a launch: a replay never takes them from the machine on which it runs."""
_LAUNCH = """
CUDA_LAUNCH_BLOCKING CUDA_VERSION CUDA_VISIBLE_DEVICES FI_CXI_DEFAULT_CQ_SIZE FI_CXI_DEFAULT_TX_SIZE
FI_CXI_DISABLE_HOST_REGISTER FI_CXI_RDZV_EAGER_SIZE FI_CXI_RDZV_GET_MIN FI_CXI_RDZV_PROTO
FI_CXI_RDZV_THRESHOLD FI_CXI_RX_MATCH_MODE FI_LOG_LEVEL FI_MR_CACHE_MONITOR FI_PROVIDER IMGKIT_CODE
IMGKIT_CUDA_COMPAT IMGKIT_DECIDED IMGKIT_DELTA IMGKIT_DEVICE IMGKIT_DIRECT IMGKIT_GRACE IMGKIT_HANG_AFTER
IMGKIT_HEAD IMGKIT_HOST_LIBS IMGKIT_JOB_ID IMGKIT_LOST_AFTER IMGKIT_MAX_FAILURES IMGKIT_NCCL_VERSION
IMGKIT_NNODES IMGKIT_NODES IMGKIT_NODE_RANK IMGKIT_NO_NETWORK_TEST IMGKIT_NPROC IMGKIT_PORT IMGKIT_PREFLIGHT
IMGKIT_REQUIRE_SECRET IMGKIT_ROLLCALL_TIMEOUT IMGKIT_RUN_DIR IMGKIT_SCHEDULER LD_LIBRARY_PATH LOCAL_RANK
LOCAL_WORLD_SIZE LSB_DJOB_HOSTFILE MASTER_ADDR MASTER_PORT MPI_LOCALNRANKS MPI_LOCALRANKID NCPUS
NVIDIA_DRIVER_CAPABILITIES NVIDIA_VISIBLE_DEVICES OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE
OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMP_NUM_THREADS PALS_APID PALS_LOCAL_RANKID PALS_LOCAL_SIZE
PALS_NODEID PALS_RANKID PALS_SIZE PBS_ENVIRONMENT PBS_JOBID PBS_NODEFILE PBS_NODENUM PBS_TASKNUM
PET_MASTER_ADDR PET_MASTER_PORT PET_NNODES PET_NODE_RANK PET_NPROC_PER_NODE PET_RDZV_ENDPOINT PET_RDZV_ID
PMIX_NAMESPACE PMI_LOCAL_RANK PMI_LOCAL_SIZE PMI_RANK PMI_SIZE RANK SLURMD_NODENAME SLURM_CPUS_PER_TASK
SLURM_JOBID SLURM_JOB_CPUS_PER_NODE SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_PARTITION
SLURM_LOCALID SLURM_NNODES SLURM_NODEID SLURM_NODELIST SLURM_PROCID SLURM_STEPID SLURM_STEP_ID
SLURM_STEP_NODELIST SLURM_STEP_NUM_NODES SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE TORCHELASTIC_RUN_ID
UCX_NET_DEVICES UCX_TLS WORLD_SIZE
"""
"""What the launch reads besides the variables of NCCL, Gloo and torch."""
ALLOWED = frozenset((*KNOWN_NAMES, *lint.OLD_NAMES, *_LAUNCH.split()))
_MOST_BYTES = 1 << 18


def select(env: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the allowed variables of `env`, secrets as stars, and the names about a launch left out."""
    names = sorted(name for name in env if _FAMILIES.fullmatch(name) and name != "IMGKIT_ROOT")
    variables = {
        name: secret_patterns.masked(env[name])
        for name in names
        if name in ALLOWED and env[name].isprintable() and not secret_patterns.in_name(name, env[name])
    }
    return variables, tuple(name for name in names if name not in variables)


def to_text(variables: Mapping[str, str]) -> str:
    """Return one ``NAME=VALUE`` a line, the value as it is."""
    return "".join(f"{name}={value}\n" for name, value in sorted(variables.items()))


def from_text(text: str) -> dict[str, str]:
    """Return the allowed variables in what `to_text` wrote."""
    pairs = (line.partition("=")[::2] for line in text.splitlines() if "=" in line)
    return {name: value for name, value in pairs if name in ALLOWED}


def is_replay(env: Mapping[str, str]) -> bool:
    """Return whether ``IMGKIT_ROOT`` is an unpacked bundle."""
    root = env.get("IMGKIT_ROOT")
    return bool(root) and Path(str(root), ENVIRONMENT).is_file()


def replayed(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return `env` with the bundle's variables about a launch instead of its own; without a bundle, `env`.

    The caller's own ``IMGKIT_*`` stay, to try another node rank or NCCL.

    Raises
    ------
    UsageError : the bundle's variables cannot be read.
    """
    if not is_replay(env):
        return env
    path = facts.root_of(env) / ENVIRONMENT
    try:
        text = files.read_text(path, most_bytes=_MOST_BYTES, errors="replace")
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error
    host = {name: value for name, value in env.items() if not _FAMILIES.fullmatch(name)}
    options = {name: value for name, value in env.items() if name.startswith("IMGKIT_")}
    return {**host, **from_text(text), **options}
