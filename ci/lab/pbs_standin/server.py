"""The server: it answers the programs qsub, qstat, qselect, qdel, pbsdsh and mpiexec."""

from __future__ import annotations

import contextlib
import getopt
import os
import select
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence

from pbs_standin import mpi
from pbs_standin.jobs import SERVER, ArrayJob, Job, JobId, Task
from pbs_standin.protocol import Answer, RefusedError, Request, receive_request, send_answer
from pbs_standin.site import COMMAND, Site
from pbs_standin.submission import parse_submission

UNKNOWN_JOB = 153
"""Exit status of qstat and qdel if there is no such job: the lowest 8 bits of PBSE_UNKJOBID, 15001."""

JOB_HAS_ENDED = 35
"""Exit status of qstat without -x if the job has ended: the lowest 8 bits of PBSE_HISTJOBID, 15139."""

Program = Callable[[Request, socket.socket, Sequence[int]], Answer]
"""A program's part in the server. It gets the connection, which closes when the program is killed, and the
program's standard output and error."""


class Server:
    """All jobs of a cluster."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.jobs: dict[str, Job | ArrayJob] = {}
        """Jobs, array jobs and subjobs by their ids."""
        self.next_number = 0
        self.programs: dict[str, Program] = {
            "qsub": self.qsub,
            "qstat": self.qstat,
            "qselect": self.qselect,
            "qdel": self.qdel,
            "pbsdsh": self.pbsdsh,
            "mpiexec": self.mpiexec,
        }

    def install_programs(self) -> None:
        """Write the programs to the folder ``pbs/bin``, and put it on PATH in login shells of the user."""
        folder = self.site.folder
        for name in self.programs:
            program = folder / "bin" / name
            command = shlex.join(("python3", "-I", str(COMMAND), str(folder), name))
            program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            program.chmod(0o755)
        (self.site.home / ".profile").write_text(f"PATH={folder}/bin:$PATH\n")

    def serve(self) -> None:
        """Answer programs, each in a thread, until this process is ended."""
        path = self.site.folder / "socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            path.chmod(0o666)
            listener.listen(64)
            print("serving", flush=True)
            while True:
                link, _ = listener.accept()
                threading.Thread(target=self._answer, args=(link,), daemon=True).start()

    def _answer(self, link: socket.socket) -> None:
        """Answer one call of a program."""
        request, streams = receive_request(link)
        try:
            answer = self.programs[request.program](request, link, streams)
        except RefusedError as refused:
            answer = Answer(code=1, err=str(refused))
        except Exception as error:
            answer = Answer(code=1, err=f"stand-in: {error!r}\n")
        with contextlib.suppress(OSError):  # the program has been killed
            send_answer(link, answer)
        link.close()
        for stream in streams:
            os.close(stream)

    def qsub(self, request: Request, link: socket.socket, streams: Sequence[int]) -> Answer:
        """Start a job or an array job."""
        if list(request.args) == ["--version"]:
            return Answer(code=0, out="pbs_version = stand-in\n")
        number = self.next_number
        self.next_number += 1
        submission = parse_submission(request.script, request.args, request.cwd)
        job: Job | ArrayJob
        if submission.indices is None:
            job = Job(self.site, JobId(number=number), submission)
        else:
            job = ArrayJob(self.site, number, submission, submission.indices)
            self.jobs |= {subjob.id: subjob for subjob in job.subjobs}
        self.jobs[job.id] = job
        job.start()
        return Answer(code=0, out=f"{job.id}\n")

    def qstat(self, request: Request, link: socket.socket, streams: Sequence[int]) -> Answer:
        """Print the state of the job that the last argument names."""
        job = self._named_job(request)
        if job is None:
            return Answer(code=UNKNOWN_JOB, err=f"qstat: Unknown Job Id {request.args[-1:]}\n")
        if job.has_ended and "-x" not in request.args:
            hint = "Job has finished, use -x or -H to obtain historical job information"
            return Answer(code=JOB_HAS_ENDED, err=f"qstat: {job.id} {hint}\n")
        if "-f" in request.args:
            return Answer(code=0, out=job.status_text())
        return Answer(
            code=0, out=f"{job.id} {job.submission.name} {job.submission.queue} {_state_letter(job)}\n"
        )

    def qselect(self, request: Request, link: socket.socket, streams: Sequence[int]) -> Answer:
        """Print the ids of all jobs that have not ended, as without options. An array is one job."""
        lines = []
        for job in self.jobs.values():
            is_subjob = isinstance(job, Job) and job.job_id.index is not None
            if not is_subjob and not job.has_ended:
                lines.append(f"{job.id}\n")
        return Answer(code=0, out="".join(lines))

    def qdel(self, request: Request, link: socket.socket, streams: Sequence[int]) -> Answer:
        """Begin to end the job that the last argument names."""
        job = self._named_job(request)
        if job is None or job.has_ended:
            return Answer(code=UNKNOWN_JOB, err=f"qdel: Unknown Job Id {request.args[-1:]}\n")
        threading.Thread(target=job.delete, daemon=True).start()
        return Answer(code=0)

    def pbsdsh(self, request: Request, link: socket.socket, streams: Sequence[int]) -> Answer:
        """Start a task for each line of the node file, and wait for all of them."""
        job = self._calling_job(request)
        try:
            options, argv = getopt.getopt(list(request.args), "c:n:svo")
        except getopt.GetoptError as error:
            raise RefusedError(f"pbsdsh: {error}\n") from None
        by_flag = dict(options)
        tasks = [_start_pbsdsh_task(job, line, argv) for line in _pbsdsh_lines(by_flag, job)]
        out = ""
        for number, task in enumerate(tasks):
            code = task.wait()
            if code > 256:
                time.sleep(1)  # a lost host's processes are gone before the cluster's keeper notices
            if not self._wait_for_node(task.node, job):
                return Answer(code=1)
            if code or "-v" in by_flag:
                out += f"pbsdsh: task 0x{number:08X} exit status {code}\n"
        return Answer(code=0, out=out)

    def _wait_for_node(self, node: str, job: Job) -> bool:
        """Return True as soon as a node is up, and False if the job ends before.

        pbsdsh does not return from a lost host: it waits for it, until the script ends.
        """
        while not self.site.is_up(node):
            if job.end_event.wait(1):
                return False
        return True

    def mpiexec(self, request: Request, link: socket.socket, streams: Sequence[int]) -> Answer:
        """Start ranks on the job's hosts, and end all of them when one fails or mpiexec is killed."""
        if list(request.args) == ["--help"]:
            return Answer(code=0, out=mpi.HELP)
        job = self._calling_job(request)
        launch = mpi.parse_mpiexec(request.args)
        tasks = []
        for rank in range(launch.ranks):
            node = job.hosts[launch.node_index(rank)]
            env = {**request.env, **launch.env, **launch.rank_environment(rank)}
            out, err = streams
            tasks.append(job.start_task(node, launch.argv, env, request.cwd, (out, err)))
        codes_at_end = _wait_for_failure(tasks, link)
        for task in tasks:
            if task.process.poll() is None:
                task.signal(signal.SIGTERM)
        return Answer(code=mpi.exit_status(codes_at_end, [task.wait() for task in tasks]))

    def _named_job(self, request: Request) -> Job | ArrayJob | None:
        """Return the job that the last argument names: ``7.standin``, or ``7`` alone."""
        if not request.args:
            return None
        number = request.args[-1].partition(".")[0]
        return self.jobs.get(f"{number}.{SERVER}")

    def _calling_job(self, request: Request) -> Job:
        """Return the job whose script has called pbsdsh or mpiexec."""
        job = self.jobs.get(request.env.get("PBS_JOBID", ""))
        if not isinstance(job, Job) or not request.env.get("PBS_ENVIRONMENT"):
            raise RefusedError(f"{request.program}: not executing under PBS\n")
        return job


def _state_letter(job: Job | ArrayJob) -> str:
    """Return the state in a line of qstat: finished, or running as an array or as a job."""
    if job.has_ended:
        return "F"
    return "B" if isinstance(job, ArrayJob) else "R"


def _pbsdsh_lines(by_flag: dict[str, str], job: Job) -> Sequence[int]:
    """Return for which lines of the node file pbsdsh starts a task: ``-n LINE``, ``-c COUNT`` or all."""
    if "-n" in by_flag:
        return [int(by_flag["-n"])]
    return range(int(by_flag.get("-c", len(job.node_lines))))


def _start_pbsdsh_task(job: Job, line: int, argv: Sequence[str]) -> Task:
    """Start a task of pbsdsh for a line of the node file. ``pbsdsh -c`` starts again at the first line."""
    host = job.node_lines[line % len(job.node_lines)]
    env = job.environment(job.hosts.index(host), f"{len(job.tasks) + 1:08X}")
    return job.start_task(host, argv, {**env, "PATH": "/bin:/usr/bin"}, job.site.home)


def _wait_for_failure(tasks: Sequence[Task], link: socket.socket) -> list[int | None]:
    """Wait until a rank fails, all ranks have ended, or mpiexec is killed.

    Returns the exit status of each rank at that time; None for a rank that still runs.
    """
    while True:
        codes = [task.process.poll() for task in tasks]
        mpiexec_is_killed = bool(select.select([link], [], [], 0.1)[0])
        if mpiexec_is_killed or any(codes) or None not in codes:
            return codes
