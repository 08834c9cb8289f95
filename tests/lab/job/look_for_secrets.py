"""A user program that looks for its own secrets where other users of the node can read: prints what it found.

It knows the value of TOKEN, and the run's secret where the job script has made a file. As root, it looks as a
second user. Arguments of processes are open to all; of variables and files it sees those that it may read.
"""

import base64
import os
import re
from pathlib import Path

OTHER_USER = 12345


def openly(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def main():
    files = (
        sorted(Path(os.environ["IMGKIT_RUN_DIR"]).glob(".imgkit-secret.*"))
        if "IMGKIT_RUN_DIR" in os.environ
        else []
    )
    needles = {"token": os.environ["TOKEN"].encode()}
    for path in files:
        value = path.read_bytes()
        forms = {"raw": value, "hex": value.hex().encode(), "base64": base64.b64encode(value)}
        needles |= {f"{path.name} {form}": text for form, text in forms.items()}
    modes = [f"{path.stat().st_mode & 0o7777:04o} {path.stat().st_size}" for path in files]
    readable = {path for path in Path("/proc").glob("[0-9]*/environ") if needles["token"] in openly(path)}
    secret_in_mine = [
        path
        for path in readable
        for name, text in needles.items()
        if name != "token" and text in openly(path)
    ]
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(OTHER_USER)
        os.setuid(OTHER_USER)
    arguments = [openly(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    texts_by_kind = {
        "arguments": arguments,
        "files": [openly(path) for path in files] if os.getuid() == OTHER_USER else [],
    }
    texts_by_kind["folder"] = [
        openly(path) for path in Path().glob("*") if path.is_file() and path.stat().st_size < 1 << 20
    ]
    exposed = [
        f"{name} in {kind}"
        for kind, texts in texts_by_kind.items()
        for name, text in needles.items()
        if any(text in content for content in texts)
    ]
    exposed += [
        f"64 digits in {text!r}"
        for text in arguments
        if re.search(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", text)
    ]
    launchers = sum(b"imgkit_entrypoints" in text for text in arguments)
    print(
        "looked:",
        modes,
        "found",
        exposed + list(map(str, secret_in_mine)),
        "with",
        bool(readable),
        launchers > 0,
        flush=True,
    )


main()
