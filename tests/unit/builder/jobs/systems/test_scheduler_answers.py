"""What the schedulers' answers say about a job: its state, why it waits, and what imgkit says about that."""

from __future__ import annotations

import pytest
from job_records import queued_job

from imgkit_builder.base.flags import declared_options
from imgkit_builder.jobs import job_status, systems
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.submitted import WaitInfo
from imgkit_builder.jobs.systems.slurm import REASON_CHANGES

SACCT = """\
JobID                State                ExitCode    Elapsed               Start                 End NodeList
-------------------- -------------------- -------- ---------- ------------------- ------------------- --------
7_0                  COMPLETED                 0:0   00:00:05 2026-11-24T17:16:39 2026-11-24T17:16:44 node1
7_1                  {} 1:0   00:00:05 2026-11-24T17:16:39 2026-11-24T17:16:44 node2
"""
"""Written after the manual of sacct: no accounting ran here."""

CONDITION = """\
    Last Update Time:      2026-01-01T00:00:00Z
    Reason:                PyTorchJob{type}
    Status:                {status}
    Type:                  {type}
"""
"""A condition as ``kubectl describe`` prints it; no cluster ran here."""


def conditions(**types: bool) -> str:
    texts = [CONDITION.format(type=name, status=status) for name, status in types.items()]
    return f"Status:\n  Conditions:\n{''.join(texts)}Events: <none>\n"


@pytest.mark.parametrize(
    ("system", "output", "state"),
    [
        ("slurm", "JobId=7 JobName=x JobState=COMPLETED Reason=None", "succeeded"),
        ("slurm", "JobId=7 JobName=x JobState=FAILED Reason=NonZeroExitCode", "failed"),
        ("slurm", "7  gpu PENDING, 2 nodes, elapsed 0:00, start N/A  (Resources)", "waiting"),
        ("slurm", "7  GPU,LONG RUNNING, 2 nodes, elapsed 0:09, start 2026-01-01T00:00:00  n[1-2]", "running"),
        ("slurm", "7_1  gpu RUNNING, 1 nodes\n7_[2-9]  gpu PENDING, 1 nodes\n", "running"),
        ("slurm", "7_1  gpu RUNNING_AROUND, 1 nodes\n", ""),
        ("slurm", "slurm_load_jobs error: Invalid job id specified\n", ""),
        ("slurm", "Slurm accounting storage is disabled\n", ""),
        ("slurm", "JobId=8 JobState=COMPLETED x\nJobId=9 JobState=FAILED x\n", "failed"),
        ("slurm", "JobId=8 JobState=COMPLETING x\n", "running"),
        ("slurm", SACCT.format("COMPLETED"), "succeeded"),
        ("slurm", SACCT.format("CANCELLED by 1000"), "cancelled"),
        ("slurm", SACCT.format("RUNNING"), "running"),
        ("slurm", "\n".join(SACCT.splitlines()[:2]), ""),
        ("pbs", "Job Id: 7.s\n    job_state = F\n    Exit_status = 0\n", "succeeded"),
        ("pbs", "Job Id: 7.s\n    job_state = F\n    Exit_status = 271\n", "failed"),
        ("pbs", "Job Id: 7.s\n    job_state = F\n    Exit_status = -1\n", "failed"),
        ("pbs", "Job Id: 7.s\n    job_state = Q\n    comment = Not Running: no resources\n", "waiting"),
        ("pbs", "Job Id: 7[].s\n    job_state = B\n    array_state_count = Queued:1 Running:1\n", "running"),
        ("pbs", "Job Id: 7[1].s\n    job_state = X\n    Exit_status = 0\n", "succeeded"),
        ("pbs", "Job Id: 7.s\n    comment = Exit_status = 0 is good\n", ""),
        ("pbs", f"    Exit_status = {'0' * 5000}\n", ""),
        ("pbs", "qstat: PBS is not configured to maintain job history 7.s", ""),
        ("kubeflow", conditions(Created=True), "waiting"),
        ("kubeflow", conditions(Created=True, Running=True), "running"),
        ("kubeflow", conditions(Created=True, Running=False, Succeeded=True), "succeeded"),
        ("kubeflow", conditions(Created=True, Failed=True), "failed"),
        ("kubeflow", conditions(Complete=True), "succeeded"),
        ("kubeflow", conditions(Other=True), ""),
        ("kubeflow", conditions(), ""),
    ],
)
def test_answer_says_the_state(system, output, state):
    assert systems.get_system(system).parse_status(output).state == state


@pytest.mark.parametrize("system", ["slurm", "pbs"])
def test_system_with_a_queue_lists_its_jobs(system):
    assert systems.get_system(system).queue.unfinished_ids


@pytest.mark.parametrize("name", systems.MODULES)
def test_scheduler_is_a_class_of_at_most_nine_methods(name):
    methods: set[str] = set()
    for owner in type(systems.get_system(name)).__mro__[:-2]:  # System extends ABC, and that object
        methods |= {method for method, value in vars(owner).items() if callable(value) and method[0] != "_"}
    own = "script check parse_job_id status_commands parse_status conversion_script log_source cancel_command"
    assert methods - {"flags"} <= {*own.split(), "shell_command"}


@pytest.mark.parametrize(
    ("output", "job_id"),
    [
        ("Warning: x/y\ntrainjob.trainer.kubeflow.org/run-7 created\n", "trainjob.run-7"),
        ("pytorchjob.kubeflow.org/rcp unchanged\n", ""),  # of apply: nothing starts
    ],
)
def test_id_of_kubeflow_is_kind_and_name(output, job_id):
    assert systems.get_system("kubeflow").parse_job_id(output, "rcp") == job_id


ROW = "7  gpu PENDING, 2 nodes, elapsed 0:00, start {}  ({})\n"


def slurm_text(reason: str, start: str = "N/A", **fields: str) -> str:
    """Return what imgkit prints about a job that waits for this reason."""
    status = systems.get_system("slurm").parse_status(ROW.format(start, reason))
    assert status.state == "waiting"
    return job_status.waiting_text(queued_job(**fields), status.wait)


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
def test_reason_is_named_with_what_ends_it(reason, text):
    assert slurm_text(reason) == text


@pytest.mark.parametrize(
    "reason",
    ["QOSMaxJobsPerUserLimit", "AssocMaxJobsLimit", "AssocGrpNodeLimit", "xPartitionTimeLimit", "Priority"],
)
def test_wait_that_may_end_is_not_called_hopeless(reason):
    assert "will not start" not in slurm_text(reason)


def test_estimate_names_the_clock_of_a_remote():
    start = "2026-11-28T22:40:07"
    assert slurm_text("Priority", start) == "waiting: Priority; expected start 2026-11-28T22:40"
    far = slurm_text("Priority", start, remote="far")
    assert far == "waiting: Priority; expected start 2026-11-28T22:40, by the clock of far"


def test_running_row_has_no_reason():
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
def test_comment_of_pbs_is_the_reason(estimate, expected_start):
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
def test_change_is_logged_once(readings, lines):
    logged: list[str] = []
    log = job_status.WaitLog(queued_job(), logged.append)
    for reading in readings:
        if isinstance(reading, WaitInfo):
            log.update("waiting", reading)
        else:
            log.update(reading, WaitInfo())
    assert tuple(logged) == lines


def test_every_change_names_an_option_of_run():
    names = {name for flag in declared_options(JobRequest) for name in flag.names}
    for text in REASON_CHANGES.values():
        options = [word.partition("=")[0] for word in text.split() if word.startswith("-")]
        assert options, text
        assert set(options) <= names, text
