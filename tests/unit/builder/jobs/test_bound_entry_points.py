"""Images that imgkit did not build: what a look decides, with a fake runtime that answers in its place."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import small_sif
from job_builder import make_job, make_script, write_recipe

from imgkit_builder.base.process import Finished
from imgkit_builder.base.progress import Silent
from imgkit_builder.image import inside
from imgkit_builder.jobs import checks, entry_points, submit, systems
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.prepared import PreparedJob
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.transport import Transport
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


def fake(text: str = "", code: int = 0, *, digest: str = DIGEST, **seen: Any) -> entry_points.Runner:
    """A fake of the shell and the runtime: the image has `digest`, and its Python sees `seen`."""

    def run(argv: Sequence[str]) -> Finished:
        if argv[0] == "sh":
            return Finished(argv=tuple(argv), returncode=0, output=f"{digest}  -\n" if digest else "")
        answer = f"IMGKIT-PYTHON {json.dumps({**SEEN, **seen})}\n"
        return Finished(argv=tuple(argv), returncode=code, output=text or f"INFO: hello\n{answer}bye\n")

    return run


def bind(folder: Path, run: entry_points.Runner, recipe: Path | str = "mn5", **options: Any) -> Job:
    job = make_job(recipe, directory=folder, **{"image": "/site.sif", **options})
    return entry_points.bind_entry_points(job, run)


def test_entry_points_are_bound_and_started_by_the_image_s_python(tmp_path):
    bound_job = bind(tmp_path, fake(), env=("A=b",))
    folder = f"{tmp_path}/imgkit-entrypoints/{entry_points.folder_name(bound_job)}"
    argv = runtime_of(bound_job).argv(bound_job, bound_job.command)
    assert f"{folder}/imgkit_entrypoints:{SEEN['site']}/imgkit_entrypoints:ro" in argv
    assert f"{folder}/system.json:/opt/imgkit/system.json:ro" in argv
    assert argv[-8:] == (
        *("/site.sif", "env", "A=b", SEEN["path"], "-I", "-m", "imgkit_entrypoints", "dist-hello"),
    )
    assert bound_job.container.entry_points
    assert bound_job.container.entry_points.version == __version__


def put(job: Job) -> None:
    """Write the folder that is bound where the job looks for it."""
    Transport().put_entry_points(job, Silent())


def test_folder_holds_the_package_and_the_system(tmp_path):
    bound_job = bind(tmp_path, fake())
    folder = entry_points.mounted_folder(bound_job)
    put(bound_job)
    assert system.from_json((folder / "system.json").read_text()) == bound_job.recipe.system
    assert (folder / "imgkit_entrypoints/__main__.py").is_file()
    assert (folder / ".gitignore").read_text() == "*\n"  # neither git nor --code takes it for the user's code
    before = folder.stat().st_mtime_ns
    put(bound_job)
    assert folder.stat().st_mtime_ns == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_any_other_command_runs_in_any_image(tmp_path):
    bound_job = bind(tmp_path, fake(torch=""), command=("sh", "-c", "date"), activate="A=1")
    assert bound_job.container.entry_points is None
    argv = runtime_of(bound_job).argv(bound_job, bound_job.command)
    assert argv[-5:] == ("bash", "A=1", "sh", "-c", "date")


def test_folder_that_another_could_change_is_refused(tmp_path):
    bound_job = bind(tmp_path, fake())
    folder = entry_points.mounted_folder(bound_job)
    folder.parent.mkdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="the job would execute what is in it"):
        put(bound_job)


def test_image_is_looked_at_once(tmp_path):
    bind(tmp_path, fake())
    assert bind(tmp_path, fake("no answer any more")).container.entry_points
    with pytest.raises(UsageError, match="no answer any more"):
        bind(tmp_path, fake("no answer any more", digest="f" * 64))


def test_image_that_has_entry_points_is_left_alone(tmp_path):
    has_them = fake(built=True, entry_points="/usr/lib/python3/dist-packages")
    assert bind(tmp_path, has_them).container.entry_points is None


def test_chosen_python_of_imgkit_s_own_image_is_bound_over_it(tmp_path):
    bound_job = bind(tmp_path, fake(built=True, entry_points="/opt/x"), python="/opt/x/bin/python")
    assert bound_job.container.entry_points
    assert bound_job.container.entry_points.package_folder == "/opt/x"


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
def test_image_that_cannot_run_the_entry_points_is_refused(tmp_path, run, options, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        bind(tmp_path, run, **options)


def test_missing_runtime_names_its_module(tmp_path):
    with pytest.raises(ToolMissing, match="'module load singularity' fails here: bash: singularity: command"):
        bind(tmp_path, fake("bash: singularity: command not found\n", 127))


def test_encrypted_sif_is_refused(tmp_path):
    path = small_sif.write(tmp_path / "secret.sif", recorded=False)
    data = path.read_bytes()
    plain, encrypted = (kind.to_bytes(4, "little") + (2).to_bytes(4, "little") for kind in (1, 5))
    assert data.count(plain + b"02") == 1
    path.write_bytes(data.replace(plain + b"02", encrypted + b"02"))
    with pytest.raises(UsageError, match="the \\.sif is encrypted"):
        entry_points.bind_entry_points(make_job(image=str(path)))


def test_foreign_architecture_is_named_before_a_look(tmp_path):
    path = small_sif.write(tmp_path / "arm.sif", recorded=False, arch="arm64")
    job = make_job(image=str(path), directory=tmp_path)
    prepared = PreparedJob(job=job, script=make_script())
    assert submit.bind_entry_points(prepared, Transport()).job is job
    with pytest.raises(UsageError, match="the image is for arm64, but the nodes are amd64"):
        checks.before_submission(job)


def test_look_on_a_remote_mounts_what_the_remote_has(tmp_path):
    libs = "extends: mn5\nsystem: {runtime: {host_libs: [/far/lib, /none/lib]}}\n"
    probes: list[Sequence[str]] = []

    def run(argv: Sequence[str]) -> Finished:
        if "/far/lib" in argv:  # which of these paths exist?
            return Finished(argv=tuple(argv), returncode=0, output="/far/data\n/far/lib\n")
        if argv[0] != "sh":
            probes.append(argv)
        return fake()(argv)

    bind(tmp_path, run, write_recipe(tmp_path, libs), binds=("/far/data:/data", "/none/data"))
    [probe] = probes
    binds = [value for option, value in itertools.pairwise(probe) if option == "--bind"]
    assert binds == ["/far/lib:/far/lib:ro", "/far/data:/data", str(tmp_path)]


def test_sif_of_imgkit_is_not_looked_at(tmp_path):
    for name, is_recorded in (("own.sif", True), ("b.sif", False)):
        job = make_job(image=str(small_sif.write(tmp_path / name, recorded=is_recorded)))
        assert runtime_of(job).needs_entry_points(job) is not is_recorded


def test_digest_of_the_job_is_the_one_that_was_looked_at(tmp_path):
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
def test_activation_runs_before_the_command(tmp_path, activate, output, code, monkeypatch):
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
def test_image_of_podman_is_known_by_its_id(tmp_path, text):
    def run(argv: Sequence[str]) -> Finished:
        if argv[1:3] == ("image", "inspect"):
            return Finished(argv=tuple(argv), returncode=0, output=f"{text}sha256:{DIGEST}\n")
        return fake()(argv)

    recipe = write_recipe(tmp_path, PODMAN)
    bound_job = bind(tmp_path, run, recipe, image="docker.io/site/torch:1", nodes="2")
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
def test_python_that_prints_at_its_start_is_understood(noise):
    argv = inside.python_probe_argv()
    argv[4] = f"{noise}\n{argv[4]}"
    seen = inside.parse_python_probe(subprocess.check_output(argv, text=True))
    assert seen
    assert seen.path.startswith("/")
    assert tuple(map(int, seen.version.split(".")[:2])) >= (3, 10)
    assert not seen.built


@pytest.mark.parametrize("text", ["", "{}", '{"version": 3}', "[" * 100, "null"])
def test_answer_in_another_form_is_none(text):
    assert inside.parse_python_probe(f"IMGKIT-PYTHON {text}\n") is None
