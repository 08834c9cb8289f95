"""Whatever a file holds, `load` returns or raises UsageError: never a traceback, never a position outside."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.problems import RecipeErrors
from imgkit_entrypoints.errors import UsageError
from imgkit_recipes import FOLDER

TEXTS = [file.read_text() for file in sorted(FOLDER.glob("*.yaml"))]
PIECES = ("- ", ": ", *"[]{}~\t\n'\"|>", "&a ", "*a", "!!set ", "<<: ", "0x1", "1:2:3")


def attempt(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.yaml"
        file.write_bytes(data)
        try:
            load(file)
        except RecipeErrors as error:
            lines = data.decode("utf-8", "replace").replace("\r\n", "\n").count("\n") + 3
            for problem in error.problems:
                assert problem.position.line >= 1
                assert problem.position.column >= 1
                assert problem.position.file != file or problem.position.line <= lines
            str(error)
        except UsageError as error:
            str(error)


@settings(max_examples=150)
@given(st.binary(max_size=200))
def test_any_bytes_give_an_answer(data):
    attempt(data)


@settings(max_examples=150)
@given(st.lists(st.sampled_from([*PIECES, "image", "base", "system", "pip", "env", "a"]), max_size=30))
def test_any_yaml_pieces_give_an_answer(pieces):
    attempt("".join(pieces).encode())


@pytest.mark.parametrize("seed", range(60))
def test_damaged_shipped_recipe_gives_an_answer(seed):
    chosen = random.Random(seed)  # noqa: S311 - repeatable damage, not a secret
    text = chosen.choice(TEXTS)
    for _ in range(chosen.randint(1, 5)):
        position = chosen.randrange(len(text))
        text = text[:position] + chosen.choice(PIECES) + text[position + chosen.randint(0, 8) :]
    attempt(text.encode())
