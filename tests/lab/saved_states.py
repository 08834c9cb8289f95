"""What the newest checkpoint in a run folder holds, for tests; runs in the image."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from imgkit_entrypoints.run.checkpoint import RANK_PREFIX, find_newest
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.state_tree import list_leaves

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


def states(folder):
    """The state of each tracked object by name, and under ``ranks`` what each rank has kept for itself."""
    checkpoint, _ = find_newest(Path(folder), ALONE)
    objects = {name: checkpoint.state(name) for name in checkpoint.names}
    keys = [f"{RANK_PREFIX}{rank}" for rank in range(checkpoint.world_size)]
    rows = dict.fromkeys(keys, b"")
    checkpoint._read_into(rows)
    ranks = [pickle.loads(rows[key]) for key in keys]  # noqa: S301 - the test has written it
    for rank in ranks:
        objects_of_rank = rank["objects"].items()
        rank["objects"] = {name: pickle.loads(state) for name, state in objects_of_rank}  # noqa: S301
    return {"step": checkpoint.step, **objects, "ranks": ranks}


def differences(first, second):
    """Return the paths at which two states differ."""
    first, second = dict(list_leaves(first)), dict(list_leaves(second))
    odd = first.keys() ^ second.keys()
    return [*odd, *(path for path in first.keys() & second.keys() if not equal(first[path], second[path]))]


def equal(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return repr(first) == repr(second)  # NaN is equal to itself here


def same(first, second, *names):
    """Fail if the newest checkpoints of two runs differ; by default in any object.

    Python's and NumPy's generators do not count: most programs seed neither.
    """
    both = states(first), states(second)
    for rank in (rank for state in both for rank in state["ranks"]):
        for drawn in (rank["random"]["now"], rank["random"]["pass"]):
            drawn.pop("python", None), drawn.pop("numpy", None)
    if names:
        both = [{name: state[name] for name in ("step", *names)} for state in both]
    paths = differences(*both)
    assert not paths, paths[:8]
