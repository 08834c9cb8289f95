"""Versions of the programs that take jobs in pods: RunAI's client and Kubeflow Trainer.

A version stands for the newest one at or below it whose published reference was compared with what imgkit
writes. Later versions than the last of these are refused: nobody knows their options.
"""

from __future__ import annotations

import re

V1 = "v1"
"""RunAI's first client, ``runai submit-dist``; the later one has the version of the platform."""
CLIENTS = ("2.18", "2.24", "3.0")
"""Versions of the later client that were compared."""
TRAINERS = ("2.0", "2.1", "2.2", "2.3")
"""Versions of Kubeflow Trainer that were compared: its models, or its API server."""


def client(text: str) -> str:
    """Return ``v1``, or the item of `CLIENTS` that the client `text` follows, else raise ValueError."""
    return V1 if text == V1 else _followed(text, CLIENTS, "runai client", f"{V1}, or ")


def trainer(text: str) -> str:
    """Return the item of `TRAINERS` that the Trainer `text` follows. Raises ValueError for an unknown one."""
    return _followed(text, TRAINERS, "Kubeflow Trainer", "")


def _followed(text: str, compared: tuple[str, ...], program: str, before: str) -> str:
    match = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})(\.[0-9]{1,9})?", text)
    version = (int(match[1]), int(match[2])) if match else None
    if version is None or not _pair(compared[0]) <= version <= _pair(compared[-1]):
        raise ValueError(f"unknown {program} {text!r}: known are {before}{compared[0]} to {compared[-1]}")
    return max((release for release in compared if _pair(release) <= version), key=_pair)


def _pair(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)
