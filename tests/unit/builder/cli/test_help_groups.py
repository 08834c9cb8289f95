"""``imgkit --help``: four groups, the commonest verbs first."""

from __future__ import annotations

import pytest
import typer
from typer.core import TyperCommand
from typer.testing import CliRunner

from imgkit_builder.cli import app


def help_text() -> str:
    return CliRunner().invoke(app.build_app(), ["--help"]).output


def test_help_has_four_groups_in_order() -> None:
    lines = help_text().splitlines()
    titles = [f"{title}:" for title in app.VERB_GROUPS]
    assert titles == ["Start here:", "Images:", "Jobs:", "Checks:"]
    assert [line for line in lines if line in titles] == titles
    assert "Commands:" not in lines


def test_every_verb_is_listed_once() -> None:
    rows = [
        line.split()[0]
        for line in help_text().split("Start here:", 1)[1].splitlines()
        if line.startswith("  ")
    ]
    assert [row for row in rows if row in app.VERBS] == list(app.VERBS)


def test_first_two_groups_have_at_most_twelve_verbs() -> None:
    first, second, *_ = app.VERB_GROUPS.values()
    assert len(first) + len(second) <= 12


@pytest.mark.parametrize("verb", app.VERBS)
def test_list_of_verbs_says_what_their_help_says(verb: str) -> None:
    # The list has its own copy of the sentence: `imgkit --help` does not import the verb.
    listed = TyperCommand(verb, help=app.VERBS[verb].help)
    assert listed.get_short_help_str(100) == app.verb_command(verb).get_short_help_str(100)


def test_run_has_at_most_46_options() -> None:
    command = app.verb_command("run")
    parameters = command.get_params(typer.Context(command))
    options = {parameter.name for parameter in parameters if parameter.param_type_name == "option"}
    assert len(options - {"help"}) <= 46
