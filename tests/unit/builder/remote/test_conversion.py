"""What an archive becomes on a remote: which image it is, what converts it there, and by which job."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import tiny_image

from imgkit_builder.base.progress import Silent
from imgkit_builder.job import systems
from imgkit_builder.job.request import Request
from imgkit_builder.recipe import targets
from imgkit_builder.recipe.targets import Target
from imgkit_builder.remote import conversion, converter
from imgkit_builder.remote.conversion import ArchiveHere, Conversion
from imgkit_entrypoints.errors import CheckFailed, UsageError

PYTHON_311 = "1 3.11 /opt/my python/bin/python3"


@pytest.mark.parametrize("form", ["plain", "gzip", "folder"])
def test_image_of_an_archive_is_known_before_anything_moves(tmp_path: Path, form: str) -> None:
    archive = tmp_path / "tiny.tar"
    image_id = tiny_image.write(archive, "tiny:1")["amd64"]
    if form == "gzip":
        archive = tmp_path / "tiny.tar.gz"
        archive.write_bytes(gzip.compress((tmp_path / "tiny.tar").read_bytes()))
    elif form == "folder":
        with tarfile.open(archive) as tar:
            tar.extractall(tmp_path / "oci", filter="data")
        archive = tmp_path / "oci"
    found = conversion.read(archive, Silent())
    assert found.image_id == image_id
    assert found.size_bytes > 0


@pytest.mark.parametrize("content", [b"", b"x" * 1024, b"{}"])
def test_file_that_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "mn5.tar"
    file.write_bytes(content)
    with pytest.raises((CheckFailed, UsageError)) as caught:
        conversion.read(file, Silent())
    assert str(file) in str(caught.value.where)


def test_archive_without_a_manifest_names_no_system(tmp_path: Path) -> None:
    tiny_image.write(tmp_path / "tiny.tar", "tiny:1")
    assert conversion.target_of(tmp_path / "tiny.tar") is None


@pytest.mark.parametrize(
    ("answer", "lack"),
    [
        ({}, "Python 3.10 or newer, on the PATH or as a module, and there is none"),
        ({"python": ["0 3.6 /usr/bin/python3"], "mksquashfs": ["4.5"]}, "and there is Python 3.6"),
        ({"python": [PYTHON_311]}, "it has Python 3.11, but no mksquashfs"),
        ({"python": ["0 3.6 /usr/bin/python3", PYTHON_311], "mksquashfs": ["4.5"]}, ""),
    ],
)
def test_what_a_remote_lacks_is_named(answer: dict[str, list[str]], lack: str) -> None:
    found = converter.of_answer(answer).lack
    assert found.endswith(lack)
    assert bool(found) == bool(lack)


@pytest.fixture
def login(tmp_path: Path) -> Path:
    """A home whose login shell has modules: the oldest Python on the PATH is too old."""
    tools = tmp_path / "tools"
    for name in ("sh", "bash", "sed", "grep", "sort", "head", "timeout"):
        tools.mkdir(exist_ok=True)
        (tools / name).symlink_to(shutil.which(name) or name)
    old, new = tools / "python3", tmp_path / "new/python3"
    old.write_text("#!/bin/sh\necho 0 3.6\n")
    new.parent.mkdir()
    new.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for program in (old, new):
        program.chmod(0o755)
    (tmp_path / ".bash_profile").write_text(
        f"PATH={tools}\n"
        "module() {\n"
        "    case $* in\n"
        "    '-t avail') printf '%s\\n' /opt: gcc/12 python/3.6.1 python/3.12.1'(default)' >&2 ;;\n"
        f"    'load python/3.12.1') PATH={tmp_path}/new:$PATH ;;\n"
        "    'load base') : ;;\n"
        "    *) return 1 ;;\n"
        "    esac\n"
        "}\n"
    )
    return tmp_path


def probed(home: Path, *modules: str) -> converter.Converter:
    done = subprocess.run(
        ["/bin/sh", "-c", converter.PROBE, "sh", *modules],
        env={"HOME": str(home), "PATH": str(home / "tools")},
        capture_output=True,
        check=False,
    )
    return converter.of_answer(converter.answer_of(done.stdout))


def test_python_that_is_a_module_counts(login: Path) -> None:
    found = probed(login, "base")
    assert (found.python, found.module) == (str(login / "new/python3"), "python/3.12.1")
    assert found.version == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_modules_that_cannot_be_loaded_bring_no_python(login: Path) -> None:
    found = probed(login, "no-such-module")
    assert (found.python, found.module, found.version) == ("", "", "3.6")


def test_python_on_the_path_needs_no_module(login: Path) -> None:
    (login / "new/python3").replace(login / "tools/python3")
    found = probed(login)
    assert (found.python, found.module) == (str(login / "tools/python3"), "")


def ordered(target: Target, **request: str) -> Conversion:
    here = ArchiveHere(path=Path("mine.tar"), image_id=f"sha256:{'a' * 64}", size_bytes=1)
    return Conversion(
        archive=here,
        target=target,
        request=Request(command=("dist-bench",), nodes="4", **request),  # type: ignore[arg-type]
        write_tool=lambda path: None,
        keep=lambda record: None,
    )


def test_job_asks_for_what_the_system_gives_such_jobs() -> None:
    wanted = ordered(targets.find("mn5"), account="bsc98", qos="acc_debug", time="10m")
    made = conversion.job(wanted, "/scratch/me", ("/x/python3", "i.pyz", "sif"), modules=("python/3.12",))
    text = systems.named(made.system).script(made).text
    for line in ("--nodes=1", "--qos=gp_debug", "--account=bsc98", f"--time={conversion.TIME}"):
        assert f"#SBATCH {line}\n" in text
    assert "module load python/3.12\n" in text
    assert text.endswith("exec /x/python3 i.pyz sif\n")
    assert "acc_debug" not in text


def test_pbs_recipe_without_nodes_for_it_is_refused() -> None:
    pbs = next(name for name in targets.names() if targets.find(name).system.scheduler == "pbs")
    made = conversion.job(ordered(targets.find(pbs), account="a", queue="q", time="10m"), "/x", ("imgkit",))
    with pytest.raises(UsageError, match=r"does not name the nodes that make a .sif"):
        systems.named(made.system).script(made)
