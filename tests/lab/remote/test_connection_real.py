"""Remotes over a real sshd: login shells, banners, host keys, passwords, folders, and what check reports."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
from pathlib import Path

import pytest
import tiny_image
from file_tree import write_files, write_program
from job_records import submitted_job
from labkit import IMGKIT, expect_failure, expect_success, ordinary_user, output, public_folder
from remotekit import far_host, far_marks, sshd

from imgkit_builder.base.progress import Silent
from imgkit_builder.jobs.remote import check, connection, fetch, gc, jobs, store, transfer
from imgkit_builder.jobs.remote.config import Remote
from imgkit_entrypoints.errors import CheckFailed

pytestmark = [*far_marks, pytest.mark.xdist_group("far")]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a PAM service or a second user needs root")


@pytest.fixture
def far():
    with far_host(Path(f"/tmp/imgkit-far-{os.getpid()}")) as host:
        yield host


def add(far, folder, *options):
    expect_success(far.imgkit("remote", "add", "mine", f"far:{folder}", *options))


def send_code(reached, folder, home):
    """Send a new folder with one file to ``code/x``."""
    folder.mkdir()
    (folder / "a b.py").write_text("1\n")
    transfer.send_folder(
        reached, folder, label="code", size_bytes=2, home=home, target="code/x", report=Silent()
    )


def doctor(far, folder, *options):
    """Add the remote ``mine``, and check it."""
    add(far, folder, *options)
    return far.imgkit("doctor --on mine")


def rows(far, folder=None):
    """Return the checks of the remote ``mine``, which is in a new `folder` or was added before."""
    if folder:
        add(far, folder)
    result = far.imgkit("doctor --on mine --json")
    return {row["name"]: row for row in json.loads(result.stdout)["checks"]}


def test_check_logs_in_once_and_reports(far, tmp_path):
    with sshd(far):
        checks = rows(far, tmp_path / "my imgkit")
        assert len(far.calls()) == 1
    assert checks["login"]["verdict"] == "ok"
    assert checks["folder"]["found"].startswith(f"{tmp_path}/my imgkit, ")
    assert (tmp_path / "my imgkit").is_dir()
    assert list((tmp_path / "my imgkit").iterdir()) == []


def test_second_command_shares_the_connection(far, tmp_path):
    with sshd(far):
        add(far, tmp_path / "x")
        for _ in range(2):
            assert rows(far)["login"]["verdict"] == "ok"
        log = (far.folder / "sshd.log").read_text()
        assert log.count("Accepted publickey") == 1, log
        assert far.imgkit("remote", "disconnect", "mine").stdout == "the connection to mine has ended\n"
        assert far.imgkit("remote", "disconnect", "mine").stdout == "no connection to mine was open\n"


def test_each_command_connects_alone_without_a_folder_for_sockets(far, tmp_path):
    with sshd(far):
        add(far, tmp_path / "x", "--idle-timeout", "0")
        for _ in range(2):
            assert rows(far)["login"]["verdict"] == "ok"
        assert (far.folder / "sshd.log").read_text().count("Accepted publickey") == 2


@pytest.mark.parametrize("shell", ["/bin/sh", "csh"])
def test_files_come_and_go_behind_a_banner(far, tmp_path, shell, monkeypatch):
    """The run folder has what a run has: a secret, a checkpoint, a link, a fifo and names for no shell."""
    if not shutil.which(shell):
        pytest.skip(f"no {shell}")
    banner = far.folder / "shell"
    write_program(banner, f'echo Welcome; echo "@ERROR" >&2\nexec {shell} -c "$SSH_ORIGINAL_COMMAND"')
    far.enter(monkeypatch)
    home, target = tmp_path / "a store; of 'mine'", tmp_path / "here"
    run = home / "runs/mn5-7"
    (home / "images").mkdir(parents=True)
    files = {"metrics.jsonl": "1", "a\nb/$(touch x) 'y'": "2", "checkpoints/1/w": "3", ".imgkit-secret": b""}
    write_files(run, files)
    (run / "link").symlink_to("/etc/passwd")
    os.mkfifo(run / "pipe")
    record = submitted_job(directory=home, remote="mine", command=("x",))
    Path(jobs.log_file(record)).write_text("told\n")
    with sshd(far, forced=[str(banner)]):
        reached = connection.connect(Remote(name="mine", address="far", folder=str(home)))
        send_code(reached, tmp_path / "my code", str(home))
        assert (home / "code/x/a b.py").read_text() == "1\n"
        fetched = fetch.fetch_run(reached, record, target, checkpoints=False, report=Silent())
        log = Path(jobs.log_file(record)).name
        expected = {"metrics.jsonl", "a\nb/$(touch x) 'y'", log}
        assert {str(path.relative_to(target)) for path in fetched.new} == expected
        assert (fetched.files, fetched.bytes) == (3, 9)
        assert fetch.fetch_run(reached, record, target, checkpoints=False, report=Silent()).new == ()
        (target / "metrics.jsonl").write_text("changed here")
        fetched = fetch.fetch_run(reached, record, target, checkpoints=True, report=Silent())
        assert {path.name for path in fetched.new} == {"metrics.jsonl", "w"}
        assert (target / "metrics.jsonl").read_text() == "1\n"
        job_without_a_run = submitted_job(id="8", directory=home, remote="mine")
        with pytest.raises(CheckFailed, match=r"there is no .*/runs/mn5-8 on mine yet"):
            fetch.fetch_run(reached, job_without_a_run, tmp_path / "none", checkpoints=False, report=Silent())
    assert "store" not in "".join(far.calls())


def test_login_shell_that_runs_nothing_is_named(far, tmp_path):
    with sshd(far, forced=["/bin/echo", "This account is currently not available."]):
        message = "runs no command; it printed: This account is currently not available."
        expect_failure(doctor(far, tmp_path / "x"), 4, message)


@pytest.mark.parametrize(
    ("is_known", "hint"), [(True, "ssh-keygen -R far"), (False, "check the key that it shows")]
)
def test_host_with_another_key_is_refused(far, tmp_path, is_known, hint):
    with sshd(far):
        add(far, tmp_path / "x")
        if is_known:
            far.know(far.folder / "id.pub")
        else:
            (far.folder / "known_hosts").write_text("")
        expect_failure(far.imgkit("doctor --on mine"), 4, hint)
    assert not (tmp_path / "x").exists()


def test_password_is_not_asked_for_without_a_terminal(far, tmp_path):
    with sshd(far, "PasswordAuthentication yes"):
        add(far, tmp_path / "x")
        (far.folder / "authorized").write_text("")
        expect_failure(
            far.imgkit("doctor --on mine"),
            4,
            "Permission denied",
            "in a terminal, where ssh can ask: imgkit doctor --on mine",
        )


SECOND_FACTOR = """\
auth requisite pam_exec.so expose_authtok quiet {}
auth required pam_permit.so
account required pam_permit.so
session required pam_permit.so
"""
CODE = "424242"


@contextlib.contextmanager
def with_second_factor(far):
    """A real sshd that asks for a code after the key, through PAM; yields the list of what it was given."""
    codes_file, stub = far.folder / "asked", far.folder / "stub-of-a-code"
    codes_file.touch()
    write_program(stub, f'code=$(cat)\necho "$code" >> {codes_file}\n[ "$code" = {CODE} ]')
    methods = ("AuthenticationMethods publickey,keyboard-interactive", "KbdInteractiveAuthentication yes")
    with sshd(far, "PermitRootLogin yes", *methods, pam=SECOND_FACTOR.format(stub)):
        yield codes_file


def at_terminal(far, line, answer):
    """Run imgkit at a terminal where a person answers each question; its exit code, and what it showed."""
    child, terminal = pty.fork()
    if child == 0:
        os.execve(IMGKIT[0], [*IMGKIT, *line.split()], {**os.environ, **far.env})  # noqa: S606 - an argv list
    seen, answered = b"", 0
    with contextlib.suppress(OSError):  # the end of a terminal
        while data := os.read(terminal, 4096):
            seen += data
            if seen.count(b"Password:") > answered:
                answered += 1
                os.write(terminal, f"{answer}\n".encode())
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), seen.decode(errors="replace")


@needs_root
def test_second_factor_is_asked_once(far, tmp_path):
    with with_second_factor(far) as codes_file:
        add(far, tmp_path / "x")
        _, seen = at_terminal(far, "doctor --on mine", CODE)
        assert "one connection for all commands" in seen
        assert rows(far)["login"]["verdict"] == "ok"  # without a terminal, through the open connection
        assert at_terminal(far, "remote gc mine", "none")[0] == 0
        assert codes_file.read_text() == f"{CODE}\n"


@needs_root
def test_second_factor_is_refused_without_a_terminal(far, tmp_path):
    with with_second_factor(far) as codes_file:
        add(far, tmp_path / "x")
        expect_failure(
            far.imgkit("doctor --on mine"),
            4,
            "Permission denied (keyboard-interactive)",
            "in a terminal, where ssh can ask: imgkit doctor --on mine; then this command again",
        )
        assert codes_file.read_text() == ""
        code, seen = at_terminal(far, "doctor --on mine", "wrong")
    assert code == 4
    assert "the key was accepted, the second factor was not: ssh far true" in seen


def test_host_that_does_not_answer_is_named(far, tmp_path):
    with sshd(far):
        add(far, tmp_path / "x")
    expect_failure(far.imgkit("doctor --on mine"), 4, "mine: ssh to far failed: ", "Connection refused")


@pytest.mark.parametrize("folder", ["/proc/imgkit", "/dev/null/x"])
def test_folder_that_cannot_be_made_fails_the_check(far, folder):
    with sshd(far):
        result = expect_failure(doctor(far, Path(folder)), 1)
    assert f"{folder} cannot be used" in result.stdout


def test_missing_scheduler_fails_the_check(far, tmp_path):
    with sshd(far):
        result = expect_failure(doctor(far, tmp_path / "x", "--recipe", "lambda"), 1)
    assert "which imgkit run does not support" in result.stdout


TOOLS = (
    *("cat", "cut", "date", "dd", "df", "du", "find", "grep", "head", "id", "ls", "mkdir", "mv", "rm"),
    *("rsync", "sed", "sh", "sha256sum", "sleep", "sort", "tail", "timeout", "touch", "tr", "uname", "wc"),
)


def login_shell(far, **programs):
    """A login shell whose PATH has what every cluster has, and these programs: paths, or texts of scripts."""
    folder = far.folder / "tools"
    folder.mkdir()
    for name in TOOLS:
        program = shutil.which(name)
        assert program
        (folder / name).symlink_to(program)
    for name, text in programs.items():
        (folder / name).unlink(missing_ok=True)
        if text.startswith("/"):
            (folder / name).symlink_to(text)
        else:
            write_program(folder / name, text)
    script = f'PATH={folder}\nexport PATH\nexec /bin/sh -c "$SSH_ORIGINAL_COMMAND"'
    return [str(write_program(far.folder / "shell", script))]


def test_login_node_needs_no_python(far, tmp_path, monkeypatch):
    with sshd(far, forced=login_shell(far, sbatch="echo slurm 20.11")):
        checks = rows(far, tmp_path / "a b")
        assert "tools" not in checks
        far.enter(monkeypatch)
        reached = connection.connect(Remote(name="mine", address="far", folder=f"{tmp_path}/a b"))
        far_store = store.open_store(reached, program="sh")
        send_code(reached, tmp_path / "my code", far_store.home)
        assert (tmp_path / "a b/code/x/a b.py").read_text() == "1\n"
        assert gc.find_unused(reached, 30).folders == ()


def test_archive_that_nothing_here_converts_names_the_way_there(far, tmp_path):
    tiny_image.write(tmp_path / "my tiny.tar", "tiny:1")
    env = {"PATH": f"{far.folder}/bin", "DOCKER_HOST": f"unix://{tmp_path}/no.sock"}
    for name in ("setsid", "sh"):
        (far.folder / "bin" / name).symlink_to(str(shutil.which(name)))
    with sshd(far, forced=login_shell(far, sbatch="echo slurm 23.02.7")):
        add(far, tmp_path / "a b", "--recipe", "mn5")
        job = ("-A", "p1", "--qos", "acc_debug", "--time", "5m", "--", "true")
        expect_failure(
            far.imgkit("run", "my tiny.tar", "--on", "mine", *job, folder=tmp_path, env=env),
            3,
            "apt install squashfs-tools",
            "and there: imgkit sif 'my tiny.tar' --submit --system RECIPE, then",
        )
    assert not list((tmp_path / "a b/images").iterdir())


def test_missing_tool_is_named(far, tmp_path):
    forced = login_shell(far)
    for tool in ("sha256sum", "rsync"):
        (far.folder / "tools" / tool).unlink()
    with sshd(far, forced=forced):
        checks = rows(far, tmp_path / "x")
    assert checks["tools"]["verdict"] == "fail"
    assert checks["tools"]["found"] == "no rsync, sha256sum"
    assert "dnf install" in checks["tools"]["hint"]


def test_what_a_cluster_has_is_reported(far, tmp_path):
    fakes = {
        "quota": 'echo "other 1G 2G 3G"; echo "$(df -P . | tail -n 1 | cut -d " " -f 1) 120G 400G"',
        "sbatch": "echo slurm 23.02.7",
        "bash": (
            'case $2 in *avail*) printf "/opt/modules:\\nsingularity/3.11.5\\ngcc/12\\n" >&2 ;;'
            " 'type module') ;; *) exit 1 ;; esac"
        ),
    }
    with sshd(far, forced=login_shell(far, **fakes)):
        checks = rows(far, tmp_path / "x")
    assert checks["folder"]["found"].endswith("120G 400G")
    assert checks["scheduler"]["found"] == "slurm: slurm 23.02.7"
    assert checks["runtime"]["verdict"] == "warn"
    assert "module avail lists: singularity/3.11.5" in checks["runtime"]["hint"]


FAKE_OF_LFS = """\
[ "$1 $2 $3 $4 $5 $6" = "quota -q -h -u $(id -un) ." ] || exit 1
echo "{}"
"""


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        (
            "              .  5.915G      0k      0k       -   51652       0       0       -\n"
            "uid 68826 is using default block quota setting\nuid 68826 is using default file quota setting",
            "5.915G used, no limit",
        ),
        (
            "/lustre/project/a/long/name\n       45.31T*    40T     75T 6d23h  161195  555745  5557 -",
            "45.31T* used, soft limit 40T, hard limit 75T",
        ),
    ],
    ids=["limits of all users", "long name"],
)
def test_quota_of_lustre_is_reported(far, tmp_path, text, quota):
    with sshd(far, forced=login_shell(far, lfs=FAKE_OF_LFS.format(text), sbatch="echo slurm")):
        assert rows(far, tmp_path / "x")["folder"]["found"].endswith(f"; quota: {quota}")


def test_scheduler_that_does_not_answer_fails_the_check(far, tmp_path):
    with sshd(far, forced=login_shell(far, sbatch="echo no configuration >&2; exit 1")):
        checks = rows(far, tmp_path / "x")
    assert checks["scheduler"]["verdict"] == "fail"
    assert checks["scheduler"]["found"] == "it does not answer: no configuration"


@needs_root
def test_two_users_keep_apart_below_one_folder(far):
    parent = public_folder("two")
    parent.chmod(0o1777)
    has_room = shutil.disk_usage(parent).free >= check._LOW_SPACE_BYTES
    usable = "ok" if has_room else "warn"
    try:
        with ordinary_user() as name, sshd(far):
            assert rows(far, parent / "mine")["folder"]["verdict"] == usable
            output("usermod", "--password", "*", name)
            far.folder.chmod(0o711)
            far.direct(name)
            assert rows(far)["folder"]["verdict"] == "fail"
            result = far.imgkit("doctor --on mine")
            assert f"{parent}/mine belongs to root" in result.stdout
            assert f"imgkit remote add mine far:{parent}/mine/YOU --replace" in result.stdout
            add(far, parent / "yours", "--replace")
            assert rows(far)["folder"]["verdict"] == usable
        assert (parent / "mine").stat().st_uid != (parent / "yours").stat().st_uid
    finally:
        shutil.rmtree(parent)
