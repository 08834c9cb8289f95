"""Where the keys and tables of a TOML file are, also behind texts and lists that look like them."""

from __future__ import annotations

import pytest

from imgkit_builder.recipe.problems import parse_toml, toml_positions

TEXT = '''\
# a = 1
a = 1
  "b c" = [ # [no]
  "d = 1", """
e = 2
""",
]
f = {x = 1, y = [
]}
[one.two]
g = \'\'\'
[no]
h = 1\'\'\'
[[list]]
i = "[x]" # j = 1
[list.below]
k = 'a#b'
[[list]]
i = 2
'''


def test_every_key_and_table_has_its_line() -> None:
    parse_toml(TEXT)
    assert list(toml_positions(TEXT)) == [
        (("a",), 2, 1),
        (("b c",), 3, 3),
        (("f",), 8, 1),
        (("one", "two"), 10, 1),
        (("one", "two", "g"), 11, 1),
        (("list", 0), 14, 1),
        (("list", 0, "i"), 15, 1),
        (("list", 0, "below"), 16, 1),
        (("list", 0, "below", "k"), 17, 1),
        (("list", 1), 18, 1),
        (("list", 1, "i"), 19, 1),
    ]


@pytest.mark.parametrize(
    "text", ['a = "', "a = [[[[", "]]]]\na = 1", '"""', "= = =", "[", "[]", "\0", "[a.b"]
)
def test_no_toml_is_no_error(text: str) -> None:
    assert len(list(toml_positions(text))) <= 1


def test_long_value_takes_no_longer_than_its_length() -> None:
    text = "a = [\n" + "  '',\n" * 200_000 + "]\nb = 1\n"
    assert list(toml_positions(text)) == [(("a",), 1, 1), (("b",), 200_003, 1)]
