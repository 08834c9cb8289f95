"""The verbs build, test, shell and push against an engine in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from sample_answers import answer_line
from typer.testing import CliRunner

from imgkit_builder.cli.app import build_app
from imgkit_entrypoints.errors import CheckFailed, ToolMissing, UsageError

NAME = "registry.test/base:1"
GPU_RECIPE = "system:\n  node: {gpus: 4}\n"


def imgkit(*args: str) -> Any:
    return CliRunner().invoke(build_app(), list(args))


@pytest.fixture
def buildable(fake: Any, container_says: Callable[[str, int], None]) -> None:
    """Base and result are there; containers have nothing of imgkit in them."""
    container_says(answer_line(), 0)
    fake.on_image(NAME, fake.image(identifier="sha256:" + "b" * 64, tags=[NAME]))
    fake.on_build(image=fake.image_id)
    fake.on_image(fake.image_id, fake.image())
    fake.has("small:latest")


def test_dry_run_needs_no_engine(recipe, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    result = imgkit("build", str(recipe.file), "--dry-run", "--json", "--base", "other:1", "--tag", "t:2")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["schema"], data["base"], data["tag"]) == (1, "other:1", "t:2")
    assert "FROM other:1\n" in data["dockerfile"]
    assert data["context_bytes"] > 0


def test_dry_run_refuses_unknown_platform(recipe):
    result = imgkit("build", str(recipe.file), "--dry-run", "--platform", "linux/s390x")
    assert isinstance(result.exception, UsageError)


def test_build_without_engine_is_missing(recipe, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    result = imgkit("build", str(recipe.file))
    assert isinstance(result.exception, ToolMissing)


@pytest.mark.usefixtures("buildable")
def test_failed_smoke_test_gives_no_name(fake, recipe):
    result = imgkit("build", str(recipe.file))
    assert isinstance(result.exception, CheckFailed)
    assert "fail  manifest" in str(result.exception)
    assert not fake.requests("/tag")


@pytest.mark.usefixtures("buildable")
def test_no_test_names_the_image(fake, recipe):
    result = imgkit("build", str(recipe.file), "--no-test", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["id"], data["tag"], data["checks"]) == (fake.image_id, "small:latest", [])
    assert fake.requests("/tag")


@pytest.mark.usefixtures("buildable")
def test_build_says_what_comes_next(recipe):
    last_line = imgkit("build", str(recipe.file), "--no-test", "--base", NAME).stdout.splitlines()[-1]
    assert last_line.startswith(f"next: imgkit sif {recipe.file}")


@pytest.mark.usefixtures("buildable")
def test_failed_check_exits_1_with_json():
    result = imgkit("test", "small:latest", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert (data["schema"], data["passed"]) == (1, False)


@pytest.mark.parametrize(("name", "advice"), [("no.sif", ""), ("x.tar", "imgkit verify")])
def test_test_of_no_image_is_refused(tmp_path, name, advice):
    (tmp_path / "x.tar").write_bytes(bytes(1024))
    result = imgkit("test", str(tmp_path / name))
    assert isinstance(result.exception, UsageError)
    assert advice in str(result.exception)


@pytest.mark.parametrize(("runtimes", "gpus"), [({"runc": {}}, False), ({"nvidia": {}}, True)])
def test_shell_gives_gpus_where_both_have_them(fake, recipe, runtimes, gpus):
    recipe.file.write_text(recipe.file.read_text() + GPU_RECIPE)
    fake.has("small:latest")
    fake.on("GET", "/info", fake.json({"Runtimes": runtimes}))
    result = imgkit("shell", str(recipe.file), "--dry-run")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("docker run --network none --shm-size=8g --ulimit memlock=-1 ")
    assert ("--gpus all" in result.stdout) is gpus


def test_shell_without_docker_program(fake, monkeypatch):
    fake.on_image("small", fake.image(tags=["small:latest"]))
    monkeypatch.setenv("PATH", os.devnull)
    result = imgkit("shell", "small")
    assert isinstance(result.exception, ToolMissing)


def test_push_prints_the_digest(fake):
    digest = "sha256:" + "d" * 64
    fake.on_image("small", fake.image(tags=["small:latest"]))
    fake.has("registry.test/x:1")
    fake.on_push(fake.events({"aux": {"Digest": digest}}))
    result = imgkit("push", "small", "registry.test/x:1")
    assert result.stdout == f"registry.test/x:1  {digest}\n"
    (tagged,) = fake.requests("/tag")
    assert (tagged.query["repo"], tagged.query["tag"]) == ("registry.test/x", "1")
