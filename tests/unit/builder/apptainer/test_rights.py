"""How the runtime would become root here, from a made /proc and /etc."""

from __future__ import annotations

from pathlib import Path

import pytest

from imgkit_builder.apptainer import rights


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


ALL = {"proc/sys/kernel/cap_last_cap": "40\n", "proc/self/status": "CapBnd:\t000001ffffffffff\n"}


def test_root_with_all_capabilities_needs_nothing(tmp_path: Path) -> None:
    assert rights.inspect_rights(root=machine(tmp_path, ALL), uid=0) == rights.Rights(way="as root")


def test_root_without_a_capability_gets_a_namespace(tmp_path: Path) -> None:
    lacking = {**ALL, "proc/self/status": "CapBnd:\t000001fffeffffff\n"}
    assert rights.inspect_rights(root=machine(tmp_path, lacking), uid=0).namespace


@pytest.mark.parametrize(
    "switch", ["proc/sys/user/max_user_namespaces", "proc/sys/kernel/unprivileged_userns_clone"]
)
def test_user_without_namespaces_cannot_build(tmp_path: Path, switch: str) -> None:
    found = rights.inspect_rights(root=machine(tmp_path, {switch: "0\n"}), uid=1234567)
    assert (found.way, found.namespace) == ("", False)
    assert found.problem == f"/{switch} is 0: ordinary users get no user namespace"
    assert "sysctl -w" in found.hint


def test_user_without_a_range_is_told(tmp_path: Path) -> None:
    found = rights.inspect_rights(root=machine(tmp_path, {"etc/subuid": "other:1:2\n"}), uid=1234567)
    assert found.way.startswith("as root of a user namespace")
    assert found.problem.startswith("other owners become root")


def test_range_of_the_user_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights.shutil, "which", lambda name: f"/usr/bin/{name}")
    lists = {"etc/subuid": "1234567:100000:65536\n", "etc/subgid": "1234567:100000:65536\n"}
    assert rights.inspect_rights(root=machine(tmp_path, lists), uid=1234567).problem == ""
