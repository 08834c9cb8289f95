"""Report what a remote has: one script in one round trip, and a verdict for each line of its answer."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from imgkit_builder.base.checks import Check, Verdict
from imgkit_builder.remote import store
from imgkit_builder.remote.config import Remote
from imgkit_builder.remote.connection import FIND_PROGRAM, Connection, unreadable

if TYPE_CHECKING:
    from imgkit_builder.recipe.targets import Target

_LOW_SPACE_BYTES = 20e9
"""Free space below which a warning comes: an image of a few GB, its part file and the runs."""
_CLOCKS_S = 5.0
"""Larger differences make times in logs misleading. The figure includes the time that ssh takes to start."""
_SUBMITS: Mapping[str, str] = {"slurm": "sbatch", "pbs": "qsub"}
Answer = Mapping[str, Sequence[str]]
"""Values of the remote's answer by their key."""

# Each line of the answer is a name, a blank and a value.
_PROBE = (
    """\
echo "clock $(date +%s)"
echo "login $(id -un) on $(uname -n), $(uname -m), ${SHELL:-sh}"
tools='cat cut dd df du find grep head ls mkdir mv rm rsync sed sha256sum sleep tail timeout touch tr wc'
for tool in $tools; do
    command -v "$tool" > /dev/null 2>&1 || echo "lacks $tool"
done
"""
    + FIND_PROGRAM
    + """\
for tool in sbatch qsub; do
    if command -v "$tool" > /dev/null 2>&1; then
        if version=$("$tool" --version 2>&1 < /dev/null); then key=$tool; else key=broken; fi
        echo "$key $(echo "$version" | head -n 1)"
    fi
done
"""
    + store.FIND_OWNER
    + """\
if error=$(umask 077; mkdir -p -- "$folder" 2>&1) && error=$(cd -- "$folder" 2>&1); then
    cd -- "$folder"
    echo "home $(pwd -P)"
    probe=.imgkit-probe.$$
    if error=$( (: > "$probe") 2>&1); then rm -f "$probe"; else echo "closed $error"; fi
    echo "disk $(df -Pk . | tail -n 1)"
else
    echo "closed $error"
fi
# Of the file system that holds the folder: Lustre has a program of its own. It puts a long name on a line of
# its own, and says below the numbers where they are those of all users.
if command -v lfs > /dev/null 2>&1; then
    quota=$(timeout 5 lfs quota -q -h -u "$(id -un)" . 2> /dev/null < /dev/null)
    echo "quota $(echo "$quota" | grep -v 'using default' | head -n 2 | tr '\\n' ' ')"
elif command -v quota > /dev/null 2>&1; then
    device=$(df -P . | tail -n 1 | cut -d ' ' -f 1)
    echo "quota $(timeout 5 quota -w -s 2> /dev/null < /dev/null | grep -F -- "$device " | head -n 1)"
fi
runtime='
for module; do module load "$module" || exit 1; done > /dev/null 2>&1
for name in singularity apptainer; do
    if path=$(command -v "$name" 2> /dev/null); then echo "$("$name" --version) ($path)"; exit 0; fi
done
exit 1'
if version=$(sh -c "$runtime" 2> /dev/null < /dev/null); then
    echo "runtime $version"
elif [ $# -gt 0 ] && version=$(bash -lc "$runtime" imgkit "$@" 2> /dev/null < /dev/null); then
    echo "runtime $(echo "$version" | tail -n 1), after module load $*"
fi
if bash -lc 'type module' > /dev/null 2>&1 < /dev/null; then
    modules=$(timeout 20 bash -lc 'module -t avail' 2>&1 < /dev/null)
    echo "modules $(echo "$modules" | grep -iE '^(singularity|apptainer)' | head -n 8 | tr '\\n' ' ')"
fi
if command -v curl > /dev/null 2>&1; then
    internet=no
    if curl -sI -m 4 https://example.com > /dev/null 2>&1 < /dev/null; then internet=yes; fi
    echo "internet $internet"
fi
echo end
"""
)


def examine(connection: Connection, target: Target | None) -> tuple[Check, ...]:
    """Return a check for each thing that a job or a transfer needs there, or can use.

    Parameters
    ----------
    target : the recipe of the remote; its scheduler and modules are those that are needed.

    Raises
    ------
    Cut : ssh cannot log in.
    ToolFailed : the answer is cut short, or not that of imgkit's script.
    """
    modules = target.system.runtime.modules if target else ()
    values = {"folder": connection.remote.folder, "program": _needed_program(target) or "sbatch"}
    start_s = time.time()
    output = connection.answer(connection.stream(_PROBE, values, args=modules))
    return read(output, connection, target, start_s=start_s, end_s=time.time())


def read(
    output: bytes, connection: Connection, target: Target | None, *, start_s: float, end_s: float
) -> tuple[Check, ...]:
    """Return what the answer `output` says; the rest is as of `examine`, which asked between these times.

    Raises
    ------
    ToolFailed : the answer is cut short, or not that of imgkit's script.
    """
    answer: dict[str, list[str]] = {}
    for line in output.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        answer.setdefault(key, []).append(value.strip())
    if "end" not in answer:
        raise unreadable(connection.remote.name, output)
    modules = target.system.runtime.modules if target else ()
    return (
        *_login(answer, connection),
        _scheduler(answer, target),
        _runtime(answer, modules),
        _folder(answer, connection.remote),
        _internet(answer),
        _modules(answer, modules),
        _clock(answer, (start_s + end_s) / 2, end_s - start_s),
    )


def _check(name: str, verdict: Verdict, value: str, hint: str = "") -> Check:
    return Check(name=name, verdict=verdict, found=value, hint=hint)


def _needed_program(target: Target | None) -> str:
    """Return the program that submits jobs of the recipe; empty where no remote has it."""
    return _SUBMITS.get(target.system.scheduler, "") if target else ""


def _login(answer: Answer, connection: Connection) -> Iterator[Check]:
    shared = "; one connection for all commands" if connection.socket_folder else ""
    yield _check("login", "ok", answer.get("login", ["?"])[0] + shared)
    if connection.unshared_reason:
        value = f"every command opens its own connection: {connection.unshared_reason}"
        hint = "export XDG_RUNTIME_DIR=/run/user/$(id -u), or another short folder of mode 700"
        yield _check("sharing", "warn", value, hint)
    if missing := answer.get("lacks"):
        hint = (
            "there: dnf install coreutils findutils rsync, or apt-get install; plain commands must find them"
        )
        yield _check("tools", "fail", f"no {', '.join(missing)}", hint)


def _scheduler(answer: Answer, target: Target | None) -> Check:
    program = _needed_program(target)
    versions = {name: answer[program][0] for name, program in _SUBMITS.items() if program in answer}
    system = target.system.scheduler if target else ""
    if target and not program:
        value = f"the recipe {target.name} runs by {system}, which imgkit run does not support"
        return _check("scheduler", "fail", value, "a recipe with scheduler: slurm or pbs; imgkit list")
    name = system or next(iter(versions), "")
    if name in versions:
        return _check("scheduler", "ok", f"{name}: {versions[name]}")
    command = "imgkit remote add NAME USER@HOST --replace"
    if errors := answer.get("broken"):
        hint = f"is this a login node of the cluster? {command}"
        return _check("scheduler", "fail", f"it does not answer: {errors[0]}", hint)
    value = f"{program} is not on the PATH" if program else "neither sbatch nor qsub is on the PATH"
    if versions:
        value += f", but {', '.join(versions)} is there"
    return _check("scheduler", "fail", value, f"name a login node of the cluster: {command}")


def _runtime(answer: Answer, modules: Sequence[str]) -> Check:
    if versions := answer.get("runtime"):
        return _check("runtime", "ok", versions[0])
    value = f"module load {' '.join(modules)} gives none" if modules else "no singularity or apptainer here"
    if "modules" in answer:
        hint = "module avail singularity, then system.runtime.modules of the recipe"
        return _check("runtime", "fail" if modules else "warn", value, hint)
    # Some sites have it on the compute nodes only.
    return _check("runtime", "warn", value, "look on a compute node: srun -N1 singularity --version")


def _folder(answer: Answer, remote: Remote) -> Check:
    errors, home, owner = (answer.get(key, [""])[0] for key in ("closed", "home", "owner"))
    if not owner and (errors or not home):
        value = f"{remote.folder} cannot be used: {errors or 'no answer'}"
        hint = "another folder: imgkit remote add NAME USER@HOST:/PATH --replace"
        return _check("folder", "fail", value, hint)
    if error := store.home_error(home, owner, remote):
        return _check("folder", "fail", error.what, error.hint or "")
    free = store.free_bytes(answer["disk"][0]) if "disk" in answer else None
    value = home if free is None else f"{home}, {free / 1e9:.0f} GB free"
    if quota := answer.get("quota", [""])[0]:
        value += f"; quota: {_quota(quota)}"
    if free is not None and free < _LOW_SPACE_BYTES:
        return _check("folder", "warn", value, "an image takes several GB: a folder on a larger file system")
    return _check("folder", "ok", value)


def _quota(row: str) -> str:
    """Shorten a row of ``quota`` or ``lfs quota``: file system, used space, soft and hard limit, and more."""
    fields = row.split()
    if len(fields) < 4:
        return " ".join(fields)
    sizes = zip(("soft", "hard"), fields[2:4], strict=True)
    limits = [f"{kind} limit {size}" for kind, size in sizes if size.strip("0kKB")]
    return ", ".join((f"{fields[1]} used", *(limits or ["no limit"])))


def _internet(answer: Answer) -> Check:
    value = answer.get("internet", ["unknown: there is no curl"])[0]
    if value == "yes":
        return _check("internet", "ok", "from the login node")
    return _check("internet", "skip", f"{value}; images and data come from here")


def _modules(answer: Answer, modules: Sequence[str]) -> Check:
    if "modules" in answer:
        runtimes = answer["modules"][0] or "none of them is named singularity or apptainer"
        return _check("modules", "ok", f"module works: {runtimes}")
    if not modules:
        return _check("modules", "skip", "no module command")
    value = f"the recipe's jobs load {', '.join(modules)}, and there is no module command"
    hint = "a recipe of your own without system.runtime.modules; start from: imgkit show RECIPE"
    return _check("modules", "fail", value, hint)


def _clock(answer: Answer, local_s: float, duration_s: float) -> Check:
    value = answer.get("clock", [""])[0]
    if not re.fullmatch(r"[0-9]{1,12}", value):
        return _check("clock", "warn", "date does not answer", "date +%s there")
    ahead_s = int(value) - local_s
    if abs(ahead_s) - duration_s <= _CLOCKS_S:
        return _check("clock", "ok", f"within {_CLOCKS_S:.0f} s of this machine's")
    value = f"{abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}"
    return _check("clock", "warn", value, "times in logs mislead; here: timedatectl set-ntp true")
