"""Values that a checkpoint can give back.

torch reads checkpoints with ``weights_only=True``, which refuses more than torch.save accepts. A NumPy
number, such as an ``lr`` from a schedule of one's own, would be saved without a word, and no checkpoint of
the run could be read. So each state is looked through before it is saved.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from imgkit_entrypoints.errors import UsageError

_PLAIN = frozenset({bool, int, float, str, bytes, type(None), Tensor, nn.Parameter})
"""Types that every torch reads. Not their subclasses: numpy.float64 is one of float."""


def unfit(what: str, hint: str) -> UsageError:
    """Return the error for an object that a checkpoint cannot keep."""
    return UsageError(what, where="run.track", hint=hint)


def unreadable(where: str, value: object) -> UsageError:
    """Return the error for a value that a checkpoint could not give back.

    Parameters
    ----------
    where : the name of the tracked object, and the keys that lead to the value.
    """
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return unfit(f"{where} is a {name}, and no resume could read a checkpoint with it", _hint(where, value))


def refuse_unreadable(name: str, state: Any) -> None:
    """Raise UsageError, with the keys that lead to it, for a value that a checkpoint could not give back.

    It walks through dicts, lists and tuples, and copies no tensor: each save can afford it.
    """
    for where, value in _unusual(state, name):
        if not _is_readable(value):
            raise unreadable(where, value)


def _unusual(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield each value, key and container that is not of a plain type, and where it is."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):  # each kind of dict becomes a plain one in the checkpoint
        for key in value:
            if type(key) not in _PLAIN:
                yield from _unusual(key, f"the key {key!r} of {where}")
        items = value.items()
    elif isinstance(value, list | tuple):
        if type(value) not in (list, tuple):
            yield where, value
        items = enumerate(value)
    else:
        yield where, value
        return
    for key, item in items:
        if type(item) not in _PLAIN:
            yield from _unusual(item, f"{where}[{key!r}]")


def _is_readable(value: Any) -> bool:
    """Try it out, since each release of torch reads other types.

    Of tensors, lists and tuples the type decides: their content may be large, or is tried by itself.
    """
    content = io.BytesIO()
    try:
        sample = type(value.detach()) if isinstance(value, Tensor) else value
        torch.save(type(sample) if isinstance(sample, list | tuple) else sample, content)
        content.seek(0)
        torch.load(content, map_location="cpu", weights_only=True)
    except Exception:  # torch and pickle raise many kinds
        return False
    return True


def _hint(where: str, value: Any) -> str:
    """Return the line to change."""
    if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
        return "set it to a tensor: torch.from_numpy(...)"
    plain = value.item() if type(value).__module__ == "numpy" else None
    if plain is None or type(plain) not in _PLAIN:
        return "keep only numbers, texts, lists, dicts and tensors in the state"
    option = re.search(r"\['param_groups']\[\d+](\['\w+'])$", where)
    return f"set it to a plain value: {f'group{option[1]} = ' if option else ''}{type(plain).__name__}(...)"
