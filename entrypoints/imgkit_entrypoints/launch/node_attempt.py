"""One attempt of a run on this node: start its command, watch its workers, and explain how it ended.

An attempt is one start of the command on all nodes. The node agent (agent.py) decides when an attempt starts
and when it has to end. `NodeAttempt` starts the command below its guard (command_process.py), looks for
workers that hang, ends the command with stronger and stronger signals, and finds the reason if the command
fails.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from imgkit_entrypoints.errors import EXIT_NO, EXIT_SAVED, EXIT_TOOL_FAILED
from imgkit_entrypoints.launch import explain, failures, nccl, per_node, plan, start_up, stop_protocol
from imgkit_entrypoints.launch.attempts import SUCCESS_CODES, StartWatch
from imgkit_entrypoints.launch.command_process import CommandProcess, Deadline
from imgkit_entrypoints.launch.failures import LateRecords
from imgkit_entrypoints.launch.plan import Timeouts
from imgkit_entrypoints.launch.watchdog import Watchdog
from imgkit_entrypoints.rollcall.messages import (
    CONNECTING,
    STARTING,
    WORKERS,
    AttemptEnded,
    AttemptStart,
    NodeInfo,
    RankFailure,
)
from imgkit_entrypoints.rollcall.session import HeadSession, Session
from imgkit_entrypoints.schedulers.placement import Placement

EXPLAINED_CHARACTERS = 64 * 1024
"""Number of last characters of the error output that are searched for known failures (explain.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """The command that a node agent runs in each attempt."""

    argv: Sequence[str]
    """The command. Each attempt fills in its markers (plan.py) or placeholders (per_node.py)."""
    env: Mapping[str, str]
    """The whole environment of the command. The agent adds the stop protocol's variables and the line prefix.

    If IMGKIT_STOP_DIR is set, it is the parent of the node's stop folder. Otherwise the folder is temporary.
    """
    is_per_node: bool = False
    """True if the command is the user's own and runs once on each node, without torchrun (per_node.py)."""
    gpu_query: Sequence[str] = ()
    """The command that prints how much this node's GPUs are used (gpu_use.py).

    Empty on a run without GPUs.
    """

    @property
    def memory(self) -> str:
        """Return the memory that the job requested, such as ``440G``. Empty if it got the default."""
        return self.env.get(explain.MEMORY, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """The command and the limits with which a node agent runs."""

    command: NodeCommand
    placement: Placement
    node: NodeInfo
    """What this node reports about itself to the other nodes."""
    timeouts: Timeouts
    log: Callable[..., None]
    """Function that prints one message. Each argument is one line of the message."""
    max_failures: int = 0
    """Number of lost nodes and failed workers after which the run still starts a new attempt."""
    secret: bytes | None = None
    """The secret that all nodes of the run share. With None, any program can join the roll call."""
    preflight: str | None = None
    """The module that measures a node before the start, or None for a run without a preflight."""
    log_dir: str | None = None
    """Folder for the log of a failed run. With None, the log goes to the run's folder or a temporary one."""
    on_success: Callable[[], None] | None = None
    """Function that the head calls once its command has succeeded or saved, while the other nodes wait."""
    plan_text: str = ""
    """Every setting with its reason, for a file in the run's folder (run_files.py)."""

    @property
    def job_id(self) -> str:
        """Return the scheduler's job id, or `stop_protocol.LOCAL_JOB` without a scheduler."""
        return self.placement.job_id or stop_protocol.LOCAL_JOB

    @property
    def is_head(self) -> bool:
        """Return whether this node is the head, which decides about attempts."""
        return self.placement.node_rank == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """What all attempts on this node share."""

    config: NodeConfig
    session: Session
    """The connections to the other nodes."""
    env: Mapping[str, str]
    """The part of the command's environment that is the same in every attempt."""
    open_files: int
    """The command's soft limit for the number of open files."""
    stop_folder: Path
    """Folder in which the node agent and the program leave files for each other (stop_protocol.py)."""
    log_folder: str
    """Folder for the log of a failed run. Empty for a temporary folder."""
    folders: ExitStack
    """Folders that attempts make, such as Ray's. The node agent removes them after the run."""

    @property
    def node_name(self) -> str:
        """Return the name by which users know this node, such as ``node 2 of 2 (as07r3b13)``."""
        return self.session.node_name(self.session.placement.node_rank, self.config.node.host)


class NodeAttempt:
    """One attempt on this node.

    The node agent calls `start`, then `check_workers` about once a second while `read_reports` returns True,
    and then `finish` and `explain_failure`. An attempt that the head has cancelled is never started.
    """

    def __init__(self, node: NodeContext, order: AttemptStart, node_rank: int) -> None:
        """Prepare the attempt that the head has ordered, in which this node has the rank `node_rank`.

        The method `start` starts the command. Files of the previous attempt are removed from the stop folder,
        in which the workers and the node agent exchange files.
        """
        timeouts = node.config.timeouts
        self._node_context, self._order, self._node_rank = node, order, node_rank
        self._log = node.config.log
        self.began_at = time.time()
        """Start of the attempt in seconds of the epoch."""
        self.is_running = False
        """True from the start of the command until `finish` is called."""
        self.deadline = Deadline()
        """Time at which the command is ended by force."""
        if node.config.command.is_per_node:
            self.deadline = Deadline(timeouts.grace_s)
        self.code = EXIT_NO
        """Exit code of this node. Other nodes may end with other codes."""
        self.failure: RankFailure | None = None
        """The worker of this node that failed first."""
        self.saved_state = ""
        """Job id and step that the program has saved, such as ``4711.0 300``. Empty if it saved nothing."""
        self.stall_reason = ""
        """Why a start that took too long was ended. Only the head sets it (`StartWatch`)."""
        self._is_asked_to_stop = False
        self._command: CommandProcess | None = None
        stop_protocol.clear_stop_folder(node.stop_folder)
        self._late_records = LateRecords(node.stop_folder, is_head=node.config.is_head)
        self._watchdog = Watchdog(
            node.stop_folder,
            node.config.node.host,
            timeouts.hang_after_s,
            lambda: nccl.ask_about_hang(node.env),
        )
        self._start_watch: StartWatch | None = None
        if isinstance(node.session, HeadSession):
            self._start_watch = StartWatch(node.session, timeouts.rollcall_s)
        node.session.phase = STARTING  # heartbeats tell the head this phase

    def start(self, start_up_variables: Mapping[str, str]) -> None:
        """Start the command below a guard, the process that ends what the command leaves running.

        Parameters
        ----------
        start_up_variables : variables that tell the workers how long each part of the start took
            (start_up.py).
        """
        node, command = self._node_context, self._node_context.config.command
        env = {**node.env, "IMGKIT_ATTEMPT": str(self._order.attempt), **start_up_variables}
        if command.is_per_node:
            argv, variables = self._fill_placeholders()
            env |= variables | self._make_ray_folder()
        else:
            argv = plan.fill_markers(command.argv, self._order, self._node_rank, node.stop_folder)
        self._command = CommandProcess(
            argv,
            env,
            self._log,
            repeats_warnings=node.config.is_head,
            open_files=node.open_files,
            kind="node" if command.is_per_node else "torchrun",
        )
        self.is_running = True

    def _fill_placeholders(self) -> tuple[list[str], dict[str, str]]:
        """Return the argv of the user's command in this attempt, and variables with the same values.

        The user writes placeholders such as ``{node_rank}`` in the command. They stand for values that are
        known only now.
        """
        command = self._node_context.config.command
        placeholder_values = per_node.placeholder_values(
            self._order,
            self._node_rank,
            self._node_context.config.node.nproc,
            run_dir=command.env.get("IMGKIT_RUN_DIR", ""),
        )
        argv = per_node.fill_placeholders(command.argv, placeholder_values)
        return argv, per_node.placeholder_variables(placeholder_values)

    def _make_ray_folder(self) -> dict[str, str]:
        """Create the folder for Ray's files in this attempt, and return RAY_TMPDIR with its path.

        Each attempt has its own folder, which is the same on all nodes and is removed at the end of the run.
        Return {} if the user has set RAY_TMPDIR, or if the folder cannot be made.
        """
        node = self._node_context
        if node.config.command.env.get(per_node.RAY_TMPDIR):
            return {}
        path = per_node.ray_folder(self._order)
        try:
            node.folders.enter_context(stop_protocol.locked_folder(path))
        except OSError:  # without the variable, Ray itself reports which folder it cannot use
            return {}
        return {per_node.RAY_TMPDIR: str(path)}

    def close(self) -> None:
        """End all processes that are left of the command."""
        if self._command:
            self._command.close()

    def request_stop(self, reason: str) -> None:
        """Ask the program to save and end, and set the time at which it is ended by force.

        A program that torchrun has started finds the request as a file in its stop folder.
        """
        config = self._node_context.config
        grace_s = config.timeouts.grace_s
        self._is_asked_to_stop = True
        stop_protocol.write_stop_file(self._node_context.stop_folder, reason)
        self._log(f"{reason}: asked the program to save and end, waiting up to {grace_s:g} s")
        if config.command.is_per_node:
            # The user's own command does not read the stop file, so it gets the request as TERM. That is the
            # first step of its deadline, and is due now. KILL follows after the grace time, with this reason.
            self.deadline.set_now("the grace time is over")
        else:
            self.deadline.set_within(grace_s, "the grace time is over")

    def end_when_due(self) -> None:
        """Send the command the next signal that ends it, if it is time to do so.

        For torchrun, the signals are HUP, QUIT and KILL, some seconds apart.
        """
        if self._command is None or not self.deadline.is_due():
            return
        was_forced = self.deadline.is_forced
        step = self.deadline.take_step()
        # `is_forced` is True from the first step on after which the program can no longer save its state.
        if self.deadline.is_forced and not was_forced:
            self._log(f"ending the program: {self.deadline.reason}")
        self._command.send_step(step)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the guard, the parent of the command, reports."""
        return self._running_command.fileno()

    def read_reports(self) -> bool:
        """Handle new reports from the guard, the parent process of the command.

        Return False once no process of the command is left.
        """
        return self._running_command.read_reports()

    @property
    def _running_command(self) -> CommandProcess:
        """Return the command, which exists once the attempt has started."""
        assert self._command is not None  # noqa: S101 - only a started attempt is watched and finished
        return self._command

    def check_workers(self) -> None:
        """Report workers that hang or fail without ending, and update this node's heartbeat data.

        On the head, also end a start of the run that takes too long.
        """
        session = self._node_context.session
        # The next heartbeat to the head contains these two. A position says how many steps a worker has done.
        session.positions = self._watchdog.positions
        session.phase = self._find_phase()
        self._end_stalled_start()
        # `run_positions` are those of the whole run, from the latest heartbeats.
        for report in self._watchdog.collect_reports(session.run_positions):
            self._log(*report.split("\n"))
        for lines in self._late_records.collect_reports():
            self._log(*lines)

    def _end_stalled_start(self) -> None:
        """On the head, end the attempt if its start takes too long. Set `stall_reason` then."""
        if self._start_watch is None or self.stall_reason:  # not the head, or ended in an earlier call
            return
        self.stall_reason = self._start_watch.check_for_stall()
        if self.stall_reason:
            self.deadline.set_now(self.stall_reason)

    def _find_phase(self) -> str:
        """Return the phase that this node's torchrun has reached. It is one of `messages.PHASES`."""
        if self._node_context.session.phase not in (WORKERS, CONNECTING):
            return start_up.read_phase(self._node_context.stop_folder)
        # Once the workers run, torchrun writes no further phase. The watchdog sees whether they connect.
        if self._watchdog.are_all_connecting(self._node_context.config.node.nproc):
            return CONNECTING
        return WORKERS

    def finish(self, *, received_signal: int | None, is_head_lost: bool) -> None:
        """Set `code` and `saved_state` after the command has ended, and wait for the end of its guard.

        The guard is the parent process of the command (guard.py).

        Parameters
        ----------
        received_signal : number of the first signal that this node agent has received, or None.
        is_head_lost : True if the command was ended because the connection to the head was lost.
        """
        command_code = self._running_command.wait()
        self.is_running = False
        job_id = self._node_context.config.job_id
        step, problem = stop_protocol.read_saved_step(self._node_context.stop_folder, job_id)
        if problem:
            self._log(f"warning: {problem}")
        if step is not None:  # a saved state counts as success, even if the program has failed afterwards
            self._log(f"state saved at step {step}")
            self.saved_state = f"{job_id} {step}"
            self.code = EXIT_SAVED
            return
        self.code = self._choose_node_code(command_code, received_signal, is_head_lost=is_head_lost)
        # If the node agent has killed the command, `code` stands for the reason, and is not 128 + 9.
        if command_code == -signal.SIGKILL and self.code == 128 + signal.SIGKILL:
            self._log(
                "the program was killed (SIGKILL), often by the kernel because memory ran out: "
                f"{explain.memory_remedy(self._node_context.config.command.memory)}"
            )

    def _choose_node_code(self, command_code: int, received_signal: int | None, *, is_head_lost: bool) -> int:
        """Return the exit code of this node, whose command has ended and has not saved its state.

        If the command has ended by itself, return its exit code, or 128 plus the signal that killed it, as a
        shell does. If the node agent has ended the command, the command's own code says nothing. The result
        then stands for the reason: the head is lost, the start took too long, or the node agent has received
        a signal.
        """
        # A command that has ended with 0 has done its part, even if it was told to end.
        if command_code == 0:
            return 0
        # In both cases, the node agent has also ended the command by force, so this comes before `is_forced`.
        if is_head_lost or self.stall_reason:
            return EXIT_TOOL_FAILED
        if self.deadline.is_forced:  # the node agent has sent a signal that leaves no time to save
            return EXIT_NO if received_signal is None else 128 + received_signal
        if command_code > 0:
            return command_code
        # The code of a killed command is the negative signal: -9 becomes 137.
        return 128 - command_code

    def explain_failure(self) -> None:
        """Find out why the attempt has failed on this node, write the full log, and print known explanations.

        The result is in `failure`. If the attempt has succeeded or has saved its state, do nothing.
        """
        if self.code in SUCCESS_CODES:
            return
        self.failure = self._find_failure()
        if self.failure is not None:
            self.failure = dataclasses.replace(self.failure, log=self._write_log())
        # If the node agent has asked the command to end, or has ended it, the workers' errors only result
        # from that. They need no explanation.
        was_told_to_end = self._is_asked_to_stop or self.deadline.has_begun
        if not was_told_to_end:
            self._log_explanations(self.failure)
        # A line about the files that torch's flight recorder has written in this attempt, or "".
        recorder_line = nccl.describe_recorder_files(self._node_context.env, self.began_at)
        if recorder_line:
            self._log(recorder_line)

    def _log_explanations(self, failure: RankFailure | None) -> None:
        """Print explanations of known failures in the command's error output.

        For example, "CUDA out of memory" is a known failure. If the error of a rank is known, lines about
        closed connections only result from it and are not explained.
        """
        if failure is None or failure.rank is None:  # torchrun or the user's command has failed
            has_cause = False
        elif not failure.lines:
            return  # a rank without a traceback was usually killed, and the final message explains that
        elif self._node_context.session.placement.nnodes == 1:
            has_cause = not failure.after_peer  # `after_peer`: the error only says that another rank is gone
        else:
            # On several nodes, such an error is left to the head (`failures.explain_run_failure`).
            has_cause = True
        output = self._running_command.output_tail()[-EXPLAINED_CHARACTERS:]
        memory = self._node_context.config.command.memory
        for explanation in explain.find_explanations(output, memory=memory, has_cause=has_cause):
            self._log(*explanation.lines)

    def _find_failure(self) -> RankFailure | None:
        """Return the worker or command of this node that failed first.

        Return None if nothing has failed by itself. A command that the node agent has ended did not fail.
        """
        command = self._running_command
        command_code = command.code or 0  # it is not None, because the command has ended
        was_ended_by_agent = self.deadline.has_begun
        # With ``--per-node``, there are no workers whose records could be read, so the command is judged.
        if self._node_context.config.command.is_per_node:
            if was_ended_by_agent:
                return None
            return failures.make_command_failure(command_code, command.output_tail())
        # Workers may have failed before the node agent has ended torchrun. So only torchrun's own end is
        # ignored then.
        killed_by = 0
        if command_code < 0 and not was_ended_by_agent:
            killed_by = -command_code  # 9 if SIGKILL has ended torchrun
        return failures.find_node_failure(self._node_context.stop_folder, killed_by)

    def _write_log(self) -> str:
        """Write the end of the command's error output into a log file for this node.

        Return its path, or "" if no log can be written.
        """
        node = self._node_context
        name = plan.host_label(node.config.node.host)
        if node.session.host_index > 0:  # a second node agent on the same host
            name += f"-{node.session.host_index + 1}"
        error_output = self._running_command.output_tail()
        return failures.write_log(error_output, node.log_folder, name, self._order.attempt)

    def report(self) -> AttemptEnded:
        """Return the message to the head about the end of this attempt."""
        return AttemptEnded(
            code=self.code,
            attempt=self._order.attempt,
            position=self._watchdog.furthest_position(),
            failure=self.failure,
        )
