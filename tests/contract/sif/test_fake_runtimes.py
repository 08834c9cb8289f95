"""Conversions with every runtime that clusters have, and with everything that runtimes do wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from sample_image import SampleImage, layer_tar
from tars import tar_of_files

from imgkit_builder.archive import stored
from imgkit_builder.sif import convert, image, runtime, workspace
from imgkit_builder.sif.conversion import Converted, Options
from imgkit_builder.sif.entries import Archive, EngineImage
from imgkit_builder.sif.runtime import scratch_env
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, ToolFailed, ToolMissing, UsageError

Install = Callable[..., Any]


class Notes:
    """A reporter that records all that it gets."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.lines: list[str] = []
        self.notes: list[str] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def advance(self, done_bytes: int, total_bytes: int | None = None) -> None:
        pass

    def line(self, text: str) -> None:
        self.lines.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)


def sif(archive: Path, tmp_path: Path, notes: Notes | None = None, **options: Any) -> Converted:
    target = tmp_path / "out" / "made.sif"
    target.parent.mkdir(exist_ok=True)
    return convert.convert(Archive(path=archive), target, Options(**options), notes or Notes())


def output_names(tmp_path: Path) -> list[str]:
    """Return the names in the target's folder, which is also that of temporary files."""
    return sorted(path.name for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("name", "compression"),
    [
        ("apptainer 1.3", "runtime"),
        ("apptainer 1.4", "zstd 3"),
        ("apptainer 1.5", "zstd 3"),
        ("singularity-ce 4.1", "runtime"),
        ("singularity 3.8", "runtime"),
        ("singularitypro 3.9", "runtime"),
    ],
)
def test_each_runtime_gets_its_flags(
    archive: Path, sample: SampleImage, tmp_path: Path, install: Install, name: str, compression: str
) -> None:
    fake, notes = install(name), Notes()
    converted = sif(archive, tmp_path, notes)
    (build,) = fake.calls("build")
    argv = build["argv"]
    assert ("--mksquashfs-args" in argv) == (compression == "zstd 3")
    if "--mksquashfs-args" in argv:
        passed = argv[argv.index("--mksquashfs-args") + 1]
        assert passed.startswith("-comp zstd -Xcompression-level 3 -b 256K -processors ")
    else:
        assert any("gzip 9 by default" in note for note in notes.notes)
    assert argv[-1] == "oci:made_latest"
    assert "sudo" not in argv
    assert converted.record.compression == compression
    assert converted.record.image_id == sample.image_id
    assert output_names(tmp_path) == ["made.sif"]
    assert image.read(converted.path).record == converted.record


def test_gzip_asked_for(archive: Path, tmp_path: Path, install: Install) -> None:
    fake = install()
    sif(archive, tmp_path, compression="gzip")
    (build,) = fake.calls("build")
    assert "-comp gzip -Xcompression-level 6 -processors" in " ".join(build["argv"])


def test_zstd_from_old_runtime_refused(archive: Path, tmp_path: Path, install: Install) -> None:
    install("apptainer 1.3")
    with pytest.raises(UsageError, match="no --mksquashfs-args"):
        sif(archive, tmp_path, compression="zstd")


def test_scratch_variables_both_prefixes(archive: Path, tmp_path: Path, install: Install) -> None:
    fake = install()
    before = dict(os.environ)
    sif(archive, tmp_path, tmpdir=tmp_path)
    env = fake.calls("build")[0]["env"]
    assert env["APPTAINER_TMPDIR"] == env["SINGULARITY_TMPDIR"] == env["TMPDIR"]
    assert env["APPTAINER_CACHEDIR"] == env["SINGULARITY_CACHEDIR"]
    assert env["TMPDIR"].startswith(f"{tmp_path}/.imgkit-sif.")
    assert dict(os.environ) == before
    assert not list(tmp_path.glob(".imgkit*"))


def test_no_runtime_names_the_module(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissing, match="singularity or apptainer is not on PATH") as caught:
        sif(archive, tmp_path, module_hint="module load singularity/3.11")
    assert "module load singularity/3.11" in str(caught.value.hint)
    assert "apt install squashfs-tools" in str(caught.value.hint)
    assert output_names(tmp_path) == []


def test_game_called_singularity_refused(archive: Path, tmp_path: Path, install: Install) -> None:
    install(version="Endgame: Singularity 1.00")
    with pytest.raises(ToolMissing, match="not Singularity 3"):
        sif(archive, tmp_path)


@pytest.mark.parametrize(
    ("line", "flavour", "version"),
    [
        ("apptainer version 1.4.5", "apptainer", "1.4.5"),
        ("singularity-ce version 4.1.0", "singularity-ce", "4.1.0"),
        ("singularity version 3.8.7", "singularity", "3.8.7"),
        ("SingularityPRO version 3.11-2.el8", "singularitypro", "3.11-2.el8"),
    ],
)
def test_version_lines_understood(install: Install, line: str, flavour: str, version: str) -> None:
    install(version=line)
    program = runtime.find_runtime()
    assert (program.flavour, program.version) == (flavour, version)


def test_name_apptainer_alone_works(archive: Path, tmp_path: Path, install: Install) -> None:
    fake = install("apptainer 1.4")
    assert fake.command == "apptainer"
    sif(archive, tmp_path)
    assert {call["name"] for call in fake.calls()} == {"apptainer"}


def test_chosen_runtime_runs_whatever_path_says(
    archive: Path, tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = install("apptainer 1.4")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    sif(archive, tmp_path, runtime=str(fake.folder / fake.command))
    assert fake.calls("exec")


def test_environment_of_this_process_stays(tmp_path: Path, install: Install) -> None:
    """Other threads see no variable of a run, not even while it goes on."""
    fake = install("apptainer 1.4")
    tool, before, seen = runtime.find_runtime(), dict(os.environ), []
    variables = scratch_env(tmp_path) | {"TMPDIR": str(tmp_path)}
    runtime.run(tool, ["--version"], env=variables, on_line=lambda _: seen.append(dict(os.environ)))
    assert seen == [before]
    assert fake.calls()[-1]["env"]["TMPDIR"] == str(tmp_path)


def test_megabyte_of_stderr_drained(archive: Path, tmp_path: Path, install: Install) -> None:
    install(behaviour="noisy")
    notes = Notes()
    converted = sif(archive, tmp_path, notes)
    assert sum(line.startswith("warn rootless") for line in notes.lines) == 16384
    assert converted.log is not None
    assert converted.log.stat().st_size > 1 << 20


def test_undecodable_output_survives(archive: Path, tmp_path: Path, install: Install) -> None:
    install(behaviour="stray byte")
    notes = Notes()
    sif(archive, tmp_path, notes)
    assert "caf\\xe9" in notes.lines


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
def test_failure_keeps_the_old_file(
    sample: SampleImage,
    tmp_path: Path,
    install: Install,
    behaviour: str,
    kind: type[ImgkitError],
    message: str,
    stale: bool,
) -> None:
    big = dataclasses.replace(sample, layers=[layer_tar("big", 8 << 20)])
    archive = tmp_path / "big.tar"
    archive.write_bytes(tar_of_files(big.legacy_members()))
    fake = install()
    old = sif(archive, tmp_path).path.read_bytes()
    if not stale:
        (tmp_path / "out/made.sif").unlink()
    fake.set(behaviour=behaviour)
    with pytest.raises(kind, match=message):
        sif(archive, tmp_path, force=True)
    assert output_names(tmp_path) == (["made.sif"] if stale else [])
    if stale:
        assert (tmp_path / "out/made.sif").read_bytes() == old


@pytest.mark.parametrize("behaviour", ["killed", "killed child"])
def test_killed_runtime_names_a_job(archive: Path, tmp_path: Path, install: Install, behaviour: str) -> None:
    install(behaviour=behaviour)
    with pytest.raises(ToolFailed) as caught:
        sif(archive, tmp_path)
    assert str(caught.value.hint).endswith(
        "on a login node, let a job do this: the same command with --submit --time 1h"
    )


def test_failure_quotes_and_names_log(archive: Path, tmp_path: Path, install: Install) -> None:
    install(behaviour="fail")
    with pytest.raises(ToolFailed) as caught:
        sif(archive, tmp_path)
    hint = str(caught.value.hint)
    assert "while extracting: no space left on device" in hint
    log = Path(hint.rpartition("the full log: ")[2].strip())
    assert "FATAL" in log.read_text()


def test_exec_not_possible_can_be_skipped(archive: Path, tmp_path: Path, install: Install) -> None:
    fake = install(behaviour="no exec")
    assert sif(archive, tmp_path, test=False).path.exists()
    assert fake.calls("exec") == []


def test_foreign_architecture_not_executed(sample: SampleImage, tmp_path: Path, install: Install) -> None:
    foreign = dataclasses.replace(sample, arch="386")
    archive = tmp_path / "foreign.tar"
    archive.write_bytes(tar_of_files(foreign.legacy_members()))
    fake, notes = install(behaviour="no exec"), Notes()
    assert sif(archive, tmp_path, notes).arch == "386"
    assert fake.calls("exec") == []
    assert any("the image is 386" in note for note in notes.notes)


def test_baked_manifest_must_fit(sample: SampleImage, tmp_path: Path, install: Install) -> None:
    labels = {"imgkit.version": "0.3.0", "imgkit.recipe.sha256": "aa"}
    archive = tmp_path / "built.tar"
    archive.write_bytes(tar_of_files(dataclasses.replace(sample, labels=labels).legacy_members()))
    baked = {
        "schema": 1,
        "imgkit": "0.3.0",
        "recipe": "mn5",
        "recipe_sha256": "aa",
        "base": {"name": "b", "probe": {"pip_conflicts": []}},
        "platform": "linux/amd64",
        "wheel_sha256": "cc",
    }
    fake = install(manifest=json.dumps(baked))
    assert sif(archive, tmp_path).path.exists()
    fake.set(manifest=json.dumps(baked | {"recipe_sha256": "bb"}))
    with pytest.raises(CheckFailed, match="of recipe bb, its label says aa"):
        sif(archive, tmp_path, force=True)
    fake.set(manifest="cat: no such file")
    with pytest.raises(CheckFailed, match="json in it cannot be read"):
        sif(archive, tmp_path, force=True)


def test_second_run_is_up_to_date(archive: Path, tmp_path: Path, install: Install) -> None:
    fake = install()
    first = sif(archive, tmp_path)
    again = sif(archive, tmp_path)
    assert not first.up_to_date
    assert again.up_to_date
    assert again.record == first.record
    assert len(fake.calls("build")) == 1


@pytest.mark.parametrize("reason", ["force", "other runtime", "other compression", "damaged", "other image"])
def test_not_up_to_date_converts_again(
    archive: Path, sample: SampleImage, tmp_path: Path, install: Install, reason: str
) -> None:
    fake = install()
    path = sif(archive, tmp_path).path
    if reason == "other runtime":
        fake.set(version="apptainer version 1.4.6")
    if reason == "damaged":
        with path.open("r+b") as stream:
            stream.seek(32768 + 2000)
            stream.write(b"?")
    if reason == "other image":
        archive.write_bytes(tar_of_files(dataclasses.replace(sample, labels={"new": "1"}).legacy_members()))
    compression = "gzip" if reason == "other compression" else "auto"
    again = sif(archive, tmp_path, force=reason == "force", compression=compression)
    assert not again.up_to_date
    assert len(fake.calls("build")) == 2


def test_target_of_another_kind_refused(archive: Path, tmp_path: Path, install: Install) -> None:
    install()
    target = tmp_path / "out/made.sif"
    target.parent.mkdir()
    target.write_text("my thesis")
    with pytest.raises(UsageError, match="exists and is no"):
        sif(archive, tmp_path)
    assert target.read_text() == "my thesis"
    assert sif(archive, tmp_path, force=True).path == target


def test_runtime_builds_on_request_and_says_why(archive: Path, tmp_path: Path, install: Install) -> None:
    fake, notes = install(), Notes()
    converted = sif(archive, tmp_path, notes, writer="runtime")
    assert (converted.record.route, converted.record.runtime) == ("layers", "apptainer 1.4.5")
    assert len(fake.calls("build")) == 1
    assert notes.notes[0] == "writer: apptainer 1.4.5, started through spython: --writer runtime"
    assert sif(archive, tmp_path, writer="runtime").up_to_date


def test_engine_image_without_mksquashfs_names_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    laptop_image = MagicMock(spec=EngineImage)
    with pytest.raises(ToolMissing) as caught:
        convert.list_commands(laptop_image, tmp_path / "x.sif", Options())
    assert "brew install squashfs" in str(caught.value.hint)
    assert "imgkit save IMAGE" in str(caught.value.hint)


def test_image_of_an_engine_reaches_the_runtime_by_its_save_stream(
    archive: Path, sample: SampleImage, tmp_path: Path, install: Install
) -> None:
    fake, target = install(), tmp_path / "x.sif"
    saved = MagicMock(spec=EngineImage)
    saved.name, saved.size_bytes = "mine:1", archive.stat().st_size
    saved.config = stored.open_image(archive).selected.config
    saved.save = lambda: contextlib.nullcontext(iter([archive.read_bytes()]))
    converted = convert.convert(saved, target, Options(writer="runtime"), Notes())
    assert fake.calls("build")[0]["argv"][-1] == "oci:mine_1"
    assert (converted.record.route, converted.record.source, converted.record.image_id) == (
        "layers",
        "mine:1",
        sample.image_id,
    )
    assert not saved.export.called


def test_writer_imgkit_does_not_fall_back_to_a_runtime(
    archive: Path, tmp_path: Path, install: Install
) -> None:
    fake = install()
    with pytest.raises(ToolMissing, match="mksquashfs"):
        sif(archive, tmp_path, writer="imgkit")
    assert fake.calls("build") == []


def test_no_space_refused_before_work(
    archive: Path, tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = install()
    usage = type("usage", (), {"free": 100_000})
    monkeypatch.setattr(workspace, "disk_usage", lambda _: usage)
    with pytest.raises(CheckFailed, match=r"100\.0 kB are free"):
        sif(archive, tmp_path)
    assert fake.calls("build") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_stopped_midway_leaves_nothing(
    archive: Path, tmp_path: Path, install: Install, number: signal.Signals
) -> None:
    fake = install(behaviour="hang")
    with _verb(archive, tmp_path) as process:
        _wait_for(fake.folder / "grandchild")
        process.send_signal(number)
        assert process.wait(20) != 0
    assert output_names(tmp_path) == []
    assert not list(tmp_path.glob(".imgkit*"))
    assert _gone(int((fake.folder / "grandchild").read_text()))
    assert all(_gone(call["pid"]) for call in fake.calls("build"))


def test_interrupted_reader_ends_the_group(tmp_path: Path, install: Install) -> None:
    """When `run` raises, nothing that it started runs any more."""
    fake = install(behaviour="hang")
    tool = runtime.find_runtime()

    def interrupt(line: str) -> None:
        _wait_for(fake.folder / "grandchild")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runtime.run(
            tool,
            ["build", "--force", str(tmp_path / "x"), "oci:x"],
            env=scratch_env(tmp_path),
            on_line=interrupt,
        )
    pids = [int((fake.folder / "grandchild").read_text()), *(call["pid"] for call in fake.calls("build"))]
    assert all(_gone(pid, within_s=0) for pid in pids)


def test_killed_midway_cleaned_by_the_next(archive: Path, tmp_path: Path, install: Install) -> None:
    fake = install(behaviour="hang")
    with _verb(archive, tmp_path) as process:
        _wait_for(fake.folder / "grandchild")
        process.kill()
        process.wait(20)
    assert "made.sif" not in output_names(tmp_path)
    assert all(name.startswith(".imgkit-") for name in output_names(tmp_path))
    assert list(tmp_path.glob(".imgkit-sif.*"))
    # Its children notice that they are orphans.
    assert _gone(int((fake.folder / "grandchild").read_text()))
    fake.set(behaviour="good")
    assert sif(archive, tmp_path).path.exists()
    assert output_names(tmp_path) == ["made.sif"]
    assert not list(tmp_path.glob(".imgkit*"))


def test_second_run_at_once_refused(archive: Path, tmp_path: Path, install: Install) -> None:
    fake = install(behaviour="hang")
    with _verb(archive, tmp_path) as process:
        _wait_for(fake.folder / "grandchild")
        with pytest.raises(
            UsageError, match=rf"another imgkit process is writing this file .pid {process.pid} "
        ):
            sif(archive, tmp_path)
        process.terminate()
        process.wait(20)


@contextlib.contextmanager
def _verb(archive: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``imgkit sif`` as its own process, temporary files in `tmp_path`."""
    (tmp_path / "out").mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "imgkit_builder", "sif", str(archive), "--tmpdir", str(tmp_path)]
    with subprocess.Popen([*argv, "-o", str(tmp_path / "out/made.sif")]) as process:
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
