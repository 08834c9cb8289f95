"""Prepare a job and submit it, on this machine or on a remote.

The command line, the Python API and `imgkit scaling` use these functions. `prepare` writes nothing and runs
nothing. `submit_job` brings the image, the data and the code to the machine that submits the job, and submits
it there.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from imgkit_builder.base import process
from imgkit_builder.base.progress import Reporter, Silent
from imgkit_builder.data.folder import DataFolder
from imgkit_builder.jobs import (
    added_packages,
    data_mounts,
    dependencies,
    image_source,
    quoting,
    records,
    resume,
    systems,
    volume,
    workspace,
)
from imgkit_builder.jobs import code as code_folders
from imgkit_builder.jobs.code import CodeFolder
from imgkit_builder.jobs.image_source import ImageSource
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.prepared import PreparedJob
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.request import JobRequest, ResumedRun
from imgkit_builder.jobs.resolve import resolve_job
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.submitted import QueuedJob, SubmittedJob
from imgkit_builder.jobs.transport import DATA_FOLDER, Ssh, Transport, VolumeStore
from imgkit_builder.recipe import targets
from imgkit_builder.sif import image, sqsh
from imgkit_builder.workflow import baked
from imgkit_entrypoints.errors import ToolFailed, UsageError
from imgkit_entrypoints.launch import stop_protocol
from imgkit_entrypoints.system import WORKSPACE

# This shell script creates a link to a data folder in a run's copy of its code. The link replaces the empty
# folder that the code has at this path, or a link to older data. The arguments are the path of the data and
# the path of the link.
_LINK_DATA = """\
cd -- "$(dirname -- "$2")" 2> /dev/null || exit 0 # the job has not started: its script makes the link
if [ -d "$2" ] && [ ! -L "$2" ]; then rmdir -- "$2"; fi
ln -sfn -- "$1" "$2"
"""
# If the scheduler prints no job id, the job's record contains the first 1000 characters of its answer.
_MAX_ANSWER_CHARS = 1000


def prepare(
    recipe: str | Path,
    request: JobRequest,
    code: CodeFolder | None = None,
    *,
    remote: Remote | None = None,
    base: str = "",
    data: Sequence[DataFolder] | None = None,
) -> PreparedJob:
    """Return the job that `request` describes, with its script. Nothing is written, sent or submitted.

    Parameters
    ----------
    recipe : a shipped name, a recipe's file, or a .sif to run on its own system. For a remote, it can also be
        an archive, or empty for the remote's default recipe.
    code : the code of the request, as `code.read_code_folder` returns it.
    remote : the remote on which the job is submitted or that stores its files. None means this machine.
    base : the base image that replaces the recipe's base image, for a job on a remote. "" keeps the recipe's.
    data : the request's folders of data, as `data_mounts.list_folders` returns them. With None, this function
        lists them.

    Raises
    ------
    UsageError : the system cannot satisfy a value of the request.
    """
    if data is None:
        data = data_mounts.list_folders(request)
    remote_name = remote.name if remote else ""
    # The request is recorded for `imgkit resume` before anything in it is replaced.
    recorded = resume.to_json(recipe, request, base, remote=remote_name)
    # A remote with a volume (pvc) only stores files for pods. The Kubernetes client on this machine submits
    # the job.
    submits_here = remote is None or bool(remote.pvc)
    options = dependencies.with_scheduler_ids(request.allocation.options, "" if submits_here else remote_name)
    request = request.changed(options=options)
    source = None
    if remote is None:
        job = _job_of_this_machine(recipe, request, code, data)
    elif remote.pvc:
        image_source.refuse_flags(request, base)
        job = _job_in_pods(str(recipe), request, code, remote, data)
    else:
        image_source.refuse_flags(request, base)
        source = image_source.find_image_source(str(recipe), request, remote.recipe)
        source = dataclasses.replace(source, base=base)
        job = _job_on_remote(source, code, data)
    script = systems.get_system(job.system).script(job)  # last, because the script contains all of the job
    if source is not None:
        image_source.refuse_script(job, script)
    return PreparedJob(job=job, script=script, code=code, data=tuple(data), source=source, request=recorded)


def _job_on_remote(source: ImageSource, code: CodeFolder | None, data: Sequence[DataFolder]) -> Job:
    """Return the job that a remote submits, with its data and code.

    imgkit has not connected to the remote yet, so the path of its folder there is unknown. In all paths of
    the job, `image_source.UNKNOWN_HOME` stands for that folder until `make_ready` replaces it.

    Raises
    ------
    UsageError : the job's runtime cannot start a .sif, or Python would import a copy of the code in the
        image.
    """
    image_source.refuse_runtime(source)
    if code is not None:
        code_folders.refuse_shadowed_code(code, source.target, source.given_sif)
    job = source.provisional_job
    # None of the next three steps needs the result of another one.
    job = data_mounts.with_data(job, data, f"{job.directory}/{DATA_FOLDER}")
    job = added_packages.with_packages(job)
    job = _with_code(job, code, Ssh.code_store_name)
    if code is not None and source.recipe:  # only a recipe says which code its image contains
        job = job.with_warning(code_folders.image_code_notice(job))
    return job


def _job_in_pods(
    recipe: str, request: JobRequest, code: CodeFolder | None, remote: Remote, data: Sequence[DataFolder]
) -> Job:
    """Return a job in pods, which this machine submits.

    `remote` only stores the files of the job, on the volume of the pods.

    Raises
    ------
    UsageError : the image has installed a project of the code, so the pods would run the copy in the image.
    """
    job = volume.provisional_job(recipe, request, remote)
    # The data, the packages and the code do not depend on each other.
    job = data_mounts.with_data(job, data, f"{job.directory}/{DATA_FOLDER}")
    job = added_packages.with_packages(job)
    if code is not None:
        code_folders.refuse_projects_in_image(code, job.recipe)
        job = job.with_warning(code_folders.image_code_notice(job))
        job = job.with_warning(code_folders.left_out_notice(code, None))
    return _with_code(job, code, VolumeStore.code_store_name)


def _job_of_this_machine(
    recipe: str | Path, request: JobRequest, code: CodeFolder | None, data: Sequence[DataFolder]
) -> Job:
    """Return a job that is submitted on this machine, with its image, code and data.

    If `recipe` is a .sif or .sqsh, the record in the image names the system. The job then runs this image,
    unless ``--image`` names another one.

    Parameters
    ----------
    recipe : a shipped name, a recipe's file, or an image to run on its own system.
    code : the user's code, or None for a job without code.
    data : the folders of data that the request names.

    Raises
    ------
    UsageError : the system cannot satisfy a value of the request, or Python would import a copy of the code
        in the image.
    """
    recipe_file = Path(recipe)
    if image.is_sif(recipe_file) or sqsh.is_sqsh(recipe_file):
        target = baked.read_target(recipe_file)
        if not request.container.image:
            request = request.changed(image=str(recipe_file.absolute()))
    else:
        target = targets.load_target(recipe)
    job = added_packages.with_packages(resolve_job(target, request))
    image_file = Path(job.container.image)
    # Only a .sif on this machine can be searched for installed projects. For any other image, the checks
    # below use the recipe.
    sif = None
    if image.is_sif(image_file):
        sif = image_file
    code_folders.refuse_shadowed_bind(job, sif)
    job = _with_code(job, code, Transport.code_store_name)
    if code is not None:
        job = _with_local_code(job, code, sif)
    return data_mounts.with_data(job, data)  # this comes last, because links to the data need the run folder


def _with_local_code(job: Job, code: CodeFolder, sif: Path | None) -> Job:
    """Return `job` with warnings about its code, and with a run folder if imgkit itself has to create one.

    On a system with a scheduler, the job's script creates the run folder, and its name is unknown so far.
    Without a scheduler there is no such script, so imgkit creates the folder and copies the code into it
    before the start.

    Parameters
    ----------
    sif : the job's image if it is a .sif on this machine, or None.

    Raises
    ------
    UsageError : Python would import a copy of the code that the image has installed.
    """
    if runtime_of(job).has_container:
        code_folders.refuse_shadowed_code(code, job.recipe, sif)
        if not job.request.container.image:
            job = job.with_warning(code_folders.image_code_notice(job))
    if systems.get_system(job.system).code_copier == "imgkit":  # otherwise, the job's script does it
        job = code_folders.with_new_run_folder(job)
    # The files in a .sif or .sqsh on this machine show whether the job may need a file that is left out.
    image_file = sif
    if sqsh.is_sqsh(Path(job.container.image)):
        image_file = Path(job.container.image)
    return job.with_warning(code_folders.left_out_notice(code, image_file))


def _with_code(job: Job, code: CodeFolder | None, store_name: str) -> Job:
    """Return `job` with the version of the code that its run gets a copy of.

    If `code` is None, a resumed run goes on with the version that it already has. Any other job is then
    returned unchanged.

    Parameters
    ----------
    store_name : the name of the store of code in the job's folder, such as ``.imgkit-code``.
    """
    resumed = job.request.resumed
    record = None
    if code is not None:
        record = code.record
    elif resumed is not None:
        record = resumed.code
    if record is None:
        return job
    return code_folders.with_code(job, record, job.directory / store_name)


def submit_job(prepared: PreparedJob, transport: Transport, report: Reporter | None = None) -> SubmittedJob:
    """Bring the image, data and code of a job to its machine, submit the job, and return its saved record.

    Parameters
    ----------
    transport : reaches the machine that submits the job. See `handle.transport_to`.
    report : receives progress and warnings. Without it, nothing is reported.

    Raises
    ------
    UsageError : the system cannot satisfy the request, or has no scheduler.
    ToolMissing : the scheduler's command is not on PATH.
    ToolFailed : the scheduler refused the job. The error quotes the scheduler's message.
    ImgkitError : a build, a conversion or a transfer failed.
    """
    if prepared.script.foreground:
        raise _foreground_error(prepared.job)
    report = report or Silent()
    ready = make_ready(prepared, transport, report)
    return start_job(ready, transport, report)


def _foreground_error(job: Job) -> UsageError:
    """Return the error for a job without an id, because it runs in the terminal that starts it.

    Only the command line can run such a job.
    """
    if job.is_interactive:
        reason, where = "the job is interactive", "interactive"
    else:
        reason, where = f"{job.recipe.name} has no scheduler", "system.scheduler"
    return UsageError(
        f"{reason}: the run would take place in this process",
        where=where,
        hint=f"imgkit run {job.recipe.file} ...",
    )


def start_job(ready: PreparedJob, transport: Transport, report: Reporter) -> SubmittedJob:
    """Submit a job, save its record on this machine, and return the record.

    If the record cannot be saved, this is only reported. The job is in the queue by then, and after an
    exception the user might submit it a second time.

    Parameters
    ----------
    ready : a job whose files `make_ready` has brought to its machine.

    Raises
    ------
    ToolMissing : the scheduler's command is not on PATH.
    ToolFailed : the scheduler refused the job. The error quotes the scheduler's message.
    """
    record = _submit_script(ready, transport)
    try:
        records.save_record(record)
    except OSError as error:
        report.note(
            f"the job {record.job.handle} is submitted, but its record cannot be saved "
            f"({error.filename}: {error.strerror}): imgkit status, logs and cancel will not know it; "
            "next time: export XDG_STATE_HOME=FOLDER"
        )
    return record


def make_ready(prepared: PreparedJob, transport: Transport, report: Reporter) -> PreparedJob:
    """Bring the image, data, code and entry points of a job to the machine where it starts.

    The result is the job with the paths on that machine, and with a script that contains these paths.

    Raises
    ------
    ImgkitError : a build, a conversion or a transfer failed, or the image cannot run the job.
    """
    for warning in prepared.job.warnings:
        report.note(warning)  # before the long steps, so that the user can still stop
    data = data_mounts.download(prepared.data, prepared.job.request, report)
    # The image comes first: `prepare_image` reads what a remote already has, and the other steps use the
    # result.
    with_image = transport.prepare_image(dataclasses.replace(prepared, data=data), report)
    code = with_image.code
    job = transport.bring_data(with_image, report)
    job = _with_code(job, code, transport.code_store_name)
    # imgkit itself creates the run folder of a job that starts at once or in pods, and brings the code with
    # it, below. The script of any other job creates the folder, and copies the code from the store of code.
    creates_run_folder = job.run_folder != ""
    if code is not None and not creates_run_folder:
        transport.put_code(code, transport.home_of(job), report)
    # To look for Python, this starts the image, which must be in its place by now.
    job = transport.with_entry_points(dataclasses.replace(with_image, job=job))
    if job.container.entry_points is not None:
        transport.put_entry_points(job, report)
    if creates_run_folder:
        transport.make_run_folder(job, code, report)
    if job.request.resumed is not None:
        _prepare_resumed_folder(job.request.resumed, code, job, transport)
    return _with_job(with_image, job)  # writes the script again, with the new paths


def with_files_of(prepared: PreparedJob, ready: PreparedJob) -> PreparedJob:
    """Return `prepared` with the image, code and entry points that `make_ready` has brought for another job.

    `imgkit scaling` submits the same request on different numbers of nodes. With this function, the files are
    sent only once.

    Parameters
    ----------
    prepared : a job that uses the same files as `ready`, but is not ready itself.
    ready : a job of the same request, whose files are on its machine already.
    """
    job = prepared.job
    if prepared.source is not None:  # a job on a remote; its folder there is known from `ready`
        job = prepared.source.job_on_remote(str(ready.job.directory), ready.job.container.image)
    # The container names the image, the code and the entry points, and is the same for any number of nodes.
    job = dataclasses.replace(job, container=ready.job.container)
    return dataclasses.replace(_with_job(prepared, job), image_id=ready.image_id)


def bind_entry_points(prepared: PreparedJob, transport: Transport) -> PreparedJob:
    """Return `prepared` with the entry points bound into an image that imgkit did not build.

    Python is started once in the image, to find out where it searches for packages. Only the result of this
    probe is written, to imgkit's cache.
    """
    return _with_job(prepared, transport.with_entry_points(prepared))


def _with_job(prepared: PreparedJob, job: Job) -> PreparedJob:
    """Return `prepared` with its job replaced by `job`, and with the script of that job."""
    return dataclasses.replace(prepared, job=job, script=systems.get_system(job.system).script(job))


def _prepare_resumed_folder(
    resumed: ResumedRun, code: CodeFolder | None, job: Job, transport: Transport
) -> None:
    """Prepare the folder of an earlier run, so that the new job can go on in it.

    The user's current code and data are brought into the folder. Two files of the earlier job are removed.
    The file ``stop``, by which a person ends a run, would stop the new job at once. The file with the exit
    code would make the new job look finished.

    Parameters
    ----------
    code : the user's current code, or None if the run goes on with its copy as it is.

    Raises
    ------
    UsageError : jobs now run in another folder than the earlier run, or both the run and the user have
        changed the same file.
    ToolFailed : the copy cannot be written.
    """
    home = transport.home_of(job)
    # The new job's script expects the folder in `home`. On a remote, the user may have changed the folder
    # since.
    if resumed.folder.parent != home / "runs":
        raise UsageError(
            f"the run is in {resumed.folder}, but jobs now run in {home}",
            where=transport.name or "--directory",
            hint=f"imgkit remote add {transport.name} ... --replace, with the folder of the run",
        )
    if code is not None:
        store = home / transport.code_store_name
        workspace.update_workspace(resumed, store, code.record, transport.run_script)
    for link_name, data_path in runtime_of(job).data_links(job).items():
        link = resumed.folder / WORKSPACE / link_name
        transport.run_script(_LINK_DATA, (data_path, str(link)), ())
    # This comes last, so that after an error above the folder still shows how the earlier job ended.
    old_files = [str(resumed.folder / name) for name in (stop_protocol.BY_PERSON, stop_protocol.RESULT)]
    transport.run_script('rm -f -- "$@"\n', old_files, ())


def _submit_script(ready: PreparedJob, transport: Transport) -> SubmittedJob:
    """Submit the script of `ready`, and return the record by which imgkit follows the job.

    Once the scheduler's command has succeeded, the job exists, whatever the command has printed. If the
    output contains no job id, the record gets the output and an id that imgkit chooses.
    """
    job = ready.job
    output = _call_scheduler(ready, transport)
    job_id, cluster = _parse_job_id(output, job)
    memory = job.allocation.memory
    entry_points = job.container.entry_points
    record = SubmittedJob(
        job=_describe_queued_job(ready, job_id, cluster, remote=transport.name),
        recipe=job.recipe.name,
        # An answer marks a job whose id is unknown. imgkit then never asks the scheduler about it.
        answer=None if job_id else output[:_MAX_ANSWER_CHARS],
        code=job.container.code,
        bound_entry_points=entry_points.version if entry_points else "",
        submitted=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=job.command,
        memory=memory.option if memory else "",
        image_id=ready.image_id,
        request=ready.request,
    )
    return transport.with_store(record, job)  # for a job in pods, its files are on another machine


def _describe_queued_job(ready: PreparedJob, job_id: str, cluster: str, *, remote: str) -> QueuedJob:
    """Return the part of a job's record by which imgkit asks the scheduler about the job.

    Parameters
    ----------
    job_id : the scheduler's id, or "" if it is unknown. imgkit then chooses an id.
    cluster : the cluster that has the job, or "" unless the site has several clusters.
    remote : the remote on which the job was submitted, or "" for this machine.
    """
    job = ready.job
    resumed = job.request.resumed
    return QueuedJob(
        # imgkit's own id contains random digits, because it names the file of the record and must be unique.
        id=job_id or f"unknown-{secrets.token_hex(4)}",
        cluster=cluster,
        system=job.system,
        kind=ready.script.kind,
        name=job.name,
        directory=job.directory,
        queue=job.allocation.queue,
        remote=remote,
        array=ready.script.is_array,
        shell_line=runtime_of(job).shell_line(job),
        run_name=resumed.folder.name if resumed else "",
    )


def _call_scheduler(ready: PreparedJob, transport: Transport) -> str:
    """Submit the script of `ready`, and return the output of the scheduler's command, such as ``"4711\\n"``.

    Raises
    ------
    ToolMissing : the scheduler's command is not on PATH.
    ToolFailed : the scheduler refused the job.
    """
    try:
        answer = process.read_answer(transport.start(ready.job, ready.script), ready.job.system)
    except process.TooLong as error:
        # A command with too much output may have submitted the job nevertheless. The first part of the output
        # may contain the id.
        answer = error.start
    except ToolFailed as error:
        # In pods, the name of a job is its id. So kubectl and runai refuse a second job of the same name.
        if not re.search("already ?exists", f"{error.what}\n{error.hint}", re.IGNORECASE):
            raise
        name = ready.job.name
        hint = f"nothing was started: a job named {name} exists; choose --name OTHER, or delete that job"
        hint = f"{hint}\n{error.hint or ''}".strip()
        raise ToolFailed(error.what, where=error.where, hint=hint) from error
    return answer.decode(errors="replace")


def _parse_job_id(answer: str, job: Job) -> tuple[str, str]:
    """Return the id and the cluster of a job from the scheduler's answer to its submission: ``("4711", "")``.

    The cluster is empty unless the site has several clusters. Both values are empty if `answer` contains no
    id.
    """
    try:
        id_text = systems.get_system(job.system).parse_job_id(answer, job.name)
    except Exception:
        # A plug-in can raise any exception. The job exists nevertheless, and only its id is unknown.
        return "", ""
    # sbatch prints "4711;CLUSTER" on a site with several clusters. Both parts name files and become
    # arguments.
    job_id, _, cluster = id_text.partition(";")
    if not quoting.is_job_id(job_id) or (cluster and not quoting.is_job_id(cluster)):
        return "", ""
    return job_id, cluster
