"""The engines that ``imgkit doctor`` lists; tests/lab/engine asks real ones."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from imgkit_builder.engine import address
from imgkit_builder.examine import doctor


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The contexts ``old`` and ``far``, and no engine anywhere."""
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("DOCKER_CONFIG", "HOME", "XDG_RUNTIME_DIR", "PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(address, "DEFAULT_HOST", f"unix://{tmp_path}/docker.sock")
    monkeypatch.setattr("os.getuid", lambda: 1000)
    for name, host in (("old", f"unix://{tmp_path}/old.sock"), ("far", "ssh://me@far")):
        path = tmp_path / "contexts/meta" / hashlib.sha256(name.encode()).hexdigest() / "meta.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"Name": name, "Endpoints": {"docker": {"Host": host}}}))
    return tmp_path


def test_silent_contexts_are_named_and_do_not_fail(contexts: Path) -> None:
    first, *others = doctor.checks()
    assert (first.name, first.verdict) == ("docker", "fail")
    assert [(one.name, one.verdict) for one in others] == [("not used", "skip")] * 2
    assert others[0].found == "context far at ssh://me@far: not queried over ssh"
    assert others[1].found.startswith(f"context old at unix://{contexts}/old.sock: no Docker engine answers")


def test_wrong_context_still_lists_the_others(contexts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONTEXT", "gone")
    first, *others = doctor.checks()
    assert first.verdict == "fail"
    assert "unset DOCKER_CONTEXT" in first.hint
    assert len(others) == 2


@pytest.mark.parametrize(
    ("source", "typed"),
    [
        ("", "docker context use lab"),
        ("/home/me/.docker/config.json", "docker context use lab"),
        ("DOCKER_HOST", "unset DOCKER_HOST; docker context use lab"),
        ("DOCKER_CONTEXT", "unset DOCKER_CONTEXT; docker context use lab"),
    ],
)
def test_choice_of_a_context_beats_what_is_in_use(source: str, typed: str) -> None:
    used = address.Endpoint(host="unix:///used.sock", source=source)
    assert doctor.choice(address.Endpoint(host="tcp://far:2376", context="lab"), used) == typed


def test_choice_of_a_socket_is_a_variable() -> None:
    used = address.Endpoint(host="tcp://far:2376", source="DOCKER_CONTEXT", context="far")
    assert doctor.choice(address.Endpoint(host="unix:///x.sock"), used) == "export DOCKER_HOST=unix:///x.sock"
