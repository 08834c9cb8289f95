"""Why a job waits: the reasons in the answers of Slurm and PBS, and what imgkit says about them."""

from __future__ import annotations

import pytest
from job_records import queued_job

from imgkit_builder.jobs import history, systems
from imgkit_builder.jobs.submitted import JobState, WaitInfo
from imgkit_builder.jobs.systems.slurm import REASON_CHANGES

ROW = "7  gpu PENDING, 2 nodes, elapsed 0:00, start {}  ({})\n"


def slurm_text(reason: str, start: str = "N/A", **fields: str) -> str:
    """Return what imgkit prints about a job that waits for this reason."""
    status = systems.get_system("slurm").parse_status(ROW.format(start, reason))
    assert status.state == "waiting"
    return history.waiting_text(queued_job(**fields), status.wait)


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("None", "waiting"),
        ("Resources", "waiting: Resources"),
        ("NewReason(of 2030)", "waiting: NewReason(of 2030)"),
        ("AssocGrpGRES", "waiting: AssocGrpGRES; a limit of all jobs of the account together"),
        (
            "ReqNodeNotAvail, UnavailableNodes:node[1-2]",
            "waiting: ReqNodeNotAvail, UnavailableNodes:node[1-2]; "
            "scontrol show reservation and sinfo --list-reasons may tell until when",
        ),
        ("JobHeldUser", "waiting: JobHeldUser; scontrol release 7 lets it start"),
        (
            "AssocMaxBillingPerJob",
            "waiting: AssocMaxBillingPerJob; the job will not start: imgkit cancel 7, and submit it with "
            "fewer --nodes",
        ),
    ],
)
def test_reason_is_named_with_what_ends_it(reason: str, text: str) -> None:
    assert slurm_text(reason) == text


@pytest.mark.parametrize(
    "reason",
    ["QOSMaxJobsPerUserLimit", "AssocMaxJobsLimit", "AssocGrpNodeLimit", "xPartitionTimeLimit", "Priority"],
)
def test_wait_that_may_end_is_not_called_hopeless(reason: str) -> None:
    assert "will not start" not in slurm_text(reason)


def test_estimate_names_the_clock_of_a_remote() -> None:
    start = "2026-11-28T22:40:07"
    assert slurm_text("Priority", start) == "waiting: Priority; expected start 2026-11-28T22:40"
    far = slurm_text("Priority", start, remote="far")
    assert far == "waiting: Priority; expected start 2026-11-28T22:40, by the clock of far"


def test_running_row_has_no_reason() -> None:
    row = "7  gpu RUNNING, 2 nodes, elapsed 1:00, start 2026-11-28T22:40:07  node[1-2]\n"
    assert systems.get_system("slurm").parse_status(row).wait == WaitInfo()


QSTAT = """\
Job Id: 7.s
    Job_Name = mn5
    job_state = {}
    Variable_List = PBS_O_HOME=/home/me,PBS_O_LANG=C,
\tPBS_O_WORKDIR=/w
    comment = Not Running: Insufficient amount of resource: ngpus (R: 8 A: 0 T: 8,
\t more)
    estimated.start_time = {}
"""


@pytest.mark.parametrize(
    ("estimate", "expected_start"),
    [("Sat Nov 28 22:40:07 2026", "2026-11-28T22:40"), ("UNSET", "")],
)
def test_comment_of_pbs_is_the_reason(estimate: str, expected_start: str) -> None:
    status = systems.get_system("pbs").parse_status(QSTAT.format("Q", estimate))
    reason = "Not Running: Insufficient amount of resource: ngpus (R: 8 A: 0 T: 8, more)"
    assert status.wait == WaitInfo(reason=reason, expected_start=expected_start)
    assert systems.get_system("pbs").parse_status(QSTAT.format("R", estimate)).wait == WaitInfo()


SOON = WaitInfo(reason="Priority", expected_start="2026-11-28T22:40")
LATER = WaitInfo(reason="Priority", expected_start="2026-11-28T23:00")
PRIORITY = WaitInfo(reason="Priority")


@pytest.mark.parametrize(
    ("readings", "lines"),
    [
        (
            (PRIORITY, SOON, LATER, PRIORITY, SOON, "running", "running", LATER, "cancelled"),
            (
                "waiting: Priority",
                "waiting: Priority; expected start 2026-11-28T22:40",
                "running",
                "waiting: Priority; expected start 2026-11-28T23:00",
            ),
        ),
        ((WaitInfo(), WaitInfo(), WaitInfo(), PRIORITY), ("waiting", "waiting: Priority")),
        ((WaitInfo(), "running", "succeeded"), ()),  # it started before the scheduler had a reason
        (("running", "running", "succeeded"), ()),
    ],
)
def test_change_is_logged_once(readings: tuple[WaitInfo | JobState, ...], lines: tuple[str, ...]) -> None:
    logged: list[str] = []
    log = history.WaitLog(queued_job(), logged.append)
    for reading in readings:
        if isinstance(reading, WaitInfo):
            log.update("waiting", reading)
        else:
            log.update(reading, WaitInfo())
    assert tuple(logged) == lines


def test_every_change_names_an_option_of_run() -> None:
    from imgkit_builder.base.flags import declared_options
    from imgkit_builder.jobs.request import JobRequest

    names = {name for flag in declared_options(JobRequest) for name in flag.names}
    for text in REASON_CHANGES.values():
        options = [word.partition("=")[0] for word in text.split() if word.startswith("-")]
        assert options, text
        assert set(options) <= names, text
