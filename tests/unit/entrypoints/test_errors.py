"""Messages stay readable, whatever the input that they repeat."""

from __future__ import annotations

import pytest

from imgkit_builder.recipe.load import load
from imgkit_entrypoints.errors import UsageError, shorten_message


@pytest.mark.parametrize("value", ["x" * 5000, "word " * 1000, "/a" * 2000])
@pytest.mark.parametrize("form", ["{0!r} is no name; near: {0!r}", "there is no {0}", '"{0}"'])
def test_long_value_is_shortened(value, form):
    text = shorten_message(form.format(value))
    assert "…" in text
    assert len(text) < 260
    assert str(UsageError(form.format(value), where=value, hint=value)).count("\n") == 1


def test_ordinary_text_stays_as_it_is():
    text = "it's here: 'a b' and \"c\"\n  -> " + "try this, " * 60 + "\n" + "/folder" * 20
    assert shorten_message(text) == text


@pytest.mark.parametrize(
    "line",
    ["base: {}", "env: {{A B: {}}}", "workdir: {}", "{}: 1", "platform: {}", "pip: [{{packages: [{}]}}]"],
)
def test_recipe_with_a_long_value_refused_in_a_few_lines(tmp_path, line):
    file = tmp_path / "r.yaml"
    file.write_text(f"extends: mn5\nimage:\n  {line.format('x y' * 2000)}\n")
    with pytest.raises(UsageError) as caught:
        load(str(file))
    assert max(map(len, str(caught.value).splitlines())) < 300 + len(str(tmp_path))
    excerpt, caret = str(caught.value).splitlines()[1:]
    assert len(excerpt) <= 154
    assert caret.endswith("^")
