"""mksquashfs in a container, for machines that have an engine but no mksquashfs, such as laptops.

The image for it is made once from a base that the engine has, or Debian's: a container installs
squashfs-tools and becomes an image, so that no builder is needed. A tar goes to its standard input, and the
engine hands out the finished file. Nothing is mounted: the engine may be on another machine.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import io
import os
import select
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from imgkit_builder.archive.tar_read import TarStream
from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter, Silent
from imgkit_builder.engine import connection, containers
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import broken, translated
from imgkit_builder.engine.images import ImageInfo, find
from imgkit_builder.engine.transfer import pull
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, ToolFailed
from imgkit_entrypoints.terminal import unstyled

REPOSITORY = "imgkit-squash"
DEBIAN = "debian:stable-slim"
BASE_VARIABLE = "IMGKIT_SQUASH_BASE"
"""Names another base with apt, for a network without Docker Hub."""
_PURPOSE = "squash"
_READS_TAR = "{ mksquashfs -help; mksquashfs -help-all; } 2>&1 | grep -q -e '^ *-tar'"
_INSTALL = f"""set -e
if ! {_READS_TAR}; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update
  apt-get install -y --no-install-recommends squashfs-tools
  rm -rf /var/lib/apt/lists/*
fi
{_READS_TAR} || {{ echo 'mksquashfs of this base reads no tar (older than 4.5)'; exit 1; }}
"""
_RESULT = "/tmp/root.sqfs"  # noqa: S108 - in a container of its own
_BUFFER_BYTES = 1 << 20
_LOOK_EVERY_S = 1.0


@dataclass(slots=True, kw_only=True)
class EngineHelper:
    """An engine that squashes; `prepare` comes before `feed`."""

    engine: Engine
    bases: tuple[str, ...]
    """Names of images with apt; the first one that the engine has counts."""
    wanted: str = ""
    """The name of an image with apt that is used, and pulled where the engine does not have it."""
    _image: str = field(default="", init=False)
    _report: Reporter = field(default_factory=Silent, init=False)

    def __str__(self) -> str:
        facts = self.engine.facts()
        return f"{facts.product} {facts.version}"

    def prepare(self, report: Reporter) -> None:
        """Make the image with mksquashfs, unless the engine has it.

        Raises
        ------
        ToolFailed : the base cannot be pulled, or squashfs-tools not installed.
        """
        self._report = report
        if self._image:
            return
        platform = self.engine.platform
        base = next(self._found(platform), None)
        if base is None:
            name = self.wanted or DEBIAN
            which = BASE_VARIABLE if self.wanted else f"from Docker Hub; {BASE_VARIABLE}: another"
            report.note(f"the engine pulls {name}, for mksquashfs ({which})")
            base = pull(self.engine, name, platform, report)
        key = hashlib.sha256(f"{base.ref}\n{_INSTALL}".encode()).hexdigest()[:12]
        made = find(self.engine, f"{REPOSITORY}:{key}")
        if made is None:
            report.stage(f"put mksquashfs into {REPOSITORY}:{key}")
            report.note(
                f"once: a container of {_name(base)} installs squashfs-tools from its package sources"
            )
            self._install(base, key, report)
            made = find(self.engine, f"{REPOSITORY}:{key}")
        if made is None:
            raise broken("make the image with mksquashfs", "the engine does not list it")
        self._image = made.ref

    def _found(self, platform: str) -> Iterator[ImageInfo]:
        """The bases that the engine has; a label may name anything."""
        for name in (self.wanted,) if self.wanted else (*self.bases, DEBIAN):
            with contextlib.suppress(ImgkitError):
                found = find(self.engine, name)
                if found and found.platform == platform:
                    yield found

    def _install(self, base: ImageInfo, key: str, report: Reporter) -> None:
        argv = ("sh", "-c", _INSTALL)
        with containers.created(
            self.engine,
            base.ref,
            argv,
            purpose=_PURPOSE,
            platform=self.engine.platform,
            network=True,
            user="0",
        ) as name:
            lines = collections.deque[str](maxlen=10)
            with translated("install squashfs-tools in a container"), self.engine.patient() as api:
                api.start(name)
                for data in api.logs(name, stream=True, follow=True):
                    for line in unstyled(data.decode("utf-8", "replace")).splitlines():
                        report.line(line)
                        lines.append(line)
            code, _ = self._ended(name)
            if code:
                tail = "\n".join(lines)
                raise ToolFailed(
                    f"squashfs-tools cannot be installed in a container of {_name(base)}",
                    hint=f"its last lines:\n{tail}\nanother base with apt: {BASE_VARIABLE}=NAME; or install "
                    "squashfs-tools on this machine",
                )
            with translated("make the image with mksquashfs"), self.engine.patient() as api:
                changes = [f"LABEL imgkit.purpose={_PURPOSE}", "ENTRYPOINT []", "USER 0"]
                api.commit(name, repository=REPOSITORY, tag=key, changes=changes)

    def _runs(self, name: str) -> bool:
        with translated("ask for the state of mksquashfs"):
            return bool(self.engine.api.inspect_container(name)["State"]["Running"])

    def _ended(self, name: str) -> tuple[int, str]:
        """Wait for the container, and return its exit code and output."""
        with translated("wait for mksquashfs"), self.engine.patient() as api:
            code = int(api.wait(name)["StatusCode"])
            output: bytes = api.logs(name, stdout=True, stderr=True)
        return code, unstyled(output.decode("utf-8", "replace")).strip()

    @contextlib.contextmanager
    def feed(
        self, options: Sequence[str], target: Path, offset: int, judge: Callable[[int, bool, str], None]
    ) -> Iterator[IO[bytes]]:
        """Take a whole tar; on leaving, its squashfs lies at byte `offset` of `target`.

        `judge` gets the exit code, whether it ended before it had read everything, and what it said; it
        raises for a failure.
        """
        argv = ("mksquashfs", "-", _RESULT, "-tar", "-noappend", "-quiet", "-no-progress", *options)
        with containers.created(
            self.engine,
            self._image,
            argv,
            purpose=_PURPOSE,
            platform=self.engine.platform,
            user="0",
            fed=True,
        ) as name:
            with translated("start mksquashfs"):
                # What the SDK returns depends on the kind of the connection.
                attached: Any = self.engine.api.attach_socket(name, params={"stdin": 1, "stream": 1})
                self.engine.api.start(name)
            ended_early = False
            with contextlib.closing(_Input(attached, runs=lambda: self._runs(name))) as raw:
                sink = io.BufferedWriter(raw, _BUFFER_BYTES)
                try:
                    yield sink
                    sink.flush()
                    raw.end()
                except (BrokenPipeError, ConnectionResetError):
                    ended_early = True
                code, text = self._ended(name)
            judge(code, ended_early, text)
            self._fetch(name, target, offset)

    def _fetch(self, name: str, target: Path, offset: int) -> None:
        with translated("read what mksquashfs wrote"), self.engine.patient() as api:
            chunks, _ = api.get_archive(name, _RESULT)
            stream = TarStream(iter(chunks), name="the squashfs of the engine")
            member = next(iter(stream), None)
            if member is None:
                raise CheckFailed("the engine returned no squashfs", where=str(target))
            self._report.stage("receive the squashfs from the engine")
            done_bytes = 0
            with files.open_own(target, os.O_RDWR | os.O_CREAT, "r+b") as out:
                out.seek(offset)
                for piece in stream.content():
                    out.write(piece)
                    done_bytes += len(piece)
                    self._report.advance(done_bytes, member.content_bytes)
            stream.drain()


class _Input(io.RawIOBase):
    """The standard input of a container; BrokenPipeError where its program has ended."""

    def __init__(self, attached: Any, *, runs: Callable[[], bool]) -> None:
        self._attached = attached
        # A plain connection is wrapped in a reader, one by ssh is not.
        self._socket = getattr(attached, "_sock", attached)
        self._runs = runs
        self._selects = hasattr(self._socket, "setblocking")
        if self._selects:
            self._socket.setblocking(False)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not self._selects:
            self._socket.sendall(data)
            return len(data)
        while True:
            # Nobody may read any more: not every engine then ends the connection.
            if not select.select([], [self._socket], [], _LOOK_EVERY_S)[1] and not self._runs():
                raise BrokenPipeError
            with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError):
                return int(self._socket.send(data))

    def end(self) -> None:
        """Close this direction; mksquashfs stops at the end of the tar where a connection cannot."""
        with contextlib.suppress(AttributeError, OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):
            self._attached.close()


def _name(image: ImageInfo) -> str:
    return image.tag or image.ref


def squash_helper(bases: Sequence[str] = ()) -> EngineHelper | None:
    """Find the engine that squashes; None where no engine answers.

    `bases` are images with apt that the user knows, such as the base of a recipe.
    """
    named = os.environ.get(BASE_VARIABLE, "")
    try:
        engine = connection.connect()
    except ImgkitError:
        return None
    return EngineHelper(engine=engine, bases=tuple(bases), wanted=named)
