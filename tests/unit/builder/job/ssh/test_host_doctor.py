"""``imgkit doctor --hosts``: what is made of the hosts' answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from imgkit_builder.base.checks import Check
from imgkit_builder.job.ssh import doctor, fanout

ALIKE = (
    "clock 1700000000.123456789",
    "head 10.0.0.1",
    "orted there",
    "gpu 550.54.15, NVIDIA RTX A6000",
    "gpu 550.54.15, NVIDIA RTX A6000",
    "image sha256:0123456789abcdef",
    "end",
)


def examined(answers: Mapping[str, Sequence[str]], kind: str = "docker") -> dict[str, Check]:
    """Checks by name; an answer's lines that begin with ``ssh:`` come from standard error."""

    def run(remote: Sequence[tuple[str, str]], show: fanout.Show) -> None:
        for host, _ in remote:
            for text in answers[host]:
                show(host, text.encode(), text.startswith("ssh:"))

    found = doctor.examine(tuple(answers), kind=kind, command=kind, image="lambda:latest", run=run)
    return {check.name: check for check in found}


def changed(old: str, new: str) -> tuple[str, ...]:
    return tuple(text.replace(old, new) for text in ALIKE)


def test_equal_hosts_pass() -> None:
    found = examined({"a": ALIKE, "b": ALIKE})
    assert {check.verdict for check in found.values()} == {"ok"}
    assert found["GPUs"].found == "2 x NVIDIA RTX A6000 on all"
    assert found["driver"].found == "550.54.15 on all"
    assert found["image"].found == "lambda:latest, 0123456789ab on all"


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("ssh: b: Permission denied (publickey).", "ssh-copy-id b"),
        ("ssh: Host key verification failed.", "ssh b true"),
        ("ssh: Could not resolve hostname b: Name or service not known", "/etc/hosts"),
        ("ssh: connect to host b port 22: No route to host", "ssh -v b true"),
    ],
)
def test_closed_host_fails_with_a_way_out(said: str, hint: str) -> None:
    found = examined({"a": ALIKE, "b": (said,)})
    assert found["ssh a"].verdict == "ok"
    assert (found["ssh b"].verdict, found["ssh b"].found) == ("fail", said)
    assert hint in found["ssh b"].hint
    assert found["image"].verdict == "ok"


def test_clock_that_prints_no_time_is_named() -> None:
    for clock in ("clock rubbish", "clock", f"clock {'9' * 5000}", "clock nan"):
        found = examined({"a": ALIKE, "b": (clock, *ALIKE[1:])})["clock"]
        assert (found.verdict, found.found) == ("warn", "date prints no time on b")


def test_host_that_prints_without_end_has_not_answered() -> None:
    flood = "x" * (1 << 20)
    found = examined({"a": ALIKE, "b": (*([flood] * 9), *ALIKE)})
    assert [found[name].verdict for name in ("ssh a", "ssh b")] == ["ok", "fail"]


def test_no_host_answers() -> None:
    found = examined({"a": (), "b": ()})
    assert {name: check.verdict for name, check in found.items()} == {"ssh a": "fail", "ssh b": "fail"}


def test_other_image_fails_with_the_copy_command() -> None:
    found = examined({"a": ALIKE, "b": changed("0123456789abcdef", "fedcba9876543210")})["image"]
    assert (found.verdict, found.found) == ("fail", "a: 0123456789ab; b: fedcba987654")
    assert found.hint == "on a: docker save lambda:latest | ssh b docker load"


def test_absent_image_fails() -> None:
    absent = changed("sha256:0123456789abcdef", "! Error: No such image: lambda:latest")
    assert examined({"a": absent, "b": ALIKE})["image"].hint.startswith("on b: docker save")
    found = examined({"a": absent, "b": absent})["image"]
    assert (found.verdict, found.found) == ("fail", "no host has it: Error: No such image: lambda:latest")


@pytest.mark.parametrize(
    ("old", "new", "name", "told"),
    [
        ("550.54.15", "535.1", "driver", "a: 550.54.15; b: 535.1"),
        ("A6000", "A4000", "GPUs", "a: 2 x NVIDIA RTX A6000; b: 2 x NVIDIA RTX A4000"),
        ("gpu 550.54.15, NVIDIA RTX A6000", "", "driver", "a: 550.54.15; b: unknown"),
        ("orted there", "", "Open MPI", "not on the PATH of b"),
    ],
)
def test_unlike_hosts_warn(old: str, new: str, name: str, told: str) -> None:
    found = examined({"a": ALIKE, "b": changed(old, new)})
    assert (found[name].verdict, found[name].found) == ("warn", told)


def test_unknown_head_fails() -> None:
    found = examined({"a": ALIKE, "b": changed("head 10.0.0.1", "")})["head"]
    assert (found.verdict, found.found) == ("fail", "the name a cannot be resolved on b")


def test_without_containers_no_image_is_looked_for() -> None:
    assert "image" not in examined({"a": ALIKE}, kind="host")


def test_unknown_gpus_are_no_failure() -> None:
    found = examined({"a": changed("gpu 550.54.15, NVIDIA RTX A6000", "")})
    assert (found["driver"].verdict, found["GPUs"].found) == ("warn", "unknown: nvidia-smi does not answer")
