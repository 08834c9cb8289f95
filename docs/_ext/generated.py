"""Reference pages that are generated from the code: every verb's help, recipe keys, JSON schemas."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Schema = Mapping[str, Any]

WIDTH = 88
"""Columns of a help text: as wide as the site shows without scrolling."""


def write(folder: Path) -> None:
    """Write all generated pages into `folder`, and the schemas into `folder`/schemas."""
    recipe = recipe_schema()
    pages = {
        "verbs.md": verbs_page(),
        "commands.md": commands_page(),
        "recipe-keys.md": keys_page(recipe),
        "json-objects.md": json_page(),
        "known-issues.md": known_issues_page(),
        "schemas/recipe.schema.json": json.dumps(recipe, indent=2) + "\n",
    }
    for name, text in pages.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        # An unchanged page keeps its time, and Sphinx does not read it again.
        if not place.exists() or place.read_text(encoding="utf-8") != text:
            place.write_text(text, encoding="utf-8")


def json_page() -> str:
    """One object per verb with ``--json``, as record_json.py has recorded them."""
    text = Path(__file__).with_name("json_examples.json").read_text(encoding="utf-8")
    parts = [
        "# JSON: one object per verb",
        "Recorded from real commands and shortened: lists have their first item, digests and long texts end "
        "in `...`. [JSON output](../json.md) explains the fields.",
    ]
    for command, example in json.loads(text).items():
        parts += [f"## {command}", f"```json\n{json.dumps(example, indent=1)}\n```"]
    return "\n\n".join(parts) + "\n"


def known_issues_page() -> str:
    """Return a section for each known issue that imgkit ships."""
    from imgkit_entrypoints.known_issues import SHIPPED_FILE

    parts = [
        "# Known issues",
        "This page is generated from the rows that imgkit ships. `dist-doctor --known-issues` says on a node "
        "which of them match.",
    ]
    for row in json.loads(SHIPPED_FILE.read_text(encoding="utf-8")):
        settings = ", ".join(f"`{name}={value}`" for name, value in row.get("env", {}).items())
        lines = {
            "When": " and ".join(f"`{condition}`" for condition in row["when"]),
            "Effect": f"{row['effect']} {settings}".strip(),
            "What to do": row.get("hint", ""),
            "Source": row.get("source", ""),
        }
        listed = "\n".join(f"* {name}: {text}" for name, text in lines.items() if text)
        parts += [f"## {row['id']}", f"{row['message']}.", listed]
    return "\n\n".join(parts) + "\n"


def recipe_schema() -> Schema:
    """The JSON Schema that ``imgkit check --schema`` prints."""
    from imgkit_builder.recipe.schema import schema_json

    schema: Schema = json.loads(schema_json())
    return schema


def verbs_page() -> str:
    """The help of ``imgkit`` and of each of its verbs."""
    import typer.main

    from imgkit_builder.cli.app import VERBS, build_app, verb_command

    group = typer.main.get_command(build_app())
    parts = [
        "# imgkit: every verb",
        "This page is generated from the code. `imgkit VERB --help` prints the same text.",
        _block(_click_help(group, "imgkit", None)),
    ]
    for verb in VERBS:
        command = verb_command(verb)
        parts += [f"## imgkit {verb}", _block(_click_help(command, verb, group))]
        for name, part in getattr(command, "commands", {}).items():
            parts += [f"### imgkit {verb} {name}", _block(_click_help(part, f"{verb} {name}", group))]
    return "\n\n".join(parts) + "\n"


def _click_help(command: Any, name: str, group: Any) -> str:
    # Typer may bring its own copy of click: the context class is the command's.
    settings = {"terminal_width": WIDTH, "max_content_width": WIDTH}
    parent = group.context_class(group, info_name="imgkit") if group is not None else None
    with command.context_class(command, info_name=name, parent=parent, **settings) as context:
        text: str = command.get_help(context)
    return text


def commands_page() -> str:
    """The help of each ``dist-*`` command of the image."""
    from imgkit_entrypoints.cli.commands import COMMANDS

    parts = [
        "# dist-*: the commands in the image",
        "This page is generated from the code. `dist-NAME --help` prints the same text. "
        "Every command that starts a run is explained in [What dist-* commands do](../launch.md).",
    ]
    for command in COMMANDS:
        parts += [f"## {command.name}", _block(_dist_help(command.name))]
        for verb, module in command.verbs.items():
            parts += [f"### {command.name} {verb}", _block(_verb_help(module))]
    return "\n\n".join(parts) + "\n"


def _dist_help(name: str) -> str:
    from imgkit_entrypoints.cli import main

    with _help_text() as text:
        main.main([name, "--help"])
    return text.getvalue()


def _verb_help(module: str) -> str:
    with _help_text() as text:
        importlib.import_module(module).main(["--help"])
    return text.getvalue()


@contextlib.contextmanager
def _help_text() -> Iterator[io.StringIO]:
    """Collect what a parser prints before it exits, formatted for `WIDTH` columns."""
    text, before = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(WIDTH + 2)  # argparse leaves two columns free
    try:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            yield text
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)


def keys_page(schema: Schema) -> str:
    """Tables of every key that a recipe may hold: type, default and meaning."""
    parts = [
        "# Recipe keys",
        "This page is generated from the JSON Schema that `imgkit check --schema` prints. "
        "[Recipes](../recipes.md) explains the keys and shows all of them in one file.",
        "## Top level",
        _keys_table(schema, "", schema),
    ]
    for key in ("image", "system"):
        forms = (_resolve(one, schema) for one in _forms(schema["properties"][key]))
        node = next(form for form in forms if "properties" in form)
        parts.append(f"## {key}")
        parts.append(_keys_table(node, "", schema))
        parts += list(_below(node, key, schema))
    return "\n\n".join(part for part in parts if part) + "\n"


def _below(node: Schema, path: str, schema: Schema) -> Iterator[str]:
    """A section for every mapping, and every list or mapping of mappings, below `node`."""
    for name, value in node["properties"].items():
        # A list may allow a short form, a text, beside the mapping.
        inner = value.get("items") or value.get("additionalProperties") or value
        forms = (_resolve(one, schema) for one in ((value,) if inner is value else _forms(inner)))
        item = next((form for form in forms if "properties" in form), None)
        if item is None:
            continue
        listed = " (each item)" if inner is not value else ""
        yield f"### {path}.{name}{listed}"
        yield str(item.get("description", "")).replace("``", "`")
        yield _keys_table(item, "", schema)


def _forms(value: Schema) -> tuple[Schema, ...]:
    return tuple(value.get("anyOf", (value,)))


def _keys_table(node: Schema, prefix: str, schema: Schema) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, value in node["properties"].items():
        meaning = value.get("description") or _resolve(value, schema).get("description", "")
        rows.append(
            f"| `{prefix}{name}` | {_type(value, schema)} | {_default(value)} | {_cell(meaning)} |",
        )
    return "\n".join(rows)


def _resolve(value: Schema, schema: Schema) -> Schema:
    reference = value.get("$ref")
    if reference is None and len(value.get("allOf", ())) == 1:
        reference = value["allOf"][0].get("$ref")
    if reference is None:
        return value
    found: Schema = schema["$defs"][str(reference).rpartition("/")[2]]
    return found


def _type(value: Schema, schema: Schema) -> str:
    """The type of a key in a reader's words."""
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_type(choice, schema) for choice in value["anyOf"]))
    resolved = _resolve(value, schema)
    kind = resolved.get("type")
    if kind == "array":
        forms = [_resolve(form, schema) for form in _forms(resolved["items"])]
        kinds = ("mappings" if "properties" in form else _type(form, schema) for form in forms)
        return f"list of {' or '.join(dict.fromkeys(kinds))}"
    if kind == "object":
        inner = _resolve(resolved.get("additionalProperties") or {}, schema)
        of = "mappings" if "properties" in inner else "text"
        return "mapping" if "properties" in resolved else f"mapping of {of}"
    names = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
    return "path" if resolved.get("format") == "path" else names[str(kind)]


def _default(value: Schema) -> str:
    default = value.get("default")
    if default in (None, "", [], {}) or isinstance(default, dict):
        return ""
    return " ".join(f"`{item}`" for item in default) if isinstance(default, list) else f"`{default}`"


def _cell(text: str) -> str:
    line = re.sub(r"\s+", " ", text.replace("``", "`").replace("|", "\\|"))
    return line[:1].upper() + line[1:]


def _block(text: str) -> str:
    return f"```text\n{text.strip()}\n```"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
