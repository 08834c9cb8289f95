"""The host half of imgkit: from a recipe to a checked .sif and a job. Needs no torch.

The names below are the Python API, which is provisional: a minor version may change it. Each function takes
and returns frozen values, prints nothing, and reports progress to its argument `report`.
Importing this package loads none of its modules; each name loads its own at the first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from imgkit_entrypoints import __version__

if TYPE_CHECKING:
    from imgkit_builder.apptainer.build import BuiltSif
    from imgkit_builder.base.checks import Check
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.jobs.conversion import prepare_build, prepare_conversion
    from imgkit_builder.jobs.handle import JobHandle, find_job, run, submit_conversion
    from imgkit_builder.jobs.prepared import PreparedJob
    from imgkit_builder.jobs.request import JobRequest, SubmitRequest
    from imgkit_builder.jobs.submit import prepare
    from imgkit_builder.jobs.submitted import JobState, SubmittedJob
    from imgkit_builder.recipe.load import load
    from imgkit_builder.recipe.model import Recipe
    from imgkit_builder.sif.conversion import Converted
    from imgkit_builder.sif.conversion import Options as ConversionRequest
    from imgkit_builder.workflow.build import BuiltImage, ImagePlan, build, build_sif, plan
    from imgkit_builder.workflow.build_request import BuildRequest, SifBuildRequest
    from imgkit_builder.workflow.convert import convert
    from imgkit_builder.workflow.images import smoke_test
    from imgkit_entrypoints.errors import ImgkitError

__all__ = [
    "BuildRequest",
    "BuiltImage",
    "BuiltSif",
    "Check",
    "ConversionRequest",
    "Converted",
    "ImagePlan",
    "ImgkitError",
    "JobHandle",
    "JobRequest",
    "JobState",
    "PreparedJob",
    "Recipe",
    "Reporter",
    "SifBuildRequest",
    "SubmitRequest",
    "SubmittedJob",
    "__version__",
    "build",
    "build_sif",
    "convert",
    "find_job",
    "load",
    "plan",
    "prepare",
    "prepare_build",
    "prepare_conversion",
    "run",
    "smoke_test",
    "submit_conversion",
]

_MODULES = {
    "imgkit_builder.apptainer.build": ("BuiltSif",),
    "imgkit_builder.base.checks": ("Check",),
    "imgkit_builder.base.progress": ("Reporter",),
    "imgkit_builder.jobs.submitted": ("JobState", "SubmittedJob"),
    "imgkit_builder.jobs.request": ("JobRequest", "SubmitRequest"),
    "imgkit_builder.jobs.prepared": ("PreparedJob",),
    "imgkit_builder.jobs.submit": ("prepare",),
    "imgkit_builder.recipe.load": ("load",),
    "imgkit_builder.recipe.model": ("Recipe",),
    "imgkit_builder.sif.conversion": ("Converted", "Options"),
    "imgkit_builder.workflow.build": ("BuiltImage", "ImagePlan", "build", "build_sif", "plan"),
    "imgkit_builder.workflow.build_request": ("BuildRequest", "SifBuildRequest"),
    "imgkit_builder.workflow.convert": ("convert",),
    "imgkit_builder.workflow.images": ("smoke_test",),
    "imgkit_builder.jobs.conversion": ("prepare_build", "prepare_conversion"),
    "imgkit_builder.jobs.handle": ("JobHandle", "find_job", "run", "submit_conversion"),
    "imgkit_entrypoints.errors": ("ImgkitError",),
}
_HERE = {"Options": "ConversionRequest"}
"""The names of this API that differ from the class's name in its own module. There, ``Options`` is clear."""
# "ConversionRequest" -> ("imgkit_builder.sif.conversion", "Options")
_MODULE_OF = {_HERE.get(name, name): (module, name) for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the module of an API name at the first use of the name, and return the value (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _MODULE_OF[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
