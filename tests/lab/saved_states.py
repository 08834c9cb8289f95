"""What the newest checkpoint in a run folder holds, for tests; runs in the image."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from imgkit_entrypoints.run.checkpoint import RANK, find_newest
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.state_tree import leaves

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


def states(folder):
    """The state of each tracked object by name, and under ``ranks`` what each rank has kept for itself."""
    checkpoint = find_newest(Path(folder), ALONE, print)
    objects = {name: checkpoint.state(name) for name in checkpoint.names}
    keys = [RANK.format(rank) for rank in range(checkpoint.world_size)]
    rows = checkpoint._load(dict.fromkeys(keys, b""))
    ranks = [pickle.loads(rows[key]) for key in keys]  # noqa: S301 - the test has written it
    for rank in ranks:
        objects_of_rank = rank["objects"].items()
        rank["objects"] = {name: pickle.loads(state) for name, state in objects_of_rank}  # noqa: S301
    return {"step": checkpoint.step, **objects, "ranks": ranks}


def differences(one, other):
    """The paths at which two states differ."""
    first, second = dict(leaves(one)), dict(leaves(other))
    odd = first.keys() ^ second.keys()
    return [*odd, *(path for path in first.keys() & second.keys() if not equal(first[path], second[path]))]


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return repr(one) == repr(other)  # NaN is equal to itself here


def same(one, other, *names):
    """Fail if the newest checkpoints of two runs differ; by default in any object.

    Python's and NumPy's generators do not count: most programs seed neither.
    """
    both = states(one), states(other)
    for rank in (rank for state in both for rank in state["ranks"]):
        for drawn in (rank["random"]["now"], rank["random"]["pass"]):
            drawn.pop("python", None), drawn.pop("numpy", None)
    if names:
        both = [{name: state[name] for name in ("step", *names)} for state in both]
    found = differences(*both)
    assert not found, found[:8]
