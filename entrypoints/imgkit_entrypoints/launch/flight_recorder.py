"""NCCL's flight recorder: torch's files about each rank's collectives after a timeout."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.arguments import digits

PLACES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables with the beginning of the files' names, to which torch adds the rank. Older versions read the
second; newer ones warn about it."""
RENAMED = (2, 9)
"""Version of torch that first reads the first name, and records and dumps by itself."""


def variables(env: Mapping[str, str], torch: str, job_id: str) -> dict[str, str]:
    """Return the variables that make torch of version `torch` record and dump where `dumps` looks.

    Variables that `env` already has are left out.
    """
    if env.get("IMGKIT_DEVICE") != "cuda":
        return {}
    folder = None if any(name in env for name in PLACES) else _folder(env)
    place = str(folder / f"nccl-{re.sub('[^A-Za-z0-9.-]', '_', job_id)}-rank-") if folder else ""
    version = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", torch)
    found = {
        # torchrun sets 1, which tears NCCL down during the dump. This is torch's own default.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    if version and tuple(map(int, version.groups())) >= RENAMED:
        found[PLACES[0]] = place
    else:
        found |= {PLACES[1]: place, "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
    if not place:
        found = {name: value for name, value in found.items() if name not in PLACES}
    return {name: value for name, value in found.items() if name not in env}


def _folder(env: Mapping[str, str]) -> Path | None:
    """The run's folder, or one of this user's own where others could plant links, which torch follows."""
    folder = Path(env.get("IMGKIT_RUN_DIR") or tempfile.gettempdir())
    try:
        shared = folder.stat().st_mode & 0o022
    except OSError:
        return folder  # a folder that the run makes
    if not shared:
        return folder
    own = folder / f"imgkit-nccl-{os.geteuid()}"
    try:
        files.make_own_folder(own)
    except OSError:
        return None
    return own


def dumps(env: Mapping[str, str], since: float) -> str:
    """Return a line about the files written after `since` (seconds of the epoch); empty if there are none."""
    place = next((env[name] for name in PLACES if env.get(name)), "")
    if not place:
        return ""
    written = [
        path for path in Path(place).parent.glob(f"{Path(place).name}*") if path.stat().st_mtime >= since
    ]
    if not written:
        return ""
    ranks = ", ".join(sorted((path.name.removeprefix(Path(place).name) for path in written), key=_as_number))
    return (
        f"NCCL's flight recorder has written {place}N for rank {ranks}, with the collectives. "
        f"To compare them: torchfrtrace --prefix {Path(place).name} {Path(place).parent}"
    )


def _as_number(text: str) -> tuple[int, str]:
    return (-1 if (number := digits(text)) is None else number, text)
