"""Resolves the apt step inside the base, by its apt. Runs by path in the base; standard library only.

Usage: ``inside_apt.py PACKAGE...``. It reads ``order.json`` next to it, and writes into ``out/`` there
``apt.json`` with what apt printed, or ``failed.json``. It ends with 0 in both cases.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

FOLDER = Path(__file__).resolve().parent
OUT = FOLDER / "out"
ARCHIVES = FOLDER / "archives"
PREFERENCES = Path("/etc/apt/preferences.d/imgkit-lock.pref")

INSTALL = ("install", "-y", "--no-install-recommends")


def main(packages: list[str]) -> None:
    """Write what apt would download for `packages`, and install it where a pip step comes after it."""
    order = json.loads((FOLDER / "order.json").read_text(encoding="utf-8"))
    (OUT / "files").mkdir(parents=True, exist_ok=True)
    try:
        # Without it, apt goes on with half of its lists when an archive does not answer.
        apt("apt-get", "update", "-o", "APT::Update::Error-Mode=any")
        pins = "".join(
            f"Package: {name}\nPin: version {version}\nPin-Priority: 1001\n\n"
            for name, version in order["debs"]
        )
        if pins:
            PREFERENCES.write_text(pins, encoding="utf-8")
        uris = apt("apt-get", "--print-uris", "-qq", *INSTALL, *packages)
        names = [exact(line.split()[1]) for line in uris.splitlines() if line.startswith("'")]
        records = apt("apt-cache", "show", *names) if names else ""
        answer = {"uris": uris, "records": records}
        (OUT / "apt.json").write_text(json.dumps(answer), encoding="utf-8")
        if names and (order["keep"] or order["has_pip"]):
            fetch(packages, order)
    except subprocess.CalledProcessError as error:
        failed = {"step": "apt", "kind": "apt", "about": "", "output": (error.stdout + error.stderr)[-8000:]}
        (OUT / "failed.json").write_text(json.dumps(failed), encoding="utf-8")


def fetch(packages: list[str], order: dict[str, bool]) -> None:
    """Download the packages, install them where a pip step needs them, and keep the files where asked."""
    # A folder of our own: many images remove every .deb from apt's.
    (ARCHIVES / "partial").mkdir(parents=True, exist_ok=True)
    words = [*INSTALL, "-o", f"Dir::Cache::archives={ARCHIVES}", "-o", "APT::Keep-Downloaded-Packages=true"]
    if not order["has_pip"]:
        words.append("--download-only")
    apt("apt-get", *words, *packages)
    for file in sorted(ARCHIVES.glob("*.deb")):
        if order["keep"]:
            file.rename(OUT / "files" / file.name)
        else:
            file.unlink()


def exact(file: str) -> str:
    """``git:amd64=1:2.39`` of the file name ``git_1%3a2.39_amd64.deb``; a package of all has no colon."""
    name, version, architecture = file[: -len(".deb")].split("_")
    of = "" if architecture == "all" else f":{architecture}"
    return f"{name}{of}={unquote(version)}"


def apt(*argv: str) -> str:
    """The standard output of a program of apt, which also goes into the log.

    Raises
    ------
    CalledProcessError : it ended with an error.
    """
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, errors="replace", check=False)
    sys.stdout.write(done.stdout + done.stderr)
    sys.stdout.flush()
    done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
