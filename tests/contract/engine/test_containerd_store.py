"""Engines with containerd's store, by recorded answers: image ids, platforms, and the digest of a push."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from file_tree import write_program
from refusals import refused
from tars import tar_of_files

from imgkit_builder import engine as engines
from imgkit_builder.base.progress import Silent
from imgkit_builder.engine import Engine
from imgkit_builder.engine.builders import ChosenBuilder
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import Recipe
from imgkit_entrypoints.errors import ToolFailed, UsageError

ANSWERS: dict[str, Any] = json.loads(Path(__file__).with_name("containerd_answers.json").read_text())
RELEASES = ("26.1.5", "28.5.2")
NAME = "127.0.0.1:5000/both:1"
FILES: dict[str, str] = ANSWERS["files"]
Playing = Callable[..., Engine]
INDEX = "sha256:a65deac7cef8e901ecf8d65895f7f5c0b159438fca45cdd416394f6e2c4c2198"
MANIFESTS = {
    "linux/amd64": "sha256:b76dee553934451d82da7b2e172afeb1b3f1b25e54f156f2f67199ccb8842483",
    "linux/arm64": "sha256:4f83d10198bc42863725a72ee86eb4ba512e5480b8449646faa29f04bce4d174",
}
CONFIGS = {
    "linux/amd64": "sha256:c33c80aa9bac55f5696185d73ea5f235415c4634a447737089ca19bdb77c9c7c",
    "linux/arm64": "sha256:b30ec0e00a6bd39ba66bda4c698c1125cdfec59f9d4f7403b8f02f82b0a0f86c",
}


def play(fake: Any, release: str, platforms: str = "both") -> None:
    """Answer as `release` does, which keeps ``both`` platforms of the image or ``arm64 only``."""
    answers = ANSWERS[release]

    def inspected(request: Any) -> Any:
        platform = json.loads(request.query.get("platform", "{}")).get("architecture", "plain")
        parameter = "manifests" if "manifests" in request.query else platform
        # Release 26.1.5 does not know the parameters.
        answer = answers[platforms].get(parameter, answers[platforms]["plain"])
        return fake.json(answer["data"], answer["status"])

    def file(request: Any) -> Any:
        name = request.query["path"].rpartition("/")[2]
        text = FILES.get(f"sha256:{name}")
        if text is None:
            return fake.refused(404, "no such file")
        return fake.raw(tar_of_files({name: text.encode()}))

    fake.on("GET", "/version", fake.json(answers["version"]))
    fake.on("GET", "/info", fake.json(answers["info"]))
    for name in (NAME, INDEX):
        fake.on("GET", f"/images/{name}/json", inspected)
    fake.on("GET", "/containers/.+/archive", file)


@pytest.fixture
def playing(fake: Any) -> Iterator[Playing]:
    """Connect to a release that keeps ``both`` platforms or ``arm64 only``."""
    with contextlib.ExitStack() as stack:

        def connected(release: str, platforms: str = "both") -> Engine:
            play(fake, release, platforms)
            return stack.enter_context(engines.connect(timeout_s=5))

        yield connected


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, fake: Any) -> str:
    """Each release plays in turn, with both platforms."""
    play(fake, request.param)
    return str(request.param)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A recipe on the image, for both platforms."""
    path = tmp_path / "both.yaml"
    path.write_text(f'description: x\nimage:\n  base: "{NAME}"\n  platform: [linux/amd64, linux/arm64]\n')
    return load(path)


@pytest.mark.usefixtures("release")
def test_image_id_is_the_configurations_digest(fake, engine):
    info = engines.inspect(engine, NAME)
    assert (info.id, info.ref, info.platform) == (CONFIGS["linux/amd64"], INDEX, "linux/amd64")
    (create,) = fake.requests("POST /containers/create")
    assert create.query["platform"] == "linux/amd64"
    assert not fake.requests("/start")
    assert fake.requests("DELETE /containers/imgkit-read")
    engines.inspect(engine, NAME)
    assert len(fake.requests("POST /containers/create")) == 1, "the id was not kept"


@pytest.mark.usefixtures("release")
def test_cache_that_cannot_be_written(engine, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert engines.inspect(engine, NAME).id == CONFIGS["linux/amd64"]


def without_store(fake: Any, playing: Playing, release: str) -> Engine:
    """Connect to a release whose store is in a place that nobody knows."""
    engine, refusal = playing(release), ANSWERS[release]["folder that is not there"]
    fake.on("POST", "/containers/create", fake.refused(refusal["status"], refusal["data"]["message"]))
    return engine


def test_store_elsewhere_reads_the_save_stream(fake, playing):
    engine = without_store(fake, playing, "28.5.2")
    blobs = {f"blobs/sha256/{name.removeprefix('sha256:')}": text.encode() for name, text in FILES.items()}
    fake.on_save(fake.raw(tar_of_files({"layer": bytes(5 << 20), **blobs})))
    assert engines.inspect(engine, NAME).id == CONFIGS["linux/amd64"]


@pytest.mark.parametrize("damage", ["absent", "changed"])
def test_id_is_never_guessed(fake, playing, damage):
    engine = without_store(fake, playing, "26.1.5")
    blobs = {} if damage == "absent" else {f"blobs/sha256/{INDEX.removeprefix('sha256:')}": b"{}"}
    fake.on_save(fake.raw(tar_of_files(blobs)))
    with pytest.raises(ToolFailed, match=f"does not show the manifest of {INDEX}"):
        engines.inspect(engine, NAME)


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine runs arm64 programs."""
    monkeypatch.setattr("imgkit_builder.engine.base_image.emulator_problem", lambda arch: None)


@pytest.mark.usefixtures("emulator")
def test_base_of_the_only_platform_that_is_here(playing, recipe):
    base = engines.resolve_base(playing("28.5.2", "arm64 only"), recipe, platform="linux/arm64")
    assert (base.name, base.platform, base.id) == (NAME, "linux/arm64", CONFIGS["linux/arm64"])


@pytest.mark.usefixtures("emulator")
def test_base_of_several_platforms_by_its_manifest(fake, playing, recipe):
    # Its builder would take the platform that it prefers.
    engine, manifest = playing("28.5.2"), MANIFESTS["linux/arm64"]
    exact = f"127.0.0.1:5000/both@{manifest}"

    def arrives(_: object) -> Any:
        answer = ANSWERS["28.5.2"]["both"]["arm64"]["data"]
        fake.on_image(exact, fake.json(answer))
        return fake.events({"status": "Downloaded newer image"})

    fake.on_pull(arrives)
    base = engines.resolve_base(engine, recipe, platform="linux/arm64")
    assert (base.name, base.platform, base.id) == (exact, "linux/arm64", CONFIGS["linux/arm64"])
    (request,) = fake.requests("/images/create")
    assert request.query["tag"] == manifest


@pytest.mark.parametrize(
    ("release", "kept", "platform", "message", "hint"),
    [
        (
            "28.5.2",
            "arm64 only",
            None,
            "is linux/arm64, the build is for linux/amd64",
            f"docker pull --platform linux/amd64 {NAME}",
        ),
        # To pull the other platform, which it then keeps as well, changes nothing.
        ("26.1.5", "both", "linux/arm64", "is linux/amd64, the build is for linux/arm64", "NAME@sha256:"),
    ],
)
def test_missing_platform_names_the_pull_or_the_digest(
    playing,
    recipe,
    release,
    kept,
    platform,
    message,
    hint,
):
    with refused(UsageError, message, hint=hint) as caught:
        engines.resolve_base(playing(release, kept), recipe, platform=platform)
    assert ("docker pull" in str(caught.value.hint)) == ("docker pull" in hint)


@pytest.mark.parametrize("requested", [None, "linux/arm64"])
def test_preferred_platform_that_is_not_kept(fake, playing, requested):
    """Docker 29 tells nothing of it; here that is an answer of 28 without its platform."""
    engine = playing("28.5.2", "arm64 only")
    recorded = ANSWERS["28.5.2"]["arm64 only"]
    nothing = {"status": 200, "data": {**recorded["plain"]["data"], "Architecture": "", "Os": ""}}

    def inspected(request: Any) -> Any:
        platform = json.loads(request.query.get("platform", "{}")).get("architecture")
        parameter = "manifests" if "manifests" in request.query else platform
        answer = recorded[parameter] if parameter else nothing
        return fake.json(answer["data"], answer["status"])

    fake.on("GET", f"/images/{NAME}/json", inspected)
    info = engines.inspect(engine, NAME, platform=requested)
    assert (info.platform, info.id) == ("linux/arm64", CONFIGS["linux/arm64"])


@pytest.mark.parametrize("release", RELEASES, indirect=True)
def test_push_takes_the_digest_from_the_status(fake, engine, release):
    fake.on_push(fake.events(*ANSWERS[release]["push"]))
    assert engines.push(engine, NAME, Silent()) == INDEX


@pytest.mark.parametrize("status", ["1: digest: sha256:abc size: 1", "digest of 1 is unknown", "Pushed"])
def test_push_with_half_a_digest_is_no_success(fake, playing, status):
    engine = playing("28.5.2")
    fake.on_push(fake.events({"status": status}))
    with pytest.raises(ToolFailed, match="reported no digest"):
        engines.push(engine, NAME, Silent())


def test_save_asks_for_the_platform(fake, playing):
    engine = playing("28.5.2", "arm64 only")
    fake.on_save(fake.raw(bytes(1024)))
    with engines.save_stream(engine, NAME) as chunks:
        assert b"".join(chunks) == bytes(1024)
    (request,) = fake.requests("/get")
    assert json.loads(request.query["platform"]) == {"os": "linux", "architecture": "arm64"}


def test_save_that_is_refused_is_raised(fake, playing):
    engine = playing("28.5.2")
    fake.on_save(fake.refused(404, "content digest sha256:1: not found"))
    with (
        refused(ToolFailed, "content digest", hint="NAME@sha256:"),
        engines.save_stream(engine, NAME) as chunks,
    ):
        next(chunks)


BUILDX = """
# A fake of docker buildx: it writes what release 0.29.1 wrote after a build with containerd's store.
while [ $# -gt 0 ]; do
  case $1 in
    --iidfile) echo CONFIG >"$2" ;;
    --metadata-file) [ -z "$SILENT" ] && echo '{"containerimage.digest": "MANIFEST"}' >"$2" ;;
  esac
  shift
done
cat >/dev/null
"""


@pytest.fixture
def fake_buildx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake docker program on PATH."""
    script = BUILDX.replace("CONFIG", CONFIGS["linux/amd64"]).replace("MANIFEST", MANIFESTS["linux/amd64"])
    program = write_program(tmp_path / "bin/docker", script)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


@pytest.mark.usefixtures("fake_buildx")
def test_buildx_tells_which_manifest_it_built(fake, playing, context):
    engine, answer = playing("28.5.2"), ANSWERS["28.5.2"]["both"]["amd64"]["data"]
    for name in (MANIFESTS["linux/amd64"], "small:latest"):
        fake.on_image(name, fake.json(answer))
    built = engines.build(
        engine, context, tag="small:latest", report=Silent(), builder=ChosenBuilder(name="buildx")
    )
    assert (built.image.id, built.image.ref) == (CONFIGS["linux/amd64"], MANIFESTS["linux/amd64"])


@pytest.mark.usefixtures("fake_buildx")
def test_buildx_without_an_image_is_no_success(playing, context, monkeypatch):
    monkeypatch.setenv("SILENT", "1")
    with pytest.raises(ToolFailed, match="ended before the image was finished"):
        engines.build(
            playing("28.5.2"), context, tag="x:1", report=Silent(), builder=ChosenBuilder(name="buildx")
        )


def test_containers_run_the_base_by_name(fake, playing, recipe, container_says):
    # The engine knows no image by the digest of its configuration.
    engine = playing("28.5.2")
    container_says("", 1)
    engines.probe(engine, engines.resolve_base(engine, recipe))
    create = fake.requests("POST /containers/create")[-1]
    assert json.loads(create.body)["Image"] == NAME
    assert create.query["platform"] == "linux/amd64"
