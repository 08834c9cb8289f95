"""``dist-bench schema``: the JSON Schema of the saved file, generated from its dataclasses.

Unlisted fields are allowed: a later version may add some, and readers ignore them.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from imgkit_entrypoints import terminal
from imgkit_entrypoints.apps.bench import compute, nccl_log, node_state, record, soak, verdict
from imgkit_entrypoints.arguments import Parser

Schema = dict[str, Any]

_WHOLE: Schema = {"type": "integer", "minimum": 0}
_TEXT: Schema = {"type": "string"}
_SPREAD = ("p50_us", "p95_us", "p99_us", "cv", "times_us")
_LEAST: Mapping[str, Schema] = {
    **{name: {"minimum": 1} for name in ("ranks", "nodes", "ranks_per_node", "size_bytes", "iterations")},
    "time_us": {"exclusiveMinimum": 0},
}


def main(words: Sequence[str]) -> int:
    """Print the schema."""
    Parser(
        prog="dist-bench schema",
        description="Print the JSON Schema of the file that dist-bench --save writes.",
        allow_abbrev=False,
    ).parse_args(words)
    terminal.document(json.dumps(made(), indent=2) + "\n")
    return 0


def made() -> Schema:
    """The schema (draft 2020-12)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{record.TOOL} --save, schema {record.SCHEMA}",
        "description": "GBps is 1e9 B/s, Gbps 1e9 bit/s; fields: docs/bench-report.md of imgkit",
        **_object(
            {
                "schema": {"const": record.SCHEMA},
                "tool": {"const": record.TOOL},
                "version": _TEXT,
                "complete": {"type": "boolean"},
                "started": {**_TEXT, "format": "date-time"},
                "command": _array(_TEXT),
                "world": _of(record.World),
                "fingerprint": {"type": "object"},
                "line_rate_Gbps": {"type": ["number", "null"], "minimum": 0},
                "results": _array(_result()),
                "transport": _array(_TEXT),
                "verdict": _verdict(),
            },
            optional=("line_rate_Gbps", "transport", "verdict"),
        ),
    }


def _result() -> Schema:
    derived: Schema = {name: {"type": "number", "exclusiveMinimum": 0} for name in record.BAND}
    found = _of(record.Result, optional=(*_SPREAD, "batches_us", "wrong"), **derived)
    for name in ("times_us", "batches_us"):
        found["properties"][name] = _array({"type": "number", "exclusiveMinimum": 0})
    single = {"properties": {"timing": {"const": "iteration"}}}
    spread = {name: {"type": "number"} for name in _SPREAD if name != "times_us"}
    then = {"required": list(_SPREAD), "properties": {**spread, "times_us": {"minItems": 1}}}
    batched = {"required": ["batches_us"], "properties": {"batches_us": {"minItems": 1}}}
    return {**found, "if": single, "then": then, "else": batched}


def _verdict() -> Schema:
    parts = {
        "sentences": _TEXT,
        "traffic": _of(verdict.Traffic),
        "fits": _of(verdict.Fit, op=_TEXT, trusted={"type": "boolean"}),
        "late": _object({"rank": _WHOLE, "host": _TEXT, "late_us": {"type": "number"}}),
        "ports": _of(node_state.Count, host=_TEXT, port=_TEXT),
        "decided": _of(nccl_log.NcclChoice, op=_TEXT),
        "conditions": _of(node_state.NodeConditions),
        "overlap": _of(compute.OverlapTimes, hidden={"type": "number", "minimum": 0, "maximum": 1}),
        "timeline": _of(soak.Moment, optional=("wrong",)),
        "matrix_GBps": _row(),
        "rails_GBps": _array(_row()),
    }
    return _object({name: _array(part) for name, part in parts.items()}, optional=tuple(parts)[1:])


def _row() -> Schema:
    return _array({"type": "number", "minimum": 0})


def _of(kind: type, *, optional: tuple[str, ...] = (), **more: Schema) -> Schema:
    """The schema of an object with the fields of a dataclass and those in `more`."""
    hints = typing.get_type_hints(kind)
    fields = {
        one.name: {**_type(hints[one.name]), **_LEAST.get(one.name, {})} for one in dataclasses.fields(kind)
    }
    return _object({**more, **fields}, optional=optional)


def _object(properties: Mapping[str, Schema], *, optional: tuple[str, ...] = ()) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "required": required, "properties": dict(properties)}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _type(hint: Any) -> Schema:
    """The schema of a type hint; knows the hints that the file's dataclasses use."""
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return _of(typing.cast("type", hint))
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return _array(_type(arguments[0]))
    if origin is types.UnionType:  # every union here is "X or None"
        inner = _type(arguments[0])
        return {**inner, "type": [inner["type"], "null"]}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _type(arguments[1])}
    return {int: _WHOLE, float: {"type": "number", "minimum": 0}}.get(hint, _TEXT)
