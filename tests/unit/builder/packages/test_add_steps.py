"""``imgkit add`` on a remote, with programs that stand for the runtime and mksquashfs."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import sys
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from file_tree import FakeProgram
from package_index import write_wheel

from imgkit_builder.packages import add, record
from imgkit_builder.packages.add import Added, AddRequest
from imgkit_entrypoints.errors import ToolFailed, ToolMissing, UsageError

# It runs the Python of this machine for that of the image. The folder of the first --bind stands for its path
# in the container, also in the order.
RUNTIME = f"""\
for argument; do
    case $argument in *:/run/imgkit/add) folder=${{argument%:*}} ;; esac
done
sed -i "s|/run/imgkit/add|$folder|g" "$folder/order.json"
exec {sys.executable} -s "$folder/inside.py"
"""
SQUASH = 'ls "$1" > "$2"'


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


def add_there(there: Path, **values: Any) -> Added:
    request = AddRequest(**{"requirements": ("lib",), "image": there / "x.sif", **values})
    return add.add(request, machine=dataclasses.replace(add.this_machine(), remote="far"))


def test_wheels_of_this_machine_are_sent(there: Path, wheels: Path) -> None:
    added = add_there(there, wheels=wheels)
    assert added.path == there / "x+1.sqsh"
    assert b"lib-1.0.dist-info\nlib.py\n" in added.path.read_bytes()
    stored = record.read(added.path)
    assert [package.name for package in stored.packages] == ["lib"]
    assert record.squashfs_sha256(added.path) == stored.squashfs_sha256
    assert sorted(path.name for path in there.iterdir()) == ["x+1.sqsh", "x.sif"]


def test_requirements_file_is_sent_with_those_that_it_names(
    there: Path, wheels: Path, tmp_path: Path
) -> None:
    (tmp_path / "all.txt").write_text("-r base.txt\nother\n")
    (tmp_path / "base.txt").write_text("lib\n")
    added = add_there(there, requirements=(), requirements_file=tmp_path / "all.txt", wheels=wheels)
    assert [package.name for package in added.record.packages] == ["lib", "other"]


def test_project_is_sent_without_its_environment(there: Path, wheels: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / ".venv").mkdir(parents=True)
    (project / ".venv/large").write_text("")
    tar, _ = add._Steps(
        request=AddRequest(project=project, wheels=wheels),
        machine=dataclasses.replace(add.this_machine(), remote="far"),
        image=there / "x.sif",
        target=there / "x+1.sqsh",
        token="1",  # noqa: S106 - it tells files apart
    )._pack_inputs()
    names = [member.name for member in tar]
    assert "project" in names
    assert not any("large" in name for name in names)


def test_modules_are_words_and_no_shell_text(
    there: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".bash_profile").write_text(
        f'PATH={os.environ["PATH"]}\nmodule() {{ echo "$*" > loaded; }}\n'
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    machine = dataclasses.replace(add.this_machine(), remote="far", modules=("apptainer/1.4", "x; touch ran"))
    request = AddRequest(requirements=("lib",), image=there / "x.sif", wheels=wheels)
    add.add(request, machine=machine)
    assert (tmp_path / "loaded").read_text() == "load apptainer/1.4 x; touch ran\n"
    assert not (tmp_path / "ran").exists()


def test_equal_request_installs_nothing(there: Path, tmp_path: Path, fake_program: FakeProgram) -> None:
    requirements = (f"lib @ file://{write_wheel(tmp_path, 'lib', '1.0')}",)
    assert not add_there(there, requirements=requirements).up_to_date
    fake_program("singularity", "exit 1")
    assert add_there(there, requirements=requirements).up_to_date
    with pytest.raises(UsageError, match=r"the file exists and holds 'lib @ file"):
        add_there(there)


def test_failure_of_pip_leaves_nothing(there: Path, wheels: Path) -> None:
    with pytest.raises(UsageError, match="there is no nothing-like-it for Python 3"):
        add_there(there, requirements=("nothing-like-it",), wheels=wheels)
    assert [path.name for path in there.iterdir()] == ["x.sif"]


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("FATAL: the image's architecture (arm64) could not run on the host's (amd64)", "another processor"),
        ('FATAL: "python3": executable file not found in $PATH', "the image has no python3"),
        ("OSError: [Errno 28] No space left on device", "is full"),
        ("FATAL: something new", "singularity failed with exit code 255"),
    ],
)
def test_image_that_does_not_start_is_explained(
    there: Path, fake_program: FakeProgram, printed: str, message: str
) -> None:
    fake_program("singularity", f"echo '{printed.replace(chr(39), '')}'; exit 255")
    with pytest.raises((UsageError, ToolFailed), match=message):
        add_there(there)
    assert [path.name for path in there.iterdir()] == ["x.sif"]


def test_foreign_processor_has_the_line_for_a_node(there: Path, fake_program: FakeProgram) -> None:
    fake_program("singularity", "echo could not run on the host; exit 255")
    with pytest.raises(UsageError) as caught:
        add_there(there)
    line = f"srun --nodes 1 --ntasks 1 imgkit add lib --image {there}/x.sif"
    assert (caught.value.hint or "").endswith(line)


def test_second_command_is_refused(there: Path, wheels: Path) -> None:
    folder = there / ".packages.x+1.sqsh"
    folder.mkdir()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another imgkit process is writing this file"):
            add_there(there, wheels=wheels)
    (folder / "0123").mkdir()  # of a command that was killed
    add_there(there, wheels=wheels)
    assert not folder.exists()


def test_machine_without_mksquashfs_is_refused(there: Path) -> None:
    def run(script: str, args: Sequence[str], data: Iterable[bytes]) -> Generator[bytes, None, None]:
        # The folders of mksquashfs on this machine cannot be left out of PATH.
        return add.this_machine().run(script.replace("command -v mksquashfs", "false"), args, data)

    machine = dataclasses.replace(add.this_machine(), run=run, remote="far")
    with pytest.raises(ToolMissing, match="mksquashfs is not on this machine"):
        add.add(AddRequest(requirements=("lib",), image=there / "x.sif"), machine=machine)


def test_relative_image_of_a_remote_is_refused(there: Path) -> None:
    with pytest.raises(UsageError, match=r"'x\.sif' is not a path on the remote"):
        add_there(there, image=Path("x.sif"))
