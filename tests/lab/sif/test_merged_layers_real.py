"""An image that an ordinary user converts has, entry by entry, the tree that root unpacks from its layers."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import layer_reference
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from labkit import output
from layer_reference import Entry
from stored_images import Way, archive, convert_as, files_of, only

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
def entries(draw: some.DrawFn) -> Entry:
    name = draw(paths)
    info = tarfile.TarInfo(name)
    what = draw(some.sampled_from((*KINDS, "whiteout", "opaque")))
    if isinstance(what, str):
        folder, _, last = name.rpartition("/")
        info.name = f"{name}/.wh..wh..opq" if what == "opaque" else f"{folder}/.wh.{last}".lstrip("/")
        return info, b""
    info.type = what
    info.mode = draw(some.sampled_from((0o644, 0o4755, 0o1777, 0o0)))
    info.uid, info.gid = draw(some.sampled_from(((0, 0), (1234, 4321), (3000000, 7))))
    info.mtime = draw(some.sampled_from((0, 1710892800, 4294967295)))
    data = draw(some.binary(max_size=40)) if what == tarfile.REGTYPE else b""
    info.size = len(data)
    if what == tarfile.SYMTYPE:
        info.linkname = draw(targets)
    if what == tarfile.LNKTYPE:
        info.linkname = draw(paths)
    if what in (tarfile.CHRTYPE, tarfile.BLKTYPE):
        info.devmajor, info.devminor = draw(some.sampled_from(((1, 3), (7, 70000 % 256))))
    if what == tarfile.REGTYPE and draw(some.booleans()):
        info.pax_headers = {"SCHILY.xattr.security.capability": CAPABILITY, "SCHILY.xattr.user.note": "x"}
    return info, data


stacks = some.lists(some.lists(entries(), max_size=8), min_size=1, max_size=4)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A place that every user can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="imgkit-layers-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def check(layers: Sequence[Sequence[Entry]], folder: Path, *, way: Way = "new", uid: int = STRANGER) -> None:
    """Compare the merged image with the reference; both refuse the same layers."""
    case = Path(tempfile.mkdtemp(dir=folder))
    case.chmod(0o777)
    (case / "wanted").mkdir()
    impossible = layer_reference.unpack(layers, case / "wanted")
    (case / "x.tar").write_bytes(archive(layers))
    (case / "x.tar").chmod(0o644)
    env = {} if way == "new" else only(way, folder)
    said = convert_as(uid, case / "x.tar", case / "x.sif", env=env)
    if impossible:
        assert "CheckFailed" in said, impossible
        assert not (case / "x.sif").exists()
        return
    assert said == "", said
    wanted = layer_reference.described(case / "wanted")
    found = files_of(case / "x.sif", case / "found", image_files=wanted)
    for about in (*found.values(), *wanted.values()) if way == "old" else ():
        _forget_losses(about, uid)
    assert found == wanted


def _forget_losses(about: dict[str, Any], uid: int) -> None:
    """Leave out what docs/reference/files.md says that an old mksquashfs loses."""
    kind = stat.S_IFMT(int(about["mode"], 8))
    if kind in (stat.S_IFCHR, stat.S_IFBLK):
        about["mtime"] = 0
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        about["links"] = []
    if uid:
        about["xattrs"] = {}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers=stacks)
def test_random_layers_give_the_tree_of_root(folder: Path, layers: list[list[Entry]]) -> None:
    check(layers, folder)


WAYS: Sequence[tuple[Way, int]] = (("old", STRANGER), ("old", 0))


def every_kind() -> list[Entry]:
    """A layer with every kind of file, and names that a pseudo file has to quote."""
    about = {"mtime": 1710892800, "uid": 1234, "gid": 4321, "mode": 0o4755}
    capable = entry("#é", data=b"1", pax_headers={"SCHILY.xattr.security.capability": CAPABILITY}, **about)
    return [
        entry("d", tarfile.DIRTYPE, **{**about, "mode": 0o1700}),
        entry('d/a b\t"\\#', data=b"x" * 300_000, **about),
        capable,
        entry("d/hard", tarfile.LNKTYPE, linkname="#é"),
        entry("d/link", tarfile.SYMTYPE, linkname="/etc", **about),
        entry("d/second link", tarfile.LNKTYPE, linkname="d/link"),
        entry("d/fifo", tarfile.FIFOTYPE, **about),
        entry("d/null", tarfile.CHRTYPE, devmajor=1, devminor=3, **about),
        entry("d/second null", tarfile.LNKTYPE, linkname="d/null"),
    ]


@pytest.mark.parametrize(("way", "uid"), WAYS)
def test_every_way_gives_the_tree_of_root(folder: Path, way: Way, uid: int) -> None:
    @settings(max_examples=4, deadline=None)
    @given(layers=stacks)
    def some_stacks(layers: list[list[Entry]]) -> None:
        check(layers, folder, way=way, uid=uid)

    check([every_kind()], folder, way=way, uid=uid)
    some_stacks()


@pytest.mark.soak
@pytest.mark.parametrize(("way", "uid"), WAYS)
def test_many_random_layers_on_every_way(folder: Path, way: Way, uid: int) -> None:
    @settings(max_examples=500, deadline=None)
    @given(layers=stacks)
    def many_stacks(layers: list[list[Entry]]) -> None:
        check(layers, folder, way=way, uid=uid)

    many_stacks()


@pytest.mark.parametrize("words", [("gzip", "-c"), ("zstd", "-qc")], ids=["gzip", "zstd"])
def test_compressed_layers_give_the_same_file(folder: Path, words: Sequence[str]) -> None:
    if shutil.which(words[0]) is None:
        pytest.skip(f"apt install {words[0]}")

    def packed(data: bytes) -> bytes:
        return subprocess.run(words, input=data, capture_output=True, check=True).stdout

    layers = [every_kind(), [entry("d/fifo", data=b"new"), entry(".wh.#é")]]
    folder.chmod(0o777)
    made = []
    for name, image in (("plain", archive(layers)), ("packed", archive(layers, packed=packed))):
        (folder / f"{name}.tar").write_bytes(image)
        assert convert_as(STRANGER, folder / f"{name}.tar", folder / f"{name}.sif") == ""
        made.append(sif_image.root_sha256(folder / f"{name}.sif"))
    assert made[0] == made[1]


def test_old_mksquashfs_refuses_a_line_break(folder: Path) -> None:
    (folder / "x.tar").write_bytes(archive([[entry("a\nb m 4755 0 0")]]))
    folder.chmod(0o777)
    said = convert_as(STRANGER, folder / "x.tar", folder / "x.sif", env=only("old", folder))
    assert "whose name has a line break" in said
    assert sorted(path.name for path in folder.iterdir()) == ["only-old", "x.tar"]


@pytest.mark.parametrize(("way", "uid"), WAYS)
def test_same_image_gives_the_same_bytes_on_every_way(folder: Path, way: Way, uid: int) -> None:
    layers = [[one for one in every_kind() if "null" not in one[0].name]]
    (folder / "x.tar").write_bytes(archive(layers))
    folder.chmod(0o777)
    made = []
    for name in ("a.sif", "b.sif"):
        assert convert_as(uid, folder / "x.tar", folder / name, env=only(way, folder)) == ""
        made.append((folder / name).read_bytes())
    assert made[0] == made[1]


@pytest.mark.soak
@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers=stacks)
def test_many_random_layers(folder: Path, layers: list[list[Entry]]) -> None:
    check(layers, folder)


def entry(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **fields: object) -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def test_link_keeps_what_a_higher_layer_replaces(folder: Path) -> None:
    check(
        [
            [entry("a", data=b"old"), entry("b", tarfile.LNKTYPE, linkname="a")],
            [entry("a", data=b"new"), entry("c", tarfile.LNKTYPE, linkname="b")],
        ],
        folder,
    )


def test_link_into_the_folder_that_it_replaces_is_refused(folder: Path) -> None:
    check([[entry("a/b/c", data=b"x"), entry("a", tarfile.LNKTYPE, linkname="a/b/c")]], folder)


def test_link_to_what_its_folder_replaces_is_refused(folder: Path) -> None:
    check([[entry("a", data=b"x"), entry("a/a", tarfile.LNKTYPE, linkname="a")]], folder)


def test_whiteout_spares_what_its_own_layer_has(folder: Path) -> None:
    lower = [entry("a", data=b"old"), entry("d/x", data=b"old"), entry("e/x", data=b"old")]
    upper = [
        *(entry("a", data=b"new"), entry(".wh.a")),
        *(entry("d/y", data=b"new"), entry("d/z", tarfile.LNKTYPE, linkname="e/x")),
        *(entry("d/.wh..wh..opq"), entry(".wh.d")),
    ]
    check([lower, upper], folder)


def test_sparse_file_keeps_its_holes_and_content(folder: Path) -> None:
    """GNU tar writes it in each of its formats; the reference gets the plain file."""
    content = bytes(200_000) + b"end"
    (folder / "s").write_bytes(content)
    os.truncate(folder / "s", 0)
    with (folder / "s").open("r+b") as stream:
        stream.seek(200_000)
        stream.write(b"end")
    for form in ("--format=gnu", "--format=pax"):
        layer = folder / "layer.tar"
        words = ["tar", "--sparse", form, "--owner=5", "--group=6", "--mtime=@77", "--mode=0640"]
        output(*words, "-C", folder, "-cf", layer, "s")
        assert layer.stat().st_size < 100_000
        (folder / "x.tar").write_bytes(archive([], raw=[layer.read_bytes()]))
        folder.chmod(0o777)
        assert convert_as(STRANGER, folder / "x.tar", folder / "x.sif") == ""
        found = files_of(folder / "x.sif", folder / f"found{form}")["s"]
        assert (found["content"], found["owner"], found["mtime"]) == (content, (5, 6), 77)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (entry("a/../../b"), "leads out of the image"),
        (entry("a", tarfile.LNKTYPE, linkname="nowhere"), "where there is no file"),
        (entry("x" * 256), "Linux has at most 255"),
        (entry("a", b"Z"), "its type b'Z'"),
        (entry("l/a", tarfile.REGTYPE), "a link that leads to itself"),
        (entry(".wh."), "a whiteout without a name"),
    ],
)
def test_hostile_member_is_named(folder: Path, bad: Entry, why: str) -> None:
    loop = entry("l", tarfile.SYMTYPE, linkname="l")
    (folder / "x.tar").write_bytes(archive([[loop, bad]]))
    folder.chmod(0o777)
    said = convert_as(STRANGER, folder / "x.tar", folder / "x.sif")
    assert why in said
    assert bad[0].name[:20] in said
    assert {path.name for path in folder.iterdir()} == {"x.tar"}


def test_links_that_lead_anywhere_are_stored(folder: Path) -> None:
    links = [entry("etc", tarfile.SYMTYPE, linkname="/home/me"), entry("l", tarfile.SYMTYPE, linkname="l")]
    check([links, [entry("etc/hosts", data=b"inside")]], folder)


def test_device_that_is_no_whiteout_stays(folder: Path) -> None:
    check([[entry("dev/zero", tarfile.CHRTYPE, devmajor=0, devminor=0)]], folder)


def test_deep_whiteouts_need_no_stack(folder: Path) -> None:
    deep = "/".join("d" * 900)
    layers = [[entry(deep, tarfile.DIRTYPE)], [entry(".wh.d")]]
    check(layers, folder)
