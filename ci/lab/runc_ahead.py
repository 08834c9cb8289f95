"""runc whose containers see a clock that is ahead: the runtime of `engine start --ahead DAYS`.

    runc_ahead.py DAYS RUNC-ARGUMENTS...

libfaketime is mounted below /dev, which is a tmpfs, so that nothing of it stays in a layer of a build.
Standard library only: the engine starts it with the machine's Python.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIBRARY_IN_CONTAINER = "/dev/faketime.so"


def set_clock_ahead(config: dict[str, Any], library: str, days: str) -> None:
    """Change the config.json of an OCI bundle so that the container's programs load `library`."""
    mount = {
        "type": "bind",
        "source": library,
        "destination": LIBRARY_IN_CONTAINER,
        "options": ["bind", "ro"],
    }
    config["mounts"].append(mount)
    config["process"]["env"] += [
        f"LD_PRELOAD={LIBRARY_IN_CONTAINER}",
        f"FAKETIME=+{days}d",
        "NO_FAKE_STAT=1",  # file times stay as they are
    ]


def main(argv: Sequence[str]) -> None:
    """Change the configuration of a container that runc is to create, and become runc."""
    days, *args = argv
    if "--bundle" in args:
        file = Path(args[args.index("--bundle") + 1], "config.json")
        (library,) = Path("/usr/lib").glob("*/faketime/libfaketime.so.1")
        config = json.loads(file.read_text())
        set_clock_ahead(config, str(library), days)
        file.write_text(json.dumps(config))
    os.execvp("runc", ["runc", *args])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
