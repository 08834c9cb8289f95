"""The arms of ``--compare``: ways through one network, and the variables that select each."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way through the network."""

    carrier: str
    """The transport that must have carried the arm's data: "RDMA" or "sockets"."""
    env: Mapping[str, str] = field(default_factory=dict)
    device: str = "cuda"
    """The only device type whose backend offers this choice."""


ARMS: Mapping[str, Arm] = {
    "rdma": Arm(carrier="RDMA"),
    # The launcher's fabric plan follows this variable: no verbs, and the interfaces that carry the data.
    "tcp": Arm(carrier="sockets", env={"NCCL_NET": "Socket"}),
}


def arms(text: str) -> tuple[str, str]:
    """The two names of ``--compare A,B``.

    Raises
    ------
    argparse.ArgumentTypeError : they are not two known arms.
    """
    names = text.split(",")
    if len(names) != 2 or names[0] == names[1] or not set(names) <= set(ARMS):
        raise argparse.ArgumentTypeError(f"{text!r} is not two of {', '.join(ARMS)}, as in rdma,tcp")
    return names[0], names[1]
