"""Which builder an engine gets, what an engine says about itself, and what refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from file_tree import write_program
from refusals import refused

from imgkit_builder.engine import builders
from imgkit_builder.engine.address import Endpoint
from imgkit_builder.engine.builders import ChosenBuilder
from imgkit_builder.engine.connection import EngineFacts, engine_facts
from imgkit_entrypoints.errors import ToolMissing, UsageError

CONTAINERD = {"Driver": "overlayfs", "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}
SECRETS = "mine.yaml:4"


def facts(product: str, host: str = "unix:///var/run/docker.sock", **info: Any) -> EngineFacts:
    component = {"docker": "Engine", "podman": "Podman Engine"}[product]
    version = {"Version": "4.3.1", "ApiVersion": "1.41", "Arch": "amd64", "Components": [{"Name": component}]}
    return engine_facts(Endpoint(host=host), version=version, info={"Driver": "overlay2", **info})


@pytest.fixture(autouse=True)
def _no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def test_store_names_the_graph_driver_or_containerd():
    assert facts("docker").store == "overlay2"
    assert facts("docker", **CONTAINERD).store == "containerd (overlayfs)"


def test_docker_builds_by_its_api():
    assert builders.choose(facts("docker")) == ChosenBuilder(name="classic", may_change=True)


@pytest.mark.parametrize(
    ("host", "reason"),
    [("unix:///s", "'podman' is not on PATH"), ("tcp://far:2375", "another machine")],
)
def test_podman_out_of_reach_builds_by_its_api(host, reason):
    builder = builders.choose(facts("podman", host))
    assert (builder.name, reason in builder.note) == ("classic", True)


@pytest.mark.parametrize(
    ("product", "requested", "secrets", "kind", "message", "hint"),
    [
        ("podman", "podman", "", ToolMissing, "'podman' is not on PATH", "podman"),
        ("docker", "podman", "", UsageError, "is Docker", "--builder auto"),
        ("podman", "buildx", "", UsageError, "no BuildKit", "--builder podman"),
        ("docker", "buildx", "", ToolMissing, "'docker' is not on PATH", "docker-buildx"),
        ("docker", "classic", SECRETS, UsageError, "they would stay in the image", "use --builder buildx"),
        ("podman", "auto", SECRETS, UsageError, "they would stay in the image", "use --builder podman"),
    ],
)
def test_builder_that_cannot_build_is_refused(product, requested, secrets, kind, message, hint):
    with refused(kind, message, hint=hint) as caught:
        builders.choose(facts(product), requested, secrets_at=secrets)
    assert not secrets or (caught.value.where, caught.value.hint) == (secrets, hint)


def test_docker_without_buildx_refuses_secrets(tmp_path):
    write_program(tmp_path / "docker", "exit 1")
    with refused(ToolMissing, "only with buildx: the docker program has no buildx", where=SECRETS) as caught:
        builders.choose(facts("docker"), secrets_at=SECRETS)
    assert "classic" not in str(caught.value)


def test_secrets_choose_buildx_for_docker(tmp_path):
    write_program(tmp_path / "docker", "exit 0")
    assert builders.choose(facts("docker"), secrets_at=SECRETS).name == "buildx"
    assert builders.choose(facts("docker")).name == "classic"
