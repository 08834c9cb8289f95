"""The node agent: run torchrun, or one program, on this node and end it in an orderly way.

There is one agent on each node, and the head's agent decides about attempts (attempts.py). Three processes
belong together on each node:

* the node agent, which takes the signals and holds the connection to the other nodes,
* the guard, below which everything else runs (guard.py),
* torchrun, or the user's own command (per_node.py).

Schedulers signal every process of a job step, so torchrun and its workers start with `STOP_SIGNALS` blocked.
Only the node agent acts on a signal: it raises the stop flag (stop_protocol.py), which the program reads. A
user program has the signals unblocked again (user_program.py).
"""

from __future__ import annotations

import dataclasses
import json
import resource
import secrets
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from imgkit_entrypoints import fence
from imgkit_entrypoints.errors import EXIT_NO, EXIT_SAVED, EXIT_TOOL_FAILED, ImgkitError, NoPlan
from imgkit_entrypoints.launch import (
    explain,
    failures,
    gpu_use,
    guard,
    guarded,
    nccl,
    per_node,
    plan,
    start_up,
    stop_protocol,
)
from imgkit_entrypoints.launch.attempts import Attempts, StartWatch
from imgkit_entrypoints.launch.failures import LateRecords, NodeFailure
from imgkit_entrypoints.launch.guarded import Deadline, GuardedCommand
from imgkit_entrypoints.launch.plan import Timeouts
from imgkit_entrypoints.launch.preflight.run import PreflightConfig, run_preflight
from imgkit_entrypoints.launch.progress import StepTimer
from imgkit_entrypoints.launch.start_up import StartUp, process_began_s, start_began_s
from imgkit_entrypoints.launch.stop_protocol import RESULT, CollectedSignals, RunFolder, StopRequest
from imgkit_entrypoints.launch.watchdog import Watchdog
from imgkit_entrypoints.rollcall import gather
from imgkit_entrypoints.rollcall.messages import (
    CONNECTING,
    STARTING,
    WORKERS,
    AttemptEnded,
    AttemptStart,
    EndAttempt,
    EndRun,
    Event,
    GpuUse,
    HeadLost,
    NodeInfo,
    RankFailure,
    StopOrder,
)
from imgkit_entrypoints.rollcall.session import HeadSession, Readable, Session
from imgkit_entrypoints.schedulers.placement import Placement, Size

TICK_S = 1.0
"""Longest time in seconds between two checks of the other nodes, the stop file and the workers."""
BESIDE_S = 60.0
"""Longest time in seconds for which the other nodes wait while the head runs `on_success`."""
ALONE_S = 10.0
"""Seconds after which a node reports that its command ended before that of the head.

The commands of a run usually end within moments of each other, and then no message is needed.
"""
PLAN_FILE = "launch.txt"
"""File in the run's folder with every setting and its reason."""
EXPLAINED_CHARACTERS = 64 * 1024
"""Number of last characters of the error output that are searched for known failures (explain.py)."""


State = Callable[[], "State | None"]
"""A method of `NodeAgent` that does the work of one state and returns the next state, or None at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """The command, the environment and the limits with which a node agent runs."""

    argv: Sequence[str]
    """The command. `plan.fill` or `per_node.fill` replaces its markers by what the roll call decides."""
    env: Mapping[str, str]
    """The whole environment of the command. The agent adds the stop protocol's variables and the line prefix.

    If IMGKIT_STOP_DIR is set, it is the parent of the node's stop folder. Otherwise the folder is temporary.
    """
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
    is_per_node: bool = False
    """True if the command is the user's own and runs once on each node, without torchrun (per_node.py)."""
    gpu_query: Sequence[str] = ()
    """The command that prints how much this node's GPUs are used (gpu_use.py).

    Empty on a run without GPUs.
    """
    plan_text: str = ""
    """Every setting with its reason, for `PLAN_FILE` in the run's folder."""


class NodeAgent:
    """A state machine for one node of a run, from the meeting of all nodes to the exit code.

    ========= =================================== ========================================== ==========
    state     what the agent does                 event                                      next state
    ========= =================================== ========================================== ==========
    gather    meets the agents of all nodes       all are there, ``--preflight``             preflight
                                                  all are there                              start
    preflight measures the node, with the others  the head has judged                        start
    start     waits for the head's order (a spare the head starts an attempt with this node  watch
              waits here), starts the command     the run is over, the head is lost          end
                                                  a second signal, or no word after a stop   end
    watch     reports hanging workers, ends a     a stop request, a failure on another node, stop
              start that stalls                   a lost head, a start that stalls
                                                  the command has ended                      restart
    stop      waits until the program has saved,  the command has ended                      restart
              then ends it by force
    restart   explains a failure, and reports     reported                                   start
              the end of the attempt to the head
    end       requests a requeue for a new state,
              and returns the exit code
    ========= =================================== ========================================== ==========

    An error (`ImgkitError`) leaves any state. On the head, `Attempts` reacts to the reports of all nodes
    while the agent waits in any state: it orders the next attempt, or ends the run with one code for all.
    """

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.log = config.log
        self.is_head = config.placement.node_rank == 0
        self.job_id = config.placement.job_id or stop_protocol.LOCAL_JOB
        self.stop: StopRequest | None = None
        run_folder = self._shared_folder = RunFolder.of(config.env, config.log)
        self._log_folder = str(run_folder.path) if run_folder else ""
        if config.log_dir:
            self._log_folder = str(Path(config.log_dir, plan.host_label(config.node.host)))
        # All nodes share the folder, so the head looks after it.
        self._run_folder = run_folder if self.is_head else None
        self._signals = CollectedSignals()
        self._deadline = Deadline()
        """Time at which the program is ended by force. Between attempts, time at which the waiting ends."""
        self._session: Session | None = None
        self._attempts: Attempts | None = None
        """The decisions about attempts. Set on the head only, after the roll call."""
        self._order: AttemptStart | None = None
        """The attempt that the head has ordered and this node has not started yet."""
        self._cancelled = 0
        """Number of the latest attempt that the head has ended, or 0."""
        self._run_code: int | None = None
        """The exit code of the run. It is None until the head ends the run."""
        self._is_head_lost = False
        self._command: GuardedCommand | None = None
        self._attempt = 0
        self._attempt_began = 0.0
        self._code = EXIT_NO
        """Exit code of this node alone in its latest attempt.

        After the last one, the agent's own exit code.
        """
        self._failure: RankFailure | None = None
        """The worker of this node that failed first in the latest attempt."""
        self._saved_state = ""
        """Job id and step that the latest attempt has saved, such as ``4711.0 300``.

        Empty if it saved nothing.
        """
        self._stall = ""
        """Message about a start of this attempt that took too long. Only the head sets it (`StartWatch`)."""
        self._is_output_lost = False
        self._final_lines: tuple[str, ...] = ()
        began_s = start_began_s(config.env, self._run_folder)
        self._timer, self._start_up = StepTimer(began_s), StartUp(began_s)
        self._gpu_monitor = gpu_use.GpuMonitor(config.gpu_query)
        self._next_gpu_file_s = 0.0
        self._run_id = secrets.token_hex(4)
        self._stop_folder = Path()
        self._folders = ExitStack()
        """Folders that the agent makes during the run, such as Ray's, and removes after it."""
        # The head raises its own limit of open files in the roll call (rollcall/gather.py). The command still
        # gets the limit that the user or the scheduler has set.
        self._open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._env: Mapping[str, str] = {}
        self._memory = config.env.get(explain.MEMORY, "")
        # These three belong to one attempt: `_start_command` makes them anew.
        self._watchdog: Watchdog
        self._late_records: LateRecords
        self._start_watch: StartWatch | None

    def run(self) -> int:
        """Meet the other nodes, run the command, supervise it, and return the exit code of this node.

        Raises
        ------
        NoPlan : the roll call failed. ToolFailed : the command cannot be started. UsageError : a folder of
        the run cannot be written, or a file in it prevents the run from starting. CheckFailed : the
        preflight found more outliers than the run can do without.
        """
        env = self.config.env
        parent = Path(env["IMGKIT_STOP_DIR"]) if env.get("IMGKIT_STOP_DIR") else None
        with (
            self._signals.collecting(),
            stop_protocol.folder(parent, self.config.placement.node_rank) as self._stop_folder,
            self._folders,
        ):
            if self._run_folder:
                self._run_folder.refuse_unusable()
                self._run_folder.clear()
                self._write_run_file(
                    PLAN_FILE, self.config.plan_text, "the reasons of the settings are not there"
                )
            try:
                # Every node looks for the stop file. If only the head refused, the others would wait for it
                # in the roll call.
                if self._shared_folder:
                    self._shared_folder.refuse_stopped()
                self._run_states()
            except ImgkitError as error:
                self._code = error.exit_code
                raise
            finally:
                if self._final_lines:
                    self.log(*self._final_lines)
                # The job script takes this file as the end of the run, so it is written last.
                text = f"{self.job_id} {self._code}\n"
                loss = "the job script and imgkit status will not see how the run has ended"
                self._write_run_file(RESULT, text, loss)
        return self._code

    def _run_states(self) -> None:
        """Run one state after another, set the exit code, and close all processes and connections."""
        state: State | None = self._gather
        try:
            while state:
                state = state()
            self._code = self._finish()
            if self._code == 0 and self._is_output_lost:
                self._code = EXIT_NO
        except NoPlan:
            if not self._signals.received:
                raise
            self._code = 128 + self._signals.received[0]
        finally:
            self._gpu_monitor.close()
            if self._command:
                self._command.close()
            if self._session:
                self._session.close()
            if isinstance(self._session, HeadSession):
                self._log_summary(self._session)

    def _log_summary(self, session: HeadSession) -> None:
        """Print one line about where the time of the run went and how much it used its GPUs.

        Print only the parts that are known, and nothing without any.
        """
        texts = [self._timer.summary(session.placement.nnodes)]
        use = self._write_gpu_use(session)
        if use:
            texts.append(gpu_use.describe(use))
        line = "; ".join(text for text in texts if text)
        if line:
            self.log(line)

    def _write_gpu_use(self, session: HeadSession) -> GpuUse | None:
        """Write the GPU use of all nodes so far into the run's folder, and return it.

        Return None and write nothing if no node has read its GPUs yet.
        """
        use = gpu_use.combine(session.gpu_uses.values())
        if use:
            text = json.dumps(dataclasses.asdict(use)) + "\n"
            self._write_run_file(
                stop_protocol.GPU_USE, text, "imgkit will not see how much its GPUs are used"
            )
        return use

    @property
    def session(self) -> Session:
        """Return the connections to the other nodes, which exist once all nodes have met."""
        assert self._session is not None  # noqa: S101 - every state after gather has it
        return self._session

    def _gather(self) -> State:
        """Meet the agents of all nodes, and return the preflight or the first attempt as the next state."""
        config = self.config
        self._start_up.ends("container", process_began_s())
        self._start_up.ends("node_agent")
        self._session = gather.meet(
            config.placement,
            config.node,
            timeout_s=config.timeouts.rollcall_s,
            log=self.log,
            stop_reason=self._signals.first,
            secret=config.secret,
            all_reach_head=config.is_per_node,
        )
        self._start_up.ends("roll_call")
        self._session.lost_after_s = config.timeouts.lost_after_s
        guard.adopt_orphans()  # if a guard is killed, its processes become children of this one
        self._env = self._command_env()
        if isinstance(self._session, HeadSession):
            for warning in self._session.warnings:
                self.log(f"warning: {warning}")
            size = self._session.placement.size or Size(training=self._session.placement.nnodes)
            self._attempts = Attempts(
                self._session,
                size,
                max_failures=config.max_failures,
                log=self.log,
                fence=self._admit_attempt,
                is_per_node=config.is_per_node,
            )
        return self._preflight if config.preflight else self._begin_attempts()

    def _command_env(self) -> Mapping[str, str]:
        """Return the environment of the command, the same in every attempt."""
        config = self.config
        env = {
            # torchrun's own prefix for the lines of --tee names no host. This one is "[host:rank]: ".
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[{config.node.host.replace('$', '$$')}:${{rank}}]: ",
            **config.env,
            "IMGKIT_STOP_DIR": str(self._stop_folder),
            "IMGKIT_JOB_ID": self.job_id,
            **nccl.recorder_variables(config.env, config.node.software.torch, self.job_id),
        }
        return {**env, fence.VARIABLE: self._run_id} if self.is_head else env

    def _admit_attempt(self, attempt: int) -> None:
        """Let only workers of `attempt` write into the run's folder.

        Workers of an earlier attempt may still run on a lost node. A run that can have only one attempt needs
        no such fence.
        """
        size = self.session.placement.size
        if self._run_folder is None or (size is None and not self.config.max_failures):
            return
        if problem := fence.admit_attempt(self._run_folder.path, self.job_id, attempt, self._run_id):
            self.log(f"warning: {problem}")

    def _preflight(self) -> State:
        """Measure all nodes, then begin the first attempt without the slow ones."""
        assert self.config.preflight  # noqa: S101 - else this state is skipped
        size, nnodes = self.session.placement.size, self.session.placement.nnodes
        needs = PreflightConfig(
            module=self.config.preflight,
            env=self._env,
            open_files=self._open_files,
            signals=self._signals,
            log=self.log,
            folder=self._run_folder.path if self._run_folder else None,
            spares=nnodes - size.training if size else 0,
        )
        excluded = run_preflight(self.session, needs)
        self._start_up.ends("preflight")
        return self._begin_attempts(excluded)

    def _begin_attempts(self, excluded: Collection[int] = ()) -> State:
        """On the head, order the first attempt without the nodes in `excluded`. Return the next state."""
        if self._attempts:
            self._attempts.start(excluded)
        return self._start

    def _start(self) -> State | None:
        """Wait for the head's next attempt, and start the command in it.

        Return None, the end, if the head ends the run or is lost, after a second signal, or if the other
        nodes take too long to stop. A node that is a spare in the attempt stays in this state.
        """
        report_at = float("inf")
        if self.config.is_per_node and not self.is_head and self._code == 0 and not self._deadline.has_begun:
            # The command may have finished as intended. But `ray symmetric-run` also returns 0 if Ray has
            # failed on its node, so the user should know if the head's command goes on for long.
            report_at = time.monotonic() + ALONE_S
        self._deadline = Deadline()
        if self.stop:
            self._deadline.set_within(self._patience_s(), "the other nodes are not done")
        self._handle_events()
        while self._order is None:
            if self._run_code is not None or self._is_head_lost or self._signals.is_repeated:
                return None
            self._wait(self._signals)
            self._handle_events()
            if time.monotonic() >= report_at:
                report_at = float("inf")
                self.log(f"the command on {self._node_name()} has ended with 0, and the head's goes on")
            if self._deadline.is_due() and not self._is_head_lost:
                self.log("the other nodes are not done; leaving without them")
                return None
        if self._is_head_lost:
            return None
        order, self._order = self._order, None
        if order.attempt > 1 and (lines := self._failure_lines(of_previous=True)):
            self.log(*lines)
        self._failure = None
        if order.node_rank is None:
            return self._start
        self._start_command(order, order.node_rank)
        if self._command is None:
            return self._restart
        return self._stop if self.stop else self._watch

    def _start_command(self, order: AttemptStart, node_rank: int) -> None:
        """Start the command of an attempt under a guard, with a new watchdog.

        Start nothing if the head has cancelled the attempt in the meantime. `self._command` is then None.
        """
        folder = self._stop_folder
        self._attempt, self._attempt_began, self._code = order.attempt, time.time(), EXIT_NO
        self._deadline, self._stall, self._saved_state, self.session.phase = Deadline(), "", "", STARTING
        if self.config.is_per_node:
            self._deadline = Deadline(self.config.timeouts.grace_s)
        stop_protocol.clear(folder)
        if self.stop:  # the request came while the other nodes started
            self._raise_flag(self.stop)
        self._late_records = LateRecords(folder)
        hang_after_s = self.config.timeouts.hang_after_s
        self._watchdog = Watchdog(
            folder, self.config.node.host, hang_after_s, lambda: nccl.question(self._env)
        )
        self._start_watch = None
        if isinstance(self._session, HeadSession):
            self._start_watch = StartWatch(self._session, self.config.timeouts.rollcall_s)
        first_s = self._timer.start_attempt(folder)
        if order.attempt <= self._cancelled:
            return
        # The parts before torchrun, such as the roll call, belong to the first attempt only.
        parts = self._start_up if order.attempt == 1 else StartUp(time.monotonic())
        argv, variables = self._fill_command(order, node_rank)
        self._command = GuardedCommand(
            argv,
            {
                **self._env,
                **variables,
                "IMGKIT_ATTEMPT": str(order.attempt),
                start_up.VARIABLE: parts.text(),
                start_up.FIRST_ATTEMPT: f"{first_s:.3f}",
            },
            self.log,
            repeats_warnings=self.is_head,
            open_files=self._open_files,
            kind="node" if self.config.is_per_node else "torchrun",
        )
        if order.attempt > 1 and self._attempts:
            waited_s = time.monotonic() - self._attempts.failed_at
            program = "the command" if self.config.is_per_node else "torchrun"
            self.log(f"{program} starts again {waited_s:.1f} s after the failure was noticed")

    def _fill_command(self, order: AttemptStart, node_rank: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """Return the argv of an attempt, and the variables that are different in each attempt."""
        config = self.config
        if not config.is_per_node:
            argv = plan.fill(
                config.argv,
                attempt=order.attempt,
                port=order.port,
                nnodes=order.nnodes,
                node_rank=node_rank,
                logs=self._stop_folder / "logs" / f"attempt{order.attempt}",
            )
            return argv, {}
        run_dir = config.env.get("IMGKIT_RUN_DIR", "")
        values = per_node.placeholder_values(order, node_rank, config.node.nproc, run_dir)
        variables = per_node.variables(values)
        if not config.env.get(per_node.RAY_TMPDIR):
            path = per_node.ray_folder(order)
            with suppress(OSError):  # without the variable, Ray itself reports which folder it cannot use
                self._folders.enter_context(stop_protocol.locked_folder(path))
                variables[per_node.RAY_TMPDIR] = str(path)
        return per_node.fill(config.argv, values), variables

    def _watch(self) -> State:
        """Watch the command until it has ended or must be ended. Return the next state."""
        while self._supervise_tick():
            if self.stop or self._deadline.at < float("inf"):
                return self._stop
        return self._restart

    def _stop(self) -> State:
        """Wait until the program has saved and ended. From the deadline on, end it step by step by force."""
        while self._supervise_tick():
            if self._deadline.is_due() and self._command:
                was_forced = self._deadline.is_forced
                step = self._deadline.next_step()
                if self._deadline.is_forced and not was_forced:
                    self.log(f"ending the program: {self._deadline.reason}")
                self._command.send(step)
        return self._restart

    def _supervise_tick(self) -> bool:
        """Wait up to one tick, and react to the command, the other nodes and the workers.

        Return False once no process of the command is left.
        """
        session, command = self.session, self._command
        assert command is not None  # noqa: S101 - the states that watch it have it
        self._wait(command, self._signals)
        if not command.read():
            return False
        self._handle_events()
        session.positions = self._watchdog.positions
        if session.phase not in (WORKERS, CONNECTING):
            session.phase = start_up.read_phase(self._stop_folder)
        elif self._watchdog.connects(self.config.node.nproc):
            session.phase = CONNECTING
        else:
            session.phase = WORKERS
        if self._start_watch and not self._stall and (reason := self._start_watch.stalled()):
            self._stall = reason
            self._deadline.set_now(reason)
        if self._attempts and self._attempts.have_others_ended():
            stop_protocol.release(self._stop_folder)
        for report in self._watchdog.look(session.run_positions):
            self.log(*report.split("\n"))
        for lines in self._late_records.look():
            self.log(*lines)
        self._report_lost_output()
        if time.time() - self._attempt_began >= gpu_use.START_AFTER_S:
            self._gpu_monitor.start()
        self._report_gpu_use()
        return True

    def _report_gpu_use(self) -> None:
        """Report new readings of this node's GPUs; the head writes the use of all nodes once a minute."""
        use = self._gpu_monitor.read()
        if use is None:
            return
        self.session.report(use)
        if isinstance(self._session, HeadSession) and time.monotonic() >= self._next_gpu_file_s:
            self._next_gpu_file_s = time.monotonic() + gpu_use.WRITE_EVERY_S
            self._write_gpu_use(self._session)

    def _report_lost_output(self) -> None:
        """Report once that the output of the ranks is lost, because standard output is closed or full."""
        if self._is_output_lost or not (reason := stop_protocol.lost_output(self._stop_folder)):
            return
        self._is_output_lost = True
        self.log(f"standard output is closed or full ({reason}): output of the ranks is lost")

    def _restart(self) -> State:
        """Explain how the attempt ended on this node, and report that to the head."""
        command, self._command = self._command, None
        if command:
            self._code = self._node_code(command.wait())
            self._report_lost_output()
            self._report_gpu_use()
            if self._code not in (0, EXIT_SAVED):
                self._failure = self._first_failure(command)
                self._explain(command)
        self._timer.end_attempt(self._stop_folder)
        self.session.positions = None
        if self.config.on_success and self.is_head and command and self._code in (0, EXIT_SAVED):
            self._run_while_connected(self.config.on_success)
        report = AttemptEnded(
            code=self._code,
            attempt=self._attempt,
            position=self._watchdog.furthest(),
            failure=self._failure,
        )
        self.session.report(report)
        return self._start

    def _run_while_connected(self, function: Callable[[], None]) -> None:
        """Run `function` in a thread, and answer the other nodes in the meantime.

        Return when it has ended, or after `BESIDE_S` seconds.
        """
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        thread.join(0.1)  # a function that ends at once need not wait for a whole tick
        end = time.monotonic() + BESIDE_S
        while thread.is_alive() and time.monotonic() < end:
            self._wait(self._signals)
            self._handle_events()

    def _node_code(self, code: int) -> int:
        """Return the exit code of this node alone, given the `code` with which its command ended.

        A saved state counts more than the code, and the reason for which the agent ended the program counts
        more than the signal that it used. A program that a signal killed has 128 plus its number.
        """
        step, problem = stop_protocol.saved_step(self._stop_folder, self.job_id)
        if problem:
            self.log(f"warning: {problem}")
        if step is not None:
            self.log(f"state saved at step {step}")
            self._saved_state = f"{self.job_id} {step}"
            return EXIT_SAVED
        if code == 0:
            return 0
        if self._is_head_lost or self._stall:
            return EXIT_TOOL_FAILED
        if self._deadline.is_forced:
            return 128 + self._signals.received[0] if self._signals.received else EXIT_NO
        if code == -signal.SIGKILL:
            self.log(
                "the program was killed (SIGKILL), often by the kernel because memory ran out: "
                f"{explain.memory_remedy(self._memory)}"
            )
        return code if code > 0 else 128 - code

    def _first_failure(self, command: GuardedCommand) -> RankFailure | None:
        """Return the worker of this node that failed first, with the path of the full log that is written.

        Return None, and write no log, if no worker or command is known to have failed by itself.
        """
        failure: RankFailure | None
        if self.config.is_per_node:
            if self._deadline.has_begun:
                return None
            failure = failures.of_command(command.code or 0, command.tail())
        else:
            is_killed = not self._deadline.is_forced and command.code is not None
            killed_by = max(0, -(command.code or 0)) if is_killed else 0
            failure = failures.of_node(self._stop_folder, killed_by)
        if failure is None:
            return None
        number = self.session.host_index + 1
        node = plan.host_label(self.config.node.host) + (f"-{number}" if number > 1 else "")
        log = failures.write_log(command.tail(), self._log_folder, node, self._attempt)
        return dataclasses.replace(failure, log=log)

    def _explain(self, command: GuardedCommand) -> None:
        """Print the known explanations of a failed attempt, and where NCCL's flight recorder wrote."""
        failed_rank = self._failure if self._failure and self._failure.rank is not None else None
        # A rank without a traceback was usually killed, and the final message explains that.
        is_silent = failed_rank is not None and not failed_rank.lines
        if not self.stop and not self._deadline.has_begun and not is_silent:
            is_alone = self.session.placement.nnodes == 1
            has_cause = failed_rank is not None and not (failed_rank.after_peer and is_alone)
            output = command.tail()[-EXPLAINED_CHARACTERS:]
            for explanation in explain.explain(output, memory=self._memory, has_cause=has_cause):
                self.log(*explanation.lines)
        if dumps := nccl.recorder_dumps(self._env, self._attempt_began):
            self.log(dumps)

    def _failure_lines(self, *, of_previous: bool = False) -> tuple[str, ...]:
        """Return the lines about a failed run, which are printed last.

        The head describes the failure that came first on any node, and every other node has one line about
        its own worker. With `of_previous`, the lines are about the attempt before this one.
        """
        session, name = self.session, self._node_name()
        if self._stall:  # the ranks failed because the agent ended them, so their errors say nothing
            return (self._stall,)
        if isinstance(session, HeadSession):
            return failures.of_run(session, name, self.log, memory=self._memory, of_previous=of_previous)
        if self._failure is None:
            return ()
        failure = NodeFailure(at=0.0, node=name, failure=self._failure)
        if self._is_head_lost:
            return failures.block(failure, memory=self._memory)
        return (failures.one_line(failure),)

    def _node_name(self) -> str:
        return self.session.node_name(self.session.placement.node_rank, self.config.node.host)

    def _finish(self) -> int:
        """Return the exit code of this node, and ask the job script to requeue a run that has saved.

        The code is that of the whole run if the head has ended it, else that of this node.
        """
        if self._run_code is not None:
            code = self._run_code
        elif self._is_head_lost:
            code = EXIT_TOOL_FAILED
        elif self._signals.received and self._code != EXIT_SAVED:
            code = 128 + self._signals.received[0]
        else:
            code = self._code
        if code not in (0, EXIT_SAVED):
            self._final_lines = self._failure_lines()
        if code == EXIT_SAVED and self.stop and not self.stop.requeue:
            return 0  # a person asked for the stop, so the job script must not requeue the job
        if code == EXIT_SAVED and self._saved_state and self._run_folder:
            # A scheduler's exit code does not say that the state was saved: Slurm reports the code of a task
            # that it has killed.
            try:
                return self._run_folder.request_requeue(self._saved_state)
            except OSError as error:
                self.log(f"warning: {self._run_folder.path}: {error.strerror}; no script requeues the job")
        return code

    def _write_run_file(self, name: str, text: str, loss: str) -> None:
        """Write a file into the run's folder. If that fails, print a warning that ends with `loss`.

        Do nothing for an empty `text`, or on a node that does not look after the folder.
        """
        if self._run_folder is None or not text:
            return
        try:
            self._run_folder.write(name, text)
        except OSError as error:
            self.log(f"warning: {self._run_folder.path}: {error.strerror}; {loss}")

    def _patience_s(self) -> float:
        """Return the seconds that the other nodes may take to save and end: the grace time and three steps.

        The steps are HUP, QUIT and KILL (guarded.py).
        """
        return self.config.timeouts.grace_s + 3 * guarded.END_STEP_S

    def _wait(self, *sources: Readable) -> None:
        """Wait for a message or one of `sources`, for a tick at most and not past the deadline."""
        self.session.wait(sources, min(TICK_S, max(0.0, self._deadline.at - time.monotonic())))
        self._signals.drain()

    def _handle_events(self) -> None:
        """React to the other nodes, the signals, the stop file and, on the head, the reports of all nodes."""
        for event in self.session.poll():
            self._handle_event(event)
        if self._signals.is_repeated and not self._deadline.is_forced:
            self._deadline.set_within(0.0, "a second signal")
        elif self._signals.received and not self.stop:
            self._stop_all(StopRequest(reason=self._signals.first(), requeue=True))
        self._check_run_folder()
        if self._attempts:
            self._attempts.check(stopped=self.stop is not None)

    def _check_run_folder(self) -> None:
        """Stop the run if a file in its folder asks for it.

        The request of a person also counts after one for a requeue, since the job must then stay ended.
        """
        request = self._run_folder.request() if self._run_folder else None
        if request and (self.stop is None or (self.stop.requeue and not request.requeue)):
            self._stop_all(request)

    def _handle_event(self, event: Event) -> None:
        """React to one message of another node. Messages of other kinds need no reaction here."""
        match event:
            case StopOrder():
                reason = f"{event.reason} on {event.node}"
                self.request_stop(StopRequest(reason=reason, requeue=event.requeue))
            case AttemptStart():
                self._order = event
            case EndAttempt():
                self._cancelled = event.attempt
                if self._command:
                    self._deadline.set_now(event.reason)
            case HeadLost():
                self._is_head_lost = True
                self.log(f"lost {event.node}: {event.reason}")
                self._deadline.set_now(f"lost {event.node}")
            case EndRun():
                self._run_code = event.code

    def _stop_all(self, request: StopRequest) -> None:
        """Pass a stop request of this node on to all other nodes, and stop this one."""
        self.session.report(StopOrder(reason=request.reason, requeue=request.requeue))
        self.request_stop(request)

    def request_stop(self, request: StopRequest) -> None:
        """Ask the program to save and end. A second request changes only whether the job is requeued.

        If one of two requests is a person's, that one counts, and the run ends for good.
        """
        if self.stop:
            if self.stop.requeue and not request.requeue:
                self.stop = request
                self.log(f"{request.reason}: the run ends for good")
            return
        self.stop = request
        if self._command:
            self._raise_flag(request)
        else:
            self._deadline.set_within(self._patience_s(), "the other nodes are not done")

    def _raise_flag(self, request: StopRequest) -> None:
        """Make the program's stop file, and set the deadline at which the program is ended by force."""
        grace_s = self.config.timeouts.grace_s
        stop_protocol.raise_flag(self._stop_folder, request.reason)
        self.log(f"{request.reason}: asked the program to save and end, waiting up to {grace_s:g} s")
        if self.config.is_per_node:
            # An ordinary command reads no stop file, so TERM, the first step, is its request to stop.
            self._deadline.set_now("the grace time is over")
        else:
            self._deadline.set_within(grace_s, "the grace time is over")
