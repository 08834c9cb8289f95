"""Run torchrun with nine changes.

The node agent (imgkit's process on each node) starts this module instead of torchrun. The changes are:

1. If a worker fails, torchrun ends the remaining workers by HUP instead of TERM. Schedulers send TERM to
   every process, so workers block or ignore it, and torchrun would wait 30 s before it sends KILL.
2. If the node agent ends torchrun by HUP or QUIT, torchrun prints nothing, because the node agent has already
   reported the reason.
3. After success, torchrun exits without finalizing its interpreter, which takes 0.4 s with torch.
4. The report of failed workers goes only to the full log of the node agent (launch/failures.py). If the
   workers run a program of this package, torchrun exits with the worker's exit code.
5. With ``IMGKIT_START=fork``, workers are forks of torchrun. So torch is imported only once, and all workers
   share the memory of the imported modules.
6. Each worker starts on the processors that are near its GPU (launch/cores.py).
7. The begin and the end of the rendezvous are recorded for the node agent.
8. If standard output is closed or its disk is full, this is recorded, and torchrun continues.
9. At the end, torchrun waits for the other nodes without torch's key-value store.

Where torch has no setting for a change, the code at the end of this module replaces a function of torch.
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

# Prefix of the modules of imgkit's own programs, such as imgkit_entrypoints.apps.train.
_OWN_PREFIX = "imgkit_entrypoints.apps."
# Seconds between two checks for the file with which the node agent allows this process to exit.
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
"""torchrun's loggers for messages about workers. Their messages go only to the node agent's log."""
# The original functions of torch that this module replaces.
_TORCH_RENDEZVOUS = SimpleElasticAgent._rendezvous
_TORCH_EXIT_BARRIER = SimpleElasticAgent._exit_barrier
# These two are None if this version of torch does not have the function.
_TORCH_START_WORKER: Any = getattr(api, "get_subprocess_handler", None)
_TORCH_ON_SIGNAL: Any = getattr(api, "_terminate_process_handler", None)


class LogHandler(logging.Handler):
    """Writes log records to the log of the node agent instead of the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        user_program.print_to_log(self.format(record))


class LossyOutput(io.FileIO):
    """Standard output that drops data which cannot be written, and records the reason for the node agent.

    With a normal file, the thread in which torch copies the output of a worker would end at the first error.
    The rest of the output would be lost without a message.
    """

    def write(self, data: Any) -> int:
        """Write or drop `data`, and return the number of bytes that were handled."""
        try:
            return super().write(data)
        except OSError as error:
            with contextlib.suppress(KeyError, OSError):
                note = Path(os.environ["IMGKIT_STOP_DIR"], stop_protocol.LOST_OUTPUT)
                files.write_file(note, error.strerror or str(error))
            return len(data)


def run_torchrun(run: Callable[[], None], *, is_own_program: bool) -> None:
    """Run torchrun, and report errors to the node agent instead of printing a traceback.

    The node agent is imgkit's process on each node, which has started torchrun. It reads the errors of failed
    workers, or of torchrun itself, from files, and prints them.

    Parameters
    ----------
    run : function that runs torchrun, such as ``torch.distributed.run.main``.
    is_own_program : True if the workers run a program of this package. The exit codes of these programs have
        a meaning, so torchrun exits with the same code.
    """
    for logger in LOGGERS:
        logger.handlers = [LogHandler()]  # writes to the node agent's log instead of the terminal
        logger.propagate = False
    try:
        run()
    except ChildFailedError as error:
        user_program.print_to_log(traceback.format_exc().rstrip("\n"))
        sys.exit(_record_failed_workers(error, is_own_program=is_own_program))
    except api.SignalException as error:  # the node agent has ended torchrun, and reports the reason itself
        sys.exit(128 + error.sigval)  # the exit code of a process that a signal has ended, as in a shell
    except Exception:
        text = traceback.format_exc().rstrip("\n")
        is_recorded = failures.write_torchrun_error(os.environ, text)
        if not is_recorded:  # for example, there is no node agent
            raise
        user_program.print_to_log(text)
        sys.exit(EXIT_NO)


def on_signal(number: int, frame: FrameType | None) -> None:
    """Handle a signal as torchrun does, but without log messages about the workers that it ends."""
    for logger in LOGGERS:
        logger.setLevel(logging.CRITICAL)
    _TORCH_ON_SIGNAL(number, frame)


def _record_failed_workers(error: ChildFailedError, *, is_own_program: bool) -> int:
    """Record the exit codes of failed workers for the node agent, and return the exit code of torchrun.

    The node agent is imgkit's process on each node, which has started torchrun. It reads the codes to explain
    the failure. torchrun exits with the code of the first worker that failed if the workers run a program of
    this package (`is_own_program`), and otherwise with a fixed code.
    """
    # The first failure in time is the cause. torchrun itself ended the other workers after it.
    failed_rank, first_failure = error.get_first_failure()
    codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    # For forked workers, `error.failures` has only one failure, and not always the first one.
    first_rank_of_node = failed_rank - first_failure.local_rank
    codes.update(_find_failed_forks(first_rank_of_node))
    failures.write_exit_codes(os.environ, codes, runs_own_program=is_own_program)
    if is_own_program and first_failure.exitcode > 0:  # if a signal ended the worker, the code is negative
        return int(first_failure.exitcode)
    return EXIT_NO


_forked_workers: list[Any] = []
"""The processes of the current forked workers, by local rank. Empty if workers are started in another way.

The function that replaces torch's `_is_done` keeps them here for `_find_failed_forks`.
"""


def _find_failed_forks(first_rank_of_node: int) -> dict[int, int]:
    """Return the exit codes of forked workers that failed, by rank."""
    codes: dict[int, int] = {}
    for rank, process in enumerate(_forked_workers, first_rank_of_node):
        if process.exitcode not in (None, 0):  # None: the process is still running
            codes[rank] = process.exitcode
    return codes


def rendezvous(agent: SimpleElasticAgent, group: object) -> None:
    """Run torchrun's rendezvous, and record for the node agent when it begins and ends.

    In the rendezvous, the torchruns of all nodes find each other.
    """
    with start_up.rendezvous(os.environ):
        _TORCH_RENDEZVOUS(agent, group)


def exit_barrier(agent: SimpleElasticAgent) -> None:
    """Wait until torchrun may exit. This replaces torchrun's own barrier at the end of a run.

    The torchrun on node 0 runs the server of torch's key-value store, so it must outlive the workers of all
    nodes. It waits until the node agent creates a file, which it does when all other nodes have ended. The
    other nodes need not wait. torchrun's own barrier is a counter in the store. Other programs on the network
    can write to the store, and could delay the barrier for five minutes.
    """
    folder = os.environ.get("IMGKIT_STOP_DIR")
    if not folder:  # there is no node agent
        _TORCH_EXIT_BARRIER(agent)
        return
    group = agent._worker_group
    node_rank, nnodes = group.group_rank, group.group_world_size
    if node_rank != 0 or nnodes == 1:
        return
    release_file = Path(folder, stop_protocol.RELEASE)
    # If a program that cleans up /tmp has removed the folder, the file cannot be created any more. If the
    # node agent is gone, the parent process of torchrun (launch/guard.py) ends this process.
    while Path(folder).exists() and not release_file.exists():
        time.sleep(RELEASE_POLL_S)


def start_worker(*, local_rank_id: int, **options: Any) -> object:
    """Start a worker on the processors that are near its GPU.

    A new process inherits the allowed processors of the thread that starts it. So this thread changes its own
    processors for a moment, and the worker runs on the right processors from the beginning.
    """
    own_cpus = os.sched_getaffinity(0)
    cores.bind_to_cpus(os.environ, local_rank_id)
    try:
        return _TORCH_START_WORKER(local_rank_id=local_rank_id, **options)
    finally:
        os.sched_setaffinity(0, own_cpus)


def run_with_forks() -> None:
    """Run torchrun with workers that are forks of this process.

    This process has already imported torch, so workers do not need to import it again. Forking is safe,
    because this process has not started threads of torch or opened a CUDA context. If this container does not
    allow torch to fork workers, run torchrun as usual.
    """
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    if not _can_fork_workers():
        main()
        return
    # `argv` is the command of a worker, without the name of the interpreter.
    config, _, argv = config_from_args(parse_args(sys.argv[1:]))
    config.start_method = "fork"
    # Forks inherit imported modules. A module of the user is not imported, because that could start threads
    # or use a GPU, and neither works in a fork.
    module = _find_own_module(argv)
    if module:
        importlib.import_module(module)
    # If a worker fails, torch ends the others by `terminate`. It sends TERM, which workers block.
    popen_fork.Popen.terminate = _send_hangup  # type: ignore[assignment, method-assign]
    _accept_exits_of_forks()
    elastic_launch(config, run_forked_worker)(*argv)


def _can_fork_workers() -> bool:
    """Return whether torch can fork workers in this container.

    It needs semaphores in /dev/shm and a folder for temporary files. A container may lack both.
    """
    try:
        multiprocessing.get_context("fork").Event()
        tempfile.gettempdir()
    except OSError:
        return False
    return True


def _accept_exits_of_forks() -> None:
    """Change torchrun so that a forked worker counts as succeeded if its exit code is 0.

    torchrun waits for the return value of the function that each fork runs. Here this function ends the
    process and never returns, so torchrun would wait forever. Therefore a return value is added for each fork
    with the exit code 0. All names with an underscore below are private to torch.
    """
    torch_is_done = api.MultiprocessContext._is_done

    # torchrun calls this function again and again while workers run.
    def is_done(group: api.MultiprocessContext) -> bool:
        _forked_workers[:] = group._pc.processes
        for local_rank, process in enumerate(group._pc.processes):
            if process.exitcode == 0:
                group._return_values.setdefault(local_rank, None)
        return bool(torch_is_done(group))

    api.MultiprocessContext._is_done = is_done


_ORIGINAL_TERMINATE = popen_fork.Popen.terminate


def _send_hangup(process: popen_fork.Popen) -> None:
    """End a forked worker by HUP if it is still running."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGHUP)


def _find_own_module(argv: Sequence[str]) -> str:
    """Return the module of imgkit's own program in `argv`, or "" if the program is the user's.

    If the program is a package such as ``imgkit_entrypoints.apps.train``, return the package's ``__main__``
    module, which imports everything that the program needs.
    """
    for argument in argv:
        if not argument.startswith(_OWN_PREFIX):
            continue
        spec = importlib.util.find_spec(argument)
        if spec is not None and spec.submodule_search_locations:
            return f"{argument}.__main__"
        return argument
    return ""


def run_forked_worker(*argv: str) -> None:
    """Run a worker in a forked process, as ``python3 ARGV`` would, and end the process."""
    # The fork has inherited what `run_with_forks` and torchrun have changed. It must not affect the program.
    popen_fork.Popen.terminate = _ORIGINAL_TERMINATE  # type: ignore[method-assign]
    for handled_signal in (signal.SIGHUP, signal.SIGQUIT):  # torchrun's handlers raise an exception
        signal.signal(handled_signal, signal.SIG_DFL)
    # Run on the processors near this rank's GPU.
    cores.bind_to_cpus(os.environ, int(os.environ["LOCAL_RANK"]))
    module = _find_own_module(argv)
    if module:
        run_worker(lambda: _run_own_module(module, argv))
    else:
        # A program of the user may have started threads, or registered functions to call at its exit.
        run_worker(lambda: _run_user_program(argv), end=_finish_interpreter)


def _finish_interpreter() -> None:
    """Wait for the program's threads and call its atexit functions, as Python does at a normal exit.

    `run_worker` ends the process without a normal exit, so this must be done explicitly.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _run_own_module(module: str, argv: Sequence[str]) -> None:
    """Run a program of this package as the main program, as ``python3 -m PROGRAM OPTIONS`` does.

    Parameters
    ----------
    module : the program's module, which was imported before the fork. If the program is a package, this is
        its ``__main__`` module.
    argv : command of the worker, such as ``-u -m imgkit_entrypoints.apps.train --steps 10``.
    """
    module_option = argv.index("-m")
    program, *options = argv[module_option + 1 :]
    sys.argv = ["-m", *options]  # as Python does, runpy replaces "-m" by the path of the module
    # runpy executes the module again, and warns if it is imported. What the module has imported stays so.
    sys.modules.pop(module, None)
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def _run_user_program(argv: Sequence[str]) -> None:
    """Run the user's own program."""
    # torchrun runs in isolated mode (python3 -I). The user's program expects the current folder and
    # PYTHONPATH in sys.path.
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[0:0] = ["", *filter(None, folders)]
    runner = argv.index(user_program.__file__)  # the user's program and its arguments come after it
    user_program.main(list(argv[runner + 1 :]))


if __name__ == "__main__":
    # The signal that ends the remaining workers after a failure; see the first change above.
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
    is_own_program = any(argument.startswith(_OWN_PREFIX) for argument in sys.argv)
    run_worker(lambda: run_torchrun(start, is_own_program=is_own_program))
