"""A job runs a command or makes a .sif; cli/refusals has the options that belong to another kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.jobs import checks, submit
from imgkit_builder.jobs.request import JobRequest
from imgkit_entrypoints.errors import UsageError

ARCHIVE = Path("x.tar")
MN5: dict[str, Any] = {"account": "a1", "qos": "gp_debug", "time": "10m", "directory": Path("/w")}


def test_image_job_names_its_file_and_follows_no_run() -> None:
    prepared = submit.prepare("mn5", JobRequest.of(archive=ARCHIVE, **MN5))
    assert (prepared.job.title, prepared.job.container.image) == ("mn5-sif", "/w/mn5.sif")
    record = submit.submitted(prepared.job, prepared.script, (line for line in [b"7\n"]))
    assert (record.job.id, record.job.name, record.command, record.code) == ("7", "mn5-sif", (), None)


def test_missing_archive_is_refused_before_the_queue(tmp_path: Path) -> None:
    request = JobRequest.of(archive=tmp_path / "none.tar", **{**MN5, "directory": tmp_path})
    with pytest.raises(UsageError, match=r"no file .*none\.tar"):
        checks.before_submission(submit.prepare("mn5", request).job)


def test_dry_run_shows_an_image_job(call: Callable[..., tuple[int, str, str]]) -> None:
    argv = ("run", "mn5", "-A", "a1", "--qos", "gp_debug", "--time", "1h", "--sif", "/x.tar")
    code, out, err = call(*argv, "--dry-run", "-v")
    assert (code, out.splitlines()[0]) == (0, "#!/bin/bash")
    assert [line.split() for line in err.splitlines() if line.split()[:1] == ["sif"]] == [
        ["sif", "/x.tar", "--sif"]
    ]
    code, _, err = call(*argv, "--gpus", "1")
    assert (code, "--sif cannot be combined with --gpus" in err) == (2, True)
