"""``python -m imgkit_entrypoints.apps.bench``: one worker."""

from __future__ import annotations

import sys

from imgkit_entrypoints.apps.bench.ending import Ending


def main(ending: Ending | None = None) -> None:
    """Run as one worker."""
    from imgkit_entrypoints.apps.bench import sweep

    sys.exit(sweep.main(ending or Ending()))


if __name__ == "__main__":
    first = Ending()  # the import of torch starts threads
    from imgkit_entrypoints.apps.ranks import run_worker

    run_worker(lambda: main(first))
