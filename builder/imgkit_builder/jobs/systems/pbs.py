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
from imgkit_builder.jobs.quoting import ShellText, command_line
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
    with_folder_check,
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
        """Return the script for ``qsub``, or for an interactive job the ``qsub -I`` line.

        PBS runs the script on the first node only. So on several nodes, the script itself starts the command
        on the others, with pbsdsh, ssh or PALS' mpiexec (``--pbs-start``).
        """
        if job.is_interactive:
            return _interactive_script(job)
        # The script itself starts the processes on the other hosts, with pbsdsh or ssh, unless PALS does.
        starter = ""
        start_on_host = ""
        has_peers = job.allocation.nodes > 1
        pbs_start = job.flags(PbsFlags).pbs_start
        if has_peers and pbs_start != "pals":
            starter = pbs_start
            start_on_host = command_line(_remote_command(pbs_start))
        # The recipe chooses a rendezvous protocol of the cxi provider for which PALS needs an option (see the
        # template).
        needs_rdzv = has_peers and job.recipe.system.env.get("FI_CXI_RDZV_PROTO") == "alt_read"
        text = render_template(
            job,
            "pbs.sh.j2",
            directives=_directive_texts(("-S", "/bin/bash", "-j", "oe", *_resource_options(job))),
            by_task=starter,
            patience_s=PEER_EXIT_S,
            rdzv=needs_rdzv and not starter,
            node=command_line(_node_command(job, rdzv=needs_rdzv)),
            words=start_on_host,
        )
        is_array = any(option.startswith("-J") for option in scheduler_options(job))
        return Script(text=text, submit=("qsub",), on_stdin=True, is_array=is_array)

    def conversion_script(self, job: Job) -> Script:
        """Return the script for ``qsub`` of a job that runs imgkit on a node, to make an image file.

        Raises
        ------
        UsageError : the recipe does not say which nodes make a .sif.
        """
        if not job.recipe.system.queue.sif:
            name = job.recipe.name
            raise UsageError(
                f"the recipe {name} does not name the nodes that make a .sif",
                where=job.recipe.where("system", "queue"),
                hint=f"{command_line(job.command)} on a node; or queue.sif: [-l, select=1:ncpus=8] in a "
                f"recipe that extends {name}",
            )
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

        The state of a finished job (``F``) does not tell whether it succeeded, so its exit status decides.
        """
        output = output.replace("\n\t", "")  # qstat breaks long values at 80 columns
        letter = _find_attribute(output, "job_state", r"\w")
        state: JobState = STATES.get(letter, "")
        code = None
        exit_status = _find_attribute(output, "Exit_status", r"-?[0-9]{1,9}")
        if exit_status:
            code = int(exit_status)
            if not state:
                state = "succeeded" if code == 0 else "failed"
        wait = _wait_info(output) if state == "waiting" else WaitInfo()
        return JobStatus(state=state, text=_shown_attributes(output), code=code, wait=wait)

    def log_source(self, record: QueuedJob) -> Argv:
        """Return the command that follows the output in the file ``NAME.oSEQUENCE`` in the job's folder.

        Most systems copy the file there only when the job ends. ``tail -F`` waits until the file exists.

        Raises
        ------
        UsageError : the job is an array. Each task writes another file.
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


def _find_attribute(output: str, name: str, pattern: str) -> str:
    """Return the value of an attribute in the output of ``qstat -f``: ``    job_state = R`` -> ``R``.

    The result is empty without the attribute, or if `pattern` does not match the whole value.
    """
    match = re.search(rf"^\s*{re.escape(name)} = ({pattern})\s*$", output, re.MULTILINE)
    if match is None:
        return ""
    return match[1].strip()


def _shown_attributes(output: str) -> str:
    """Return those lines of the output of ``qstat -f`` that a status shows."""
    lines = []
    for line in output.splitlines():
        attribute = re.split(r" = |: ", line.strip())[0]  # "Job Id: 4711.server", "job_state = R"
        if attribute in _SHOWN_ATTRIBUTES:
            lines.append(f"{line}\n")
    return "".join(lines)


def _wait_info(output: str) -> WaitInfo:
    """Return why a job waits, and its expected start, from the output of ``qstat -f``.

    The reason is the scheduler's comment. The start is estimated only where the site has turned that on.
    """
    expected_start = ""
    estimate = _find_attribute(output, "estimated.start_time", ".*")
    # PBS can also print a text that is no time, such as UNSET.
    with contextlib.suppress(ValueError):
        start = datetime.strptime(estimate, "%a %b %d %H:%M:%S %Y")
        expected_start = start.isoformat(timespec="minutes")
    return WaitInfo(reason=_find_attribute(output, "comment", ".*"), expected_start=expected_start)


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
    texts: list[str] = []
    for option in options:
        if option.startswith("-") or not texts:
            texts.append(option)
        else:
            texts[-1] += f" {option}"
    return texts


def _node_command(job: Job, *, rdzv: bool) -> Argv:
    """Return the command that starts the job's command on one node, or with PALS' mpiexec on all nodes.

    Parameters
    ----------
    rdzv : whether the script sets options for the network in the array ``network``, which PALS' mpiexec gets.
    """
    nodes = job.allocation.nodes
    by_pals = nodes > 1 and job.flags(PbsFlags).pbs_start == "pals"
    placement = PALS.fields.variables if by_pals else ("PBS_JOBID", "PBS_NODENUM", "PBS_TASKNUM")
    forward = [*placement, *pbs.FORWARD, RUN_DIR]
    if job.makes_secret:
        forward.append(VARIABLE)
    argv = with_folder_check(job, runtime_of(job).argv(job, job.command, forward=tuple(forward)))
    if not by_pals:
        return argv
    network_options = [ShellText('"${network[@]}"')] if rdzv else []
    return PALS.start_argv(argv, nnodes=nodes, options=network_options)


def _remote_command(starter: str) -> Argv:
    """Return the command with which the job's script runs the shell text ``$task`` on another of its hosts.

    Parameters
    ----------
    starter : ``pbsdsh`` or ``ssh``.
    """
    if starter == "pbsdsh":
        return pbs.start_argv(
            ("/bin/bash", "-lc", ShellText('"$task; node"')), line_index=ShellText('"${lines[rank]}"')
        )
    return ("ssh", "-o", "BatchMode=yes", ShellText('"${hosts[rank]}"'), "/bin/bash", "-l", "-s")


def _interactive_script(job: Job) -> Script:
    """Return the script of an interactive job: the ``qsub -I`` line, which opens a shell on a node.

    ``qsub -I`` cannot be told what to run there. So comments above it have the lines that the user types.

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
    typed_lines = [
        f"cd {shlex.quote(str(job.directory))}",
        *(f"module load {name}" for name in runtime.modules(job)),
        *runtime.exports(job),
        *run_folder_lines(job, "$PBS_JOBID").splitlines(),
        *command_line(with_folder_check(job, runtime.shell(job))).split("\n"),
    ]
    lines = [
        "# In the shell that it gives, on one of the nodes:",
        *(f"#   {line}" for line in typed_lines),
        "# On all nodes: imgkit run --on here --dry-run ... > job.sh, no --interactive; then: bash job.sh",
        command_line(argv),
    ]
    return Script(text="\n".join(lines) + "\n", submit=argv, foreground=True)
