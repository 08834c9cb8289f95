"""How the runtime would become root here, from a made /proc and /etc."""

from __future__ import annotations

from pathlib import Path

import pytest
from file_tree import write_files

from imgkit_builder.apptainer import rights

ALL = {"proc/sys/kernel/cap_last_cap": "40", "proc/self/status": "CapBnd:\t000001ffffffffff"}


def inspect(root: Path, files: dict[str, str], uid: int = 1234567) -> rights.Rights:
    return rights.inspect_rights(root=write_files(root, files), uid=uid)


def test_root_with_all_capabilities_needs_nothing(tmp_path):
    assert inspect(tmp_path, ALL, uid=0) == rights.Rights(way="as root")


def test_root_without_a_capability_gets_a_namespace(tmp_path):
    lacking = {**ALL, "proc/self/status": "CapBnd:\t000001fffeffffff"}
    assert inspect(tmp_path, lacking, uid=0).needs_namespace


@pytest.mark.parametrize(
    "switch", ["proc/sys/user/max_user_namespaces", "proc/sys/kernel/unprivileged_userns_clone"]
)
def test_user_without_namespaces_cannot_build(tmp_path, switch):
    user_rights = inspect(tmp_path, {switch: "0"})
    assert (user_rights.way, user_rights.needs_namespace) == ("", False)
    assert user_rights.problem == f"/{switch} is 0: ordinary users get no user namespace"
    assert "sysctl -w" in user_rights.hint


def test_user_without_a_range_is_told(tmp_path):
    user_rights = inspect(tmp_path, {"etc/subuid": "other:1:2"})
    assert user_rights.way.startswith("as root of a user namespace")
    assert user_rights.problem.startswith("other owners become root")


def test_range_of_the_user_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(rights.shutil, "which", lambda name: f"/usr/bin/{name}")
    user_range = "1234567:100000:65536"
    assert inspect(tmp_path, {"etc/subuid": user_range, "etc/subgid": user_range}).problem == ""
