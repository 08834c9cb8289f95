"""Conversions with every runtime that clusters have, and with everything that runtimes do wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from notes import Notes
from refusals import refused
from sample_image import SampleImage, layer_tar
from tars import tar_of_files

from imgkit_builder.archive import stored
from imgkit_builder.sif import convert, image, runtime, workspace
from imgkit_builder.sif.conversion import Converted, Options
from imgkit_builder.sif.entries import Archive, EngineImage
from imgkit_builder.sif.runtime import scratch_env
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, ToolMissing, UsageError


class Lab:
    """An archive to convert, fake runtimes to convert it with, and what the conversion reports."""

    def __init__(self, archive: Path, folder: Path, install: Callable[..., Any]) -> None:
        self.archive = archive
        self.folder = folder
        self.install = install
        self.notes = Notes()
        self.target = folder / "out/made.sif"
        self.target.parent.mkdir()

    def write(self, sample: SampleImage, **changes: Any) -> None:
        """Replace the archive by one of a changed image."""
        image = dataclasses.replace(sample, **changes)
        self.archive.write_bytes(tar_of_files(image.legacy_members()))

    def sif(self, **options: Any) -> Converted:
        return convert.convert(Archive(path=self.archive), self.target, Options(**options), self.notes)

    def outputs(self) -> list[str]:
        """Return the names in the target's folder, which is also that of temporary files."""
        return sorted(path.name for path in self.target.parent.iterdir())


@pytest.fixture
def lab(archive: Path, tmp_path: Path, install: Callable[..., Any]) -> Lab:
    return Lab(archive, tmp_path, install)


@pytest.mark.parametrize(
    ("name", "version", "compression"),
    [
        ("apptainer 1.3", "apptainer 1.3.6-1.el8", "runtime"),
        ("apptainer 1.4", "apptainer 1.4.5", "zstd 3"),
        ("apptainer 1.5", "apptainer 1.5.3", "zstd 3"),
        ("singularity-ce 4.1", "singularity-ce 4.1.0-jammy", "runtime"),
        ("singularity 3.8", "singularity 3.8.7-1.el8", "runtime"),
        ("singularitypro 3.9", "singularitypro 3.9-4.el8", "runtime"),
    ],
)
def test_each_runtime_is_understood_and_gets_its_flags(lab, sample, name, version, compression):
    fake = lab.install(name)
    converted = lab.sif()
    (build,) = fake.calls("build")
    argv = build["argv"]
    assert ("--mksquashfs-args" in argv) == (compression == "zstd 3")
    if "--mksquashfs-args" in argv:
        passed = argv[argv.index("--mksquashfs-args") + 1]
        assert passed.startswith("-comp zstd -Xcompression-level 3 -b 256K -processors ")
    else:
        assert any("gzip 9 by default" in note for note in lab.notes.texts)
    assert argv[-1] == "oci:made_latest"
    assert "sudo" not in argv
    assert converted.record.runtime == version
    assert converted.record.compression == compression
    assert converted.record.image_id == sample.image_id
    assert lab.outputs() == ["made.sif"]
    assert image.read(converted.path).record == converted.record


def test_gzip_asked_for(lab):
    fake = lab.install()
    lab.sif(compression="gzip")
    (build,) = fake.calls("build")
    assert "-comp gzip -Xcompression-level 6 -processors" in " ".join(build["argv"])


def test_zstd_from_old_runtime_refused(lab):
    lab.install("apptainer 1.3")
    with pytest.raises(UsageError, match="no --mksquashfs-args"):
        lab.sif(compression="zstd")


def test_scratch_variables_both_prefixes(lab):
    fake = lab.install()
    before = dict(os.environ)
    lab.sif(tmpdir=lab.folder)
    env = fake.calls("build")[0]["env"]
    assert env["APPTAINER_TMPDIR"] == env["SINGULARITY_TMPDIR"] == env["TMPDIR"]
    assert env["APPTAINER_CACHEDIR"] == env["SINGULARITY_CACHEDIR"]
    assert env["TMPDIR"].startswith(f"{lab.folder}/.imgkit-sif.")
    assert dict(os.environ) == before
    assert not list(lab.folder.glob(".imgkit*"))


def test_no_runtime_names_the_module(lab, monkeypatch):
    monkeypatch.setenv("PATH", str(lab.folder))
    with refused(
        ToolMissing, "singularity or apptainer is not on PATH", hint="module load singularity/3.11"
    ) as caught:
        lab.sif(module_hint="module load singularity/3.11")
    assert "apt install squashfs-tools" in str(caught.value.hint)
    assert lab.outputs() == []


def test_game_called_singularity_refused(lab):
    lab.install(version="Endgame: Singularity 1.00")
    with pytest.raises(ToolMissing, match="not Singularity 3"):
        lab.sif()


def test_name_apptainer_alone_works(lab):
    fake = lab.install("apptainer 1.4")
    assert fake.command == "apptainer"
    lab.sif()
    assert {call["name"] for call in fake.calls()} == {"apptainer"}


def test_chosen_runtime_runs_whatever_path_says(lab, monkeypatch):
    fake = lab.install("apptainer 1.4")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    lab.sif(runtime=str(fake.folder / fake.command))
    assert fake.calls("exec")


def test_environment_of_this_process_stays(lab):
    """Other threads see no variable of a run, not even while it goes on."""
    fake = lab.install("apptainer 1.4")
    tool, before, seen = runtime.find_runtime(), dict(os.environ), []
    variables = scratch_env(lab.folder) | {"TMPDIR": str(lab.folder)}
    runtime.run(tool, ["--version"], env=variables, on_line=lambda _: seen.append(dict(os.environ)))
    assert seen == [before]
    assert fake.calls()[-1]["env"]["TMPDIR"] == str(lab.folder)


def test_megabyte_of_stderr_drained(lab):
    lab.install(behaviour="noisy")
    converted = lab.sif()
    assert sum(line.startswith("warn rootless") for line in lab.notes.lines) == 16384
    assert converted.log is not None
    assert converted.log.stat().st_size > 1 << 20


def test_undecodable_output_survives(lab):
    lab.install(behaviour="stray byte")
    lab.sif()
    assert "caf\\xe9" in lab.notes.lines


@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        ("fail", ToolFailed, "exit code 255"),
        ("fail late", ToolFailed, "exit code 255"),
        ("no file", ToolFailed, "wrote no file"),
        ("empty", ToolFailed, "Architecture not recognized"),
        ("tiny", CheckFailed, "files are missing"),
        ("wrong arch", CheckFailed, "marked arm64, but the image is amd64"),
        ("no labels", CheckFailed, "its label org.opencontainers.image.title is None"),
        ("no exec", ToolFailed, "'true' does not run in the new .sif"),
    ],
)
@pytest.mark.parametrize("stale", [True, False], ids=["old file", "no old file"])
def test_failure_keeps_the_old_file(lab, sample, behaviour, kind, message, stale):
    lab.write(sample, layers=[layer_tar("big", 8 << 20)])
    fake = lab.install()
    old = lab.sif().path.read_bytes()
    if not stale:
        lab.target.unlink()
    fake.set(behaviour=behaviour)
    with pytest.raises(kind, match=message):
        lab.sif(force=True)
    assert lab.outputs() == (["made.sif"] if stale else [])
    if stale:
        assert lab.target.read_bytes() == old


@pytest.mark.parametrize("behaviour", ["killed", "killed child"])
def test_killed_runtime_names_a_job(lab, behaviour):
    lab.install(behaviour=behaviour)
    with pytest.raises(ToolFailed) as caught:
        lab.sif()
    assert str(caught.value.hint).endswith(
        "on a login node, let a job do this: the same command with --submit --time 1h"
    )


def test_failure_quotes_and_names_log(lab):
    lab.install(behaviour="fail")
    with pytest.raises(ToolFailed) as caught:
        lab.sif()
    hint = str(caught.value.hint)
    assert "while extracting: no space left on device" in hint
    log = Path(hint.rpartition("the full log: ")[2].strip())
    assert "FATAL" in log.read_text()


def test_exec_not_possible_can_be_skipped(lab):
    fake = lab.install(behaviour="no exec")
    assert lab.sif(test=False).path.exists()
    assert fake.calls("exec") == []


def test_foreign_architecture_not_executed(lab, sample):
    lab.write(sample, arch="386")
    fake = lab.install(behaviour="no exec")
    assert lab.sif().arch == "386"
    assert fake.calls("exec") == []
    assert any("the image is 386" in note for note in lab.notes.texts)


def test_baked_manifest_must_fit(lab, sample):
    lab.write(sample, labels={"imgkit.version": "0.3.0", "imgkit.recipe.sha256": "aa"})
    baked = {
        "schema": 1,
        "imgkit": "0.3.0",
        "recipe": "mn5",
        "recipe_sha256": "aa",
        "base": {"name": "b", "probe": {"pip_conflicts": []}},
        "platform": "linux/amd64",
        "wheel_sha256": "cc",
    }
    fake = lab.install(manifest=json.dumps(baked))
    assert lab.sif().path.exists()
    fake.set(manifest=json.dumps(baked | {"recipe_sha256": "bb"}))
    with pytest.raises(CheckFailed, match="of recipe bb, its label says aa"):
        lab.sif(force=True)
    fake.set(manifest="cat: no such file")
    with pytest.raises(CheckFailed, match="json in it cannot be read"):
        lab.sif(force=True)


def test_second_run_is_up_to_date(lab):
    fake = lab.install()
    first = lab.sif()
    again = lab.sif()
    assert not first.up_to_date
    assert again.up_to_date
    assert again.record == first.record
    assert len(fake.calls("build")) == 1


@pytest.mark.parametrize("reason", ["force", "other runtime", "other compression", "damaged", "other image"])
def test_not_up_to_date_converts_again(lab, sample, reason):
    fake = lab.install()
    path = lab.sif().path
    if reason == "other runtime":
        fake.set(version="apptainer version 1.4.6")
    if reason == "damaged":
        with path.open("r+b") as stream:
            stream.seek(32768 + 2000)
            stream.write(b"?")
    if reason == "other image":
        lab.write(sample, labels={"new": "1"})
    compression = "gzip" if reason == "other compression" else "auto"
    again = lab.sif(force=reason == "force", compression=compression)
    assert not again.up_to_date
    assert len(fake.calls("build")) == 2


def test_target_of_another_kind_refused(lab):
    lab.install()
    lab.target.write_text("my thesis")
    with pytest.raises(UsageError, match="exists and is no"):
        lab.sif()
    assert lab.target.read_text() == "my thesis"
    assert lab.sif(force=True).path == lab.target


def test_runtime_builds_on_request_and_says_why(lab):
    fake = lab.install()
    converted = lab.sif(writer="runtime")
    assert (converted.record.route, converted.record.runtime) == ("layers", "apptainer 1.4.5")
    assert len(fake.calls("build")) == 1
    assert lab.notes.texts[0] == "writer: apptainer 1.4.5, started through spython: --writer runtime"
    assert lab.sif(writer="runtime").up_to_date


def test_engine_image_without_mksquashfs_names_both_ways(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    laptop_image = MagicMock(spec=EngineImage)
    with refused(ToolMissing, hint="brew install squashfs") as caught:
        convert.list_commands(laptop_image, tmp_path / "x.sif", Options())
    assert "imgkit save IMAGE" in str(caught.value.hint)


def test_listed_commands_can_be_pasted_into_a_shell(lab, tmp_path):
    lab.install()
    folder = tmp_path / "my images"
    folder.mkdir()
    lines = convert.list_commands(Archive(path=lab.archive), folder / "x.sif", Options(writer="runtime"))
    commands = [shlex.split(line, comments=True) for line in lines]
    assert ["cd", str(folder / ".imgkit-sif.TOKEN")] in commands
    program, _, target = commands[-1]
    assert (program, target) == ("mv", str(folder / "x.sif"))


def test_image_of_an_engine_reaches_the_runtime_by_its_save_stream(lab, sample):
    fake = lab.install()
    saved = MagicMock(spec=EngineImage)
    saved.name, saved.size_bytes = "mine:1", lab.archive.stat().st_size
    saved.config = stored.open_image(lab.archive).selected.config
    saved.save = lambda: contextlib.nullcontext(iter([lab.archive.read_bytes()]))
    record = convert.convert(saved, lab.target, Options(writer="runtime"), Notes()).record
    assert fake.calls("build")[0]["argv"][-1] == "oci:mine_1"
    assert (record.route, record.source, record.image_id) == ("layers", "mine:1", sample.image_id)
    assert not saved.export.called


def test_writer_imgkit_does_not_fall_back_to_a_runtime(lab):
    fake = lab.install()
    with pytest.raises(ToolMissing, match="mksquashfs"):
        lab.sif(writer="imgkit")
    assert fake.calls("build") == []


def test_no_space_refused_before_work(lab, monkeypatch):
    fake = lab.install()
    usage = type("usage", (), {"free": 100_000})
    monkeypatch.setattr(workspace, "disk_usage", lambda _: usage)
    with pytest.raises(CheckFailed, match=r"100\.0 kB are free"):
        lab.sif()
    assert fake.calls("build") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_stopped_midway_leaves_nothing(lab, number):
    fake = lab.install(behaviour="hang")
    with _verb(lab) as process:
        _wait_for(fake.folder / "grandchild")
        process.send_signal(number)
        assert process.wait(20) != 0
    assert lab.outputs() == []
    assert not list(lab.folder.glob(".imgkit*"))
    assert _gone(int((fake.folder / "grandchild").read_text()))
    assert all(_gone(call["pid"]) for call in fake.calls("build"))


def test_interrupted_reader_ends_the_group(lab):
    """When `run` raises, nothing that it started runs any more."""
    fake = lab.install(behaviour="hang")
    tool = runtime.find_runtime()

    def interrupt(line: str) -> None:
        _wait_for(fake.folder / "grandchild")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runtime.run(
            tool,
            ["build", "--force", str(lab.folder / "x"), "oci:x"],
            env=scratch_env(lab.folder),
            on_line=interrupt,
        )
    pids = [int((fake.folder / "grandchild").read_text()), *(call["pid"] for call in fake.calls("build"))]
    assert all(_gone(pid, within_s=0) for pid in pids)


def test_killed_midway_cleaned_by_the_next(lab):
    fake = lab.install(behaviour="hang")
    with _verb(lab) as process:
        _wait_for(fake.folder / "grandchild")
        process.kill()
        process.wait(20)
    assert "made.sif" not in lab.outputs()
    assert all(name.startswith(".imgkit-") for name in lab.outputs())
    assert list(lab.folder.glob(".imgkit-sif.*"))
    # Its children notice that they are orphans.
    assert _gone(int((fake.folder / "grandchild").read_text()))
    fake.set(behaviour="good")
    assert lab.sif().path.exists()
    assert lab.outputs() == ["made.sif"]
    assert not list(lab.folder.glob(".imgkit*"))


def test_second_run_at_once_refused(lab):
    fake = lab.install(behaviour="hang")
    with _verb(lab) as process:
        _wait_for(fake.folder / "grandchild")
        with pytest.raises(
            UsageError, match=rf"another imgkit process is writing this file .pid {process.pid} "
        ):
            lab.sif()
        process.terminate()
        process.wait(20)


@contextlib.contextmanager
def _verb(lab: Lab) -> Iterator[subprocess.Popen[bytes]]:
    """``imgkit sif`` as its own process, temporary files in the folder of `lab`."""
    argv = [sys.executable, "-m", "imgkit_builder", "sif", str(lab.archive), "--tmpdir", str(lab.folder)]
    with subprocess.Popen([*argv, "-o", str(lab.target)]) as process:
        try:
            yield process
        finally:
            process.kill()


def _wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.02)


def _gone(pid: int, within_s: float = 15) -> bool:
    """Return True if the process ends within some seconds; a zombie has ended."""
    end = time.monotonic() + within_s
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)
