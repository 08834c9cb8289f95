"""Facts about base images, and the warnings that follow from them.

The facts are a table of NVIDIA's PyTorch images. Each cell has its source. A value without a public source is
left out, and then causes no warning.
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
"""The value of ``--base`` that selects ``image.current_base``. No image can have this name, because an image
reference has a tag."""
OLDEST_PYTHON = (3, 10)
"""The oldest version of Python that the entry points support."""
NONE = "none"
"""The value in the table for a component that an image does not contain."""
REPOSITORY = "nvcr.io/nvidia/pytorch"
TABLE = FOLDER / "bases.toml"

# A mirror may have folders before the name.
_NGC_REPOSITORY = re.compile(r"(?:.*/)?nvidia/pytorch")
# "24.03-py3"
_NGC_TAG = re.compile(r"([0-9]{2}\.[0-9]{2})-py3")
_PYTHON_REPOSITORIES = ("python", "library/python")
"""The repositories of Docker Hub's Python image. Its tags begin with the version of Python."""
_NCCL_PLUGIN = re.compile(r"ofi-nccl|libnccl-net")
"""Matches the text of a step that installs NCCL's plug-in for libfabric."""
# "rocm/pytorch:latest"
_ROCM_NAME = re.compile(r"(?:^|[/:._-])rocm")
_ROCM_VARIABLE = re.compile(r"(?:ROCM|HIP)_|PYTORCH_ROCM_ARCH$")
_BEFORE_TURING = re.compile(r"\b(?:V100S?|TITAN V|P100|P40|P4|K80|M40)\b")
"""Matches GPUs that CUDA 13 does not support. Its release notes dropped Maxwell, Pascal and Volta."""
# "GH200", "GB200"
_ARM_GPU = re.compile(r"\bG[BH][0-9]{3}|Grace")
# Finds the 550 of "550.54.15".
_DRIVER_BRANCH = re.compile(r"[0-9]{1,9}")
_AMD_MODEL = re.compile(r"\b(?:AMD|Instinct|Radeon|MI[0-9]{2,3}[AX]?)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Cell:
    """A value and its public source."""

    value: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """An image of NVIDIA's PyTorch. A cell is None if no public source has the value."""

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
    """Variables that the image sets and that determine which network NCCL uses."""

    @property
    def reference(self) -> str:
        """The reference of the image, with registry and tag."""
        return f"{REPOSITORY}:{self.tag}-py3"

    @property
    def driver(self) -> int | None:
        """The oldest driver branch that runs the image's CUDA without its cuda-compat package.

        With that package, data-centre GPUs also run it with some older branches.
        """
        if self.cuda is None:
            return None
        return cuda_drivers.first_driver(self.cuda.value)

    def list_columns(self) -> Iterator[tuple[str, Cell | None]]:
        """Yield each column of the table of base images: its name, and the cell of this image.

        A cell has a value and its source. It is None if the value is unknown. The tag is no column, because
        it names the image. The driver comes after CUDA, because it is derived from the version of CUDA.
        """
        for column in fields(self):
            if column.name == "tag":
                continue
            yield column.name, getattr(self, column.name)
            # The driver is a property and not a field, so it is added here.
            if column.name == "cuda":
                yield "driver", Cell(str(self.driver), cuda_drivers.SOURCE) if self.driver else None


@functools.cache
def load_table() -> tuple[Base, ...]:
    """Return the images in the table, oldest first.

    Raises
    ------
    ImgkitError : the file with the table is damaged, or a cell has no source.
    """
    bases = []
    try:
        table_data = problems.parse_toml(files.read_text(TABLE))
        for tag, row in table_data["bases"].items():
            # `source` is a key in the table of sources. Each cell must have one.
            cells = {}
            for column, (value, source) in row.items():
                cells[column] = Cell(value, table_data["sources"][source])
            bases.append(Base(tag=tag, **cells))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"the table of bases is damaged: {error!r}"
        raise ImgkitError(message, where=str(TABLE), hint="install imgkit again") from error
    return tuple(bases)


def ngc_image(reference: str) -> Base | None:
    """Return what the table knows about an image of NVIDIA's PyTorch, from NGC or a mirror.

    For any other image, and for a release that is not in the table, return None.
    """
    image = _parse_or_none(reference)
    if image is None or not _NGC_REPOSITORY.fullmatch(image.repository):
        return None
    tag_match = _NGC_TAG.fullmatch(image.tag)
    if tag_match is None:
        return None
    for base in load_table():
        # The table has the release without the suffix of the tag: "24.03" for "24.03-py3". The first group
        # of the match is that release.
        if base.tag == tag_match[1]:
            return base
    return None


def _parse_or_none(reference: str) -> ImageReference | None:
    """Return the parts of an image reference, or None if it is not valid.

    A check of the recipe reports that.
    """
    try:
        return parse_reference(reference)
    except Unfit:
        return None


def select_base(base: str | None, recipe: Recipe) -> str | None:
    """Return the image that the option ``--base`` selects. `base` is the value of the option.

    Raises
    ------
    UsageError : the value is `CURRENT`, but `recipe` has no current base.
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


def newest_base(system: SystemFacts) -> Base | None:
    """Return the newest image of NVIDIA's PyTorch that the driver and the GPUs of `system` support.

    Return None if the driver of `system` is unknown, or if no image in the table supports it.
    """
    branch = _parse_driver_branch(system)
    if branch is None:
        return None
    # CUDA 13 dropped GPUs before Turing (such as Volta), so these need an image with an older CUDA.
    has_old_gpus = _BEFORE_TURING.search(system.node.gpu_model)
    for base in reversed(_list_bases_for_driver(branch)):
        if base.cuda is None:
            continue
        cuda_major, _, _ = base.cuda.value.partition(".")
        if not has_old_gpus or int(cuda_major) < 13:
            return base
    return None


def _parse_driver_branch(system: SystemFacts) -> int | None:
    """Return the branch of the nodes' driver, such as 550 for 550.54.15. If it is unknown, return None."""
    match = _DRIVER_BRANCH.match(system.node.driver)
    if match is None:
        return None
    return int(match[0])


def node_platform(system: SystemFacts) -> str:
    """Return the platform of the nodes of `system`, which is derived from the model of their GPUs.

    Nodes with NVIDIA's Grace processors are arm64. All others are amd64.
    """
    if _ARM_GPU.search(system.node.gpu_model):
        return "linux/arm64"
    return "linux/amd64"


def _list_bases_for_driver(branch: int) -> list[Base]:
    """Return the images whose CUDA runs with a driver of the given `branch`, oldest first."""
    return [base for base in load_table() if base.driver and base.driver <= branch]


def find_warnings(image: Image, system: SystemFacts) -> Iterator[tuple[KeyPath, Fault]]:
    """Yield warnings that `image` may not work well on `system`, each with the key of the recipe to change.

    A warning is a pair of a message and a hint.
    """
    for key in ("base", "current_base"):
        reference = getattr(image, key)
        if not reference:
            continue  # `current_base` is optional
        for warning in _check_base(reference, image, system):
            yield ("image", key), warning
    yield from _find_known_issues(image, system)
    # A sentence that says why the GPUs seem to be AMD's, or "".
    amd_evidence = amd_node_evidence(system)
    if amd_evidence:
        yield ("system", "node"), amd_warning(amd_evidence)


def _check_base(reference: str, image: Image, system: SystemFacts) -> Iterator[Fault]:
    """Yield warnings about `reference`, one of the base images of `image`."""
    yield from _check_python(reference)
    yield from _check_driver(reference, system)
    yield from _check_nccl_plugin(reference, image, system)
    # A sentence that says why the image seems to be for AMD GPUs, or "".
    amd_evidence = amd_image_evidence(reference)
    if amd_evidence:
        yield amd_warning(amd_evidence)


def _find_known_issues(image: Image, system: SystemFacts) -> Iterator[tuple[KeyPath, Fault]]:
    """Yield warnings about known issues, which are bugs in versions of CUDA, NCCL and other software.

    An issue applies if its conditions match the versions in a base and the values of `system`. A recipe can
    name a second, newer base as ``current_base``. If both bases have an issue, it is yielded once.
    """
    reported_ids = set()
    # The empty mapping replaces the environment, so the file with the issues of this machine's site is not
    # read.
    issues = known_issues.load_issues(system.known_issues, {})
    for key in ("base", "current_base"):
        reference = getattr(image, key)
        if not reference:
            continue  # `current_base` is optional
        lookup = _make_lookup(reference, system)
        for issue in issues:
            # The effect "set" changes variables of a job, so it is no reason for a warning here.
            if issue.effect not in ("warn", "refuse") or issue.id in reported_ids:
                continue
            # The state is "match", "no match", or "unknown" if the condition needs a value that is unknown.
            result = known_issues.evaluate_issue(issue, lookup)
            if result.state == "match":
                reported_ids.add(issue.id)
                yield ("image", key), (result.message, issue.hint)


def _make_lookup(reference: str, system: SystemFacts) -> known_issues.Lookup:
    """Return a function that looks up a fact or variable from the condition of a known issue.

    The facts come from the base image `reference` and from the nodes of `system`. No job has started yet, so
    a variable that neither the base nor `system` sets is unknown: a node may set it.
    """
    facts = {}
    base = ngc_image(reference)
    if base is not None:
        facts = {name: cell.value for name, cell in base.list_columns() if cell}
    # The table contains at most one variable per image, such as "NCCL_NET_PLUGIN=ofi".
    base_variable, _, base_value = facts.get("variables", "").partition("=")
    env = {base_variable: base_value, **system.env}
    facts |= _list_node_facts(system)

    def lookup(name: str) -> Value:
        """Return the value of a fact such as ``driver``, or of a variable such as ``$NCCL_DEBUG``.

        The enclosing function has collected the facts, and the variables that the base or the system sets
        (`env`).
        """
        if name in known_issues.FACTS:
            fact = facts.get(name, "")
            return Value(text=fact, evidence=f"{known_issues.FACTS[name]} {fact or 'unknown'}")
        variable = name.removeprefix("$")
        value = env.get(variable, "")
        # Whether a job requests the variable is unknown (None), because a node leaves out variables that its
        # network does not need.
        return Value(text=value, evidence=f"{variable}={value}", is_requested=None, is_known=variable in env)

    return lookup


def _list_node_facts(system: SystemFacts) -> dict[str, str]:
    """Return the facts about a job on the nodes of `system`, by their names in a known issue."""
    machines = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
    return {
        "arch": machines[node_platform(system)],
        "driver": system.node.driver,
        "fabric": system.fabric.kind,
        "gpu": system.node.gpu_model,
        "gpus": str(system.node.gpus),
        "nodes": "2",  # unknown before a job starts, but most jobs on a cluster have several nodes
    }


def amd_image_evidence(reference: str, env: Iterable[str] = ()) -> str:
    """Return a sentence that says why an image seems to be for AMD GPUs, or ``""`` if it does not.

    The evidence is the name of the image, `reference`, or the name of a variable in `env`.
    """
    if _ROCM_NAME.search(reference):
        return f"{reference} is an image for AMD GPUs (ROCm)"
    # Sort the names, so that the message does not depend on the order of a set.
    for name in sorted(env):
        if _ROCM_VARIABLE.match(name):
            return f"{reference}, which sets {name}, is an image for AMD GPUs"
    return ""


def amd_node_evidence(system: SystemFacts) -> str:
    """Return a sentence that says why the GPUs of `system` seem to be AMD's, or ``""`` if they do not."""
    if system.node.gpus and _AMD_MODEL.search(system.node.gpu_model):
        return f"{system.node.gpu_model} is a GPU of AMD"
    if "--rocm" in system.runtime.options:
        return "the option --rocm of system.runtime is for AMD GPUs"
    return ""


def amd_warning(evidence: str) -> Fault:
    """Return the warning that an image or a system is for AMD GPUs. `evidence` is the reason to think so."""
    return f"{evidence}: imgkit supports only work on CPUs with it", CPU_WORK


CPU_WORK = (
    "for CPUs: imgkit run --gpus 0, or --device cpu of dist-*; for GPUs: an image and nodes for NVIDIA's"
)
"""What works with AMD's images and nodes, as a hint."""


def _check_python(reference: str) -> Iterator[Fault]:
    """Yield a warning if the base's Python is older than `OLDEST_PYTHON`, such as (3, 10)."""
    # The text is a version, or a tag that begins with one, such as "3.12-slim". A tag such as "latest" does
    # not match.
    match = re.match(r"([0-9]{1,3})\.([0-9]{1,3})(?![0-9])", _find_version_or_tag(reference))
    if match and (int(match[1]), int(match[2])) < OLDEST_PYTHON:
        oldest_version = ".".join(map(str, OLDEST_PYTHON))
        yield (
            f"{reference} has Python {match[0]}: imgkit's entry points need {oldest_version} or newer",
            f"choose a base with Python {oldest_version}; imgkit list --bases",
        )


def _find_version_or_tag(reference: str) -> str:
    """Return the Python version of a base, or a tag that may begin with it. If both are unknown, return "".

    For NVIDIA's images, the table has the version. For Docker Hub's Python images, the result is the tag,
    such as ``3.12-slim``.
    """
    image = _parse_or_none(reference)
    # In another registry, an image with this name may have any content.
    if image and image.repository in _PYTHON_REPOSITORIES and image.registry in ("", "docker.io"):
        return image.tag
    base = ngc_image(reference)
    if base is None or base.python is None:
        return ""
    return base.python.value


def _check_driver(reference: str, system: SystemFacts) -> Iterator[Fault]:
    """Yield a warning if the driver of the nodes is too old for the base's CUDA.

    Data-centre GPUs cause no warning, because the base's cuda-compat package runs a newer CUDA with an older
    driver there. If the driver or CUDA is unknown, there is no warning, either.
    """
    ngc_base = ngc_image(reference)
    branch = _parse_driver_branch(system)
    if ngc_base is None or ngc_base.cuda is None or ngc_base.driver is None or branch is None:
        return
    if branch >= ngc_base.driver:
        return
    is_data_centre = cuda_drivers.is_data_centre_gpu(system.node.gpu_model)
    if is_data_centre and system.runtime.cuda_compat != "none":
        return  # the node agent uses the base's cuda-compat package
    remedy = "update the driver"
    older_bases = _list_bases_for_driver(branch)
    if older_bases:
        remedy = f"choose {older_bases[-1].reference} or an older one"
    yield (
        f"CUDA {ngc_base.cuda.value} of {reference} needs driver {ngc_base.driver} or newer, "
        f"and system.node.driver is {system.node.driver}",
        f"{remedy}; on data-centre GPUs (system.node.gpu_model), the base's cuda-compat package is used "
        "unless system.runtime.cuda_compat is none",
    )


def _check_nccl_plugin(reference: str, image: Image, system: SystemFacts) -> Iterator[Fault]:
    """Yield a warning if NCCL would use TCP on a Slingshot network, which is slow.

    To use Slingshot, NCCL needs a plug-in for libfabric (aws-ofi-nccl). It may be in the base, on the nodes,
    or added by the recipe.
    """
    has_host_libs = system.runtime.host_libs or system.fabric.host_libs == "auto"
    if system.fabric.kind != "slingshot" or has_host_libs or _brings_nccl_plugin(image, system):
        return
    base = ngc_image(reference)
    # A cell is None if the value is unknown. Only the value "none" means that the base lacks the plug-in.
    if base is not None and base.aws_ofi_nccl is not None and base.aws_ofi_nccl.value == NONE:
        yield (
            f"{reference} has no aws-ofi-nccl: on Slingshot NCCL would use TCP",
            "use libfabric with cxi and aws-ofi-nccl of the nodes: system.fabric.host_libs: auto, or their "
            "folders in system.runtime.host_libs; or build both in image.run",
        )


def _brings_nccl_plugin(image: Image, system: SystemFacts) -> bool:
    """Return whether the recipe seems to add NCCL's plug-in for libfabric.

    The search covers its mounts, the commands of its run steps, and the folders that it copies.
    """
    texts = list(system.runtime.binds)
    texts += [step.command for step in image.run]
    texts += [str(step.source) for step in image.copy]
    return any(_NCCL_PLUGIN.search(text) for text in texts)
