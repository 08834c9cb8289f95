"""Transfer images and files: pull, push and tag images, and read them as streams or single files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive import tar_read
from imgkit_builder.archive.tar_read import REGULAR
from imgkit_builder.base.progress import SILENT, Reporter
from imgkit_builder.engine import containers, images
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import (
    Event,
    LayerProgress,
    explain_message,
    no_image_error,
    refuse_error_events,
    translate_errors,
)
from imgkit_builder.engine.images import ImageInfo, check_name, find_image, inspect, repository
from imgkit_builder.oci.config import ImageConfig, parse_config
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError
from imgkit_entrypoints.terminal import strip_styles

# How many bytes at the end of a tar are kept to find an error message of the engine, which is shorter.
_TAIL_BYTES = 4096
# Every tar ends with two empty blocks of 512 bytes.
_TAR_END = bytes(1024)
_MAX_FILE_BYTES = 4 << 20
# "latest: digest: sha256:... size: 1234"
_PUSHED = re.compile(r".*: digest: (?P<digest>sha256:[0-9a-f]{64}) size: \d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalImage:
    """An image on a connected engine, as returned by `local_image`.

    All data are read by the id of the image. So if a tag moves to another image in the meantime, the data of
    two images cannot be mixed.
    """

    engine: Engine
    name: str
    """The first tag of the image. If it has none, the requested name."""
    info: ImageInfo
    config: ImageConfig

    @property
    def size_bytes(self) -> int:
        """The size of the uncompressed layers."""
        return self.info.size_bytes

    def save(self) -> AbstractContextManager[Iterator[bytes]]:
        """Stream ``docker save``. The archive contains the image's tag, if it has one."""
        return save_stream(self.engine, self.info.tag or self.info.ref)

    def export(self) -> AbstractContextManager[Iterator[bytes]]:
        """Stream ``docker export`` of a container that is created from the image."""
        return export_stream(self.engine, self.info.ref)


def local_image(engine: Engine, name: str) -> LocalImage:
    """Find the image `name` (a tag or id) on `engine`.

    Raises
    ------
    UsageError : the engine has no such image.
    CheckFailed : the image has no layers.
    """
    info = inspect(engine, name)
    config = parse_config(images.config_json(engine, info), where=name, image_id=info.id)
    return LocalImage(engine=engine, name=info.tag or name, info=info, config=config)


@contextlib.contextmanager
def save_stream(engine: Engine, name: str, *, report: Reporter = SILENT) -> Iterator[Iterator[bytes]]:
    """Yield the chunks of ``docker save``. The archive has at most one tag.

    An image that was requested by its id is saved by its first tag, because the archive would otherwise have
    no tag.

    Notes
    -----
    Since version 20.10, the engine writes all layers to its disk before it sends the first byte (4-7 s for
    783 MB).

    Raises
    ------
    UsageError : there is no such image.
    ToolFailed : (while iterating) the engine fails, or the stream ends too early.
    """
    image = inspect(engine, name)
    doing = f"save {name}"
    report.stage(f"the engine stages {image.tag or name}")
    # An error of the caller's own code in the block must not be translated. So errors of the request are
    # translated by `open_saved_image`, and errors in the stream by `_refuse_incomplete`.
    with (
        images.open_saved_image(engine, image.tag or image.ref, image.platform, requested=name) as chunks,
        contextlib.closing(_refuse_incomplete(chunks, doing)) as checked_chunks,
    ):
        yield checked_chunks


@contextlib.contextmanager
def export_stream(engine: Engine, name: str) -> Iterator[Iterator[bytes]]:
    """Yield the chunks of a tar with the image's flattened file tree, as written by ``docker export``.

    Only containers can be exported. So a container is created, never started, and removed at the end of the
    block.

    Raises
    ------
    UsageError : there is no such image.
    ToolFailed : (while iterating) the engine fails, or the stream ends too early.
    """
    image = inspect(engine, name)
    doing = f"export {name}"
    # Use the id, because the tag could move to another image in the meantime.
    with containers.temporary_container(
        engine, image.ref, purpose="export", platform=image.platform
    ) as container:
        with translate_errors(doing, name=name), engine.without_timeout() as api:
            response = iter(api.export(container))
        with contextlib.closing(_refuse_incomplete(response, doing)) as chunks:
            yield chunks


def _refuse_incomplete(chunks: Iterator[bytes], doing: str) -> Generator[bytes, None, None]:
    """Yield the `chunks` of a tar unchanged, and raise an error at the end if the tar is incomplete.

    The engine sends the status 200 before the data. If it fails later, it can only append the error to the
    data, as JSON.

    Raises
    ------
    ToolFailed, UsageError : the engine failed, or the data ended too early.
    """
    tail = b""  # the last bytes so far
    with translate_errors(doing):
        for chunk in chunks:
            # Copy only the end of the chunk, because chunks are large.
            tail += chunk[-_TAIL_BYTES:]
            tail = tail[-_TAIL_BYTES:]
            yield chunk
    # Only a complete tar ends with two empty blocks. After an error, the tail ends with JSON or anywhere.
    if not tail.endswith(_TAR_END):
        raise _explain_incomplete(tail, doing)


def _explain_incomplete(tail: bytes, doing: str) -> ImgkitError:
    """Return the error for a tar of the engine that is incomplete, and ends with the bytes `tail`.

    The tail contains the engine's error message if the engine has sent one.
    """
    # The JSON begins with this key: b'... {"errorDetail":{"message":"no space left"},"error":"..."}'
    _, first_key, rest_of_json = tail.rpartition(b'{"errorDetail"')
    if first_key:
        message = (first_key + rest_of_json).decode("utf-8", "replace")
        return explain_message(strip_styles(message), doing=doing)
    return ToolFailed(
        f"{doing}: the stream ended before the archive did",
        hint="the engine stopped or its disk is full: docker system df; journalctl -u docker -n 50",
    )


def read_file(engine: Engine, name: str, path: str) -> bytes | None:
    """Return the content of the file `path` in the image `name`, without starting a container.

    If there is no such file, or if it is larger than 4 MiB, return None.

    Raises
    ------
    UsageError : there is no such image.
    """
    image = inspect(engine, name)
    with containers.temporary_container(
        engine, image.ref, purpose="read", platform=image.platform
    ) as container:
        return containers.read_file(engine, container, path, most_bytes=_MAX_FILE_BYTES)


def store_files(
    engine: Engine,
    name: str,
    path: str,
    folder: Path,
    *,
    is_wanted: Callable[[str], bool],
    platform: str,
) -> None:
    """Write files from below `path` in the image `name` to `folder`, without starting a container.

    Subfolders are not created, so all files are written to `folder` itself.

    Parameters
    ----------
    folder : an empty folder.
    is_wanted : returns whether to write a file, given its name without folders.
    platform : the platform of the image.

    Raises
    ------
    FileExistsError : two files have the same name.
    CheckFailed : the engine's tar is damaged.
    """
    with (
        containers.temporary_container(engine, name, purpose="read", platform=platform) as container,
        translate_errors(f"read {path} in {name}", name=name),
        engine.without_timeout() as api,
    ):
        chunks, _ = api.get_archive(container, path)
        stream = tar_read.TarStream(iter(chunks), name=f"{path} in {name}")
        for member in stream:
            # Use only the last part of the name, so that a file cannot be written outside of `folder`.
            _, _, base_name = member.name.rpartition("/")
            if member.kind == REGULAR and is_wanted(base_name):
                with (folder / base_name).open("xb") as target:
                    target.writelines(stream.content())


def pull_image(engine: Engine, ref: str, platform: str | None, report: Reporter) -> ImageInfo:
    """Pull the image `ref` from its registry, and return what the engine knows about it.

    If `ref` has neither a tag nor a digest, the tag ``latest`` is pulled. If `platform` is None, the engine
    chooses the platform.

    Raises
    ------
    UsageError : the registry does not have the image, or not for `platform`.
    ToolFailed : the network, the permission or the space on the disk is missing.
    """
    check_name(ref)
    doing = f"pull {ref}"
    report.stage(doing)
    name, tag = _split_tag(ref)
    progress = LayerProgress(report)
    with translate_errors(doing, name=ref), engine.without_timeout() as api:
        events = api.pull(name, tag=tag, stream=True, decode=True, platform=platform)
        for event in refuse_error_events(events, doing=doing, name=ref):
            progress.add_event(event)
    if platform is None:
        return inspect(engine, ref)
    image = inspect(engine, ref, platform=full_platform(platform))
    # A tag can refer to a single image instead of a list of images for several platforms. The engine then
    # pulls this image, whatever the requested platform.
    if image.platform != full_platform(platform):
        raise UsageError(
            f"{ref} is {image.platform}; the registry has none for {platform}",
            hint=f"choose another tag; to see its platforms: docker manifest inspect {ref}",
        )
    return image


def push(engine: Engine, ref: str, report: Reporter) -> str:
    """Push the local image `ref` to the registry in its name.

    Return the digest of its manifest, ``sha256:...``.

    Raises
    ------
    UsageError : there is no such local image.
    ToolFailed : the network or the permission is missing, or the engine reports no digest.
    """
    doing = f"push {ref}"
    if find_image(engine, ref) is None:
        raise no_image_error(ref)
    report.stage(doing)
    name, tag = _split_tag(ref)
    progress = LayerProgress(report)
    digest = ""
    # A push may take an hour, hence no timeout.
    with translate_errors(doing, name=ref), engine.without_timeout() as api:
        events = api.push(name, tag=tag, stream=True, decode=True)
        for event in refuse_error_events(events, doing=doing, name=ref):
            progress.add_event(event)
            # Only one of the last events has the digest. Keep it when others follow.
            digest = _read_digest(event) or digest
    if not digest:
        raise ToolFailed(
            f"{doing}: the engine reported no digest", hint="push again; see: journalctl -u docker"
        )
    return digest


def _read_digest(event: Event) -> str:
    """Return the digest of the pushed image if `event` contains it, or ``""``.

    With its own drivers, Docker reports the digest in an object. With containerd's store, and with Podman,
    the digest is part of a text: ``latest: digest: sha256:... size: 1234``.
    """
    aux = event.get("aux") or {}
    digest = aux.get("Digest")
    if digest:
        return str(digest)
    match = _PUSHED.fullmatch(str(event.get("status") or ""))
    if match is None:
        return ""
    return match["digest"]


def full_platform(platform: str) -> str:
    """Return a platform in its full form: ``linux/arm64`` for ``arm64`` or ``linux/arm64/v8``."""
    if "/" not in platform:
        return f"linux/{platform}"
    system, arch, *_ = platform.split("/")  # without a variant such as v8
    return f"{system}/{arch}"


def add_tag(engine: Engine, image: str, ref: str) -> None:
    """Give the local image `image` the name `ref`. If another image has that name, it loses it."""
    check_name(ref)
    name, tag = _split_tag(ref)
    with translate_errors(f"tag {image} as {ref}", name=image):
        engine.api.tag(image, name, tag)


def _split_tag(ref: str) -> tuple[str, str]:
    """Split `ref` into the repository and the tag or digest: ``host/mn5:1`` -> ``host/mn5``, ``1``."""
    name = repository(ref)
    tag = ref.removeprefix(name).lstrip(":@")
    # Without a tag, the SDK would push every tag of the repository.
    return name, tag or "latest"
