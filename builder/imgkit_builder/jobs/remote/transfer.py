"""Send a folder to the store on a remote with rsync, and try again when the connection is lost.

The folder is received in ``.incoming`` beside its target, where a later attempt can resume the transfer. When
all of it has arrived and has been checked, a single rename gives it its name. So the target is either
complete or does not exist. Two transfers at the same time write the same bytes to the same files, so they do
not harm each other.

An older image on the remote is the basis of a new one: rsync sends only the blocks that the basis does not
contain. This module relies on the following behavior of rsync, which was observed with version 3.2.7:

* rsync looks for the basis under the same file name, in the folder of ``--copy-dest``.
* That folder must be an absolute path. Debian's 3.2.7 and 3.4.3 fail with a relative path that contains
  ``..``.
* After a lost connection, rsync uses the partial file as the basis, and would send all blocks that are
  missing there. So `_JOIN` appends the real basis to the partial file before the next attempt. It appends the
  complete basis. rsync changes the partial file in place, and uses no block before the position that it
  writes. If only the end of the basis were appended, blocks that have moved towards the end of the new image
  could not be used.
* Without ``--ignore-times``, rsync would copy a basis of the same size and time instead of sending the image.
"""

from __future__ import annotations

import re
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.base.sizes import size_text
from imgkit_builder.data.folder import DataFolder
from imgkit_builder.jobs.remote import rsync
from imgkit_builder.jobs.remote.connection import Connection, Cut, ScriptFailed, unreadable_answer
from imgkit_builder.jobs.remote.rsync import Transferred
from imgkit_builder.jobs.remote.store import IMAGE_JSON, SIF, RemoteImage, free_bytes
from imgkit_entrypoints.errors import CheckFailed

ATTEMPTS = 4
"""The number of attempts in a row without progress after which a transfer gives up."""
_WAIT_S = 60
"""Seconds for which a new attempt waits at most, until the rsync of the earlier attempt has ended."""
_FULL_DISK = re.compile(r"(No space left on device|Disk quota exceeded) \(\d+\)")
"""The text and number of a system error, as rsync prints them: ``mkstemp "..." failed: TEXT (28)``."""
_DATA_MODES = "--chmod=Du+rwx,Fa-w"
"""Option of rsync that makes files read-only and keeps folders writable for the user.

All runs read the same data files, and a later version of the data has hard links to them. So nothing may
change the files.
"""

# This script prepares the folder that receives the files. After a lost connection, rsync on the remote moves
# its temporary file .image.sif.XXXXXX to the folder for partial files, either at once or at its time limit.
# If rsync was killed, the temporary file stays beside that folder, and the script moves it. The file `joined`
# contains two numbers: the size of the partial image before `_JOIN` appended the basis, and its size
# afterwards.
_PREPARE = f"""\
umask 077
cd -- "$home" || exit 1
arrived=0
if [ -d "$folder/.incoming/$name" ]; then
    arrived=$(($(du -sk "$folder/.incoming/$name" | cut -f 1) * 1024))
fi
mkdir -p -- "$folder/.incoming/$name" && cd -- "$folder/.incoming/$name" || exit 1
while [ "$wait" -gt 0 ] && [ -n "$(find . -maxdepth 1 -name ".{SIF}.*" -mmin -1)" ]; do
    sleep 1
    wait=$((wait - 1))
done
# rsync goes on in the part of a file, which its mode may forbid: code is read-only.
find . -type f -path "*/$partial/*" -exec chmod u+w {{}} + 2> /dev/null
for file in .{SIF}.*; do
    if [ -f "$file" ]; then mkdir -p "$partial" && mv -f -- "$file" "$partial/{SIF}"; fi
done
echo "disk $(df -Pk . | tail -n 1)"
if [ -f "$partial/{SIF}" ]; then
    arrived=$(wc -c < "$partial/{SIF}")
    read -r before after 2> /dev/null < "$partial/joined"
    if [ "$after" = "$((arrived))" ]; then arrived=$before; fi
fi
echo "arrived $((arrived))"
"""
_PREPARED = re.compile(rb"disk (?P<df_row>.*)\narrived (?P<arrived_bytes>\d{1,15})\n")
"""The answer of `_PREPARE`: the free space, and how many bytes have arrived."""
_JOIN = f"""\
cd -- "$home/$folder/.incoming/$name/$partial" 2> /dev/null && [ -f {SIF} ] || exit 0
basis_file=$home/$folder/$basis/{SIF}
before=$(($(wc -c < {SIF}))) && added=$(($(wc -c < "$basis_file"))) || exit 1
read -r _ after 2> /dev/null < joined
if [ "$before" != "$after" ]; then
    cat -- "$basis_file" >> {SIF} && echo "$before $((before + added))" > joined
fi
"""
# This script checks the digest of the root partition, and renames the folder. Another transfer of the same
# content may do so at any moment. Then mv fails, and the folder that already has the name is used. The disk
# is written while the digest is computed. openssl is preferred: on many systems, sha256sum does not use the
# processor's instructions for SHA-256 and takes four times the processor time.
_PUBLISH = f"""\
cd -- "$home/$folder" || exit 1
if [ -d ".incoming/$name" ]; then
    find ".incoming/$name" -name "$partial" -prune -exec rm -rf {{}} +
    if [ -n "$sum" ]; then
        touch -c -- ".incoming/$name/{SIF}"
        sync -- ".incoming/$name/{SIF}" > /dev/null 2>&1 &
        digest='openssl dgst -sha256 -r'
        if [ -z "$(: | $digest 2> /dev/null)" ]; then digest=sha256sum; fi
        set -- $(tail -c "+$start" ".incoming/$name/{SIF}" | head -c "$length" | $digest)
        wait
        if [ "$1" != "$sum" ]; then rm -rf -- ".incoming/$name" && echo different; exit; fi
    fi
    touch -c -- ".incoming/$name"
    mv -T -f -- ".incoming/$name" "$name" 2> /dev/null || rm -rf -- ".incoming/$name"
fi
if [ -e "$name" ]; then echo published; else echo "$name cannot be made" >&2; exit 1; fi
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A folder to send, and how to send it."""

    path: Path
    label: str
    """The name of the content in messages: ``image``, ``data``, ``code`` or ``entry points``."""
    size_bytes: int
    options: tuple[str, ...]
    """Options of rsync for this kind of content, which begin with ``-rpt``.

    ``-a`` is not used because it would also keep the owner. If the user on the remote is root, the files
    would get a user id of this machine.
    """
    check: Callable[[], None] | None = None
    """A function that raises an error if the content has changed since the transfer began."""
    may_be_linked: bool = False
    """Whether most files can become hard links to files of an earlier folder, which need no space."""
    is_prepared: bool = False
    """Whether the remote already has an empty folder for the content in ``.incoming``."""
    image: RemoteImage | None = None
    """The description of the image in the folder, or None if the folder contains no image."""
    basis: str = ""
    """Name of an older image on the remote, or "". Blocks that it shares with the new image are not sent."""


def send_folder(
    connection: Connection,
    path: Path,
    *,
    label: str,
    size_bytes: int,
    home: str,
    target: str,
    similar: tuple[str, ...] = (),
    is_prepared: bool = False,
    report: Reporter,
) -> Transferred | None:
    """Send the folder `path` to the remote, where its path is ``HOME/TARGET``.

    Parameters
    ----------
    label : the name of the content in messages.
    size_bytes : the size of the content.
    home : the absolute path of imgkit's folder on the remote.
    target : a path of the form ``FOLDER/NAME``, relative to `home`.
    similar : names of folders beside the target. Files that they have in common with `path` are not sent, but
        become hard links.
    is_prepared : whether the remote already has an empty folder for the content in ``.incoming``.

    Returns
    -------
    The number and the size of the files that were sent. None if rsync does not report them.

    Raises
    ------
    Cut : the connection was lost too often. The same call resumes the transfer later.
    ToolMissing : rsync is missing on this machine or on the remote.
    CheckFailed : the file system of the remote has too little free space.
    ScriptFailed : a command on the remote failed.
    """
    links = tuple(f"--link-dest={rsync.FOLDER}/{name}" for name in similar)
    options = ("-rpt", "--links", "--checksum", *links)
    source = Source(path=path, label=label, size_bytes=size_bytes, options=options, is_prepared=is_prepared)
    return _send_and_publish(connection, source, home=home, target=target, report=report)


def send_data(
    connection: Connection, folder: DataFolder, *, home: str, earlier: tuple[str, ...], report: Reporter
) -> Transferred | None:
    """Send a data folder to the store on the remote.

    Parameters
    ----------
    home : the absolute path of imgkit's folder on the remote.
    earlier : names of earlier versions of the folder. A file that has the same size and time in an earlier
        version is not sent, but becomes a hard link to that file.

    Returns
    -------
    The number and the size of the files that were sent. None if rsync does not report them.

    Raises
    ------
    Cut : the connection was lost too often. The same call resumes the transfer later.
    ToolMissing : rsync is missing on this machine or on the remote.
    CheckFailed : the file system of the remote has too little free space.
    ScriptFailed : a command on the remote failed.
    UsageError : a file has changed since the folder was listed.
    """
    links = tuple(f"--link-dest={rsync.FOLDER}/{name}" for name in earlier)
    source = Source(
        path=folder.path,
        label="data",
        size_bytes=folder.size_bytes,
        options=("-rpt", "--links", _DATA_MODES, *links),
        check=folder.refuse_changed,
        may_be_linked=bool(earlier),
    )
    return _send_and_publish(connection, source, home=home, target=f"data/{folder.name}", report=report)


def send_image(
    connection: Connection,
    sif: Path,
    image: RemoteImage,
    *,
    home: str,
    basis: RemoteImage | None,
    report: Reporter,
) -> Transferred | None:
    """Send a .sif to the store on the remote, together with the file that describes it.

    Parameters
    ----------
    sif : the local .sif.
    image : the description of `sif`.
    home : the absolute path of imgkit's folder on the remote.
    basis : an older image on the remote. rsync uses its blocks instead of sending them. With None, all blocks
        are sent.

    Returns
    -------
    The number and the size of the files that were sent. None if rsync does not report them.

    Raises
    ------
    Cut : the connection was lost too often. The same call resumes the transfer later.
    ToolMissing : rsync is missing on this machine or on the remote.
    CheckFailed : the file system of the remote has too little free space, or the file there differs from
        `image`, for example because `sif` has changed.
    ScriptFailed : a command on the remote failed.
    """
    options = ["-rpt", "--copy-links", "--ignore-times"]
    if basis is not None:
        options.append(f"--copy-dest={rsync.FOLDER}/{basis.name}")
    with tempfile.TemporaryDirectory(prefix="imgkit-") as work:
        folder = Path(work, image.name)
        folder.mkdir()
        (folder / SIF).symlink_to(sif.absolute())
        files.write_file(folder / IMAGE_JSON, image.to_json().decode())
        # rsync follows the link because of --copy-links, so the .sif is not copied here.
        source = Source(
            path=folder,
            label="image",
            size_bytes=image.sif_bytes,
            options=tuple(options),
            image=image,
            basis=basis.name if basis else "",
        )
        return _send_and_publish(connection, source, home=home, target=f"images/{image.name}", report=report)


def _send_and_publish(
    connection: Connection, source: Source, *, home: str, target: str, report: Reporter
) -> Transferred | None:
    """Send `source` and publish it as `target`. Connect again as long as the transfer makes progress.

    To publish means to check what has arrived in ``.incoming``, and to give it its name in the store, which
    is imgkit's folder on the remote.

    Parameters
    ----------
    home : the absolute path of the store.
    target : a path of the form ``FOLDER/NAME``, relative to `home`.

    Returns
    -------
    The number and the size of the files that were sent. None if rsync does not report them.

    Raises
    ------
    Cut : the first connection was lost, or `ATTEMPTS` connections in a row brought no progress.
    ToolMissing, CheckFailed, ScriptFailed : another attempt would not help, so there is none.
    """
    folder, _, name = target.rpartition("/")
    script_variables = {"home": home, "folder": folder, "name": name, "partial": rsync.PARTIAL}
    failures = 0  # connections in a row that were lost without progress
    most_arrived_bytes = -1  # at the start of any attempt so far; -1 until an attempt has reached the remote
    while True:
        try:
            arrived_bytes = 0
            # A folder that is prepared and empty saves the first attempt a round trip. Any later attempt must
            # see what has arrived.
            if failures or not source.is_prepared:
                arrived_bytes = _prepare_incoming(connection, script_variables, source, is_retry=failures > 0)
            if arrived_bytes > most_arrived_bytes:  # progress, so the count of failures starts again
                failures = 0
                most_arrived_bytes = arrived_bytes
            return _send_rest(connection, script_variables, source, arrived_bytes, report)
        except Cut as error:
            failures += 1
            # If not even the first connection succeeded, the address is probably wrong, and further attempts
            # would not help.
            if most_arrived_bytes < 0 or failures >= ATTEMPTS:
                raise _final_error(error, can_resume=most_arrived_bytes > 0) from error
            report.note(f"the connection was lost, and imgkit connects again: {error.what}")
        time.sleep(failures - 1)  # no pause after the first failure


def _final_error(last_error: Cut, *, can_resume: bool) -> Cut:
    """Return the error after the last attempt to send files.

    Parameters
    ----------
    can_resume : whether a part of the files has arrived, from which the same command goes on later.
    """
    hint = str(last_error.hint)
    if can_resume:
        hint += "; the same command resumes the transfer"
    return Cut(last_error.what, where=last_error.where, hint=hint)


def _send_rest(
    connection: Connection, values: Mapping[str, str], source: Source, arrived_bytes: int, report: Reporter
) -> Transferred | None:
    """Send what the remote does not have yet, and publish the folder.

    Parameters
    ----------
    values : the variables of the scripts on the remote: ``home``, ``folder``, ``name`` and ``partial``.
    arrived_bytes : how many bytes have arrived in earlier attempts.

    Raises
    ------
    Cut : the connection was lost.
    """
    remote = connection.remote.name
    if arrived_bytes:
        report.note(f"{size_text(arrived_bytes)} of {size_text(source.size_bytes)} were sent before")
    report.stage(f"send the {source.label} to {remote}")
    transferred = _send_files(connection, values, source, report)
    if source.check is not None:
        # Raise an error if the content has changed while it was sent. This comes before `_publish`, because
        # jobs can use the content as soon as it is published.
        source.check()
    report.stage(f"check the {source.label} on {remote}")
    _publish(connection, values, source)
    return transferred


def _publish(connection: Connection, values: Mapping[str, str], source: Source) -> None:
    """Check what has arrived in ``.incoming`` on the remote, and give the folder its name in the store.

    Parameters
    ----------
    values : the variables of the script on the remote: ``home``, ``folder``, ``name`` and ``partial``.

    Raises
    ------
    CheckFailed : the root partition of the image on the remote has a wrong digest. The script has removed the
        folder.
    ToolFailed : the remote's answer cannot be read.
    """
    remote = connection.remote.name
    output = connection.run(_PUBLISH, {**values, **_partition_variables(source.image)}, by_transfer=True)
    if output == b"different\n":
        path = str((source.path / SIF).resolve())
        raise CheckFailed(
            f"what arrived on {remote} differs from the {source.label} here",
            where=path,
            hint=f"if no program writes to it: imgkit verify {shlex.quote(path)}",
        )
    if output != b"published\n":
        raise unreadable_answer(remote, output)


def _partition_variables(image: RemoteImage | None) -> dict[str, str]:
    """Return the variables by which the script `_PUBLISH` checks the image's root partition on the remote.

    They are the digest, the start and the length of the partition. A folder without an image is not checked.
    The script skips the check if the digest is "".
    """
    if image is None:
        return {"sum": ""}
    return {
        "sum": image.root_sha256,
        "start": str(image.root_offset + 1),  # tail -c counts bytes from 1
        "length": str(image.root_bytes),
    }


def _prepare_incoming(
    connection: Connection, values: Mapping[str, str], source: Source, *, is_retry: bool
) -> int:
    """Create the folder in ``.incoming`` for the files, and return how many bytes have already arrived there.

    If an earlier attempt has left a part of an image, the basis (an older image on the remote) is appended to
    it (`_JOIN`), so that rsync can use the blocks of both. The result does not count the appended bytes.

    Parameters
    ----------
    values : the variables of the scripts on the remote: ``home``, ``folder``, ``name`` and ``partial``.
    is_retry : whether to wait first until the rsync of the earlier attempt has ended on the remote.

    Raises
    ------
    CheckFailed : the file system of the remote has too little free space.
    """
    wait_s = _WAIT_S if is_retry else 0
    output = connection.run(_PREPARE, {**values, "wait": str(wait_s)}, by_transfer=True)
    answer = _PREPARED.fullmatch(output)
    if answer is None:
        raise unreadable_answer(connection.remote.name, output)
    free = free_bytes(answer["df_row"].decode(errors="replace"))
    if free is not None:
        _refuse_too_large(source, free, connection, home=values["home"])
    # The count can exceed the size of the content: du counts whole disk blocks, and `_JOIN` may have appended
    # the basis.
    arrived_bytes = min(int(answer["arrived_bytes"]), source.size_bytes)
    # `_JOIN` enlarges the partial image by the size of the basis. rsync may then write a new image beside it.
    has_space_to_join = free is None or free > 2 * source.size_bytes
    if arrived_bytes and source.basis and has_space_to_join:
        connection.run(_JOIN, {**values, "basis": source.basis}, by_transfer=True)
    return arrived_bytes


def _space_hint(connection: Connection) -> str:
    """Return commands that free space on the remote, or that choose another folder."""
    name = connection.remote.name
    replace_command = f"imgkit remote add {name} {connection.remote.address}:/PATH --replace"
    return f"what no job uses: imgkit remote gc {name} --delete; or another folder: {replace_command}"


def _refuse_too_large(source: Source, free: int, connection: Connection, *, home: str) -> None:
    """Raise CheckFailed if the remote has less free space than the files of `source` need.

    Parameters
    ----------
    free : number of free bytes on the file system of `home`, which is imgkit's folder on the remote.
    """
    # rsync writes a new file beside the partial one. So the bytes that have already arrived do not reduce the
    # space that is needed. For files that may become hard links, the needed space is unknown.
    if free < source.size_bytes and not source.may_be_linked:
        raise CheckFailed(
            f"{size_text(source.size_bytes)} to send to {connection.remote.name}, but {size_text(free)} free",
            where=home,
            hint=_space_hint(connection),
        )


def _send_files(
    connection: Connection, values: Mapping[str, str], source: Source, report: Reporter
) -> Transferred | None:
    """Send the files of `source` to its folder in ``.incoming``, and return what was transferred.

    If rsync prints no statistics, the result is None. The caller publishes the files afterwards.

    Parameters
    ----------
    values : ``home`` is imgkit's folder on the remote, ``folder`` a folder in it such as ``images``, and
        ``name`` the name of the new folder in that one.

    Raises
    ------
    Cut : the connection was lost.
    ToolMissing : rsync is missing on this machine or on the remote.
    ScriptFailed : rsync failed for another reason than a full disk.
    CheckFailed : the disk of the remote is full, or the user's quota is used up.
    """
    folder = f"{values['home']}/{values['folder']}"
    options = list(source.options)
    if connection.remote.bwlimit:
        # The user gives the limit in MB/s, and rsync takes it in KiB/s.
        limit_kib = round(connection.remote.bwlimit * 1e6 / 1024)
        options.append(f"--bwlimit={max(1, limit_kib)}")  # at least 1, because 0 would mean no limit
    # `run_rsync` takes "remote:" as the start of a path relative to `folder`.
    args = (*options, f"{source.path.absolute()}/", f"remote:.incoming/{values['name']}/")
    try:
        return rsync.run_rsync(connection, folder, args, report, source.size_bytes)
    except ScriptFailed as error:
        # A full disk is the only failure with advice of its own. Any other one is raised as it is.
        message = _full_disk_message(connection, folder, error, source.size_bytes)
        if message is None:
            raise
        hint = _space_hint(connection)
        if error.hint:
            hint = f"{error.hint}\n{hint}"
        raise CheckFailed(message, where=folder, hint=hint) from error


def _full_disk_message(
    connection: Connection, folder: str, error: ScriptFailed, size_bytes: int
) -> str | None:
    """Return an error message if rsync failed because the remote's disk is full, and None otherwise.

    Usually, the error of rsync names the reason. If it does not, the free space on the remote decides.

    Parameters
    ----------
    folder : a path on the file system that may be full.
    error : the failure of rsync.
    size_bytes : the size of the content that rsync could not write.
    """
    message = f"the disk of {connection.remote.name} is full"
    if _FULL_DISK.search(error.output):
        return message
    if error.code != rsync.FILE_ERROR:
        return None
    # After such an error, rsync on the remote ends. If rsync on this machine notices the closed pipe first,
    # it does not read the message, and the message is lost. Then only the free space shows the reason.
    df_row = connection.run('df -Pk -- "$folder"\n', {"folder": folder}, by_transfer=True)
    free_space_bytes = free_bytes(df_row.decode(errors="replace"))
    if free_space_bytes is None or free_space_bytes >= size_bytes:
        return None
    return f"{message}: {size_text(free_space_bytes)} free"
