"""The host's architecture, and what its kernel emulates."""

from __future__ import annotations

from pathlib import Path

import pytest

from imgkit_builder.oci import platform


@pytest.mark.parametrize(
    ("machine", "arch"),
    [("x86_64", "amd64"), ("AMD64", "amd64"), ("aarch64", "arm64"), ("arm64", "arm64"), ("s390x", "s390x")],
)
def test_kernels_word_becomes_the_images_word(monkeypatch, machine, arch):
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert platform.host_arch() == arch
    assert platform.host_platform() == f"linux/{arch}"
    assert platform.runs_here(arch, root=Path("/nonexistent"))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "is missing"),
        ("disabled\nflags: F\n", "switched off"),
        ("", "switched off"),
        ("enabled\nflags: P\n", "without F"),
        ("enabled\ninterpreter /q\n", "without F"),
        ("enabled\ninterpreter /q\nflags: POF\n", ""),
    ],
)
def test_handler_must_be_enabled_and_fixed(tmp_path, content, fault):
    folder = tmp_path / "proc/sys/fs/binfmt_misc"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "qemu-ppc64le").write_text(content)
    problem = platform.emulator_problem("ppc64le", root=tmp_path)
    assert fault in problem
    assert bool(problem) == bool(fault)
    assert platform.runs_here("ppc64le", root=tmp_path) != bool(fault)
