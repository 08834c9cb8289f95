"""Slurm: a batch script, or the line that allocates nodes for interactive work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from imgkit_builder.job import container, quoting
from imgkit_builder.job.container import fill
from imgkit_builder.job.quoting import Shell, line, quote
from imgkit_builder.job.request import AnyJob, ImageJob, Job, Script, SubmittedJob
from imgkit_builder.job.systems import System, last_line
from imgkit_builder.recipe.systems import SHIPPED
from imgkit_entrypoints.schedulers import slurm


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
                *_place(job),
                *_resource_options(job),
                *(
                    # B: the signal goes to the script alone. A step's signal reaches every process of it. For
                    # ordinary users one of them serves the image's files; the run would die of a bus error.
                    (f"--signal=B:USR1@{job.stop_before_s}",) if job.stop_before_s else ()
                ),
                *(("--requeue", "--open-mode=append") if job.stop_before_s or job.outlives_nodes else ()),
            ),
            start=line(_start(job, container.start(job, job.command))),
            start_in_node=line(_start(job, (*_IN_NODE, *container.start(job, job.command)))),
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
        return ("tail", "-n", "+1", "-f", str(record.directory / f"{record.name}-{record.id}.out"))

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

    def outcome(self, record: SubmittedJob) -> tuple[str, ...]:
        """Words that print how the job ended; Slurm knows that for some minutes."""
        return ("scontrol", *_at(record.cluster), "--oneliner", "show", "job", record.id)

    def succeeded(self, output: str) -> bool | None:
        """Whether the job ended well, by the output of `outcome`."""
        found = re.search(r"\bJobState=([A-Z_]+)", output)
        return found[1] == "COMPLETED" if found else None

    def queues(self) -> tuple[tuple[str, ...], ...]:
        """Words that show the queues; the first program that exists is used."""
        return (("bsc_queues",), ("sinfo",))


SYSTEM = Slurm()


def _at(cluster: str) -> tuple[str, ...]:
    """The option of Slurm's commands for a job on a cluster that sbatch has named."""
    return (f"--clusters={cluster}",) if cluster else ()


def _place(job: AnyJob) -> tuple[str, str]:
    """The folder in which a script runs, and the file of its output."""
    folder = str(job.directory)
    return f'--chdir="{folder}"' if " " in folder else f"--chdir={folder}", "--output=%x-%j.out"


def _resource_options(job: Job) -> tuple[str, ...]:
    """The resources to request; directives and salloc take the same words."""
    nodes = f"{job.size.least}-{job.nodes}" if job.elastic else str(job.nodes)
    return (
        f"--nodes={nodes}",
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


def _start(job: Job, words: Sequence[str]) -> tuple[str, ...]:
    # srun does not read --network from the script's directives.
    network = tuple(word for word in job.recipe.system.queue.options if word.startswith("--network="))
    # From 22.05 to 23.02 srun does not inherit --cpus-per-task. As a variable, it follows the directive when
    # somebody edits the script.
    cpus = (Shell('--cpus-per-task="$SLURM_CPUS_PER_TASK"'),) if job.cpus else ()
    return slurm.start_argv(
        words,
        nnodes=None if job.elastic else job.nodes,
        outlives_nodes=job.outlives_nodes,
        options=(*cpus, *network),
    )


def _typed(job: Job) -> str:
    """The line that runs in the allocation: the command on all nodes, or a shell on the first one."""
    modules = [f"module load {shlex.quote(name)}" for name in container.modules(job)]
    cpus = (f"--cpus-per-task={job.cpus}",) if job.cpus else ()
    words = (
        _start(job, container.start(job, job.command))
        if job.command
        else ("srun", "--nodes=1", "--ntasks=1", *cpus, "--pty", *container.shell(job))
    )
    return " && ".join((*modules, *container.exports(job), " ".join(("exec", *map(quote, words)))))
