"""A machine with an engine and no mksquashfs, as a laptop is: mksquashfs runs in a container."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import remotekit
from labkit import IMGKIT, PrivateEngine, docker, imgkit, output, registry, run, until
from stored_images import archive, convert_as

from imgkit_builder.sif import image

BUSYBOX = Path("/bin/busybox")
REAL = shutil.which("mksquashfs")
pytestmark = [
    pytest.mark.docker,
    pytest.mark.xdist_group("engine-squashes"),
    pytest.mark.skipif(
        REAL is None or not BUSYBOX.exists(), reason="apt install squashfs-tools busybox-static"
    ),
]
BASE_VARIABLE = "IMGKIT_SQUASH_BASE"
SOAK = pytest.mark.soak
KNOWS_TAR = 'case "$1" in -help*) echo "-tar"; exit 1;; esac'
HANGS = f"{KNOWS_TAR}; echo begun >&2; exec sleep 600"


@pytest.fixture(scope="module")
def make_base() -> Iterator[Callable[..., str]]:
    """Make a base of this machine's mksquashfs, or of a script that stands in for it; without apt."""
    made: list[str] = []

    def make(script: str = "", *, bare: bool = False) -> str:
        files = {"bin/busybox": BUSYBOX.read_bytes()}
        if script:
            files["bin/mksquashfs"] = f"#!/bin/sh\n{script}\n".encode()
        elif not bare:
            assert REAL is not None
            found = re.findall(r"(/\S+) \(0x", output("ldd", REAL))
            found += map(str, Path("/lib").glob("*-linux-gnu/libgcc_s.so.1"))  # its threads end by it
            files |= {one.lstrip("/"): Path(one).read_bytes() for one in (REAL, *found)}
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(data), 0o755
                tar.addfile(info, io.BytesIO(data))
            for name in ("sh", "grep", "sleep", "cat"):
                link = tarfile.TarInfo(f"bin/{name}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
            folder = tarfile.TarInfo("tmp")
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(folder)
        name = f"imgkit-test-squash-{os.getpid()}-{len(made)}:1"
        subprocess.run(
            ["docker", "import", "-", name], input=buffer.getvalue(), check=True, capture_output=True
        )
        made.append(name)
        return name

    before = set(helpers())
    yield make
    for one in (*(set(helpers()) - before), *made):
        run("docker", "rmi", "--force", one)


def helpers() -> list[str]:
    return docker(
        "images", "--filter", "reference=imgkit-squash", "--format", "{{.Repository}}:{{.Tag}}"
    ).split()


def left() -> str:
    """Containers that squash."""
    return docker("ps", "--all", "--quiet", "--filter", "label=imgkit.purpose=squash")


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, str]:
    """Variables of a machine that has an engine, and nothing that squashes or runs a .sif."""
    programs = tmp_path / "programs"
    programs.mkdir()
    return {"PATH": str(programs)}


def source(folder: Path) -> Path:
    info, device = tarfile.TarInfo("a"), tarfile.TarInfo("null")
    info.size, info.uid, info.mode = 3_000_000, 3_000_000, 0o4755
    info.pax_headers = {"SCHILY.xattr.user.x": "y"}
    device.type, device.devmajor, device.devminor = tarfile.CHRTYPE, 1, 3
    (folder / "x.tar").write_bytes(archive([[(info, os.urandom(info.size)), (device, b"")]]))
    return folder / "x.tar"


def test_engine_gives_the_file_of_this_machine(
    tmp_path: Path, alone: Mapping[str, str], make_base: Callable[..., str]
) -> None:
    env = {**alone, BASE_VARIABLE: make_base()}
    path = source(tmp_path)
    done = imgkit("sif", path, "-o", "engine.sif", folder=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "installs squashfs-tools" in done.stderr
    assert "not run: no singularity here" in done.stderr
    assert convert_as(0, path, tmp_path / "here.sif") == ""
    assert (tmp_path / "engine.sif").read_bytes() == (tmp_path / "here.sif").read_bytes()
    assert left() == ""


@pytest.mark.soak
def test_image_of_the_engine_needs_no_archive(
    tmp_path: Path, alone: Mapping[str, str], make_base: Callable[..., str]
) -> None:
    name = make_base()
    words = ("sif", name, "--from", "daemon", "--compression", "gzip")
    for again in (False, True):
        env = {**alone, BASE_VARIABLE: name}
        done = imgkit(*words, "--force", "-o", "a.sif", folder=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        assert ("installs squashfs-tools" in done.stderr) is not again
    output(*IMGKIT, *words, "-o", "b.sif", "--no-test", folder=tmp_path)
    assert image.root_sha256(tmp_path / "a.sif") == image.root_sha256(tmp_path / "b.sif")


@pytest.mark.sshd
def test_engine_behind_ssh_squashes(
    tmp_path: Path, alone: Mapping[str, str], make_base: Callable[..., str]
) -> None:
    """The port of the far machine stands in ssh's configuration only."""
    folder = Path(f"/tmp/imgkit-far-{os.getpid()}")
    here = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    with remotekit.far_host(folder) as host, remotekit.sshd(host, f"SetEnv DOCKER_HOST={here}"):
        env = {"PATH": f"{folder}/bin", "DOCKER_HOST": "ssh://far", BASE_VARIABLE: make_base()}
        done = imgkit("sif", source(tmp_path), "-o", "x.sif", "--json", folder=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        assert "docker system dial-stdio" in host.calls()[0]
    assert json.loads(done.stdout)["seconds"]["receive the squashfs from the engine"] >= 0
    assert left() == ""


@pytest.mark.soak
@pytest.mark.parametrize("kind", [pytest.param("podman", marks=pytest.mark.podman), "sid", "rootless"])
def test_every_engine_squashes(
    tmp_path: Path,
    alone: Mapping[str, str],
    make_base: Callable[..., str],
    started: Callable[[str], PrivateEngine],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in started(kind).env.items():
        monkeypatch.setenv(name, value)
    env = {**alone, BASE_VARIABLE: make_base()}
    path = source(tmp_path)
    done = imgkit("sif", path, "-o", "engine.sif", folder=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert convert_as(0, path, tmp_path / "here.sif") == ""
    assert image.root_sha256(tmp_path / "engine.sif") == image.root_sha256(tmp_path / "here.sif")
    assert left() == ""


@pytest.mark.soak
def test_named_base_is_pulled(
    tmp_path: Path, alone: Mapping[str, str], make_base: Callable[..., str]
) -> None:
    with registry(tmp_path) as address:
        name, base = make_base(), f"{address}/group/squash:1"
        docker("tag", name, base)
        docker("push", base)
        docker("rmi", base, name)
        try:
            env = {**alone, BASE_VARIABLE: base}
            done = imgkit("sif", source(tmp_path), "-o", "x.sif", folder=tmp_path, env=env)
        finally:
            run("docker", "rmi", "--force", base)
    assert done.returncode == 0, done.stderr
    assert f"the engine pulls {base}, for mksquashfs ({BASE_VARIABLE})" in done.stderr


def test_missing_base_is_refused(tmp_path: Path, alone: Mapping[str, str]) -> None:
    env = {**alone, BASE_VARIABLE: "127.0.0.1:1/no/base:1"}
    done = imgkit("sif", source(tmp_path), "-o", "x.sif", folder=tmp_path, env=env)
    assert done.returncode == 4
    assert "pull 127.0.0.1:1/no/base:1" in done.stderr
    assert not (tmp_path / "x.sif").exists()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=SOAK), signal.SIGKILL])
def test_interrupt_leaves_no_container(
    tmp_path: Path, alone: Mapping[str, str], make_base: Callable[..., str], number: signal.Signals
) -> None:
    env = {**os.environ, **alone, BASE_VARIABLE: make_base(HANGS)}
    target = tmp_path / "x.sif"
    target.write_bytes(b"old")
    words = [*IMGKIT, "sif", source(tmp_path), "-o", target, "--force"]
    with subprocess.Popen(words, env=env, stderr=subprocess.PIPE) as process:
        until(lambda: left() and "begun" in run("docker", "logs", left()).stderr, within_s=60)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1].decode()
    assert process.returncode == (130 if number is signal.SIGINT else -9)
    assert "Traceback" not in said
    until(lambda: left() == "", within_s=60)
    assert target.read_bytes() == b"old"
    if number is signal.SIGINT:
        assert {path.name for path in tmp_path.iterdir()} == {"x.sif", "x.tar", "programs"}


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f"{KNOWS_TAR}; echo 'no room' >&2; exit 3", "mksquashfs failed with exit code 3"),
        pytest.param(
            f"{KNOWS_TAR}; cat >/tmp/root.sqfs; echo 'I left a file out'",
            "mksquashfs printed something unexpected",
            marks=pytest.mark.soak,
        ),
        (f"{KNOWS_TAR}; exit 0", "mksquashfs failed with exit code 0"),
        pytest.param(f"{KNOWS_TAR}; cat >/dev/null", "/tmp/root.sqfs", marks=SOAK),
        pytest.param("echo old", "squashfs-tools cannot be installed in a container", marks=SOAK),
    ],
)
def test_fault_in_the_container_is_told(
    tmp_path: Path, alone: Mapping[str, str], make_base: Callable[..., str], script: str, why: str
) -> None:
    done = imgkit(
        "sif",
        source(tmp_path),
        "-o",
        "x.sif",
        folder=tmp_path,
        env={**alone, BASE_VARIABLE: make_base(script)},
    )
    assert done.returncode == 4, done.stderr
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "x.sif").exists()
    assert left() == ""


@pytest.mark.soak
def test_packages_of_the_images_own_base_serve(tmp_path: Path, alone: Mapping[str, str]) -> None:
    """Installs squashfs-tools by apt: needs Debian's packages."""
    base = "imgkit.local/standin:24.03-notorch"
    for one in helpers():
        run("docker", "rmi", "--force", one)
    done = imgkit("sif", source(tmp_path), "-o", "x.sif", folder=tmp_path, env={**alone, BASE_VARIABLE: base})
    assert done.returncode == 0, done.stderr
    assert f"a container of {base} installs squashfs-tools from its package sources" in done.stderr
