"""The roll call: the nodes of a run meet before torchrun starts.

Node 0 listens and the others call. The head names every node that never calls, refuses nodes with different
software on all nodes at once, lets the nodes test the network between them (probe.py), and hands out a free
port for torchrun. The connections stay open (session.py).

A range of nodes (``--nnodes MIN:MAX``) starts with MAX nodes, or with MIN or more once no further one has
called for `LAST_CALL_S`. The head numbers those that are there anew, since torchrun allows no gaps. Nobody
joins after the start.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall import descriptors, differences, messages, ports, probe, session, strangers
from imgkit_entrypoints.rollcall.link import LONGEST, Link
from imgkit_entrypoints.rollcall.messages import (
    Beat,
    Call,
    Caller,
    FromHead,
    FromNode,
    Go,
    Offer,
    ProbeOrder,
    Refused,
)
from imgkit_entrypoints.rollcall.probe import OpenPorts
from imgkit_entrypoints.rollcall.proof import LONGEST_UNPROVEN, OPEN_HEAD, NodeProof
from imgkit_entrypoints.rollcall.session import LINGER_S, HeadRoll, MemberRoll, Roll, node_name, wait
from imgkit_entrypoints.rollcall.strangers import Strangers
from imgkit_entrypoints.schedulers.placement import Placement

PROGRESS_S = 10.0
RETRY_S = 0.5
LOOK_S = 0.5
"""Time between two looks at nodes that have called and are waiting."""
LAST_CALL_S = 30.0
"""Time that a range of nodes waits for one more after the last call; torchrun's own waits as long.

Nodes of one job start seconds apart, and pods as far apart as their images take to pull. So a shorter wait
would leave nodes out, and a longer one costs every run that gets fewer than MAX."""
PROOF_S = 10.0
"""Time that a node gives the head to prove itself before it calls again."""

Say = Callable[[str], None]


def call(
    place: Placement,
    me: Caller,
    *,
    timeout_s: float,
    say: Say,
    stopped: Callable[[], str] = lambda: "",
    secret: bytes | None = None,
) -> Roll:
    """Meet all nodes of `place` within `timeout_s` seconds from this node's own start.

    The place of the result counts the nodes that are there, also where `place` has a range.

    Parameters
    ----------
    stopped : called about twice a second; a text that it returns ends the roll call everywhere.
    secret : the run's secret, which every node proves (proof.py); None: names alone are enough.

    Raises
    ------
    NoPlan : a node never called or never answered, the nodes run different software, the network between two
    nodes loses data, a port is busy, or the limit of open files is too low.
    """
    assert place.nnodes > 1  # noqa: S101 - one node has nobody to call
    with probe.offering(me.address, me.interface) as opened:
        if place.node_rank != 0:
            return _Joining(place, me, opened, timeout_s, say, stopped, secret).join()
        run = _Gathering(place, me, opened, timeout_s, say, stopped, secret)
        try:
            return run.gather()
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
        self.links: dict[int, Link[FromNode]] = {}
        self.callers: dict[int, Caller] = {0: me}
        self.opened = opened
        self.offers: dict[int, Offer | None] = {0: opened.offer}
        most = descriptors.make_room(place.nnodes, strangers.MOST)
        try:
            listener = ports.listen(self.port)
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
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.strangers, selectors.EVENT_READ, 0)

    def gather(self) -> Roll:
        """Wait for all nodes, compare them, and hand out the port."""
        start = progress = time.monotonic()
        with self._selector:
            while not self._complete(now := time.monotonic(), start + self.timeout_s):
                if reason := self.stopped():
                    raise NoPlan(f"stopped during the roll call: {self._name(0)} got {reason}")
                if now - progress >= PROGRESS_S:
                    progress = now
                    self.say(f"roll call: {self._present()}, waiting for {', '.join(self._missing()[:8])}")
                self._hear()
        warnings = differences.compare(self.place, self.callers)
        failures, crowded = probe.between_all(self.offers, self.links, self.opened)
        if failures:
            raise probe.refusal(failures, self.offers, self._name)
        if crowded:
            names = ", ".join(map(self._name, crowded[: differences.GROUPS]))
            warnings += (f"strangers connect to the ports of the network test; no result from {names}",)
        port = self._torchrun_port()
        numbers = {rank: number for number, rank in enumerate(sorted(self.callers))}
        for rank, link in self.links.items():
            link.send(Go(port=port, warnings=warnings, nnodes=len(numbers), node_rank=numbers[rank]))
        self.say(f"roll call: {self._present()} in {time.monotonic() - start:.1f} s")
        place = self.place.numbered(len(numbers), 0)
        links = {numbers[rank]: link for rank, link in self.links.items()}
        hosts = {numbers[rank]: caller.host for rank, caller in self.callers.items()}
        return HeadRoll(place, port, warnings, links=links, hosts=hosts, strangers=self.strangers)

    def _complete(self, now: float, end: float) -> bool:
        """Return whether the run can start.

        Raises
        ------
        NoPlan : the time is over, and too few nodes have called.
        """
        present, least = len(self.callers), self.place.min_nnodes or self.place.nnodes
        if present == self.place.nnodes:
            return True
        if present >= least:
            return now >= min(end, self._newest + LAST_CALL_S)
        if now >= end:
            raise self._never_called()
        return False

    def refuse(self, error: NoPlan) -> None:
        """Send the reason to every node that has called."""
        for link in self.links.values():
            link.send(_refusal(error))
        end = time.monotonic() + LINGER_S
        for link in self.links.values():
            link.close(max(0.0, end - time.monotonic()))

    def _hear(self) -> None:
        """Wait a moment and read what has arrived; now and then, look for nodes that have gone."""
        for key, _ in self._selector.select(RETRY_S):
            if key.data:
                self.links[key.data].receive()
                self._drop_if_gone(key.data)
        missing = self.place.nnodes - len(self.callers)
        for link, called in self.strangers.callers(missing):
            self._enter(link, called)
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        for rank, link in list(self.links.items()):
            if now - link.sent >= session.BEAT_S:
                link.send(Beat())
            self._drop_if_gone(rank)

    def _drop_if_gone(self, rank: int) -> None:
        link = self.links[rank]
        if link.why or time.monotonic() - link.heard > session.LOST_S:
            self.say(f"roll call: {self._name(rank)} called and is gone ({link.why or 'silent'})")
            self._selector.unregister(link)
            link.close()
            del self.links[rank], self.callers[rank], self.offers[rank]

    def _enter(self, link: Link[FromNode], called: Call) -> None:
        """Count a node in.

        Raises
        ------
        NoPlan : the node belongs to another layout of this run, or to a second start of it.
        """
        rank, nnodes, caller = called.node_rank, called.nnodes, called.caller
        if rank in self.links:  # it may have gone a moment ago, and calls again
            self.links[rank].receive()
            self._drop_if_gone(rank)
        before = self.callers.get(rank)
        key = rank if before is None else -1 - len(self.links)  # so that a refusal reaches it
        self.links[key] = link
        if nnodes != self.place.nnodes or not 0 < rank < nnodes:
            raise NoPlan(
                f"{caller.host} calls as node {rank} of {nnodes}, but the head counts "
                f"{self.place.nnodes} nodes",
                hint="give the same --nnodes everywhere, and each node its own --node-rank",
            )
        if before is not None:
            raise NoPlan(
                f"{before.host} and {caller.host} both call as node {rank} of {nnodes}",
                hint="start this command once per node, each with its own node rank",
            )
        self.callers[rank], self.offers[rank] = caller, called.offer
        self._newest = time.monotonic()
        self._selector.register(link, selectors.EVENT_READ, rank)
        link.send(Beat())  # shows the node that the head, and no other service, took its call

    def _torchrun_port(self) -> int:
        wanted = self.place.port
        if wanted is None:
            found = ports.first_free(self.port)
            if found is None:
                raise NoPlan(
                    f"no free port after {self.port} on the head", hint="give all nodes the same --port N"
                )
            return found
        if not ports.is_free(wanted):
            raise NoPlan(
                f"torchrun's port {wanted} is busy on the head: {ports.holder(wanted)} listens there",
                hint="give every node the same other --port, or leave --port out",
            )
        return wanted

    def _never_called(self) -> NoPlan:
        missing = self._missing()
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        others = "".join(f"; {text}" for text in self.strangers.refused)
        return NoPlan(
            f"{shown} never called; {self._present()} after {self.timeout_s:g} s{others}",
            where=f"roll call on {self.callers[0].host}:{self.port}",
            hint="start this command once on every node of the job. If it was, read its output; check that "
            f"the node reaches {self.place.head} (--head NAME, firewall). Late nodes: --rollcall-timeout",
        )

    def _name(self, rank: int) -> str:
        known = self.callers.get(rank)
        return node_name(self.place, rank, known.host if known else "")

    def _missing(self) -> list[str]:
        return [self._name(rank) for rank in range(self.place.nnodes) if rank not in self.callers]

    def _present(self) -> str:
        return f"{len(self.callers)}/{self.place.nnodes} present"


def _refusal(error: NoPlan) -> Refused:
    return Refused(what=error.what, where=error.where, hint=error.hint)


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
        place, why, last_said = self.place, "", time.monotonic()
        while (left := self.deadline - time.monotonic()) > 0:
            self._check_stop()
            address = (place.head, self.port)
            try:
                connection = socket.create_connection(address, timeout=min(5.0, left))
            except (
                OSError
            ) as error:  # not started yet, or a pod whose name does not resolve before it is ready
                why = f"{error.strerror or error}"
            else:
                link = Link(connection, messages.from_head)
                try:
                    if found := self._met(link):
                        return found
                except NoPlan:
                    link.close()
                    raise
                why = link.why or "it does not answer the call"
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
            detail = "its answer is no proof"
        link.why = (
            f"something else answers at {self.where} and does not know this run's secret "
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
                    place = self.place
                    if message.nnodes:
                        place = place.numbered(message.nnodes, message.node_rank)
                    unread = received[position + 1 :]
                    return MemberRoll(place, message.port, message.warnings, link=link, unread=unread)
            if time.monotonic() - link.sent >= session.BEAT_S:
                link.send(Beat())
        return None
