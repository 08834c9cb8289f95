"""Make the files that a runtime expects in every .sif, in ``/.singularity.d``, from an image configuration.

Runtimes from Singularity 3.6 on contain the scripts in ``actions`` themselves. The public sources of
Apptainer 1.4 and 1.5 show what a runtime still reads in the image:

* the names of the scripts in ``env``
* ``env/99-base.sh``: directly after this script, the runtime sets the variables of the user
* the line ``eval "set ${SINGULARITY_OCI_RUN}"`` in a runscript: it tells the runtime that it can run the
  command itself if the image has no shell
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
"""Folder of the runtime's own files in an image."""
LIBS = f"/{META}/libs"
"""Folder in which a runtime mounts the GPU libraries of the host (option ``--nv``)."""
ENVIRONMENT = f"{META}/env/10-docker2singularity.sh"
"""Script with the variables of the image's configuration. A runtime that builds a .sif writes it, too."""
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A line of a script: "export A=...", "[ -n ... ] || A=..." or "A=...".
_ASSIGNMENT = re.compile(r"(?:export |.*\|\| )?(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)")

# English names, because %A and %B of strftime depend on the locale.
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

    They contain the image's variables, commands and labels, and replace the image's own files at these paths.
    """
    created_s = creation_time_s(config.created)
    scripts = {
        ENVIRONMENT: _environment(config),
        f"{META}/env/90-environment.sh": "#!/bin/sh\n",
        f"{META}/env/99-base.sh": _BASE,
        f"{META}/runscript": _runscript(config),
        f"{META}/startscript": "#!/bin/sh\n",
        # Without this file, Apptainer 1.4.5 looks for actions/test.
        f"{META}/test": "#!/bin/sh\n",
    }
    entries = [_folder(path, created_s) for path in (META, f"{META}/env", f"{META}/libs")]
    for path, text in scripts.items():
        entries.append(text_file(path, text, created_s, mode=0o755))
    entries.append(text_file(f"{META}/Singularity", definition(config), created_s))
    entries.append(text_file(f"{META}/labels.json", _labels(config), created_s))
    return tuple(entries)


def mount_points(created_s: int) -> tuple[ImageEntry, ...]:
    """Return the folders and files on which a runtime mounts those of the host, such as ``/etc/hosts``.

    The caller adds only those that are missing in the image.
    """
    entries = [_folder(path, created_s) for path in _MOUNT_FOLDERS]
    entries += [text_file(path, "", created_s) for path in _MOUNT_FILES]
    return tuple(entries)


def _folder(path: str, created_s: int) -> ImageEntry:
    return ImageEntry(names=(path,), kind=DIRECTORY, mtime_s=created_s)


def runtime_links(created_s: int) -> tuple[ImageEntry, ...]:
    """Return two links to scripts in `META`. The caller adds a link only if its name is unused."""
    targets = {"environment": f"{META}/env/90-environment.sh", "singularity": f"{META}/runscript"}
    links = []
    for path, target in targets.items():
        links.append(ImageEntry(names=(path,), kind=SYMLINK, mode=0o777, link=target, mtime_s=created_s))
    return tuple(links)


def definition(config: ImageConfig) -> str:
    """Return the definition file that ``inspect --deffile`` shows for the .sif."""
    return f"# Written by imgkit from this image configuration.\nbootstrap: oci\nfrom: {config.image_id}\n"


def text_file(path: str, text: str, created_s: int, *, mode: int = 0o644) -> ImageEntry:
    """Return a file that belongs to root and has `text` as its content."""
    entry = ImageEntry(names=(path,), kind=REGULAR, mode=mode, mtime_s=created_s)
    return entry.with_content(text.encode("utf-8", "surrogateescape"))


def skipped_variables(config: ImageConfig) -> tuple[str, ...]:
    """Return the names of the image's variables that no shell can set."""
    return tuple(name for name, value in config.env if not _can_export(name, value))


def variables(script: str) -> dict[str, str]:
    """Return the variables that a script sets: ``export A="1"`` -> ``{"A": "1"}``.

    `script` is the text of the file `ENVIRONMENT` in a .sif, written by imgkit or a runtime. The function
    only parses the script, because it is not safe to run a script of unknown origin. A line that cannot be
    parsed is left out.
    """
    variable_values = {}
    for line in script.splitlines():
        match = _ASSIGNMENT.fullmatch(line)
        if match is None:
            continue
        name = match["name"]
        quoted_value = _strip_default(name, match["value"])
        # shlex raises ValueError for a quote that is not closed. A value of several lines is left out.
        with contextlib.suppress(ValueError):
            variable_values[name] = "".join(shlex.split(quoted_value))
    return variable_values


def _strip_default(name: str, value: str) -> str:
    """Return DEFAULT, including its own quotes, of a value ``"${NAME:-DEFAULT}"`` that a runtime wrote.

    A value of another form is returned unchanged.
    """
    start = f'"${{{name}:-'
    end = '}"'
    if value.startswith(start) and value.endswith(end):
        return value[len(start) : -len(end)]
    return value


def _can_export(name: str, value: str | None) -> bool:
    """Return whether a shell script can set the variable `name` to this value.

    It cannot if a shell does not allow the name, or if the value is not text.
    """
    value_text = value or ""
    if not _VARIABLE_NAME.fullmatch(name) or "\0" in value_text:
        return False
    try:
        value_text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which stands for a byte that is not UTF-8
        return False
    return True


def _environment(config: ImageConfig) -> str:
    """Return the script that sets the image's variables.

    A variable that the user has already set keeps its value. PATH is the exception.
    """
    lines = ["#!/bin/sh"]
    # If a name has two values, `dict` keeps the last one, as docker run does. In the script, a second
    # assignment would have no effect.
    for name, value in dict(config.env).items():
        if not _can_export(name, value):
            continue
        assignment = f"{name}={_quote(value or '')}"
        # The image's PATH always replaces the user's PATH, which contains folders of the host.
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
    """Quote a word for a POSIX shell. The word may contain any bytes."""
    # A single quote becomes '"'"'. The shorter \' is not possible: outside of quotes in an assignment,
    # Apptainer 1.4.5 reads it as two characters.
    return "'" + text.replace("'", "'\"'\"'") + "'"


def _labels(config: ImageConfig) -> str:
    """Return the JSON of the labels that ``inspect --labels`` shows."""
    # The image's own labels come last in the dict, so they replace labels of the same name.
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
    """Return the time `created` in the form that the runtimes use: ``Friday_1_March_2024_12:5:0_UTC``.

    The hour is padded with a zero. Day, minute and second are not.
    """
    time = datetime.datetime.fromtimestamp(creation_time_s(created), tz=datetime.timezone.utc)
    day = f"{_WEEKDAYS[time.weekday()]}_{time.day}_{_MONTHS[time.month - 1]}_{time.year}"
    return f"{day}_{time:%H}:{time.minute}:{time.second}_UTC"
