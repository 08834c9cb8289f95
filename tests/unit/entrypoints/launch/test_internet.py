"""Services on the internet that a program is likely to call."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import pytest

from imgkit_entrypoints.launch import internet
from imgkit_entrypoints.launch.internet import OfflineSettings


def settings(*packages: str, reachable: bool = False, shared: bool = False, **env: str) -> OfflineSettings:
    return internet.offline_settings(
        env,
        has_package=packages.__contains__,
        can_connect=lambda _: reachable,
        is_shared=lambda _: shared,
    )


@pytest.mark.parametrize(
    ("packages", "env", "host"),
    [
        (("huggingface_hub",), {}, "https://huggingface.co"),
        ((), {"HF_TOKEN": "x"}, "https://huggingface.co"),
        (("huggingface_hub",), {"HF_ENDPOINT": "http://mirror"}, "http://mirror"),
        (("wandb",), {}, "https://api.wandb.ai"),
        ((), {"WANDB_PROJECT": "letters"}, "https://api.wandb.ai"),
    ],
)
def test_unreachable_service_is_named(packages: tuple[str, ...], env: Mapping[str, str], host: str) -> None:
    (note,) = settings(*packages, **env).notes
    assert note.startswith(f"this node cannot reach {host}: ")


@pytest.mark.parametrize(
    ("packages", "env"),
    [
        ((), {}),
        (("huggingface_hub",), {"HF_HUB_OFFLINE": "1"}),
        (("wandb",), {"WANDB_MODE": "disabled"}),
        (("huggingface_hub", "wandb"), {"https_proxy": "http://proxy:3128"}),
    ],
    ids=["nothing calls one", "hub is offline", "wandb is off", "proxy"],
)
def test_program_without_need_of_the_internet_gets_no_note(
    packages: tuple[str, ...], env: Mapping[str, str]
) -> None:
    assert settings(*packages, **env).notes == ()


def test_wandb_writes_into_the_run_folder() -> None:
    assert settings("wandb", reachable=True, IMGKIT_RUN_DIR="/run").env == {"WANDB_DIR": "/run"}
    own = settings("wandb", reachable=True, IMGKIT_RUN_DIR="/run", WANDB_DIR="/mine")
    assert own.env == {}
    assert settings("wandb", WANDB_MODE="online").env == {}, "the user's mode stays"


@pytest.mark.parametrize(
    ("shared", "env", "has_note"), [(True, {}, True), (False, {}, False), (True, {"HF_HOME": "/s"}, False)]
)
def test_models_in_a_shared_home_are_named(shared: bool, env: Mapping[str, str], has_note: bool) -> None:
    notes = settings("huggingface_hub", reachable=True, shared=shared, HOME="/home/me", **env).notes
    assert any("models are saved in /home/me/.cache/huggingface" in note for note in notes) == has_note


def test_connection_shows_what_can_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert internet.can_connect(url)
    assert not internet.can_connect(url)


@pytest.mark.parametrize("url", ["", "huggingface.co", "http://host:port", "http://no-such-host.invalid"])
def test_faulty_address_cannot_be_reached(url: str) -> None:
    assert not internet.can_connect(url)
