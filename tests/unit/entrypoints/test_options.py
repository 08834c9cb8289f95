"""How an option is declared, and what argparse makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from imgkit_entrypoints.arguments import Option, Parser, add_options, declared_options, option, parse_natural
from imgkit_entrypoints.errors import UsageError


@dataclass(frozen=True)
class Limits:
    tasks: int = option("--tasks", "number of tasks", parse_natural, "N", default=0, heading="limits")
    stop_after_s: int | None = option(
        "--stop-after", "time limit", parse_natural, "S", unset="none", one_of="end"
    )
    stop_at: str | None = option("--stop-at", "end", metavar="DATE", aliases=("--until",), one_of="end")


@pytest.fixture
def parser() -> Parser:
    parser = Parser(prog="dist-x")
    add_options(parser, (Option("--strict -s", "refuse", action="store_true"), *declared_options(Limits)))
    return parser


def test_help_lists_options_with_their_defaults(parser):
    text = " ".join(parser.format_help().split())
    assert "--strict, -s refuse limits:" in text
    assert "--tasks N number of tasks (default: 0)" in text
    assert text.endswith("--stop-after S time limit (default: none) --stop-at DATE end")


def test_values_have_the_names_of_fields(parser):
    values = vars(parser.parse_args(["-s", "--until", "monday"]))
    assert values.pop("strict")
    assert Limits(**values) == Limits(tasks=0, stop_after_s=None, stop_at="monday")


def test_only_one_of_two_options_is_taken(parser):
    with pytest.raises(UsageError) as caught:
        parser.parse_args(["--until", "monday", "--stop-after", "5"])
    assert caught.value.what == "argument --stop-after: not allowed with argument --until"
