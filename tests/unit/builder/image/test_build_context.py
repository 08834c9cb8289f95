"""The build context: what is in it, that nothing of the machine shows in its bytes, and build secrets."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from file_tree import write_files
from packed_context import git, own_file, pack, tar_members

from imgkit_builder.base.files import MTIME_S
from imgkit_builder.base.progress import Silent
from imgkit_builder.image import context, secret_values
from imgkit_builder.image.context import BuildContext, LargeContext
from imgkit_builder.oci import manifest
from imgkit_builder.oci.manifest import LOCK_LABEL, BaseImage
from imgkit_builder.recipe.model import BuildSecret, CopyStep, PipStep, Recipe, RunCommand
from imgkit_entrypoints import system
from imgkit_entrypoints.errors import UsageError

MakeRecipe = Callable[..., Recipe]
PackCode = Callable[..., BuildContext]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder to copy: a module, a script, a space in a name."""
    folder = write_files(tmp_path / "code", {"pkg/a b.py": "x = 1", "run.sh": "#!/bin/sh"})
    (folder / "run.sh").chmod(0o755)
    return folder


@pytest.fixture
def pack_code(make_recipe: MakeRecipe, code: Path) -> PackCode:
    """``pack_code(ignore=("*.csv",))``: the context of a recipe that copies `code`."""

    def make(**step: Any) -> BuildContext:
        return pack(make_recipe(copy=(CopyStep(**{"source": code, **step}),)))

    return make


def names(packed: BuildContext, folder: str = "") -> list[str]:
    """Return the names below a folder of the context."""
    members = tar_members(packed)
    return [member.name.removeprefix(folder) for member in members if member.name.startswith(folder)]


def test_members_sorted_and_normalised(pack_code):
    members = {member.name: member for member in tar_members(pack_code())}
    assert list(members) == sorted(members)
    assert min(members) == "Dockerfile"
    assert {"copy/0/pkg/a b.py", "imgkit/system.json", "imgkit/manifest.json"} < set(members)
    owners = {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members.values()}
    assert owners == {(0, 0, "", "", MTIME_S)}
    modes = {name: members[f"copy/0/{name}"].mode for name in ("run.sh", "pkg/a b.py", "pkg")}
    assert modes == {"run.sh": 0o755, "pkg/a b.py": 0o644, "pkg": 0o755}


def test_sha_is_of_the_stream(pack_code):
    packed = pack_code()
    for _ in range(2):
        with packed.open() as stream:
            data = stream.read()
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (packed.sha256, packed.size_bytes)


def test_umask_user_and_time_do_not_show(pack_code, code):
    first = pack_code().sha256
    for path in (code, *code.rglob("*")):
        path.chmod(path.stat().st_mode & 0o700)
        os.utime(path, (1, 1))
        if os.geteuid() == 0:
            os.chown(path, 1234, 1234)
    assert pack_code().sha256 == first


def test_content_and_executable_bit_show(pack_code, code):
    shas = {pack_code().sha256}
    (code / "run.sh").chmod(0o644)
    shas.add(pack_code().sha256)
    (code / "run.sh").write_text("#!/bin/ash")
    assert len(shas | {pack_code().sha256}) == 3


def test_input_has_files_and_the_name_of_the_base(make_recipe, code):
    recipe = make_recipe(copy=(CopyStep(source=code),))

    def digest(name: str, **known: Any) -> str:
        base = BaseImage(name=name, platform="linux/amd64", **known)
        return context.input_sha256(recipe, pack(recipe, base=base), "b:1")

    by_name = digest("b:1")
    # What an engine knows: the platform's own name, id, variables and user.
    assert digest("b@sha256:1", id="sha256:1", env={"A": "1"}, user="ana") == by_name
    assert context.input_sha256(recipe, pack(recipe), "b:2") != by_name
    (code / "run.sh").write_text("#!/bin/ash")
    assert digest("b:1") != by_name


def test_baked_facts_read_back(make_recipe):
    recipe = make_recipe(env={"NCCL_NET_PLUGIN": "ofi", "PATH": "/x:$PATH"})
    base = BaseImage(name="base:1", id="sha256:1", env={"NCCL_NET_PLUGIN": "spcx", "PATH": "/bin"})
    packed = pack(recipe, base=base, platform="linux/arm64", revision="abc-dirty")
    assert system.from_json(own_file(packed, "imgkit/system.json").decode()) == recipe.system
    read = manifest.from_json(own_file(packed, "imgkit/manifest.json").decode())
    assert read == packed.manifest
    assert (read.base, read.revision, read.recipe_sha256) == (base, "abc-dirty", recipe.sha256)
    assert read.env == {"NCCL_NET_PLUGIN": "ofi"}  # only what the recipe itself sets
    (wheel,) = (member.data for member in packed.members if member.name.endswith(".whl"))
    assert hashlib.sha256(wheel).hexdigest() == read.wheel_sha256
    assert own_file(packed, "Dockerfile").decode() == packed.dockerfile


@pytest.mark.parametrize(("locked", "lock_digest"), [(False, ""), (True, None)])
def test_labels_of_the_base_are_not_inherited(make_recipe, locked, lock_digest):
    """A locked build has the label of its lock from the recipe."""
    packed = pack(make_recipe())
    labels = manifest.labels(packed.manifest, context_sha256="ef", created="2026-01-01", locked=locked)
    assert labels.get(LOCK_LABEL) == lock_digest
    assert labels["org.opencontainers.image.revision"] == ""


def test_ignore_of_the_recipe_decides(pack_code, code):
    files = ("data/x.bin", "pkg/data/y.bin", "keep.csv", "drop.csv", "data.txt", ".git/HEAD")
    write_files(code, dict.fromkeys(files, ""))
    copied = names(pack_code(ignore=("/data/", "*.csv", "!keep.csv")), "copy/0/")
    assert " ".join(copied) == "data.txt keep.csv pkg pkg/a b.py pkg/data pkg/data/y.bin run.sh"


def test_single_file_keeps_its_name(pack_code, code):
    assert names(pack_code(source=code / "run.sh"), "copy/0/") == ["run.sh"]


def test_requirements_go_in_as_they_are(make_recipe, tmp_path):
    text = b"numpy>=1.26,<2  # why\r\n--extra-index-url https://example.org/x\nmine @ https://a/b.whl\n"
    (tmp_path / "r.txt").write_bytes(text)
    packed = pack(make_recipe(pip=(PipStep(packages=("x",)), PipStep(requirements=tmp_path / "r.txt"))))
    assert own_file(packed, "imgkit/requirements-1.txt") == text


def test_certificate_ends_in_a_line_end(make_recipe, tmp_path):
    (tmp_path / "company.crt").write_bytes(b"-----END CERTIFICATE-----")
    packed = pack(make_recipe(ca=(tmp_path / "company.crt",)))
    assert own_file(packed, "imgkit/ca-0.crt") == b"-----END CERTIFICATE-----\n"


def test_project_brings_its_dependencies_first(make_recipe, tmp_path):
    texts = {
        "pyproject.toml": "[project]\nname = 'mine'\ndependencies = ['einops>=0.7']\n",
        "src/mine.py": "",
        ".gitignore": "*.log\n",
        "run.log": "",
    }
    packed = pack(make_recipe(pip=(PipStep(project=write_files(tmp_path / "mine", texts)),)))
    assert own_file(packed, "imgkit/requirements-0.txt") == b"einops>=0.7\n"
    assert names(packed, "project") == [
        "",
        "/0",
        "/0/.gitignore",
        "/0/pyproject.toml",
        "/0/src",
        "/0/src/mine.py",
    ]
    assert packed.code.left_out == ("run.log",)


def test_project_without_pyproject_refused(make_recipe, tmp_path):
    """A recipe's check refuses this too; the file may have gone since."""
    recipe = make_recipe(pip=(PipStep(project=tmp_path),))
    with pytest.raises(UsageError, match=r"pyproject\.toml: cannot be read: No such file"):
        pack(recipe)


def test_large_code_refused_before_reading(make_recipe, code):
    with (code / "weights.bin").open("wb") as stream:
        stream.truncate(1_100_000_000)
    recipe = make_recipe(copy=(CopyStep(source=code),), lines={("image", "copy", 0): 7})
    with pytest.raises(LargeContext, match=r"^mine\.yaml:7: .* is 1\.1 GB: weights\.bin 1\.1 GB\n"):
        pack(recipe, large=False)
    (code / ".dockerignore").write_text("weights.bin\n")
    assert pack(recipe, large=False).code.left_out == ("weights.bin",)


def test_progress_ends_with_all_bytes(make_recipe, code):
    reading, sending = Mock(spec=Silent), Mock(spec=Silent)
    (code / "big").write_bytes(bytes(3 << 20))
    packed = pack(make_recipe(copy=(CopyStep(source=code),)), report=reading)
    with packed.open(sending) as stream:
        stream.read()
    end = call(packed.size_bytes, packed.size_bytes)
    assert reading.advance.mock_calls[-1] == sending.advance.mock_calls[-1] == end
    assert sending.advance.call_count == 4  # not one for each of the tar's chunks


def test_links_inside_stay_links(pack_code, code):
    (code / "pkg" / "up").symlink_to("../run.sh")
    (code / "dir").symlink_to("pkg")
    (code / "later").symlink_to("not-there-yet")
    links = {member.name: member.linkname for member in tar_members(pack_code()) if member.issym()}
    assert links == {"copy/0/pkg/up": "../run.sh", "copy/0/dir": "pkg", "copy/0/later": "not-there-yet"}


def test_names_of_any_bytes_and_length(pack_code, code):
    odd = os.fsdecode(b"caf\xe9\n")
    deep = f"{'d' * 120}/{'e' * 120}/f"
    write_files(code, {odd: "", deep: ""})
    packed = pack_code()
    assert {odd, deep} < set(names(packed, "copy/0/"))
    with packed.open() as stream:
        assert len(stream.read()) == packed.size_bytes


def test_large_source_is_streamed(make_recipe, tmp_path):
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


def test_socket_and_fifo_refused(pack_code, code, monkeypatch):
    monkeypatch.chdir(code)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        with pytest.raises(
            UsageError, match=r"^mine\.yaml:2: .*code/s is a socket, and only files"
        ) as caught:
            pack_code()
    assert caught.value.hint == "add 's' to this copy's `ignore`"
    os.mkfifo("f")
    assert "f" not in names(pack_code(ignore=("s", "f")))


def test_missing_source_names_recipe_line(pack_code, tmp_path):
    with pytest.raises(UsageError, match=r"^mine\.yaml:2: .*gone: cannot be read: No such file"):
        pack_code(source=tmp_path / "gone")


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
def test_unreadable_file_refused(pack_code, name):
    # Not below tmp_path, whose parents are closed to an ordinary user.
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary)
        source.chmod(0o755)
        (source / "folder").mkdir()
        (source / "file").write_text("")
        (source / name).chmod(0)
        pack_code(source=source / "file") if name == "folder" else pack_code()  # imports all that it needs
        with ordinary_user(), pytest.raises(UsageError) as caught:
            pack_code(source=source)
        (source / name).chmod(0o755)
    assert caught.value.what == f"{source / name}: cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("#!/bin/sh\nmore\n", "run.sh grew while it was read"),
        ("#", "run.sh shrank while it was read"),
        ("#!/bin/ed\n", "changed while they were read"),
    ],
)
def test_file_that_changed_is_refused(pack_code, code, content, message):
    packed = pack_code()
    (code / "run.sh").write_text(content)
    with packed.open() as stream, pytest.raises(UsageError, match=message):
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
def test_requirements_naming_files_refused(make_recipe, tmp_path, line):
    file = tmp_path / "r.txt"
    file.write_text(f"numpy\n{line}\n")
    recipe = make_recipe(pip=(PipStep(requirements=file),))
    with pytest.raises(UsageError, match="names another file") as caught:
        pack(recipe)
    assert caught.value.where == f"{file}:2"


def test_revision_of_a_repository(tmp_path):
    assert context.git_revision(tmp_path) == ""
    git(tmp_path, "init", "-q")
    assert context.git_revision(tmp_path) == ""
    write_files(tmp_path, {"mine.yaml": "x", ".gitignore": "venv/"})
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    clean = context.git_revision(tmp_path)
    assert len(clean) == 40
    write_files(tmp_path, {"sub/.imgkit-sif.0a/spool.tar": "", "sub/mine.sif": "", "venv/mine.yaml": "x"})
    assert context.git_revision(tmp_path) == clean
    assert context.git_revision(tmp_path / "venv") == ""  # git tracks no file of it
    (tmp_path / "mine.yaml").write_text("y")
    assert context.git_revision(tmp_path) == f"{clean}-dirty"
    write_files(tmp_path, {"new/mine.yaml": "x"})
    assert context.git_revision(tmp_path / "new") == ""


# ---- build secrets

VALUE = "marker-0123456789"


@pytest.fixture
def secret_recipe(make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A variable for pip, a file for a command that runs last, and a secret that no step uses."""
    monkeypatch.setenv("MY_TOKEN", VALUE)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "netrc").write_text(
        f"-----KIND-----\nmachine example.org\npassword {VALUE}\nshort\n"
    )
    return make_recipe(
        secrets=(
            BuildSecret(id="github", env="MY_TOKEN"),
            BuildSecret(id="netrc", file=tmp_path / "code" / "netrc"),
            BuildSecret(id="unused", env="NOT_SET"),
        ),
        pip=(PipStep(packages=("einops",), secrets=("github",)),),
        run=("make", RunCommand(command="make", secrets=("netrc",), after="copy")),
        copy=(CopyStep(source=tmp_path / "code"),),
        lines={("image", "secrets", 0): 5},
    )


def test_options_name_sources_only(secret_recipe, tmp_path):
    values = secret_values.read_secrets(secret_recipe)
    netrc = f"id=netrc,src={tmp_path}/code/netrc"
    assert values.options == ("--secret", "id=github,env=MY_TOKEN", "--secret", netrc)
    assert VALUE not in repr(values)


def test_output_shows_stars(secret_recipe):
    values = secret_values.read_secrets(secret_recipe)
    output = f"url https://{VALUE}@x password {VALUE} machine example.org short -----KIND-----"
    assert values.mask(output) == "url https://***@x *** *** short -----KIND-----"


def test_file_of_a_secret_stays_out_of_the_context(secret_recipe):
    packed = pack(secret_recipe)
    assert "copy/0/netrc" not in {member.name for member in packed.members}
    secret_values.refuse_secrets_in(packed, secret_values.read_secrets(secret_recipe))


def test_value_in_copied_code_refused(secret_recipe, tmp_path):
    # Across the border of two blocks of the file.
    (tmp_path / "code" / "settings.py").write_text("x" * ((1 << 20) - 4) + VALUE)
    with pytest.raises(
        UsageError, match=r"^copy/0/settings\.py: settings\.py holds the value of a build secret"
    ) as caught:
        secret_values.refuse_secrets_in(pack(secret_recipe), secret_values.read_secrets(secret_recipe))
    assert VALUE not in str(caught.value)


def test_script_is_there_for_steps_with_secrets(secret_recipe, make_recipe):
    assert own_file(pack(secret_recipe), "imgkit/with-secrets").startswith(b"#!/bin/sh\n")
    assert "imgkit/with-secrets" not in {member.name for member in pack(make_recipe()).members}
