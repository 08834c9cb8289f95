"""The JSON Schema of recipe files, for editors, generated from the dataclasses and their docstrings."""

from __future__ import annotations

import ast
import inspect
import json
from typing import Any

from imgkit_builder.recipe import model, systems
from imgkit_builder.recipe.rules import JOB_FIELDS, PLATFORMS
from imgkit_builder.recipe.typecheck import Document
from imgkit_entrypoints import system

_PLATFORM = {"enum": sorted([*PLATFORMS, *(name.removeprefix("linux/") for name in PLATFORMS)])}


def to_json() -> str:
    """The schema, JSON Schema draft 2020-12."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(Document).json_schema()
    definitions = schema["$defs"]
    for name, described in _docstrings().items():
        for field, text in described.items():
            if name in definitions and field in definitions[name]["properties"]:
                definitions[name]["properties"][field]["description"] = text
    _as_written(schema, definitions)
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


def _as_written(schema: dict[str, Any], definitions: dict[str, Any]) -> None:
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
