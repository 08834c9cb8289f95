"""One archive, written by imgkit and built by the real runtime: which files differ, and why."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from labkit import IMGKIT, output, public_folder
from stored_images import archive, files_of
from tars import tar_entry

CAPABILITY = "\x01\x00\x00\x02\x00\x20\x00\x00" + "\x00" * 12
WHEN = 1_600_000_000

pytestmark = [
    pytest.mark.singularity,
    pytest.mark.xdist_group("writers"),
    pytest.mark.skipif(os.geteuid() != 0, reason="unpacks owners: needs root"),
]


def entry(name, data=b"", kind=tarfile.REGTYPE, **fields):
    mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    return tar_entry(name, data, kind, **{"mode": mode, "mtime": WHEN, **fields})


def layers():
    folder = tarfile.DIRTYPE
    below = [
        entry("bin", kind=folder),
        entry("bin/sh", Path("/bin/busybox").read_bytes(), mode=0o755),
        entry("bin/true", kind=tarfile.LNKTYPE, linkname="bin/sh", mode=0o755),
        entry("etc", kind=folder),
        entry("etc/passwd", b"root:x:0:0:root:/:/bin/sh\n"),
        entry("srv", kind=folder, uid=33, gid=33, mode=0o750),
        entry("srv/theirs", b"data", uid=33, gid=34, mode=0o640),
        entry("srv/setuid", b"#!/bin/sh\n", mode=0o4755),
        entry(
            "srv/capable", b"elf", mode=0o755, pax_headers={"SCHILY.xattr.security.capability": CAPABILITY}
        ),
        entry("srv/noted", b"x", pax_headers={"SCHILY.xattr.user.note": "kept?"}),
        entry("srv/link", kind=tarfile.SYMTYPE, linkname="theirs"),
        entry("srv/fifo", kind=tarfile.FIFOTYPE),
        entry("srv/secret", b"s", mode=0o600),
        entry("srv/gone", b"deleted by the second layer"),
        entry("opaque", kind=folder),
        entry("opaque/below", b"hidden by the second layer"),
    ]
    above = [
        entry("srv/.wh.gone"),
        entry("opaque/.wh..wh..opq"),
        entry("opaque/above", b"shown"),
    ]
    return below, above


Tree = dict[str, dict[str, Any]]

RUNTIMES_OWN = re.compile(
    r"\.(exec|run|shell|test)|\.singularity\.d/actions(/\w+)?"
    r"|\.singularity\.d/env/(01-base|94-appsbase|95-apps|99-runtimevars)\.sh"
)
"""Files that only the runtime's build adds: every runtime from 3.6 on mounts its own ones over them."""


BARE = {"user.note": b"kept?"}
ROOTLESS = "user.rootlesscontainers"
ALLOWED = {
    "root": {
        # A .sif of imgkit holds capabilities and no other attribute; the runtime keeps user.* of a layer.
        "srv/noted": [{"xattrs": {}}, {"xattrs": BARE}],
    },
    "ordinary user": {
        "srv/noted": [{"xattrs": {}}, {"xattrs": BARE}],
        # The runtime unpacks as the user: owners become root, with the true ones in an attribute that
        # nothing reads at a start, and a capability cannot be set.
        "srv": [{"owner": (33, 33), "xattrs": {}}, {"owner": (0, 0), "xattrs": {ROOTLESS: b"\x08!\x10!"}}],
        "srv/theirs": [
            {"owner": (33, 34), "xattrs": {}},
            {"owner": (0, 0), "xattrs": {ROOTLESS: b'\x08!\x10"'}},
        ],
        "srv/capable": [{"xattrs": {"security.capability": CAPABILITY.encode("latin-1")}}, {"xattrs": {}}],
    },
}
"""Who converts -> path -> what imgkit writes there, and what the runtime does: every allowed difference."""


@pytest.fixture(scope="module", params=["root", "ordinary user"])
def trees(request):
    """The user who converted, the files of the .sif that imgkit wrote, and those of the runtime's."""
    folder = public_folder("writers")
    try:
        (folder / "x.tar").write_bytes(archive(layers(), config={"Env": ["PATH=/bin"]}))
        start: tuple[object, ...] = IMGKIT
        if request.param != "root":
            start = _as_user(request.getfixturevalue("user"), request.getfixturevalue("public_imgkit"))
            (folder / "made").mkdir()
            shutil.chown(folder / "made", request.getfixturevalue("user"))
        trees = []
        for writer, route in (("imgkit", "stream"), ("runtime", "layers")):
            (folder / "made").mkdir(exist_ok=True)
            target = folder / "made" / f"{writer}.sif"
            answer = output(
                *(*start, "sif", folder / "x.tar", "-o", target, "--writer", writer, "--no-test", "--json"),
                folder="/",
            )
            assert json.loads(answer)["record"]["route"] == route
            trees.append(files_of(target, folder / writer))
        yield request.param, trees[0], trees[1]
    finally:
        shutil.rmtree(folder)


def _as_user(user, program):
    """The argv that starts imgkit as `user`, who may not read the folder of this Python."""
    path = f"{Path(shutil.which('singularity') or '').parent}:/usr/bin:/bin:/usr/sbin:/sbin"
    home = f"HOME={pwd.getpwnam(user).pw_dir}"
    env = ("env", "-i", f"PATH={path}", home, "LC_ALL=C.UTF-8")
    return ("runuser", "-u", user, "--", *env, program)


def differences(first, second):
    """Return path -> the values that differ, in `first` and in `second`; a missing file has none."""
    differing: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(first.keys() | second.keys()):
        pair = [first.get(path, {}), second.get(path, {})]
        keys = [key for key in sorted({**pair[0], **pair[1]}) if pair[0].get(key) != pair[1].get(key)]
        if keys:
            differing[path] = [{key: side[key] for key in keys if key in side} for side in pair]
    return differing


def test_trees_of_both_writers_differ_in_the_listed_entries_only(trees):
    user, of_imgkit, of_runtime = trees
    differing = differences(of_imgkit, of_runtime)
    runtime_paths = [path for path in differing if RUNTIMES_OWN.fullmatch(path)]
    assert runtime_paths
    assert [path for path in runtime_paths if path in of_imgkit] == []
    assert {path: values for path, values in differing.items() if path not in runtime_paths} == ALLOWED[user]


def test_difference_that_is_not_listed_is_found(trees):
    _, of_imgkit, _ = trees
    changed = {**of_imgkit, "etc/passwd": {**of_imgkit["etc/passwd"], "mode": "0o100600"}}
    assert list(differences(of_imgkit, changed)) == ["etc/passwd"]
    assert differences(of_imgkit, {}).keys() == of_imgkit.keys()


def test_trees_hold_what_the_layers_show(trees):
    """The comparison is not one of two empty trees."""
    for tree in trees[1:]:
        assert tree["opaque/above"]["content"] == b"shown"
        assert "srv/gone" not in tree
        assert "opaque/below" not in tree
