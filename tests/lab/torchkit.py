"""Run scripts on torch in the stand-in image, in a process that has imported it already (torch_server.py).

The import takes three seconds of a processor, which is more than most of these scripts need.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import secrets
import select
import subprocess
from pathlib import Path

from labkit import PACKAGE, PLACE, QUIET, ROOT, Done, afterwards

# Each test process has a container for each image, and ends it.
_servers: dict[str, subprocess.Popen[str]] = {}
_stack = contextlib.ExitStack()
atexit.register(_stack.close)


def run_script(image: str, folder: Path, module: str, script: str, *, timeout_s: float = 600) -> Done:
    """Run a Python script in `folder`, a test's temporary one, with the names of run_many or train_many."""
    if image not in _servers:
        # All temporary folders of this process lie beside each other.
        _servers[image] = _start_server(image, folder.parent)
    server = _servers[image]
    files = {name: folder.parent / f"torch-{name}" for name in ("script", "stdout", "stderr")}
    for name, file in files.items():
        file.write_text(script if name == "script" else "")
    request = {"module": module, "folder": str(folder), **{name: str(file) for name, file in files.items()}}
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    is_answered, _, _ = select.select([server.stdout], [], [], timeout_s)
    if not is_answered:
        _servers.pop(image).kill()
        raise subprocess.TimeoutExpired(
            module, timeout_s, files["stdout"].read_text(), files["stderr"].read_text()
        )
    code = int(server.stdout.readline())
    return Done((module,), code, files["stdout"].read_text(), files["stderr"].read_text())


def _start_server(image: str, parent: Path) -> subprocess.Popen[str]:
    name = f"imgkit-torch-{secrets.token_hex(4)}"
    _stack.enter_context(afterwards('docker rm --force "$1" >/dev/null 2>&1', name))
    mounts = (
        f"{parent}:{parent}",
        f"{PACKAGE}:{PLACE}:ro",
        f"{ROOT}/tests/lab:/lab:ro",
        f"{ROOT}/examples:/examples:ro",
    )
    volumes = [option for mount in mounts for option in ("--volume", mount)]
    # Folders that are nearly full, for tests of what does not fit.
    disks = ("--tmpfs", "/tiny:size=400k", "--tmpfs", "/full:size=4k")
    options = ("--rm", "--interactive", "--name", name, "--network", "none", "--entrypoint", "python3")
    path = ("--env", "PYTHONPATH=/lab:/lab/run:/lab/apps")
    return subprocess.Popen(
        ["docker", "run", *options, *QUIET, *path, *volumes, *disks, image, "/lab/torch_server.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
