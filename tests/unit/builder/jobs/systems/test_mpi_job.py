from __future__ import annotations

import shlex
from typing import Any

import pytest
from job_builder import make_job, make_script

from imgkit_builder.jobs import checks
from imgkit_builder.jobs.job import Job, Script
from imgkit_builder.jobs.systems.mpi import MpiFlags
from imgkit_entrypoints.errors import UsageError


def job(hosts: str = "node1,node2", *, start: Any = "agents", **options: Any) -> Job:
    return make_job("lambda", MpiFlags(hosts=hosts, mpi_start=start), **options)


def script(hosts: str = "node1,node2", *, start: Any = "ssh", **options: Any) -> Script:
    return make_script("lambda", MpiFlags(hosts=hosts, mpi_start=start), **options)


def test_each_host_gets_its_rank():
    job_script = script("me@10.0.0.1,10.0.0.2")
    assert [host for host, _ in job_script.host_commands] == ["me@10.0.0.1", "10.0.0.2"]
    port = shlex.split(job_script.host_commands[0][1])[-1]
    for rank, (_, text) in enumerate(job_script.host_commands):
        assert shlex.split(text)[-9:] == [
            *("dist-hello", "--nnodes", "2", "--node-rank", str(rank)),
            *("--head", "10.0.0.1", "--port", port),
        ]


def test_runs_by_hand_meet_at_random_ports():
    ports = {int(shlex.split(script().host_commands[0].line)[-1]) for _ in range(20)}
    assert len(ports) > 10
    assert all(20000 <= port < 30999 for port in ports)
    chosen = script(env=("IMGKIT_PORT=29500",)).host_commands
    assert all(command.line.endswith("--port 29500") for command in chosen)


def test_spare_is_a_host_like_any():
    job_script = script("a,b,c", nodes="2+1")
    assert job_script.head_decides
    assert [shlex.split(text)[-8:-4] for _, text in job_script.host_commands] == [
        ["--nnodes", "2+1", "--node-rank", rank] for rank in "012"
    ]


def test_mpirun_ends_a_run_in_spite_of_its_spare():
    (warning,) = job("a,b,c", nodes="2+1").warnings
    assert "a lost node ends the run on all nodes" in warning
    assert job("a,b,c", nodes="2+1", start="ssh").warnings == ()


def test_own_program_gets_its_rank_by_variables():
    job_script = script(command=("./serve",), runtime="host")
    argv = shlex.split(job_script.host_commands[1].line)
    assert {"IMGKIT_NNODES=2", "IMGKIT_NODE_RANK=1", "IMGKIT_HEAD=node1"} <= set(argv)


def test_guard_reads_the_container_s_input():
    argv = shlex.split(script().host_commands[0].line)
    assert argv[:4] == ["docker", "run", "--interactive", "--rm"]
    assert argv.index("lambda:latest") < argv.index("sh")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("dist-pi", "--nproc", "4", "--terms", "9"), "-m imgkit_entrypoints.apps.pi --terms 9"),
        (("dist-run", "train.py", "--lr", "1"), "--master_port=29500 train.py --lr 1"),
        (("dist-run", "--nproc", "2", "train.py"), None),
        (("dist-hello", "--help"), None),
        (("dist-env",), None),
        (("./own",), None),
    ],
)
def test_torch_launch_line_is_printed(command, expected):
    text = script(command=command).text
    rows = [row for row in text.splitlines() if row.startswith("# ssh")]
    if expected is None:
        assert not rows
    else:
        assert len(rows) == 2
        assert all(expected in row for row in rows)
        assert all(f" --nnodes=2 --node_rank={rank} " in row for rank, row in enumerate(rows))


def test_shell_is_for_one_host():
    *start, line = script("node1", start="agents", command=(), interactive=True).submit
    assert start == ["ssh", "-t", "node1"]
    assert "docker run --interactive --tty" in line


def test_own_host_must_be_the_first(tmp_path):
    hosts = "192.0.2.1,127.0.0.1"
    with pytest.raises(UsageError, match=r"mpirun gives rank 0 to its own host") as caught:
        checks.before_submission(job(hosts, directory=tmp_path))
    assert "--hosts 127.0.0.1,192.0.2.1" in (caught.value.hint or "")
    checks.before_submission(job(hosts, start="ssh", directory=tmp_path))
    checks.before_submission(job("127.0.0.1,192.0.2.1", directory=tmp_path))
