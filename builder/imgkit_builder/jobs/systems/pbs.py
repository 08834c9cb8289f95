"""PBS: write a batch script, or the line that allocates nodes for interactive work.

By default, the mpiexec of PALS starts one process per node. It passes the environment on and returns the exit
code. On Slingshot it sets the SLINGSHOT_* variables that libfabric's cxi provider needs. pbsdsh and ssh are
for systems without PALS.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NoReturn

from imgkit_builder.base.flags import option_field
from imgkit_builder.jobs.job import Argv, Job, Script
from imgkit_builder.jobs.memory import size_text
from imgkit_builder.jobs.quoting import Shell, command_line
from imgkit_builder.jobs.request import SystemFlags
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.submitted import JobState, JobStatus, QueuedJob, WaitInfo
from imgkit_builder.jobs.systems import (
    NEW_CONTAINER,
    Abilities,
    QueueCommands,
    System,
    find_job_id,
    options_with_values,
    recipe_options,
    refuse_whole_array,
    scheduler_options,
    with_folders,
)
from imgkit_builder.jobs.templates import render_template, run_folder_lines
from imgkit_builder.recipe.systems import SHIPPED
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rollcall.secret import VARIABLE
from imgkit_entrypoints.schedulers import pbs
from imgkit_entrypoints.schedulers.mpi import PALS

RUN_DIR = "IMGKIT_RUN_DIR"
"""Variable with the path of the run folder."""
PEER_EXIT_S = 30
"""Seconds that other node agents have to end after one has failed. They learn of it within seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PbsFlags(SystemFlags):
    """Flags that only PBS has."""

    pbs_start: Literal["pals", "pbsdsh", "ssh"] = option_field(
        "pals", help="PBS: what starts one process per node."
    )


STATES: Mapping[str, JobState] = {
    **dict.fromkeys("QHWTSM", "waiting"),
    **dict.fromkeys("RBEU", "running"),
}
"""The meaning of PBS' letters for the state of a job in the queue (qstat(1)).

Among them, B is an array that has started, and E is a job that is about to end.
"""
_SHOWN_ATTRIBUTES = frozenset(
    {
        "Job Id",
        "Job_Name",
        "job_state",
        "array_state_count",
        "comment",
        "estimated.start_time",
        "stime",
        "resources_used.walltime",
        "exec_host",
        "obittime",
        "Exit_status",
    }
)
"""Attributes in the output of ``qstat -f`` that a status shows. There are dozens of others."""


class Pbs(System):
    """PBS Professional and OpenPBS: qsub."""

    registration = SHIPPED["pbs"]
    flags = PbsFlags
    uses = ("account", "queue", "time", "cpus", "mem", "mem-per-gpu", "group-readable")
    abilities = Abilities(resumes_jobs=True)
    code_copier = "script"
    queue = QueueCommands(
        submit="qsub",
        own_jobs=("qstat",),  # the option for one user needs a name
        unfinished_ids=("qselect",),
        unknown_job="[Uu]nknown [Jj]ob|has finished",
        fields={"-q": "name"},
    )

    def script(self, job: Job) -> Script:
        """Return the script for ``qsub``, or for an interactive job the ``qsub -I`` line."""
        if job.is_interactive:
            return _interactive_script(job)
        nodes = job.allocation.nodes
        start = job.flags(PbsFlags).pbs_start
        # The script itself starts the processes on the other hosts, with pbsdsh or ssh, unless PALS does.
        by_task, remote_command = "", ""
        if nodes > 1 and start != "pals":
            by_task, remote_command = start, command_line(_remote_command(start))
        # The recipe chooses a rendezvous protocol of the cxi provider for which PALS needs an option (see the
        # template).
        rdzv = nodes > 1 and job.recipe.system.env.get("FI_CXI_RDZV_PROTO") == "alt_read"
        text = render_template(
            job,
            "pbs.sh.j2",
            directives=_directive_texts(("-S", "/bin/bash", "-j", "oe", *_resource_options(job))),
            by_task=by_task,
            patience_s=PEER_EXIT_S,
            rdzv=rdzv and not by_task,
            node=command_line(_node_command(job, rdzv=rdzv)),
            words=remote_command,
        )
        is_array = any(option.startswith("-J") for option in scheduler_options(job))
        return Script(text=text, submit=("qsub",), on_stdin=True, is_array=is_array)

    def conversion_script(self, job: Job) -> Script:
        """Return the script for ``qsub`` of a job that makes an image file. See `System`.

        Raises
        ------
        UsageError : the recipe does not say which nodes make a .sif.
        """
        if not job.recipe.system.queue.sif:
            raise _no_sif_options_error(job)
        directives = _directive_texts(
            ("-S", "/bin/bash", "-j", "oe", *_common_options(job), *scheduler_options(job))
        )
        text = render_template(
            job, "sif.sh.j2", prefix="#PBS", directives=directives, command=command_line(job.command)
        )
        return Script(text=text, submit=("qsub",), on_stdin=True)

    def parse_job_id(self, output: str, name: str) -> str:
        """Return the id that ``qsub`` prints: ``4711.server``, or ``4711[].server`` for an array."""
        return find_job_id(output, r"[0-9]+(\[[0-9]*\])?(\..+)?")

    def status_commands(self, record: QueuedJob) -> tuple[Argv, ...]:
        """Return the commands that ask the queue, and the history that a server may keep."""
        return (("qstat", "-f", record.id), ("qstat", "-x", "-f", record.id))

    def parse_status(self, output: str) -> JobStatus:
        """Parse the output of ``qstat -f``: the job's state, its exit code, and the fields for people.

        The state of a finished job does not tell whether it succeeded, so its exit status decides.
        """
        output = output.replace("\n\t", "")  # qstat breaks long values at 80 columns
        text = ""
        for row in output.splitlines():
            attribute = re.split(r" = |: ", row.strip())[0]  # "Job Id: 4711.server", "job_state = R"
            if attribute in _SHOWN_ATTRIBUTES:
                text += f"{row}\n"
        state_match = re.search(r"^\s*job_state = (\w)$", output, re.MULTILINE)
        code_match = re.search(r"^\s*Exit_status = (-?[0-9]{1,9})\s*$", output, re.MULTILINE)
        state: JobState = ""
        if state_match:
            state = STATES.get(state_match[1], "")
        code = None
        if code_match:
            code = int(code_match[1])
            if not state:
                state = "succeeded" if code == 0 else "failed"
        wait = WaitInfo()
        if state == "waiting":
            wait = _wait_info(output)
        return JobStatus(state=state, text=text, code=code, wait=wait)

    def log_source(self, record: QueuedJob) -> Argv:
        """Return the command that follows the output in the file ``NAME.oSEQUENCE`` in the job's folder.

        Most systems copy the file there only when the job ends. ``tail -F`` waits until the file exists.

        Raises
        ------
        UsageError : the job is an array, whose tasks have outputs of their own.
        """
        sequence = record.id.partition(".")[0]  # without the server
        refuse_whole_array(record, sequence.replace("[]", "[0]"))
        suffix = re.sub(r"\[([0-9]+)\]", r".\1", sequence)  # of a task: NAME.oSEQUENCE.INDEX
        path = record.directory / f"{record.name}.o{suffix}"
        return ("tail", "-n", "+1", "-F", str(path))

    def cancel_command(self, record: QueuedJob) -> Argv:
        """Return the command that ends the job, or all tasks of an array."""
        return ("qdel", record.id)

    def shell_command(self, record: QueuedJob, line: str, node: str) -> NoReturn:
        """Raise UsageError, because PBS starts tasks only from within a job. The hint uses ssh instead."""
        shell = f"ssh -t {node or 'NODE'} {shlex.quote('bash -lc ' + shlex.quote(line))}"
        raise UsageError(
            "PBS starts no shell in a running job from outside",
            where="--job",
            hint=f"where ssh may enter the nodes of your jobs (qstat -n1 {record.id} names them): {shell}; "
            f"it is {NEW_CONTAINER}",
        )


SYSTEM = Pbs()


def _wait_info(output: str) -> WaitInfo:
    """Return the reason of a job's wait and its expected start from the output of ``qstat -f``.

    The reason is the scheduler's comment. The start is estimated only where the site has turned that on.
    """
    comment = re.search(r"^ *comment = (.*)$", output, re.MULTILINE)
    reason = comment[1].strip() if comment else ""
    estimate = re.search(r"^ *estimated\.start_time = (.*)$", output, re.MULTILINE)
    expected_start = ""
    if estimate:
        # PBS can also print a text that is no time, such as UNSET.
        with contextlib.suppress(ValueError):
            start = datetime.strptime(estimate[1].strip(), "%a %b %d %H:%M:%S %Y")
            expected_start = start.isoformat(timespec="minutes")
    return WaitInfo(reason=reason, expected_start=expected_start)


def _no_sif_options_error(job: Job) -> UsageError:
    """Return the error for a recipe without ``queue.sif``, the options for a node that makes a .sif."""
    name = job.recipe.name
    return UsageError(
        f"the recipe {name} does not name the nodes that make a .sif",
        where=job.recipe.where("system", "queue"),
        hint=f"{command_line(job.command)} on a node; or queue.sif: [-l, select=1:ncpus=8] in a "
        f"recipe that extends {name}",
    )


def _resource_options(job: Job) -> Argv:
    """Return the options for the resources to request, in the form that directives and ``qsub -I`` share."""
    allocation = job.allocation
    # PBS cannot request memory per GPU, and writes units in lower case: "440gb".
    memory = ""
    if allocation.memory:
        memory = f"{size_text(allocation.memory.node_MiB)}b".lower()
    chunk = (
        f"select={allocation.nodes}",
        *options_with_values({"ncpus": allocation.cpus, "ngpus": allocation.gpus, "mem": memory}),
        # The node file has a line for each MPI process of a chunk. With one process per chunk, it has one
        # line per node. That process starts the others.
        "mpiprocs=1",
        *recipe_options(job, "chunk"),
    )
    return (*_common_options(job), "-l", ":".join(chunk), *scheduler_options(job))


def _common_options(job: Job) -> Argv:
    """Return the options for the name, the queue, the account and the time limit, which all jobs have."""
    allocation = job.allocation
    options = ["-N", job.name]
    if allocation.queue:
        options += ("-q", allocation.queue)
    if allocation.account:
        options += ("-A", allocation.account)
    if allocation.time:
        options += ("-l", f"walltime={allocation.time}")
    return tuple(options)


def _directive_texts(options: Sequence[str]) -> list[str]:
    """Return the texts of ``#PBS`` lines: ``["-N", "run", "-q", "gpu"] -> ["-N run", "-q gpu"]``."""
    rows: list[str] = []
    for option in options:
        if option.startswith("-") or not rows:
            rows.append(option)
        else:
            rows[-1] += f" {option}"
    return rows


def _node_command(job: Job, *, rdzv: bool) -> Argv:
    """Return the command that starts the job's command on this node, or by mpiexec on all nodes.

    Parameters
    ----------
    rdzv : whether the script sets options for the network in the array ``network``, which PALS' mpiexec gets.
    """
    nodes = job.allocation.nodes
    by_pals = nodes > 1 and job.flags(PbsFlags).pbs_start == "pals"
    variables = PALS.fields.variables if by_pals else ("PBS_JOBID", "PBS_NODENUM", "PBS_TASKNUM")
    forward = (*variables, *pbs.FORWARD, RUN_DIR)
    if job.makes_secret:
        forward += (VARIABLE,)
    argv = with_folders(job, runtime_of(job).argv(job, job.command, forward=forward))
    if not by_pals:
        return argv
    options = [Shell('"${network[@]}"')] if rdzv else []
    return PALS.start_argv(argv, nnodes=nodes, options=options)


def _remote_command(by_task: str) -> Argv:
    """Return the command with which the script runs the text ``$task`` on another host, by pbsdsh or ssh."""
    if by_task == "pbsdsh":
        return pbs.start_argv(
            ("/bin/bash", "-lc", Shell('"$task; node"')), line_index=Shell('"${lines[rank]}"')
        )
    return ("ssh", "-o", "BatchMode=yes", Shell('"${hosts[rank]}"'), "/bin/bash", "-l", "-s")


def _interactive_script(job: Job) -> Script:
    """Return the ``qsub -I`` line. Comments above it have the lines to type in the shell that it opens.

    Raises
    ------
    UsageError : the job has a command, which ``qsub -I`` cannot run.
    """
    if job.command:
        raise UsageError(
            f"PBS takes no command for an interactive job, but {job.command[0]} was given",
            where="--interactive",
            hint="leave --interactive out: imgkit run starts it on all nodes; or leave the command out",
        )
    argv = ("qsub", "-I", *_resource_options(job))
    runtime = runtime_of(job)
    shell = command_line(with_folders(job, runtime.shell(job)))
    comments = (
        "# In the shell that it gives, on one of the nodes:",
        f"#   cd {shlex.quote(str(job.directory))}",
        *(f"#   module load {name}" for name in runtime.modules(job)),
        *(f"#   {export}" for export in runtime.exports(job)),
        *(f"#   {row}" for row in run_folder_lines(job, "$PBS_JOBID").splitlines()),
        *(f"#   {row}" for row in shell.split("\n")),
        "# On all nodes: imgkit run --on here --dry-run ... > job.sh, no --interactive; then: bash job.sh",
    )
    return Script(text="\n".join((*comments, command_line(argv), "")), submit=argv, foreground=True)
