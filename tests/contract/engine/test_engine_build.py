"""Builds: each way to fail has its type, its place in the recipe and its log; the tag moves last."""

from __future__ import annotations

import functools
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from imgkit_builder import engine as engines
from imgkit_builder.base.progress import Silent
from imgkit_builder.engine import Engine
from imgkit_builder.engine.builders import ChosenBuilder
from imgkit_builder.image.context import BuildContext
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, ToolMissing, UsageError

TAG = "small:latest"
MAY_CHANGE = ChosenBuilder(name="classic", may_change=True)
FAILED = "The command '/bin/sh -c make things' returned a non-zero code: 2"
RUNNING = " ---> Running in 0123456789ab\n"
Build = Callable[..., engines.Built]


@pytest.fixture
def build(engine: Engine, context: BuildContext) -> Build:
    return functools.partial(engines.build, engine, context, tag=TAG, report=Silent())


@pytest.fixture
def step(context: BuildContext) -> str:
    """The header of the step that the recipe's line 6 made."""
    lines = [line for line in context.dockerfile.splitlines() if line and line[0].isupper()]
    numbers = [number for number, line in enumerate(lines, 1) if line.startswith("RUN make things")]
    return f"Step {numbers[0]}/9 : RUN make things\n"


@pytest.fixture
def succeeds(fake: Any) -> None:
    """A build that ends well."""
    fake.on_build(
        "Step 1/2 : FROM registry.test/base:1\n", "\x1b[91mwarning: red\x1b[0m\n", image=fake.image_id
    )
    fake.on_image(fake.image_id, fake.image())
    fake.has(TAG)


def test_failing_run_names_recipe_line(fake, build, context, step):
    output = (step.rstrip("\n"), "\n", RUNNING, "\x1b[91mmake: *** No rule\x1b[0m\n")
    fake.on_build(*output, "Removing intermediate container 0123456789ab\n", error=FAILED)
    with refused(ToolFailed, "non-zero code: 2", where="small.yaml:6", hint="make: *** No rule\n") as caught:
        build()
    log = Path(str(caught.value.hint).partition("full log: ")[2].partition(",")[0])
    assert "make: *** No rule" in log.read_text()
    assert "\x1b" not in log.read_text()
    assert (log.parent / "Dockerfile").read_text().startswith(context.dockerfile.rstrip())
    assert not fake.requests("/tag")


@pytest.mark.parametrize(
    ("message", "kind", "advice"),
    [
        (
            'Get "https://registry.test/v2/": dial tcp: lookup registry.test on 10.0.0.1:53: no such host',
            ToolFailed,
            "cannot reach the registry",
        ),
        ("manifest for registry.test/base:1 not found: manifest unknown", UsageError, "check name and tag"),
        ("pull access denied for base, repository does not exist", UsageError, "check name and tag"),
        ("write /x: no space left on device", ToolFailed, "docker system df"),
        ("COPY failed: file not found in build context: stat nope", ToolFailed, "full log"),
        ("the --mount option requires BuildKit. Refer to https://docs.docker.com", ToolFailed, "full log"),
        ("exec /bin/sh: exec format error", ToolFailed, "qemu-user-static"),
    ],
)
def test_in_band_error_is_typed(fake, build, message, kind, advice):
    fake.on_build("Step 1/9 : FROM registry.test/base:1\n", error=message)
    with pytest.raises(kind, match=r"step 1/9") as caught:
        build()
    assert advice in str(caught.value)


def test_full_disk_inside_run_is_recognised(fake, build, step):
    fake.on_build(step, "cc: cannot write: No space left on device\n", error=FAILED)
    with refused(ToolFailed, hint="docker system df"):
        build()


def test_parse_error_names_recipe_line(fake, build, context):
    lines_before, _, _ = context.dockerfile.partition("RUN make things")
    line = lines_before.count("\n") + 1
    message = f"dockerfile parse error line {line}: unknown instruction: FORM"
    fake.on("POST", "/build", fake.refused(400, message))
    with refused(ToolFailed, "unknown instruction", where="small.yaml:6"):
        build()


def test_engine_500_is_quoted(fake, build):
    fake.on("POST", "/build", fake.refused(500, "Cannot locate specified Dockerfile: Dockerfile"))
    with pytest.raises(ToolFailed, match="Cannot locate specified Dockerfile"):
        build()


@pytest.mark.parametrize(
    ("status", "message"),
    [(501, "gone"), (404, "page not found"), (400, "the legacy builder is no longer supported")],
)
def test_refused_classic_builder_asks_for_buildx(fake, build, monkeypatch, status, message):
    monkeypatch.setenv("PATH", "/nowhere")
    fake.on("POST", "/build", fake.refused(status, message))
    with refused(ToolMissing, f"refuses its classic builder .*{message}", hint="docker-buildx"):
        build(builder=MAY_CHANGE)
    # Who asked for the classic builder gets the engine's own words.
    with pytest.raises(ToolFailed, match=message):
        build()


def test_other_failures_stay_with_the_classic_builder(fake, build, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    step = fake.events(fake.error("the builder of this step is no longer supported"))
    for reply in (fake.refused(500, "no space left on device"), step):
        fake.on("POST", "/build", reply)
        with pytest.raises(ToolFailed):
            build(builder=MAY_CHANGE)


@pytest.mark.parametrize("dies", [True, False], ids=["cut", "closed in good order"])
def test_dying_engine_is_no_success(fake, build, step, dies):
    fake.on_build(step, RUNNING, dies=dies)
    with refused(
        ToolFailed, "connection to the engine was lost", where="small.yaml:6", hint="journalctl -u docker"
    ):
        build()
    # The engine may be alive and only the connection gone: its container must not stay.
    assert fake.requests("DELETE /containers/0123456789ab")
    assert not fake.requests("/tag")


def test_half_an_event_is_a_broken_connection(fake, build):
    half = fake.raw(b'{"stream": "Step 1/9 : FROM x\\n"}\r\n{"stre', dies=True)
    fake.on("POST", "/build", half)
    with pytest.raises(ToolFailed, match="broke"):
        build()


@pytest.mark.usefixtures("succeeds")
def test_wrong_architecture_keeps_old_tag(fake, build):
    fake.on_image(fake.image_id, fake.image(arch="arm64"))
    with pytest.raises(ToolFailed, match="built linux/arm64 instead of linux/amd64"):
        build()
    assert not fake.requests("/tag")


@pytest.mark.usefixtures("succeeds")
def test_refused_image_keeps_old_tag(fake, build):
    def accept(image: engines.ImageInfo) -> None:
        raise CheckFailed(f"{image.id} is not good")

    with pytest.raises(CheckFailed):
        build(accept=accept)
    assert not fake.requests("/tag")


@pytest.mark.usefixtures("succeeds")
def test_bad_tag_stops_before_building(fake, build):
    with pytest.raises(UsageError, match="capital letters"):
        build(tag="UPPER:1")
    assert not fake.requests("/build")


@pytest.mark.usefixtures("succeeds")
def test_log_goes_to_tmp_where_home_is_read_only(build, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    log = build().log
    assert log.is_file()
    assert log.parent.parent == tmp_path


@pytest.mark.usefixtures("succeeds")
def test_tag_is_the_last_change(fake, build):
    built = build()
    assert built.image.id == fake.image_id
    assert built.image.env == {"PATH": "/usr/bin", "A": "b=c"}
    changes = [str(request) for request in fake.seen if request.method != "GET"]
    assert changes == ["POST /build", f"POST /images/{fake.image_id}/tag"]
    assert "warning: red" in built.log.read_text()


@pytest.mark.usefixtures("succeeds")
def test_request_removes_containers_and_pulls_nothing(fake, build):
    build(no_cache=True)
    (request,) = fake.requests("POST /build")
    query = {"rm": "True", "forcerm": "True", "pull": "False", "nocache": "True", "platform": "linux/amd64"}
    assert request.query.items() >= query.items()
    assert "t" not in request.query


@pytest.mark.usefixtures("succeeds")
def test_sent_tar_is_context_plus_labels(fake, build, context):
    build()
    (request,) = fake.requests("POST /build")
    with tarfile.open(fileobj=io.BytesIO(request.body)) as tar, context.open() as plain:
        assert request.body.endswith(plain.read())
        sent = tar.extractfile(request.query["dockerfile"])
        assert sent is not None
        *head, last = sent.read().decode().splitlines()
    assert head == context.dockerfile.rstrip("\n").splitlines()
    assert last.startswith("LABEL ")
    assert f'"imgkit.context.sha256"="{context.sha256}"' in last


def created(fake: Any) -> str:
    body = fake.requests("POST /build")[-1].body.decode("latin-1")
    return str(body.partition('"org.opencontainers.image.created"="')[2].partition('"')[0])


@pytest.mark.usefixtures("succeeds")
def test_same_context_keeps_created_label(fake, build, context):
    time = "2001-02-03T04:05:06Z"
    labels = {"imgkit.context.sha256": context.sha256, "org.opencontainers.image.created": time}
    fake.has(TAG, labels=labels)
    build()
    assert created(fake) == time
    build(no_cache=True)
    assert created(fake) != time


@pytest.mark.usefixtures("succeeds")
def test_source_date_epoch_decides_created(fake, build, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    build()
    assert created(fake) == "1970-01-02T00:00:00Z"


def test_interrupt_removes_running_container(fake, build):
    class Impatient(Silent):
        def line(self, text: str) -> None:
            if "Running in" in text:
                raise KeyboardInterrupt

    fake.on_build(RUNNING)
    with pytest.raises(KeyboardInterrupt):
        build(report=Impatient())
    assert fake.requests("DELETE /containers/0123456789ab")
