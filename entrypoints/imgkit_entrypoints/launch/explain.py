"""Known failure texts of torchrun and NCCL, with cause and remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a text means."""

    found: str
    """The text, as it was printed."""
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"why: {self.cause}\n  seen: {self.found}\n  -> {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    pattern: str
    cause: str
    """May use the pattern's named groups."""
    remedy: str
    stops: bool = False
    """What follows in the table would only repeat it."""


START_ALL = "start this command once on every node (Slurm: srun --ntasks-per-node=1; PBS: mpiexec --ppn 1)"

# The most telling first. Texts of torch 2.13, where not said otherwise.
KNOWN: tuple[_Known, ...] = (
    _Known(
        pattern=r"Timed out after .{1,40}? waiting for clients\. (?P<here>\d+)/(?P<all>\d+) clients joined",
        cause="only {here} of {all} nodes started torchrun",
        remedy=START_ALL,
        stops=True,
    ),
    _Known(
        pattern=r"EADDRINUSE|[Aa]ddress already in use|port: \d+ is (?:already in use|not available)",
        cause="another process on the head holds torchrun's port",
        remedy="give all nodes the same free one with --port N; `ss -ltnp` shows who holds it",
        stops=True,
    ),
    _Known(
        pattern=r"RendezvousTimeoutError",
        cause="not all nodes came to the rendezvous: some never started torchrun, or each has another "
        "--rdzv-id ($RANDOM differs per node)",
        remedy=START_ALL + "; take the rendezvous id from the job id",
        stops=True,
    ),
    _Known(
        pattern=r"RendezvousConnectionError",
        cause="nobody hosts the rendezvous, or it cannot be reached from here",
        remedy="check the head's name or address (--head), that the command runs there, and firewalls",
        stops=True,
    ),
    _Known(
        pattern=r"DistNetworkError.*trying to connect to \((?P<host>[^,]+), (?P<port>\d+)\)"
        r"|client socket has (?:timed out|failed).*trying to connect to \((?P<host2>[^,]+), (?P<port2>\d+)\)",
        cause="torchrun on the head does not answer at {host}:{port}",
        remedy="check that node 0 has started and that its address is the one that nodes reach (--head)",
        stops=True,
    ),
    _Known(
        pattern=r"CUDA out of memory|torch\.OutOfMemoryError",
        cause="a GPU's memory is full",
        remedy="a smaller batch, --amp bf16, or accumulation; nvidia-smi shows other users of the GPU",
    ),
    _Known(
        pattern=r"DataLoader worker.*(?:Bus error|killed by signal: Bus)|insufficient shared memory",
        cause="the shared memory (/dev/shm) is too small for the data workers",
        remedy="docker: --shm-size=8g or --ipc=host; singularity has the host's: df -h /dev/shm",
    ),
    _Known(
        pattern=r"failed to extend /dev/shm/nccl-",
        cause="the shared memory (/dev/shm) is too small for NCCL",
        remedy="docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium Memory",
    ),
    _Known(
        pattern=r"unlink shared memory .* failed",
        cause="something removed NCCL's files from /dev/shm while it ran: systemd does when a user's last "
        "session on the node ends",
        remedy="the node's administrator: RemoveIPC=no in /etc/systemd/logind.conf",
    ),
    _Known(
        pattern=r"DataLoader worker.*killed by signal: Killed|exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)",
        cause="a process was killed, most often by the kernel because memory ran out",
        remedy="ask for more memory (Slurm: --mem) or use fewer data workers; dmesg | grep -i oom",
    ),
    _Known(
        pattern=r"network AWS Libfabric not found|Failed to initialize any NET plugin",
        cause="NCCL_NET asks for the libfabric plugin, which NCCL did not find",
        remedy="put libnccl-net.so on LD_LIBRARY_PATH in the container, or unset NCCL_NET",
    ),
    _Known(
        pattern=r"No eligible providers were found",
        cause="libfabric has no device for the provider that FI_PROVIDER names; efa exists on EC2 only",
        remedy="unset FI_PROVIDER; on Slingshot it is cxi",
    ),
    _Known(
        pattern=r"Got completion with error 12",
        cause="an RDMA transfer timed out: a link or the other node is down, or routing between them fails",
        remedy="check the ports (ibstat) of the node that it names; on RoCE unset NCCL_IB_GID_INDEX",
    ),
    _Known(
        pattern=r"ibv_modify_qp failed",
        cause="NCCL could not connect an RDMA queue pair, often because of a wrong GID",
        remedy="unset NCCL_IB_GID_INDEX: NCCL from 2.21 on finds the GID by itself",
    ),
    _Known(
        pattern=r"Bootstrap : no socket interface found|no socket interface found",
        cause="NCCL found no network interface by the name in NCCL_SOCKET_IFNAME",
        remedy="unset it, or name one that `ip -br addr` shows as UP",
    ),
    _Known(
        pattern=r"no kernel image is available|CUDA driver version is insufficient",
        cause="the image's CUDA does not fit this GPU or its driver",
        remedy="take an older (driver) or newer (GPU) base image; nvidia-smi shows the driver",
    ),
    _Known(
        pattern=r"terminate called without an active exception",
        cause="gloo's threads outlived the interpreter of a script that had ended well: DDP keeps them",
        remedy="end the script by sys.stdout.flush(); os._exit(0) after destroy_process_group()",
    ),
    _Known(
        pattern=r"Connection reset by peer|Connection closed by peer|Socket closed|recvValue failed",
        cause="another rank's process ended first; the reason is in its output, not here. With no other "
        "message at all: the rendezvous port belongs to a different service",
        remedy="look for the first error of all nodes; for a foreign service on the port: --port N",
    ),
)


def explain(text: str) -> tuple[Explanation, ...]:
    """The known causes that `text` shows, the most telling first."""
    return tuple(_explanations(text))


def _explanations(text: str) -> Iterator[Explanation]:
    first = True
    for known in KNOWN:
        match = re.search(known.pattern, text)
        # A closed connection follows from nearly every failure: a word only where nothing else is known.
        if match is None or (known is KNOWN[-1] and not first):
            continue
        groups = {name.rstrip("2"): value for name, value in match.groupdict().items() if value is not None}
        line = text[text.rfind("\n", 0, match.start()) + 1 :].partition("\n")[0].strip()
        yield Explanation(found=line[:300], cause=known.cause.format(**groups), remedy=known.remedy)
        first = False
        if known.stops:
            return
