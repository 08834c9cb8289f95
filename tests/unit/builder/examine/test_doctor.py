from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

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

PATHS = {
    "qemu": "proc/sys/fs/binfmt_misc/qemu-aarch64",
    "userns": "proc/sys/user/max_user_namespaces",
    "userns_clone": "proc/sys/kernel/unprivileged_userns_clone",
    "apparmor": "proc/sys/kernel/apparmor_restrict_unprivileged_userns",
    "fuse": "dev/fuse",
    "mounts": "proc/mounts",
}
RUNTIME = 'echo "singularity-ce version 4.1.0"'
OLD = 'echo "mksquashfs version 4.4 (2019/08/29)"; echo "-pf <file>"; echo "  gzip xz zstd"; exit 1'
BROKEN = 'echo "mksquashfs version 4.4 (2019/08/29)"; exit 1'
NEW = 'echo "mksquashfs version 4.6.1 (2023/03/25)"; echo "-tar read a tar"; echo "  zstd"'


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
    return write_program(programs / "singularity", RUNTIME)


@pytest.fixture
def root(tmp_path: Path) -> Callable[..., Machine]:
    """A machine with these files below its root."""

    def make(uid: int = 1000, arch: str = "amd64", **files: str) -> Machine:
        folder = write_files(tmp_path / "root", {PATHS[name]: text for name, text in files.items()})
        return Machine(root=folder, uid=uid, arch=arch)

    return make


Root = Callable[..., Machine]
ROOT = Machine(uid=0)


def look(*args: object, **options: object) -> dict[str, Check]:
    return {check.name: check for check in doctor.check_machine(*args, **options)}  # type: ignore[arg-type]


def test_every_trouble_of_a_machine_with_nothing_names_a_fix(programs, root):
    checks = look(OLIVIA, machine=root(userns="0"))
    assert all(check.hint for check in checks.values() if check.verdict in ("warn", "fail"))
    assert checks["docker"].verdict == checks["singularity"].verdict == "fail"
    assert (checks["imgkit sif"].verdict, checks["zstd"].verdict) == ("fail", "warn")


class Case(NamedTuple):
    """A machine, and one of its checks."""

    check: str
    verdict: Verdict
    texts: tuple[str, ...] = ()
    """What the check has found, after ``^``; a text after ``-> `` is in its hint."""
    programs: Mapping[str, str] = {}
    """Scripts, by their paths below the prefix of the runtime."""
    files: Mapping[str, str] = {}
    """Files of the kernel, by their names in `PATHS`."""
    target: Target | None = None


HERE = {"bin/singularity": RUNTIME}
LIBEXEC = "libexec/singularity/bin"
CASES = {
    "missing runtime": Case("singularity", "fail", ("-> module load gcc singularity",), target=MN5),
    "no runtime for containers": Case("singularity", "skip", target=LAMBDA),
    "no .sif for containers": Case("imgkit sif", "skip", target=LAMBDA),
    "game": Case("singularity", "fail", ("Endgame",), {"bin/singularity": "echo Endgame: Singularity 1.00"}),
    "namespaces": Case("user namespaces", "ok", ("allowed, at most 15000",), HERE, {"userns": "15000"}),
    "no namespaces": Case("user namespaces", "fail", ("-> max_user_namespaces",), HERE, {"userns": "0"}),
    "no unprivileged namespaces": Case(
        "user namespaces", "fail", ("-> unprivileged_userns_clone",), HERE, {"userns_clone": "0"}
    ),
    "namespaces by profile": Case("user namespaces", "warn", ("-> apparmor_",), HERE, {"apparmor": "1"}),
    "fuse": Case("fuse", "ok", (), HERE, {"fuse": ""}),
    "no fuse": Case("fuse", "warn", ("-> modprobe fuse",), HERE),
    "old mksquashfs": Case(
        "imgkit sif",
        "warn",
        ("itself, with mksquashfs 4.4 at {}/bin/mksquashfs; the files are written", "no -tar"),
        {**HERE, "bin/mksquashfs": OLD},
    ),
    "runtime beside a broken mksquashfs": Case(
        "imgkit sif",
        "warn",
        ("^singularity-ce 4.1.0 builds the file", "no -tar", "version 4.4"),
        {**HERE, "bin/mksquashfs": BROKEN},
    ),
    "broken mksquashfs": Case("imgkit sif", "fail", (), {"bin/mksquashfs": BROKEN}),
    "mksquashfs of a runtime before an old one": Case(
        "imgkit sif",
        "ok",
        (f"4.6.1 at {{}}/{LIBEXEC}",),
        {**HERE, "bin/mksquashfs": OLD, f"{LIBEXEC}/mksquashfs": NEW},
    ),
    "emulator": Case("emulation", "ok", (), {}, {"qemu": "enabled\ninterpreter /q\nflags: F"}, OLIVIA),
    "no fixed interpreter": Case(
        "emulation", "warn", ("-> --install arm64",), {}, {"qemu": "enabled\nflags: "}, OLIVIA
    ),
    "disabled emulator": Case(
        "emulation", "warn", ("-> --install arm64",), {}, {"qemu": "disabled\nflags: F"}, OLIVIA
    ),
}
for folder in ("bin", LIBEXEC, "libexec/apptainer/bin", "utils/bin", "x86_64/utils/bin"):
    CASES[f"mksquashfs in {folder}"] = Case(
        "imgkit sif",
        "ok",
        (f"itself, with mksquashfs 4.6.1 at {{}}/{folder}/mksquashfs", "Singularity 3.8 or later"),
        {**HERE, f"{folder}/mksquashfs": NEW},
    )
for version, verdict in (
    ("singularity version 3.7.4", "warn"),
    ("singularity-ce version 4.1.0", "ok"),
    ("singularity version 3.8.0", "ok"),
    ("singularitypro version 3.11-2", "ok"),
    ("apptainer version 1.0.0", "ok"),
):
    text = f"^{version.replace(' version', '')} at {{}}/bin/singularity, "
    texts = (text, "-> 3.8") if verdict == "warn" else (text,)
    CASES[version] = Case("singularity", verdict, texts, {"bin/singularity": f'echo "{version}"'})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_machine_is_judged_by_what_it_has(programs, root, case):
    prefix = programs.parent
    for path, script in case.programs.items():
        write_program(prefix / path, script)
    check = look(case.target, machine=root(**case.files))[case.check]
    assert check.verdict == case.verdict
    for text in case.texts:
        advice = text.removeprefix("-> ")
        assert advice.format(prefix) in (f"^{check.found}" if advice == text else check.hint)


def test_root_needs_no_namespaces(runtime, root):
    assert "user namespaces" not in look(machine=root(uid=0, userns="0"))


@pytest.mark.parametrize(("purpose", "verdict"), [("any", "warn"), ("sif", "warn"), ("build", "fail")])
def test_missing_engine_fails_only_builders(runtime, purpose, verdict, monkeypatch):
    """Nor those, where the runtime builds."""
    cases: tuple[tuple[Verdict, Verdict], ...] = (("warn", verdict), ("ok", "warn"))
    for way, expected in cases:
        build_check = Check("build --with apptainer", way, "x", "x")
        monkeypatch.setattr(doctor, "_check_build_rights", lambda _, check=build_check: check)
        check = look(purpose=purpose, machine=ROOT)["docker"]
        assert check.verdict == expected
        assert ("--with apptainer" in check.hint) == (purpose == "build" and way == "ok")


@pytest.mark.parametrize(("purpose", "verdict"), [("any", "warn"), ("build", "warn"), ("sif", "fail")])
def test_missing_runtime_fails_only_conversions(programs, purpose, verdict, monkeypatch):
    monkeypatch.setattr(doctor, "_check_engine", lambda: Check("docker", "ok", "x"))
    assert look(purpose=purpose)["imgkit sif"].verdict == verdict


def test_setuid_runtime_needs_no_namespaces(runtime, root):
    starter = write_program(runtime.parent.parent / "libexec/singularity/bin/starter-suid", "")
    starter.chmod(0o4755)
    checks = look(machine=root(userns="0"))
    assert checks["user namespaces"].verdict == "ok"
    assert "fuse" not in checks


@pytest.mark.parametrize(
    ("subfolder", "flavour"), [("etc", "singularity"), ("etc", "apptainer"), ("x86_64/etc", "apptainer")]
)
@pytest.mark.parametrize("folder_only", [True, False])
def test_mksquashfs_of_the_configuration_is_found(runtime, tmp_path, subfolder, flavour, folder_only):
    program = write_program(tmp_path / "own tools/mksquashfs", NEW)
    value = program.parent if folder_only else program
    text = f"# mksquashfs path = /commented\nmksquashfs path = {value}"
    write_files(runtime.parent.parent, {f"{subfolder}/{flavour}/{flavour}.conf": text})
    assert f"mksquashfs 4.6.1 at {program}" in look(machine=ROOT)["imgkit sif"].found


def test_absent_mksquashfs_of_the_configuration_is_ignored(runtime):
    text = b"mksquashfs path = /absent\nmksquashfs path =\n\xff\0"
    write_files(runtime.parent.parent, {"etc/singularity/singularity.conf": text})
    assert "mksquashfs is not on this machine" in look(machine=ROOT)["imgkit sif"].found


def test_machine_without_runtime_still_writes_files(programs):
    write_program(programs / "mksquashfs", NEW)
    checks = look(MN5, purpose="sif", machine=ROOT)
    assert (checks["imgkit sif"].verdict, checks["singularity"].verdict) == ("ok", "warn")
    assert "module load gcc singularity" in checks["singularity"].hint
    assert "\n" not in checks["singularity"].hint
    assert passed(tuple(checks.values()))


def test_tmp_in_memory_warns(programs, root, monkeypatch, tmp_path):
    (tmp_path / "scratch dir").mkdir()
    monkeypatch.setenv("APPTAINER_TMPDIR", str(tmp_path / "scratch dir"))
    escaped = str(tmp_path / "scratch dir").replace(" ", "\\040")
    check = look(machine=root(mounts=f"/dev/vda / ext4 rw 0 0\ntmpfs {escaped} tmpfs rw 0 0"))["disk tmp"]
    assert check.verdict == "warn"
    assert "--tmpdir" in check.hint


def test_absent_tmp_is_told(runtime, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/nonexistent/tmp")
    check = look(purpose="sif", machine=ROOT)["disk tmp"]
    assert check.verdict == "fail"
    assert "TMPDIR" in check.hint


@pytest.mark.parametrize(("squashes", "enough"), [(NEW, 10), (OLD, 40), (BROKEN, 76)])
def test_disk_that_the_way_fills_warns(
    runtime,
    root,
    monkeypatch,
    squashes,
    enough,
):
    """The stream needs room for the .sif alone, plain files for the image, a runtime for three of them."""
    write_program(runtime.parent / "mksquashfs", squashes)
    for free, verdict in ((enough, "ok"), (enough - 1, "warn")):
        usage = type("usage", (), {"free": free * 10**9})
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        machine = root(uid=0, mounts="/dev/vda / ext4 rw 0 0")
        check = look(purpose="sif", machine=machine)["disk tmp"]
        assert check.verdict == verdict


def test_own_architecture_needs_no_emulation(programs, root):
    assert "emulation" not in look(OLIVIA, machine=root(arch="arm64"))
