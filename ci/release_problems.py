"""What a release needs, and what is missing: ``ci/release`` stops if there is anything.

release_problems.py VERSION
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def find_problems(root: Path, version: str, today: str) -> list[str]:
    """Return a line for each thing that is missing, with what to write."""
    problems = []
    if not re.search(r'^Homepage = ".+"$', _read(root / "pyproject.toml"), re.MULTILINE):
        problems.append(
            'pyproject.toml: no address; write, under [project.urls]: Homepage = "ADDRESS OF THE PROJECT"'
        )
    problems += changelog_problems(_read(root / "CHANGELOG.md"), version, today)
    problems += citation_problems(_read(root / "CITATION.cff"), version, today)
    if not (root / "tests/written" / version).is_dir():
        problems.append(
            f"tests/written/{version}: no files of this version; python tests/written/make.py writes them"
        )
    return problems + git_problems(root, version)


def changelog_problems(text: str, version: str, today: str) -> list[str]:
    """Return the problem of a version whose heading is missing, or has no date: ``## [1.0] - 2026-01-31``."""
    heading = f"## [{version}]"
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith(heading):
            continue
        if re.search(r" - \d{4}-\d\d-\d\d$", line):
            return []
        return [f"CHANGELOG.md:{number}: no date after the heading of {version}; write: {heading} - {today}"]
    return [f"CHANGELOG.md: no heading of {version}; write: {heading} - {today}"]


def citation_problems(text: str, version: str, today: str) -> list[str]:
    """Return a problem for each key that CITATION.cff lacks."""
    keys = {line.partition(":")[0] for line in text.splitlines()}
    values = {"version": version, "date-released": today}
    return [
        f"CITATION.cff: no {key}; write: {key}: {value}" for key, value in values.items() if key not in keys
    ]


def git_problems(root: Path, version: str) -> list[str]:
    """Return the problems of a checkout with changes, or of a version that is another commit already."""
    problems = []
    if _git(root, "status", "--porcelain"):
        problems.append("git status: uncommitted files; commit or remove them")
    tagged = _git(root, "rev-parse", "-q", "--verify", f"v{version}^{{commit}}")
    if tagged and tagged != _git(root, "rev-parse", "HEAD"):
        problems.append(
            f"the tag v{version} is another commit;"
            " raise __version__ in entrypoints/imgkit_entrypoints/__init__.py"
        )
    return problems


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _git(root: Path, *args: str) -> str:
    """Return what git prints; nothing if it fails."""
    return subprocess.run(["git", *args], cwd=root, stdout=subprocess.PIPE, text=True).stdout.strip()


def main(argv: Sequence[str]) -> int:
    """Print all that is missing, and return 1 if anything is."""
    (version,) = argv
    problems = find_problems(ROOT, version, datetime.date.today().isoformat())
    if not problems:
        return 0
    print("release: not yet:", file=sys.stderr)
    for problem in problems:
        print(f"  - {problem}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
