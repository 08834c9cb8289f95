"""Resolve one step of a recipe inside the base image, with its apt or pip.

This file is copied into the base and run there as a program, so it may import the standard library only. Its
command line is ``inside.py apt PACKAGE...`` or ``inside.py STEP install ARGUMENTS``, with the arguments of
the step's ``pip install``. It reads ``settings.json`` from its own folder, and writes its answer to the
folder ``out`` there:

* ``apt.txt``: the files that apt would download.
* ``pip-STEP.json``: the packages that pip would install.
* ``failed.txt``: the output of a program that failed.
* ``files/``: the packages themselves, if the lock stores them.

The exit code is 0 even after a failure, because the build of the image must go on so that the answers can be
read. Every step but the last also installs its packages. So the next step finds the image as it is in a real
build.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
OUT = FOLDER / "out"
FILES = OUT / "files"
FAILED = OUT / "failed.txt"
ARCHIVES = FOLDER / "archives"
PIP = (sys.executable, "-m", "pip")
# Wheels that an earlier lock has stored. No index has them, so pip must search this folder as well.
FIND_KEPT = ["--find-links", str(FOLDER / "kept")] if (FOLDER / "kept").is_dir() else []
PREFERENCES = Path("/etc/apt/preferences.d/imgkit-lock.pref")
# A priority above 1000 lets apt go back to an older version.
PIN = "Package: {}\nPin: version {}\nPin-Priority: 1001\n\n"
# pip names the constraint that it cannot meet: "numpy==1.26 (from -c (constraint) numpy==1.26)".
PINNED_NAME = re.compile(
    r"(?:\(constraint\)|satisfies the requirement|found for) ([A-Za-z0-9][A-Za-z0-9._-]*)=="
)
INSTALL_ONLY = (
    *("--upgrade", "-U", "--force-reinstall", "--ignore-installed", "-I", "--no-compile", "--compile"),
    "--require-hashes",
)
"""Options of ``pip install`` that ``pip wheel`` does not have, or that only make sense for the whole step."""


def main(step: str, arguments: list[str]) -> None:
    """Resolve `step`, unless an earlier step has failed. Write a failure to ``failed.txt``.

    `step` is ``apt``, ``uv`` or the number of a pip step. `arguments` are the names of Debian packages, or
    the arguments of the step's pip, of which the first one is ``install``.
    """
    if FAILED.exists():
        return
    FILES.mkdir(parents=True, exist_ok=True)
    settings = json.loads((FOLDER / "settings.json").read_text(encoding="utf-8"))
    try:
        if step == "apt":
            resolve_apt(arguments, settings)
        else:
            resolve_pip(step, arguments, settings)
    except subprocess.CalledProcessError as error:
        # The program ends without an error, because the build must go on so that imgkit can read this file.
        FAILED.write_text(f"{step}\n{error.output[-8000:]}", encoding="utf-8")


def resolve_apt(packages: list[str], settings: dict[str, Any]) -> None:
    """Write the list of files that apt would download for `packages` to ``apt.txt``.

    If a pip step follows, the packages are also installed, because pip may need them. If the lock stores
    packages, their files are kept in `FILES`.

    Parameters
    ----------
    settings : the content of ``settings.json``. ``debs`` are packages with their versions in the old lock,
        ``steps`` are the pip steps that follow, and ``keep_files`` is true if the lock stores packages.

    Raises
    ------
    CalledProcessError : apt failed.
    """
    # apt must ask no questions, and print English messages, in which imgkit looks for the cause of a failure.
    os.environ.update(DEBIAN_FRONTEND="noninteractive", LC_ALL="C")
    keep_files = settings["keep_files"]
    # Without this option, apt continues with incomplete lists if an archive does not answer.
    run_program(["apt-get", "update", "-o", "APT::Update::Error-Mode=any"])
    if settings["debs"]:
        # With these pins, apt takes the versions of the old lock if the archive still has them.
        pins = [PIN.format(name, version) for name, version in settings["debs"]]
        PREFERENCES.write_text("".join(pins), encoding="utf-8")
    install = ["install", "-y", "--no-install-recommends", *packages]
    # This must come before the installation: apt lists no files for packages that are installed.
    # By default apt prints an MD5 digest even if the index also has a SHA-256 digest.
    uris = run_program(["apt-get", "--print-uris", "-qq", "-o", "Acquire::ForceHash=SHA256", *install])
    (OUT / "apt.txt").write_text(uris, encoding="utf-8")
    has_pip_steps = bool(settings["steps"])
    if not uris or not (keep_files or has_pip_steps):
        return  # the base already has the packages, or nothing needs them
    # The files are not left in apt's own folder, because many images remove every .deb there.
    (ARCHIVES / "partial").mkdir(parents=True, exist_ok=True)
    options = ["-o", f"Dir::Cache::archives={ARCHIVES}", "-o", "APT::Keep-Downloaded-Packages=true"]
    if not has_pip_steps:
        options.append("--download-only")
    run_program(["apt-get", *options, *install])
    for file in sorted(ARCHIVES.glob("*.deb")):
        if keep_files:
            file.rename(FILES / file.name)
        else:
            file.unlink()  # only the installation needed it


def resolve_pip(step: str, arguments: list[str], settings: dict[str, Any]) -> None:
    """Write the packages that pip would install for a step of the recipe to ``pip-STEP.json``.

    If the lock stores packages, their wheels are kept in `FILES`. The packages of every step but the last are
    also installed, so that the next step finds the image as it is in a real build.

    Parameters
    ----------
    arguments : the arguments of the step's pip, such as ``install einops``.
    settings : the content of ``settings.json``. It has the options of each step, and as ``pins`` the versions
        of the old lock. ``keep_files`` is true if the lock stores packages.

    Raises
    ------
    CalledProcessError : pip found no solution, or could not build a wheel.
    """
    keep_files = settings["keep_files"]
    step_settings = settings["steps"][step]
    # The steps are in the order in which the recipe installs them.
    *_, last_step = settings["steps"]
    is_last = step == last_step
    report = OUT / f"pip-{step}.json"
    install = [*PIP, *arguments, *FIND_KEPT, "--report", str(report)]
    if not keep_files:
        # A lock without files can only name packages that an index has as wheels.
        install += ["--only-binary", ":all:"]
    if keep_files or is_last:
        # If wheels are kept, `store_wheels` installs them. After the last step, nothing needs them.
        install.append("--dry-run")
    install_pinned(install, step_settings["pins"])
    report_items = json.loads(report.read_text(encoding="utf-8"))["install"]
    # The short form replaces pip's own report in the file. imgkit reads it from there as the answer.
    report.write_text(json.dumps([describe_package(item) for item in report_items]), encoding="utf-8")
    if keep_files and report_items:
        store_wheels(report_items, step_settings["options"], install=not is_last)


def store_wheels(items: list[dict[str, Any]], step_options: list[str], *, install: bool) -> None:
    """Write the wheels of `items`, the packages in pip's report, to `FILES`. Install them if `install`.

    pip builds a wheel for a package that has only its source. The options of the step, such as another index,
    are used except those that ``pip wheel`` does not have.
    """
    options = [option for option in step_options if option not in INSTALL_ONLY]
    get_wheels = ["wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", str(FILES), *options, *FIND_KEPT]
    # --no-deps, because the report already has the dependencies.
    run_program([*PIP, *get_wheels, *map(exact_requirement, items)])
    if install:
        requirements = [f"{item['metadata']['name']}=={item['metadata']['version']}" for item in items]
        offline_options = ["--no-deps", "--no-index", "--find-links", str(FILES), "--no-cache-dir"]
        # Install the stored files themselves, and do not download or build them a second time.
        run_program([*PIP, "install", *offline_options, *requirements])


def install_pinned(argv: list[str], pins: dict[str, str]) -> None:
    """Run ``pip install`` with the versions of the old lock, as far as they still fit.

    `pins` maps package names to these versions. If pip fails, the versions that its output blames are
    dropped, and pip runs again. If the output blames none of them, all versions are dropped.

    Raises
    ------
    CalledProcessError : pip fails without these versions, too.
    """
    pins = dict(pins)
    while pins:
        blamed_names = try_install(argv, pins)
        if blamed_names is None:
            return
        unfit_names = (pins.keys() & blamed_names) or set(pins)
        print(f"imgkit: locked versions do not fit: {', '.join(sorted(unfit_names))}", flush=True)
        # Each round drops at least one version, so the loop ends.
        for name in unfit_names:
            del pins[name]
    run_program(argv)  # no version of the old lock is left


def try_install(argv: list[str], pins: dict[str, str]) -> set[str] | None:
    """Run ``pip install`` with exactly the versions `pins` of these packages, if it installs them at all.

    Return None if it succeeds. Otherwise, return the normalized names of the packages that its output blames.
    """
    constraint_file = FOLDER / "pins.txt"
    constraint_lines = [f"{name}=={version}\n" for name, version in sorted(pins.items())]
    constraint_file.write_text("".join(constraint_lines), encoding="utf-8")
    try:
        run_program([*argv, "--constraint", str(constraint_file)])
    except subprocess.CalledProcessError as error:
        # pip may blame a package under another spelling of its name.
        names = PINNED_NAME.findall(error.output)
        return {re.sub(r"[-_.]+", "-", name).lower() for name in names}
    return None


def describe_package(item: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a lock needs from one item of pip's report.

    Everything else is dropped, because the metadata of a package can have megabytes. The digest is empty for
    a package without an archive, such as a repository.
    """
    download = item["download_info"]
    archive = download.get("archive_info") or {}
    # pip before 23.0 has only the key ``hash``, with the value "sha256=...".
    sha256 = archive.get("hashes", {}).get("sha256") or archive.get("hash") or ""
    return {
        "name": item["metadata"]["name"],
        "version": item["metadata"]["version"],
        "url": download["url"],
        "sha256": sha256.rpartition("sha256=")[2],
        "direct": bool(item.get("is_direct")),  # whether the requirement itself names a URL
    }


def exact_requirement(item: dict[str, Any]) -> str:
    """Return a requirement with which pip gets exactly the package of an item of its report.

    It has the form ``numpy==1.26.4``, or ``apex @ git+https://HOST/PATH@COMMIT`` for a package from a
    repository.
    """
    name = item["metadata"]["name"]
    if not item.get("is_direct"):  # the requirement did not name a URL, so the package is from an index
        # The URL is not used, because pip reports it without the password of the index.
        return f"{name}=={item['metadata']['version']}"
    download = item["download_info"]
    url = download["url"]
    vcs = download.get("vcs_info")  # only for a package from a repository
    if vcs:
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"{name} @ {url}"


def run_program(argv: list[str]) -> str:
    """Run a program, print each line of its output as it arrives, and return the whole output.

    Raises
    ------
    CalledProcessError : the program failed.
    """
    output_lines = []
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", bufsize=1
    ) as process:
        # The output is printed at once, because a step can take minutes and the user watches the build.
        for line in process.stdout or ():
            output_lines.append(line)
            print(line, end="", flush=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv, "".join(output_lines))
    return "".join(output_lines)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
