"""The fan-out with everything real but the network: `ssh` is a shell script that runs the line here."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from file_tree import FakeProgram

from imgkit_builder.jobs.job import HostCommand, HostInput
from imgkit_builder.jobs.systems import fanout
from imgkit_entrypoints.errors import UsageError

MAIN = """
import json, sys
from imgkit_builder.jobs.job import HostCommand
from imgkit_builder.jobs.systems import fanout
def show(host, text, error):
    print(host, "error" if error else "output", text.decode(), flush=True)
fanout.END_S = float(sys.argv[2])
say = lambda text: print("said", text, flush=True)
commands = [HostCommand(*command) for command in json.loads(sys.argv[1])]
sys.exit(fanout.run_on_hosts(commands, show=show, say=say))
"""


@pytest.fixture
def hosts(fake_program: FakeProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ssh`` to ``gone`` fails as the real one does, any other host is this machine."""
    fails = 'echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255'
    last_two = 'while [ "$#" -gt 2 ]; do shift; done'
    fake_program("ssh", f'{last_two}\n[ "$1" = gone ] && {{ {fails}; }}\nexec sh -c "$2"')
    monkeypatch.setattr(fanout, "KILL_S", 1)


def line(*argv: str) -> str:
    return shlex.join(fanout.guard_command(argv))


def run(*remote: tuple[str, str], **options: Any) -> tuple[int, list[str]]:
    """Return the exit code, and each part of the output with its host and stream."""
    output: list[str] = []

    def show(host: str, text: bytes, error: bool) -> None:
        output.append(f"{host} {'error' if error else 'output'} {text.decode()}")

    def say(text: str) -> None:
        output.append(f"said {text}")

    commands = [HostCommand(*command) for command in remote]
    return fanout.run_on_hosts(commands, show=show, say=say, **options), output


@pytest.mark.parametrize("code", [0, 3])
def test_run_with_a_spare_outlives_a_host_and_ends_with_its_head(hosts, monkeypatch, code):
    monkeypatch.setattr(fanout, "PEERS_S", 0.2)
    head = ("a", line("sh", "-c", f"sleep 1; exit {code}"))
    result, output = run(head, ("gone", ""), ("c", line("sleep", "60")), head_decides=True)
    assert result == code
    assert output[0].startswith("gone error")
    assert output[-1] == "said c: its command ended with exit code 143"


def test_lost_head_ends_all_hosts(hosts, monkeypatch):
    monkeypatch.setattr(fanout, "PEERS_S", 0.2)
    code, output = run(("gone", ""), ("b", line("sleep", "60")), head_decides=True)
    assert code == 255
    assert "said asking b to end as well" in output


@pytest.fixture
def started(hosts: None, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a program on two hosts in a process of its own; returns when both say so."""
    running: list[subprocess.Popen[str]] = []

    def start(program: str, end_s: float = 8) -> subprocess.Popen[str]:
        (tmp_path / "program").write_text(program)
        remote = [(host, line("sh", str(tmp_path / "program"), host)) for host in ("a", "b")]
        sender = subprocess.Popen(
            [sys.executable, "-c", MAIN, json.dumps(remote), str(end_s)], stdout=subprocess.PIPE, text=True
        )
        assert sender.stdout is not None
        running.append(sender)
        both = {sender.stdout.readline(), sender.stdout.readline()}
        assert both == {"a output works\n", "b output works\n"}
        return sender

    yield start
    for sender in running:
        sender.kill()
        sender.communicate()


def find_remains(folder: Path) -> list[str]:
    """Command lines that name a file of the test's folder, without this process."""
    command_lines = []
    for entry in Path("/proc").iterdir():
        try:
            text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if entry.name.isdigit() and str(folder / "program") in text:
            command_lines.append(text)
    return command_lines


def gone(folder: Path, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while find_remains(folder) and time.monotonic() < end:
        time.sleep(0.05)
    return not find_remains(folder)


WILLING = "trap 'echo asked; exit 7' TERM; echo works; while :; do sleep 0.1; done"
DEAF = "trap '' TERM INT HUP; sleep 1000 & echo works; while :; do sleep 0.1; done"


def test_output_bears_its_host(hosts):
    code, output = run(
        ("a", line("sh", "-c", "echo one; echo two >&2; printf last")), ("b", line("echo", "x"))
    )
    assert code == 0
    assert sorted(output) == ["a error two", "a output last", "a output one", "b output x"]


def test_arguments_arrive_unchanged(hosts):
    argv = ("", "a b", "it's", '"$HOME"', "`reboot`; rm -rf /", "*", "-n")
    _, output = run(("a", line("printf", "<%s>", *argv)))
    assert output == ["a output " + "".join(f"<{argument}>" for argument in argv)]


def test_first_failure_is_the_exit_code(hosts):
    code, output = run(("a", line("sh", "-c", "sleep 1; exit 4")), ("b", line("sh", "-c", "exit 3")))
    assert code == 3
    assert "said b: its command ended with exit code 3" in output


def test_missing_program_fails(hosts):
    code, output = run(("a", line("/absent/program")))
    assert code == 127
    assert any("/absent/program" in text for text in output)


def test_all_hosts_end_after_a_failure(hosts, monkeypatch):
    monkeypatch.setattr(fanout, "PEERS_S", 0.3)
    start_s = time.monotonic()
    code, output = run(("a", line("sleep", "60")), ("gone", line("true")))
    assert code == fanout.SSH_FAILED
    assert time.monotonic() - start_s < 30
    assert "gone error ssh: connect to host gone port 22: No route to host" in output
    assert "said asking a to end as well" in output


def test_endless_line_is_shown_in_parts(hosts):
    code, output = run(("a", line("sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x")))
    assert code == 0
    assert len(output) > 1
    assert "".join(text.removeprefix("a output ") for text in output) == "x" * 300000


def test_command_reads_no_input(hosts):
    code, output = run(("a", line("sh", "-c", "cat; echo read")))
    assert (code, output) == (0, ["a output read"])


def test_remains_of_a_command_are_ended(hosts, tmp_path):
    (tmp_path / "program").write_text("exec sleep 1000")
    code, output = run(("a", line("sh", "-c", f"sh {tmp_path}/program & echo done")))
    assert (code, output) == (0, ["a output done"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_asks_all_to_end(started, number, tmp_path):
    sender = started(WILLING)
    sender.send_signal(number)
    output = sender.communicate(timeout=30)[0]
    assert sender.returncode == 7
    assert "a output asked" in output
    assert "b output asked" in output
    assert gone(tmp_path, 5)


def test_second_signal_kills_all(started, tmp_path):
    sender = started(DEAF)
    sender.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert find_remains(tmp_path)
    sender.send_signal(signal.SIGINT)
    sender.communicate(timeout=30)
    assert sender.returncode == 137
    assert gone(tmp_path, 5)


def test_silent_host_is_given_up(started, tmp_path):
    # Out of the guard's reach, and it holds the connection open.
    survivor = "setsid sh -c 'echo $$ > $1; exec sleep 1000' sh $0.$1 &"
    sender = started(f"{survivor} until [ -s $0.$1 ]; do sleep 0.1; done; echo works; wait", end_s=1.5)
    files = [tmp_path / f"program.{host}" for host in ("a", "b")]
    for _ in range(2):
        sender.send_signal(signal.SIGINT)
        time.sleep(0.3)
    sender.communicate(timeout=30)
    assert sender.returncode == 130
    for file in files:
        os.kill(int(file.read_text()), signal.SIGKILL)  # were there still


@pytest.mark.parametrize("program", [WILLING, DEAF])
def test_killed_fanout_leaves_nothing(started, program, tmp_path):
    sender = started(program)
    sender.kill()
    sender.wait()
    assert gone(tmp_path, 10)


def test_secret_and_variables_come_by_standard_input_alone(hosts, tmp_path, monkeypatch):
    """Each host's program prints both, its variables, and the arguments of all processes."""
    monkeypatch.setenv("TOKEN", " a 'b' $(touch x)\\n")
    monkeypatch.setenv("imgkit_secret", "exported by somebody")
    program = tmp_path / "program"
    program.write_text(
        'read -r secret; echo "$secret"; printf "%s\\n" "$IMGKIT_SECRET_FILE$TOKEN"; env; ps -eo args\n'
    )
    sent = HostInput(secret=True, names=("TOKEN",))
    command = shlex.join(fanout.guard_command(("sh", str(program)), sent))
    code, output = run(("a", command), ("b", command), host_input=sent)
    assert code == 0, output
    secrets = [text.split() for text in output if re.fullmatch("[ab] output [0-9a-f]{64}", text)]
    assert sorted(host for host, _, _ in secrets) == ["a", "b"]
    value = secrets[0][2]
    assert sum(value in text for text in output) == 2
    token = os.environ["TOKEN"]
    assert sorted(text for text in output if token in text) == [
        *(f"a output -{token}", f"a output TOKEN={token}"),
        *(f"b output -{token}", f"b output TOKEN={token}"),
    ]


def test_flag_keeps_its_order():
    assert fanout.parse_hosts("node10, node2,me@10.0.0.1") == ("node10", "node2", "me@10.0.0.1")


def test_no_text_is_no_host():
    assert fanout.parse_hosts("") == ()


def test_file_of_open_mpi_is_read(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# head\nnode2 slots=2\n\nnode1 slots=2 max_slots=4 # second\nfd00::7\n")
    assert fanout.parse_hosts(str(file)) == ("node2", "node1", "fd00::7")


@pytest.mark.parametrize(
    "text",
    [
        "-oProxyCommand=reboot",
        "-l@node1",
        "a;reboot",
        "a b",
        "a,,b",
        "node1:2",
        "$(reboot)",
        "a\nb",
        "@a",
        "é",
    ],
)
def test_what_is_no_host_is_refused(text):
    with pytest.raises(UsageError, match="is not a host"):
        fanout.parse_hosts(text)


def test_file_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "hosts"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read") as caught:
        fanout.parse_hosts(str(file))
    assert caught.value.where == str(file)


def test_this_machine_is_known():
    assert fanout.is_this_machine("127.0.0.1")
    assert fanout.is_this_machine("me@localhost")
    assert not fanout.is_this_machine("192.0.2.1")  # of a network that is nobody's: RFC 5737
