"""The keys of a recipe as the JSON Schema for editors."""

from __future__ import annotations

import json
from typing import Any

from imgkit_builder.recipe import systems
from imgkit_builder.recipe.model import Document
from imgkit_builder.recipe.validation import adapter


def schema_json() -> str:
    """Return the JSON Schema of recipe files, draft 2020-12."""
    schema = _simplify(adapter(Document).json_schema())
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
    facts["scheduler"]["enum"] = list(systems.scheduler_names())
    # The recipe that this one extends may state the missing keys.
    del definitions["Image"]["required"], schema["required"]
    schema["anyOf"] = [
        {"required": ["extends"]},
        {"required": ["image"], "properties": {"image": {"required": ["base"]}}},
    ]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "imgkit recipe"}
    return json.dumps({**head, **schema}, indent=2)


def _simplify(node: Any) -> Any:
    """Return a part of pydantic's schema without what is of no use for a YAML file.

    Left out are pydantic's titles, which repeat the keys, and null, which a recipe cannot state.
    """
    if isinstance(node, list):
        return [_simplify(item) for item in node]
    if not isinstance(node, dict):
        return node
    simplified = {key: _simplify(value) for key, value in node.items()}
    # Only texts: `title` and `description` may also be keys of a recipe, and their values are schemas then.
    if isinstance(simplified.get("title"), str):
        del simplified["title"]
    if isinstance(simplified.get("description"), str):
        simplified["description"] = simplified["description"].replace("\n", " ")
    if "default" in simplified and simplified["default"] is None:
        del simplified["default"]
    # "text or null" becomes "text".
    forms = [form for form in simplified.get("anyOf", ()) if form != {"type": "null"}]
    if len(forms) == 1:
        del simplified["anyOf"]
        simplified.update(forms[0])
    return simplified
