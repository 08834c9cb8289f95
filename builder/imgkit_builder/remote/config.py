"""The clusters that a person has named: ``~/.config/imgkit/remotes.toml``, which holds no secret."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgkit_builder.base import files
from imgkit_builder.job.ssh import fanout
from imgkit_builder.recipe import problems
from imgkit_builder.recipe.problems import choices
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FOLDER = "imgkit"
"""imgkit's folder on a remote, in the home there, where the user names none."""
KEEP_S = 600
_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}"
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
    UsageError : there is no host in it, or the folder's name cannot stand in a job.
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
            f"{name!r} cannot name a remote",
            where="NAME",
            hint="up to 32 letters, digits and _ -, for example mn5",
        )
    return name


def path() -> Path:
    """The file that lists the remotes."""
    return files.config_dir() / "remotes.toml"


def remotes() -> dict[str, Remote]:
    """All remotes by name, in the order of the file; none where there is no file.

    Raises
    ------
    UsageError : the file is no TOML, or a value in it is wrong; names the line.
    """
    text = _text()
    return {name: Remote(name=name, **values) for name, values in _checked(text).items()}


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
                f"there is a remote {remote.name} already",
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


def _checked(text: str) -> dict[str, Any]:
    """The tables of the file, each with values that `Remote` takes."""
    if not text.strip():
        return {}
    from pydantic import ValidationError

    try:
        data = problems.parse(text)
    except problems.NotToml as error:
        where = f"{path()}:{error.line}"
        raise UsageError(error.what, where=where, hint="correct the file") from error
    try:
        found = _adapter().validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        keys = [str(part) for part in first["loc"] if part != "[key]"]
        raise UsageError(
            f"{'.'.join(keys)}: {first['msg'].removeprefix('Value error, ')}",
            where=f"{path()}:{_line(text, keys)}",
            hint="correct the line",
        ) from error
    return {name: one.model_dump() for name, one in found.items()}


def _adapter() -> TypeAdapter[Any]:
    from typing import Annotated

    import pydantic

    def check_host(value: str) -> str:
        if value and not fanout.is_host(value):
            raise ValueError(f"{value!r} is not an address")
        return value

    def check_path(value: str) -> str:
        try:
            return check_folder(value, where="")
        except UsageError as error:
            raise ValueError(error.what) from None

    class RemoteTable(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid", strict=True)
        address: Annotated[str, pydantic.AfterValidator(check_host), pydantic.Field(min_length=1)]
        folder: Annotated[str, pydantic.AfterValidator(check_path)] = FOLDER
        recipe: str = ""
        transfer: Annotated[str, pydantic.AfterValidator(check_host)] = ""
        keep_s: Annotated[int, pydantic.Field(ge=0, le=86400)] = KEEP_S

    name = Annotated[str, pydantic.StringConstraints(pattern=f"^{_NAME}$")]
    return pydantic.TypeAdapter(dict[name, RemoteTable])


def _line(text: str, keys: list[str]) -> int:
    """The line of a key of a table, or of the table itself."""
    place, table = 1, ""
    for number, row in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*\[\s*\"?([^\]\"]*)\"?\s*\]", row):
            table = head[1]
        elif table != keys[0] or len(keys) < 2 or not re.match(rf"\s*\"?{re.escape(keys[1])}\"?\s*=", row):
            continue
        if table == keys[0]:
            place = number
    return place


def _without(text: str, name: str) -> str:
    """`text` without the table `name`."""
    kept, inside = [], False
    for row in text.splitlines():
        if re.match(r"\s*\[", row):
            inside = re.match(rf"\s*\[\s*\"?{re.escape(name)}\"?\s*\]", row) is not None
        if not inside:
            kept.append(row)
    return "\n".join(kept).strip() + "\n" if kept else ""
