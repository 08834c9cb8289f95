"""Fake runtimes: programs that answer as Singularity and Apptainer do."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from file_tree import write_program


@dataclass(frozen=True, kw_only=True)
class FakeRuntime:
    """A fake that is alone on PATH."""

    folder: Path
    command: str

    def calls(self, verb: str | None = None) -> list[dict[str, Any]]:
        """Return its calls in order: all, or those of one verb."""
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        calls = [json.loads(line) for line in lines]
        if verb is None:
            return calls
        return [call for call in calls if call["argv"][:1] == [verb] and "--help" not in call["argv"]]

    def set(self, **settings: Any) -> None:
        """Change its settings."""
        path = self.folder / "settings.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))


OLD_FLAGS = ("--disable-cache", "--no-https")
RUNTIMES = {
    "apptainer 1.3": ("apptainer", "apptainer version 1.3.6-1.el8", OLD_FLAGS),
    "apptainer 1.4": ("apptainer", "apptainer version 1.4.5", (*OLD_FLAGS, "--mksquashfs-args")),
    "apptainer 1.5": (
        "singularity",
        "apptainer version 1.5.3",
        (*OLD_FLAGS, "--mksquashfs-args", "--reproducible"),
    ),
    "singularity-ce 4.1": ("singularity", "singularity-ce version 4.1.0-jammy", OLD_FLAGS),
    "singularity 3.8": ("singularity", "singularity version 3.8.7-1.el8", ("--disable-cache",)),
    "singularitypro 3.9": ("singularity", "SingularityPRO version 3.9-4.el8", ()),
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRuntime]:
    """Install one of `RUNTIMES` as the only runtime on PATH."""

    def _install(name: str = "apptainer 1.4", **settings: Any) -> FakeRuntime:
        command, version, flags = RUNTIMES[name]
        folder = tmp_path / "bin"
        folder.mkdir()
        source = Path(__file__).with_name("fake_runtime.py").read_text()
        program = folder / command
        # sh and Python read the first lines in turn: "#!" cannot name an interpreter whose path has a space.
        start = f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} -IS \"$0\" \"$@\"\n' '''\n"
        program.write_text(start + source)
        program.chmod(0o755)
        # The runtime builds only where nothing else squashes: this one knows no option.
        write_program(folder / "mksquashfs", "echo zstd")
        fake = FakeRuntime(folder=folder, command=command)
        good = {"version": version, "build_flags": flags, "behaviour": "good", "manifest": "{}"}
        (folder / "settings.json").write_text(json.dumps(good | settings))
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        return fake

    return _install


@pytest.fixture(autouse=True)
def _temporary_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes into the user's home or follows the user's variables."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("IMGKIT_TMPDIR", "APPTAINER_TMPDIR", "SINGULARITY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
