"""What of a locked image's configuration goes into its .sif: nothing that two builds of one lock differ in.

A build by a lock labels its image with a time. The image id, the history, the digests of layers and the
engine's own words depend on the clock and on the engine. A .sif of such an image has the id of its settled
configuration instead (docs/adr/0019).
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.oci.config import ImageConfig
from imgkit_builder.oci.manifest import EPOCH_LABEL
from imgkit_entrypoints import json_text

_MOST_TIME_S = (1 << 32) - 1
_KEPT = ("User", "ExposedPorts", "Env", "Entrypoint", "Cmd", "Volumes", "WorkingDir", "StopSignal")
"""What the OCI's image specification has beside labels; engines add values of their own."""
_ENGINES_LABELS = frozenset({"io.buildah.version"})


def epoch_s(config: ImageConfig) -> int | None:
    """The latest time of a file in the .sif of a locked image; None where the image is not locked."""
    text = config.labels.get(EPOCH_LABEL, "")
    return min(int(text), _MOST_TIME_S) if text.isascii() and text.isdigit() else None


def settled(config: ImageConfig) -> ImageConfig:
    """The configuration as the .sif of a locked image has it; that of another image unchanged."""
    clamp_s = epoch_s(config)
    if clamp_s is None:
        return config
    values = json_text.parse(config.raw)
    settings = values.get("config") or {}
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(clamp_s))
    labels = {name: value for name, value in config.labels.items() if name not in _ENGINES_LABELS}
    kept = {name: settings[name] for name in _KEPT if settings.get(name)}
    text = {
        "architecture": config.arch,
        "config": {**kept, "Labels": labels},
        "created": created,
        "os": "linux",
    }
    raw = json.dumps(text, sort_keys=True).encode()
    return replace(
        config,
        image_id=f"sha256:{hashlib.sha256(raw).hexdigest()}",
        raw=raw,
        diff_ids=(),
        labels=labels,
        created=created,
    )


def root_of(image_id: str) -> str:
    """The digest of the root partition that this user's last conversion of the image made; empty if none."""
    try:
        return files.read_own(_note(image_id))
    except (OSError, UnicodeDecodeError):
        return ""


def remember(image_id: str, root_sha256: str) -> None:
    """Record what a conversion of the locked image `image_id`, as an engine calls it, has made."""
    files.write_cache(_note(image_id), root_sha256)


def _note(image_id: str) -> Path:
    return files.cache_dir() / "locked" / image_id.replace(":", "-")
