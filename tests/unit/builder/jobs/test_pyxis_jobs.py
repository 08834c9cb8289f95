"""Jobs that pyxis starts. pyxis and enroot are not here; tests/lab/job/test_pyxis_real.py starts them."""

from __future__ import annotations

import dataclasses
import json
import os
import posixpath
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_sif
from file_tree import write_program
from job_builder import MANIFEST, REQUEST, make_job

from imgkit_builder.jobs import checks, entry_points, submit
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.oci import manifest as manifest_of
from imgkit_builder.oci.manifest import MANIFEST_JSON
from imgkit_builder.recipe.targets import Target, load_target
from imgkit_builder.sif import sqsh
from imgkit_entrypoints import system
from imgkit_entrypoints.errors import CheckFailed, ToolMissing, UsageError
from imgkit_entrypoints.system import Fabric, Runtime

needs_squasher = pytest.mark.programs("mksquashfs", "unsquashfs")
HELLO = REQUEST.changed(nodes="2", time="1h")


def recipe(scheduler: str = "slurm", gpus: int = 0, **runtime: Any) -> Target:
    target = load_target("cpu")
    facts = dataclasses.replace(
        target.system,
        scheduler=scheduler,
        node=dataclasses.replace(target.system.node, gpus=gpus),
        runtime=Runtime(kind="pyxis", **runtime),
        fabric=Fabric(),
    )
    return dataclasses.replace(target, system=facts)


def job(of: Target | None = None, **options: Any) -> Job:
    return make_job(of or recipe(), nodes="2", **options)


def command_of(of: Job) -> tuple[str, ...]:
    return runtime_of(of).argv(of, of.command)


def option(name: str, of: Job) -> str:
    (value,) = [
        argument.partition("=")[2]
        for argument in command_of(of)
        if argument.startswith(f"--container-{name}=")
    ]
    return value


def started(of: Job, environment: Path, *command: str) -> str:
    """What the command prints, started as in the container whose /etc/environment is `environment`."""
    argv = runtime_of(of).argv(of, command)
    argv = tuple(
        argument.replace("/etc/environment", str(environment)) for argument in argv[argv.index("sh") :]
    )
    env = {**os.environ, "PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/own"}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout


def squashed(path: Path, *, manifest: bool = True, arch: str = "amd64", compression: str = "gzip") -> Path:
    """A .sqsh with the system of `recipe`; without a manifest, as another program writes it."""
    folder = path.parent / f"{path.name}.folder"
    (folder / "opt/imgkit").mkdir(parents=True, exist_ok=True)
    (folder / system.SYSTEM_JSON.relative_to("/")).write_text(system.to_json(recipe().system))
    if manifest:
        (folder / MANIFEST_JSON.lstrip("/")).write_text(manifest_of.to_json(MANIFEST))
    subprocess.run(
        ["mksquashfs", folder, path, "-comp", compression, "-quiet", "-no-progress"],
        check=True,
        capture_output=True,
    )
    if manifest:
        record = dataclasses.replace(small_sif.record(), arch=arch)
        sqsh.Sqsh().put_record(path, record, lambda *_: None)
    return path


@pytest.mark.parametrize(
    ("typed", "image"),
    [
        ("", "/w/cpu.sqsh"),
        ("/images/a.sqsh", "/images/a.sqsh"),
        ("images/a.sqsh", "/w/images/a.sqsh"),
        ("./a", "/w/a"),
        ("nvcr.io#nvidia/pytorch:24.03-py3", "nvcr.io#nvidia/pytorch:24.03-py3"),
        ("me@nvcr.io#nvidia/pytorch", "me@nvcr.io#nvidia/pytorch"),
        ("pytorch/pytorch:2.5.1", "pytorch/pytorch:2.5.1"),
        ("ubuntu", "ubuntu"),
    ],
)
def test_image_is_a_file_or_a_name(typed, image):
    assert option("image", job(image=typed)) == image


def test_folder_and_home_are_those_that_are_stated():
    assert option("workdir", job(workdir="/opt/a")) == "/opt/a"
    argv = command_of(job(recipe(options=("--container-mount-home",))))
    assert "--container-mount-home" in argv
    assert "--no-container-mount-home" not in argv


def test_path_is_that_of_the_image(tmp_path):
    file = tmp_path / "environment"
    file.write_text("A=$(touch x)\nPATH=/opt/a b/bin:/usr/bin\nPATHS=/no\nLD_LIBRARY_PATH=/no")
    assert started(job(), file, "printenv", "PATH") == "/opt/a b/bin:/usr/bin\n"
    assert started(job(env=("PATH=/bin",)), file, "printenv", "PATH") == "/bin\n"
    file.write_text('PATH="/usr/bin:/quoted"\n')
    assert started(job(), file, "printenv", "PATH") == "/usr/bin:/bin\n"
    assert started(job(), tmp_path / "none", "printenv", "PATH") == "/usr/bin:/bin\n"


def test_libraries_of_the_host_come_first(tmp_path):
    pyxis_job = job(recipe(host_libs=("/opt/aws",)))
    assert "/opt/aws:/opt/aws:ro," in option("mounts", pyxis_job)
    assert started(pyxis_job, tmp_path / "none", "printenv", "LD_LIBRARY_PATH") == "/opt/aws:/own\n"


SHELL = {
    "PYXIS_CONTAINER_NAME": "other",
    "PYXIS_CONTAINER_UNSHARE": "net",
    "ENROOT_UNSHARE_NET": "yes",
    "ENROOT_REMAP_ROOT": "yes",
    "ENROOT_CACHE_PATH": "/cache",
}


def test_variables_of_the_shell_do_not_reach_pyxis():
    script = "\n".join(("set -eu", *runtime_of(job()).exports(job()), "env"))
    env = {**SHELL, "PATH": "/usr/bin:/bin"}
    result = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True)
    lines = [line for line in result.stdout.splitlines() if line.startswith(("PYXIS", "ENROOT", "NVIDIA"))]
    assert sorted(lines) == ["ENROOT_CACHE_PATH=/cache", "NVIDIA_VISIBLE_DEVICES=void"]
    with_gpus = job(recipe(gpus=4))
    assert not any("NVIDIA" in line for line in runtime_of(with_gpus).exports(with_gpus))


@pytest.mark.parametrize("name", ["PYXIS_CONTAINER_IMAGE", "PYXIS_CONTAINER_NAME"])
def test_variable_that_moves_the_script_is_refused(tmp_path, name, monkeypatch):
    monkeypatch.setenv(name, "")
    with pytest.raises(UsageError, match="would start the job's script itself in a container") as caught:
        checks.before_submission(job(directory=tmp_path))
    assert caught.value.where == name


def looked(of: Job, *, path: str = "/usr/bin:/bin") -> tuple[int, str]:
    """Exit code and messages of the look on a node."""
    argv = runtime_of(of).node_check(of)
    result = subprocess.run(argv, env={"PATH": path}, capture_output=True, text=True, check=False)
    return result.returncode, result.stderr


def test_node_without_the_image_is_named(tmp_path):
    code, messages = looked(job(image="a.sqsh", directory=tmp_path))
    assert code == 2
    assert messages == f"imgkit: node {os.uname().nodename} has no {tmp_path}/a.sqsh, or may not read it\n"
    assert looked(job(image="ubuntu")) == (0, "")


def test_requeued_job_removes_what_its_start_has_left(tmp_path):
    # A stand-in that lists three containers, and tells what it removes.
    names = "pyxis_12.1 pyxis_12_12.1 pyxis_123.1"
    write_program(
        tmp_path / "enroot", f'case $1 in list) echo {names} ;; *) echo "$ENROOT_DATA_PATH$*" >&2 ;; esac'
    )
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "12", "ENROOT_DATA_PATH": "/mine"}
    for variables, messages in (
        ({}, ""),
        ({"SLURM_RESTART_COUNT": "1"}, "remove -f pyxis_12.1\nremove -f pyxis_12_12.1\n"),
    ):
        of = job(image="ubuntu")
        argv = runtime_of(of).node_check(of)
        result = subprocess.run(argv, env={**env, **variables}, capture_output=True, text=True, check=True)
        assert result.stderr == messages


@needs_squasher
def test_node_that_cannot_unpack_the_image_is_named(tmp_path):
    pyxis_job = job(image=str(squashed(tmp_path / "it's.sqsh", compression="xz")), directory=tmp_path)
    assert looked(pyxis_job) == (0, "")
    without_xz = "echo Filesystem uses xz compression, this is unsupported\nexit 1"
    tool = write_program(tmp_path / "bin/unsquashfs", without_xz)
    code, messages = looked(pyxis_job, path=f"{tool.parent}:/usr/bin:/bin")
    assert code == 0
    assert f"{tmp_path}/it's.sqsh (compressed with xz): Filesystem uses xz compression" in messages


@needs_squasher
def test_image_that_is_cut_short_is_refused(tmp_path):
    content = squashed(tmp_path / "cpu.sqsh").read_bytes()
    (tmp_path / "cpu.sqsh").write_bytes(content[:200])
    with pytest.raises(CheckFailed, match="cut short"):
        checks.before_submission(job(directory=tmp_path))


@pytest.mark.parametrize("flag", ["python", "activate"])
def test_image_of_a_registry_is_not_looked_into(flag):
    with pytest.raises(
        UsageError, match="imgkit does not look into me/x:1, an image of a registry"
    ) as caught:
        entry_points.bind_entry_points(job(image="me/x:1", **{flag: "/opt/venv/bin/python"}))
    assert caught.value.where == f"--{flag}"
    assert str(caught.value.hint).endswith("then --image NAME.sqsh")


def test_image_of_a_registry_without_entry_points_ends_with_the_way(tmp_path):
    argv = command_of(job(image="me/x:1"))
    env = {**os.environ, "PATH": "/usr/bin:/bin"}
    result = subprocess.run(argv[argv.index("sh") :], env=env, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert "the image has no dist-run, so imgkit did not build it" in result.stderr
    assert "enroot import -o NAME.sqsh docker://" in result.stderr
    (tmp_path / "dist-run").symlink_to("/bin/true")
    (tmp_path / "dist-hello").symlink_to("/bin/true")
    env["PATH"] += f":{tmp_path}"
    subprocess.run(argv[argv.index("sh") :], env=env, check=True)
    assert "has no dist-run" not in str(command_of(job(image="me/x:1", command=("true",))))


@pytest.mark.parametrize("scheduler", ["pbs", "mpi", "standalone"])
def test_only_slurm_has_pyxis(scheduler):
    with pytest.raises(UsageError, match=r"^\S*:?.*pyxis cannot be used on"):
        job(recipe(scheduler))


@needs_squasher
def test_sqsh_runs_on_its_own_system(tmp_path):
    image = squashed(tmp_path / "a.sqsh")
    prepared = submit.prepare(image, HELLO.changed(directory=tmp_path))
    checks.before_submission(prepared.job)
    assert f"--container-image={image}" in prepared.script.text
    assert prepared.job.warnings == ()


@needs_squasher
def test_runtimes_that_start_no_sqsh_refuse_it(tmp_path):
    image = squashed(tmp_path / "a.sqsh")
    with pytest.raises(UsageError) as caught:
        submit.prepare(image, HELLO.changed(directory=tmp_path, runtime="host"))
    assert (caught.value.what, caught.value.where) == ("host does not start a .sqsh", str(image))
    assert "--runtime singularity" in str(caught.value.hint)


@needs_squasher
def test_singularity_gets_the_variables_of_a_sqsh(tmp_path):
    image = squashed(tmp_path / "a.sqsh")
    request = HELLO.changed(directory=tmp_path, runtime="singularity", env=("B=job",))
    pyxis_job = submit.prepare(image, request).job
    assert isinstance(pyxis_job, Job)
    checks.before_submission(pyxis_job)
    file = tmp_path / "environment"
    file.write_text("PATH=/usr/bin:/bin\nA='$(date)'\nB=image\nQ=  a \nENROOT_X=1\n1X=1\nno\nE=")
    argv = runtime_of(pyxis_job).argv(pyxis_job, ("printenv", "A", "B", "Q", "E"))
    inside = [
        argument.replace("/etc/environment", str(file)) for argument in argv[argv.index(str(image)) + 1 :]
    ]
    assert subprocess.check_output(inside, text=True) == "$(date)\njob\n  a \n\n"
    names = subprocess.check_output([*inside[: inside.index("printenv")], "env"], text=True)
    assert "ENROOT_X" not in names
    assert "1X" not in names


@pytest.mark.parametrize("libraries", ["", "/own", "/own:/.singularity.d/libs"])
def test_libraries_of_the_host_and_of_the_gpu_are_found(tmp_path, libraries):
    of = recipe(host_libs=("/opt/aws",))
    pyxis_job = job(of, runtime="singularity", image="/far/a.sqsh", directory=tmp_path)
    argv = [
        argument.replace("libs=/.singularity.d/libs", "libs=/usr/bin") for argument in command_of(pyxis_job)
    ]
    argv = argv[argv.index("/far/a.sqsh") + 1 : argv.index("dist-hello")]
    env = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": libraries.replace("/.singularity.d/libs", "/usr/bin")}
    output = subprocess.check_output([*argv, "printenv", "LD_LIBRARY_PATH"], env=env, text=True)
    assert output == {"": "/opt/aws:/usr/bin\n"}.get(libraries, "/opt/aws:/own:/usr/bin\n")
    assert not [line for line in runtime_of(pyxis_job).exports(pyxis_job) if "LD_LIBRARY_PATH" in line]


@needs_squasher
def test_sqsh_for_other_nodes_is_refused(tmp_path):
    pyxis_job = job(dataclasses.replace(recipe(), platforms=("linux/arm64",)), directory=tmp_path)
    squashed(tmp_path / "cpu.sqsh")
    with pytest.raises(UsageError, match="the image is for amd64, but the nodes are arm64"):
        checks.before_submission(pyxis_job)


@pytest.mark.parametrize(("text", "message"), [(None, "does not exist"), ("hsif", "is not a .sqsh")])
def test_missing_sqsh_is_refused_before_the_queue(tmp_path, text, message):
    if text:
        (tmp_path / "cpu.sqsh").write_text(text)
    with pytest.raises(UsageError, match=f"the image {message}"):
        checks.before_submission(job(directory=tmp_path))


SEEN = {"version": "3.11.2", "path": "/opt/x/bin/python", "machine": "x86_64", "site": "/opt/x/site-packages"}
STARTERS = ("apptainer", "singularity", "enroot")


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Fakes of programs that start a .sqsh: each notes its arguments, and its image's Python answers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("sh", "head", "tail", "stat", "sha256sum", "mksquashfs", "unsquashfs", "env"):
        (folder / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(folder))

    def write(name: str, code: int = 0, **seen: str) -> Path:
        arguments_file = tmp_path / f"{name}.words"
        fields = {**SEEN, "torch": "2.5.1", "entry_points": "", "built": False, **seen}
        answer = "FATAL: it is broken" if code else f"IMGKIT-PYTHON {json.dumps(fields)}"
        note = f"printf '%s\\n' \"$@\" >> {arguments_file}\necho 'hello of a sitecustomize'"
        write_program(folder / name, f"{note}\necho '{answer}'\nexit {code}")
        return arguments_file

    return write


@needs_squasher
@pytest.mark.parametrize("program", STARTERS)
def test_sqsh_of_another_program_is_looked_into_by(tmp_path, program, starter):
    image = squashed(tmp_path / "a.sqsh", manifest=False)
    arguments_file = starter(program)
    pyxis_job = job(image=str(image), directory=tmp_path, binds=(f"{tmp_path}:/data:ro",), activate="A=1")
    checks.before_submission(pyxis_job)
    bound_job = entry_points.bind_entry_points(pyxis_job)
    arguments = arguments_file.read_text().splitlines()
    assert {str(image), "A=1"} <= {*arguments}
    assert f"{tmp_path}:/data" in " ".join(arguments)
    mounts = option("mounts", bound_job)
    folder = f"{tmp_path}/imgkit-entrypoints/{entry_points.folder_name(bound_job)}"
    assert f"{folder}/imgkit_entrypoints:/opt/x/site-packages/imgkit_entrypoints:ro" in mounts
    assert f"{folder}/system.json:/opt/imgkit/system.json:ro" in mounts
    started = ("bash", "A=1", "/opt/x/bin/python", "-I", "-m", "imgkit_entrypoints", "dist-hello")
    assert command_of(bound_job)[-7:] == started
    before = arguments_file.read_text()
    assert entry_points.bind_entry_points(pyxis_job) == bound_job
    assert arguments_file.read_text() == before  # the second job does not look


@needs_squasher
@pytest.mark.parametrize(
    ("fake", "options", "message"),
    [
        ({}, {}, "nothing here starts a .sqsh"),
        ({"version": "3.9.1"}, {}, "is 3.9.1; the entry points need Python 3.10"),
        ({"site": "/opt/a b"}, {}, "has no folder of packages"),
        ({"code": 255}, {}, "found no Python in it: FATAL: it is broken"),
        ({"code": 3}, {"activate": "x"}, "the command fails in"),
    ],
)
def test_sqsh_that_cannot_run_the_entry_points_is_refused(tmp_path, starter, fake, options, message):
    image = squashed(tmp_path / "a.sqsh", manifest=False)
    if fake:
        starter("apptainer", **fake)
    with pytest.raises((ToolMissing, UsageError), match=message) as caught:
        entry_points.bind_entry_points(job(image=str(image), directory=tmp_path, **options))
    if not fake:
        assert all(name in str(caught.value.hint) for name in STARTERS)


@needs_squasher
def test_compression_that_old_nodes_lack_is_named(tmp_path):
    image = squashed(tmp_path / "a.sqsh", compression="zstd")
    (warning,) = job(image=str(image)).warnings
    assert warning.startswith("a.sqsh is compressed with zstd: unsquashfs of RHEL 8 cannot read that")
    assert job(recipe(compression="zstd"), image=str(image)).warnings == ()


@needs_squasher
@pytest.mark.parametrize("program", [b"", b"\x7fELF", b"#!/bin/sh\n", b"\x7fELF\x02\x02" + bytes(20)])
def test_shell_that_tells_no_architecture_is_not_judged(tmp_path, program):
    (tmp_path / "a.sqsh.folder/bin").mkdir(parents=True)
    (tmp_path / "a.sqsh.folder/bin/sh").write_bytes(program)
    image = squashed(tmp_path / "a.sqsh", manifest=False)
    of = job(image=str(image), directory=tmp_path)
    assert runtime_of(of).arch_error(of) is None


@needs_squasher
@pytest.mark.parametrize("runtime", ["pyxis", "singularity"])
@pytest.mark.parametrize("link", ["", "busybox", "/usr/bin/../bin/busybox", "sh"])
def test_architecture_of_another_program_s_sqsh_is_that_of_its_shell(tmp_path, link, runtime):
    programs = tmp_path / "a.sqsh.folder/usr/bin"
    programs.mkdir(parents=True)
    (tmp_path / "a.sqsh.folder/bin").symlink_to("usr/bin")
    program = b"\x7fELF\x02\x01".ljust(18, b"\0") + (0xB7).to_bytes(2, "little") + bytes(100)
    (programs / (posixpath.basename(link) if link != "sh" and link else "sh")).write_bytes(program)
    if link and link != "sh":
        (programs / "sh").symlink_to(link)
    elif link:
        (programs / "sh").unlink()
        (programs / "sh").symlink_to("sh")  # a link to itself leads nowhere
    image = squashed(tmp_path / "a.sqsh", manifest=False)
    amd = dataclasses.replace(recipe(), platforms=("linux/amd64",))
    pyxis_job = job(amd, image=str(image), directory=tmp_path, runtime=runtime)
    if link == "sh":
        assert runtime_of(pyxis_job).arch_error(pyxis_job) is None
        return
    with pytest.raises(UsageError, match="the image is for arm64, but the nodes are amd64"):
        checks.before_submission(pyxis_job)
