"""Find out for ``imgkit init`` which program of a folder to start, and which packages it needs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_builder.image.skeleton import CODE_FOLDER
from imgkit_builder.recipe import requirements, rules, yaml_tree
from imgkit_builder.recipe.model import NO_DEPS
from imgkit_builder.recipe.problems import Collector
from imgkit_entrypoints import files, terminal

REQUIREMENTS = "requirements.txt"
CONDA = "environment.yml"

# Usual names of training programs. The first one that the folder has is the program to start.
_TRAINING_PROGRAMS = (
    "train.py",
    "main.py",
    "run.py",
    "pretrain.py",
    "finetune.py",
    "src/train.py",
    "src/main.py",
)
# Names that need no quotes in a shell.
_NAME = re.compile(r"[\w.-]+")
# Python files that are not training programs: tests and tools for packaging.
_NOT_STARTED_STEM = re.compile(r"setup|conftest|test_.*|.*_test|noxfile|versioneer")
# A file with `if __name__ == "__main__":` is meant to be started.
_MAIN_BLOCK = re.compile(r"^if __name__ ?==", re.MULTILINE)
# Packages that have the same name in conda and on PyPI. Other packages of conda may be called differently on
# PyPI (pytorch is torch), or are not Python packages at all.
_SAME_IN_CONDA = re.compile(
    "accelerate|datasets|diffusers|einops|evaluate|h5py|hydra-core|ipython|jupyter|matplotlib|networkx|numpy|"
    "omegaconf|pandas|pillow|psutil|pyarrow|pyyaml|requests|scikit-image|scikit-learn|scipy|seaborn|"
    "sentencepiece|tensorboard|timm|tokenizers|tqdm|transformers|wandb|zarr"
)
# A package in environment.yml: "conda-forge::numpy=1.26", "numpy >=1.26"
_CONDA_SPEC = re.compile(r"(?:[\w/.-]+::)?(?P<name>[\w.-]+)\s*(?P<versions>[<>=!~].*)?")
# A single version of conda: "=1.26", "==1.26", or with a build "=1.26.4=py311h64a7726_0"
_CONDA_VERSION = re.compile(r"={1,2}(?P<version>[0-9][\w.]*)(?P<build>=[^=]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipProposal:
    """A proposal for the steps under ``pip`` in a new recipe, and for what they leave out."""

    file: str
    """The name of the file in the folder that lists the packages."""
    steps: tuple[str, ...]
    """The steps in YAML, such as ``requirements: requirements.txt``. Empty if pip has nothing to install."""
    left_out: tuple[str, ...] = ()
    """Lines of the file that no step contains, because the base has the package or PyPI does not."""


def find_start_scripts(folder: Path) -> tuple[str, ...]:
    """Return the programs in `folder` that a job may start.

    If a file has a usual name, such as ``train.py``, only that file is returned. Otherwise all Python files
    with the line ``if __name__ == ...`` are returned, sorted by name. Tests and packaging tools are left out.
    """
    # A usual name is a strong sign, so other programs are not considered then.
    for name in _TRAINING_PROGRAMS:
        if (folder / name).is_file():
            return (name,)
    script_names = []
    for path in sorted(folder.glob("*.py")):
        is_candidate = _NAME.fullmatch(path.stem) and not _NOT_STARTED_STEM.fullmatch(path.stem)
        if is_candidate and _MAIN_BLOCK.search(_read_text(path)):
            script_names.append(path.name)
    return tuple(script_names)


def has_code(folder: Path) -> bool:
    """Return whether there is a Python file in `folder` or in one of its direct subfolders."""
    paths = (*folder.glob("*.py"), *folder.glob("*/*.py"))
    return any(path.is_file() for path in paths)


def pip_steps(folder: Path, *, editable: bool) -> PipProposal | None:
    """Return the pip steps of a recipe that install what the program in `folder` needs, or None.

    The packages are listed in pyproject.toml (as dependencies), requirements.txt or environment.yml. The
    first of these files that lists any packages is used. If pip can install the folder as a project, the last
    step installs it, so that its own modules can be imported from everywhere. The result is None if there is
    nothing to install.

    Parameters
    ----------
    editable : whether jobs mount the run's code over the project. The project is then installed as editable,
        so that Python imports the mounted code and not a copy of it.
    """
    proposal = _propose_package_step(folder)
    if not is_project(folder):
        return proposal
    if proposal is None:  # the project itself is still to be installed
        proposal = PipProposal(file=requirements.PYPROJECT, steps=())
    project_keys = ["project: ."]
    if editable:
        project_keys.append(f"editable: {CODE_FOLDER}")
    if proposal.left_out and proposal.file != CONDA:
        # The project may depend on packages that were left out. Without this option, pip would install them.
        project_keys.append(f"options: [{NO_DEPS}]")
    project_step = f"{{{', '.join(project_keys)}}}"
    steps = (*proposal.steps, project_step)
    if proposal.file == requirements.PYPROJECT and not proposal.left_out:
        steps = (project_step,)  # pip then installs the dependencies in pyproject.toml as well
    return dataclasses.replace(proposal, steps=steps)


def is_project(folder: Path) -> bool:
    """Return whether pip can install `folder` as a project.

    This needs a table ``build-system`` in pyproject.toml. The project must be described in the same file, or
    in setup.py or setup.cfg.
    """
    pyproject_text = _read_text(folder / requirements.PYPROJECT)
    has_build_system = re.search(r"^\[build-system\]", pyproject_text, re.MULTILINE) is not None
    is_described = re.search(r"^\[(project|tool\.poetry)\]", pyproject_text, re.MULTILINE) is not None
    has_setup = (folder / "setup.py").is_file() or (folder / "setup.cfg").is_file()
    return has_build_system and (is_described or has_setup)


def _propose_package_step(folder: Path) -> PipProposal | None:
    """Return the step for the packages that a file in `folder` lists, or None if no file lists any.

    The first file that lists packages is used, in the order below. The other files are ignored.
    """
    files_and_lines = (
        (requirements.PYPROJECT, _read_lines_if_valid(requirements.read_dependencies, folder)),
        (REQUIREMENTS, _read_lines_if_valid(requirements.read_requirements, folder / REQUIREMENTS)),
        (CONDA, tuple(_read_conda_lines(folder / CONDA))),
    )
    for file, lines in files_and_lines:
        if lines:
            return _propose_step(file, lines)
    return None


def _read_text(file: Path) -> str:
    """Return the text of `file`, or "" if it cannot be read."""
    try:
        return files.read_text(file, errors="replace")
    except (OSError, ValueError):
        return ""


def _read_lines_if_valid(read: Callable[[Path], tuple[str, ...]], path: Path) -> tuple[str, ...]:
    """Return the requirements that the function `read` finds in `path`.

    If the file is missing or damaged, the result is empty. ``imgkit check`` reports damaged files later.
    """
    try:
        return read(path)
    except (OSError, ValueError):
        return ()


def _propose_step(file: str, lines: tuple[str, ...]) -> PipProposal:
    """Return the step that installs the packages in the `lines` of `file`, and the lines that it leaves out.

    If nothing is left out of requirements.txt, the step is ``requirements: requirements.txt``. Otherwise the
    step is a list of packages: ``packages: ["einops", "timm"]``. Packages of the base image that must not
    change, such as torch, are left out.
    """
    unfit_lines = [line for line in lines if _is_unfit(line)]
    # pip can then read the file itself, with its options, whenever the image is built.
    if file == REQUIREMENTS and not unfit_lines:
        return PipProposal(file=file, steps=(f"requirements: {file}",))
    listed_packages = []
    left_out = []
    for line in lines:
        # A list of packages in a recipe cannot contain options and URLs, which a requirements file may have.
        if line in unfit_lines or any(rules.find_pip_package_faults(line)):
            left_out.append(terminal.escape_controls(line))  # it is shown to the user
        else:
            listed_packages.append(line)
    steps = (f"packages: {json.dumps(listed_packages)}",) if listed_packages else ()
    return PipProposal(file=file, steps=steps, left_out=tuple(left_out))


def _is_unfit(line: str) -> bool:
    """Return whether a requirement must be left out.

    It must be left out if it refers to another file, or names a package of the base that must not change.
    """
    name = requirements.requirement_name(line)
    is_in_base = re.fullmatch(requirements.PROTECTED, name) is not None
    return is_in_base or requirements.names_other_file(line)


def _read_conda_lines(file: Path) -> Iterator[str]:
    """Yield the requirements in ``environment.yml``, the file of a conda environment, in pip's syntax.

    The list ``dependencies`` contains packages of conda, and possibly a list ``pip`` with packages of pip. A
    package that may be missing on PyPI is yielded as a line that begins with ``conda:``. All other values are
    skipped.
    """
    tree = yaml_tree.read_yaml(file, Collector()) if file.is_file() else None
    if tree is None:
        return
    # The file is the user's and may have any form, so each level is checked.
    for dependency in _as_list(yaml_tree.to_data(tree).get("dependencies")):
        if isinstance(dependency, str):
            yield _convert_conda_spec(dependency)
        elif isinstance(dependency, dict):
            for requirement in _as_list(dependency.get("pip")):
                if isinstance(requirement, str):
                    yield requirement


def _as_list(value: Any) -> list[Any]:
    """Return `value` if it is a list, and an empty list otherwise."""
    return value if isinstance(value, list) else []


def _convert_conda_spec(spec: str) -> str:
    """Convert a requirement from conda to pip: ``conda-forge::numpy=1.26`` -> ``numpy==1.26.*``.

    A package that may be missing on PyPI is returned as ``conda:`` and the original text.
    """
    spec_match = _CONDA_SPEC.fullmatch(spec.strip())
    if spec_match is None or not _SAME_IN_CONDA.fullmatch(requirements.canonical_name(spec_match["name"])):
        return f"conda:{spec}"
    version_spec = spec_match["versions"] or ""
    single_version = _CONDA_VERSION.fullmatch(version_spec)
    if single_version is None:  # no version, or a range such as ">=1.26", which pip writes in the same way
        return f"{spec_match['name']}{version_spec}"
    requirement = f"{spec_match['name']}=={single_version['version']}"
    is_exact = version_spec.startswith("==") or single_version["build"]
    return requirement if is_exact else f"{requirement}.*"  # conda's "=1.26" means any 1.26
