"""Read and write the list of remotes, ``~/.config/imgkit/remotes.toml``. The file contains no secrets.

Each table in the file describes a remote::

    [mn5]
    address = "me@login.example.org"
    folder = "/scratch/me/imgkit"
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from imgkit_builder.base import files
from imgkit_builder.jobs.systems import fanout, pods
from imgkit_builder.recipe import problems
from imgkit_builder.recipe.model import KEYS
from imgkit_builder.recipe.problems import allowed_hint
from imgkit_builder.recipe.validation import make_rule, validate
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import Fault, Rule, pattern_rule

FOLDER = "imgkit"
"""Default folder of imgkit on a remote, below the home folder there."""
KEEP_S = 600
"""Default number of seconds for which an unused ssh connection stays open."""
_MAX_KEEP_S = 86400  # a day
# A name becomes the key of a table in the file and a part of messages and commands, without quotes.
_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}"
_NAME_HINT = "up to 32 letters, digits and _ -, for example mn5"
_MAX_BYTES = 1 << 20
"""The file is not read if it is larger than this. A remote needs about 200 bytes."""
# Quotes, "\", "$", "`" and a leading "~" have a meaning in a shell, and a leading "-" begins an option.
# Singularity splits bind options at ":" and ",", and Slurm replaces "%" in the name of the output file.
_NOT_IN_FOLDER = r"\x00-\x1f\x7f\"'\\%`$:,"
_FOLDER = re.compile(f"[^{_NOT_IN_FOLDER}~-][^{_NOT_IN_FOLDER}]*")
# "USER@HOST:DIR". An IPv6 address is in brackets, because its colons could not be told from the one before
# DIR: "me@[2001:db8::1]:/scratch/me".
_ADDRESS = re.compile(
    r"(?P<user>[^@\[\]:]*@)?(\[(?P<ipv6>[^\]]*)\]|(?P<host>[^:\[\]]*))(:(?P<folder>.*))?", re.DOTALL
)


def check_folder(folder: str, *, where: str) -> str:
    """Return `folder` without a leading ``~/``, after checking that a job script can contain the path.

    A relative path is relative to the home folder on the remote.

    Parameters
    ----------
    where : the flag or file that contains the value, for the error.

    Raises
    ------
    UsageError : the path contains a character with a special meaning in job scripts or bind options.
    """
    path = folder.removeprefix("~/")  # without it, the path is relative to the home folder anyway
    if not _FOLDER.fullmatch(path):
        raise UsageError(
            f"{path!r} cannot be the folder of jobs",
            where=where,
            hint="a path there, absolute or in your home folder, without quotes and \\ % $ ` : ,",
        )
    return path


def check_host(text: str, *, where: str = "") -> str:
    """Return `text`, after checking that it is the address of a host.

    Raises
    ------
    UsageError : `text` is not an address. The error names `where`.
    """
    if not fanout.is_host(text):
        hint = "USER@HOST, or a Host of ~/.ssh/config"
        raise UsageError(f"{text!r} is not an address", where=where, hint=hint)
    return text


def _keep_s_faults(seconds: int) -> Iterator[Fault]:
    """Yield a fault if `seconds` is out of range. This is the rule for the field `RemoteTable.keep_s`."""
    if not 0 <= seconds <= _MAX_KEEP_S:
        yield f"must be 0 to {_MAX_KEEP_S} seconds", ""


def check_bwlimit(mb_per_s: float, *, where: str = "") -> float:
    """Return `mb_per_s`, after checking that it can limit a bandwidth. 0 means no limit.

    Raises
    ------
    UsageError : the number is negative or not finite. The error names `where`.
    """
    if not 0 <= mb_per_s < math.inf:
        hint = "a number of MB/s, for example 5; 0: no limit"
        raise UsageError(f"{mb_per_s:g} is not a limit", where=where, hint=hint)
    return mb_per_s


def check_pvc(text: str, *, where: str = "") -> str:
    """Return `text`, after checking that it names a volume to which pods can write: ``CLAIM:/PATH``.

    Raises
    ------
    UsageError : `text` has another form, or the volume is read-only. The error names `where`.
    """
    if pods.parse_claim(text, where=where).read_only:
        raise UsageError(
            f"{text}: pods write into their run folders on this volume", where=where, hint="leave :ro out"
        )
    return text


def check_volume(path: str, *, where: str = "") -> str:
    """Return `path` without a slash at its end, after checking that it is an absolute path of a folder.

    Raises
    ------
    UsageError : the path is relative, or contains a character that a path in a job must not contain. The
        error names `where`.
    """
    if not path.startswith("/"):
        hint = "the path at which the remote has the volume, for example /mnt/mlo/scratch"
        raise UsageError(f"{path!r} is not an absolute path", where=where, hint=hint)
    return check_folder(path, where=where).rstrip("/") or "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTable:
    """The table of a remote in the file, without its name."""

    address: Annotated[str, make_rule(check_host, required=True)]
    """``USER@HOST``, or a Host of ~/.ssh/config."""
    folder: Annotated[str, make_rule(partial(check_folder, where=""))] = FOLDER
    """imgkit's folder on the remote: an absolute path, or a path below the home folder."""
    recipe: str = ""
    """The recipe of the jobs on this remote. If it is empty, each job names its own recipe."""
    transfer: Annotated[str, make_rule(check_host)] = ""
    """A host that has the same file systems and is used for transfers. If it is empty, `address` is used."""
    keep_s: Annotated[int, Rule(_keep_s_faults, core={"type": "int", "strict": True})] = KEEP_S
    """Seconds for which an unused connection stays open. If it is 0, each command connects by itself."""
    bwlimit: Annotated[float, make_rule(check_bwlimit, core_schema={"type": "float", "strict": True})] = 0.0
    """Limit for uploads, in MB/s. 0 means no limit."""
    pvc: Annotated[str, make_rule(check_pvc)] = ""
    """``CLAIM:/PATH``: the volume on which pods have `folder`, and its path in pods.

    Such a remote only stores files, and the client on this machine submits the jobs. If it is empty, the
    remote takes jobs itself.
    """
    volume: Annotated[str, make_rule(check_volume)] = ""
    """With `pvc`, the path of the volume's root on the remote.

    If it is empty, the root is the mount point of the file system that has `folder`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote(RemoteTable):
    """A cluster that imgkit reaches over ssh."""

    name: str
    """The user's name for the cluster, such as ``mn5``. It is the key of the cluster's table in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemoteFile:
    """The content of the file, under the key ``remotes``. The file itself does not contain this key."""

    __pydantic_config__ = KEYS

    remotes: Mapping[
        Annotated[str, pattern_rule(_NAME, "is not a valid name of a remote", _NAME_HINT)], RemoteTable
    ]


def parse_address(text: str) -> tuple[str, str]:
    """Split ``USER@HOST[:DIR]`` into the address and the folder. The default folder is `FOLDER`.

    ``me@mn5:/scratch/me`` -> ``("me@mn5", "/scratch/me")``

    Raises
    ------
    UsageError : `text` contains no valid host, or the path of the folder cannot be used in a job.
    """
    match = _ADDRESS.fullmatch(text)
    address = ""
    if match is not None:
        user = match["user"] or ""  # includes the "@"
        host = match["ipv6"] or match["host"] or ""
        address = user + host
    if match is None or not fanout.is_host(address):
        raise UsageError(
            f"{text!r} is not an address",
            where="ADDRESS",
            hint="USER@HOST or USER@HOST:DIR, for example me@login.example.org:/scratch/me",
        )
    folder = check_folder(match["folder"] or FOLDER, where="ADDRESS")
    return address, folder


def check_name(name: str) -> str:
    """Return `name` if it is a valid name for a remote.

    Raises
    ------
    UsageError : the name is too long, or contains other characters than letters, digits, ``_`` and ``-``.
    """
    if not re.fullmatch(_NAME, name):
        raise UsageError(f"{name!r} is not a valid name of a remote", where="NAME", hint=_NAME_HINT)
    return name


def remotes_file() -> Path:
    """Return the path of the file that lists the remotes. The file need not exist."""
    return files.config_dir() / "remotes.toml"


def read_remotes() -> dict[str, Remote]:
    """Return all remotes by name, in the order of the file. Without the file, the result is empty.

    Raises
    ------
    UsageError : the file cannot be read, is not TOML, or contains a wrong value. The error names the file.
    """
    return _parse_file(_read_file())


def get_remote(name: str) -> Remote:
    """Return the remote with this name.

    Raises
    ------
    UsageError : no remote has this name. The hint lists the existing names, the most similar one first.
    """
    remotes = read_remotes()
    if name in remotes:
        return remotes[name]
    if remotes:
        hint = allowed_hint(name, remotes)
    elif re.fullmatch(_NAME, name):
        hint = f"imgkit remote add {name} USER@HOST:DIR"
    else:
        hint = "imgkit remote add NAME USER@HOST:DIR"
    raise UsageError(f"there is no remote {name!r}", where="--on", hint=hint)


def add_remote(remote: Remote, *, replace: bool = False) -> None:
    """Append `remote` to the file. Comments and the tables of other remotes are not changed.

    Parameters
    ----------
    replace : whether the table of a remote with the same name is first removed.

    Raises
    ------
    UsageError : the name is already used and `replace` is false, or the file cannot be read or contains an
        error.
    """
    text = _read_file()
    # A file with an error is refused here, before it is written again.
    if remote.name not in _parse_file(text):
        other_tables = text
    elif replace:
        other_tables = _remove_table(text, remote.name)
    else:
        raise UsageError(
            f"the remote {remote.name} already exists",
            where=str(remotes_file()),
            hint=f"imgkit remote add {remote.name} ... --replace",
        )
    new_text = f"{other_tables.rstrip()}\n\n{_format_table(remote)}"
    _write_file(new_text.lstrip())  # no blank lines before the first table


def _format_table(remote: Remote) -> str:
    """Return the TOML table for `remote`.

    Keys with their default value are left out, except for the folder.
    """
    defaults = RemoteTable(address="", folder="")  # no remote has an empty address or folder
    lines = [f"[{remote.name}]"]
    for field in dataclasses.fields(RemoteTable):
        value = getattr(remote, field.name)
        if value != getattr(defaults, field.name):
            # JSON and TOML quote text in the same way if it contains no control characters.
            lines.append(f"{field.name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def remove_remote(name: str) -> Remote:
    """Remove the remote `name` from the file, and return it. Nothing on the cluster changes.

    Raises
    ------
    UsageError : no remote has this name.
    """
    remote = get_remote(name)
    _write_file(_remove_table(_read_file(), name))
    return remote


def _read_file() -> str:
    """Return the text of the file, or "" if the file does not exist.

    Raises
    ------
    UsageError : the file cannot be read, is larger than `_MAX_BYTES`, or is not UTF-8.
    """
    try:
        return files.read_text(remotes_file(), most_bytes=_MAX_BYTES)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot be read: {error}", where=str(remotes_file()), hint="correct or remove the file"
        ) from error


def _write_file(text: str) -> None:
    """Replace the content of the file by `text`. Only this user can read the new file."""
    target = remotes_file()
    files.make_own_folder(target.parent)
    with files.replace_file(target, mode=0o600) as stream:
        stream.write(text.encode())


def _parse_file(text: str) -> dict[str, Remote]:
    """Parse `text`, the content of ``remotes.toml``: the remotes by name, ``{"mn5": Remote(...)}``.

    Raises
    ------
    UsageError : `text` is not TOML, or contains a wrong value.
    """
    if not text.strip():  # most users have no remotes, and need no parser
        return {}
    try:
        tables = problems.parse_toml(text)
    except problems.NotToml as error:
        where = f"{remotes_file()}:{error.line}"
        raise UsageError(error.what, where=where, hint="correct the file") from error
    content, mistakes = validate(_RemoteFile, {"remotes": tables})
    if content is None:
        mistake = mistakes[0]
        keys = mistake.path[1:]  # the first key is "remotes", which the file does not contain
        message = f"{'.'.join(map(str, keys))}: {mistake.message}"
        raise UsageError(message, where=str(remotes_file()), hint=mistake.hint or "correct the value")
    remotes = {}
    for name, table in content.remotes.items():
        remotes[name] = Remote(name=name, **dataclasses.asdict(table))
    return remotes


def _remove_table(text: str, name: str) -> str:
    """Return `text`, the content of the file, without the table of the remote `name`.

    The lines are edited as text, so that comments and other tables do not change. A table begins with its
    header, ``[mn5]`` or ``["mn5"]``, and ends before the next header. The result is empty, or ends with a
    line break.
    """
    header = re.compile(rf"\s*\[\s*([\"']?){re.escape(name)}\1\s*\]")
    remaining_lines = []
    is_in_table = False
    for line in text.splitlines():
        if line.lstrip().startswith("["):  # this line is the header of a table
            is_in_table = header.match(line) is not None
        if not is_in_table:
            remaining_lines.append(line)
    remaining_text = "\n".join(remaining_lines).strip()
    return f"{remaining_text}\n" if remaining_text else ""
