"""``imgkit run --on --interactive`` at a terminal, over a real sshd to a real Slurm."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from labkit import IMGKIT, TOKEN, Cluster, expect_success, output, slurm_marks, until
from remotekit import FarSite, far_host, far_marks
from terminals import Terminal

RECIPE = """\
image: {base: "imgkit.local/standin:24.03-notorch", platform: amd64}
system:
  scheduler: slurm
  runtime: {kind: singularity, command: singularity}
  node: {gpus: 0, cpus: 2}
"""

pytestmark = [*slurm_marks, *far_marks, pytest.mark.xdist_group("far-shell")]


@pytest.fixture(scope="module")
def site(standin_notorch):
    """A login node with a store whose name has a blank, and here a .sif and a folder of code."""
    folder = Path(f"/tmp/imgkit-shell-{os.getpid()}")
    cluster = Cluster(state=folder / "c")
    with far_host(folder) as far:
        site = FarSite(far=far, cluster=cluster, folder=folder / "here", store=folder / "my store")
        (site.folder / "code").mkdir(parents=True)
        (site.folder / "code/train.py").write_text("print('the code')\n")
        output("docker", "save", "-o", site.folder / "site.tar", standin_notorch)
        expect_success(site.imgkit("sif site.tar"))
        cluster.up(2)
        try:
            site.add_remote(RECIPE)
            yield site
        finally:
            far.disconnect()
            cluster.down()


def at_terminal(site, *args):
    argv = (*IMGKIT, "run", "site.sif", "--on", "far", "--time", "5m", "--interactive", *args)
    return Terminal(argv, env={**site.far.env, "TOKEN": TOKEN}, folder=site.folder)


def wait_for_prompt(terminal):
    """Read until the shell in the container asks for a command: ``Singularity> ``, or ``Apptainer> ``."""
    terminal.read_until("ready for job")
    terminal.read_until("> ")


def cancel_job(site, terminal):
    """End the job that `salloc` named at the terminal; the queue may still show the one before."""
    job = re.search(r"Granted job allocation (\d+)", terminal.text)
    assert job, terminal.text
    site.cluster("scancel", job[1])


def queue(site):
    return site.cluster("squeue --noheader").stdout.strip()


def test_shell_on_a_node_has_the_code_and_the_terminal(site):
    with at_terminal(site, "--code", "code", "--env", "TOKEN", "--env", "WORD=a  b'c") as terminal:
        wait_for_prompt(terminal)
        terminal.type('echo "$(hostname) $PWD [$WORD] ${#TOKEN}"; python3 train.py\n')
        terminal.read_until(f"node1 /workspace [a  b'c] {len(TOKEN)}")
        terminal.read_until("the code")
        terminal.resize(33, 77)
        # The new size travels by ssh and srun.
        terminal.type("until [ \"$(stty size)\" = '33 77' ]; do sleep 0.1; done; echo size $((1 + 1))\n")
        terminal.read_until("size 2")
        # One program, which prints when the terminal is its own. Between an `echo` and the start of `sleep`,
        # bash may take the interrupt for itself: `sleep` then goes on, and the end of the shell waits for it.
        terminal.type("sh -c \"echo slee''ps; exec sleep 600\"\n")
        terminal.read_until("sleeps")
        terminal.type("\x03")
        terminal.read_until("> ")
        terminal.type("echo ali''ve; exit 7\n")
        terminal.read_until("alive")
        assert terminal.wait() == 7
    until(lambda: not queue(site))
    assert not [*site.store.rglob(".interactive.*")]
    assert TOKEN not in terminal.text + "".join(site.far.calls())


def test_command_runs_on_all_nodes_and_returns_its_code(site):
    # node1 fails last: srun would end a container of node2 that is still starting, and return its code.
    program = (
        'echo "from $(hostname)"; touch "at-$(hostname)"; [ "$(hostname)" = node1 ] || exit 0; '
        "until [ -e at-node2 ]; do sleep 0.1; done; sleep 1; exit 5"
    )
    with at_terminal(site, "--nodes", "2", "--", "sh", "-c", program) as terminal:
        assert terminal.wait() == 5, terminal.text
    assert "from node1" in terminal.text
    assert "from node2" in terminal.text


def test_interrupt_ends_a_shell_that_waits(site):
    with at_terminal(site, "--option=--hold") as terminal:
        terminal.read_until("queued and waiting for resources")
        terminal.type("\x03")
        assert terminal.wait() != 0
    until(lambda: not queue(site))
    assert not [*site.store.rglob(".interactive.*")]


def test_end_of_the_allocation_ends_the_shell(site):
    with at_terminal(site) as terminal:
        wait_for_prompt(terminal)
        cancel_job(site, terminal)
        terminal.wait()  # salloc exits with 0 here
    assert "has been revoked" in terminal.text


def test_end_of_the_allocation_fails_a_command(site):
    with at_terminal(site, "--", "sh", "-c", "echo $((40 + 2))x; sleep 600") as terminal:
        terminal.read_until("42x")
        cancel_job(site, terminal)
        assert terminal.wait() == 143
    assert "has been revoked" in terminal.text


def test_lost_connection_ends_the_allocation(site):
    with at_terminal(site) as terminal:
        wait_for_prompt(terminal)
        site.far.kill_master()
        assert terminal.wait() == 255
    until(lambda: not queue(site))


def test_job_that_slurm_refuses_ends_with_its_message(site):
    with at_terminal(site, "--option=--no-such-option") as terminal:
        assert terminal.wait() == 255
    assert "salloc: unrecognized option '--no-such-option'" in terminal.text
