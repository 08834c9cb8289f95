"""Run pytest, and then a few failed tests once more, alone.

    steady_tests.py NAME FOLDER PYTEST-ARGUMENTS...

Real processes miss their time on a machine that does more than it can. So a test that fails among others and
passes alone has not failed: ``ci/report`` names it. Many failures are not of that kind, and do not run again.

It writes FOLDER/NAME.xml and, if tests ran again, FOLDER/NAME-alone.xml. It ends as the last run does.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

RERUN_LIMIT = 3
TESTS_FAILED = 1
"""Exit status of pytest if tests have failed; others stand for interrupts, usage errors and the like."""

_XDIST_GROUP = re.compile(r"@[^\]@]*$")


def select_reruns(last_failed: Mapping[str, bool]) -> dict[str, bool]:
    """Return the tests to run again, as pytest's cache names those that failed; empty if there are too many.

    xdist adds ``@GROUP`` to a test's name. Without xdist, no test has this name.
    """
    if len(last_failed) > RERUN_LIMIT:
        return {}
    return {_XDIST_GROUP.sub("", name): True for name in last_failed}


def run_pytest(name: str, folder: Path, suffix: str, args: Sequence[str]) -> int:
    """Run the tests NAME, and return pytest's exit status."""
    argv = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={_cache(name, folder)}"]
    results = ["-o", f"junit_suite_name={name}", f"--junitxml={folder / name}{suffix}.xml"]
    return subprocess.call([*argv, *results, *args])


def _cache(name: str, folder: Path) -> Path:
    return folder.absolute() / f"cache-{name}"


def main(argv: Sequence[str]) -> int:
    """Run tests, and return the exit status."""
    name, folder, *args = argv
    code = run_pytest(name, Path(folder), "", args)
    if code != TESTS_FAILED:
        return code
    last_failed_file = _cache(name, Path(folder)) / "v/cache/lastfailed"
    reruns = select_reruns(json.loads(last_failed_file.read_text()))
    if not reruns:
        return code
    last_failed_file.write_text(json.dumps(reruns))
    print("\n== once more, alone", flush=True)
    # What failed is printed in full above.
    brief = ("-r", "fE", "--tb=line", "--show-capture=no")
    return run_pytest(name, Path(folder), "-alone", [*args, "--last-failed", "-n", "0", *brief])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
