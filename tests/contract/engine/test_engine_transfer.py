"""Push, pull and load: what the engine says in band is an exception here."""

from __future__ import annotations

from typing import Any

import pytest
from notes import Notes

from imgkit_builder import engine as engines
from imgkit_builder.base.progress import Silent
from imgkit_builder.engine import image_source
from imgkit_entrypoints.errors import ToolFailed, UsageError

REF = "registry.test:5000/group/small:1"
UNREACHABLE = 'Get "https://registry.test/v2/": dial tcp: lookup registry.test: no such host'
DIGEST = "sha256:" + "d" * 64


@pytest.fixture
def local(fake: Any) -> None:
    """The image is here."""
    fake.has(REF)


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize(
    ("message", "advice"),
    [
        (UNREACHABLE, "cannot reach the registry"),
        ("denied: requested access to the resource is denied", "docker login registry.test:5000"),
        ("unauthorized: authentication required", "docker login registry.test:5000"),
        ("x509: certificate signed by unknown authority", "/etc/docker/certs.d"),
        ("http: server gave HTTP response to HTTPS client", "insecure-registries"),
        ("blob upload unknown", "blob upload unknown"),
    ],
)
def test_failed_push_is_raised(fake, engine, message, advice):
    fake.on_push(fake.events({"status": "The push refers to"}, fake.error(message)))
    with pytest.raises(ToolFailed) as caught:
        engines.push(engine, REF, Silent())
    assert advice in str(caught.value)


@pytest.mark.usefixtures("local")
def test_push_returns_digest_and_counts_bytes(fake, engine):
    fake.on_push(
        fake.events(
            {"status": "Preparing", "progressDetail": {}, "id": "one"},
            {"status": "Pushing", "progressDetail": {"current": 10, "total": 40}, "id": "one"},
            {"status": "Pushing", "progressDetail": {"current": 7, "total": 5}, "id": "two"},
            {"status": "Pushed", "progressDetail": {}, "id": "two"},
            {"progressDetail": {}, "aux": {"Tag": "1", "Digest": DIGEST, "Size": 528}},
        ),
    )
    report = Notes()
    assert engines.push(engine, REF, report) == DIGEST
    assert report.progress[-1] == (17, 47)
    (request,) = fake.requests("/push")
    assert (request.path, request.query) == ("/images/registry.test:5000/group/small/push", {"tag": "1"})


def test_push_of_absent_image_asks_nothing(fake, engine):
    with pytest.raises(UsageError, match="has no image"):
        engines.push(engine, REF, Silent())
    assert not fake.requests("/push")


@pytest.mark.parametrize(
    ("status", "message", "kind", "advice"),
    [
        (404, f"manifest for {REF} not found: manifest unknown", UsageError, "check name and tag"),
        (404, "pull access denied for x, repository does not exist", UsageError, "check name and tag"),
        (500, UNREACHABLE, ToolFailed, "cannot reach the registry"),
        (500, "toomanyrequests: You have reached your pull rate limit", ToolFailed, "docker login"),
    ],
)
def test_refused_pull_is_typed(fake, engine, status, message, kind, advice):
    fake.on_pull(fake.refused(status, message))
    with pytest.raises(kind) as caught:
        image_source.pull_image(engine, REF, None, Silent())
    assert advice in str(caught.value)


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize("message", ["failed to register layer: no space left on device", "unexpected EOF"])
def test_pull_failing_midway_gives_no_stale_image(fake, engine, message):
    fake.on_pull(fake.events({"status": "Downloading", "id": "x"}, fake.error(message)))
    with pytest.raises(ToolFailed, match=message):
        image_source.pull_image(engine, REF, None, Silent())


@pytest.mark.usefixtures("local")
def test_dying_engine_breaks_a_pull(fake, engine):
    fake.on_pull(fake.events({"status": "Downloading", "id": "x"}, dies=True))
    with pytest.raises(ToolFailed, match="broke"):
        image_source.pull_image(engine, REF, None, Silent())


@pytest.mark.usefixtures("local")
def test_pull_of_other_platform_is_refused(fake, engine):
    fake.on_pull(fake.events({"status": "Downloaded newer image"}))
    with pytest.raises(UsageError, match="has none for arm64"):
        image_source.pull_image(engine, REF, "arm64", Silent())
    assert image_source.pull_image(engine, REF, "linux/amd64", Silent()).platform == "linux/amd64"


def test_pull_by_digest_asks_for_it(fake, engine):
    ref = f"registry.test/small@{DIGEST}"
    fake.on_pull(fake.events({"status": "Downloaded newer image"}))
    # Podman lists further digests, of the image as it lies in the storage.
    fake.on_image(ref, fake.image(digests=[f"registry.test/small@sha256:{'e' * 64}", ref]))
    assert image_source.pull_image(engine, ref, None, Silent()).digest == ref
    (request,) = fake.requests("/images/create")
    assert request.query == {"tag": DIGEST, "fromImage": "registry.test/small"}


def test_pull_may_take_longer_than_an_answer(fake):
    fake.on_pull(fake.events({"status": "Downloaded"}, delay_s=0.6))
    fake.has(REF)
    with engines.connect(timeout_s=0.3) as engine:
        assert image_source.pull_image(engine, REF, None, Silent()).id == fake.image_id
