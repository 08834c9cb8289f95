"""An image of the engine as conversions and deltas see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder import engine as engines
from imgkit_builder.engine import Engine, LocalImage
from imgkit_builder.sif.conversion import EngineImage
from imgkit_entrypoints.errors import ToolFailed, UsageError

NAME = "small:latest"


@pytest.fixture
def image(fake: Any, engine: Engine) -> LocalImage:
    fake.on_image(NAME, fake.image(tags=[NAME]))
    fake.on_image(fake.image_id, fake.image(tags=[NAME]))
    return engines.local_image(engine, NAME)


def test_local_image_is_what_conversions_ask_for(fake: Any, image: LocalImage) -> None:
    assert isinstance(image, EngineImage)
    assert (image.name, image.config.image_id, image.config.arch) == (NAME, fake.image_id, "amd64")


def test_streams_are_asked_for_by_tag_and_by_id(
    fake: Any, image: LocalImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for stream in ("save_stream", "export_stream"):
        monkeypatch.setattr(
            f"imgkit_builder.engine.image_source.{stream}", lambda _, name: asked.append(name)
        )
    image.save()
    image.export()
    assert asked == [NAME, fake.image_id]


def test_layers_of_another_machine_are_not_read(image: LocalImage) -> None:
    assert image.folders(image.config.diff_ids) is None


def stored(fake: Any, name: str, **places: str) -> None:
    """Let the engine tell where it keeps the layers of the image."""
    about = {**fake.image(tags=[NAME]).data, "GraphDriver": {"Name": name, "Data": places}}
    for ref in (NAME, fake.image_id):
        fake.on_image(ref, type(fake.image())(data=about))


def test_storage_without_an_overlay_is_the_reason(fake: Any, image: LocalImage, tmp_path: Path) -> None:
    stored(fake, "vfs", UpperDir="/x")
    with pytest.raises(ToolFailed, match="keeps its layers by vfs") as refused:
        image.changed(None, 1, tmp_path, skip=[])
    assert "overlay2" in (refused.value.hint or "")
    assert fake.requests("POST /containers/create") == []


def test_refused_mount_is_the_reason(fake: Any, image: LocalImage, tmp_path: Path) -> None:
    stored(fake, "overlay2", UpperDir="/o/2/diff", LowerDir="/o/1/diff")
    fake.on("POST", "/containers/create", fake.refused(400, "Mounts denied: /o/2/diff is not shared"))
    with pytest.raises(ToolFailed, match="/o/2/diff is not shared"):
        image.changed(None, 1, tmp_path, skip=[])


def test_container_gets_only_the_changed_layers_and_no_rights(
    fake: Any, image: LocalImage, tmp_path: Path
) -> None:
    stored(fake, "overlay2", UpperDir="/o/2/diff", LowerDir="/o/1/diff")
    fake.on("POST", "/containers/.+/attach", fake.refused(400, 'exec: "python3": executable file not found'))
    with pytest.raises(ToolFailed, match="the image has no python3"):
        image.changed(None, 1, tmp_path, skip=[])
    (created,) = fake.requests("POST /containers/create")
    wanted = json.loads(created.body)
    assert (wanted["User"], wanted["WorkingDir"]) == ("0", "/")
    host = wanted["HostConfig"]
    assert [(one["Source"], one["ReadOnly"]) for one in host["Mounts"]] == [("/o/2/diff", True)]
    assert (host["NetworkMode"], host["CapDrop"], host["CapAdd"]) == ("none", ["ALL"], ["DAC_READ_SEARCH"])
    assert (host["SecurityOpt"], host["ReadonlyRootfs"]) == (["no-new-privileges"], True)
    assert len(fake.requests("DELETE /containers/")) == 1


def test_other_image_is_found_by_id_or_layers(fake: Any, image: LocalImage) -> None:
    fake.on("GET", "/images/json", type(fake.image())(data=[{"Id": "gone:1"}, {"Id": fake.image_id}]))
    for name, layers in ((fake.image_id, ()), ("sha256:" + "0" * 64, image.config.diff_ids)):
        other = image.other(name, layers)
        assert other is not None
        assert other.config == image.config


def test_other_image_that_is_gone_is_none(fake: Any, image: LocalImage) -> None:
    fake.on("GET", "/images/json", type(fake.image())(data=[{"Id": fake.image_id}]))
    assert image.other("sha256:" + "0" * 64, image.config.diff_ids[:1]) is None


def test_unknown_image_names_what_makes_one(engine: Engine) -> None:
    with pytest.raises(UsageError, match="no image 'absent:1'"):
        engines.local_image(engine, "absent:1")


@pytest.mark.parametrize("name", ["/", "../images", "a//b", "a b", "A:1\x1b[2J"])
def test_name_that_is_none_asks_nothing(fake: Any, engine: Engine, name: str) -> None:
    fake.on("GET", "/images/.*/json", type(fake.image())(data=[{"Id": fake.image_id}]))
    for ask in (engines.local_image, engines.find):
        with pytest.raises(UsageError, match="not an image name") as caught:
            ask(engine, name)
        assert caught.value.hint
    assert fake.requests("/images/") == []
