"""The kit of refusals (tests/kit/refusals.py): wrong cases, and programs that do not refuse, fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import refusals
import yaml

CASE = refusals.Case(name="a", run="program TMP", files={"x": "1"}, exit=2, stderr="no TMP\n")


def program(code: int = 2, message: str = "no {}\n", path: str = "") -> Callable[[], None]:
    """Return a program that prints `message` with its argument, touches `path`, and ends with `code`."""

    def main() -> None:
        print(message.format(sys.argv[1]), end="", file=sys.stderr)
        if path:
            Path(path).write_text("2")
        sys.exit(code)

    return main


@pytest.fixture
def check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Callable[[], None]], None]:
    return lambda main: refusals.check(CASE, main, tmp_path, monkeypatch, capsys)


def test_program_that_refuses_as_recorded_passes(check):
    check(program())


@pytest.mark.parametrize(
    ("main", "reason"),
    [
        (program(code=0), "exit: 0\n"),
        (program(message="no, {}\n"), "the case is now:\n  exit: 2\n  stderr: |\n    no, TMP\n"),
        (program(message="no {}"), "no TMP"),
        (program(path="x"), "leave its folder as it was"),
        (program(path="new"), "leave its folder as it was"),
        (lambda: None, "DID NOT RAISE"),
    ],
)
def test_program_that_does_anything_else_fails(check, main, reason):
    with pytest.raises((pytest.fail.Exception, AssertionError)) as caught:
        check(main)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a.yaml: .*\n.*valid list"),
        ("[]", "there are no cases"),
        ("- [", "a.yaml"),
        ("- {name: a, run: b, stderr: c}", "exit\n.*Field required"),
        ("- {name: a, run: b, exit: 0, stderr: c}", "exit\n.*greater than or equal to 1"),
        ("- {name: a, run: b, exit: '2', stderr: c}", "exit\n.*valid integer"),
        ("- {name: a, run: b, exit: 2}", "stderr\n.*Field required"),
        ("- {name: a, run: b, exit: 2, stderr: c, hint: d}", "hint\n.*not permitted"),
        ("- {name: a, run: b, exit: 2, stderr: c, name: d}", "'name' stands twice"),
        ("- &one {name: a, run: b, exit: 2, stderr: c}\n- *one", "two cases have the name 'a'"),
    ],
)
def test_malformed_case_is_refused(tmp_path, text, reason):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises((ValueError, yaml.YAMLError), match=reason):
        refusals.load_cases(tmp_path)


def test_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there are no cases"):
        refusals.load_cases(tmp_path / "none")
