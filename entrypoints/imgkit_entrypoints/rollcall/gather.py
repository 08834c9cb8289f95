"""The roll call: the nodes of a run meet before torchrun starts.

Node 0 listens (`_Gathering`) and the others call (`_Joining`). The head names every node that never
calls, refuses nodes with different software on all nodes at once, lets the nodes test the network between
them (probe.py), and hands out a free port for torchrun. The connections stay open (session.py).

A run with spares (``--nnodes N+S``) starts with N+S nodes, or with N or more once no further one has called
for `LAST_CALL_S`. The head numbers those that are there anew, since torchrun allows no gaps. Nobody joins
after the start.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall import head_roll, messages, ports, probe, session
from imgkit_entrypoints.rollcall.head_roll import HeadRoll, Links, Strangers
from imgkit_entrypoints.rollcall.link import LONGEST, LONGEST_UNPROVEN, OPEN_HEAD, Link, NodeProof
from imgkit_entrypoints.rollcall.messages import (
    Beat,
    Call,
    Caller,
    FromHead,
    FromNode,
    Go,
    Identity,
    Offer,
    ProbeOrder,
    Refused,
)
from imgkit_entrypoints.rollcall.probe import OpenPorts
from imgkit_entrypoints.rollcall.session import MemberRoll, Roll, node_name, wait
from imgkit_entrypoints.schedulers import hostlist
from imgkit_entrypoints.schedulers.placement import Placement

PROGRESS_S = 10.0
LOOK_S = 0.5
"""Time between two looks at nodes that have called and are waiting."""
LONGEST_NAMES = 400
"""Characters of the names of missing nodes in one message; it names as many as `SHOWN` of them otherwise."""
SHOWN = 32
LAST_CALL_S = 30.0
"""Time that a run with spares waits for one more after the last call.

Nodes of one job start seconds apart, and pods as far apart as their images take to pull. So a shorter wait
would leave nodes out, and a longer one costs every run in which a node is missing."""

Say = Callable[[str], None]


def call(
    place: Placement,
    me: Caller,
    *,
    timeout_s: float,
    say: Say,
    stopped: Callable[[], str] = lambda: "",
    secret: bytes | None = None,
    elastic: bool = False,
) -> Roll:
    """Meet all nodes of `place` within `timeout_s` seconds from this node's own start.

    The place of the result counts the nodes that are there, also where `place` has spares.

    Parameters
    ----------
    stopped : called about twice a second; a text that it returns ends the roll call everywhere.
    secret : the run's secret, which every node proves (link.py); None: names alone are enough.
    elastic : the head starts each attempt (`Roll.elastic`); the head's word counts on all nodes.

    Raises
    ------
    NoPlan : a node did not join or never answered, the nodes run different software, the network between two
    nodes loses data, a port is busy, or the limit of open files is too low.
    """
    assert place.nnodes > 1  # noqa: S101 - one node has nobody to call
    with probe.offering(me.address, me.interface) as opened:
        if place.node_rank != 0:
            return _Joining(place, me, opened, timeout_s, say, stopped, secret).join()
        run = _Gathering(place, me, opened, timeout_s, say, stopped, secret)
        try:
            return run.gather(elastic=elastic)
        except BaseException as error:
            if isinstance(error, NoPlan):
                run.refuse(error)
            run.strangers.close()
            raise


class _Gathering:
    """The head's side until all nodes have called."""

    def __init__(
        self,
        place: Placement,
        me: Caller,
        opened: OpenPorts,
        timeout_s: float,
        say: Say,
        stopped: Callable[[], str],
        secret: bytes | None,
    ) -> None:
        self.place, self.timeout_s, self.say, self.stopped = place, timeout_s, say, stopped
        self.port = ports.roll_call(place.job_id, place.port)
        self.links = Links()
        self.callers: dict[int, Caller] = {0: me}
        self.opened = opened
        self.offers: dict[int, Offer | None] = {0: opened.offer}
        most = make_room(place.nnodes, head_roll.MOST)
        try:
            listener = ports.listen(self.port, backlog=place.nnodes)
        except OSError as error:
            raise NoPlan(
                f"port {self.port}, where the nodes of this run meet, is busy on the head: "
                f"{ports.holder(self.port)} listens there",
                where=f"{place.head or me.host}:{self.port} ({error.strerror})",
                hint="if that is this very command, it was started twice on this host (pbsdsh starts it once "
                "per line of the node file); else give every node the same free port, for example: --port "
                f"{ports.first_free(self.port) or 29500}",
            ) from error
        self.strangers = Strangers(listener, run=place.job_id, secret=secret, most=most, say=say)
        self._looked = self._newest = time.monotonic()
        if (queue := ports.longest_queue()) < place.nnodes:
            say(
                f"roll call: the head's kernel queues {queue} calls; some of {place.nnodes} at once may come "
                f"seconds later. As root: sysctl -w net.core.somaxconn={place.nnodes}"
            )

    def gather(self, *, elastic: bool) -> Roll:
        """Wait for all nodes, compare them, and hand out the port."""
        start = progress = time.monotonic()
        with self.links.watching([self.strangers]):
            while not self._complete(now := time.monotonic(), start + self.timeout_s):
                if reason := self.stopped():
                    raise NoPlan(f"stopped during the roll call: {self._name(0)} got {reason}")
                if now - progress >= PROGRESS_S:
                    progress = now
                    self.say(f"roll call: {self._present()}, waiting for {self._missing()}")
                self._hear()
        warnings = compare_software(self.place, self.callers)
        failures, crowded = probe.between_all(self.offers, self.links, self.opened)
        if failures:
            raise probe.refusal(failures, self.offers, self._name)
        if crowded:
            names = ", ".join(map(self._name, crowded[:GROUPS]))
            warnings += (f"strangers connect to the ports of the network test; no result from {names}",)
        port = self._torchrun_port()
        numbers = {rank: number for number, rank in enumerate(sorted(self.callers))}
        self.links.renumber(numbers)
        for number, _ in self.links.items():
            go = Go(port=port, warnings=warnings, nnodes=len(numbers), node_rank=number, elastic=elastic)
            self.links.send(number, go)
        self.say(f"roll call: {self._present()} in {time.monotonic() - start:.1f} s")
        place = self.place.numbered(len(numbers), 0)
        hosts = {numbers[rank]: caller.host for rank, caller in self.callers.items()}
        return HeadRoll(
            place,
            port,
            warnings,
            links=self.links,
            hosts=hosts,
            strangers=self.strangers,
            elastic=elastic,
        )

    def _complete(self, now: float, end: float) -> bool:
        """Return whether the run can start.

        Raises
        ------
        NoPlan : the time is over, and too few nodes have called.
        """
        present, size = len(self.callers), self.place.size
        least = size.training if size else self.place.nnodes
        if present == self.place.nnodes:
            return True
        if present >= least:
            return now >= min(end, self._newest + LAST_CALL_S)
        if now >= end:
            raise self._never_called()
        return False

    def refuse(self, error: NoPlan) -> None:
        """Send the reason to every node that has called."""
        self.links.send_all(_refusal(error))
        self.links.close(session.LINGER_S)

    def _hear(self) -> None:
        """Wait a moment and read what has arrived; now and then, look for nodes that have gone."""
        turn = self.links.hear(LOOK_S)
        for rank in turn.gone:
            self._drop(rank)
        now = time.monotonic()
        look = now - self._looked >= LOOK_S
        if look or turn.others:
            for link, called in self.strangers.callers(self.place.nnodes - len(self.callers)):
                self._enter(link, called)
        if look:
            self._looked = now
            for rank in self.links.look(now, Beat()):
                self._drop(rank)

    def _drop(self, rank: int) -> None:
        why = self.links[rank].why or "silent"
        self.say(f"roll call: {self._name(rank)} joined and disconnected ({why})")
        self.links.drop(rank)
        del self.callers[rank], self.offers[rank]

    def _enter(self, link: Link[FromNode], called: Call) -> None:
        """Count a node in.

        Raises
        ------
        NoPlan : the node belongs to another layout of this run, or to a second start of it.
        """
        rank, nnodes, caller = called.node_rank, called.nnodes, called.caller
        if rank in self.links:  # it may have gone a moment ago, and calls again
            for _ in range(3):  # what it has sent, and the end of it; one that goes on must not hold the head
                self.links[rank].receive()
            if self.links[rank].why:
                self._drop(rank)
        before = self.callers.get(rank)
        self.links.add(rank if before is None else -1, link)  # so that a refusal reaches it
        if nnodes != self.place.nnodes or not 0 < rank < nnodes:
            raise NoPlan(
                f"{caller.host} joins as node {rank} of {nnodes}, but the head expects "
                f"{self.place.nnodes} nodes",
                hint="give the same --nnodes everywhere, and each node its own --node-rank",
            )
        if before is not None:
            raise NoPlan(
                f"{before.host} and {caller.host} both join as node {rank} of {nnodes}",
                hint="start this command once per node, each with its own node rank",
            )
        self.callers[rank], self.offers[rank] = caller, called.offer
        self._newest = time.monotonic()
        self.links.send(rank, Beat())  # shows the node that the head, and no other service, took its call

    def _torchrun_port(self) -> int:
        wanted = self.place.port
        if wanted is None:
            return ports.next_free(self.port)
        if not ports.is_free(wanted):
            raise NoPlan(
                f"torchrun's port {wanted} is busy on the head: {ports.holder(wanted)} listens there",
                hint="give every node the same other --port, or leave --port out",
            )
        return wanted

    def _never_called(self) -> NoPlan:
        others = "".join(f"; {text}" for text in self.strangers.refused)
        return NoPlan(
            f"{self._missing()} did not join; {self._present()} after {self.timeout_s:g} s{others}",
            where=f"roll call on {self.callers[0].host}:{self.port}",
            hint="start this command once on every node of the job. If it was, read its output; check that "
            f"the node reaches {self.place.head} (--head NAME, firewall). Late nodes: --rollcall-timeout",
        )

    def _name(self, rank: int) -> str:
        known = self.callers.get(rank)
        return node_name(self.place, rank, known.host if known else "")

    def _missing(self) -> str:
        """Return the missing nodes: "nodes 1-2,5 of 8 (node[01-02,05])"."""
        ranks = [rank for rank in range(self.place.nnodes) if rank not in self.callers]
        text = self._names(ranks)
        if len(text) > LONGEST_NAMES:
            text = f"{self._names(ranks[:SHOWN])} and {len(ranks) - SHOWN} more"
        return text

    def _names(self, ranks: list[int]) -> str:
        if len(ranks) == 1:
            return self._name(ranks[0])
        hosts = [self.place.hosts[rank] for rank in ranks if rank < len(self.place.hosts)]
        named = f" ({hostlist.folded(hosts)})" if len(hosts) == len(ranks) else ""
        return f"nodes {hostlist.number_ranges(map(str, ranks))} of {self.place.nnodes}{named}"

    def _present(self) -> str:
        return f"{len(self.callers)}/{self.place.nnodes} present"


def _refusal(error: NoPlan) -> Refused:
    return Refused(what=error.what, where=error.where, hint=error.hint)


RETRY_S = 0.5
PROOF_S = 10.0
"""Time that a node gives the head to prove itself before it calls again."""


class _Joining:
    """The side of any node but the head until the head sends the start."""

    def __init__(
        self,
        place: Placement,
        me: Caller,
        opened: OpenPorts,
        timeout_s: float,
        say: Say,
        stopped: Callable[[], str],
        secret: bytes | None,
    ) -> None:
        self.place, self.me, self.opened, self.timeout_s, self.say = place, me, opened, timeout_s, say
        self.stopped, self.secret = stopped, secret
        self.port = ports.roll_call(place.job_id, place.port)
        self.where = f"{place.head}:{self.port}"
        self.deadline = time.monotonic() + timeout_s

    def join(self) -> Roll:
        """Call the head again and again until it starts the run or refuses it."""
        place, why, said, last_said = self.place, "", "", time.monotonic()
        while (left := self.deadline - time.monotonic()) > 0:
            self._check_stop()
            address = (place.head, self.port)
            try:
                connection = socket.create_connection(address, timeout=min(5.0, left))
            except OSError as error:  # not started yet, or a pod whose name does not resolve yet
                why = f"{error.strerror or error}"
            else:
                link = Link(connection, messages.from_head)
                try:
                    if found := self._met(link):
                        return found
                except NoPlan:
                    link.close()
                    raise
                if not said or time.monotonic() < self.deadline:  # a last call may have no time for an answer
                    said = link.why or said
                why = said or "it does not answer the call"
                link.close()
            if time.monotonic() - last_said >= PROGRESS_S:
                last_said = time.monotonic()
                self.say(f"roll call: waiting for the head {self.where} ({why})")
            time.sleep(RETRY_S)
        raise NoPlan(
            f"the head ({place.head}) did not answer {node_name(place, place.node_rank, self.me.host)} "
            f"within {self.timeout_s:g} s: {why}",
            where=self.where,
            hint="check that this command runs on the head, and that this name leads there (--head). The "
            "head's output says whether its port was busy. For nodes that start late: --rollcall-timeout",
        )

    def _check_stop(self) -> None:
        if reason := self.stopped():
            raise NoPlan(f"stopped during the roll call by {reason}")

    def _met(self, link: Link[FromHead]) -> Roll | None:
        """Return the roll once the head sends it; None if another call may help."""
        if self.secret is not None and not self._proved(link, self.secret):
            return None
        place = self.place
        link.send(
            Call(
                job=place.job_id,
                node_rank=place.node_rank,
                nnodes=place.nnodes,
                caller=self.me,
                offer=self.opened.offer,
            )
        )
        return self._await_go(link)

    def _proved(self, link: Link[FromHead], secret: bytes) -> bool:
        """Return whether the other end has proved the secret; if not, `link.why` names it as a stranger."""
        own = NodeProof(secret, self.place.job_id, self.place.node_rank)
        link.longest = LONGEST_UNPROVEN
        link.send_line(own.call)
        end, answer = min(self.deadline, time.monotonic() + PROOF_S), None
        while not link.why and answer is None and time.monotonic() < end:
            self._check_stop()
            wait([link], RETRY_S)
            link.fill()
            answer = link.next_line()
        if answer is not None and (seals := own.seals(answer)):
            link.longest = LONGEST
            link.seal(incoming=seals[0], outgoing=seals[1])
            return True
        detail = "it starts without a secret" if answer == OPEN_HEAD else link.why
        if answer is not None and answer != OPEN_HEAD:
            detail = "its answer is not a valid proof"
        link.why = (
            f"another program answers at {self.where} and does not know this run's secret "
            f"({detail or 'it is silent'}); if it is the head, give both the same --secret-file"
        )
        return False

    def _await_go(self, link: Link[FromHead]) -> Roll | None:
        answered = False
        while not link.why and time.monotonic() < (
            link.heard + session.LOST_S if answered else self.deadline
        ):
            self._check_stop()
            wait([link], RETRY_S)
            received = link.receive()
            answered = answered or bool(received)
            for position, message in enumerate(received):
                if isinstance(message, Refused):
                    raise NoPlan(message.what, where=message.where, hint=message.hint)
                if isinstance(message, ProbeOrder):
                    link.send(probe.report(self.place.node_rank, message, self.opened))
                elif isinstance(message, Go):
                    place = self.place.numbered(message.nnodes, message.node_rank)
                    unread = received[position + 1 :]
                    return MemberRoll(
                        place,
                        message.port,
                        message.warnings,
                        link=link,
                        unread=unread,
                        elastic=message.elastic,
                    )
            if time.monotonic() - link.sent >= session.BEAT_S:
                link.send(Beat())
        return None


MANIFEST = "opt/imgkit/manifest.json"
GROUPS = 8
"""Groups of different nodes that one message names: it must fit into a line."""


def identity(*, torch: str, nccl: str, root: Path = Path("/")) -> Identity:
    """Return this image's identity."""
    import hashlib

    try:
        image = hashlib.sha256(files.read_bytes(root / MANIFEST)).hexdigest()[:12]
    except OSError:
        image = ""
    return Identity(image=image, torch=torch, nccl=nccl)


def compare_software(place: Placement, callers: Mapping[int, Caller]) -> tuple[str, ...]:
    """Refuse nodes with different software; return differences that torchrun supports as warnings."""
    versions = (
        _groups(place, callers, "image", lambda caller: caller.identity.image),
        _groups(place, callers, "torch", lambda caller: caller.identity.torch),
        _groups(place, callers, "NCCL", lambda caller: caller.identity.nccl),
    )
    if differing := [text for text in versions if text]:
        raise NoPlan(
            "the nodes do not run the same software: " + "; ".join(differing),
            hint="start the same .sif on every node; compare: sha256sum IMAGE.sif, dist-env --json",
        )
    workers = _groups(place, callers, "workers per node", lambda caller: str(caller.nproc))
    if workers and place.size is not None:
        raise NoPlan(
            f"the nodes differ in {workers}: an attempt without one of them would have another batch",
            where=f"--nnodes {place.size}",
            hint="give the same --nproc to all nodes, or leave out the spares",
        )
    found = (
        workers,
        _groups(place, callers, "GPU", lambda caller: caller.gpu),
    )
    return tuple(f"the nodes differ in {text}" for text in found if text)


def _groups(
    place: Placement, callers: Mapping[int, Caller], label: str, value: Callable[[Caller], str]
) -> str:
    """Return "torch 2.3 on node 0 of 2 (a), 2.4 on node 1 of 2 (b)"; empty if all are the same."""
    groups: dict[str, list[str]] = {}
    for rank in sorted(callers):
        groups.setdefault(value(callers[rank]), []).append(node_name(place, rank, callers[rank].host))
    if len(groups) < 2:
        return ""
    parts = (
        f"{found or 'none'} on {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for found, names in list(groups.items())[:GROUPS]
    )
    more = f" and {len(groups) - GROUPS} more" if len(groups) > GROUPS else ""
    return f"{label} " + ", ".join(parts) + more


ROOM = 512
"""Descriptors besides those of the nodes: strangers, and the node agent's own."""
SPARE = 64
"""Descriptors for the node agent itself: pipes to its children, files that it reads."""
FEWEST_STRANGERS = 16


def make_room(nnodes: int, strangers: int) -> int:
    """Raise this process' soft limit for a run of `nnodes`; return how many strangers there is room for.

    The program gets the old limit back (launch/guard.py): some programs close every number up to the limit.

    Raises
    ------
    NoPlan : the hard limit is too low for the nodes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = len(os.listdir("/proc/self/fd")) + nnodes + SPARE  # noqa: PTH208 - no need for paths
    wanted = max(nnodes + ROOM, least + strangers)
    if hard != resource.RLIM_INFINITY and least + FEWEST_STRANGERS > hard:
        raise NoPlan(
            f"the head of {nnodes} nodes needs {least + FEWEST_STRANGERS} open files; its limit is {hard}",
            where="ulimit -Hn",
            hint=f"raise it on the head: ulimit -n {wanted} in a shell of root, nofile in "
            f"/etc/security/limits.conf, or docker run --ulimit nofile={wanted}",
        )
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return min(strangers, wanted - least)
