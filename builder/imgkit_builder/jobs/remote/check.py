"""Report what a remote has: one script in one round trip, and a verdict for each line of its answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from imgkit_builder.base.checks import Check
from imgkit_builder.jobs import systems
from imgkit_builder.jobs.remote import store
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.remote.connection import FIND_PROGRAM, Connection, unreadable
from imgkit_builder.recipe.systems import SHIPPED

if TYPE_CHECKING:
    from imgkit_builder.recipe.targets import Target

_LOW_SPACE_BYTES = 20e9
"""Free space below which a warning comes: an image of a few GB, its part file and the runs."""
Answer = Mapping[str, Sequence[str]]
"""Values of the remote's answer by their key."""

# Each line of the answer is a name, a blank and a value.
_PROBE = (
    """\
echo "login $(id -un) on $(uname -n), $(uname -m), ${SHELL:-sh}"
tools='cat cut dd df du find grep head ls mkdir mv rm rsync sed sha256sum sleep tail timeout touch tr wc'
for tool in $tools; do
    command -v "$tool" > /dev/null 2>&1 || echo "lacks $tool"
done
"""
    + FIND_PROGRAM
    + """\
for tool in $schedulers; do
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
echo end
"""
)


def examine(connection: Connection, target: Target | None) -> tuple[Check, ...]:
    """Return a check for each thing that a job or a transfer needs there.

    Parameters
    ----------
    target : the recipe of the remote; its scheduler and modules are those that are needed.

    Raises
    ------
    Cut : ssh cannot log in.
    ToolFailed : the answer is cut short, or not that of imgkit's script.
    """
    modules = target.system.runtime.modules if target else ()
    programs = list(_submit_programs().values())
    values = {
        "folder": connection.remote.folder,
        "program": _needed_program(target) or programs[0],
        "schedulers": " ".join(programs),
    }
    output = connection.answer(connection.stream(_PROBE, values, args=modules))
    return read(output, connection, target)


def read(output: bytes, connection: Connection, target: Target | None) -> tuple[Check, ...]:
    """Return what the answer `output` says; the rest is as of `examine`.

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
    )


def _needed_program(target: Target | None) -> str:
    """Return the program that submits jobs of the recipe; empty where no remote has it."""
    return _submit_programs().get(target.system.scheduler, "") if target else ""


def _submit_programs() -> Mapping[str, str]:
    """Return the program of each system that queues scripts on a login node, by the system's name."""
    names = (name for name in SHIPPED if systems.named(name).queue.submit)
    return {name: systems.named(name).queue.submit for name in names}


def _login(answer: Answer, connection: Connection) -> Iterator[Check]:
    shared = "; one connection for all commands" if connection.socket_folder else ""
    yield Check("login", "ok", answer.get("login", ["?"])[0] + shared)
    if connection.unshared_reason:
        value = f"every command opens its own connection: {connection.unshared_reason}"
        hint = "export XDG_RUNTIME_DIR=/run/user/$(id -u), or another short folder of mode 700"
        yield Check("sharing", "warn", value, hint)
    if missing := answer.get("lacks"):
        hint = (
            "there: dnf install coreutils findutils rsync, or apt-get install; plain commands must find them"
        )
        yield Check("tools", "fail", f"no {', '.join(missing)}", hint)


def _scheduler(answer: Answer, target: Target | None) -> Check:
    name, program = "scheduler", _needed_program(target)
    versions = {system: answer[tool][0] for system, tool in _submit_programs().items() if tool in answer}
    system = target.system.scheduler if target else next(iter(versions), "")
    if target and not program:
        value = f"the recipe {target.name} runs by {system}, which imgkit run does not support"
        return Check(
            name, "fail", value, f"a recipe with scheduler: {' or '.join(_submit_programs())}; imgkit list"
        )
    if system in versions:
        return Check(name, "ok", f"{system}: {versions[system]}")
    hint = "name a login node of the cluster: imgkit remote add NAME USER@HOST --replace"
    if errors := answer.get("broken"):
        return Check(name, "fail", f"it does not answer: {errors[0]}", hint)
    value = f"{program or ' or '.join(_submit_programs().values())} is not on the PATH"
    if versions:
        value += f", but {', '.join(versions)} is there"
    return Check(name, "fail", value, hint)


def _runtime(answer: Answer, modules: Sequence[str]) -> Check:
    if versions := answer.get("runtime"):
        return Check("runtime", "ok", versions[0])
    if modules and "modules" not in answer:
        value = f"the recipe's jobs load {', '.join(modules)}, and there is no module command"
        hint = "a recipe of your own without system.runtime.modules; start from: imgkit show RECIPE"
        return Check("runtime", "fail", value, hint)
    value = f"module load {' '.join(modules)} gives none" if modules else "no singularity or apptainer here"
    if "modules" in answer:
        names = answer["modules"][0] or "none of that name"
        hint = f"system.runtime.modules of the recipe; module avail lists: {names}"
        return Check("runtime", "fail" if modules else "warn", value, hint)
    # Some sites have it on the compute nodes only.
    return Check("runtime", "warn", value, "look on a compute node: srun -N1 singularity --version")


def _folder(answer: Answer, remote: Remote) -> Check:
    errors, home, owner = (answer.get(key, [""])[0] for key in ("closed", "home", "owner"))
    if not owner and (errors or not home):
        value = f"{remote.folder} cannot be used: {errors or 'no answer'}"
        hint = "another folder: imgkit remote add NAME USER@HOST:/PATH --replace"
        return Check("folder", "fail", value, hint)
    if error := store.home_error(home, owner, remote):
        return Check("folder", "fail", error.what, error.hint or "")
    free = store.free_bytes(answer["disk"][0]) if "disk" in answer else None
    value = home if free is None else f"{home}, {free / 1e9:.0f} GB free"
    if quota := answer.get("quota", [""])[0]:
        value += f"; quota: {_quota(quota)}"
    if free is not None and free < _LOW_SPACE_BYTES:
        return Check("folder", "warn", value, "an image takes several GB: a folder on a larger file system")
    return Check("folder", "ok", value)


def _quota(row: str) -> str:
    """Shorten a row of ``quota`` or ``lfs quota``: file system, used space, soft and hard limit, and more."""
    fields = row.split()
    if len(fields) < 4:
        return " ".join(fields)
    sizes = zip(("soft", "hard"), fields[2:4], strict=True)
    limits = [f"{kind} limit {size}" for kind, size in sizes if size.strip("0kKB")]
    return ", ".join((f"{fields[1]} used", *(limits or ["no limit"])))
