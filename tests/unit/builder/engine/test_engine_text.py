"""Small pure parts of the engine: step lines, labels, names, messages, commands."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import requests
from docker.errors import create_api_error_from_http_exception

from imgkit_builder.engine import images
from imgkit_builder.engine.address import Endpoint
from imgkit_builder.engine.building import _label_instruction
from imgkit_builder.engine.containers import shell_argv
from imgkit_builder.engine.errors import explain_message, registry_of, translate_errors
from imgkit_builder.engine.following import instruction_lines
from imgkit_builder.engine.image_source import full_platform
from imgkit_builder.engine.images import ImageFacts, ImageInfo, repository
from imgkit_builder.oci.manifest import STANDIN_LABEL
from imgkit_entrypoints.errors import ToolFailed, UsageError


def test_steps_map_to_first_lines():
    text = "# c\nARG A=1\nFROM x\n\nRUN a \\\n  # inside\n\n  && b\n# c \\\nCOPY a b\n"
    assert instruction_lines(text) == (2, 3, 5, 10)
    assert instruction_lines("# only\n\n") == ()


def test_label_values_cannot_break_out():
    line = _label_instruction({"k": 'a "b" $HOME \\ c\nRUN evil'})
    assert line == 'LABEL "k"="a \\"b\\" \\$HOME \\\\ c RUN evil"\n'


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("debian", "debian"),
        ("debian:12", "debian"),
        ("host:5000/a/b", "host:5000/a/b"),
        ("host:5000/a/b:1@sha256:00", "host:5000/a/b"),
    ],
)
def test_repository_leaves_ports_alone(name, expected):
    assert repository(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("debian:12", ""), ("group/x:1", ""), ("nvcr.io/a/b:1", "nvcr.io"), ("localhost/x", "localhost")],
)
def test_registry_is_told_from_group(name, expected):
    assert registry_of(name) == expected


@pytest.mark.parametrize("text", ["arm64", "linux/arm64", "linux/arm64/v8"])
def test_platform_spellings_are_one(text):
    assert full_platform(text) == "linux/arm64"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("An image does not exist locally with the tag: x", UsageError),
        ("invalid reference format: repository name must be lowercase", UsageError),
        ("manifest unknown", UsageError),
        ("dial tcp 127.0.0.1:5999: connect: connection refused", ToolFailed),
        ("something new", ToolFailed),
    ],
)
def test_message_decides_the_kind(message, kind):
    error = explain_message(message, doing="push x", name="x")
    assert type(error) is kind


def test_unknown_message_is_quoted_in_full():
    assert "push x: something new" in str(explain_message("\x1b[91msomething new\x1b[0m", doing="push x"))


HERE = Endpoint(host="unix:///var/run/docker.sock")


def shell(endpoint: Endpoint = HERE, *, gpus: bool = False, host: bool = True) -> str:
    return " ".join(shell_argv("mn5", gpus=gpus, share_host=host, endpoint=endpoint))


def test_shell_asks_for_gpus_only_if_told():
    assert shell().endswith("--rm mn5 bash")
    assert "--gpus" not in shell()
    assert "--ipc=host" in shell()
    assert shell(gpus=True).endswith("--rm --gpus all mn5 bash")


def test_shell_shares_nothing_unasked():
    argv = shell(host=False)
    assert " --network none " in argv
    for option in ("--ipc", "--volume", "--mount"):
        assert option not in argv


@pytest.mark.parametrize(
    ("program", "endpoint", "start"),
    [
        ("docker", HERE, "docker run"),
        ("docker", Endpoint(host="unix:///p.sock", source="DOCKER_HOST"), "docker run"),
        ("docker", Endpoint(host="unix:///p.sock"), "docker --host unix:///p.sock run"),
        ("podman", HERE, f"podman --url {HERE.host} run"),
    ],
)
def test_shell_names_a_socket_that_its_program_would_not_find(monkeypatch, program, endpoint, start):
    monkeypatch.setattr("shutil.which", lambda name: name if name == program else None)
    assert shell(endpoint).startswith(f"{start} ")


def test_facts_name_a_standin_first_and_have_a_schema():
    image = ImageInfo(
        ref="sha256:1",
        id="sha256:1",
        tags=("mn5:latest",),
        platform="linux/amd64",
        labels={"a": "b"},
        env={},
        user="",
        diff_ids=("sha256:2",),
        size_bytes=5_000_000,
        digest="",
    )
    assert "STAND-IN" not in "".join(ImageFacts(image=image).lines())
    data = ImageFacts(image=image).to_dict()
    assert (data["schema"], data["standin"], data["labels"]) == (1, False, {"a": "b"})
    standin = dataclasses.replace(image, labels={STANDIN_LABEL: "1"})
    assert ImageFacts(image=standin).lines()[0].startswith("STAND-IN")


def test_configuration_that_is_not_named_by_a_sha256_gives_no_id():
    manifest = b'{"config": {"digest": "sha256:../etc/passwd"}}'
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    assert images._find_config_digest(digest, "linux/amd64", {digest: manifest}.get) is None


def test_error_without_a_message_is_told():
    """Podman 5 answers so to a push, and the SDK then fails with a KeyError."""
    answer = requests.Response()
    answer.status_code, answer._content = 500, b'{"error": "dial tcp: connection refused"}'

    def ask() -> None:
        try:
            answer.raise_for_status()
        except requests.exceptions.HTTPError as error:
            create_api_error_from_http_exception(error)

    with pytest.raises(ToolFailed, match="push x: dial tcp: connection refused"), translate_errors("push x"):
        ask()
