"""Resolve and install packages inside an image with the image's own pip.

If the image has uv and no pip, uv fetches pip for the time of this program. uv itself has no report of what
it would install, and does not read the metadata that stands for the image's pre-releases.

This file runs with the Python of the image, so it uses the standard library only. It reads ``request.json``
beside it, and writes ``answer.json`` and the folder ``root`` there. The exit code is 0 even if the packages
cannot be installed; then the answer describes the failure.

All packages of the image are constraints for pip. A pre-release in the image must count as its release:
NVIDIA's torch is ``2.3.0a0+40ec155e58.nv24.3``, and a package that needs ``torch>=2.3`` must accept it. pip
compares requirements with the metadata of installed packages. So a folder that pip searches first, "shadows",
has a copy of the metadata of such a package, with the release as its version.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

OUTPUT_CHARACTERS = 20_000
"""Number of characters at the end of pip's output that an answer has. The errors of pip are at the end."""


class Failure(Exception):
    """The packages cannot be installed.

    Parameters
    ----------
    kind : ``no pip``, ``protected`` for a package that must not be replaced, or ``pip`` if pip failed.
    output : what pip printed, or the name of the protected package.
    """

    def __init__(self, kind: str, output: str = "") -> None:
        super().__init__(kind)
        self.kind, self.output = kind, output


def main(folder: Path) -> None:
    """Install what ``request.json`` in `folder` names, and write ``answer.json`` there."""
    os.umask(0o022)  # in the squashfs the files belong to root, and every user reads them
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    versions = installed_versions()
    try:
        answer = install(folder, request, versions)
    except Failure as failure:
        answer = {"failure": failure.kind, "output": failure.output[-OUTPUT_CHARACTERS:]}
    answer["image"] = versions
    answer["python"] = platform.python_version()
    answer["machine"] = platform.machine()
    (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


def install(folder: Path, request: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, Any]:
    """Install the packages of `request` that the image lacks into the folder ``root``.

    pip runs twice. The first run only finds out which packages the image lacks (``--dry-run``). The second
    run installs exactly these into another folder (``--target``), for which pip itself would install all
    dependencies again, also those that the image has.

    Parameters
    ----------
    folder : a temporary folder in the container.
    request : the content of ``request.json``: requirements, options of pip, and names of packages.
    versions : the versions of the image's packages, by name.

    Returns
    -------
    The keys ``packages`` and ``modules`` of the answer: the installed packages, and the names to import.

    Raises
    ------
    Failure : the image has no pip, a package to replace is protected, or pip failed.
    """
    shadows = folder / "shadows"
    constraints = folder / "constraints.txt"
    env = pip_environment(folder, shadows)
    pip = importlib.util.find_spec("pip")
    if pip is None or pip.origin is None:  # an empty folder is a namespace package, which has no origin
        fetch_pip(folder / "pip", request["options"], env)
    protected = protected_names(request["protected"])
    replaced = [canonical(name) for name in request["replace"]]
    for name in replaced:
        if name in protected:
            raise Failure("protected", name)
    write_constraints(constraints, shadows, versions, replaced)
    env["PIP_CONSTRAINT"] = str(constraints)
    report = folder / "report.json"
    run_pip([*request["options"], "--dry-run", "--report", str(report), *request["requirements"]], env)
    items = json.loads(report.read_text(encoding="utf-8"))["install"]
    root = folder / "root"
    root.mkdir()
    if items:
        exact_file = folder / "exact.txt"
        exact_file.write_text("".join(f"{line}\n" for line in exact_requirements(items)), encoding="utf-8")
        # The versions are exact, so nothing is constrained now. The variable still names the file, so that
        # the constraints of the image's own configuration do not apply either.
        constraints.write_text("", encoding="utf-8")
        run_pip(["--no-deps", "--target", str(root), *request["options"], "-r", str(exact_file)], env)
    names = sorted(path.name for path in root.iterdir())
    return {
        "packages": [summary(item) for item in items],
        "modules": [name.partition(".")[0] for name in names if is_module(name)],
    }


def write_constraints(
    constraints: Path, shadows: Path, versions: Mapping[str, str], replaced: Collection[str]
) -> None:
    """Write the file `constraints`, by which pip keeps the version of every package of the image.

    A pre-release such as ``2.3.0a0+nv24.3`` counts as its release (`released`). For such a package, a changed
    copy of its metadata is written to the folder `shadows`, which pip reads first.

    Parameters
    ----------
    versions : the versions of the image's packages, by name.
    replaced : the names of packages that pip may replace.
    """
    lines = []
    changed_versions = {}
    for name, version in released(versions).items():
        if name in replaced:
            continue
        lines.append(f"{name}=={version}\n")
        if version != versions[name]:
            changed_versions[name] = version
    write_shadows(shadows, changed_versions)
    constraints.write_text("".join(lines), encoding="utf-8")


def installed_versions() -> dict[str, str]:
    """Return the version of each distribution on Python's search path, by its normalised name.

    If a distribution is there twice, the first one counts, because Python imports that one.
    """
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name and distribution.version:
            versions.setdefault(canonical(name), distribution.version)
    return versions


def protected_names(pattern: str) -> set[str]:
    """Return the names of the installed packages that nothing may replace, because torch would break.

    These are the packages whose whole name matches `pattern`, and all that the image's torch requires in one
    exact version.
    """
    names = {name for name in installed_versions() if re.fullmatch(pattern, name)}
    try:
        requirements = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return names
    # "nvidia-cudnn-cu12==9.1.0.70; platform_system == 'Linux'", or "triton (==3.1.0)" in older metadata
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9._-]+)\s*\(?==", requirement)
        if match:
            names.add(canonical(match[1]))
    return names


def released(versions: Mapping[str, str]) -> dict[str, str]:
    """Return `versions` as pip shall see them: a pre-release with a local version counts as its release.

    NVIDIA's torch ``2.3.0a0+40ec155e58.nv24.3`` becomes ``2.3.0+40ec155e58.nv24.3``, so that it satisfies
    ``torch>=2.3``. A version that is not valid by PEP 440, as some of Debian's packages have, is left out,
    because pip could not read it as a constraint.
    """
    versioning = importlib.import_module("pip._vendor.packaging.version")
    result = {}
    for name, text in versions.items():
        try:
            version = versioning.Version(text)
        except versioning.InvalidVersion:
            continue
        result[name] = text
        if version.is_prerelease and version.local:
            result[name] = f"{version.base_version}+{version.local}"
    return result


def write_shadows(folder: Path, versions: Mapping[str, str]) -> None:
    """Write copies of the metadata of installed packages into `folder`, with other versions in them.

    pip searches `folder` first, and takes the version there for that of the installed package.

    Parameters
    ----------
    versions : the version to write for each package, by its name.
    """
    folder.mkdir()
    for name, version in versions.items():
        distribution = metadata.distribution(name)
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or f"Name: {name}\n"
        # The version is replaced only in the header, because a description may have such a line, too.
        header, blank_line, description = text.partition("\n\n")
        other_lines = re.sub(r"(?m)^Version:.*\n?", "", header).rstrip("\n")
        new_text = f"{other_lines}\nVersion: {version}{blank_line}{description}\n"
        dist_info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        dist_info.mkdir()
        (dist_info / "METADATA").write_text(new_text, encoding="utf-8")
        (dist_info / "INSTALLER").write_text("imgkit\n", encoding="utf-8")


def pip_environment(folder: Path, shadows: Path) -> dict[str, str]:
    """Return the environment variables for pip.

    They are those of the image, with three changes: temporary folders are in `folder`, Python finds the
    metadata in `shadows` before that of the image's packages, and pip asks no questions.
    """
    env = dict(os.environ)
    for name in ("TMPDIR", "PIP_CACHE_DIR"):
        env[name] = str(folder / name.lower())
        Path(env[name]).mkdir(exist_ok=True)
    certificates = folder.with_name(f"{folder.name}.pem")
    if certificates.exists():
        env["PIP_CERT"] = str(certificates)
    search_path = [str(shadows), str(folder / "pip")]
    if env.get("PYTHONPATH"):
        search_path.append(env["PYTHONPATH"])
    env["PYTHONPATH"] = os.pathsep.join(search_path)
    env |= {
        "PIP_BREAK_SYSTEM_PACKAGES": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        # A node without a network is to say so within a minute.
        "PIP_RETRIES": "2",
        "PIP_DEFAULT_TIMEOUT": "15",
    }
    return env


def fetch_pip(target: Path, options: list[str], env: Mapping[str, str]) -> None:
    """Install pip into the folder `target` with the image's uv.

    Raises
    ------
    Failure : the image has no uv, or uv exited with an error.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise Failure("no pip")
    env = {**env, "UV_CACHE_DIR": f"{target}-cache"}
    if "PIP_INDEX_URL" in env:
        env["UV_DEFAULT_INDEX"] = env["PIP_INDEX_URL"]
    run([uv, "pip", "install", "--python", sys.executable, "--target", str(target), *options, "pip"], env)
    sys.path.append(str(target))  # `released` imports a part of pip


def run_pip(arguments: list[str], env: Mapping[str, str]) -> None:
    """Run ``pip install`` with `arguments`."""
    run([sys.executable, "-s", "-m", "pip", "install", "--no-warn-script-location", *arguments], env)


def run(argv: list[str], env: Mapping[str, str]) -> None:
    """Run a program, and print its output line by line while it runs.

    Raises
    ------
    Failure : the program exited with an error. The failure has all of its output.
    """
    lines = []
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=dict(env)
    ) as process:
        assert process.stdout is not None  # noqa: S101 - for the type checker: stdout=PIPE
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    if process.returncode:
        raise Failure("pip", "".join(lines))


def exact_requirements(items: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a requirements file for exactly the items of pip's report.

    An example is ``einops==0.8.0 --hash=sha256:5f...``. No line has a hash if one of the items has none,
    because pip requires a hash of all requirements as soon as one has it.
    """
    has_hashes = all(summary(item)["sha256"] for item in items)
    lines = []
    for item in items:
        line = exact_requirement(item)
        if has_hashes:
            line += f" --hash=sha256:{summary(item)['sha256']}"
        lines.append(line)
    return lines


def exact_requirement(item: Mapping[str, Any]) -> str:
    """Return the requirement of one item of pip's report, without a hash: ``einops==0.8.0``.

    A package of a URL or repository has the form ``NAME @ git+https://...@COMMIT``.
    """
    name = item["metadata"]["name"]
    if not item.get("is_direct"):
        return f"{name}=={item['metadata']['version']}"
    download = item["download_info"]
    repository = download.get("vcs_info")
    if repository:
        return f"{name} @ {repository['vcs']}+{download['url']}@{repository['commit_id']}"
    return f"{name} @ {download['url']}"


def summary(item: Mapping[str, Any]) -> dict[str, str]:
    """Return the name, version and SHA-256 of a package in pip's report (``pip install --report``).

    The SHA-256 is that of the downloaded file. It is empty for a folder or a repository.
    """
    archive = item["download_info"].get("archive_info") or {}
    # pip before 23.0 writes only the key ``hash``, whose value is ``sha256=DIGEST``.
    sha256 = archive.get("hashes", {}).get("sha256") or archive.get("hash") or ""
    return {
        "name": item["metadata"]["name"],
        "version": item["metadata"]["version"],
        "sha256": sha256.rpartition("sha256=")[2],
    }


def is_module(name: str) -> bool:
    """Return whether a file or folder called `name` in the folder of packages can be imported.

    ``einops`` and ``six.py`` can; ``einops-0.8.0.dist-info`` and ``bin`` cannot.
    """
    return name.partition(".")[0].isidentifier() and name not in ("bin", "__pycache__")


def canonical(name: str) -> str:
    """Return the normalised name of a package: ``Ruamel.YAML_clib`` -> ``ruamel-yaml-clib``."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
