"""Describe the keys of a recipe as a JSON Schema, for editors."""

from __future__ import annotations

import json
from typing import Any

from imgkit_builder.recipe import systems
from imgkit_builder.recipe.model import Document
from imgkit_builder.recipe.validation import adapter


def schema_json() -> str:
    """Return the JSON Schema (draft 2020-12) with which editors check and complete recipe files."""
    schema = _simplify(adapter(Document).json_schema())
    _add_references(schema)
    _make_keys_optional(schema)
    schema["$defs"]["SystemFacts"]["properties"]["scheduler"]["enum"] = list(systems.scheduler_names())
    header = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "imgkit recipe"}
    return json.dumps({**header, **schema}, indent=2)


def _add_references(schema: dict[str, Any]) -> None:
    """Add the keys that refer to another recipe or system: ``extends``, and ``system`` with a name.

    They are resolved before the check of the model, so the model has no fields for them.
    """
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "The recipe to start from: a shipped recipe's name, or a path relative to this file.",
    }
    schema["properties"]["system"] = {
        "description": "The name of a system, or a path relative to this file; or keys, with `extends` for a "
        "system to start from. It replaces that of a recipe which this one extends if it names one.",
        "anyOf": [{"type": "string"}, {"$ref": "#/$defs/SystemFacts"}],
    }
    schema["$defs"]["SystemFacts"]["properties"]["extends"] = {
        "type": "string",
        "description": "The system to start from: a name of `imgkit list --systems`, or a path.",
    }


def _make_keys_optional(schema: dict[str, Any]) -> None:
    """Require the keys ``image`` and ``image.base`` only in a recipe without ``extends``.

    In any other recipe, they may come from the parent recipe.
    """
    del schema["required"]
    del schema["$defs"]["Image"]["required"]
    schema["anyOf"] = [
        {"required": ["extends"]},
        {"required": ["image"], "properties": {"image": {"required": ["base"]}}},
    ]


def _simplify(node: Any) -> Any:
    """Return a copy of `node`, a part of pydantic's schema, without entries that are useless for a YAML file.

    pydantic's titles only repeat the keys. The type null is left out, because a recipe cannot contain it.
    """
    if isinstance(node, list):
        return [_simplify(item) for item in node]
    if not isinstance(node, dict):
        return node
    simplified = {key: _simplify(value) for key, value in node.items()}
    # Remove only titles that are text. If a recipe has a key called `title` or `description`, its value here
    # is a schema.
    if isinstance(simplified.get("title"), str):
        del simplified["title"]
    if isinstance(simplified.get("description"), str):
        simplified["description"] = simplified["description"].replace("\n", " ")
    if "default" in simplified and simplified["default"] is None:
        del simplified["default"]
    # "text or null" becomes "text". No key of a recipe has the type "A or B or null".
    forms = [form for form in simplified.get("anyOf", ()) if form != {"type": "null"}]
    if len(forms) == 1:
        del simplified["anyOf"]
        simplified.update(forms[0])
    return simplified
