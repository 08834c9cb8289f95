"""Rows about options of schedulers fit the options of imgkit."""

from __future__ import annotations

import re

import typer

from imgkit_builder.cli import app
from imgkit_builder.cli.scheduler_options import TABLES

RESOURCES = ("select", "nodes", "ncpus", "ngpus", "mem", "walltime", "mpiprocs", "ppn", "ompthreads", "place")


def own_options() -> set[str]:
    command = app.verb_command("run", quiet=True)
    parameters = command.get_params(typer.Context(command))
    return {name for parameter in parameters for name in parameter.opts}


def test_no_row_is_about_an_option_of_imgkit() -> None:
    names = {name for rows in TABLES.values() for row in rows for name in row.names.split()}
    assert len(names) > 80
    assert names & own_options() == set()
    assert {name for name in names if not name.startswith("-")} == set(RESOURCES)


def test_answers_are_options_of_imgkit() -> None:
    answers = {row.answer for rows in TABLES.values() for row in rows}
    typed = {name for answer in answers for name in re.findall(r"(?:^| )(--?[a-z][a-z-]*|-A)", answer)}
    assert typed - own_options() == set()
    assert "--option" in typed
