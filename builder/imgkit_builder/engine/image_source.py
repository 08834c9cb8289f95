"""One image of the engine, as the source of a .sif, a delta or a lock: streams, files, layers on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_builder.archive import tar_read
from imgkit_builder.archive.changed_files import ChangedFiles
from imgkit_builder.archive.tar_read import REGULAR
from imgkit_builder.base.progress import Reporter, Silent
from imgkit_builder.engine import changed_layers, containers, images
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import explain, translated
from imgkit_builder.engine.images import ImageInfo, config_json, find, inspect, with_layers
from imgkit_builder.oci.config import ImageConfig, parse_config
from imgkit_entrypoints.errors import ToolFailed
from imgkit_entrypoints.terminal import unstyled


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalImage:
    """An image on a connected engine; `local_image` finds it.

    Everything is read by the image's id: a tag that moves meanwhile cannot mix two images.
    """

    engine: Engine
    name: str
    """Its first tag, or else the requested name."""
    info: ImageInfo
    config: ImageConfig

    @property
    def size_bytes(self) -> int:
        """Size of its layers, uncompressed."""
        return self.info.size_bytes

    def save(self) -> AbstractContextManager[Iterator[bytes]]:
        """Stream ``docker save``; the archive names the image's tag where it has one."""
        return save_stream(self.engine, self.info.tag or self.info.ref)

    def export(self) -> AbstractContextManager[Iterator[bytes]]:
        """Stream ``docker export`` of a container made of the image."""
        return export_stream(self.engine, self.info.ref)

    def folders(self, diff_ids: Sequence[str]) -> tuple[Path, ...] | None:
        """Folders in which the engine keeps the layers `diff_ids`; None where they cannot be read."""
        return layer_folders(self.engine, diff_ids)

    def why_unreadable(self) -> str:
        """The reason why `folders` gives None."""
        return why_unreadable(self.engine)

    def changed(
        self, other: LocalImage | None, layers: int, folder: Path, *, skip: Sequence[str]
    ) -> ChangedFiles:
        """What shows at the paths of the layers that this image or `other` has and not both.

        Without `other`, these are the last `layers` ones. Paths in `skip` are left out; the tar goes into
        `folder`.

        Raises
        ------
        ToolFailed : a container cannot read them; `what` is the reason.
        """
        old = other.info if other else None
        return changed_layers.read(self.engine, self.info, old, layers, folder, skip=skip)

    def fetch(self, paths: Sequence[str], folder: Path) -> tuple[Path | None, ...]:
        """Write a tar of each of `paths` into `folder`; the result has None for a missing path."""
        return fetch(self.engine, self.info.ref, paths, folder, platform=self.info.platform)

    def other(self, image_id: str, diff_ids: Sequence[str]) -> LocalImage | None:
        """Find another image of the same engine by its id or else by its layers; None where there is none."""
        # An engine with containerd's store does not find an image by the id that a .sif records.
        info = find(self.engine, image_id) or with_layers(self.engine, diff_ids)
        return _opened(self.engine, image_id, info) if info else None


def local_image(engine: Engine, name: str) -> LocalImage:
    """Find the image `name` (tag or id) on `engine`.

    Raises
    ------
    UsageError : the engine has no such image.
    CheckFailed : the image has no layers.
    """
    return _opened(engine, name, inspect(engine, name))


def _opened(engine: Engine, name: str, info: ImageInfo) -> LocalImage:
    return LocalImage(
        engine=engine,
        name=info.tag or name,
        info=info,
        config=parse_config(config_json(engine, info), where=name, image_id=info.id),
    )


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
            wanted = images.get_image(engine, image.tag or image.ref, image.platform)
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
    """Return the content of the file `path` in the image `name`; None where it is missing or has over 4 MiB.

    It starts no container.

    Raises
    ------
    UsageError : no such image.
    """
    image = inspect(engine, name)
    with containers.created(
        engine, image.ref, ["true"], purpose="read", platform=image.platform
    ) as container:
        return containers.read_file(engine, container, path, most_bytes=_MAX_FILE_BYTES)


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


def fetch(
    engine: Engine, name: str, paths: Sequence[str], folder: Path, *, platform: str
) -> tuple[Path | None, ...]:
    """Write a tar of each of `paths` into `folder`, None for a missing path; starts no container."""
    import docker.errors

    found: list[Path | None] = []
    with containers.created(engine, name, ["true"], purpose="read", platform=platform) as container:
        for number, path in enumerate(paths):
            target = folder / f"copy-{number}.tar"
            with translated(f"read {path} in {name}", name=name), engine.patient() as api:
                try:
                    chunks, _ = api.get_archive(container, path)
                except docker.errors.NotFound:
                    found.append(None)
                    continue
                with target.open("wb") as stream:
                    stream.writelines(chunks)
            found.append(target)
    return tuple(found)


def store_files(
    engine: Engine, name: str, path: str, folder: Path, *, wanted: Callable[[str], bool], platform: str
) -> None:
    """Write the files below `path` whose names are `wanted` into the new `folder`, flat; starts no container.

    Raises
    ------
    FileExistsError : two files have one name.
    CheckFailed : the engine's tar is damaged.
    """
    with (
        containers.created(engine, name, ["true"], purpose="read", platform=platform) as container,
        translated(f"read {path} in {name}", name=name),
        engine.patient() as api,
    ):
        stream = tar_read.TarStream(iter(api.get_archive(container, path)[0]), name=f"{path} in {name}")
        for member in stream:
            file = member.name.rpartition("/")[2]
            if member.kind == REGULAR and wanted(file):
                with (folder / file).open("xb") as target:
                    target.writelines(stream.content())


_SHIFTED = ("name=rootless", "name=userns")
"""Security options that change the owners of files on disk."""


def layer_folders(engine: Engine, diff_ids: Sequence[str]) -> tuple[Path, ...] | None:
    """The overlay2 folder of each layer, lowest first; None where they cannot be read.

    Notes
    -----
    The engine names a layer by its chain: the digest of all layers up to it. The folder of that name contains
    the layer's own digest and the name of the overlay2 folder, whose content never changes.
    """
    about = engine.info
    if _obstacle(engine, about):
        return None
    root, chain, found = Path(str(about.get("DockerRootDir"))), "", []
    for diff_id in diff_ids:
        chain = _chained(chain, diff_id)
        known = root / "image/overlay2/layerdb/sha256" / chain.removeprefix("sha256:")
        try:
            if (known / "diff").read_text(encoding="ascii") != diff_id:
                return None
            folder = root / "overlay2" / (known / "cache-id").read_text(encoding="ascii") / "diff"
        except OSError:
            return None
        if not folder.is_dir():
            return None
        found.append(folder)
    return tuple(found)


def why_unreadable(engine: Engine) -> str:
    """The reason why `layer_folders` finds nothing."""
    about = engine.info
    return _obstacle(engine, about) or f"{about.get('DockerRootDir')} has no folder of its layers"


def _obstacle(engine: Engine, about: dict[str, Any]) -> str:
    if not engine.facts().is_here:
        return "the engine is on another machine"
    if about.get("Driver") != "overlay2":
        return f"the engine keeps its layers by {about.get('Driver')}, not overlay2"
    if any(option.startswith(_SHIFTED) for option in about.get("SecurityOptions") or ()):
        return "the engine shifts the owners of files on its disk"
    return "" if os.geteuid() == 0 else "only root can read the engine's layers on its disk"


def _chained(chain: str, diff_id: str) -> str:
    """The chain id of the layers up to `diff_id`, as the OCI image specification defines it."""
    if not chain:
        return diff_id
    return f"sha256:{hashlib.sha256(f'{chain} {diff_id}'.encode()).hexdigest()}"
