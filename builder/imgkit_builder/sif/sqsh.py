"""The .sqsh of an image: what enroot, pyxis and ch-run start. One squashfs, and imgkit's record after it::

    +---------------------+  byte 0
    | squashfs            |  the image's files; those of `own_files` replace the image's own
    +---------------------+
    | JSON object         |  `ImgkitRecord`, which a mount ignores
    | its length, 8 bytes |
    | mark ``IMGKSQSH``   |
    +---------------------+

``X.sqsh.sha256`` next to it holds the checksum of the whole file, for ``sha256sum -c``.

enroot's doc/image-format.md and sources (4.1) say what the files in /etc mean. ``environment`` has a variable
on each line. enroot replaces ``${NAME}`` in a line by the host's variable, and knows no escape. It drops
names that no shell can set, and its own (``ENROOT_``). It removes a pair of quotes or backslashes around a
value, twice, and ch-run one pair of single quotes: a pair is added here, and ``rc`` sets what lost its own.
``fstab`` lists mounts, and ``rc`` is the script that starts the container. pyxis puts another ``rc.local``
there to skip the entrypoint.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from imgkit_builder.archive import sidecar
from imgkit_builder.archive.tar_read import BLOCK, CHARACTER, DIRECTORY, HARD_LINK, REGULAR, SYMLINK
from imgkit_builder.base import files
from imgkit_builder.oci.config import ImageConfig
from imgkit_builder.sif import entries, image
from imgkit_builder.sif.entries import ImageEntry, OwnFile, PassingStage
from imgkit_builder.sif.image import ImgkitRecord, Superblock
from imgkit_entrypoints.errors import CheckFailed, UsageError

MARK = b"IMGKSQSH"
ENVIRONMENT = "etc/environment"
"""File with the variables of the image's configuration."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SUBSTITUTED = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
_RESERVED = "ENROOT_"
_STRIPPED = ("'", '"', "\\")
"""What enroot 4.1 removes where one is at the beginning of a value and one at its end."""
Advance = Callable[[int, "int | None"], None]
_GPUS = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
"""enroot's hook mounts no GPU where the first is missing, without a word, and no CUDA where the second is."""

_RC = """\
#!/bin/sh
# Written by imgkit from the configuration of image {image_id}.
mkdir -p {workdir} 2> /dev/null
cd {workdir} || exit 1
unset OLDPWD
{restored}if [ -s /etc/rc.local ]; then
    . /etc/rc.local
fi
if [ $# -eq 0 ]; then
    set --{cmd}
fi
exec {entrypoint}"$@"
"""


def own_files(config: ImageConfig) -> tuple[OwnFile, ...]:
    """The files in /etc that the programs read; they replace the image's own.

    Raises
    ------
    UsageError : the configuration has a value that they cannot hold.
    """
    texts = {ENVIRONMENT: _environment(config), "etc/fstab": "", "etc/rc": _rc(config), "etc/rc.local": ""}
    return tuple(
        OwnFile(path=path, kind=REGULAR, mode=0o755 if path == "etc/rc" else 0o644, data=text.encode())
        for path, text in texts.items()
    )


def if_missing(config: ImageConfig) -> tuple[OwnFile, ...]:
    """What an image gets if it has nothing of that name: places for mounts, and the working folder."""
    places = [one for one in entries.if_missing() if one.kind != SYMLINK]
    # ch-run mounts its own over them, and fails where there is nothing.
    places += [OwnFile(path=path, kind=REGULAR, mode=0o644) for path in ("etc/group", "etc/passwd")]
    known = {one.path for one in places}
    parts = config.workdir.strip("/").split("/")
    above = ("/".join(parts[:count]) for count in range(1, len(parts) + 1))
    return (
        *places,
        *(OwnFile(path=path, kind=DIRECTORY) for path in above if path and path not in known),
    )


def left_out(config: ImageConfig) -> tuple[str, ...]:
    """Names in the configuration's ENV that enroot drops."""
    return tuple(name for name in dict(config.env) if not _kept(name))


def without_devices(note: Callable[[str], None]) -> PassingStage:
    """A stage that leaves out devices, which an ordinary user cannot unpack, and all that is in /dev."""

    def pass_on(found: Iterator[ImageEntry]) -> Iterator[ImageEntry]:
        gone: list[str] = []
        for entry in found:
            if entry.name == "etc" and entry.kind != DIRECTORY:
                raise CheckFailed(
                    "/etc of the image is not a folder, and enroot reads its files there on the host",
                    hint="make a .sif of it: imgkit sif IMAGE",
                )
            names = tuple(name for name in entry.names if not name.startswith("dev/"))
            if not names or (entry.kind == HARD_LINK and entry.link in gone):
                continue
            if entry.kind in (CHARACTER, BLOCK):
                gone += names
                continue
            yield entry if len(names) == len(entry.names) else entry.changed(names=names)
        if gone:
            note(f"{len(gone)} devices outside /dev are left out, as /{gone[0]}: only root can unpack one")

    return pass_on


def _kept(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and not name.startswith(_RESERVED)


def _environment(config: ImageConfig) -> str:
    # The last of two values counts, as in docker run.
    found = {name: value or "" for name, value in config.env if _kept(name)}
    for name, value in found.items():
        if why := _unsayable(value):
            raise UsageError(
                f"a .sqsh cannot hold the value of {name}: {why}",
                where=f"ENV {name}",
                hint=f"change image.env.{name} of the recipe (or ENV of the image), or make a .sif of it",
            )
    return "".join(f"{name}={_enclosed(value)}\n" for name, value in {**_GPUS, **found}.items())


def _unsayable(value: str) -> str:
    """Why a line of /etc/environment cannot have this value; empty if it can."""
    if found := _SUBSTITUTED.search(value):
        return f"enroot replaces {found[0]} by the host's variable"
    if "\n" in value:
        return "it has a line break, and a variable has one line"
    return _no_text(value)


def _no_text(value: str) -> str:
    if "\0" in value:
        return "it has a zero byte"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "it is not UTF-8"
    return ""


def _enclosed(value: str) -> str:
    """The value with a pair of quotes for enroot and ch-run to remove, where they would remove its own."""
    return f"'{value}'" if value.startswith(_STRIPPED) else value


def _restored(config: ImageConfig) -> str:
    """Lines of ``rc`` that set the values from which enroot removes a pair of their own."""
    found = {name: value or "" for name, value in config.env if _kept(name)}
    pairs = ((name, value, _without_pair(value)) for name, value in found.items())
    return "".join(
        f'[ "${{{name}-}}" != {shlex.quote(left)} ] || export {name}={shlex.quote(value)}\n'
        for name, value, left in pairs
        if left != value
    )


def _without_pair(value: str) -> str:
    """The value without the pair that enroot removes; itself if there is none."""
    bare = value.rstrip()
    return bare[1:-1] if len(bare) > 1 and bare.startswith(_STRIPPED) and bare.endswith(_STRIPPED) else value


def _rc(config: ImageConfig) -> str:
    entrypoint, cmd = config.entrypoint, config.cmd
    for what, words in (("ENTRYPOINT", entrypoint), ("CMD", cmd), ("WORKDIR", (config.workdir,))):
        if why := next(filter(None, map(_no_text, words)), ""):
            raise UsageError(f"a .sqsh cannot hold {what}: {why}", where=what, hint="change it in the image")
    if not entrypoint and not cmd:
        cmd = ("/bin/sh",)
    return _RC.format(
        image_id=config.image_id,
        workdir=shlex.quote(posixpath.join("/", config.workdir)),
        cmd="".join(f" {shlex.quote(word)}" for word in cmd),
        entrypoint=f"{shlex.join(entrypoint)} " if entrypoint else "",
        restored=_restored(config),
    )


_READ = (
    f"if [ -r /{ENVIRONMENT} ]; then "
    'while IFS= read -r line || [ "$line" ]; do '
    "name=${line%%=*}; value=${line#*=}; "
    f'case $name in "$line" | "" | [0-9]* | *[!A-Za-z0-9_]* | {_RESERVED}*) continue ;; esac; '
    """case $value in [\\'\\"\\\\]*[\\'\\"\\\\]) value=${value#?}; value=${value%?} ;; esac; """
    f'export "$name=$value"; done < /{ENVIRONMENT}; fi; '
)
"""Sets what `variables` reads."""
_LIBS = (
    f"libs={entries.LIBS}; "
    'if [ -d "$libs" ]; then case ":${LD_LIBRARY_PATH-}:" in *":$libs:"*) ;; '
    '*) export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$libs" ;; esac; fi; '
)


def environment_words(first: str = "") -> tuple[str, ...]:
    """Words before a command in a container of Singularity, which sets nothing that a .sqsh states.

    They set the image's variables, and find the libraries of ``--nv`` after the image's own.

    Parameters
    ----------
    first : a command of sh between the two.
    """
    return ("sh", "-c", f'{_READ}{f"{first}; " if first else ""}{_LIBS}exec "$@"', "sh")


_PADDING_BYTES = 1 << 20


def is_sqsh(path: Path) -> bool:
    """Whether the file is a squashfs, by whatever program, and no delta; False also if it cannot be read."""
    try:
        with files.open_regular(path) as stream:
            return stream.read(4) == image.SQUASHFS_MAGIC and not files.ends_with(stream, image.DELTA_MARK)
    except OSError:
        return False


def structure(path: Path) -> Superblock:
    """The superblock of a .sqsh.

    Raises
    ------
    CheckFailed : it is no squashfs, or cut short, or the end of a record or of a delta is missing.
    """
    found = image.superblock(path)
    if found is None:
        raise CheckFailed("it is not a squashfs", where=str(path))
    size = path.stat().st_size
    if found.used_bytes > size:
        raise CheckFailed(
            f"it has {size} of {found.used_bytes} bytes: cut short", where=str(path), hint="copy it again"
        )
    with files.open_regular(path) as stream:
        stream.seek(found.used_bytes)
        # Programs pad a squashfs with zeros.
        if stream.read(_PADDING_BYTES).strip(b"\0") and not files.ends_with(stream, MARK):
            what = "what follows the squashfs is no record of imgkit: cut short, or changed"
            raise CheckFailed(what, where=str(path), hint="copy it again")
    return found


def record(path: Path) -> ImgkitRecord | None:
    """The record of the .sqsh `path`; None where another program wrote the file.

    Raises
    ------
    CheckFailed : its record is damaged.
    """
    text = _tail(path)
    return image.parse_record(path, text) if text is not None else None


def _tail(path: Path) -> bytes | None:
    with files.open_regular(path) as stream:
        if not files.ends_with(stream, MARK):
            return None
        text = files.described(stream, 0, os.fstat(stream.fileno()).st_size, MARK)
    if text is None:
        raise CheckFailed("its record is damaged", where=str(path), hint="copy it again")
    return text


def digests(path: Path, *, advance: Advance = lambda *_: None) -> tuple[str, str]:
    """Hex digests of the squashfs, and of the whole file; reads it once.

    Raises
    ------
    CheckFailed : its record is damaged.
    """
    text = _tail(path)
    tail = files.description(text, MARK) if text is not None else b""
    digest = _digest(path, path.stat().st_size - len(tail), advance)
    root = digest.hexdigest()
    digest.update(tail)
    return root, digest.hexdigest()


def _digest(path: Path, size_bytes: int, advance: Advance) -> hashlib._Hash:
    with files.open_regular(path) as stream:
        return files.sha256_begun(stream, 0, size_bytes, advance=advance)


def describe(
    path: Path, record_of: Callable[[str], ImgkitRecord], *, advance: Advance = lambda *_: None
) -> tuple[ImgkitRecord, str]:
    """Append to the squashfs `path` the record that `record_of` makes of its digest; reads the file once.

    Returns the record, and the hex digest of the whole file.

    Raises
    ------
    CheckFailed : the record cannot be read back.
    """
    digest = _digest(path, path.stat().st_size, advance)
    made = record_of(digest.hexdigest())
    tail = files.description(image.record_text(made), MARK)
    files.append(path, tail)
    digest.update(tail)
    if record(path) != made:
        raise CheckFailed("its record cannot be read back", where=str(path), hint="please report this")
    return made, digest.hexdigest()


def publish(part: Path, target: Path, sha256: str) -> None:
    """Put `part` in place as `target`, and its checksum next to it: after a kill, there is none."""
    checksum = sidecar.sha256_path(target)
    files.remove(checksum)
    files.publish(part, target)
    files.put(checksum, f"{sha256}  {target.name}\n")


def undamaged(path: Path, wanted: Callable[[ImgkitRecord], bool]) -> ImgkitRecord | None:
    """The record of the .sqsh `path`, if it is `wanted`, and no byte of the file has changed.

    None also where there is no such file, or no checksum next to it.
    """
    try:
        if not is_sqsh(path) or (found := record(path)) is None or not wanted(found):
            return None
        root, whole = digests(path)
        return found if (found.root_sha256, sidecar.read_sha256(path)) == (root, whole) else None
    except (CheckFailed, UsageError):
        return None
