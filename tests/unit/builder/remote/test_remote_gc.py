"""What ``imgkit remote gc`` takes for unused."""

from __future__ import annotations

import pytest

from imgkit_builder.remote import gc
from imgkit_builder.remote.gc import JobNote, StoredFile
from imgkit_entrypoints.errors import ToolFailed

SIF = f"images/{'a' * 64}-{'b' * 12}.sif"
DELTA = f"deltas/{'c' * 64}-{'d' * 12}.imgdelta"
OLD, LIMIT, NEW = 100.0, 500.0, 900.0


def file(path: str, used_s: float = OLD) -> StoredFile:
    return StoredFile(path=path, size_bytes=1, used_s=used_s)


def note(*files: str, used_s: float = OLD) -> JobNote:
    return JobNote(id="7", system="slurm", files=files, used_s=used_s)


def test_old_file_without_a_job_is_unused() -> None:
    found = gc.choose([file(SIF), file(DELTA, NEW)], [], {}, LIMIT)
    assert [one.path for one in found.files] == [SIF]
    assert found.used == 1


def test_files_of_a_waiting_job_stay() -> None:
    found = gc.choose([file(SIF), file(DELTA)], [note(SIF, DELTA)], {"slurm": {"7"}}, LIMIT)
    assert (found.files, found.used, found.ended_jobs) == ((), 2, ())


def test_run_of_late_keeps_its_files() -> None:
    assert gc.choose([file(SIF)], [note(SIF, used_s=NEW)], {"slurm": ()}, LIMIT).files == ()


def test_ended_job_keeps_nothing() -> None:
    found = gc.choose([file(SIF)], [note(SIF)], {"slurm": {"77"}}, LIMIT)
    assert [one.path for one in found.files] == [SIF]
    assert found.ended_jobs == ("7",)


def test_silent_scheduler_keeps_all_files_of_jobs() -> None:
    assert gc.choose([file(SIF)], [note(SIF)], {"slurm": "squeue failed"}, LIMIT).files == ()


def read(*rows: str) -> tuple[tuple[StoredFile, ...], tuple[JobNote, ...], float]:
    return gc.parse("\n".join(("clock 1000", *rows, "end", "")).encode(), "far")


@pytest.mark.parametrize(
    "name",
    [
        f"{SIF}.AbCdEf",
        f"images/.imgkit-part/{SIF[7:]}",
        f"code/.incoming/x/{'a' * 64}",
        f"code/{'a' * 63}",
        "images/mine.sif",
        "images/../x.sif",
        f"runs/{SIF[7:]}",
        f"{SIF}.bak",
        f"images/.{SIF[7:]}",
        f"images/{SIF[7:].upper()}",
        f"images/deep/{SIF[7:]}",
    ],
)
def test_name_that_imgkit_did_not_give_is_left_out(name: str) -> None:
    assert read(f"file 1 2 {name}")[0] == ()


@pytest.mark.parametrize(
    "form",
    [
        *("{}", ".{}.gone", ".incoming/{}", ".incoming/.imgkit-part/{}", ".incoming/.imgkit-part/.{}.gone"),
        *(".incoming/.{}.AbCd12", ".incoming/.{}.AbCd12.gone"),
    ],
)
def test_names_of_imgkit_are_read(form: str) -> None:
    path = f"images/{form.format(SIF[7:])}"
    files, _, clock_s = read(f"file 17.5 2 {path}")
    assert files == (StoredFile(path=path, size_bytes=2, used_s=17),)
    assert clock_s == 1000


def test_run_folder_tells_when_a_job_used_its_files() -> None:
    rows = ("run 300.1 x-7", "job 100.0 7", "note jobs/7:slurm", "note jobs/7:x", f"note jobs/7:{SIF}")
    assert read(*rows)[1] == (note(SIF, used_s=300),)


def test_empty_note_names_no_file() -> None:
    assert read("job 100 7")[1] == (JobNote(id="7", system="", files=(), used_s=100),)


@pytest.mark.parametrize("text", ["", "clock 1\n", "clock x\nend\n", "end\n"])
def test_answer_that_is_cut_short_is_refused(text: str) -> None:
    with pytest.raises(ToolFailed, match="cut short"):
        gc.parse(text.encode(), "far")


@pytest.mark.parametrize("form", ["{}", ".{}.gone", ".incoming/{}", ".incoming/.{}.gone"])
def test_code_that_no_job_uses_is_found(form: str) -> None:
    path = f"code/{form.format('e' * 64)}"
    files, _, _ = read(f"file 17 2 {path}")
    assert [one.path for one in files] == [path]
