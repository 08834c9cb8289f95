"""Types of a recipe: pydantic checks a tree by the annotations of the model, and the JSON Schema says the
same to editors.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from imgkit_builder.recipe import model, systems
from imgkit_builder.recipe.check import Checked
from imgkit_builder.recipe.model import STRICT, Image
from imgkit_builder.recipe.problems import (
    YAML_NAMES,
    Collector,
    KeyPath,
    choices,
    key_text,
    nearest,
)
from imgkit_builder.recipe.rules import JOB_FIELDS, PLATFORMS
from imgkit_builder.recipe.yaml_tree import Items, Scalar, Table, YamlNode, deepest, kind
from imgkit_entrypoints import system
from imgkit_entrypoints.system import SystemFacts

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

_ALIASES = {
    "apptainer": "singularity",
    "k8s": "kubernetes",
    "podman": "docker",
    "ib": "infiniband",
    "rdma": "roce",
    "cxi": "slingshot",
    "ethernet": "tcp",
}
"""Other names for allowed values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The content of a recipe file, as pydantic checks it."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    description: str = ""
    image: Image
    system: SystemFacts = field(default_factory=SystemFacts)


def typecheck(tree: Table, bad: Checked, found: Collector, *, whole: bool) -> Document | None:
    """The values of `tree`; None after a problem.

    Places in `bad` have a reported problem. If `whole` is false, a parent could not be read: it may state the
    keys that are missing here.
    """
    from pydantic import ValidationError

    # JSON mode is strict about text and numbers, but accepts lists for tuples and text for paths.
    try:
        return _adapter().validate_json(json.dumps(_long_forms(_data(tree))))
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            place = detail["loc"] = _as_written(tree, detail["loc"])
            if detail["type"] == "missing" and not whole:
                continue
            if detail["type"] == "value_error" and any(path[: len(place)] == place for path in bad):
                continue  # the dataclass repeats a check that a rule has reported
            if place not in bad:
                _explain(tree, detail, found)
        return None


@functools.cache
def _adapter() -> TypeAdapter[Document]:
    """Built once: this takes longer than a recipe."""
    from pydantic import TypeAdapter

    return TypeAdapter(Document)


def _data(node: YamlNode) -> Any:
    """JSON data; a value that YAML misreads becomes a number that no field accepts."""
    if isinstance(node, Table):
        return {key: _data(entry.value) for key, entry in node.entries.items()}
    if isinstance(node, Items):
        return [_data(item) for item in node.items]
    if node.type == "text":
        return node.text
    if node.type == "integer" and _is_decimal(node.text):
        return int(node.text)
    return node.text.lower() in ("true", "yes", "on") if node.type == "boolean" else 0.5


def _long_forms(data: Any) -> Any:
    """Expand each command of ``image.run`` that is not a mapping to ``{command: TEXT}``."""
    image = data.get("image")
    commands = image.get("run") if isinstance(image, dict) else None
    if isinstance(commands, list):
        image["run"] = [one if isinstance(one, dict | list) else {"command": one} for one in commands]
    return data


def _as_written(tree: Table, path: KeyPath) -> KeyPath:
    """`path`, or the place of the short form that has no such part."""
    node, reached = deepest(tree, path)
    return reached if isinstance(node, Scalar) and path[:2] == ("image", "run") else path


def _is_decimal(text: str) -> bool:
    """YAML also reads 0644 (octal, 420), 1_000 and 3:00:00 (sexagesimal, 10800) as integers."""
    return bool(re.fullmatch(r"-?(?:0|[1-9][0-9]{0,17})", text))


def _explain(tree: Table, detail: ErrorDetails, found: Collector) -> None:
    """Report one pydantic error with the names of the file."""
    path: KeyPath = detail["loc"]
    node, reached = deepest(tree, path)
    error_type = detail["type"]
    if error_type == "missing":
        found.error(node.position, path, "is missing", _missing_hint(path))
    elif error_type == "unexpected_keyword_argument":
        above, _ = deepest(tree, path[:-1])
        assert isinstance(above, Table)  # noqa: S101 - only a mapping can have a key too many
        found.error(above.entries[str(path[-1])].key, path, "unknown key", _key_hint(path))
    elif isinstance(node, Scalar) and node.type not in ("text", "nothing") and reached == path:
        found.error(node.position, path, *_misread(node, error_type))
    elif error_type == "literal_error" and isinstance(node, Scalar):
        allowed = re.findall(r"'([^']*)'", str(detail.get("ctx", {}).get("expected", "")))
        meant = _ALIASES.get(node.text.lower(), node.text)
        found.error(node.position, path, f"{node.text!r} is not known", choices(meant, allowed))
    else:
        found.error(node.position, path, *_wrong_type(node, error_type, detail["msg"]))


def _misread(node: Scalar, error_type: str) -> tuple[str, str]:
    """YAML's reading of an unquoted scalar, and how to keep the text."""
    if error_type.startswith("int"):
        if node.type == "integer":
            return f"YAML reads {node.text} as {_became(node)}", "write plain decimal digits"
        return f"must be an integer, not {kind(node)}", ""
    if error_type in ("string_type", "path_type", "literal_error"):
        return f"must be text, but YAML reads {node.text} as {_became(node)}", f'quote it: "{node.text}"'
    return _wrong_type(node, error_type, "")


def _became(node: Scalar) -> str:
    """``the number 24.1`` for 24.10; only the type where the value equals the text."""
    import yaml

    try:
        value = yaml.safe_load(node.text)
    except (yaml.YAMLError, ValueError, OverflowError):
        return kind(node)
    said = str(value).lower() if isinstance(value, bool) else str(value)
    return kind(node) if said == node.text or node.type == "date" else f"the {node.type} {said}"


def _wrong_type(node: YamlNode, error_type: str, message: str) -> tuple[str, str]:
    wanted = {
        "string_type": ("text", ""),
        "path_type": ("a path", ""),
        "int_type": ("an integer", "write plain decimal digits, without quotes"),
        "tuple_type": ("a list", "write - ITEM lines, or [ITEM, ITEM]"),
        "dataclass_type": ("a mapping", "write `key: value` lines below it"),
        "dict_type": ("a mapping", "write NAME: VALUE lines below it"),
        "mapping_type": ("a mapping", "write NAME: VALUE lines below it"),
    }.get(error_type)
    if wanted is None:
        return message, ""
    return f"must be {wanted[0]}, not {kind(node)}", wanted[1]


def _missing_hint(path: KeyPath) -> str:
    return "a recipe needs at least `image: {base: NAME:TAG}`" if len(path) < 3 else f"add `{path[-1]}: ...`"


def _key_hint(path: KeyPath) -> str:
    """The place where an unknown key was probably meant to be."""
    name = str(path[-1])
    allowed = _fields(path[:-1])
    hint = choices(name, allowed)
    if nearest(name, allowed):
        return hint
    elsewhere = [place for place in places() if place[-1] == name]
    return f"{hint}; did you mean {key_text(elsewhere[0])}?" if elsewhere else hint


def _fields(path: KeyPath) -> tuple[str, ...]:
    """Keys that YAML allows at `path`."""
    wanted = tuple(part for part in path if not isinstance(part, int))
    names = tuple(YAML_NAMES.get(place[-1], place[-1]) for place in places() if place[:-1] == wanted)
    return (*names, "extends") if not path else names


def places() -> list[tuple[str, ...]]:
    """Every key of a recipe as a path without indices, read from the dataclasses."""

    def below(owner: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        places = []
        hints = typing.get_type_hints(owner)
        for known in dataclasses.fields(owner):
            place = (*path, known.name)
            places.append(place)
            for candidate in (hints[known.name], *typing.get_args(hints[known.name])):
                if dataclasses.is_dataclass(candidate):
                    places.extend(below(candidate, place))
        return places

    return below(Document, ())


_PLATFORM = {"enum": sorted([*PLATFORMS, *(name.removeprefix("linux/") for name in PLATFORMS)])}


def schema_json() -> str:
    """The schema, JSON Schema draft 2020-12."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(Document).json_schema()
    definitions = schema["$defs"]
    for name, described in _docstrings().items():
        for key, text in described.items():
            if name in definitions and key in definitions[name]["properties"]:
                definitions[name]["properties"][key]["description"] = text
    _schema_as_written(schema, definitions)
    _tidy(schema)
    return json.dumps(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "imgkit recipe",
            **schema,
            "description": "The content of an image, and facts about the system it is for.",
        },
        indent=2,
    )


def _schema_as_written(schema: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Adapt the schema where YAML differs from the model."""
    image = definitions["Image"]
    platforms = image["properties"].pop("platforms")["description"]
    image["properties"]["platform"] = {
        "description": platforms.removeprefix("``platform`` in YAML, "),
        "default": "amd64",
        "anyOf": [_PLATFORM, {"type": "array", "items": _PLATFORM, "minItems": 1, "uniqueItems": True}],
    }
    image["properties"]["constraints"] = {
        "description": image["properties"]["constraints"]["description"],
        "default": "keep",
        "anyOf": [
            {"enum": ["keep", "ignore"]},
            {
                "type": "object",
                "properties": {"drop": {"type": "array", "items": {"type": "string"}, "minItems": 1}},
                "required": ["drop"],
                "additionalProperties": False,
            },
        ],
    }
    del definitions["Constraints"]
    step = definitions["PipStep"]
    step["oneOf"] = [{"required": [kind]} for kind in ("packages", "requirements", "project")]
    step["dependentRequired"] = {"editable": ["project"]}
    for name in ("requirements", "project", "editable"):
        described = step["properties"][name]["description"]
        step["properties"][name] = {"type": "string", "description": described}
    folder = definitions["UvProject"]["properties"]["project"]
    definitions["UvProject"]["properties"]["project"] = {
        "type": "string",
        "description": folder["description"],
    }
    secret = definitions["BuildSecret"]
    secret["oneOf"] = [{"required": [kind]} for kind in ("env", "file")]
    for name in ("env", "file"):
        secret["properties"][name] = {
            "type": "string",
            "description": secret["properties"][name]["description"],
        }
    commands = image["properties"]["run"]
    commands["items"] = {"anyOf": [{"type": "string"}, commands["items"]]}
    definitions["Queue"]["properties"]["required"]["items"] = {"enum": list(JOB_FIELDS)}
    schema["properties"]["description"]["description"] = "One line about the recipe, for people."
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "The recipe to start from: a shipped recipe's name, or a path relative to this file.",
    }
    scheduler = definitions["SystemFacts"]["properties"]["scheduler"]
    scheduler["enum"] = list(systems.words())
    # The recipe that this one extends may state the missing keys.
    image.pop("required")
    schema.pop("required")
    schema["anyOf"] = [
        {"required": ["extends"]},
        {"required": ["image"], "properties": {"image": {"required": ["base"]}}},
    ]


def _docstrings() -> dict[str, dict[str, str]]:
    """Docstrings of fields, by class and field."""
    found: dict[str, dict[str, str]] = {}
    for module in (model, system):
        for owner in ast.parse(inspect.getsource(module)).body:
            if not isinstance(owner, ast.ClassDef):
                continue
            for before, after in zip(owner.body, owner.body[1:], strict=False):
                if (
                    isinstance(before, ast.AnnAssign)
                    and isinstance(before.target, ast.Name)
                    and isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                ):
                    text = inspect.cleandoc(str(after.value.value)).replace("\n", " ")
                    found.setdefault(owner.name, {})[before.target.id] = text
    return found


def _tidy(node: Any) -> None:
    """Remove pydantic's titles, which repeat the keys, and null, which no recipe may contain."""
    if isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        if {"type": "null"} in node.get("anyOf", ()):
            node.update(next(kind for kind in node.pop("anyOf") if kind != {"type": "null"}))
            node.pop("default", None)
        for below in node.values():
            _tidy(below)
    elif isinstance(node, list):
        for below in node:
            _tidy(below)
