"""Refusals as text: a command line and its files go in; the exit code and the message of a user come out.

A folder has a YAML file for each subject, which is a list of cases::

    - name: unknown system names the nearest
      run: imgkit show ./mine.yaml          # split as a shell does, and called in this process
      files: {mine.yaml: "system: mn6"}     # optional; a path that ends with / is an empty folder
      edits: {mine.yaml: {mn6: mn7}}        # optional; the first of a text in a file becomes another
      links: {link.yaml: mine.yaml}         # optional; symbolic links
      modes: {mine.yaml: 0666}              # optional
      env: {SLURM_JOB_ID: "7"}              # optional; PATH, HOME and COLUMNS are set to fixed values
      exit: 2
      stdout: ""                            # optional
      stderr: |
        imgkit: mine.yaml:1:9: system: there is no system 'mn6'; did you mean mn5?

The program runs in a folder of its own, whose path is ``TMP`` in the case. Nothing else is replaced, and no
switch rewrites a case: whoever changes a message edits its text. A refusal must leave the folder as it was.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pydantic
import pytest
import yaml


class Case(pydantic.BaseModel, extra="forbid", frozen=True, strict=True):
    """One refusal of a command line."""

    name: str = pydantic.Field(min_length=1)
    run: str = pydantic.Field(min_length=1)
    files: dict[str, str] = {}
    edits: dict[str, dict[str, str]] = {}
    links: dict[str, str] = {}
    modes: dict[str, int] = {}
    env: dict[str, str] = {}
    exit: int = pydantic.Field(ge=1)
    stdout: str = ""
    stderr: str


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: without its first line, a case would replace the one above it."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(problem=f"{key!r} stands twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def load_cases(folder: Path) -> list[Any]:
    """Return a parameter of pytest for each case of `folder`; its id is ``SUBJECT: NAME``."""
    adapter = pydantic.TypeAdapter(list[Case])
    parameters: dict[str, Any] = {}
    for file in sorted(folder.glob("*.yaml")):
        with file.open(encoding="utf-8") as stream:
            rows = yaml.load(stream, _Loader)  # noqa: S506 - it is a safe loader
        try:
            cases = adapter.validate_python(rows)
        except pydantic.ValidationError as error:
            raise ValueError(f"{file}: {error}") from error
        for case in cases:
            name = f"{file.stem}: {case.name}"
            if name in parameters:
                raise ValueError(f"{file}: two cases have the name {case.name!r}")
            parameters[name] = pytest.param(case, id=name)
    if not parameters:
        raise ValueError(f"{folder}: there are no cases")
    return list(parameters.values())


def check(
    case: Case,
    main: Callable[[], None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run `case` by `main` in the empty `folder`; if the program prints another text, fail with that."""
    _write_files(case, folder)
    before = _snapshot(folder)
    env = {"PATH": os.defpath, "HOME": f"{folder}/home", "COLUMNS": "100"}
    env |= {name: _with_folder(value, folder) for name, value in case.env.items()}
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", shlex.split(_with_folder(case.run, folder)))
    with mock.patch.dict(os.environ, env, clear=True), pytest.raises(SystemExit) as exited:
        main()
    stdout, stderr = (text.replace(str(folder), "TMP") for text in capsys.readouterr())
    expected = _as_text(case.exit, case.stdout, case.stderr)
    actual = _as_text(exited.value.code, stdout, stderr)
    if actual != expected:
        difference = difflib.unified_diff(
            expected.split("\n"), actual.split("\n"), "case", "now", lineterm=""
        )
        pytest.fail("\n".join((*difference, "", "the case is now:", actual)), pytrace=False)
    assert _snapshot(folder) == before, "a refusal must leave its folder as it was"


def _with_folder(text: str, folder: Path) -> str:
    return re.sub(r"\bTMP\b", str(folder), text)


def _write_files(case: Case, folder: Path) -> None:
    for path, text in case.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if path.endswith("/"):
            (folder / path).mkdir()
            continue
        for old, new in case.edits.get(path, {}).items():
            assert old in text, f"{path} has no {old!r}"
            text = text.replace(old, new, 1)
        (folder / path).write_text(_with_folder(text, folder), encoding="utf-8")
    assert case.edits.keys() <= case.files.keys()
    for path, target in case.links.items():
        (folder / path).symlink_to(_with_folder(target, folder))
    for path, mode in case.modes.items():
        (folder / path).chmod(mode)


def _snapshot(folder: Path) -> dict[Path, bytes | None]:
    """Return the content of each file below `folder`; None for a folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def _as_text(code: object, stdout: str, stderr: str) -> str:
    """Return what a program printed, as it stands in a case."""
    blocks = [f"  exit: {code}\n"]
    for name, text in (("stdout", stdout), ("stderr", stderr)):
        if text:
            blocks.append(f"  {name}: |\n{textwrap.indent(text, '    ')}")
    return "".join(blocks)


@contextlib.contextmanager
def refused(
    kind: type[Any], what: str | None = None, *, where: str | None = None, hint: str = ""
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error of this kind that `what` matches, at the place `where`, with `hint` in its hint."""
    with pytest.raises(kind, match=what) as caught:
        yield caught
    if where is not None:
        assert caught.value.where == where
    assert hint in str(caught.value.hint)
