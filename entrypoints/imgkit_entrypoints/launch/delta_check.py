"""Whether the delta that a job was given is there: a runtime may pass over it without a word.

So it does where an admin has set ``enable overlay = no``, and with an overlay in a .sif that is not of the
root partition's group. The job would run the base, and nobody would know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from imgkit_entrypoints import facts
from imgkit_entrypoints.errors import NoPlan

VARIABLE = "IMGKIT_DELTA"
"""Set by a job that has a delta: id of the image that base and delta are together."""
DELTA_JSON = "/opt/imgkit/delta.json"
"""In the uppermost delta: ``image_id``."""


def require(env: Mapping[str, str]) -> None:
    """Raise NoPlan where the job has a delta, and what runs here is not base and delta."""
    wanted = env.get(VARIABLE, "")
    if not wanted:
        return
    text = facts.Reader(root=facts.root_of(env)).text(DELTA_JSON)
    try:
        found = str(json.loads(text)["image_id"]) if text is not None else ""
    except (ValueError, KeyError, TypeError):
        found = "unreadable"
    if found == wanted:
        return
    if found:
        raise NoPlan(
            f"another delta is here than the job says: {found}, not {wanted}",
            where=f"{VARIABLE}, {DELTA_JSON}",
            hint="submit the job again with the delta that is meant; two --overlay are one too many",
        )
    raise NoPlan(
        "the job's delta is not here: this is the base without it",
        where=f"{VARIABLE}={wanted}, and no {DELTA_JSON}",
        hint="what does the runtime say? singularity exec --overlay X.imgdelta:ro BASE.sif true; where an "
        "admin set `enable overlay = no`, transfer the whole image instead (imgkit sif)",
    )
