"""Each recipe in ``malformed`` is refused with its message in ``malformed.txt``.

No switch rewrites that file: whoever changes a message edits it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.problems import RecipeErrors

FOLDER = Path(__file__).parent / "malformed"
CASES = sorted(path.name for path in FOLDER.glob("*.yaml"))


def recorded_messages() -> dict[str, str]:
    """Return the message of each case; a section has a line ``== NAME``, and an empty line at its end."""
    text = FOLDER.with_suffix(".txt").read_text(encoding="utf-8")
    sections = text.removeprefix("== ").removesuffix("\n").split("\n\n== ")
    return dict(section.split("\n", 1) for section in sections)


@pytest.mark.parametrize("case", CASES)
def test_all_problems_are_named_at_their_places(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    with pytest.raises(RecipeErrors) as caught:
        load(f"./{case}")
    message = str(caught.value).replace(str(FOLDER), "FOLDER")
    assert message == recorded_messages()[case]


def test_every_message_has_its_case() -> None:
    assert list(recorded_messages()) == CASES
