"""Resolves one pip step inside the base, by its pip. Runs by path in the base; standard library only.

Usage: ``inside_pip.py NUMBER install ARGUMENTS``, with the arguments of the step's ``pip install``. It reads
``order.json`` next to it, and writes into ``out/`` there ``pip-NUMBER.json``, the report of pip, or
``failed.json``; the wheels of a lock with files lie in ``out/files``. It ends with 0 in both cases.

Notes
-----
Every step but the last is also installed: the next one then meets what it meets in a build.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

FOLDER = Path(__file__).resolve().parent
OUT = FOLDER / "out"
FILES = OUT / "files"
REPORTS = (22, 2)
"""The first pip with ``--report``."""
NO_MATCH = re.compile(r"No matching distribution found for ([A-Za-z0-9][A-Za-z0-9._-]*)(\S*)")
PINNED = re.compile(r"(?:\(constraint\)|satisfies the requirement|found for) ([A-Za-z0-9][A-Za-z0-9._-]*)==")
INDEX_OPTIONS = ("--index-url", "-i", "--extra-index-url", "--find-links", "-f", "--trusted-host", "--cert")
"""Options with a value that ``pip index`` and ``pip download`` know too."""
INDEX_FLAGS = ("--no-index", "--pre")
INSTALL_ONLY = (
    *("--upgrade", "-U", "--force-reinstall", "--ignore-installed", "-I", "--no-compile", "--compile"),
    "--require-hashes",
)
"""Options of ``pip install`` that ``pip wheel`` does not have, or that fit only the whole step."""


class Unanswered(Exception):
    """The step has no solution: what kind of failure, about what, and the output of pip."""

    def __init__(self, kind: str, about: str, output: str) -> None:
        super().__init__(kind)
        self.kind, self.about, self.output = kind, about, output


def main(number: int, words: list[str]) -> None:
    """Resolve the step `number`, unless an earlier one has failed."""
    if (OUT / "failed.json").exists():
        return
    FILES.mkdir(parents=True, exist_ok=True)
    order = json.loads((FOLDER / "order.json").read_text(encoding="utf-8"))
    try:
        pip = program(order["steps"][number]["packages"])
        resolve(pip, number, words, order)
    except Unanswered as error:
        failed = {"step": number, "kind": error.kind, "about": error.about, "output": error.output[-8000:]}
        (OUT / "failed.json").write_text(json.dumps(failed), encoding="utf-8")


def program(packages: list[str]) -> list[str]:
    """The argv that starts a pip with ``--report``: the base's, or one that this step names.

    Raises
    ------
    Unanswered : the base's is too old, and the step names none.
    """
    pip = [sys.executable, "-m", "pip"]
    code, said = run([*pip, "--version"])
    version = tuple(int(part) for part in re.findall(r"\d+", said.partition(" from ")[0])[:2])
    if code or version >= REPORTS:
        return pip
    wanted = [one for one in packages if re.match(r"pip\s*([<>=!~;\[]|$)", one)]
    if not wanted:
        raise Unanswered("old pip", said.partition(" from ")[0].strip(), said)
    place = FOLDER / "pip"
    code, said = run([*pip, "install", "--no-cache-dir", "--no-deps", "--target", str(place), *wanted])
    if code:
        raise Unanswered("pip", "", said)
    # Without its record it is a program, and no installed package: the step still installs its own pip.
    for record in place.glob("pip-*.dist-info"):
        shutil.rmtree(record)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))
    return pip


def resolve(pip: list[str], number: int, words: list[str], order: dict) -> None:  # type: ignore[type-arg]
    """Write the report of the step, then its wheels, and install it for the next step.

    Raises
    ------
    Unanswered : pip found no solution, or could not build a wheel.
    """
    keep, last = order["keep"], number == len(order["steps"]) - 1
    options = order["steps"][number]["options"]
    report = OUT / f"pip-{number}.json"
    more = ["--report", str(report)]
    if order["kept"]:
        more += ["--find-links", str(FOLDER / "kept")]
    if not keep:
        more += ["--only-binary", ":all:"]
    if keep or last:
        more += ["--dry-run"]
    pins = dict(order["wheels"][number])
    while True:
        code, said = run([*pip, *words, *more, *constraint(pins)])
        if not code:
            break
        if not pins:
            raise explained(pip, said, options, keep=keep)
        unfit = {canonical(name) for name in PINNED.findall(said)} & pins.keys()
        pins = {name: pins[name] for name in pins.keys() - unfit} if unfit else {}
        print(f"imgkit: locked versions do not fit: {', '.join(sorted(unfit)) or 'all'}", flush=True)
    items = json.loads(report.read_text(encoding="utf-8"))["install"]
    for item in items if not keep else ():
        add_hash(pip, item, options)
    report.write_text(json.dumps({"install": [small(item) for item in items]}), encoding="utf-8")
    if keep and items:
        build(pip, items, options, last=last)


def constraint(pins: dict[str, str]) -> list[str]:
    """The words that make pip choose `pins`."""
    if not pins:
        return []
    file = FOLDER / "pins.txt"
    file.write_text(
        "".join(f"{name}=={version}\n" for name, version in sorted(pins.items())), encoding="utf-8"
    )
    return ["--constraint", str(file)]


def explained(pip: list[str], said: str, options: list[str], *, keep: bool) -> Unanswered:
    """The failure: an index may have the sources of what has no wheel."""
    found = NO_MATCH.search(said)
    if found is None or keep:
        return Unanswered("pip", found[1] if found else "", said)
    code, listed = run([*pip, "index", "versions", *index_options(options), found[1]])
    versions = re.findall(r"[^\s,]+", listed.partition("Available versions:")[2].partition("\n")[0])
    exact = re.fullmatch(r"==([^*,]+)", found[2])
    has_source = versions and (exact is None or exact[1] in versions)
    if not code and has_source:
        return Unanswered("source", found[1] + found[2], said)
    # Without retries only this one tells of a network that fails.
    return Unanswered("pip", found[1] + found[2], said + listed)


def index_options(words: list[str]) -> list[str]:
    """Those of `words` that say where pip looks for packages."""
    found = []
    for number, word in enumerate(words):
        if word in INDEX_FLAGS or (word.partition("=")[0] in INDEX_OPTIONS and "=" in word):
            found.append(word)
        elif word in INDEX_OPTIONS:
            found += words[number : number + 2]
    return found


def add_hash(pip: list[str], item: dict, options: list[str]) -> None:  # type: ignore[type-arg]
    """Add the sha256 of a wheel whose index states none."""
    place = item["download_info"]
    archive = place.get("archive_info")
    parts = urlsplit(place["url"])
    if archive is None or hashes(archive) or parts.scheme == "file" or not parts.path.endswith(".whl"):
        return
    with tempfile.TemporaryDirectory() as folder:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        wanted = f"{name} @ {place['url']}" if item.get("is_direct") else f"{name}=={version}"
        argv = [*pip, "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--dest", folder]
        code, said = run([*argv, *index_options(options), wanted])
        files = list(Path(folder).iterdir())
        if code or not files:
            raise Unanswered("pip", name, said)
        archive["hashes"] = {"sha256": sha256(files[0])}


def hashes(archive: dict) -> bool:  # type: ignore[type-arg]
    """Whether a report states the sha256 of an archive."""
    stated = archive.get("hash") or ""
    return bool(archive.get("hashes", {}).get("sha256")) or stated.startswith("sha256=")


def build(pip: list[str], items: list, options: list[str], *, last: bool) -> None:  # type: ignore[type-arg]
    """Put the wheels of `items` into `FILES`, built where there is none, and install them unless `last`.

    Raises
    ------
    Unanswered : a wheel cannot be built.
    """
    stated = [one for one in options if one not in INSTALL_ONLY]
    argv = [*pip, "wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", str(FILES), *stated]
    if (FOLDER / "kept").is_dir():
        argv += ["--find-links", str(FOLDER / "kept")]
    ready = [item for item in items if urlsplit(item["download_info"]["url"]).path.endswith(".whl")]
    # What must be built comes one after the other: the failure then names its package.
    for group in (ready, *([item] for item in items if item not in ready)):
        code, said = run([*argv, *map(wanted, group)]) if group else (0, "")
        if code and group is ready:
            raise Unanswered("pip", "", said)
        if code:
            raise Unanswered("wheel", wanted(group[0]), said)
    if not last:
        exact = [f"{item['metadata']['name']}=={item['metadata']['version']}" for item in items]
        argv = [
            *pip,
            "install",
            "--no-deps",
            "--no-index",
            "--find-links",
            str(FILES),
            "--no-cache-dir",
            *exact,
        ]
        code, said = run(argv)
        if code:
            raise Unanswered("pip", "", said)


def wanted(item: dict) -> str:  # type: ignore[type-arg]
    """The requirement that gives exactly what `item` of a report is."""
    name, place = item["metadata"]["name"], item["download_info"]
    if not item.get("is_direct"):
        return f"{name}=={item['metadata']['version']}"
    vcs = place.get("vcs_info")
    return f"{name} @ {vcs['vcs']}+{place['url']}@{vcs['commit_id']}" if vcs else f"{name} @ {place['url']}"


def small(item: dict) -> dict:  # type: ignore[type-arg]
    """An item of a report without the metadata that a lock does not need: some are megabytes."""
    metadata = {key: item["metadata"][key] for key in ("name", "version")}
    return {"download_info": item["download_info"], "is_direct": item.get("is_direct"), "metadata": metadata}


def canonical(name: str) -> str:
    """The name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def sha256(file: Path) -> str:
    """The digest of a file."""
    found = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()


def run(argv: list[str]) -> tuple[int, str]:
    """Run a program, let its output go on line by line, and return its exit code and output."""
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", bufsize=1
    ) as process:
        lines = []
        for line in process.stdout or ():
            lines.append(line)
            print(line, end="", flush=True)
    return process.returncode, "".join(lines)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
