"""Texts of an archive, a .sif, a recipe, a lock, a record or a program reach no terminal as they are."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small_sif
from file_tree import write_program
from sample_image import SampleImage
from tars import tar_of_files

from imgkit_builder.archive import sidecar
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.config import parse_config
from imgkit_builder.oci.manifest import BaseImage, Manifest
from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.model import Lock, LockedBase, LockedPlatform, LockRequest
from imgkit_entrypoints.system import SystemFacts

FORGED = "ok    signature  good"
EVIL = f"EVIL\n{FORGED}\r\x1b[2J\x9b31m\u202egpj.\u2066\u200b\u061c\x07\x7f\x85\u2028 EVIL"
Call = Callable[..., tuple[object, str, str]]


@pytest.fixture
def check(call: Call) -> Callable[..., None]:
    """``check("verify", "x.tar")``: its output shows `EVIL`, on one line and without a control character."""

    def run(*args: str, shows: bool = True, code: int | None = None) -> None:
        exit_code, out, err = call(*args)
        text = out + err
        assert text.replace("\n", "").isprintable(), text.encode("unicode_escape")
        assert [line for line in text.split("\n") if line.startswith(FORGED)] == [], text
        assert ("EVIL" in text) == shows, (args, text)
        assert code is None or exit_code == code, text

    return run


@pytest.fixture
def evil(sample: SampleImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SampleImage:
    """An image with `EVIL` in every text, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    sample.tags = [f"made:{EVIL}"]
    sample.labels = {"imgkit.recipe": EVIL, EVIL: EVIL, "org.opencontainers.image.created": EVIL}
    manifest = Manifest(
        imgkit=EVIL,
        recipe=EVIL,
        recipe_sha256=EVIL,
        base=BaseImage(name=EVIL, id=EVIL, digest=EVIL),
        platform="linux/amd64",
        wheel_sha256=EVIL,
        revision=EVIL,
    )
    status = "Package: a\x1b[2J\x9bEVIL\nStatus: install ok installed\nVersion: 1\u202e\nArchitecture: x\n"
    sample.layers = [
        tar_of_files({f"etc/{EVIL}": b"x", "var/lib/dpkg/status": status.encode()}),
        tar_of_files({"opt/imgkit/manifest.json": manifests.to_json(manifest).encode()}, {"etc/link": EVIL}),
    ]
    return sample


@pytest.mark.programs("mksquashfs")
def test_archive_with_hostile_texts(evil, check):
    layouts = {
        "modern.tar": evil.modern_members(),
        "old.tar": evil.legacy_members(),
        "packed.tar": evil.modern_members(gzip.compress),
    }
    for name, members in layouts.items():
        Path(name).write_bytes(tar_of_files(members))
        check("verify", name)
        check("verify", name, "--json")
        check("sif", name, "--dry-run", shows=False)
    check("sbom", "modern.tar")
    evil.layers = [evil.layers[1]]
    Path("other.tar").write_bytes(tar_of_files(evil.modern_members()))
    Path(f"{EVIL}.tar").write_bytes(b"no archive")
    check("verify", f"{EVIL}.tar")
    check("sif", f"{EVIL}.tar")


def test_record_beside_an_archive_with_hostile_texts(evil, check):
    data = tar_of_files(evil.modern_members())
    Path("x.tar").write_bytes(data)
    described = sidecar.Sidecar(
        image=sidecar.SavedImage(
            id=evil.image_id, tag=EVIL, platform=EVIL, diff_ids=(EVIL,), labels={EVIL: EVIL}
        ),
        archive=sidecar.SavedArchive(
            name=EVIL, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), compress=EVIL
        ),
        system=SystemFacts(title=EVIL),
        manifest=None,
    )
    Path("x.tar.manifest.json").write_text(sidecar.to_json(described))
    check("verify", "x.tar")
    Path("x.tar.sha256").write_text(f"{'0' * 64}  {EVIL}\n")
    check("verify", "x.tar")


class EvilImage:
    """An image of an engine, exported."""

    def __init__(self, evil: SampleImage) -> None:
        self.name, self.size_bytes = f"new:{EVIL}", 1
        self.config = parse_config(evil.config, where="x")
        self._exported = tar_of_files({f"etc/{EVIL}": b"y"})

    @contextlib.contextmanager
    def export(self) -> Iterator[Iterator[bytes]]:
        """Yield a tar."""
        yield iter([self._exported])


@pytest.mark.programs("mksquashfs")
def test_sif_with_hostile_texts(evil, check):
    Path("x.tar").write_bytes(tar_of_files(evil.modern_members()))
    check("sif", "x.tar", "--no-test", "--compression", "gzip", code=0, shows=False)
    check("show", "x.sif", code=0)
    check("show", "x.sif", "--json", code=0)
    check("verify", "x.sif")
    check("sbom", "x.sif", code=0)


def test_recipe_and_lock_with_hostile_texts(tmp_path, monkeypatch, check):
    monkeypatch.chdir(tmp_path)
    escaped = json.dumps(EVIL)  # YAML reads it
    recipes = {
        "name.yaml": f'image: {{base: "a:1", {escaped}: 1}}\n',
        "value.yaml": f"image: {{base: {escaped}}}\n",
        "env.yaml": f"description: {escaped}\nimage: {{base: a:1, env: {{A: {escaped}}}}}\n",
        "raw.yaml": "image:\n  base: 'EVIL \x1b[2J \x9b'\n",
        "parent.yaml": f"extends: {escaped}\n",
        f"{EVIL}.yaml": "image: {base: a:1}\n",
    }
    for name, text in recipes.items():
        Path(name).write_text(text)
        for verb in ("check", "show", "render", "build"):
            check(verb, f"./{name}", code=2)
    Path("child.yaml").write_text(f"extends: {json.dumps(f'./{EVIL}.yaml')}\nimage: {{apt: [jq]}}\n")
    check("render", "child.yaml", code=0)
    check("show", "child.yaml")
    Path("mine.yaml").write_text("image: {base: a:1}\n")
    base = LockedBase(name=EVIL, digest=EVIL)
    part = LockedPlatform(
        platform="linux/amd64", source_date_epoch=1, request=LockRequest(base=EVIL, apt=(EVIL,)), base=base
    )
    Path("mine.lock").write_text(lock_file.render_lock(Lock(recipe=EVIL, imgkit=EVIL, platforms=(part,))))
    check("render", "mine.yaml", code=2, shows=False)
    check("lock", "mine.yaml", "--check", code=1, shows=False)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that comes first, and a state folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "said").write_text(EVIL)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "bin"


def record(programs: Path, **values: Any) -> None:
    """Write the record of job 7."""
    state = programs.parent / "state/imgkit/jobs"
    state.mkdir(parents=True, exist_ok=True)
    job = {"schema": 1, "id": "7", "system": "slurm", "name": "a", "recipe": "a", "directory": "/"}
    job |= {"queue": "", "cluster": "", "answer": None, "remote": "", "submitted": "", "command": []}
    job |= {"image_id": "", "state": "running", "fetched": "", "code": None, "array": False, "shell_line": ""}
    (state / "7.json").write_text(json.dumps(job | values))


def test_job_and_runs_with_hostile_texts(programs, check):
    small_sif.write(programs.parent / "x.sif")
    slurm = ("mn5", "-A", "a", "--qos", "acc_debug", "--time", "1h", "--image", "x.sif", "--", "dist-env")
    write_program(programs / "sbatch", "cat said >&2; exit 1")
    check("run", "--detach", *slurm, code=4)
    write_program(programs / "sbatch", "cat said")
    check("run", "--detach", *slurm, code=4)
    record(programs, recipe=EVIL, directory=f"/{EVIL}", command=[EVIL], image_id=EVIL)
    check("runs", code=0)
    check("runs", "--json", code=0)
    write_program(programs / "squeue", "cat said >&2; exit 1")
    check("fetch", "7")
    record(programs, command=[EVIL], shell_line=EVIL)
    check("status", code=4)
    check("status", "7", code=4)
    check("shell", "--job", "7", "--dry-run", code=0)
    write_program(programs / "squeue", "")
    for name in ("sacct", "scontrol", "cat"):
        write_program(programs / name, f"exec /bin/cat {programs.parent}/said")
    check("status", "7", code=0, shows=False)
    check("status", "8" + EVIL, code=2)


def test_remote_with_hostile_texts(programs, check):
    check("remote", "add", "far", "me@far", "--idle-timeout", "0", code=0, shows=False)
    for code in (1, 255):
        write_program(programs / "ssh", f"cat said >&2; exit {code}")
        check("doctor", "--on", "far")
    write_program(programs / "ssh", "cat said; cat > /dev/null")
    check("doctor", "--on", "far")
    # A stand-in for a login node: what ssh would run there runs here, and the scheduler's programs lie.
    write_program(programs / "ssh", 'for last; do :; done; cd "$HOME" && exec sh -c "$last"')
    for name in ("sbatch", "sinfo", "sacctmgr", "singularity", "lfs", "quota"):
        write_program(programs / name, f"cat {programs.parent}/said")
    check("doctor", "--on", "far")


def test_doctor_with_hostile_texts(programs, check):
    for name in (
        "docker",
        "podman",
        "singularity",
        "apptainer",
        "mksquashfs",
        "zstd",
    ):
        write_program(programs / name, "cat said")
    check("doctor")
    check("doctor", "--json")


def test_program_that_status_runs_cannot_steer_the_terminal(programs):
    record(programs)
    write_program(programs / "squeue", "printf '\\033[32mgreen\\033[0m\\n'; cat said; cat said >&2")
    reader, writer = os.openpty()
    argv = [sys.executable, "-m", "imgkit_builder", "status", "7"]
    with subprocess.Popen(argv, stdout=writer, stderr=writer, stdin=subprocess.DEVNULL) as started:
        os.close(writer)
        seen = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(reader, 1 << 16):
                seen += part
    os.close(reader)
    text = seen.decode().replace("\r\n", "\n")
    assert started.returncode == 0
    assert text.replace("\n", "").isprintable()
    assert "\ngreen\n" in text
    assert text.count("\\x9b31m\\u202egpj.\\u2066") == 2
