"""The roll call between threads of this process, over real sockets."""

from __future__ import annotations

import os
import resource
import socket
import time
from dataclasses import replace

import pytest
from rollcall_nodes import CallThread, close, end_run, hear, kept_file_limit, meet, squatting

from imgkit_entrypoints.rollcall import messages, ports, session
from imgkit_entrypoints.rollcall.connection import Connection
from imgkit_entrypoints.rollcall.messages import HeadLost, Software, StopOrder
from imgkit_entrypoints.schedulers.placement import Size, job_port


def test_all_nodes_get_one_free_port(placement):
    rolls = meet(placement)
    assert ports.is_free(rolls[0].port)
    assert rolls[0].port != job_port(placement.job_id)
    rolls[0].start_attempt(1, {0: 0, 1: 1})
    orders = hear(rolls, all)
    assert [[order.port for order in seen] for seen in orders] == [[rolls[0].port]] * 2
    close(rolls)


def test_given_port_is_torchruns(placement):
    port = ports.first_free(job_port(placement.job_id))
    rolls = meet(replace(placement, port=port))
    assert rolls[0].port == port
    close(rolls)


def test_missing_node_is_named(placement):
    placement = replace(placement, nnodes=3)
    head, member = CallThread(placement, 0, timeout_s=2.0), CallThread(placement, 2)
    assert "node 2 of 3 (as07r3b13) did not join; 2/3 present after 2 s" in head.refusal()
    assert member.refusal() == head.refusal()


@pytest.mark.parametrize(
    ("head", "reason"), [("127.0.0.1", "Connection refused"), ("no-such-host.invalid", "")]
)
def test_missing_head_is_named(placement, head, reason):
    text = CallThread(replace(placement, head=head), 1, timeout_s=0.3).refusal()
    assert f"the head ({head}) did not answer node 2 of 2 (as07r3b13) within 0.3 s: {reason}" in text


def test_late_head_is_waited_for(placement):
    member = CallThread(placement, 1)
    time.sleep(0.3)
    close([CallThread(placement, 0).roll(), member.roll()])


@pytest.mark.parametrize("field", ["image", "torch", "nccl"])
def test_different_software_is_refused_everywhere(placement, field):
    calls = [CallThread(placement, rank, software=Software(**{field: f"1.{rank}"})) for rank in range(2)]
    texts = {call.refusal() for call in calls}
    assert len(texts) == 1
    assert "1.0 on node 1 of 2 (as07r3b12), 1.1 on node 2 of 2 (as07r3b13)" in texts.pop()


@pytest.mark.parametrize("size", [None, Size.parse("1+1")], ids=["warning", "refused with spares"])
def test_different_workers_are_named(placement, size):
    placement = replace(placement, size=size)
    calls = [CallThread(placement, rank, nproc=4 - rank, gpu="H100") for rank in range(2)]
    text = "the nodes differ in workers per node 4 on node 1"
    if size:
        assert all(text in call.refusal() for call in calls)
        return
    rolls = [call.roll() for call in calls]
    assert text in rolls[0].warnings[0]
    close(rolls)


def test_two_nodes_of_one_rank_are_refused(placement):
    placement = replace(placement, nnodes=3)
    calls = [CallThread(placement, 0), CallThread(placement, 1), CallThread(placement, 1)]
    for call in calls:
        assert "both join as node 2 of 3" in call.refusal()


@pytest.mark.parametrize("secret", [None, bytes(32)], ids=["open", "with a secret"])
def test_different_node_counts_are_refused(placement, secret):
    head = CallThread(placement, 0, secret=secret)
    member = CallThread(replace(placement, nnodes=3), 2, secret=secret)
    assert "as07r3b14 joins as node 3 of 3, but the head expects 2 nodes" in head.refusal()
    assert member.refusal() == head.refusal()


def test_busy_port_is_refused(placement):
    port = job_port(placement.job_id)
    with ports.listen(port):
        text = CallThread(placement, 0).refusal()
    assert f"port {port}, where the nodes of this run meet, is busy on the head" in text
    assert f"ss -ltnp sport = {port}" in text


def test_busy_torchrun_port_is_refused_everywhere(placement):
    port = ports.first_free(job_port(placement.job_id))
    assert port is not None
    with ports.listen(port):
        calls = [CallThread(replace(placement, port=port), rank) for rank in range(2)]
        assert {call.refusal() for call in calls} == {calls[0].refusal()}
    assert f"torchrun's port {port} is busy on the head" in calls[0].refusal()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "it does not answer the call"),
        (b"220 mail ready\r\n", "it sent something other than a message of imgkit's roll call"),
    ],
    ids=["silent", "other protocol"],
)
def test_service_on_the_port_is_not_waited_for(placement, answer, reason):
    with squatting(placement, answer):
        assert reason in CallThread(placement, 1, timeout_s=1.0).refusal()


def test_node_that_went_away_can_call_again(placement):
    placement = replace(placement, nnodes=3)
    head = CallThread(placement, 0)
    first = CallThread(placement, 1)
    time.sleep(0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "LOST_AFTER_S", -1.0)  # the member gives up its connection and calls anew
        time.sleep(0.1)
    close([call.roll() for call in (head, first, CallThread(placement, 2))])


def test_heartbeat_keeps_quiet_nodes(placement):
    rolls = meet(placement)
    for roll in rolls:
        roll.lost_after_s = 0.5
    assert hear(rolls, lambda _: False, within_s=1.2) == [[], []]
    close(rolls)


def test_silent_node_is_lost(placement):
    rolls = meet(placement)
    head = rolls[0]
    head.lost_after_s = 0.4
    assert hear([head], lambda _: bool(head.lost)) == [[]]
    assert head.lost == {1: "no heartbeat for 0.4 s"}
    assert head.alive == (0,)
    close(rolls)


def test_silent_head_is_lost(placement):
    rolls = meet(placement)
    rolls[1].lost_after_s = 0.4
    ((event,),) = hear(rolls[1:], lambda seen: bool(seen[0]))
    assert event == HeadLost(node="node 1 of 2 (as07r3b12)", reason="no heartbeat for 0.4 s")
    close(rolls)


def test_closed_connection_is_lost(placement):
    rolls = meet(replace(placement, nnodes=3))
    head = rolls[0]
    rolls[1]._connection.socket.close()
    assert hear([head, rolls[2]], lambda _: bool(head.lost)) == [[], []]
    assert head.lost == {1: "it closed the connection"}
    close([head, rolls[2]])


def test_stop_reaches_all_others(placement):
    rolls = meet(replace(placement, nnodes=3))
    rolls[1].report(StopOrder(reason="SIGUSR1"))
    events = hear(rolls, lambda seen: bool(seen[0] and seen[2]))
    expected = StopOrder(node="node 2 of 3 (as07r3b13)", reason="SIGUSR1")
    assert events == [[expected], [], [expected]]
    close(rolls)


def test_end_of_the_run_is_told_to_all(placement):
    end_run(meet(placement), 85)


def test_link_beyond_descriptor_1023_closes():
    near_end, far_end = socket.socketpair()
    with kept_file_limit(), near_end, far_end:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        link = Connection(socket.socket(fileno=os.dup2(near_end.fileno(), 2000)))
        far_end.sendall(messages.encode(messages.Heartbeat()) + b"\n")
        link.close(linger_s=0.1)
        assert link.fileno() == -1


def test_ports_stay_below_the_ephemeral_range():
    assert all(20000 <= ports.rollcall_port(str(job), None) < 31000 for job in range(2000))
    assert ports.first_free(30999) in range(20000, 20100)
    assert ports.rollcall_port("any", 29500) == 29501
    assert ports.rollcall_port("any", 65535) == 65534


@pytest.mark.parametrize("secret", [None, bytes(32)], ids=["open", "with a secret"])
def test_call_after_the_roll_call_is_refused(placement, secret):
    rolls = meet(placement, secret=secret)
    late = CallThread(placement, 1, secret=secret)
    hear(rolls, lambda _: not late.is_alive())
    for call in (late, CallThread(placement, 0)):
        assert "started twice on this host" in call.refusal()
    close(rolls)
