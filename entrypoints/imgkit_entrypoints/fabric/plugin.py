"""Check that the network plug-in named by ``NCCL_NET_PLUGIN`` can be opened.

NCCL opens the name as it is, then ``libnccl-net-NAME.so``. If neither exists, NCCL silently goes on with its
own networks (user guide, NCCL_NET_PLUGIN).
"""

from __future__ import annotations

from collections.abc import Collection

from imgkit_entrypoints.fabric.fabric_plan import FabricPlanBuilder
from imgkit_entrypoints.facts import HostFacts, software

VARIABLE = software.NET_PLUGIN


def is_ofi(value: str) -> bool:
    """Return True if a value of NCCL_NET_PLUGIN names aws-ofi-nccl: ``ofi``, ``/opt/libnccl-net-ofi.so``."""
    return "ofi" in value.rpartition("/")[2].lower()


def plugin_files(facts: HostFacts, value: str) -> tuple[str, ...]:
    """Return the paths of the plug-in files that a value of NCCL_NET_PLUGIN names and that exist.

    ``ofi``, for example, stands for libnccl-net-ofi.so.
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

    If a file is missing, the image's value is dropped, so that NCCL searches by itself. A value of the user
    or the recipe is kept with a warning.
    """
    preset = plan.preset(VARIABLE)
    if preset is None:
        return
    missing = _missing_files(plan, preset.value)
    if not missing:
        return
    names = " or ".join(missing)
    if preset.origin == "image":
        plan.drop_variable(VARIABLE, f"{names} is not on the library path")
        return
    consequence = "NCCL ignores it"
    if plan.kind == "slingshot":
        consequence += " and uses TCP"
    plan.add_warning(
        f"{plan.describe(VARIABLE)} cannot be opened, there is no {names} on the library path: {consequence}",
        f"put its folder on LD_LIBRARY_PATH, or {plan.unset_hint(VARIABLE)}",
        failed_check="plug-in",
    )


def _missing_files(plan: FabricPlanBuilder, value: str) -> Collection[str]:
    """Return the names that NCCL tries for each plug-in in `value` that has no file, in NCCL's order."""
    missing: dict[str, None] = {}
    for plugin in software.split_plugins(value):
        names = software.plugin_files(plugin)
        if not any(plan.facts.library(name) or name in plan.links for name in names):
            missing.update(dict.fromkeys(names))
    return missing
