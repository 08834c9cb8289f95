"""Explain why packages could not be installed in an image.

`machine.sh` reports problems of the machine by name. ``inside.py`` passes on the output of pip as text. This
module searches the output for messages that it knows.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from imgkit_builder.base import process
from imgkit_builder.recipe.requirements import PROTECTED, canonical_name
from imgkit_builder.sif import squash
from imgkit_builder.sif.workspace import NO_SPACE
from imgkit_entrypoints import secret_patterns
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, ToolMissing, UsageError

_NO_NETWORK_MESSAGE = re.compile(
    r"NewConnectionError|Temporary failure in name resolution|ConnectTimeout|ReadTimeoutError|ProxyError"
    r"|dns error|Connection (?:timed out|refused)|Network is unreachable|SSLError"
)
# "The user requested (constraint) numpy==1.26.4": pip cannot install the request because of the version that
# the image has.
_CONSTRAINT_MESSAGE = re.compile(r"\(constraint\) (?P<name>[A-Za-z0-9._-]+)==\S+")
_MISSING_MESSAGE = re.compile(r"No matching distribution found for (?P<package>[^\n]+)")
# Lines of pip that do not explain a failure. "━" is the progress bar.
_NOISE = re.compile(r"WARNING: |\[notice\]|DEPRECATION: |Looking in |Collecting |  Downloading | +━")
# The most lines of pip's output that a hint shows. The log has all of them.
_MAX_LINES = 12
_SIF_HINT = "imgkit sif IMAGE makes a .sif of an archive or an image"


class _Problem(NamedTuple):
    """The error for a problem that `machine.sh` reports, about the file to write or about the image."""

    message: str
    hint: str
    error: type[UsageError | ToolMissing] = UsageError
    is_about_image: bool = False


# `machine.sh` reports a problem as "problem NAME".
_PROBLEMS = {
    "no-image": _Problem("there is no such image", _SIF_HINT, is_about_image=True),
    "no-sif": _Problem("this is no .sif", _SIF_HINT, is_about_image=True),
    "no-folder": _Problem("there is no such folder", "mkdir -p {folder}"),
    "not-writable": _Problem("you may not write in {folder}", "-o FILE.sqsh, in a folder of yours: -o {own}"),
    "busy": _Problem(
        "another imgkit process is writing this file", "wait for it, or choose another name with -o"
    ),
    "no-runtime": _Problem(
        "there is no singularity on PATH",
        "module load singularity or apptainer; on a remote: a recipe with system.runtime.modules",
        ToolMissing,
    ),
    "no-mksquashfs": _Problem("mksquashfs is not on this machine", squash.INSTALL, ToolMissing),
}


def refuse_problem(line: str, *, image: str, target: Path, remote: str = "") -> None:
    """Raise an error if `line` is a problem that `machine.sh` reports, such as ``problem no-image``.

    Any other line is ignored.

    Parameters
    ----------
    target : the file that `imgkit add` writes.
    remote : the name of the remote with the image, or empty for this machine.
    """
    first_word, _, name = line.partition(" ")
    if first_word != "problem" or name not in _PROBLEMS:
        return
    problem = _PROBLEMS[name]
    where = image if problem.is_about_image else str(target)
    # On this machine, the file may be in the current folder. On a remote, only an absolute path is allowed.
    own_path = f"/home/ME/{target.name}" if remote else target.name
    values = {"folder": target.parent, "own": own_path}
    raise problem.error(problem.message.format(**values), where=where, hint=problem.hint.format(**values))


def explain_crash(
    error: ToolFailed, output: str, *, image: Path, target: Path, command: str, log: str
) -> ImgkitError:
    """Return the error to show if a program other than pip failed, or if the image did not start.

    Failures of pip itself are explained by `explain`.

    Parameters
    ----------
    error : the failure of the script, with the end of its standard error.
    output : what the container printed.
    command : the `imgkit add` command that makes the file, for a hint.
    log : the path of the file with all of the output.
    """
    all_messages = f"{output}\n{error.what}\n{error.hint}"
    # "the image's architecture (arm64) could not run on the host's (amd64)"
    if "could not run on the host" in all_messages:
        return UsageError(
            "the image is for another processor, and pip cannot run in it on this machine",
            where=str(image),
            hint=f"on a node for the image: srun --nodes 1 --ntasks 1 {command}",
        )
    if "executable file not found" in all_messages:
        return UsageError("the image has no python3", where=str(image), hint="another image")
    if NO_SPACE.search(all_messages):
        return _full_disk_error(target)
    last_lines = process.last_lines(secret_patterns.mask_secrets(output), _MAX_LINES)
    if not last_lines:  # the container has not printed anything that would explain more
        return error
    hint = "\n".join(["its last lines:", *last_lines, f"full log: {log}"])
    return ToolFailed(error.what, where=str(image), hint=hint)


def _full_disk_error(target: Path) -> ToolFailed:
    """Return the error for a disk that became full while packages were installed."""
    message = f"the disk of {target.parent} is full"
    return ToolFailed(message, where=str(target), hint="-o FILE on a larger disk")


def explain(
    answer: Mapping[str, Any],
    *,
    image: Path,
    target: Path,
    requirements: tuple[str, ...],
    log: str,
    remote: str = "",
) -> ImgkitError:
    """Return the error to show for a failure of pip, with a hint that names the cause.

    Parameters
    ----------
    answer : what ``inside.py``, which runs pip in the image, has written about the failure.
    requirements : the requirements as the user typed them, for the commands in hints.
    log : the path of the file with all of pip's output.
    remote : the name of the remote with the image, or empty for this machine.
    """
    # For the failure "protected", `output` is only the name of the package.
    failure, output = answer["failure"], answer["output"]
    versions: Mapping[str, str] = answer["image"]
    recipe_line = _recipe_line(requirements)
    # `inside.py` uses pip's option --report, which exists since pip 22.2.
    pip_problem = "has no pip" if failure == "no pip" else ""
    if "no such option: --report" in output:
        pip_problem = "has a pip older than 22.2, which cannot do this"
    if pip_problem:
        hint = f"build one that has it: {recipe_line}"
        return UsageError(f"the image {pip_problem}", where=str(image), hint=hint)
    if failure == "protected":
        return UsageError(
            f"nothing may replace {output} {versions.get(output, '')}, which belongs to the image's torch",
            where="--replace",
            hint=f"build an image with another base: {recipe_line}",
        )
    if NO_SPACE.search(output):
        return _full_disk_error(target)
    constraint = _CONSTRAINT_MESSAGE.search(output)
    if constraint:
        name = canonical_name(constraint["name"])
        return UsageError(
            f"{_conflict_reason(name, output)}, and the image has {name} {versions.get(name, '')}",
            where="PACKAGE",
            hint=_conflict_hint(name, recipe_line),
        )
    # The network is checked before a missing package, because pip also prints that message without a network.
    if _NO_NETWORK_MESSAGE.search(output):
        return ToolFailed(
            f"the image's pip cannot reach a package index from {remote or 'this machine'}",
            where=str(image),
            hint=f"{_wheels_hint(answer, image, shlex.join(requirements), remote)}; or build {recipe_line}",
        )
    missing = _MISSING_MESSAGE.search(output)
    if missing:
        return UsageError(
            f"there is no {missing['package']} for Python {answer['python']} on {answer['machine']}",
            where=str(image),
            hint="\n".join(["check its name and version at the index", *_last_lines(output)]),
        )
    hint = "\n".join([*_last_lines(output), f"full log: {log}"])
    return ToolFailed("pip failed in the image", where=str(image), hint=hint)


def _wheels_hint(answer: Mapping[str, Any], image: Path, typed: str, remote: str) -> str:
    """Return the commands that download wheels on a machine with a network, and add packages from them.

    Parameters
    ----------
    answer : the answer of ``inside.py``, with the image's processor and version of Python.
    typed : the requirements as the user typed them.
    remote : the name of the remote with the image, or empty for this machine.
    """
    # The options select wheels for the image's processor and Python, whatever machine runs the command.
    download = (
        "python3 -m pip download --only-binary :all: -d wheels "
        f"--platform manylinux_2_28_{answer['machine']} --python-version {answer['python']} {typed}"
    )
    add_again = f"imgkit add {typed} --image {image} --wheels wheels"
    if remote:
        return f"{download}; then: {add_again} --on {remote}"
    return f"where there is a network: {download}; copy the folder here, and: {add_again}"


def _conflict_hint(name: str, recipe_line: str) -> str:
    """Return what the user can do if a request needs another version of `name` than the image has."""
    # --replace would not help here: `inside.py` refuses to replace packages on which the image's torch
    # depends.
    if re.fullmatch(PROTECTED, name) or name.startswith("nvidia-"):
        return f"another version of it; or build an image with another torch: {recipe_line}"
    return f"another version of it, or let it replace the image's: --replace {name}"


def _conflict_reason(name: str, output: str) -> str:
    """Return why pip needs another version of the package `name`: ``"timm 1.0.9 needs torch>=2.4"``."""
    pattern = re.escape(name)
    dependency = re.search(
        rf"(?mi)^ +(?P<package>\S+) (?P<version>\S+) depends on (?P<needed>{pattern}\b[^\n]*)", output
    )
    if dependency:
        return f"{dependency['package']} {dependency['version']} needs {dependency['needed']}"
    request = re.search(rf"(?mi)^ +The user requested (?P<needed>{pattern}[^\n]*)", output)
    if request:
        return f"{request['needed']} is asked for"
    return "another version is asked for"


def _recipe_line(requirements: tuple[str, ...]) -> str:
    """Return the lines of a recipe, for a hint, that would build the packages into a new image."""
    packages = ", ".join(requirements) or "..."
    return f"a recipe with this image's base and `pip: [{packages}]` (imgkit init)"


def _last_lines(output: str) -> list[str]:
    """Return the last lines of pip's output that explain its failure.

    These are the lines that begin with ``ERROR:``. If there are none, they are all lines except progress and
    notices.
    """
    lines = output.splitlines()
    relevant_lines = [line.rstrip() for line in lines if line.strip() and not _NOISE.match(line)]
    errors = [line for line in relevant_lines if line.startswith("ERROR:")]
    shown_lines = errors or relevant_lines
    return shown_lines[-_MAX_LINES:]
