from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from file_tree import write_files, write_program

from imgkit_builder.base.checks import Check, Verdict, passed
from imgkit_builder.examine import doctor
from imgkit_builder.examine.doctor import Machine
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints.system import Runtime, SystemFacts

MN5 = Target(
    name="mn5",
    system=SystemFacts(runtime=Runtime(modules=("gcc", "singularity"))),
    platforms=("linux/amd64",),
    file=Path("mn5.yaml"),
)
OLIVIA = Target(name="olivia", system=SystemFacts(), platforms=("linux/arm64",), file=Path("olivia.yaml"))
LAMBDA = Target(
    name="lambda",
    system=SystemFacts(runtime=Runtime(kind="docker")),
    platforms=("linux/amd64",),
    file=Path("lambda.yaml"),
)

QEMU = "proc/sys/fs/binfmt_misc/qemu-aarch64"
USERNS = "proc/sys/user/max_user_namespaces"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty PATH to put programs on, and no engine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/absent.sock")
    for name in ("TMPDIR", "APPTAINER_TMPDIR", "IMGKIT_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def runtime(programs: Path) -> Path:
    return write_program(programs / "singularity", 'echo "singularity-ce version 4.1.0"')


@pytest.fixture
def root(tmp_path: Path) -> Callable[..., Machine]:
    """A machine with these files below its root."""

    def make(uid: int = 1000, arch: str = "amd64", **files: str) -> Machine:
        paths = {"qemu": QEMU, "userns": USERNS, "fuse": "dev/fuse", "mounts": "proc/mounts"}
        folder = write_files(tmp_path / "root", {paths[name]: text for name, text in files.items()})
        return Machine(root=folder, uid=uid, arch=arch)

    return make


def look(*args: object, **options: object) -> dict[str, Check]:
    return {check.name: check for check in doctor.check_machine(*args, **options)}  # type: ignore[arg-type]


def test_machine_with_nothing_fails(programs: Path) -> None:
    checks = look()
    assert checks["docker"].verdict == checks["singularity"].verdict == "fail"


def test_every_trouble_names_a_fix(programs: Path, root: Callable[..., Machine]) -> None:
    checks = look(OLIVIA, machine=root(userns="0"))
    assert all(check.hint for check in checks.values() if check.verdict in ("warn", "fail"))
    assert (checks["imgkit sif"].verdict, checks["zstd"].verdict) == ("fail", "warn")


@pytest.mark.parametrize(("purpose", "verdict"), [("any", "warn"), ("sif", "warn"), ("build", "fail")])
def test_missing_engine_fails_only_builders(
    runtime: Path, purpose: str, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those, where the runtime builds."""
    cases: tuple[tuple[Verdict, Verdict], ...] = (("warn", verdict), ("ok", "warn"))
    for way, expected in cases:
        build_check = Check("build --with apptainer", way, "x", "x")
        monkeypatch.setattr(doctor, "_check_definitions", lambda _, check=build_check: check)
        check = look(purpose=purpose, machine=Machine(uid=0))["docker"]
        assert check.verdict == expected
        assert ("--with apptainer" in check.hint) == (purpose == "build" and way == "ok")


def test_runtime_tells_flavour_and_place(runtime: Path) -> None:
    assert look()["singularity"].found.startswith(f"singularity-ce 4.1.0 at {runtime}")


def test_missing_runtime_names_the_recipes_modules(programs: Path) -> None:
    checks = look(MN5)
    assert "module load gcc singularity" in checks["singularity"].hint
    assert "\n" not in checks["singularity"].hint


def test_system_of_containers_needs_no_runtime(programs: Path) -> None:
    checks = look(LAMBDA)
    assert checks["singularity"].verdict == checks["imgkit sif"].verdict == "skip"


def test_game_named_singularity_is_no_runtime(programs: Path) -> None:
    write_program(programs / "singularity", "echo Endgame: Singularity 1.00")
    check = look()["singularity"]
    assert check.verdict == "fail"
    assert "Endgame" in check.found


@pytest.mark.parametrize("name", ["max_user_namespaces", "unprivileged_userns_clone"])
def test_forbidden_namespaces_fail_ordinary_users(
    runtime: Path, root: Callable[..., Machine], name: str
) -> None:
    machine = root(userns="15000")
    path = USERNS if name.startswith("max") else "proc/sys/kernel/unprivileged_userns_clone"
    write_files(machine.root, {path: "0"})
    check = look(machine=machine)["user namespaces"]
    assert check.verdict == "fail"
    assert name in check.hint


def test_root_needs_no_namespaces(runtime: Path, root: Callable[..., Machine]) -> None:
    assert "user namespaces" not in look(machine=root(uid=0, userns="0"))


def test_setuid_runtime_needs_no_namespaces(runtime: Path, root: Callable[..., Machine]) -> None:
    starter = runtime.parent.parent / "libexec/singularity/bin/starter-suid"
    starter.parent.mkdir(parents=True)
    starter.touch()
    starter.chmod(0o4755)
    checks = look(machine=root(userns="0"))
    assert checks["user namespaces"].verdict == "ok"
    assert "fuse" not in checks


def test_missing_fuse_warns(runtime: Path, root: Callable[..., Machine]) -> None:
    check = look(machine=root(userns="15000"))["fuse"]
    assert (check.verdict, "modprobe fuse" in check.hint) == ("warn", True)
    assert look(machine=root(fuse=""))["fuse"].verdict == "ok"


OLD = 'echo "mksquashfs version 4.4 (2019/08/29)"; echo "-pf <file>"; echo "  gzip xz zstd"; exit 1'
BROKEN = 'echo "mksquashfs version 4.4 (2019/08/29)"; exit 1'
NEW = 'echo "mksquashfs version 4.6.1 (2023/03/25)"; echo "-tar read a tar"; echo "  zstd"'


@pytest.mark.parametrize(
    "subfolder", ["bin", "libexec/singularity/bin", "libexec/apptainer/bin", "utils/bin", "x86_64/utils/bin"]
)
def test_own_way_names_the_mksquashfs_wherever_it_lies(runtime: Path, subfolder: str) -> None:
    folder = runtime.parent.parent / subfolder
    write_program(folder / "mksquashfs", NEW)
    check = look(machine=Machine(uid=0))["imgkit sif"]
    assert check.verdict == "ok"
    assert f"itself, with mksquashfs 4.6.1 at {folder}/mksquashfs" in check.found
    assert "Singularity 3.8 or later" in check.found


def test_mksquashfs_of_a_runtime_comes_before_an_old_one_of_the_path(runtime: Path) -> None:
    beside = runtime.parent.parent / "libexec/singularity/bin"
    beside.mkdir(parents=True)
    write_program(runtime.parent / "mksquashfs", OLD)
    write_program(beside / "mksquashfs", NEW)
    assert f"4.6.1 at {beside}" in look(machine=Machine(uid=0))["imgkit sif"].found


def test_old_mksquashfs_squashes_plain_files(runtime: Path) -> None:
    write_program(runtime.parent / "mksquashfs", OLD)
    check = look(machine=Machine(uid=0))["imgkit sif"]
    assert check.verdict == "warn"
    assert f"itself, with mksquashfs 4.4 at {runtime.parent}/mksquashfs; the files are written" in check.found
    assert "no -tar" in check.found


@pytest.mark.parametrize(
    ("subfolder", "flavour"), [("etc", "singularity"), ("etc", "apptainer"), ("x86_64/etc", "apptainer")]
)
@pytest.mark.parametrize("folder_only", [True, False])
def test_mksquashfs_of_the_configuration_is_found(
    runtime: Path, tmp_path: Path, subfolder: str, flavour: str, folder_only: bool
) -> None:
    configuration = runtime.parent.parent / subfolder / flavour / f"{flavour}.conf"
    configuration.parent.mkdir(parents=True)
    program = write_program(tmp_path / "own tools/mksquashfs", NEW)
    value = program.parent if folder_only else program
    configuration.write_text(f"# mksquashfs path = /commented\nmksquashfs path = {value}\n")
    assert f"mksquashfs 4.6.1 at {program}" in look(machine=Machine(uid=0))["imgkit sif"].found


def test_absent_mksquashfs_of_the_configuration_is_ignored(runtime: Path) -> None:
    configuration = runtime.parent.parent / "etc/singularity/singularity.conf"
    configuration.parent.mkdir(parents=True)
    configuration.write_bytes(b"mksquashfs path = /absent\nmksquashfs path =\n\xff\0")
    assert "mksquashfs is not on this machine" in look(machine=Machine(uid=0))["imgkit sif"].found


def test_runtime_builds_where_nothing_squashes(runtime: Path) -> None:
    write_program(runtime.parent / "mksquashfs", BROKEN)
    check = look(machine=Machine(uid=0))["imgkit sif"]
    assert check.verdict == "warn"
    assert check.found.startswith("singularity-ce 4.1.0 builds the file")
    assert "no -tar" in check.found
    assert "version 4.4" in check.found


def test_broken_mksquashfs_without_runtime_leaves_no_way(programs: Path) -> None:
    write_program(programs / "mksquashfs", BROKEN)
    assert look(purpose="sif")["imgkit sif"].verdict == "fail"


def test_machine_without_runtime_still_writes_files(programs: Path) -> None:
    write_program(programs / "mksquashfs", NEW)
    checks = look(MN5, purpose="sif", machine=Machine(uid=0))
    assert (checks["imgkit sif"].verdict, checks["singularity"].verdict) == ("ok", "warn")
    assert "module load gcc singularity" in checks["singularity"].hint
    assert passed(tuple(checks.values()))


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("singularity version 3.7.4", "warn"),
        ("singularity version 3.8.0", "ok"),
        ("singularitypro version 3.11-2", "ok"),
        ("apptainer version 1.0.0", "ok"),
    ],
)
def test_runtime_below_the_floor_warns(programs: Path, version: str, verdict: str) -> None:
    write_program(programs / "singularity", f'echo "{version}"')
    check = look(machine=Machine(uid=0))["singularity"]
    assert check.verdict == verdict
    assert verdict == "ok" or "3.8" in check.hint


def test_tmp_in_memory_warns(
    programs: Path, root: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "scratch dir").mkdir()
    monkeypatch.setenv("APPTAINER_TMPDIR", str(tmp_path / "scratch dir"))
    escaped = str(tmp_path / "scratch dir").replace(" ", "\\040")
    check = look(machine=root(mounts=f"/dev/vda / ext4 rw 0 0\ntmpfs {escaped} tmpfs rw 0 0"))["disk tmp"]
    assert check.verdict == "warn"
    assert "--tmpdir" in check.hint


def test_absent_tmp_is_told(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nonexistent/tmp")
    check = look(purpose="sif", machine=Machine(uid=0))["disk tmp"]
    assert check.verdict == "fail"
    assert "TMPDIR" in check.hint


@pytest.mark.parametrize(("squashes", "enough"), [(NEW, 10), (OLD, 40), (BROKEN, 76)])
def test_disk_that_the_way_fills_warns(
    runtime: Path,
    root: Callable[..., Machine],
    monkeypatch: pytest.MonkeyPatch,
    squashes: str,
    enough: int,
) -> None:
    """The stream needs room for the .sif alone, plain files for the image, a runtime for three of them."""
    write_program(runtime.parent / "mksquashfs", squashes)
    for free, verdict in ((enough, "ok"), (enough - 1, "warn")):
        usage = type("usage", (), {"free": free * 10**9})
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        machine = root(uid=0, mounts="/dev/vda / ext4 rw 0 0")
        check = look(purpose="sif", machine=machine)["disk tmp"]
        assert check.verdict == verdict


@pytest.mark.parametrize(
    ("qemu", "verdict"),
    [
        ("enabled\ninterpreter /q\nflags: F", "ok"),
        ("enabled\nflags: ", "warn"),
        ("disabled\nflags: F", "warn"),
    ],
)
def test_emulation_needs_a_fixed_interpreter(
    programs: Path, root: Callable[..., Machine], qemu: str, verdict: str
) -> None:
    check = look(OLIVIA, machine=root(qemu=qemu))["emulation"]
    assert check.verdict == verdict
    assert verdict == "ok" or "--install arm64" in check.hint


def test_own_architecture_needs_no_emulation(programs: Path, root: Callable[..., Machine]) -> None:
    assert "emulation" not in look(OLIVIA, machine=root(arch="arm64"))
