"""What ``imgkit init`` finds in a folder with a program: how to start it, and the packages that it needs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.image.skeleton import CODE_FOLDER
from imgkit_builder.recipe import requirements, rules, yaml_tree
from imgkit_builder.recipe.model import NO_DEPS
from imgkit_builder.recipe.problems import Collector
from imgkit_entrypoints import files, terminal

REQUIREMENTS = "requirements.txt"
CONDA = "environment.yml"

_USUAL = ("train.py", "main.py", "run.py", "pretrain.py", "finetune.py", "src/train.py", "src/main.py")
_NAME = re.compile(r"[\w.-]+")
_NOT_STARTED = re.compile(r"setup|conftest|test_.*|.*_test|noxfile|versioneer")
_STARTS = re.compile(r"^if __name__ ?==", re.MULTILINE)
# conda has other names than PyPI, and packages that are no Python: only these are certain.
_SAME_IN_CONDA = re.compile(
    "accelerate|datasets|diffusers|einops|evaluate|h5py|hydra-core|ipython|jupyter|matplotlib|networkx|numpy|"
    "omegaconf|pandas|pillow|psutil|pyarrow|pyyaml|requests|scikit-image|scikit-learn|scipy|seaborn|"
    "sentencepiece|tensorboard|timm|tokenizers|tqdm|transformers|wandb|zarr"
)
_CONDA_SPEC = re.compile(r"(?:[\w/.-]+::)?(?P<name>[\w.-]+)\s*(?P<versions>[<>=!~].*)?")
_CONDA_BUILD = re.compile(r"={1,2}(?P<version>[0-9][\w.]*)(?P<exact>=[^=]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipProposal:
    """The steps of the recipe's ``pip``, and what of their file they lack."""

    file: str
    """The file in the folder that names the packages."""
    steps: tuple[str, ...]
    """The steps as YAML; empty if nothing is left."""
    left_out: tuple[str, ...] = ()
    """Lines of the file that the steps lack: the base has them, or they do not name a package of PyPI."""


def find_start_scripts(folder: Path) -> tuple[str, ...]:
    """Return the programs in `folder` that a job may start; several if none has a usual name."""
    for name in _USUAL:
        if (folder / name).is_file():
            return (name,)
    stems = (path.stem for path in folder.glob("*.py"))
    names = sorted(
        f"{stem}.py" for stem in stems if _NAME.fullmatch(stem) and not _NOT_STARTED.fullmatch(stem)
    )
    return tuple(name for name in names if _STARTS.search(_read_beginning(folder / name)))


def has_code(folder: Path) -> bool:
    """Return whether there is Python in `folder` or in a folder of it."""
    return any(path.is_file() for pattern in ("*.py", "*/*.py") for path in folder.glob(pattern))


def pip_steps(folder: Path, *, editable: bool) -> PipProposal | None:
    """Return the steps that install what the program in `folder` needs; None if no file says that.

    The dependencies in pyproject.toml come first, then requirements.txt, then environment.yml. A project that
    pip can install is installed after them, so that its own modules can be imported from everywhere.

    Parameters
    ----------
    editable : whether the run's code is mounted over the project.
    """
    packages = _package_steps(folder)
    if not is_project(folder):
        return packages
    file = requirements.PYPROJECT
    keys = ["project: ."]
    if editable:
        keys.append(f"editable: {CODE_FOLDER}")
    left_out: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    if packages is not None:
        file, left_out = packages.file, packages.left_out
        if left_out or file != requirements.PYPROJECT:
            steps = packages.steps
        if left_out and file != CONDA:
            # The project may depend on the omitted packages, and pip would install these.
            keys.append(f"options: [{NO_DEPS}]")
    return PipProposal(file=file, steps=(*steps, f"{{{', '.join(keys)}}}"), left_out=left_out)


def is_project(folder: Path) -> bool:
    """Return whether pip can install `folder`: its pyproject.toml names a build system and describes it."""
    text = _read_beginning(folder / requirements.PYPROJECT)
    has_build_system = re.search(r"^\[build-system\]", text, re.MULTILINE) is not None
    is_described = re.search(r"^\[(project|tool\.poetry)\]", text, re.MULTILINE) is not None
    has_setup = (folder / "setup.py").is_file() or (folder / "setup.cfg").is_file()
    return has_build_system and (is_described or has_setup)


def _package_steps(folder: Path) -> PipProposal | None:
    """Return the steps that install the packages which a file in `folder` names; None if none does."""
    sources = (
        (requirements.PYPROJECT, _requirement_lines(requirements.read_dependencies, folder), ""),
        (
            REQUIREMENTS,
            _requirement_lines(requirements.read_requirements, folder / REQUIREMENTS),
            f"requirements: {REQUIREMENTS}",
        ),
        (CONDA, tuple(_conda_lines(folder / CONDA)), ""),
    )
    return next((_propose_step(*source) for source in sources if source[1]), None)


def _read_beginning(file: Path) -> str:
    try:
        return files.read_text(file, errors="replace")
    except (OSError, ValueError):
        return ""


def _requirement_lines(read: Callable[[Path], tuple[str, ...]], path: Path) -> tuple[str, ...]:
    """Return what `read` finds in `path`; nothing if it is missing or damaged, which imgkit check reports."""
    try:
        return read(path)
    except (OSError, ValueError):
        return ()


def _propose_step(file: str, lines: tuple[str, ...], as_a_whole: str) -> PipProposal:
    """Return the step for the `lines` of `file`: `as_a_whole`, or a list of those that pip can install."""
    unfit = {line for line in lines if _is_in_base(line) or requirements.names_other_file(line)}
    if as_a_whole and not unfit:
        return PipProposal(file=file, steps=(as_a_whole,))
    # A list takes less than a file: no options, no URLs.
    packages = [line for line in lines if line not in unfit and not [*rules.pip_package(line)]]
    left_out = tuple(terminal.escape_controls(line) for line in lines if line not in packages)
    steps = (f"packages: {json.dumps(packages)}",) if packages else ()
    return PipProposal(file=file, steps=steps, left_out=left_out)


def _is_in_base(line: str) -> bool:
    return bool(re.fullmatch(requirements.PROTECTED, requirements.requirement_name(line)))


def _conda_lines(file: Path) -> Iterator[str]:
    """Yield the requirements of a conda environment; a package of another name for pip as conda writes it."""
    tree = yaml_tree.read_yaml(file, Collector()) if file.is_file() else None
    dependencies = yaml_tree.to_data(tree).get("dependencies") if tree else None
    for item in dependencies if isinstance(dependencies, list) else ():
        if isinstance(item, dict) and isinstance(item.get("pip"), list):
            yield from (line for line in item["pip"] if isinstance(line, str))
        elif isinstance(item, str):
            yield _of_conda(item)


def _of_conda(spec: str) -> str:
    """Return ``numpy==1.26.*`` of ``conda-forge::numpy=1.26``; what PyPI may lack stays as it is."""
    match = _CONDA_SPEC.fullmatch(spec.strip())
    if match is None or not _SAME_IN_CONDA.fullmatch(requirements.canonical_name(match["name"])):
        return f"conda:{spec}"
    versions = match["versions"] or ""
    if (build := _CONDA_BUILD.fullmatch(versions)) is not None:
        is_exact = versions.startswith("==") or build["exact"]
        versions = f"=={build['version']}{'' if is_exact else '.*'}"
    return match["name"] + versions
