"""The files that a runtime expects in every .sif: ``/.singularity.d``, made from an image configuration.

Runtimes from Singularity 3.6 on bring their own actions. What they read in the image is their interface, seen
in the public sources of Apptainer 1.4 and 1.5: the names in ``env``; ``env/99-base.sh``, directly after which
they set the user's variables; and in a runscript the line ``eval "set ${SINGULARITY_OCI_RUN}"``, which says
that they can run it themselves where the image has no shell.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import shlex
from collections.abc import Sequence

from imgkit_builder.archive.tar_read import DIRECTORY, REGULAR, SYMLINK
from imgkit_builder.oci.config import ImageConfig, creation_time_s
from imgkit_builder.sif.entries import ImageEntry

META = ".singularity.d"
"""Folder of the runtime's own files."""
LIBS = f"/{META}/libs"
"""Where a runtime binds the libraries of ``--nv``."""
ENVIRONMENT = f"{META}/env/10-docker2singularity.sh"
"""Script with the variables of the image's configuration; the runtimes write one, too."""
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A line of a script: "export A=...", "[ -n ... ] || A=..." or "A=...".
_ASSIGNMENT = re.compile(r"(?:export |.*\|\| )?(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)")

# Not %A and %B: they depend on the locale.
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August"),
    *("September", "October", "November", "December"),
)
_MOUNT_FOLDERS = ("dev", "etc", "home", "proc", "root", "sys", "tmp", "var", "var/tmp")
_MOUNT_FILES = ("etc/hosts", "etc/resolv.conf")

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


def runtime_files(config: ImageConfig) -> tuple[ImageEntry, ...]:
    """Return the files that a runtime expects in ``/.singularity.d``, folders first.

    They hold the image's variables, commands and labels, and replace what the image has at their paths.
    """
    created_s = creation_time_s(config.created)
    scripts = {
        ENVIRONMENT: _environment(config),
        f"{META}/env/90-environment.sh": "#!/bin/sh\n",
        f"{META}/env/99-base.sh": _BASE,
        f"{META}/runscript": _runscript(config),
        f"{META}/startscript": "#!/bin/sh\n",
        # Without this one, Apptainer 1.4.5 looks for actions/test.
        f"{META}/test": "#!/bin/sh\n",
    }
    entries = [_folder(path, created_s) for path in (META, f"{META}/env", f"{META}/libs")]
    for path, text in scripts.items():
        entries.append(text_file(path, text, created_s, mode=0o755))
    entries.append(text_file(f"{META}/Singularity", definition(config), created_s))
    entries.append(text_file(f"{META}/labels.json", _labels(config), created_s))
    return tuple(entries)


def mount_points(created_s: int) -> tuple[ImageEntry, ...]:
    """Return the folders and files over which a runtime mounts those of the host, such as ``/etc/hosts``.

    An image gets those that it lacks.
    """
    entries = [_folder(path, created_s) for path in _MOUNT_FOLDERS]
    entries += [text_file(path, "", created_s) for path in _MOUNT_FILES]
    return tuple(entries)


def _folder(path: str, created_s: int) -> ImageEntry:
    return ImageEntry(names=(path,), kind=DIRECTORY, mtime_s=created_s)


def runtime_links(created_s: int) -> tuple[ImageEntry, ...]:
    """Return the two links into `META` that an image gets if it has nothing of that name."""
    targets = {"environment": f"{META}/env/90-environment.sh", "singularity": f"{META}/runscript"}
    links = []
    for path, target in targets.items():
        links.append(ImageEntry(names=(path,), kind=SYMLINK, mode=0o777, link=target, mtime_s=created_s))
    return tuple(links)


def definition(config: ImageConfig) -> str:
    """Return the definition that ``inspect --deffile`` shows."""
    return f"# Written by imgkit from this image configuration.\nbootstrap: oci\nfrom: {config.image_id}\n"


def text_file(path: str, text: str, created_s: int, *, mode: int = 0o644) -> ImageEntry:
    """Return a file of root's with `text` as its content."""
    entry = ImageEntry(names=(path,), kind=REGULAR, mode=mode, mtime_s=created_s)
    return entry.with_content(text.encode("utf-8", "surrogateescape"))


def skipped_variables(config: ImageConfig) -> tuple[str, ...]:
    """Return the names in the configuration's ENV that no shell can set."""
    return tuple(name for name, value in config.env if not _can_export(name, value))


def variables(script: str) -> dict[str, str]:
    """Return the variables that a script sets: ``export A="1"`` -> ``{"A": "1"}``.

    `script` is the text of `ENVIRONMENT` in a .sif, as imgkit or a runtime writes it. It is only parsed: a
    script of unknown origin must not be run.
    """
    values = {}
    for line in script.splitlines():
        match = _ASSIGNMENT.fullmatch(line)
        if match is None:
            continue
        name = match["name"]
        quoted_value = _strip_default(name, match["value"])
        with contextlib.suppress(ValueError):  # an open quote: the value has several lines
            values[name] = "".join(shlex.split(quoted_value))
    return values


def _strip_default(name: str, value: str) -> str:
    """Return DEFAULT of the value ``"${NAME:-DEFAULT}"``, with its quotes, as runtimes write it.

    Any other value is returned unchanged.
    """
    start = f'"${{{name}:-'
    end = '}"'
    if value.startswith(start) and value.endswith(end):
        return value[len(start) : -len(end)]
    return value


def _can_export(name: str, value: str | None) -> bool:
    """Return whether a shell script can set the variable `name` to this value.

    It cannot if the name has other characters than a shell allows, or the value is no text.
    """
    text = value or ""
    if not _VARIABLE_NAME.fullmatch(name) or "\0" in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _environment(config: ImageConfig) -> str:
    """Return the script that sets the image's variables.

    A variable that the user has set already keeps its value, except for PATH.
    """
    lines = ["#!/bin/sh"]
    # `dict` keeps the last of two values of a name, as docker run does. In the script, the first would win.
    for name, value in dict(config.env).items():
        if not _can_export(name, value):
            continue
        assignment = f"{name}={_quote(value or '')}"
        # The image's PATH always replaces the user's, which has folders of the host.
        if name != "PATH":
            assignment = f'[ -n "${{{name}:-}}" ] || {assignment}'
        lines.append(assignment)
        lines.append(f"export {name}")
    return "\n".join(lines) + "\n"


def _runscript(config: ImageConfig) -> str:
    cmd = _quote_argv(config.cmd)
    entrypoint = _quote_argv(config.entrypoint)
    return _RUNSCRIPT.format(
        cmd=cmd, entrypoint=entrypoint, evaluated_cmd=_quote(cmd), evaluated_entrypoint=_quote(entrypoint)
    )


def _quote_argv(argv: Sequence[str]) -> str:
    return " ".join(_quote(argument) for argument in argv)


def _quote(text: str) -> str:
    """Quote a word for a POSIX shell, whatever bytes it has."""
    # Apptainer 1.4.5 reads \' outside of quotes as two characters in an assignment.
    return "'" + text.replace("'", "'\"'\"'") + "'"


def _labels(config: ImageConfig) -> str:
    """Return the JSON of the labels that ``inspect --labels`` shows. The image's own come last."""
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
    """Return the time `created` as the runtimes write it: ``Friday_1_March_2024_12:5:0_UTC``.

    Only the hour has a leading zero.
    """
    time = datetime.datetime.fromtimestamp(creation_time_s(created), tz=datetime.timezone.utc)
    day = f"{_WEEKDAYS[time.weekday()]}_{time.day}_{_MONTHS[time.month - 1]}_{time.year}"
    return f"{day}_{time:%H}:{time.minute}:{time.second}_UTC"
