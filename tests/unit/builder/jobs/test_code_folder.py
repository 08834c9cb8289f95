"""Which files of ``--code DIR`` go to the nodes, what is refused, and that equal folders give equal bytes."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from file_tree import write_files, write_program
from job_builder import make_job
from stored_images import archive

from imgkit_builder.base.progress import Silent
from imgkit_builder.image.context import LargeContext
from imgkit_builder.jobs import code, transport
from imgkit_builder.jobs.code_tree import CodeTree
from imgkit_builder.jobs.request import CodeRecord, JobRequest
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.oci.manifest import InstalledProject
from imgkit_builder.recipe.targets import load_target
from imgkit_builder.sif import convert
from imgkit_builder.sif.conversion import Options
from imgkit_builder.sif.entries import Archive
from imgkit_builder.workflow import baked
from imgkit_entrypoints.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_files(tmp_path / "it's my code", {"train.py": "print(1)", "a b/run": "#!/bin/sh"})
    (folder / "a b/run").chmod(0o700)
    return folder


def read(folder: Path, *, large: bool = False, **flags: object) -> code.CodeFolder:
    return code.read_code_folder(JobRequest.of(code=folder).changed(**flags), large=large, report=Silent())


def names(tree: CodeTree) -> list[str]:
    return list(tree.files)


def git(folder: Path, *args: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", folder, *identity, *args], check=True, capture_output=True)


def write(source: code.CodeFolder, target: Path) -> dict[str, tuple[int, int, bytes]]:
    """Write the folder of the code; the result has mode, time and content of each file."""
    source.tree.write(target)
    files = [path for path in target.rglob("*") if path.is_file() and not path.is_symlink()]
    return {
        str(path.relative_to(target)): (path.stat().st_mode, int(path.stat().st_mtime), path.read_bytes())
        for path in files
    }


def test_same_folder_gives_the_same_files(folder, tmp_path):
    first = read(folder)
    data = write(first, tmp_path / "1")
    assert {mode & 0o777 for mode, _, _ in data.values()} == {0o444, 0o555}  # what waits is not edited
    copy = tmp_path / "other"
    shutil.copytree(folder, copy)
    (copy / "train.py").chmod(0o600)
    (copy / "a b/run").chmod(0o755)
    os.utime(copy / "train.py", (5, 5))
    second = read(copy)
    assert second.record.sha256 == first.record.sha256
    assert write(second, tmp_path / "2") == data


def test_edit_of_the_same_size_changes_the_time(folder, tmp_path):
    """Python would else take bytecode of the old version for current."""
    _, before_s, before = write(read(folder), tmp_path / "1")["workspace/train.py"]
    (folder / "train.py").write_text("print(2)\n")
    _, after_s, after = write(read(folder), tmp_path / "2")["workspace/train.py"]
    assert len(before) == len(after)
    assert before_s != after_s


def test_links_are_stored_and_never_followed(folder, tmp_path):
    (folder / "away").symlink_to("/etc/hostname")
    (folder / "gone").symlink_to(".//nowhere")
    (folder / "back").symlink_to("..")
    write(read(folder), tmp_path / "x")
    links = [path for path in (tmp_path / "x/workspace").iterdir() if path.is_symlink()]
    targets = {path.name: os.readlink(path) for path in links}  # noqa: PTH115 - Path.readlink loses ./ and //
    assert targets == {"away": "/etc/hostname", "gone": ".//nowhere", "back": ".."}


@pytest.mark.parametrize("with_git", [True, False], ids=["git", "no git"])
def test_ignored_files_stay_here(folder, with_git):
    ignored = {".gitignore": "*.log", ".dockerignore": "data", "x.log": "", "data/big": ""}
    write_files(folder, {**ignored, "new.py": ""})
    if with_git:
        git(folder, "init", "--quiet")
    assert names(read(folder).tree) == [".dockerignore", ".gitignore", "a b", "a b/run", "new.py", "train.py"]


@pytest.mark.programs("mksquashfs", "unsquashfs")
def test_ignored_files_that_the_image_has_are_named(call, folder, tmp_path):
    (folder / ".gitignore").write_text("*.so\nweights/\ndata/\n")
    git(folder, "init", "--quiet")
    image, sqsh = tmp_path / "image", tmp_path / "x.sqsh"
    for root in (folder, image / "workspace"):
        (root / "weights").mkdir(parents=True)
        (root / "_c.so").touch()
    (folder / "data").mkdir()
    (folder / "away.so").symlink_to("_c.so")
    (image / "workspace/away.so").symlink_to("_c.so")
    (image / "other.so").touch()
    subprocess.run(["mksquashfs", image, sqsh, "-quiet", "-no-progress"], check=True)
    site = ("-A", "bsc98", "--qos", "acc_debug", "--time", "10m", "--dry-run")
    code, _, err = call("run", "mn5", "--image", sqsh, "--code", folder, *site, "--", "true")
    assert code == 0, err
    named = [row for row in err.splitlines() if "not sent" in row]
    ignored = "_c.so, away.so, weights/ (git, Docker or imgkit ignores it)"
    data = '["_c.so", "away.so", "weights"]'
    assert named == [f"imgkit: not sent: {ignored}; if the job reads it: data = {data} in imgkit.toml"]


def test_ignored_data_is_named_in_one_line(folder):
    names = ("data/set/train.bin", "data/set/val.bin", "many/0", "runs/x/w", ".venv/b", "x.sif")
    write_files(folder, {".gitignore": "*.bin\nmany/\nruns/\n.venv/\nsmall", ".venv/pyvenv.cfg": ""})
    write_files(folder, {**dict.fromkeys(names, bytes(1_100_000)), "small": bytes(10)})
    assert code.left_out_notice(read(folder), None) == (
        "not sent: data/set/train.bin, data/set/val.bin, many/ (git, Docker or imgkit ignores it); if the "
        'job reads it: data = ["data/set", "many"] in imgkit.toml'
    )


def test_folder_of_a_run_is_no_code(folder):
    write_files(folder, {"runs/x-1/workspace/train.py": "", "runs/x-1/code.json": "", "other/code.json": ""})
    assert names(read(folder).tree) == ["a b", "a b/run", "other", "other/code.json", "train.py"]


def test_git_itself_says_what_it_ignores(folder):
    git(folder, "init", "--quiet")
    write_files(folder, {".git/info/exclude": "*.tmp", ".gitignore": "kept.log", "x.tmp": "", "kept.log": ""})
    git(folder, "add", "--force", "kept.log")
    inside = write_files(folder / "a b/inside", {"one": "", "two.o": ""})
    git(inside, "init", "--quiet")
    write_files(inside, {".git/info/exclude": "*.o"})
    expected = [".gitignore", "a b", "a b/inside", "a b/inside/one", "a b/run", "kept.log", "train.py"]
    assert names(read(folder).tree) == expected


def test_program_that_a_folder_names_does_not_run(folder, tmp_path):
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "1")
    ran = tmp_path / "ran"
    hook = write_program(tmp_path / "hook", f"touch '{ran}'")
    git(folder, "config", "core.fsmonitor", str(hook))
    read(folder)
    assert not ran.exists()
    git(folder, "status")
    assert ran.exists()  # git alone would have run it


def test_folder_that_git_ignores_counts_when_named(folder):
    git(folder, "init", "--quiet")
    (folder / ".gitignore").write_text("a b/\n")
    assert names(read(folder / "a b").tree) == ["run"]


def test_record_says_what_is_committed(folder):
    assert read(folder).record.git == ""
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "1")
    git(folder, "tag", "-a", "v1", "-m", "1")
    clean = read(folder).record
    assert (clean.git, clean.uncommitted) == ("v1", False)
    for name in ("mine.sif", ".imgkit-lock.x.sif", "a b/.imgkit-0a1b2c3d.x.part"):
        (folder / name).touch()
    assert read(folder).record == clean  # what a submission leaves there is no code
    (folder / "new.py").touch()
    assert read(folder).record.uncommitted
    (folder / "train.py").write_text("print(3)\n")
    assert read(folder).record.git == "v1-dirty"


@pytest.mark.parametrize("name", [".env", "server.pem", "id_rsa", "conf/.env"])
def test_secret_names_are_refused_until_allowed(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    with pytest.raises(UsageError, match="usually hold secrets") as caught:
        read(folder)
    assert "--allow " in str(caught.value.hint)
    (folder / ".dockerignore").write_text(f"{name}\n")
    assert name not in names(read(folder).tree)
    assert name in names(read(folder, allow=(name,)).tree)


def test_folder_that_is_none_is_refused(folder):
    (folder / "empty").mkdir()
    for name, message in (
        ("train.py", "not a directory"),
        ("gone", "no such directory"),
        ("empty", "every file is ignored"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            read(folder / name)
        assert name in str(caught.value.where)


def test_fifo_in_the_folder_is_refused(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(UsageError, match="only files, folders and links"):
        read(folder)


def test_large_code_needs_a_leave(folder):
    with (folder / "data.bin").open("wb") as file:
        file.truncate(code.LARGE_BYTES)
    with pytest.raises(LargeContext, match=r"data\.bin 100\.0 MB") as caught:
        read(folder)
    assert "--yes" in str(caught.value.hint)
    assert read(folder, large=True).tree.size_bytes > code.LARGE_BYTES


def test_many_files_need_a_leave(folder):
    (folder / "set").mkdir()
    for number in range(code.MANY_FILES - 1):
        (folder / f"set/{number}").touch()
    with pytest.raises(LargeContext) as caught:
        read(folder)
    assert str(caught.value) == (
        f"--code {folder}: the code has 10,001 files: set 9,999\n  -> list data in .gitignore, and name its "
        "folder in imgkit.toml (data = [...]); to send all of it: --yes"
    )
    assert len(read(folder, large=True).tree.files) == code.MANY_FILES + 3


@pytest.mark.parametrize(
    "text", ["print(2)\n", "print(10)\n", "", None], ids=["other", "more", "less", "gone"]
)
def test_change_while_it_is_read_is_refused(folder, tmp_path, text):
    source = read(folder)
    if text is None:
        (folder / "train.py").unlink()
    else:
        (folder / "train.py").write_text(text)
    with pytest.raises(UsageError, match="changed while imgkit read it"):
        transport.write_folder(tmp_path / "store/x", source.tree.write)
    assert not list((tmp_path / "store").iterdir())


def test_container_gets_the_copy_of_its_run(folder):
    job = make_job("cpu", runtime="singularity", code=folder)
    record = CodeRecord(sha256="ab", git="", uncommitted=True)
    argv = runtime_of(job).argv(code.with_code(job, record, Path("/d/code")), ("true",))
    binds = [argument for before, argument in itertools.pairwise(argv) if before == "--bind"]
    assert binds[0] == '"$IMGKIT_RUN_DIR/workspace:/workspace"'
    assert {"IMGKIT_CODE=ab", "PYTHONDONTWRITEBYTECODE=1"} <= set(argv)
    with pytest.raises(UsageError, match="cannot be used in a job"):
        code.with_code(job, record, Path("/d/a,b"))


PYPROJECT = '[tool.x]\nname = "no"\n[project]  # mine\nname = "My_Proj"\n'
MINE = InstalledProject(name="my-proj", step=0)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A recipe beside a project in the folder src/, whose distribution has another name than its package."""
    files = {
        "pyproject.toml": PYPROJECT,
        "src/mypkg/__init__.py": "",
        "scripts/run.py": "",
        "lib/namespace/group/mypkg/__init__.py": "",
        "modules/src/module.py": "",
        "train.py": "",
        "mine.yaml": "image:\n  base: a:1\n  pip:\n    - packages: [x]\n    - project: .",
    }
    return write_files(tmp_path / "p", files)


@pytest.mark.parametrize(
    ("sent", "installed", "message", "hint"),
    [
        (".", MINE, "but the image runs its copy in site-packages", "`editable: /workspace`"),
        ("..", MINE, "has the project my-proj in /workspace/p,", "`editable: /workspace/p`"),
        ("src", MINE, "is only a part of the project my-proj", "the whole folder"),
        ("src/mypkg", replace(MINE, folder="/workspace"), "is only a part", "the whole folder"),
        (
            ".",
            replace(MINE, folder="/workspace/p"),
            "the image runs that in /workspace/p",
            "`editable: /work",
        ),
        (".", replace(MINE, folder="/workspace"), "", ""),
        ("..", replace(MINE, folder="/workspace/p"), "", ""),
        (".", replace(MINE, name="other"), "", ""),
        ("scripts", MINE, "", ""),
        ("lib", MINE, "is only a part of the project my-proj", "the whole folder"),
        ("modules/src", MINE, "is only a part of the project my-proj", "the whole folder"),
    ],
)
def test_project_that_the_image_has_elsewhere_is_refused(project, sent, installed, message, hint):
    source, image = read(project / sent), replace(load_target("cpu"), projects=(installed,), positions={})
    if not message:
        code.refuse_shadowed_code(source, image, None)
        return
    with pytest.raises(UsageError, match=message) as caught:
        code.refuse_shadowed_code(source, image, None)
    assert hint in str(caught.value.hint)


def test_refused_project_names_the_recipes_line(project):
    with pytest.raises(UsageError, match="the project my-proj") as caught:
        code.refuse_shadowed_code(read(project), load_target(project / "mine.yaml"), None)
    assert caught.value.where == "mine.yaml:5"
    assert "`editable: /workspace` in image.pip[1] of the recipe mine" in str(caught.value.hint)
    (project / "mine.yaml").write_text((project / "mine.yaml").read_text() + "      editable: /workspace/\n")
    code.refuse_shadowed_code(read(project), load_target(project / "mine.yaml"), None)


DIRECT = '{"dir_info": {"editable": %s}, "url": "file:///workspace%%20a"}'


@pytest.mark.programs("mksquashfs")
@pytest.mark.parametrize(
    ("direct_url", "folder"),
    [(DIRECT % "true", "/workspace a"), (DIRECT % "false", ""), ("{}", ""), ("", ""), ("[", "")],
)
def test_project_that_any_command_installed_is_found(tmp_path, direct_url, folder):
    info = "usr/lib/python3/dist-packages/My_Proj-1.dist-info"
    files = [(tarfile.TarInfo(f"{info}/METADATA"), b"")]
    if direct_url:
        files.append((tarfile.TarInfo(f"{info}/direct_url.json"), direct_url.encode()))
        files[-1][0].size = len(direct_url)
    (tmp_path / "x.tar").write_bytes(archive([files], config={"Env": ["PATH=/x/bin:/usr/bin"]}))
    convert.convert(Archive(path=tmp_path / "x.tar"), tmp_path / "x.sif", Options(test=False), Silent())
    assert baked.read_projects(tmp_path / "x.sif", "my-proj") == (
        InstalledProject(name="my-proj", folder=folder),
    )
    assert baked.read_projects(tmp_path / "x.sif", "proj") == ()


def test_folder_bound_over_the_code_is_refused(project):
    for target, fine in (("/workspace", False), ("/workspace/p", False), ("/data", True)):
        recipe = replace(load_target("cpu"), projects=(MINE,))
        job = make_job(recipe, binds=(f"{project}:{target}:ro",), runtime="singularity")
        if fine:
            code.refuse_shadowed_bind(job, None)
            continue
        with pytest.raises(UsageError, match=f"has the project my-proj in {target}, but"):
            code.refuse_shadowed_bind(job, None)
