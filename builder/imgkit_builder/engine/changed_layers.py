"""Read what the uppermost layers of an image change, through a container of it: seconds, and no root needed.

The engine's disk belongs to root, or to the ids of a user namespace. But an engine gives a container any
folder to read. So a container of the image gets the folders of the layers that differ, and the image's own
Python writes what shows at their paths (`show_changed`). It has no network, no capability but that of reading
files of all owners, and cannot get more.

Graph drivers, and Podman's storage, tell where their layers lie. With containerd's store only the mounts of a
running container do.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import select
import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from imgkit_builder.archive import changed_files
from imgkit_builder.archive.changed_files import ChangedFiles
from imgkit_builder.engine import containers, images
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import translated
from imgkit_builder.engine.images import ImageInfo
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, UsageError
from imgkit_entrypoints.terminal import unstyled

_INSIDE = "/dev/imgkit-layers"
"""Where the container has the folders: in a file system of its own, so that nothing shows in the image."""
_PYTHON = ("python3", "-I", "-S", "-c")
_MOUNTS = "import sys; sys.stdout.write(open('/proc/self/mountinfo').read())"
_HINT = "where the image has it, imgkit reads only what changed"
_DRIVERS = ("overlay2", "overlay", "fuse-overlayfs")
_STDOUT = 1
_HEADER = struct.Struct(">BxxxL")
"""Number of the stream and bytes, before each piece that an attached connection gives."""
_LOOK_EVERY_S = 2.0
_MOST_READ_BYTES = 1 << 20
_MOST_STDERR_BYTES = 4 << 10
_MOST_MOUNTINFO_BYTES = 4 << 20


def read(
    engine: Engine,
    image: ImageInfo,
    other: ImageInfo | None,
    layers: int,
    folder: Path,
    *,
    skip: Sequence[str],
) -> ChangedFiles:
    """What `image` shows at the paths of the layers that it or `other` has and not both.

    Without `other`, these are the uppermost `layers` ones of `image`. Paths in `skip` are left out. The tar
    is a new file in `folder`.

    Raises
    ------
    ToolFailed : this engine or image cannot be read so; `what` is the reason.
    """
    with contextlib.ExitStack() as stack:
        new = _folders(engine, image, stack)
        old = _folders(engine, other, stack) if other else ()
        if not other and len(new) != len(image.diff_ids):
            raise ToolFailed("the engine no longer has the image of the .sif")
        shared = _common_end(new, old) if other else len(new) - layers
        new, old = new[: len(new) - shared], old[: max(len(old) - shared, 0)]
        shown = {path: f"{_INSIDE}/{number}" for number, path in enumerate((*new, *old))}
        argv = (*_PYTHON, _program("show_changed.py"), _INSIDE, str(len(new)), str(len(old)), *skip)
        chunks = stack.enter_context(_output(engine, image, argv, shown))
        # A file may have holes, which are no part of the image's size.
        most_bytes = 2 * image.size_bytes + (1 << 30)
        try:
            return changed_files.read(chunks, folder / "changed.tar", most_bytes=most_bytes)
        except CheckFailed as error:
            raise ToolFailed(error.what) from error


def _program(module: str) -> str:
    return importlib.resources.files(__package__).joinpath(module).read_text(encoding="utf-8")


def _common_end(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _folders(engine: Engine, image: ImageInfo, stack: contextlib.ExitStack) -> tuple[str, ...]:
    """Folders of the layers on the engine's machine, the uppermost first, as long as `stack` is open."""
    with translated(f"inspect {image.ref}", name=image.ref):
        driver = images.storage(engine, image)
    if driver is not None:
        name, places = driver
        if name not in _DRIVERS:
            raise ToolFailed(
                f"the engine keeps its layers by {name}, not by an overlay file system",
                hint="with the driver overlay2 (Podman: overlay) imgkit reads only what changed",
            )
        found = tuple(filter(None, (places.get("UpperDir", ""), *places.get("LowerDir", "").split(":"))))
    else:
        chunks = stack.enter_context(_output(engine, image, (*_PYTHON, _MOUNTS), {}))
        text = b"".join(_at_most(chunks, _MOST_MOUNTINFO_BYTES)).decode("utf-8", "surrogateescape")
        # One is the container's own, and the classic builder has left such ones between the layers.
        found = lower_folders(text)
    if len(found) < len(image.diff_ids) or len(set(found)) != len(found):
        raise ToolFailed("the engine does not tell where the layers of the image lie")
    return found


def lower_folders(mountinfo: str) -> tuple[str, ...]:
    """The read-only folders of the overlay at ``/``, the uppermost first; empty where it is another kind.

    Names that begin without ``/`` are relative to the folder above the writable one, as containerd shortens
    them.
    """
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 5 or fields[4] != "/" or kind[0] != "overlay":
            continue
        options = [one.partition("=") for one in kind[-1].split(",")]
        lower = [one for key, _, value in options if key.startswith("lowerdir") for one in value.split(":")]
        upper = next((value for key, _, value in options if key == "upperdir"), "")
        # .../snapshots/12/fs: the folder of all snapshots
        above = upper.rpartition("/")[0].rpartition("/")[0]
        return tuple(one if one.startswith("/") else f"{above}/{one}" for one in lower if one)
    return ()


def _at_most(chunks: Iterator[bytes], most_bytes: int) -> Iterator[bytes]:
    for chunk in chunks:
        most_bytes -= len(chunk)
        if most_bytes < 0:
            raise ToolFailed("a program of the image does not end its output")
        yield chunk


@contextlib.contextmanager
def _output(
    engine: Engine, image: ImageInfo, argv: Sequence[str], shown: dict[str, str]
) -> Iterator[Iterator[bytes]]:
    """Run `argv` in a confined container, and yield its output; reading to the end checks the exit code."""
    import docker.errors

    with contextlib.ExitStack() as stack:
        api = stack.enter_context(engine.patient())
        try:
            name = stack.enter_context(
                containers.created(
                    engine,
                    image.ref,
                    argv,
                    purpose="delta",
                    platform=image.platform,
                    shown=shown,
                    user="0",
                    confined=True,
                )
            )
            with translated("start it"):
                try:
                    # Podman prepares the program already when something is attached.
                    attached = api.attach_socket(name, params={"stdout": 1, "stderr": 1, "stream": 1})
                    stack.callback(attached.close)
                    api.start(name)
                except docker.errors.APIError as error:
                    if containers.lacks_program(error):
                        raise ToolFailed("the image has no python3", hint=_HINT) from error
                    raise
        except UsageError as error:
            raise ToolFailed(error.what) from error
        yield _checked(engine, name, _frames(attached, lambda: _runs(engine, name)))


def _checked(engine: Engine, name: str, frames: Iterator[tuple[int, bytes]]) -> Iterator[bytes]:
    said = b""
    while True:
        with translated("read what python3 of the image writes"):
            stream, data = next(frames, (_STDOUT, b""))
            if not data:
                code = int(engine.api.wait(name)["StatusCode"])
                break
        if stream == _STDOUT:
            yield data
        else:
            said = (said + data)[-_MOST_STDERR_BYTES:]
    if code:
        lines = unstyled(said.decode("utf-8", "replace")).split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        raise ToolFailed(last or f"python3 of the image ended with exit code {code}")


def _frames(attached: Any, runs: Callable[[], bool]) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each stream and a piece of it, from a connection that is attached to a container.

    Not every engine ends the connection when the container ends: in silence, `runs` tells.
    """
    # A plain connection is wrapped in a reader, one by ssh is not.
    sock: socket.socket = getattr(attached, "_sock", attached)
    stream, left, header, alive = _STDOUT, 0, b"", True
    while True:
        # What TLS has decrypted already does not show in the socket.
        while not (isinstance(sock, ssl.SSLSocket) and sock.pending()):
            if select.select([sock], [], [], _LOOK_EVERY_S)[0]:
                break
            if not alive:
                return
            alive = runs()
        data = sock.recv(min(left, _MOST_READ_BYTES) or _HEADER.size - len(header))
        if not data:
            return
        if left:
            left -= len(data)
            yield stream, data
            continue
        header += data
        if len(header) == _HEADER.size:
            (stream, left), header = _HEADER.unpack(header), b""


def _runs(engine: Engine, name: str) -> bool:
    import docker.errors

    with translated("ask for the state of a container"), contextlib.suppress(docker.errors.NotFound):
        return bool(engine.api.inspect_container(name)["State"]["Running"])
    return False
