"""Files in a run's folder that ask it to stop: a person's and the job script's."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from rollcall_nodes import head_placement

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import stop_protocol
from imgkit_entrypoints.launch.agent import NodeAgent
from imgkit_entrypoints.launch.node_attempt import NodeCommand, NodeConfig
from imgkit_entrypoints.launch.plan import Timeouts
from imgkit_entrypoints.launch.stop_protocol import RunFolder, StopRequest
from imgkit_entrypoints.rollcall.messages import NodeInfo

from .conftest import SAVE, file_names, stub

SOON = {"tick_s": 0.1}


def test_next_start_removes_the_folder_of_a_killed_job(nodes):
    def folders() -> set[Path]:
        return set(nodes.folder.glob("imgkit-stop-*"))

    killed = nodes.start(stub(SAVE, 1))
    nodes.said("ready")
    killed.kill()  # as Slurm does after KillWait
    assert nodes.codes() == [-9]
    (abandoned,) = folders()
    running = nodes.start(stub(SAVE, 1))
    nodes.said("ready", 2)
    assert abandoned in folders()  # it may be of a start that has not locked it yet
    for folder in folders():
        os.utime(folder / "lock", (0, 0))
    assert nodes.start(["true"]).wait(timeout=20) == 0
    assert folders()
    assert abandoned not in folders()
    running.terminate()
    assert nodes.codes() == [-9, 85, 0]


def test_file_of_a_person_ends_both_nodes_for_good(nodes, run_dir):
    nodes.two(SAVE, **SOON)
    nodes.said("ready", 4)
    (run_dir / "stop").touch()
    assert nodes.codes() == [0, 0]
    assert nodes.output().count("state saved at step 7") == 2
    assert file_names(run_dir) == ["result", "stop"]  # nobody is to requeue the job


def test_file_of_a_person_counts_after_that_of_the_script(nodes, run_dir):
    waits = SAVE.replace(
        "open(stop", "while not os.path.exists(stop + '/../go'): time.sleep(0.02)\nopen(stop"
    )
    nodes.two(waits, **SOON)
    nodes.said("ready", 4)
    (run_dir / "stop-for-requeue").touch()
    nodes.said("asked the program to save", 2)
    (run_dir / "stop").touch()
    nodes.said(f"{run_dir}/stop: the run ends for good")
    nodes.said("the run ends for good", 2)
    (nodes.folder / "go").touch()
    assert nodes.codes() == [0, 0]
    assert file_names(run_dir) == ["result", "stop", "stop-for-requeue"]


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def folder(tmp_path: Path, messages: list[str]) -> RunFolder:
    return RunFolder(path=tmp_path, log=messages.append)


@pytest.mark.parametrize(
    ("requeued", "names", "code", "message"),
    [
        ("7.0 20\n", ["requeue", "requeued"], 85, None),
        ("7.0 40\n", ["requeued"], 85, " where it was at the last start: not requeued"),
        (None, ["stop"], 0, ", not requeued: {}/stop prevents the run from starting"),
    ],
    ids=["new state", "no progress", "a person's stop"],
)
def test_job_is_requeued_for_a_new_state(
    folder,
    messages,
    requeued,
    names,
    code,
    message,
):
    if requeued:
        (folder.path / "requeued").write_text(requeued)
    else:
        (folder.path / "stop").touch()
    assert folder.request_requeue("7.0 40") == code
    assert file_names(folder.path) == names
    assert messages == ([f"state saved (7.0 40){message.format(folder.path)}"] if message else [])
    assert not requeued or (folder.path / "requeued").read_text() == "7.0 40\n"


def test_next_start_removes_the_request_to_requeue_and_the_use_of_gpus(folder):
    folder.request_requeue("7.0 40")
    (folder.path / stop_protocol.GPU_USE).write_text("{}")
    folder.clear()
    assert file_names(folder.path) == ["requeued"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as a second user")
def test_record_of_a_stranger_prevents_no_requeue(folder):
    for name in ("requeued", "stop"):
        (folder.path / name).write_text("7.0 40\n")
        os.chown(folder.path / name, 12345, 12345)
    assert folder.request_requeue("7.0 40") == 85
    assert (folder.path / "requeue").exists()


def test_of_two_files_the_one_of_a_person_counts(tmp_path):
    for name in ("stop-for-requeue", "stop"):
        (tmp_path / name).touch()
    assert RunFolder(path=tmp_path).stop_request() == StopRequest(reason=f"{tmp_path}/stop", requeue=False)


@pytest.mark.parametrize("nnodes", [1, 2])
def test_start_is_refused_while_the_file_is_there(nodes, run_dir, nnodes):
    (run_dir / "stop").touch()
    for rank in range(nnodes):
        nodes.start(["echo", "started"], nnodes=nnodes, rank=rank)
    assert nodes.codes() == [2] * nnodes
    assert f"{run_dir}/stop: this file prevents the run from starting" in nodes.output()
    assert f"rm {run_dir}/stop" in nodes.output()
    assert "started" not in nodes.output()
    assert file_names(run_dir) == ["result", "stop"]


def test_run_folder_that_is_a_file_is_refused_before_the_start(nodes):
    file = nodes.folder / "run"
    file.touch()
    nodes.start(["echo", "started"])
    assert nodes.codes() == [2]
    assert f"IMGKIT_RUN_DIR: {file}: the run folder cannot be written: Not a directory" in nodes.output()
    assert "started" not in nodes.output()


def test_folder_with_a_blank_gives_a_line_to_copy(tmp_path):
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "stop").touch()
    with pytest.raises(UsageError) as caught:
        RunFolder(path=folder).refuse_if_stopped()
    assert caught.value.hint == f"rm '{folder}/stop'"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as a second user")
def test_mark_that_cannot_be_removed_is_refused():
    """A folder that this user may only read holds a mark of root, which counts."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are private
        folder = Path(name)
        folder.chmod(0o755)
        (folder / stop_protocol.FOR_REQUEUE).touch()
        pid = os.fork()
        if pid == 0:
            os.setuid(12345)
            try:
                RunFolder(path=folder).clear()
            except UsageError as error:
                os._exit("IMGKIT_RUN_DIR" in str(error) and "Permission denied" in str(error))
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_folder_with_the_name_of_a_mark_does_not_count(nodes, run_dir):
    (run_dir / stop_protocol.FOR_REQUEUE).mkdir(parents=True)
    nodes.start(["true"])
    assert nodes.codes() == [0]
    assert "is ignored" in nodes.output()


def test_of_two_requests_the_one_of_a_person_counts():
    person = StopRequest(reason="a file", requeue=False)
    scheduler = StopRequest(reason="SIGTERM", requeue=True)
    config = NodeConfig(
        command=NodeCommand(argv=(), env={}),
        placement=head_placement(1),
        node=NodeInfo(host="n1"),
        timeouts=Timeouts(),
        log=print,
    )
    for requests in ((person, scheduler), (scheduler, person)):
        agent = NodeAgent(config)
        for request in requests:
            agent.request_stop(request)
        assert agent.stop == person


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as a second user")
def test_files_of_a_stranger_do_not_end_a_run(nodes, run_dir):
    nodes.start(stub(SAVE, 1), **SOON)
    nodes.said("ready")
    for name in ("stop", "stop-for-requeue"):
        (run_dir / name).touch()
        os.chown(run_dir / name, 12345, 12345)
    nodes.said("is ignored: it belongs to another user (12345)", 2)
    (run_dir / "stop").unlink()
    (run_dir / "stop").touch()
    assert nodes.codes() == [0]
    assert nodes.output().count("is ignored") == 2
    assert nodes.output().count("asked the program to save and end") == 1
