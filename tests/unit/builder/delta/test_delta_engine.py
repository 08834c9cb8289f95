"""What an engine's answers say about the layers of an image."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, cast

import pytest

from imgkit_builder.engine.address import Endpoint
from imgkit_builder.engine.changed_layers import lower_folders
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.image_source import layer_folders


class Api:
    """An engine's answers."""

    def __init__(self, *, info: dict[str, Any]) -> None:
        self._info = info

    def info(self) -> dict[str, Any]:
        return self._info


def engine(api: Api, host: str = "unix:///var/run/docker.sock") -> Engine:
    return Engine(cast("Any", api), Endpoint(host=host))


FIRST, SECOND = "sha256:" + "1" * 64, "sha256:" + "2" * 64


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine's folder with two layers, readable as if by root."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    chain = hashlib.sha256(f"{FIRST} {SECOND}".encode()).hexdigest()
    for name, digest, cache in (("1" * 64, FIRST, "one"), (chain, SECOND, "two")):
        known = tmp_path / "image/overlay2/layerdb/sha256" / name
        known.mkdir(parents=True)
        (known / "diff").write_text(digest)
        (known / "cache-id").write_text(cache)
        (tmp_path / "overlay2" / cache / "diff").mkdir(parents=True)
    return tmp_path


def info(root: Path, **more: Any) -> Api:
    return Api(info={"Driver": "overlay2", "DockerRootDir": str(root), **more})


def test_folders_of_layers_by_their_chain(root: Path) -> None:
    found = layer_folders(engine(info(root)), (FIRST, SECOND))
    assert found == (root / "overlay2/one/diff", root / "overlay2/two/diff")


def test_layer_that_is_not_there(root: Path) -> None:
    assert layer_folders(engine(info(root)), (SECOND,)) is None
    (root / "image/overlay2/layerdb/sha256" / ("1" * 64) / "diff").write_text(SECOND)
    assert layer_folders(engine(info(root)), (FIRST,)) is None


@pytest.mark.parametrize(
    "more",
    [{"Driver": "btrfs"}, {"SecurityOptions": ["name=userns"]}, {"SecurityOptions": ["name=rootless"]}],
)
def test_storage_with_other_owners_or_forms_is_not_read(root: Path, more: dict[str, Any]) -> None:
    assert layer_folders(engine(info(root, **more)), (FIRST,)) is None


def test_engine_elsewhere_or_no_root_is_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert layer_folders(engine(info(root), "tcp://host:2375"), (FIRST,)) is None
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert layer_folders(engine(info(root)), (FIRST,)) is None


def root_mount(options: str, kind: str = "overlay") -> str:
    """What /proc/self/mountinfo has, with a mount before and behind."""
    other = "229 228 0:54 / /proc rw,nosuid - proc proc rw\n"
    return f"{other}228 190 0:62 / / ro,relatime master:6 - {kind} overlay {options}\n{other}"


@pytest.mark.parametrize(
    "options",
    [
        # Docker 20.10, and Docker 28.5 with containerd's store.
        "rw,lowerdir=/d/l/INIT:/d/l/TWO:/d/l/ONE,upperdir=/d/up/diff,workdir=/d/up/work",
        # A kernel's newer form.
        "rw,lowerdir+=/d/l/INIT,lowerdir+=/d/l/TWO,lowerdir+=/d/l/ONE,upperdir=/d/up/diff,workdir=/d/up/work",
        # As containerd shortens many: relative to the folder of all snapshots.
        "rw,lowerdir=l/INIT:l/TWO:l/ONE,upperdir=/d/up/diff,workdir=/d/up/work,index=off",
    ],
)
def test_lower_folders_of_a_containers_root(options: str) -> None:
    assert lower_folders(root_mount(options)) == ("/d/l/INIT", "/d/l/TWO", "/d/l/ONE")


def test_root_that_is_no_overlay_has_no_folders() -> None:
    assert lower_folders(root_mount("rw,lowerdir=/x", "btrfs")) == ()
    assert lower_folders("no mount\n") == ()
