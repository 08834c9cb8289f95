"""An image of the engine as conversions and deltas see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder import engine as engines
from imgkit_builder.engine import Engine, LocalImage
from imgkit_builder.sif.conversion import EngineImage
from imgkit_entrypoints.errors import UsageError

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


def test_copies_are_read_from_the_history(fake: Any, image: LocalImage, tmp_path: Path) -> None:
    steps = [{"CreatedBy": "/bin/sh -c #(nop) COPY dir:1 in /workspace "}]
    fake.on("GET", f"/images/{fake.image_id}/history", fake.raw(json.dumps(steps).encode()))
    assert image.copied(1) == ("/workspace",)
    assert image.fetch([], tmp_path) == ()


def test_history_that_the_engine_cannot_tell_is_none(fake: Any, image: LocalImage) -> None:
    # What Podman 4.3 answers where a step of the base has no date.
    message = "runtime error: invalid memory address or nil pointer dereference"
    fake.on("GET", f"/images/{fake.image_id}/history", fake.refused(500, message))
    assert image.copied(1) is None


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
