"""The state of a node: traffic and errors that its ports count, GPU clocks, and what holds them down.

The byte counters show the traffic that left the node, whatever NCCL reports.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.arguments import digits
from imgkit_entrypoints.facts import Reader

QUERY = ("index", "clocks.sm", "clocks.max.sm", "temperature.gpu")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The field's name since driver 535, and its older name. nvidia-smi refuses a query with an unknown name."""
SLOWED: Mapping[int, str] = {
    0x4: "the power cap (software)",
    0x8: "a hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power brake (hardware)",
}
"""Bits of nvmlClocksEventReasons (nvml.h) that cost speed; idle and user-set clocks are not among them."""
QUERY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClocks:
    """One GPU at one moment; None where the driver reports no value."""

    index: int
    sm_MHz: int | None
    most_MHz: int | None
    """Largest possible `sm_MHz`."""
    temperature_C: int | None
    slowed_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One node at one moment."""

    gpus: tuple[GpuClocks, ...]
    errors: Mapping[str, int]
    """``mlx5_0:1 symbol_error`` and the like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConditions:
    """One node's condition before the first size and after the last."""

    host: str
    before: Condition
    after: Condition


def read_condition(reader: Reader, *, gpus: bool) -> Condition:
    """Read this node's condition now; runs nvidia-smi only if `gpus`."""
    return Condition(gpus=_gpus() if gpus else (), errors=read_errors(reader))


def _gpus() -> tuple[GpuClocks, ...]:
    for reasons in REASONS:
        query = ("nvidia-smi", f"--query-gpu={','.join((*QUERY, reasons))}", "--format=csv,noheader,nounits")
        try:
            done = subprocess.run(
                query,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=QUERY_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return ()
        if done.returncode == 0:
            return parsed_clocks(done.stdout)
    return ()


def parsed_clocks(text: str) -> tuple[GpuClocks, ...]:
    """Parse the CSV lines of nvidia-smi; skips lines of any other form."""
    found = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(QUERY) + 1 or digits(values[0]) is None:
            continue
        sm, most, temperature = map(digits, values[1:4])
        try:
            bits = int(values[4], 16)
        except ValueError:
            bits = 0
        slowed = tuple(name for bit, name in SLOWED.items() if bits & bit)
        found.append(
            GpuClocks(
                index=int(values[0]), sm_MHz=sm, most_MHz=most, temperature_C=temperature, slowed_by=slowed
            )
        )
    return tuple(found)


def sentences(nodes: Sequence[NodeConditions]) -> tuple[str, ...]:
    """Report the clocks of all GPUs, GPUs that are slowed down, and error counters that rose."""
    return (*_clocks(nodes), *(text for node in nodes for text in (*_slowed(node), *_errors(node))))


def _clocks(nodes: Sequence[NodeConditions]) -> Iterator[str]:
    ranges = []
    for when in ("before", "after"):
        gpus = [gpu for node in nodes for gpu in getattr(node, when).gpus]
        clocks = [gpu.sm_MHz for gpu in gpus if gpu.sm_MHz is not None]
        if clocks:
            ranges.append(f"{min(clocks)} to {max(clocks)} MHz {when}")
            most = max((gpu.most_MHz or 0 for gpu in gpus), default=0)
    if ranges:
        yield f"GPU clocks: {', '.join(ranges)}, of {most} MHz."


def _slowed(node: NodeConditions) -> Iterator[str]:
    for when in ("before", "after"):
        for gpu in getattr(node, when).gpus:
            if gpu.slowed_by:
                warm = "" if gpu.temperature_C is None else f" at {gpu.temperature_C} C"
                by = " and ".join(gpu.slowed_by)
                yield f"{node.host}: GPU {gpu.index} was slowed down by {by}{warm}, {when} the run."


def _errors(node: NodeConditions) -> Iterator[str]:
    for name, now in node.after.errors.items():
        before = node.before.errors.get(name, now)
        if now > before:
            yield f"{node.host}: {name} rose from {before} to {now} during the run."


_ERRORS_IB = ("symbol_error", "port_rcv_errors", "port_xmit_discards", "link_downed")
_ERRORS_ROCE = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err")
_ERRORS_NET = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped")

_INSIDE = ("lo", "docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "tun", "kube", "podman", "ifb")
_OVER_RDMA = ("ib", "hsn")
"""Prefixes of interfaces whose bytes an RDMA port counts as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Byte counters of one port or interface, or their growth."""

    sent_bytes: int
    received_bytes: int

    def since(self, before: Count) -> Count:
        """The growth since `before`. A counter that went back was reset, and counts from 0."""
        return Count(
            sent_bytes=_grown(before.sent_bytes, self.sent_bytes),
            received_bytes=_grown(before.received_bytes, self.received_bytes),
        )


def _grown(before: int, now: int) -> int:
    return now - before if now >= before else now


def read_ports(reader: Reader) -> dict[str, Count]:
    """The counters of every port by its name: ``mlx5_0:1``, ``cxi0``, ``eth0``."""
    found: dict[str, Count] = {}
    for name in reader.names("/sys/class/infiniband"):
        for number in reader.names(f"/sys/class/infiniband/{name}/ports"):
            counted = _infiniband(reader, f"/sys/class/infiniband/{name}/ports/{number}")
            if counted is not None:
                found[f"{name}:{number}"] = counted
    for name in reader.names("/sys/class/cxi"):
        folder = f"/sys/class/cxi/{name}/device/telemetry"
        sent, received = (_stamped(reader, f"{folder}/hni_sts_{way}_ok_octets") for way in ("tx", "rx"))
        if sent is not None and received is not None:
            found[name] = Count(sent_bytes=sent, received_bytes=received)
    for name in reader.names("/sys/class/net"):
        if any(inner.startswith("lower_") for inner in reader.names(f"/sys/class/net/{name}")):
            continue  # a bond, bridge or VLAN: the interface below it counts the same bytes
        folder = f"/sys/class/net/{name}/statistics"
        sent, received = reader.number(f"{folder}/tx_bytes"), reader.number(f"{folder}/rx_bytes")
        if sent is not None and received is not None:
            found[name] = Count(sent_bytes=sent, received_bytes=received)
    return found


def read_errors(reader: Reader) -> dict[str, int]:
    """The error counters of every port: ``mlx5_0:1 symbol_error``, ``eth0 rx_dropped``."""
    found: dict[str, int] = {}

    def take(name: str, folder: str, kinds: tuple[str, ...]) -> None:
        for kind in kinds:
            if (count := reader.number(f"{folder}/{kind}")) is not None:
                found[f"{name} {kind}"] = count

    for name in reader.names("/sys/class/infiniband"):
        for number in reader.names(f"/sys/class/infiniband/{name}/ports"):
            folder = f"/sys/class/infiniband/{name}/ports/{number}"
            take(f"{name}:{number}", f"{folder}/counters", _ERRORS_IB)
            take(f"{name}:{number}", f"{folder}/hw_counters", _ERRORS_ROCE)
    for name in reader.names("/sys/class/net"):
        if not name.startswith(_INSIDE):
            take(name, f"/sys/class/net/{name}/statistics", _ERRORS_NET)
    return found


def _infiniband(reader: Reader, folder: str) -> Count | None:
    # The unit is words of four bytes: Linux, Documentation/ABI/stable/sysfs-class-infiniband.
    sent, received = (reader.number(f"{folder}/counters/port_{way}_data") for way in ("xmit", "rcv"))
    if sent is None or received is None:
        return None
    return Count(sent_bytes=4 * sent, received_bytes=4 * received)


def _stamped(reader: Reader, path: str) -> int | None:
    """A telemetry file holds ``value@time``."""
    value = (reader.text(path) or "").partition("@")[0]
    return digits(value)


def since(before: Mapping[str, Count], now: Mapping[str, Count]) -> dict[str, Count]:
    """The growth of every port that is in both."""
    return {name: now[name].since(before[name]) for name in now if name in before}


def total(parts: Sequence[Mapping[str, Count]]) -> dict[str, Count]:
    """The sum over `parts` of every port that is in all of them."""
    first, *rest = parts
    return {
        name: Count(
            sent_bytes=sum(part[name].sent_bytes for part in parts),
            received_bytes=sum(part[name].received_bytes for part in parts),
        )
        for name in first
        if all(name in part for part in rest)
    }


def is_rdma(name: str) -> bool:
    """Whether the name is that of an RDMA port or a Slingshot NIC, rather than an interface."""
    return ":" in name or name.startswith("cxi")


def carriers(counts: Mapping[str, Count]) -> dict[str, Count]:
    """The ports that lead out of the node and carried traffic, with each byte counted once.

    RDMA traffic does not reach an interface's counters, so RoCE ports and their interfaces are both kept.
    Sockets over InfiniBand (ib0) and Slingshot (hsn0) appear in their port's counters too. Where sockets are
    most of that traffic, the interfaces are kept; otherwise the ports.
    """
    used = {
        name: count
        for name, count in counts.items()
        if (is_rdma(name) or not name.startswith(_INSIDE)) and (count.sent_bytes or count.received_bytes)
    }
    fast = {name for name in used if is_rdma(name)}
    over = {name for name in used if name not in fast and name.startswith(_OVER_RDMA)}
    sockets, everything = (sum(used[name].sent_bytes for name in names) for names in (over, fast))
    twice = over if 2 * sockets < everything else fast if over else set()
    return {name: count for name, count in used.items() if name not in twice}


def busiest(counts: Mapping[str, Count]) -> int:
    """Bytes through the node's ports, in the busier direction."""
    used = carriers(counts).values()
    return max(sum(count.sent_bytes for count in used), sum(count.received_bytes for count in used))
