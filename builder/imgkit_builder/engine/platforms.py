"""Requests about one platform of an image, for which the SDK has no parameter.

The graph drivers keep one platform of an image, so they need none. With containerd's store an image can be a
list of several; an engine before release 28.1 then shows and saves only the one that it prefers itself.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from imgkit_builder.engine.connection import Engine

if TYPE_CHECKING:
    import requests

CHUNK_BYTES = 2 << 20
_INSPECTS, _SAVES = "1.49", "1.48"
"""First version of the API with the parameter."""


def inspect_image(engine: Engine, name: str, platform: str | None) -> dict[str, Any]:
    """What the engine tells of `name`: of its `platform` where the engine keeps it, else of what it prefers.

    ``Id`` is the same for all platforms, and the only id that other requests take. ``Manifest`` is the digest
    of the platform's manifest; it is there only where the engine prefers another platform that it keeps.
    """
    first: dict[str, Any] = engine.api.inspect_image(name)  # type: ignore[no-untyped-call]  # the stubs forgot it
    if not engine.names_manifests or not _speaks(engine, _INSPECTS):
        return first
    wanted = [platform] if platform else []
    if not first.get("Architecture"):
        # It prefers one that it does not keep.
        wanted += sorted(_kept(engine, name), key=lambda one: one != engine.platform)
    for one in wanted:
        if one == platform_of(first):
            break
        answer = _get(engine, f"/images/{_quoted(name)}/json", {"platform": _as_json(one)})
        if answer.ok:
            data: dict[str, Any] = answer.json()
            found = {"Manifest": data["Id"]} if first.get("Architecture") else {}
            return {**data, "Id": first["Id"], **found}
    return first


def platform_of(data: Mapping[str, Any]) -> str:
    """``linux/amd64``, from what an engine tells of an image."""
    return f"{data.get('Os') or 'linux'}/{data.get('Architecture') or ''}"


def can_choose(engine: Engine) -> bool:
    """Whether the engine shows any platform that it keeps, and not only the one that it prefers."""
    return not engine.names_manifests or _speaks(engine, _INSPECTS)


@contextlib.contextmanager
def get_image(engine: Engine, name: str, platform: str) -> Iterator[Iterator[bytes]]:
    """Yield the chunks of ``docker save``."""
    with engine.patient() as api:
        if not engine.names_manifests or not _speaks(engine, _SAVES):
            yield iter(api.get_image(name, CHUNK_BYTES))
            return
        query = {"platform": _as_json(platform)}
        with _get(engine, f"/images/{_quoted(name)}/get", query, stream=True) as answer:
            _raise_for(answer)
            yield answer.iter_content(CHUNK_BYTES)


def _kept(engine: Engine, name: str) -> Iterator[str]:
    answer = _get(engine, f"/images/{_quoted(name)}/json", {"manifests": "1"})
    for one in (answer.json().get("Manifests") or ()) if answer.ok else ():
        about = (one.get("ImageData") or {}).get("Platform") or {}
        if one.get("Available") and about:
            yield f"{about.get('os')}/{about.get('architecture')}"


def _speaks(engine: Engine, version: str) -> bool:
    import docker.utils

    return bool(docker.utils.version_gte(engine.api.api_version, version))


def _get(engine: Engine, path: str, query: Mapping[str, str], *, stream: bool = False) -> requests.Response:
    api = engine.api
    address = f"{api.base_url}/v{api.api_version}{path}"
    return api.get(address, params=dict(query), timeout=api.timeout, stream=stream)


def _raise_for(answer: requests.Response) -> None:
    import docker.errors
    import requests.exceptions

    try:
        answer.raise_for_status()
    except requests.exceptions.HTTPError as error:
        raise docker.errors.create_api_error_from_http_exception(error) from error


def _quoted(name: str) -> str:
    return quote(name, safe="/:@")


def _as_json(platform: str) -> str:
    system, _, arch = platform.partition("/")
    return json.dumps({"os": system, "architecture": arch})
