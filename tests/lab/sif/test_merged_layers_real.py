"""An image that an ordinary user converts has, entry by entry, the tree that root unpacks from its layers."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import layer_reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from labkit import output
from stored_images import Way, archive, convert_as, files_of, only
from tars import tar_entry

from imgkit_builder.sif import image as sif_image

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the reference is unpacked by root"),
    pytest.mark.programs("mksquashfs"),
]
STRANGER = 12345
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000").decode("latin-1")
NAMES = ("a", "b", "c", "d" * 120, "é")
KINDS = (
    *(tarfile.REGTYPE,) * 3,
    *(tarfile.DIRTYPE,) * 3,
    *(tarfile.SYMTYPE,) * 2,
    *(tarfile.LNKTYPE,) * 2,
    *(tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE),
)

paths = some.lists(some.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
targets = some.one_of(
    paths, paths.map("/{}".format), paths.map("../{}".format), some.just("/"), some.just(".")
)


@some.composite
def entries(draw):
    name = draw(paths)
    info = tarfile.TarInfo(name)
    kind = draw(some.sampled_from((*KINDS, "whiteout", "opaque")))
    if isinstance(kind, str):
        folder, _, last = name.rpartition("/")
        info.name = f"{name}/.wh..wh..opq" if kind == "opaque" else f"{folder}/.wh.{last}".lstrip("/")
        return info, b""
    info.type = kind
    info.mode = draw(some.sampled_from((0o644, 0o4755, 0o1777, 0o0)))
    info.uid, info.gid = draw(some.sampled_from(((0, 0), (1234, 4321), (3000000, 7))))
    info.mtime = draw(some.sampled_from((0, 1710892800, 4294967295)))
    data = draw(some.binary(max_size=40)) if kind == tarfile.REGTYPE else b""
    info.size = len(data)
    if kind == tarfile.SYMTYPE:
        info.linkname = draw(targets)
    if kind == tarfile.LNKTYPE:
        info.linkname = draw(paths)
    if kind in (tarfile.CHRTYPE, tarfile.BLKTYPE):
        info.devmajor, info.devminor = draw(some.sampled_from(((1, 3), (7, 70000 % 256))))
    if kind == tarfile.REGTYPE and draw(some.booleans()):
        info.pax_headers = {"SCHILY.xattr.security.capability": CAPABILITY, "SCHILY.xattr.user.note": "x"}
    return info, data


stacks = some.lists(some.lists(entries(), max_size=8), min_size=1, max_size=4)


@pytest.fixture
def folder():
    """A place that every user can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="imgkit-layers-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def check(layers, folder, *, way="new", uid=STRANGER):
    """Compare the merged image with the reference; both refuse the same layers."""
    case = Path(tempfile.mkdtemp(dir=folder))
    case.chmod(0o777)
    (case / "expected").mkdir()
    impossible = layer_reference.unpack(layers, case / "expected")
    (case / "x.tar").write_bytes(archive(layers))
    (case / "x.tar").chmod(0o644)
    env = {} if way == "new" else only(way, folder)
    message = convert_as(uid, case / "x.tar", case / "x.sif", env=env)
    if impossible:
        assert "CheckFailed" in message, impossible
        assert not (case / "x.sif").exists()
        return
    assert message == "", message
    expected = layer_reference.described(case / "expected")
    described = files_of(case / "x.sif", case / "found", image_files=expected)
    for description in (*described.values(), *expected.values()) if way == "old" else ():
        _forget_losses(description, uid)
    assert described == expected


def _forget_losses(description, uid):
    """Leave out what docs/reference/files.md says that an old mksquashfs loses."""
    kind = stat.S_IFMT(int(description["mode"], 8))
    if kind in (stat.S_IFCHR, stat.S_IFBLK):
        description["mtime"] = 0
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        description["links"] = []
    if uid:
        description["xattrs"] = {}


OLD_WAYS: Sequence[tuple[Way, int]] = (("old", STRANGER), ("old", 0))


def every_kind():
    """A layer with every kind of file, and names that a pseudo file has to quote."""
    header = {"mtime": 1710892800, "uid": 1234, "gid": 4321, "mode": 0o4755}
    capable = tar_entry(
        "#é", data=b"1", pax_headers={"SCHILY.xattr.security.capability": CAPABILITY}, **header
    )
    return [
        tar_entry("d", kind=tarfile.DIRTYPE, **{**header, "mode": 0o1700}),
        tar_entry('d/a b\t"\\#', data=b"x" * 300_000, **header),
        capable,
        tar_entry("d/hard", kind=tarfile.LNKTYPE, linkname="#é"),
        tar_entry("d/link", kind=tarfile.SYMTYPE, linkname="/etc", **header),
        tar_entry("d/second link", kind=tarfile.LNKTYPE, linkname="d/link"),
        tar_entry("d/fifo", kind=tarfile.FIFOTYPE, **header),
        tar_entry("d/null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3, **header),
        tar_entry("d/second null", kind=tarfile.LNKTYPE, linkname="d/null"),
    ]


RANDOM_STACKS = (
    *(("new", STRANGER, 60), ("old", STRANGER, 4), ("old", 0, 4)),
    *(
        pytest.param(*row, marks=pytest.mark.soak)
        for row in (("new", STRANGER, 3000), ("old", STRANGER, 500), ("old", 0, 500))
    ),
)


@pytest.mark.parametrize(("way", "uid", "count"), RANDOM_STACKS)
def test_every_way_gives_the_tree_of_root(folder, way, uid, count):
    @settings(max_examples=count, deadline=None)
    @given(layers=stacks)
    def check_random_stacks(layers):
        check(layers, folder, way=way, uid=uid)

    check([every_kind()], folder, way=way, uid=uid)
    check_random_stacks()


@pytest.mark.parametrize("command", [("gzip", "-c"), ("zstd", "-qc")], ids=["gzip", "zstd"])
def test_compressed_layers_give_the_same_file(folder, command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"apt install {command[0]}")

    def packed(data):
        return subprocess.run(command, input=data, capture_output=True, check=True).stdout

    layers = [every_kind(), [tar_entry("d/fifo", data=b"new"), tar_entry(".wh.#é")]]
    folder.chmod(0o777)
    digests = []
    for name, image in (("plain", archive(layers)), ("packed", archive(layers, packed=packed))):
        (folder / f"{name}.tar").write_bytes(image)
        assert convert_as(STRANGER, folder / f"{name}.tar", folder / f"{name}.sif") == ""
        digests.append(sif_image.root_sha256(folder / f"{name}.sif"))
    assert digests[0] == digests[1]


def test_old_mksquashfs_refuses_a_line_break(folder):
    (folder / "x.tar").write_bytes(archive([[tar_entry("a\nb m 4755 0 0")]]))
    folder.chmod(0o777)
    message = convert_as(STRANGER, folder / "x.tar", folder / "x.sif", env=only("old", folder))
    assert "whose name has a line break" in message
    assert sorted(path.name for path in folder.iterdir()) == ["only-old", "x.tar"]


@pytest.mark.parametrize(("way", "uid"), OLD_WAYS)
def test_same_image_gives_the_same_bytes_on_every_way(folder, way, uid):
    layers = [[entry for entry in every_kind() if "null" not in entry[0].name]]
    (folder / "x.tar").write_bytes(archive(layers))
    folder.chmod(0o777)
    contents = []
    for name in ("a.sif", "b.sif"):
        assert convert_as(uid, folder / "x.tar", folder / name, env=only(way, folder)) == ""
        contents.append((folder / name).read_bytes())
    assert contents[0] == contents[1]


def hard_link(name, target):
    return tar_entry(name, kind=tarfile.LNKTYPE, linkname=target)


def symlink(name, target):
    return tar_entry(name, kind=tarfile.SYMTYPE, linkname=target)


@pytest.mark.parametrize(
    "layers",
    [
        [
            [tar_entry("a", b"old"), hard_link("b", "a")],
            [tar_entry("a", b"new"), hard_link("c", "b")],
        ],
        [[tar_entry("a/b/c", b"x"), hard_link("a", "a/b/c")]],
        [[tar_entry("a", b"x"), hard_link("a/a", "a")]],
        [
            [tar_entry("a", b"old"), tar_entry("d/x", b"old"), tar_entry("e/x", b"old")],
            [
                *(tar_entry("a", b"new"), tar_entry(".wh.a")),
                *(tar_entry("d/y", b"new"), hard_link("d/z", "e/x")),
                *(tar_entry("d/.wh..wh..opq"), tar_entry(".wh.d")),
            ],
        ],
        [[symlink("etc", "/home/me"), symlink("l", "l")], [tar_entry("etc/hosts", b"inside")]],
        [[tar_entry("dev/zero", kind=tarfile.CHRTYPE, devmajor=0, devminor=0)]],
        [[tar_entry("/".join("d" * 900), kind=tarfile.DIRTYPE)], [tar_entry(".wh.d")]],
    ],
    ids=[
        "a link keeps what a higher layer replaces",
        "a link into the folder that it replaces",
        "a link to what its folder replaces",
        "a whiteout spares what its own layer has",
        "links that lead anywhere",
        "a device that is no whiteout",
        "deep whiteouts need no stack",
    ],
)
def test_rare_layers_give_the_tree_of_root(folder, layers):
    check(layers, folder)


def test_sparse_file_keeps_its_holes_and_content(folder):
    """GNU tar writes it in each of its formats; the reference gets the plain file."""
    content = bytes(200_000) + b"end"
    (folder / "s").write_bytes(content)
    os.truncate(folder / "s", 0)
    with (folder / "s").open("r+b") as stream:
        stream.seek(200_000)
        stream.write(b"end")
    for form in ("--format=gnu", "--format=pax"):
        layer = folder / "layer.tar"
        argv = ["tar", "--sparse", form, "--owner=5", "--group=6", "--mtime=@77", "--mode=0640"]
        output(*argv, "-C", folder, "-cf", layer, "s")
        assert layer.stat().st_size < 100_000
        (folder / "x.tar").write_bytes(archive([], raw=[layer.read_bytes()]))
        folder.chmod(0o777)
        assert convert_as(STRANGER, folder / "x.tar", folder / "x.sif") == ""
        description = files_of(folder / "x.sif", folder / f"found{form}")["s"]
        assert (description["content"], description["owner"], description["mtime"]) == (content, (5, 6), 77)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (tar_entry("a/../../b"), "leads out of the image"),
        (hard_link("a", "nowhere"), "where there is no file"),
        (tar_entry("x" * 256), "Linux has at most 255"),
        (tar_entry("a", kind=b"Z"), "its type b'Z'"),
        (tar_entry("l/a", kind=tarfile.REGTYPE), "a link that leads to itself"),
        (tar_entry(".wh."), "a whiteout without a name"),
    ],
)
def test_hostile_member_is_named(folder, bad, reason):
    (folder / "x.tar").write_bytes(archive([[symlink("l", "l"), bad]]))
    folder.chmod(0o777)
    message = convert_as(STRANGER, folder / "x.tar", folder / "x.sif")
    assert reason in message
    assert bad[0].name[:20] in message
    assert {path.name for path in folder.iterdir()} == {"x.tar"}
