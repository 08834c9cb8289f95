"""Checks of the engines: the one that every verb uses, and the others that this user could choose."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from imgkit_builder.base.checks import Check
from imgkit_builder.base.sizes import size_text
from imgkit_builder.engine import address, builders, without_sdk
from imgkit_builder.engine.contexts import Endpoint
from imgkit_builder.engine.facts import EngineFacts
from imgkit_entrypoints.errors import ImgkitError

NVIDIA_IMAGE_BYTES = 20 * 10**9
"""Rough size of NVIDIA's PyTorch images, uncompressed."""
BUILD_SPACE_BYTES = 2 * NVIDIA_IMAGE_BYTES
"""Space for such an image, and for its archive or the layers of the next one."""
OTHER_S = 1.0
"""Limit for an answer of an engine that is not used."""


def checks() -> tuple[Check, ...]:
    """A check of the engine that every verb uses, then one of each other engine that could be chosen."""
    buildx = builders.buildx_version()
    try:
        used = address.endpoint()
        first = _used(used, buildx)
    except ImgkitError as error:
        used = Endpoint(host="", source=error.where or "")
        first = _failed(error)
    return (first, *_others(address.others(used), used, buildx))


def _failed(error: ImgkitError) -> Check:
    found = f"{error.where}: {error.what}" if error.where else error.what
    return Check(name="docker", verdict="fail", found=found, hint=error.hint or "")


def _used(place: Endpoint, buildx: str) -> Check:
    try:
        answer = without_sdk.query(place)
    except ImgkitError as error:
        return _failed(error)
    found, note = _described(answer.facts, buildx)
    if answer.free_bytes is not None:
        found += f", {size_text(answer.free_bytes)} free for images"
    if answer.free_bytes is None or answer.free_bytes >= BUILD_SPACE_BYTES:
        return Check(name="docker", verdict="ok", found=found, hint=note)
    hint = "an NVIDIA PyTorch image needs 20 GB, and saving it as much again; see: docker system df"
    return Check(name="docker", verdict="warn", found=found, hint=hint)


def _others(places: Sequence[Endpoint], used: Endpoint, buildx: str) -> tuple[Check, ...]:
    if not places:
        return ()
    with ThreadPoolExecutor(max_workers=len(places)) as pool:
        return tuple(pool.map(lambda place: _other(place, used, buildx), places))


def _other(place: Endpoint, used: Endpoint, buildx: str) -> Check:
    name = "not used"
    if place.host.startswith("ssh://"):
        # ssh may take long, or ask for a password.
        return Check(
            name=name,
            verdict="skip",
            found=f"{_reached(place)}: not asked by ssh",
            hint=f"to use it: {choice(place, used)}",
        )
    try:
        facts = without_sdk.query(place, timeout_s=OTHER_S).facts
    except ImgkitError as error:
        return Check(name=name, verdict="skip", found=f"{_reached(place)}: {error.what}")
    found, _ = _described(facts, buildx)
    return Check(name=name, verdict="ok", found=found, hint=f"to use it: {choice(place, used)}")


def _described(facts: EngineFacts, buildx: str) -> tuple[str, str]:
    """What an engine is, and what its builder lacks."""
    builder = builders.choose(facts)
    also = f" or buildx {buildx}" if buildx and not facts.is_podman else ""
    parts = (
        f"{facts.product} {facts.version}",
        f"API {facts.api}",
        facts.arch,
        f"store {facts.store}",
        f"builder {builder.name}{also}",
        _reached(facts.endpoint),
    )
    return ", ".join(parts), builder.note


def _reached(place: Endpoint) -> str:
    if place.context:
        return f"context {place.context} at {place.host}"
    return f"at {place.host}" + (f" ({place.source})" if place.source else "")


def choice(place: Endpoint, used: Endpoint) -> str:
    """The command after which every verb uses `place` instead of `used`."""
    if not place.context:
        return f"export DOCKER_HOST={place.host}"
    # A variable goes before the context that is in use.
    variable = used.source if used.source in ("DOCKER_HOST", "DOCKER_CONTEXT") else ""
    return f"{f'unset {variable}; ' if variable else ''}docker context use {place.context}"
