"""What ``imgkit remote gc`` takes for unused, and which images a run removes after it has sent a new one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import pytest
from remote_image import remote_image

from imgkit_builder.jobs.remote import connection, gc
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.remote.connection import Connection
from imgkit_builder.jobs.remote.gc import JobNote, StoredFolder, StoreListing, UnfinishedJobs
from imgkit_builder.jobs.remote.store import RemoteImage
from imgkit_entrypoints.errors import ToolFailed

IMAGE = f"images/{'a' * 64}-{'b' * 12}"
CODE = f"code/{'c' * 64}"
OLD, LIMIT, NEW = 100.0, 500.0, 900.0
UNFINISHED = UnfinishedJobs(ids=frozenset({"7"}))


def folder(path: str, used_s: float = OLD) -> StoredFolder:
    return StoredFolder(path=path, size_bytes=1, used_s=used_s)


def note(*folders: str, used_s: float = OLD) -> JobNote:
    return JobNote(id="7", system="slurm", folders=folders, used_s=used_s)


def listing(*folders: StoredFolder, notes: Sequence[JobNote] = ()) -> StoreListing:
    return StoreListing(folders=folders, notes=tuple(notes), clock_s=1000)


NONE, OTHER = UnfinishedJobs(), UnfinishedJobs(ids=frozenset({"77"}))
UNKNOWN = UnfinishedJobs(unknown_reason="squeue failed")


@pytest.mark.parametrize(
    ("notes", "unfinished", "unused", "ended_jobs"),
    [
        ([], NONE, [CODE, IMAGE], ()),
        ([note(IMAGE)], OTHER, [CODE, IMAGE], ("7",)),
        ([note(IMAGE, CODE)], UNFINISHED, [], ()),
        ([note(IMAGE, used_s=NEW)], NONE, [CODE], ()),
        ([note(IMAGE)], UNKNOWN, [CODE], ()),
    ],
    ids=["no job", "ended job", "waiting job", "run of late", "silent scheduler"],
)
def test_image_without_a_job_that_may_use_it_is_unused(notes, unfinished, unused, ended_jobs):
    store = listing(folder(IMAGE), folder(CODE), folder("data/new", NEW), notes=notes)
    selected = gc.select_unused(store, {"slurm": unfinished}, LIMIT)
    assert [folder.path for folder in selected.folders] == unused
    assert (selected.used, selected.ended_jobs) == (3 - len(unused), ended_jobs)
    assert selected.unknown == (("squeue failed",) if unfinished is UNKNOWN else ())


@pytest.mark.usefixtures("ssh")
def test_packages_go_and_stay_with_their_image(tmp_path, monkeypatch):
    """An old image goes with its packages. Those that a waiting job mounts stay with their image."""
    store = tmp_path / "store"
    unused_image = store / IMAGE
    needed_image = store / f"images/{'c' * 64}-{'d' * 12}"
    for image in (unused_image, needed_image):
        image.mkdir(parents=True)
        for name in ("image.sif", "image+3f2a91c0.sqsh", ".packages.image+77.sqsh"):
            (image / name).write_text("")
            os.utime(image / name, (0, 0))
        os.utime(image, (0, 0))
    (store / "jobs").mkdir()
    (store / "jobs/7").write_text(f"slurm\nx\n{needed_image.relative_to(store)}/image.sif\n")
    monkeypatch.setattr(gc, "unfinished_jobs", lambda connection, name: UNFINISHED)
    far = connection.connect(Remote(name="far", address="far", folder=str(store), keep_s=0))
    removed = gc.remove_unused(far, gc.find_unused(far, 7))
    assert removed == (IMAGE,)
    assert not unused_image.exists()
    assert (needed_image / "image+3f2a91c0.sqsh").exists()


def parse(*rows: str) -> StoreListing:
    return gc.parse_listing("\n".join(("clock 1000", *rows, "end", "")).encode(), "far")


@pytest.mark.parametrize(
    "path",
    [
        f"{IMAGE}.AbCdEf",
        f"images/.imgkit-part/{IMAGE[7:]}",
        f"code/.incoming/x/{'a' * 64}",
        f"code/{'a' * 63}",
        "images/mine",
        "images/../x",
        f"runs/{IMAGE[7:]}",
        f"images/.{IMAGE[7:]}",
        f"images/{IMAGE[7:].upper()}",
        f"images/deep/{IMAGE[7:]}",
    ],
)
def test_name_that_imgkit_did_not_give_is_left_out(path):
    assert parse(f"folder 1 2 1 {path}").folders == ()


@pytest.mark.parametrize("form", ["{}", ".{}.gone", ".incoming/{}", ".incoming/.{}.gone"])
@pytest.mark.parametrize("path", [IMAGE, CODE])
def test_names_of_imgkit_are_read(path, form):
    kind, _, name = path.partition("/")
    path = f"{kind}/{form.format(name)}"
    store = parse(f"folder 17 2 1 {path}")
    assert store.folders == (StoredFolder(path=path, size_bytes=2, used_s=17),)
    assert store.clock_s == 1000


def test_run_folder_tells_when_a_job_used_its_image():
    rows = (
        "run 300.1 x-7",
        "job 100.0 7",
        "note jobs/7:slurm",
        "note jobs/7:x",
        f"note jobs/7:{IMAGE}/image.sif",
    )
    (job,) = parse(*rows).notes
    assert (job.folders, job.used_s) == ((IMAGE,), 300)


def test_resumed_job_uses_the_folder_of_the_first():
    rows = ("run 300.1 x-7", "job 100.0 8", "note jobs/8:slurm", "note jobs/8:x")
    (job,) = parse(*rows, f"note jobs/8:{IMAGE}/image.sif", "note jobs/8:runs/x-7", SAVED).notes
    assert (job.folders, job.used_s, job.is_resumable) == ((IMAGE,), 300, True)


SAVED = "checkpoint runs/x-7/checkpoints/step-0000000005"


@pytest.mark.parametrize(
    ("rows", "is_resumable"),
    [
        ([], False),
        (["run 300.1 x-7"], False),
        (["run 300.1 x-7", SAVED], True),
        (["run 300.1 x-7", SAVED, "result 7 85 runs/x-7/result"], True),
        (["run 300.1 x-7", SAVED, "result 7 0 runs/x-7/result"], False),
        (["run 300.1 x-7", SAVED, "result 8 0 runs/x-8/result"], True),
        (["run 300.1 x-7", "checkpoint runs/x-8/checkpoints/step-0000000005"], False),
    ],
)
def test_saved_run_that_did_not_end_well_can_be_resumed(rows, is_resumable):
    (job,) = parse("job 100 7", "note jobs/7:slurm", "note jobs/7:x", *rows).notes
    assert job.is_resumable == is_resumable


def test_empty_note_names_no_folder():
    assert parse("job 100 7").notes == (JobNote(id="7", system="", folders=(), used_s=100),)


@pytest.mark.parametrize("text", ["", "clock 1\n", "clock x\nend\n", "end\n"])
def test_answer_that_is_cut_short_is_refused(text):
    with pytest.raises(ToolFailed, match="cut short"):
        gc.parse_listing(text.encode(), "far")


NEEDED = f"images/{remote_image('c').name}"
NEWEST_FIRST = [remote_image(letter) for letter in "edcb"]


def superseded(
    monkeypatch: pytest.MonkeyPatch, store: StoreListing, images: Sequence[RemoteImage] = NEWEST_FIRST
) -> list[str]:
    """Return the letters of the images that a run of the image ``f`` would remove."""
    monkeypatch.setattr(gc, "_list_store", lambda connection: store)
    monkeypatch.setattr(gc, "unfinished_jobs", lambda connection, name: UNFINISHED)
    far: Connection = object()  # type: ignore[assignment]
    unused, by_path = gc.find_superseded(far, images, remote_image("f"))
    return [by_path[folder.path].root_sha256[0] for folder in unused.folders]


def folders(letters: str) -> list[StoredFolder]:
    return [folder(f"images/{remote_image(letter).name}") for letter in letters]


def test_older_images_of_the_project_go_but_for_one(monkeypatch):
    assert superseded(monkeypatch, listing(*folders("fedcb"))) == ["d", "c", "b"]


def test_images_of_other_projects_stay(monkeypatch):
    foreign_images = [remote_image(letter, "here:/other") for letter in "dcb"]
    assert superseded(monkeypatch, listing(*folders("edcb")), [remote_image("e"), *foreign_images]) == []


@pytest.mark.parametrize(
    "values", [{}, {"id": "1", "is_resumable": True}], ids=["has not ended", "can be resumed"]
)
def test_image_that_a_job_needs_stays(monkeypatch, values):
    job = dataclasses.replace(note(NEEDED), **values)
    assert superseded(monkeypatch, listing(*folders("fedcb"), notes=[job])) == ["d", "b"]


def test_image_with_another_name_stays(monkeypatch):
    linked = dataclasses.replace(folder(NEEDED), is_linked=True)
    assert superseded(monkeypatch, listing(linked, *folders("db"))) == ["d", "b"]
