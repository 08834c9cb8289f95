"""Answers of Slurm and OpenPBS as scripts: what fake programs of theirs do."""

from __future__ import annotations

SLURM_FORGOT = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
"""Of squeue and scontrol, some minutes after a job has ended."""

PBS_HISTORY = """\
Job Id: 1.s
    Job_Name = a
    Job_Owner = me@login
    resources_used.walltime = 00:00:09
    job_state = F
    Exit_status = {}
    Variable_List = PBS_O_HOME=/home/me,
"""


def pbs_ended(exit_status: int) -> str:
    """Return what qstat does for a job that has ended: only ``qstat -x`` still knows it."""
    history = f"printf %s '{PBS_HISTORY.format(exit_status)}'"
    refusal = "qstat: 1.s Job has finished, use -x or -H to obtain historical job information"
    return f"case $1 in -x) {history} ;; *) echo '{refusal}' >&2; exit 35 ;; esac"
