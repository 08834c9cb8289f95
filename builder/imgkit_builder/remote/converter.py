"""What converts an archive on a remote: a Python that runs the one-file tool, and mksquashfs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imgkit_builder.remote.connection import Connection

PROBE = """\
is_new='import sys; v = sys.version_info; print("%d %d.%d" % ((v >= (3, 10),) + v[:2]))'
new=
for one in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if found=$("$one" -c "$is_new" 2> /dev/null < /dev/null); then
        echo "python $found $(command -v "$one")"
        case $found in 1*) new=1 ;; esac
    fi
done
squash='
PATH=$PATH:/usr/sbin:/sbin
for module; do module load "$module" || exit 1; done > /dev/null 2>&1
command -v mksquashfs > /dev/null 2>&1 && echo "mksquashfs $(mksquashfs -version 2>&1 | head -n 1)"'
if ! sh -c "$squash" 2> /dev/null < /dev/null && [ $# -gt 0 ]; then
    bash -lc "$squash" imgkit "$@" 2> /dev/null < /dev/null
fi
by_module='
is_new=$1 squash=$2; shift 2
for module; do module load "$module" || exit 1; done > /dev/null 2>&1
listed=$(module -t avail 2>&1 | sed "s/(.*//" | grep -iE "^[^ ]*python[^ ]*/[^ ]*3[.]1[0-9]")
for one in $(echo "$listed" | sort -rV | head -n 4); do
    (
        module load "$one" > /dev/null 2>&1
        found=$(python3 -c "$is_new" 2> /dev/null < /dev/null) || exit 1
        case $found in 1*) ;; *) exit 1 ;; esac
        echo "python $found $(command -v python3)"
        echo "pymodule $one"
        bash -c "$squash" 2> /dev/null
        exit 0
    ) && exit 0
done'
if [ -z "$new" ] && bash -lc 'type module' > /dev/null 2>&1 < /dev/null; then
    timeout 60 bash -lc "$by_module" imgkit "$is_new" "$squash" "$@" 2> /dev/null < /dev/null
fi
"""
"""Part of a script, whose words are the modules that a job loads. Lines of its answer: a name and a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converter:
    """What a remote has to convert with; empty where it lacks something."""

    python: str
    """Path of a Python from 3.10 on."""
    version: str
    """Its version; where there is none, that of an older one."""
    module: str
    """The module that brings it; empty where none is needed."""
    squash: str
    """The first line of ``mksquashfs -version``."""

    @property
    def lack(self) -> str:
        """Why no archive can be converted there; empty where one can."""
        if not self.python:
            older = f"Python {self.version}" if self.version else "none"
            return f"it needs Python 3.10 or newer, on the PATH or as a module, and there is {older}"
        return "" if self.squash else f"it has Python {self.version}, but no mksquashfs"


def of_answer(answer: Mapping[str, Sequence[str]]) -> Converter:
    """Read the lines of `PROBE`: name -> values."""
    pythons = [row.split(" ", 2) for row in answer.get("python", ())]
    new = next((row for row in pythons if row[0] == "1" and len(row) == 3), None)
    oldest = pythons[0][1] if pythons and len(pythons[0]) > 1 else ""
    return Converter(
        python=new[2] if new else "",
        version=new[1] if new else oldest,
        module=next(iter(answer.get("pymodule", ())), ""),
        squash=next(iter(answer.get("mksquashfs", ())), ""),
    )


def find(connection: Connection, modules: Sequence[str]) -> Converter:
    """What `connection` has, where jobs load `modules`.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached.
    """
    output = b"".join(connection.stream(PROBE + ":\n", {}, words=modules))
    return of_answer(answer_of(output))


def answer_of(output: bytes) -> dict[str, list[str]]:
    """Name -> values of an answer in which each line is a name, a blank and a value."""
    answer: dict[str, list[str]] = {}
    for line in output.decode(errors="replace").splitlines():
        name, _, value = line.partition(" ")
        answer.setdefault(name, []).append(value.strip())
    return answer
