"""Commands of a cluster import nothing compiled: one environment serves nodes of several architectures."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

BODY = """
import sys
from pathlib import Path
from imgkit_builder.__main__ import main
code = 0
try:
    main()
except SystemExit as end:
    code = end.code
own = Path(sys.executable).parents[1]
compiled = [
    name
    for name, module in sys.modules.items()
    if (file := getattr(module, "__file__", None) or "").endswith(".so")
    and (own in Path(file).parents or "-packages" in file)
]
print(f"exit code {code}, compiled: {compiled}")
"""


def archive(folder: Path) -> Path:
    """Write a small archive as ``docker save`` writes it, with the digest that `imgkit verify` compares."""

    def tar(members: dict[str, bytes]) -> bytes:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as file:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
        return stream.getvalue()

    layer = tar({"etc/hello": b"x"})
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]}
    config = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs}
    manifest = [{"Config": "c.json", "RepoTags": ["small:1"], "Layers": ["l.tar"]}]
    data = tar(
        {
            "manifest.json": json.dumps(manifest).encode(),
            "c.json": json.dumps(config).encode(),
            "l.tar": layer,
        }
    )
    path = folder / "small.tar"
    path.write_bytes(data)
    (folder / "small.tar.sha256").write_text(f"{hashlib.sha256(data).hexdigest()}  small.tar\n")
    return path


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("sif", "small.tar", "--no-test", "-o", "small.sif"),
        ("sif", "-", "--no-test", "-o", "small.sif"),
        ("verify", "small.tar"),
        ("apply", "small.imgdelta", "small.tar", "-o", "new.sif"),
    ],
    ids=" ".join,
)
def test_command_imports_nothing_compiled(tmp_path: Path, words: tuple[str, ...]) -> None:
    path = archive(tmp_path)
    (tmp_path / "small.imgdelta").write_bytes(b"no delta")
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    argv = [sys.executable, "-c", BODY, *words]
    with path.open("rb") as stream:
        done = subprocess.run(
            argv, cwd=tmp_path, env=env, stdin=stream, capture_output=True, text=True, timeout=120
        )
    assert done.stdout.splitlines()[-1].endswith("compiled: []"), done.stdout + done.stderr
    assert words[0] == "--help" or "imgkit: " in done.stderr  # it got as far as the file


def test_reading_a_recipe_is_what_needs_compiled_code(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", BODY, "check", "mn5"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "pydantic_core" in done.stdout.splitlines()[-1]
