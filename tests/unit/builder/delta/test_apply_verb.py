"""``imgkit apply`` takes a delta and its .sif, or with --flatten one .sif."""

from __future__ import annotations

import pytest

from imgkit_builder.cli.app import build_app
from imgkit_entrypoints.errors import UsageError


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (["x.imgdelta"], "apply needs a delta and the .sif", "imgkit apply x.imgdelta BASE.sif -o NEW.sif"),
        (["--flatten", "x.imgdelta", "y.sif"], "--flatten takes one file", "imgkit apply --flatten NEW.sif"),
    ],
    ids=["no base", "flatten with a base"],
)
def test_wrong_number_of_files_is_refused(arguments: list[str], what: str, hint: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        build_app(("apply",))(["apply", *arguments, "-o", "z.sif"], standalone_mode=False)
    assert hint in (caught.value.hint or "")
