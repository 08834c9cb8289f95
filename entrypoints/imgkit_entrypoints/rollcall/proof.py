"""The proof that both ends of a link know the secret of the run, and that each message is from the other end.

One line each, as the messages behind it::

    node   imgkit-call RANK NONCE          16 random bytes of the node, in hexadecimal
    head   imgkit-head NONCE MAC           16 random bytes of the head; the node checks MAC first
    node   MAC {"job": ..., ...}           the node's proof is the MAC of its first message
    both   MAC {"beat": null}              and so on, each message with its own

A MAC is HMAC-SHA256 in hexadecimal. Its key follows from the secret, the job id, the node's rank, both nonces
and the direction, and it covers the number of the line in this direction and the line itself. So a line that
was recorded in another start, on another connection or in the other direction is refused, and so is one that
is repeated, left out or moved. Before a proof the head parses nothing but the shape of the first line. It
answers a stranger with a nonce and a MAC of fresh random bytes, and closes on anything else.

The proof hides nothing: who can read the packets on the way can read the messages.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re

NONCE_BYTES = 16
LONGEST_UNPROVEN = 4096
"""Bytes that the head reads of a connection before it has proved the secret."""
OPEN_HEAD = b"imgkit-open"
"""Answer of a head without a secret to a call with a proof. The node believes nothing but its failure."""
_DIGEST = "sha256"
_MAC_CHARACTERS = 2 * hashlib.sha256().digest_size
_CALL = re.compile(rb"imgkit-call (\d{1,7}) ([0-9a-f]{32})")
_ANSWER = re.compile(rb"(imgkit-head ([0-9a-f]{32})) ([0-9a-f]{64})")


def wants_proof(line: bytes) -> bool:
    """Return whether this is the first line of a node that has a secret."""
    return _CALL.fullmatch(line) is not None


class Seal:
    """One direction of a link: it signs or checks line after line."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod=_DIGEST)
        self._count = 0

    def mac(self, line: bytes) -> bytes:
        """Return the MAC of the next line of this direction."""
        mac = self._keyed.copy()  # less than half the time of a new one, and a head makes thousands
        mac.update(self._count.to_bytes(8, "big") + line)
        self._count += 1
        return mac.hexdigest().encode()

    def sign(self, line: bytes) -> bytes:
        """Return the next line with its MAC in front."""
        return self.mac(line) + b" " + line

    def opened(self, signed: bytes) -> bytes | None:
        """Return the next line without its MAC; None if the MAC is wrong."""
        mac, line = signed[:_MAC_CHARACTERS], signed[_MAC_CHARACTERS + 1 :]
        return line if hmac.compare_digest(mac, self.mac(line)) else None


class HeadProof:
    """The head's side of one connection: its answer to a call, and the two seals after it."""

    def __init__(self, secret: bytes, run: str, call: bytes) -> None:
        """Read the first line of a connection.

        Raises
        ------
        ValueError : it is no call with a proof.
        """
        found = _CALL.fullmatch(call)
        if found is None:
            raise ValueError("it is no call with a proof")
        self.node_rank = int(found[1])
        nonce = os.urandom(NONCE_BYTES).hex()
        self.from_head, self.from_node = _seals(secret, run, self.node_rank, found[2].decode(), nonce)
        line = f"imgkit-head {nonce}".encode()
        self.answer = line + b" " + self.from_head.mac(line)


class NodeProof:
    """A node's side of one connection: its call, and the two seals once the head has proved itself."""

    def __init__(self, secret: bytes, run: str, node_rank: int) -> None:
        self._secret, self._run, self._node_rank = secret, run, node_rank
        self._nonce = os.urandom(NONCE_BYTES).hex()
        self.call = f"imgkit-call {node_rank} {self._nonce}".encode()

    def seals(self, answer: bytes) -> tuple[Seal, Seal] | None:
        """Return the seals from the head and from the node; None if the answer does not prove the secret."""
        found = _ANSWER.fullmatch(answer)
        if found is None:
            return None
        head, node = _seals(self._secret, self._run, self._node_rank, self._nonce, found[2].decode())
        return (head, node) if hmac.compare_digest(found[3], head.mac(found[1])) else None


def _seals(secret: bytes, run: str, rank: int, node_nonce: str, head_nonce: str) -> tuple[Seal, Seal]:
    """Return the seals of the lines from the head and from the node."""
    context = json.dumps(["imgkit roll call", run, rank, node_nonce, head_nonce]).encode()
    head, node = (hmac.digest(secret, context + end, _DIGEST) for end in (b" from the head", b" from a node"))
    return Seal(head), Seal(node)
