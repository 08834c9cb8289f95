"""System facts are the same after they are written to JSON and read again."""

from __future__ import annotations

import pytest

from imgkit_entrypoints import system
from imgkit_entrypoints.system import Fabric, Node, Queue, Runtime, SystemFacts


def test_facts_survive_json():
    facts = SystemFacts(
        title="a cluster",
        scheduler="slurm",
        runtime=Runtime(modules=("singularity",), options=("--nv",)),
        node=Node(gpus=4, cpus=80),
        fabric=Fabric(kind="infiniband", nics=4, line_rate_Gbps=800),
        queue=Queue(required=("account",)),
        env={"NCCL_CROSS_NIC": "1"},
    )
    assert system.from_json(system.to_json(facts)) == facts


def test_json_is_the_same_each_time():
    facts = SystemFacts(env={"B": "2", "A": "1"})
    assert system.to_json(facts) == system.to_json(SystemFacts(env={"A": "1", "B": "2"}))


def test_keys_of_later_versions_are_ignored():
    assert system.from_json('{"schema": 1, "title": "x", "colour": "red"}').title == "x"


@pytest.mark.parametrize("facts", [{"gpus": -1}, {"cpus": 0}])
def test_impossible_numbers_are_refused(facts: dict[str, int]):
    with pytest.raises(ValueError, match="at least"):
        Node(**facts)
