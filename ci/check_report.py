"""The summary of a run of ``ci/check``: its parts with their minutes, and slow, skipped and unsteady tests.

A test that failed among others runs once more, alone. Its result is in a second JUnit file,
``NAME-alone.xml``, and replaces the first one. A test that passes then is unsteady: it is named, but it does
not fail the run.
"""

from __future__ import annotations

import argparse
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SHOWN_TESTS = 20
"""How many of the slowest tests are listed."""

SKIP_LIMIT_PERCENT = 10
"""From this share of skipped tests on, a run has failed, since it has tested too little."""

Outcome = Literal["passed", "failed", "skipped"]

_XDIST_GROUP = re.compile(r"@[^\]@]*$")  # pytest-xdist adds it to a test's name: "test_ring[2]@wires"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """The result of one test in one run of pytest."""

    run: str
    """The name of the run: ``"unit"``, ``"lab"``."""
    name: str
    outcome: Outcome
    skip_reason: str = ""
    seconds: float
    """Set-up and clean-up included. A shared fixture counts for the test that needs it first."""

    @property
    def key(self) -> tuple[str, str]:
        """Return what identifies the test among those of all runs."""
        return self.run, self.name


def read_results(path: Path) -> list[CaseResult]:
    """Return the results in a JUnit file."""
    results = []
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):  # noqa: S314 - pytest wrote it just now
        run = suite.get("name", path.stem)
        results += [_parse_case(run, case) for case in suite.iter("testcase")]
    return results


def _parse_case(run: str, case: ElementTree.Element) -> CaseResult:
    """Return the result in a ``<testcase>`` element of JUnit."""
    outcome, skip_reason = _parse_outcome(case)
    name = f"{case.get('classname', '')}.{case.get('name', '')}"
    return CaseResult(
        run=run,
        name=_XDIST_GROUP.sub("", name),
        outcome=outcome,
        skip_reason=skip_reason,
        seconds=float(case.get("time", "0")),
    )


def _parse_outcome(case: ElementTree.Element) -> tuple[Outcome, str]:
    """Return the outcome of a ``<testcase>``, and the reason of a skipped test (else ``""``).

    A test that is skipped and whose clean-up fails has both elements. It has failed.
    """
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed", ""
    skipped = case.find("skipped")
    if skipped is not None:
        return "skipped", skipped.get("message", "")
    return "passed", ""


def format_parts(table: str) -> str:
    """Return a line for each part of a run, with its minutes and ``ok`` or the exit code.

    Each line of `table` has a name, seconds and an exit code, separated by tabs.
    """
    lines = []
    for row in table.splitlines():
        name, seconds, exit_code = row.split("\t")
        result = "ok" if exit_code == "0" else f"FAILED ({exit_code})"
        lines.append(f"{int(seconds) / 60:6.1f} min  {name:44} {result}")
    return "\n".join(lines)


def format_slowest(results: Iterable[CaseResult]) -> str:
    """Return a line for each of the slowest tests, with its seconds."""
    slowest_first = sorted(results, key=lambda result: -result.seconds)
    lines = [
        f"{result.seconds:6.1f} s    {result.run}: {result.name}" for result in slowest_first[:SHOWN_TESTS]
    ]
    return "\n".join(lines)


def format_skips(results: Iterable[CaseResult]) -> str:
    """Return a line for each reason of skipped tests, with the first of these tests."""
    names_by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for result in results:
        if result.outcome == "skipped":
            names_by_reason[result.run, result.skip_reason].append(result.name)
    lines = []
    for (run, reason), names in names_by_reason.items():
        subject = names[0]
        if len(names) > 1:
            subject += f" and {len(names) - 1} more"
        lines.append(f"  {run}: {subject}: {reason}")
    return "\n".join(lines)


def format_unsteady(results: Iterable[CaseResult], reruns: Iterable[CaseResult]) -> str:
    """Return a line for each test that failed among others and passed alone."""
    passed_alone = {rerun.key for rerun in reruns if rerun.outcome == "passed"}
    lines = []
    for result in results:
        if result.outcome == "failed" and result.key in passed_alone:
            lines.append(f"  {result.run}: {result.name}")
    return "\n".join(lines)


def count_outcomes(results: Sequence[CaseResult], reruns: Iterable[CaseResult]) -> Counter[Outcome]:
    """Return how many tests passed, failed and were skipped; a test's rerun replaces its first result."""
    outcomes = {result.key: result.outcome for result in results}
    outcomes |= {rerun.key: rerun.outcome for rerun in reruns}
    return Counter(outcomes[result.key] for result in results)


def find_problem(counts: Counter[Outcome]) -> str:
    """Return why these tests say too little of the code, or ``""`` if they say enough."""
    total = counts.total()
    if total == 0:
        return "no test ran"
    if counts["skipped"] * 100 >= SKIP_LIMIT_PERCENT * total:
        return f"{counts['skipped']} of {total} tests were skipped, which is too many"
    return ""


def print_report(parts: str, results: Sequence[CaseResult], reruns: Sequence[CaseResult]) -> bool:
    """Print the summary of a run, and return True if its tests have passed."""
    counts = count_outcomes(results, reruns)
    print(format_parts(parts))
    print(f"\nslowest tests:\n{format_slowest(results)}")
    print(f"\nskipped:\n{format_skips(results)}" if counts["skipped"] else "\nskipped: none")
    unsteady = format_unsteady(results, reruns)
    if unsteady:
        print(f"\nfailed among others, passed alone:\n{unsteady}")
    problem = find_problem(counts)
    if problem:
        print(f"report: {problem}")
    print(f"\ntotal: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return not counts["failed"] and not problem


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report that the command line asks for, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="report",
        description="Print what a run of ci/check did; exit with 1 if its tests have failed.",
        epilog="Changes: nothing. Undo: not needed.",
    )
    parser.add_argument("parts", type=Path, help="a table: name, seconds and exit code of each part")
    parser.add_argument("files", type=Path, nargs="*", help="JUnit files of pytest")
    options = parser.parse_args(argv)
    results: list[CaseResult] = []
    reruns: list[CaseResult] = []
    for path in options.files:
        if path.stem.endswith("-alone"):
            reruns += read_results(path)
        else:
            results += read_results(path)
    passed = print_report(options.parts.read_text(encoding="utf-8"), results, reruns)
    return 0 if passed else 1
