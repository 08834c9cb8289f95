"""System facts are the same after they are written to JSON and read again."""

from __future__ import annotations

import re

import pytest
from pydantic import TypeAdapter

from imgkit_entrypoints import system
from imgkit_entrypoints.system import Fabric, Node, Partition, Queue, Runtime, SystemFacts


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


def test_partition_has_nodes_of_its_own():
    big = Partition(gpus=8, gpu_model="H200", interfaces=("ib0",))
    facts = SystemFacts(node=Node(gpus=4, gpu_model="A100", cpus=64), partitions={"big": big})
    assert system.from_json(system.to_json(facts)) == facts
    assert facts.in_partition("big").node == Node(gpus=8, gpu_model="H200", cpus=64)
    assert facts.in_partition("small") == facts.in_partition("") == facts


def test_partition_without_gpus_has_none():
    facts = SystemFacts(node=Node(gpus=4), partitions={"cpu": Partition(gpus=0)})
    assert facts.in_partition("cpu").node.gpus == 0


def test_options_for_gpus_stay_out_of_a_partition_without_them():
    queue = Queue(options=("--exclusive",))
    cpu, big = Partition(gpus=0, options=("--constraint=cpu",)), Partition(options=("--constraint=big",))
    facts = SystemFacts(node=Node(gpus=4), queue=queue, partitions={"cpu": cpu, "big": big})
    assert facts.in_partition("cpu").queue.options == ("--constraint=cpu",)
    assert facts.in_partition("big").queue.options == ("--exclusive", "--constraint=big")
    no_gpus = SystemFacts(queue=queue, partitions={"cpu": cpu})  # its options are for nodes without GPUs
    assert no_gpus.in_partition("cpu").queue.options == ("--exclusive", "--constraint=cpu")


def test_json_is_the_same_each_time():
    facts = SystemFacts(env={"B": "2", "A": "1"})
    assert system.to_json(facts) == system.to_json(SystemFacts(env={"A": "1", "B": "2"}))


def test_keys_of_later_versions_are_ignored():
    assert system.from_json('{"schema": 1, "title": "x", "colour": "red"}').title == "x"


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Node, {"gpus": -1}),
        (Node, {"cpus": 0}),
        (Partition, {"gpus": -1}),
        (Partition, {"cpus_per_gpu": 0}),
        (Fabric, {"nics": 0}),
        (Fabric, {"line_rate_Gbps": 0}),
    ],
)
def test_impossible_numbers_are_refused_where_a_person_wrote_them(kind, values):
    with pytest.raises(ValueError, match="is too small"):
        TypeAdapter(kind).validate_python(values)


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        (SystemFacts(title="a\nb"), "system.title: contains a line break; write it on one line, "),
        (SystemFacts(env={"A;id;B": "1"}), "system.env: 'A;id;B' is not a variable name; allowed: "),
        (SystemFacts(env={"A": "$(id)"}), "system.env.A: $(...) is not executed: "),
        (SystemFacts(node=Node(gpus=-1)), "system.node.gpus: -1 is too small; at least 0"),
    ],
)
def test_file_of_an_image_that_breaks_a_rule_is_refused(facts, problem):
    with pytest.raises(ValueError, match="^" + re.escape(problem)):
        system.from_json(system.to_json(facts))
