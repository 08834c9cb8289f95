"""The result of one check, as ``imgkit test``, ``verify`` and ``doctor`` print it.

This module imports the standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# Version of the JSON form that `to_dict` returns.
SCHEMA = 1

# "skip" means that the check could not be made, or was not needed. Only "fail" counts as a failure in
# `passed`.
Verdict = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    For example, ``Check("zstd", "warn", "not on PATH", "apt-get install zstd")``.
    """

    name: str
    verdict: Verdict
    found: str
    """What the check saw, such as a version, a digest or the first line of an error."""
    hint: str = ""
    """How to fix the problem. A check that is ok may have a remark here; most have the empty string."""


def passed(checks: Sequence[Check]) -> bool:
    """Return True unless a check failed. Warnings and skipped checks do not count as failures."""
    return all(check.verdict != "fail" for check in checks)


def to_dict(checks: Sequence[Check], **context: Any) -> dict[str, Any]:
    """Return the JSON form: ``{"schema": 1, "passed": ..., "checks": [...], **context}``."""
    return {
        "schema": SCHEMA,
        **context,
        "passed": passed(checks),
        "checks": [dataclasses.asdict(check) for check in checks],
    }


def table(checks: Sequence[Check]) -> Iterator[str]:
    """Yield the lines of a table that is printed for people.

    Each check has a line with its verdict, its name and what was found, in aligned columns: ``warn  zstd  not
    on PATH``. If the check has a hint, the hint follows in a line of its own.
    """
    width = max((len(check.name) for check in checks), default=0)
    for check in checks:
        yield f"{check.verdict:4}  {check.name:{width}}  {check.found}"
        if check.hint:
            yield f"      {'':{width}}  -> {check.hint}"
