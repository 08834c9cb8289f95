"""What an engine's answers say about the layers of an image."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, cast

import pytest

from imgkit_builder.engine.address import Endpoint
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.image_source import copied, layer_folders


class Api:
    """An engine's answers."""

    def __init__(self, *, history: list[str] | None = None, info: dict[str, Any] | None = None) -> None:
        self._history, self._info = history or [], info or {}

    def history(self, name: str) -> list[dict[str, Any]]:
        return [{"CreatedBy": text} for text in self._history]

    def info(self) -> dict[str, Any]:
        return self._info


def engine(api: Api, host: str = "unix:///var/run/docker.sock") -> Engine:
    return Engine(cast("Any", api), Endpoint(host=host))


NOP = "/bin/sh -c #(nop) "
CODE = f"{NOP}COPY dir:12ab in /workspace/src/ "
FACTS = f"{NOP}COPY multi:34cd in /opt/imgkit/ "


def test_last_layers_that_only_copy() -> None:
    api = Api(
        history=[f"{NOP} LABEL a=b\nin two lines", FACTS, f"{NOP} ENV A=1", CODE, "/bin/sh -c pip install x"]
    )
    assert copied(engine(api), "x", 2) == ("/opt/imgkit/", "/workspace/src/")
    assert copied(engine(api), "x", 1) == ("/opt/imgkit/",)
    assert copied(engine(api), "x", 0) == ()


@pytest.mark.parametrize(
    "step",
    [
        "/bin/sh -c rm -rf /workspace",
        f"{NOP} WORKDIR /made/perhaps",
        f"{NOP}COPY file:12ab in relative ",
        "COPY src /workspace # buildkit",
        "",
    ],
)
def test_anything_else_among_them_is_no_copy(step: str) -> None:
    assert copied(engine(Api(history=[FACTS, step, CODE])), "x", 2) is None


def test_fewer_steps_than_layers_is_no_copy() -> None:
    assert copied(engine(Api(history=[FACTS])), "x", 2) is None


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
