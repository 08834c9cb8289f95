"""Hunt with new random inputs for minutes or hours, and keep what a reader fails on.

python tests/fuzz/hunt.py --minutes 10 [--seed N] [TARGET...]
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import mutate
import targets
from house import CORPUS, House

MAX_CHANGES = 6
MAX_KEPT_BYTES = 4096


def random_changes(dice: random.Random) -> list[mutate.Change]:
    """A few changes at random."""
    count = 1 + int(dice.random() ** 2 * MAX_CHANGES)
    return [
        mutate.Change(dice.getrandbits(16), dice.getrandbits(32), dice.getrandbits(16)) for _ in range(count)
    ]


def applied(target: targets.Target, seed: bytes, changes: Sequence[mutate.Change]) -> bytes:
    """`seed` with all changes."""
    for change in changes:
        seed = target.change(seed, change)[: 1 << 20]
    return seed


def smaller(
    changes: list[mutate.Change], fails: Callable[[list[mutate.Change]], bool]
) -> list[mutate.Change]:
    """Leave out the changes that the fault does not need."""
    for index in reversed(range(len(changes))):
        fewer = changes[:index] + changes[index + 1 :]
        if fewer and fails(fewer):
            changes = fewer
    return changes


def keep(target: str, data: bytes) -> Path:
    """Write a failing input to the corpus; a large one is for you to make smaller."""
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    path = (
        folder / f"{hashlib.sha256(data).hexdigest()[:12]}{'' if len(data) <= MAX_KEPT_BYTES else '.large'}"
    )
    path.write_bytes(data)
    return path


def _fails(house: House, target: targets.Target, first: bytes, changes: list[mutate.Change]) -> bool:
    return bool(house.fault(target.name, applied(target, first, changes)))


def hunt(
    chosen: Sequence[targets.Target], minutes: float, seed: int, say: Callable[[str], None] = print
) -> int:
    """Try inputs round after round; returns how many different faults there were."""
    dice, house, end = random.Random(seed), House(), time.monotonic() + minutes * 60
    seeds = {target.name: target.seeds() for target in chosen}
    seen: set[tuple[str, str]] = set()
    tried = 0
    try:
        while time.monotonic() < end:
            for target in chosen:
                until = min(end, time.monotonic() + 2)
                while seeds[target.name] and time.monotonic() < until:
                    first, changes = dice.choice(seeds[target.name]), random_changes(dice)
                    tried += 1
                    fault = house.fault(target.name, applied(target, first, changes))
                    if not fault:
                        continue
                    sign = (target.name, re.sub(r'"says": .*"where"', "", fault))
                    if sign in seen:
                        continue
                    seen.add(sign)
                    least = smaller(changes, functools.partial(_fails, house, target, first))
                    path = keep(target.name, applied(target, first, least))
                    say(
                        f"{target.name}: {fault}\n  replay: pytest tests/fuzz -k '{target.name} and kept'   # {path}"
                    )
    finally:
        house.close()
    say(f"seed {seed}: {tried} inputs, {len(seen)} faults")
    return len(seen)


def main() -> int:
    """Hunt as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=time.time_ns() & 0xFFFFFFFF)
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    options = parser.parse_args()
    chosen = [target for target in targets.TARGETS if not options.targets or target.name in options.targets]
    return 1 if hunt(chosen, options.minutes, options.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
