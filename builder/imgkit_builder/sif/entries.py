"""An entry of an image on its way into a squashfs, and the entries that a runtime expects in every .sif.

Those are the files in ``/.singularity.d``, made from an image configuration. Runtimes from Singularity 3.6 on
bring their own actions. What they read in the image is their interface, seen in the public sources of
Apptainer 1.4 and 1.5: the names in ``env``; ``env/99-base.sh``, directly after which they set the user's
variables; and in a runscript the line ``eval "set ${SINGULARITY_OCI_RUN}"``, which says that they can run it
themselves where the image has no shell.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from imgkit_builder.archive.tar_read import DIRECTORY, REGULAR, SYMLINK, Member
from imgkit_builder.oci.config import ImageConfig, epoch

META = ".singularity.d"
"""Folder of the runtime's own files."""
LIBS = f"/{META}/libs"
"""Where a runtime binds the libraries of ``--nv``."""
ENVIRONMENT = f"{META}/env/10-docker2singularity.sh"
"""Script with the variables of the image's configuration; the runtimes write one, too."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SET = re.compile(r"(?:export |.*\|\| )?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


# Not %A and %B: they depend on the locale.
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August"),
    *("September", "October", "November", "December"),
)
_PLACES = ("dev", "etc", "home", "proc", "root", "sys", "tmp", "var", "var/tmp")
_EMPTY = ("etc/hosts", "etc/resolv.conf")

_BASE = f"""#!/bin/sh
# The runtime sets the variables of the user directly after this file.
LD_LIBRARY_PATH="${{LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}}{LIBS}"
export LD_LIBRARY_PATH
"""
_RUNSCRIPT = """#!/bin/sh
# Written by imgkit. ENTRYPOINT and CMD of the image, as the runtime's own build treats them.
if [ -n "${{SINGULARITY_NO_EVAL:-}}" ]; then
    # As in docker run: no word is evaluated.
    if [ $# -eq 0 ]; then
        set -- {cmd}
    fi
    set -- {entrypoint} "$@"
    exec "$@"
fi
# Otherwise a shell evaluates the words of the command line once more.
OCI_WORDS={evaluated_cmd}
if [ $# -gt 0 ]; then
    OCI_WORDS=
    for word in "$@"; do
        OCI_WORDS="$OCI_WORDS \\"$word\\""
    done
fi
SINGULARITY_OCI_RUN="-- "{evaluated_entrypoint}" $OCI_WORDS"
eval "set ${{SINGULARITY_OCI_RUN}}"
exec "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEntry:
    """A file, folder, link or device, and the names under which it shows."""

    names: tuple[str, ...]
    """Relative paths; all but the first become hard links to the first."""
    kind: bytes
    """Type flag of a tar. An engine's export has hard links as entries of their own, behind their target."""
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime_s: int = 0
    link: str = ""
    """Target of a symlink or hard link."""
    device: tuple[int, int] = (0, 0)
    """Major and minor number."""
    xattrs: Mapping[str, bytes] = field(default_factory=dict)
    size_bytes: int = 0
    """Size of a file; 0 for other kinds."""
    content: Iterable[bytes | memoryview] = ()
    """The bytes of a file. They can be read once: a stage that reads them gives a copy on."""
    header: bytes = b""
    """The tar's own blocks for it; empty: they are made from the values above."""

    @property
    def name(self) -> str:
        """Its first path."""
        return self.names[0]

    def read(self) -> bytes:
        """All of `content`, which is spent afterwards."""
        return b"".join(map(bytes, self.content))

    def changed(self, **values: Any) -> ImageEntry:
        """The same with other `values`."""
        return replace(self, header=b"", **values)

    def with_content(self, data: bytes) -> ImageEntry:
        """The same file with `data` as its content."""
        return self.changed(content=(data,), size_bytes=len(data))


PassingStage = Callable[[Iterator[ImageEntry]], Iterator[ImageEntry]]
"""A function that changes, drops, adds or observes entries."""


def of_member(
    member: Member, content: Iterable[bytes | memoryview], *, names: tuple[str, ...] = (), header: bytes = b""
) -> ImageEntry:
    """The entry of a tar's member; `names` where they are others than its own."""
    is_file = member.kind == REGULAR
    return ImageEntry(
        names=names or (member.name,),
        kind=member.kind,
        mode=member.mode,
        uid=member.uid,
        gid=member.gid,
        mtime_s=member.mtime_s,
        link=member.link,
        device=member.device,
        xattrs=member.xattrs,
        size_bytes=member.content_bytes if is_file else 0,
        content=content if is_file else (),
        header=header,
    )


def of_own(file: OwnFile, mtime_s: int, *, path: str = "") -> ImageEntry:
    """The entry of a file of imgkit's own; `path` is where links of the image lead."""
    return ImageEntry(
        names=(path or file.path,),
        kind=file.kind,
        mode=file.mode,
        mtime_s=mtime_s,
        link=file.link,
        size_bytes=len(file.data),
        content=(file.data,),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFile:
    """A file, folder or symlink that imgkit adds to an image."""

    path: str
    kind: bytes
    """Type flag of a tar."""
    mode: int = 0o755
    data: bytes = b""
    link: str = ""


def own_files(config: ImageConfig) -> tuple[OwnFile, ...]:
    """Everything that belongs to the runtime, folders first; root owns it."""
    scripts = {
        ENVIRONMENT.removeprefix(f"{META}/"): _environment(config),
        "env/90-environment.sh": "#!/bin/sh\n",
        "env/99-base.sh": _BASE,
        "runscript": _runscript(config),
        "startscript": "#!/bin/sh\n",
        # Without this one, Apptainer 1.4.5 looks for actions/test.
        "test": "#!/bin/sh\n",
    }
    texts = {"Singularity": definition(config), "labels.json": _labels(config)}
    return (
        *(OwnFile(path=path, kind=DIRECTORY) for path in (META, f"{META}/env", f"{META}/libs")),
        *(_file(f"{META}/{name}", text, 0o755) for name, text in scripts.items()),
        *(_file(f"{META}/{name}", text, 0o644) for name, text in texts.items()),
    )


def if_missing() -> tuple[OwnFile, ...]:
    """What an image gets if it has nothing of that name: places where a runtime mounts, and two links."""
    return (
        OwnFile(path="environment", kind=SYMLINK, mode=0o777, link=f"{META}/env/90-environment.sh"),
        OwnFile(path="singularity", kind=SYMLINK, mode=0o777, link=f"{META}/runscript"),
        *(OwnFile(path=path, kind=DIRECTORY) for path in _PLACES),
        *(_file(path, "", 0o644) for path in _EMPTY),
    )


def definition(config: ImageConfig) -> str:
    """The definition that ``inspect --deffile`` shows."""
    return f"# Written by imgkit from this image configuration.\nbootstrap: oci\nfrom: {config.image_id}\n"


def skipped_variables(config: ImageConfig) -> tuple[str, ...]:
    """Names in the configuration's ENV that no shell can set."""
    return tuple(name for name, value in config.env if not _can_export(name, value))


def variables(script: str) -> dict[str, str]:
    """The variables that the text of `ENVIRONMENT` sets, by imgkit or by a runtime; runs nothing."""
    found: dict[str, str] = {}
    for line in script.splitlines():
        # VALUE of imgkit is in single quotes; runtimes write NAME="${NAME:-"VALUE"}".
        set_by = _SET.fullmatch(line)
        if set_by is None:
            continue
        name, value = set_by.groups()
        default = f'"${{{name}:-'
        if value.startswith(default) and value.endswith('}"'):
            value = value[len(default) : -2]
        with contextlib.suppress(ValueError):  # an open quote: the value has several lines
            found[name] = "".join(shlex.split(value))
    return found


def _file(path: str, text: str, mode: int) -> OwnFile:
    return OwnFile(path=path, kind=REGULAR, mode=mode, data=text.encode("utf-8", "surrogateescape"))


def _can_export(name: str, value: str | None) -> bool:
    if not _NAME.fullmatch(name) or "\0" in (value or ""):
        return False
    try:
        (value or "").encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _environment(config: ImageConfig) -> str:
    lines = ["#!/bin/sh"]
    # The last of two values counts, as in docker run; a default would keep the first one.
    for name, value in dict(config.env).items():
        if not _can_export(name, value):
            continue
        if name == "PATH":
            lines.append(f"PATH={_quoted(value or '')}")
        else:
            lines.append(f'[ -n "${{{name}:-}}" ] || {name}={_quoted(value or "")}')
        lines.append(f"export {name}")
    return "\n".join((*lines, ""))


def _runscript(config: ImageConfig) -> str:
    return _RUNSCRIPT.format(
        cmd=_words(config.cmd),
        entrypoint=_words(config.entrypoint),
        evaluated_cmd=_quoted(_words(config.cmd)),
        evaluated_entrypoint=_quoted(_words(config.entrypoint)),
    )


def _words(words: Sequence[str]) -> str:
    return " ".join(_quoted(word) for word in words)


def _quoted(text: str) -> str:
    """Quote a word for a POSIX shell, whatever bytes it has."""
    # Apptainer 1.4.5 reads \' outside of quotes as two characters in an assignment.
    return "'" + text.replace("'", "'\"'\"'") + "'"


def _labels(config: ImageConfig) -> str:
    labels = {
        "org.label-schema.schema-version": "1.0",
        "org.label-schema.build-arch": config.arch,
        "org.label-schema.build-date": _date(config.created),
        "org.label-schema.usage.singularity.deffile.bootstrap": "oci",
        "org.label-schema.usage.singularity.deffile.from": config.image_id,
        **config.labels,
    }
    return json.dumps(labels, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _date(created: str) -> str:
    """When the image was made, in the words of the runtimes: they write minutes without a leading zero."""
    when = datetime.datetime.fromtimestamp(epoch(created), tz=datetime.timezone.utc)
    day = f"{_WEEKDAYS[when.weekday()]}_{when.day}_{_MONTHS[when.month - 1]}_{when.year}"
    return f"{day}_{when:%H}:{when.minute}:{when.second}_UTC"
