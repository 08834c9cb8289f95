"""``--compare``: the launches, the evidence it accepts, and its refusals.

No NCCL here: `FakeLauncher` writes the files that workers would, with a log in the form of NCCL's
sources. The launches themselves are real in tests/lab/apps/test_bench_real.py, on gloo.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from imgkit_entrypoints.apps.bench import compare, nccl_log, options, record
from imgkit_entrypoints.cli import start
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch.plan import Series
from imgkit_entrypoints.schedulers.placement import Placement, Size

FAKE_LOG = {
    "IB": "n1:7:9 [0] NCCL INFO Using network IB\n"
    "n1:7:9 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] [receive] via NET/IB/0/GDRDMA\n",
    "Socket": "n1:7:9 [0] NCCL INFO Using network Socket\n"
    "n1:7:9 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] [receive] via NET/Socket/0\n",
    "AWS Libfabric": "n1:7:9 [0] NCCL INFO Using network AWS Libfabric\n"
    "n1:7:9 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] [receive] via NET/AWS Libfabric/0/GDRDMA\n",
    "": "",
}
PORTS = {"IB": "mlx5_0:1", "Socket": "eth0", "AWS Libfabric": "cxi0", "": "eth0"}
SIZES = (1 << 20, 1 << 30)


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """Environment of a node with one GPU and one InfiniBand port."""
    port = tmp_path / "root/sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    told = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "200 Gb/sec (2X NDR)", "lid": "0x1"}
    for name, text in (told | {"link_layer": "InfiniBand"}).items():
        (port / name).write_text(f"{text}\n")
    (tmp_path / "root/dev").mkdir()
    (tmp_path / "root/dev/nvidia0").touch()
    return {"IMGKIT_ROOT": str(tmp_path / "root")}


class FakeLauncher:
    """Stands in for the launches: each writes the file of a run over `networks[turn]`."""

    def __init__(
        self, *networks: str, ratio: float = 4.0, counted: bool = True, codes: Sequence[int] = (0, 0, 0, 0)
    ) -> None:
        self.networks, self.ratio, self.counted, self.codes = networks, ratio, counted, codes
        self.started: list[tuple[tuple[str, ...], dict[str, str]]] = []

    def __call__(self, words: Sequence[str], variables: Mapping[str, str]) -> int:
        turn = len(self.started)
        self.started.append((tuple(words), dict(variables)))
        if "--save" in words:
            network = self.networks[turn]
            fast = self.ratio if network != "Socket" else 1.0
            Path(words[list(words).index("--save") + 1]).write_text(self.saved(network, fast, turn))
        return self.codes[turn]

    def saved(self, network: str, fast: float, turn: int) -> str:
        results = []
        for size in SIZES:
            seconds = size / 1e9 / fast * (1 + 0.1 * (turn // 2))
            one = {"size_bytes": size, "dtype": "fp32", "group": "world"}
            batches = [seconds] * 5
            results.append(
                record.new_result(
                    "all_reduce", 1.75, seconds, iterations=10, wrong=None, batches=batches, **one
                )  # type: ignore[arg-type]
            )
            times = [seconds, seconds * 2, seconds * 3]
            results.append(
                record.new_result("all_reduce", 1.75, seconds, iterations=3, wrong=0, times=times, **one)  # type: ignore[arg-type]
            )
        made = record.Record(
            started="2026-11-21T15:00:00+00:00",
            command=("dist-bench",),
            world=record.World(
                ranks=8, nodes=2, ranks_per_node=4, hosts=("n1", "n2"), backend="nccl", device="cuda"
            ),
            fingerprint={"nccl": "2.20.5"},
            line_rate_Gbps=200.0,
            results=results,
            complete=self.codes[turn] == 0,
            transport=tuple(sorted(nccl_log.parsed(FAKE_LOG[network].splitlines()))),
        )
        seen = 100.0 if self.counted else None
        made.verdict |= {
            "traffic": [{"op": "all_reduce", "measured_Gbps": seen}],
            "ports": [{"host": "n1", "port": PORTS[network], "sent_bytes": 8_100_000_000}],
        }
        return made.to_json()


def place(nnodes: int = 2, node_rank: int = 0, **more: object) -> Placement:
    fixed = {"scheduler": "manual", "hosts": (), "head": "n1", "port": None, "job_id": "", "source": {}}
    return Placement(nnodes=nnodes, node_rank=node_rank, **{**fixed, **more})  # type: ignore[arg-type]


def series(
    env: Mapping[str, str],
    launcher: FakeLauncher,
    *words: str,
    launch: Sequence[str] = (),
    at: Placement | None = None,
) -> int:
    asked = start.read_options(start.launch_parser("dist-bench", "", {}).parse_args(launch), ("dist-bench",))
    given = Series(
        arguments=words,
        command=("dist-bench", *words),
        options=asked,
        place=at or place(),
        env=env,
        launch=launcher,
        say=lambda text: print(f"say: {text}"),
    )
    return compare.run(given)


IN_TURN = ("IB", "Socket", "IB", "Socket")
RDMA_TCP = ("all_reduce", "--compare", "rdma,tcp")


def test_without_compare_it_is_one_launch(machine: dict[str, str]) -> None:
    launcher = FakeLauncher("IB")
    assert series(machine, launcher, "all_reduce", "--size", "4K") == 0
    assert [words for words, _ in launcher.started] == [("all_reduce", "--size", "4K")]


def test_workers_are_told_the_whole_command(machine: dict[str, str], tmp_path: Path) -> None:
    launcher = FakeLauncher("IB")
    words = ("--save", str(tmp_path / "a b.json"))
    series(machine, launcher, *words)
    (told,) = (variables[options.WHOLE_COMMAND] for _, variables in launcher.started)
    assert shlex.split(told) == ["dist-bench", *words]


def test_arms_take_turns_with_variables_of_their_own(machine: dict[str, str]) -> None:
    launcher = FakeLauncher(*IN_TURN)
    assert series(machine, launcher, "--compare=rdma,tcp", "--size", "4K") == 0
    assert [variables.get("NCCL_NET") for _, variables in launcher.started] == [None, "Socket"] * 2
    assert all(words[:3] == ("--size", "4K", "--save") for words, _ in launcher.started)
    assert len({words[3] for words, _ in launcher.started}) == 4


def test_ratio_is_told_for_every_size(machine: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert series(machine, FakeLauncher(*IN_TURN), *RDMA_TCP) == 0
    told = capsys.readouterr().out.splitlines()
    rows = [line for line in told if line.startswith("all_reduce")]
    assert [line.split()[-3:] for line in rows] == [["4.00", "4,", "4"]] * 2
    assert "1GiB (1.07GB)" in rows[1]
    assert any(
        "rdma: NCCL's log names network IB, via NET/IB with GDRDMA; the ports" in line for line in told
    )


def test_ratio_within_the_spread_is_undecided(
    machine: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    # The second round of each arm is 10 % slower than the first, which is more than the arms differ by.
    assert series(machine, FakeLauncher(*IN_TURN, ratio=1.05), *RDMA_TCP) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.endswith("undecided") for line in told if line.startswith("all_reduce")] == [True, True]
    assert any("the ratio may be chance" in line for line in told)


def test_other_nodes_start_the_same_and_save_nothing(machine: dict[str, str]) -> None:
    launcher = FakeLauncher(*IN_TURN)
    assert series(machine, launcher, *RDMA_TCP, at=place(node_rank=1)) == 0
    assert [words for words, _ in launcher.started] == [("all_reduce",)] * 4


def test_rounds_of_an_arm_become_one_file(machine: dict[str, str], tmp_path: Path) -> None:
    series(machine, FakeLauncher(*IN_TURN), *RDMA_TCP, "--save", str(tmp_path / "run.json"))
    found = record.load(tmp_path / "run.rdma.json")
    assert (found.arm, found.complete) == ("rdma", True)
    assert found.command == ("dist-bench", *RDMA_TCP, "--save", str(tmp_path / "run.json"))
    batched, single = found.results[:2]
    assert (batched.iterations, len(batched.batches_us)) == (20, 10)
    assert batched.algbw_GBps == pytest.approx(4 / 1.05)  # the mean of both rounds' times
    assert len(single.times_us) == 6
    assert record.load(tmp_path / "run.tcp.json").transport == (
        "network Socket",
        "via NET/Socket without GDRDMA",
    )


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "log alone"])
def test_arm_by_the_wrong_way_is_an_error(
    machine: dict[str, str], capsys: pytest.CaptureFixture[str], counted: bool
) -> None:
    launcher = FakeLauncher("Socket", "Socket", "Socket", "Socket", counted=counted)
    assert series(machine, launcher, *RDMA_TCP) == 1
    told = capsys.readouterr().out
    assert (
        "NOT PROVEN: the arm rdma must use RDMA, but it used sockets: NCCL's log names network Socket" in told
    )
    assert "No ratio" in told
    assert len(launcher.started) == 4  # the other nodes do not know, and start theirs


def test_arm_without_evidence_is_an_error(
    machine: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert series(machine, FakeLauncher("", "", "", "", counted=False), *RDMA_TCP) == 1
    assert "the arm tcp must use sockets, but nothing proves that it did" in capsys.readouterr().out


def test_log_and_ports_that_disagree_prove_nothing() -> None:
    launcher = FakeLauncher("IB")
    text = launcher.saved("IB", 1.0, 0).replace("mlx5_0:1", "eth0")
    assert compare.carrier(record.parse(json.loads(text), "a"))[0] == ""


@pytest.mark.parametrize(
    ("network", "carrier"),
    [("IB", "RDMA"), ("AWS Libfabric", "RDMA"), ("Socket", "sockets"), ("", "sockets")],
)
def test_carrier_is_told_by_log_and_ports(network: str, carrier: str) -> None:
    launcher = FakeLauncher(network)
    found = record.parse(json.loads(launcher.saved(network, 1.0, 0)), "a")
    assert compare.carrier(found)[0] == carrier


def test_failed_arm_ends_the_comparison(
    machine: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = FakeLauncher(*IN_TURN, codes=(0, 0, 7))
    assert series(machine, launcher, *RDMA_TCP, "--save", str(tmp_path / "run.json")) == 7
    assert len(launcher.started) == 3
    assert "INCOMPLETE: not all rounds" in capsys.readouterr().out
    assert not record.load(tmp_path / "run.rdma.json").complete


@pytest.mark.parametrize("text", ["rdma", "rdma,rdma", "rdma,ipoib", "rdma,tcp,rdma", ""])
def test_other_arms_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not two of rdma, tcp"):
        options.parse_arms(text)


@pytest.mark.parametrize(
    ("words", "launch", "at", "message"),
    [
        ((), ("--device", "cpu"), None, "only NCCL between GPUs can choose"),
        ((), (), place(nnodes=1), "nothing crosses the network"),
        ((), (), place(size=Size(training=1, spares=1)), "separate workers"),
        (("--baseline", "old.json"), (), None, "--baseline needs a single run"),
        (("--matrix",), (), None, "--compare would have no effect with --matrix"),
        (("--duration", "30m"), (), None, "--duration needs a single run"),
        (("--require", "80%"), (), None, "--require needs a single run"),
        (("--group", "node"), (), None, "within a node"),
        ((), ("--dry-run",), None, "--dry-run needs a single run"),
    ],
)
def test_impossible_comparisons_are_refused(
    machine: dict[str, str],
    words: tuple[str, ...],
    launch: tuple[str, ...],
    at: Placement | None,
    message: str,
) -> None:
    launcher = FakeLauncher()
    with pytest.raises(UsageError, match=message):
        series(machine, launcher, *RDMA_TCP, *words, launch=launch, at=at)
    assert not launcher.started


@pytest.mark.parametrize("off", ["NCCL_IB_DISABLE=1", "NCCL_NET=Socket"])
def test_rdma_that_is_switched_off_is_refused(machine: dict[str, str], off: str) -> None:
    name, _, value = off.partition("=")
    with pytest.raises(UsageError, match=f"no RDMA on this node: {off}"):
        series(machine | {name: value}, FakeLauncher(), *RDMA_TCP)


def test_no_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no GPU is visible"):
        series({"IMGKIT_ROOT": str(tmp_path)}, FakeLauncher(), *RDMA_TCP)


def test_unwritable_file_is_refused_at_once(machine: dict[str, str], tmp_path: Path) -> None:
    launcher = FakeLauncher()
    with pytest.raises(UsageError, match="is a folder"):
        series(machine, launcher, *RDMA_TCP, "--save", str(tmp_path))
    assert not launcher.started
