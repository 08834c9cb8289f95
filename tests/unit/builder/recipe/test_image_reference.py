from __future__ import annotations

import pytest

from imgkit_builder.recipe.rules import ImageReference, parse_reference
from imgkit_entrypoints.rules import Unfit

SHA = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("python", ("", "python", "", "")),
        ("python:3.11-slim-bookworm", ("", "python", "3.11-slim-bookworm", "")),
        ("nvcr.io/nvidia/pytorch:24.03-py3", ("nvcr.io", "nvidia/pytorch", "24.03-py3", "")),
        ("localhost:5000/a/b", ("localhost:5000", "a/b", "", "")),
        ("localhost/a:1", ("localhost", "a", "1", "")),
        ("library/python", ("", "library/python", "", "")),
        ("[::1]:5000/a:1", ("[::1]:5000", "a", "1", "")),
        ("Registry/a:1", ("Registry", "a", "1", "")),
        (f"a/b@{SHA}", ("", "a/b", "", SHA)),
        (f"host.org:443/a:1@{SHA}", ("host.org:443", "a", "1", SHA)),
        ("a__b/c--d", ("", "a__b/c--d", "", "")),
        ("a:" + "x" * 128, ("", "a", "x" * 128, "")),
    ],
)
def test_good_reference_comes_apart(text: str, parts: tuple[str, str, str, str]) -> None:
    registry, repository, tag, digest = parts
    assert parse_reference(text) == ImageReference(
        registry=registry, repository=repository, tag=tag, digest=digest
    )


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
def test_bad_reference_is_refused(text: str) -> None:
    with pytest.raises(Unfit) as caught:
        parse_reference(text)
    assert caught.value.message
