"""Images that imgkit did not build: what a look decides, with a fake runtime that answers in its place."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import small_sif

from imgkit_builder.base.process import Finished
from imgkit_builder.image import inside
from imgkit_builder.jobs import bound, checks, submit, systems
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve_job
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.transport import Transport
from imgkit_builder.recipe.targets import load_target
from imgkit_entrypoints import __version__, system
from imgkit_entrypoints.errors import ToolMissing, UsageError

pytestmark = pytest.mark.usefixtures("home")

DIGEST = "0123456789abcdef" * 4
SEEN = {
    "version": "3.11.2",
    "path": "/opt/venv/bin/python",
    "machine": "x86_64",
    "site": "/opt/venv/lib/python3.11/site-packages",
    "torch": "2.5.1",
    "entry_points": "",
    "built": False,
}
HELLO = JobRequest.of(command=("dist-hello",), image="/site.sif", account="a", qos="acc_debug", time="5m")


def job(folder: Path, **options: Any) -> Job:
    return resolve_job(load_target("mn5"), HELLO.changed(directory=folder, **options))


def fake(text: str = "", code: int = 0, *, digest: str = DIGEST, **seen: Any) -> bound.Runner:
    """A fake of the shell and the runtime: the image has `digest`, and its Python sees `seen`."""

    def run(argv: Sequence[str]) -> Finished:
        if argv[0] == "sh":
            return Finished(argv=tuple(argv), returncode=0, output=f"{digest}  -\n" if digest else "")
        answer = f"IMGKIT-PYTHON {json.dumps({**SEEN, **seen})}\n"
        return Finished(argv=tuple(argv), returncode=code, output=text or f"INFO: hello\n{answer}bye\n")

    return run


def bind(folder: Path, run: bound.Runner, **options: Any) -> Job:
    return bound.bind_entry_points(job(folder, **options), run)


def test_entry_points_are_bound_and_started_by_the_image_s_python(tmp_path: Path) -> None:
    bound_job = bind(tmp_path, fake(), env=("A=b",))
    folder = f"{tmp_path}/imgkit-entrypoints/{bound.folder_name(bound_job)}"
    argv = runtime_of(bound_job).argv(bound_job, bound_job.command)
    assert f"{folder}/imgkit_entrypoints:{SEEN['site']}/imgkit_entrypoints:ro" in argv
    assert f"{folder}/system.json:/opt/imgkit/system.json:ro" in argv
    assert argv[-8:] == (
        *("/site.sif", "env", "A=b", SEEN["path"], "-I", "-m", "imgkit_entrypoints", "dist-hello"),
    )
    assert bound_job.container.bound
    assert bound_job.container.bound.version == __version__


def put(job: Job) -> None:
    """Write the folder that is bound where the job looks for it."""
    assert job.container.bound
    bound.write_folder(Path(job.container.bound.folder), functools.partial(bound.write_bound_files, job))


def test_folder_holds_the_package_and_the_system(tmp_path: Path) -> None:
    bound_job = bind(tmp_path, fake())
    assert bound_job.container.bound
    folder = Path(bound_job.container.bound.folder)
    put(bound_job)
    assert system.from_json((folder / "system.json").read_text()) == bound_job.recipe.system
    assert (folder / "imgkit_entrypoints/__main__.py").is_file()
    assert (folder / ".gitignore").read_text() == "*\n"  # neither git nor --code takes it for the user's code
    before = folder.stat().st_mtime_ns
    put(bound_job)
    assert folder.stat().st_mtime_ns == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_any_other_command_runs_in_any_image(tmp_path: Path) -> None:
    bound_job = bind(tmp_path, fake(torch=""), command=("sh", "-c", "date"), activate="A=1")
    assert bound_job.container.bound is None
    argv = runtime_of(bound_job).argv(bound_job, bound_job.command)
    assert argv[-5:] == ("bash", "A=1", "sh", "-c", "date")


def test_folder_that_another_could_change_is_refused(tmp_path: Path) -> None:
    bound_job = bind(tmp_path, fake())
    assert bound_job.container.bound
    folder = Path(bound_job.container.bound.folder)
    folder.parent.mkdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="the job would execute what is in it"):
        put(bound_job)


def test_image_is_looked_at_once(tmp_path: Path) -> None:
    bind(tmp_path, fake())
    assert bind(tmp_path, fake("no answer any more")).container.bound
    with pytest.raises(UsageError, match="no answer any more"):
        bind(tmp_path, fake("no answer any more", digest="f" * 64))


def test_image_that_has_entry_points_is_left_alone(tmp_path: Path) -> None:
    assert (
        bind(tmp_path, fake(built=True, entry_points="/usr/lib/python3/dist-packages")).container.bound
        is None
    )


def test_chosen_python_of_imgkit_s_own_image_is_bound_over_it(tmp_path: Path) -> None:
    bound_job = bind(tmp_path, fake(built=True, entry_points="/opt/x"), python="/opt/x/bin/python")
    assert bound_job.container.bound
    assert bound_job.container.bound.site == "/opt/x"


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        (fake(version="3.9.18"), {}, "/opt/venv/bin/python, is 3.9.18; the entry points need Python 3.10"),
        (fake(version="2.7.5", site=""), {}, "is 2.7.5; the entry points need"),
        (fake(torch=""), {}, "is 3.11.2 and has no torch"),
        (fake(machine="aarch64"), {}, "is 3.11.2 and for aarch64, but the nodes are amd64"),
        (fake(torch="2.5.1+rocm6.2"), {}, "torch 2.5.1+rocm6.2 of this image is for AMD GPUs"),
        (fake(site=""), {}, "has no folder of packages"),
        (fake(site="/opt/a:b"), {}, "has no folder of packages"),
        (fake("no program python3\n", 127), {}, "found no Python in it: no program python3"),
        (fake("FATAL: no such option\n", 255), {}, "found no Python in it: FATAL: no such option"),
        (
            fake("a\nno such env\n", 3),
            {"activate": "source x"},
            "the command fails in /site.sif: no such env",
        ),
        (fake(digest=""), {}, "/site.sif does not exist or cannot be read on the remote"),
        (fake(), {"python": "bin/python"}, "'bin/python' is not a Python of the image"),
        (fake(), {"python": "/x", "command": ("sh",)}, "the job runs none"),
        (fake(), {"python": "/a:b"}, "is not a Python of the image"),
        (fake(), {"activate": "a\nb"}, "holds a control character"),
        (fake(), {"python": "/x", "runtime": "host", "image": ""}, "host binds nothing into an image"),
    ],
)
def test_image_that_cannot_run_the_entry_points_is_refused(
    tmp_path: Path, run: bound.Runner, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        bind(tmp_path, run, **options)


def test_missing_runtime_names_its_module(tmp_path: Path) -> None:
    with pytest.raises(ToolMissing, match="'module load singularity' fails here: bash: singularity: command"):
        bind(tmp_path, fake("bash: singularity: command not found\n", 127))


def test_encrypted_sif_is_refused(tmp_path: Path) -> None:
    path = small_sif.write(tmp_path / "secret.sif", recorded=False)
    data = path.read_bytes()
    plain, encrypted = (kind.to_bytes(4, "little") + (2).to_bytes(4, "little") for kind in (1, 5))
    assert data.count(plain + b"02") == 1
    path.write_bytes(data.replace(plain + b"02", encrypted + b"02"))
    with pytest.raises(UsageError, match="the \\.sif is encrypted"):
        bound.bind_entry_points(job(tmp_path, image=str(path)))


def test_foreign_architecture_is_named_before_a_look(tmp_path: Path) -> None:
    path = small_sif.write(tmp_path / "arm.sif", recorded=False, arch="arm64")
    prepared = submit.prepare("mn5", HELLO.changed(image=str(path), directory=tmp_path))
    assert submit.bind_entry_points(prepared, Transport()).job is prepared.job
    assert isinstance(prepared.job, Job)
    with pytest.raises(UsageError, match="the image is for arm64, but the nodes are amd64"):
        checks.before_submission(prepared.job)


def test_look_on_a_remote_mounts_what_the_remote_has(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extends: mn5\nsystem: {runtime: {host_libs: [/far/lib, /none/lib]}}\n")
    probes: list[Sequence[str]] = []

    def run(argv: Sequence[str]) -> Finished:
        if "/far/lib" in argv:  # which of these paths exist?
            return Finished(argv=tuple(argv), returncode=0, output="/far/data\n/far/lib\n")
        if argv[0] != "sh":
            probes.append(argv)
        return fake()(argv)

    request = HELLO.changed(directory=tmp_path, binds=("/far/data:/data", "/none/data"))
    bound.bind_entry_points(resolve_job(load_target(file), request), run)
    [probe] = probes
    binds = [value for option, value in itertools.pairwise(probe) if option == "--bind"]
    assert binds == ["/far/lib:/far/lib:ro", "/far/data:/data", str(tmp_path)]


def test_sif_of_imgkit_is_not_looked_at(tmp_path: Path) -> None:
    for name, is_recorded in (("own.sif", True), ("b.sif", False)):
        foreign_job = job(tmp_path, image=str(small_sif.write(tmp_path / name, recorded=is_recorded)))
        assert runtime_of(foreign_job).is_foreign(foreign_job) is not is_recorded


def test_digest_of_the_job_is_the_one_that_was_looked_at(tmp_path: Path) -> None:
    image = tmp_path / "an image"
    image.write_bytes(bytes(200_000))
    digests: list[str] = []

    def run(argv: Sequence[str]) -> Finished:
        if argv[0] != "sh":
            return fake()(argv)
        result = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
        digests.append(result.stdout)
        return Finished(argv=tuple(argv), returncode=0, output=result.stdout)

    bound_job = bind(tmp_path, run, image=str(image))
    line = runtime_of(bound_job).exports(bound_job)[-1]
    shell = ("bash", "-c", f"{line}\necho starts")
    assert subprocess.run(shell, stdout=subprocess.PIPE, check=True).stdout == b"starts\n"
    for change in (lambda: image.write_bytes(bytes(199_999) + b"x"), image.unlink):
        change()
        result = subprocess.run(shell, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout) == (2, "")
        assert (
            f"imgkit: {image} has changed since its job was submitted, or this node lacks it" in result.stderr
        )


@pytest.mark.parametrize(
    ("activate", "output", "code"),
    [
        ("PATH=/x:$PATH; A=1", "1 a b\n", 0),
        ("$WITH_CONDA", "2 a b\n", 0),
        ("${WITH_CONDA}", "2 a b\n", 0),
        ("echo noise; A=3", "3 a b\n", 0),
        ("false", "", 3),
        ("exit 7", "", 7),
    ],
)
def test_activation_runs_before_the_command(
    tmp_path: Path, activate: str, output: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound_job = bind(tmp_path, fake(), activate=activate)
    argv = runtime_of(bound_job).argv(bound_job, ("sh", "-c", 'echo "$A $1 $2"', "sh", "a", "b"))
    monkeypatch.setenv("WITH_CONDA", "true && export A=2")
    monkeypatch.setenv("A", "0")
    result = subprocess.run(argv[argv.index("/site.sif") + 1 :], capture_output=True, text=True, check=False)
    assert (result.stdout, result.returncode) == (output, code)
    assert ("--activate failed with exit code 1: false" in result.stderr) == (activate == "false")


PODMAN = """\
extends: mn5
system: {runtime: {kind: docker, command: podman, options: [--gpu]}}
"""


@pytest.mark.parametrize("text", ["", "WARN: no network\n"])
def test_image_of_podman_is_known_by_its_id(tmp_path: Path, text: str) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(PODMAN)

    def run(argv: Sequence[str]) -> Finished:
        if argv[1:3] == ("image", "inspect"):
            return Finished(argv=tuple(argv), returncode=0, output=f"{text}sha256:{DIGEST}\n")
        return fake()(argv)

    request = HELLO.changed(image="docker.io/site/torch:1", directory=tmp_path, nodes="2")
    bound_job = bound.bind_entry_points(resolve_job(load_target(file), request), run)
    lines = systems.get_system("slurm").script(bound_job).text
    assert f"""podman image inspect --format '{{{{.Id}}}}' "$image")" != "sha256:{DIGEST}" ]""" in lines
    assert f"--volume {tmp_path}/imgkit-entrypoints/" in lines.replace(" \\\n    ", " ")
    checked(lines)


def checked(script: str) -> None:
    """Fail where shellcheck finds something in `script`."""
    name = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    assert name, "shellcheck is not installed; pip install -e '.[dev]'"
    argv = (name, "--shell=bash", "--severity=style", "--exclude=SC2016", "-")
    result = subprocess.run(argv, input=script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{script}\n{result.stdout}"


@pytest.mark.parametrize("noise", ["", "print('welcome')", "import sys; sys.stdout.write('no line end')"])
def test_python_that_prints_at_its_start_is_understood(
    tmp_path: Path, noise: str, run_python: Callable[[str], str]
) -> None:
    seen = inside.parse_python_probe(run_python(noise))
    assert seen
    assert seen.path.startswith("/")
    assert tuple(map(int, seen.version.split(".")[:2])) >= (3, 10)
    assert not seen.built


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[[str], str]:
    def run(noise: str) -> str:
        argv = inside.python_probe_argv()
        argv[4] = f"{noise}\n{argv[4]}"
        return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout

    return run


@pytest.mark.parametrize("text", ["", "{}", '{"version": 3}', "[" * 100, "null"])
def test_answer_in_another_form_is_none(text: str) -> None:
    assert inside.parse_python_probe(f"IMGKIT-PYTHON {text}\n") is None
