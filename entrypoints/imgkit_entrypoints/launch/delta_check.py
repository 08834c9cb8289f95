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
    """Raise NoPlan if the job has a delta or a code delta, and another one or none is mounted."""
    expected = env.get(VARIABLE, "")
    mounted = _read(env, DELTA_JSON, "image_id") if expected else ""
    if expected and mounted and mounted != expected:
        raise NoPlan(
            f"this image has a different delta from the job's: {mounted}, not {expected}",
            where=f"{VARIABLE}, {DELTA_JSON}",
            hint="submit the job again with the right delta; give one --overlay only",
        )
    if expected and not mounted:
        raise NoPlan(
            "the job's delta is not mounted: this is the base without it",
            where=f"{VARIABLE}={expected}, and no {DELTA_JSON}",
            hint="check the runtime's output: singularity exec --overlay X.imgdelta:ro BASE.sif true. If an "
            "admin has set `enable overlay = no`, transfer the whole image instead (imgkit sif)",
        )
    code = env.get(CODE_VARIABLE, "")
    mounted_code = _read(env, CODE_JSON, "sha256") if code else ""
    if code and mounted_code != code:
        raise NoPlan(
            f"the job's code is not mounted, but {'another' if mounted_code else 'that of the image'}",
            where=f"{CODE_VARIABLE}={code}, and {mounted_code or 'nothing'} in {CODE_JSON}",
            hint="submit the job again with --code; if an admin has set `user bind control = no`, no folder "
            "can be mounted there: build the code into the image (image.copy)",
        )


def _read(env: Mapping[str, str], file: str, key: str) -> str:
    """Return a value of a JSON file of the image; empty without the file."""
    text = facts.Reader(root=facts.root_of(env)).text(file)
    try:
        return str(json_text.parse(text)[key]) if text is not None else ""
    except (ValueError, KeyError, TypeError):
        return "unreadable"
