"""Recipes of some systems, and the facts of the machines in the parent folder's table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from imgkit_entrypoints import facts
from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.system import Fabric, Node, SystemFacts

RECIPES = {
    "mn5": SystemFacts(
        title="MareNostrum 5",
        node=Node(gpus=4, gpu_model="NVIDIA H100 64GB"),
        fabric=Fabric(kind="infiniband", nics=4, line_rate_Gbps=800),
    ),
    "lambda": SystemFacts(env={"NCCL_IB_DISABLE": "1"}),
    "rcp": SystemFacts(
        fabric=Fabric(kind="roce", nics=1),
        env={"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "8"},
    ),
    "olivia": SystemFacts(
        node=Node(gpus=4, gpu_model="NVIDIA GH200 120GB"),
        fabric=Fabric(kind="slingshot", nics=4, line_rate_Gbps=800),
        env={"NCCL_SOCKET_IFNAME": "hsn0,hsn1,hsn2,hsn3", "NCCL_PROTO": "^LL128", "HSA_X": "1"},
    ),
}


@pytest.fixture
def recipes() -> Mapping[str, SystemFacts]:
    """System facts of some recipes."""
    return RECIPES


@pytest.fixture(scope="session")
def machine(kept_tree: Callable[[str], Path]) -> Callable[..., HostFacts]:
    """Function that reads the facts of a tree, by its name, the image's NCCL version and `env`."""

    @functools.cache
    def read(name: str, variables: tuple[tuple[str, str], ...]) -> HostFacts:
        return facts.gather(env={**dict(variables), "IMGKIT_ROOT": str(kept_tree(name))})

    def gather(name: str, nccl: str = "2.27.3", env: Mapping[str, str] = MappingProxyType({})) -> HostFacts:
        variables = {**env, "IMGKIT_NCCL_VERSION": nccl}
        return read(name, tuple((key, value) for key, value in variables.items() if value))

    return gather
