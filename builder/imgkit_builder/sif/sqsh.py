"""Write and read .sqsh files, which enroot, pyxis and ch-run start. A .sqsh is a squashfs with a record::

    +---------------------+  byte 0
    | squashfs            |  the image's files; the files of `enroot_files` replace the image's own
    +---------------------+
    | JSON object         |  `ImgkitRecord`; a mount ignores what follows the squashfs
    | its length, 8 bytes |
    | mark ``IMGKSQSH``   |
    +---------------------+

``X.sqsh.sha256`` next to it holds the checksum of the whole file, for ``sha256sum -c``.

enroot's doc/image-format.md and sources (4.1) describe the files in /etc:

* ``environment`` has one variable on each line. enroot replaces ``${NAME}`` in a line by the variable of the
  host, and has no escape for it. It drops names that no shell can set, and names that begin with ``ENROOT_``.
* enroot removes a pair of quotes or backslashes around a value, and does so twice. ch-run removes one pair of
  single quotes. So imgkit adds a pair, and ``rc`` restores the values that have lost a pair of their own.
* ``fstab`` lists mounts. ``rc`` is the script that starts the container. pyxis replaces ``rc.local`` by
  another file to skip the entrypoint.
"""

from __future__ import annotations

import dataclasses
import os
import posixpath
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from imgkit_builder.archive import sidecar
from imgkit_builder.archive.tar_read import BLOCK, CHARACTER, DIRECTORY, HARD_LINK
from imgkit_builder.base import files
from imgkit_builder.oci.config import ImageConfig, creation_time_s
from imgkit_builder.sif import image, runtime_files
from imgkit_builder.sif.conversion import AddedFiles, Format
from imgkit_builder.sif.entries import ImageEntry
from imgkit_builder.sif.image import Advance, ImgkitRecord, Superblock
from imgkit_builder.sif.runtime_files import text_file
from imgkit_entrypoints.errors import CheckFailed, UsageError

MARK = b"IMGKSQSH"
ENVIRONMENT = "etc/environment"
"""File with the variables of the image's configuration."""
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SUBSTITUTION = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
_RESERVED_PREFIX = "ENROOT_"
# enroot 4.1 removes one of these from each end of a value that begins and ends with them.
_QUOTES = ("'", '"', "\\")
# Without the first variable, enroot's hook silently mounts no GPU. Without the second, it mounts no CUDA.
_GPU_DEFAULTS = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}

_RC = """\
#!/bin/sh
# Written by imgkit from the configuration of image {image_id}.
mkdir -p {workdir} 2> /dev/null
cd {workdir} || exit 1
unset OLDPWD
{restore_quotes}if [ -s /etc/rc.local ]; then
    . /etc/rc.local
fi
if [ $# -eq 0 ]; then
    {set_cmd}
fi
{exec_entrypoint} "$@"
"""


def enroot_files(config: ImageConfig) -> tuple[ImageEntry, ...]:
    """Return the files in /etc that enroot reads to start an image: variables, mounts and the start script.

    They replace files of the image at the same paths.

    Raises
    ------
    UsageError : these files cannot hold a value of the image's configuration, such as one with a line break.
    """
    created_s = creation_time_s(config.created)
    return (
        text_file(ENVIRONMENT, _render_environment(config), created_s),
        text_file("etc/fstab", "", created_s),
        text_file("etc/rc", _render_start_script(config), created_s, mode=0o755),
        text_file("etc/rc.local", "", created_s),
    )


def mount_points(config: ImageConfig) -> tuple[ImageEntry, ...]:
    """Return folders and empty files that are added to an image if their paths are unused.

    They are the paths on which a runtime mounts something, and the image's working folder with its parents.
    In a read-only image, a runtime cannot create them.
    """
    created_s = creation_time_s(config.created)
    entries = {entry.name: entry for entry in runtime_files.mount_points(created_s)}
    # ch-run mounts its own versions of these two files, and fails if the image does not have them.
    for path in ("etc/group", "etc/passwd"):
        entries[path] = text_file(path, "", created_s)
    workdir = PurePosixPath(config.workdir.lstrip("/"))
    # `parents` begins with the closest folder. Folders must come before what is in them.
    for folder in (*reversed(workdir.parents), workdir):
        path = str(folder)
        if path != "." and path not in entries:
            entries[path] = ImageEntry(names=(path,), kind=DIRECTORY, mtime_s=created_s)
    return tuple(entries.values())


def skipped_variables(config: ImageConfig) -> tuple[str, ...]:
    """Return the names in the configuration's ENV that enroot drops."""
    return tuple(name for name in dict(config.env) if not _is_set_by_enroot(name))


def without_devices(entries: Iterator[ImageEntry], note: Callable[[str], None]) -> Iterator[ImageEntry]:
    """Yield `entries` without devices and without the content of /dev.

    enroot unpacks a .sqsh as an ordinary user, who cannot create devices. A runtime mounts the host's /dev
    anyway. If devices outside /dev are left out, `note` receives a sentence for the user after the last
    entry.

    Raises
    ------
    CheckFailed : /etc is not a folder.
    """
    device_names: list[str] = []  # those outside /dev; an image has few of them or none
    for entry in _refuse_etc_link(entries):
        # One file may have several names (hard links), of which only some are in /dev. The folder /dev itself
        # is kept, so that a runtime can mount the host's /dev on it.
        dev_names = [name for name in entry.names if name.startswith("dev/")]
        remaining = entry.without_names(dev_names)
        if remaining is None:  # all its names are in /dev
            continue
        # A hard link comes after its file, so a device is already listed when a link to it comes.
        is_link_to_device = remaining.kind == HARD_LINK and remaining.link in device_names
        if remaining.kind in (CHARACTER, BLOCK):
            device_names += remaining.names
        elif not is_link_to_device:
            yield remaining
    if device_names:
        count, example = len(device_names), device_names[0]
        note(f"{count} devices outside /dev are left out, as /{example}: only root can unpack one")


def _refuse_etc_link(entries: Iterator[ImageEntry]) -> Iterator[ImageEntry]:
    """Yield `entries` unchanged. Raise CheckFailed if /etc is not a folder, but for example a link."""
    for entry in entries:
        if entry.name == "etc" and entry.kind != DIRECTORY:
            raise CheckFailed(
                "/etc of the image is not a folder, and enroot reads its files there on the host",
                hint="make a .sif of it: imgkit sif IMAGE",
            )
        yield entry


def _is_set_by_enroot(name: str) -> bool:
    return _VARIABLE_NAME.fullmatch(name) is not None and not name.startswith(_RESERVED_PREFIX)


def _select_variables(config: ImageConfig) -> dict[str, str]:
    # If a name has two values, the dict keeps the last one, as docker run does.
    return {name: value or "" for name, value in config.env if _is_set_by_enroot(name)}


def _render_environment(config: ImageConfig) -> str:
    """Return the content of /etc/environment, one ``NAME=VALUE`` on each line.

    Raises
    ------
    UsageError : the file cannot hold a value, for a reason that `_find_value_problem` returns.
    """
    lines = []
    # The right side of `|` has priority: settings for GPUs in the image replace the defaults.
    for name, value in (_GPU_DEFAULTS | _select_variables(config)).items():
        problem = _find_value_problem(value)
        if problem:
            raise UsageError(
                f"a .sqsh cannot hold the value of {name}: {problem}",
                where=f"ENV {name}",
                hint=f"change image.env.{name} of the recipe (or ENV of the image), or make a .sif of it",
            )
        # enroot and ch-run remove a pair of quotes around a value. So a value that begins with a quote gets
        # another pair, even if its own quote is not closed: the new pair is removed in any case.
        if value.startswith(_QUOTES):
            value = f"'{value}'"
        lines.append(f"{name}={value}\n")
    return "".join(lines)


def _find_value_problem(value: str) -> str:
    """Return why a line of /etc/environment cannot hold `value`, or ``""`` if it can."""
    substitution = _SUBSTITUTION.search(value)
    if substitution is not None:
        return f"enroot replaces {substitution[0]} by the host's variable"
    if "\n" in value:
        return "it has a line break, and a variable has one line"
    return _find_text_problem(value)


def _find_text_problem(text: str) -> str:
    """Return why a text file cannot hold `text`, or ``""`` if it can."""
    if "\0" in text:
        return "it has a zero byte"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "it is not UTF-8"
    return ""


def _make_restoring_lines(config: ImageConfig) -> str:
    """Return the lines of the start script that restore quotes which enroot removes from values.

    enroot removes quotes twice: first the pair that /etc/environment adds, and then a pair that belongs to
    the value. So the value ``'a'`` becomes ``a`` in the container, and a line of the script sets it again::

        [ "${NAME-}" != a ] || export NAME=''"'"'a'"'"''
    """
    lines = []
    for name, value in _select_variables(config).items():
        # enroot removes any two of these characters, even different ones, with the white space after them.
        bare = value.rstrip()
        has_pair = len(bare) > 1 and bare.startswith(_QUOTES) and bare.endswith(_QUOTES)
        if has_pair:
            value_in_container = shlex.quote(bare[1:-1])
            restore = f"export {name}={shlex.quote(value)}"
            # Only if the value still is as enroot left it: the user may have set another one.
            lines.append(f'[ "${{{name}-}}" != {value_in_container} ] || {restore}\n')
    return "".join(lines)


def _render_start_script(config: ImageConfig) -> str:
    """Return the content of /etc/rc, the script that starts the container.

    The script changes to the WORKDIR, and runs ``set -- CMD`` if it has no arguments, and then
    ``exec ENTRYPOINT "$@"``. Before, it restores the quotes of variables that enroot has removed.

    Raises
    ------
    UsageError : a text file cannot hold the ENTRYPOINT, CMD or WORKDIR of the image.
    """
    _refuse_unwritable_commands(config)
    cmd = config.cmd
    # Without any command, the script would have nothing to run.
    if not config.entrypoint and not cmd:
        cmd = ("/bin/sh",)
    return _RC.format(
        image_id=config.image_id,
        workdir=shlex.quote(posixpath.join("/", config.workdir)),
        set_cmd=shlex.join(("set", "--", *cmd)),
        exec_entrypoint=shlex.join(("exec", *config.entrypoint)),  # only "exec" without an ENTRYPOINT
        restore_quotes=_make_restoring_lines(config),
    )


def _refuse_unwritable_commands(config: ImageConfig) -> None:
    """Refuse an image whose ENTRYPOINT, CMD or WORKDIR is not text, such as bytes that are not UTF-8.

    The start script contains these values. If it cannot hold them exactly, it would start another program.

    Raises
    ------
    UsageError : a value has a zero byte or is not UTF-8.
    """
    instructions = {"ENTRYPOINT": config.entrypoint, "CMD": config.cmd, "WORKDIR": (config.workdir,)}
    for instruction, arguments in instructions.items():
        for argument in arguments:
            problem = _find_text_problem(argument)
            if problem:
                raise UsageError(
                    f"a .sqsh cannot hold {instruction}: {problem}",
                    where=instruction,
                    hint="change it in the image",
                )


# A command of sh that exports the variables in /etc/environment, as enroot reads it.
_READ_VARIABLES = (
    f"if [ -r /{ENVIRONMENT} ]; then "
    'while IFS= read -r line || [ "$line" ]; do '
    "name=${line%%=*}; value=${line#*=}; "
    f'case $name in "$line" | "" | [0-9]* | *[!A-Za-z0-9_]* | {_RESERVED_PREFIX}*) continue ;; esac; '
    """case $value in [\\'\\"\\\\]*[\\'\\"\\\\]) value=${value#?}; value=${value%?} ;; esac; """
    f'export "$name=$value"; done < /{ENVIRONMENT}; fi'
)
# A command of sh that adds the folder with the libraries of --nv to the end of LD_LIBRARY_PATH.
_ADD_GPU_LIBRARIES = (
    f"libs={runtime_files.LIBS}; "
    'if [ -d "$libs" ]; then case ":${LD_LIBRARY_PATH-}:" in *":$libs:"*) ;; '
    '*) export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$libs" ;; esac; fi'
)


def environment_argv(extra_command: str) -> tuple[str, ...]:
    """Return ``sh -c SCRIPT sh``, to put before a command that Singularity runs in a .sqsh.

    Singularity does not know where a .sqsh stores the image's variables. The script sets them, adds the GPU
    libraries of ``--nv`` to the end of LD_LIBRARY_PATH, and then runs the command, which is ``"$@"`` for it.

    Parameters
    ----------
    extra_command : a shell command to run after the variables are set and before the libraries are added. It
        may be empty.
    """
    commands = [_READ_VARIABLES]
    if extra_command:
        commands.append(extra_command)
    commands += [_ADD_GPU_LIBRARIES, 'exec "$@"']
    return ("sh", "-c", "; ".join(commands), "sh")


_PADDING_BYTES = 1 << 20
"""How many bytes after a squashfs are read. Programs pad a squashfs with zeros, usually to 4 KiB."""


def is_sqsh(path: Path) -> bool:
    """Return whether the file is a squashfs, written by any program. Return False if it cannot be read."""
    try:
        with files.open_regular(path) as stream:
            return stream.read(len(image.SQUASHFS_MAGIC)) == image.SQUASHFS_MAGIC
    except OSError:
        return False


def check_structure(path: Path) -> Superblock:
    """Check that a .sqsh is complete, and return its superblock, the header of the squashfs.

    Raises
    ------
    CheckFailed : the file is not a squashfs, is cut short, or has other bytes than padding or imgkit's record
        after the squashfs.
    """
    superblock = image.read_superblock(path)
    if superblock is None:
        raise CheckFailed("it is not a squashfs", where=str(path))
    file_bytes = path.stat().st_size
    if superblock.used_bytes > file_bytes:
        raise CheckFailed(
            f"it has {file_bytes} of {superblock.used_bytes} bytes: cut short",
            where=str(path),
            hint="copy it again",
        )
    with files.open_regular(path) as stream:
        # After the squashfs, a file of another program has only padding, and a file of imgkit has a record
        # (the source of the file, and how it was made).
        stream.seek(superblock.used_bytes)
        is_padding = not stream.read(_PADDING_BYTES).strip(b"\0")
        has_record = files.has_trailer(stream, MARK)
    if not is_padding and not has_record:
        raise CheckFailed(
            "what follows the squashfs is no record of imgkit: cut short, or changed",
            where=str(path),
            hint="copy it again",
        )
    return superblock


def read_record(path: Path) -> ImgkitRecord | None:
    """Return imgkit's record of the .sqsh `path`, or None if another program wrote the file.

    The record says from which image and how imgkit made the file.

    Raises
    ------
    CheckFailed : its record is damaged.
    """
    record_text = _read_record_text(path)
    if record_text is None:
        return None
    return image.parse_record(path, record_text)


def _read_record_text(path: Path) -> bytes | None:
    """Return the JSON of the record at the end of the .sqsh `path`, or None if the file has none.

    Raises
    ------
    CheckFailed : the record is damaged.
    """
    with files.open_regular(path) as stream:
        if not files.has_trailer(stream, MARK):
            return None
        record_text = files.read_trailer(stream, 0, os.fstat(stream.fileno()).st_size, MARK)
    if record_text is None:
        raise CheckFailed("its record is damaged", where=str(path), hint="copy it again")
    return record_text


def hash_sqsh(path: Path, *, advance: Advance | None = None) -> tuple[str, str]:
    """Return the sha256 of the squashfs and the sha256 of the whole .sqsh, both in hex.

    The file is read once. `advance` is called with the number of bytes read so far and the total.

    Raises
    ------
    CheckFailed : its record is damaged.
    """
    record = _read_record_text(path)
    squashfs_bytes = path.stat().st_size
    if record is not None:
        squashfs_bytes -= len(files.make_trailer(record, MARK))
    with files.open_regular(path) as stream:
        digest = files.start_sha256(stream, 0, squashfs_bytes, advance=advance)
        squashfs_sha256 = digest.hexdigest()
        # The record is the rest of the file. Adding it to the same digest gives the digest of the file.
        digest.update(stream.read())
    return squashfs_sha256, digest.hexdigest()


class Sqsh(Format):
    """The .sqsh of enroot, pyxis and ch-run."""

    name = "sqsh"
    # unsquashfs of RHEL 8 reads no zstd, and the user's machine cannot tell what the nodes have.
    default_compression = "gzip"
    has_checksum = True

    def matches(self, path: Path) -> bool:
        """Return whether the file is a squashfs."""
        return is_sqsh(path)

    def added_files(self, config: ImageConfig, note: Callable[[str], None]) -> AddedFiles:
        """Return the files that enroot reads, and the mount points that are added if they are missing."""
        for name in skipped_variables(config):
            note(f"the image sets the variable {name!r}, which enroot never sets: left out")
        return AddedFiles(replacing=enroot_files(config), if_missing=mount_points(config))

    def filter_entries(
        self, entries: Iterator[ImageEntry], note: Callable[[str], None]
    ) -> Iterator[ImageEntry]:
        """Return `entries` without devices."""
        return without_devices(entries, note)

    def complete(self, path: Path, config: ImageConfig) -> None:
        """Check the squashfs. A .sqsh has no headers to write around it."""
        check_structure(path)

    def put_record(self, path: Path, record: ImgkitRecord, advance: Advance) -> tuple[ImgkitRecord, str]:
        """Append the record with the squashfs' digest. Return the record and the checksum of the file."""
        with files.open_regular(path) as stream:
            digest = files.start_sha256(stream, 0, path.stat().st_size, advance=advance)
        # Until now, the file is only the squashfs. Store its digest before the record is appended.
        record = dataclasses.replace(record, root_sha256=digest.hexdigest())
        trailer = files.make_trailer(image.record_text(record), MARK)
        files.append_file(path, trailer)
        digest.update(trailer)
        return record, digest.hexdigest()

    def intact_record(
        self, path: Path, config: ImageConfig, accepts: Callable[[ImgkitRecord], bool]
    ) -> ImgkitRecord | None:
        """Return the record of the .sqsh `path` if the file need not be written again, else None.

        A record is imgkit's note at the end of the file: from which image and how it was made. The file is
        kept if `accepts` is true for its record, and its content matches the recorded digests. A damaged file
        is no error here, because it will be written again.
        """
        if not is_sqsh(path):
            return None
        try:
            record = read_record(path)
            if record is None or not accepts(record):
                return None
            # The digest of the whole file is in a second file, for `sha256sum -c`.
            checksum = sidecar.read_sha256(path)
            # The slowest check comes last: it reads the whole file.
            squashfs_sha256, file_sha256 = hash_sqsh(path)
        except (CheckFailed, UsageError):
            return None
        if squashfs_sha256 != record.root_sha256 or file_sha256 != checksum:
            return None
        return record
