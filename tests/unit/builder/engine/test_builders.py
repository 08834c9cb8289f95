"""Which builder an engine gets, what an engine says about itself, and what refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from file_tree import write_program

from imgkit_builder.engine import builders
from imgkit_builder.engine.address import Endpoint
from imgkit_builder.engine.connection import EngineFacts, engine_facts
from imgkit_entrypoints.errors import ToolMissing, UsageError

HERE = Endpoint(host="unix:///var/run/docker.sock")
DOCKER = {"Version": "27.1.0", "ApiVersion": "1.46", "Arch": "amd64", "Components": [{"Name": "Engine"}]}
PODMAN = {
    "Version": "4.3.1",
    "ApiVersion": "1.41",
    "Arch": "amd64",
    "Components": [{"Name": "Podman Engine"}],
}


def facts(version: dict[str, Any], endpoint: Endpoint = HERE, **info: Any) -> EngineFacts:
    return engine_facts(endpoint, version=version, info={"Driver": "overlay2", **info})


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program is on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))


def test_store_names_the_graph_driver() -> None:
    assert facts(DOCKER).store == "overlay2"


def test_store_names_containerd() -> None:
    status = [["driver-type", "io.containerd.snapshotter.v1"]]
    assert facts(DOCKER, Driver="overlayfs", DriverStatus=status).store == "containerd (overlayfs)"


def test_docker_builds_by_its_api(bare: None) -> None:
    assert builders.choose(facts(DOCKER)) == builders.Choice(name="classic", may_change=True)


def test_podman_without_its_program_builds_by_its_api(bare: None) -> None:
    builder = builders.choose(facts(PODMAN))
    assert builder.name == "classic"
    assert "'podman' is not on PATH" in builder.note


def test_podman_of_another_machine_builds_by_its_api() -> None:
    builder = builders.choose(facts(PODMAN, Endpoint(host="tcp://far:2375")))
    assert (builder.name, "another machine" in builder.note) == ("classic", True)


def test_podman_program_is_needed_when_asked_for(bare: None) -> None:
    with pytest.raises(ToolMissing, match="'podman' is not on PATH"):
        builders.choose(facts(PODMAN), "podman")


def test_podman_cannot_build_for_docker() -> None:
    with pytest.raises(UsageError, match="is Docker") as caught:
        builders.choose(facts(DOCKER), "podman")
    assert "--builder auto" in str(caught.value.hint)


def test_buildx_cannot_build_for_podman() -> None:
    with pytest.raises(UsageError, match="no BuildKit"):
        builders.choose(facts(PODMAN), "buildx")


def test_missing_buildx_names_its_package(bare: None) -> None:
    with pytest.raises(ToolMissing) as caught:
        builders.choose(facts(DOCKER), "buildx")
    assert "docker-buildx" in str(caught.value.hint)


def test_classic_builder_refuses_secrets() -> None:
    with pytest.raises(UsageError, match="they would stay in the image") as caught:
        builders.choose(facts(DOCKER), "classic", secrets_at="mine.yaml:4")
    assert (caught.value.where, caught.value.hint) == ("mine.yaml:4", "use --builder buildx")


def test_podman_through_its_api_refuses_secrets(bare: None) -> None:
    with pytest.raises(UsageError, match="they would stay in the image") as caught:
        builders.choose(facts(PODMAN), secrets_at="mine.yaml:4")
    assert caught.value.hint == "use --builder podman"


def test_docker_without_buildx_refuses_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path / "docker", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ToolMissing, match="only with buildx: the docker program has no buildx") as caught:
        builders.choose(facts(DOCKER), secrets_at="mine.yaml:4")
    assert caught.value.where == "mine.yaml:4"
    assert "classic" not in str(caught.value)


def test_secrets_choose_buildx_for_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path / "docker", "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert builders.choose(facts(DOCKER), secrets_at="mine.yaml:4").name == "buildx"
    assert builders.choose(facts(DOCKER)).name == "classic"
