"""NCCL's search for a GID, written twice: imgkit's rule, and the scan of its source (net_ib/connect.cc)."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from imgkit_entrypoints.fabric import ports
from imgkit_entrypoints.facts.host_facts import Gid

V1, V2 = "IB/RoCE v1", "RoCE v2"
ZERO = ("::", "")
BARE = ("fe80::", V1)
LOCAL_V1, LOCAL_V2 = ("fe80::1:2:3", V1), ("fe80::1:2:3", V2)
GLOBAL = ("2001:db8::7", V2)
MAPPED_V1, MAPPED_V2 = ("::ffff:10.0.0.7", V1), ("::ffff:10.0.0.7", V2)
UNTYPED = ("::ffff:10.0.0.7", "")
"""A slot that the container's sysfs does not map: its type answers EINVAL, and NCCL skips it."""
KINDS = (ZERO, BARE, LOCAL_V1, LOCAL_V2, GLOBAL, MAPPED_V1, MAPPED_V2, UNTYPED)
Slot = tuple[str, str]


def rule(table: Sequence[Slot]) -> int:
    """Apply imgkit's rule to a table of facts, which has no empty slots."""
    gids = [
        Gid(index=index, value=ipaddress.IPv6Address(address).exploded, kind=kind)
        for index, (address, kind) in enumerate(table)
        if address != "::"
    ]
    gid = ports.pick_gid(gids)
    return gid.index if gid else 0


def scan(table: Sequence[Slot]) -> int:
    """Scan like NCCL with AF_INET, RoCE version 2 and no address range: keep the best slot so far."""
    best = 0
    for candidate in range(1, len(table)):
        if not is_mapped(table[candidate]):
            continue
        if not is_mapped(table[best]):
            best = candidate
            continue
        better = version(table[best]) != 2 or not is_valid(table[best])
        if is_valid(table[candidate]) and version(table[candidate]) == 2 and better:
            best = candidate
    return best


def is_mapped(slot: Slot) -> bool:
    raw = ipaddress.IPv6Address(slot[0]).packed
    return raw[:12] == bytes(10) + b"\xff\xff"


def is_valid(slot: Slot) -> bool:
    raw = ipaddress.IPv6Address(slot[0]).packed
    configured = raw != bytes(16) and raw != b"\xfe\x80" + bytes(14)
    return configured and raw[:8] != b"\xfe\x80" + bytes(6)


def version(slot: Slot) -> int:
    return {V1: 1, V2: 2}.get(slot[1], -1)


def test_rule_is_nccls_scan_exhaustively():
    tables = (table for size in range(1, 5) for table in itertools.product(KINDS, repeat=size))
    assert all(rule(table) == scan(table) for table in tables)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=256))
def test_rule_is_nccls_scan_anywhere(table):
    assert rule(table) == scan(table)
