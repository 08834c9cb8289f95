"""Byte and error counters of a node's ports: the traffic that left it, whatever NCCL reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.arguments import digits
from imgkit_entrypoints.facts import Reader

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


def read(reader: Reader) -> dict[str, Count]:
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


def errors(reader: Reader) -> dict[str, int]:
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
