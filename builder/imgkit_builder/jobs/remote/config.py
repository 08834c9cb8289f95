"""The clusters that a person has named: ``~/.config/imgkit/remotes.toml``, which holds no secret."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from imgkit_builder.base import files
from imgkit_builder.jobs.systems import fanout
from imgkit_builder.recipe import problems
from imgkit_builder.recipe.model import KEYS
from imgkit_builder.recipe.problems import choices
from imgkit_builder.recipe.validation import rule_of, validate
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import Fault, Rule, like

FOLDER = "imgkit"
"""imgkit's folder on a remote, in the home there, where the user names none."""
KEEP_S = 600
_MAX_KEEP_S = 86400
_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}"
_NAME_HINT = "up to 32 letters, digits and _ -, for example mn5"
_MAX_BYTES = 1 << 20


def check_folder(folder: str, *, where: str) -> str:
    """Return `folder`, if its name can stand in a job script.

    Raises
    ------
    UsageError : it cannot.
    """
    folder = folder.removeprefix("~/")
    if not re.fullmatch(r"[^\x00-\x1f\x7f\"'\\%`$:,~-][^\x00-\x1f\x7f\"'\\%`$:,]*", folder):
        raise UsageError(
            f"{folder!r} cannot be the folder of jobs",
            where=where,
            hint="a path there, absolute or in your home folder, without quotes and \\ % $ ` : ,",
        )
    return folder


def check_host(text: str, *, where: str = "") -> str:
    """Return `text`, if it is an address. Raises UsageError if it is not."""
    if not fanout.is_host(text):
        hint = "USER@HOST, or a Host of ~/.ssh/config"
        raise UsageError(f"{text!r} is not an address", where=where, hint=hint)
    return text


def _keep_s(seconds: int) -> Iterator[Fault]:
    if not 0 <= seconds <= _MAX_KEEP_S:
        yield f"must be 0 to {_MAX_KEEP_S} seconds", ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTable:
    """The keys of a remote in the file."""

    address: Annotated[str, rule_of(check_host, required=True)]
    """``USER@HOST``, or a Host of ~/.ssh/config."""
    folder: Annotated[str, rule_of(partial(check_folder, where=""))] = FOLDER
    """imgkit's folder there: a path, or a name in the home folder."""
    recipe: str = ""
    """The recipe that jobs there use; empty where each names its own."""
    transfer: Annotated[str, rule_of(check_host)] = ""
    """Another host with the same folders, through which files go; empty where `address` takes them."""
    keep_s: Annotated[int, Rule(_keep_s, core={"type": "int", "strict": True})] = KEEP_S
    """Seconds for which an unused connection stays open; 0: each command connects by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote(RemoteTable):
    """A cluster that ssh reaches."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemoteFile:
    """The content of the file, with its tables below one key."""

    __pydantic_config__ = KEYS

    remotes: Mapping[Annotated[str, like(_NAME, "is not a valid name of a remote", _NAME_HINT)], RemoteTable]


def parse(text: str) -> tuple[str, str]:
    """Return the address and the folder of ``USER@HOST[:DIR]``.

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


def check_name(name: str) -> str:
    """Return `name`, if a remote can have it.

    Raises
    ------
    UsageError : it cannot.
    """
    if not re.fullmatch(_NAME, name):
        raise UsageError(f"{name!r} is not a valid name of a remote", where="NAME", hint=_NAME_HINT)
    return name


def path() -> Path:
    """Return the file that lists the remotes."""
    return files.config_dir() / "remotes.toml"


def remotes() -> dict[str, Remote]:
    """Return all remotes by name, in the order of the file; none where there is no file.

    Raises
    ------
    UsageError : the file is not TOML, or a value in it is wrong; names the line.
    """
    return _parse_file(_text())


def find(name: str) -> Remote:
    """Return the remote `name`.

    Raises
    ------
    UsageError : there is none; names the nearest.
    """
    configured = remotes()
    if name in configured:
        return configured[name]
    new_name = name if re.fullmatch(_NAME, name) else "NAME"
    hint = choices(name, configured) if configured else f"imgkit remote add {new_name} USER@HOST:DIR"
    raise UsageError(f"there is no remote {name!r}", where="--on", hint=hint)


def add(remote: Remote, *, replace: bool = False) -> None:
    """Write `remote` into the list, whose other lines stay as they are.

    Raises
    ------
    UsageError : the name is taken, or the file is damaged or cannot be written.
    """
    text = _text()
    if remote.name in _parse_file(text):
        if not replace:
            raise UsageError(
                f"the remote {remote.name} already exists",
                where=str(path()),
                hint=f"imgkit remote add {remote.name} ... --replace",
            )
        text = _without(text, remote.name)
    default = RemoteTable(address="", folder="")
    rows = [f"[{remote.name}]"]
    for field in dataclasses.fields(RemoteTable):
        value = getattr(remote, field.name)
        if value != getattr(default, field.name):
            # For text without control characters, JSON and TOML quote alike.
            rows.append(f"{field.name} = {json.dumps(value, ensure_ascii=False)}")
    before = f"{text.rstrip()}\n\n" if text.strip() else ""
    _write(before + "\n".join(rows) + "\n")


def remove(name: str) -> Remote:
    """Take the remote `name` out of the list; nothing on the cluster changes.

    Raises
    ------
    UsageError : there is none.
    """
    remote = find(name)
    _write(_without(_text(), name))
    return remote


def _text() -> str:
    try:
        return files.read_text(path(), most_bytes=_MAX_BYTES)
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


def _parse_file(text: str) -> dict[str, Remote]:
    """Return the remotes in the file."""
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
        raise UsageError(
            f"{key}: {mistake.message}", where=str(path()), hint=mistake.hint or "correct the value"
        )
    return {name: Remote(name=name, **dataclasses.asdict(values)) for name, values in tables.remotes.items()}


def _without(text: str, name: str) -> str:
    """Return `text` without the table `name`."""
    rows, inside = [], False
    for row in text.splitlines():
        if re.match(r"\s*\[", row):
            inside = re.match(rf"\s*\[\s*\"?{re.escape(name)}\"?\s*\]", row) is not None
        if not inside:
            rows.append(row)
    return "\n".join(rows).strip() + "\n" if rows else ""
