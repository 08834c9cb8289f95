"""The check that a job's delta is really mounted: a runtime may ignore it silently.

A runtime does so if an admin has set ``enable overlay = no``, or if an overlay in a .sif is not in the group
of the root partition. The job would then run the base, and nobody would know.
"""

from __future__ import annotations

from collections.abc import Mapping

from imgkit_entrypoints import facts, json_text
from imgkit_entrypoints.errors import NoPlan

VARIABLE = "IMGKIT_DELTA"
"""Variable of a job with a delta: the id of the image that base and delta make together."""
DELTA_JSON = "/opt/imgkit/delta.json"
"""File of the uppermost delta; its ``image_id`` is that id."""


def require(env: Mapping[str, str]) -> None:
    """Raise NoPlan if the job has a delta but this image is not base and delta."""
    wanted = env.get(VARIABLE, "")
    if not wanted:
        return
    text = facts.Reader(root=facts.root_of(env)).text(DELTA_JSON)
    try:
        found = str(json_text.parse(text)["image_id"]) if text is not None else ""
    except (ValueError, KeyError, TypeError):
        found = "unreadable"
    if found == wanted:
        return
    if found:
        raise NoPlan(
            f"this image has another delta than the job: {found}, not {wanted}",
            where=f"{VARIABLE}, {DELTA_JSON}",
            hint="submit the job again with the right delta; give one --overlay only",
        )
    raise NoPlan(
        "the job's delta is not here: this is the base without it",
        where=f"{VARIABLE}={wanted}, and no {DELTA_JSON}",
        hint="see what the runtime says: singularity exec --overlay X.imgdelta:ro BASE.sif true. If an admin "
        "has set `enable overlay = no`, transfer the whole image instead (imgkit sif)",
    )
