from __future__ import annotations

import importlib.resources
from pathlib import Path

import pytest

from imgkit_builder.recipe import targets
from imgkit_entrypoints.errors import UsageError


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate the one-file tool, where the facts are beside the package."""
    (tmp_path / targets.SYSTEMS_JSON).write_text(targets.to_json(targets.shipped()))
    monkeypatch.setattr(importlib.resources, "files", lambda _: tmp_path)


def test_facts_survive_the_bundle() -> None:
    before = targets.shipped()
    assert len(before) >= 8
    assert targets.from_json(targets.to_json(before)) == before


@pytest.mark.usefixtures("bundled")
def test_bundle_knows_the_shipped_recipes() -> None:
    found = targets.find("mn5")
    assert found.module_line == "module load singularity"
    assert found.platforms == ("linux/amd64",)


@pytest.mark.usefixtures("bundled")
@pytest.mark.parametrize("ref", ["mn6", "./mine.yaml"])
def test_bundle_refuses_other_recipes(ref: str) -> None:
    with pytest.raises(UsageError, match="does not know") as caught:
        targets.find(ref)
    assert "mn5" in str(caught.value.hint)


def test_unknown_recipe_is_refused() -> None:
    with pytest.raises(UsageError):
        targets.find("no-such-recipe")
