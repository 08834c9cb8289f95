"""What is known of base images: a table of NVIDIA's PyTorch images, and the warnings that follow from it.

Each cell has its source. One that no source states is unknown, and causes no warning.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from imgkit_builder.recipe import problems
from imgkit_builder.recipe.problems import KeyPath
from imgkit_builder.recipe.rules import Fault, ImageReference, parse_reference
from imgkit_entrypoints import cuda_drivers, files, known_issues
from imgkit_entrypoints.errors import ImgkitError, UsageError
from imgkit_entrypoints.known_issues import Value
from imgkit_entrypoints.rules import Unfit
from imgkit_entrypoints.system import SystemFacts
from imgkit_recipes import FOLDER

if TYPE_CHECKING:
    from imgkit_builder.recipe.model import Image, Recipe

CURRENT = "current"
"""The word of ``--base`` for ``image.current_base``; an image reference has a tag."""
FLOOR = (3, 10)
"""The oldest Python that the entry points run on."""
NONE = "none"
"""Value of a part that an image lacks."""
REPOSITORY = "nvcr.io/nvidia/pytorch"
TABLE = FOLDER / "bases.toml"

_OF_NGC = re.compile(r"(?:.*/)?nvidia/pytorch")
_NGC_TAG = re.compile(r"([0-9]{2}\.[0-9]{2})-py3")
_OF_PYTHON = ("python", "library/python")
"""Docker Hub's image of Python, whose tag begins with the version."""
_PLUGIN_BY = re.compile(r"ofi-nccl|libnccl-net")
"""What a step that installs NCCL's plug-in for libfabric names."""
_ROCM_NAME = re.compile(r"(?:^|[/:._-])rocm")
_ROCM_VARIABLE = re.compile(r"(?:ROCM|HIP)_|PYTORCH_ROCM_ARCH$")
_BEFORE_TURING = re.compile(r"\b(?:V100S?|TITAN V|P100|P40|P4|K80|M40)\b")
"""GPUs that CUDA 13 does not run on: its release notes dropped Maxwell, Pascal and Volta."""
_WITH_ARM = re.compile(r"\bG[BH][0-9]{3}|Grace")
_AMD_MODEL = re.compile(r"\b(?:AMD|Instinct|Radeon|MI[0-9]{2,3}[AX]?)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Cell:
    """A value and the public source that states it."""

    value: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """One image of NVIDIA's PyTorch; None where no source is known."""

    tag: str
    python: Cell | None = None
    torch: Cell | None = None
    cuda: Cell | None = None
    nccl: Cell | None = None
    ucx: Cell | None = None
    libfabric: Cell | None = None
    aws_ofi_nccl: Cell | None = None
    """NCCL's plug-in for libfabric: a version, ``present`` or `NONE`."""
    variables: Cell | None = None
    """Variables that the image sets and that decide on NCCL's network."""

    @property
    def reference(self) -> str:
        """Return the image's name."""
        return f"{REPOSITORY}:{self.tag}-py3"

    @property
    def driver(self) -> int | None:
        """Return the first driver branch that runs the CUDA without the image's cuda-compat package.

        With that package, data-centre GPUs run it on some older branches, too.
        """
        return cuda_drivers.first_driver(self.cuda.value) if self.cuda else None

    def cells(self) -> Iterator[tuple[str, Cell | None]]:
        """Yield the columns in their order; that of the driver follows the one of its CUDA."""
        for column in fields(self):
            if column.name == "tag":
                continue
            yield column.name, getattr(self, column.name)
            if column.name == "cuda":
                driver = Cell(str(self.driver), cuda_drivers.SOURCE) if self.driver else None
                yield "driver", driver


@functools.cache
def table() -> tuple[Base, ...]:
    """Return the images in the table, oldest first.

    Raises
    ------
    ImgkitError : the file of the table is damaged, or a cell has no source.
    """
    try:
        data = problems.parse_toml(files.read_text(TABLE))
        sources, rows = data["sources"], data["bases"].items()
        return tuple(
            Base(tag=tag, **{name: Cell(value, sources[source]) for name, (value, source) in cells.items()})
            for tag, cells in rows
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fault = f"the table of bases is damaged: {error!r}"
        raise ImgkitError(fault, where=str(TABLE), hint="install imgkit again") from error


def ngc_image(reference: str) -> Base | None:
    """Return the row of an image that a recipe names, from NGC or a mirror of it; None for any other."""
    image = _parsed(reference)
    tag = _NGC_TAG.fullmatch(image.tag) if image and _OF_NGC.fullmatch(image.repository) else None
    return next((base for base in table() if base.tag == tag[1]), None) if tag else None


def _parsed(reference: str) -> ImageReference | None:
    try:
        return parse_reference(reference)
    except Unfit:
        return None


def chosen(base: str | None, recipe: Recipe) -> str | None:
    """Return the image that the value of ``--base`` means.

    Raises
    ------
    UsageError : it is `CURRENT`, and `recipe` names no current base.
    """
    if base != CURRENT:
        return base
    if not recipe.image.current_base:
        raise UsageError(
            f"the recipe {recipe.name} names no current base",
            where=f"--base {CURRENT}",
            hint=f"add image.current_base to {recipe.file.name}, or name an image: --base {REPOSITORY}:TAG",
        )
    return recipe.image.current_base


def newest(system: SystemFacts) -> Base | None:
    """Return the newest image that the driver and the GPUs of `system` run; None if the driver is unknown."""
    branch = re.match(r"[0-9]{1,9}", system.node.driver)
    images = _run_by(int(branch[0])) if branch else []
    if _BEFORE_TURING.search(system.node.gpu_model):
        images = [base for base in images if base.cuda and int(base.cuda.value.partition(".")[0]) < 13]
    return images[-1] if images else None


def platform_of(system: SystemFacts) -> str:
    """Return the platform of the nodes of `system`, by their GPUs: Grace is arm64."""
    return "linux/arm64" if _WITH_ARM.search(system.node.gpu_model) else "linux/amd64"


def _run_by(branch: int) -> list[Base]:
    """Return the images whose CUDA a driver of `branch` runs, oldest first."""
    return [base for base in table() if base.driver and base.driver <= branch]


def doubts(image: Image, system: SystemFacts) -> Iterator[tuple[KeyPath, Fault]]:
    """Yield reasons why `image` would not run well on `system`, each with the key of the base."""
    for key in ("base", "current_base"):
        if reference := getattr(image, key):
            faults = (
                *_old_python(reference),
                *_old_driver(reference, system),
                *_no_plugin(reference, image, system),
                *map(for_amd, filter(None, (amd_image(reference),))),
            )
            yield from ((("image", key), fault) for fault in faults)
    yield from _known_issues(image, system)
    if evidence := amd_nodes(system):
        yield ("system", "node"), for_amd(evidence)


def _known_issues(image: Image, system: SystemFacts) -> Iterator[tuple[KeyPath, Fault]]:
    """Yield the known issues of the bases' versions and of the system's variables, each once."""
    reported: set[str] = set()
    for key in ("base", "current_base"):
        lookup = _lookup(getattr(image, key) or "", system)
        for issue in known_issues.load(system.known_issues, {}):
            result = known_issues.evaluate(issue, lookup)
            is_new = issue.effect in ("warn", "refuse") and issue.id not in reported
            if result.state == "match" and is_new:
                reported.add(issue.id)
                yield ("image", key), (result.message, issue.hint)


def _lookup(reference: str, system: SystemFacts) -> known_issues.Lookup:
    """Return what is known of a base and the nodes before a start; only a node knows other variables."""
    base = ngc_image(reference)
    cells = {name: cell.value for name, cell in base.cells() if cell} if base else {}
    name_of_base, _, value_of_base = cells.get("variables", "").partition("=")
    env = {name_of_base: value_of_base, **system.env}
    values = {
        **cells,
        "arch": "aarch64" if platform_of(system) == "linux/arm64" else "x86_64",
        "driver": system.node.driver,
        "fabric": system.fabric.kind,
        "gpu": system.node.gpu_model,
        "gpus": str(system.node.gpus),
        "nodes": "2",  # of most jobs on a cluster
    }

    def lookup(name: str) -> Value:
        if name in known_issues.FACTS:
            text = values.get(name, "")
            return Value(text, f"{known_issues.FACTS[name]} {text or 'unknown'}")
        variable = name.removeprefix("$")
        text = env.get(variable, "")
        # A node leaves out what the system sets and its network does not need.
        return Value(text, f"{variable}={text}", is_requested=None, is_known=variable in env)

    return lookup


def amd_image(reference: str, env: Iterable[str] = ()) -> str:
    """Return evidence that an image, by its name and its variables' names, is for AMD GPUs; else empty."""
    if _ROCM_NAME.search(reference):
        return f"{reference} is an image for AMD GPUs (ROCm)"
    name = next((name for name in sorted(env) if _ROCM_VARIABLE.match(name)), "")
    return f"{reference}, which sets {name}, is an image for AMD GPUs" if name else ""


def amd_nodes(system: SystemFacts) -> str:
    """Return evidence that the GPUs of `system` are AMD's; else empty."""
    if system.node.gpus and _AMD_MODEL.search(system.node.gpu_model):
        return f"{system.node.gpu_model} is a GPU of AMD"
    if "--rocm" in system.runtime.options:
        return "the option --rocm of system.runtime is for AMD GPUs"
    return ""


def for_amd(evidence: str) -> Fault:
    """Return the warning about an image or nodes that `evidence` shows to be AMD's."""
    return f"{evidence}: imgkit supports only work on CPUs with it", CPU_WORK


CPU_WORK = (
    "for CPUs: imgkit run --gpus 0, or --device cpu of dist-*; for GPUs: an image and nodes for NVIDIA's"
)
"""What works with AMD's images and on its nodes."""


def _old_python(reference: str) -> Iterator[Fault]:
    base, image = ngc_image(reference), _parsed(reference)
    version = base.python.value if base and base.python else ""
    if image and image.repository in _OF_PYTHON and image.registry in ("", "docker.io"):
        version = image.tag
    # Of a tag such as 3.12-slim, the version is the beginning; `latest` says nothing.
    number = re.match(r"([0-9]{1,3})\.([0-9]{1,3})(?![0-9])", version)
    if number and (int(number[1]), int(number[2])) < FLOOR:
        least = ".".join(map(str, FLOOR))
        yield (
            f"{reference} has Python {number[0]}: imgkit's entry points need {least} or newer",
            f"choose a base with Python {least}; imgkit list --bases",
        )


def _old_driver(reference: str, system: SystemFacts) -> Iterator[Fault]:
    base = ngc_image(reference)
    branch = re.match(r"[0-9]{1,9}", system.node.driver)
    if base is None or base.driver is None or branch is None or int(branch[0]) >= base.driver:
        return
    is_data_centre = cuda_drivers.is_data_centre_gpu(system.node.gpu_model)
    if is_data_centre and system.runtime.cuda_compat != "none":
        return  # the node agent uses the base's cuda-compat package
    fitting = _run_by(int(branch[0]))
    cuda = f" {base.cuda.value}" if base.cuda else ""
    remedy = f"choose {fitting[-1].reference} or an older one" if fitting else "update the driver"
    yield (
        f"CUDA{cuda} of {reference} needs driver {base.driver} or newer, and system.node.driver is "
        f"{system.node.driver}",
        f"{remedy}; on data-centre GPUs (system.node.gpu_model), the base's cuda-compat package is used "
        "unless system.runtime.cuda_compat is none",
    )


def _no_plugin(reference: str, image: Image, system: SystemFacts) -> Iterator[Fault]:
    base = ngc_image(reference)
    has_none = base is not None and base.aws_ofi_nccl is not None and base.aws_ofi_nccl.value == NONE
    has_host_libs = system.runtime.host_libs or system.fabric.host_libs == "auto"
    if system.fabric.kind != "slingshot" or not has_none or has_host_libs:
        return
    commands = (step.command for step in image.run)
    texts = (*system.runtime.binds, *commands, *(str(step.source) for step in image.copy))
    # A recipe that installs or mounts the plug-in itself knows what it does.
    if any(_PLUGIN_BY.search(text) for text in texts):
        return
    yield (
        f"{reference} has no aws-ofi-nccl: on Slingshot NCCL would use TCP",
        "use libfabric with cxi and aws-ofi-nccl of the nodes: system.fabric.host_libs: auto, or their "
        "folders in system.runtime.host_libs; or build both in image.run",
    )
