"""The exported JSON Schema, by the validator that editors and CI use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from imgkit_builder.recipe import schema
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.system_files import is_path
from imgkit_entrypoints.errors import UsageError
from imgkit_recipes import FOLDER

SCHEMA: dict[str, Any] = json.loads(schema.schema_json())
MALFORMED = Path(__file__).parent / "malformed"

NOT_FOR_A_SCHEMA = ("base-", "extends-", "env-", "binds", "copy-", "labels-own", "run-", "workdir", "apt-bad")
"""Rules over the text of a value, files and `extends`: `imgkit check` tells them."""


def accepts(data: Any) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(data)


def test_schema_is_itself_valid():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_check_jsonschema_accepts_the_shipped_recipes(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(schema.schema_json())
    argv = [sys.executable, "-m", "check_jsonschema", "--schemafile", str(file)]
    process = subprocess.run([*argv, *map(str, FOLDER.glob("*.yaml"))], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout
    bad = tmp_path / "bad.yaml"
    bad.write_text("image: {base: 'python:3', apts: [git]}\n")
    process = subprocess.run([*argv, str(bad)], capture_output=True, text=True)
    assert process.returncode == 1
    assert "apts" in process.stdout


@pytest.mark.parametrize(
    "recipe",
    [
        "image: {base: 'python:3', platform: [amd64, linux/arm64]}",
        "image: {base: 'python:3', constraints: {drop: [numpy]}}",
        "extends: mn5",
        "{extends: mn5, image: {pip: [{packages: [a]}, {requirements: r.txt}]}}",
        "{extends: mn5, image: {run: [make, {command: make, after: copy}]}}",
        "{extends: mn5, image: {pip: [{project: ., editable: /workspace/mine}]}}",
        "{extends: mn5, image: {secrets: [{id: x, env: X}, {id: y, file: ~/y}]}}",
        "{image: {base: 'python:3'}, system: {node: {gpus: 4, cpus: 8}}}",
    ],
)
def test_schema_accepts_good_recipe(recipe):
    assert accepts(yaml.safe_load(recipe))


@pytest.mark.parametrize(
    "recipe",
    [
        "{}",
        "image: {}",
        "image: {base: 'python:3', platforms: [linux/amd64]}",
        "image: {base: 'python:3', platform: x86_64}",
        "image: {base: 'python:3', constraints: drop}",
        "image: {base: 'python:3', constraints: {policy: keep}}",
        "image: {base: 'python:3', pip: [{packages: [a], requirements: r.txt}]}",
        "image: {base: 24.1}",
        "{extends: mn5, image: {secrets: [{id: x, env: X, file: y}]}}",
        "image: {base: 'python:3', pip: [{packages: [a], editable: /x}]}",
        "image: {base: 'python:3', run: [{after: copy}]}",
        "{extends: mn5, foo: 1}",
        "{extends: mn5, system: {node: {gpu: 4}}}",
        "{extends: mn5, system: {node: {cpus: null}}}",
        "{extends: mn5, system: {queue: {required: [acount]}}}",
    ],
)
def test_schema_refuses_bad_recipe(recipe):
    assert not accepts(yaml.safe_load(recipe))


@pytest.mark.parametrize("case", sorted(MALFORMED.glob("*.yaml")), ids=lambda case: case.stem)
def test_schema_refuses_what_has_a_wrong_type(case):
    try:
        data = yaml.safe_load(case.read_text())
    except (yaml.YAMLError, RecursionError):
        return
    try:
        load(case)
    except UsageError as error:
        wrong = [message for message in ("unknown key", "must be ", "is missing") if message in str(error)]
        if wrong and not case.stem.startswith(NOT_FOR_A_SCHEMA):
            assert not accepts(data)


def test_every_field_is_described():
    for name in ("Image", "PipStep", "CopyStep", "RunCommand", "BuildSecret"):
        for field, schema_of_field in SCHEMA["$defs"][name]["properties"].items():
            assert schema_of_field.get("description"), f"{name}.{field}"


def test_path_or_name_is_told_apart():
    assert [is_path(ref) for ref in ("mn5", "./mn5", "mn5.yaml", "a.yml", "mn5:latest")] == [
        False,
        True,
        True,
        True,
        False,
    ]
