"""The node agent: run torchrun, or the user's command, on this node, and end it in an orderly way.

Each node of a run has one agent. The agent of the head (the node with rank 0) also decides when the command
is started again after a failure (attempts.py). Three processes work together on each node:

* the node agent, which handles signals and is connected to the other nodes,
* the guard, the parent of all processes of the command (guard.py),
* torchrun, or the user's own command (per_node.py).

A scheduler sends signals to every process of a job step. torchrun and its workers must not end by such a
signal before they have saved, so they start with `STOP_SIGNALS` blocked. Only the node agent reacts: it
creates the stop file, which the program checks (stop_protocol.py). In a user program, the signals are
unblocked again (user_program.py).
"""

from __future__ import annotations

import math
import resource
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from imgkit_entrypoints import fence
from imgkit_entrypoints.errors import EXIT_NO, EXIT_SAVED, EXIT_TOOL_FAILED, ImgkitError, NoPlan
from imgkit_entrypoints.launch import (
    command_process,
    failures,
    gpu_use,
    guard,
    nccl,
    plan,
    progress,
    stop_protocol,
)
from imgkit_entrypoints.launch.attempts import SUCCESS_CODES, Attempts
from imgkit_entrypoints.launch.command_process import Deadline
from imgkit_entrypoints.launch.node_attempt import NodeAttempt, NodeConfig, NodeContext
from imgkit_entrypoints.launch.preflight.run import PreflightConfig, run_preflight
from imgkit_entrypoints.launch.progress import StepTimer
from imgkit_entrypoints.launch.run_files import RunFiles
from imgkit_entrypoints.launch.start_up import StartUp, process_start_s, start_time_s
from imgkit_entrypoints.launch.stop_protocol import CollectedSignals, RunFolder, StopRequest
from imgkit_entrypoints.rollcall import gather
from imgkit_entrypoints.rollcall.messages import (
    AttemptStart,
    EndAttempt,
    EndRun,
    Event,
    HeadLost,
    StopOrder,
)
from imgkit_entrypoints.rollcall.session import HeadSession, Readable, Session
from imgkit_entrypoints.schedulers.placement import Size

TICK_S = 1.0
"""Longest time in seconds between two checks of the other nodes, the stop file and the workers."""
ON_SUCCESS_S = 60.0
"""Longest time in seconds for which the other nodes wait while the head runs `on_success`."""
ALONE_S = 10.0
"""Seconds after which a node reports that its command has ended and the head's command still runs.

The commands of a run usually end within moments of each other, and then no message is needed.
"""


State = Callable[[], "State | None"]
"""A method of `NodeAgent` that does the work of one state and returns the next state, or None at the end."""


@dataclass(slots=True, kw_only=True)
class HeadOrders:
    """The latest orders of the head (the node with rank 0), and whether the head is still connected."""

    next_attempt: AttemptStart | None = None
    """The attempt that the head has ordered, until this node starts it."""
    cancelled_attempt: int = 0
    """Number of the latest attempt that the head has ended, or 0."""
    run_code: int | None = None
    """The exit code of the run. It is None until the head ends the run."""
    is_head_lost: bool = False


class NodeAgent:
    """A state machine for one node of a run, from the meeting of all nodes to the exit code.

    ========= =================================== ========================================== ==========
    state     what the agent does                 event                                      next state
    ========= =================================== ========================================== ==========
    meet      meets the agents of all nodes       all are there, ``--preflight``             preflight
                                                  all are there                              start
    preflight measures the node, with the others  the head has judged                        start
    start     waits for the head's order (a spare the head starts an attempt with this node  watch
              waits here), starts the command     the run is over, the head is lost          end
                                                  a second signal, or no word after a stop   end
    watch     reports hanging workers, ends a     a stop request, a failure on another node, stop
              start that stalls                   a lost head, a start that stalls
                                                  the command has ended                      report
    stop      waits until the program has saved,  the command has ended                      report
              then ends it by force
    report    explains a failure, and reports     reported                                   start
              the end of the attempt to the head
    end       requests a requeue for a new state,
              and returns the exit code
    ========= =================================== ========================================== ==========

    An error (`ImgkitError`) ends the run in any state. While the head's agent waits in any state, `Attempts`
    reacts to the reports of all nodes. It orders the next attempt, or ends the run with one exit code for
    all.
    """

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.log = config.log
        self.stop: StopRequest | None = None
        """The request to save and end that is in effect, from this node or any other."""
        self._stop_signals = CollectedSignals()
        self._run_folder = RunFolder.from_env(config.command.env, config.log)
        # All nodes share the run's folder, so only the head manages its files.
        own_folder = self._run_folder if config.is_head else None
        self._files = RunFiles(own_folder, config.job_id, config.log)
        self._context: NodeContext | None = None
        self._head_decisions: Attempts | None = None
        """The decisions about attempts. Set on the head only, after the roll call."""
        self._head_orders = HeadOrders()
        self._latest_attempt: NodeAttempt | None = None
        """The latest attempt in which this node has taken part."""
        self._waiting_deadline = Deadline()
        """Time at which this node stops waiting for the other nodes after its own command has ended."""
        self._is_output_lost = False
        start_s = start_time_s(config.command.env, own_folder)
        self._step_timer = StepTimer(start_s)
        self._start_up = StartUp(start_s)
        self._gpu_monitor = gpu_use.GpuMonitor(config.command.gpu_query)
        # The head raises its own limit of open files in the roll call (rollcall/gather.py). The command still
        # gets the limit that the user or the scheduler has set.
        self._open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

    def run(self) -> int:
        """Meet the other nodes, run the command, supervise it, and return the exit code of this node.

        Raises
        ------
        NoPlan : the roll call, in which the nodes meet, has failed.
        ToolFailed : the command cannot be started.
        UsageError : a folder of the run cannot be written, or a file in it prevents the run from starting.
        CheckFailed : the preflight found more outliers (slow or broken nodes) than the run can do without.
        """
        stop_dir = self.config.command.env.get("IMGKIT_STOP_DIR", "")
        # Attempts add the folders that they make, such as Ray's, to `folders`. They are removed at the end of
        # this block.
        with (
            self._stop_signals.collect(),
            stop_protocol.use_stop_folder(stop_dir, self.config.placement.node_rank) as stop_folder,
            ExitStack() as folders,
        ):
            self._files.prepare(self.config.plan_text)
            return self._run_with_result(stop_folder, folders)

    def _run_with_result(self, stop_folder: Path, folders: ExitStack) -> int:
        """Run the command, write the exit code into the result file, and return the exit code.

        The file is also written if an error ends the run. For example, UsageError is raised if a person's
        stop file forbids the run to start.
        """
        exit_code = EXIT_NO  # 1: the result file contains it if an unexpected error ends the run
        try:
            # Every node looks for the stop file. If only the head refused, the others would wait for it in
            # the roll call.
            if self._run_folder:
                self._run_folder.refuse_if_stopped()
            exit_code = self._run_states(stop_folder, folders)
        except ImgkitError as error:
            exit_code = error.exit_code
            raise
        finally:
            # The job script takes this file as the end of the run, so it is written last.
            self._files.write_result(exit_code)
        return exit_code

    def _run_states(self, stop_folder: Path, folders: ExitStack) -> int:
        """Run one state after another until the run is over, and return the exit code of this process.

        A state is a method that does its work and returns the next state (see the table in the docstring of
        this class). Finally, all processes and connections are closed, even if an error was raised.
        """
        failure_lines: tuple[str, ...] = ()
        # `_close` in `finally` is needed in any case: without it, processes of the command would be left.
        try:
            state: State | None = self._meet_nodes(stop_folder, folders)
            while state:
                state = state()
            run_code = self._find_run_code()
            if run_code not in SUCCESS_CODES:
                failure_lines = self._explain_failure()
            exit_code = self._finish_run(run_code)
        except NoPlan:
            # A signal during the roll call or the preflight raises NoPlan as well. The signal is then no
            # failure to report, and the exit code is 128 plus its number, as in a shell.
            if not self._stop_signals.received:
                raise
            exit_code = 128 + self._stop_signals.received[0]
        finally:
            self._close()
        # Printed after the summary in `_close`, so that the error is the last thing that the user sees.
        if failure_lines:
            self.log(*failure_lines)
        return exit_code

    def _close(self) -> None:
        """End all processes of this node and its connections. On the head, print the summary of the run."""
        self._gpu_monitor.close()
        if self._latest_attempt:
            self._latest_attempt.close()
        if self._context is None:  # the nodes have not met, so there are no connections and no run
            return
        session = self._context.session
        session.close()
        if isinstance(session, HeadSession):
            self._log_summary(session)

    def _log_summary(self, session: HeadSession) -> None:
        """Print one line about how the run spent its time, and how much it used its GPUs.

        If one of the two is unknown, the line contains only the other. If both are unknown, nothing is
        printed.
        """
        summaries = []
        time_summary = self._step_timer.summary(session.placement.nnodes)
        if time_summary:
            summaries.append(time_summary)
        # This also updates the file with the GPU use in the run's folder.
        use = self._files.write_gpu_use(session)
        if use:
            summaries.append(gpu_use.describe(use))
        if summaries:
            self.log("; ".join(summaries))

    @property
    def session(self) -> Session:
        """Return the connections to the other nodes. They exist once the nodes have met."""
        return self.context.session

    @property
    def context(self) -> NodeContext:
        """Return what all attempts on this node share. It exists once the nodes have met."""
        assert self._context is not None  # noqa: S101 - every state after `_meet_nodes` has it
        return self._context

    @property
    def running_attempt(self) -> NodeAttempt | None:
        """Return the attempt whose command runs on this node, or None between attempts."""
        if self._latest_attempt and self._latest_attempt.is_running:
            return self._latest_attempt
        return None

    def _meet_nodes(self, stop_folder: Path, folders: ExitStack) -> State:
        """Meet the agents of all nodes in the roll call, and return the next state.

        The next state is the preflight if the user requested it, otherwise the first attempt.
        """
        session = self._hold_roll_call()
        guard.adopt_orphans()  # if a guard is killed, its processes become children of this one
        self._context = NodeContext(
            config=self.config,
            session=session,
            env=self._make_command_env(stop_folder),
            open_files=self._open_files,
            stop_folder=stop_folder,
            log_folder=self._log_folder(),
            folders=folders,
        )
        if isinstance(session, HeadSession):
            self._head_decisions = self._prepare_attempts(session)
        if self.config.preflight:
            return self._run_preflight
        return self._begin_attempts()

    def _hold_roll_call(self) -> Session:
        """Hold the roll call, and return the connections to the other nodes.

        In the roll call, every node connects to the head (the node with rank 0) and reports facts about
        itself. Also record how long the container, this node agent and the roll call took (start_up.py).
        """
        config = self.config
        self._start_up.record("container", process_start_s())
        self._start_up.record("node_agent")
        session = gather.meet_nodes(
            config.placement,
            config.node,
            timeout_s=config.timeouts.rollcall_s,
            log=self.log,
            stop_reason=self._stop_signals.first_name,
            secret=config.secret,
            all_reach_head=config.command.is_per_node,
        )
        self._start_up.record("roll_call")
        session.lost_after_s = config.timeouts.lost_after_s
        return session

    def _prepare_attempts(self, session: HeadSession) -> Attempts:
        """Print the warnings of the roll call, and return the object that decides about attempts.

        An attempt is one start of the command on all nodes. Only the head (the node with rank 0) calls this
        method.
        """
        for warning in session.warnings:
            self.log(f"warning: {warning}")
        return Attempts(
            session,
            session.placement.size or Size(training=session.placement.nnodes),
            max_failures=self.config.max_failures,
            log=self.log,
            on_start=self._admit_attempt,
            is_per_node=self.config.command.is_per_node,
        )

    def _make_command_env(self, stop_folder: Path) -> Mapping[str, str]:
        """Return the environment of the command. It is the same in every attempt of the run.

        IMGKIT_STOP_DIR is the stop folder, in which the node agent and the program exchange files.
        """
        config, env = self.config, self.config.command.env
        host = config.node.host.replace("$", "$$")  # torchrun reads the prefix as a string.Template
        command_env = {
            # torchrun's own prefix for the lines of --tee names no host. This one is "[host:rank]: ".
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[{host}:${{rank}}]: ",
            **env,
            "IMGKIT_STOP_DIR": str(stop_folder),
            "IMGKIT_JOB_ID": config.job_id,
            **nccl.recorder_variables(env, config.node.software.torch, config.job_id),
        }
        # The run's id keeps workers of an older attempt from writing checkpoints (fence.py). Only the head
        # knows it.
        if config.is_head:
            command_env[fence.RUN_ID_VARIABLE] = self._files.run_id
        return command_env

    def _log_folder(self) -> str:
        """Return the folder for the log of a failed run: the user's ``--log-dir``, or else the run's folder.

        Return "" if there is neither. The log then goes to a temporary folder.
        """
        if self.config.log_dir:
            return str(Path(self.config.log_dir, plan.host_label(self.config.node.host)))
        if self._run_folder:
            return str(self._run_folder.path)
        return ""

    def _admit_attempt(self, attempt: int) -> None:
        """Allow only workers of `attempt` to write into the run's folder.

        A worker of an earlier attempt may still be running on a lost node. A run that has only one attempt
        needs no such protection.
        """
        if self.session.placement.size is not None or self.config.max_failures:
            self._files.admit_attempt(attempt)

    def _run_preflight(self) -> State:
        """Measure all nodes, then begin the first attempt without nodes that are too slow or broken.

        This state comes after the roll call if the user gave ``--preflight``. Return the next state.
        """
        assert self.config.preflight  # noqa: S101 - else this state is skipped
        placement, folder = self.session.placement, self._files.folder
        # Spares are extra nodes that replace lost ones. The preflight can exclude at most as many nodes as
        # there are spares.
        config = PreflightConfig(
            module=self.config.preflight,
            env=self.context.env,
            open_files=self._open_files,
            signals=self._stop_signals,
            log=self.log,
            folder=folder.path if folder else None,
            spares=placement.nnodes - placement.size.training if placement.size else 0,
        )
        excluded = run_preflight(self.session, config)
        self._start_up.record("preflight")
        return self._begin_attempts(excluded)

    def _begin_attempts(self, excluded: Collection[int] = ()) -> State:
        """Return the state in which this node starts its command. On the head, order the first attempt.

        Nodes in `excluded` take no part in the run.
        """
        if self._head_decisions:
            self._head_decisions.start(excluded)
        return self._start

    def _start(self) -> State | None:
        """Wait until the head orders an attempt, and start the command of this node.

        Return the next state, or None if the run is over. A spare (a node that may replace a lost one) runs
        no command. It stays in this state, because a later attempt may need it.
        """
        order = self._wait_for_attempt()
        if order is None:
            return None
        # This comes before the new attempt, which replaces `_latest_attempt` and its failure.
        if order.attempt > 1:
            self._log_previous_failure()
        if order.node_rank is None:  # this node is a spare in the new attempt
            return self._start
        return self._start_attempt(order, order.node_rank)

    def _log_previous_failure(self) -> None:
        """Print why the previous attempt has failed, if that is known and was not printed before."""
        lines = self._explain_failure(of_previous=True)
        if lines:
            self.log(*lines)
        # A spare keeps `_latest_attempt` during later attempts, and must not print its failure again.
        if self._latest_attempt:
            self._latest_attempt.failure = None

    def _wait_for_attempt(self) -> AttemptStart | None:
        """Wait until the head orders an attempt, and return the order.

        An attempt is one start of the command on all nodes, and only the head (node 0) decides about it. A
        spare (a node that may replace a lost one) waits here during whole attempts. Return None if this node
        should leave instead: the head has ended the run or is lost, the user has sent a second stop signal,
        or the other nodes take too long to stop.
        """
        orders = self._head_orders
        self._waiting_deadline = Deadline()  # no time limit, unless a stop was requested
        if self.stop:
            self._limit_waiting()
        self._handle_events()  # this stores orders of the head in `orders`, and may set `stop`
        if not self._wait_for_order() or orders.is_head_lost:
            return None
        order = orders.next_attempt
        orders.next_attempt = None  # each order is carried out only once
        return order

    def _wait_for_order(self) -> bool:
        """Wait until the head has ordered an attempt. Return False if this node should no longer wait.

        With ``--per-node``, print once if the head's command goes on for long after that of this node.
        """
        orders = self._head_orders
        report_at = math.inf  # time of the message that the head's command still runs
        if self._has_ended_first():
            report_at = time.monotonic() + ALONE_S
        while orders.next_attempt is None:
            is_run_over = orders.run_code is not None or orders.is_head_lost
            if is_run_over or self._stop_signals.is_repeated:
                return False
            self._wait(self._stop_signals)
            self._handle_events()
            if time.monotonic() >= report_at:
                report_at = math.inf  # print the message only once
                name = self.context.node_name
                self.log(f"the command on {name} has ended with 0, and the head's goes on")
            # A lost head was reported already.
            if self._waiting_deadline.is_due() and not orders.is_head_lost:
                self.log("the other nodes are not done; leaving without them")
                return False
        return True

    def _has_ended_first(self) -> bool:
        """Return whether this node's command has succeeded before the head's command.

        This is only relevant with ``--per-node``. For example, `ray symmetric-run` returns 0 even if Ray has
        failed on its node. The user should learn of it if the head's command goes on for long.
        """
        if not self.config.command.is_per_node or self.config.is_head or self._latest_attempt is None:
            return False
        # If the deadline has begun, the command did not end by itself: the node agent has ended it.
        return self._latest_attempt.code == 0 and not self._latest_attempt.deadline.has_begun

    def _start_attempt(self, order: AttemptStart, node_rank: int) -> State:
        """Start the command of an attempt, and return the next state.

        If the head has cancelled the attempt since it ordered the start, start nothing: the next state then
        reports the attempt as ended, for which the head waits. `node_rank` is the rank of this node in the
        attempt, which may differ between attempts.
        """
        attempt = self._latest_attempt = NodeAttempt(self.context, order, node_rank)
        if self.stop:  # the stop request arrived before this node received the order
            attempt.request_stop(self.stop.reason)
        progress.remove_notes(self.context.stop_folder)  # before the workers of this attempt write theirs
        self._step_timer.start_attempt()
        if order.attempt <= self._head_orders.cancelled_attempt:
            return self._report_end
        # The workers learn how long each part of the start has taken. The parts before torchrun, such as the
        # roll call, happen only once, so the start of a later attempt is measured from now.
        if order.attempt > 1:
            self._start_up = StartUp(time.monotonic())
        attempt.start(self._start_up.variables(self._step_timer.first_attempt_start_s))
        if order.attempt > 1:
            self._log_restart()
        return self._stop if self.stop else self._watch

    def _log_restart(self) -> None:
        """Print on the head (the node with rank 0) how long after the failure the command starts again."""
        if self._head_decisions is None:
            return
        waited_s = time.monotonic() - self._head_decisions.failed_at
        program = "the command" if self.config.command.is_per_node else "torchrun"
        self.log(f"{program} starts again {waited_s:.1f} s after the failure was noticed")

    def _watch(self) -> State:
        """Watch the command until it ends, or until it must be stopped. Return the next state."""
        attempt = self._get_attempt()
        while self._supervise_tick(attempt):
            # A lost head, a failure on another node or a stalled start sets the deadline, without a stop
            # request.
            if self.stop or attempt.deadline.is_set:
                return self._stop
        return self._report_end

    def _stop(self) -> State:
        """Wait until the program has saved and ended. After the deadline, end it by force.

        Force means several signals, some seconds apart. Return the next state.
        """
        attempt = self._get_attempt()
        while self._supervise_tick(attempt):
            attempt.end_when_due()
        return self._report_end

    def _get_attempt(self) -> NodeAttempt:
        """Return the latest attempt. Only states after `_start_attempt` call this."""
        assert self._latest_attempt is not None  # noqa: S101 - `_start_attempt` has set it
        return self._latest_attempt

    def _supervise_tick(self, attempt: NodeAttempt) -> bool:
        """Wait up to one tick (`TICK_S`), and react to the command, the other nodes and the workers.

        Return False once no process of the command is left.
        """
        self._wait(attempt, self._stop_signals)
        if not attempt.read_reports():
            return False
        self._handle_events()
        attempt.check_workers()
        self._release_torchrun_when_last()
        self._report_lost_output()
        # In its first seconds, the program only imports its libraries. Further calls of `start` do nothing.
        if time.time() - attempt.began_at >= gpu_use.START_AFTER_S:
            self._gpu_monitor.start()
        self._report_gpu_use()
        return True

    def _release_torchrun_when_last(self) -> None:
        """On the head, let torchrun exit once the attempt is over on all other nodes.

        The head's torchrun serves the store that the other nodes use, so it must exit last.
        """
        if self._head_decisions and self._head_decisions.have_others_ended():
            stop_protocol.release_torchrun(self.context.stop_folder)

    def _report_gpu_use(self) -> None:
        """Report new readings of this node's GPUs; the head writes the use of all nodes once a minute."""
        use = self._gpu_monitor.read_use()
        if use is None:
            return
        self.session.report(use)
        if isinstance(self.session, HeadSession):
            self._files.write_gpu_use_when_due(self.session)

    def _report_lost_output(self) -> None:
        """Report once that the output of the ranks is lost, because standard output is closed or full."""
        if self._is_output_lost:
            return
        reason = stop_protocol.lost_output_reason(self.context.stop_folder)
        if reason:
            self._is_output_lost = True
            self.log(f"standard output is closed or full ({reason}): output of the ranks is lost")

    def _report_end(self) -> State:
        """Finish an attempt on this node: explain a failure, and report the end to the head (node 0).

        Return the state in which this node waits for the head's next order. The head may start another
        attempt, or end the run.
        """
        attempt = self._get_attempt()
        has_run = attempt.is_running  # False if the head has cancelled the attempt before its start
        if has_run:
            self._finish_attempt(attempt)  # this sets `attempt.code`
        self._step_timer.end_attempt(self.context.stop_folder)
        self.session.positions = None  # heartbeats must no longer contain the positions of ended workers
        has_succeeded = has_run and attempt.code in SUCCESS_CODES
        # `on_success` is a function of the run, such as one that packs compiled code. It may take seconds.
        if has_succeeded and self.config.is_head and self.config.on_success:
            self._run_while_connected(self.config.on_success)
        self.session.report(attempt.report())
        return self._start

    def _finish_attempt(self, attempt: NodeAttempt) -> None:
        """Collect the results of an attempt whose command has ended, and explain a failure to the user."""
        received = self._stop_signals.received
        attempt.finish(
            received_signal=received[0] if received else None,
            is_head_lost=self._head_orders.is_head_lost,
        )
        self._report_lost_output()
        self._report_gpu_use()
        attempt.explain_failure()

    def _run_while_connected(self, function: Callable[[], None]) -> None:
        """Run `function` in a thread, and keep answering the other nodes meanwhile.

        Without answers, the other nodes would consider this node lost. Return when `function` has ended, or
        after `ON_SUCCESS_S` seconds.
        """
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        thread.join(0.1)  # a function that ends at once need not wait for a whole tick
        deadline = time.monotonic() + ON_SUCCESS_S
        while thread.is_alive() and time.monotonic() < deadline:
            self._wait(self._stop_signals)
            self._handle_events()

    def _explain_failure(self, *, of_previous: bool = False) -> tuple[str, ...]:
        """Return the lines about a failed run that are printed last, so that the user sees them first.

        The head (the node with rank 0) describes the failure that came first on any node. It also prints
        known explanations of that failure, before this method returns. Every other node describes only the
        failure of its own worker. Return () if no failure is known.

        Parameters
        ----------
        of_previous : True if the head has already ordered the next attempt, so that the failure belongs to
            the attempt before it.
        """
        attempt, memory = self._latest_attempt, self.config.command.memory
        # The ranks of a stalled start failed because the agent ended them, so their errors say nothing.
        if attempt and attempt.stall_reason:
            return (attempt.stall_reason,)
        if not isinstance(self.session, HeadSession):
            return self._describe_own_failure()
        reports = self.session.previous_failures if of_previous else self.session.failures
        for explanation in failures.explain_run_failure(self.session, reports, memory=memory):
            self.log(*explanation.lines)
        return failures.describe_run_failure(self.session, reports, memory=memory)

    def _describe_own_failure(self) -> tuple[str, ...]:
        """Return the lines about the worker of this node that failed first in its latest attempt.

        Usually, this is one line, because the head prints more about the failure that came first. Return ()
        if no worker has failed.
        """
        attempt = self._latest_attempt
        if attempt is None or attempt.failure is None:
            return ()
        name = self.context.node_name
        if self._head_orders.is_head_lost:  # the head cannot describe the failure any more
            return failures.describe_failure(attempt.failure, name, memory=self.config.command.memory)
        return (failures.summarize_failure(attempt.failure, name),)

    def _find_run_code(self) -> int:
        """Return the exit code of the run, as the head (the node with rank 0) has announced it.

        If the head has not announced a code, for example because a signal came first, return the code of this
        node.
        """
        if self._head_orders.run_code is not None:
            return self._head_orders.run_code
        if self._head_orders.is_head_lost:
            return EXIT_TOOL_FAILED
        # No attempt means that this node has run no command, for example because it is a spare.
        node_code = self._latest_attempt.code if self._latest_attempt else EXIT_NO
        # A program that gets a signal saves and ends. The job must then be requeued, so the code for a saved
        # state (85) takes precedence over the code of the signal.
        if self._stop_signals.received and node_code != EXIT_SAVED:
            return 128 + self._stop_signals.received[0]
        return node_code

    def _finish_run(self, run_code: int) -> int:
        """Ask the job script to requeue a run that has saved its state. Return the exit code of this process.

        It may differ from the exit code of the run: if the run has succeeded but its output could not be
        printed, it is 1, because the user has not seen everything.
        """
        exit_code = run_code
        if run_code == EXIT_SAVED:
            exit_code = self._request_requeue()
        if exit_code == 0 and self._is_output_lost:
            return EXIT_NO
        return exit_code

    def _request_requeue(self) -> int:
        """Ask the job script to requeue a run that has saved its state, and return the exit code.

        If a person has requested the stop, the job must not start again. The job is then not requeued, and
        the code is 0.
        """
        if self.stop and not self.stop.requeue:
            return 0
        return self._files.request_requeue(self._latest_attempt.saved_state if self._latest_attempt else "")

    def _wait(self, *sources: Readable) -> None:
        """Wait until a message or one of `sources` can be read.

        Return after `TICK_S` seconds at the latest, and never later than the current deadline.
        """
        left_s = max(0.0, self._deadline.next_step_at - time.monotonic())
        self.session.wait(sources, min(TICK_S, left_s))
        self._stop_signals.drain()

    @property
    def _deadline(self) -> Deadline:
        """Return the current deadline.

        While the command runs, it is the time at which the command is ended by force. Between attempts, it is
        the time at which this node stops waiting for the other nodes.
        """
        if self.running_attempt:
            return self.running_attempt.deadline
        return self._waiting_deadline

    def _limit_waiting(self) -> None:
        """Set how long this node waits for the other nodes to save and end after its own command has ended.

        The other nodes may need the grace time, and then three steps of force: HUP, QUIT and KILL
        (command_process.py).
        """
        patience_s = self.config.timeouts.grace_s + 3 * command_process.END_STEP_S
        self._waiting_deadline.set_within(patience_s, "the other nodes are not done")

    def _handle_events(self) -> None:
        """React to the other nodes, the signals and the stop file.

        On the head, `Attempts` also reacts to the reports of all nodes: it may start or end an attempt.
        """
        for event in self.session.poll():
            self._handle_event(event)
        self._handle_signals()  # this and the stop file may set `stop`, which `check` below gets
        # The request stays in the folder. It is new only if it takes precedence over the current one.
        request = self._files.stop_request()
        if request and request.takes_precedence(self.stop):
            self._stop_all(request)
        if self._head_decisions:
            self._head_decisions.check(stopped=self.stop is not None)

    def _handle_signals(self) -> None:
        """Ask all nodes to stop after the first stop signal. End the command at once after a second one."""
        if self._stop_signals.is_repeated and not self._deadline.is_forced:
            self._deadline.set_within(0.0, "a second signal")
        elif self._stop_signals.received and not self.stop:
            self._stop_all(StopRequest(reason=self._stop_signals.first_name(), requeue=True))

    def _handle_event(self, event: Event) -> None:
        """React to one message from another node.

        Messages of other types have already updated the session, and need no reaction here.
        """
        match event:
            case StopOrder():
                reason = f"{event.reason} on {event.node}"
                self.request_stop(StopRequest(reason=reason, requeue=event.requeue))
            case AttemptStart():
                self._head_orders.next_attempt = event
            case EndAttempt():
                self._head_orders.cancelled_attempt = event.attempt
                if self.running_attempt:
                    self._deadline.set_now(event.reason)
            case HeadLost():
                self._head_orders.is_head_lost = True
                self.log(f"lost {event.node}: {event.reason}")
                self._deadline.set_now(f"lost {event.node}")
            case EndRun():
                self._head_orders.run_code = event.code

    def _stop_all(self, request: StopRequest) -> None:
        """Pass a stop request of this node on to all other nodes, and stop this one."""
        self.session.report(StopOrder(reason=request.reason, requeue=request.requeue))
        self.request_stop(request)

    def request_stop(self, request: StopRequest) -> None:
        """Ask the program to save its state and end.

        If a stop has been requested before, the program already knows. A second request can then only change
        whether the job is requeued.
        """
        is_first = self.stop is None
        if not request.takes_precedence(self.stop):
            return
        self.stop = request  # at the end of the run, `_request_requeue` decides by it
        if not is_first:
            self.log(f"{request.reason}: the run ends for good")
        elif self.running_attempt:
            self.running_attempt.request_stop(request.reason)
        # No command runs on this node now, so there is only the wait for the other nodes to limit.
        else:
            self._limit_waiting()
