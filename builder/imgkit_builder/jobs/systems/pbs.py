"""PBS: write a batch script, or the command that allocates nodes for interactive work.

By default, mpiexec of PALS starts one process on each node. It passes on the environment and returns the exit
code. On a Slingshot network, it also sets the SLINGSHOT_* variables that libfabric's cxi provider needs.
pbsdsh and ssh are for systems without PALS.
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
from imgkit_entrypoints.rollcall.secret import VARIABLE as SECRET_VARIABLE
from imgkit_entrypoints.schedulers import pbs
from imgkit_entrypoints.schedulers.mpi import PALS

RUN_DIR_VARIABLE = "IMGKIT_RUN_DIR"
"""Variable with the path of the run folder."""
PEER_EXIT_S = 30
"""Seconds for which the other nodes may go on after one node has failed.

They learn of the failure within seconds.
"""


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
"""The meaning of the letters by which PBS reports the state of a job in the queue (qstat(1)).

For example, B is an array that has started, and E is a job that is about to end.
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
"""The attributes in the output of ``qstat -f`` that a status shows. qstat prints dozens of others."""


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
        """Return the script for ``qsub``, or the ``qsub -I`` command for an interactive job.

        PBS runs the script only on the first node. In a job on several nodes, the script itself starts the
        command on the other nodes, by pbsdsh, ssh or mpiexec of PALS (``--pbs-start``).
        """
        if job.is_interactive:
            return _interactive_script(job)
        starter_per_host = ""  # "" if PALS starts the command on all hosts, or if there is only one node
        start_on_host = ""
        has_peers = job.allocation.nodes > 1
        pbs_start = job.flags(PbsFlags).pbs_start
        uses_pals = has_peers and pbs_start == "pals"
        if has_peers and not uses_pals:  # pbsdsh or ssh starts the command on the other hosts one by one
            starter_per_host = pbs_start
            start_on_host = command_line(_remote_command(pbs_start))
        # With this protocol of the cxi provider, PALS needs a further option. The template explains it.
        protocol = job.recipe.system.env.get("FI_CXI_RDZV_PROTO")
        needs_network_option = uses_pals and protocol == "alt_read"
        node_command = _node_command(job, uses_pals=uses_pals, needs_network_option=needs_network_option)
        # The users' own templates (--templates) rely on the names of these values.
        script_text = render_template(
            job,
            "pbs.sh.j2",
            # With "-j oe", errors go to the file of the output, the only one that `log_source` follows.
            directives=_directive_texts(("-S", "/bin/bash", "-j", "oe", *_resource_options(job))),
            by_task=starter_per_host,
            patience_s=PEER_EXIT_S,
            rdzv=needs_network_option,
            node=command_line(node_command),
            words=start_on_host,
        )
        is_array = any(option.startswith("-J") for option in scheduler_options(job))
        return Script(text=script_text, submit=("qsub",), on_stdin=True, is_array=is_array)

    def conversion_script(self, job: Job) -> Script:
        """Return the script for ``qsub`` of a job that runs imgkit on a node to create an image file.

        Raises
        ------
        UsageError : the recipe does not name the nodes on which a .sif can be created.
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
        script_text = render_template(
            job, "sif.sh.j2", prefix="#PBS", directives=directives, command=command_line(job.command)
        )
        return Script(text=script_text, submit=("qsub",), on_stdin=True)

    def parse_job_id(self, output: str, name: str) -> str:
        """Return the id that ``qsub`` prints: ``4711.server``, or ``4711[].server`` for an array."""
        return find_job_id(output, r"[0-9]+(\[[0-9]*\])?(\..+)?")

    def status_commands(self, record: QueuedJob) -> tuple[Argv, ...]:
        """Return the commands that ask the queue, and then the history, which not every server keeps.

        The first one must ask the queue. If it prints anything, `job_status` takes the job for waiting or
        running.
        """
        return (("qstat", "-f", record.id), ("qstat", "-x", "-f", record.id))

    def parse_status(self, output: str) -> JobStatus:
        """Parse the output of ``qstat -f``: the job's state, its exit code, and the text for people.

        The state of a finished job (``F``) does not show whether the job succeeded. So its exit status is
        used.
        """
        output = output.replace("\n\t", "")  # qstat continues a long value on a new line, after a tab
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
        """Return the command that follows the job's output file, ``NAME.oSEQUENCE`` in the job's folder.

        Most systems copy the file there only when the job ends. ``tail -F`` waits until the file exists.

        Raises
        ------
        UsageError : the job is an array, in which each task writes to another file.
        """
        sequence = record.id.partition(".")[0]  # without the name of the server
        refuse_whole_array(record, example=sequence.replace("[]", "[0]"))
        suffix = re.sub(r"\[([0-9]+)\]", r".\1", sequence)  # for a task of an array: NAME.oSEQUENCE.INDEX
        path = record.directory / f"{record.name}.o{suffix}"
        return ("tail", "-n", "+1", "-F", str(path))

    def cancel_command(self, record: QueuedJob) -> Argv:
        """Return the command that ends the job, or all tasks of an array."""
        return ("qdel", record.id)

    def shell_command(self, record: QueuedJob, shell_line: str, node: str) -> NoReturn:
        """Raise UsageError, because PBS starts processes only from inside a job.

        The hint suggests ssh instead: ``ssh -t NODE 'bash -lc ...'; it is a new container on a node ...``.
        """
        shell = f"ssh -t {node or 'NODE'} {shlex.quote('bash -lc ' + shlex.quote(shell_line))}"
        raise UsageError(
            "PBS starts no shell in a running job from outside",
            where="--job",
            hint=f"where ssh may enter the nodes of your jobs (qstat -n1 {record.id} names them): {shell}; "
            f"it is {NEW_CONTAINER}",
        )


SYSTEM = Pbs()


def _find_attribute(output: str, name: str, pattern: str) -> str:
    """Return the value of an attribute in the output of ``qstat -f``: ``    job_state = R`` -> ``R``.

    The result is empty if the attribute is missing, or if `pattern` does not match its whole value.
    """
    match = re.search(rf"^\s*{re.escape(name)} = ({pattern})\s*$", output, re.MULTILINE)
    if match is None:
        return ""
    return match[1].strip()


def _shown_attributes(output: str) -> str:
    """Return the lines in the output of ``qstat -f`` that a status shows."""
    lines = []
    for line in output.splitlines():
        # From a line such as "Job Id: 4711.server" or "job_state = R".
        attribute = re.split(r" = |: ", line.strip())[0]
        if attribute in _SHOWN_ATTRIBUTES:
            lines.append(f"{line}\n")
    return "".join(lines)


def _wait_info(output: str) -> WaitInfo:
    """Return why a job waits, and its expected start, from the output of ``qstat -f``.

    The reason is the scheduler's comment. The scheduler estimates the start only if the site has enabled
    this.
    """
    expected_start = ""
    estimate = _find_attribute(output, "estimated.start_time", ".*")
    # PBS can also print a text that is not a time, such as UNSET. Then there is no estimate.
    with contextlib.suppress(ValueError):
        start_time = datetime.strptime(estimate, "%a %b %d %H:%M:%S %Y")
        expected_start = start_time.isoformat(timespec="minutes")
    return WaitInfo(reason=_find_attribute(output, "comment", ".*"), expected_start=expected_start)


def _resource_options(job: Job) -> Argv:
    """Return the options that request resources, for ``#PBS`` lines as well as for ``qsub -I``."""
    allocation = job.allocation
    # PBS has no option for memory per GPU, so the memory of a whole node is requested. Units are in lower
    # case: "440gb".
    memory = ""
    if allocation.memory:
        memory = f"{size_text(allocation.memory.node_MiB)}b".lower()
    chunk = (
        f"select={allocation.nodes}",
        *options_with_values({"ncpus": allocation.cpus, "ngpus": allocation.gpus, "mem": memory}),
        # The node file of PBS has one line for each MPI process. With one process per chunk, it has exactly
        # one line for each node. That process then starts the others on its node.
        "mpiprocs=1",
        *recipe_options(job, "chunk"),
    )
    return (*_common_options(job), "-l", ":".join(chunk), *scheduler_options(job))


def _common_options(job: Job) -> Argv:
    """Return the options for the name, queue, account and time limit, which every job has."""
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
    """Return the text of each ``#PBS`` line: ``["-N", "run", "-q", "gpu"] -> ["-N run", "-q gpu"]``."""
    texts: list[str] = []
    for option in options:
        # Each option begins a new line. Its value follows on the same line.
        if option.startswith("-") or not texts:
            texts.append(option)
        else:
            texts[-1] += f" {option}"
    return texts


def _node_command(job: Job, *, uses_pals: bool, needs_network_option: bool) -> Argv:
    """Return the command that starts the job's command on one node, or through mpiexec of PALS on all nodes.

    Parameters
    ----------
    uses_pals : whether the script starts the command on all nodes by mpiexec.
    needs_network_option : whether mpiexec gets a further option. The script finds out its spelling, and puts
        it into the array ``network``.
    """
    forward = _variables_to_forward(job, uses_pals=uses_pals)
    argv = with_folder_check(job, runtime_of(job).argv(job, job.command, forward=forward))
    if not uses_pals:
        return argv
    network_options = [ShellText('"${network[@]}"')] if needs_network_option else []
    return PALS.start_argv(argv, nnodes=job.allocation.nodes, options=network_options)


def _variables_to_forward(job: Job, *, uses_pals: bool) -> tuple[str, ...]:
    """Return the names of the variables that docker passes into the container. Others are not passed.

    By these variables, a node agent (imgkit's process on each node) finds its rank and the other nodes.
    """
    rank_variables: tuple[str, ...] = ("PBS_JOBID", "PBS_NODENUM", "PBS_TASKNUM")
    if uses_pals:  # mpiexec has started the node agent, and has set variables of its own
        rank_variables = PALS.fields.variables
    variables = (*rank_variables, *pbs.FORWARD, RUN_DIR_VARIABLE)
    if job.makes_secret:  # the nodes of the run recognize each other by this secret
        return (*variables, SECRET_VARIABLE)
    return variables


def _remote_command(starter: str) -> Argv:
    """Return the command by which the job's script starts the job's command on another host.

    It becomes a part of the template ``pbs.sh.j2``, which sets the variables in it. ``$rank`` is the index of
    the host, ``${hosts[rank]}`` its name, and ``${lines[rank]}`` its line in PBS' list of nodes. ``$task`` is
    shell text that defines the function ``node``, which runs the job's command.

    Parameters
    ----------
    starter : ``pbsdsh`` or ``ssh``.
    """
    if starter == "pbsdsh":
        return pbs.start_argv(
            ("/bin/bash", "-lc", ShellText('"$task; node"')), line_index=ShellText('"${lines[rank]}"')
        )
    # ssh gets the shell text through the standard input of bash (-s), and not as an argument.
    return ("ssh", "-o", "BatchMode=yes", ShellText('"${hosts[rank]}"'), "/bin/bash", "-l", "-s")


def _interactive_script(job: Job) -> Script:
    """Return the script of an interactive job: the ``qsub -I`` command, which opens a shell on a node.

    ``qsub -I`` cannot run commands in that shell. So comments above it list the lines that the user has to
    type there.

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
    lines = [
        "# In the shell that it gives, on one of the nodes:",
        *(f"#   {line}" for line in _shell_start_lines(job)),
        "# On all nodes: imgkit run --on here --dry-run ... > job.sh, no --interactive; then: bash job.sh",
        command_line(argv),
    ]
    return Script(text="\n".join(lines) + "\n", submit=argv, foreground=True)


def _shell_start_lines(job: Job) -> list[str]:
    """Return the lines that the user types on a node of an interactive job, up to the container's shell."""
    runtime = runtime_of(job)
    return [
        f"cd {shlex.quote(str(job.directory))}",
        *(f"module load {name}" for name in runtime.modules(job)),
        *runtime.exports(job),
        *run_folder_lines(job, "$PBS_JOBID").splitlines(),
        *command_line(with_folder_check(job, runtime.shell(job))).split("\n"),
    ]
