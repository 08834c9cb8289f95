"""A node's side of the roll call: it calls the head until that starts the run or refuses it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall import ports, probe, reader, session
from imgkit_entrypoints.rollcall.link import LONGEST, Link
from imgkit_entrypoints.rollcall.messages import Beat, Call, Caller, FromHead, Go, ProbeOrder, Refused
from imgkit_entrypoints.rollcall.probe import OpenPorts
from imgkit_entrypoints.rollcall.proof import LONGEST_UNPROVEN, OPEN_HEAD, NodeProof
from imgkit_entrypoints.rollcall.session import MemberRoll, Roll, node_name, wait
from imgkit_entrypoints.schedulers.placement import Placement

PROGRESS_S = 10.0
RETRY_S = 0.5
PROOF_S = 10.0
"""Time that a node gives the head to prove itself before it calls again."""

Say = Callable[[str], None]


class Joining:
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
                link = Link(connection, reader.from_head)
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
