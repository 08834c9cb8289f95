"""The stand-in for PBS of the lab: what qsub and mpiexec ask for, and what a task is told."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pbs_standin import mpi
from pbs_standin.jobs import ArrayJob, Job, JobId
from pbs_standin.protocol import Answer, RefusedError, Request, receive_request, send_answer
from pbs_standin.site import COMMAND, Site
from pbs_standin.submission import parse_submission

SITE = Site(state=Path("/state"), home=Path("/state/home/me"), nodes=("node1", "node2"))


def test_command_line_wins_over_directives():
    script = "#!/bin/sh\n#PBS -N two -q slow -j oe\n# why\n\n#PBS -l walltime=1:00:30\ntrue\n#PBS -A late\n"
    submission = parse_submission(script, ["-q", "fast", "-A", "mine"], "/work")
    assert (submission.name, submission.queue, submission.account) == ("two", "fast", "mine")
    assert submission.has_joined_streams
    assert submission.resources.walltime_s == 3630


@pytest.mark.parametrize(
    ("limits", "lines"),
    [
        ("", ["node1"]),
        ("select=2:ncpus=8:mpiprocs=2", ["node1"] * 4),
        ("select=2:mpiprocs=2,place=scatter:excl", ["node1", "node1", "node2", "node2"]),
    ],
)
def test_node_file_has_a_line_for_each_process(limits, lines):
    submission = parse_submission("", ["-l", limits], "/work")
    assert submission.resources.list_hosts(SITE.nodes) == lines


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-l", "walltime=1h"], "Illegal attribute or resource value: walltime=1h"),
        (["-l", "select=many"], "Resource request can never run: select=many"),
        (["-l", "select=3,place=scatter"], "Resource request can never run: select=3"),
        (["-J", "3-3"], "illegal -J value"),
        (["-Z", "1"], "option -Z not recognized"),
        (["script.sh"], "illegal words ['script.sh']"),
    ],
)
def test_what_pbs_refuses_is_refused(args, message):
    with pytest.raises(RefusedError) as refused:
        Job(SITE, JobId(number=0), parse_submission("", args, "/work"))
    assert str(refused.value) == f"qsub: {message}\n"


def test_subjobs_have_ids_outputs_and_variables_of_their_own():
    submission = parse_submission("", ["-J", "0-4:2", "-A", "mine"], "/work")
    assert submission.indices is not None
    array = ArrayJob(SITE, 7, submission, submission.indices)
    assert [job.id for job in array.subjobs] == ["7[0].standin", "7[2].standin", "7[4].standin"]
    last = array.subjobs[-1]
    assert last.job_id.output_name("train", "o") == "train.o7.4"
    env = last.environment(0, "1")
    assert (env["PBS_ARRAY_ID"], env["PBS_ARRAY_INDEX"], env["PBS_ACCOUNT"]) == ("7[].standin", "4", "mine")
    assert "job_state = B" in array.status_text()


def test_ranks_of_mpiexec_fill_one_node_after_another():
    launch = mpi.parse_mpiexec(["-n", "3", "--ppn", "2", "--env", "A=b=c", "prog", "-n"])
    assert (launch.argv, launch.env) == (["prog", "-n"], {"A": "b=c"})
    env = launch.rank_environment(2)
    assert (env["PALS_NODEID"], env["PALS_LOCAL_RANKID"], env["PALS_LOCAL_SIZE"]) == ("1", "0", "1")


@pytest.mark.parametrize(
    ("at_end", "final", "status"),
    [([0, 0], [0, 0], 0), ([None, 3], [271, 3], 3), ([None, None], [0, 271], 15)],
    ids=["success", "first failure", "killed"],
)
def test_mpiexec_ends_as_the_first_failed_rank(at_end, final, status):
    assert mpi.exit_status(at_end, final) == status


def test_program_prints_what_the_server_answers(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        # As jobs start it: isolated, from another folder.
        program = subprocess.Popen(
            [sys.executable, "-I", COMMAND, tmp_path, "qstat", "7"], stdout=subprocess.PIPE, cwd="/"
        )
        link, _ = listener.accept()
        with link:
            request, streams = receive_request(link)
            send_answer(link, Answer(code=35, out="ended\n"))
        for stream in streams:
            os.close(stream)
    assert program.communicate(timeout=60) == (b"ended\n", None)
    assert program.returncode == 35
    assert request == Request(program="qstat", args=["7"], env=request.env, cwd="/")
