"""Ids of jobs in an option for dependencies: imgkit's become those of the scheduler."""

from __future__ import annotations

import pytest

from imgkit_builder.jobs.dependencies import with_scheduler_ids
from imgkit_entrypoints.errors import UsageError


@pytest.mark.parametrize(
    ("option", "result"),
    [
        ("--dependency=afterok:4711@mn5", "--dependency=afterok:4711"),
        ("--dependency=afterok:1@mn5:2_3@mn5,after:4@mn5+5", "--dependency=afterok:1:2_3,after:4+5"),
        ("-dafterany:4711@mn5", "-dafterany:4711"),
        ("depend=afterok:12[].pbs-1@mn5", "depend=afterok:12[].pbs-1"),
        ("--dependency=singleton", "--dependency=singleton"),
        ("--mail-user=1@mn5", "--mail-user=1@mn5"),
    ],
)
def test_ids_of_the_remote_become_those_of_its_scheduler(option: str, result: str) -> None:
    assert with_scheduler_ids((option, "--nice"), "mn5") == (result, "--nice")


@pytest.mark.parametrize(
    ("remote", "destination"), [("olivia", "olivia"), ("", "the scheduler of this machine")]
)
def test_id_of_another_remote_is_refused(remote: str, destination: str) -> None:
    with pytest.raises(UsageError) as caught:
        with_scheduler_ids(("--dependency=afterok:4711@mn5",), remote)
    assert str(caught.value) == (
        f"--option: 4711@mn5 is a job on mn5, but the new job goes to {destination}\n"
        "  -> wait for it first: imgkit wait 4711@mn5"
    )
