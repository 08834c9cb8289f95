"""Known failure messages of torchrun, torch and NCCL, each with its cause and a remedy.

`find_explanations` searches the error output of a failed run for the patterns in `KNOWN`. One failure often
leaves several of these messages, so the order of the table matters: the most specific patterns come first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MEMORY = "IMGKIT_MEM"
"""Variable with the job's request for memory as the user would type it, such as ``--mem 440G``."""


def memory_remedy(requested: str) -> str:
    """Return advice about a process that was killed because memory ran out.

    Parameters
    ----------
    requested : the value of `MEMORY`, such as ``--mem 440G``. Empty if the job got the default memory.
    """
    advice = "request more memory (imgkit run --mem SIZE)"
    if requested:
        advice = f"the job had {requested}; request more"
    return f"{advice}, or use fewer data workers; to check: dmesg | grep -i oom"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A known failure message that was found in the output, with its cause and remedy."""

    text: str
    """The line of the output in which the match begins, cut to 300 characters."""
    cause: str
    remedy: str

    @property
    def lines(self) -> tuple[str, ...]:
        """Return the three lines that are printed: the cause, the text and the remedy."""
        return f"why: {self.cause}", f"  seen: {self.text}", f"  -> {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """One entry of the table: a pattern for a failure message, its cause and its remedy."""

    pattern: str
    cause: str
    """The cause. It may use the pattern's named groups, such as ``{host}``."""
    remedy: str
    stops: bool = False
    """True if the search ends after this entry, because later entries would only repeat its explanation."""
    is_consequence: bool = False
    """True for a message that nearly every failure leaves. It is explained only if nothing else is known."""


# Stands in the table for the text of `memory_remedy`, because that text depends on the job.
_MEMORY_REMEDY = "memory"
START_ALL = "start this command once on every node (Slurm: srun --ntasks-per-node=1; PBS: mpiexec --ppn 1)"

# The most specific entries come first. The messages are those of torch 2.13, unless a comment says otherwise.
# A group name can be used only once in a pattern, so a second group for the same value has a 2 at the end:
# `host` and `host2`.
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
        remedy="give all nodes the same free port with --port N; `ss -ltnp` shows the process",
        stops=True,
    ),
    _Known(
        pattern=r"DistNetworkError.*trying to connect to \((?P<host>[^,]+), (?P<port>\d+)\)"
        r"|client socket has (?:timed out|failed).*trying to connect to \((?P<host2>[^,]+), (?P<port2>\d+)\)",
        cause="torchrun on the head does not answer at {host}:{port}",
        remedy="check that node 0 has started, and that the other nodes reach it by this address (--head)",
        stops=True,
    ),
    _Known(
        pattern=r"in _assign_worker_ranks\n(?:.*\n)*?json\.decoder\.JSONDecodeError",
        cause="another program changes the keys of torch's store, which has no authentication",
        remedy="start the job again: a new job gets another port; SECURITY.md says what a site can do",
        stops=True,
    ),
    _Known(
        pattern=r"Gloo connectFullMesh failed with|failed to connect, willRetry=.*?error=SO_ERROR",
        cause="Gloo connects every pair of ranks, and one connection failed: a firewall between the nodes "
        "drops the ports that the kernel hands out, or GLOO_SOCKET_IFNAME names a network that other nodes "
        "do not reach",
        remedy="let the nodes connect on all TCP ports (sudo ufw allow from NETWORK), or name the interface "
        "that all reach: GLOO_SOCKET_IFNAME. The roll call tests both, unless --no-network-test is given",
        stops=True,
    ),
    _Known(
        pattern=r"Timed out waiting (?P<time>\d+)ms for (?:recv|send) operation to complete",
        cause="a rank waited {time} ms for another rank that hangs, has exited, or whose packets are lost on "
        "the way: large ones are, if a switch or tunnel carries a smaller MTU than the nodes have",
        remedy="look for the first error on any node. If there is none, test the path: "
        "ping -c 3 -M do -s 1472 HOST; without an answer, lower the MTU: sudo ip link set dev IFNAME mtu N",
        stops=True,
    ),
    _Known(
        pattern=r"CUDA out of memory|torch\.OutOfMemoryError",
        cause="a GPU's memory is full",
        remedy="use a smaller batch, --amp bf16, or accumulation; nvidia-smi shows other users of the GPU",
    ),
    _Known(
        pattern=r"DataLoader worker.*(?:Bus error|killed by signal: Bus)|insufficient shared memory",
        cause="the shared memory (/dev/shm) is too small for the data workers",
        remedy="docker: --shm-size=8g or --ipc=host; singularity uses the host's: df -h /dev/shm",
    ),
    _Known(
        pattern=r"failed to extend /dev/shm/nccl-",
        cause="the shared memory (/dev/shm) is too small for NCCL",
        remedy="docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium Memory",
    ),
    _Known(
        pattern=r"unlink shared memory .* failed",
        cause="NCCL's files in /dev/shm were removed during the run: systemd does this when a user's last "
        "session on the node ends",
        remedy="ask the node's administrator for RemoveIPC=no in /etc/systemd/logind.conf",
    ),
    _Known(
        pattern=r"DataLoader worker.*killed by signal: Killed|exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)",
        cause="a process was killed, most often by the kernel because memory ran out",
        remedy=_MEMORY_REMEDY,
    ),
    _Known(
        pattern=r"network AWS Libfabric not found|Failed to initialize any NET plugin",
        cause="NCCL_NET asks for the libfabric plugin, but NCCL did not find it",
        remedy="put libnccl-net.so on LD_LIBRARY_PATH in the container, or unset NCCL_NET",
    ),
    _Known(
        pattern=r"No eligible providers were found",
        cause="libfabric has no device for the provider in FI_PROVIDER; efa exists on EC2 only",
        remedy="unset FI_PROVIDER; on Slingshot the provider is cxi",
    ),
    _Known(
        pattern=r"Got completion with error 12",
        cause="an RDMA transfer timed out: a link or the other node is down, or routing between them fails",
        remedy="check the ports (ibstat) of the node in that line; on RoCE unset NCCL_IB_GID_INDEX",
    ),
    _Known(
        pattern=r"ibv_modify_qp failed",
        cause="NCCL could not connect an RDMA queue pair, often because of a wrong GID",
        remedy="unset NCCL_IB_GID_INDEX: NCCL 2.21 and newer find the GID themselves",
    ),
    _Known(
        pattern=r"Bootstrap : no socket interface found|no socket interface found",
        cause="NCCL found no network interface by the name in NCCL_SOCKET_IFNAME",
        remedy="unset NCCL_SOCKET_IFNAME, or name an interface that `ip -br addr` shows as UP",
    ),
    _Known(
        pattern=r"no kernel image is available|CUDA driver version is insufficient",
        cause="the image's CUDA does not support this GPU or its driver",
        remedy="use an older base image (for the driver) or a newer one (for the GPU); nvidia-smi shows both",
    ),
    _Known(
        pattern=r"terminate called without an active exception",
        cause="the script succeeded, but gloo threads that DDP holds outlived the interpreter",
        remedy="end the script with sys.stdout.flush(); os._exit(0) after destroy_process_group()",
    ),
    _Known(
        pattern=r"(?:\[Errno 30\]|: cannot [^\n]*:) Read-only file system",
        cause="the program writes into the image, which is read-only; a relative path begins in the folder "
        "where the command starts",
        remedy="start in a copy of your code, which can be written to (imgkit run --code .), or in the job's "
        "folder (--workdir .)",
    ),
    _Known(
        pattern=r"(?:Failed to resolve|Could not resolve host:|ConnectionPool\(host=|couldn't connect to) ?"
        r"['\"]?(?:https?://)?(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*)",
        cause="this node cannot reach {host}; many clusters have no internet on their nodes",
        remedy='models of Hugging Face: data = ["hf://NAME"] in imgkit.toml; else download on a login node, '
        "for example into TORCH_HOME, or set a proxy of the site in HTTPS_PROXY",
    ),
    _Known(
        # C++ frames of c10d::TCPStore after such a line come from a node on which nothing has failed.
        pattern=r"Connection reset by peer|Connection closed by peer|Socket closed"
        r"|recvValue(?:WithTimeout)? failed|Failed to recv, got 0 bytes"
        r"|waitForInput: poll for socket .* likely a timeout",
        cause="another rank exited first, and its output shows why. If there is no other "
        "message at all, another service holds the rendezvous port",
        remedy="look for the first error on any node; if another service holds the port: --port N",
        is_consequence=True,
    ),
)


def find_explanations(text: str, *, memory: str = "", has_cause: bool = False) -> tuple[Explanation, ...]:
    """Return the explanations of all known failures in `text`, the most specific first.

    `text` is the error output of a run. Each entry of `KNOWN` contains a pattern, such as "CUDA out of
    memory", and what to do about that failure.

    Parameters
    ----------
    memory : the value of `MEMORY`, which is the memory that the job requested, or "".
    has_cause : True if a rank is known to have failed by itself, so that closed connections need no
        explanation.
    """
    explanations: list[Explanation] = []
    for entry in KNOWN:
        # Entries for consequences, such as a closed connection, come last in `KNOWN`. They say nothing new if
        # the cause is known or was explained by an entry before.
        if entry.is_consequence and (has_cause or explanations):
            continue
        match = re.search(entry.pattern, text)
        if match is None:
            continue
        explanations.append(_explain(entry, match, memory))
        if entry.stops:  # the entries after it would only repeat this explanation
            break
    return tuple(explanations)


def _explain(entry: _Known, match: re.Match[str], memory: str) -> Explanation:
    """Return the explanation of a failure: the line of the output, the cause and the remedy.

    Parameters
    ----------
    entry : the known failure.
    match : the place in the output at which the pattern of `entry` was found. Its named groups fill in the
        text of the cause.
    memory : the memory that the job requested, which the remedy of a lack of memory names, or "".
    """
    group_values = {}
    for name, value in match.groupdict().items():
        if value is not None:
            # A pattern can use a name only once, so `host2` is a second group with the meaning of `host`.
            group_values[name.rstrip("2")] = value
    output = match.string
    # The user should see the whole line in which the match begins, so go back to the start of that line.
    line_start = output.rfind("\n", 0, match.start()) + 1
    line, _, _ = output[line_start:].partition("\n")
    # The remedy for a lack of memory depends on the job, so the table only has a mark in its place.
    remedy = memory_remedy(memory) if entry.remedy == _MEMORY_REMEDY else entry.remedy
    return Explanation(text=line.strip()[:300], cause=entry.cause.format(**group_values), remedy=remedy)
