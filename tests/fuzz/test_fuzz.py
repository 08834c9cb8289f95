"""Every reader takes or refuses any bytes: no other exception, little memory, and an end.

``python tests/fuzz/hunt.py`` looks for more, and ci/soak does so for an hour (IMGKIT_FUZZ_MINUTES).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies

sys.path.insert(0, str(Path(__file__).resolve().parent))

import built
import hunt
import mutate
import targets
from house import CORPUS, House

NAMES = [target.name for target in targets.TARGETS]
EXAMPLES = 60


@pytest.fixture(scope="session")
def house():
    house = House()
    yield house
    house.close()


@pytest.mark.parametrize("name", NAMES)
def test_kept_inputs_are_refused(house, name):
    """Inputs at which a hunt once found a fault; a file's name is the digest of its bytes."""
    for path in sorted((CORPUS / name).glob("*")):
        assert not house.fault(name, path.read_bytes()), path


@pytest.mark.parametrize(
    ("name", "make"), [pytest.param(name, make, id=f"{name}-{title}") for name, title, make in built.BUILT]
)
def test_hostile_input_ends_in_time_and_memory(house, name, make):
    assert not house.fault(name, make())


@pytest.mark.parametrize("name", NAMES)
def test_changed_inputs_are_taken_or_refused(house, name):
    target = targets.by_name(name)
    seeds = target.seeds()
    random_change = strategies.builds(
        mutate.Change,
        strategies.integers(0, (1 << 16) - 1),
        strategies.integers(0, (1 << 32) - 1),
        strategies.integers(0, (1 << 16) - 1),
    )

    @hypothesis.settings(
        max_examples=EXAMPLES, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(strategies.sampled_from(seeds), strategies.lists(random_change, min_size=1, max_size=4))
    def check(seed, changes):
        assert not house.fault(name, hunt.applied(target, seed, changes))

    check()


SPECIAL: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_pipe_or_device_is_refused_at_once(kind, tmp_path, monkeypatch):
    """The files that the readers of the table are given become pipes and devices."""

    def late(*_):
        raise AssertionError(f"{target.name} waits for a {kind}, or reads all of it")

    written: list[Path] = []
    targets_with_seeds = [target for target in targets.TARGETS if target.seeds()]  # seeds may write files
    monkeypatch.setattr(Path, "write_bytes", lambda path, _: (written.append(path), SPECIAL[kind](path)))
    before = signal.signal(signal.SIGALRM, late)
    try:
        for target in targets_with_seeds:
            (folder := tmp_path / target.name).mkdir()
            signal.alarm(10)
            try:
                target.run(b"", folder)
            except target.refusals:
                pass
            except OSError as error:
                assert error.strerror == "it is not a regular file", target.name  # noqa: PT017
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert len(written) >= 15


def test_house_notices_a_fault(house):
    """The readers of this test are wrong on purpose: the house itself works."""
    for name, sign in (("fault", "ZeroDivisionError"), ("memory", "MemoryError"), ("circle", "TooManySteps")):
        assert sign in house.fault(f"wrong-{name}", b"x")


@pytest.mark.soak
def test_an_hour_with_new_inputs():
    minutes = float(os.environ.get("IMGKIT_FUZZ_MINUTES", "60"))
    assert hunt.hunt(targets.TARGETS, minutes, time.time_ns() & 0xFFFFFFFF) == 0
