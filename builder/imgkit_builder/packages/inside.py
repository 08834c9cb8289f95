"""Install packages inside an image with the image's own pip.

This file is run by the Python of the image, so it uses the standard library only. It reads ``request.json``
from its own folder. There it writes ``answer.json`` and the folder ``root``, which has the packages. The exit
code is 0 even if the packages cannot be installed. In that case the answer describes the failure.

All packages of the image are constraints for pip, so that pip does not install other versions of them. A
pre-release in the image must count as its release. For example, NVIDIA's torch is
``2.3.0a0+40ec155e58.nv24.3``, and must satisfy a package that needs ``torch>=2.3``. pip reads the installed
version from the metadata of a package. So this program writes a copy of the metadata, with the release as its
version, to the folder "changed-metadata", which pip searches first.

If the image has uv but no pip, uv installs pip into a temporary folder. uv itself cannot be used: it cannot
report what it would install, and it does not read that folder.
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
"""The number of characters that an answer contains from the end of pip's output, where the errors are."""


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
    """Install the packages that ``request.json`` in `folder` names, and write ``answer.json`` there.

    After a failure, the answer has its kind and the output of pip. It always has the versions of the image's
    packages and the platform, which the error messages of imgkit need.
    """
    os.umask(0o022)  # the files will belong to root in the squashfs, and every user must be able to read them
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
    """Install the packages of `request` that the image does not have into the folder ``root``.

    pip runs twice. The first run only finds out which packages are missing (``--dry-run``). The second run
    installs exactly these packages into another folder (``--target``). One run would not be enough, because
    with ``--target`` pip installs all dependencies again, even those that the image has.

    Parameters
    ----------
    folder : a temporary folder in the container.
    request : the content of ``request.json``: requirements, options of pip, and names of packages.
    versions : the versions of the image's packages, by name.

    Returns
    -------
    The keys ``packages`` and ``modules`` of the answer: the installed packages, and the names that programs
    can import.

    Raises
    ------
    Failure : the image has no pip, a package to replace is protected, or pip failed.
    """
    changed_metadata = folder / "changed-metadata"
    constraints = folder / "constraints.txt"
    # This only names the folder. `write_constraints` makes it, before pip runs in this environment.
    env = pip_environment(folder, changed_metadata)
    pip = importlib.util.find_spec("pip")
    if pip is None or pip.origin is None:  # an empty folder is a namespace package, which has no origin
        fetch_pip(folder / "pip", request["options"], env)
    replaced = replaceable_names(request)
    write_constraints(constraints, changed_metadata, versions, replaced)
    env["PIP_CONSTRAINT"] = str(constraints)
    report = folder / "report.json"
    run_pip([*request["options"], "--dry-run", "--report", str(report), *request["requirements"]], env)
    report_items = json.loads(report.read_text(encoding="utf-8"))["install"]
    root = folder / "root"
    root.mkdir()
    if report_items:
        exact_file = folder / "exact.txt"
        exact_lines = [f"{line}\n" for line in exact_requirements(report_items)]
        exact_file.write_text("".join(exact_lines), encoding="utf-8")
        # All versions are exact now, so no constraints are needed. The variable still names an empty file.
        # Otherwise the constraints in the image's own configuration would apply.
        constraints.write_text("", encoding="utf-8")
        run_pip(["--no-deps", "--target", str(root), *request["options"], "-r", str(exact_file)], env)
    root_names = sorted(path.name for path in root.iterdir())
    return {
        "packages": [describe_package(item) for item in report_items],
        "modules": [name.partition(".")[0] for name in root_names if is_module(name)],
    }


def replaceable_names(request: Mapping[str, Any]) -> list[str]:
    """Return the packages that pip may replace, as the user wants. Raise Failure if one is protected."""
    protected = protected_names(request["protected"])
    names = [canonical(name) for name in request["replace"]]
    for name in names:
        if name in protected:
            raise Failure("protected", name)
    return names


def write_constraints(
    constraints: Path, changed_metadata: Path, versions: Mapping[str, str], replaced: Collection[str]
) -> None:
    """Write the file `constraints`, which makes pip keep the version of every package in the image.

    A pre-release such as ``2.3.0a0+nv24.3`` counts as its release. For such a package, a copy of its metadata
    with the release as its version is written to the folder `changed_metadata`. The caller must make pip
    search this folder first.

    Parameters
    ----------
    versions : the versions of the image's packages, by name.
    replaced : the names of packages that pip may replace, and that are not constrained.
    """
    constraint_lines = []
    changed_versions = {}
    # Packages whose version pip cannot read are left out by `versions_for_pip`, and are not constrained.
    for name, version in versions_for_pip(versions).items():
        if name in replaced:
            continue
        constraint_lines.append(f"{name}=={version}\n")
        # A version that differs from the installed one must also be in the metadata that pip reads.
        if version != versions[name]:
            changed_versions[name] = version
    write_changed_metadata(changed_metadata, changed_versions)
    constraints.write_text("".join(constraint_lines), encoding="utf-8")


def installed_versions() -> dict[str, str]:
    """Return the version of each package on Python's search path, by its normalized name.

    If a package is installed twice, the first one on the path counts, because Python imports that one.
    """
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name and distribution.version:
            versions.setdefault(canonical(name), distribution.version)
    return versions


def protected_names(pattern: str) -> set[str]:
    """Return the names of the installed packages that must not be replaced, because torch would break.

    These are the packages whose name matches `pattern`, and all packages that the image's torch requires in
    one exact version. If the image has no torch, only `pattern` counts.
    """
    protected = {name for name in installed_versions() if re.fullmatch(pattern, name)}
    try:
        requirements = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return protected
    # A requirement in one exact version: "nvidia-cudnn-cu12==9.1.0.70; platform_system == 'Linux'", or
    # "triton (==3.1.0)" in older metadata
    for requirement in requirements:
        exact_match = re.match(r"([A-Za-z0-9._-]+)\s*\(?==", requirement)
        if exact_match:
            protected.add(canonical(exact_match[1]))
    return protected


def versions_for_pip(versions: Mapping[str, str]) -> dict[str, str]:
    """Return the `versions` that pip should see. A pre-release with a local version counts as its release.

    For example, NVIDIA's torch ``2.3.0a0+40ec155e58.nv24.3`` becomes ``2.3.0+40ec155e58.nv24.3``, which
    satisfies ``torch>=2.3``. Some packages of Debian have versions that PEP 440 does not allow. They are left
    out, because pip could not read them as constraints.
    """
    # pip's own copy of packaging is used, because the image may not have packaging itself.
    versioning = importlib.import_module("pip._vendor.packaging.version")
    versions_by_name = {}
    for name, text in versions.items():
        try:
            version = versioning.Version(text)
        except versioning.InvalidVersion:
            continue
        versions_by_name[name] = text
        if version.is_prerelease and version.local:
            versions_by_name[name] = f"{version.base_version}+{version.local}"
    return versions_by_name


def write_changed_metadata(folder: Path, versions: Mapping[str, str]) -> None:
    """Write copies of the metadata of installed packages into `folder`, with other versions.

    pip searches `folder` first, so it takes the version there for the version of the installed package.

    Parameters
    ----------
    versions : the version to write for each package, by name.
    """
    folder.mkdir()
    for name, version in versions.items():
        distribution = metadata.distribution(name)
        old_metadata = (
            distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or f"Name: {name}\n"
        )
        # The version is replaced in the header only, because the description may have a line "Version:", too.
        header, blank_line, description = old_metadata.partition("\n\n")
        other_lines = re.sub(r"(?m)^Version:.*\n?", "", header).rstrip("\n")
        new_metadata = f"{other_lines}\nVersion: {version}{blank_line}{description}\n"
        dist_info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        dist_info.mkdir()
        (dist_info / "METADATA").write_text(new_metadata, encoding="utf-8")
        (dist_info / "INSTALLER").write_text("imgkit\n", encoding="utf-8")


def pip_environment(folder: Path, changed_metadata: Path) -> dict[str, str]:
    """Return the environment variables for pip.

    They are the variables of the image, with three changes. Temporary files go to `folder`. Python finds the
    metadata in `changed_metadata` before that of the image's packages, so pip sees the versions there. And
    pip asks no questions.
    """
    env = dict(os.environ)
    for name in ("TMPDIR", "PIP_CACHE_DIR"):
        env[name] = str(folder / name.lower())
        Path(env[name]).mkdir(exist_ok=True)
    # The certificates of the machine, which ``machine.sh`` mounts beside `folder` if it has any.
    certificates = folder.with_name(f"{folder.name}.pem")
    if certificates.exists():
        env["PIP_CERT"] = str(certificates)
    # The second folder exists only if the image has no pip (see `fetch_pip`).
    search_path = [str(changed_metadata), str(folder / "pip")]
    if env.get("PYTHONPATH"):
        search_path.append(env["PYTHONPATH"])
    env["PYTHONPATH"] = os.pathsep.join(search_path)
    env |= {
        # Distributions protect their packages from pip. Here pip writes to other folders only.
        "PIP_BREAK_SYSTEM_PACKAGES": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        # Without a network, pip should fail within a minute.
        "PIP_RETRIES": "2",
        "PIP_DEFAULT_TIMEOUT": "15",
    }
    return env


def fetch_pip(target: Path, options: list[str], env: Mapping[str, str]) -> None:
    """Install pip into the folder `target`, with the uv of the image.

    `options` are options for uv and pip, such as another index. Afterwards this program can import pip, too.

    Raises
    ------
    Failure : the image has no uv, or uv exited with an error.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise Failure("no pip")
    env = {**env, "UV_CACHE_DIR": f"{target}-cache"}
    if "PIP_INDEX_URL" in env:  # uv does not read the variables of pip
        env["UV_DEFAULT_INDEX"] = env["PIP_INDEX_URL"]
    run([uv, "pip", "install", "--python", sys.executable, "--target", str(target), *options, "pip"], env)
    sys.path.append(str(target))  # `versions_for_pip` imports a module of pip


def run_pip(arguments: list[str], env: Mapping[str, str]) -> None:
    """Run ``pip install`` with `arguments`, and ignore packages in the user's home folder.

    Raises
    ------
    Failure : pip exited with an error.
    """
    run([sys.executable, "-s", "-m", "pip", "install", "--no-warn-script-location", *arguments], env)


def run(argv: list[str], env: Mapping[str, str]) -> None:
    """Run a program, and print each line of its output as it arrives.

    Raises
    ------
    Failure : the program exited with an error. The failure contains all of its output.
    """
    output_lines = []
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=dict(env)
    ) as process:
        assert process.stdout is not None  # noqa: S101 - for the type checker: stdout=PIPE
        for line in process.stdout:
            output_lines.append(line)
            print(line, end="", flush=True)
    if process.returncode:
        raise Failure("pip", "".join(output_lines))


def exact_requirements(items: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a requirements file that install exactly the items of pip's report.

    An example is ``einops==0.8.0 --hash=sha256:5f...``. If any item has no hash, no line gets one, because
    pip requires all hashes as soon as there is one.
    """
    has_hashes = all(describe_package(item)["sha256"] for item in items)
    requirement_lines = []
    for item in items:
        requirement_line = exact_requirement(item)
        if has_hashes:
            requirement_line += f" --hash=sha256:{describe_package(item)['sha256']}"
        requirement_lines.append(requirement_line)
    return requirement_lines


def exact_requirement(item: Mapping[str, Any]) -> str:
    """Return the requirement for one item of pip's report, without a hash, such as ``einops==0.8.0``.

    A package from a URL or a repository has the form ``NAME @ git+https://...@COMMIT``.
    """
    name = item["metadata"]["name"]
    if not item.get("is_direct"):  # the requirement did not name a URL, so the package is from an index
        return f"{name}=={item['metadata']['version']}"
    download = item["download_info"]
    repository = download.get("vcs_info")
    if repository:
        return f"{name} @ {repository['vcs']}+{download['url']}@{repository['commit_id']}"
    return f"{name} @ {download['url']}"


def describe_package(item: Mapping[str, Any]) -> dict[str, str]:
    """Return the name, version and SHA-256 digest of a package in pip's report (``pip install --report``).

    The digest is that of the downloaded file. It is empty for a folder or a repository.
    """
    archive = item["download_info"].get("archive_info") or {}
    # pip before 23.0 writes only the key ``hash``, whose value is ``sha256=DIGEST``.
    sha256 = archive.get("hashes", {}).get("sha256") or archive.get("hash") or ""
    return {
        "name": item["metadata"]["name"],
        "version": item["metadata"]["version"],
        "sha256": sha256.rpartition("sha256=")[2],  # unchanged if it has no such prefix
    }


def is_module(name: str) -> bool:
    """Return whether Python can import a file or folder called `name` in the folder of packages.

    It can import ``einops`` and ``six.py``, but not ``einops-0.8.0.dist-info`` and ``bin``.
    """
    return name.partition(".")[0].isidentifier() and name not in ("bin", "__pycache__")


def canonical(name: str) -> str:
    """Return the normalized name of a package: ``Ruamel.YAML_clib`` -> ``ruamel-yaml-clib``."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
