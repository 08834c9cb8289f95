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

import pytest

from imgkit_builder.jobs.job import SentInput
from imgkit_builder.jobs.systems import fanout

MAIN = """
import json, sys
from imgkit_builder.jobs.systems import fanout
def show(host, text, error):
    print(host, "error" if error else "output", text.decode(), flush=True)
fanout.END_S = float(sys.argv[2])
sys.exit(fanout.run(json.loads(sys.argv[1]), show=show, say=lambda text: print("said", text, flush=True)))
"""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ssh`` to ``gone`` fails as the real one does, any other host is this machine."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\nwhile [ "$#" -gt 2 ]; do shift; done\n'
        '[ "$1" = gone ] && { echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255; }\n'
        'exec sh -c "$2"\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(fanout, "KILL_S", 1)


def line(*words: str) -> str:
    return shlex.join(fanout.guarded(words))


def run(*remote: tuple[str, str], head_decides: bool = False) -> tuple[int, list[str]]:
    told: list[str] = []

    def show(host: str, text: bytes, error: bool) -> None:
        told.append(f"{host} {'error' if error else 'output'} {text.decode()}")

    say = lambda text: told.append(f"said {text}")  # noqa: E731
    return fanout.run(remote, show=show, say=say, head_decides=head_decides), told


@pytest.mark.parametrize("code", [0, 3])
def test_run_with_a_spare_outlives_a_host_and_ends_with_its_head(
    hosts: None, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(fanout, "PEERS_S", 0.2)
    begun = ("a", line("sh", "-c", f"sleep 1; exit {code}"))
    found, told = run(begun, ("gone", ""), ("c", line("sleep", "60")), head_decides=True)
    assert found == code
    assert told[0].startswith("gone error")
    assert told[-1] == "said c: its command ended with exit code 143"


def test_head_that_is_gone_ends_the_others(hosts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout, "PEERS_S", 0.2)
    found, told = run(("gone", ""), ("b", line("sleep", "60")), head_decides=True)
    assert found == 255
    assert "said asking b to end as well" in told


@pytest.fixture
def started(hosts: None, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a program on two hosts in a process of its own; returns when both say so."""
    running: list[subprocess.Popen[str]] = []

    def start(program: str, end_s: float = 8) -> subprocess.Popen[str]:
        (tmp_path / "program").write_text(program)
        remote = [(host, line("sh", str(tmp_path / "program"), host)) for host in ("a", "b")]
        made = subprocess.Popen(
            [sys.executable, "-c", MAIN, json.dumps(remote), str(end_s)], stdout=subprocess.PIPE, text=True
        )
        assert made.stdout is not None
        running.append(made)
        both = {made.stdout.readline(), made.stdout.readline()}
        assert both == {"a output works\n", "b output works\n"}
        return made

    yield start
    for made in running:
        made.kill()
        made.communicate()


def left(folder: Path) -> list[str]:
    """Command lines that name a file of the test's folder, without this process."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if entry.name.isdigit() and str(folder / "program") in text:
            found.append(text)
    return found


def gone(folder: Path, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while left(folder) and time.monotonic() < end:
        time.sleep(0.05)
    return not left(folder)


WILLING = "trap 'echo asked; exit 7' TERM; echo works; while :; do sleep 0.1; done"
DEAF = "trap '' TERM INT HUP; sleep 1000 & echo works; while :; do sleep 0.1; done"


def test_output_bears_its_host(hosts: None) -> None:
    code, told = run(("a", line("sh", "-c", "echo one; echo two >&2; printf last")), ("b", line("echo", "x")))
    assert code == 0
    assert sorted(told) == ["a error two", "a output last", "a output one", "b output x"]


def test_words_arrive_as_given(hosts: None) -> None:
    words = ("", "a b", "it's", '"$HOME"', "`reboot`; rm -rf /", "*", "-n")
    _, told = run(("a", line("printf", "<%s>", *words)))
    assert told == ["a output " + "".join(f"<{word}>" for word in words)]


def test_first_failure_is_the_exit_code(hosts: None) -> None:
    code, told = run(("a", line("sh", "-c", "sleep 1; exit 4")), ("b", line("sh", "-c", "exit 3")))
    assert code == 3
    assert "said b: its command ended with exit code 3" in told


def test_missing_program_fails(hosts: None) -> None:
    code, told = run(("a", line("/absent/program")))
    assert code == 127
    assert any("/absent/program" in text for text in told)


def test_others_end_after_a_failure(hosts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout, "PEERS_S", 0.3)
    began = time.monotonic()
    code, told = run(("a", line("sleep", "60")), ("gone", line("true")))
    assert code == fanout.SSH_FAILED
    assert time.monotonic() - began < 30
    assert "gone error ssh: connect to host gone port 22: No route to host" in told
    assert "said asking a to end as well" in told


def test_endless_line_is_shown_in_parts(hosts: None) -> None:
    code, told = run(("a", line("sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x")))
    assert code == 0
    assert len(told) > 1
    assert "".join(text.removeprefix("a output ") for text in told) == "x" * 300000


def test_command_reads_no_input(hosts: None) -> None:
    code, told = run(("a", line("sh", "-c", "cat; echo read")))
    assert (code, told) == (0, ["a output read"])


def test_what_a_command_left_is_ended(hosts: None, tmp_path: Path) -> None:
    (tmp_path / "program").write_text("exec sleep 1000")
    code, told = run(("a", line("sh", "-c", f"sh {tmp_path}/program & echo done")))
    assert (code, told) == (0, ["a output done"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_asks_all_to_end(
    started: Callable[[str], subprocess.Popen[str]], number: signal.Signals, tmp_path: Path
) -> None:
    made = started(WILLING)
    made.send_signal(number)
    told = made.communicate(timeout=30)[0]
    assert made.returncode == 7
    assert "a output asked" in told
    assert "b output asked" in told
    assert gone(tmp_path, 5)


def test_second_signal_makes_them(started: Callable[[str], subprocess.Popen[str]], tmp_path: Path) -> None:
    made = started(DEAF)
    made.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert left(tmp_path)
    made.send_signal(signal.SIGINT)
    made.communicate(timeout=30)
    assert made.returncode == 137
    assert gone(tmp_path, 5)


def test_silent_host_is_left(started: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    # Out of the guard's reach, and it holds the connection open.
    survivor = "setsid sh -c 'echo $$ > $1; exec sleep 1000' sh $0.$1 &"
    made = started(f"{survivor} until [ -s $0.$1 ]; do sleep 0.1; done; echo works; wait", end_s=1.5)
    files = [tmp_path / f"program.{host}" for host in ("a", "b")]
    for _ in range(2):
        made.send_signal(signal.SIGINT)
        time.sleep(0.3)
    made.communicate(timeout=30)
    assert made.returncode == 130
    for file in files:
        os.kill(int(file.read_text()), signal.SIGKILL)  # were there still


@pytest.mark.parametrize("program", [WILLING, DEAF])
def test_killed_fanout_leaves_nothing(
    started: Callable[[str], subprocess.Popen[str]], program: str, tmp_path: Path
) -> None:
    made = started(program)
    made.kill()
    made.wait()
    assert gone(tmp_path, 10)


def test_secret_and_variables_come_by_standard_input_alone(
    hosts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host's program prints both, its variables, and the arguments of all processes."""
    monkeypatch.setenv("TOKEN", " a 'b' $(touch x)\\n")
    monkeypatch.setenv("imgkit_secret", "exported by somebody")
    program = tmp_path / "program"
    program.write_text(
        'read -r secret; echo "$secret"; printf "%s\\n" "$IMGKIT_SECRET_FILE$TOKEN"; env; ps -eo args\n'
    )
    sent = SentInput(secret=True, names=("TOKEN",))
    words = shlex.join(fanout.guarded(("sh", str(program)), sent))
    told: list[str] = []
    code = fanout.run(
        [("a", words), ("b", words)],
        show=lambda host, text, error: told.append(f"{host} {text.decode()}"),
        say=told.append,
        sent=sent,
    )
    assert code == 0, told
    secrets = [text for text in told if re.fullmatch("[ab] [0-9a-f]{64}", text)]
    assert sorted(text[0] for text in secrets) == ["a", "b"]
    assert len({text[2:] for text in secrets}) == 1
    value = secrets[0][2:]
    assert sum(value in text for text in told) == 2
    token = os.environ["TOKEN"]
    assert sorted(text for text in told if token in text) == [
        *(f"a -{token}", f"a TOKEN={token}"),
        *(f"b -{token}", f"b TOKEN={token}"),
    ]
