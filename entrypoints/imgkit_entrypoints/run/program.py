"""What a checkpoint records of the program, so that a resume can name what has changed. It restores nothing.

These are the program's options and what its optimizers were built with: a resume gives each optimizer the
learning rate of the checkpoint, and a changed ``--lr`` would have no effect without a word. resumable.py
recognizes the data.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from imgkit_entrypoints import json_text, secret_patterns
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run.checkpoints import STATE, FoundCheckpoint

LONGEST = 200
"""Most characters of a value that are kept."""
MOST = 1000
"""Most options, and most values of optimizers, that are kept."""
_HIDDEN = "(a secret, which is not kept)"


class ProgramRecord:
    """The options of a program, and the values of its optimizers when they were built.

    Parameters
    ----------
    options : by name; None: those of `arguments`.
    arguments : the command line.
    """

    def __init__(self, options: Mapping[str, object] | None, arguments: Sequence[str]) -> None:
        chosen = from_arguments(arguments) if options is None else options
        self._options = {str(name): _short(name, value) for name, value in [*chosen.items()][:MOST]}
        self._built: dict[str, str] = {}

    def add(self, name: str, value: object) -> None:
        """Note the values of a tracked object, if it is an optimizer."""
        if not isinstance(value, torch.optim.Optimizer):
            return
        for number, group in enumerate(value.param_groups):
            where = f"{name}.param_groups[{number}]" if len(value.param_groups) > 1 else name
            first = {"lr": group["initial_lr"]} if "initial_lr" in group else {}  # a scheduler has changed it
            for key, one in {**group, **first}.items():
                if key not in ("params", "initial_lr", "param_names") and len(self._built) < MOST:
                    if isinstance(one, Tensor) and one.numel() == 1:
                        one = one.item()
                    if isinstance(one, str | numbers.Real | list | tuple):
                        self._built[f"{where} {key}"] = _short(key, one)

    def kept(self) -> dict[str, dict[str, str]]:
        """The record in a checkpoint."""
        return {"options": self._options, "built": self._built}

    def changes(self, found: FoundCheckpoint) -> list[str]:
        """What differs from the program that has written a checkpoint; a collective call.

        Raises
        ------
        UsageError : its record is no such record.
        """
        values = found.values(STATE)
        try:
            saved = json_text.read(Mapping[str, Mapping[str, str]], values["program"], "program")
            options, built = saved["options"], saved["built"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"the checkpoint's record of its program is invalid ({error})",
                where=str(found.where / STATE),
                hint=f"mv {found.where} elsewhere, and the run resumes from an older checkpoint",
            ) from None
        lines = [
            f"{name} was {options.get(name, 'not given')}, and is {self._options.get(name, 'not given')} now"
            for name in sorted({*options, *self._options})
            if options.get(name) != self._options.get(name)
        ]
        other = [name for name in built if self._built.get(name, built[name]) != built[name]]
        return lines + [
            f"{name} was {built[name]}, and the program builds it with {self._built[name]} now; the run goes "
            "on with the checkpoint's: if the change is meant, set it after run.restore()"
            for name in other
        ]


def from_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """The options of a command line by name, as most programs take them: ``--lr 0.1``, ``--lr=0.1``."""
    found: dict[str, list[str]] = {}
    name = "arguments"
    for text in arguments:
        if text.startswith("-") and not _is_number(text):
            name, equals, value = text.partition("=")
            found.setdefault(name, []).extend([value] if equals else [])
            name = "arguments" if equals else name
        else:
            found.setdefault(name, []).append(text)
            name = "arguments" if name != "arguments" and not name.startswith("-") else name
    return {name: " ".join(values) or "given" for name, values in found.items()}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _short(name: object, value: object) -> str:
    text = str(value)
    if secret_patterns.in_name(str(name), text) or secret_patterns.in_value(text):
        return _HIDDEN
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
