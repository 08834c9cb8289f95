"""Slurm: write a batch script, or the command that allocates nodes for interactive work.

srun starts one task on each node, the node agent of imgkit, which starts the workers there. Earlier steps of
the script check the nodes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from imgkit_builder.jobs.job import Argv, Job, Script
from imgkit_builder.jobs.memory import size_text
from imgkit_builder.jobs.quoting import ShellText, command_line, quote
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.submitted import JobState, JobStatus, QueuedJob, WaitInfo
from imgkit_builder.jobs.systems import (
    NEW_CONTAINER,
    OPTIONAL,
    Abilities,
    JobShell,
    QueueCommands,
    System,
    array_state,
    find_job_id,
    mounted_folders,
    options_with_values,
    refuse_whole_array,
    scheduler_options,
    with_folder_check,
)
from imgkit_builder.jobs.templates import render_template, run_folder_lines
from imgkit_builder.recipe.systems import SHIPPED
from imgkit_entrypoints.schedulers import slurm

# With --parsable, sbatch prints only the job id, and the cluster if the site has several.
SUBMIT = ("sbatch", "--parsable")
STATES: Mapping[str, JobState] = {
    "PENDING": "waiting",
    "CONFIGURING": "waiting",
    "REQUEUED": "waiting",
    "REQUEUE_FED": "waiting",
    "REQUEUE_HOLD": "waiting",
    "RESV_DEL_HOLD": "waiting",
    "SPECIAL_EXIT": "waiting",
    "RUNNING": "running",
    "COMPLETING": "running",
    "RESIZING": "running",
    "SIGNALING": "running",
    "STAGE_OUT": "running",
    "STOPPED": "running",
    "SUSPENDED": "running",
    "COMPLETED": "succeeded",
    "CANCELLED": "cancelled",
    "BOOT_FAIL": "failed",
    "DEADLINE": "failed",
    "FAILED": "failed",
    "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "PREEMPTED": "failed",
    "REVOKED": "failed",
    "TIMEOUT": "failed",
}
"""The meaning of Slurm's job states (slurm.schedmd.com/job_state_codes.html)."""
_STATE = re.compile(
    r"\bJobState=(?P<scontrol>[A-Z_]+)"
    r"|^ *[0-9]\S*  \S+ (?P<squeue>[A-Z_]+),"
    r"|^ *[0-9]\S* +(?P<sacct>[A-Z_]{3,})\b",
    re.MULTILINE,
)
"""The state in the output of each of `status_commands`. Rows of squeue and sacct begin with a job id.

scontrol prints ``JobState=RUNNING``, squeue prints ``4711  gpu RUNNING, ...``, and sacct prints ``4711
RUNNING  0:0``.
"""
_CODE = re.compile(
    r"\bExitCode=([0-9]{1,3}):|^ *[0-9]\S* +[A-Z_]{3,}(?: by [0-9]+)? +([0-9]{1,3}):", re.MULTILINE
)
"""The exit code in the output of scontrol or sacct.

``1:0`` means that the exit code is 1 and the signal is 0.
"""
_SCONTROL_FIELD = re.compile(
    r"\b(?:JobId|ArrayJobId|ArrayTaskId|JobState|Reason|ExitCode|RunTime|StartTime|EndTime|NodeList)=\S+"
)
"""The fields in the output of scontrol that a status shows. scontrol prints dozens of others."""
_WAITING_ROW = re.compile(
    r"^ *(?P<id>[0-9]\S*)  \S+ [A-Z_]+, \S+ nodes, elapsed \S+, start (?P<start>\S+)  \((?P<reason>.*)\) *$",
    re.MULTILINE,
)
"""A row of squeue about a job that waits.

The row of a running job has the names of its nodes instead of ``(REASON)``.
"""
_START_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}")
"""The expected start of a job, without its seconds. Slurm prints ``N/A`` if it has no estimate."""
REASON_CHANGES = {
    "PartitionTimeLimit": "a shorter --time or another --queue",
    "PartitionNodeLimit": "other --nodes or another --queue",
    "QOSMaxWallDurationPerJobLimit": "a shorter --time or another --qos",
    "AssocMaxWallDurationPerJobLimit": "a shorter --time",
    "AssocMaxNodePerJobLimit": "fewer --nodes",
    "AssocMaxCpuPerJobLimit": "fewer --nodes or --cpus",
    "AssocMaxGRESPerJob": "fewer --nodes or --gpus",
    "AssocMaxMemPerJob": "fewer --nodes or another --option=--mem=...",
    "AssocMaxLicensePerJob": "another --option=--licenses=...",
    "AssocMax[A-Za-z]+MinutesPerJob(Limit)?": "a shorter --time or fewer --nodes",
    "AssocMax[A-Za-z]+PerJob": "fewer --nodes",  # of burst buffers, energy or billing units
    "InvalidAccount": "another --account",
    "InvalidQOS": "another --qos",
    "BadConstraints": "another --option=--constraint=...",
    "DependencyNeverSatisfied": "another --option=--dependency=...",
}
"""What the user must change so that a job can start, by the reason why it waits.

Each key is a pattern for one of Slurm's reasons. A job with such a reason never starts unless it is changed.
The list of reasons is slurm.schedmd.com/job_reason_codes.html.
"""
REASON_NOTES = {
    "AssocGrp[A-Za-z]+": "a limit of all jobs of the account together",
    "ReqNodeNotAvail": "scontrol show reservation and sinfo --list-reasons may tell until when",
    "JobHeldUser": "scontrol release {id} lets it start",
}
"""A note for the user, by the pattern of a reason that can end although the job stays as it is."""


class Slurm(System):
    """Slurm: sbatch, srun and salloc."""

    registration = SHIPPED["slurm"]
    uses = OPTIONAL
    # sbatch and salloc pass on their environment, so the program gets the values of --env NAME.
    abilities = Abilities(passes_names=True, spares_take_over=True, resumes_jobs=True)
    code_copier = "script"
    queue = QueueCommands(
        submit="sbatch",
        own_jobs=("squeue", "--me"),
        unfinished_ids=("squeue", "--noheader", "--format=%A", "--clusters={cluster}"),
        unknown_job="[Ii]nvalid job",
        fields={"--partition": "name", "-p": "name", "--qos": "qos", "-q": "qos"},
    )

    def script(self, job: Job) -> Script:
        """Return the script for ``sbatch``, or the ``salloc`` command for an interactive job."""
        if job.is_interactive:
            argv = ("salloc", *_resource_options(job), "bash", "-lc", _interactive_line(job))
            return Script(text=command_line(argv) + "\n", submit=argv, foreground=True)
        # An array job has an option such as "--array=1-9" or "-a1-9".
        is_array = any(re.match(r"--array\b|-a", option) for option in scheduler_options(job))
        container = runtime_of(job).argv(job, job.command, forward=PODMAN_FORWARD)
        # Both checks are steps of their own, before the step of the job. That step is `start`, or in a job
        # with spare nodes `start_in_node`, which starts the container in a shell function of the template.
        script_text = render_template(
            job,
            "slurm.sh.j2",
            directives=_directive_options(job, is_array=is_array),
            array=is_array,
            folder_check=command_line(_folder_check(job)),
            node_check=command_line(_node_check(job)),
            start=command_line(_srun_argv(job, container)),
            start_in_node=command_line(_srun_argv(job, (*_IN_NODE_FUNCTION, *container))),
        )
        return Script(text=script_text, submit=SUBMIT, on_stdin=True, is_array=is_array)

    def conversion_script(self, job: Job) -> Script:
        """Return the script for ``sbatch`` of a job that runs imgkit on a node to create an image file."""
        directives = (
            f"--job-name={job.name}",
            *_output_options(job, "%j"),
            "--nodes=1",
            "--ntasks=1",
            *_queue_options(job),
        )
        script_text = render_template(
            job, "sif.sh.j2", prefix="#SBATCH", directives=directives, command=command_line(job.command)
        )
        return Script(text=script_text, submit=SUBMIT, on_stdin=True)

    def parse_job_id(self, output: str, name: str) -> str:
        """Return the id that ``sbatch --parsable`` prints: ``4711``, or ``4711;CLUSTER``."""
        return find_job_id(output, r"[0-9]+(;.+)?")

    def status_commands(self, record: QueuedJob) -> tuple[Argv, ...]:
        """Return the commands that ask the queue, the accounting and Slurm's controller, in this order.

        The first one must ask the queue. If it prints anything, `job_status` takes the job for waiting or
        running. The controller still knows a job for some minutes after its end.
        """
        cluster = _cluster_options(record.cluster)
        # %S is the start of a running job, and the expected start of a waiting one. On a site with several
        # clusters, squeue prints the name of a cluster before its jobs. From 20.02 on, --noheader leaves that
        # line out.
        row = "%i  %P %T, %D nodes, elapsed %M, start %S  %R"
        columns = "JobID%-20,State%-20,ExitCode,Elapsed,Start,End,NodeList%-30"
        return (
            ("squeue", *cluster, "--noheader", f"--jobs={record.id}", f"--format={row}"),
            ("sacct", *cluster, "--allocations", f"--jobs={record.id}", f"--format={columns}"),
            ("scontrol", *cluster, "--oneliner", "show", "job", record.id),
        )

    def parse_status(self, output: str) -> JobStatus:
        """Parse the output of squeue, sacct or scontrol: the job's state, its exit code, and why it waits.

        For an array, the output has one row for each task. The state of the array follows from the states of
        its tasks, and its exit code is the highest code of a task.
        """
        # Each pattern has one group for each command. In each match, all groups but one are empty, so joining
        # them gives the value.
        names = map("".join, _STATE.findall(output))
        codes = map("".join, _CODE.findall(output))
        state = array_state(STATES.get(name, "") for name in names)
        code = max(map(int, codes), default=None)
        if "JobState=" in output:  # the output is from scontrol
            return JobStatus(state=state, text=_shown_fields(output), code=code)
        wait = _wait_info(output) if state == "waiting" else WaitInfo()
        return JobStatus(state=state, text=output, code=code, wait=wait)

    def log_source(self, record: QueuedJob) -> Argv:
        """Return the command that follows the job's output.

        Raises
        ------
        UsageError : the job is an array, in which each task writes to another file.
        """
        refuse_whole_array(record, example=f"{record.id}_0")
        output = record.directory / f"{record.name}-{record.id}.out"
        errors = output.with_name(f"{record.name}-{record.id}.err")
        # Most recipes write output and errors to a single file. For a job on a remote, the file of errors is
        # not on this machine, so only the output is followed.
        files = [str(output)]
        if errors.is_file():
            files = [str(errors), str(output)]
        return ("tail", "-n", "+1", "-f", *files)

    def cancel_command(self, record: QueuedJob) -> Argv:
        """Return the command that ends the job and all tasks of its array."""
        return ("scancel", *_cluster_options(record.cluster), record.id)

    def shell_command(self, record: QueuedJob, shell_line: str, node: str) -> JobShell:
        """Return the command that starts a shell as another step of the job, beside the running step.

        Raises
        ------
        UsageError : the job is an array, in which each task has other nodes.
        """
        refuse_whole_array(record, example=f"{record.id}_0")
        options = [*_cluster_options(record.cluster), "--overlap", "--nodes=1", "--ntasks=1"]
        if node:
            options.append(f"--nodelist={node}")
        step = (*options, f"--chdir={record.directory}", "--pty", "bash", "-lc", shell_line)
        argv: Argv
        if record.id.isdecimal():
            argv = ("srun", f"--jobid={record.id}", *step)
        else:  # a task of an array, such as 4711_3
            argv = _array_task_argv(record, step)
        return JobShell(argv=argv, description=NEW_CONTAINER)


SYSTEM = Slurm()


def _array_task_argv(task: QueuedJob, step: Argv) -> Argv:
    """Return the command that starts a step in one task of an array job.

    srun does not accept the id of a task, ``ARRAY_INDEX``. Each task also has a job number of its own, which
    srun accepts and squeue prints.

    Parameters
    ----------
    step : the arguments of srun, except for the job.
    """
    cluster = _cluster_options(task.cluster)
    print_number = shlex.join(("squeue", *cluster, "--noheader", f"--jobs={task.id}", "--format=%A"))
    script = f'id=$({print_number}) && : "${{id:?{task.id} does not run}}" && exec srun --jobid="$id" "$@"'
    # The script runs in bash and not in sh, because dash would remove the shell function `module` from the
    # environment.
    return ("bash", "-c", script, "srun", *step)


def _shown_fields(output: str) -> str:
    """Return the fields in the output of scontrol that people read, with one line for each task."""
    lines = []
    for line in output.splitlines():
        fields = _SCONTROL_FIELD.findall(line)
        if fields:
            lines.append(" ".join(fields) + "\n")
    return "".join(lines)


def _wait_info(output: str) -> WaitInfo:
    """Return why a job waits, and its expected start, from the output of squeue.

    ``4711  gpu PENDING, 2 nodes, elapsed 0:00, start N/A  (Priority)`` -> the reason ``Priority``, and no
    expected start. For an array, squeue prints several rows. The first row about waiting tasks is used.
    """
    row = _WAITING_ROW.search(output)
    if row is None:
        return WaitInfo()
    reason = row["reason"]
    if reason == "None":  # the scheduler has not considered the job yet
        reason = ""
    # The name of a reason ends at the first other character: "ReqNodeNotAvail, UnavailableNodes:node1" ->
    # "ReqNodeNotAvail".
    reason_name, *_ = re.split(r"\W", reason, maxsplit=1)
    start_match = _START_TIME.match(row["start"])
    return WaitInfo(
        reason=reason,
        expected_start=start_match[0] if start_match else "",
        note=_find_text(REASON_NOTES, reason_name).format(id=row["id"]),
        change=_find_text(REASON_CHANGES, reason_name),
    )


def _find_text(texts: Mapping[str, str], reason: str) -> str:
    """Return the text of the first pattern that matches the whole `reason`, or "" if none does.

    Parameters
    ----------
    texts : the texts by pattern, such as `REASON_NOTES`.
    """
    for pattern, text in texts.items():
        if re.fullmatch(pattern, reason):
            return text
    return ""


def _cluster_options(cluster: str) -> Argv:
    """Return the option that selects a cluster for Slurm's commands, on a site with several clusters.

    sbatch prints the cluster with the job's id (``4711;CLUSTER``). On a site with a single cluster, it prints
    none. Then `cluster` is empty, and the result is empty too.
    """
    if not cluster:
        return ()
    return (f"--clusters={cluster}",)


def _directive_options(job: Job, *, is_array: bool) -> Argv:
    """Return the options for the ``#SBATCH`` lines of the job's script."""
    directives = [
        f"--job-name={job.name}",
        # `log_source` relies on these names. Each task of an array has its own file.
        *_output_options(job, "%A_%a" if is_array else "%j"),
        *_resource_options(job),
    ]
    stop_before_s = job.allocation.stop_before_s
    if stop_before_s:
        # "B:" sends the signal to the script only. Otherwise, all processes of the step would get it. If the
        # user is not root, one of them (squashfuse) serves the files of the image. If it ended, the run would
        # die of a bus error.
        directives.append(f"--signal=B:USR1@{stop_before_s}")
    # Slurm starts such a job again, after it has saved its state in time or has lost a node.
    can_be_requeued = stop_before_s > 0 or job.outlives_nodes
    if can_be_requeued:
        # A requeued job appends to its output files. By default, Slurm would empty them.
        directives += ("--requeue", "--open-mode=append")
    return tuple(directives)


def _output_options(job: Job, id_pattern: str) -> Argv:
    """Return the options for the folder in which a script runs, and for its output files.

    Parameters
    ----------
    id_pattern : the part of the file names that sbatch replaces by the job's id, for example ``%j``.
    """
    folder = str(job.directory)
    if " " in folder:  # sbatch splits directives at blanks
        folder = f'"{folder}"'
    options = [f"--chdir={folder}", f"--output=%x-{id_pattern}.out"]
    if job.recipe.system.queue.output == "separate":
        options.append(f"--error=%x-{id_pattern}.err")
    return tuple(options)


def _resource_options(job: Job) -> Argv:
    """Return the options that request resources, for ``#SBATCH`` lines as well as for salloc."""
    allocation = job.allocation
    options = [f"--nodes={allocation.nodes}"]
    if job.outlives_nodes:
        options.append("--no-kill")  # otherwise, Slurm ends the job when it loses a node
    options.append("--ntasks-per-node=1")
    if allocation.gpus:
        options.append(f"--gres={job.recipe.system.node.gres or 'gpu'}:{allocation.gpus}")
    options += options_with_values({"--cpus-per-task": allocation.cpus})
    if allocation.memory:
        options.append(f"{allocation.memory.flag}={size_text(allocation.memory.size_MiB)}")
    return (*options, *_queue_options(job))


def _queue_options(job: Job) -> Argv:
    """Return the options for the time limit, account, queue and QoS, and those of the recipe and the user."""
    allocation = job.allocation
    options = {
        "--time": allocation.time,
        "--account": allocation.account,
        "--partition": allocation.queue,
        "--qos": allocation.qos,
    }
    return (*options_with_values(options), *scheduler_options(job))


_IN_NODE_FUNCTION = ("bash", "-c", ShellText('"$task"'), "node")
"""Arguments that start a node agent in the shell function of templates/job/slurm-spares.sh.j2."""


# With --overlap, the next step can start before Slurm has cleaned up after this one. With --input=none, this
# step does not read what the user types for the next one.
_STEP_BEFORE = ("srun", "--overlap", "--input=none", "--ntasks-per-node=1")
"""The start of a command that runs once on each node before the job's own step."""

PODMAN_FORWARD = ("SLURM*", "IMGKIT_*", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that podman passes into the container. Among the runtimes, only podman expands the stars."""


def _with_folder_check(job: Job, argv: Argv) -> Argv:
    """Return an argv that runs `argv` only if the node has all folders that the job mounts.

    An argv for pyxis is returned unchanged, because it begins with options of srun and not with a program.
    For pyxis, the step of `_node_check` checks the folders.
    """
    if _node_check(job):
        return argv
    return with_folder_check(job, argv)


def _node_check(job: Job) -> Argv:
    """Return the ``srun`` command that checks each node before pyxis starts the container there.

    Other runtimes need no such step, so the result is empty for them.
    """
    argv = runtime_of(job).node_check(job)
    if not argv:
        return ()
    return (*_STEP_BEFORE, *with_folder_check(job, argv))


def _folder_check(job: Job) -> Argv:
    """Return the ``srun`` command that checks on each node whether the folders to mount exist.

    The result is empty if the job mounts no folders. It is also empty for pyxis, because the step of
    `_node_check` checks the folders there.
    """
    folders = mounted_folders(job)
    if not folders or runtime_of(job).node_check(job):
        return ()
    # ls fails and names the folder. With -L, a link to a missing folder counts as missing.
    return (*_STEP_BEFORE, "ls", "-dL", *folders)


def _srun_argv(job: Job, argv: Argv) -> Argv:
    """Return the ``srun`` command that starts `argv` on all nodes of the job."""
    options: list[str] = []
    if job.allocation.cpus:
        # srun does not inherit --cpus-per-task in versions 22.05 to 23.02. The value is a variable, so that
        # it stays correct if somebody edits the directive in the script.
        options.append(ShellText('--cpus-per-task="$SLURM_CPUS_PER_TASK"'))
    # srun does not read --network from the script's directives.
    options += [option for option in scheduler_options(job) if option.startswith("--network=")]
    return slurm.start_argv(
        argv,
        nnodes=job.allocation.nodes,
        outlives_nodes=job.outlives_nodes,
        options=(*options, *job.recipe.system.queue.srun),
    )


def _interactive_line(job: Job) -> str:
    """Return the shell text that salloc runs on the first node of an interactive job.

    It runs the job's command on all nodes. Without a command, it opens a shell on the first node.
    """
    runtime = runtime_of(job)
    if job.command:
        container = runtime.argv(job, job.command, forward=PODMAN_FORWARD)
        argv = _srun_argv(job, _with_folder_check(job, container))
    else:
        argv = _shell_on_first_node(job)
    lines = runtime.environment_lines(job)
    node_check = _node_check(job)
    if node_check:
        lines.append(_quote_argv(node_check))
    lines.append(f"exec {_quote_argv(argv)}")
    start_line = " && ".join(lines)  # the command starts only if all lines before it succeed
    run_folder = run_folder_lines(job, "$SLURM_JOB_ID")
    if not run_folder:
        return start_line
    # The parts are on separate lines. If they were joined by &&, bash would ignore the "set -e" that ends the
    # lines for the run folder after an error.
    return f"set -e\n{run_folder}\n{start_line}"


def _shell_on_first_node(job: Job) -> Argv:
    """Return the ``srun`` command that opens a shell in the job's container on the first node.

    Like any command of the job, the shell starts only if the node has all folders that the job mounts.
    """
    cpus = options_with_values({"--cpus-per-task": job.allocation.cpus})
    shell = _with_folder_check(job, runtime_of(job).shell(job))
    return ("srun", "--nodes=1", "--ntasks=1", *cpus, *job.recipe.system.queue.srun, "--pty", *shell)


def _quote_argv(argv: Argv) -> str:
    """Return `argv` as shell text on one line."""
    return " ".join(map(quote, argv))
