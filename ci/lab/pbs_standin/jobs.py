"""Jobs and array jobs, and the tasks of a job on its nodes."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pbs_standin.site import Site
from pbs_standin.submission import Submission

SERVER = "standin"
"""The server's name, with which every job id ends: ``7.standin``."""

KILL_DELAY_S = 3
OVER_WALLTIME = -29
"""The exit status of a job that has reached its walltime (JOB_EXEC_KILL_WALLTIME in OpenPBS)."""

Stream = int | IO[bytes]
"""A file, or its descriptor, to which a task writes."""

_START_TASK = 'echo $$ > "$0"; umask 077; mkdir -p "$TMPDIR"; exec "$@"'
"""A shell command that writes its session to the file ``$0``, and becomes the task ``$@``."""


class Task:
    """A process on a node, in a session of its own, as a daemon of PBS starts it."""

    def __init__(
        self,
        site: Site,
        node: str,
        argv: Sequence[object],
        env: Mapping[str, str],
        cwd: str | Path,
        streams: tuple[Stream, Stream],
    ) -> None:
        """Start `argv` with no other variables than `env`. The streams are its output and errors."""
        self.site = site
        self.node = node
        self.session_file = site.folder / "sessions" / f"{time.monotonic_ns()}"
        variables = [f"--env={name}={value}" for name, value in env.items()]
        start_argv = ("setsid", "sh", "-c", _START_TASK, self.session_file, *argv)
        self.process = subprocess.Popen(
            site.cluster_argv(
                "exec", "--user", "--clean-env", *variables, "--cwd", cwd, node, "--", *start_argv
            ),
            stdin=subprocess.DEVNULL,
            stdout=streams[0],
            stderr=streams[1],
            start_new_session=True,
        )

    def wait(self) -> int:
        """Wait for the task's end, and return its exit status.

        It is 256 and the number of the signal if one has ended the task.
        """
        code = self.process.wait()
        if 128 < code < 160:  # `cluster exec` adds a signal's number to 128
            return code + 128
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the task's session."""
        with contextlib.suppress(OSError, ValueError):  # it has not written its session yet
            session = int(self.session_file.read_text())
            kill_argv = ("pkill", f"-{int(number)}", "-s", session)
            subprocess.run(
                self.site.cluster_argv("exec", self.node, "--", *kill_argv),
                stdin=subprocess.DEVNULL,
                check=False,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobId:
    """The number of a job, and its index if it is a subjob: ``7.standin``, ``7[2].standin``."""

    number: int
    index: int | None = None

    def __str__(self) -> str:
        return f"{self.number}{self._brackets()}.{SERVER}"

    def _brackets(self) -> str:
        return "" if self.index is None else f"[{self.index}]"

    def output_name(self, job_name: str, letter: str) -> str:
        """Return the name of the file with the job's output (letter ``o``) or errors (``e``)."""
        subjob = "" if self.index is None else f".{self.index}"
        return f"{job_name}.{letter}{self.number}{subjob}"


class Job:
    """A job or subjob: where it runs, and its tasks."""

    def __init__(self, site: Site, job_id: JobId, submission: Submission) -> None:
        self.site = site
        self.job_id = job_id
        self.id = str(job_id)
        self.submission = submission
        self.code: int | None = None
        """The exit status. It is set before the end where the job has reached its walltime."""
        self.tasks: list[Task] = []
        self.end_event = threading.Event()
        self.lock = threading.Lock()
        self.node_lines = submission.resources.list_hosts(site.nodes)
        """The lines of the node file."""
        self.hosts = list(dict.fromkeys(self.node_lines))
        self.node_file = f"/run/pbs/aux/{self.id}"
        self.output = site.folder / "spool" / f"{self.id}.OU"
        self.errors = self.output if submission.has_joined_streams else self.output.with_suffix(".ER")

    @property
    def has_ended(self) -> bool:
        """Return True if the job's output has been delivered, and its exit status is known."""
        return self.end_event.is_set()

    def environment(self, node_index: int, task_number: str) -> dict[str, str]:
        """Return the variables of the script, and of every task that pbsdsh starts.

        Parameters
        ----------
        node_index : the position of the task's host among the job's hosts
        task_number : ``"1"`` for the script, 8 hexadecimal digits for a task of pbsdsh
        """
        submission = self.submission
        env = {
            "PBS_JOBNAME": submission.name,
            "PBS_JOBID": self.id,
            "PBS_QUEUE": submission.queue,
            "PBS_JOBCOOKIE": "0" * 32,
            "PBS_NODENUM": str(node_index),
            "PBS_TASKNUM": task_number,
            "PBS_MOMPORT": "15003",
            "PBS_O_WORKDIR": submission.cwd,
            "PBS_O_HOST": "login",
            "PBS_O_QUEUE": submission.queue,
            "PBS_O_HOME": str(self.site.home),
            "PBS_O_SHELL": "/bin/bash",
            "PBS_O_SYSTEM": "Linux",
            "PBS_ENVIRONMENT": "PBS_BATCH",
            "ENVIRONMENT": "BATCH",
            "PBS_JOBDIR": str(self.site.home),
            "OMP_NUM_THREADS": submission.resources.ncpus,
            "NCPUS": submission.resources.ncpus,
            "TMPDIR": f"/var/tmp/pbs.{self.id}",
        }
        if submission.account:
            env["PBS_ACCOUNT"] = submission.account
        if self.job_id.index is not None:
            env["PBS_ARRAY_INDEX"] = str(self.job_id.index)
            env["PBS_ARRAY_ID"] = array_id(self.job_id.number)
        return env

    def start(self) -> None:
        """Start the script on the first host, and the threads that wait for its end."""
        script = self.site.folder / "spool" / f"{self.id}.SC"
        script.write_text(self.submission.script)
        self._write_node_file()
        env = {**self.environment(0, "1"), "PBS_NODEFILE": self.node_file}
        shell_argv = (self.submission.shell, "-l", script)
        main_task = self.start_task(self.hosts[0], shell_argv, env, self.site.home)
        threading.Thread(target=self._follow, args=(main_task,), daemon=True).start()
        if self.submission.resources.walltime_s:
            threading.Thread(target=self._enforce_walltime, daemon=True).start()

    def _write_node_file(self) -> None:
        """Write the node file to the first host's own disk."""
        lines = " ".join(self.node_lines)
        command = f"mkdir -p /run/pbs/aux && printf '%s\\n' {lines} > {self.node_file}"
        subprocess.run(
            self.site.cluster_argv("exec", self.hosts[0], "--", "sh", "-c", command),
            check=True,
            stdin=subprocess.DEVNULL,
        )

    def start_task(
        self,
        node: str,
        argv: Sequence[object],
        env: Mapping[str, str],
        cwd: str | Path,
        streams: tuple[Stream, Stream] | None = None,
    ) -> Task:
        """Start a task of this job. Without `streams` it writes to the job's own output and errors."""
        with self.output.open("ab") as output, self.errors.open("ab") as errors, self.lock:
            task = Task(self.site, node, argv, env, cwd, streams or (output, errors))
            self.tasks.append(task)
        return task

    def signal(self, number: signal.Signals, hosts: Sequence[str]) -> None:
        """Send a signal to the job's tasks on some of its hosts."""
        for task in list(self.tasks):  # pbsdsh may add tasks meanwhile
            if task.node in hosts:
                task.signal(number)

    def delete(self) -> None:
        """End the job as qdel does: signal its sessions on the first host alone."""
        first_host = self.hosts[:1]
        self.signal(signal.SIGTERM, first_host)
        if not self.end_event.wait(KILL_DELAY_S):
            self.signal(signal.SIGKILL, first_host)

    def status_text(self) -> str:
        """Return the lines of ``qstat -x -f`` that imgkit reads."""
        if not self.has_ended:
            return f"Job Id: {self.id}\n    job_state = R\n"
        return f"Job Id: {self.id}\n    job_state = F\n    Exit_status = {self.code}\n"

    def _enforce_walltime(self) -> None:
        """End the job when its walltime is over."""
        if not self.end_event.wait(self.submission.resources.walltime_s):
            self.code = OVER_WALLTIME
            self.delete()

    def _follow(self, main_task: Task) -> None:
        """Wait for the script's end, kill what is left of the job, and bring its output to the submitter."""
        code = main_task.wait()
        if self.code is None:
            self.code = code
        self.signal(signal.SIGKILL, self.hosts)
        for task in self.tasks:
            task.process.wait()
        self._deliver_output()
        shutil.rmtree(f"/var/tmp/pbs.{self.id}", ignore_errors=True)
        code_file = self.site.folder / "spool" / f"{self.id}.code"
        code_file.write_text(f"{self.code}\n")
        code_file.rename(self.site.folder / "jobs" / self.id)  # a waiting process sees the whole file or none
        self.end_event.set()

    def _deliver_output(self) -> None:
        """Move the job's output to the folder of qsub."""
        for file, letter in ((self.output, "o"), (self.errors, "e")):
            target = Path(self.submission.cwd) / self.job_id.output_name(self.submission.name, letter)
            with contextlib.suppress(OSError):  # joined streams are one file; or the folder has gone
                shutil.move(file, target)


class ArrayJob:
    """The subjobs of one script, one for each index."""

    def __init__(self, site: Site, number: int, submission: Submission, indices: Sequence[int]) -> None:
        self.id = array_id(number)
        self.submission = submission
        self.subjobs = [Job(site, JobId(number=number, index=index), submission) for index in indices]

    @property
    def has_ended(self) -> bool:
        """Return True if all subjobs have ended."""
        return all(job.has_ended for job in self.subjobs)

    def start(self) -> None:
        """Start all subjobs."""
        for job in self.subjobs:
            job.start()

    def delete(self) -> None:
        """End all subjobs, without waiting for their end."""
        for job in self.subjobs:
            threading.Thread(target=job.delete, daemon=True).start()

    def status_text(self) -> str:
        """Return the lines of ``qstat -x -f`` that imgkit reads."""
        if not self.has_ended:
            return f"Job Id: {self.id}\n    job_state = B\n"
        code = int(any(job.code for job in self.subjobs))
        return f"Job Id: {self.id}\n    job_state = F\n    Exit_status = {code}\n"


def array_id(number: int) -> str:
    """Return the id of an array job: ``7[].standin``."""
    return f"{number}[].{SERVER}"
