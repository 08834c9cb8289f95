"""Build secrets on this machine: where they come from, and where they must not be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from imgkit_builder.image import context, secret_values
from imgkit_builder.image.context import BuildContext
from imgkit_builder.oci.manifest import BaseImage
from imgkit_builder.recipe.model import BuildSecret, CopyStep, PipStep, Recipe, RunCommand
from imgkit_entrypoints.errors import UsageError

MakeRecipe = Callable[..., Recipe]
VALUE = "marker-0123456789"


@pytest.fixture
def recipe(make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A variable for pip, a file for a command that runs last, and a secret that no step uses."""
    monkeypatch.setenv("MY_TOKEN", VALUE)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "netrc").write_text(
        f"-----KIND-----\nmachine example.org\npassword {VALUE}\nshort\n"
    )
    return make_recipe(
        secrets=(
            BuildSecret(id="github", env="MY_TOKEN"),
            BuildSecret(id="netrc", file=tmp_path / "code" / "netrc"),
            BuildSecret(id="unused", env="NOT_SET"),
        ),
        pip=(PipStep(packages=("einops",), secrets=("github",)),),
        run=("make", RunCommand(command="make", secrets=("netrc",), after="copy")),
        copy=(CopyStep(source=tmp_path / "code"),),
        lines={("image", "secrets", 0): 5},
    )


def pack(recipe: Recipe) -> BuildContext:
    return context.pack_context(recipe, base=BaseImage(name="b:1"), platform="linux/amd64", revision="")


def test_options_name_sources_only(recipe: Recipe, tmp_path: Path) -> None:
    values = secret_values.read_secrets(recipe)
    netrc = f"id=netrc,src={tmp_path}/code/netrc"
    assert values.options == ("--secret", "id=github,env=MY_TOKEN", "--secret", netrc)
    assert VALUE not in repr(values)


def test_output_shows_stars(recipe: Recipe) -> None:
    values = secret_values.read_secrets(recipe)
    output = f"url https://{VALUE}@x password {VALUE} machine example.org short -----KIND-----"
    assert values.mask(output) == "url https://***@x *** *** short -----KIND-----"


def test_file_of_a_secret_stays_out_of_the_context(recipe: Recipe) -> None:
    packed = pack(recipe)
    assert "copy/0/netrc" not in {member.name for member in packed.members}
    secret_values.refuse_secrets_in(packed, secret_values.read_secrets(recipe))


def test_value_in_copied_code_refused(recipe: Recipe, tmp_path: Path) -> None:
    # Across the border of two blocks of the file.
    (tmp_path / "code" / "settings.py").write_text("x" * ((1 << 20) - 4) + VALUE)
    with pytest.raises(
        UsageError, match=r"^copy/0/settings\.py: settings\.py holds the value of a build secret"
    ) as caught:
        secret_values.refuse_secrets_in(pack(recipe), secret_values.read_secrets(recipe))
    assert VALUE not in str(caught.value)


def test_script_is_there_for_steps_with_secrets(recipe: Recipe, make_recipe: MakeRecipe) -> None:
    (script,) = (member for member in pack(recipe).members if member.name == "imgkit/with-secrets")
    assert script.data.startswith(b"#!/bin/sh\n")
    assert "imgkit/with-secrets" not in {member.name for member in pack(make_recipe()).members}
