"""The result of a check, for ``test``, ``verify`` and ``doctor``. Standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA = 1

Verdict = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: ``Check("zstd", "warn", "not on PATH", "apt-get install zstd")``."""

    name: str
    verdict: Verdict
    found: str
    """A version, a digest, the first line of an error."""
    hint: str = ""
    """The fix, where the verdict is not ok."""


def passed(checks: Sequence[Check]) -> bool:
    """Return whether no check failed."""
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
    """Yield aligned lines: one for each check, and its hint below."""
    width = max((len(check.name) for check in checks), default=0)
    for check in checks:
        yield f"{check.verdict:4}  {check.name:{width}}  {check.found}"
        if check.hint:
            yield f"      {'':{width}}  -> {check.hint}"
