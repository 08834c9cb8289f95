"""NCCL's flight recorder: where torch leaves what a rank's collectives were doing when one timed out."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

PLACES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The beginning of the files' names, to which torch adds the rank. The second is the name of older versions,
of which newer ones warn."""
RENAMED = (2, 9)
"""Torch from here on reads the first name, and records and dumps by itself."""


def variables(env: Mapping[str, str], torch: str, job_id: str) -> dict[str, str]:
    """What makes torch of version `torch` record, and dump where `dumps` finds it; what is set stays."""
    if env.get("IMGKIT_DEVICE") != "cuda":
        return {}
    folder = env.get("IMGKIT_RUN_DIR") or tempfile.gettempdir()
    place = str(Path(folder, f"nccl-{re.sub('[^A-Za-z0-9.-]', '_', job_id)}-rank-"))
    version = re.match(r"(\d+)\.(\d+)", torch)
    found = {
        # torchrun sets 1, by which NCCL is torn down while it is looked at; this is torch's own default.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    if version and tuple(map(int, version.groups())) >= RENAMED:
        found[PLACES[0]] = place
    else:
        found |= {PLACES[1]: place, "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
    if any(name in env for name in PLACES):
        found = {name: value for name, value in found.items() if name not in PLACES}
    return {name: value for name, value in found.items() if name not in env}


def dumps(env: Mapping[str, str], since: float) -> str:
    """A line about the files that were written after `since` (seconds of the epoch); empty without any."""
    place = next((env[name] for name in PLACES if env.get(name)), "")
    if not place:
        return ""
    files = [
        path for path in Path(place).parent.glob(f"{Path(place).name}*") if path.stat().st_mtime >= since
    ]
    if not files:
        return ""
    ranks = ", ".join(sorted((path.name.removeprefix(Path(place).name) for path in files), key=_as_number))
    return (
        f"NCCL's flight recorder has left {place}N for rank {ranks}: what each was waiting for; to compare "
        f"them all: torchfrtrace --prefix {Path(place).name} {Path(place).parent}"
    )


def _as_number(text: str) -> tuple[int, str]:
    return (int(text) if text.isdigit() else -1, text)
