"""Images as byte streams: the archive of ``docker save``, and the flattened file tree."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

from imgkit_builder.archive import tar_read
from imgkit_builder.base.progress import Reporter, Silent
from imgkit_builder.engine import containers, platforms
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import explain, translated
from imgkit_builder.engine.images import inspect
from imgkit_entrypoints.errors import ToolFailed
from imgkit_entrypoints.terminal import unstyled

_TAIL_BYTES = 4096
_TAR_END = bytes(1024)
_MAX_FILE_BYTES = 4 << 20


@contextlib.contextmanager
def save_stream(engine: Engine, name: str, *, report: Reporter | None = None) -> Iterator[Iterator[bytes]]:
    """Yield the chunks of ``docker save``; the archive has exactly one tag.

    Notes
    -----
    Since 20.10 the engine stages all layers on its disk before it sends the first byte (4-7 s for 783 MB).
    Saving by id would lose the tag, so an image requested by id is saved under its first tag.

    Raises
    ------
    UsageError : no such image.
    ToolFailed : while iterating, when the engine fails or the stream is cut short.
    """
    image = inspect(engine, name)
    doing = f"save {name}"
    (report or Silent()).stage(f"the engine stages {image.tag or name}")
    with contextlib.ExitStack() as stack:
        with translated(doing, name=name):
            wanted = platforms.get_image(engine, image.tag or image.ref, image.platform)
            response = stack.enter_context(wanted)
        yield stack.enter_context(contextlib.closing(_whole(response, doing)))


@contextlib.contextmanager
def export_stream(engine: Engine, name: str, *, report: Reporter | None = None) -> Iterator[Iterator[bytes]]:
    """Yield the chunks of a tar of the image's flattened file tree, as ``docker export`` writes it.

    The container for it is never started and always removed.

    Raises
    ------
    UsageError : no such image.
    ToolFailed : while iterating, when the engine fails or the stream is cut short.
    """
    image = inspect(engine, name)
    doing = f"export {name}"
    (report or Silent()).stage(f"export {name}")
    # By id: a tag that moves meanwhile must not mix two images.
    with containers.created(
        engine, image.ref, ["true"], purpose="export", platform=image.platform
    ) as container:
        with translated(doing, name=name), engine.patient() as api:
            response = iter(api.export(container))
        with contextlib.closing(_whole(response, doing)) as chunks:
            yield chunks


def read_file(engine: Engine, name: str, path: str) -> bytes | None:
    """Content of the file `path` in the image `name`; None where it is missing or has over 4 MiB.

    It starts no container.

    Raises
    ------
    UsageError : no such image.
    """
    import docker.errors

    image = inspect(engine, name)
    with (
        containers.created(engine, image.ref, ["true"], purpose="read", platform=image.platform) as container,
        translated(f"read {path} in {name}", name=name),
    ):
        try:
            chunks, _ = engine.api.get_archive(container, path)
        except docker.errors.NotFound:
            return None
        return tar_read.first_file(iter(chunks), name=f"{path} in {name}", most_bytes=_MAX_FILE_BYTES)


def _whole(chunks: Iterator[bytes], doing: str) -> Generator[bytes, None, None]:
    """Yield `chunks`; raise at the end where the tar is incomplete.

    The engine has already sent its status, so it appends a later error to the data, as JSON.
    """
    tail = b""
    with translated(doing):
        for chunk in chunks:
            tail = chunk[-_TAIL_BYTES:] if len(chunk) >= _TAIL_BYTES else (tail + chunk)[-_TAIL_BYTES:]
            yield chunk
    if tail.endswith(_TAR_END):
        return
    at = tail.rfind(b'{"errorDetail"')
    if at >= 0:
        raise explain(unstyled(tail[at:].decode("utf-8", "replace")), doing=doing)
    raise ToolFailed(
        f"{doing}: the stream ended before the archive did",
        hint="the engine stopped or its disk is full: docker system df; journalctl -u docker -n 50",
    )
