"""Errors under ``--json`` that no command line causes by itself: one object on stdout, as in ``refusals``."""

from __future__ import annotations

import json
from typing import Any

import pytest


def test_unreadable_folder_is_an_object(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/closed")

    monkeypatch.setattr("imgkit_builder.workflow.build.load", refuse)
    code, out, _ = call("build", "mn5", "--json")
    error = json.loads(out)["error"]
    assert (code, error["what"], error["where"]) == (4, "Permission denied", "/closed")


def test_interrupt_is_an_object(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("imgkit_builder.workflow.build.load", interrupt)
    code, out, _ = call("build", "mn5", "--json")
    assert (code, json.loads(out)["error"]["exit_code"]) == (130, 130)


def test_check_of_good_recipes_passes(call: Any) -> None:
    code, out, _ = call("check", "mn5", "cpu", "--json")
    assert (code, json.loads(out)["passed"]) == (0, True)
