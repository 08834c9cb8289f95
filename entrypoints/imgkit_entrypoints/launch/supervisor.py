"""Run torchrun, or one program, on this node and end it well: on request, or when a node is lost or fails.

The nodes meet; the head then starts attempts (attempts.py), and every node takes part in them (node.py).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_entrypoints import fence
from imgkit_entrypoints.errors import EXIT_NO, ImgkitError, NoPlan
from imgkit_entrypoints.launch import flight_recorder, guard, stop_protocol
from imgkit_entrypoints.launch.attempts import Attempts
from imgkit_entrypoints.launch.node import NodeRun, Surroundings
from imgkit_entrypoints.launch.run_folder import RunFolder
from imgkit_entrypoints.launch.signals import CollectedSignals
from imgkit_entrypoints.launch.start_up import StartUp, process_began_s
from imgkit_entrypoints.launch.timekeeper import Timekeeper
from imgkit_entrypoints.rollcall import descriptors
from imgkit_entrypoints.rollcall.session import LeadingRoll, LoneRoll, Roll
from imgkit_entrypoints.schedulers.placement import Size

if TYPE_CHECKING:
    from imgkit_entrypoints.launch.request import Timeouts
    from imgkit_entrypoints.rollcall.messages import Caller
    from imgkit_entrypoints.schedulers.placement import Placement

Say = Callable[..., None]


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    place: Placement,
    me: Caller,
    say: Say,
    timeouts: Timeouts,
    max_failures: int = 0,
    secret: bytes | None = None,
    goodput: str = "",
    preflight: str = "",
) -> int:
    """Meet the other nodes, run `argv` with `env`, supervise it, and return the exit code of this node.

    Parameters
    ----------
    argv : markers in it are filled in (markers.py).
    env : the whole environment of the child; the stop protocol's variables and the line prefix are added.
        IMGKIT_STOP_DIR is the parent of the node's stop folder; unset, the folder is a temporary one.
    max_failures : lost nodes and failed workers that the run survives by a new attempt.
    secret : what all nodes of the run know, and no stranger (rollcall/proof.py); None: an open start.
    goodput : who knows where the time goes, see `Timekeeper`.
    preflight : how all nodes are measured before the start (launch/preflight); empty: not at all.

    Raises
    ------
    NoPlan : the roll call failed. ToolFailed : `argv` cannot be started. UsageError : a folder of the run
    cannot be written, or a file in it keeps the run from starting. CheckFailed : the
    preflight found more outliers than the run can do without.
    """
    wanted = Path(env["IMGKIT_STOP_DIR"]) if env.get("IMGKIT_STOP_DIR") else None
    head, job_id = place.node_rank == 0, place.job_id or stop_protocol.LOCAL_JOB
    elastic, word = place.size is not None or max_failures > 0, secrets.token_hex(4)
    with (
        descriptors.limit_kept() as open_files,  # the roll call may raise it
        CollectedSignals().collecting() as signals,
        stop_protocol.folder(wanted, place.node_rank) as folder,
    ):
        shared = RunFolder.of(env, say)
        if shared and head:
            shared.clear()
        with _result(shared if head and place.size else None, job_id, say) as result, ExitStack() as held:
            if shared:
                shared.refuse_stopped()  # on every node: none waits in the roll call for one that has refused
            times = held.enter_context(Timekeeper(env, place, say, goodput))
            started = StartUp(min(times.began_s, process_began_s()))
            started.ends("container", process_began_s())
            started.ends("launcher")
            try:
                roll = _meet(place, me, timeouts.rollcall_s, say, signals, secret, elastic=elastic)
            except NoPlan:
                if signals.got:
                    result.code = 128 + signals.got[0]
                    return result.code
                raise
            started.ends("roll_call")
            roll.lost_s, times.nodes = timeouts.lost_after_s, roll.place.nnodes
            around = Surroundings(
                argv=argv,
                env={**_variables(env, me, folder, job_id), **({fence.VARIABLE: word} if head else {})},
                open_files=open_files,
                host=me.host,
                stop_folder=folder,
                # All nodes share the folder, so the head looks after it.
                run_folder=shared if head else None,
                job_id=job_id,
                head=head,
                roll=roll,
                attempts=_attempts(roll, max_failures, job_id, word, shared, say),
                times=times,
                started=started,
                signals=signals,
                rendezvous_s=timeouts.rollcall_s,
                grace_s=timeouts.grace_s,
                hang_after_s=timeouts.hang_after_s,
                say=say,
            )
            guard.adopt_orphans()  # for the case that a guard itself is killed
            try:
                left_out = _measured(preflight, around, shared) if preflight else ()
                if preflight:
                    started.ends("preflight")
                if around.attempts:
                    around.attempts.start(left_out)
                result.code = times.code = NodeRun(around).to_the_end()
            except NoPlan:
                if signals.got:
                    result.code = times.code = 128 + signals.got[0]
                    return result.code
                raise
            finally:
                roll.close()
        return result.code


@dataclass(slots=True)
class _RunEnd:
    code: int = EXIT_NO


@contextlib.contextmanager
def _result(folder: RunFolder | None, job_id: str, say: Say) -> Iterator[_RunEnd]:
    """Leave the exit code of the whole run in `folder` as the last thing, for the job script."""
    result = _RunEnd()
    try:
        yield result
    except ImgkitError as error:
        result.code = error.exit_code
        raise
    finally:
        if folder:
            try:
                folder.end(job_id, result.code)
            except OSError as error:
                why = f"{folder.path}: {error.strerror}"
                say(f"warning: {why}; the job script will not see how the run has ended")


def _variables(env: Mapping[str, str], me: Caller, stop_folder: Path, job_id: str) -> Mapping[str, str]:
    """The environment of the command, in every attempt."""
    return {
        # torchrun knows no host name: each line of --tee says [host:rank].
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[{me.host.replace('$', '$$')}:${{rank}}]: ",
        **env,
        "IMGKIT_STOP_DIR": str(stop_folder),
        "IMGKIT_JOB_ID": job_id,
        **flight_recorder.variables(env, me.identity.torch, job_id),
    }


def _attempts(
    roll: Roll, max_failures: int, job_id: str, word: str, folder: RunFolder | None, say: Say
) -> Attempts | None:
    if not isinstance(roll, LeadingRoll) or not roll.elastic:
        return None

    def admit(attempt: int) -> None:
        if folder and (why := fence.admit(folder.path, job_id, attempt, word)):
            say(f"warning: {why}")

    nnodes = roll.place.nnodes
    size = roll.place.size or Size(least=nnodes, most=nnodes)
    return Attempts(roll, size, max_failures=max_failures, say=say, fence=admit)


def _measured(mode: str, around: Surroundings, shared: RunFolder | None) -> tuple[int, ...]:
    """Measure all nodes; return the numbers of those that the run leaves out."""
    from imgkit_entrypoints.launch.preflight.run import Needs, preflight

    place = around.roll.place
    needs = Needs(
        mode=mode,
        env=around.env,
        open_files=around.open_files,
        signals=around.signals,
        say=around.say,
        folder=shared.path if shared else None,
        spares=place.nnodes - place.size.least if place.size else 0,
    )
    return preflight(around.roll, needs)


def _meet(
    place: Placement,
    me: Caller,
    timeout_s: float,
    say: Say,
    signals: CollectedSignals,
    secret: bytes | None,
    *,
    elastic: bool,
) -> Roll:
    if place.nnodes == 1:
        return LoneRoll(place, elastic=elastic)
    from imgkit_entrypoints.rollcall import gather  # one node starts without it, and sooner

    roll = gather.call(
        place, me, timeout_s=timeout_s, say=say, stopped=signals.first, secret=secret, elastic=elastic
    )
    for warning in roll.warnings if place.node_rank == 0 else ():
        say(f"warning: {warning}")
    return roll
