"""Texts that imgkit takes apart itself: references of images, and TOML that no reader should take."""

from __future__ import annotations

import pytest

from imgkit_builder.recipe import problems
from imgkit_builder.recipe.problems import NotToml
from imgkit_builder.recipe.rules import parse_reference
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import Unfit

SHA = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("python", "|python||"),
        ("python:3.11-slim-bookworm", "|python|3.11-slim-bookworm|"),
        ("nvcr.io/nvidia/pytorch:24.03-py3", "nvcr.io|nvidia/pytorch|24.03-py3|"),
        ("localhost:5000/a/b", "localhost:5000|a/b||"),
        ("localhost/a:1", "localhost|a|1|"),
        ("library/python", "|library/python||"),
        ("[::1]:5000/a:1", "[::1]:5000|a|1|"),
        ("Registry/a:1", "Registry|a|1|"),
        (f"a/b@{SHA}", f"|a/b||{SHA}"),
        (f"host.org:443/a:1@{SHA}", f"host.org:443|a|1|{SHA}"),
        ("a__b/c--d", "|a__b/c--d||"),
        ("a:" + "x" * 128, "|a|" + "x" * 128 + "|"),
    ],
)
def test_good_reference_comes_apart(text, parts):
    reference = parse_reference(text)
    registry, repository, tag, digest = parts.split("|")
    assert (reference.registry, reference.repository) == (registry, repository)
    assert (reference.tag, reference.digest) == (tag, digest)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " python",
        "python:3 ",
        "Python:3",
        "python:",
        "python:-x",
        "a:" + "x" * 129,
        "/python",
        "python/",
        "a//b",
        "a.-b",
        "a._b:1",
        "-a:1",
        "a-:1",
        "a___b:1",
        "host:port/a",
        "host.org:/a",
        "-host.org/a",
        "docker://a:1",
        "docker-archive:x.tar",
        "https://nvcr.io/a",
        "a@sha256:123",
        "a@sha256:" + "g" * 64,
        "a@" + "0" * 64,
        "a@",
        f"a@{SHA}@{SHA}",
        "a:$TAG",
        "a/" * 128 + "b",
    ],
)
def test_bad_reference_is_refused(text):
    with pytest.raises(Unfit) as caught:
        parse_reference(text)
    assert caught.value.message


def test_text_becomes_values():
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
def test_what_is_no_toml_is_an_error_of_imgkit(text, message):
    with pytest.raises(UsageError, match=message):
        problems.parse_toml(text)


def test_largest_integers_and_texts_with_dots_pass():
    text = f"a = [9223372036854775807, -9223372036854775808]\nb = '{'a.b ' * 40}'\n"
    assert problems.parse_toml(text)["a"] == [(1 << 63) - 1, -(1 << 63)]
