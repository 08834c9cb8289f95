"""Who may build with buildah."""

from __future__ import annotations

from pathlib import Path

import pytest

from imgkit_builder.buildah import program
from imgkit_entrypoints.errors import CheckFailed, ToolMissing

USER = 4242


def machine(root: Path, *, ranges: bool) -> Path:
    (root / "etc").mkdir()
    for name in ("subuid", "subgid"):
        (root / "etc" / name).write_text(f"{USER}:100000:65536\n" if ranges else "other:1:2\n")
    return root


def test_root_needs_no_further_users(tmp_path: Path) -> None:
    assert program.look(root=machine(tmp_path, ranges=False), uid=0).way == "as root"


def test_user_with_ranges_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/newuidmap").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = program.look(root=machine(tmp_path, ranges=True), uid=USER)
    assert (found.fault, "subuid" in found.way) == ("", True)


def test_user_without_ranges_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = program.look(root=machine(tmp_path, ranges=False), uid=USER)
    assert (found.way, "--with apptainer" in found.hint) == ("", True)
    monkeypatch.setattr(program, "look", lambda: found)
    monkeypatch.setattr(program.process, "need", lambda *_: None)
    with pytest.raises(CheckFailed, match="buildah needs several users"):
        program.needed()


def test_missing_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ToolMissing, match="buildah"):
        program.needed()
