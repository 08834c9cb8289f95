"""Each file in ``malformed`` is a case; ``# expect [FILE:]LINE:COL: KEY: WHAT`` lines end it.

They are all its problems, in this order; WHAT is the beginning of the message. ``malformed.txt`` has the
whole messages. After an intended change: ``IMGKIT_UPDATE_GOLDEN=1 pytest tests/unit/builder/recipe``, then
review the diff.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.problems import Problem, RecipeErrors
from imgkit_entrypoints.terminal import shown

FOLDER = Path(__file__).parent / "malformed"
CASES = sorted(FOLDER.glob("*.yaml"))
MESSAGES = FOLDER.with_suffix(".txt")


def told(problem: Problem, case: Path) -> str:
    file = problem.position.file.relative_to(FOLDER).as_posix()
    place = f"{problem.position.line}:{problem.position.column}: "
    key = f"{problem.key}: " if problem.key else ""
    return f"{'' if file == case.name else f'{file}:'}{place}{key}{problem.what}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_all_problems_at_exact_places(case: Path) -> None:
    expected = re.findall(r"^# expect (.+)$", case.read_text(), re.MULTILINE)
    with pytest.raises(RecipeErrors) as caught:
        load(case)
    found = [told(problem, case) for problem in caught.value.problems]
    assert expected
    assert len(found) == len(expected), found
    for have, want in zip(found, expected, strict=True):
        assert have.startswith(want)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_caret_stands_below_the_column(case: Path) -> None:
    with pytest.raises(RecipeErrors) as caught:
        load(case)
    for problem in caught.value.problems:
        if not problem.source.strip():
            continue
        *_, source, caret = str(problem).split("\n")
        assert caret.strip() == "^"
        assert len(caret) == 5 + len(shown(problem.source[: problem.position.column - 1]))
        assert source == f"    {shown(problem.source)}"


def test_messages_are_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    rows = []
    for case in CASES:
        with pytest.raises(RecipeErrors) as caught:
            load(f"./{case.name}")
        rows += [f"== {case.name}", str(caught.value).replace(str(FOLDER), "FOLDER"), ""]
    messages = "\n".join(rows)
    if os.environ.get("IMGKIT_UPDATE_GOLDEN") == "1":
        MESSAGES.write_text(messages, encoding="utf-8")
    assert messages == MESSAGES.read_text(encoding="utf-8")


def test_enough_cases_are_there() -> None:
    assert len(CASES) >= 40


HINTS = {
    "sexagesimal-time": 'quote it: "3:00:00"',
    "float-in-text": 'quote it: "24.10"',
    "unknown-key": "did you mean apt?",
    "key-of-other-section": "did you mean image.apt?",
    "key-at-top-level": "did you mean image.base?",
    "unknown-top-level": "allowed: system, description, extends, image; did you mean system?",
    "extends-unknown": "did you mean mn5?",
    "platform-alias": "did you mean amd64?",
    "system-words": "did you mean slurm?",
    "base-transport": "write python:3.11-slim",
    "base-capitals": "repository names are lower-case: nvidia",
    "env-tuning": "move it to system.env: {NCCL_DEBUG: ...}",
    "star-unquoted": "text that begins with *, & or ! must be quoted",
    "colon-in-text": 'quote text that contains ": "',
    "pip-bad-options": "write --index-url, https://x.org as separate items",
    "apt-bad": "package names are lower-case: git",
    "constraints-word": "allowed: keep, ignore, {drop: [NAME, ...]}",
    "env-path": "add to the base's value by whole elements: PATH: /FIRST:$PATH or PATH: $PATH:/LAST",
    "pip-bad-packages": "write git+https://x.org/y@COMMIT with all 40 digits",
    "ca-files": "openssl x509 -inform der -in run-mappings.yaml -out certificate.crt",
    "run-mappings": "allowed: ",
    "pip-projects": "add one next to setup.py: [build-system] with requires",
    "pip-neither": "add packages: [NAME]",
}


@pytest.mark.parametrize("name", sorted(HINTS))
def test_hint_says_what_to_write(name: str) -> None:
    with pytest.raises(RecipeErrors, match=re.escape(HINTS[name])):
        load(FOLDER / f"{name}.yaml")
