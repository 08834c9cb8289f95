"""What the engine adds to an export goes, the runtime's files come, and links survive mksquashfs."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest
from small_sif import CONFIG, CREATED_S
from tars import TarEntry, tar_entry, tar_of_entries

from imgkit_builder.sif import squash
from imgkit_builder.sif.entries import ImageEntry, export_entries, with_added_files, with_package_list
from imgkit_entrypoints.errors import CheckFailed

EXPORTED_S = 1795262421


def member(name: str, kind: bytes = tarfile.REGTYPE, *, data: bytes = b"", **fields: Any) -> TarEntry:
    return tar_entry(name, data, kind, **{"mode": 0o644, "mtime": CREATED_S, **fields})


def engines(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> TarEntry:
    """A file that the engine adds to a container."""
    return member(name, kind, **{"mode": 0o755, "mtime": EXPORTED_S, **fields})


MARK = engines(".dockerenv")


def added(path: str, kind: bytes = tarfile.DIRTYPE, **values: Any) -> ImageEntry:
    return ImageEntry(names=(path,), kind=kind, mtime_s=CREATED_S, **values)


OWN = (
    added(".singularity.d"),
    added(".singularity.d/env"),
    added(".singularity.d/env/10.sh", tarfile.REGTYPE).with_content(b"export A=1\n"),
)
IF_MISSING = (
    added("environment", tarfile.SYMTYPE, link=".singularity.d/env/10.sh"),
    added("etc"),
    added("etc/hosts", tarfile.REGTYPE, mode=0o644),
)


def rewritten(*members: TarEntry) -> tarfile.TarFile:
    entries = export_entries(iter([tar_of_entries(members)]), created_s=CREATED_S)
    entries = with_package_list(with_added_files(entries, OWN, IF_MISSING), CONFIG)
    sink = io.BytesIO()
    squash.write_tar(squash.strip_attributes(entries, print), sink)
    sink.seek(0)
    return tarfile.open(fileobj=sink)


def test_engines_files_go():
    tar = rewritten(
        MARK,
        engines("dev", tarfile.DIRTYPE),
        engines("dev/console"),
        engines("dev/pts", tarfile.DIRTYPE),
        engines("dev/shm", tarfile.DIRTYPE),
        engines("etc", tarfile.DIRTYPE),
        engines("etc/hostname"),
        engines("etc/hosts"),
        engines("etc/mtab", tarfile.SYMTYPE, linkname="/proc/mounts"),
        engines("etc/resolv.conf"),
    )
    names = tar.getnames()
    added_names = {
        "environment",
        ".singularity.d",
        ".singularity.d/env",
        ".singularity.d/env/10.sh",
        "etc/hosts",
    }
    added_names |= {"opt", "opt/imgkit", "opt/imgkit/sbom.spdx.json"}
    assert set(names) == {"dev", "etc"} | added_names
    assert {tar.getmember(name).mtime for name in names} == {CREATED_S}
    assert tar.getmember("etc/hosts").mode == 0o644


def test_images_own_files_stay():
    image_members = [
        member("dev", tarfile.DIRTYPE),
        member("dev/console", tarfile.CHRTYPE),
        member("dev/shm", tarfile.DIRTYPE, mode=0o1777),
        member("etc", tarfile.DIRTYPE, mode=0o750),
        member("etc/hosts", data=b"127.0.0.1 localhost\n"),
        member("etc/mtab", tarfile.SYMTYPE, linkname="/proc/self/mounts"),
        member("home/.dockerenv"),
    ]
    tar = rewritten(MARK, *image_members)
    for info, data in image_members:
        tar_member = tar.getmember(info.name)
        assert (tar_member.type, tar_member.mode, tar_member.mtime) == (info.type, info.mode, info.mtime)
        if data:
            assert tar.extractfile(tar_member).read() == data  # type: ignore[union-attr]
    assert len(tar.getnames()) == len(set(tar.getnames()))


def test_runtime_files_replace_older_ones():
    """The image was made from a .sif once."""
    tar = rewritten(
        MARK,
        member(".singularity.d", tarfile.DIRTYPE),
        member(".singularity.d/env", tarfile.DIRTYPE),
        member(".singularity.d/env/10.sh", data=b"export A=old\n"),
        member(".singularity.d/env/91-own.sh", data=b"export B=1\n"),
    )
    assert tar.extractfile(".singularity.d/env/10.sh").read() == b"export A=1\n"  # type: ignore[union-attr]
    assert tar.extractfile(".singularity.d/env/91-own.sh").read() == b"export B=1\n"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "target", ["/" + "t" * 150, "../../" + "t" * 150, "./" + "t" * 150, "/é", "../é", "short", "//x"]
)
def test_link_targets_leave_pax(target):
    """mksquashfs 4.5.1 drops a leading / and ../ of targets that stand in a pax header."""
    link = member("l" * 120 + "é", tarfile.SYMTYPE, linkname=target, mtime=CREATED_S + 0.5)
    tar = rewritten(MARK, link)
    tar_member = tar.getmember(link[0].name)
    assert tar_member.linkname == target
    assert "linkpath" not in tar_member.pax_headers


def test_capabilities_and_hard_links_pass(capsys):
    capability = {"SCHILY.xattr.security.capability": "\x01\x02"}
    capable = member("ping", data=b"elf", pax_headers=capability)
    with_note = member("noted", data=b"elf", pax_headers={**capability, "SCHILY.xattr.user.note": "x"})
    hard = member("pong", tarfile.LNKTYPE, linkname="ping")
    tar = rewritten(MARK, capable, with_note, hard)
    assert tar.getmember("ping").pax_headers == tar.getmember("noted").pax_headers == capability
    assert tar.getmember("pong").islnk()
    assert "1 files lose extended attributes" in capsys.readouterr().out


def test_cut_export_refused():
    info, data = member("file", data=b"x" * 5000)
    cut = info.tobuf() + data[:2000]
    with pytest.raises(CheckFailed, match="docker export: cut short"):
        squash.write_tar(export_entries(iter([cut]), created_s=0), io.BytesIO())


def test_what_hides_the_runtimes_files_gives_way():
    tar = rewritten(
        MARK,
        member(".singularity.d", tarfile.SYMTYPE, linkname="/home/me"),
        member(".singularity.d/env/10.sh", tarfile.DIRTYPE),
        member(".singularity.d/env/10.sh/below"),
    )
    assert tar.getmember(".singularity.d").isdir()
    assert tar.getmember(".singularity.d/env/10.sh").isreg()
    assert ".singularity.d/env/10.sh/below" not in tar.getnames()


def test_nothing_is_added_behind_a_link():
    tar = rewritten(MARK, member("etc", tarfile.SYMTYPE, linkname="/home/me"))
    assert "etc/hosts" not in tar.getnames()


def test_link_of_the_image_called_environment_stays():
    tar = rewritten(MARK, member("environment", tarfile.SYMTYPE, linkname="own"))
    assert tar.getmember("environment").linkname == "own"


def test_other_name_of_a_replaced_file_stays():
    """Layers give a file with all its names."""
    old = ImageEntry(names=(".singularity.d/env/10.sh", "srv/old"), kind=tarfile.REGTYPE).with_content(b"old")
    folder = ImageEntry(names=(".singularity.d",), kind=tarfile.DIRTYPE, mode=0o700, uid=7)
    entries = list(with_added_files(iter([folder, old]), OWN, IF_MISSING))
    assert [entry.names for entry in entries[:2]] == [(".singularity.d",), ("srv/old",)]
    assert (entries[0].mode, entries[0].uid, entries[1].read()) == (0o755, 0, b"old")
    assert [entry.name for entry in entries[2:]] == [
        ".singularity.d/env",
        ".singularity.d/env/10.sh",
        "environment",
        "etc",
        "etc/hosts",
    ]
