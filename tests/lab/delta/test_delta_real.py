"""Deltas with a real engine and a real runtime: what base and delta show is what a full conversion shows.

Random edits (delta_edits.py), forty trees in each image, are looked at from inside (delta_tree.py) on the
three ways in which a runtime mounts overlays. A runtime passes over a delta in silence in some cases: there
imgkit must refuse.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from labkit import imgkit, imgkit_json, output, public_folder, run

from imgkit_builder.delta import descriptor
from imgkit_builder.sif import file_manifest, frame, image
from imgkit_builder.sif.unsquash import Squashfs

pytestmark = [pytest.mark.docker, pytest.mark.singularity, pytest.mark.xdist_group("delta")]

HERE = Path(__file__).parent
EDITS = base64.b64encode((HERE / "delta_edits.py").read_bytes()).decode()
TREE = (HERE / "delta_tree.py").read_text(encoding="utf-8")
TREES = 40
FOLDERS = ("/t", "/.singularity.d", "/opt", "/workspace")
CONFIG = re.compile(r"^enable overlay = .*", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """Images of one base, and a folder that an ordinary user may read."""

    folder: Path
    base: str
    prefix: str

    def build(self, name: str, edits: Sequence[str], *, variable: str = "old", code: str = "old") -> str:
        """An image of a recipe whose run steps edit at random, and that copies code; returns its name."""
        source = self.folder / f"{name}-src"
        source.mkdir()
        (source / "code.py").write_text(f"print({code!r})\n")
        (source / f"only-{code}.py").write_text("")
        steps = [f"echo {EDITS} | base64 -d | python3 -I - {choice} {TREES}" for choice in edits]
        recipe = {
            "extends": "mn5",
            "image": {
                "env": {"NAME": variable, f"ONLY_{variable.upper()}": 'a "quoted" $word'},
                "run": steps,
                "copy": [{"source": source.name, "target": "/workspace/code"}],
                "labels": {"which": variable},
            },
        }
        path = self.folder / "lab.yaml"
        path.write_text(json.dumps(recipe))
        tag = f"{self.prefix}-{name}:latest"
        words = ("build", "./lab.yaml", "--base", self.base, "--tag", tag, "--no-test")
        assert (done := imgkit(*words, folder=self.folder)).returncode == 0, done.stderr
        return tag

    def sif(self, tag: str, name: str) -> Path:
        """The image as a .sif."""
        imgkit_json("sif", tag, "-o", name, folder=self.folder)
        (self.folder / name).chmod(0o644)
        return self.folder / name

    def delta(self, tag: str, over: Path, name: str) -> Path:
        """The image as a delta."""
        imgkit_json("delta", tag, "--against", over, "-o", name, folder=self.folder)
        (self.folder / name).chmod(0o644)
        return self.folder / name


@pytest.fixture(scope="module")
def lab(standin_notorch: str) -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("acts as another user")
    folder = public_folder("delta")
    found = Lab(folder=folder, base=standin_notorch, prefix=f"imgkit-test-delta-{secrets.token_hex(3)}")
    try:
        yield found
    finally:
        names = output("docker", "images", "--format", "{{.Repository}}:{{.Tag}}").split()
        ours = [name for name in names if name.startswith(found.prefix)]
        run("docker", "image", "rm", "-f", *ours)
        shutil.rmtree(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An image over another, by delta and in full."""

    tag: str
    base: Path
    full: Path
    delta: Path


@pytest.fixture(scope="module")
def replaced(lab: Lab) -> Pair:
    """Layers of the base's image are others in the new one."""
    base = lab.sif(lab.build("a", ["common 60", "a 15", "aa 6"]), "a.sif")
    tag = lab.build("b", ["common 60", "b 15", "empty 0", "bb 6"], variable="new", code="new")
    return Pair(tag=tag, base=base, full=lab.sif(tag, "b.sif"), delta=lab.delta(tag, base, "b.imgdelta"))


@pytest.fixture(scope="module")
def added(lab: Lab, replaced: Pair) -> Pair:
    """The new image has all layers of the base's: it is built on that."""
    dockerfile = (
        f"FROM {lab.prefix}-a:latest\n"
        f"RUN echo {EDITS} | base64 -d | python3 -I - c 20 {TREES}\n"
        f"RUN echo {EDITS} | base64 -d | python3 -I - cc 10 {TREES}\n"
        'CMD ["echo", "another"]\n'
    )
    tag = f"{lab.prefix}-c:latest"
    output("docker", "build", "-q", "-t", tag, "-", stdin=dockerfile)
    base = replaced.base
    return Pair(tag=tag, base=base, full=lab.sif(tag, "c.sif"), delta=lab.delta(tag, base, "c.imgdelta"))


def configured(folder: Path, overlay: str) -> Path:
    """A command like singularity whose admin has set ``enable overlay`` to `overlay`."""
    found = Path(shutil.which("singularity") or "").resolve()
    config = CONFIG.sub(f"enable overlay = {overlay}", _configuration(found).read_text())
    (folder / f"{overlay}.conf").write_text(config)
    script = folder / overlay / "singularity"
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = buildcfg ] && exec echo SINGULARITY_CONF_FILE={folder}/{overlay}.conf\n'
        f'exec {found} --config {folder}/{overlay}.conf "$@"\n'
    )
    script.chmod(0o755)
    return script


def _configuration(program: Path) -> Path:
    for parent in program.parents:
        for found in (parent / "etc/apptainer/apptainer.conf", parent / "etc/singularity/singularity.conf"):
            if found.is_file():
                return found
    pytest.skip("the runtime's configuration was not found")


def tree(sif: Path, way: str, user: str, folder: Path, *, delta: Path | None = None) -> dict[str, Any]:
    """What shows in `sif`, with the delta over it."""
    command: str | Path = "singularity" if way != "fuse" else configured(folder, "driver")
    start = () if way == "root" else ("runuser", "-u", user, "--")
    over = ("--overlay", f"{delta}:ro") if delta else ()
    words = (*start, command, "exec", "--cleanenv", *over, sif, "python3", "-I", "-", *FOLDERS)
    found: dict[str, Any] = json.loads(output(*words, stdin=TREE, folder="/"))
    found.pop("/opt/imgkit/delta.json", None)
    for about in found.values():
        # A file whose content has not changed keeps the time of the base. Which names are one file is open.
        about.pop("mtime", 0)
        about.pop("links", 0)
    return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    names = one.keys() | other.keys()
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


# ci/soak runs the others.
HERE = {("replaced", "user")}


@pytest.mark.parametrize(
    ("pair", "way"),
    [
        pytest.param(*case, marks=() if case in HERE else pytest.mark.soak)
        for case in itertools.product(("replaced", "added"), ("root", "user", "fuse"))
    ],
)
def test_shows_what_a_full_conversion_shows(
    lab: Lab, pair: str, way: str, user: str, request: pytest.FixtureRequest
) -> None:
    here: Pair = request.getfixturevalue(pair)
    full = tree(here.full, way, user, lab.folder)
    assert len(full) > 1000
    assert differing(tree(here.base, way, user, lab.folder, delta=here.delta), full) == {}
    assert len(differing(tree(here.base, way, user, lab.folder), full)) > 100


def test_environment_runscript_and_labels_travel(lab: Lab, replaced: Pair, added: Pair) -> None:
    def variables(*words: str | Path) -> list[str]:
        lines = output("singularity", "exec", "--cleanenv", *words, "env").splitlines()
        return sorted(line for line in lines if "_CONTAINER=" not in line and "_NAME=" not in line)

    found = variables("--overlay", f"{replaced.delta}:ro", replaced.base)
    assert found == variables(replaced.full)
    assert "NAME=new" in found
    assert not [line for line in found if line.startswith("ONLY_OLD=")]
    words = ("singularity", "run", "--overlay", f"{added.delta}:ro", added.base)
    assert output(*words).splitlines()[-1] == "another"
    labels = ("cat", "/.singularity.d/labels.json")
    over = ("--overlay", f"{replaced.delta}:ro", replaced.base)
    assert '"which": "new"' in output("singularity", "exec", *over, *labels)


def test_delta_of_copied_code_is_small(lab: Lab, replaced: Pair) -> None:
    tag = lab.build("code", ["common 60", "a 15", "aa 6"], code="new")
    target = lab.delta(tag, replaced.base, "code.imgdelta")
    listed = {file.path: file for file in Squashfs(path=target).listed("workspace/code")}
    gone = listed["workspace/code/only-old.py"]
    assert (gone.mode[0], gone.size) == ("c", "0,0")  # a whiteout
    assert target.stat().st_size < 65536
    words = ("singularity", "exec", "--overlay", f"{target}:ro", replaced.base, "python3")
    assert output(*words, "/workspace/code/code.py") == "new\n"


def test_made_again_is_the_same_file(lab: Lab, replaced: Pair) -> None:
    again = lab.delta(replaced.tag, replaced.base, "again.imgdelta")
    assert again.read_bytes() == replaced.delta.read_bytes()


# ---- into the .sif


@pytest.fixture(scope="module")
def applied(lab: Lab, replaced: Pair) -> Path:
    """The .sif with the delta in it."""
    imgkit_json("apply", replaced.delta, replaced.base, "-o", "ab.sif", folder=lab.folder)
    (lab.folder / "ab.sif").chmod(0o644)
    return lab.folder / "ab.sif"


@pytest.mark.parametrize(
    "way", ["root", *(pytest.param(way, marks=pytest.mark.soak) for way in ("user", "fuse"))]
)
def test_delta_in_the_sif_shows_the_new_image(
    lab: Lab, replaced: Pair, applied: Path, way: str, user: str
) -> None:
    full = tree(replaced.full, way, user, lab.folder)
    assert differing(tree(applied, way, user, lab.folder), full) == {}


def test_sif_takes_one_delta(lab: Lab, replaced: Pair, added: Pair, applied: Path) -> None:
    for words in (("apply", added.delta, applied, "-o", "x.sif"), ("delta", added.tag, "--against", applied)):
        done = imgkit(*words, folder=lab.folder)
        assert (done.returncode, "has a delta already, and a .sif takes one" in done.stderr) == (2, True)
    assert not (lab.folder / "x.sif").exists()


@pytest.mark.soak
def test_ordinary_user_applies(replaced: Pair, applied: Path, user: str, public_imgkit: Path) -> None:
    home = Path(pwd.getpwnam(user).pw_dir)
    places = f"{Path(shutil.which('singularity') or '').parent}:/usr/bin:/bin"
    start = ("runuser", "-u", user, "--", "env", "-i", f"PATH={places}", f"HOME={home}", "LC_ALL=C.UTF-8")
    output(*start, public_imgkit, "apply", replaced.delta, replaced.base, "-o", "mine.sif", folder=home)
    assert (home / "mine.sif").read_bytes() == applied.read_bytes()


def test_show_and_verify_name_base_and_delta(lab: Lab, applied: Path, replaced: Pair) -> None:
    shown = imgkit_json("show", applied, folder=lab.folder)
    base = image.read(replaced.base).record
    assert base is not None
    assert shown["record"]["image_id"] == base.image_id
    assert shown["delta"]["source"] == replaced.tag
    checks = imgkit_json("verify", applied, "--files", folder=lab.folder)["checks"]
    assert {check["name"]: check["verdict"] for check in checks} == dict.fromkeys(
        ("header", "root partition", "delta", "manifest", "files"), "ok"
    )
    assert imgkit_json("show", replaced.delta, folder=lab.folder)["kind"] == "delta"


@pytest.mark.programs("unsquashfs")
def test_manifest_of_a_delta_has_what_it_holds(replaced: Pair) -> None:
    delta = descriptor.read(replaced.delta)
    records = file_manifest.parse_records(descriptor.manifest(replaced.delta, delta), where="x")
    expected = {
        f"{name} -> {record.content}" if record.type == "l" else name: record.mode_text
        for name, record in records.items()
        if "\n" not in name + record.content
    }
    listed = {file.path: file.mode for file in Squashfs(path=replaced.delta).listed()}
    assert expected.items() <= listed.items()
    assert len(expected) > 100


# ---- refusals: a runtime says nothing


def without_group(lab: Lab, replaced: Pair) -> Path:
    """A .sif with the delta as an overlay that a runtime passes over."""
    broken = lab.folder / "nogroup.sif"
    imgkit_json("apply", replaced.delta, replaced.base, "-o", broken, folder=lab.folder)
    (overlay,) = image.read(broken).overlays
    data = bytearray(broken.read_bytes())
    # The descriptor's group number stands 9 bytes into it; the table begins at byte 4096.
    at = next(
        4096 + 585 * slot
        for slot in range(48)
        if int.from_bytes(data[4096 + 585 * slot + 5 : 4096 + 585 * slot + 9], "little") == overlay.id
    )
    data[at + 9 : at + 13] = (0xF0000002).to_bytes(4, "little")
    broken.write_bytes(data)
    return broken


def test_overlay_without_the_group_is_refused(lab: Lab, replaced: Pair) -> None:
    broken = without_group(lab, replaced)
    # The silence: the base runs, and nobody says so.
    assert output("singularity", "exec", broken, "python3", "/workspace/code/code.py") == "old\n"
    for words in (("verify", broken), ("show", broken), ("delta", replaced.tag, "--against", broken)):
        done = imgkit(*words, folder=lab.folder)
        assert done.returncode == 1
        assert "group" in done.stdout + done.stderr
    job = ("run", "cpu", "--dry-run", "--runtime", "singularity", "--image", broken, "--", "dist-env")
    assert imgkit(*job, folder=lab.folder).returncode == 1


def test_commands_refuse_where_the_delta_is_not(lab: Lab, replaced: Pair, user: str) -> None:
    job = ("run", "cpu", "--runtime", "singularity", "--image", replaced.base, "--directory", lab.folder)
    delta = ("--delta", replaced.delta, "--", "dist-env")
    done = imgkit(*job, *delta, folder=lab.folder)
    assert (done.returncode, "placement" in done.stdout) == (0, True), done.stderr
    # The same job, and a runtime that passes over the delta: the words without --overlay.
    script = output(sys.executable, "-m", "imgkit_builder", *job, "--dry-run", *delta)
    silent = script.replace(f"--overlay {replaced.delta}:ro", "").replace("\\\n", "")
    done = run("sh", "-c", silent)
    assert done.returncode == 5
    assert "without it" in done.stderr


def test_deltas_switched_off_by_the_admin(lab: Lab, replaced: Pair) -> None:
    off = configured(lab.folder, "no")
    done = imgkit(
        "apply", replaced.delta, replaced.base, "-o", "x.sif", "--runtime-command", off, folder=lab.folder
    )
    assert done.returncode == 1
    assert "enable overlay" in done.stderr
    assert not list(lab.folder.glob("*x.sif*"))
    imgkit_json("apply", replaced.delta, replaced.base, "-o", "applied.sif", folder=lab.folder)
    words = ("cpu", "--runtime", "singularity", "--image", lab.folder / "applied.sif", "--", "dist-env")
    path = f"{off.parent}:{os.environ['PATH']}"
    done = imgkit("run", *words, folder=lab.folder, env={"PATH": path})
    assert done.returncode == 5
    assert "without it" in done.stderr


def test_delta_of_another_base_refused(lab: Lab, replaced: Pair, added: Pair) -> None:
    submit = ("run", "cpu", "--runtime", "singularity")
    other = (*submit, "--image", replaced.full, "--delta", added.delta, "--", "dist-env")
    for words, said in (
        (("apply", added.delta, replaced.full, "-o", "x.sif"), "the delta is for image"),
        (other, "lies over image"),
    ):
        done = imgkit(*words, folder=lab.folder)
        assert done.returncode in (1, 2)
        assert said in done.stderr
    assert not (lab.folder / "x.sif").exists()


def test_base_without_a_record_refused(lab: Lab, replaced: Pair) -> None:
    bare = lab.folder / "bare.sif"
    shutil.copy(replaced.base, bare)
    record = next(one for one in image.read(bare).descriptors if one.name == image.IMGKIT_OBJECT)
    output("singularity", "sif", "del", str(record.id), bare)
    done = imgkit("delta", replaced.tag, "--against", bare, folder=lab.folder)
    assert done.returncode == 1
    assert re.search(r"full transfer of about \d+\.\d MB", done.stderr)


def test_image_without_a_common_layer_refused(lab: Lab, replaced: Pair) -> None:
    tag = f"{lab.prefix}-other:latest"
    with tarfile.open(lab.folder / "other.tar", "w"):
        pass
    output("docker", "import", lab.folder / "other.tar", tag)
    done = imgkit("delta", tag, "--against", replaced.base, folder=lab.folder)
    assert done.returncode == 1
    assert re.search(r"shares no layer with it.*\n.*full transfer, \d+\.\d MB", done.stderr)


def test_signature_of_the_base_is_not_carried_over(lab: Lab, replaced: Pair) -> None:
    signed = lab.folder / "signed.sif"
    shutil.copy(replaced.base, signed)
    key, public = lab.folder / "key.pem", lab.folder / "key.pub"
    output("openssl", "genpkey", "-algorithm", "ed25519", "-out", key)
    output("openssl", "pkey", "-in", key, "-pubout", "-out", public)
    output("singularity", "sign", "--key", key, signed)
    output("singularity", "verify", "--key", public, signed)
    done = imgkit("apply", replaced.delta, signed, "-o", "unsigned.sif", folder=lab.folder)
    assert done.returncode == 0, done.stderr
    assert "signed.sif is signed, but the new .sif does not keep its signature" in done.stderr
    assert image.read(lab.folder / "unsigned.sif").signatures == ()
    image.refuse_damaged(lab.folder / "unsigned.sif")
    assert len(image.read(signed).signatures) == 1


def test_damaged_delta_refused(lab: Lab, replaced: Pair) -> None:
    data = bytearray(replaced.delta.read_bytes())
    data[len(data) // 2] ^= 1
    (lab.folder / "damaged.imgdelta").write_bytes(data)
    (lab.folder / "short.imgdelta").write_bytes(replaced.delta.read_bytes()[:-1])
    for name in ("damaged.imgdelta", "short.imgdelta"):
        assert imgkit("verify", name, folder=lab.folder).returncode in (1, 2)
        done = imgkit("apply", name, replaced.base, "-o", "x.sif", folder=lab.folder)
        assert done.returncode == 1
    assert not (lab.folder / "x.sif").exists()


def test_damaged_sif_not_extended(lab: Lab, replaced: Pair) -> None:
    """A copy of it would get a fresh record that says that all is well."""
    sif = image.read(replaced.base)
    data = bytearray(replaced.base.read_bytes())
    data[sif.require_root().offset + 9999] ^= 1
    (lab.folder / "damaged.sif").write_bytes(data)
    done = imgkit("apply", replaced.delta, "damaged.sif", "-o", "x.sif", folder=lab.folder)
    assert (done.returncode, "its root partition has another sha256" in done.stderr) == (1, True)
    assert not (lab.folder / "x.sif").exists()


def test_forged_or_missing_manifest_of_the_base_refused(lab: Lab, replaced: Pair) -> None:
    """What a delta leaves out would be what the manifest says is there."""
    sif = image.read(replaced.base)
    data = bytearray(replaced.base.read_bytes())
    data[sif.manifest_offset + 99] ^= 1
    (lab.folder / "forged.sif").write_bytes(data)
    record = dataclasses.replace(sif.record, manifest_sha256="", manifest_bytes=0)  # type: ignore[type-var]
    shutil.copy(replaced.base, lab.folder / "bare.sif")
    frame.put_record(lab.folder / "bare.sif", record)
    for name, said in (("forged", "its file manifest is damaged"), ("bare", "it has no file manifest")):
        done = imgkit(
            "delta", replaced.tag, "--against", f"{name}.sif", "-o", "x.imgdelta", folder=lab.folder
        )
        assert (done.returncode, said in done.stderr) == (1, True)
    assert not (lab.folder / "x.imgdelta").exists()


def test_applied_file_keeps_the_mode(lab: Lab, replaced: Pair) -> None:
    base = lab.folder / "mode.sif"
    shutil.copy(replaced.base, base)
    base.chmod(0o555)
    imgkit_json("apply", replaced.delta, base, "-o", "moded.sif", folder=lab.folder)
    assert (lab.folder / "moded.sif").stat().st_mode & 0o777 == 0o555


# ---- killed and full


STAGES = {
    "delta": ("export and squash", "make durable"),
    "apply": ("compare digests", "copy", "add", "make durable"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A verb with its words, and an older file under the name that it shall write."""

    words: tuple[str | Path, ...]
    target: Path
    old: bytes


@pytest.fixture(params=["delta", "apply"])
def call(lab: Lab, replaced: Pair, added: Pair, request: pytest.FixtureRequest) -> Call:
    verb: str = request.param
    words: tuple[str | Path, ...] = ("apply", replaced.delta, replaced.base)
    if verb == "delta":
        words = ("delta", replaced.tag, "--against", replaced.base)
    target = lab.folder / ("target.imgdelta" if verb == "delta" else "target.sif")
    shutil.copy(added.delta if verb == "delta" else replaced.base, target)
    return Call(words=(*words, "-o", target), target=target, old=target.read_bytes())


def left(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith((".target", ".imgkit"))]


def test_killed_at_every_stage_the_old_file_stays(lab: Lab, replaced: Pair, call: Call) -> None:
    argv = [sys.executable, "-m", "imgkit_builder", *map(str, call.words)]
    stages = STAGES[str(call.words[0])]
    finished: list[bytes] = []
    for stage in stages:
        call.target.write_bytes(call.old)
        with subprocess.Popen(
            argv, cwd=lab.folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE
        ) as running:
            assert running.stderr is not None
            assert any(stage.encode() in line for line in running.stderr)
            running.send_signal(signal.SIGKILL)
            later = running.stderr.read()
        # The last stage may end before the signal arrives, and on a busy machine it may begin before.
        if stage == stages[-1] or stages[-1].encode() in later:
            finished.append(call.target.read_bytes())
        else:
            assert call.target.read_bytes() == call.old
    call.target.write_bytes(call.old)
    imgkit_json(*call.words, folder=lab.folder)
    new = call.target.read_bytes()
    assert new != call.old
    assert all(content in (call.old, new) for content in finished)
    assert left(lab.folder) == []
    assert imgkit_json("verify", replaced.base, folder=lab.folder)["checks"]


FAILING = """
import errno, os, sys
from imgkit_builder.cli.app import main

def fail(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

setattr(os, sys.argv.pop(1), fail)
main()
"""


@pytest.fixture
def no_logs() -> Iterator[None]:
    """Remove the logs of runtimes, which go to the temporary folder where there is no state folder."""
    yield
    for log in Path(tempfile.gettempdir()).glob("20*-target-*.log"):
        log.unlink()


@pytest.mark.usefixtures("no_logs")
@pytest.mark.parametrize(
    "call",
    ["apply", pytest.param("delta", marks=pytest.mark.soak)],
    indirect=True,
)
def test_full_disk_at_any_step_leaves_the_old_file(lab: Lab, call: Call) -> None:
    imgkit_json(*call.words, folder=lab.folder)
    size = call.target.stat().st_size
    # From the first byte to the last of the record; then what only the last steps ask for.
    limits = [("prlimit", f"--fsize={limit}") for limit in (0, size // 2, size - 4096, size - 8)]
    starts = [(*limit, sys.executable, "-m", "imgkit_builder") for limit in limits]
    starts += [(sys.executable, "-c", FAILING, name) for name in ("fsync", "replace")]
    for start in starts:
        call.target.write_bytes(call.old)
        done = run(*start, *call.words, folder=lab.folder, env={"XDG_STATE_HOME": "/dev/null"})
        assert done.returncode == 4, (start, done.stderr)
        # Python's own temporary files, which have a byte, come before the target.
        full = f"{call.target}: the disk of {lab.folder} is full"
        assert full in done.stderr or "No usable temporary directory" in done.stderr
        assert "Traceback" not in done.stderr
        assert call.target.read_bytes() == call.old
        assert left(lab.folder) == []
