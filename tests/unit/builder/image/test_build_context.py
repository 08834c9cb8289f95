"""The build context: what is in it, and that nothing of the machine shows in its bytes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from file_tree import write_files

from imgkit_builder.base.files import MTIME_S
from imgkit_builder.base.progress import Silent
from imgkit_builder.image import context, members
from imgkit_builder.image.context import BuildContext, LargeContext
from imgkit_builder.image.members import TarMember
from imgkit_builder.oci import manifest
from imgkit_builder.oci.manifest import BaseImage
from imgkit_builder.recipe.model import CopyStep, PipStep, Recipe
from imgkit_entrypoints import system
from imgkit_entrypoints.errors import UsageError

MakeRecipe = Callable[..., Recipe]
Pack = Callable[..., BuildContext]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder to copy: a module, a script, a space in a name."""
    folder = write_files(tmp_path / "code", {"pkg/a b.py": "x = 1", "run.sh": "#!/bin/sh"})
    (folder / "run.sh").chmod(0o755)
    return folder


@pytest.fixture
def pack(make_recipe: MakeRecipe, code: Path) -> Pack:
    """``pack(ignore=("*.csv",))``: the context of a recipe that copies `code`."""

    def packed(**step: object) -> BuildContext:
        recipe = make_recipe(copy=(CopyStep(**{"source": code, **step}),))  # type: ignore[arg-type]
        return pack_recipe(recipe)

    return packed


def pack_recipe(recipe: Recipe, **options: Any) -> BuildContext:
    return context.pack_context(
        recipe, base=BaseImage(name="b"), platform="linux/amd64", revision="", **options
    )


def names(packed: BuildContext) -> list[str]:
    with packed.open() as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        return [member.name for member in archive]


def copied(packed: BuildContext) -> list[str]:
    return [name.removeprefix("copy/0/") for name in names(packed) if name.startswith("copy/0/")]


def test_members_sorted_and_normalised(pack: Pack) -> None:
    with pack().open() as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        members = archive.getmembers()
    member_names = [member.name for member in members]
    assert member_names == sorted(member_names)
    assert member_names[0] == "Dockerfile"
    assert {"copy/0/pkg/a b.py", "imgkit/system.json", "imgkit/manifest.json"} < set(member_names)
    assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {(0, 0, "", "", MTIME_S)}
    modes = {m.name: m.mode for m in members}
    assert (modes["copy/0/run.sh"], modes["copy/0/pkg/a b.py"], modes["copy/0/pkg"]) == (0o755, 0o644, 0o755)


def test_sha_is_of_the_stream(pack: Pack) -> None:
    packed = pack()
    for _ in range(2):
        with packed.open() as stream:
            data = stream.read()
        assert hashlib.sha256(data).hexdigest() == packed.sha256
        assert len(data) == packed.size_bytes


def test_umask_user_and_time_do_not_show(pack: Pack, code: Path) -> None:
    first = pack().sha256
    for path in (code, *code.rglob("*")):
        path.chmod(path.stat().st_mode & 0o700)
        os.utime(path, (1, 1))
        if os.geteuid() == 0:
            os.chown(path, 1234, 1234)
    assert pack().sha256 == first


def test_content_and_executable_bit_show(pack: Pack, code: Path) -> None:
    shas = [pack().sha256]
    (code / "run.sh").chmod(0o644)
    shas.append(pack().sha256)
    (code / "run.sh").write_text("#!/bin/ash")
    shas.append(pack().sha256)
    assert len(set(shas)) == 3


def test_input_has_files_and_the_name_of_the_base(make_recipe: MakeRecipe, code: Path) -> None:
    recipe = make_recipe(copy=(CopyStep(source=code),))

    def digest(name: str, **known: Any) -> str:
        base = BaseImage(name=name, platform="linux/amd64", **known)
        packed = context.pack_context(recipe, base=base, platform="linux/amd64", revision="")
        return context.input_sha256(recipe, packed, "b:1")

    by_name = digest("b:1")
    # What an engine knows: the platform's own name, id, variables and user.
    assert digest("b@sha256:1", id="sha256:1", env={"A": "1"}, user="ana") == by_name
    assert context.input_sha256(recipe, pack_recipe(recipe), "b:2") != by_name
    (code / "run.sh").write_text("#!/bin/ash")
    assert digest("b:1") != by_name


def test_baked_facts_read_back(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    base = BaseImage(name="base:1", id="sha256:1", platform="linux/arm64")
    packed = context.pack_context(recipe, base=base, platform="linux/arm64", revision="abc-dirty")
    with packed.open() as stream, tarfile.open(fileobj=io.BytesIO(stream.read())) as archive:
        texts = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}  # type: ignore[union-attr]
    assert system.from_json(texts["imgkit/system.json"].decode()) == recipe.system
    read = manifest.from_json(texts["imgkit/manifest.json"].decode())
    assert read == packed.manifest
    assert (read.base, read.revision, read.recipe_sha256) == (base, "abc-dirty", recipe.sha256)
    wheel = next(data for name, data in texts.items() if name.endswith(".whl"))
    assert hashlib.sha256(wheel).hexdigest() == read.wheel_sha256
    assert texts["Dockerfile"].decode() == packed.dockerfile


def test_manifest_has_the_recipes_own_variables(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(env={"NCCL_NET_PLUGIN": "ofi", "PATH": "/x:$PATH"})
    base = BaseImage(name="base:1", env={"NCCL_NET_PLUGIN": "spcx", "PATH": "/bin"})
    packed = context.pack_context(recipe, base=base, platform="linux/amd64", revision="")
    assert packed.manifest.env == {"NCCL_NET_PLUGIN": "ofi"}
    text = manifest.to_json(packed.manifest)
    assert manifest.from_json(text) == packed.manifest


def test_gitignore_rules_decide(pack: Pack, code: Path) -> None:
    names = ("data/x.bin", "pkg/data/y.bin", "keep.csv", "drop.csv", "data.txt", ".git/HEAD")
    write_files(code, dict.fromkeys((*names, "pkg/__pycache__/a.pyc"), ""))
    assert copied(pack(ignore=("/data/", "*.csv", "!keep.csv"))) == [
        "data.txt",
        "keep.csv",
        "pkg",
        "pkg/a b.py",
        "pkg/data",
        "pkg/data/y.bin",
        "run.sh",
    ]


def test_single_file_keeps_its_name(pack: Pack, code: Path) -> None:
    assert copied(pack(source=code / "run.sh")) == ["run.sh"]


def test_requirements_go_in_as_they_are(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    file = tmp_path / "r.txt"
    file.write_bytes(
        b"numpy>=1.26,<2  # why\r\n--extra-index-url https://example.org/x\nmine @ https://a/b.whl\n"
    )
    recipe = make_recipe(pip=(PipStep(packages=("x",)), PipStep(requirements=file)))
    packed = pack_recipe(recipe)
    assert "imgkit/requirements-1.txt" in names(packed)


def test_certificate_ends_in_a_line_end(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    file = tmp_path / "company.crt"
    file.write_bytes(b"-----END CERTIFICATE-----")
    packed = pack_recipe(make_recipe(ca=(file,)))
    (member,) = (entry for entry in packed.members if entry.name == "imgkit/ca-0.crt")
    assert member.data == b"-----END CERTIFICATE-----\n"


def project(folder: Path, dependencies: str = '["einops>=0.7"]') -> Path:
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "mine.py").write_text("")
    (folder / "pyproject.toml").write_text(f"[project]\nname = 'mine'\ndependencies = {dependencies}\n")
    return folder


def test_project_brings_its_dependencies_first(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    folder = project(tmp_path / "mine")
    (folder / ".gitignore").write_text("*.log\n")
    (folder / "run.log").write_text("")
    recipe = make_recipe(pip=(PipStep(project=folder),))
    packed = pack_recipe(recipe)
    (needed,) = (entry.data for entry in packed.members if entry.name == "imgkit/requirements-0.txt")
    assert needed == b"einops>=0.7\n"
    assert [name for name in names(packed) if name.startswith("project")] == [
        "project",
        "project/0",
        "project/0/.gitignore",
        "project/0/pyproject.toml",
        "project/0/src",
        "project/0/src/mine.py",
    ]
    assert packed.code.left_out == ("run.log",)


def test_project_without_pyproject_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """A recipe's check refuses this too; the file may have gone since."""
    recipe = make_recipe(pip=(PipStep(project=tmp_path),))
    with pytest.raises(UsageError, match=r"pyproject\.toml: cannot be read: No such file"):
        pack_recipe(recipe)


def test_large_code_refused_before_reading(make_recipe: MakeRecipe, code: Path) -> None:
    with (code / "weights.bin").open("wb") as stream:
        stream.truncate(1_100_000_000)
    recipe = make_recipe(copy=(CopyStep(source=code),), lines={("image", "copy", 0): 7})
    with pytest.raises(LargeContext, match=r"is 1\.1 GB: weights\.bin 1\.1 GB\n") as caught:
        pack_recipe(recipe, large=False)
    assert caught.value.where == "mine.yaml:7"
    (code / ".dockerignore").write_text("weights.bin\n")
    packed = pack_recipe(recipe, large=False)
    assert packed.code.left_out == ("weights.bin",)


class ProgressLog(Silent):
    """Keeps the progress of a stage."""

    def __init__(self) -> None:
        self.progress: list[tuple[int, int | None]] = []

    def advance(self, done_bytes: int, total_bytes: int | None = None) -> None:
        self.progress.append((done_bytes, total_bytes))


def test_progress_ends_with_all_bytes(make_recipe: MakeRecipe, code: Path) -> None:
    reading, sending = ProgressLog(), ProgressLog()
    (code / "big").write_bytes(bytes(3 << 20))
    recipe = make_recipe(copy=(CopyStep(source=code),))
    packed = pack_recipe(recipe, report=reading)
    with packed.open(sending) as stream:
        stream.read()
    assert reading.progress[-1] == sending.progress[-1] == (packed.size_bytes, packed.size_bytes)
    assert len(sending.progress) == 4  # not one for each of the tar's chunks


def test_links_inside_stay_links(pack: Pack, code: Path) -> None:
    (code / "pkg" / "up").symlink_to("../run.sh")
    (code / "dir").symlink_to("pkg")
    (code / "later").symlink_to("not-there-yet")
    with pack().open() as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        links = {member.name: member.linkname for member in archive if member.issym()}
    assert links == {"copy/0/pkg/up": "../run.sh", "copy/0/dir": "pkg", "copy/0/later": "not-there-yet"}


def test_names_of_any_bytes_and_length(pack: Pack, code: Path) -> None:
    odd = os.fsdecode(b"caf\xe9\n")
    (code / odd).write_text("")
    deep = code / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)
    (deep / "f").write_text("")
    assert {odd, f"{'d' * 120}/{'e' * 120}/f"} < set(copied(pack()))


def test_large_source_is_streamed(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """The address space is capped far below the file's size."""
    big = tmp_path / "big"
    with big.open("wb") as stream:
        stream.truncate(200 << 20)
    code = f"""
import resource
from pathlib import Path
from imgkit_builder.image.context import pack_context
from imgkit_builder.oci.manifest import BaseImage
from imgkit_builder.base.files import MTIME_S
from imgkit_builder.recipe.model import CopyStep, Image, Recipe
from imgkit_entrypoints.system import SystemFacts
def made(*copy):
    recipe = Recipe(name="x", image=Image(base="b:1", copy=copy), system=SystemFacts(), file=Path("/x.yaml"),
                    sha256="", positions={{}})
    return pack_context(recipe, base=BaseImage(name="b:1"), platform="linux/amd64", revision="")
made()  # everything is imported now
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
packed = made(CopyStep(source=Path({str(big)!r})))
sent = 0
with packed.open() as stream:
    while chunk := stream.read(1 << 16):
        sent += len(chunk)
assert sent == packed.size_bytes > 200 << 20
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_socket_and_fifo_refused(pack: Pack, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(code)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        with pytest.raises(UsageError, match="code/s is a socket, and only files") as caught:
            pack()
    assert caught.value.where == "mine.yaml:2"
    assert caught.value.hint == "add 's' to this copy's `ignore`"
    os.mkfifo("f")
    assert "f" not in copied(pack(ignore=("s", "f")))


def test_missing_source_names_recipe_line(pack: Pack, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gone: cannot be read: No such file") as caught:
        pack(source=tmp_path / "gone")
    assert caught.value.where == "mine.yaml:2"


@contextlib.contextmanager
def ordinary_user() -> Iterator[None]:
    """Root reads everything; become somebody else for a while."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        os.setegid(65534)
        os.seteuid(65534)
    try:
        if not os.access(__file__, os.R_OK, effective_ids=True):
            pytest.skip("the checkout lies in a folder that is closed to ordinary users")
        yield
    finally:
        os.seteuid(user)
        os.setegid(group)


@pytest.mark.parametrize("name", ["file", "folder"])
def test_unreadable_file_refused(pack: Pack, name: str) -> None:
    # Not below tmp_path, whose parents are closed to an ordinary user.
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary)
        source.chmod(0o755)
        (source / "folder").mkdir()
        (source / "file").write_text("")
        (source / name).chmod(0)
        pack(source=source / "file") if name == "folder" else pack()  # imports all that it needs
        with ordinary_user(), pytest.raises(UsageError) as caught:
            pack(source=source)
        (source / name).chmod(0o755)
    assert caught.value.what == f"{source / name}: cannot be read: Permission denied"


@pytest.mark.parametrize(("content", "how"), [("#!/bin/sh\nmore\n", "grew"), ("#", "shrank")])
def test_file_of_other_size_refused(pack: Pack, code: Path, content: str, how: str) -> None:
    packed = pack()
    (code / "run.sh").write_text(content)
    with packed.open() as stream, pytest.raises(UsageError, match=f"run.sh {how} while it was read"):
        stream.read()


def test_file_of_same_size_refused_too(pack: Pack, code: Path) -> None:
    packed = pack()
    (code / "run.sh").write_text("#!/bin/ed\n")
    with packed.open() as stream, pytest.raises(UsageError, match="changed while they were read"):
        stream.read()


@pytest.mark.parametrize(
    "line",
    [
        "-r more.txt",
        "-c pins.txt",
        "-e .",
        "./mine",
        "--requirement=x.txt",
        "file:./mine",
        "-r https://a/b.txt",
    ],
)
def test_requirements_naming_files_refused(make_recipe: MakeRecipe, tmp_path: Path, line: str) -> None:
    file = tmp_path / "r.txt"
    file.write_text(f"numpy\n{line}\n")
    recipe = make_recipe(pip=(PipStep(requirements=file),))
    with pytest.raises(UsageError, match="names another file") as caught:
        pack_recipe(recipe)
    assert caught.value.where == f"{file}:2"


def git(folder: Path, *args: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", folder, *identity, *args], check=True, capture_output=True)


def test_revision_of_a_repository(tmp_path: Path) -> None:
    assert context.git_revision(tmp_path) == ""
    git(tmp_path, "init", "-q")
    assert context.git_revision(tmp_path) == ""
    (tmp_path / "mine.yaml").write_text("x")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    clean = context.git_revision(tmp_path)
    assert len(clean) == 40
    leftover = tmp_path / "sub/.imgkit-sif.0a"
    leftover.mkdir(parents=True)
    for path in (leftover / "spool.tar", leftover.parent / "mine.sif"):
        path.touch()
    assert context.git_revision(tmp_path) == clean
    (tmp_path / "mine.yaml").write_text("y")
    assert context.git_revision(tmp_path) == f"{clean}-dirty"


def test_untracked_folder_has_no_revision(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "x")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "mine.yaml").write_text("x")
    assert context.git_revision(tmp_path / "venv") == ""


def test_size_of_a_tar_is_that_of_its_chunks(tmp_path: Path) -> None:
    long_name = "/".join(["folder" * 10] * 5)  # its header has a block for the name
    (tmp_path / "wheel").write_bytes(b"x" * 700)
    tar = [
        members.empty_folder("folder"),
        members.memory_file(long_name, b"a"),
        TarMember(name="wheel", size_bytes=700, source=tmp_path / "wheel"),
    ]
    assert members.tar_size(tar) == sum(len(chunk) for chunk in members.tar_chunks(tar))
