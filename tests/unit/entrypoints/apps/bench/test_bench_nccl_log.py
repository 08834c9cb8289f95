"""How NCCL's log is read. No GPU here: the lines have the form that NCCL prints."""

from __future__ import annotations

import os
from pathlib import Path

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


def test_log_of_nccl_tells_the_way() -> None:
    found = nccl_log.parsed(LOG.format("/GDRDMA").splitlines())
    assert found == {"network IB", "16 channels", "via NET/IB with GDRDMA", "via P2P"}
    (text,) = nccl_log.sentences(found)
    assert text.startswith("NCCL's log: 16 channels, network IB")


def test_way_through_host_memory_is_told() -> None:
    found = nccl_log.parsed(LOG.format("").splitlines())
    assert "without GPUDirect RDMA" in nccl_log.sentences(found)[1]
    assert nccl_log.sentences(nccl_log.parsed(["unrelated"])) == ()


def test_plugin_with_a_blank_in_its_name_is_read() -> None:
    line = "n1:7:9 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] [receive] via NET/AWS Libfabric/0/GDRDMA"
    assert nccl_log.parsed([line]) == {"via NET/AWS Libfabric with GDRDMA"}


def test_log_that_the_user_wants_is_left_alone() -> None:
    env = {"IMGKIT_DEVICE": "cuda", "NCCL_DEBUG": "WARN"}
    with nccl_log.collected(env) as folder:
        assert folder is None
    assert env == {"IMGKIT_DEVICE": "cuda", "NCCL_DEBUG": "WARN"}


def test_quiet_log_leaves_nothing_behind() -> None:
    env = {"IMGKIT_DEVICE": "cuda"}
    with nccl_log.collected(env) as folder:
        assert folder is not None
        assert env["NCCL_DEBUG_FILE"].startswith(str(folder))
    assert env == {"IMGKIT_DEVICE": "cuda"}
    assert not folder.exists()


@pytest.mark.parametrize(
    ("line", "algorithm", "protocol", "channels"),
    [
        ("AllReduce: 4096 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..1}", "TREE", "LL", 2),
        (
            "n1:7:9 [0] NCCL INFO AllGather: 37756928 Bytes -> Algo 1 proto 2 time 2860.208008",
            "Ring",
            "Simple",
            None,
        ),
    ],
)
def test_decision_of_nccl_is_read(line: str, algorithm: str, protocol: str, channels: int | None) -> None:
    found = nccl_log.last_choice(["8 Bytes -> Algo NVLS proto LL128", line, "unrelated"])
    assert found == nccl_log.NcclChoice(algorithm=algorithm, protocol=protocol, channels=channels)


def test_log_without_decisions_says_nothing() -> None:
    assert nccl_log.last_choice(["Using network IB"]) is None
    assert nccl_log.decided(None, "decided") is None


def test_without_nccl_nothing_is_switched(tmp_path: Path) -> None:
    env = dict(nccl_log.SETTINGS)
    with nccl_log.deciding(tmp_path, env) as begin:
        assert env == nccl_log.SETTINGS
        assert nccl_log.decided(tmp_path, begin) is None


def test_decisions_go_to_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = dict(nccl_log.SETTINGS)

    told = iter(["8 Bytes -> Algo 0 proto 0", "Using network IB", "no decision on this one", "via NET/IB/0"])

    def fake_nccl_opens_its_log() -> None:
        name = env["NCCL_DEBUG_FILE"].replace("%h", "n1").replace("%p", str(os.getpid()))
        assert not Path(name).exists(), "NCCL would empty it"
        Path(name).write_text(f"{next(told)}\n")

    monkeypatch.setattr(nccl_log, "_reset", lambda: fake_nccl_opens_its_log)
    found = []
    for _ in range(2):
        with nccl_log.deciding(tmp_path, env) as begin:
            assert env["NCCL_DEBUG_SUBSYS"] == "TUNING"
            found.append(nccl_log.decided(tmp_path, begin))
    assert found == [nccl_log.NcclChoice(algorithm="Tree", protocol="LL", channels=None), None]
    assert env["NCCL_DEBUG_SUBSYS"] == nccl_log.SETTINGS["NCCL_DEBUG_SUBSYS"]
    assert "network IB" in nccl_log.found(tmp_path)
