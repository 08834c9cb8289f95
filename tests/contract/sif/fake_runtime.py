"""A fake singularity/apptainer: a program; conftest.py copies it under the name of a runtime.

It reads ``settings.json`` beside itself, writes what it was called with to ``calls.jsonl``, and its ``build``
reads a real OCI folder and writes a small file in the real .sif format: what is around it is not faked.
"""

import json
import os
import signal
import struct
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SETTINGS = json.loads((HERE / "settings.json").read_text())
DATA_AT = 32768
HEADER = struct.Struct("<32s10s3s3s16s8q")
DESCRIPTOR = struct.Struct("<iBIII7q128s384s")
RECORDED_VARIABLES = (
    "TMPDIR",
    "APPTAINER_TMPDIR",
    "SINGULARITY_TMPDIR",
    "APPTAINER_CACHEDIR",
    "SINGULARITY_CACHEDIR",
)
ARCHS = {"386": 1, "amd64": 2, "arm": 3, "arm64": 4}


def main() -> int:
    argv = sys.argv[1:]
    call = {"name": Path(sys.argv[0]).name, "argv": argv, "pid": os.getpid()}
    call["env"] = {name: os.environ.get(name) for name in RECORDED_VARIABLES}
    with (HERE / "calls.jsonl").open("a") as stream:
        stream.write(json.dumps(call) + "\n")
    if argv == ["--version"]:
        print(SETTINGS["version"])
        return 0
    if argv == ["build", "--help"]:
        print("Options:\n" + "\n".join(f"      {flag} string   help" for flag in SETTINGS["build_flags"]))
        return 0
    verb = {"build": build, "inspect": inspect, "exec": execute}[argv[0]]
    return verb(argv[1:])


def build(argv: list[str]) -> int:
    allowed = {"--force", "--sandbox", *SETTINGS["build_flags"]}
    for argument in argv:
        if argument.startswith("--") and argument not in allowed:
            print(f'Error for command "build": unknown flag: {argument}', file=sys.stderr)
            return 1
    target, source = Path(argv[-2]), argv[-1]
    behaviour = SETTINGS["behaviour"]
    print("INFO:    Starting build...", file=sys.stderr)
    (Path(os.environ["APPTAINER_TMPDIR"]) / "build-temp-1").mkdir(exist_ok=True)
    if behaviour == "noisy":
        for number in range(16384):
            print(
                f"warn rootless: {number:07d} a file name that is long enough to be a line", file=sys.stderr
            )
    if behaviour == "stray byte":
        sys.stderr.buffer.write(b"caf\xe9\n")
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "killed child":
        print("FATAL:   While performing build: mksquashfs: signal: killed", file=sys.stderr)
        return 255
    if behaviour in ("fail", "fail late"):
        if behaviour == "fail late":
            target.write_bytes(b"half a file")
        print("FATAL:   While performing build: while extracting: no space left on device", file=sys.stderr)
        return 255
    if behaviour == "hang":
        target.write_bytes(b"half a file")
        child = os.fork()
        if child == 0:  # stands for mksquashfs
            (HERE / "grandchild").write_text(str(os.getpid()))
            time.sleep(60)
            os._exit(0)
        time.sleep(60)
        return 0
    if behaviour == "no file":
        return 0
    config, layers = read_oci(source.removeprefix("oci:"))
    size = max(layers // 3, 65536)
    arch = config["architecture"]
    if behaviour == "empty":
        print("INFO:    Architecture not recognized, use native", file=sys.stderr)
        size = 40960
    if behaviour == "tiny":
        size = 40960 - DATA_AT
    if behaviour == "wrong arch":
        arch = "arm64" if arch == "amd64" else "amd64"
    write_sif(target, arch=arch, root_bytes=size)
    (HERE / "labels.json").write_text(json.dumps(config.get("config", {}).get("Labels") or {}))
    print(f"INFO:    Build complete: {target}", file=sys.stderr)
    return 0


def read_oci(folder: str):
    root = Path(folder)
    index = json.loads((root / "index.json").read_text())

    def blob(descriptor) -> Path:
        path = root / "blobs/sha256" / descriptor["digest"].removeprefix("sha256:")
        assert path.stat().st_size == descriptor["size"], path
        return path

    (entry,) = index["manifests"]
    manifest = json.loads(blob(entry).read_text())
    config = json.loads(blob(manifest["config"]).read_text())
    return config, sum(blob(layer).stat().st_size for layer in manifest["layers"])


def write_sif(path: Path, *, arch: str, root_bytes: int) -> None:
    code = b"%02d\0" % ARCHS[arch]
    root = struct.pack("<4sIIIIHHHHHHQQ", b"hsqs", 1, 0, 1 << 20, 0, 6, 20, 0, 1, 4, 0, 0, root_bytes)
    # Times differ, as real ones do: equal inputs give different files.
    root += struct.pack("<Q", time.time_ns())
    descriptor = DESCRIPTOR.pack(
        0x4004,
        1,
        1,
        0xF0000001,
        0,
        DATA_AT,
        root_bytes,
        root_bytes,
        0,
        0,
        0,
        0,
        b"root",
        struct.pack("<ii3s", 1, 2, code),
    )
    header = HEADER.pack(
        b"#!/usr/bin/env run-singularity\n",
        b"SIF_MAGIC\0",
        b"01\0",
        code,
        bytes(16),
        0,
        0,
        3,
        4,
        4096,
        4 * DESCRIPTOR.size,
        DATA_AT,
        root_bytes,
    )
    with path.open("wb") as stream:
        stream.write(header)
        stream.seek(4096)
        stream.write(descriptor + bytes(3 * DESCRIPTOR.size))
        stream.seek(DATA_AT)
        stream.write(root)
        stream.truncate(DATA_AT + root_bytes)


def inspect(argv: list[str]) -> int:
    labels = {} if SETTINGS["behaviour"] == "no labels" else json.loads((HERE / "labels.json").read_text())
    print("WARNING: a warning comes first, on the same terminal", file=sys.stderr)
    print(json.dumps({"data": {"attributes": {"labels": labels}}, "type": "container"}))
    return 0


def execute(argv: list[str]) -> int:
    if SETTINGS["behaviour"] == "no exec":
        print("FATAL:   container creation failed: mount: unable to create user namespace", file=sys.stderr)
        return 255
    if argv[-2:-1] == ["cat"]:
        print(SETTINGS["manifest"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
