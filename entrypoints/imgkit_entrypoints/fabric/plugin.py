"""Check that the network plug-in named by ``NCCL_NET_PLUGIN`` can be opened.

NCCL first opens a file with exactly this name, and then ``libnccl-net-NAME.so``. If neither file exists, NCCL
silently continues with its built-in networks (user guide, NCCL_NET_PLUGIN).
"""

from __future__ import annotations

from collections.abc import Collection

from imgkit_entrypoints.fabric.fabric_plan import FabricPlanBuilder
from imgkit_entrypoints.facts import HostFacts, software

VARIABLE = software.NET_PLUGIN


def is_ofi(value: str) -> bool:
    """Return whether a value of NCCL_NET_PLUGIN selects aws-ofi-nccl.

    Examples are ``ofi`` and ``/opt/libnccl-net-ofi.so``.
    """
    return "ofi" in value.rpartition("/")[2].lower()


def plugin_files(facts: HostFacts, value: str) -> tuple[str, ...]:
    """Return the paths of the existing plug-in files that a value of NCCL_NET_PLUGIN selects.

    For example, the value ``ofi`` selects libnccl-net-ofi.so.
    """
    paths = []
    for plugin in software.split_plugins(value):
        for name in software.plugin_files(plugin):
            library = facts.library(name)
            if library:
                paths.append(library.path)
    return tuple(paths)


def check_plugin(plan: FabricPlanBuilder) -> None:
    """Check that every network plug-in in NCCL_NET_PLUGIN has a file that NCCL can open.

    If the file is missing and the value comes from the image, the value is dropped, so that NCCL uses its
    default. If the value comes from the user or the recipe, it is kept and the plan gets a warning.
    """
    preset = plan.preset(VARIABLE)
    if preset is None:
        return
    missing = _find_missing_files(plan, preset.value)
    if not missing:
        return
    names = " or ".join(missing)
    if preset.origin == "image":
        plan.drop_variable(VARIABLE, f"{names} is not on the library path")
        return
    # NCCL has no network of its own for Slingshot, so it falls back to TCP.
    consequence = "NCCL ignores it"
    if plan.kind == "slingshot":
        consequence += " and uses TCP"
    plan.add_warning(
        f"{plan.describe(VARIABLE)} cannot be opened, there is no {names} on the library path: {consequence}",
        f"put its folder on LD_LIBRARY_PATH, or {plan.unset_hint(VARIABLE)}",
        failed_check="plug-in",
    )


def _find_missing_files(plan: FabricPlanBuilder, value: str) -> Collection[str]:
    """Return the file names that NCCL would try in vain, in its order.

    `value` is a value of NCCL_NET_PLUGIN. NCCL tries several names for each plug-in in the value. If one of
    these files exists, none of the plug-in's names is returned.
    """
    missing: dict[str, None] = {}  # a dict keeps each name once, in order
    for plugin in software.split_plugins(value):
        names = software.plugin_files(plugin)
        if not any(plan.facts.library(name) or name in plan.links for name in names):
            missing.update(dict.fromkeys(names))
    return missing
