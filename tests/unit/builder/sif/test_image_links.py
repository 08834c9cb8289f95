"""Links of an image that lead to this machine; Apptainer 1.4.5 showed what it does with each."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from tars import TarMember, tar_of_files, tar_of_links

from imgkit_builder.archive import tar_read, tar_write
from imgkit_builder.sif import runtime_build
from imgkit_entrypoints.errors import CheckFailed

FILE, DIR, LINK, HARD, FIFO = (
    tarfile.REGTYPE,
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.FIFOTYPE,
)
ETC: TarMember = ("etc/", DIR, "")


def write_layer(path: Path, members: Sequence[TarMember], *, form: int = tarfile.GNU_FORMAT) -> Path:
    path.write_bytes(tar_of_links(members, form=form))
    return path


def refuse_links(folder: Path, *layers: Sequence[TarMember]) -> None:
    files = [write_layer(folder / f"{number}.tar", members) for number, members in enumerate(layers)]
    runtime_build.refuse_links(files, where="hostile:1")


@pytest.mark.parametrize(
    ("layers", "path"),
    [
        ([[("etc", LINK, "/home/me")]], "/etc"),
        ([[("./etc", LINK, "/home/me")]], "/etc"),
        ([[("etc", LINK, "../../../home/me")]], "/etc"),
        ([[("etc", LINK, "usr/etc"), ("usr/", DIR, ""), ("usr/etc", LINK, "/home/me")]], "/usr/etc"),
        ([[("dev", LINK, "/dev")]], "/dev"),
        ([[("proc", LINK, "/proc")]], "/proc"),
        ([[("var", LINK, "/home/me")]], "/var"),
        ([[(".singularity.d", LINK, "/home/me")]], "/.singularity.d"),
        ([[(".singularity.d", LINK, "usr")]], "/.singularity.d"),
        ([[(".singularity.d/env", LINK, "/home/me")]], "/.singularity.d/env"),
        ([[(".singularity.d/labels.json", LINK, "/home/me/x")]], "/.singularity.d/labels.json"),
        ([[(".singularity.d/runscript", FIFO, "")]], "/.singularity.d/runscript"),
        ([[ETC, ("etc/hosts", LINK, "/home/me/new")]], "/etc/hosts"),
        ([[ETC, ("etc/resolv.conf", LINK, "/home/me/.profile")]], "/etc/resolv.conf"),
        ([[ETC, ("etc/hosts", FIFO, "")]], "/etc/hosts"),
        ([[ETC, ("x", LINK, "/home/me/new"), ("etc/hosts", HARD, "x")]], "/etc/hosts"),
        ([[ETC, ("x", LINK, "etc")], [("x/hosts", LINK, "/home/me/new")]], "/etc/hosts"),
        ([[("x", LINK, "/")], [("x/etc", LINK, "/home/me")]], "/etc"),
        ([[("etc", LINK, "/home/me")], [("etc/passwd", FILE, "")]], "/etc"),
        ([[("etc", LINK, "a"), ("a", LINK, "etc")]], "/a"),
    ],
)
def test_link_to_this_machine_refused(tmp_path: Path, layers: list[list[TarMember]], path: str) -> None:
    with pytest.raises(CheckFailed) as caught:
        refuse_links(tmp_path, *layers)
    assert caught.value.what.startswith(f"{path} in the image is ")
    assert caught.value.where == "hostile:1"


@pytest.mark.parametrize(
    "layers",
    [
        [[("etc", LINK, "usr/etc"), ("usr/etc/resolv.conf", LINK, "../../run/resolv.conf")]],
        [[("etc", LINK, "/home/me")], [(".wh.etc", FILE, "")], [ETC]],
        [[("etc", LINK, "/home/me")], [ETC]],
        [[("usr/etc", LINK, "/x"), ("etc", LINK, "usr/etc")], [("usr/.wh..wh..opq", FILE, "")]],
        [[("var/tmp", LINK, "/tmp"), ("var/run", LINK, "/run"), ("bin", LINK, "/usr/bin")]],
        [[(".singularity.d/", DIR, ""), (".singularity.d/runscript", FILE, "")]],
        [[("etc/mtab", LINK, "/proc/mounts"), ("etc/.wh..wh.plnk", FILE, "")]],
    ],
)
def test_links_that_nothing_writes_through(tmp_path: Path, layers: list[list[TarMember]]) -> None:
    refuse_links(tmp_path, *layers)


def test_headers_pass_over_content(tmp_path: Path) -> None:
    """The first member is larger than what one read returns."""
    path = tmp_path / "layer.tar"
    path.write_bytes(tar_of_files({"large": bytes(1 << 20), "small": b"1", "etc": b""}))
    sizes = [(member.name, member.size_bytes) for member in tar_read.read_headers(path)]
    assert sizes == [("large", 1 << 20), ("small", 1), ("etc", 0)]


def test_cut_layer_refused(tmp_path: Path) -> None:
    path = write_layer(tmp_path / "layer.tar", [ETC])
    path.write_bytes(path.read_bytes()[:512])
    with pytest.raises(CheckFailed, match="cut short"):
        runtime_build.refuse_links([path], where="hostile:1")


def extended(kind: bytes, body: bytes) -> bytes:
    """An extended header."""
    head = tar_write.ustar_header(name=b"x", kind=kind, size_bytes=len(body))
    return head + body + bytes(-len(body) % 512)


def test_member_with_two_names_refused(tmp_path: Path) -> None:
    """Go's reader takes GNU's name, others take the pax record."""
    plain = tar_write.ustar_header(name=b"y", kind=tar_read.SYMLINK, link=b"/home/me")
    data = tar_write.pax_header({"path": b"harmless"}) + extended(b"L", b"etc\0") + plain
    (tmp_path / "layer.tar").write_bytes(data + tar_write.END)
    with pytest.raises(CheckFailed, match="two names"):
        runtime_build.refuse_links([tmp_path / "layer.tar"], where="hostile:1")


def test_name_of_a_sparse_file_counts(tmp_path: Path) -> None:
    """Go's reader takes this record for every kind of member."""
    plain = tar_write.ustar_header(name=b"harmless", kind=tar_read.SYMLINK, link=b"/home/me")
    data = tar_write.pax_header({"GNU.sparse.name": b"etc"}) + plain
    (tmp_path / "layer.tar").write_bytes(data + tar_write.END)
    with pytest.raises(CheckFailed, match="/etc in the image"):
        runtime_build.refuse_links([tmp_path / "layer.tar"], where="hostile:1")


def test_prefix_in_a_gnu_header_refused(tmp_path: Path) -> None:
    header = bytearray(tar_write.ustar_header(name=b"hosts", kind=tar_read.SYMLINK, link=b"/home/me"))
    header[257:265] = b"ustar  \0"
    header[345:348] = b"etc"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "layer.tar").write_bytes(bytes(header) + tar_write.END)
    with pytest.raises(CheckFailed, match="prefix"):
        runtime_build.refuse_links([tmp_path / "layer.tar"], where="hostile:1")
