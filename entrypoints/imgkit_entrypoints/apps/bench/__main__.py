"""``python -m imgkit_entrypoints.apps.bench``: one worker of dist-bench."""

from __future__ import annotations

import sys


def main() -> None:
    """Run as one worker."""
    from imgkit_entrypoints.apps.bench import sweep

    sys.exit(sweep.main())


if __name__ == "__main__":
    from imgkit_entrypoints.apps.ranks import run_worker

    run_worker(main)
