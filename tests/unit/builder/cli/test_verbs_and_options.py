"""What the verbs and options of ``imgkit`` have in common, and how ``imgkit --help`` lists the verbs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.core import TyperCommand
from typer.testing import CliRunner

from imgkit_builder.cli import app
from imgkit_builder.cli.scheduler_options import OPTION_TABLES

OUTPUTS = ("--output", "-o")
"""Their value is a file or folder everywhere; its name in the help tells which."""
RESOURCES = ("select", "nodes", "ncpus", "ngpus", "mem", "walltime", "mpiprocs", "ppn", "ompthreads", "place")


def test_help_lists_every_verb_once_in_four_groups():
    text = CliRunner().invoke(app.build_app(), ["--help"]).output
    _, listed = text.split("Start here:", 1)
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Options:", "Start here:", "Images:", "Jobs:", "Checks:"]
    rows = [line.split()[0] for line in listed.splitlines() if line.startswith("  ")]
    assert [row for row in rows if row in app.VERBS] == list(app.VERBS)
    first, second, *_ = app.VERB_GROUPS.values()
    assert len(first) + len(second) <= 12


@pytest.mark.parametrize("verb", app.VERBS)
def test_list_of_verbs_says_what_their_help_says(verb):
    # The list has its own copy of the sentence: `imgkit --help` does not import the verb.
    listed = TyperCommand(verb, help=app.VERBS[verb].help)
    assert listed.get_short_help_str(100) == app.verb_command(verb).get_short_help_str(100)


def list_options(command: Any, verb: str) -> Iterator[tuple[str, Any]]:
    """Yield the verb and the parameter of each option, also those of the verbs of a group."""
    subcommands = getattr(command, "commands", None) or {}
    for name, subcommand in subcommands.items():
        yield from list_options(subcommand, f"{verb} {name}")
    if not subcommands:
        for parameter in command.get_params(typer.Context(command)):
            if parameter.param_type_name == "option":
                yield verb, parameter


def kind_of_value(parameter: Any) -> str:
    if getattr(parameter.type, "choices", None):
        return "a choice"
    # Of a list, its items count: imgkit scaling --nodes 1,2,4.
    first, *_ = re.split("[|,]", parameter.metavar or parameter.type.name)
    return str(first)


def test_flag_takes_one_kind_of_value():
    kinds: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in app.VERBS:
        for verb, parameter in list_options(app.verb_command(name), name):
            for flag in () if parameter.is_flag else parameter.opts:
                kinds[flag][kind_of_value(parameter)].append(verb)
    assert len(kinds) > 50
    several = {flag: dict(verbs) for flag, verbs in kinds.items() if len(verbs) > 1 and flag not in OUTPUTS}
    assert several == {}


@pytest.fixture
def run_options() -> list[Any]:
    """The parameters of the options of ``imgkit run``."""
    return [parameter for _, parameter in list_options(app.verb_command("run", quiet=True), "run")]


@pytest.fixture
def run_flags(run_options: list[Any]) -> set[str]:
    return {name for parameter in run_options for name in parameter.opts}


def test_run_has_at_most_46_options(run_options):
    assert len({parameter.name for parameter in run_options} - {"help"}) <= 46


def test_no_option_of_a_scheduler_is_one_of_imgkit(run_flags):
    names = {name for rows in OPTION_TABLES.values() for row in rows for name in row.names.split()}
    assert len(names) > 80
    assert names & run_flags == set()
    assert {name for name in names if not name.startswith("-")} == set(RESOURCES)


def test_replacements_for_options_of_schedulers_are_options_of_imgkit(run_flags):
    texts = {row.replacement for rows in OPTION_TABLES.values() for row in rows}
    typed = {name for text in texts for name in re.findall(r"(?:^| )(--?[a-z][a-z-]*|-A)", text)}
    assert typed - run_flags == set()
    assert "--option" in typed
