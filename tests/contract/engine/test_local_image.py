"""An image of the engine as conversions and deltas see it."""

from __future__ import annotations

from typing import Any

import pytest

from imgkit_builder import engine as engines
from imgkit_builder.engine import Engine, LocalImage, images
from imgkit_builder.sif.entries import EngineImage
from imgkit_entrypoints.errors import UsageError

NAME = "small:latest"


@pytest.fixture
def image(fake: Any, engine: Engine) -> LocalImage:
    fake.has(NAME)
    fake.on_image(fake.image_id, fake.image(tags=[NAME]))
    return engines.local_image(engine, NAME)


def test_local_image_is_what_conversions_ask_for(fake, image):
    assert isinstance(image, EngineImage)
    assert (image.name, image.config.image_id, image.config.arch) == (NAME, fake.image_id, "amd64")


def test_streams_are_asked_for_by_tag_and_by_id(fake, image, monkeypatch):
    names: list[str] = []
    for stream in ("save_stream", "export_stream"):
        monkeypatch.setattr(
            f"imgkit_builder.engine.image_source.{stream}", lambda _, name: names.append(name)
        )
    image.save()
    image.export()
    assert names == [NAME, fake.image_id]


def test_unknown_image_is_named(engine):
    with pytest.raises(UsageError, match="no image 'absent:1'"):
        engines.local_image(engine, "absent:1")


@pytest.mark.parametrize("name", ["/", "../images", "a//b", "a b", "A:1\x1b[2J"])
def test_name_that_is_none_asks_nothing(fake, engine, name):
    fake.on("GET", "/images/.*/json", fake.json([{"Id": fake.image_id}]))
    for ask in (engines.local_image, images.find_image):
        with pytest.raises(UsageError, match="not an image name") as caught:
            ask(engine, name)
        assert caught.value.hint
    assert fake.requests("/images/") == []
