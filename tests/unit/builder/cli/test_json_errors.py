"""Errors under ``--json`` that no command line causes by itself: one object on stdout, as in ``refusals``."""

from __future__ import annotations

import json
from unittest import mock

import pytest


@pytest.mark.parametrize(
    ("error", "code", "what", "where"),
    [
        (PermissionError(13, "Permission denied", "/closed"), 4, "Permission denied", "/closed"),
        (KeyboardInterrupt(), 130, "interrupted; no partial file is left", None),
    ],
)
def test_error_is_an_object(call, monkeypatch, error, code, what, where):
    monkeypatch.setattr("imgkit_builder.workflow.build.load", mock.Mock(side_effect=error))
    exit_code, out, _ = call("build", "mn5", "--json")
    values = json.loads(out)["error"]
    assert (exit_code, values["exit_code"], values["what"], values["where"]) == (code, code, what, where)


def test_check_of_good_recipes_passes(call):
    code, out, _ = call("check", "mn5", "cpu", "--json")
    assert (code, json.loads(out)["passed"]) == (0, True)
