"""How NCCL's log is read. No GPU here: the lines have the form that NCCL prints."""

from __future__ import annotations

import os

import pytest

from imgkit_entrypoints.apps.bench import nccl_log

# Lines as NCCL prints them (src/transport/net.cc, p2p.cc, src/init.cc), of two ranks on two nodes.
LOG = """\
n1:7:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>
n1:7:9 [0] NCCL INFO Using network IB
n1:7:9 [0] NCCL INFO 16 coll channels, 16 collnet channels, 0 nvls channels, 16 p2p channels
n1:7:9 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] [receive] via NET/IB/0{}
n1:7:9 [0] NCCL INFO Channel 00/0 : 4[0] -> 5[1] via P2P/CUMEM/read
"""


@pytest.mark.parametrize(
    ("log", "sentences"),
    [
        (
            LOG.format("/GDRDMA"),
            ("NCCL's log: 16 channels, network IB, via NET/IB with GDRDMA, via P2P.",),
        ),
        (
            LOG.format(""),
            (
                "NCCL's log: 16 channels, network IB, via NET/IB without GDRDMA, via P2P.",
                "Some data passes through host memory, without GPUDirect RDMA. Run dist-doctor to see why.",
            ),
        ),
        (
            "n1:7:9 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] [receive] via NET/AWS Libfabric/0/GDRDMA",
            ("NCCL's log: via NET/AWS Libfabric with GDRDMA.",),
        ),
        ("unrelated", ()),
    ],
    ids=["direct", "through host memory", "plugin with a blank in its name", "other lines"],
)
def test_log_of_nccl_tells_the_way(log, sentences):
    assert nccl_log.describe_transports(nccl_log.find_transports(log.splitlines())) == sentences


def test_log_that_the_user_wants_is_left_alone():
    env = {"IMGKIT_DEVICE": "cuda", "NCCL_DEBUG": "WARN"}
    with nccl_log.collect_log(env) as folder:
        assert folder is None
    assert env == {"IMGKIT_DEVICE": "cuda", "NCCL_DEBUG": "WARN"}


def test_quiet_log_leaves_nothing_behind():
    env = {"IMGKIT_DEVICE": "cuda"}
    with nccl_log.collect_log(env) as folder:
        assert folder is not None
        assert env["NCCL_DEBUG_FILE"].startswith(str(folder))
    assert env == {"IMGKIT_DEVICE": "cuda"}
    assert not folder.exists()


def test_own_log_is_read_and_not_that_of_another_rank(tmp_path):
    (tmp_path / f"n1.{os.getpid()}").write_text("Using network IB\n")
    (tmp_path / f"n1.{os.getpid()}1").write_text("Using network Socket\n")
    assert nccl_log.read_transports(tmp_path) == {"network IB"}
    assert nccl_log.read_transports(None) == frozenset()
