"""Supervision of real processes below a stub torchrun: who ends, with which code, and what is left."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from imgkit_entrypoints.rollcall import ports

from .conftest import READY, SAVE, STUB, file_names, stub

HANG = READY + "time.sleep(100)"
TWO = {"nnodes": 2, "hosts": ["host0", "host1"], "timeout_s": 3.0, "lost_s": 20.0}
STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2]


NAMELESS = (
    "[W1122 08:12:37.08 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
)


def test_warning_of_every_process_prints_once(nodes):
    lines = [f"[host:0]: {NAMELESS}", "before", NAMELESS, NAMELESS.replace("hostname", "name"), "after"]
    nodes.two(f"import sys; sys.stderr.write({chr(10).join((*lines, ''))!r})", workers=1)
    assert nodes.codes() == [0, 0]
    output = nodes.output()
    assert output.count("The hostname of the client socket cannot be retrieved") == 1
    assert [output.count(line + "\n") for line in ("before", lines[3], "after")] == [2, 2, 2]


def test_program_keeps_the_limit_that_the_head_raises(nodes):
    code = "import resource; print('limit', resource.getrlimit(resource.RLIMIT_NOFILE)[0], 'here')"
    nodes.two(code, workers=1, open_files=150)
    assert nodes.codes() == [0, 0]
    assert nodes.output().count("limit 150 here") == 2


def test_missing_program_is_a_tool_error(nodes):
    nodes.start(["/no/such/program"])
    assert nodes.codes() == [4]
    assert "/no/such/program: the program cannot be started: No such file" in nodes.output()


@pytest.mark.parametrize("number", STOPS)
def test_stop_signal_saves_and_requeues(nodes, number):
    launcher = nodes.start(stub(SAVE))
    nodes.said("ready", 2)
    launcher.send_signal(number)
    assert nodes.codes() == [85]
    assert f"{number.name}: asked the program to save" in nodes.output()
    assert "state saved at step 7" in nodes.output()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_every_process_saves_too(nodes, number):
    nodes.start(stub(SAVE))
    nodes.said("ready", 2)
    for pid in nodes.live_processes():
        with contextlib.suppress(ProcessLookupError):  # the first ones' end may have ended it
            os.kill(pid, number)
    assert nodes.codes() == [85]


@pytest.mark.parametrize("deaf", [(), range(1, 32)], ids=["to requests", "to all signals"])
def test_deaf_program_is_ended_after_grace(nodes, deaf):
    ignore = f"import signal\nfor n in {deaf!r}:\n  if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\n"
    launcher = nodes.start([sys.executable, "-c", ignore + HANG], grace_s=0.3)
    nodes.said("ready")
    launcher.terminate()
    assert nodes.codes() == [143]
    assert "ending the program: the grace time is over" in nodes.output()


def test_second_interrupt_ends_at_once(nodes):
    launcher = nodes.start(stub(HANG), grace_s=60)
    nodes.said("ready", 2)
    launcher.send_signal(signal.SIGINT)
    nodes.said("asked the program to save")
    signal.sigtimedwait([signal.SIGRTMAX], 0.3)  # longer than a signal that is only delivered twice
    launcher.send_signal(signal.SIGINT)
    assert nodes.codes() == [130]


def test_terminate_after_usr1_does_not_cut_saving(nodes):
    launcher = nodes.start(stub(SAVE.replace("open(", "time.sleep(1.0); open(")))
    nodes.said("ready", 2)
    launcher.send_signal(signal.SIGUSR1)
    nodes.said("asked the program to save")
    launcher.terminate()
    assert nodes.codes() == [85]


def test_signal_after_the_end_keeps_the_exit_code(nodes):
    nodes.start(stub("raise SystemExit(1)"), is_ended_late=True)
    assert nodes.codes() == [1]


def test_mark_of_another_job_does_not_count(nodes):
    nodes.start(stub("import os; open(os.environ['IMGKIT_STOP_DIR'] + '/state-saved', 'w').write('other 7')"))
    assert nodes.codes() == [0]
    assert "names job other" in nodes.output()


def test_old_marks_are_removed(nodes, tmp_path):
    folder = tmp_path / "stop" / "node0"
    folder.mkdir(parents=True)
    (folder / "state-saved").write_text(f"{nodes.job} 3")
    (folder / "stop").write_text("SIGTERM")
    code = "import os; assert not os.listdir(os.environ['IMGKIT_STOP_DIR'])"
    nodes.start(stub(code), env={"IMGKIT_STOP_DIR": str(tmp_path / "stop")})
    assert nodes.codes() == [0], nodes.output()


def test_unwritable_stop_folder_is_refused(nodes, tmp_path):
    (tmp_path / "file").write_text("")
    nodes.start(stub("pass"), env={"IMGKIT_STOP_DIR": str(tmp_path / "file")})
    assert nodes.codes() == [2]
    assert "the stop folder cannot be used" in nodes.output()


@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_killed_launcher_leaves_nothing(nodes, kill):
    launcher = nodes.start(stub(HANG))
    nodes.said("ready", 2)
    kill(launcher.pid, signal.SIGKILL)
    assert nodes.codes() == [-9]


@pytest.mark.parametrize(
    ("victim", "text"),
    [
        (
            f"{sys.executable} {STUB} ",
            "the program was killed (SIGKILL), often by the kernel because memory ran out: the job had --mem "
            "440G; request more, or use fewer data workers;",
        ),
        (f"{sys.executable} -I -S ", "the guard of this node's processes was killed"),
    ],
    ids=["torchrun", "guard"],
)
def test_killed_parent_of_the_workers_leaves_nothing(nodes, victim, text):
    nodes.start(stub(HANG), env={"IMGKIT_MEM": "--mem 440G"})
    nodes.said("ready", 2)
    os.kill(
        next(pid for pid, line in nodes.live_processes().items() if line.startswith(victim)), signal.SIGKILL
    )
    assert nodes.codes() == [137]
    assert text in nodes.output()


def test_hidden_grandchild_is_ended(nodes):
    # Its own session, orphaned at once, and without the environment that would mark it.
    hidden = (
        "import os\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        "    os.execve('/bin/sleep', ['imgkit-hidden-sleep', '100'], {})\n  os._exit(0)\n"
    )
    launcher = nodes.start(stub(hidden + HANG, workers=1))
    nodes.said("ready")

    def hidden_ones() -> list[Path]:
        folders = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if b"imgkit-hidden-sleep" in (folder / "cmdline").read_bytes():
                    folders.append(folder)
        return folders

    assert hidden_ones()
    launcher.kill()
    assert nodes.codes() == [-9]
    assert not hidden_ones()


def test_known_failure_is_explained(nodes):
    text = "DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients joined."
    nodes.start(stub(f"raise SystemExit({text!r})", workers=1))
    assert nodes.codes() == [1]
    assert "only 1 of 2 nodes started torchrun" in nodes.output()


def test_signal_to_one_node_stops_both(nodes):
    _, second = nodes.two(SAVE)
    nodes.said("ready", 4)
    second.send_signal(signal.SIGUSR1)
    assert nodes.codes() == [85, 85]
    assert "SIGUSR1 on node 2 of 2 (host1): asked the program to save" in nodes.output()


def test_nobody_leaves_before_all_have_saved(nodes):
    slow = SAVE.replace(
        "open(", "time.sleep(2 * ('host1' in os.environ['TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE'])); open("
    )
    head, second = nodes.two(slow)
    nodes.said("ready", 4)
    head.terminate()
    nodes.said("state saved at step 7")
    assert head.poll() is None
    assert second.poll() is None
    assert nodes.codes() == [85, 85]


@pytest.mark.parametrize(("code", "expected", "count"), [("", 0, 1), ("sys.exit(3)", 1, 0)])
def test_others_wait_while_the_head_packs_after_a_success(nodes, code, expected, count):
    nodes.two(f"import sys; {code}", pack_s=3.0)  # longer than the silence of a lost node
    assert nodes.codes() == [expected, expected]
    assert nodes.output().count("<packed>") == count
    assert "lost" not in nodes.output()


def test_file_of_the_job_script_saves_and_requeues_all_nodes(nodes, run_dir):
    for name in ("stop-for-requeue", "requeue"):
        (run_dir / name).write_text("of an earlier run")
    nodes.two(SAVE)
    nodes.said("ready", 4)
    assert file_names(run_dir) == []
    (run_dir / "stop-for-requeue").touch()
    assert nodes.codes() == [85, 85]
    assert f"{run_dir}/stop-for-requeue on node 1 of 2 (host0): asked the program to save" in nodes.output()
    assert (run_dir / "requeued").read_text().split()[1:] == ["7"]
    assert file_names(run_dir) == ["requeue", "requeued", "result", "stop-for-requeue"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGKILL, "lost node {} of 2"),
        (signal.SIGSTOP, "lost node {} of 2 (host{}): no heartbeat for 1 s"),
    ],
    ids=["killed", "silent"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_lost_node_ends_the_other(nodes, rank, number, text):
    both = nodes.two(HANG, lost_s=1.0)
    nodes.said("ready", 4)
    both[rank].send_signal(number)
    assert both[1 - rank].wait(timeout=20) == 4
    assert text.format(rank + 1, rank) in nodes.output()
    both[rank].kill()
    nodes.codes()


def test_failed_node_ends_the_other(nodes):
    only_host1 = (
        "import os\nif 'host1' in os.environ['TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE']: raise SystemExit(3)\n"
    )
    nodes.two(only_host1 + HANG)
    assert nodes.codes() == [1, 1]
    assert "node 2 of 2 (host1) ended with exit code 1" in nodes.output()


def test_logs_of_two_nodes_on_one_host_have_two_names(nodes):
    # Neither node ends before both have reported: the first end would stop the other.
    fails = (
        "import os, pathlib, time; os.environ['RANK'] = '0'\n"
        "from imgkit_entrypoints.launch import user_program\n"
        "user_program.record_error('ValueError: bad')\n"
        f"folder = pathlib.Path({str(nodes.folder)!r}); (folder / f'{{os.getpid()}}.reported').touch()\n"
        "while len(list(folder.glob('*.reported'))) < 2: time.sleep(0.05)\n"
        "raise SystemExit(1)"
    )
    nodes.two(fails, workers=1, host="a/b")
    assert nodes.codes() == [1, 1]
    assert {path.name for path in (nodes.folder / "run").glob("errors*")} == {
        "errors-a_b.log",
        "errors-a_b-2.log",
    }


def test_stalled_rendezvous_ends_with_the_nodes_named(nodes):
    """Torchrun of node 1 waits in torch's store, as after a stranger has deleted a key."""
    note = "from imgkit_entrypoints.launch import start_up; start_up.write_phase(os.environ, {phase!r});"
    nodes.start(stub(READY + note.format(phase="workers") + "time.sleep(100)"), **TWO, rank=0)
    nodes.start(stub(READY + note.format(phase="rendezvous") + "time.sleep(100)"), **TWO, rank=1)
    assert nodes.codes(within_s=40) == [4, 4]
    output = nodes.output()
    assert (
        "rendezvous did not complete within 3 s (--rollcall-timeout); without workers: node 2 of 2 (host1)."
        in output
    )
    assert "node 1 of 2 (host0) ended with exit code 4" in output


def test_stop_during_the_roll_call(nodes):
    both = {"nnodes": 2, "port": ports.first_free(os.getpid() % 10000 + 15000)}
    launcher = nodes.start(stub("print('never')"), **both)
    nodes.start(stub("print('never')"), **both, rank=1, job="another")
    nodes.said("; ignored")
    launcher.terminate()
    assert nodes.codes() == [143, 5]
    assert "never" not in nodes.output()
