"""Local images of the engine: their facts, their platforms, and the id that archives record.

The graph drivers keep one platform of an image. With containerd's store an image can be a list of several;
an engine before release 28.1 then shows and saves only the one that it prefers itself, and the SDK has no
parameter for it.

The image id is the digest of the image's configuration, as archives and .sif files record it. An engine
with containerd's store names an image by its manifest. The API does not report the id, but the manifest
does. That is a file in containerd's store, and the engine shows it in a container that is never started.
Where the store is in another place, the save stream has the manifest too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from imgkit_builder.archive import read, tar_read
from imgkit_builder.archive.tar_read import REGULAR, TarLimits, TarStream
from imgkit_builder.base import files
from imgkit_builder.engine import containers
from imgkit_builder.engine.connection import Engine, connect
from imgkit_builder.engine.errors import translated
from imgkit_builder.oci.manifest import STANDIN_LABEL
from imgkit_builder.recipe.rules import BadReference, parse_reference
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, ToolFailed, UsageError
from imgkit_entrypoints.terminal import shown

if TYPE_CHECKING:
    import requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """A local image."""

    ref: str
    """The engine's own name for it, ``sha256:...``: what requests to the engine take."""
    id: str
    """``sha256:...`` of the image configuration; archives and .sif files record it."""
    tags: tuple[str, ...]
    platform: str
    """``linux/amd64``."""
    labels: Mapping[str, str]
    env: Mapping[str, str]
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    workdir: str
    user: str
    diff_ids: tuple[str, ...]
    """Digests of the uncompressed layers, lowest first."""
    size_bytes: int
    digest: str
    """``repo@sha256:...``; empty for an image that never saw a registry."""
    manifest: str = ""
    """``sha256:...`` of its manifest where the engine prefers another platform of the image; else empty."""

    @property
    def tag(self) -> str:
        """Its first tag; empty where it has none."""
        return self.tags[0] if self.tags else ""


def inspect(engine: Engine, name: str, *, platform: str | None = None) -> ImageInfo:
    """Describe the local image `name` (tag or id); never uses the network.

    Of an image with several platforms it describes `platform`, or else the one that the engine prefers.

    Raises
    ------
    UsageError : there is no such image, or `name` is not an image name.
    """
    # The engine would answer "/" with the list of its images, for example.
    check_name(name)
    with translated(f"inspect {name}", name=name):
        data = _inspect_image(engine, name, platform)
    return _info(engine, data, name)


def find(engine: Engine, name: str, *, platform: str | None = None) -> ImageInfo | None:
    """Like `inspect`, but None where the engine has no such image."""
    import docker.errors

    check_name(name)
    with translated(f"inspect {name}", name=name):
        try:
            data = _inspect_image(engine, name, platform)
        except docker.errors.ImageNotFound:
            return None
    return _info(engine, data, name)


def with_layers(engine: Engine, diff_ids: Sequence[str]) -> ImageInfo | None:
    """Find a local image with exactly the layers `diff_ids`, under any name or none."""
    import docker.errors

    with translated("list the images"):
        for ref in engine.api.images(quiet=True):
            # It may be removed meanwhile.
            with contextlib.suppress(docker.errors.ImageNotFound):
                data = _inspect_image(engine, ref, None)
                if _layers(data) == tuple(diff_ids):
                    return _info(engine, data, ref)
    return None


def remove(engine: Engine, name: str) -> None:
    """Remove the image `name`, with the layers that no other image has; a missing image is no error."""
    import docker.errors

    with translated(f"remove the image {name}"), contextlib.suppress(docker.errors.ImageNotFound):
        engine.api.remove_image(name, force=True)


def config_json(engine: Engine, image: ImageInfo) -> bytes:
    """The OCI configuration of `image` without its history.

    The engine hands out values, not bytes: their digest is not the image id.
    """
    with translated(f"inspect {image.ref}", name=image.ref):
        data = _inspect_image(engine, image.ref, image.platform)
    return json.dumps(
        {
            "created": data.get("Created") or "",
            "architecture": data.get("Architecture") or "",
            "os": data.get("Os") or "linux",
            "config": data.get("Config") or {},
            "rootfs": {"type": "layers", "diff_ids": _layers(data)},
        }
    ).encode()


def storage(engine: Engine, image: ImageInfo) -> tuple[str, dict[str, str]] | None:
    """The graph driver of `image` and its folders on the engine's machine; None with containerd's store."""
    if engine.names_manifests:
        return None
    driver = _inspect_image(engine, image.ref, image.platform).get("GraphDriver") or {}
    return str(driver.get("Name") or ""), dict(driver.get("Data") or {})


def _layers(data: dict[str, Any]) -> tuple[str, ...]:
    return tuple((data.get("RootFS") or {}).get("Layers") or ())


def _info(engine: Engine, data: dict[str, Any], name: str) -> ImageInfo:
    ref, platform, config = str(data["Id"]), platform_of(data), data.get("Config") or {}
    tags = [plain(tag) for tag in data.get("RepoTags") or () if tag != "<none>:<none>"]
    # The requested name comes first, so that saving and messages use it.
    tags.sort(key=lambda tag: tag not in (plain(name), f"{plain(name)}:latest"))
    digests = [plain(digest) for digest in data.get("RepoDigests") or () if not digest.startswith("<none>")]
    # The requested one comes first: Podman lists each name with each digest that the image has anywhere.
    digests.sort(key=lambda one: (one != plain(name), one.partition("@")[0] != repository(plain(name))))
    pairs = (word.partition("=") for word in config.get("Env") or ())
    return ImageInfo(
        ref=ref,
        id=_image_id(engine, ref, platform),
        tags=tuple(tags),
        platform=platform,
        labels=dict(config.get("Labels") or {}),
        env={key: value for key, _, value in pairs},
        entrypoint=tuple(config.get("Entrypoint") or ()),
        cmd=tuple(config.get("Cmd") or ()),
        workdir=str(config.get("WorkingDir") or ""),
        user=str(config.get("User") or ""),
        diff_ids=_layers(data),
        size_bytes=int(data.get("Size") or 0),
        digest=digests[0] if digests else "",
        manifest=str(data.get("Manifest") or ""),
    )


_PREFIXES = ("docker.io/library/", "docker.io/", "localhost/")


def plain(name: str) -> str:
    """`name` without the registry that Podman puts before a short name: ``mn5:1`` of ``localhost/mn5:1``."""
    return next((name.removeprefix(one) for one in _PREFIXES if name.startswith(one)), name)


def check_name(name: str, *, where: str | None = None) -> None:
    """Raise UsageError where `name` is not an image reference, before the engine is asked."""
    try:
        parse_reference(name)
    except BadReference as error:
        raise UsageError(f"not an image name: {error.what}", where=where, hint=error.hint) from error


def repository(name: str) -> str:
    """``host:5000/group/name`` of ``host:5000/group/name:tag@sha256:...``."""
    plain = name.partition("@")[0]
    head, colon, tail = plain.rpartition(":")
    return head if colon and "/" not in tail else plain


CHUNK_BYTES = 2 << 20
_INSPECTS, _SAVES = "1.49", "1.48"
"""First version of the API with the parameter."""


def _inspect_image(engine: Engine, name: str, platform: str | None) -> dict[str, Any]:
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


_CONTENT = "io.containerd.content.v1.content/blobs/sha256"
_OTHER_STORES = (f"/var/lib/containerd/{_CONTENT}", f"/var/lib/desktop-containerd/daemon/{_CONTENT}")
"""The stores of a containerd that the engine did not start: the system's, and Docker Desktop's."""
_CONTENT_INSIDE = "/imgkit-content"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_INDEX_DEPTH = 4

_Read = Callable[[str], bytes | None]
"""The file with a digest; None if there is none."""


def _image_id(engine: Engine, ref: str, platform: str) -> str:
    """``sha256:...`` of the configuration of the image that `engine` calls `ref`, for `platform`.

    Notes
    -----
    It is kept in a file: a manifest never changes. Without a cache folder it is read again, 0.15 s each time.

    Raises
    ------
    ToolFailed : the engine has no readable manifest of the image.
    """
    if not engine.names_manifests or not _DIGEST.fullmatch(ref):
        return ref
    name = f"{ref.removeprefix('sha256:')}-{platform.replace('/', '-')}"
    kept = files.cache_dir() / "image-ids" / name
    with contextlib.suppress(OSError, ValueError):
        known = files.read_own(kept).strip()
        if _DIGEST.fullmatch(known):
            return known
    found = _in_the_store(engine, ref, platform) or _in_the_archive(engine, ref, platform)
    if found is None:
        raise ToolFailed(
            f"the engine does not show the manifest of {ref}",
            hint="pull or build the image again; see: journalctl -u docker -n 50",
        )
    files.write_cache(kept, f"{found}\n")
    return found


def _in_the_store(engine: Engine, ref: str, platform: str) -> str | None:
    for place in (f"{engine.root}/containerd/daemon/{_CONTENT}", *_OTHER_STORES):
        # The engine refuses a folder that is not there.
        with (
            contextlib.suppress(ImgkitError),
            containers.created(
                engine, ref, ["true"], purpose="read", platform=platform, shown={place: _CONTENT_INSIDE}
            ) as container,
        ):
            if found := _configuration(ref, platform, functools.partial(_read, engine, container)):
                return found
    return None


def _read(engine: Engine, container: str, digest: str) -> bytes | None:
    import docker.errors

    with translated(f"read {digest} from the engine's store"):
        try:
            chunks, _ = engine.api.get_archive(
                container, f"{_CONTENT_INSIDE}/{digest.removeprefix('sha256:')}"
            )
        except docker.errors.NotFound:
            return None
        return tar_read.first_file(chunks, most_bytes=read.MAX_JSON_BYTES, name=digest)


def _in_the_archive(engine: Engine, ref: str, platform: str) -> str | None:
    """Read the save stream until the manifest has come by."""
    seen: dict[str, bytes] = {}
    with translated(f"save {ref}"), get_image(engine, ref, platform) as chunks:
        tar = TarStream(chunks, name=ref, limits=TarLimits(entries=read.MAX_MEMBERS))
        try:
            for member in tar:
                if member.kind == REGULAR and member.size_bytes <= read.MAX_JSON_BYTES:
                    data = b"".join(tar.body())
                    # Only these can be the manifest or an index, and the layers between them stay unread.
                    if data.startswith(b"{"):
                        seen[f"sha256:{member.name.rpartition('/')[2]}"] = data
                        if found := _configuration(ref, platform, seen.get):
                            return found
        except CheckFailed:
            return None
    return None


def _configuration(digest: str, platform: str, look_up: _Read) -> str | None:
    """The configuration that the manifest or index `digest` names; None if a file is missing or damaged."""
    for _ in range(_MAX_INDEX_DEPTH + 1):
        raw = look_up(digest)
        if raw is None or f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
            return None
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            document: dict[str, Any] = json_text.parse(raw)
            if "config" in document:
                found = str(document["config"]["digest"])
                return found if _DIGEST.fullmatch(found) else None
            digest = next(str(one["digest"]) for one in document["manifests"] if _is_for(one, platform))
            continue
        return None
    return None


def _is_for(entry: dict[str, Any], platform: str) -> bool:
    stated = entry.get("platform") or {}
    return f"{stated.get('os')}/{stated.get('architecture')}" == platform


SCHEMA = 1
STANDIN_WARNING = "STAND-IN: its base has no NVIDIA software; for tests only, not for a cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """The facts that ``imgkit show`` prints."""

    id: str
    tags: tuple[str, ...]
    platform: str
    size_bytes: int
    digest: str
    recipe: str
    """Name of its recipe; empty for an image that imgkit did not build."""
    base: str
    created: str
    standin: bool
    layers: int
    labels: Mapping[str, str]

    def lines(self) -> list[str]:
        """Aligned lines for people."""
        rows = [
            ("image", ", ".join(self.tags) or "(no tag)"),
            ("id", self.id),
            ("digest", self.digest or "(not from a registry)"),
            ("platform", self.platform),
            ("size", f"{self.size_bytes / 1e6:.1f} MB in {self.layers} layers"),
            ("recipe", self.recipe or "(not built by imgkit)"),
            ("base", self.base),
            ("created", self.created),
            *((f"label {shown(key)}", value) for key, value in sorted(self.labels.items())),
        ]
        width = max(len(key) for key, _ in rows)
        lines = [f"{key:{width}}  {value}".rstrip() for key, value in rows if value]
        return [STANDIN_WARNING, *lines] if self.standin else lines

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, with its schema number."""
        return {"schema": SCHEMA, "kind": "image", **dataclasses.asdict(self)}


def image_facts(name: str) -> ImageFacts:
    """The facts of the engine's image `name`.

    Raises
    ------
    UsageError : there is no such image.
    ToolMissing : no engine.
    """
    with connect() as engine:
        image = inspect(engine, name)
    return ImageFacts(
        id=image.id,
        tags=image.tags,
        platform=image.platform,
        size_bytes=image.size_bytes,
        digest=image.digest,
        recipe=image.labels.get("imgkit.recipe", ""),
        base=image.labels.get("org.opencontainers.image.base.name", ""),
        created=image.labels.get("org.opencontainers.image.created", ""),
        standin=STANDIN_LABEL in image.labels,
        layers=len(image.diff_ids),
        labels=image.labels,
    )
