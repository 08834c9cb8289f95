"""A job runs a command or makes a .sif: flags of `imgkit run` choose it; flags of another are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.jobs import checks, submit
from imgkit_builder.jobs.request import JobRequest, refuse_mixed
from imgkit_builder.jobs.systems.pods import PodFlags
from imgkit_entrypoints.errors import UsageError

ARCHIVE = Path("x.tar")
MN5: dict[str, Any] = {"account": "a1", "qos": "gp_debug", "time": "10m", "directory": Path("/w")}


@pytest.mark.parametrize(
    ("flags", "where", "what"),
    [
        ({"command": ("dist-pi",), "archive": ARCHIVE}, "--sif", "the command dist-pi"),
        ({"command": ("dist-pi",), "build": "mn5"}, "--build", "the command dist-pi"),
        ({"build": "mn5", "archive": ARCHIVE}, "--sif", "--build"),
        ({"base_from": Path("b.sif"), "archive": ARCHIVE}, "--base-from", "without --build"),
        ({"base_from": Path("b.sif")}, "--base-from", "without --build"),
        ({"code": Path(), "archive": ARCHIVE}, "--sif", "--code"),
        ({"nodes": "2", "build": "mn5"}, "--build", "--nodes"),
        ({"interactive": True, "build": "mn5"}, "--build", "--interactive"),
        ({"env": ("A=b",), "archive": ARCHIVE}, "--sif", "--env"),
    ],
)
def test_flag_of_another_kind_is_refused(flags: dict[str, Any], where: str, what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        refuse_mixed(JobRequest.of(**flags))
    assert caught.value.where == where


@pytest.mark.parametrize("request_", [JobRequest.of(archive=ARCHIVE), JobRequest.of(build="mn5")])
@pytest.mark.parametrize(
    ("recipe", "what"),
    [
        ("cpu", "no scheduler to submit this to"),
        ("lambda", "no scheduler to submit this to"),
        ("rcp", "of no use to them"),
    ],
)
@pytest.mark.parametrize("own", [(), (PodFlags(format="pytorchjob"),)], ids=["", "kubeflow"])
def test_image_job_is_refused_where_nothing_queues_it(
    recipe: str, what: str, request_: JobRequest, own: tuple[PodFlags, ...]
) -> None:
    asked = request_.changed(queue="p", system_flags=own)
    with pytest.raises(UsageError, match=what) as caught:
        submit.prepare(recipe, asked)
    assert caught.value.where == request_.image_flag


def test_image_job_names_its_file_and_follows_no_run() -> None:
    prepared = submit.prepare("mn5", JobRequest.of(archive=ARCHIVE, **MN5))
    assert (prepared.job.title, prepared.job.container.image) == ("mn5-sif", "/w/mn5.sif")
    record = submit.submitted(prepared.job, prepared.script, (line for line in [b"7\n"]))
    assert (record.job.id, record.job.name, record.command, record.code) == ("7", "mn5-sif", (), None)


def test_missing_archive_is_refused_before_the_queue(tmp_path: Path) -> None:
    asked = JobRequest.of(archive=tmp_path / "none.tar", **{**MN5, "directory": tmp_path})
    with pytest.raises(UsageError, match=r"no file .*none\.tar"):
        checks.before_submission(submit.prepare("mn5", asked).job)


def test_dry_run_shows_an_image_job(call: Callable[..., tuple[int, str, str]]) -> None:
    words = ("run", "mn5", "-A", "a1", "--qos", "gp_debug", "--time", "1h", "--sif", "/x.tar")
    code, out, err = call(*words, "--dry-run", "-v")
    assert (code, out.splitlines()[0]) == (0, "#!/bin/bash")
    assert [line.split() for line in err.splitlines() if line.split()[:1] == ["sif"]] == [
        ["sif", "/x.tar", "--sif"]
    ]
    code, _, err = call(*words, "--gpus", "1")
    assert (code, "--sif cannot be combined with --gpus" in err) == (2, True)
