"""Prepare jobs in pods whose files are on a remote.

ssh and rsync access the files on the remote. The pods see the same files on a volume, under another path. For
example, imgkit's folder is ``/mnt/mlo/scratch/homes/me/imgkit`` on the remote, and
``/mloscratch/homes/me/imgkit`` in the pods. The jobs are submitted by the Kubernetes client on this machine.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path, PurePosixPath

from imgkit_builder.jobs import code as code_folders
from imgkit_builder.jobs.image_source import UNKNOWN_HOME, find_title
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.remote.connection import Connection
from imgkit_builder.jobs.remote.store import Store, UsedPaths, pod_folder
from imgkit_builder.jobs.request import JobRequest, SystemFlags
from imgkit_builder.jobs.resolve import resolve_job
from imgkit_builder.jobs.runtimes.pod import Pod
from imgkit_builder.jobs.systems import pods
from imgkit_builder.recipe import targets
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints.errors import UsageError

# Text that stands for the user's ids on a remote until imgkit has connected to the remote.
UNKNOWN_IDS = "UID:GID"

# This script creates the run folder of a job. The folder must exist before the pods start, because Kubernetes
# would create it as root. The note in the folder "jobs" lists what the job uses, so that `imgkit remote gc`
# keeps it. gc cannot find out on the remote whether the pods are still running.
_MAKE_RUN_FOLDER = """\
umask 077
cd -- "$folder" && printf '%s\\n' "$note" > "jobs/$id" || exit 1
if [ -z "$resumed" ]; then mkdir -- "runs/$name" || exit 1; fi
cd -- "runs/$name" || exit 1
if [ -n "$record" ]; then printf '%s' "$script" > "$script_name" || exit 1; fi
# A copy that is there is of the code that the file names, until it is brought to today's.
if [ -n "$record" ] && [ ! -d workspace ]; then printf '%s\\n' "$record" > code.json; fi
"""


def provisional_job(recipe: str, request: JobRequest, remote: Remote) -> Job:
    """Return the job in pods, before imgkit has connected to the remote that stores the job's files.

    The job gets a new run folder, or the folder of the run that it resumes. Two values are known only on the
    remote, so texts stand for them until `job_with_pod_paths` replaces them: `UNKNOWN_HOME` for imgkit's
    folder, and `UNKNOWN_IDS` for the ids of the user.

    Raises
    ------
    UsageError : the system has no pods, or cannot satisfy the request.
    """
    target = targets.load_target(find_title(recipe, request, remote.recipe))
    if target.system.runtime.kind != Pod.kind:
        raise UsageError(
            f"the remote {remote.name} only stores files for pods, and {target.title} has none",
            where="--on",
            hint=f"a recipe with scheduler: runai, or imgkit remote add {remote.name} ... without --pvc",
        )
    volume_path = pods.parse_claim(remote.pvc).path
    home = f"{volume_path}{UNKNOWN_HOME}"
    job = _resolve_pod_job(target, request, remote, home, UNKNOWN_IDS)
    if request.resumed is None:
        return code_folders.with_new_run_folder(job)
    return code_folders.with_run_folder(job, f"{home}/runs/{request.resumed.folder.name}")


def job_with_pod_paths(store: Store, provisional: Job, remote: Remote) -> Job:
    """Return a job of `provisional_job` with its real paths in the pods, and the user's ids on the remote.

    Raises
    ------
    UsageError : imgkit's folder on the remote is not on the volume.
    """
    home = pod_folder(remote, store.home, store.volume)
    job = _resolve_pod_job(provisional.recipe, provisional.request, remote, home, store.ids)
    return code_folders.with_run_folder(job, f"{home}/runs/{PurePosixPath(provisional.run_folder).name}")


def _resolve_pod_job(target: Target, request: JobRequest, remote: Remote, home: str, ids: str) -> Job:
    """Return the job of `request` in pods, with the remote's volume mounted.

    Parameters
    ----------
    home : the path of imgkit's folder in the pods. The job runs in this folder.
    ids : the user id and group id of the pods: ``UID:GID``.
    """
    flags = request.flags(pods.PodFlags)
    volumes = tuple(dict.fromkeys((remote.pvc, *flags.pvcs)))  # each volume once
    # The new flags for pods replace those of the request. The flags for other systems stay.
    system_flags: list[SystemFlags] = [dataclasses.replace(flags, pvcs=volumes, run_as=ids)]
    for other_flags in request.system_flags:
        if not isinstance(other_flags, pods.PodFlags):
            system_flags.append(other_flags)
    request = request.changed(directory=Path(home), system_flags=tuple(system_flags))
    return resolve_job(target, request)


def make_run_folder(connection: Connection, store: Store, job: Job) -> None:
    """Create the run folder of `job` on the remote, with the script that starts the job in its pods.

    The script copies the code and starts the command. A job without code needs no script. If the job resumes
    a run, the folder already exists and only gets a new script.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached, or cannot create the folder.
    """
    run_name = PurePosixPath(job.run_folder).name
    used = UsedPaths.of_job(job, run_name)
    script_variables = {
        "folder": store.home,
        # The name of the note in "jobs" is an id, such as "20261128-224000-3f2a".
        "id": run_name.removeprefix(f"{job.name}-"),
        "name": run_name,
        "note": f"{used.system}\n{used.lines_after_system()}",
        "resumed": "yes" if job.request.resumed else "",
    }
    if job.container.code is None:
        script_variables["record"] = ""  # without code, the script on the remote writes no start script
    else:
        script_variables |= {
            "record": job.container.code.text,
            "script": pods.start_script(job),
            "script_name": pods.START_SCRIPT,
        }
    connection.run(_MAKE_RUN_FOLDER, script_variables)
