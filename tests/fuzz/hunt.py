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


def changes(dice: random.Random) -> list[mutate.Change]:
    """A few changes at random."""
    count = 1 + int(dice.random() ** 2 * MAX_CHANGES)
    return [
        mutate.Change(dice.getrandbits(16), dice.getrandbits(32), dice.getrandbits(16)) for _ in range(count)
    ]


def applied(target: targets.Target, seed: bytes, wanted: Sequence[mutate.Change]) -> bytes:
    """`seed` with all changes."""
    for change in wanted:
        seed = target.change(seed, change)[: 1 << 20]
    return seed


def smaller(wanted: list[mutate.Change], fails: Callable[[list[mutate.Change]], bool]) -> list[mutate.Change]:
    """Leave out the changes that the fault does not need."""
    for place in reversed(range(len(wanted))):
        fewer = wanted[:place] + wanted[place + 1 :]
        if fewer and fails(fewer):
            wanted = fewer
    return wanted


def keep(target: str, data: bytes) -> Path:
    """Write a failing input to the corpus; a large one is for you to make smaller."""
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    path = (
        folder / f"{hashlib.sha256(data).hexdigest()[:12]}{'' if len(data) <= MAX_KEPT_BYTES else '.large'}"
    )
    path.write_bytes(data)
    return path


def _fails(house: House, target: targets.Target, first: bytes, wanted: list[mutate.Change]) -> bool:
    return bool(house.fault(target.name, applied(target, first, wanted)))


def hunt(
    chosen: Sequence[targets.Target], minutes: float, seed: int, say: Callable[[str], None] = print
) -> int:
    """Try inputs round after round; returns how many different faults there were."""
    dice, house, end = random.Random(seed), House(), time.monotonic() + minutes * 60
    seeds = {target.name: target.seeds() for target in chosen}
    known: set[tuple[str, str]] = set()
    tried = 0
    try:
        while time.monotonic() < end:
            for target in chosen:
                until = min(end, time.monotonic() + 2)
                while seeds[target.name] and time.monotonic() < until:
                    first, wanted = dice.choice(seeds[target.name]), changes(dice)
                    tried += 1
                    fault = house.fault(target.name, applied(target, first, wanted))
                    if not fault:
                        continue
                    sign = (target.name, re.sub(r'"says": .*"where"', "", fault))
                    if sign in known:
                        continue
                    known.add(sign)
                    least = smaller(wanted, functools.partial(_fails, house, target, first))
                    path = keep(target.name, applied(target, first, least))
                    say(
                        f"{target.name}: {fault}\n  replay: pytest tests/fuzz -k '{target.name} and kept'   # {path}"
                    )
    finally:
        house.close()
    say(f"seed {seed}: {tried} inputs, {len(known)} faults")
    return len(known)


def main() -> int:
    """Hunt as the command line says."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--minutes", type=float, default=10)
    words.add_argument("--seed", type=int, default=time.time_ns() & 0xFFFFFFFF)
    words.add_argument("targets", nargs="*", metavar="TARGET")
    given = words.parse_args()
    chosen = [one for one in targets.TARGETS if not given.targets or one.name in given.targets]
    return 1 if hunt(chosen, given.minutes, given.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
