"""A flag of several verbs takes the same kind of value in each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import typer

from imgkit_builder.cli import app

OUTPUTS = ("--output", "-o")
"""Their value is a file or folder everywhere; its name in the help tells which."""


def options(command: Any, verb: str = "") -> Iterator[tuple[str, str, str]]:
    """Verb, flag and kind of value of each option that takes one."""
    subcommands = getattr(command, "commands", None)
    for name, sub in (subcommands or {}).items():
        yield from options(sub, f"{verb} {name}".strip())
    if subcommands:
        return
    for parameter in command.get_params(typer.Context(command)):
        if parameter.param_type_name == "option" and not parameter.is_flag:
            choices = getattr(parameter.type, "choices", None)
            metavar = parameter.metavar or parameter.type.name
            # Of a list, its items count: imgkit scaling --nodes 1,2,4.
            kind = "a choice" if choices else re.split("[|,]", metavar)[0]
            yield from ((verb, flag, kind) for flag in parameter.opts)


def test_flag_takes_one_kind_of_value() -> None:
    kinds: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in app.VERBS:
        for verb, flag, kind in options(app.verb_command(name), name):
            kinds[flag][kind].append(verb)
    assert len(kinds) > 50
    several = {flag: dict(verbs) for flag, verbs in kinds.items() if len(verbs) > 1 and flag not in OUTPUTS}
    assert several == {}
