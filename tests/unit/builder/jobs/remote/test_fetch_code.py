"""Of a run's copy of its code, ``imgkit fetch`` brings what the run wrote. ssh is a fake, rsync is real."""

from __future__ import annotations

from pathlib import Path

import pytest
from file_tree import write_files
from job_records import submitted_job

from imgkit_builder.base.progress import Silent
from imgkit_builder.jobs import code
from imgkit_builder.jobs.remote import connection, fetch
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.request import JobRequest

pytestmark = [pytest.mark.programs("rsync"), pytest.mark.usefixtures("ssh")]


def test_unchanged_code_stays_on_the_remote(tmp_path: Path) -> None:
    folder = write_files(
        tmp_path / "here", {"train.py": "1", "a[b] *.py": "2", "lib/same.py": "3", "x.csv": "4"}
    )
    read = code.read_code_folder(JobRequest.of(code=folder), large=False, report=Silent())
    store = tmp_path / "my store"
    read.tree.write(store / "code" / read.record.sha256)
    run_folder = store / "runs/mn5-7"
    run_folder.mkdir(parents=True)
    workspace = run_folder / "workspace"
    read.tree.write_copy(workspace)
    write_files(run_folder, {"code.json": read.record.text, "metrics.jsonl": "{}"})
    write_files(workspace, {"out/model": "weights", "x.csv": "5"})
    far = connection.connect(Remote(name="far", address="far", folder=str(store), keep_s=0))
    record = submitted_job(directory=store, remote="far", code=read.record)
    target = tmp_path / "fetched"
    fetch.fetch_run(far, record, target, checkpoints=False, report=Silent())
    names = {
        str(path.relative_to(target)) for path in target.rglob("*") if path.is_file() or path.name == "lib"
    }
    assert names == {"code.json", "metrics.jsonl", "workspace/out/model", "workspace/x.csv"}
