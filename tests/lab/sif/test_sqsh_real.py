"""A .sqsh that imgkit wrote: ch-run starts it, an ordinary user unpacks it, accidents leave nothing half."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from file_tree import write_program
from labkit import PYXIS, imgkit, imgkit_json, output, public_folder, small_disk, soak
from sample_image import verdicts
from squashed_files import squashed_files
from stored_images import archive, busybox_layer, only
from tars import tar_entry

from imgkit_builder.base.progress import Silent
from imgkit_builder.inventory.collector import SPDX_PATH
from imgkit_builder.jobs import image_source, submit
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.sif import convert
from imgkit_builder.sif import sqsh as sqsh_files
from imgkit_builder.sif.conversion import Options
from imgkit_builder.sif.entries import Archive
from imgkit_entrypoints.errors import UsageError

RUNTIME_FILES = {
    *(".singularity.d", ".exec", ".run", ".shell", ".test", "environment", "singularity", SPDX_PATH),
    *("dev", "proc", "sys", "etc/hostname", "etc/hosts", "etc/resolv.conf", "etc/mtab"),
}
ENROOT_FILES = {"etc/environment", "etc/fstab", "etc/rc", "etc/rc.local"}
NVIDIA = ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility")
ENV = (
    *NVIDIA,
    "PATH=/bin",
    "SPACES=  a  b  ",
    'QUOTED="a b"',
    "SINGLE='a'",
    "BACK=\\a\\",
    "HOST=$HOME",
    "TWICE=1",
    "TWICE=2",
)
NASTY = 'it\'s a "name" with $spaces'

pytestmark = [
    pytest.mark.xdist_group("sqsh"),
    pytest.mark.programs("busybox"),
    pytest.mark.programs("unsquashfs"),
]


def layer():
    return [
        *busybox_layer("sh", "printf", "env", "pwd", "mkdir"),
        tar_entry("dev/null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3),
        tar_entry("dev/fd", kind=tarfile.SYMTYPE, linkname="/proc/self/fd"),
        tar_entry("etc/environment", b"OLD=1\n"),
        tar_entry("etc/fstab", b"/etc /mnt none bind\n"),
        tar_entry("etc/rc.local", b"exit 9\n"),
    ]


CONFIG = {"Env": ENV, "Entrypoint": ["printf", "<%s>"], "Cmd": ["a b", "it's"], "WorkingDir": "/work/in side"}


@pytest.fixture(scope="module")
def folder():
    """A folder that every user can enter."""
    folder = public_folder("sqsh")
    (folder / "x.tar").write_bytes(archive([layer()], config=CONFIG))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def sqsh(folder):
    target = folder / f"{NASTY}.sqsh"
    answer = imgkit_json("sif", folder / "x.tar", "-o", target)
    assert (answer["file"], answer["format"], answer["record"]["compression"]) == (
        str(target),
        "sqsh",
        "gzip 6",
    )
    assert answer["next"].startswith("srun '--container-image=")
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [target.name, f"{target.name}.sha256", "x.tar"]
    )
    return target


@pytest.fixture
def unpacked(sqsh, as_user, request):
    """The files of the .sqsh, as this user unpacks them, without an error."""
    folder = public_folder("unpacked")
    folder.chmod(0o777)
    output(*as_user, "unsquashfs", "-quiet", "-no-progress", "-d", folder / "root", sqsh)
    yield folder / "root"
    shutil.rmtree(folder)


def ch_run(as_user, image, root, *command):
    """Return the output of a command in a container of `image`, with `root`'s /etc/environment."""
    args = (f"--set-env={root}/etc/environment", image, "--", *command)
    return output(*as_user, "HOME=/", "ch-run", "--env-no-expand", *args, folder="/")


@pytest.mark.charliecloud
def test_ch_run_starts_the_unpacked_files(unpacked, as_user):
    assert ch_run(as_user, unpacked, unpacked, "/etc/rc") == "<a b><it's>"
    assert ch_run(as_user, unpacked, unpacked, "/etc/rc", "c  d", "*") == "<c  d><*>"
    variables = ch_run(as_user, unpacked, unpacked, "env").splitlines()
    assert {*ENV} - {"TWICE=1"} <= {*variables}
    assert not {"TWICE=1", "OLD=1"} & {*variables}


@pytest.mark.charliecloud
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="there is no /dev/fuse")
def test_ch_run_mounts_the_file_itself(sqsh, unpacked, as_user):
    assert ch_run(as_user, sqsh, unpacked, "/etc/rc") == "<a b><it's>"


@pytest.mark.charliecloud
def test_a_script_in_its_place_skips_the_entrypoint(unpacked, as_user):
    """pyxis puts such a script there."""
    (unpacked / "etc/rc.local").write_text('exec "$@"\n')
    assert ch_run(as_user, unpacked, unpacked, "/etc/rc", "pwd") == "/work/in side\n"


def test_an_ordinary_user_unpacks_it_without_devices(unpacked):
    assert not [*(unpacked / "dev").iterdir()]
    assert (unpacked / "etc/fstab").read_text() == (unpacked / "etc/rc.local").read_text() == ""


def changed_paths(old, new):
    """Return the paths that differ; what a conversion adds to one format alone is no difference."""
    before, after = squashed_files(old), squashed_files(new)
    skip = {SPDX_PATH} if old.suffix == new.suffix else RUNTIME_FILES | ENROOT_FILES
    differing = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    return sorted(path for path in differing if not {path, path.partition("/")[0]} & skip)


def test_it_holds_the_files_of_the_sif(folder, sqsh):
    assert imgkit("sif", folder / "x.tar", "-o", folder / "x.sif", "--no-test").returncode == 0
    # The .sif has no folder for the program to begin in, and no /etc/group.
    assert changed_paths(folder / "x.sif", sqsh) == ["etc/group", "work", "work/in side"]
    (folder / "x.sif").unlink()


def test_the_same_image_gives_the_same_bytes(folder, sqsh):
    again = folder / "again"
    again.mkdir()
    env = only("old", again)
    assert imgkit("sif", folder / "x.tar", "-o", again / "1.sqsh").returncode == 0
    assert (again / "1.sqsh").read_bytes() == sqsh.read_bytes()
    # One of RHEL 8 cannot read a tar: another order, the same files.
    assert imgkit("sif", folder / "x.tar", "-o", again / "2.sqsh", env=env).returncode == 0
    assert changed_paths(sqsh, again / "2.sqsh") == []
    shutil.rmtree(again)


def test_an_up_to_date_file_is_left_alone(folder, sqsh):
    before = sqsh.stat()
    result = imgkit("sif", folder / "x.tar", "-o", sqsh)
    assert "up to date" in result.stdout
    assert sqsh.stat() == before
    checksum = Path(f"{sqsh}.sha256")
    checksum.unlink()
    assert "up to date" not in imgkit("sif", folder / "x.tar", "-o", sqsh).stdout
    output("sha256sum", "-c", checksum.name, folder=folder)


Call = Callable[..., Any]
"""The command line, in this process."""


@pytest.fixture
def copy(sqsh, tmp_path):
    shutil.copy(f"{sqsh}.sha256", tmp_path)
    return Path(shutil.copy(sqsh, tmp_path))


def test_verify_notices_each_kind_of_damage(copy):
    content = copy.read_bytes()
    fine = {"sha256": "ok", "squashfs": "ok", "content": "ok", "manifest": "warn"}
    assert verdicts(copy) == fine
    copy.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    damaged = {"sha256": "fail", "squashfs": "ok", "content": "fail", "manifest": "skip"}
    assert verdicts(copy) == damaged
    copy.write_bytes(content[: len(content) // 2])
    assert verdicts(copy) == {"squashfs": "fail"}
    copy.write_bytes(content.replace(b'"amd64"', b'"arm64"'))
    assert verdicts(copy) == {"squashfs": "fail"}  # the record does not fit its own digest
    copy.write_bytes(content)
    Path(f"{copy}.sha256").unlink()
    assert verdicts(copy) == {**fine, "sha256": "warn"}


def test_show_prints_image_and_compression(call, sqsh):
    answer = json.loads(call("show", str(sqsh), "--json")[1])
    assert (answer["kind"], answer["arch"], answer["record"]["compression"]) == ("sqsh", "amd64", "gzip 6")


@pytest.fixture
def refused(call, monkeypatch):
    """Run imgkit in a folder whose files must stay as they are, and return its refusal."""

    def run(folder, *args, code=2):
        before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
        monkeypatch.chdir(folder)
        exit_code, _, message = call(*map(str, args))
        assert exit_code == code, message
        assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
        return str(message)

    return run


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--writer", "runtime"), "no runtime writes a .sqsh"),
        (("--runtime-command", "apptainer"), "imgkit starts no .sqsh"),
        (("-o", "x.sif"), "--format sqsh writes no .sif"),
        (("-o", "x.tar"), "target exists and is not a .sqsh"),
    ],
)
def test_what_a_sqsh_cannot_be_is_refused(refused, folder, args, reason):
    assert reason in refused(folder, "sif", "x.tar", "--format", "sqsh", *args)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("sif",), "it is a .sqsh, which is not converted"),
        (("test",), "is not a .sif"),
        (("shell",), "is not a .sif"),
    ],
)
def test_verbs_of_a_sif_refuse_a_sqsh_by_name(refused, folder, sqsh, args, reason):
    assert reason in refused(folder, *args, sqsh)


@pytest.mark.singularity
@pytest.mark.parametrize("runtime", ["singularity", *soak("apptainer")])
def test_singularity_starts_it_with_its_variables(folder, sqsh, as_user, runtime):
    plain = folder / "plain.sqsh"
    plain.symlink_to(sqsh)
    request = JobRequest.of(
        image=str(plain), command=("env",), runtime="singularity", env=("MINE=1",), directory=folder
    )
    text = submit.prepare("cpu", request).script.text.replace("singularity", runtime, 1)
    library = folder / "libimgkit.so.1"
    library.touch()
    # Bound as the libraries of --nv are; without a file of the image's own, no runtime puts them on the path.
    libraries = f"{runtime.upper()}_CONTAINLIBS={library}"
    variables = output(*as_user, "HOME=/", libraries, "sh", "-c", text, folder="/").splitlines()
    plain.unlink()
    library.unlink()
    assert "LD_LIBRARY_PATH=/.singularity.d/libs" in variables
    assert {*ENV, "MINE=1"} - {"TWICE=1"} <= {*variables}
    assert not {"TWICE=1", "OLD=1"} & {*variables}


def test_runtimes_that_start_no_sqsh_refuse_it(refused, folder, sqsh):
    plain = folder / "plain.sqsh"
    plain.symlink_to(sqsh)
    args = ("run", "cpu", "--runtime", "docker", "--dry-run", "--image", plain, "--", "dist-env")
    assert "docker does not start a .sqsh" in refused(folder, *args)
    plain.unlink()


def test_a_sqsh_is_not_sent_to_a_remote(sqsh):
    with pytest.raises(UsageError, match=r"imgkit run sends a \.sif, and this is a \.sqsh"):
        image_source.find_image_source(str(sqsh), JobRequest.of(), "cpu")


def test_a_value_that_no_line_holds_leaves_no_file(refused, tmp_path):
    config = {"Env": ["PATH=/bin", "MINE=/a:${MINE}"]}
    (tmp_path / "x.tar").write_bytes(archive([layer()], config=config))
    message = refused(tmp_path, "sif", "x.tar", "--format", "sqsh")
    assert "a .sqsh cannot hold the value of MINE: enroot replaces ${MINE}" in message
    assert "image.env.MINE" in message


@pytest.mark.parametrize("size", [0.3, 0.9])
def test_a_damaged_archive_leaves_the_old_file(refused, folder, copy, size):
    content = (folder / "x.tar").read_bytes()
    (copy.parent / "y.tar").write_bytes(content[: int(len(content) * size)])
    refused(copy.parent, "sif", "y.tar", "-o", copy.name, "--force", code=1)


class Killed(Silent):
    """A reporter that ends its process at one stage, as ``kill -9`` does."""

    def __init__(self, stage):
        self.last = stage

    def stage(self, text):
        if text == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def kill(source, target, stage, patch=lambda: None):
    """Convert in a child that dies at a stage."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            patch()
            convert.convert(Archive(path=source), target, Options(test=False, format="sqsh"), Killed(stage))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("stage", ["merge and squash", "check", "make durable"])
@pytest.mark.parametrize("older", [False, True])
def test_a_killed_conversion_leaves_the_old_file_or_none(folder, sqsh, tmp_path, stage, older):
    target = tmp_path / "x.sqsh"
    if older:
        target.write_bytes(b"hsqs the old one")
    kill(folder / "x.tar", target, stage)
    assert target.read_bytes() == b"hsqs the old one" if older else not target.exists()
    convert.convert(Archive(path=folder / "x.tar"), target, Options(format="sqsh"), Silent())
    assert target.read_bytes() == sqsh.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.sqsh", "x.sqsh.sha256"]


def test_a_kill_before_the_checksum_leaves_none(folder, sqsh, tmp_path):
    def patch():
        sqsh_files.files.write_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]

    target = tmp_path / "x.sqsh"
    target.write_bytes(b"hsqs the old one")
    Path(f"{target}.sha256").write_text(f"{'0' * 64}  x.sqsh\n")
    kill(folder / "x.tar", target, "", patch)
    assert target.read_bytes() == sqsh.read_bytes()
    assert not Path(f"{target}.sha256").exists()
    convert.convert(Archive(path=folder / "x.tar"), target, Options(format="sqsh"), Silent())
    assert verdicts(target)["sha256"] == "ok"


def test_mksquashfs_without_zstd_is_told(folder, tmp_path):
    real = shutil.which("mksquashfs")
    without_zstd = f'case "$1" in -help*) {real} "$1" 2>&1 | grep -v zstd; exit 1;; esac\nexec {real} "$@"'
    program = write_program(tmp_path / "programs/mksquashfs", without_zstd)
    env = {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    target = tmp_path / "x.sqsh"
    result = imgkit("sif", folder / "x.tar", "-o", target, "--compression", "zstd", env=env)
    assert result.returncode == 2
    assert "was built without zstd" in result.stderr
    assert not target.exists()
    assert imgkit("sif", folder / "x.tar", "-o", target, env=env).returncode == 0


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    data = os.urandom(3_000_000)
    (tmp_path / "x.tar").write_bytes(archive([[*layer(), tar_entry("data", data)]]))
    with small_disk(tmp_path / "disk", 3 << 10) as disk:
        result = imgkit("sif", tmp_path / "x.tar", "-o", disk / "x.sqsh")
        assert result.returncode != 0
        assert f"{disk}" in result.stderr
        assert "on a larger disk" in result.stderr
        assert not [*disk.iterdir()]


@pytest.mark.docker
def test_an_image_of_the_engine_gives_the_same_files(folder, sqsh, tmp_path):
    tag = f"imgkit-test-sqsh-{os.getpid()}:1"
    loaded = output("docker", "load", "-i", folder / "x.tar")
    name = loaded.partition("Loaded image")[2].partition(": ")[2].strip()
    try:
        output("docker", "tag", name, tag)
        assert imgkit("sif", tag, "-o", tmp_path / "x.sqsh").returncode == 0
        assert changed_paths(sqsh, tmp_path / "x.sqsh") == []
    finally:
        subprocess.run(["docker", "rmi", name, tag], check=False, capture_output=True)


@pytest.mark.soak
@pytest.mark.skipif(not PYXIS, reason="IMGKIT_PYXIS names no folder with enroot")
def test_enroot_starts_it(sqsh, as_user):
    folder = public_folder("enroot")
    folder.chmod(0o777)
    variables = [f"{name}={folder}/{name}" for name in ("HOME", "XDG_RUNTIME_DIR", "XDG_DATA_HOME")]
    output(*as_user, "mkdir", *(variable.partition("=")[2] for variable in variables))
    (folder / "rc.local").write_text('exec "$@"\n')
    # enroot's hook for GPUs asks for programs of NVIDIA.
    paths = (f"PATH={PYXIS}/bin:{os.environ['PATH']}", "NVIDIA_VISIBLE_DEVICES=void")
    enroot = (*as_user, *variables, *paths, "enroot")
    try:
        output(*enroot, "create", "-n", "made", sqsh, folder="/")
        assert output(*enroot, "start", "made", folder="/") == "<a b><it's>"
        args = ("start", "--mount", f"{folder}/rc.local:/etc/rc.local", "made", "env")
        values = output(*enroot, *args, folder="/").splitlines()
        assert {*ENV} - {"TWICE=1"} <= {*values}
    finally:
        output("rm", "-rf", folder)
