"""TOML texts, and what no reader of them takes."""

from __future__ import annotations

import pytest

from imgkit_builder.recipe import problems
from imgkit_builder.recipe.problems import NotToml
from imgkit_entrypoints.errors import UsageError


def test_text_becomes_values() -> None:
    assert problems.parse_toml("[a]\nb = [1]\n") == {"a": {"b": [1]}}
    with pytest.raises(NotToml, match="Invalid value") as refused:
        problems.parse_toml("\na = x")
    assert (refused.value.line, refused.value.column) == (2, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1\0", "it is not TOML"),
        ("a = " + "[" * 100_000, "too deep"),
        ("a = " + "[" * 40 + "]" * 40, "too deep"),
        ("a." * 100_000 + "b = 1", "a key has more than 32 parts"),
        ("['a'." + '"b" . ' * 40 + "c]", "a key has more than 32 parts"),
        ("a = " + "9" * 5000, "it is not TOML"),
        ("a = 0x" + "f" * 5000, "an integer has more than 64 bits"),
        ("a = [{b = [9223372036854775808]}]", "an integer has more than 64 bits"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_is_no_toml_is_an_error_of_imgkit(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        problems.parse_toml(text)


def test_largest_integers_and_texts_with_dots_pass() -> None:
    text = f"a = [9223372036854775807, -9223372036854775808]\nb = '{'a.b ' * 40}'\n"
    assert problems.parse_toml(text)["a"] == [(1 << 63) - 1, -(1 << 63)]
