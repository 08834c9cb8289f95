"""The check that a job's code is really mounted over the image: a runtime may leave a bind out without an
error.

The job would then run the code of the image, and nobody would know.
"""

from __future__ import annotations

from collections.abc import Mapping

from imgkit_entrypoints import facts, json_text
from imgkit_entrypoints.errors import NoPlan

CODE_VARIABLE = "IMGKIT_CODE"
"""Variable of a job with ``--code``: the digest of the code."""
CODE_JSON = "/opt/imgkit/code.json"
"""File that is mounted with the code; its ``sha256`` is that digest."""


def refuse_unmounted_code(env: Mapping[str, str]) -> None:
    """Raise NoPlan if the job has code of its own, and other code or none is mounted."""
    code = env.get(CODE_VARIABLE, "")
    if not code:
        return
    mounted = _mounted_code(env)
    if mounted == code:
        return
    raise NoPlan(
        f"the job's code is not mounted, but {'another' if mounted else 'that of the image'}",
        where=f"{CODE_VARIABLE}={code}, and {mounted or 'nothing'} in {CODE_JSON}",
        hint="submit the job again with --code; if an admin has set `user bind control = no`, no folder "
        "can be mounted there: build the code into the image (image.copy)",
    )


def _mounted_code(env: Mapping[str, str]) -> str:
    """Return the digest in `CODE_JSON`. It is empty without the file, and "unreadable" if the file is
    damaged."""
    text = facts.Reader(root=facts.root_of(env)).text(CODE_JSON)
    if text is None:
        return ""
    try:
        return str(json_text.parse(text)["sha256"])
    except (ValueError, KeyError, TypeError):
        return "unreadable"
