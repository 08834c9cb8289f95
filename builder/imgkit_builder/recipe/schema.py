"""The keys of a recipe as a list of paths, and as the JSON Schema for editors."""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import typing
from collections.abc import Iterator
from typing import Any

from imgkit_builder.recipe import systems
from imgkit_builder.recipe.model import Document
from imgkit_builder.recipe.problems import ANY, KeyPath
from imgkit_builder.recipe.validation import adapter


def key_paths(model: Any = Document, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every key below `model` as a path without indices; `ANY` stands for a name of the user's."""
    hints = typing.get_type_hints(model)
    for field in dataclasses.fields(model):
        key_path = (*path, field.metadata.get("alias", field.name))
        yield key_path
        hint = hints[field.name]
        is_named = typing.get_origin(hint) is collections.abc.Mapping
        for candidate in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(candidate):
                yield from key_paths(candidate, (*key_path, ANY) if is_named else key_path)


def allowed_keys(path: KeyPath, model: Any = Document) -> list[str]:
    """Return the keys that `model` allows where `path` states one."""
    above = [part for part in path[:-1] if isinstance(part, str)]
    return [keys[-1] for keys in key_paths(model) if _fits(above, keys[:-1])]


def _fits(path: list[str], pattern: tuple[str, ...]) -> bool:
    return len(path) == len(pattern) and all(
        part == expected or expected == ANY for part, expected in zip(path, pattern, strict=True)
    )


def schema_json() -> str:
    """Return the JSON Schema of recipe files, draft 2020-12."""
    schema = _tidy(adapter(Document).json_schema())
    definitions = schema["$defs"]
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "The recipe to start from: a shipped recipe's name, or a path relative to this file.",
    }
    schema["properties"]["system"] = {
        "description": "The name of a system, or a path relative to this file; or keys, with `extends` for a "
        "system to start from. It replaces that of a recipe which this one extends if it names one.",
        "anyOf": [{"type": "string"}, {"$ref": "#/$defs/SystemFacts"}],
    }
    facts = definitions["SystemFacts"]["properties"]
    facts["extends"] = {
        "type": "string",
        "description": "The system to start from: a name of `imgkit list --systems`, or a path.",
    }
    facts["scheduler"]["enum"] = list(systems.names())
    # The recipe that this one extends may state the missing keys.
    del definitions["Image"]["required"], schema["required"]
    schema["anyOf"] = [
        {"required": ["extends"]},
        {"required": ["image"], "properties": {"image": {"required": ["base"]}}},
    ]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "imgkit recipe"}
    return json.dumps({**head, **schema}, indent=2)


def _tidy(node: Any) -> Any:
    """Leave out what says nothing in YAML: pydantic's titles, and null, which a recipe cannot state."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    if isinstance(node.get("title"), str):
        node = {key: value for key, value in node.items() if key != "title"}
    if node.get("default", ...) is None:
        node = {key: value for key, value in node.items() if key != "default"}
    if isinstance(node.get("description"), str):
        node = {**node, "description": node["description"].replace("\n", " ")}
    node = {key: _tidy(value) for key, value in node.items()}
    forms = [form for form in node.get("anyOf", ()) if form != {"type": "null"}]
    if len(forms) == 1:
        del node["anyOf"]
        node.update(forms[0])
    return node
