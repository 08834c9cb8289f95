"""``--per-node``: real commands below real node agents; who ends, with which code, and what is left."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from imgkit_entrypoints.launch import per_node
from imgkit_entrypoints.rollcall.messages import AttemptStart

from .conftest import until

BOTH = {
    **{"nnodes": 2, "hosts": ["host0", "host1"], "timeout_s": 10.0, "lost_s": 20.0, "tick_s": 0.1},
    **{"per_node": True, "address": "127.0.0.1", "interface": "lo"},
}
HEAD = '[ "$NODE_RANK" = 0 ]'
WAIT = "echo ready; exec sleep 1000"
DAEMON = "setsid sleep 1001 & "


def start(nodes: Any, script: str, *args: str, **options: Any) -> None:
    for rank in range(2):
        nodes.start(["sh", "-c", script, "sh", *args], rank=rank, **{**BOTH, **options})


def left_files(nodes: Any) -> list[str]:
    return [path.name for path in nodes.folder.glob("imgkit-*")]


def test_values_of_the_roll_call_replace_placeholders(nodes):
    script = 'echo "got $* $MASTER_ADDR:$MASTER_PORT $NNODES $NODE_RANK $IMGKIT_NPROC."'
    args = ("{head}:{port}", "{nnodes} {node_rank} {nproc} {world_size}", "{run_dir}", "{{head}} {x}")
    start(nodes, script, *args, nproc=4)
    assert nodes.codes() == [0, 0]
    lines = [line for line in nodes.output().splitlines() if line.startswith("got ")]
    port = lines[0].split()[1].partition(":")[2]
    assert lines == [
        f"got 127.0.0.1:{port} 2 {rank} 4 8 {nodes.folder}/run {{head}} {{x}} 127.0.0.1:{port} 2 {rank} 4."
        for rank in range(2)
    ]


def test_end_of_the_head_ends_the_other_commands(nodes):
    go = nodes.folder / "go"
    head = f"while ! [ -e {go} ]; do sleep 0.05; done; exit 0"
    start(nodes, f"{HEAD} && {{ {head}; }}; trap 'echo got TERM; exit 9' TERM; {DAEMON} touch {go}; wait")
    assert nodes.codes() == [0, 0]
    assert nodes.output().count("got TERM") == 1
    assert not left_files(nodes)


@pytest.mark.parametrize(
    ("script", "code", "failure", "texts"),
    [
        (f"{HEAD} && {{ echo wrong model >&2; exit 7; }}", 7, "1 of 2 (host0) failed first: exit code 7", 2),
        (f"{HEAD} || {{ echo wrong model >&2; exit 3; }}", 3, "2 of 2 (host1) failed first: exit code 3", 3),
        (f"{HEAD} && kill -9 $$", 137, "1 of 2 (host0) failed first: killed by SIGKILL", 0),
    ],
    ids=["of the head", "of another node", "killed head"],
)
def test_first_failure_ends_all_with_its_code(nodes, script, code, failure, texts):
    start(nodes, f"{DAEMON} {script}; {WAIT}")
    assert nodes.codes() == [code, code]
    assert f"<the command on node {failure}\n" in nodes.output()
    assert nodes.output().count("wrong model") == texts
    assert not left_files(nodes)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (0, "node 2 of 2 (host1) ended with exit code 1; the head's command has succeeded"),
        (7, "<the command on node 2 of 2 (host1) failed first: exit code 1\n"),
    ],
)
def test_code_of_the_head_counts_after_a_failure_elsewhere(nodes, code, message):
    """As at the end of `ray symmetric-run`, whose other nodes lose their cluster first."""
    go = nodes.folder / "go"
    start(nodes, f"{HEAD} || exit 1; while ! [ -e {go} ]; do sleep 0.05; done; exit {code}")
    assert until(lambda: len(list((nodes.folder / "run").glob("errors-host1.log"))) == 1)
    go.touch()
    assert nodes.codes() == [code, code]
    assert message in nodes.output()


def test_command_that_ends_long_before_the_head_is_named(nodes):
    go = nodes.folder / "go"
    start(nodes, f"{HEAD} || exit 0; while ! [ -e {go} ]; do sleep 0.05; done")
    nodes.said("the command on node 2 of 2 (host1) has ended with 0, and the head's goes on")
    go.touch()
    assert nodes.codes() == [0, 0]


def test_killed_node_agent_leaves_no_process(nodes):
    start(nodes, f"{DAEMON} {WAIT}")
    nodes.said("ready", 2)
    nodes.processes[0].kill()
    assert nodes.codes() == [-signal.SIGKILL, 4]


def test_stop_request_is_term_for_every_process(nodes):
    child = "trap 'sleep 0.3; echo child saved; exit' TERM; while :; do sleep 0.1; done"
    nodes.start(["sh", "-c", f'sh -c "{child}" & echo ready; wait'], per_node=True, tick_s=0.1)
    nodes.said("ready")
    nodes.processes[0].terminate()
    assert nodes.codes() == [143]
    assert "child saved" in nodes.output()


def test_command_deaf_to_term_is_killed_after_grace(nodes):
    nodes.start(["sh", "-c", f"trap '' TERM; {DAEMON} {WAIT}"], per_node=True, grace_s=0.5)
    nodes.said("ready")
    nodes.processes[0].terminate()
    assert nodes.codes() == [143]
    assert "ending the program: the grace time is over" in nodes.output()
    assert not left_files(nodes)


def test_warning_signals_of_a_scheduler_do_not_end_the_command(nodes):
    nodes.start(["sh", "-c", "kill -USR1 $$; kill -USR2 $$; echo alive"], per_node=True)
    assert nodes.codes() == [0]
    assert "alive" in nodes.output()


def test_command_that_leaves_daemons_has_ended_the_run(nodes):
    nodes.start(["sh", "-c", DAEMON], per_node=True)
    assert nodes.codes() == [0]
    assert (
        "<ended processes that the program left running: sleep>\n<the run ends when its command returns: a "
        "command that starts daemons has to stay in the foreground (ray start --block)>\n"
    ) in nodes.output()


def test_all_commands_start_again_after_a_failure(nodes):
    first = nodes.folder / "first"
    script = (
        f'{HEAD} || {{ [ -e {first} ] || {{ touch {first}; exit 3; }}; }}; echo "attempt $IMGKIT_ATTEMPT"'
    )
    start(nodes, f"{script}; [ $IMGKIT_ATTEMPT = 2 ] && exit; {WAIT}", max_failures=1, timeout_s=20)
    assert nodes.codes(within_s=60) == [0, 0]
    assert nodes.output().count("attempt 2\n") == 2


def test_spare_takes_the_place_of_a_lost_node(nodes):
    hosts = ["host0", "host1", "host2"]
    spares = {**BOTH, "nnodes": 3, "hosts": hosts, "size": "2+1", "max_failures": 1, "beat_s": 0.1}
    for rank in range(3):
        nodes.start(
            ["sh", "-c", f"echo rank $NODE_RANK; [ $IMGKIT_ATTEMPT = 2 ] && exit; {WAIT}"],
            rank=rank,
            **spares,
        )
    nodes.said("ready", 2)
    nodes.processes[1].kill()
    assert nodes.codes(within_s=60) == [0, -signal.SIGKILL, 0]
    assert nodes.output().count("rank 1\n") == 2


def test_sockets_of_ray_have_one_short_path_on_all_nodes(nodes):
    # As Ray does, whose other nodes use the head's folder; TMPDIR is too long here.
    code = (
        "import os, socket\n"
        "folder = os.environ['RAY_TMPDIR'] + '/ray/session_2026-01-31_12-00-00_123456_1234567/sockets'\n"
        "os.makedirs(folder, exist_ok=True)\n"
        "path = folder + '/plasma_stor' + os.environ['NODE_RANK']\n"
        "socket.socket(socket.AF_UNIX).bind(path)\n"
        "print('bound', path[:-1] + ' here', flush=True)\n"
        "while int(os.environ['NODE_RANK']) == 0 and not os.path.exists(path[:-1] + '1'): pass\n"
    )
    for rank in range(2):
        nodes.start([sys.executable, "-c", code], rank=rank, **BOTH)
    assert nodes.codes() == [0, 0]
    paths = re.findall("bound (.*) here", nodes.output())
    assert len(paths) == 2
    assert len({*paths}) == 1
    assert not Path(paths[0].partition("/ray/")[0]).exists()


@pytest.mark.parametrize(
    ("arg", "filled"),
    [
        ("--address={head}:{port}", "--address=10.0.0.1:15001"),
        ("{port2}", "15002"),
        # of vLLM and of SGLang
        ("--nnodes={nnodes} --node-rank={node_rank}", "--nnodes=2 --node-rank=1"),
        ("--tp={nproc} --dist-init-addr={head}:{port}", "--tp=4 --dist-init-addr=10.0.0.1:15001"),
        ("{{port2}}", "{port2}"),
        ('{"head": 1, {}, {HEAD}}', '{"head": 1, {}, {HEAD}}'),
    ],
)
def test_other_braces_stay_as_they_are(arg, filled):
    order = AttemptStart(attempt=1, nnodes=2, node_rank=1, port=15001, second_port=15002, head="10.0.0.1")
    assert per_node.fill_placeholders([arg], per_node.placeholder_values(order, 1, 4, "/run")) == [filled]
