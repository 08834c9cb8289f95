"""Report what a remote has: one script in one round trip, and a verdict for each line of its answer."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from imgkit_builder.base.checks import Check
from imgkit_builder.job.ssh.doctor import CLOCKS_S
from imgkit_builder.remote import store
from imgkit_builder.remote.config import Remote
from imgkit_builder.remote.connection import FIND_PROGRAM, Connection, unreadable

if TYPE_CHECKING:
    from imgkit_builder.recipe.targets import Target

_ROOM_BYTES = 20e9
"""Free space below which a warning comes: an image of a few GB, its part file and the runs."""
_SUBMITS: Mapping[str, str] = {"slurm": "sbatch", "pbs": "qsub"}

# Each line of the answer is a name, a blank and a value.
_PROBE = (
    """\
echo "clock $(date +%s)"
echo "login $(id -un) on $(uname -n), $(uname -m), ${SHELL:-sh}"
tools='cat cut dd df du find grep head ls mkdir mv rm rsync sed sha256sum sleep tail tar timeout touch tr wc'
for tool in $tools; do
    command -v "$tool" > /dev/null 2>&1 || echo "lacks $tool"
done
"""
    + FIND_PROGRAM
    + """\
for tool in sbatch qsub; do
    if command -v "$tool" > /dev/null 2>&1; then
        if said=$("$tool" --version 2>&1 < /dev/null); then word=$tool; else word=broken; fi
        echo "$word $(echo "$said" | head -n 1)"
    fi
done
"""
    + store.FIND_OWNER
    + """\
if why=$(umask 077; mkdir -p -- "$folder" 2>&1) && why=$(cd -- "$folder" 2>&1); then
    cd -- "$folder"
    echo "home $(pwd -P)"
    probe=.imgkit-probe.$$
    if why=$( (: > "$probe") 2>&1); then rm -f "$probe"; else echo "closed $why"; fi
    echo "disk $(df -Pk . | tail -n 1)"
else
    echo "closed $why"
fi
# Of the file system that holds the folder: Lustre has a program of its own. It puts a long name on a line of
# its own, and says below the numbers where they are those of all users.
if command -v lfs > /dev/null 2>&1; then
    found=$(timeout 5 lfs quota -q -h -u "$(id -un)" . 2> /dev/null < /dev/null)
    echo "quota $(echo "$found" | grep -v 'using default' | head -n 2 | tr '\\n' ' ')"
elif command -v quota > /dev/null 2>&1; then
    device=$(df -P . | tail -n 1 | cut -d ' ' -f 1)
    echo "quota $(timeout 5 quota -w -s 2> /dev/null < /dev/null | grep -F -- "$device " | head -n 1)"
fi
runtime='
for module; do module load "$module" || exit 1; done > /dev/null 2>&1
for one in singularity apptainer; do
    if command -v "$one" > /dev/null 2>&1; then echo "$("$one" --version) ($(command -v "$one"))"; exit 0; fi
done
exit 1'
if found=$(sh -c "$runtime" 2> /dev/null < /dev/null); then
    echo "runtime $found"
elif [ $# -gt 0 ] && found=$(bash -lc "$runtime" imgkit "$@" 2> /dev/null < /dev/null); then
    echo "runtime $(echo "$found" | tail -n 1), after module load $*"
fi
if bash -lc 'type module' > /dev/null 2>&1 < /dev/null; then
    found=$(timeout 20 bash -lc 'module -t avail' 2>&1 < /dev/null)
    echo "modules $(echo "$found" | grep -iE '^(singularity|apptainer)' | head -n 8 | tr '\\n' ' ')"
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
    """One check for each thing that a job or a transfer needs there, or can use.

    Parameters
    ----------
    target : the recipe of the remote; its scheduler and modules are those that are needed.

    Raises
    ------
    Cut : ssh cannot log in.
    ToolFailed : the answer is cut short, or not that of imgkit's script.
    """
    modules = target.system.runtime.modules if target else ()
    values = {"folder": connection.remote.folder, "program": _needed(target) or "sbatch"}
    began = time.time()
    output = connection.answer(connection.stream(_PROBE, values, args=modules))
    return read(output, connection, target, began_s=began, ended_s=time.time())


def read(
    output: bytes, connection: Connection, target: Target | None, *, began_s: float, ended_s: float
) -> tuple[Check, ...]:
    """What the answer `output` says; the rest is as of `examine`, which asked between these times.

    Raises
    ------
    ToolFailed : the answer is cut short, or not that of imgkit's script.
    """
    answer: dict[str, list[str]] = {}
    for line in output.decode(errors="replace").splitlines():
        name, _, value = line.partition(" ")
        answer.setdefault(name, []).append(value.strip())
    if "end" not in answer:
        raise unreadable(connection.remote.name, output)
    modules = target.system.runtime.modules if target else ()
    return (
        *_login(answer, connection),
        _scheduler(answer, target),
        _runtime(answer, modules),
        *_folder(answer, connection.remote),
        *_programs(answer, modules),
        _clock(answer, (began_s + ended_s) / 2, ended_s - began_s),
    )


def _needed(target: Target | None) -> str:
    """The program that submits jobs of the recipe; empty where no remote has it."""
    return _SUBMITS.get(target.system.scheduler, "") if target else ""


def _login(answer: Mapping[str, list[str]], connection: Connection) -> Iterator[Check]:
    shared = connection.socket_folder is not None
    found = answer.get("login", ["?"])[0]
    yield Check(
        name="login", verdict="ok", found=f"{found}; one connection for all commands" if shared else found
    )
    if connection.unshared_reason:
        yield Check(
            name="sharing",
            verdict="warn",
            found=f"every command opens its own connection: {connection.unshared_reason}",
            hint="export XDG_RUNTIME_DIR=/run/user/$(id -u), or another short folder of mode 700",
        )
    if lacks := answer.get("lacks"):
        yield Check(
            name="tools",
            verdict="fail",
            found=f"no {', '.join(lacks)}",
            hint="there: dnf install coreutils findutils tar rsync, or apt-get install; plain ssh commands "
            "must have them on their PATH",
        )


def _scheduler(answer: Mapping[str, list[str]], target: Target | None) -> Check:
    wanted = _needed(target)
    there = {name: answer[program][0] for name, program in _SUBMITS.items() if program in answer}
    system = target.system.scheduler if target else ""
    if target and not wanted:
        return Check(
            name="scheduler",
            verdict="fail",
            found=f"the recipe {target.name} runs by {system}, which imgkit run does not support",
            hint="a recipe with scheduler: slurm or pbs; imgkit list",
        )
    if (system or next(iter(there), "")) in there:
        name = system or next(iter(there))
        return Check(name="scheduler", verdict="ok", found=f"{name}: {there[name]}")
    if broken := answer.get("broken"):
        return Check(
            name="scheduler",
            verdict="fail",
            found=f"it does not answer: {broken[0]}",
            hint="is this a login node of the cluster? imgkit remote add NAME USER@HOST --replace",
        )
    found = f"{wanted} is not on the PATH" if wanted else "neither sbatch nor qsub is on the PATH"
    return Check(
        name="scheduler",
        verdict="fail",
        found=found + (f", but {', '.join(there)} is there" if there else ""),
        hint="name a login node of the cluster: imgkit remote add NAME USER@HOST --replace",
    )


def _runtime(answer: Mapping[str, list[str]], modules: Sequence[str]) -> Check:
    if found := answer.get("runtime"):
        return Check(name="runtime", verdict="ok", found=found[0])
    wanted = f"module load {' '.join(modules)} gives none" if modules else "no singularity or apptainer here"
    has_modules = "modules" in answer
    # Some sites have it on the compute nodes only.
    return Check(
        name="runtime",
        verdict="fail" if modules and has_modules else "warn",
        found=wanted,
        hint="module avail singularity, then system.runtime.modules of the recipe"
        if has_modules
        else "look on a compute node: srun -N1 singularity --version",
    )


def _folder(answer: Mapping[str, list[str]], remote: Remote) -> Iterator[Check]:
    closed, home = answer.get("closed"), answer.get("home", [""])[0]
    owner = answer.get("owner", [""])[0]
    if not owner and (closed or not home):
        yield Check(
            name="folder",
            verdict="fail",
            found=f"{remote.folder} cannot be used: {closed[0] if closed else 'no answer'}",
            hint="another folder: imgkit remote add NAME USER@HOST:/PATH --replace",
        )
        return
    fault = store.home_error(home, owner, remote)
    free = store.free_bytes(answer["disk"][0]) if "disk" in answer else None
    shown = f"{home}, {free / 1e9:.0f} GB free" if free is not None else home
    if quota := answer.get("quota", [""])[0]:
        shown += f"; quota: {_quota(quota)}"
    if fault:
        yield Check(name="folder", verdict="fail", found=fault.what, hint=fault.hint or "")
    elif free is not None and free < _ROOM_BYTES:
        yield Check(
            name="folder",
            verdict="warn",
            found=shown,
            hint="an image takes several GB: a folder on a larger file system",
        )
    else:
        yield Check(name="folder", verdict="ok", found=shown)


def _quota(row: str) -> str:
    """A row of ``quota`` or ``lfs quota``: file system, used space, soft limit, hard limit, and more."""
    words = row.split()
    if len(words) < 4:
        return " ".join(words)
    limits = [
        f"{kind} limit {size}"
        for kind, size in zip(("soft", "hard"), words[2:4], strict=True)
        if size.strip("0kKB")
    ]
    return ", ".join((f"{words[1]} used", *(limits or ["no limit"])))


def _programs(answer: Mapping[str, list[str]], modules: Sequence[str]) -> Iterator[Check]:
    internet = answer.get("internet", ["unknown: there is no curl"])[0]
    yield Check(
        name="internet",
        verdict="ok" if internet == "yes" else "skip",
        found="from the login node" if internet == "yes" else f"{internet}; images and data come from here",
    )
    yield _modules(answer, modules)


def _modules(answer: Mapping[str, list[str]], modules: Sequence[str]) -> Check:
    if modules and "modules" not in answer:
        return Check(
            name="modules",
            verdict="fail",
            found=f"the recipe's jobs load {', '.join(modules)}, and there is no module command",
            hint="a recipe of your own without system.runtime.modules; start from: imgkit show RECIPE",
        )
    if "modules" not in answer:
        return Check(name="modules", verdict="skip", found="no module command")
    runtimes = answer["modules"][0] or "none of them is named singularity or apptainer"
    return Check(name="modules", verdict="ok", found=f"module works: {runtimes}")


def _clock(answer: Mapping[str, list[str]], here_s: float, took_s: float) -> Check:
    there = answer.get("clock", [""])[0]
    if not re.fullmatch(r"[0-9]{1,12}", there):
        return Check(name="clock", verdict="warn", found="date does not answer", hint="date +%s there")
    ahead_s = int(there) - here_s
    apart = max(0.0, abs(ahead_s) - took_s)
    late = apart > CLOCKS_S
    return Check(
        name="clock",
        verdict="warn" if late else "ok",
        found=f"{abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}"
        if late
        else f"within {CLOCKS_S:.0f} s of this machine's",
        hint="times in logs mislead; here: timedatectl set-ntp true" if late else "",
    )
