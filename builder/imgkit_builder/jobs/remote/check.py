"""Check a remote: run one script there, and turn its answer into a list of checks.

A single script is used because each further command would need another round trip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from imgkit_builder.base.checks import Check
from imgkit_builder.jobs import systems
from imgkit_builder.jobs.remote import store
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.remote.connection import FIND_PROGRAM, Connection, unreadable_answer
from imgkit_builder.jobs.remote.store import Answer, first_value
from imgkit_builder.recipe.systems import SHIPPED
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_builder.recipe.targets import Target

_LOW_SPACE_BYTES = 20e9
"""Free space below which the check warns.

An image of a few GB, its partial copy and the runs must all fit.
"""

# The script that collects everything for the checks. Its arguments are the modules of the recipe. Each line
# of its output is a key, a blank and a value:
#
# login     the user, the host, its processor and the login shell
# lacks     a program that is missing, one per line
# sbatch    its version, and the same for the submit program of each other scheduler
# broken    the error of such a program that is there, but fails
# owner     the owner of imgkit's folder if it belongs to another user
# home      the real path of imgkit's folder
# closed    the reason why nothing can be written there
# volume    the root of the volume that has the folder
# ids       the ids of the user
# disk      the row of df about the file system
# quota     the row of quota or lfs about the user
# runtime   the version of Singularity or Apptainer
# modules   the modules of these names, if there is a module command
# end       the last line, without which the output is cut short
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
"""
    + store.FIND_VOLUME
    + """\
    probe=.imgkit-probe.$$
    if error=$( (: > "$probe") 2>&1); then rm -f "$probe"; else echo "closed $error"; fi
    echo "disk $(df -Pk . | tail -n 1)"
else
    echo "closed $error"
fi
# The quota of the file system that has the folder. Lustre has its own program, lfs. It prints a long name of
# a file system on a separate line, and below the numbers "using default" if they hold for all users.
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


def check_remote(connection: Connection, target: Target | None) -> tuple[Check, ...]:
    """Check everything on the remote that a job or a transfer needs, and return the results.

    Parameters
    ----------
    target : the recipe of the remote, whose scheduler and modules are checked. None if the remote has no
        recipe.

    Raises
    ------
    Cut : ssh cannot log in.
    ToolFailed : the remote's answer is cut short, or is not the output of imgkit's script.
    """
    submit_programs = _submit_programs()
    expected_programs = [submit_programs[name] for name in _expected_schedulers(target)]
    script_variables = {
        "folder": connection.remote.folder,
        "volume": connection.remote.volume,
        # The lines `FIND_PROGRAM` of the script add the PATH of a login shell if this program is not on PATH.
        # Any of the expected programs shows whether that is needed.
        "program": expected_programs[0],
        "schedulers": " ".join(submit_programs.values()),
    }
    output = connection.stream(_PROBE, script_variables, args=_modules_of_recipe(target))
    return parse_probe(connection.answer(output), connection, target)


def parse_probe(output: bytes, connection: Connection, target: Target | None) -> tuple[Check, ...]:
    """Return the checks for the `output` of `_PROBE`, the script that `check_remote` runs on the remote.

    Each line of the output is a key and a value, such as ``home /scratch/me/imgkit``. A key can occur in
    several lines.

    Parameters
    ----------
    connection : the connection by which the script ran.
    target : the recipe of the remote, whose scheduler and modules are checked. None if it has no recipe.

    Raises
    ------
    ToolFailed : the output is cut short, or is not the output of imgkit's script.
    """
    answer: dict[str, list[str]] = {}
    for line in output.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        answer.setdefault(key, []).append(value.strip())
    # The script prints "end" as its last line.
    if "end" not in answer:
        raise unreadable_answer(connection.remote.name, output)
    login = _check_login(answer, connection)
    folder = _check_folder(answer, connection.remote)
    if connection.remote.pvc:
        # Such a remote only stores the files of pods. It needs no scheduler and no runtime.
        return (*login, folder, _check_volume(answer, connection.remote))
    runtime = _check_runtime(answer, _modules_of_recipe(target))
    return (*login, _check_scheduler(answer, target), runtime, folder)


def _submit_programs() -> Mapping[str, str]:
    """Return the program that submits jobs for each system: ``{"slurm": "sbatch", ...}``.

    Systems to which a remote cannot submit jobs are left out.
    """
    programs = {}
    for name in SHIPPED:
        program = systems.get_system(name).queue.submit
        if program:
            programs[name] = program
    return programs


def _expected_schedulers(target: Target | None) -> Sequence[str]:
    """Return the names of the schedulers of which the remote must have at least one, such as ``["slurm"]``.

    This is the scheduler of the recipe. If there is no recipe, or if imgkit cannot submit to its scheduler,
    all schedulers are returned to which imgkit can submit.
    """
    programs = _submit_programs()
    if target is not None and target.system.scheduler in programs:
        return [target.system.scheduler]
    return list(programs)


def _modules_of_recipe(target: Target | None) -> tuple[str, ...]:
    """Return the environment modules that jobs of the recipe load before they start the container runtime."""
    if target is None:
        return ()
    return tuple(target.system.runtime.modules)


def _check_login(answer: Answer, connection: Connection) -> Iterator[Check]:
    """Yield the checks of the connection, and of the basic programs on the remote."""
    login = first_value(answer, "login") or "?"
    if connection.socket_folder:
        login += "; one connection for all commands"
    yield Check("login", "ok", login)
    if connection.unshared_reason:
        message = f"every command opens its own connection: {connection.unshared_reason}"
        hint = "export XDG_RUNTIME_DIR=/run/user/$(id -u), or another short folder of mode 700"
        yield Check("sharing", "warn", message, hint)
    if "lacks" in answer:
        message = f"no {', '.join(answer['lacks'])}"
        hint = (
            "there: dnf install coreutils findutils rsync, or apt-get install; plain commands must find them"
        )
        yield Check("tools", "fail", message, hint)


def _check_scheduler(answer: Answer, target: Target | None) -> Check:
    """Return the check of the recipe's scheduler, or of any scheduler if the remote has no recipe.

    The remote must have the program that submits jobs, such as ``sbatch``, and this program must work.
    """
    programs = _submit_programs()
    if target is not None and target.system.scheduler not in programs:
        message = (
            f"the recipe {target.name} runs by {target.system.scheduler}, which imgkit run does not support"
        )
        hint = f"a recipe with scheduler: {' or '.join(programs)}; imgkit list"
        return Check("scheduler", "fail", message, hint)
    for name in _expected_schedulers(target):
        if programs[name] in answer:
            version = first_value(answer, programs[name])
            return Check("scheduler", "ok", f"{name}: {version}")
    if "broken" in answer:
        message = f"it does not answer: {first_value(answer, 'broken')}"
    else:
        message = _describe_missing_scheduler(answer, target)
    hint = "name a login node of the cluster: imgkit remote add NAME USER@HOST --replace"
    return Check("scheduler", "fail", message, hint)


def _describe_missing_scheduler(answer: Answer, target: Target | None) -> str:
    """Return which scheduler is missing: ``"sbatch is not on the PATH, but pbs is there"``."""
    programs = _submit_programs()
    expected_programs = [programs[name] for name in _expected_schedulers(target)]
    value = f"{' or '.join(expected_programs)} is not on the PATH"
    other_schedulers = [name for name, program in programs.items() if program in answer]
    if other_schedulers:
        value += f", but {', '.join(other_schedulers)} is there"
    return value


def _check_runtime(answer: Answer, modules: Sequence[str]) -> Check:
    """Return the check of Singularity or Apptainer. The remote needs one of them to start a .sif.

    Parameters
    ----------
    modules : the environment modules that the recipe's jobs load before they start the runtime.
    """
    if "runtime" in answer:
        return Check("runtime", "ok", first_value(answer, "runtime"))
    if "modules" not in answer:  # the remote has no command "module"
        return _runtime_without_module_command(modules)
    available_modules = first_value(answer, "modules") or "none of that name"
    hint = f"system.runtime.modules of the recipe; module avail lists: {available_modules}"
    if modules:
        return Check("runtime", "fail", f"module load {' '.join(modules)} gives none", hint)
    return Check("runtime", "warn", "no singularity or apptainer here", hint)


def _runtime_without_module_command(modules: Sequence[str]) -> Check:
    """Return the check of a remote without Singularity, Apptainer and the command ``module``.

    Parameters
    ----------
    modules : the environment modules that the recipe's jobs load. Without the command ``module``, these jobs
        would fail.
    """
    if modules:
        value = f"the recipe's jobs load {', '.join(modules)}, and there is no module command"
        hint = "a recipe of your own without system.runtime.modules; start from: imgkit show RECIPE"
        return Check("runtime", "fail", value, hint)
    # At some sites, only the compute nodes have the runtime. So this is a warning and not a failure.
    hint = "look on a compute node: srun -N1 singularity --version"
    return Check("runtime", "warn", "no singularity or apptainer here", hint)


def _check_folder(answer: Answer, remote: Remote) -> Check:
    """Return the check of imgkit's folder on the remote: its access, its owner and its free space.

    If the folder cannot be used, the check fails. If it has too little space, the check only warns.
    """
    home = first_value(answer, "home")
    owner = first_value(answer, "owner")
    access_error = first_value(answer, "closed")
    if not home and not access_error:
        access_error = "no answer"
    if access_error and not owner:
        hint = "another folder: imgkit remote add NAME USER@HOST:/PATH --replace"
        return Check("folder", "fail", f"{remote.folder} cannot be used: {access_error}", hint)
    error = store.home_error(home, owner, remote)
    if error is not None:
        return Check("folder", "fail", error.what, error.hint or "")
    return _check_space(answer, home)


def _check_space(answer: Answer, home: str) -> Check:
    """Return the check of the free space and the quota in imgkit's folder, whose path is `home`."""
    value = home
    free_bytes = store.free_bytes(first_value(answer, "disk"))
    if free_bytes is not None:
        value += f", {free_bytes / 1e9:.0f} GB free"
    quota = first_value(answer, "quota")
    if quota:
        value += f"; quota: {_format_quota(quota)}"
    if free_bytes is not None and free_bytes < _LOW_SPACE_BYTES:
        return Check("folder", "warn", value, "an image takes several GB: a folder on a larger file system")
    return Check("folder", "ok", value)


def _check_volume(answer: Answer, remote: Remote) -> Check:
    """Return the check of the path at which pods see imgkit's folder. It also shows the user's ids."""
    home = first_value(answer, "home")
    try:
        path = store.pod_folder(remote, home, first_value(answer, "volume"))
    except UsageError as error:
        return Check("volume", "fail", error.what, error.hint or "")
    ids = first_value(answer, "ids") or "?"
    return Check("volume", "ok", f"{path} in pods, for the user and group {ids}")


def _format_quota(row: str) -> str:
    """Return a short form of a line of ``quota`` or ``lfs quota``.

    For example: ``"/home 3G 5G 6G ..." -> "3G used, ..."``. The columns are the file system, the used space,
    the soft limit and the hard limit. A limit of 0 means no limit.
    """
    columns = row.split()
    if len(columns) < 4:
        return " ".join(columns)
    _, used, soft_limit, hard_limit, *_ = columns
    limits = []
    for kind, limit in (("soft", soft_limit), ("hard", hard_limit)):
        is_zero = not limit.strip("0kKB")  # the limit is "0", "0k" or "0KB"
        if not is_zero:
            limits.append(f"{kind} limit {limit}")
    if not limits:
        limits.append("no limit")
    return ", ".join([f"{used} used", *limits])
