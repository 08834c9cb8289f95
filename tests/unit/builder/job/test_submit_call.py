"""``submit`` as a function: what it does, prints and refuses, with a fake sbatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.base.progress import Silent
from imgkit_builder.job import submit
from imgkit_builder.job.request import Request
from imgkit_entrypoints.errors import ToolFailed, ToolMissing, UsageError

SBATCH = "#!/bin/sh\n# A fake sbatch.\ncat > script\n{}\n"
REQUEST = Request(command=("dist-hello",), account="a", qos="acc_debug", time="10m", nodes="2")


class Notes(Silent):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an image and the scheduler's program."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    Path("mn5.sif").mkdir()  # a sandbox: imgkit does not look inside
    Path("bin").mkdir()
    answering(tmp_path, "echo 4711")
    return tmp_path


def answering(folder: Path, command: str) -> None:
    (folder / "bin/sbatch").write_text(SBATCH.format(command))
    (folder / "bin/sbatch").chmod(0o755)


def test_submitted_job_is_known_by_its_id(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record = submit.submit("mn5", REQUEST)
    assert (record.id, record.recipe, record.command) == ("4711", "mn5", ("dist-hello",))
    assert submit.record_of("4711") == record
    assert (folder / "script").read_text() == submit.prepare("mn5", REQUEST).script.text
    assert capfd.readouterr() == ("", "")


def test_dry_run_prints_the_bytes_that_are_submitted(folder: Path, call: Any) -> None:
    argv = ("mn5", "-A", "a", "--qos", "acc_debug", "--time", "10m", "--nodes", "2")
    code, out, err = call("submit", *argv, "--dry-run", "--", "dist-hello")
    assert (code, err) == (0, "")
    assert not (folder / "script").exists()
    assert call("submit", *argv, "--", "dist-hello")[:2] == (0, "4711\n")
    assert (folder / "script").read_text() == out


def test_values_go_to_stderr_and_the_script_to_stdout(folder: Path, call: Any) -> None:
    argv = ("submit", "mn5", "-A", "a", "--qos", "acc_debug", "--time", "10m", "--dry-run")
    plain = call(*argv, "--", "dist-hello")
    code, out, err = call(*argv, "-v", "--", "dist-hello")
    assert (code, out) == (0, plain[1])
    assert any(line.split() == ["account", "a", "-A"] or "--account" in line for line in err.splitlines())


def test_warnings_and_a_full_disk_are_notes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "state").write_text("a file where the records would lie")
    report = Notes()
    record = submit.submit("mn5", Request(**{**as_dict(REQUEST), "command": ("hostname",)}), report=report)
    assert record.id == "4711"
    assert "hostname starts once per node" in report.notes[0]
    assert "the record of the job 4711 cannot be saved" in report.notes[1]


def as_dict(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in ("account", "qos", "time", "nodes")}


def test_values_without_a_dry_run_are_refused(folder: Path, call: Any) -> None:
    code, out, err = call("submit", "mn5", "-v", "--", "dist-hello")
    assert (code, out) == (2, "")
    assert "--verbose needs --dry-run" in err


def test_job_without_a_scheduler_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="cpu has no scheduler") as caught:
        submit.submit("cpu", Request(command=("dist-hello",)))
    assert caught.value.where == "system.scheduler"


def test_job_without_its_image_is_refused(folder: Path) -> None:
    (folder / "mn5.sif").rmdir()
    with pytest.raises(UsageError, match="no image"):
        submit.submit("mn5", REQUEST)
    assert not (folder / "script").exists()


def test_missing_scheduler_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "bin/sbatch").unlink()
    monkeypatch.setenv("PATH", str(folder / "bin"))
    with pytest.raises(ToolMissing, match="sbatch"):
        submit.submit("mn5", REQUEST)


@pytest.mark.parametrize("answer", ["echo no; exit 1", "echo Submitted"])
def test_answer_without_an_id_is_an_error(folder: Path, answer: str) -> None:
    answering(folder, answer)
    with pytest.raises(ToolFailed):
        submit.submit("mn5", REQUEST)


@pytest.mark.parametrize("flag", ["--sif", "--delta", "--build", "--directory", "-i"])
def test_run_has_no_flag_that_it_would_refuse(call: Any, folder: Path, flag: str) -> None:
    assert call("submit", "--help")[1].count(flag)
    code, out, err = call("run", "mn5", "--on", "x", flag, "y", "--", "dist-hello")
    assert (code, out) == (2, "")
    assert f"No such option: {flag}" in err
