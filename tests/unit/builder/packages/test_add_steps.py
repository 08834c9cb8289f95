"""``imgkit add`` on a remote, with programs that stand for the runtime and mksquashfs."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import os
import sys
import tarfile
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from file_tree import FakeProgram, write_files
from package_index import write_wheel

from imgkit_builder.packages import add, record
from imgkit_builder.packages.add import AddedFile, AddRequest, ImageMachine
from imgkit_entrypoints.errors import ToolFailed, ToolMissing, UsageError

# It runs the Python of this machine for that of the image. The folder of the first --bind stands for its path
# in the container, also in the order.
RUNTIME = f"""\
for argument; do
    case $argument in *:/run/imgkit/add) folder=${{argument%:*}} ;; esac
done
sed -i "s|/run/imgkit/add|$folder|g" "$folder/request.json"
exec {sys.executable} -s "$folder/inside.py"
"""
SQUASH = 'ls "$1" > "$2"'
Add = Callable[..., AddedFile]


@pytest.fixture
def there(tmp_path: Path, fake_program: FakeProgram) -> Path:
    """The folder of the image."""
    fake_program("singularity", RUNTIME)
    fake_program("mksquashfs", SQUASH)
    there = tmp_path / "there"
    there.mkdir()
    (there / "x.sif").write_bytes(bytes(32) + b"SIF_MAGIC\0")
    return there


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "lib", "1.0")
    write_wheel(wheels, "other", "1.0")
    return wheels


@pytest.fixture
def machine() -> ImageMachine:
    """This machine as a remote."""
    return dataclasses.replace(add.this_machine(), remote="far")


@pytest.fixture
def add_there(there: Path, machine: ImageMachine) -> Add:
    """``add_there(wheels=wheels)`` adds ``lib`` to the image of the remote."""

    def run(machine: ImageMachine = machine, **values: Any) -> AddedFile:
        request = AddRequest(**{"requirements": ("lib",), "image": there / "x.sif", **values})
        return add.add(request, machine=machine)

    return run


def test_wheels_of_this_machine_are_sent(there, wheels, add_there):
    added = add_there(wheels=wheels)
    assert added.path == there / "x+1.sqsh"
    assert b"lib-1.0.dist-info\nlib.py\n" in added.path.read_bytes()
    stored = record.read_record(added.path)
    assert [package.name for package in stored.packages] == ["lib"]
    assert record.squashfs_sha256(added.path) == stored.squashfs_sha256
    assert sorted(path.name for path in there.iterdir()) == ["x+1.sqsh", "x.sif"]


def test_requirements_file_is_sent_with_those_that_it_names(wheels, tmp_path, add_there):
    file = write_files(tmp_path, {"all.txt": "-r base.txt\nother\n", "base.txt": "lib\n"}) / "all.txt"
    added = add_there(requirements=(), requirements_file=file, wheels=wheels)
    assert [package.name for package in added.record.packages] == ["lib", "other"]


def test_project_is_sent_without_its_environment(machine, tmp_path, add_there):
    project = write_files(tmp_path / "project", {".venv/large": "", "lib.py": ""})
    tars = []

    def run(script: str, args: Sequence[str], data: Iterable[bytes]) -> Generator[bytes, None, None]:
        step, *_ = args
        if step == "look":
            return machine.run(script, args, data)
        tars.append(b"".join(data))
        return (line for line in (b"problem busy\n",))

    with pytest.raises(UsageError, match="another imgkit process"):
        add_there(dataclasses.replace(machine, run=run), requirements=(), project=project)
    with tarfile.open(fileobj=io.BytesIO(*tars)) as tar:
        names = tar.getnames()
    assert {"project/lib.py", "inside.py", "request.json"} <= {*names}
    assert not any("large" in name for name in names)


def test_modules_are_words_and_no_shell_text(machine, wheels, tmp_path, monkeypatch, add_there):
    (tmp_path / ".bash_profile").write_text(
        f'PATH={os.environ["PATH"]}\nmodule() {{ echo "$*" > loaded; }}\n'
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    add_there(dataclasses.replace(machine, modules=("apptainer/1.4", "x; touch ran")), wheels=wheels)
    assert (tmp_path / "loaded").read_text() == "load apptainer/1.4 x; touch ran\n"
    assert not (tmp_path / "ran").exists()


def test_equal_request_installs_nothing(tmp_path, wheels, fake_program, add_there):
    requirements = (f"lib @ file://{write_wheel(tmp_path, 'lib', '1.0')}",)
    assert not add_there(requirements=requirements).up_to_date
    fake_program("singularity", "exit 1")
    assert add_there(requirements=requirements).up_to_date
    with pytest.raises(UsageError, match=r"the file exists and holds 'lib @ file"):
        add_there()
    output = tmp_path / "other.sqsh"
    fake_program("singularity", RUNTIME)
    added = add_there(wheels=wheels, output=output)
    fake_program("singularity", "exit 1")
    with pytest.raises(ToolFailed):  # the wheels may have changed, so pip is asked again
        add_there(wheels=wheels, output=output)
    assert record.read_record(output) == added.record


def test_failure_of_pip_leaves_nothing(there, wheels, add_there):
    with pytest.raises(UsageError, match="there is no nothing-like-it for Python 3"):
        add_there(requirements=("nothing-like-it",), wheels=wheels)
    assert [path.name for path in there.iterdir()] == ["x.sif"]


@pytest.mark.parametrize(
    ("printed", "message", "hint"),
    [
        (
            "FATAL: the image has an architecture (arm64) that could not run on the host (amd64)",
            "another processor",
            "srun --nodes 1 --ntasks 1 imgkit add lib --image {}/x.sif\n",
        ),
        ('FATAL: "python3": executable file not found in $PATH', "the image has no python3", "another image"),
        ("OSError: [Errno 28] No space left on device", "is full", "-o FILE on a larger disk"),
        ("FATAL: something new", "singularity failed with exit code 255", "FATAL: something new\nfull log: "),
    ],
)
def test_image_that_does_not_start_is_explained(there, fake_program, add_there, printed, message, hint):
    fake_program("singularity", f"echo '{printed}'; exit 255")
    with pytest.raises((UsageError, ToolFailed), match=message) as caught:
        add_there()
    assert hint.format(there) in f"{caught.value.hint}\n"
    assert [path.name for path in there.iterdir()] == ["x.sif"]


def test_second_command_is_refused(there, wheels, add_there):
    folder = there / ".packages.x+1.sqsh"
    folder.mkdir()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another imgkit process is writing this file"):
            add_there(wheels=wheels)
    (folder / "0123").mkdir()  # of a command that was killed
    add_there(wheels=wheels)
    assert not folder.exists()


def test_machine_without_mksquashfs_is_refused(machine, add_there):
    def run(script: str, args: Sequence[str], data: Iterable[bytes]) -> Generator[bytes, None, None]:
        # The folders of mksquashfs on this machine cannot be left out of PATH.
        return machine.run(script.replace("command -v mksquashfs", "false"), args, data)

    with pytest.raises(ToolMissing, match="mksquashfs is not on this machine"):
        add_there(dataclasses.replace(machine, run=run))


def test_relative_image_of_a_remote_is_refused(add_there):
    with pytest.raises(UsageError, match=r"'x\.sif' is not a path on the remote"):
        add_there(image=Path("x.sif"))


@pytest.mark.parametrize("output", ["extra.sqsh", "below/extra.sqsh"])
def test_relative_output_on_a_remote_is_refused(there, wheels, tmp_path, monkeypatch, add_there, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    with pytest.raises(UsageError, match=rf"--output: '{output}' is not a path on the remote") as caught:
        add_there(output=Path(output), wheels=wheels)
    assert caught.value.hint == f"its absolute path there: -o {there}/extra.sqsh"
    assert not list(tmp_path.rglob("extra.sqsh"))


def test_hint_names_an_absolute_path_on_a_remote(there, machine, add_there):
    def run(script: str, args: Sequence[str], data: Iterable[bytes]) -> Generator[bytes, None, None]:
        return (line for line in (b"problem not-writable\n",))

    with pytest.raises(UsageError, match=f"you may not write in {there}") as caught:
        add_there(dataclasses.replace(machine, run=run))
    assert caught.value.hint == "-o FILE.sqsh, in a folder of yours: -o /home/ME/x+1.sqsh"
