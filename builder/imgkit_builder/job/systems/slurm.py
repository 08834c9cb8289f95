"""Slurm: a batch script, or the line that allocates nodes for interactive work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from imgkit_builder.job import container, pyxis, quoting
from imgkit_builder.job.container import fill
from imgkit_builder.job.quoting import Shell, line, quote
from imgkit_builder.job.request import AnyJob, ImageJob, Job, Script, SubmittedJob
from imgkit_builder.job.systems import (
    NEW_CONTAINER,
    JobShell,
    System,
    last_line,
    need_task,
    options_of,
    with_folders,
)
from imgkit_builder.recipe.systems import SHIPPED
from imgkit_entrypoints.schedulers import slurm

ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""States of a job that has ended; the accounting can lag behind with another one."""


class Slurm(System):
    """Slurm: sbatch, srun and salloc."""

    registration = SHIPPED["slurm"]
    passes_names = True  # sbatch and salloc hand their environment on
    uses = ("account", "queue", "qos", "time", "cpus", "stop-before")
    spares_take_over = True

    def script(self, job: Job) -> Script:
        """The script for ``sbatch``, or the ``salloc`` line of an interactive job."""
        if job.request.interactive:
            words = ("salloc", *_resource_options(job), "bash", "-lc", _typed(job))
            return Script(text=line(words) + "\n", submit=words, foreground=True)
        text = fill(
            job,
            "slurm.sh.j2",
            directives=(
                f"--job-name={job.name}",
                *_place(job, "%A_%a" if self.is_array(job) else "%j"),
                *_resource_options(job),
                *(
                    # B: the signal goes to the script alone. A step's signal reaches every process of it. For
                    # ordinary users one of them serves the image's files; the run would die of a bus error.
                    (f"--signal=B:USR1@{job.stop_before_s}",) if job.stop_before_s else ()
                ),
                *(("--requeue", "--open-mode=append") if job.stop_before_s or job.outlives_nodes else ()),
            ),
            array=self.is_array(job),
            look=line(look) if (look := _look(job)) else "",
            start=line(_start(job, _container(job))),
            start_in_node=line(_start(job, (*_IN_NODE, *_container(job)))),
        )
        return Script(text=text, submit=("sbatch", "--parsable"), on_stdin=True)

    def image_script(self, job: ImageJob) -> Script:
        """The script for ``sbatch``."""
        queue = job.recipe.system.queue
        text = fill(
            job,
            "slurm-sif.sh.j2",
            directives=(
                f"--job-name={job.title}",
                *_place(job),
                "--nodes=1",
                "--ntasks=1",
                *((f"--time={job.time}",) if job.time else ()),
                *((f"--account={job.account}",) if job.account else ()),
                *queue.sif,
                *map(quoting.option, job.request.options),
            ),
            make=line(container.making(job)),
        )
        return Script(text=text, submit=("sbatch", "--parsable"), on_stdin=True)

    def job_id(self, output: str, name: str) -> str:
        """The id in the output of ``sbatch --parsable``: ``ID``, or ``ID;CLUSTER`` of one of several."""
        return last_line(output, r"[0-9]+(;.+)?")

    def status(self, record: SubmittedJob) -> tuple[str, ...]:
        """Words that show the job; %S is its start, or its expected start while it waits."""
        return (
            "squeue",
            *_at(record.cluster),
            f"--jobs={record.id}",
            "--format=%.12i %.10P %.20j %.10T %.10M %.6D %.20S %R",
        )

    def logs(self, record: SubmittedJob) -> tuple[str, ...]:
        """Words that follow the job's output."""
        need_task(record, f"{record.id}_0")
        output = record.directory / f"{record.name}-{record.id}.out"
        errors = output.with_name(f"{record.name}-{record.id}.err")
        # On a remote there is none, and nothing here has its name.
        return ("tail", "-n", "+1", "-f", *((str(errors),) if errors.is_file() else ()), str(output))

    def cancel(self, record: SubmittedJob) -> tuple[str, ...]:
        """Words that end the job."""
        return ("scancel", *_at(record.cluster), record.id)

    def alive(self, record: SubmittedJob) -> tuple[str, ...]:
        """Words that print the job's state while it waits or runs."""
        # From 20.02 on, --noheader leaves out the name of a single cluster, too.
        return ("squeue", *_at(record.cluster), "--noheader", f"--jobs={record.id}", "--format=%T")

    def unfinished(self, cluster: str = "") -> tuple[str, ...]:
        """Words that print the id of each job that waits or runs."""
        return ("squeue", *_at(cluster), "--noheader", "--format=%A")

    def own_jobs(self, record: SubmittedJob) -> tuple[str, ...]:
        """Words that list this user's jobs."""
        return ("squeue", "--me")

    def gone(self, said: str) -> bool:
        """Whether squeue no longer knows the job."""
        return "invalid job" in said.lower()

    def outcome(self, record: SubmittedJob) -> tuple[tuple[str, ...], ...]:
        """Commands that print how the job ended: the accounting's, and Slurm's own for some minutes."""
        columns = "JobID%-20,State%-20,ExitCode,Elapsed,Start,End,NodeList%-30"
        at = _at(record.cluster)
        return (
            ("sacct", *at, "--allocations", f"--jobs={record.id}", f"--format={columns}"),
            ("scontrol", *at, "--oneliner", "show", "job", record.id),
        )

    def succeeded(self, output: str) -> bool | None:
        """Whether the job, or all tasks of an array, ended well, by the output of `outcome`."""
        by_row = re.compile(r"^\S+ +([A-Z_]{3,})\b", re.MULTILINE)
        states = re.findall(r"\bJobState=([A-Z_]+)", output) or by_row.findall(output)
        if not states or any(state not in ENDED for state in states):
            return None
        return all(state == "COMPLETED" for state in states)

    def brief(self, output: str) -> str:
        """The fields of scontrol that tell how the job ended; all of sacct."""
        fields = "JobId|ArrayJobId|ArrayTaskId|JobState|Reason|ExitCode|RunTime|StartTime|EndTime|NodeList"
        if "JobState=" not in output:
            return output
        return "".join(
            " ".join(re.findall(rf"\b(?:{fields})=\S+", row)) + "\n" for row in output.splitlines() if row
        )

    def is_array(self, job: Job) -> bool:
        """Whether an option makes the job an array."""
        return any(re.match(r"--array\b|-a", word) for word in options_of(job))

    def task(self, record: SubmittedJob, job_id: str) -> str:
        """The id of a task: ``ARRAY_INDEX``."""
        return job_id if re.fullmatch(rf"{re.escape(record.id)}_[0-9]+", job_id) else ""

    def enter(self, record: SubmittedJob, line: str, node: str) -> JobShell:
        """A separate step that shares the nodes with the job's."""
        need_task(record, f"{record.id}_0")
        at, on = _at(record.cluster), (f"--nodelist={node}",) if node else ()
        step = (
            *(*at, "--overlap", "--nodes=1", "--ntasks=1", *on, f"--chdir={record.directory}", "--pty"),
            *("bash", "-lc", line),
        )
        if record.id.isdecimal():
            words = ("srun", f"--jobid={record.id}", *step)
        else:  # srun takes no ARRAY_INDEX, but the number that each task has, too
            number = shlex.join(("squeue", *at, "--noheader", f"--jobs={record.id}", "--format=%A"))
            find = f'id=$({number}) && : "${{id:?{record.id} does not run}}" && exec srun --jobid="$id" "$@"'
            words = ("bash", "-c", find, "srun", *step)  # dash would drop the function of modules
        return JobShell(words=words, about=NEW_CONTAINER)


SYSTEM = Slurm()


def _at(cluster: str) -> tuple[str, ...]:
    """The option of Slurm's commands for a job on a cluster that sbatch has named."""
    return (f"--clusters={cluster}",) if cluster else ()


def _place(job: AnyJob, numbered: str = "%j") -> tuple[str, ...]:
    """The folder in which a script runs, and the files of its output; `numbered` is the id in their names."""
    folder = str(job.directory)
    return (
        f'--chdir="{folder}"' if " " in folder else f"--chdir={folder}",
        f"--output=%x-{numbered}.out",
        *((f"--error=%x-{numbered}.err",) if job.recipe.system.queue.output == "separate" else ()),
    )


def _resource_options(job: Job) -> tuple[str, ...]:
    """The resources to request; directives and salloc take the same words."""
    return (
        f"--nodes={job.nodes}",
        *(("--no-kill",) if job.outlives_nodes else ()),
        "--ntasks-per-node=1",
        *((f"--gres=gpu:{job.gpus}",) if job.gpus else ()),
        *((f"--cpus-per-task={job.cpus}",) if job.cpus else ()),
        *((f"--time={job.time}",) if job.time else ()),
        *((f"--account={job.account}",) if job.account else ()),
        *((f"--partition={job.queue}",) if job.queue else ()),
        *((f"--qos={job.qos}",) if job.qos else ()),
        *job.recipe.system.queue.options,
        *map(quoting.option, job.request.options),
    )


_IN_NODE = ("bash", "-c", Shell('"$task"'), "node")
"""Words that run a node agent within the function of templates/job/slurm-spares.sh.j2."""


PODMAN_FORWARD = ("SLURM*", "IMGKIT_*", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that podman passes into the container; it alone expands the stars."""


def _container(job: Job) -> tuple[str, ...]:
    return _with_folders(job, container.start(job, job.command, forward=PODMAN_FORWARD))


def _with_folders(job: Job, words: Sequence[str]) -> tuple[str, ...]:
    """The same as `with_folders`, but for pyxis, whose words are first options of srun: `_look` does it."""
    return tuple(words) if job.run_by == "pyxis" else with_folders(job, words)


def _look(job: Job) -> tuple[str, ...]:
    """The step that looks at each node before the one that pyxis starts; empty for other runtimes."""
    if job.run_by != "pyxis":
        return ()
    # The next step need not wait until Slurm has cleaned up after this one, and gets all that is typed.
    words = with_folders(job, pyxis.look(job))
    return ("srun", "--overlap", "--input=none", "--ntasks-per-node=1", *words)


def _start(job: Job, words: Sequence[str]) -> tuple[str, ...]:
    # srun does not read --network from the script's directives.
    network = tuple(word for word in job.recipe.system.queue.options if word.startswith("--network="))
    # From 22.05 to 23.02 srun does not inherit --cpus-per-task. As a variable, it follows the directive when
    # somebody edits the script.
    cpus = (Shell('--cpus-per-task="$SLURM_CPUS_PER_TASK"'),) if job.cpus else ()
    return slurm.start_argv(
        words,
        nnodes=job.nodes,
        outlives_nodes=job.outlives_nodes,
        options=(*cpus, *network, *job.recipe.system.queue.srun),
    )


def _typed(job: Job) -> str:
    """The line that runs in the allocation: the command on all nodes, or a shell on the first one."""
    modules = [f"module load {shlex.quote(name)}" for name in container.modules(job)]
    cpus = (f"--cpus-per-task={job.cpus}",) if job.cpus else ()
    own, shell = job.recipe.system.queue.srun, _with_folders(job, container.shell(job))
    words = (
        _start(job, _container(job))
        if job.command
        else ("srun", "--nodes=1", "--ntasks=1", *cpus, *own, "--pty", *shell)
    )
    steps = (_look(job), ("exec", *words))
    typed = (" ".join(map(quote, step)) for step in steps if step)
    return " && ".join((*modules, *container.exports(job), *typed))
