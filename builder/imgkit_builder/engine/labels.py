"""Provenance labels, set by a last instruction of the Dockerfile."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, BinaryIO, cast

from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.images import find
from imgkit_builder.image.quoting import docker_quote
from imgkit_builder.oci.manifest import CONTEXT_LABEL, CREATED_LABEL, time_of_build

if TYPE_CHECKING:
    from imgkit_builder.image.context import BuildContext

DOCKERFILE = "Dockerfile.imgkit"
"""Name of the Dockerfile with the labels; the context keeps its own beside it."""


def created(engine: Engine, context: BuildContext, *, tag: str, fresh: bool) -> str:
    """Time of creation in RFC 3339.

    That of the lock where `context` follows one, then ``SOURCE_DATE_EPOCH`` where set; else, unless
    `fresh`, the time of the image `tag` if that was built from the same context. The label then stays, so
    that a rebuild is fully cached and gives the same image id.
    """
    if context.source_date_epoch is None and not os.environ.get("SOURCE_DATE_EPOCH", "").isdigit():
        old = None if fresh else find(engine, tag)
        # The context contains the manifest, hence the base's id: an equal context means an equal base.
        if old and old.labels.get(CONTEXT_LABEL) == context.label_sha256 and old.labels.get(CREATED_LABEL):
            return old.labels[CREATED_LABEL]
    return time_of_build(context.source_date_epoch)


def instruction(values: Mapping[str, str]) -> str:
    """One LABEL line.

    Notes
    -----
    The SDK's ``labels=`` adds a step per label, 65 ms each when one of them changed (docker 20.10).
    """
    pairs = (f"{_one_line(key)}={_one_line(value)}" for key, value in values.items())
    return f"LABEL {' '.join(pairs)}\n"


def _one_line(text: str) -> str:
    return docker_quote(" ".join(text.splitlines()))


def with_dockerfile(stream: BinaryIO, text: str) -> BinaryIO:
    """The tar `stream` with the file `DOCKERFILE` inserted before its first member, as one stream."""
    data = text.encode()
    member = tarfile.TarInfo(DOCKERFILE)
    member.size, member.mode = len(data), 0o644
    head = member.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)
    return cast("BinaryIO", _Chained(io.BytesIO(head), stream))


class _Chained(io.RawIOBase):
    """One stream after the other; the HTTP library reads it in blocks."""

    def __init__(self, *streams: BinaryIO) -> None:
        self._streams = list(streams)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # typeshed: WriteableBuffer
        while self._streams:
            data = self._streams[0].read(len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)
            self._streams.pop(0).close()
        return 0

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        super().close()
