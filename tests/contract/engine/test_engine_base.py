"""The base: local without a network, of the right architecture, never a stand-in by accident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from imgkit_builder import engine as engines
from imgkit_entrypoints.errors import ToolFailed, ToolMissing, UsageError

NAME = "registry.test/base:1"
STANDIN = "imgkit.local/standin:24.03"
ENABLED = "enabled\ninterpreter /usr/bin/qemu-aarch64-static\nflags: {flags}\noffset 0\n"


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of the arm64 binfmt handler, on a machine that has none."""
    monkeypatch.setattr("imgkit_builder.oci.platform.BINFMT", tmp_path)
    return tmp_path / "qemu-aarch64"


def test_local_base_needs_no_network(fake, engine, recipe):
    digest = "registry.test/base@sha256:" + "d" * 64
    fake.has(NAME, digests=["mirror.test/x@sha256:" + "e" * 64, digest])
    base = engines.resolve_base(engine, recipe)
    assert (base.id, base.digest, base.platform) == (fake.image_id, digest, "linux/amd64")
    assert base.env == {"PATH": "/usr/bin", "A": "b=c"}
    assert not fake.requests("/images/create")


def test_absent_base_is_pulled_for_platform(fake, engine, recipe):
    def arrives(_: object) -> Any:
        fake.has(NAME)
        return fake.events({"status": "Downloaded newer image"})

    fake.on_pull(arrives)
    assert engines.resolve_base(engine, recipe).digest == ""
    (request,) = fake.requests("/images/create")
    assert request.query == {"fromImage": "registry.test/base", "tag": "1", "platform": "linux/amd64"}


def test_pull_option_fetches_local_base(fake, engine, recipe):
    fake.has(NAME)
    fake.on_pull(fake.events({"status": "Image is up to date"}))
    engines.resolve_base(engine, recipe, pull=True)
    assert fake.requests("/images/create")


def test_unreachable_registry_names_recipe_line(fake, engine, recipe):
    fake.on_pull(fake.refused(500, "dial tcp: lookup registry.test: no such host"))
    with refused(ToolFailed, "no such host", where="small.yaml:3", hint="--base"):
        engines.resolve_base(engine, recipe)


def test_other_architecture_is_refused(fake, engine, recipe):
    fake.has(NAME, arch="arm64")
    with refused(
        UsageError,
        "is linux/arm64, the build is for linux/amd64",
        where="small.yaml:4",
        hint=f"docker pull --platform linux/amd64 {NAME}",
    ):
        engines.resolve_base(engine, recipe)


def test_unknown_platform_lists_allowed(engine, recipe):
    with refused(UsageError, "not for 'linux/riscv64'", hint="linux/amd64, linux/arm64"):
        engines.resolve_base(engine, recipe, platform="linux/riscv64")


def test_engines_own_platform_is_preferred(recipe):
    assert engines.choose_platform(recipe, requested=None, host="linux/arm64") == "linux/arm64"
    assert engines.choose_platform(recipe, requested=None, host="linux/s390x") == "linux/amd64"
    assert engines.choose_platform(recipe, requested="arm64", host="linux/amd64") == "linux/arm64"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "is missing"),
        ("disabled\n", "switched off"),
        (ENABLED.format(flags="P"), "without F"),
    ],
)
def test_no_emulator_stops_before_pulling(fake, engine, recipe, handler, content, reason):
    if content is not None:
        handler.write_text(content)
    with refused(ToolMissing, reason, hint="qemu-user-static"):
        engines.resolve_base(engine, recipe, platform="linux/arm64")
    assert not fake.requests("/images/create")


@pytest.mark.parametrize("system", ["Debian", "Docker Desktop"])
def test_emulator_of_the_machine_or_of_docker_desktop_lets_arm64_pass(fake, engine, recipe, handler, system):
    if system == "Debian":
        handler.write_text(ENABLED.format(flags="POF"))
    fake.on("GET", "/info", fake.json({"OperatingSystem": system}))
    fake.has(NAME, arch="arm64")
    assert engines.resolve_base(engine, recipe, platform="arm64").platform == "linux/arm64"


def test_standin_needs_to_be_named(fake, engine, recipe):
    fake.has(NAME, labels={"imgkit.standin": "1"})
    with refused(UsageError, "is a stand-in", hint=f"--base {NAME}"):
        engines.resolve_base(engine, recipe)
    assert engines.resolve_base(engine, recipe, override=NAME).standin


def test_absent_standin_is_never_pulled(fake, engine, recipe):
    with refused(UsageError, "no local stand-in", hint="ci/lab/base-image"):
        engines.resolve_base(engine, recipe, override=STANDIN)
    assert not fake.requests("/images/create")


def test_bad_base_name_asks_nothing(fake, engine, recipe):
    with refused(UsageError, "contains a blank", where="--base"):
        engines.resolve_base(engine, recipe, override="a b")
    assert not fake.requests("/images/")


SEEN = (
    'banner\nIMGKIT-SEEN {"machine": "x86_64", "python": "3.10.12", "torch": "2.3.0a0", "torch_error": "", '
    '"cuda": "12.4", "nccl": "2.20.5", "pip_conflicts": ["a needs b"], "files": {}}\n'
)


def test_probe_runs_the_base_once(fake, engine, base, container_says):
    container_says(SEEN, 0)
    first = engines.probe(engine, base)
    assert (first.torch, first.cuda, first.nccl, first.pip_conflicts) == (
        "2.3.0a0",
        "12.4",
        "2.20.5",
        ("a needs b",),
    )
    assert engines.probe(engine, base) == first
    (request,) = fake.requests("POST /containers/create")
    assert '"NetworkMode": "none"' in request.body.decode()
    assert '"Entrypoint": ["python3"]' in request.body.decode()
    assert fake.requests("DELETE /containers/imgkit-run")


def test_base_that_cannot_run_is_said(fake, engine, base, container_says):
    container_says("exec /usr/bin/python3: exec format error\n", 1)
    assert "no emulator" in engines.probe(engine, base).skipped
    container_says(SEEN, 0)
    assert engines.probe(engine, base).torch == "2.3.0a0"


def test_base_without_python_is_said(fake, engine, base):
    message = 'OCI runtime create failed: exec: "python3": executable file not found in $PATH'
    fake.on("POST", "/containers/.+/start", fake.refused(400, message))
    assert engines.probe(engine, base).skipped == "the base has no python3"
    assert fake.requests("DELETE /containers/imgkit-run")
