"""The clusters that a person has named: ``~/.config/imgkit/remotes.toml``, which holds no secret."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from imgkit_builder.base import files
from imgkit_builder.job.ssh import fanout
from imgkit_builder.recipe import problems
from imgkit_builder.recipe.model import KEYS
from imgkit_builder.recipe.problems import choices
from imgkit_builder.recipe.validation import validate
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import Fault, Rule, like

FOLDER = "imgkit"
"""imgkit's folder on a remote, in the home there, where the user names none."""
KEEP_S = 600
_MOST_KEEP_S = 86400
_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}"
_NAME_HINT = "up to 32 letters, digits and _ -, for example mn5"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A cluster that ssh reaches."""

    name: str
    address: str
    """``USER@HOST``, or a Host of ~/.ssh/config."""
    folder: str = FOLDER
    """imgkit's folder there: a path, or a name in the home folder."""
    recipe: str = ""
    """The recipe that jobs there use; empty where each names its own."""
    transfer: str = ""
    """Another host with the same folders, through which files go; empty where `address` takes them."""
    keep_s: int = KEEP_S
    """Seconds for which an unused connection stays open; 0: each command connects by itself."""


def parse(text: str) -> tuple[str, str]:
    """The address and the folder of ``USER@HOST[:DIR]``.

    Raises
    ------
    UsageError : there is no host in it, or the folder's name cannot be used in a job.
    """
    # The address of an IPv6 host holds colons itself, and stands in brackets.
    match = re.fullmatch(
        r"(?P<user>[^@\[\]:]*@)?(\[(?P<six>[^\]]*)\]|(?P<host>[^:\[\]]*))(:(?P<dir>.*))?", text, re.DOTALL
    )
    address = f"{match['user'] or ''}{match['six'] or match['host'] or ''}" if match else ""
    if match is None or not fanout.is_host(address):
        raise UsageError(
            f"{text!r} is not an address",
            where="ADDRESS",
            hint="USER@HOST or USER@HOST:DIR, for example me@login.example.org:/scratch/me",
        )
    return address, check_folder(match["dir"] or FOLDER, where="ADDRESS")


def check_folder(folder: str, *, where: str) -> str:
    """`folder`, if its name can stand in a job script.

    Raises
    ------
    UsageError : it cannot.
    """
    if folder.startswith("~/"):
        folder = folder[2:]
    if not re.fullmatch(r"[^\x00-\x1f\x7f\"'\\%`$:,~-][^\x00-\x1f\x7f\"'\\%`$:,]*", folder):
        raise UsageError(
            f"{folder!r} cannot be the folder of jobs",
            where=where,
            hint="a path there, absolute or in your home folder, without quotes and \\ % $ ` : ,",
        )
    return folder


def check_name(name: str) -> str:
    """`name`, if a remote can have it.

    Raises
    ------
    UsageError : it cannot.
    """
    if not re.fullmatch(_NAME, name):
        raise UsageError(
            f"{name!r} is not a valid name of a remote",
            where="NAME",
            hint=_NAME_HINT,
        )
    return name


def path() -> Path:
    """The file that lists the remotes."""
    return files.config_dir() / "remotes.toml"


def remotes() -> dict[str, Remote]:
    """All remotes by name, in the order of the file; none where there is no file.

    Raises
    ------
    UsageError : the file is not TOML, or a value in it is wrong; names the line.
    """
    text = _text()
    return _checked(text)


def find(name: str) -> Remote:
    """The remote `name`.

    Raises
    ------
    UsageError : there is none; names the nearest.
    """
    known = remotes()
    if name not in known:
        raise UsageError(
            f"there is no remote {name!r}",
            where="--on",
            hint=choices(name, known)
            if known
            else f"imgkit remote add {name if re.fullmatch(_NAME, name) else 'NAME'} USER@HOST:DIR",
        )
    return known[name]


def add(remote: Remote, *, replace: bool = False) -> None:
    """Write `remote` into the list, whose other lines stay as they are.

    Raises
    ------
    UsageError : the name is taken, or the file is damaged or cannot be written.
    """
    text = _text()
    if remote.name in _checked(text):
        if not replace:
            raise UsageError(
                f"the remote {remote.name} already exists",
                where=str(path()),
                hint=f"imgkit remote add {remote.name} ... --replace",
            )
        text = _without(text, remote.name)
    rows = [f"[{remote.name}]", *(f"{key} = {_toml(getattr(remote, key))}" for key in ("address", "folder"))]
    default = Remote(name="", address="")
    for key in ("recipe", "transfer", "keep_s"):
        if getattr(remote, key) != getattr(default, key):
            rows.append(f"{key} = {_toml(getattr(remote, key))}")
    before = f"{text.rstrip()}\n\n" if text.strip() else ""
    _write(before + "\n".join(rows) + "\n")


def remove(name: str) -> Remote:
    """Take the remote `name` out of the list; nothing on the cluster changes.

    Raises
    ------
    UsageError : there is none.
    """
    found = find(name)
    _write(_without(_text(), name))
    return found


def _text() -> str:
    try:
        return files.read_text(path(), most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot be read: {error}", where=str(path()), hint="correct or remove the file"
        ) from error


def _write(text: str) -> None:
    target = path()
    files.make_own_folder(target.parent)
    with files.writing(target, mode=0o600) as stream:
        stream.write(text.encode())


def _toml(value: str | int) -> str:
    # For text without control characters, JSON and TOML quote alike.
    return json.dumps(value, ensure_ascii=False)


def _checked(text: str) -> dict[str, Remote]:
    """The remotes in the file."""
    if not text.strip():
        return {}
    try:
        data = problems.parse_toml(text)
    except problems.NotToml as error:
        where = f"{path()}:{error.line}"
        raise UsageError(error.what, where=where, hint="correct the file") from error
    tables, mistakes = validate(_RemoteFile, {"remotes": data})
    if tables is None:
        mistake = mistakes[0]
        key = ".".join(map(str, mistake.path[1:]))
        hint = mistake.hint or "correct the value"
        raise UsageError(f"{key}: {mistake.message}", where=str(path()), hint=hint)
    return {name: Remote(name=name, **dataclasses.asdict(values)) for name, values in tables.remotes.items()}


def _host(text: str) -> Iterator[Fault]:
    if not fanout.is_host(text):
        yield f"{text!r} is not an address", "USER@HOST, or a Host of ~/.ssh/config"


def _transfer(text: str) -> Iterator[Fault]:
    if text:
        yield from _host(text)


def _folder(text: str) -> Iterator[Fault]:
    try:
        check_folder(text, where="")
    except UsageError as error:
        yield error.what, error.hint or ""


def _keep_s(seconds: int) -> Iterator[Fault]:
    if not 0 <= seconds <= _MOST_KEEP_S:
        yield f"must be 0 to {_MOST_KEEP_S} seconds", ""


_RemoteName = Annotated[str, like(_NAME, "is not a valid name of a remote", _NAME_HINT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemoteTable:
    """The keys of a table of the file, as in `Remote`."""

    address: Annotated[str, Rule(_host)]
    folder: Annotated[str, Rule(_folder)] = FOLDER
    recipe: str = ""
    transfer: Annotated[str, Rule(_transfer)] = ""
    keep_s: Annotated[int, Rule(_keep_s, core={"type": "int", "strict": True})] = KEEP_S


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemoteFile:
    """The content of the file, with its tables below one key."""

    __pydantic_config__ = KEYS

    remotes: Mapping[_RemoteName, _RemoteTable]


def _without(text: str, name: str) -> str:
    """`text` without the table `name`."""
    kept, inside = [], False
    for row in text.splitlines():
        if re.match(r"\s*\[", row):
            inside = re.match(rf"\s*\[\s*\"?{re.escape(name)}\"?\s*\]", row) is not None
        if not inside:
            kept.append(row)
    return "\n".join(kept).strip() + "\n" if kept else ""
