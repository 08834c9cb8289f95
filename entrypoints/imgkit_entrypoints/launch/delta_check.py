"""The check that a job's delta is really mounted: a runtime may ignore it silently.

A runtime does so if an admin has set ``enable overlay = no``, or if an overlay in a .sif is not in the
group of the root partition. The job would then run the base, and nobody would know.
"""

from __future__ import annotations

from collections.abc import Mapping

from imgkit_entrypoints import facts, json_text
from imgkit_entrypoints.errors import NoPlan

VARIABLE = "IMGKIT_DELTA"
"""Variable of a job with a delta: the id of the image that base and delta make together."""
DELTA_JSON = "/opt/imgkit/delta.json"
"""File of the uppermost delta; its ``image_id`` is that id."""
CODE_VARIABLE = "IMGKIT_CODE"
"""Variable of a job with ``--code``: the digest of the code."""
CODE_JSON = "/opt/imgkit/code.json"
"""File that is mounted with the code; its ``sha256`` is that digest."""


def require(env: Mapping[str, str]) -> None:
    """Raise NoPlan if the job has a delta or code, and another one or none is here."""
    if wanted := env.get(VARIABLE, ""):
        _require_delta(wanted, _found(env, DELTA_JSON, "image_id"))
    if wanted := env.get(CODE_VARIABLE, ""):
        _require_code(wanted, _found(env, CODE_JSON, "sha256"))


def _found(env: Mapping[str, str], file: str, key: str) -> str:
    text = facts.Reader(root=facts.root_of(env)).text(file)
    try:
        return str(json_text.parse(text)[key]) if text is not None else ""
    except (ValueError, KeyError, TypeError):
        return "unreadable"


def _require_delta(wanted: str, found: str) -> None:
    if found == wanted:
        return
    if found:
        raise NoPlan(
            f"this image has a different delta from the job's: {found}, not {wanted}",
            where=f"{VARIABLE}, {DELTA_JSON}",
            hint="submit the job again with the right delta; give one --overlay only",
        )
    raise NoPlan(
        "the job's delta is not mounted: this is the base without it",
        where=f"{VARIABLE}={wanted}, and no {DELTA_JSON}",
        hint="check the runtime's output: singularity exec --overlay X.imgdelta:ro BASE.sif true. If an "
        "admin has set `enable overlay = no`, transfer the whole image instead (imgkit sif)",
    )


def _require_code(wanted: str, found: str) -> None:
    if found != wanted:
        raise NoPlan(
            f"the job's code is not mounted, but {'another' if found else 'that of the image'}",
            where=f"{CODE_VARIABLE}={wanted}, and {found or 'nothing'} in {CODE_JSON}",
            hint="submit the job again with --code; if an admin has set `user bind control = no`, no folder "
            "can be mounted there: build the code into the image (image.copy)",
        )
