"""Links of an image that lead to this machine; Apptainer 1.4.5 showed what it does with each."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from refusals import refused
from tars import TarMember, changed_header, tar_of_files, tar_of_links

from imgkit_builder.archive import tar_read, tar_write
from imgkit_builder.sif import runtime_build
from imgkit_entrypoints.errors import CheckFailed

FILE, DIR, LINK, HARD, FIFO = b"0", b"5", b"2", b"1", b"6"
ETC: TarMember = ("etc/", DIR, "")


def write_layer(path: Path, members: Sequence[TarMember], *, form: int = tarfile.GNU_FORMAT) -> Path:
    path.write_bytes(tar_of_links(members, form=form))
    return path


def refuse_links(folder: Path, *layers: Sequence[TarMember]) -> None:
    files = [write_layer(folder / f"{number}.tar", members) for number, members in enumerate(layers)]
    runtime_build.refuse_links(files, where="hostile:1")


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ([[("etc", LINK, "/home/me")]], "/etc -> /home/me"),
        ([[("./etc", LINK, "/home/me")]], "/etc -> /home/me"),
        ([[("etc", LINK, "../../../home/me")]], "/etc -> ../../../home/me"),
        (
            [[("etc", LINK, "usr/etc"), ("usr/", DIR, ""), ("usr/etc", LINK, "/home/me")]],
            "/usr/etc -> /home/me",
        ),
        ([[("dev", LINK, "/dev")]], "/dev -> /dev"),
        ([[("proc", LINK, "/proc")]], "/proc -> /proc"),
        ([[("var", LINK, "/home/me")]], "/var -> /home/me"),
        ([[(".singularity.d", LINK, "/home/me")]], "/.singularity.d -> /home/me"),
        ([[(".singularity.d", LINK, "usr")]], "/.singularity.d -> usr"),
        ([[(".singularity.d/env", LINK, "/home/me")]], "/.singularity.d/env -> /home/me"),
        ([[(".singularity.d/labels.json", LINK, "/home/me/x")]], "/.singularity.d/labels.json -> /home/me/x"),
        ([[(".singularity.d/runscript", FIFO, "")]], "/.singularity.d/runscript"),
        ([[ETC, ("etc/hosts", LINK, "/home/me/new")]], "/etc/hosts -> /home/me/new"),
        ([[ETC, ("etc/resolv.conf", LINK, "/home/me/.profile")]], "/etc/resolv.conf -> /home/me/.profile"),
        ([[ETC, ("etc/hosts", FIFO, "")]], "/etc/hosts"),
        ([[ETC, ("x", LINK, "/home/me/new"), ("etc/hosts", HARD, "x")]], "/etc/hosts -> /home/me/new"),
        ([[ETC, ("x", LINK, "etc")], [("x/hosts", LINK, "/home/me/new")]], "/etc/hosts -> /home/me/new"),
        ([[("x", LINK, "/")], [("x/etc", LINK, "/home/me")]], "/etc -> /home/me"),
        ([[("etc", LINK, "/home/me")], [("etc/passwd", FILE, "")]], "/etc -> /home/me"),
        ([[("etc", LINK, "a"), ("a", LINK, "etc")]], "/a -> etc"),
        ([[("etc", LINK, "/a"), ("a", LINK, "/etc/x")]], "/etc -> /a"),
    ],
)
def test_link_to_this_machine_refused(tmp_path, layers, found):
    with refused(CheckFailed, where="hostile:1") as caught:
        refuse_links(tmp_path, *layers)
    path, _, target = found.partition(" -> ")
    kind = f"a link to {target!r}" if target else "a FIFO"
    assert caught.value.what.startswith(f"{path} in the image is {kind}, and the runtime ")


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
def test_links_that_nothing_writes_through(tmp_path, layers):
    refuse_links(tmp_path, *layers)


def test_headers_pass_over_content(tmp_path):
    """The first member is larger than what one read returns."""
    path = tmp_path / "layer.tar"
    path.write_bytes(tar_of_files({"large": bytes(1 << 20), "small": b"1", "etc": b""}))
    sizes = [(member.name, member.size_bytes) for member in tar_read.read_headers(path)]
    assert sizes == [("large", 1 << 20), ("small", 1), ("etc", 0)]


def test_cut_layer_refused(tmp_path):
    path = write_layer(tmp_path / "layer.tar", [ETC])
    path.write_bytes(path.read_bytes()[:512])
    with pytest.raises(CheckFailed, match="cut short"):
        runtime_build.refuse_links([path], where="hostile:1")


def link_header(name: bytes) -> bytes:
    return tar_write.ustar_header(name=name, kind=tar_read.SYMLINK, link=b"/home/me")


LONG_NAME = tar_write.ustar_header(name=b"x", kind=b"L", size_bytes=4) + b"etc\0".ljust(512, b"\0")
GNU_PREFIX = [(slice(257, 265), b"ustar  \0"), (slice(345, 348), b"etc")]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tar_write.pax_header({"path": b"harmless"}) + LONG_NAME + link_header(b"y"), "two names"),
        (
            tar_write.pax_header({"GNU.sparse.name": b"etc"}) + link_header(b"harmless"),
            "/etc in the image is a link to '/home/me'",
        ),
        (changed_header(link_header(b"hosts"), *GNU_PREFIX), "prefix"),
    ],
    ids=["GNU's name beside a pax record", "name of a sparse file", "prefix in a GNU header"],
)
def test_name_that_readers_disagree_on_is_refused(tmp_path, data, message):
    """Go's reader takes another name than others do."""
    (tmp_path / "layer.tar").write_bytes(data + tar_write.END)
    with pytest.raises(CheckFailed, match=message):
        runtime_build.refuse_links([tmp_path / "layer.tar"], where="hostile:1")
