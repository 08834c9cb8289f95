"""What ``ci/report`` says of a run, and when it calls a skip a failure."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

import check_report
import pytest

PASSED = '<testcase classname="tests.a" name="test_one"/>'
FAILED = '<testcase classname="tests.a" name="test_two"><failure message="no"/></testcase>'
NO_DOCKER = (
    '<testcase classname="tests.b" name="{}"><skipped message="docker: no engine answers"/></testcase>'
)
UNASKED = '<testcase classname="tests.b" name="t"><skipped message="torch_arm64: takes minutes"/></testcase>'


class Report(NamedTuple):
    stdout: str
    returncode: int


def report(folder, *cases, alone=""):
    table = folder / "parts.tsv"
    table.write_text("lint\t30\t0\ntests: lab\t90\t1\n")
    results = {"lab.xml": "".join(cases), "lab-alone.xml": alone}
    for name, inside in results.items():
        text = f'<testsuites><testsuite name="lab">{inside}</testsuite></testsuites>'
        (folder / name).write_text(text)
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        code = check_report.main([str(table), *(str(folder / name) for name in results)])
    return Report(stdout.getvalue(), code)


def test_parts_show_minutes_and_failures(tmp_path):
    lines = report(tmp_path, PASSED).stdout.splitlines()
    assert lines[0].split() == ["0.5", "min", "lint", "ok"]
    assert lines[1].split() == ["1.5", "min", "tests:", "lab", "FAILED", "(1)"]


def test_slowest_tests_come_first_without_their_group(tmp_path):
    cases = [f'<testcase classname="tests.c" name="test_{n}@wires" time="{n}.5"/>' for n in range(25)]
    lines = report(tmp_path, *cases).stdout.partition("slowest tests:\n")[2].splitlines()
    assert lines[0].split() == ["24.5", "s", "lab:", "tests.c.test_24"]
    assert lines[19].split() == ["5.5", "s", "lab:", "tests.c.test_5"]
    assert lines[20] == ""


def test_skips_of_one_reason_share_a_line(tmp_path):
    result = report(tmp_path, NO_DOCKER.format("t1"), NO_DOCKER.format("t2"))
    assert "lab: tests.b.t1 and 1 more: docker: no engine answers" in result.stdout


def test_total_counts_every_outcome(tmp_path):
    result = report(tmp_path, PASSED, FAILED, UNASKED)
    assert result.stdout.splitlines()[-1] == "total: 1 passed, 1 failed, 1 skipped"


def test_test_that_passes_alone_is_named_and_counts_as_passed(tmp_path):
    result = report(tmp_path, PASSED, FAILED, alone=FAILED.partition("<failure")[0].rstrip(">") + "/>")
    assert "failed among others, passed alone:\n  lab: tests.a.test_two\n" in result.stdout
    assert result.stdout.splitlines()[-1] == "total: 2 passed, 0 failed, 0 skipped"
    assert result.returncode == 0


@pytest.mark.parametrize(
    ("failed", "alone"), [(FAILED, FAILED), (FAILED.replace("test_two", "test_two@loop shapes"), "")]
)
def test_failed_test_that_does_not_pass_alone_stays_a_failure(tmp_path, failed, alone):
    result = report(tmp_path, PASSED, failed, alone=alone)
    assert "passed alone" not in result.stdout
    assert result.stdout.splitlines()[-1] == "total: 1 passed, 1 failed, 0 skipped"
    assert result.returncode == 1


def test_run_without_tests_fails(tmp_path):
    result = report(tmp_path)
    assert result.returncode == 1
    assert "no test ran" in result.stdout


@pytest.mark.parametrize(("passed", "code"), [(9, 1), (10, 0)])
def test_tenth_of_the_tests_skipped_fails(tmp_path, passed, code):
    cases = [f'<testcase classname="tests.c" name="test_{n}"/>' for n in range(passed)]
    result = report(tmp_path, NO_DOCKER.format("t"), *cases)
    assert result.returncode == code
    assert ("1 of 10 tests were skipped" in result.stdout) == (code == 1)
