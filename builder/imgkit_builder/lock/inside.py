"""Resolves one step inside the base, by its apt or pip. Runs by path in the base; standard library only.

``inside.py apt PACKAGE...`` and ``inside.py STEP install ARGUMENTS``, with the arguments of the step's ``pip
install``, read ``settings.json`` next to them, and write into ``out/`` there: ``apt.txt``, the files that apt
would download, ``pip-STEP.json``, what pip reports, or ``failed.txt``. The files of a lock with files lie in
``out/files``. The exit code is 0 also after a failure.

Every step but the last is also installed: the next one then meets what it meets in a build.
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
FIND_KEPT = ["--find-links", str(FOLDER / "kept")] if (FOLDER / "kept").is_dir() else []
PREFERENCES = Path("/etc/apt/preferences.d/imgkit-lock.pref")
# A priority above 1000 lets apt go back to an older version.
PIN = "Package: {}\nPin: version {}\nPin-Priority: 1001\n\n"
# "numpy==1.26 (from -c (constraint) numpy==1.26)": pip names the constraint that it cannot meet.
PINNED_NAME = re.compile(
    r"(?:\(constraint\)|satisfies the requirement|found for) ([A-Za-z0-9][A-Za-z0-9._-]*)=="
)
INSTALL_ONLY = (
    *("--upgrade", "-U", "--force-reinstall", "--ignore-installed", "-I", "--no-compile", "--compile"),
    "--require-hashes",
)
"""Options of ``pip install`` that ``pip wheel`` does not have, or that fit only the whole step."""


def main(step: str, arguments: list[str]) -> None:
    """Resolve `step`, unless an earlier one has failed."""
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
        FAILED.write_text(f"{step}\n{error.output[-8000:]}", encoding="utf-8")


def resolve_apt(packages: list[str], settings: dict[str, Any]) -> None:
    """Write to ``apt.txt`` which files apt would download for `packages`.

    The packages are also installed if a pip step follows, since it may need them, and their files are stored
    if the lock keeps files.

    Raises
    ------
    CalledProcessError : apt failed.
    """
    os.environ.update(DEBIAN_FRONTEND="noninteractive", LC_ALL="C")
    keep_files = settings["keep_files"]
    # Without this option, apt goes on with incomplete lists if an archive does not answer.
    run_program(["apt-get", "update", "-o", "APT::Update::Error-Mode=any"])
    if settings["debs"]:
        pins = [PIN.format(name, version) for name, version in settings["debs"]]
        PREFERENCES.write_text("".join(pins), encoding="utf-8")
    install = ["install", "-y", "--no-install-recommends", *packages]
    # By default apt names an MD5 sum where an index also has a SHA256.
    uris = run_program(["apt-get", "--print-uris", "-qq", "-o", "Acquire::ForceHash=SHA256", *install])
    (OUT / "apt.txt").write_text(uris, encoding="utf-8")
    has_pip_steps = bool(settings["steps"])
    if not uris or not (keep_files or has_pip_steps):
        return
    # Not apt's own folder: many images are configured to remove every .deb there.
    (ARCHIVES / "partial").mkdir(parents=True, exist_ok=True)
    options = ["-o", f"Dir::Cache::archives={ARCHIVES}", "-o", "APT::Keep-Downloaded-Packages=true"]
    if not has_pip_steps:
        options.append("--download-only")
    run_program(["apt-get", *options, *install])
    for file in sorted(ARCHIVES.glob("*.deb")):
        if keep_files:
            file.rename(FILES / file.name)
        else:
            file.unlink()


def resolve_pip(step: str, arguments: list[str], settings: dict[str, Any]) -> None:
    """Write to ``pip-STEP.json`` which packages pip installs for a step of the recipe.

    If the lock keeps files, their wheels are stored, too. The packages of every step but the last are
    installed, so that the next step finds the image as it is in a build.

    Raises
    ------
    CalledProcessError : pip found no solution, or could not build a wheel.
    """
    keep_files = settings["keep_files"]
    step_settings = settings["steps"][step]
    *_, last_step = settings["steps"]
    is_last = step == last_step
    report = OUT / f"pip-{step}.json"
    install = [*PIP, *arguments, *FIND_KEPT, "--report", str(report)]
    if not keep_files:
        install += ["--only-binary", ":all:"]
    if keep_files or is_last:
        install.append("--dry-run")
    install_pinned(install, step_settings["pins"])
    items = json.loads(report.read_text(encoding="utf-8"))["install"]
    report.write_text(json.dumps([summarize(item) for item in items]), encoding="utf-8")
    if keep_files and items:
        store_wheels(items, step_settings["options"], install=not is_last)


def store_wheels(items: list[dict[str, Any]], step_options: list[str], *, install: bool) -> None:
    """Write the wheels of `items` of pip's report to `FILES`, and install them from there if `install`."""
    options = [option for option in step_options if option not in INSTALL_ONLY]
    download = ["wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", str(FILES), *options, *FIND_KEPT]
    run_program([*PIP, *download, *map(exact_requirement, items)])
    if install:
        packages = [f"{item['metadata']['name']}=={item['metadata']['version']}" for item in items]
        local = ["--no-deps", "--no-index", "--find-links", str(FILES), "--no-cache-dir"]
        run_program([*PIP, "install", *local, *packages])


def install_pinned(argv: list[str], pins: dict[str, str]) -> None:
    """Run ``pip install`` with the versions of the old lock, as far as they still fit.

    `pins` are these versions by name. If pip fails, its output names versions that cannot stay. They are left
    out, and pip runs again; if it names none, all are left out.
    """
    constraint = FOLDER / "pins.txt"
    pins = dict(pins)
    while pins:
        lines = [f"{name}=={version}\n" for name, version in sorted(pins.items())]
        constraint.write_text("".join(lines), encoding="utf-8")
        try:
            run_program([*argv, "--constraint", str(constraint)])
            return
        except subprocess.CalledProcessError as error:
            blamed_names = PINNED_NAME.findall(error.output)
        unfit = pins.keys() & {re.sub(r"[-_.]+", "-", name).lower() for name in blamed_names}
        if not unfit:
            unfit = set(pins)
        print(f"imgkit: locked versions do not fit: {', '.join(sorted(unfit))}", flush=True)
        for name in unfit:
            del pins[name]
    run_program(argv)


def summarize(item: dict[str, Any]) -> dict[str, Any]:
    """Return the values of an item of pip's report that a lock needs.

    The rest is dropped, since the metadata of a package can have megabytes.
    """
    download = item["download_info"]
    archive = download.get("archive_info") or {}
    # pip before 23.0 states ``hash`` alone.
    sha256 = archive.get("hashes", {}).get("sha256") or archive.get("hash") or ""
    return {
        "name": item["metadata"]["name"],
        "version": item["metadata"]["version"],
        "url": download["url"],
        "sha256": sha256.rpartition("sha256=")[2],
        "direct": bool(item.get("is_direct")),
    }


def exact_requirement(item: dict[str, Any]) -> str:
    """Return the requirement by which pip gets exactly the package of an item of its report.

    It is ``numpy==1.26.4``, or ``apex @ git+https://HOST/PATH@COMMIT`` for a package from a repository.
    """
    name = item["metadata"]["name"]
    if not item.get("is_direct"):
        # Not the URL: pip reports it without the password of its index.
        return f"{name}=={item['metadata']['version']}"
    download = item["download_info"]
    url = download["url"]
    vcs = download.get("vcs_info")  # of a repository
    if vcs:
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"{name} @ {url}"


def run_program(argv: list[str]) -> str:
    """Run a program, print its output line by line as it comes, and return the output.

    Raises
    ------
    CalledProcessError : it failed.
    """
    lines = []
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", bufsize=1
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            print(line, end="", flush=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv, "".join(lines))
    return "".join(lines)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
