"""Describe local images of the engine: their facts, their platforms, and their image ids.

With a graph driver, the engine keeps an image for a single platform. With containerd's store, an image can be
a list of images for several platforms. An engine before release 28.1 then shows and saves only the platform
that it prefers. Later releases have a parameter for the platform, but the SDK does not support it.

The image id is the digest of the image's configuration, and is recorded in archives and .sif files. An engine
with containerd's store identifies an image by its manifest instead, and its API does not report the image id.
But the manifest contains the id. The manifest is a file in containerd's store, and the engine can read it
through a container that is never started. If the store is in an unknown folder, the manifest is read from the
stream of ``docker save``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_builder.archive import read
from imgkit_builder.archive.tar_read import REGULAR, TarLimits, TarStream
from imgkit_builder.base import files
from imgkit_builder.engine import containers
from imgkit_builder.engine.connection import Engine, connect
from imgkit_builder.engine.errors import no_image_error, translate_errors
from imgkit_builder.oci.manifest import STANDIN_LABEL
from imgkit_builder.recipe.rules import parse_reference
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, ToolFailed, UsageError
from imgkit_entrypoints.rules import Unfit
from imgkit_entrypoints.terminal import escape_controls


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """A local image of the engine."""

    ref: str
    """The engine's own name for the image, ``sha256:...``, for requests to the engine."""
    id: str
    """``sha256:...``, the digest of the image's configuration. Archives and .sif files record it."""
    tags: tuple[str, ...]
    platform: str
    """The platform, such as ``linux/amd64``."""
    labels: Mapping[str, str]
    env: Mapping[str, str]
    user: str
    diff_ids: tuple[str, ...]
    """The digests of the uncompressed layers, lowest first."""
    size_bytes: int
    digest: str
    """``repo@sha256:...``. Empty if the image was never in a registry."""
    manifest: str = ""
    """``sha256:...`` of the manifest if the engine prefers another platform of this image.

    Empty if the engine keeps the image for a single platform, or if this is the preferred one.
    """

    @property
    def tag(self) -> str:
        """The first tag of the image. Empty if it has none."""
        return self.tags[0] if self.tags else ""


def inspect(engine: Engine, name: str, *, platform: str | None = None) -> ImageInfo:
    """Return what the engine knows about its image `name` (a tag or id), without using the network.

    If the engine keeps the image for several platforms, the result is about `platform`. If `platform` is
    None, it is about the platform that the engine prefers.

    Raises
    ------
    UsageError : there is no such image, or `name` is not an image name.
    """
    image = find_image(engine, name, platform=platform)
    if image is None:
        raise no_image_error(name)
    return image


def find_image(engine: Engine, name: str, *, platform: str | None = None) -> ImageInfo | None:
    """Return what the engine knows about its image `name`, or None if there is no such image.

    Raises
    ------
    UsageError : `name` is not an image name.
    """
    import docker.errors

    # Check the name first. For the name "/", for example, the engine would return the list of its images.
    check_name(name)
    with translate_errors(f"inspect {name}", name=name):
        try:
            response = _inspect_image(engine, name, platform)
        except docker.errors.ImageNotFound:
            return None
    return _make_info(engine, response, name)


def remove_image(engine: Engine, name: str) -> None:
    """Remove the image `name` and the layers that no other image uses. A missing image is no error."""
    import docker.errors

    with translate_errors(f"remove the image {name}"), contextlib.suppress(docker.errors.ImageNotFound):
        engine.api.remove_image(name, force=True)


def config_json(engine: Engine, image: ImageInfo) -> bytes:
    """Return the OCI configuration of `image` as JSON, without the history.

    The engine does not provide the original bytes, so the configuration is composed of values that the engine
    reports. Its digest is therefore not the image id.
    """
    with translate_errors(f"inspect {image.ref}", name=image.ref):
        response = _inspect_image(engine, image.ref, image.platform)
    return json.dumps(
        {
            "created": response.get("Created") or "",
            "architecture": response.get("Architecture") or "",
            "os": response.get("Os") or "linux",
            "config": response.get("Config") or {},
            # An image configuration must list the layers here. `parse_config` reads them.
            "rootfs": {"type": "layers", "diff_ids": _read_diff_ids(response)},
        }
    ).encode()


def _read_diff_ids(data: dict[str, Any]) -> tuple[str, ...]:
    """Return the digests of an image's layers. `data` is the engine's response about the image."""
    return tuple((data.get("RootFS") or {}).get("Layers") or ())


def _make_info(engine: Engine, data: dict[str, Any], name: str) -> ImageInfo:
    """Return the description of an image. `data` is the engine's response about the image.

    `name` is the name that the user has requested. If the image has several tags, this one comes first.
    """
    # `ref` is the engine's own name for the image. The id is the same on every engine, and is found below.
    ref = str(data["Id"])
    platform = read_platform(data)
    config = data.get("Config") or {}
    digests = _sort_digests(data, short_name(name))
    return ImageInfo(
        ref=ref,
        id=_read_image_id(engine, ref, platform),
        tags=tuple(_sort_tags(data, short_name(name))),
        platform=platform,
        labels=dict(config.get("Labels") or {}),
        env=_parse_env(config.get("Env") or ()),
        user=str(config.get("User") or ""),
        diff_ids=_read_diff_ids(data),
        size_bytes=int(data.get("Size") or 0),
        digest=digests[0] if digests else "",
        manifest=str(data.get("Manifest") or ""),
    )


def _parse_env(variables: Iterable[str]) -> dict[str, str]:
    """Return the variables of an image by name: ``["HOME=/root"]`` -> ``{"HOME": "/root"}``."""
    env = {}
    for variable in variables:
        name, _, value = variable.partition("=")
        env[name] = value
    return env


def _sort_tags(data: dict[str, Any], requested: str) -> list[str]:
    """Return the tags of an image, with the requested name first.

    `data` is the engine's response about it. The order matters, because messages and ``docker save`` use the
    first tag.
    """
    # An engine may send null instead of an empty list.
    tags = [short_name(tag) for tag in data.get("RepoTags") or () if tag != "<none>:<none>"]
    requested_tags = (requested, f"{requested}:latest")
    return sorted(tags, key=lambda tag: tag not in requested_tags)


def _sort_digests(data: dict[str, Any], requested: str) -> list[str]:
    """Return the names of an image with a digest, ``repo@sha256:...``.

    `data` is the engine's response about it. The digest of the requested name comes first, because only the
    first one is used. Podman lists each name with every digest that the image has under any name.
    """
    digests = [short_name(name) for name in data.get("RepoDigests") or () if not name.startswith("<none>")]
    requested_repository = repository(requested)
    # False sorts before True. So the exact name comes first, then other digests in its repository.
    return sorted(
        digests, key=lambda digest: (digest != requested, repository(digest) != requested_repository)
    )


# The longest prefix comes first, because the first match is removed.
_PREFIXES = ("docker.io/library/", "docker.io/", "localhost/")


def short_name(name: str) -> str:
    """Return `name` without the registry that Podman adds: ``localhost/mn5:1`` -> ``mn5:1``."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def check_name(name: str, *, where: str | None = None) -> None:
    """Raise UsageError if `name` is not an image reference. The message names `where` as its source."""
    try:
        parse_reference(name)
    except Unfit as error:
        raise UsageError(f"not an image name: {error.message}", where=where, hint=error.hint) from error


def repository(name: str) -> str:
    """Return the repository of an image, without its tag and digest.

    For example, ``host:5000/group/name:tag@sha256:...`` gives ``host:5000/group/name``.
    """
    name_and_tag = name.partition("@")[0]
    path, colon, tag = name_and_tag.rpartition(":")
    # A colon before the last slash belongs to the registry's port.
    if not colon or "/" in tag:
        return name_and_tag
    return path


CHUNK_BYTES = 2 << 20
_INSPECT_API, _SAVE_API = "1.49", "1.48"
"""The first versions of the API in which these requests have the parameter ``platform``."""


def _inspect_image(engine: Engine, name: str, platform: str | None) -> dict[str, Any]:
    """Return the engine's response about the image `name` for `platform`.

    If `platform` is None, or if the engine does not keep the image for it, the response is about the platform
    that the engine prefers.

    In the result, ``Id`` is the engine's name for the image, which is the same for all platforms. If the
    engine keeps the image for its preferred platform but the response is about another one, ``Manifest`` is
    added. It is the digest of the manifest for that platform.
    """
    default_response = _request_inspection(engine, name)
    if not can_choose_platform(engine) or not engine.has_containerd_store:
        return default_response
    # Without an architecture, the response is about a platform that the engine knows but does not keep.
    is_default_kept = bool(default_response.get("Architecture"))
    candidates = [platform] if platform else []
    if not is_default_kept:
        # The engine's own platform first.
        kept_platforms = _list_local_platforms(engine, name)
        candidates += sorted(kept_platforms, key=lambda kept: kept != engine.platform)
    for candidate in candidates:
        if candidate == read_platform(default_response):
            return default_response
        # An error means that the engine does not keep this platform. Then try the next one.
        with _suppress_api_errors():
            response = _request_inspection(engine, name, platform=_platform_json(candidate))
            # Here, `Id` is the digest of the candidate's manifest. Save it before `Id` is replaced. A build
            # must name the base by this digest, or the engine would use the platform that it prefers.
            if is_default_kept:
                response["Manifest"] = response["Id"]
            response["Id"] = default_response["Id"]
            return response
    return default_response


def _request_inspection(engine: Engine, name: str, **query: str) -> dict[str, Any]:
    """Return the engine's response about the image `name`. `query` has further parameters of the request."""
    with _with_query_parameters(engine, query):
        data: dict[str, Any] = engine.api.inspect_image(name)  # type: ignore[no-untyped-call]  # not in the stubs
    return data


def _list_local_platforms(engine: Engine, name: str) -> Iterator[str]:
    """Yield the platforms for which the engine keeps the image `name`."""
    with _suppress_api_errors():
        for manifest in _request_inspection(engine, name, manifests="1").get("Manifests") or ():
            platform = (manifest.get("ImageData") or {}).get("Platform")
            # An index also lists manifests whose layers were not pulled.
            if manifest.get("Available") and platform:
                yield f"{platform.get('os')}/{platform.get('architecture')}"


@contextlib.contextmanager
def _with_query_parameters(engine: Engine, parameters: Mapping[str, str]) -> Iterator[None]:
    """Add `parameters` to the URLs of all requests in the block. The SDK does not support them (docker 7.2).

    The block must contain only the requests that these parameters are for.
    """
    # The client is a session of requests, which adds its `params` to every URL. They are empty otherwise.
    engine.api.params = dict(parameters)
    try:
        yield
    finally:
        engine.api.params = {}


def _suppress_api_errors() -> contextlib.AbstractContextManager[None]:
    """Return a context manager that suppresses error responses of the engine.

    At such an error, the program continues after the block.
    """
    import docker.errors

    return contextlib.suppress(docker.errors.APIError)


def read_platform(data: Mapping[str, Any]) -> str:
    """Return the platform of an image, such as ``linux/amd64``.

    `data` is the engine's response about the image.
    """
    return f"{data.get('Os') or 'linux'}/{data.get('Architecture') or ''}"


def can_choose_platform(engine: Engine) -> bool:
    """Return whether the engine can describe every platform of an image, not only the one that it prefers."""
    return not engine.has_containerd_store or _has_api(engine, _INSPECT_API)


@contextlib.contextmanager
def open_saved_image(
    engine: Engine, name: str, platform: str, *, requested: str
) -> Iterator[Iterator[bytes]]:
    """Request ``docker save`` of the image `name`, and yield the chunks of the archive.

    The archive is for `platform` if the engine supports this parameter. Otherwise the engine decides.
    `requested` is the name that the user has requested, for errors of the request. Errors while the chunks
    are read are not translated.
    """
    parameters = {}
    if engine.has_containerd_store and _has_api(engine, _SAVE_API):
        parameters["platform"] = _platform_json(platform)
    with engine.without_timeout() as api:
        # The request is sent inside this block. The response is read later, and needs no parameters.
        with (
            translate_errors(f"save {requested}", name=requested),
            _with_query_parameters(engine, parameters),
        ):
            chunks = api.get_image(name, CHUNK_BYTES)
        with contextlib.closing(chunks):
            yield chunks


def _has_api(engine: Engine, version: str) -> bool:
    """Return whether the engine supports at least this `version` of the API."""
    import docker.utils

    return bool(docker.utils.version_gte(engine.api.api_version, version))


def _platform_json(platform: str) -> str:
    """Return a platform such as ``linux/amd64`` in the form of the API's parameter ``platform``."""
    system, _, arch = platform.partition("/")
    return json.dumps({"os": system, "architecture": arch})


_CONTENT = "io.containerd.content.v1.content/blobs/sha256"
_OTHER_STORES = (f"/var/lib/containerd/{_CONTENT}", f"/var/lib/desktop-containerd/daemon/{_CONTENT}")
"""The folders of a containerd that the engine has not started: that of the system, and that of Docker
Desktop."""
_CONTENT_INSIDE = "/imgkit-content"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def _read_image_id(engine: Engine, ref: str, platform: str) -> str:
    """Return the id (the digest of the configuration) of the image that `engine` calls `ref`.

    With Docker's own drivers, the id is `ref`. With containerd's store, `ref` is the digest of a manifest, or
    of an index that lists manifests for several platforms. Then the id is read from the manifest for
    `platform`. It is cached in a file, because a manifest never changes. Reading takes 0.15 s.

    Raises
    ------
    ToolFailed : the engine has no readable manifest of the image.
    """
    if not engine.has_containerd_store or not _DIGEST.fullmatch(ref):
        return ref
    # The file name contains the platform, because `ref` may be an index that leads to one configuration per
    # platform.
    file_name = f"{ref.removeprefix('sha256:')}-{platform.replace('/', '-')}"
    cache_path = files.cache_dir() / "image-ids" / file_name
    cached_id = _read_cached_id(cache_path)
    if cached_id is not None:
        return cached_id
    image_id = _read_id_in_store(engine, ref, platform) or _read_id_in_archive(engine, ref, platform)
    if image_id is None:
        raise ToolFailed(
            f"the engine does not show the manifest of {ref}",
            hint="pull or build the image again; see: journalctl -u docker -n 50",
        )
    files.write_cache(cache_path, f"{image_id}\n")
    return image_id


def _read_cached_id(path: Path) -> str | None:
    """Return the image id that an earlier command has written to `path`, or None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        text = files.read_own(path).strip()
        if _DIGEST.fullmatch(text):
            return text
    return None


def _read_id_in_store(engine: Engine, ref: str, platform: str) -> str | None:
    """Return the image id from the manifest in containerd's store, or None if it is not found there."""
    root = engine.facts().root or "/var/lib/docker"
    for folder in (f"{root}/containerd/daemon/{_CONTENT}", *_OTHER_STORES):
        # If the folder does not exist, the engine returns an error. Then try the next one.
        with contextlib.suppress(ImgkitError):
            image_id = _read_id_in_folder(engine, folder, ref, platform)
            if image_id is not None:
                return image_id
    return None


def _read_id_in_folder(engine: Engine, folder: str, ref: str, platform: str) -> str | None:
    """Return the image id from the manifest in `folder`, which may be containerd's store, or None.

    The folder is on the engine's machine. It is mounted into a container that is never started, and the
    engine reads the files through that container.

    Raises
    ------
    ImgkitError : the engine has no such folder.
    """
    with containers.temporary_container(
        engine, ref, purpose="read", platform=platform, mounted={folder: _CONTENT_INSIDE}
    ) as container:

        def read_blob(digest: str) -> bytes | None:
            path = f"{_CONTENT_INSIDE}/{digest.removeprefix('sha256:')}"
            return containers.read_file(engine, container, path, most_bytes=read.MAX_JSON_BYTES)

        return _find_config_digest(ref, platform, read_blob)


def _read_id_in_archive(engine: Engine, ref: str, platform: str) -> str | None:
    """Return the image id from the manifest in the stream of ``docker save``, or None if it is not found.

    This is slow, so it is done only if containerd's store is not found. Reading stops at the manifest. A
    damaged archive also gives None.
    """
    blobs_by_digest = {}
    archive = open_saved_image(engine, ref, platform, requested=ref)
    with translate_errors(f"save {ref}"), archive as chunks, contextlib.suppress(CheckFailed):
        for digest, blob in _iterate_json_blobs(chunks, ref):
            blobs_by_digest[digest] = blob
            # An index may come before or after the manifests in it, so search again after each blob.
            config_digest = _find_config_digest(ref, platform, blobs_by_digest.get)
            if config_digest is not None:
                return config_digest
    return None


def _iterate_json_blobs(chunks: Iterator[bytes], name: str) -> Iterator[tuple[str, bytes]]:
    """Yield each JSON object in an archive of ``docker save``, after the digest in its name.

    `chunks` are the bytes of the archive. `name` is the name of the image, for messages.

    Raises
    ------
    CheckFailed : the archive is damaged.
    """
    stream = TarStream(chunks, name=name, limits=TarLimits(entries=read.MAX_MEMBERS))
    for member in stream:
        if member.kind != REGULAR or member.size_bytes > read.MAX_JSON_BYTES:
            continue
        blob = b"".join(stream.body())  # the content of this member
        if blob.startswith(b"{"):
            yield f"sha256:{posixpath.basename(member.name)}", blob  # "blobs/sha256/1a2b..."


def _find_config_digest(digest: str, platform: str, read_blob: Callable[[str], bytes | None]) -> str | None:
    """Return the digest of the configuration for `platform`, starting at the manifest or index `digest`.

    An index lists the manifests of several platforms. A manifest refers to the configuration. If a document
    is missing or damaged, return None.

    Parameters
    ----------
    read_blob : returns the content that belongs to a digest, or None if it is missing.
    """
    # An index can contain other indexes. The limit prevents an endless loop.
    for _ in range(read.MAX_INDEX_DEPTH + 1):
        raw = read_blob(digest)
        # If the digest does not match, the file was changed or is incomplete.
        if raw is None or f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
            return None
        try:
            document: dict[str, Any] = json_text.parse(raw)
            # Only a manifest refers to a configuration. An index does not.
            if "config" in document:
                return _require_digest(document["config"])
            digest = _select_manifest(document["manifests"], platform)
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
    return None


def _require_digest(descriptor: dict[str, Any]) -> str:
    """Return the digest in an OCI descriptor. Raise ValueError if it is not a sha256."""
    digest = str(descriptor["digest"])
    if not _DIGEST.fullmatch(digest):
        raise ValueError(digest)
    return digest


def _select_manifest(entries: Iterable[dict[str, Any]], platform: str) -> str:
    """Return the digest of the manifest for `platform`. `entries` are the manifests in an index.

    Raises
    ------
    LookupError : the index has no manifest for this platform.
    """
    for entry in entries:
        entry_platform = entry.get("platform") or {}
        if f"{entry_platform.get('os')}/{entry_platform.get('architecture')}" == platform:
            return str(entry["digest"])
    raise LookupError(platform)


SCHEMA = 1
STANDIN_WARNING = "STAND-IN: its base has no NVIDIA software; for tests only, not for a cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """The facts about an image that ``imgkit show`` prints."""

    image: ImageInfo

    def lines(self) -> list[str]:
        """Return aligned lines of text for people."""
        image = self.image
        facts = self.to_dict()
        rows = {
            "image": ", ".join(image.tags) or "(no tag)",
            "id": image.id,
            # An image that was only built or loaded locally has no digest of a registry.
            "digest": image.digest or "(not from a registry)",
            "platform": image.platform,
            "size": f"{image.size_bytes / 1e6:.1f} MB in {len(image.diff_ids)} layers",
            "recipe": facts["recipe"] or "(not built by imgkit)",
            "base": facts["base"],
            "created": facts["created"],
        }
        for name, value in sorted(image.labels.items()):
            rows[f"label {escape_controls(name)}"] = value
        # Align the values in one column. Rows without a value, such as the base of an image that imgkit did
        # not build, are left out.
        width = max(map(len, rows))
        lines = [f"{name:{width}}  {value}".rstrip() for name, value in rows.items() if value]
        if facts["standin"]:
            lines.insert(0, STANDIN_WARNING)
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as a dict for JSON, with the version of its schema."""
        image = self.image
        return {
            "schema": SCHEMA,
            "kind": "image",
            "id": image.id,
            "tags": image.tags,
            "platform": image.platform,
            "size_bytes": image.size_bytes,
            "digest": image.digest,
            "recipe": image.labels.get("imgkit.recipe", ""),
            "base": image.labels.get("org.opencontainers.image.base.name", ""),
            "created": image.labels.get("org.opencontainers.image.created", ""),
            "standin": STANDIN_LABEL in image.labels,
            "layers": len(image.diff_ids),
            "labels": dict(image.labels),
        }


def image_facts(name: str) -> ImageFacts:
    """Return the facts about the engine's image `name`.

    Raises
    ------
    UsageError : there is no such image.
    ToolMissing : no engine responds.
    """
    with connect() as engine:
        return ImageFacts(image=inspect(engine, name))
