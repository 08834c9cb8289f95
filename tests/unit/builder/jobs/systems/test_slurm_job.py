"""The Slurm script: words of the user stay words, directives stay lines."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_builder import make_script
from job_records import queued_job

from imgkit_builder.jobs import systems
from imgkit_builder.jobs.systems.slurm import SYSTEM as slurm
from imgkit_entrypoints.errors import UsageError


def text(**options: Any) -> str:
    return make_script(**{"nodes": "2", **options}).text


def srun(script: str) -> list[str]:
    """The words of the one command that starts the run, as bash reads them."""
    joined = script.replace(" \\\n", " ")
    (line,) = [line for line in joined.split("\n") if line.startswith("srun ")]
    return shlex.split(line)


WORDS = st.text(st.characters(exclude_characters="\n\0\r", exclude_categories=("Cs",)), max_size=12)


@settings(deadline=None)
@given(st.lists(WORDS, max_size=4))
def test_arguments_reach_the_program_unchanged(arguments):
    command = srun(text(command=("dist-run", *arguments)))
    assert command[command.index("dist-run") :] == ["dist-run", *arguments, "&"]


def test_job_that_survives_no_failure_is_a_plain_one():
    plain, spared = text(nodes="3"), text(nodes="2+1", max_failures=0)
    settings = "export IMGKIT_NNODES=2+1\nexport IMGKIT_MAX_FAILURES=0\n"
    assert spared.replace(settings, "") == plain


def test_spares_start_in_a_template_of_a_user(tmp_path):
    (tmp_path / "slurm.sh.j2").write_text("{{ start }}\n")
    command = srun(text(templates=tmp_path, nodes="2+1"))
    assert command[command.index("--wait=0") + 2] == "singularity"  # and not in a shell function of ours


def test_interactive_job_with_a_spare_outlives_a_node():
    line = text(interactive=True, nodes="2+1")
    assert line.count("--no-kill") == 2  # of the allocation and of the step


@pytest.mark.parametrize("body", ["{{ nothing }}", "{% if %}", "{{ job.nothing.more }}"])
def test_faulty_template_is_named(tmp_path, body):
    (tmp_path / "slurm.sh.j2").write_text(body)
    with pytest.raises(UsageError) as caught:
        text(templates=tmp_path)
    assert "slurm.sh.j2" in (caught.value.where or "")


def test_commands_name_the_cluster_that_sbatch_named():
    record = queued_job(cluster="two")
    for job in (record, dataclasses.replace(record, cluster="")):
        shell = slurm.shell_command(job, "", "").argv
        calls = (*slurm.status_commands(job), slurm.cancel_command(job), shell)
        assert [("--clusters=two" in argv) for argv in calls] == [bool(job.cluster)] * 5


def test_task_of_an_array_has_its_own_folder_and_output():
    array = text(options=("--array=0-3%2",))
    assert "#SBATCH --output=%x-%A_%a.out\n" in array
    assert "runs/mn5-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID\n" in array
    record = queued_job(array=True)
    assert [systems.task_id(record, task_id) for task_id in ("7_3", "7_", "7_x", "70_3", "7_[1-2]")] == [
        "7_3",
        *[""] * 4,
    ]
    with pytest.raises(UsageError, match="7 is an array job") as caught:
        slurm.log_source(record)
    assert "7_0" in str(caught.value.hint)
    task = dataclasses.replace(record, id="7_3", array=False)
    assert slurm.log_source(task)[-1] == "/w/mn5-7_3.out"
    assert "squeue --noheader --jobs=7_3 --format=%A" in slurm.shell_command(task, "", "").argv[2]


def test_logs_are_where_the_script_writes_them():
    record = queued_job()
    assert slurm.log_source(record)[-1] == "/w/mn5-7.out"
    assert "#SBATCH --output=%x-%j.out\n" in text()
    assert "#SBATCH --chdir=/w\n" in text()
