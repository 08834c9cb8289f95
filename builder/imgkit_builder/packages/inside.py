"""Resolves and installs packages inside an image, by its pip. Standard library only.

``inside.py`` reads ``order.json`` next to it, and writes ``answer.json`` and the folder ``root`` there. The
exit code is 0 also after a failure, which the answer then describes.

Everything that the image has is a constraint. pip sees a pre-release of the image as its release: NVIDIA's
torch is ``2.3.0a0+40ec155e58.nv24.3``, and a package that needs ``torch>=2.3`` must accept it. pip compares
with what it finds installed, so a folder that it searches first has a copy of the metadata of such a package,
with the release as its version.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

OUTPUT_CHARACTERS = 20_000
"""The end of pip's output that an answer holds."""


class Failure(Exception):
    """The packages cannot be installed; `kind` says why, and `output` is what pip printed."""

    def __init__(self, kind: str, output: str = "") -> None:
        super().__init__(kind)
        self.kind, self.output = kind, output


def main(folder: Path) -> None:
    """Do what the order in `folder` asks for, and write the answer."""
    os.umask(0o022)  # in the squashfs the files belong to root, and every user reads them
    order = json.loads((folder / "order.json").read_text(encoding="utf-8"))
    versions = installed_versions()
    try:
        answer = install(folder, order, versions)
    except Failure as failure:
        answer = {"failure": failure.kind, "output": failure.output[-OUTPUT_CHARACTERS:]}
    answer["image"] = versions
    answer["python"], answer["machine"] = platform.python_version(), platform.machine()
    (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


def install(folder: Path, order: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, Any]:
    """Install what the image lacks into ``root``, and return what that is.

    Raises
    ------
    Failure : the image has no usable pip, or pip failed.
    """
    pip = importlib.util.find_spec("pip")
    if pip is None or pip.origin is None:  # an empty folder has no origin
        raise Failure("no pip")
    protected = protected_names(order["protected"])
    for name in map(canonical, order["replace"]):
        if name in protected:
            raise Failure("protected", name)
    replaced = set(map(canonical, order["replace"]))
    kept = {name: version for name, version in released(versions).items() if name not in replaced}
    shadows = folder / "shadows"
    write_shadows(shadows, {name: version for name, version in kept.items() if version != versions[name]})
    constraints = folder / "constraints.txt"
    constraints.write_text(
        "".join(f"{name}=={version}\n" for name, version in kept.items()), encoding="utf-8"
    )
    env = pip_environment(folder, shadows)
    report = folder / "report.json"
    resolve = [*order["options"], "--dry-run", "--report", str(report), *order["requirements"]]
    run_pip(resolve, {**env, "PIP_CONSTRAINT": str(constraints)})
    items = json.loads(report.read_text(encoding="utf-8"))["install"]
    root = folder / "root"
    root.mkdir()
    if items:
        exact = folder / "exact.txt"
        exact.write_text("".join(f"{line}\n" for line in exact_requirements(items)), encoding="utf-8")
        # The constraints of the image's own configuration must not apply either.
        constraints.write_text("", encoding="utf-8")
        arguments = ["--no-deps", "--target", str(root), *order["options"], "-r", str(exact)]
        run_pip(arguments, {**env, "PIP_CONSTRAINT": str(constraints)})
    names = sorted(path.name for path in root.iterdir())
    return {
        "packages": [summary(item) for item in items],
        "modules": [name.partition(".")[0] for name in names if is_module(name)],
    }


def installed_versions() -> dict[str, str]:
    """Return the version of each distribution that Python finds; of two, the first one counts."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name and distribution.version:
            versions.setdefault(canonical(name), distribution.version)
    return versions


def protected_names(pattern: str) -> set[str]:
    """Return the distributions that nothing may replace: by their names, or because torch pins them."""
    names = {name for name in installed_versions() if re.fullmatch(pattern, name)}
    try:
        requirements = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return names
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9._-]+)\s*\(?==", requirement)
        if match:
            names.add(canonical(match[1]))
    return names


def released(versions: Mapping[str, str]) -> dict[str, str]:
    """Return the versions as pip shall see them: a local pre-release as its release.

    ``2.3.0a0+40ec155e58.nv24.3`` becomes ``2.3.0+40ec155e58.nv24.3``. A version that PEP 440 does not know,
    as Debian's packages have them, is left out: pip could not read it as a constraint.
    """
    versioning = importlib.import_module("pip._vendor.packaging.version")
    result = {}
    for name, text in versions.items():
        try:
            version = versioning.Version(text)
        except versioning.InvalidVersion:
            continue
        is_local_prerelease = version.is_prerelease and version.local
        result[name] = f"{version.base_version}+{version.local}" if is_local_prerelease else text
    return result


def write_shadows(folder: Path, versions: Mapping[str, str]) -> None:
    """Write the metadata of installed distributions to `folder`, with other versions."""
    folder.mkdir()
    for name, version in versions.items():
        distribution = metadata.distribution(name)
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or f"Name: {name}\n"
        # Only in the header: a description may have such a line, too.
        header, blank, description = text.partition("\n\n")
        header = re.sub(r"(?m)^Version:.*\n?", "", header).rstrip("\n")
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"{header}\nVersion: {version}{blank}{description}\n", encoding="utf-8"
        )
        (info / "INSTALLER").write_text("imgkit\n", encoding="utf-8")


def pip_environment(folder: Path, shadows: Path) -> dict[str, str]:
    """Return the environment of pip: that of the image, with folders and settings of our own."""
    env = dict(os.environ)
    for name in ("TMPDIR", "PIP_CACHE_DIR"):
        env[name] = str(folder / name.lower())
        Path(env[name]).mkdir(exist_ok=True)
    certificates = folder.with_name(f"{folder.name}.pem")
    if certificates.exists():
        env["PIP_CERT"] = str(certificates)
    search_path = [str(shadows), *filter(None, [env.get("PYTHONPATH", "")])]
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


def run_pip(arguments: list[str], env: Mapping[str, str]) -> None:
    """Run ``pip install``, and let its output go on line by line.

    Raises
    ------
    Failure : it failed.
    """
    argv = [sys.executable, "-s", "-m", "pip", "install", "--no-warn-script-location", *arguments]
    lines = []
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=dict(env)
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            print(line, end="", flush=True)
    if process.returncode:
        raise Failure("pip", "".join(lines))


def exact_requirements(items: list[dict[str, Any]]) -> list[str]:
    """Return lines of a requirements file that name exactly what pip's report has.

    Either each line has a hash or none: pip then requires one of all.
    """
    has_hashes = all(summary(item)["sha256"] for item in items)
    lines = []
    for item in items:
        name, download = item["metadata"]["name"], item["download_info"]
        line = f"{name}=={item['metadata']['version']}"
        if item.get("is_direct"):
            repository = download.get("vcs_info")
            url = download["url"]
            if repository:
                url = f"{repository['vcs']}+{url}@{repository['commit_id']}"
            line = f"{name} @ {url}"
        if has_hashes:
            line = f"{line} --hash=sha256:{summary(item)['sha256']}"
        lines.append(line)
    return lines


def summary(item: Mapping[str, Any]) -> dict[str, str]:
    """Return the name, version and digest of an item of pip's report."""
    archive = item["download_info"].get("archive_info") or {}
    # pip before 23.0 states ``hash`` alone.
    sha256 = archive.get("hashes", {}).get("sha256") or archive.get("hash") or ""
    return {
        "name": item["metadata"]["name"],
        "version": item["metadata"]["version"],
        "sha256": sha256.rpartition("sha256=")[2],
    }


def is_module(name: str) -> bool:
    """Return whether something in the folder of packages can be imported."""
    return name.partition(".")[0].isidentifier() and name not in ("bin", "__pycache__")


def canonical(name: str) -> str:
    """Return the name as PyPA's specification normalises it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
