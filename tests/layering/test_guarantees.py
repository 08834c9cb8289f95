"""Each guarantee of tests/guarantees.md names the tests that check it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "tests/guarantees.md").read_text(encoding="utf-8")


def test_every_guarantee_names_tests_that_exist():
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    tests = set(re.findall(r"^def (test_\w+)\(", code, re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 20
    assert named - tests == set()
    subjects = {path.name for path in (ROOT / "tests").rglob("refusals/*.yaml")}
    assert set(re.findall(r"`refusals/(\w+\.yaml)`", TEXT)) <= subjects
    rows = [
        row
        for row in re.findall(r"^\| (.+) \|$", TEXT, re.MULTILINE)
        if not row.startswith(("guarantee", "---"))
    ]
    assert [row for row in rows if not re.search(r"`test_\w+`$", row)] == []
