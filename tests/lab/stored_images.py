"""Small image archives, their conversion by any user, and the files in a .sif."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import layer_reference
import pytest
from file_tree import write_program
from labkit import output
from tars import TarEntry, tar_entry, tar_of_entries, tar_of_files
from tiny_image import BUSYBOX

from imgkit_builder.base.progress import Silent
from imgkit_builder.inventory.collector import SPDX_PATH
from imgkit_builder.oci.config import parse_config
from imgkit_builder.sif import convert, image
from imgkit_builder.sif.conversion import Options
from imgkit_builder.sif.entries import Archive

Way = Literal["new", "old", "runtime"]


def archive(
    layers: Sequence[Sequence[TarEntry]],
    *,
    name: str = "made:latest",
    raw: Sequence[bytes] = (),
    config: Mapping[str, Any] | None = None,
    packed: Callable[[bytes], bytes] = bytes,
) -> bytes:
    """Return a docker archive of an image with `layers` and, above them, those that are `raw` tars.

    `packed` compresses each layer.
    """
    tars = [*map(tar_of_entries, layers), *raw]
    digests = [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in tars]
    configuration = {
        "architecture": "amd64",
        "os": "linux",
        "config": dict(config or {}),
        "rootfs": {"type": "layers", "diff_ids": digests},
    }
    text = json.dumps(configuration).encode()
    config_name = f"{hashlib.sha256(text).hexdigest()}.json"
    files = {f"{number}/layer.tar": packed(data) for number, data in enumerate(tars)}
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [*files]}]
    files |= {config_name: text, "manifest.json": json.dumps(manifest).encode()}
    return tar_of_files(files)


def busybox_layer(*programs: str) -> list[TarEntry]:
    """Return a layer with busybox, links to it that have the names of `programs`, and its user root."""
    if not BUSYBOX.exists():
        pytest.skip("busybox is missing: apt-get install busybox-static")
    links = [tar_entry(f"bin/{name}", kind=tarfile.SYMTYPE, linkname="busybox") for name in programs]
    passwd = tar_entry("etc/passwd", b"root:x:0:0:root:/:/bin/sh\n")
    return [tar_entry("bin/busybox", BUSYBOX.read_bytes()), passwd, *links]


def only(way: Way, folder: Path) -> dict[str, str]:
    """Return variables under which imgkit finds no better way to a squashfs than `way`.

    `old` stands in for mksquashfs 4.4: the one of this machine, whose help does not list ``-tar``.
    """
    programs, real = folder / f"only-{way}", shutil.which("mksquashfs")
    help_filter = f'{real} "$1" 2>&1 | grep -v -e "^ *-tar";' if way == "old" else ""
    # The runtime that builds runs it, too.
    script = f'case "$1" in -help*) {help_filter} exit 1;; esac\nexec {real} "$@"'
    write_program(programs / "mksquashfs", script)
    programs.chmod(0o755)
    return {"PATH": f"{programs}:{os.environ['PATH']}"}


@functools.cache
def _warm() -> None:
    """Import all that a conversion imports: another user may not read this Python's folder."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "x.tar").write_bytes(archive([[]]))
        convert.convert(
            Archive(path=Path(name) / "x.tar"), Path(name) / "x.sif", Options(test=False), Silent()
        )


def convert_as(
    uid: int, source: Path, target: Path, *, env: Mapping[str, str] | None = None, **options: Any
) -> str:
    """Convert as another user, without running the result; returns an empty text or the error."""
    _warm()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if uid:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            os.environ.update(env or {})
            os.environ["XDG_STATE_HOME"] = str(target.parent / "state")
            convert.convert(Archive(path=source), target, Options(test=False, **options), Silent())
            os._exit(0)
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode()[:4000])
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        error_text = stream.read().decode()
    os.waitpid(child, 0)
    output("rm", "-rf", target.parent / "state")
    return error_text


def files_of(sif: Path, folder: Path, *, image_files: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Describe the files in `sif` that its image has; needs root.

    Files that imgkit adds are left out, except for `image_files`, which the image itself has.
    """
    root = image.read(sif).root
    assert root is not None
    output("unsquashfs", "-quiet", "-no-progress", "-o", root.offset, "-d", folder, sif)
    files = layer_reference.described(folder)
    configuration = {"architecture": "amd64", "rootfs": {"diff_ids": [f"sha256:{'0' * 64}"]}}
    config = parse_config(json.dumps(configuration).encode(), where="")
    replacing, if_missing = convert.FORMATS["sif"].added_files(config, lambda _: None)
    added = {entry.name for entry in (*replacing, *if_missing)}
    added = (added | {"opt", "opt/imgkit", SPDX_PATH}) - set(image_files)
    return {path: description for path, description in files.items() if path not in added}
