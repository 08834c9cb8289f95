"""The configuration of a locked image without what its engine and its day made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from imgkit_builder.oci.config import ImageConfig, parse_config
from imgkit_builder.oci.manifest import EPOCH_LABEL
from imgkit_builder.sif import locked


def config(created: str, epoch: str | None = "1750000000", *, layer: int = 1, **settings: Any) -> ImageConfig:
    labels = {"imgkit.recipe": "mine", **({} if epoch is None else {EPOCH_LABEL: epoch})}
    values = {
        "architecture": "amd64",
        "os": "linux",
        "created": created,
        "history": [{"created": created, "created_by": "RUN x"}],
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer:064x}"]},
        "config": {"Env": ["A=1", "PATH=/bin"], "Cmd": ["sh"], "Labels": labels, **settings},
    }
    return parse_config(json.dumps(values).encode(), where="x")


def test_two_builds_have_one_id() -> None:
    docker = config("2026-01-01T00:00:00Z", Image="sha256:1", Hostname="3f2a", ArgsEscaped=True, Volumes=None)
    podman_labels = {"imgkit.recipe": "mine", EPOCH_LABEL: "1750000000", "io.buildah.version": "1.28.2"}
    podman = config("2027-02-03T04:05:06.789Z", layer=2, Labels=podman_labels, Entrypoint=[])
    assert docker.image_id != podman.image_id
    assert locked.settled(docker) == locked.settled(podman)
    assert locked.settled(docker).created == "2025-06-15T15:06:40Z"
    assert locked.settled(docker).diff_ids == ()


@pytest.mark.parametrize(
    "settings",
    [{"Env": ["A=2", "PATH=/bin"]}, {"Cmd": ["bash"]}, {"User": "me"}, {"WorkingDir": "/w"}],
)
def test_what_a_program_sees_changes_the_id(settings: dict[str, Any]) -> None:
    one, other = config("2026-01-01T00:00:00Z"), config("2026-01-01T00:00:00Z", **settings)
    assert locked.settled(one).image_id != locked.settled(other).image_id


def test_settled_twice_is_settled_once() -> None:
    once = locked.settled(config("2026-01-01T00:00:00Z"))
    assert locked.settled(once) == once


@pytest.mark.parametrize("epoch", [None, "", "soon", "-5", "1e9", "\u0663"])
def test_image_without_a_lock_stays(epoch: str | None) -> None:
    found = config("2026-01-01T00:00:00Z", epoch)
    assert locked.settled(found) is found


def test_time_beyond_what_a_squashfs_holds_is_the_latest() -> None:
    assert locked.epoch_s(config("2026-01-01T00:00:00Z", "9" * 30)) == (1 << 32) - 1


def test_note_of_a_conversion_is_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert locked.root_of("sha256:1") == ""
    locked.remember("sha256:1", "abc")
    assert (locked.root_of("sha256:1"), locked.root_of("sha256:2")) == ("abc", "")
