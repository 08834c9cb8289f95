"""The Python API: the example of its page runs, it prints nothing by itself, and its names are there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import imgkit_builder as imgkit

PAGE = Path(__file__).parents[4] / "docs/reference/api.md"


def blocks() -> list[str]:
    """The Python examples of the page."""
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks()[0], str(PAGE), "exec"), {})  # noqa: S102 - a page of this checkout
    output = capsys.readouterr()
    assert "cpu:latest" in output.out
    assert "#SBATCH --qos=acc_debug" in output.out
    assert "no recipe" in output.out
    assert output.err == ""
    assert list(tmp_path.iterdir()) == []


def test_every_name_is_there_and_listed():
    assert sorted(imgkit.__all__) == [name for name in dir(imgkit) if name in imgkit.__all__]
    for name in imgkit.__all__:
        assert getattr(imgkit, name) is not None


def test_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="has no attribute 'biuld'"):
        imgkit.biuld  # noqa: B018


def test_functions_are_silent_by_default(capsys):
    for name in (
        "build",
        "plan",
        "build_sif",
        "convert",
        "smoke_test",
        "run",
        "submit_conversion",
    ):
        default = inspect.signature(getattr(imgkit, name)).parameters["report"].default
        assert default is None or type(default).__name__ == "Silent"
    imgkit.plan("cpu")
    assert capsys.readouterr() == ("", "")


def test_values_cannot_be_changed():
    plan = imgkit.plan("cpu")
    with pytest.raises(AttributeError):
        plan.tag = "other"  # type: ignore[misc]


def test_both_kinds_of_lock_are_refused():
    request = imgkit.BuildRequest(locked=True, no_lock=True)
    with pytest.raises(imgkit.ImgkitError, match="--locked cannot be combined with --no-lock"):
        imgkit.build("cpu", request)


def test_standard_input_needs_a_name():
    with pytest.raises(imgkit.ImgkitError, match="no name yet"):
        imgkit.convert("-")
