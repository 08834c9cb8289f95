"""Saving and exporting: whole or an error, without a time limit, with nothing left behind."""

from __future__ import annotations

import time
from typing import Any

import pytest
from notes import Notes
from refusals import refused

from imgkit_builder import engine as engines
from imgkit_builder.engine import Engine, image_source
from imgkit_entrypoints.errors import ToolFailed, UsageError

TAG = "small:latest"
WHOLE = (b"x" * 512, bytes(512), bytes(512))


@pytest.fixture(autouse=True)
def local(fake: Any) -> None:
    """The image is here, under its tag and its id."""
    fake.on_image(TAG, fake.image(tags=["other:1", TAG]))
    fake.on_image(fake.image_id, fake.image(tags=[TAG]))


def save(engine: Engine, name: str = TAG) -> bytes:
    with engines.save_stream(engine, name) as chunks:
        return b"".join(chunks)


def test_save_asks_for_exactly_one_tag(fake, engine):
    fake.on_save(fake.raw(*WHOLE))
    assert save(engine) == b"".join(WHOLE)
    # An image asked for by id keeps its name too.
    save(engine, fake.image_id)
    assert [request.path for request in fake.requests("/get")] == [f"/images/{TAG}/get"] * 2


def test_staging_may_take_longer_than_an_answer(fake):
    fake.on_save(fake.raw(*WHOLE, delay_s=0.6))
    with engines.connect(timeout_s=0.3) as engine:
        assert len(save(engine)) == 1536


def test_stalled_answer_is_no_read_timeout(fake):
    fake.on("GET", "/images/.+/json", fake.refused(404, "late", delay_s=0.8))
    with engines.connect(timeout_s=0.3) as engine:
        start = time.monotonic()
        with pytest.raises(ToolFailed, match="did not answer in time"):
            engines.inspect(engine, "slow")
        assert time.monotonic() - start < 10


def test_error_behind_the_data_is_raised(fake, engine):
    message = b'{"errorDetail":{"message":"no space left on device"},"error":"no space left on device"}\n'
    fake.on_save(fake.raw(b"x" * 512, message))
    with refused(ToolFailed, "no space left", hint="docker system df"):
        save(engine)


@pytest.mark.parametrize("dies", [True, False], ids=["cut", "closed in good order"])
def test_short_archive_is_no_success(fake, engine, dies):
    fake.on_save(fake.raw(b"x" * 512, bytes(512), dies=dies))
    with pytest.raises(ToolFailed, match=r"was lost|ended before the archive"):
        save(engine)


def test_save_of_absent_image_names_pull(engine):
    with refused(UsageError, "no image 'nope:1'", hint="docker pull nope:1"):
        save(engine, "nope:1")


def test_image_gone_before_the_save(fake, engine):
    # Measured: here the engine says NotFound, not ImageNotFound.
    fake.on_save(fake.refused(404, "reference does not exist"))
    with pytest.raises(UsageError, match="no image"):
        save(engine)


def test_users_own_error_is_left_alone(fake, engine):
    fake.on_save(fake.raw(*WHOLE))
    with pytest.raises(OSError, match="disk of the user"), engines.save_stream(engine, TAG):
        raise OSError(28, "disk of the user")


def test_export_creates_and_removes_unstarted(fake, engine):
    fake.on_export(fake.raw(*WHOLE))
    with image_source.export_stream(engine, TAG) as chunks:
        assert b"".join(chunks) == b"".join(WHOLE)
    requests = fake.requests(r"(GET|DELETE) /containers/imgkit-export")
    names = [request.path.split("/")[2] for request in requests]
    assert len(names) == 2
    assert len(set(names)) == 1
    assert not fake.requests("/start")
    assert f'"Image": "{fake.image_id}"' in fake.requests("/containers/create")[0].body.decode()


@pytest.mark.parametrize("trouble", [KeyboardInterrupt(), OSError(28, "full")])
def test_export_container_goes_on_errors(fake, engine, trouble):
    fake.on_export(fake.raw(*WHOLE))
    with pytest.raises(type(trouble)), image_source.export_stream(engine, TAG):
        raise trouble
    assert fake.requests("DELETE /containers/imgkit-export")


def test_export_cut_short_is_raised(fake, engine):
    fake.on_export(fake.raw(b"x" * 512, dies=True))
    with pytest.raises(ToolFailed), image_source.export_stream(engine, TAG) as chunks:
        list(chunks)
    assert fake.requests("DELETE /containers/imgkit-export")


def test_staging_is_told(fake, engine):
    notes = Notes()
    fake.on_save(fake.raw(*WHOLE))
    with engines.save_stream(engine, TAG, report=notes):
        assert notes.stages == [f"the engine stages {TAG}"]
