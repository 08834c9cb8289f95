"""What the schedulers' answers say about a job."""

from __future__ import annotations

import pytest

from imgkit_builder.jobs import systems


@pytest.mark.parametrize(
    ("system", "output", "state"),
    [
        ("slurm", "JobId=7 JobName=x JobState=COMPLETED Reason=None", "succeeded"),
        ("slurm", "JobId=7 JobName=x JobState=FAILED Reason=NonZeroExitCode", "failed"),
        ("slurm", "7  gpu PENDING, 2 nodes, elapsed 0:00, start N/A  (Resources)", "waiting"),
        ("slurm", "7  GPU,LONG RUNNING, 2 nodes, elapsed 0:09, start 2026-01-01T00:00:00  n[1-2]", "running"),
        ("slurm", "7_1  gpu RUNNING, 1 nodes\n7_[2-9]  gpu PENDING, 1 nodes\n", "running"),
        ("slurm", "7_1  gpu RUNNING_AROUND, 1 nodes\n", ""),
        ("slurm", "slurm_load_jobs error: Invalid job id specified", ""),
        ("pbs", "Job Id: 7.s\n    job_state = F\n    Exit_status = 0\n", "succeeded"),
        ("pbs", "Job Id: 7.s\n    job_state = F\n    Exit_status = 271\n", "failed"),
        ("pbs", "Job Id: 7.s\n    job_state = F\n    Exit_status = -1\n", "failed"),
        ("pbs", "Job Id: 7.s\n    job_state = Q\n    comment = Not Running: no resources\n", "waiting"),
        ("pbs", "Job Id: 7[].s\n    job_state = B\n    array_state_count = Queued:1 Running:1\n", "running"),
        ("pbs", "Job Id: 7[1].s\n    job_state = X\n    Exit_status = 0\n", "succeeded"),
        ("pbs", "Job Id: 7.s\n    comment = Exit_status = 0 is good\n", ""),
        ("pbs", f"    Exit_status = {'0' * 5000}\n", ""),
        ("pbs", "qstat: PBS is not configured to maintain job history 7.s", ""),
    ],
)
def test_answer_says_the_state(system: str, output: str, state: str) -> None:
    assert systems.get_system(system).parse_status(output).state == state


@pytest.mark.parametrize("system", ["slurm", "pbs"])
def test_system_with_a_queue_lists_its_jobs(system: str) -> None:
    assert systems.get_system(system).queue.unfinished_ids


@pytest.mark.parametrize("name", systems.MODULES)
def test_scheduler_is_a_class_of_at_most_nine_methods(name: str) -> None:
    system = systems.get_system(name)
    methods = {
        method
        for owner in type(system).__mro__[:-2]  # System extends ABC, and that object
        for method, value in vars(owner).items()
        if callable(value) and not method.startswith("_") and method != "flags"
    }
    assert methods <= {"script", "check", "parse_job_id", "status_commands", "parse_status"} | {
        "conversion_script",
        "log_source",
        "cancel_command",
        "shell_command",
    }
