"""Merge the layers of an image: verify their digests, and find out which files are visible in the image.

Threads compute the digests of the layers. If there is space for temporary files (a spool), the threads also
unpack compressed layers. Meanwhile, the main thread reads the headers of uncompressed layers. It reads the
headers of a compressed layer as soon as the layer is unpacked.

The layers are applied one after the other, and so are the members (entries of the tar) of each layer. The
result is that of ``umoci unpack`` for root. A member replaces a file of the same name, but a folder keeps its
content. A whiteout (a member called ``.wh.NAME``) deletes NAME of the layers below. Links in a path are
followed as in a container of the image.

Nothing is written to disk. A name needs about 200 bytes of memory, because the tree has an object only for
each folder, and a number for every other member.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from imgkit_builder.archive.compressed import Allowance
from imgkit_builder.archive.stored import Region, Spool, StoredImage, StoredLayer, hash_chunks
from imgkit_builder.archive.tar_read import (
    AUFS,
    BLOCK,
    CHARACTER,
    DIRECTORY,
    FIFO,
    HARD_LINK,
    OPAQUE,
    REGULAR,
    SYMLINK,
    WHITEOUT,
    Member,
    TarStream,
)
from imgkit_entrypoints.errors import CheckFailed

# The largest number of links in one path. Linux follows 40.
_MAX_LINKS = 255
# The longest name that Linux allows.
_MOST_NAME_BYTES = 255
# The longest path that Linux allows, without the final zero byte.
_MOST_PATH_BYTES = 4095
_KINDS = (REGULAR, HARD_LINK, SYMLINK, CHARACTER, BLOCK, DIRECTORY, FIFO)
_LAYER_UNIT = 1 << 40
"""The tree stores a member as a number, its id: member 7 of layer 2 has the id ``2 * _LAYER_UNIT + 7``.

An int needs a fifth of the memory of a tuple or an object, and an image can have millions of files.
"""


def _layer_and_position(member_id: int) -> tuple[int, int]:
    """Return the layer of a member and its position in the layer, which its id contains."""
    return divmod(member_id, _LAYER_UNIT)


def scan_layers(
    image: StoredImage,
    on_layer: Callable[[TarStream], None],
    *,
    threads: int = 1,
    unpack_limit_bytes: int | None = None,
    spool: Spool | None = None,
) -> StoredImage:
    """Call `on_layer` with the headers of each layer, lowest first, and verify the digests of all layers.

    The digest of a layer is that of its unpacked bytes.

    Parameters
    ----------
    spool : a folder for temporary files. If given, compressed layers are unpacked into it, so that the caller
        need not unpack them again.

    Returns
    -------
    The image that the caller should read from now on. With a `spool`, compressed layers are replaced by their
    unpacked copies.

    Raises
    ------
    CheckFailed : a layer is damaged, or its digest differs from the one in the image's configuration.
    NoRoom : the unpacked layers do not fit in `spool`.
    """
    allowance = Allowance(image.stored_bytes, image.where, unpack_limit_bytes)
    # A `with` statement is not used: after an error, it would first process all layers in the queue.
    pool = ThreadPoolExecutor(threads)
    try:
        # The threads start to hash and unpack all layers now. Meanwhile, this thread reads headers.
        jobs = _start_jobs(image, pool, spool, allowance)
        layers = _scan_in_order(image, jobs, on_layer, allowance)
    finally:
        if spool:
            # After an error, the unpacked files are not needed. Without `stop`, `shutdown` would wait until
            # the threads have unpacked everything.
            spool.stop()
        pool.shutdown(cancel_futures=True)
    return dataclasses.replace(image, layers=tuple(layers))


class _LayerJobs(NamedTuple):
    """The jobs of the threads. Equal layers share one file (region), which has only one job."""

    hashing: dict[Region, Future[str]]
    """Jobs that compute the digests of uncompressed layers."""
    unpacking: dict[Region, Future[tuple[StoredLayer, str]]]
    """Jobs that unpack compressed layers, and compute the digests of the unpacked bytes."""


def _start_jobs(
    image: StoredImage, pool: ThreadPoolExecutor, spool: Spool | None, allowance: Allowance
) -> _LayerJobs:
    """Let the threads of `pool` hash the uncompressed layers, and unpack the others if there is a `spool`."""
    jobs = _LayerJobs(hashing={}, unpacking={})
    for layer in image.layers:
        if layer.compress == "none":
            if layer.region not in jobs.hashing:
                jobs.hashing[layer.region] = pool.submit(layer.region.sha256)
        elif spool and layer.region not in jobs.unpacking:
            jobs.unpacking[layer.region] = pool.submit(spool.unpack, layer, allowance)
    return jobs


def _scan_in_order(
    image: StoredImage, jobs: _LayerJobs, on_layer: Callable[[TarStream], None], allowance: Allowance
) -> list[StoredLayer]:
    """Call `on_layer` with the headers of each layer, lowest first. Return the layers to read from now on.

    The digests of all layers are verified, which raises CheckFailed for a damaged layer.
    """
    layers = []
    for number, layer in enumerate(image.layers, 1):
        readable_layer = layer
        if layer.region in jobs.unpacking:
            readable_layer, sha256 = jobs.unpacking[layer.region].result()
            image.refuse_other_digest(number, sha256)
        layers.append(readable_layer)
        try:
            if readable_layer.compress == "none":
                with readable_layer.open(bodies=False) as stream:
                    on_layer(stream)
            else:
                sha256 = _scan_compressed(readable_layer, on_layer, allowance)
                image.refuse_other_digest(number, sha256)
        except CheckFailed:
            # If the layer has a wrong digest, report that. It explains every other error in the layer.
            _compare_digests(image, jobs.hashing, number)
            raise
    _compare_digests(image, jobs.hashing, len(layers))
    return layers


def _scan_compressed(layer: StoredLayer, on_layer: Callable[[TarStream], None], allowance: Allowance) -> str:
    """Unpack a layer once, call `on_layer` with its headers, and return the sha256 of its unpacked bytes."""
    digest = hashlib.sha256()
    with contextlib.closing(layer.plain(allowance)) as chunks:
        stream = TarStream(hash_chunks(chunks, digest), name=layer.name)
        on_layer(stream)
        # The digest includes the bytes after the last member.
        stream.drain()
    return digest.hexdigest()


def _compare_digests(image: StoredImage, hashing: Mapping[Region, Future[str]], count: int) -> None:
    """Raise CheckFailed if one of the first `count` layers is uncompressed and has a wrong digest.

    `hashing` contains the digests. The function waits for those that threads are still computing. Compressed
    layers are compared in `_scan_in_order`, because their digests are computed while they are unpacked.
    """
    for number, layer in enumerate(image.layers[:count], 1):
        if layer.region in hashing:
            image.refuse_other_digest(number, hashing[layer.region].result())


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderEntry:
    """The attributes of a folder, taken from its member in a layer."""

    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime_s: int
    xattrs: dict[str, bytes] = field(default_factory=dict)


class _Folder:
    """A folder of the tree.

    `entry` is None if no layer has a member for the folder itself. For example, a layer may contain ``a/b``
    without ``a``.
    """

    __slots__ = ("children", "entry", "layer", "name")

    def __init__(self, name: str, layer: int) -> None:
        self.name = name
        self.children: dict[str, _Node] = {}
        self.entry: FolderEntry | None = None
        self.layer = layer
        """Index of the last layer that added the folder or a file below it."""


_Node = _Folder | int
"""A folder, or the id (see `_LAYER_UNIT`) of a file, link or device. Hard links share one id."""


class SpecialFile(NamedTuple):
    """A link, device or FIFO: ``SpecialFile("etc/mtab", SYMLINK, "/proc/mounts")``."""

    path: str
    kind: bytes
    target: str
    """Target of a link. It is empty for a device or FIFO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """The folders and files of an image's layers that are visible in the image."""

    folders: tuple[tuple[str, FolderEntry | None], ...]
    """Path and attributes of each folder, parents first: ``usr``, then ``usr/lib``."""
    visible_paths: tuple[dict[int, tuple[str, ...]], ...]
    """For each layer, a map from the position of a member in the layer to the visible paths of its file.

    A file with hard links has several paths. A member that a later layer hides is not in the map.
    """


@dataclass(slots=True)
class _FollowedLink:
    """A symlink that was found in a path.

    `leaves_image` is True if the host, following the link, would leave the folder of the unpacked image. The
    targets ``/etc`` and ``../../..`` are examples. In a container, the same link stays in the image.
    """

    path: str
    target: str
    leaves_image: bool


class LayerTree:
    """The tree of files that are visible after the layers added so far. Layers are added lowest first."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._root = _Folder("", -1)
        self._layer = -1
        self._link_targets: dict[int, str] = {}
        """Targets of symlinks, by the id of the link."""
        self._device_kinds: dict[int, bytes] = {}
        """Types of devices and FIFOs, by their ids."""
        self._new_hard_links: set[tuple[int, str]] = set()
        """Hard links in the current layer to files of lower layers, as ``(id(folder), name)``.

        Such a name has the id of a member in a lower layer. A whiteout of the current layer must not remove
        it, so it is remembered here.
        """

    def add_layer(self, members: Iterable[Member]) -> None:
        """Add the next layer on top of the layers added before.

        Raises
        ------
        CheckFailed : one of the `members` is not allowed in an image, such as ``../a``. The message names it.
        """
        self._layer += 1
        # Those of the layer before are not new any more: whiteouts of this layer may remove them.
        self._new_hard_links.clear()
        # The tree knows a member by a number, its id, which contains the layer and the position in it.
        first_id = self._layer * _LAYER_UNIT
        for member_id, member in enumerate(members, first_id):
            names = self._split_member_path(member)
            if names:
                self._add_member(member, names, member_id)
            elif member.kind != DIRECTORY:  # the root folder itself is allowed, but not a file in its place
                raise self._error(member, "it replaces the root folder")

    def find_file_type(self, path: str) -> bytes | None:
        """Return the type of the file that a process in a container of the image would open at `path`.

        Links are followed. The result is a type flag such as `FIFO`, or None if `path` does not exist.

        Raises
        ------
        CheckFailed : a link in `path` leads to itself.
        """
        # `rest` are the names in the path after the last folder: nothing, a file, or what does not exist.
        folders, rest = self._resolve(path.split("/"), path)
        if not rest:
            return DIRECTORY
        if len(rest) > 1:  # a folder in the path does not exist
            return None
        member_id = folders[-1].children.get(rest[0])
        if not isinstance(member_id, int):  # there is no file
            return None
        return self._kind_of(member_id)

    def find_escape(self, path: str) -> SpecialFile | None:
        """Return the first link that leads `path` out of the image when the host follows it.

        On the host, the image is a folder with unpacked files. If it has a link ``data -> /scratch``, the
        path ``data/x`` leaves the folder, and the result is the link ``data``. A link that leads to itself is
        returned, too. If `path` stays in the image, the result is None.
        """
        links: list[_FollowedLink] = []  # `_resolve` adds each link that it follows, in order
        try:
            self._resolve(path.split("/"), path, links)
        except CheckFailed:
            # `_resolve` stopped at the last link, because it leads to itself or the path becomes too long. An
            # earlier link that leaves the image is still returned before it.
            links[-1].leaves_image = True
        for link in links:
            if link.leaves_image:
                return SpecialFile(link.path, SYMLINK, link.target)
        return None

    def special_files(self, path: str) -> Iterator[SpecialFile]:
        """Yield each link, device and FIFO at or below `path`, sorted by path. Links are not followed."""
        pending_paths = [path]
        while pending_paths:
            node_path = pending_paths.pop()
            node = self._find_node(node_path)
            if node is None:  # only possible for `path` itself
                continue
            if isinstance(node, _Folder):
                # In reverse order, because `pop` takes the last path first.
                names = sorted(node.children, reverse=True)
                pending_paths += [f"{node_path}/{name}" for name in names]
                continue
            kind = self._kind_of(node)
            if kind != REGULAR:
                yield SpecialFile(node_path, kind, self._link_targets.get(node, ""))

    def dissolve(self) -> MergePlan:
        """Return the folders and files that are visible in the image, and empty the tree.

        Each folder or file is removed from the tree when it is added to the result, because the tree and the
        result may not fit in memory together. The tree cannot be used afterwards.
        """
        folders: list[tuple[str, FolderEntry | None]] = []
        visible_paths: tuple[dict[int, tuple[str, ...]], ...] = tuple({} for _ in range(self._layer + 1))
        # A list instead of recursion: an image may have folders deeper than Python's recursion limit.
        pending_folders: list[tuple[str, _Folder]] = [("", self._root)]
        while pending_folders:
            folder_path, folder = pending_folders.pop()
            if folder_path:  # the root folder has no entry
                folders.append((folder_path, folder.entry))
            for path, node in _take_children(folder_path, folder):
                if isinstance(node, _Folder):
                    pending_folders.append((path, node))
                    continue
                # A node that is not a folder is the id of a member.
                layer, position = _layer_and_position(node)
                # Hard links share one id, so the file may already have other paths. Their order matters only
                # in that it must be the same each time: the first becomes the file, the others link to it.
                known_paths = visible_paths[layer].get(position, ())
                visible_paths[layer][position] = (path, *known_paths)
        return MergePlan(folders=tuple(folders), visible_paths=visible_paths)

    def _find_node(self, path: str) -> _Node | None:
        """Return the folder or member id at `path`, or None if there is nothing. Links are not followed."""
        node: _Node | None = self._root
        for name in path.split("/"):
            if not isinstance(node, _Folder):
                return None
            node = node.children.get(name)
        return node

    def _kind_of(self, member_id: int) -> bytes:
        """Return the type of a member that is not a folder, such as `SYMLINK`."""
        # Only the rare types are recorded. Every other member is a regular file.
        if member_id in self._link_targets:
            return SYMLINK
        return self._device_kinds.get(member_id, REGULAR)

    def _split_member_path(self, member: Member) -> list[str]:
        """Return the names in the path of `member`: ``./usr/lib`` -> ``["usr", "lib"]``.

        Raises
        ------
        CheckFailed : the path contains ``..``, or a name that is too long for Linux.
        """
        names = _split_path(member.name)
        if ".." in names:
            raise self._error(member, "its name leads out of the image with '..'")
        # A shortcut, because encoding takes time. A character has at most 4 bytes, so a path below a quarter
        # of the limit cannot contain a name that is too long.
        if len(member.name) > _MOST_NAME_BYTES // 4:
            name_bytes = [len(name.encode("utf-8", "surrogateescape")) for name in names]
            longest_bytes = max(name_bytes, default=0)
            if longest_bytes > _MOST_NAME_BYTES:
                reason = f"a name of {longest_bytes} bytes, and Linux has at most {_MOST_NAME_BYTES}"
                raise self._error(member, reason)
        return names

    def _add_member(self, member: Member, names: list[str], member_id: int) -> None:
        """Put `member`, an entry of the layer's tar, into the tree at the path `names`.

        If it is a whiteout, delete what it hides instead. A whiteout is a mark for a deleted file:
        ``etc/.wh.motd`` removes ``etc/motd`` of the layers below. `WHITEOUT` is the prefix ``.wh.``.

        Parameters
        ----------
        member_id : the number that the tree stores for a file. It contains the layer and the position in it.

        Raises
        ------
        CheckFailed : the member is not allowed in an image.
        """
        *folder_names, name = names
        # `folders` exist in the tree, from the root on. `rest` are the names after the last of them.
        folders, rest = self._resolve(folder_names, member.name)
        if name == WHITEOUT:
            raise self._error(member, "a whiteout without a name")
        if name.startswith(WHITEOUT):
            if not rest:  # otherwise the folder of the whiteout does not exist
                self._delete_hidden(folders[-1], name)
            return
        if member.kind not in _KINDS:
            raise self._error(member, f"its type {member.kind!r} is not file, folder, link, device or FIFO")
        # Create the folders before looking up the target of a hard link, because a new folder may replace the
        # target. For example, after the file "a", the hard link "a/a" to "a" makes "a" a folder.
        folder = self._make_folders(folders, rest)
        if member.kind == DIRECTORY:
            self._put_folder(folder, name, member)
            return
        if member.kind == HARD_LINK:
            self._put_hard_link(folder, name, member)
            return
        folder.children[name] = member_id
        # A number has no type. `_kind_of` takes every id that is in neither dict for a regular file.
        if member.kind == SYMLINK:
            self._link_targets[member_id] = member.link
        elif member.kind != REGULAR:
            self._device_kinds[member_id] = member.kind

    def _put_folder(self, parent: _Folder, name: str, member: Member) -> None:
        """Put the folder that `member` describes into `parent`.

        An existing folder of this name keeps its content. An existing file or link is replaced.
        """
        folder = parent.children.get(name)
        if not isinstance(folder, _Folder):
            folder = _Folder(name, self._layer)
            parent.children[name] = folder
        folder.layer = self._layer  # whiteouts of the same layer keep the folder
        folder.entry = FolderEntry(
            mode=member.mode & 0o7777,
            uid=member.uid,
            gid=member.gid,
            mtime_s=member.mtime_s,
            xattrs=member.xattrs,
        )

    def _put_hard_link(self, folder: _Folder, name: str, member: Member) -> None:
        """Add `name` in `folder` as another name of the file to which the hard link `member` leads.

        Raises
        ------
        CheckFailed : the file does not exist, or the new link would replace it.
        """
        target_id = self._find_link_target(folder, name, member)
        if target_id is None:
            raise self._error(member, f"a hard link to {member.link!r}, where there is no file before it")
        folder.children[name] = target_id
        # If the file is of a lower layer, remember that this name belongs to the current one, so that
        # whiteouts of the current layer do not remove the name.
        file_layer, _ = _layer_and_position(target_id)
        if file_layer != self._layer:
            # Python may give the id() of a replaced folder to a new one. That does no harm, because every
            # name in a new folder belongs to the current layer anyway.
            self._new_hard_links.add((id(folder), name))

    def _find_link_target(self, folder: _Folder, name: str, member: Member) -> int | None:
        """Return the id of the file to which the hard link `member` leads.

        Return None if the file does not exist, or if the new link, `name` in `folder`, would replace it.
        """
        target_names = _split_path(member.link)
        if not target_names or ".." in target_names:
            return None
        *folder_names, target_name = target_names
        # Links to folders are followed, but `target_name` itself is not: a hard link may lead to a symlink.
        # `folders` are the folders on the way, from the root on.
        folders, rest = self._resolve(folder_names, member.name)
        if rest:  # one of `folder_names` is not a folder
            return None
        target_folder = folders[-1]
        target_id = target_folder.children.get(target_name)
        if not isinstance(target_id, int):  # there is nothing, or a folder
            return None
        # A link with the path of its target would replace the file by a link to itself.
        if target_folder is folder and target_name == name:
            return None
        # The new link replaces whatever has its name. This must not be a folder that contains the target.
        if folder.children.get(name) in folders:
            return None
        return target_id

    def _resolve(
        self, names: list[str], path: str, links: list[_FollowedLink] | None = None
    ) -> tuple[list[_Folder], list[str]]:
        """Follow a path and its links as a process in a container of the image would.

        Parameters
        ----------
        names : the names in the path: ``["usr", "lib", "a"]``.
        path : the path, for messages.
        links : a list to which each link in the path is added.

        Returns
        -------
        The existing folders in the path, beginning with the root, and the rest of the names. The rest may be
        a file, or what does not exist. If ``usr`` is a folder without ``lib``, the path ``usr/lib/a`` gives
        the root and ``usr``, and the names ``lib`` and ``a``.

        Raises
        ------
        CheckFailed : the path has too many links, or it is too long after they are followed.
        """
        folders = [self._root]
        rest: list[str] = []
        # In reverse order, so that `pop` returns the next name, and `+=` puts the target of a link before the
        # remaining names.
        pending_names = names[::-1]
        link_count = 0
        while pending_names:
            name = pending_names.pop()
            if name in ("", "."):
                continue
            if name == "..":
                _go_up(folders, rest, links)
                continue
            node = None
            if not rest:
                node = folders[-1].children.get(name)
            if isinstance(node, _Folder):
                folders.append(node)
                continue
            target = None
            if node is not None:
                target = self._link_targets.get(node)
            if target is None:  # the name does not exist, or is a file
                rest.append(name)
                continue
            link_count += 1
            is_absolute = target.startswith("/")
            if links is not None:
                link_path = "/".join([folder.name for folder in folders[1:]] + [name])
                links.append(_FollowedLink(link_path, target, leaves_image=is_absolute))
            if link_count > _MAX_LINKS:
                raise CheckFailed(f"{path}: its folder is a link that leads to itself", where=self._where)
            if is_absolute:  # continue at the root
                del folders[1:]
            pending_names += target.split("/")[::-1]
        if link_count:
            path_names = [folder.name for folder in folders] + rest
            if len("/".join(path_names)) >= _MOST_PATH_BYTES:
                raise CheckFailed(f"{path}: too many links in its path", where=self._where)
        return folders, rest

    def _make_folders(self, folders: list[_Folder], new_names: list[str]) -> _Folder:
        """Create the folders `new_names` below the last of `folders`, and return the innermost folder.

        All folders in the path are marked as used by the current layer. Whiteouts of this layer then keep
        them, because a whiteout removes only files of lower layers.
        """
        for folder in folders:
            folder.layer = self._layer
        for name in new_names:
            # The new folder replaces a file of this name, or a link whose target does not exist.
            child = _Folder(name, self._layer)
            folder.children[name] = child
            folder = child
        return folder

    def _delete_hidden(self, folder: _Folder, whiteout: str) -> None:
        """Delete the files of lower layers that the mark `whiteout` in `folder` hides.

        ``.wh.a`` removes ``a``, and ``.wh..wh..opq`` removes everything in the folder. Files that the current
        layer has added are kept, even if it added them before the mark. Other names that begin with
        ``.wh..wh.`` belong to the file system AUFS, and are ignored.
        """
        # `OPAQUE` also begins with `AUFS`, so it must be compared first.
        if whiteout == OPAQUE:
            pending = [(folder, name) for name in folder.children]
        elif whiteout.startswith(AUFS):
            return
        else:
            pending = [(folder, whiteout.removeprefix(WHITEOUT))]
        while pending:
            parent, name = pending.pop()
            node = parent.children.get(name)
            if node is None:  # there is nothing to hide
                continue
            if not self._is_of_current_layer(parent, name, node):
                del parent.children[name]
            elif isinstance(node, _Folder):
                # Keep the folder, but hide what it still has from lower layers.
                pending += [(node, child_name) for child_name in node.children]

    def _is_of_current_layer(self, parent: _Folder, name: str, node: _Node) -> bool:
        """Return whether the current layer has added `node`, which is called `name`, to the folder `parent`.

        A folder also counts as added if the current layer has added only something in it.
        """
        if isinstance(node, _Folder):
            return node.layer == self._layer
        file_layer, _ = _layer_and_position(node)
        # A new name of an old file has the id of the file, which is that of a lower layer.
        return file_layer == self._layer or (id(parent), name) in self._new_hard_links

    def _error(self, member: Member, reason: str) -> CheckFailed:
        return CheckFailed(
            f"{member.name!r} in a layer of the image: {reason}",
            where=self._where,
            hint="do not use this image if you do not know its author",
        )


def _take_children(folder_path: str, folder: _Folder) -> Iterator[tuple[str, _Node]]:
    """Remove the children of `folder` one after the other, and yield each with its path."""
    prefix = f"{folder_path}/" if folder_path else ""
    # Sorted, so that the order of members in a layer does not change the result. In reverse, because the
    # caller begins with the folder that it received last.
    for name in sorted(folder.children, reverse=True):
        yield prefix + name, folder.children.pop(name)


def _go_up(folders: list[_Folder], rest: list[str], links: list[_FollowedLink] | None) -> None:
    """Apply the name ``..`` to a path: remove the last of `rest`, or else of `folders`.

    At the root, nothing is removed. On the host, such a path leaves the image, so the last link is marked.
    """
    if rest:
        rest.pop()
    elif len(folders) > 1:
        folders.pop()
    elif links:
        links[-1].leaves_image = True


def _split_path(path: str) -> list[str]:
    """Return the names in `path`: ``./usr//lib`` -> ``["usr", "lib"]``."""
    return [name for name in path.split("/") if name not in ("", ".")]
