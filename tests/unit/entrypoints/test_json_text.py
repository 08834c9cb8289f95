"""JSON of others: every fault is a ValueError, whatever json.loads makes of it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import pytest

from imgkit_builder.oci.config import parse_config
from imgkit_entrypoints import json_text, system
from imgkit_entrypoints.errors import CheckFailed
from imgkit_entrypoints.rules import EnvName, Rule, at_least, not_empty
from imgkit_entrypoints.system import SystemFacts

DEEP = "[" * 100_000
LIMITS = {
    "deeper than needed": "[" * 101 + "]" * 101,
    "many lists": f"[{'[],' * 100_000}0]",
    "large": f'"{"x" * (4 << 20)}"',
    "5,000 digits": "9" * 5000,
    "infinite": "1e999",
    "fraction of 5,000 digits": f"0.{'1' * 5000}",
    "a key twice": '{"a": 1, "b": 2, "a": 3}',
}


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 50_000, "NaN", '{"a": -Infinity}', "", "{", b"\xff"])
def test_faulty_json_refused(text):
    with pytest.raises(ValueError, match=r"."):
        json_text.parse(text)


@pytest.mark.parametrize("text", LIMITS.values(), ids=LIMITS)
def test_limits_refuse_what_json_takes(text):
    for document in (text, text.encode()):
        with pytest.raises(ValueError, match=r"."):
            json_text.parse(document)


def test_a_file_is_read_no_further_than_its_limit(tmp_path):
    with pytest.raises(OSError, match="not a regular file"):
        json_text.load(Path("/dev/zero"), most_bytes=1000)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="more than 1000 bytes"):
        json_text.load(tmp_path / "sparse", most_bytes=1000)


def test_object_between_warnings_found():
    assert json_text.first_object('warn [x]\n{"a": [1]} rest {') == {"a": [1]}
    for text in ("no object", "{" + DEEP, '{"a": 1e999}'):
        with pytest.raises(ValueError, match=r"."):
            json_text.first_object(text)


def test_reads_what_json_writes():
    value = {"a": [1, 2.5, None, True, "é"]}
    assert json_text.parse(json.dumps(value)) == value


@pytest.mark.parametrize("text", [DEEP, '{"rootfs": NaN}', "[]", '{"rootfs": {"diff_ids": 5}}'])
def test_image_configuration_that_is_none_refused(text):
    with pytest.raises(CheckFailed, match="its image configuration cannot be read"):
        parse_config(text.encode(), where="x.tar")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("title", 5),
        ("env", {"A": 5}),
        ("env", {"A": ["x"]}),
        ("queue", {"sif": [1]}),
        ("runtime", {"kind": "sandbox"}),
        ("node", {"gpus": "4"}),
        ("node", {"gpus": True}),
        ("fabric", None),
    ],
)
def test_facts_of_another_type_refused(key, value):
    facts = json.loads(system.to_json(SystemFacts()))
    with pytest.raises((ValueError, TypeError)):
        system.from_json(json.dumps({**facts, key: value}))


def test_facts_of_the_right_type_pass():
    facts = replace(SystemFacts(), title="x", env={"A": "1"})
    assert system.to_json(system.from_json(system.to_json(facts))) == system.to_json(facts)


READERS: dict[str, Callable[[str], object]] = {"system": system.from_json, "value": json_text.parse}


@pytest.mark.parametrize("reader", READERS)
def test_long_value_is_not_repeated(reader):
    facts = json.loads(system.to_json(SystemFacts()))
    with pytest.raises(ValueError, match=r".") as caught:
        READERS[reader](json.dumps({**facts, "title": ["x" * 9999]}) + ("}" if reader == "value" else ""))
    assert len(str(caught.value)) < 250


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    name: Annotated[str, Rule(not_empty, convert=str.lower)]
    kind: Literal["a", "b"] = "a"
    size: Annotated[int | None, at_least(0)] = None

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ValueError("bad is no name")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    wheels: tuple[Wheel, ...]
    labels: Mapping[EnvName, str] = dataclasses.field(default_factory=dict)
    folder: Path = Path()
    size: tuple[int, int, int] = (0, 0, 0)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"wheels": [{"name": 1}]}, "shelf.wheels[0].name is 1, not text"),
        ({"wheels": [{"name": "a", "size": True}]}, "shelf.wheels[0].size is true, not a whole number"),
        ({"wheels": [{"name": "a", "oops": 1}]}, "shelf.wheels[0].oops is an unknown key"),
        ({"wheels": [{"name": "a", "kind": "c"}]}, 'shelf.wheels[0].kind is "c", not a or b'),
        ({"wheels": [{"name": "a"}, {}]}, "shelf.wheels[1] is not complete: it has no name"),
        ({"wheels": ["x"]}, 'shelf.wheels[0] is "x", not an object'),
        ({"wheels": [{"name": "bad"}]}, "bad is no name"),
        ({"wheels": [{"name": ""}]}, "shelf.wheels[0].name: is empty; remove it"),
        ({"wheels": [{"name": "a", "size": -1}]}, "shelf.wheels[0].size: -1 is too small; at least 0"),
        ({"wheels": [], "labels": {"a": "b", "c": 2}}, "shelf.labels.c is 2, not text"),
        (
            {"wheels": [], "labels": {"a b": "c"}},
            "shelf.labels: 'a b' is not a variable name; allowed: letters, digits and _, but no digit at the "
            "beginning",
        ),
        ({"wheels": [], "size": [1, 2]}, "shelf.size is [1, 2], not a list of 3"),
        ({"wheels": [], "size": [1, 2, "3"]}, 'shelf.size[2] is "3", not a whole number'),
        ({}, "shelf is not complete: it has no wheels"),
        ([], "shelf is [], not an object"),
    ],
)
def test_fault_is_named_with_its_place(data, problem):
    with pytest.raises(ValueError, match="^" + re.escape(problem) + "$"):
        json_text.build_value(Shelf, data, "shelf", closed=True)


def test_value_has_the_types_of_its_fields():
    data = {"wheels": [{"name": "X", "size": None, "later": 1}], "folder": "/x", "size": [1, 2, 3]}
    shelf = Shelf(wheels=(Wheel(name="x"),), folder=Path("/x"), size=(1, 2, 3))
    assert json_text.build_value(Shelf, data, "shelf") == shelf


@pytest.mark.parametrize("value", [1, 1.0, True, None, [], {}])
def test_text_is_text_alone(value):
    with pytest.raises(ValueError, match=r"shelf\.folder is "):
        json_text.build_value(Shelf, {"wheels": [], "folder": value}, "shelf")
