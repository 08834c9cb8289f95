from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.jobs import checks
from imgkit_builder.jobs.job import Job, Script
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve_job
from imgkit_builder.jobs.systems.mpi import SYSTEM as mpi
from imgkit_builder.jobs.systems.mpi import MpiFlags
from imgkit_builder.recipe.targets import load_target
from imgkit_entrypoints.errors import UsageError

HOSTS = MpiFlags(hosts="node1,node2")
HELLO = JobRequest.of(command=("dist-hello",), directory=Path("/home/me"), system_flags=(HOSTS,))
OWN = ("hosts", "mpi_start")


def changed(request: JobRequest, **options: Any) -> JobRequest:
    """`request` with other values of its flags, the system's own among them."""
    own_options: dict[str, Any] = {name: options.pop(name) for name in OWN if name in options}
    if "hosts" in own_options:
        own_options["hosts"] = ",".join(own_options["hosts"])
    (flags,) = request.system_flags
    assert isinstance(flags, MpiFlags)
    return request.changed(system_flags=(replace(flags, **own_options),), **options)


def job(request: JobRequest) -> Job:
    return resolve_job(load_target("lambda"), request)


def script(request: JobRequest) -> Script:
    return mpi.script(job(request))


def test_each_host_gets_its_rank() -> None:
    job_script = script(changed(HELLO, hosts=("me@10.0.0.1", "10.0.0.2"), mpi_start="ssh"))
    assert [host for host, _ in job_script.remote] == ["me@10.0.0.1", "10.0.0.2"]
    port = shlex.split(job_script.remote[0][1])[-1]
    for rank, (_, text) in enumerate(job_script.remote):
        assert shlex.split(text)[-9:] == [
            *("dist-hello", "--nnodes", "2", "--node-rank", str(rank)),
            *("--head", "10.0.0.1", "--port", port),
        ]
    rows = job_script.text.replace("\\\n", "").splitlines()
    printed = [shlex.split(row)[-1] for row in rows if row[0] != "#"]
    assert len(printed) == 2
    end = f"--head 10.0.0.1 --port {port}"
    assert all(text.endswith(f"--node-rank {rank} {end}") for rank, text in enumerate(printed))


def test_runs_by_hand_meet_at_random_ports() -> None:
    request = changed(HELLO, hosts=("10.0.0.1", "10.0.0.2"), mpi_start="ssh")
    ports = {int(shlex.split(script(request).remote[0][1])[-1]) for _ in range(20)}
    assert len(ports) > 10
    assert all(20000 <= port < 30999 for port in ports)
    chosen = script(changed(request, env=("IMGKIT_PORT=29500",))).remote
    assert all(text.endswith("--port 29500") for _, text in chosen)


def test_spare_is_a_host_like_any() -> None:
    job_script = script(changed(HELLO, hosts=("a", "b", "c"), nodes="2+1", mpi_start="ssh"))
    assert job_script.head_decides
    assert [shlex.split(text)[-8:-4] for _, text in job_script.remote] == [
        ["--nnodes", "2+1", "--node-rank", rank] for rank in "012"
    ]
    assert "torch.distributed.launch" not in job_script.text  # it has no spares


def test_mpirun_ends_a_run_in_spite_of_its_spare() -> None:
    request = changed(HELLO, hosts=("a", "b", "c"), nodes="2+1")
    (warning,) = job(request).warnings
    assert "a lost node ends the run on all nodes" in warning
    assert job(changed(request, mpi_start="ssh")).warnings == ()


def test_own_program_gets_its_rank_by_variables() -> None:
    job_script = script(changed(HELLO, command=("./serve",), mpi_start="ssh", runtime="host"))
    argv = shlex.split(job_script.remote[1][1])
    assert {"IMGKIT_NNODES=2", "IMGKIT_NODE_RANK=1", "IMGKIT_HEAD=node1"} <= set(argv)


def test_guard_reads_the_container_s_input() -> None:
    text = script(changed(HELLO, mpi_start="ssh")).remote[0][1]
    argv = shlex.split(text)
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
def test_torch_launch_line_is_printed(command: tuple[str, ...], expected: str | None) -> None:
    text = script(changed(HELLO, command=command, mpi_start="ssh")).text
    rows = [row for row in text.splitlines() if row.startswith("# ssh")]
    if expected is None:
        assert not rows
    else:
        assert len(rows) == 2
        assert all(expected in row for row in rows)
        assert all(f" --nnodes=2 --node_rank={rank} " in row for rank, row in enumerate(rows))


def test_shell_is_for_one_host() -> None:
    request = changed(HELLO, command=(), interactive=True, hosts=("node1",))
    assert script(request).submit[:3] == ("ssh", "-t", "node1")
    assert "docker run --interactive --tty" in script(request).submit[3]
    with pytest.raises(UsageError, match="a shell on 2 hosts"):
        script(changed(request, hosts=("node1", "node2")))


def test_own_host_must_be_the_first(tmp_path: Path) -> None:
    request = changed(HELLO, hosts=("192.0.2.1", "127.0.0.1"), directory=tmp_path)
    with pytest.raises(UsageError, match=r"mpirun gives rank 0 to its own host") as caught:
        checks.before_submission(job(request))
    assert "--hosts 127.0.0.1,192.0.2.1" in (caught.value.hint or "")
    checks.before_submission(job(changed(request, mpi_start="ssh")))
    checks.before_submission(job(changed(request, hosts=("127.0.0.1", "192.0.2.1"))))
