"""``--compare rdma,tcp``: RDMA and TCP over one network in one job. Runs in each node agent, without torch.

NCCL reads its variables once, so each arm has workers of its own. The arms take turns (A B A B), so that a
drift of the machine affects both. All nodes start the same launches in the same order. Node 0, where rank 0
saves, reads what each arm measured, checks which transport carried it, and prints the ratio.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from imgkit_entrypoints import fabric, facts, terminal
from imgkit_entrypoints.apps.bench import node_state, options, record, sizes
from imgkit_entrypoints.apps.bench.record import BenchRun, Result
from imgkit_entrypoints.errors import EXIT_NO, UsageError
from imgkit_entrypoints.launch.plan import LaunchOptions, Series
from imgkit_entrypoints.schedulers.placement import Placement


def run(series: Series) -> int:
    """Launch dist-bench once, or with ``--compare`` once per arm and round; returns the exit code.

    Raises
    ------
    UsageError : the arms cannot be compared here, or --save names no writable file.
    """
    wanted = options.read(series.arguments)
    whole = {options.WHOLE_COMMAND: shlex.join(series.command)}
    if wanted.compare is None:
        return series.launch(series.arguments, whole)
    _refuse_options(wanted, series.options)
    _refuse_place(wanted.compare, series.place, series.options.request.device, series.env)
    head = series.place.node_rank == 0
    if head and wanted.save:
        record.writable(Path(wanted.save))
    found = _Comparison(wanted.compare, series.command, wanted.rounds)
    plain = _without("--save", _without("--compare", series.arguments))
    code = 0
    with _scratch() as folder:
        for turn in range(2 * wanted.rounds):
            name = wanted.compare[turn % 2]
            file = folder / f"{turn}.json"
            if head:
                series.say(f"--compare: {name}, round {1 + turn // 2} of {wanted.rounds}")
            code = series.launch(
                (*plain, *(("--save", str(file)) if head else ())), {**whole, **options.ARMS[name].env}
            )
            if head and file.exists():
                for problem in found.take(name, record.load(file)):
                    series.say(problem)
            if code:
                break
    if not head:
        return code
    terminal.out(*found.report())
    for path in found.save(Path(wanted.save)) if wanted.save else ():
        series.say(f"saved {path}")
    return code or (EXIT_NO if found.unproven else 0)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    try:
        made = tempfile.mkdtemp(prefix="imgkit-compare-")
    except OSError as error:
        hint = "set TMPDIR to a writable folder of this node"
        raise UsageError(
            f"cannot create a temporary folder: {error.strerror}", where="--compare", hint=hint
        ) from error
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _without(flag: str, words: Sequence[str]) -> list[str]:
    left = [word for word in words if not word.startswith(f"{flag}=")]
    if flag in left:
        place = left.index(flag)
        del left[place : place + 2]
    return left


def _refuse_options(wanted: options.BenchOptions, asked: LaunchOptions) -> None:
    flags = {
        "--baseline": wanted.baseline,
        "--require": wanted.require,
        "--duration": wanted.duration_s,
        "--dry-run": asked.dry_run,
    }
    if given := [flag for flag, value in flags.items() if value]:
        raise UsageError(
            f"{given[0]} needs a single run",
            where="--compare",
            hint="leave one of the two out. A single run over TCP: NCCL_NET=Socket dist-bench ...",
        )
    if wanted.group == "node":
        raise UsageError(
            "nothing crosses the network within a node", where="--compare", hint="use --group world"
        )


def _refuse_place(names: Sequence[str], place: Placement, device: str, env: Mapping[str, str]) -> None:
    where = f"--compare {','.join(names)}"
    if place.direct is not None or place.size is not None:
        raise UsageError(
            "each arm needs separate workers, started by one node agent per node on a fixed number of nodes",
            where=where,
            hint="start dist-bench once on every node, without --direct and --nnodes N+S",
        )
    host, system = facts.gather(env=env), facts.system_facts(env=env)
    for arm in (options.ARMS[name] for name in names):
        if arm.device == "cuda" and (device == "cpu" or not host.gpus):
            why = "--device cpu" if device == "cpu" else f"no GPU is visible: {host.gpus_source}"
            raise UsageError(
                f"only NCCL between GPUs can choose between RDMA and sockets ({why})",
                where=where,
                hint="start dist-bench with GPUs (--nv, --gres=gpu:N), or leave --compare out",
            )
        if place.nnodes < 2:
            raise UsageError(
                "nothing crosses the network on a single node",
                where=where,
                hint="start dist-bench on two nodes",
            )
        network = fabric.choose(host, system, {**env, **arm.env}, nnodes=place.nnodes, head=place.head)
        if arm.carrier == "RDMA" and network.kind == "tcp":
            raise UsageError(
                f"no RDMA on this node: {network.reason}", where=where, hint="run dist-doctor to see why"
            )


def carrier(found: BenchRun) -> tuple[str, str]:
    """The transport that carried the data ("RDMA", "sockets" or "" if unsure), and the evidence in words."""
    networks = [word for word in found.transport if word.startswith(("network ", "via NET/"))]
    by_log = {"sockets" if "socket" in word.lower() else "RDMA" for word in networks}
    rdma = sum(count for name, count in found.carried.items() if node_state.is_rdma(name))
    by_ports = {"RDMA" if 2 * rdma > sum(found.carried.values()) else "sockets"} if found.seen else set()
    log = ", ".join(networks) or "no network (it is not read if NCCL_DEBUG is set)"
    counted = ", ".join(f"{sizes.decimal(count)} through {name}" for name, count in found.carried.items())
    sure = by_log | by_ports
    return (
        sure.pop() if len(sure) == 1 else "",
        f"NCCL's log names {log}; the ports counted {counted if found.seen else 'too little to tell'}",
    )


class _Comparison:
    """The runs of both arms so far."""

    def __init__(self, names: tuple[str, str], words: tuple[str, ...], rounds: int) -> None:
        self.names, self.words, self.rounds = names, words, rounds
        self.runs: dict[str, list[BenchRun]] = {name: [] for name in names}
        self.unproven: list[str] = []
        self.proofs: dict[str, str] = {}

    def take(self, name: str, found: BenchRun) -> list[str]:
        """Add the run of one launch; returns the problems with it."""
        self.runs[name].append(found)
        used, evidence = carrier(found)
        self.proofs[name] = evidence
        wanted = options.ARMS[name].carrier
        if used == wanted or not found.complete:
            return []
        how = f"it used {used}" if used else "nothing proves that it did"
        self.unproven.append(f"NOT PROVEN: the arm {name} must use {wanted}, but {how}: {evidence}")
        return self.unproven[-1:]

    def joined(self, name: str) -> record.Record | None:
        """All rounds of an arm as one run; None before its first round."""
        runs = self.runs[name]
        if not runs:
            return None
        last = runs[-1]
        by_key: dict[object, list[Result]] = {}
        for one in (one for found in runs for one in found.results):
            by_key.setdefault(one.key, []).append(one)
        rounds = f"{len(runs)} of {self.rounds} rounds, joined; the sentences below are from the last round"
        sentences = [f"{name}: {rounds}; {self.proofs[name]}.", *last.sentences]
        return record.Record(
            started=runs[0].started,
            command=self.words,
            world=last.world,
            fingerprint=last.fingerprint,
            line_rate_Gbps=last.line_rate_Gbps,
            results=[_joined(found) for found in by_key.values()],
            verdict={"sentences": sentences},
            complete=len(runs) == self.rounds and all(found.complete for found in runs),
            transport=last.transport,
            arm=name,
        )

    def save(self, path: Path) -> list[Path]:
        """Save one file per arm: ``run.json`` becomes ``run.rdma.json`` and ``run.tcp.json``."""
        saved = []
        for name in self.names:
            if made := self.joined(name):
                saved.append(path.with_name(f"{path.stem}.{name}{path.suffix or '.json'}"))
                made.save(saved[-1])
        return saved

    def report(self) -> list[str]:
        """The table of both arms, or the reason why there is no ratio."""
        one, other = (self.joined(name) for name in self.names)
        if one is None or other is None:
            return [f"INCOMPLETE: --compare {','.join(self.names)} ended before both arms had run."]
        if self.unproven:
            return [
                *self.unproven,
                "No ratio: one arm did not use the network it is named after. Run dist-doctor to see why.",
            ]
        first, second = self.names
        columns = (f"{first} algbw", "busbw Gbps", f"{second} algbw", "busbw Gbps", f"{first} / {second}")
        lines = [
            f"{first} and {second} in turn, {self.rounds} rounds, {one.world.ranks} ranks on "
            f"{one.world.nodes} nodes; batches, median, 1 Gbps = 1e9 bit/s",
            f"{'':14} {'size':>20} {' '.join(f'{text:>12}' for text in columns)}  by round",
        ]
        others = {item.key: item for item in other.results}
        for item in one.results:
            if item.timing == "batched" and item.key in others:
                lines.append(self._line(item, others[item.key]))
        if any(line.endswith("undecided") for line in lines):
            lines.append(
                "undecided: the spreads of both arms overlap, so the ratio may be chance. More --seconds or "
                "--rounds narrow them."
            )
        lines += [f"{name}: {self.proofs[name]}." for name in self.names]
        if not (one.complete and other.complete):
            lines.append(
                "INCOMPLETE: not all rounds of both arms have ended. The lines above cover those that did."
            )
        return lines

    def _line(self, one: Result, other: Result) -> str:
        rounds = [
            _algbw(one, first) / _algbw(one, second)
            for first, second in zip(*(self.runs[name] for name in self.names), strict=False)
            if _algbw(one, first) and _algbw(one, second)
        ]
        bandwidths = [
            8 * value for item in (one, other) for value in (item.median_algbw_GBps, item.median_busbw_GBps)
        ]
        figures = " ".join(f"{value:12.2f}" for value in (*bandwidths, other.median_us / one.median_us))
        by_round = ", ".join(f"{value:.3g}" for value in rounds)
        doubt = "  undecided" if one.undecided(other) else ""
        return f"{one.op:14} {sizes.both(one.size_bytes):>20} {figures}  {by_round}{doubt}"


def _algbw(wanted: Result, found: BenchRun) -> float:
    """The bandwidth of one result in one launch; 0 if it was not measured."""
    return next((one.median_algbw_GBps for one in found.results if one.key == wanted.key), 0.0)


def _joined(found: Sequence[Result]) -> Result:
    """Join one size of several rounds; every iteration has the same weight."""
    first = found[0]
    iterations = sum(one.iterations for one in found)
    times = [time_us / 1e6 for one in found for time_us in one.times_us]
    mean = sum(one.time_us * one.iterations for one in found) / iterations / 1e6
    checked = [one.wrong for one in found if one.wrong is not None]
    return record.new_result(
        first.op,
        first.busbw_GBps / first.algbw_GBps,
        sorted(times)[(len(times) - 1) // 2] if times else mean,
        size_bytes=first.size_bytes,
        dtype=first.dtype,
        group=first.group,
        iterations=iterations,
        wrong=sum(checked) if checked else None,
        times=times or None,
        variant=first.variant,
        batches=[time_us / 1e6 for one in found for time_us in one.batches_us],
    )
