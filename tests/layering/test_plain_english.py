"""Texts for users and developers avoid a short list of phrases; docstrings are sentences with a subject."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PHRASES = (
    "is told",
    "are told",
    "be told",
    "held against",
    "hold against",
    "holds against",
    "goes by",
    "go by the",
    "of which",
    "without it the",
    "without it all",
    "without it here",
    "without it as",
    "without it:",
    "without it [0-9]",
    "free of cost",
    "and says nothing",
    "says nothing of",
    "mixes them not",
    "looked at where",
    "is known not to",
    "is there not",
    "has it not",
    "that of its names",
    "what is wanted",
    "who has not",
    "whoever",
    "thereby",
    "hereby",
    "hang watch",
    "timekeeper",
    "wherefrom",
    "whereon",
    "place in the data",
    "saved states",
    "finds its place",
    "so long;",
    "without a question",
    "cannot be had",
    "could be had",
    "hands? out no",
    "gets its name",
    "get their name only",
    "its words:",
    "of its kin\\b",
    "and its kin\\b",
    "and their kin\\b",
    "goes on where it",
    "is no (text|toml|url|image id|job id|file of|step of|list of)",
    "has not made th",
    "when it does not work",
    "tutorials' way",
    "one-file tool",
    "words that start",
    "lays? (a|the) (delta|folder) over",
    "(can|could) be looked at",
    "prove to each other",
    "never was in",
    "nobody saw",
    "is no wall",
    "needs your word",
    "what moves",
    "asks nothing",
    "imgkit says so",
    "and says so",
)
"""Regular expressions, found anywhere in a text and in any case."""
PHRASES += (
    "goes on where it",
    "goes on without",
    "in vain",
    "lie too deep",
    "no sign of life",
    "never called",
    "keeps the run from",
    "begins? anew",
    "when it does not work",
    "outlive a lost",
    "who started it",
)
"""Messages and titles of the launch and of pages on training."""
FOUND = re.compile(r"\b(?:" + "|".join(PHRASES) + r")", re.IGNORECASE)

PREPOSITIONS = re.compile(
    r"\s*(of|from|for|with|without|in|on|at|by|to|into|as|between|under|over|after|before|behind|beside|below"
    r"|above|until|through|among)\b",
    re.IGNORECASE,
)
"""A docstring that begins with one of these has no subject."""
QUOTED = re.compile(r"^\s*[a-z]?[\"']+" + PREPOSITIONS.pattern, re.IGNORECASE | re.MULTILINE)
"""The same where a line of a source begins with it."""

TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs", "recipes", "examples", "ci")
CODE = ("builder", "entrypoints", "recipes", "ci", "examples", "tests")


def tracked(places: tuple[str, ...]) -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *places],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()]


def documents() -> list[Path]:
    return [path for path in tracked(TEXTS) if path.suffix in (".md", ".yaml", ".yml", ".j2", ".sh", "")]


def sources() -> list[Path]:
    mine = Path(__file__).resolve()
    return [path for path in tracked(CODE) if path.suffix == ".py" and path != mine]


def phrases_in_document(path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if found := FOUND.search(line):
            yield f"{path.relative_to(ROOT)}:{number}: {found[0]!r}"


def phrases_in_source(path: Path) -> Iterator[str]:
    """Comments and strings: docstrings, help texts and messages alike."""
    text = path.read_text(encoding="utf-8")
    if not FOUND.search(" ".join(text.split())):
        return  # then no token holds one; tokens take long
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) or token.type == _FSTRING_MIDDLE:
            words = " ".join(token.string.split())
            if found := FOUND.search(words):
                yield f"{path.relative_to(ROOT)}:{token.start[0]}: {found[0]!r}"


_FSTRING_MIDDLE = getattr(tokenize, "FSTRING_MIDDLE", -1)


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those below an assignment included."""
    for node in ast.walk(ast.parse(text)):
        for statement in getattr(node, "body", ()) if not isinstance(node, (ast.Lambda, ast.IfExp)) else ():
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.lineno, statement.value.value


def prepositions(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8")
    if not QUOTED.search(source):
        return  # then no text begins so; a syntax tree takes long
    for line, text in docstrings(source):
        if first := PREPOSITIONS.match(text):
            yield f"{path.relative_to(ROOT)}:{line}: a docstring begins with {first[1]!r}"


def test_documents_avoid_translated_phrases() -> None:
    files = documents()
    assert len(files) > 20
    assert [found for path in files for found in phrases_in_document(path)] == []


def test_code_avoids_translated_phrases() -> None:
    files = sources()
    assert len(files) > 200
    assert [found for path in files for found in phrases_in_source(path)] == []


def test_no_docstring_begins_with_a_preposition() -> None:
    assert [found for path in sources() for found in prepositions(path)] == []


@pytest.mark.parametrize("text", ["# A rank is told.", 'x = "held against the limit"', 'f"{x} goes by {y}"'])
def test_phrases_are_found_in_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "bad.py").write_text(text + "\n")
    assert list(phrases_in_source(tmp_path / "bad.py"))


def test_docstring_of_an_attribute_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "bad.py").write_text('class A:\n    b: int\n    """Of each node."""\n')
    assert list(prepositions(tmp_path / "bad.py"))
