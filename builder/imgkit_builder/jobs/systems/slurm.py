"""Slurm: a batch script, or the line that allocates nodes for interactive work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from imgkit_builder.jobs.job import Argv, Job, Script
from imgkit_builder.jobs.quoting import Shell, line, quote
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.submitted import JobState, JobStatus, QueuedJob
from imgkit_builder.jobs.systems import (
    NEW_CONTAINER,
    JobShell,
    QueueCommands,
    System,
    last_line,
    need_task,
    options_of,
    options_with_values,
    user_options,
    with_folders,
    worst,
)
from imgkit_builder.jobs.templates import fill
from imgkit_builder.recipe.systems import SHIPPED
from imgkit_entrypoints.schedulers import slurm

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
"""Slurm's states (slurm.schedmd.com/job_state_codes.html)."""
_STATE = re.compile(
    r"\bJobState=(?P<scontrol>[A-Z_]+)"
    r"|^ *[0-9]\S*  \S+ (?P<squeue>[A-Z_]+),"
    r"|^ *[0-9]\S* +(?P<sacct>[A-Z_]{3,})\b",
    re.MULTILINE,
)
"""The state in the output of each of `status_commands`; rows of squeue and sacct begin with the job's id."""
_CODE = re.compile(
    r"\bExitCode=([0-9]{1,3}):|^ *[0-9]\S* +[A-Z_]{3,}(?: by [0-9]+)? +([0-9]{1,3}):", re.MULTILINE
)
"""The exit code, before that of the signal, in the output of scontrol or sacct."""


class Slurm(System):
    """Slurm: sbatch, srun and salloc."""

    registration = SHIPPED["slurm"]
    passes_names = True  # sbatch and salloc hand their environment on
    uses = ("account", "queue", "qos", "time", "cpus", "stop-before")
    spares_take_over = True
    queue = QueueCommands(
        submit="sbatch",
        own_jobs=("squeue", "--me"),
        unfinished_ids=("squeue", "--noheader", "--format=%A", "--clusters={cluster}"),
        unknown_job="[Ii]nvalid job",
    )

    def script(self, job: Job) -> Script:
        """Return the script for ``sbatch``, or the ``salloc`` line of an interactive job."""
        if job.is_interactive:
            argv = ("salloc", *_resource_options(job), "bash", "-lc", _typed(job))
            return Script(text=line(argv) + "\n", submit=argv, foreground=True)
        stop_before_s = job.allocation.stop_before_s
        options = () if job.makes_image else options_of(job)
        is_array = any(re.match(r"--array\b|-a", option) for option in options)
        directives = (
            f"--job-name={job.title}",
            *_output_options(job, "%A_%a" if is_array else "%j"),
            *_resource_options(job),
            # B: the signal goes to the script alone. A step's signal reaches every process of it. For
            # ordinary users one of them serves the image's files; the run would die of a bus error.
            *((f"--signal=B:USR1@{stop_before_s}",) if stop_before_s else ()),
            *(("--requeue", "--open-mode=append") if stop_before_s or job.outlives_nodes else ()),
        )
        if job.makes_image:
            text = fill(job, "slurm-sif.sh.j2", directives=directives, make=line(job.command))
        else:
            text = fill(
                job,
                "slurm.sh.j2",
                directives=directives,
                array=is_array,
                look=line(_node_check(job)),
                start=line(_start(job, _container(job))),
                start_in_node=line(_start(job, (*_IN_NODE, *_container(job)))),
            )
        return Script(text=text, submit=SUBMIT, on_stdin=True, is_array=is_array)

    def parse_job_id(self, output: str, name: str) -> str:
        """Return what ``sbatch --parsable`` prints: ``ID``, or ``ID;CLUSTER`` of one of several clusters."""
        return last_line(output, r"[0-9]+(;.+)?")

    def status_commands(self, record: QueuedJob) -> tuple[Argv, ...]:
        """Return the commands of the queue, of the accounting, and of Slurm's memory of some minutes."""
        at = _at(record.cluster)
        # %S is the start, or the expected start of a job that waits. From 20.02 on, --noheader leaves out the
        # name of a single cluster, too.
        row = "%i  %P %T, %D nodes, elapsed %M, start %S  %R"
        columns = "JobID%-20,State%-20,ExitCode,Elapsed,Start,End,NodeList%-30"
        return (
            ("squeue", *at, "--noheader", f"--jobs={record.id}", f"--format={row}"),
            ("sacct", *at, "--allocations", f"--jobs={record.id}", f"--format={columns}"),
            ("scontrol", *at, "--oneliner", "show", "job", record.id),
        )

    def parse_status(self, output: str) -> JobStatus:
        """Return the state that squeue, sacct or scontrol printed; of an array, that of all its tasks."""
        names = (match[match.lastgroup or 0] for match in _STATE.finditer(output))
        state = worst(STATES.get(name, "") for name in names)
        code = max(
            (int(by_scontrol or by_sacct) for by_scontrol, by_sacct in _CODE.findall(output)), default=None
        )
        if "JobState=" not in output:
            return JobStatus(state=state, text=output, code=code)
        fields = "JobId|ArrayJobId|ArrayTaskId|JobState|Reason|ExitCode|RunTime|StartTime|EndTime|NodeList"
        rows = [re.findall(rf"\b(?:{fields})=\S+", row) for row in output.splitlines()]
        text = "".join(" ".join(row) + "\n" for row in rows if row)
        return JobStatus(state=state, text=text, code=code)

    def log_source(self, record: QueuedJob) -> Argv:
        """Return the command that follows the job's output."""
        need_task(record, f"{record.id}_0")
        output = record.directory / f"{record.name}-{record.id}.out"
        errors = output.with_name(f"{record.name}-{record.id}.err")
        # On a remote there is none, and nothing here has its name.
        return ("tail", "-n", "+1", "-f", *((str(errors),) if errors.is_file() else ()), str(output))

    def cancel_command(self, record: QueuedJob) -> Argv:
        """Return the command that ends the job and all tasks of its array."""
        return ("scancel", *_at(record.cluster), record.id)

    def shell_command(self, record: QueuedJob, line: str, node: str) -> JobShell:
        """Return the command of a separate step, which shares the nodes with the job's."""
        need_task(record, f"{record.id}_0")
        at, on = _at(record.cluster), (f"--nodelist={node}",) if node else ()
        step = (
            *(*at, "--overlap", "--nodes=1", "--ntasks=1", *on, f"--chdir={record.directory}", "--pty"),
            *("bash", "-lc", line),
        )
        if record.id.isdecimal():
            argv = ("srun", f"--jobid={record.id}", *step)
        else:  # srun takes no ARRAY_INDEX, but the number that each task has, too
            number = shlex.join(("squeue", *at, "--noheader", f"--jobs={record.id}", "--format=%A"))
            find = f'id=$({number}) && : "${{id:?{record.id} does not run}}" && exec srun --jobid="$id" "$@"'
            argv = ("bash", "-c", find, "srun", *step)  # dash would drop the function of modules
        return JobShell(argv=argv, description=NEW_CONTAINER)


SYSTEM = Slurm()


def _at(cluster: str) -> Argv:
    """The option of Slurm's commands for a job on a cluster that sbatch has named."""
    return (f"--clusters={cluster}",) if cluster else ()


def _output_options(job: Job, numbered: str = "%j") -> Argv:
    """The folder in which a script runs, and the files of its output; `numbered` is the id in their names."""
    folder = str(job.directory)
    return (
        f'--chdir="{folder}"' if " " in folder else f"--chdir={folder}",
        f"--output=%x-{numbered}.out",
        *((f"--error=%x-{numbered}.err",) if job.recipe.system.queue.output == "separate" else ()),
    )


def _resource_options(job: Job) -> Argv:
    """The resources to request; directives and salloc take the same words."""
    queue, allocation = job.recipe.system.queue, job.allocation
    limits = options_with_values({"--time": allocation.time, "--account": allocation.account})
    options = user_options(job)
    if job.makes_image:
        return ("--nodes=1", "--ntasks=1", *limits, *queue.sif, *options)
    return (
        f"--nodes={allocation.nodes}",
        *(("--no-kill",) if job.outlives_nodes else ()),
        "--ntasks-per-node=1",
        *((f"--gres=gpu:{allocation.gpus}",) if allocation.gpus else ()),
        *options_with_values({"--cpus-per-task": allocation.cpus}),
        *limits,
        *options_with_values({"--partition": allocation.queue, "--qos": allocation.qos}),
        *queue.options,
        *options,
    )


_IN_NODE = ("bash", "-c", Shell('"$task"'), "node")
"""Words that run a node agent within the function of templates/job/slurm-spares.sh.j2."""


PODMAN_FORWARD = ("SLURM*", "IMGKIT_*", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that podman passes into the container; it alone expands the stars."""


def _container(job: Job) -> Argv:
    return _with_folders(job, runtime_of(job).argv(job, job.command, forward=PODMAN_FORWARD))


def _with_folders(job: Job, argv: Argv) -> Argv:
    """Return `argv` as `with_folders` does, unless it is for pyxis: its first words are options of srun."""
    return argv if _node_check(job) else with_folders(job, argv)


def _node_check(job: Job) -> Argv:
    """Return the step that looks at each node before the one that pyxis starts; empty for other runtimes."""
    argv = runtime_of(job).node_check(job)
    if not argv:
        return ()
    # The next step need not wait until Slurm has cleaned up after this one, and gets all that is typed.
    srun = ("srun", "--overlap", "--input=none", "--ntasks-per-node=1")
    return (*srun, *with_folders(job, argv))


def _start(job: Job, argv: Argv) -> Argv:
    # srun does not read --network from the script's directives.
    network = tuple(option for option in job.recipe.system.queue.options if option.startswith("--network="))
    # From 22.05 to 23.02 srun does not inherit --cpus-per-task. As a variable, it follows the directive when
    # somebody edits the script.
    cpus = (Shell('--cpus-per-task="$SLURM_CPUS_PER_TASK"'),) if job.allocation.cpus else ()
    return slurm.start_argv(
        argv,
        nnodes=job.allocation.nodes,
        outlives_nodes=job.outlives_nodes,
        options=(*cpus, *network, *job.recipe.system.queue.srun),
    )


def _typed(job: Job) -> str:
    """The line that runs in the allocation: the command on all nodes, or a shell on the first one."""
    runtime = runtime_of(job)
    modules = [f"module load {shlex.quote(name)}" for name in runtime.modules(job)]
    cpus = options_with_values({"--cpus-per-task": job.allocation.cpus})
    srun_options, shell = job.recipe.system.queue.srun, _with_folders(job, runtime.shell(job))
    argv = (
        _start(job, _container(job))
        if job.command
        else ("srun", "--nodes=1", "--ntasks=1", *cpus, *srun_options, "--pty", *shell)
    )
    steps = (_node_check(job), ("exec", *argv))
    typed = (" ".join(map(quote, step)) for step in steps if step)
    return " && ".join((*modules, *runtime.exports(job), *typed))
