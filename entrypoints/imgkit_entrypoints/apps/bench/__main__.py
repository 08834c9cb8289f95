"""``python -m imgkit_entrypoints.apps.bench``: one worker of dist-bench."""

from __future__ import annotations

import sys

from imgkit_entrypoints.apps.bench.sighup import HangupThread


def main(hangup: HangupThread | None = None) -> None:
    """Run as one worker."""
    from imgkit_entrypoints.apps.bench import sweep

    sys.exit(sweep.main(hangup or HangupThread()))


if __name__ == "__main__":
    first = HangupThread()  # before torch, whose import starts threads
    from imgkit_entrypoints.apps.ranks import run_worker

    run_worker(lambda: main(first))
