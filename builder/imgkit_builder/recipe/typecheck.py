"""Types of a recipe: the annotations of the model check a tree, and become the JSON Schema for editors."""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from imgkit_builder.recipe import model, systems
from imgkit_builder.recipe.check import Checked
from imgkit_builder.recipe.model import Image
from imgkit_builder.recipe.problems import (
    YAML_NAMES,
    Collector,
    KeyPath,
    choices,
    key_text,
    nearest,
)
from imgkit_builder.recipe.rules import ANY, JOB_FIELDS, PLATFORMS, matches
from imgkit_builder.recipe.yaml_tree import Items, Scalar, Table, YamlNode, deepest, kind
from imgkit_entrypoints import json_text, system
from imgkit_entrypoints.json_text import Fault
from imgkit_entrypoints.system import SystemFacts

_ALIASES = {
    "apptainer": "singularity",
    "enroot": "pyxis",
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
    """The content of a recipe file."""

    description: str = ""
    image: Image
    system: SystemFacts = field(default_factory=SystemFacts)


def typecheck(tree: Table, bad: Checked, found: Collector, *, whole: bool) -> Document | None:
    """The values of `tree`; None after a problem.

    Places in `bad` have a reported problem. If `whole` is false, a parent could not be read: it may state the
    keys that are missing here.
    """
    document: Document | None
    document, faults = json_text.checked(Document, _long_forms(_data(tree)), closed=True)
    for fault in faults:
        path = _as_written(tree, fault.path)
        if fault.kind == "missing" and not whole:
            continue
        if fault.kind == "rule" and any(other[: len(path)] == path for other in bad):
            continue  # the dataclass repeats a check that a rule has reported
        if path not in bad:
            _explain(tree, path, fault, found)
    return document


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


_START = (
    "an image keeps the start program of its base; a job names its command: imgkit submit RECIPE -- COMMAND"
)
_STAGES = "a recipe has one stage"
_OTHER_STAGE = "build what is compiled in an image of its own, and copy its files, or compile it in `run`"
_OF_DOCKERFILES: Mapping[KeyPath, tuple[str, str]] = {
    ("image", "entrypoint"): (
        _START,
        "set up the environment in `env`, or in a script that the command starts",
    ),
    ("image", "cmd"): (_START, "remove it"),
    ("image", "stages"): (_STAGES, _OTHER_STAGE),
    ("image", "from"): (_STAGES, f"the image to start from is `base`; {_OTHER_STAGE}"),
    ("image", "user"): ("the steps run as root, and containers have the base's user", "remove it"),
    ("image", "expose"): ("jobs use the node's own network: no port needs to be opened", "remove it"),
    ("image", "volumes"): (
        "folders are mounted when a job starts",
        "system.runtime.binds, or --bind of the job",
    ),
}
"""Keys for what a Dockerfile can do and a recipe cannot, with the reason and the way that works."""


_NOT_STARTED: Mapping[str, str] = {
    "shifter": "it has not been tried with one",
    "edf": "it does not write the file of srun --environment",
    "sarus": "it does not write the file of srun --edf",
}
"""Container runtimes of clusters that no recipe can name, and why."""
_STARTED = (
    "singularity, pyxis, or docker with command: podman, where the site has them; or a job without a "
    "container: imgkit submit --runtime host"
)


def _explain(tree: Table, path: KeyPath, fault: Fault, found: Collector) -> None:
    """Report one fault with the names of the file."""
    node, reached = deepest(tree, path)
    if fault.kind == "missing":
        found.error(node.position, path, "is missing", _missing_hint(path))
    elif fault.kind == "unknown":
        above, _ = deepest(tree, path[:-1])
        assert isinstance(above, Table)  # noqa: S101 - only a mapping can have a key too many
        what, hint = _OF_DOCKERFILES.get(
            (*path[:-1], str(path[-1]).lower()), ("unknown key", _key_hint(path))
        )
        found.error(above.entries[str(path[-1])].key, path, what, hint)
    elif fault.kind == "rule":
        found.error(node.position, path, str(fault.expected))
    elif isinstance(node, Scalar) and node.type not in ("text", "nothing") and reached == path:
        found.error(node.position, path, *_misread(node, fault))
    elif fault.kind == "choice" and isinstance(node, Scalar):
        if path == ("system", "runtime", "kind") and (why := _NOT_STARTED.get(node.text.lower())):
            found.error(
                node.position, path, f"imgkit does not start containers by {node.text}: {why}", _STARTED
            )
            return
        meant = _ALIASES.get(node.text.lower(), node.text)
        found.error(node.position, path, f"{node.text!r} is not known", choices(meant, fault.expected))
    else:
        found.error(node.position, path, *_wrong_type(node, fault))


def _misread(node: Scalar, fault: Fault) -> tuple[str, str]:
    """YAML's reading of an unquoted scalar, and how to keep the text."""
    if fault.expected is int:
        if node.type == "integer":
            return f"YAML reads {node.text} as {_became(node)}", "write plain decimal digits"
        return f"must be an integer, not {kind(node)}", ""
    if fault.kind == "choice" or fault.expected in (str, Path):
        return f"must be text, but YAML reads {node.text} as {_became(node)}", f'quote it: "{node.text}"'
    return _wrong_type(node, fault)


def _became(node: Scalar) -> str:
    """``the number 24.1`` for 24.10; only the type where the value equals the text."""
    import yaml

    try:
        value = yaml.safe_load(node.text)
    except (yaml.YAMLError, ValueError, OverflowError):
        return kind(node)
    said = str(value).lower() if isinstance(value, bool) else str(value)
    return kind(node) if said == node.text or node.type == "date" else f"the {node.type} {said}"


def _wrong_type(node: YamlNode, fault: Fault) -> tuple[str, str]:
    if fault.kind == "choice":
        return f"must be text, not {kind(node)}", choices("", fault.expected)
    expected = typing.get_origin(fault.expected) or fault.expected
    wanted, hint = _FORMS.get(expected, ("a mapping", "write `key: value` lines below it"))
    return f"must be {wanted}, not {kind(node)}", hint


_FORMS: Mapping[Any, tuple[str, str]] = {
    str: ("text", ""),
    Path: ("a path", ""),
    int: ("an integer", "write plain decimal digits, without quotes"),
    tuple: ("a list", "write - ITEM lines, or [ITEM, ITEM]"),
    collections.abc.Mapping: ("a mapping", "write NAME: VALUE lines below it"),
}
"""Type of a field -> its form in YAML; other types are dataclasses."""


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
    names = tuple(YAML_NAMES.get(place[-1], place[-1]) for place in places() if matches(wanted, place[:-1]))
    return (*names, "extends") if path in ((), ("system",)) else names


def places() -> list[tuple[str, ...]]:
    """Every key of a recipe as a path without indices, read from the dataclasses; `ANY`: any name."""

    def below(owner: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        places = []
        hints = typing.get_type_hints(owner)
        for known in dataclasses.fields(owner):
            place = (*path, known.name)
            places.append(place)
            for candidate in (hints[known.name], *typing.get_args(hints[known.name])):
                if dataclasses.is_dataclass(candidate):
                    is_named = typing.get_origin(hints[known.name]) is collections.abc.Mapping
                    places.extend(below(candidate, (*place, ANY) if is_named else place))
        return places

    return below(Document, ())


_PLATFORM = {"enum": sorted([*PLATFORMS, *(name.removeprefix("linux/") for name in PLATFORMS)])}


def schema_json() -> str:
    """The schema, JSON Schema draft 2020-12."""
    definitions: dict[str, Any] = {}
    schema = _object_schema(Document, definitions, _docstrings())
    _schema_as_written(schema, definitions)
    return json.dumps(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "imgkit recipe",
            "$defs": dict(sorted(definitions.items())),
            **schema,
            "description": "The content of an image, and facts about the system it is for.",
        },
        indent=2,
    )


def _object_schema(
    owner: Any, definitions: dict[str, Any], described: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """The schema of the dataclass `owner`; those that it uses go into `definitions`."""
    hints, properties, required = typing.get_type_hints(owner), {}, []
    for known in dataclasses.fields(owner):
        about = _value_schema(hints[known.name], definitions, described)
        if known.default is not dataclasses.MISSING and known.default is not None:
            plain = dataclasses.is_dataclass(known.default) and not isinstance(known.default, type)
            about["default"] = dataclasses.asdict(known.default) if plain else known.default
        elif known.default_factory is dataclasses.MISSING and known.default is dataclasses.MISSING:
            required.append(known.name)
        if text := described.get(owner.__name__, {}).get(known.name):
            about["description"] = text
        properties[known.name] = about
    return {
        "additionalProperties": False,
        "description": inspect.cleandoc(owner.__doc__ or ""),
        "properties": properties,
        **({"required": required} if required else {}),
        "type": "object",
    }


def _value_schema(
    hint: Any, definitions: dict[str, Any], described: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        name = getattr(hint, "__name__", "")
        if name not in definitions:
            definitions[name] = _object_schema(hint, definitions, described)
        return {"$ref": f"#/$defs/{name}"}
    if type(None) in inner:
        return _value_schema(inner[0], definitions, described)
    if origin is Literal:
        return {"enum": list(inner), "type": "string"}
    if origin is tuple:
        return {"items": _value_schema(inner[0], definitions, described), "type": "array"}
    if origin is collections.abc.Mapping:
        return {"additionalProperties": _value_schema(inner[1], definitions, described), "type": "object"}
    return {str: {"type": "string"}, Path: {"format": "path", "type": "string"}, int: {"type": "integer"}}[
        hint
    ]


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
    schema["properties"]["system"] = {
        "description": "The name of a system, or a path relative to this file; or keys, with `extends` for a "
        "system to start from. It replaces that of a recipe which this one extends if it names one.",
        "anyOf": [{"type": "string"}, {"$ref": "#/$defs/SystemFacts"}],
    }
    definitions["SystemFacts"]["properties"]["extends"] = {
        "type": "string",
        "description": "The system to start from: a name of `imgkit list --systems`, or a path.",
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
