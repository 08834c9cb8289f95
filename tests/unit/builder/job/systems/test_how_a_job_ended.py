"""What the schedulers' answers say about the end of a job."""

from __future__ import annotations

import pytest

from imgkit_builder.job import systems


@pytest.mark.parametrize(
    ("system", "output", "well"),
    [
        ("slurm", "JobId=7 JobName=x JobState=COMPLETED Reason=None", True),
        ("slurm", "JobId=7 JobName=x JobState=FAILED Reason=NonZeroExitCode", False),
        ("slurm", "slurm_load_jobs error: Invalid job id specified", None),
        ("pbs", "Job Id: 7.s\n    job_state = F\n    Exit_status = 0\n", True),
        ("pbs", "Job Id: 7.s\n    job_state = F\n    Exit_status = 271\n", False),
        ("pbs", "Job Id: 7.s\n    job_state = F\n    Exit_status = -1\n", False),
        ("pbs", "Job Id: 7.s\n    comment = Exit_status = 0 is good\n", None),
        ("pbs", f"    Exit_status = {'0' * 5000}\n", None),
        ("pbs", "qstat: PBS is not configured to maintain job history 7.s", None),
    ],
)
def test_answer_says_how_the_job_ended(system: str, output: str, well: bool | None) -> None:
    assert systems.named(system).succeeded(output) is well


@pytest.mark.parametrize("system", ["slurm", "pbs"])
def test_system_with_a_queue_lists_its_jobs(system: str) -> None:
    assert systems.named(system).unfinished()
