"""Find the known issues that affect a node, and set the variables that work around them.

Known issues are rows of a table. Each row has conditions on facts of the node, such as ``nccl < 2.21``, or on
variables, such as ``$NCCL_PROTO = LL128``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from imgkit_entrypoints import cuda_drivers, known_issues
from imgkit_entrypoints.fabric import library_path, plugin
from imgkit_entrypoints.fabric.fabric_plan import FabricPlanBuilder
from imgkit_entrypoints.facts import software
from imgkit_entrypoints.facts.host_facts import Candidate, Library
from imgkit_entrypoints.facts.host_libs import PLUGINS
from imgkit_entrypoints.known_issues import FACTS, IssueResult, Value


def apply_known_issues(plan: FabricPlanBuilder) -> tuple[IssueResult, ...]:
    """Set the variables that work around known issues of this node, and return the result of every issue.

    An issue is a row of a table. It has conditions, such as ``nccl < 2.21``, and an effect, such as a
    variable to set. The rows are evaluated in order, so conditions can test variables that an earlier row has
    set.

    Raises
    ------
    UsageError : a file with known issues is not valid.
    """
    # The facts are collected once. Variables may change with each row, so `lookup` asks the plan each time.
    node_facts = _collect_node_facts(plan)

    def lookup(name: str) -> Value:
        # A condition names a fact such as "nccl", or a variable such as "$NCCL_ALGO".
        if name in FACTS:
            return node_facts[name]
        return _find_variable_value(plan, name.removeprefix("$"))

    results = []
    for issue in known_issues.load_issues(plan.system.known_issues, plan.env):
        result = known_issues.evaluate_issue(issue, lookup)
        results.append(result)
        # Issues with the effects "warn" and "refuse" are only in the result. Callers report them.
        if result.state == "match" and issue.effect == "set":
            for variable, value in issue.env.items():
                plan.set_variable(variable, value, result.message)
    return tuple(results)


def _find_variable_value(plan: FabricPlanBuilder, name: str) -> Value:
    """Return the value that workers would get for the variable `name`, with its evidence for messages.

    A variable that is not set has the value "". The value counts as requested if the user or the recipe has
    set it. A value that only the image or imgkit has set is not requested.
    """
    worker_value = plan.worker_value(name) or ""
    if plan.preset(name) is not None:  # set by the user, the recipe or the image, which the evidence names
        evidence = plan.describe(name)
    elif worker_value:  # set by imgkit
        evidence = f"{name}={worker_value!r}"
    else:
        evidence = f"{name} is not set"
    return Value(worker_value, evidence, is_requested=plan.requested_preset(name) is not None)


class _Fact(NamedTuple):
    """A fact about a node, with its source for messages."""

    text: str
    """The value of the fact, or "" if it is unknown."""
    source: str = ""
    """What shows the value, such as a file or a variable, or "" if messages do not name it."""


def _collect_node_facts(plan: FabricPlanBuilder) -> Mapping[str, Value]:
    """Return the values of all facts that conditions of known issues can test, by name.

    The value of an unknown fact is "".
    """
    facts_by_name = {**_list_system_facts(plan), **_list_network_library_facts(plan)}
    node_facts = {}
    for name in FACTS:
        fact = facts_by_name.get(name, _Fact(""))
        node_facts[name] = Value(fact.text, _quote_fact(name, fact))
    return node_facts


def _list_system_facts(plan: FabricPlanBuilder) -> Mapping[str, _Fact]:
    """Return the facts about the hardware, the job and the software of a node, except network libraries."""
    facts, env = plan.facts, plan.env
    # CUDA_VERSION is a variable of NVIDIA's base images.
    cuda = facts.torch_cuda or env.get("CUDA_VERSION", "")
    # Slurm writes the tasks per node of the job step as "4(x2),3". The number for the first node is enough.
    tasks = re.match(r"[0-9]{1,9}", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return {
        "arch": _Fact(facts.arch),
        "cuda": _Fact(cuda),
        "cuda_compat": _Fact(_describe_compat(plan)),
        "cuda_driver": _Fact(str(cuda_drivers.first_driver(cuda) or ""), cuda),
        "driver": _Fact(facts.driver_version),
        "fabric": _Fact(plan.kind),
        "gpu": _find_gpu_models(plan),
        "gpus": _Fact(str(facts.gpus)),
        "image_nccl": _Fact(facts.image_nccl),
        "kernel": _Fact(facts.kernel),
        "libcudart": _Fact("present" if facts.library("libcudart.so") else "absent"),
        "nccl": _Fact(facts.nccl_version, facts.nccl_source),
        "nccl_of": _Fact(facts.nccl_of),
        "nodes": _Fact(str(plan.nnodes)),
        "numa_calls": _Fact("refused" if facts.numa_fault else "allowed", facts.numa_fault),
        "tasks": _Fact(tasks[0] if tasks else ""),
        "torch": _Fact(facts.torch_version),
        "ucx": _Fact(env.get("OPENUCX_VERSION", ""), "OPENUCX_VERSION"),
    }


def _find_gpu_models(plan: FabricPlanBuilder) -> _Fact:
    """Return the models of the node's GPUs, each once, or the recipe's model if the driver shows no GPU."""
    devices = plan.facts.gpu_devices
    if not devices:
        return _Fact(plan.system.node.gpu_model, "the recipe")
    models = dict.fromkeys(device.model for device in devices)  # in the order of the devices
    return _Fact(", ".join(models), f"/proc/driver/nvidia/gpus/{devices[0].address}/information")


def _list_network_library_facts(plan: FabricPlanBuilder) -> Mapping[str, _Fact]:
    """Return the facts about NCCL's network plug-in and libfabric, by name.

    A library that workers cannot load has no facts.
    """
    library_facts = {}
    net_plugin = _find_net_plugin(plan)
    if net_plugin:
        library_facts["aws_ofi_nccl"] = _Fact(net_plugin.version, net_plugin.path)
        library_facts["plugin_opens"] = _Fact(net_plugin.opens, net_plugin.path)
    libfabric = _find_library(plan, "libfabric.so.1")
    if libfabric:
        library_facts["libfabric"] = _Fact(libfabric.version, libfabric.path)
    return library_facts


def _quote_fact(name: str, fact: _Fact) -> str:
    """Return a fact with its source for a message: ``NCCL 2.20.5 (/usr/lib/libnccl.so.2 -> ...)``."""
    if fact.text and fact.source:
        return f"{FACTS[name]} {fact.text} ({fact.source})"
    return f"{FACTS[name]} {fact.text or 'unknown'}"


def _find_net_plugin(plan: FabricPlanBuilder) -> Library | Candidate | None:
    """Return the network plug-in that NCCL would open, or None if there is none.

    NCCL_NET_PLUGIN lists names of plug-ins. For each name, NCCL tries several files and opens the first one
    that exists.
    """
    file_names: list[str] = []
    for name in software.split_plugins(plan.worker_value(plugin.VARIABLE) or ""):
        file_names += software.plugin_files(name)
    # Without the variable NCCL opens libnccl-net.so, which is the last of PLUGINS.
    for file_name in file_names or reversed(PLUGINS):
        library = _find_library(plan, file_name)
        if library:
            return library
    return None


def _find_library(plan: FabricPlanBuilder, name: str) -> Library | Candidate | None:
    """Return the library that workers load under `name`, or None if there is none.

    If the plan links a library of the host into the container under this name, workers load the host's
    library. Otherwise they load the image's.
    """
    if name in plan.links and plan.facts.host_libraries:
        # Compare files, because a link may have another name than the file on the host.
        for candidate in plan.facts.host_libraries.host:
            if candidate.target == plan.links[name]:
                return candidate
    return plan.facts.library(name)


def _describe_compat(plan: FabricPlanBuilder) -> str:
    """Return ``used``, ``unused`` or ``absent``: the state of CUDA's forward compatibility in the image.

    Forward compatibility is a libcuda.so in the image that runs a newer CUDA on an older driver.
    """
    if any(item.variable == library_path.COMPAT_KEY and item.used for item in plan.decisions):
        return "used"
    return "unused" if plan.facts.has_cuda_compat else "absent"
