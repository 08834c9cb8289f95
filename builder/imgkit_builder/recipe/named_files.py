"""Check the files that a recipe names.

Each file must be in the recipe's folder, and have content that an image can use.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.recipe import requirements
from imgkit_builder.recipe.model import NO_DEPS
from imgkit_builder.recipe.problems import ANY, Collector, KeyPath, Position, nearest_name
from imgkit_builder.recipe.rules import parse_reference
from imgkit_builder.recipe.yaml_tree import Scalar, Table
from imgkit_entrypoints import files, secret_patterns
from imgkit_entrypoints.rules import Fault, Unfit


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFile:
    """A value of a recipe that names a file or a folder."""

    node: Scalar
    path: KeyPath
    problems: Collector
    ngc_base: str
    """The recipe's base if it is an image of NVIDIA's PyTorch. Otherwise empty."""
    has_no_dependencies: bool
    """Whether pip installs the named project without its dependencies."""

    def error(self, message: str, hint: str = "") -> None:
        """Report a problem at the position of this value."""
        self.problems.error(self.node.position, self.path, message, hint)


def check(tree: Table, problems: Collector, faulty: Collection[KeyPath]) -> None:
    """Report each file in a recipe that is missing, outside of the recipe's folder, or has unusable content.

    `faulty` contains the keys of values that have been reported already. They are skipped.
    """
    # A pin such as torch==2.3.0 cannot be met beside the NVIDIA build of torch in an image from NGC.
    ngc_base = _find_ngc_base(tree)
    for path, node in tree.select_texts("image", "pip", ANY, "packages", ANY):
        _check_torch(node.text, ngc_base, node.position, path, problems)
    steps_without_dependencies = _find_steps_without_dependencies(tree)
    # Each pattern matches keys of one kind, such as the requirements of all pip steps. Its function checks
    # the content of the files that these keys name.
    for pattern, check_content in _CONTENT_CHECKS.items():
        may_be_folder = pattern[-1] in ("source", "project")
        for path, node in tree.select_texts(*pattern):
            if path in faulty:
                continue
            named_file = NamedFile(
                node=node,
                path=path,
                problems=problems,
                ngc_base=ngc_base,
                has_no_dependencies=path[:-1] in steps_without_dependencies,
            )
            # A file outside of the recipe's folder is never opened, because a message could reveal its
            # content.
            file = _check_and_resolve_file(named_file, may_be_folder=may_be_folder)
            if file is not None:
                check_content(file, named_file)


def _find_steps_without_dependencies(tree: Table) -> set[KeyPath]:
    """Return the key of each pip step with the option ``--no-deps``, such as ``("image", "pip", 0)``."""
    steps = set()
    for path, node in tree.select_texts("image", "pip", ANY, "options", ANY):
        if node.text == NO_DEPS:
            steps.add(path[:-2])  # ("image", "pip", 0, "options", 1) -> ("image", "pip", 0)
    return steps


def _check_and_resolve_file(named: NamedFile, *, may_be_folder: bool) -> Path | None:
    """Return the path of a file that a recipe names. If it cannot be used, report the reason and return None.

    The file must exist in the folder of the recipe. It may be a folder only if `may_be_folder` is true.
    """
    named_path = named.node.text
    folder = named.node.position.file.resolve().parent
    fault: Fault | None
    try:
        fault = _find_fault(named_path, folder, may_be_folder=may_be_folder)
    except (OSError, ValueError, RuntimeError) as error:
        # ValueError: the path has a NUL byte. RuntimeError: links that form a circle, before Python 3.13.
        fault = (f"{named_path!r} cannot be checked: {error}", "name a file in the recipe's folder")
    if fault is not None:
        message, hint = fault
        named.error(message, hint)
        return None
    return (folder / named_path).resolve()


def _find_fault(text: str, folder: Path, *, may_be_folder: bool) -> Fault | None:
    """Return why a recipe in `folder` cannot use the file `text`, or None if it can.

    The file must exist below `folder`. If it is a symbolic link, its target must be there, too. All links in
    `folder` itself must already be resolved.
    """
    file = folder / text
    target = file.resolve()
    if not text:
        return "is empty", "name a file"
    if Path(text).is_absolute() or text.startswith("~"):
        return f"{text} is not relative", f"paths start at the recipe's folder, {folder}"
    # The path leaves the folder either by its parts ("../x") or through a link. Check this before the checks
    # below, which would reveal whether a file outside of the folder exists.
    if not target.is_relative_to(folder):
        route = "" if ".." in Path(text).parts else " through a symbolic link"
        return f"{text} leaves the recipe's folder{route}", f"put it below {folder}"
    if not target.exists():
        similar_name = nearest_name(file.name, [sibling.name for sibling in file.parent.glob("*")])
        hint = f"did you mean {similar_name}?" if similar_name else "create it"
        return f"there is no {text} in {folder}", hint
    if target.is_dir() and not may_be_folder:
        return f"{text} is a folder", "name a file"
    if not (target.is_dir() or target.is_file()):
        return f"{text} is neither a file nor a folder", "name a regular file"
    return None


def _find_ngc_base(tree: Table) -> str:
    """Return the recipe's base if it is an image of NVIDIA's PyTorch, from any registry.

    Otherwise return "".
    """
    for _, node in tree.select_texts("image", "base"):
        with contextlib.suppress(Unfit):
            repository = parse_reference(node.text).repository
            # A mirror may have folders before the name, so only the end of the repository is compared. The
            # slash in front keeps another word that ends in "nvidia" from matching.
            if f"/{repository}".endswith("/nvidia/pytorch"):
                return node.text
    return ""


def _check_torch(
    requirement: str, ngc_base: str, position: Position, path: KeyPath, problems: Collector
) -> None:
    """Report a requirement such as ``torch==2.3.0`` if the base is an image of NVIDIA's PyTorch.

    Such an image contains NVIDIA's own build of torch, such as ``2.3.0a0+40ec155e58.nv24.03``. This version
    is in no package index, so pip would replace it to meet the requirement.

    Parameters
    ----------
    ngc_base : the reference of NVIDIA's image. It is empty for any other base.
    position, path : the line and the key to report.
    """
    if not ngc_base:
        return
    name = requirements.find_protected_pin(requirement)  # torch, or a package that belongs to it
    if name:
        problem = f"would replace the {name} of {ngc_base}, which imgkit keeps: the build would fail"
        hint = f"remove the version: {name}; or choose a base with that version of {name}"
        problems.error(position, path, f"{requirement!r} {problem}", hint)


def _check_requirements(file: Path, named: NamedFile) -> None:
    """Report the lines of a requirements file that a build cannot use, and warn about lines with secrets.

    For example, ``-r other.txt`` names another file, but only the requirements file itself is copied into the
    image.
    """
    problems = named.problems
    try:
        lines = files.read_text(file).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problems.error(Position(file=file, line=1, column=1), named.path, f"cannot be read: {error}")
        return
    # Problems quote the lines of this file.
    problems.lines[file] = lines
    for line_number, line in enumerate(lines, start=1):
        _check_requirements_line(line, Position(file=file, line=line_number, column=1), named)


def _check_requirements_line(line: str, position: Position, named: NamedFile) -> None:
    """Report a line of a requirements file that a build cannot use, and warn if it contains a secret.

    `position` is the beginning of the line.
    """
    problems = named.problems
    requirement = line.strip()
    if requirements.names_other_file(line):
        text_position = dataclasses.replace(position, column=line.index(requirement) + 1)
        message = f"{requirement!r} names a file that is not in the image"
        problems.error(text_position, named.path, message, "write its lines here")
    _check_torch(requirement, named.ngc_base, position, named.path, problems)
    secret = secret_patterns.find_secret(requirement)
    if secret:
        problems.warn(position, named.path, f"this looks like {secret}", IN_HISTORY)


def _check_certificate(file: Path, named: NamedFile) -> None:
    """Report a file that is not a certificate in PEM form, or that contains a private key."""
    try:
        certificate = files.read_bytes(file)
    except OSError as error:
        named.error(f"{file.name} cannot be read: {error.strerror}")
        return
    # A .pem file often contains both a certificate and its key. The key must not get into the image.
    if b"PRIVATE KEY-----" in certificate:
        hint = f"keep only the certificate: openssl x509 -in {file.name} -out certificate.crt"
        named.error(f"{file.name} holds a private key, which would be in the image", hint)
    elif b"-----BEGIN CERTIFICATE-----" not in certificate:
        hint = f"if it is DER, convert it: openssl x509 -inform der -in {file.name} -out certificate.crt"
        named.error(f"{file.name} is not a certificate in PEM form", hint)


def _check_project(folder: Path, named: NamedFile) -> None:
    """Report a project without a usable pyproject.toml, or with a dependency that pip cannot install.

    pip cannot install a dependency on a path, because the path does not exist in the image. A torch other
    than the base's is reported, too, because imgkit never replaces the base's torch.
    """
    if not (folder / requirements.PYPROJECT).is_file():
        named.error(f"{folder.name} has no {requirements.PYPROJECT}", _suggest_pyproject(folder))
        return
    try:
        dependencies = requirements.read_dependencies(folder)
    except (OSError, ValueError) as error:
        named.error(f"its {requirements.PYPROJECT} cannot be read: {error}")
        return
    if named.has_no_dependencies:
        return
    for dependency in dependencies:
        # In PEP 508, a dependency on a path has the form "NAME @ file:...".
        _, _, source = dependency.rpartition("@")
        if requirements.names_other_file(source):
            message = f"depends on {dependency!r}, a path that is not in the image"
            named.error(message, "add a pip step with a project of its own before this one")
        _check_torch(dependency, named.ngc_base, named.node.position, named.path, named.problems)


def _suggest_pyproject(folder: Path) -> str:
    """Return a hint for a project in `folder` that has no pyproject.toml."""
    if (folder / "setup.py").is_file():
        return 'add one next to setup.py: [build-system] with requires = ["setuptools"]'
    if folder.is_dir():
        return "name the folder that has one"
    return "name a folder"


def _check_uv_project(folder: Path, named: NamedFile) -> None:
    """Report a folder without pyproject.toml or uv.lock. uv itself reads them when the image is built."""
    if not (folder / requirements.PYPROJECT).is_file():
        named.error(f"{folder.name} has no {requirements.PYPROJECT}", "name the folder of one")
    elif not (folder / requirements.UV_LOCK).is_file():
        named.error(f"{folder.name} has no {requirements.UV_LOCK}", "write it: uv lock")


IN_HISTORY = (
    "it stays in the image's history; write ${NAME} instead, in a requirements file or a command, and "
    "declare the variable: secrets: [{id: mine, env: NAME}], with secrets: [mine] in the step"
)
"""The hint for a secret in a build step."""

_CONTENT_CHECKS: dict[tuple[str, ...], Callable[[Path, NamedFile], None]] = {
    ("image", "ca", ANY): _check_certificate,
    ("image", "uv", "project"): _check_uv_project,
    ("image", "pip", ANY, "requirements"): _check_requirements,
    ("image", "pip", ANY, "project"): _check_project,
    ("image", "copy", ANY, "source"): lambda file, named: None,  # code is only copied
}
"""Key that names a file in the recipe's folder -> the function that checks the content of the file."""
