"""``dist-doctor`` on all nodes: the worker that checks a node, and the report of rank 0.

Each node checks itself, all ranks verify an all_reduce together, and rank 0 reports which host is bad. The
ranks send their results through the key-value store of the launch, and not through the network that is
tested. So the results arrive even if NCCL hangs or returns wrong values.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgkit_entrypoints import facts, json_text, terminal
from imgkit_entrypoints.doctor.checks import Check, Verdict
from imgkit_entrypoints.doctor.checks.machine import SHM
from imgkit_entrypoints.doctor.node import clock_remark, examine, parse_options, passed, print_json
from imgkit_entrypoints.errors import ImgkitError

if TYPE_CHECKING:
    import torch

ELEMENTS = 1 << 18
"""How many numbers the all_reduce adds up: 1 MiB of float32.

On GH200 nodes with Slingshot, most wrong results had this size (NVIDIA/nccl issue 2001).
"""
SUM_MIB = ELEMENTS * 4 >> 20
# Number of times that the all_reduce runs.
REPEATS = 5
LATE_S = 15
"""Extra seconds for a rank to answer after its own timeout."""
# Most characters of a backend's error in the report, because some errors contain a whole stack trace.
MAX_ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The results of one rank, which it sends to rank 0."""

    rank: int
    host: str
    device: str
    seconds: float = 0.0
    """Time until the collective ended or failed."""
    error: str = ""
    """First line of the collective's error; empty if there was none."""
    wrong: tuple[int, ...] = ()
    """Ranks whose values arrived corrupted at this rank."""
    checks: tuple[Check, ...] = ()
    """Results of the checks of the whole node. Only the first rank of each node runs them."""
    machine: str = ""
    """Boot id of the machine, which is the same in all containers on it."""
    time_s: float = 0.0
    """Time on the node after the collective, in seconds since the epoch; 0 if the collective failed."""
    nccl_host: str = ""
    """The text by which NCCL recognizes ranks on the same machine; see `_identify_nccl_host`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """The verdict on one node, with the reasons for it and all checks whose verdict is not ``ok``."""

    host: str
    ranks: tuple[int, ...]
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    checks: tuple[Check, ...] = field(default=())


def judge_nodes(
    hosts: Sequence[str], answers: Mapping[int, Answer], timeout_s: int
) -> tuple[NodeVerdict, ...]:
    """Return a verdict on every node that distinguishes a bad node from nodes that only suffer from it.

    If the values of a rank arrive wrong at most other ranks, the sending rank is at fault. Otherwise, the
    receiving rank is at fault. If the collective fails on a node without any other problem, the verdict
    depends on the other nodes. If one of them is at fault, the verdict is ``unknown``, because the node may
    only suffer from that node's fault.

    Parameters
    ----------
    hosts : host name of every rank, which is empty if the rank has not reported it.
    answers : results by rank. Ranks that did not answer are missing.
    timeout_s : time limit of the collective, for messages.
    """
    reasons_by_rank = _find_faulty_ranks(hosts, answers, timeout_s)
    # A rank at fault or a failed check of any node may be why the collective has failed on other nodes.
    has_failed_check = not all(passed(answer.checks) for answer in answers.values())
    has_suspects = bool(reasons_by_rank) or has_failed_check
    ranks_by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_by_host.setdefault(host, []).append(rank)
    verdicts = []
    for host, ranks in ranks_by_host.items():
        verdicts.append(_judge_node(host, ranks, answers, reasons_by_rank, has_suspects))
    return tuple(verdicts)


def _find_faulty_ranks(
    hosts: Sequence[str], answers: Mapping[int, Answer], timeout_s: int
) -> dict[int, list[str]]:
    """Return the ranks that are at fault, each with the reasons.

    A rank is at fault in three cases: it did not answer, its values arrived wrong at most other ranks, or it
    received wrong values from a rank whose values arrived correctly at most others.
    """
    # The ranks whose values arrived wrong at most other ranks, with the reason.
    bad_senders = _find_bad_senders(answers)
    reasons_by_rank = {}
    for rank in range(len(hosts)):
        reasons = []
        if rank not in answers:
            reasons.append(f"rank {rank} did not answer within {timeout_s} s")
        else:
            # `wrong` has the ranks whose values arrived wrong at this rank. If a value of such a rank arrived
            # correctly at most others, the fault is at the receiver.
            good_senders = sorted(set(answers[rank].wrong) - bad_senders.keys())
            if good_senders:
                senders = ", ".join(map(str, good_senders))
                reasons.append(f"rank {rank} received wrong values from rank {senders}")
        if rank in bad_senders:
            reasons.append(bad_senders[rank])
        if reasons:
            reasons_by_rank[rank] = reasons
    return reasons_by_rank


def _find_bad_senders(answers: Mapping[int, Answer]) -> dict[int, str]:
    """Find the ranks whose values arrived wrong at most receivers, and return the reason for each.

    Only ranks whose collective ended without an error count as receivers.
    """
    complaints = Counter[int]()
    for answer in answers.values():
        complaints.update(answer.wrong)
    receivers = sum(not answer.error for answer in answers.values())
    reasons = {}
    for sender, count in complaints.items():
        if 2 * count > receivers:  # more than half
            reasons[sender] = f"the values of rank {sender} arrived corrupted at {count} of {receivers} ranks"
    return reasons


def _compare_machines(answer: Answer, answers: Mapping[int, Answer]) -> list[Check]:
    """Return a warning if NCCL would use the network between GPUs of one machine, and otherwise [].

    NCCL treats ranks as neighbors on one machine only if their host name and /dev/shm are the same. In two
    containers on one machine, these may differ. The boot id is equal in both, so it shows that the machine is
    the same.
    """
    if not answer.machine or not answer.device.startswith("cuda"):
        return []
    hosts = set()
    for peer in answers.values():
        if peer.machine == answer.machine and peer.nccl_host != answer.nccl_host:
            hosts.add(peer.host)
    if not hosts:
        return []
    warning = Check(
        name="machine",
        verdict="warn",
        evidence=f"/proc/sys/kernel/random/boot_id is the same on {', '.join(sorted(hosts))}, but the "
        f"host name or {SHM} differs: NCCL uses the network between GPUs of one machine",
        fix=f"use one container for all GPUs of a machine, or share {SHM} (hostIPC) and NCCL_HOSTID",
    )
    return [warning]


def _compare_clocks(answer: Answer, answers: Mapping[int, Answer]) -> list[Check]:
    """Return a warning if the clock of this rank's node differs from the other clocks, and otherwise []."""
    # One warning per node is enough, and only the first rank of each node has checks.
    if not answer.checks:
        return []
    if answer.time_s == 0:  # the collective of this rank has failed, so its time was not taken
        return []
    times_s = [peer.time_s for peer in answers.values() if peer.time_s != 0]
    remark = clock_remark(answer.time_s, times_s)
    if not remark:
        return []
    return [Check(name="clock", verdict="warn", evidence=remark, fix="start chronyd or ntpd on the node")]


def _judge_node(
    host: str,
    ranks: Sequence[int],
    answers: Mapping[int, Answer],
    reasons_by_rank: Mapping[int, Sequence[str]],
    has_suspects: bool,
) -> NodeVerdict:
    """Return the verdict on one node.

    Parameters
    ----------
    reasons_by_rank : the reasons for each rank that is at fault.
    has_suspects : True if any rank is at fault, or if a check failed on any node.
    """
    checks: list[Check] = []
    reasons: list[str] = []
    errors: list[str] = []
    for rank in ranks:
        reasons += reasons_by_rank.get(rank, ())
        answer = answers.get(rank)
        if answer is None:
            continue
        checks += answer.checks
        checks += _compare_machines(answer, answers)
        checks += _compare_clocks(answer, answers)
        if answer.error:
            errors.append(f"rank {rank} after {answer.seconds:.0f} s: {answer.error}")
    problems = tuple(check for check in checks if check.verdict != "ok")
    verdict: Verdict = "ok"
    if reasons or not passed(problems):
        verdict = "fail"
    elif errors:
        # If another node is at fault, the collective may have failed because of it.
        verdict = "unknown" if has_suspects else "fail"
    elif problems:
        verdict = "warn"
    return NodeVerdict(
        host=host or "a host that never reported its name",
        ranks=tuple(ranks),
        verdict=verdict,
        reasons=(*reasons, *errors),
        checks=problems,
    )


def format_table(nodes: Sequence[NodeVerdict]) -> Iterator[str]:
    """Yield the lines of the report: one line for each node, followed by lines with its problems."""
    width = max(len(node.host) for node in nodes)
    indent = " " * (7 + 2 + width)  # the columns of the verdict and of the host
    for node in nodes:
        yield f"{node.verdict:7}  {node.host:{width}}  {_format_ranks(node.ranks)}"
        for reason in node.reasons:
            yield f"{indent}  {reason}"
        for check in node.checks:
            yield f"{indent}  {check.verdict} {check.name}: {check.evidence}"
            if check.fix:
                yield f"{indent}  -> {check.fix}"


def _format_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks of a node as a text: ``rank 3``, ``ranks 0-3``, or ``ranks 0,2,4`` with gaps."""
    first = ranks[0]
    last = ranks[-1]
    if len(ranks) == 1:
        return f"rank {first}"
    if last - first == len(ranks) - 1:
        return f"ranks {first}-{last}"
    return f"ranks {','.join(map(str, ranks))}"


def failed_hosts(nodes: Sequence[NodeVerdict], *, strict: bool) -> list[str]:
    """Return the names of the hosts that failed. With `strict`, a warning also counts as a failure."""
    return [node.host for node in nodes if node.verdict == "fail" or (strict and node.verdict == "warn")]


def verdict_line(nodes: Sequence[NodeVerdict], world_size: int, *, strict: bool = False) -> str:
    """Return the last line of the report, which names the failed hosts or says that all is well."""
    noun = "node" if len(nodes) == 1 else "nodes"
    scope = f"{len(nodes)} {noun}, {world_size} ranks"
    hosts = failed_hosts(nodes, strict=strict)
    if not hosts:
        return f"all_reduce of {SUM_MIB} MiB verified on {scope}"
    hint = "" if failed_hosts(nodes, strict=False) else ": --strict counts warnings as failures"
    return f"FAILED on {', '.join(hosts)} ({scope}){hint}"


def main() -> None:
    """Run one worker. All workers exit with the same code, which rank 0 decides."""
    import torch.distributed as dist

    options = parse_options()
    # If this process hangs in a library, no Python code can end it. Then the kernel ends it by SIGALRM.
    signal.alarm(5 * (options.timeout + LATE_S))
    # The store is a server with a table of keys and values that all ranks can reach. The ranks exchange their
    # results over it, because collectives may be what fails.
    store, rank, world_size = next(
        dist.rendezvous("env://", timeout=datetime.timedelta(seconds=options.timeout + LATE_S))
    )
    # Each attempt of the launch has its own prefix, so that results of an earlier attempt are not read.
    store = dist.PrefixStore(f"doctor/{os.environ.get('IMGKIT_ATTEMPT', '1')}", store)
    store.set(f"host/{rank}", _host())
    answer = _add_node_checks(_verify_sum(store, rank, world_size, options.timeout))
    store.set(f"answer/{rank}", json.dumps(dataclasses.asdict(answer)))
    if rank == 0:
        # Every rank gets its full time, because a rank that hangs is a finding as well.
        hosts, answers = _collect_answers(store, world_size, options.timeout + LATE_S)
        nodes = judge_nodes(hosts, answers, options.timeout)
        _print_report(nodes, world_size, options)
        has_failed = bool(failed_hosts(nodes, strict=options.strict))
        store.set("code", str(int(has_failed)))
    # Rank 0 may need its timeout for the start, for the sum, and again for the others, so wait longer.
    store.wait(["code"], datetime.timedelta(seconds=4 * (options.timeout + LATE_S)))
    code = int(store.get("code"))
    store.add("finished", 1)  # a counter of the ranks that do not need the store any more
    if rank == 0:
        _wait_for_other_ranks(store, world_size)
    sys.stdout.flush()
    # os._exit instead of sys.exit: if a collective hangs, the destructor of its process group would hang,
    # too.
    os._exit(code)


def _wait_for_other_ranks(store: Any, world_size: int) -> None:
    """Wait until no other rank needs the store any more, or until `LATE_S` seconds have passed.

    The process of rank 0 may contain the store's server, so it must exit last.
    """
    deadline_s = time.monotonic() + LATE_S
    # Adding 0 returns the counter of the ranks that have finished.
    while store.add("finished", 0) < world_size and time.monotonic() < deadline_s:
        time.sleep(0.05)


def _print_report(nodes: Sequence[NodeVerdict], world_size: int, options: argparse.Namespace) -> None:
    """Print the verdicts on all nodes as a table or, with ``--json``, as JSON."""
    if options.json:
        has_passed = not failed_hosts(nodes, strict=options.strict)
        rows = [dataclasses.asdict(node) for node in nodes]
        print_json({"passed": has_passed, "world_size": world_size, "nodes": rows})
    else:
        last_line = verdict_line(nodes, world_size, strict=options.strict)
        terminal.print_results(*format_table(nodes), last_line)


def _host() -> str:
    """Return the host name of this node, and its number in a run on several nodes: ``gpu07 (node 3)``.

    The number is needed because the host names of two containers may be equal.
    """
    node_rank = os.environ.get("GROUP_RANK")
    if node_rank and _has_several_nodes():
        return f"{platform.node()} (node {node_rank})"
    return platform.node()


def _has_several_nodes() -> bool:
    """Return whether the run has other nodes than this one."""
    nodes = os.environ.get("GROUP_WORLD_SIZE")  # torchrun sets it; a rank that MPI started has none
    if nodes:
        return nodes != "1"
    return os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")


def _add_node_checks(answer: Answer) -> Answer:
    """If this is the first rank of its node, check the node and add the results to the answer of this rank.

    On all other ranks, return the answer unchanged.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return answer
    # A run on CPUs uses Gloo, so problems of NCCL between nodes are only warnings for it.
    uses_nccl = os.environ.get("IMGKIT_DEVICE") == "cuda"
    try:
        host = facts.gather()
        checks = examine(
            host,
            facts.system_facts(),
            os.environ,
            reader=facts.Reader(root=facts.root_of(os.environ)),
            has_several_nodes=uses_nccl and _has_several_nodes(),
        )
    except ImgkitError as error:
        failure = Check(name="checks", verdict="fail", evidence=error.what, fix=error.hint or "")
        return dataclasses.replace(answer, checks=(failure,))
    return dataclasses.replace(
        answer, machine=host.boot_id, nccl_host=_identify_nccl_host(host), checks=checks
    )


def _identify_nccl_host(host: facts.HostFacts) -> str:
    """Return a text that is equal for two ranks if NCCL considers them to be on the same machine.

    NCCL compares the host name (or NCCL_HOSTID) and the device number of /dev/shm (misc/utils.cc and the shm
    transport). Ranks on the same machine can share memory.
    """
    try:
        shm = Path(SHM).stat().st_dev
    except OSError:
        shm = 0
    return f"{os.environ.get('NCCL_HOSTID') or host.hostname} {shm}"


def _verify_sum(store: Any, rank: int, world_size: int, timeout_s: int) -> Answer:
    """Open a process group, verify an all_reduce in it, and return the result as the answer of this rank.

    If the network fails, no error is raised. The error is part of the answer.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    backend = "gloo"
    if os.environ.get("IMGKIT_DEVICE") == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        backend = "nccl"
    start_s = time.monotonic()
    wrong: tuple[int, ...] = ()
    problem = ""
    time_s = 0.0
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        wrong = _run_verified_sums(rank, world_size, device)
        # All ranks leave the last all_reduce at almost the same moment, so their clocks can be compared.
        time_s = time.time()
    except Exception as error:  # a network error of any type is a finding
        lines = str(error).strip().splitlines() or [type(error).__name__]
        problem = lines[0][:MAX_ERROR_CHARACTERS]
    return Answer(
        rank=rank,
        host=_host(),
        device=str(device),
        seconds=time.monotonic() - start_s,
        error=problem,
        wrong=wrong,
        time_s=time_s,
    )


def _run_verified_sums(rank: int, world_size: int, device: torch.device) -> tuple[int, ...]:
    """Run the all_reduce several times, and return the ranks whose values arrive wrong at this rank.

    Each rank contributes its values at the positions i with i % world_size == rank, and zeros elsewhere. So
    each value of the sum comes from exactly one rank, and a wrong value shows which rank sent it.
    """
    import torch
    import torch.distributed as dist

    count = max(ELEMENTS, world_size)
    sender = torch.arange(count, device=device).remainder_(world_size)
    # Integers up to 2^20, because float32 represents integers exactly only up to 2^24.
    integers = torch.arange(count, device=device).remainder_(1 << 20).add_(1)
    expected_sum = integers.to(torch.float32)
    is_wrong = torch.zeros(count, dtype=torch.bool, device=device)
    for _ in range(REPEATS):
        buffer = torch.where(sender == rank, expected_sum, 0.0)
        dist.all_reduce(buffer)
        is_wrong |= buffer != expected_sum
    return tuple(torch.unique(sender[is_wrong]).tolist())


def _collect_answers(store: Any, world_size: int, wait_s: int) -> tuple[list[str], dict[int, Answer]]:
    """Return the host name of every rank, and the answers that arrive within `wait_s` seconds.

    The time limit is for all ranks together. If a rank does not answer, its host name may still be known,
    because each rank reports it at its start.
    """
    deadline_s = time.monotonic() + wait_s
    # Every rank writes the key host/RANK at its start, and answer/RANK when it has finished.
    answers: dict[int, Answer] = {}
    hosts = [""] * world_size
    for rank in range(world_size):
        key = f"answer/{rank}"
        # Answers that have already arrived are read even after the time limit, hence at least 0.1 s.
        answer_text = _read(store, key, max(0.1, deadline_s - time.monotonic()))
        if answer_text is None:
            # Each rank sets this key at its start, so there is no need to wait for it.
            hosts[rank] = _read(store, f"host/{rank}", 0.1) or ""
        else:
            answers[rank] = json_text.build_value(Answer, json_text.parse(answer_text), key)
            hosts[rank] = answers[rank].host
    return hosts, answers


def _read(store: Any, key: str, wait_s: float) -> str | None:
    """Return the text of a key in the store, or None if it does not arrive within `wait_s` seconds."""
    try:
        store.wait([key], datetime.timedelta(seconds=wait_s))
    except Exception:  # no such key: DistStoreError or RuntimeError, depending on torch's version
        return None
    text: bytes = store.get(key)
    return text.decode()


if __name__ == "__main__":
    from imgkit_entrypoints.apps.ranks import run_worker

    run_worker(main)
