"""The roll call: the nodes of a run meet before torchrun starts.

Node 0 listens and the others call. The head names every node that never calls, refuses nodes with different
software on all nodes at once, lets the nodes test the network between them (probe.py), and hands out a free
port for torchrun. The connections stay open (session.py).
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall import ports, probe, session
from imgkit_entrypoints.rollcall.link import Link
from imgkit_entrypoints.rollcall.probe import Offer
from imgkit_entrypoints.rollcall.session import LINGER_S, HeadRoll, MemberRoll, Place, Roll, node_name, wait

PROGRESS_S = 10.0
RETRY_S = 0.5
MANIFEST = "opt/imgkit/manifest.json"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The software that must be the same on every node; an empty string means "none"."""

    image: str = ""
    torch: str = ""
    nccl: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A node's own description."""

    host: str
    identity: Identity = Identity()
    nproc: int = 1
    """Like `gpu`, it may differ between nodes; a difference is reported, never refused."""
    gpu: str = ""
    address: str = ""
    """Address that carries the data between nodes; empty: the network to this node is not tested."""
    interface: str = ""


def identity(*, torch: str, nccl: str, root: Path = Path("/")) -> Identity:
    """Return this image's identity."""
    import hashlib

    try:
        image = hashlib.sha256((root / MANIFEST).read_bytes()).hexdigest()[:12]
    except OSError:
        image = ""
    return Identity(image=image, torch=torch, nccl=nccl)


def call(
    place: Place, me: Caller, *, timeout_s: float, say: Say, stopped: Callable[[], str] = lambda: ""
) -> Roll:
    """Meet all nodes of `place` within `timeout_s` seconds from this node's own start.

    `stopped` is called about twice a second; a text that it returns ends the roll call everywhere.

    Raises
    ------
    NoPlan : a node never called or never answered, the nodes run different software, the network between two
    nodes loses data, or a port is busy.
    """
    assert place.nnodes > 1  # noqa: S101 - one node has nobody to call
    with probe.offering(me.address, me.interface) as offer:
        if place.node_rank != 0:
            return _join(place, me, offer, timeout_s, say, stopped)
        run = _Gathering(place, me, offer, timeout_s, say, stopped)
        try:
            return run.gather()
        except BaseException as error:
            if isinstance(error, NoPlan):
                run.refuse(error)
            run.listener.close()
            raise


class _Gathering:
    """The head's side until all nodes have called."""

    def __init__(
        self,
        place: Place,
        me: Caller,
        offer: Offer | None,
        timeout_s: float,
        say: Say,
        stopped: Callable[[], str],
    ) -> None:
        self.place, self.timeout_s, self.say, self.stopped = place, timeout_s, say, stopped
        self.port = ports.roll_call(place.job_id, place.port)
        self.strangers: list[Link] = []
        self.links: dict[int, Link] = {}
        self.callers: dict[int, Caller] = {0: me}
        self.offers: dict[int, Offer | None] = {0: offer}
        try:
            self.listener = ports.listen(self.port)
        except OSError as error:
            raise NoPlan(
                f"port {self.port}, where the nodes of this run meet, is busy on the head: "
                f"{ports.holder(self.port)} listens there",
                where=f"{place.head or me.host}:{self.port} ({error.strerror})",
                hint="if that is this very command, it was started twice on this host (pbsdsh starts it once "
                "per line of the node file); else give every node the same free port, for example: --port "
                f"{ports.first_free(self.port) or 29500}",
            ) from error

    def gather(self) -> Roll:
        """Wait for all nodes, compare them, and hand out the port."""
        start = progress = time.monotonic()
        while len(self.callers) < self.place.nnodes:
            now = time.monotonic()
            if reason := self.stopped():
                raise NoPlan(f"stopped during the roll call: {self._name(0)} got {reason}")
            if now - start >= self.timeout_s:
                raise self._never_called()
            if now - progress >= PROGRESS_S:
                progress = now
                self.say(f"roll call: {self._present()}, waiting for {', '.join(self._missing()[:8])}")
            wait([self.listener, *self.strangers, *self.links.values()], RETRY_S)
            self._accept()
            self._hear()
        warnings = _compare(self.place, self.callers)
        if failures := probe.between_all(self.offers, self.links):
            raise probe.refusal(failures, self.offers, self._name)
        port = self._torchrun_port()
        for link in self.links.values():
            link.send({"go": {"port": port, "warnings": warnings}})
        self.say(f"roll call: {self._present()} in {time.monotonic() - start:.1f} s")
        for link in self.strangers:
            link.close()
        hosts = {rank: caller.host for rank, caller in self.callers.items()}
        return HeadRoll(self.place, port, warnings, links=self.links, hosts=hosts, listener=self.listener)

    def refuse(self, error: NoPlan) -> None:
        """Send the reason to every node that has called."""
        for link in self.links.values():
            link.send(_refusal(error))
        end = time.monotonic() + LINGER_S
        for link in (*self.links.values(), *self.strangers):
            link.close(max(0.0, end - time.monotonic()))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.strangers.append(Link(connection))

    def _hear(self) -> None:
        for link in list(self.strangers):
            messages = link.receive()
            if messages:
                self.strangers.remove(link)
                self._enter(link, messages[0])
            elif link.why:
                self.strangers.remove(link)
                link.close()
        now = time.monotonic()
        for rank, link in list(self.links.items()):
            link.receive()
            if now - link.sent >= session.BEAT_S:
                link.send({"beat": 1})
            if link.why or now - link.heard > session.LOST_S:
                self.say(f"roll call: {self._name(rank)} called and is gone ({link.why or 'silent'})")
                link.close()
                del self.links[rank], self.callers[rank]

    def _enter(self, link: Link, message: Mapping[str, Any]) -> None:
        try:
            rank, nnodes, job = int(message["node_rank"]), int(message["nnodes"]), str(message["job"])
            caller = _caller(message["caller"])
        except (KeyError, TypeError, ValueError, AttributeError):
            link.close()  # a port scan, for example
            return
        if job != self.place.job_id:
            error = NoPlan(f"{caller.host} belongs to job {job!r}, the head to {self.place.job_id!r}")
            link.send(_refusal(error))
            link.close(LINGER_S)
            self.say(f"roll call: {error}; not counted")
            return
        before = self.callers.get(rank)
        self.links[rank if before is None else -1 - len(self.links)] = link  # so that a refusal reaches it
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
        self.callers[rank], self.offers[rank] = caller, Offer.read(message.get("probe"))
        link.send({"beat": 1})  # shows the node that the head, and no other service, took its call

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
        return NoPlan(
            f"{shown} never called; {self._present()} after {self.timeout_s:g} s",
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


def _caller(said: Mapping[str, Any]) -> Caller:
    # Field by field: another image may hold another version of this package, and must be refused by name.
    own = said["identity"]
    same = Identity(
        image=str(own.get("image", "")), torch=str(own.get("torch", "")), nccl=str(own.get("nccl", ""))
    )
    return Caller(
        host=str(said["host"]), identity=same, nproc=int(said.get("nproc", 1)), gpu=str(said.get("gpu", ""))
    )


def _refusal(error: NoPlan) -> dict[str, Any]:
    return {"refused": {"what": error.what, "where": error.where, "hint": error.hint}}


def _compare(place: Place, callers: Mapping[int, Caller]) -> list[str]:
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
    found = (
        _groups(place, callers, "workers per node", lambda caller: str(caller.nproc)),
        _groups(place, callers, "GPU", lambda caller: caller.gpu),
    )
    return [f"the nodes differ in {text}" for text in found if text]


def _groups(place: Place, callers: Mapping[int, Caller], label: str, value: Callable[[Caller], str]) -> str:
    """Return "torch 2.3 on node 0 of 2 (a), 2.4 on node 1 of 2 (b)"; empty if all are the same."""
    groups: dict[str, list[str]] = {}
    for rank in sorted(callers):
        groups.setdefault(value(callers[rank]), []).append(node_name(place, rank, callers[rank].host))
    if len(groups) < 2:
        return ""
    parts = (
        f"{found or 'none'} on {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for found, names in groups.items()
    )
    return f"{label} " + ", ".join(parts)


def _join(
    place: Place, me: Caller, offer: Offer | None, timeout_s: float, say: Say, stopped: Callable[[], str]
) -> Roll:
    port = ports.roll_call(place.job_id, place.port)
    deadline = time.monotonic() + timeout_s
    why, last_said = "", time.monotonic()
    while (left := deadline - time.monotonic()) > 0:
        if reason := stopped():
            raise NoPlan(f"stopped during the roll call by {reason}")
        try:
            link = Link(socket.create_connection((place.head, port), timeout=min(5.0, left)))
        except OSError as error:  # not started yet, or a pod whose name does not resolve before it is ready
            why = f"{error.strerror or error}"
        else:
            link.send(
                {
                    "job": place.job_id,
                    "node_rank": place.node_rank,
                    "nnodes": place.nnodes,
                    "caller": dataclasses.asdict(me),
                    "probe": dataclasses.asdict(offer) if offer else None,
                }
            )
            if found := _await_go(place, link, deadline, stopped):
                return found
            why = link.why or "it does not answer the call"
            link.close()
        if time.monotonic() - last_said >= PROGRESS_S:
            last_said = time.monotonic()
            say(f"roll call: waiting for the head {place.head}:{port} ({why})")
        time.sleep(RETRY_S)
    raise NoPlan(
        f"the head ({place.head}) did not answer {node_name(place, place.node_rank, me.host)} "
        f"within {timeout_s:g} s: {why}",
        where=f"{place.head}:{port}",
        hint="check that this command runs on the head, and that this name leads there (--head). The "
        "head's output says whether its port was busy. For nodes that start late: --rollcall-timeout",
    )


def _await_go(place: Place, link: Link, deadline: float, stopped: Callable[[], str]) -> Roll | None:
    """Return the roll once the head sends it; None if another call may help."""
    answered = False
    while not link.why and time.monotonic() < (link.heard + session.LOST_S if answered else deadline):
        if reason := stopped():
            link.close()
            raise NoPlan(f"stopped during the roll call by {reason}")
        wait([link], RETRY_S)
        messages = link.receive()
        answered = answered or bool(messages)
        for position, message in enumerate(messages):
            if "refused" in message:
                told = message["refused"]
                link.close()
                raise NoPlan(str(told["what"]), where=told["where"], hint=told["hint"])
            if "probe" in message:
                link.send(probe.report(place.node_rank, message["probe"]))
            if "go" in message:
                go = message["go"]
                return MemberRoll(
                    place, int(go["port"]), go["warnings"], link=link, unread=messages[position + 1 :]
                )
        if time.monotonic() - link.sent >= session.BEAT_S:
            link.send({"beat": 1})
    return None
