"""torchrun itself, which the node agent starts with nine changes.

1. It ends the remaining workers of a failed group by HUP. TERM is blocked in them or does nothing, because
   schedulers send it to every process, and torchrun would wait 30 s before KILL.
2. When the node agent ends it, by HUP or QUIT, it prints nothing, because the node agent has said why.
3. After success it exits without tearing its interpreter down, which takes 0.4 s with torch.
4. Its report of failed workers goes only to the full log of the node agent (launch/failures.py). For a
   program of this package, it passes the exit code on.
5. With ``IMGKIT_START=fork`` its workers are forks of it. So torch is imported once for all of them, and they
   share the memory of what it imports.
6. It starts each worker on the processors beside its GPU (launch/cores.py).
7. It notes for the node agent when its rendezvous begins and ends.
8. If its standard output is closed or full, it notes that and goes on.
9. At its end it waits for the other nodes without torch's store.

Where torch has no setting for a change, a function of torch is replaced at the end of this module.
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

# How the modules of imgkit's own programs begin, such as imgkit_entrypoints.apps.train.
_OWN = "imgkit_entrypoints.apps."
# Time between two searches for the file by which the node agent lets this process end.
RELEASE_POLL_S = 0.02
LOGGERS = [
    logging.getLogger(name)
    for name in (
        "torch.distributed.elastic.multiprocessing.api",
        "torch.distributed.elastic.multiprocessing.tail_log",
        "torch.distributed.elastic.agent.server.api",
        "torch.multiprocessing.spawn",
    )
]
"""Loggers with which torchrun reports about its workers. The reports go only to the node agent's log."""
# Functions of torch that this module replaces.
_TORCH_RENDEZVOUS = SimpleElasticAgent._rendezvous
_TORCH_EXIT_BARRIER = SimpleElasticAgent._exit_barrier
# None: this release of torch has no such function.
_TORCH_START_WORKER: Any = getattr(api, "get_subprocess_handler", None)
_TORCH_ON_SIGNAL: Any = getattr(api, "_terminate_process_handler", None)


class LogHandler(logging.Handler):
    """Writes records to the log of the node agent, and not to the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        user_program.print_to_log(self.format(record))


class LossyOutput(io.FileIO):
    """Standard output that drops what it cannot write, and notes the reason for the node agent.

    Without it, the thread in which torch copies the output of a worker would end at the first error, and the
    rest of the output would be lost without a message.
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
    """Run torchrun, and pass its report of failed workers to the node agent and its log.

    If the node agent ends torchrun by a signal, nothing is printed. Other signals than those of the node
    agent are blocked here, or end torchrun at once.

    Parameters
    ----------
    run : function that runs torchrun, such as ``torch.distributed.run.main``.
    is_imgkits : the workers run a program of this package, whose exit codes have a meaning.
    """
    for logger in LOGGERS:
        logger.handlers = [LogHandler()]
        logger.propagate = False
    try:
        run()
    except ChildFailedError as error:
        user_program.print_to_log(traceback.format_exc().rstrip("\n"))
        sys.exit(_note_failed_workers(error, is_imgkits=is_imgkits))
    except api.SignalException as error:
        sys.exit(128 + error.sigval)
    except Exception:
        text = traceback.format_exc().rstrip("\n")
        if not failures.write_torchrun_error(os.environ, text):
            raise
        user_program.print_to_log(text)
        sys.exit(EXIT_NO)


def on_signal(number: int, frame: FrameType | None) -> None:
    """Handle a signal as torchrun does, but log nothing about the workers that it ends."""
    for logger in LOGGERS:
        logger.setLevel(logging.CRITICAL)
    _TORCH_ON_SIGNAL(number, frame)


def _note_failed_workers(error: ChildFailedError, *, is_imgkits: bool) -> int:
    """Note the exit codes of failed workers for the node agent, and return the exit code of torchrun."""
    first_rank, first_failure = error.get_first_failure()
    codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    codes.update(_codes_of_forks(first_rank - first_failure.local_rank))
    failures.write_exit_codes(os.environ, codes, is_imgkits=is_imgkits)
    if is_imgkits and first_failure.exitcode > 0:  # a negative one is the signal that ended the worker
        return int(first_failure.exitcode)
    return EXIT_NO


_FORKS: list[api.MultiprocessContext] = []
"""The current group of forked workers. torch reports only one failure of forks, and not always the first."""


def _codes_of_forks(first_rank: int) -> dict[int, int]:
    """Return the exit codes of failed forked workers by rank; `first_rank` is the rank of the first one."""
    codes: dict[int, int] = {}
    for group in _FORKS:
        for rank, process in enumerate(group._pc.processes, first_rank):
            if process.exitcode:
                codes[rank] = process.exitcode
    return codes


def rendezvous(agent: SimpleElasticAgent, group: object) -> None:
    """Do torchrun's rendezvous, and note for the node agent when it begins and ends."""
    with start_up.rendezvous(os.environ):
        _TORCH_RENDEZVOUS(agent, group)


def exit_barrier(agent: SimpleElasticAgent) -> None:
    """Wait at the end of torchrun for a file of the node agent, and only on the head of several nodes.

    The head's torchrun serves torch's store, so it must outlive the workers of all nodes. torchrun's own
    barrier for this is a counter in the store. Others on the network can write to that, and could hold up the
    barrier for five minutes.
    """
    folder = os.environ.get("IMGKIT_STOP_DIR")
    if not folder:  # there is no node agent
        _TORCH_EXIT_BARRIER(agent)
        return
    group = agent._worker_group
    if group.group_rank != 0 or group.group_world_size == 1:
        return
    # If a cleaner of /tmp has removed the folder, no file can come.
    while Path(folder).exists() and not Path(folder, stop_protocol.RELEASE).exists():
        time.sleep(RELEASE_POLL_S)


def start_worker(*, local_rank_id: int, **options: Any) -> object:
    """Start a worker on the processors beside its GPU.

    A process inherits the processors of the thread that starts it. So they are right from the worker's first
    import on.
    """
    own_cpus = os.sched_getaffinity(0)
    cores.bind_to_cpus(os.environ, local_rank_id)
    try:
        return _TORCH_START_WORKER(local_rank_id=local_rank_id, **options)
    finally:
        os.sched_setaffinity(0, own_cpus)


def run_with_forks() -> None:
    """Run torchrun with workers that are forks of this process, which has imported torch for all of them.

    This is safe because nothing here has started a thread of torch or a CUDA context.
    """
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    if not _can_fork_workers():
        main()
        return
    config, _, argv = config_from_args(parse_args(sys.argv[1:]))
    config.start_method = "fork"
    module = _find_own_module(argv)
    if module:
        importlib.import_module(module)
    # When one worker has failed, torch ends the others by TERM, which is blocked in them. So end them by HUP.
    popen_fork.Popen.terminate = _hang_up  # type: ignore[assignment, method-assign]
    count_exited_forks()
    elastic_launch(config, run_forked_worker)(*argv)


def _can_fork_workers() -> bool:
    """Return whether torch can fork workers: it needs /dev/shm and /tmp, which a container may lack."""
    try:
        multiprocessing.get_context("fork").Event()
        tempfile.gettempdir()
    except OSError:
        return False
    return True


def count_exited_forks() -> None:
    """Change torchrun so that the exit code 0 of a fork is success.

    A fork ends its process within its function, so the function returns nothing. torchrun would wait for
    ever for its return value.
    """
    torch_is_done = api.MultiprocessContext._is_done

    def is_done(group: api.MultiprocessContext) -> bool:
        _FORKS[:] = [group]
        for rank, process in enumerate(group._pc.processes):
            if process.exitcode == 0:
                group._return_values.setdefault(rank, None)
        return bool(torch_is_done(group))

    api.MultiprocessContext._is_done = is_done


_ORIGINAL_TERMINATE = popen_fork.Popen.terminate


def _hang_up(process: popen_fork.Popen) -> None:
    """End a forked worker by HUP, if it still runs."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGHUP)


def _find_own_module(argv: Sequence[str]) -> str:
    """Return the module of imgkit's own program in `argv`, or "" if the program is the user's.

    For a package such as ``imgkit_entrypoints.apps.train`` it is ``__main__`` in it, which has the imports.
    """
    for argument in argv:
        if not argument.startswith(_OWN):
            continue
        spec = importlib.util.find_spec(argument)
        if spec is not None and spec.submodule_search_locations:
            return f"{argument}.__main__"
        return argument
    return ""


def run_forked_worker(*argv: str) -> None:
    """Run a worker in a forked process, as ``python3 ARGV`` would, and end the process."""
    # The fork has torchrun's own way to end processes and its signal handlers, which are not for the program.
    popen_fork.Popen.terminate = _ORIGINAL_TERMINATE  # type: ignore[method-assign]
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    cores.bind_to_cpus(os.environ, int(os.environ["LOCAL_RANK"]))
    module = _find_own_module(argv)
    if module:
        run_worker(lambda: _run_own_module(module, argv))
    else:
        run_worker(lambda: _run_user_program(argv), end=_finish_interpreter)


def _finish_interpreter() -> None:
    """Wait for the program's threads and call its atexit functions, as Python does at the end."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _run_own_module(module: str, argv: Sequence[str]) -> None:
    """Run a module of this package, which was imported before the fork for the sake of its imports."""
    option = argv.index("-m")
    program, *options = argv[option + 1 :]
    sys.argv = ["-m", *options]
    sys.modules.pop(module, None)  # runpy warns about a module that is loaded
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def _run_user_program(argv: Sequence[str]) -> None:
    """Run the user's own program."""
    # torchrun runs isolated (python3 -I), but the user's program expects its folder and PYTHONPATH.
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[0:0] = ["", *filter(None, folders)]
    runner = argv.index(user_program.__file__)  # the user's program and its arguments come after it
    user_program.main(list(argv[runner + 1 :]))


if __name__ == "__main__":
    # The signal that ends the remaining workers of a failed group; see the first change above.
    api._get_default_signal = lambda: signal.SIGHUP
    if _TORCH_ON_SIGNAL is not None:
        api._terminate_process_handler = on_signal
    SimpleElasticAgent._rendezvous = rendezvous
    SimpleElasticAgent._exit_barrier = exit_barrier
    if cores.VARIABLE in os.environ:
        api.get_subprocess_handler = start_worker
    sys.stdout = io.TextIOWrapper(
        LossyOutput(1, "w", closefd=False),
        encoding=sys.stdout.encoding,
        errors=sys.stdout.errors,
        write_through=True,
    )
    start = main
    if os.environ.get("IMGKIT_START") == "fork":
        start = run_with_forks
    is_imgkits = any(argument.startswith(_OWN) for argument in sys.argv)
    run_worker(lambda: run_torchrun(start, is_imgkits=is_imgkits))
