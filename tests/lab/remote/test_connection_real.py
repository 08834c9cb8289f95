"""Remotes over a real sshd: login shells, banners, host keys, passwords, folders, and what check reports."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from labkit import output
from remotekit import FarHost, far_host, sshd

pytestmark = [pytest.mark.sshd, pytest.mark.xdist_group("far")]


@pytest.fixture
def far() -> Iterator[FarHost]:
    with far_host(Path(f"/tmp/imgkit-far-{os.getpid()}")) as host:
        yield host


def add(far: FarHost, folder: Path, *options: str) -> None:
    done = far.imgkit("remote", "add", "mine", f"far:{folder}", *options)
    assert done.returncode == 0, done.stderr


def rows(far: FarHost) -> dict[str, dict[str, str]]:
    done = far.imgkit("remote", "check", "mine", "--json")
    return {row["name"]: row for row in json.loads(done.stdout)["checks"]}


def test_check_logs_in_once_and_reports(far: FarHost, tmp_path: Path) -> None:
    with sshd(far):
        add(far, tmp_path / "my imgkit")
        found = rows(far)
        assert len(far.calls()) == 1
    assert found["login"]["verdict"] == "ok"
    assert found["folder"]["found"].startswith(f"{tmp_path}/my imgkit, ")
    assert found["clock"]["verdict"] == "ok"
    assert found["python"]["verdict"] == "ok"
    assert (tmp_path / "my imgkit").is_dir()
    assert list((tmp_path / "my imgkit").iterdir()) == []


def test_second_command_shares_the_connection(far: FarHost, tmp_path: Path) -> None:
    with sshd(far):
        add(far, tmp_path / "x")
        for _ in range(2):
            assert rows(far)["login"]["verdict"] == "ok"
        log = (far.folder / "sshd.log").read_text()
        assert log.count("Accepted publickey") == 1, log
        assert far.imgkit("remote", "disconnect", "mine").stdout == "the connection to mine has ended\n"
        assert far.imgkit("remote", "disconnect", "mine").stdout == "no connection to mine was open\n"


def test_each_command_connects_alone_without_a_folder_for_sockets(far: FarHost, tmp_path: Path) -> None:
    with sshd(far):
        add(far, tmp_path / "x", "--keep", "0")
        for _ in range(2):
            assert rows(far)["login"]["verdict"] == "ok"
        assert (far.folder / "sshd.log").read_text().count("Accepted publickey") == 2


@pytest.mark.parametrize(
    "shell",
    ["/bin/sh", pytest.param("csh", marks=pytest.mark.skipif(not shutil.which("csh"), reason="no csh"))],
)
def test_banner_and_login_shell_do_not_matter(far: FarHost, tmp_path: Path, shell: str) -> None:
    banner = far.folder / "shell"
    banner.write_text(
        '#!/bin/sh\necho Welcome; echo home /etc; echo "end of quota" >&2\n'
        f'exec {shell} -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    banner.chmod(0o755)
    with sshd(far, forced=[str(banner)]):
        add(far, tmp_path / "a b")
        found = rows(far)
    assert found["folder"]["found"].startswith(f"{tmp_path}/a b, ")
    assert found["login"]["verdict"] == "ok"


def test_login_shell_that_runs_nothing_is_named(far: FarHost, tmp_path: Path) -> None:
    with sshd(far, forced=["/bin/echo", "This account is currently not available."]):
        add(far, tmp_path / "x")
        done = far.imgkit("remote", "check", "mine")
    assert done.returncode == 4
    assert "starts no command; it printed: This account is currently not available." in done.stderr


def test_changed_host_key_is_refused(far: FarHost, tmp_path: Path) -> None:
    with sshd(far):
        add(far, tmp_path / "x")
        far.know(far.folder / "id.pub")
        done = far.imgkit("remote", "check", "mine")
    assert done.returncode == 4
    assert "ssh-keygen -R far" in done.stderr
    assert not (tmp_path / "x").exists()


def test_unknown_host_key_is_refused(far: FarHost, tmp_path: Path) -> None:
    with sshd(far):
        add(far, tmp_path / "x")
        (far.folder / "known_hosts").write_text("")
        done = far.imgkit("remote", "check", "mine")
    assert done.returncode == 4
    assert "check the key that it shows" in done.stderr


def test_password_is_not_asked_for_without_a_terminal(far: FarHost, tmp_path: Path) -> None:
    with sshd(far, "PasswordAuthentication yes"):
        add(far, tmp_path / "x")
        (far.folder / "authorized").write_text("")
        done = far.imgkit("remote", "check", "mine")
    assert done.returncode == 4
    assert "Permission denied" in done.stderr
    assert "in a terminal, where ssh can ask: imgkit remote check mine" in done.stderr


def test_host_that_does_not_answer_is_named(far: FarHost, tmp_path: Path) -> None:
    with sshd(far):
        add(far, tmp_path / "x")
    done = far.imgkit("remote", "check", "mine")
    assert done.returncode == 4
    assert "mine: ssh to far failed: " in done.stderr
    assert "Connection refused" in done.stderr


@pytest.mark.parametrize("folder", ["/proc/imgkit", "/dev/null/x"])
def test_folder_that_cannot_be_made_fails_the_check(far: FarHost, folder: str) -> None:
    with sshd(far):
        add(far, Path(folder))
        done = far.imgkit("remote", "check", "mine")
    assert done.returncode == 1
    assert f"{folder} cannot be used" in done.stdout


def test_missing_scheduler_fails_the_check(far: FarHost, tmp_path: Path) -> None:
    with sshd(far):
        add(far, tmp_path / "x", "--recipe", "lambda")
        done = far.imgkit("remote", "check", "mine")
    assert done.returncode == 1
    assert "which imgkit run does not reach" in done.stdout


def test_values_never_stand_in_an_argument_list(far: FarHost, tmp_path: Path) -> None:
    folder = tmp_path / "a very private name"
    with sshd(far):
        add(far, folder)
        rows(far)
    assert "private" not in "".join(far.calls())
    assert output("ls", folder) == ""
