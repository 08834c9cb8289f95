"""torchrun itself, started by the node agent with nine changes.

It ends the remaining workers of a failed group by HUP. TERM is blocked in them or does nothing, since
schedulers send it to every process, and torchrun would wait 30 s before KILL. When the node agent ends it, by
HUP or QUIT, it prints nothing: the node agent has said why. After success it exits without tearing its
interpreter down, which takes 0.4 s with torch. What it says about failed workers goes to the full log of the
node agent alone (launch/failures.py); for a program of this package, it passes the exit code on. With
``IMGKIT_START=fork`` its workers are forks of it: torch is imported once for all of them, and they share the
memory of what it imports. It starts each worker on the processors beside its GPU (launch/cores.py). It notes
for the node agent when its rendezvous begins and ends. Where its standard output is closed or full, it notes
that and goes on. And at its end it waits for the other nodes without torch's store.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import io
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import popen_fork
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from imgkit_entrypoints import files
from imgkit_entrypoints.apps.ranks import run_worker
from imgkit_entrypoints.errors import EXIT_NO
from imgkit_entrypoints.launch import cores, failures, start_up, stop_protocol, user_program

_OWN = "imgkit_entrypoints.apps."
RELEASE_LOOK_S = 0.02
LOGGERS = [
    logging.getLogger(name)
    for name in (
        "torch.distributed.elastic.multiprocessing.api",
        "torch.distributed.elastic.multiprocessing.tail_log",
        "torch.distributed.elastic.agent.server.api",
        "torch.multiprocessing.spawn",
    )
]
"""What torchrun says about its workers: for the log of the node agent alone."""


class LogHandler(logging.Handler):
    """Writes to the log of the node agent, and not to the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        user_program.mark(self.format(record))


class LossyOutput(io.FileIO):
    """Standard output that drops what it cannot write, and notes the reason for the node agent.

    Otherwise the thread in which torch copies the output of a worker ends, and the rest is lost unsaid.
    """

    def write(self, data: Any) -> int:
        """Return the number of bytes that were written or dropped."""
        try:
            return super().write(data)
        except OSError as error:
            with contextlib.suppress(KeyError, OSError):
                note = Path(os.environ["IMGKIT_STOP_DIR"], stop_protocol.LOST_OUTPUT)
                files.write_file(note, error.strerror or str(error))
            return len(data)


def run_torchrun(run: Callable[[], None], *, is_imgkits: bool) -> None:
    """Run torchrun by `run`. Its report of failed workers goes to the node agent and its log.

    It prints nothing if the node agent ends it: other signals than the node agent's are blocked here, or end
    torchrun at once.
    """
    for logger in LOGGERS:
        logger.handlers, logger.propagate = [LogHandler()], False
    name = "_terminate_process_handler"  # torch has no setting for this
    by_torch = getattr(api, name, None)
    if by_torch is not None:

        def on_signal(number: int, frame: FrameType | None) -> None:
            for logger in LOGGERS:
                logger.setLevel(logging.CRITICAL)
            by_torch(number, frame)

        setattr(api, name, on_signal)
    try:
        run()
    except ChildFailedError as error:
        user_program.mark(traceback.format_exc().rstrip("\n"))
        rank, first = error.get_first_failure()
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        codes.update(_codes_of_forks(first.local_rank, rank))
        failures.note_codes(os.environ, codes, is_imgkits=is_imgkits)
        sys.exit(first.exitcode if is_imgkits and first.exitcode > 0 else EXIT_NO)
    except api.SignalException as error:
        sys.exit(128 + error.sigval)
    except Exception:
        text = traceback.format_exc().rstrip("\n")
        if not failures.note_torchrun(os.environ, text):
            raise
        user_program.mark(text)
        sys.exit(EXIT_NO)


_FORKS: list[api.MultiprocessContext] = []
"""The latest workers that are forks: of them, torch reports one failure alone, and not always the first."""


def _codes_of_forks(local_rank: int, rank: int) -> dict[int, int]:
    """Return the exit codes of failed forks by rank; the worker `local_rank` has `rank`."""
    processes = _FORKS[-1]._pc.processes if _FORKS else []
    first = rank - local_rank
    return {first + number: failure.exitcode for number, failure in enumerate(processes) if failure.exitcode}


def note_the_rendezvous() -> None:
    """Note for the node agent from when to when this node waits for others in torch's store."""
    by_torch = SimpleElasticAgent._rendezvous

    def note_times(agent: SimpleElasticAgent, group: object) -> None:
        with start_up.rendezvous(os.environ):
            by_torch(agent, group)

    SimpleElasticAgent._rendezvous = note_times


def wait_for_the_other_nodes() -> None:
    """Have torchrun of the head wait at its end for the node agent's word, and no other one wait.

    torchrun's own barrier is a counter in a store that strangers can write: they could hold it up for five
    minutes. The head's torchrun serves this store, so it must outlive the workers of all nodes.
    """
    by_torch = SimpleElasticAgent._exit_barrier

    def wait(agent: SimpleElasticAgent) -> None:
        group, folder = agent._worker_group, os.environ.get("IMGKIT_STOP_DIR")
        if not folder:
            by_torch(agent)
        elif group.group_rank == 0 and group.group_world_size > 1:
            # What removes old files of /tmp may have taken the folder: no word comes then.
            while Path(folder).exists() and not Path(folder, stop_protocol.RELEASE).exists():
                time.sleep(RELEASE_LOOK_S)

    SimpleElasticAgent._exit_barrier = wait


def start_workers_on_their_cpus() -> None:
    """Have torchrun start each worker on the processors beside its GPU, if the plan names any.

    A process inherits the processors of the thread that starts it, so they count from its first import on.
    """
    if cores.VARIABLE not in os.environ:
        return
    by_torch = api.get_subprocess_handler

    def start_worker(*, local_rank_id: int, **options: Any) -> object:
        own_cpus = os.sched_getaffinity(0)
        cores.bind_to_cpus(os.environ, local_rank_id)
        try:
            return by_torch(local_rank_id=local_rank_id, **options)
        finally:
            os.sched_setaffinity(0, own_cpus)

    api.get_subprocess_handler = start_worker


def main_of_forks() -> None:
    """Run torchrun with workers that are forked from this process, which has imported torch for all of them.

    Nothing here has started a thread of torch's or a CUDA context, so that a fork is safe.
    """
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    try:
        multiprocessing.get_context("fork").Event()
        tempfile.gettempdir()
    except OSError:  # a container without a writable /dev/shm or /tmp: torch's side of a fork needs both
        main()
        return
    config, _, argv = config_from_args(parse_args(sys.argv[1:]))
    config.start_method = "fork"
    if module := _own_module(argv):
        importlib.import_module(module)
    # When one worker has failed, torch ends the others by TERM, which is blocked in them.
    popen_fork.Popen.terminate = _hang_up  # type: ignore[assignment, method-assign]
    by_torch = api.MultiprocessContext._is_done

    def is_done(self: api.MultiprocessContext) -> bool:
        """Take the exit code 0 for success: torch would wait for ever for what the function returns."""
        _FORKS[:] = [self]
        for rank, process in enumerate(self._pc.processes):
            if process.exitcode == 0:
                self._return_values.setdefault(rank, None)
        return bool(by_torch(self))

    api.MultiprocessContext._is_done = is_done
    elastic_launch(config, worker)(*argv)


_TERMINATE = popen_fork.Popen.terminate


def _hang_up(process: popen_fork.Popen) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGHUP)


def _own_module(argv: Sequence[str]) -> str:
    """Name of the module that holds the imports of a program of this package; empty for others."""
    name = next((argument for argument in argv if argument.startswith(_OWN)), "")
    spec = importlib.util.find_spec(name) if name else None
    return f"{name}.__main__" if spec and spec.submodule_search_locations else name


def worker(*argv: str) -> None:
    """Run the worker in a forked process as ``python3 WORDS`` would."""
    popen_fork.Popen.terminate = _TERMINATE  # type: ignore[method-assign]
    cores.bind_to_cpus(os.environ, int(os.environ["LOCAL_RANK"]))
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the agent's handlers are here too
    run_worker(lambda: _run_program(argv), end=(lambda: None) if _own_module(argv) else _end_of_interpreter)


def _end_of_interpreter() -> None:
    """Wait for the program's threads and call what it gave to atexit, as Python does at the end of `main`."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _run_program(argv: Sequence[str]) -> None:
    if _own_module(argv):
        option = argv.index("-m")
        sys.argv = ["-m", *argv[option + 2 :]]
        # It was imported before the fork for the sake of its imports; runpy warns about a loaded module.
        sys.modules.pop(_own_module(argv), None)
        runpy.run_module(argv[option + 1], run_name="__main__", alter_sys=True)
        return
    # This interpreter is isolated, and that of such a program is not.
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[0:0] = ["", *folders]
    user_program.main(list(argv[argv.index(user_program.__file__) + 1 :]))


if __name__ == "__main__":
    api._get_default_signal = lambda: signal.SIGHUP  # torch has no setting for this
    note_the_rendezvous()
    wait_for_the_other_nodes()
    start_workers_on_their_cpus()
    sys.stdout = io.TextIOWrapper(
        LossyOutput(1, "w", closefd=False),
        encoding=sys.stdout.encoding,
        errors=sys.stdout.errors,
        write_through=True,
    )
    start = main_of_forks if os.environ.get("IMGKIT_START") == "fork" else main
    is_imgkits = any(argument.startswith(_OWN) for argument in sys.argv)
    run_worker(lambda: run_torchrun(start, is_imgkits=is_imgkits))
