"""What a node lacks: services on the internet that a program is likely to call, or the run's code."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from file_tree import write_files

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.launch import internet, run_code
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
def test_unreachable_service_is_named(packages, env, host):
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
def test_program_without_need_of_the_internet_gets_no_note(packages, env):
    assert settings(*packages, **env).notes == ()


def test_wandb_writes_into_the_run_folder():
    assert settings("wandb", reachable=True, IMGKIT_RUN_DIR="/run").env == {"WANDB_DIR": "/run"}
    own = settings("wandb", reachable=True, IMGKIT_RUN_DIR="/run", WANDB_DIR="/mine")
    assert own.env == {}
    assert settings("wandb", WANDB_MODE="online").env == {}, "the user's mode stays"


@pytest.mark.parametrize(
    ("shared", "env", "has_note"), [(True, {}, True), (False, {}, False), (True, {"HF_HOME": "/s"}, False)]
)
def test_models_in_a_shared_home_are_named(shared, env, has_note):
    notes = settings("huggingface_hub", reachable=True, shared=shared, HOME="/home/me", **env).notes
    assert any("models are saved in /home/me/.cache/huggingface" in note for note in notes) == has_note


def test_connection_shows_what_can_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert internet.can_connect(url)
    assert not internet.can_connect(url)


@pytest.mark.parametrize("url", ["", "huggingface.co", "http://host:port", "http://no-such-host.invalid"])
def test_faulty_address_cannot_be_reached(url):
    assert not internet.can_connect(url)


LINE = "1209 1207 8:17 /me/runs/x-7/workspace {} rw,relatime master:9 - ext4 /dev/sdb1 rw"


def env(root: Path, mount_point: str) -> dict[str, str]:
    write_files(root, {"/proc/self/mountinfo": LINE.format(mount_point)})
    return {"IMGKIT_ROOT": str(root), "IMGKIT_CODE": "abc"}


def test_mounted_copy_is_accepted(tmp_path):
    run_code.refuse_missing_code(env(tmp_path, "/workspace"))


@pytest.mark.parametrize("mount_point", ["/workspace/data", "/scratch"])
def test_missing_copy_is_refused(tmp_path, mount_point):
    with pytest.raises(NoPlan) as caught:
        run_code.refuse_missing_code(env(tmp_path, mount_point))
    assert str(caught.value) == (
        "IMGKIT_CODE=abc: the run's copy of the code is not mounted at /workspace\n"
        "  -> if an admin has set `user bind control = no`, no folder can be mounted: build the code into "
        "the image (image.copy), and submit with --no-code"
    )


def test_job_without_code_is_not_checked(tmp_path):
    variables = env(tmp_path, "/scratch")
    del variables["IMGKIT_CODE"]
    run_code.refuse_missing_code(variables)
