"""Push, pull and tag, with progress and with in-band errors raised."""

from __future__ import annotations

import re

from imgkit_builder.base.progress import Reporter
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import LayerProgress, checked, no_image, translated
from imgkit_builder.engine.images import ImageInfo, check_name, find, inspect, repository
from imgkit_entrypoints.errors import ToolFailed, UsageError

_PUSHED = re.compile(r".*: digest: (sha256:[0-9a-f]{64}) size: \d+")


def pull(engine: Engine, ref: str, platform: str | None, report: Reporter) -> ImageInfo:
    """Pull `ref` (tag or digest; default: ``latest``) and describe the local image.

    Raises
    ------
    UsageError : the registry has no such image, or not for `platform`.
    ToolFailed : no network, no permission, no space.
    """
    check_name(ref)
    doing = f"pull {ref}"
    report.stage(doing)
    name, tag = _split(ref)
    progress = LayerProgress(report)
    with translated(doing, name=ref), engine.patient() as api:
        events = api.pull(name, tag=tag, stream=True, decode=True, platform=platform)
        for event in checked(events, doing=doing, name=ref):
            progress.take(event)
    image = inspect(engine, ref, platform=full_platform(platform) if platform else None)
    # A tag with a single image instead of a list of platforms is pulled for any platform.
    if platform and image.platform != full_platform(platform):
        raise UsageError(
            f"{ref} is {image.platform}; the registry has none for {platform}",
            hint="choose another tag; to see its platforms: docker manifest inspect " + ref,
        )
    return image


def push(engine: Engine, ref: str, report: Reporter) -> str:
    """Push the local image `ref` to the registry in its name; return ``sha256:...`` of its manifest.

    Raises
    ------
    UsageError : there is no such local image.
    ToolFailed : no network, no permission, or no digest came back.
    """
    doing = f"push {ref}"
    if find(engine, ref) is None:
        raise no_image(ref)
    report.stage(doing)
    name, tag = _split(ref)
    progress = LayerProgress(report)
    digest = ""
    # The graph drivers report it as an object; containerd's store and Podman write it into the last status.
    with translated(doing, name=ref), engine.patient() as api:
        events = api.push(name, tag=tag, stream=True, decode=True)
        for event in checked(events, doing=doing, name=ref):
            progress.take(event)
            status = _PUSHED.fullmatch(str(event.get("status") or ""))
            digest = str((event.get("aux") or {}).get("Digest") or (status[1] if status else digest))
    if not digest:
        raise ToolFailed(
            f"{doing}: the engine reported no digest", hint="push again; see: journalctl -u docker"
        )
    return digest


def full_platform(platform: str) -> str:
    """Turn ``arm64``, ``linux/arm64`` or ``linux/arm64/v8`` into ``linux/arm64``."""
    parts = platform.split("/")
    return f"linux/{parts[0]}" if len(parts) == 1 else "/".join(parts[:2])


def add_tag(engine: Engine, image: str, ref: str) -> None:
    """Add the name `ref` to the local image `image`; an existing tag moves to it."""
    check_name(ref)
    name, tag = _split(ref)
    with translated(f"tag {image} as {ref}", name=image):
        engine.api.tag(image, name, tag)


def _split(ref: str) -> tuple[str, str]:
    name = repository(ref)
    # If no tag is given, the SDK pushes every tag of the repository.
    return name, ref[len(name) + 1 :] or "latest"
