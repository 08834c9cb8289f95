"""Conversions with a real engine and a real runtime: both ways give the same tree, and it runs."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import secrets
import shutil
import stat
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from labkit import docker, expect_failure, imgkit, imgkit_json, ordinary_user, output, run
from stored_images import archive, only
from tars import tar_entry

from imgkit_builder import engine as engines
from imgkit_builder.archive import oci_folder, stored
from imgkit_builder.base.progress import Silent
from imgkit_builder.sif import image
from imgkit_builder.sif.conversion import Options
from imgkit_builder.sif.convert import convert
from imgkit_builder.sif.entries import Archive, OciFolder
from imgkit_builder.sif.image import SifImage

pytestmark = [pytest.mark.docker, pytest.mark.singularity, pytest.mark.xdist_group("sif")]

# Whatever a file system can hold and a conversion can lose.
ODD = r"""FROM {base}
RUN mkdir -p /odd/deep /odd/opaque && cd /odd && echo one >a && ln a b && ln a deep/c && ln -s a sym \
 && ln -s "/$(printf 'x%.0s' $(seq 180))" longabs && ln -s "../../$(printf 'y%.0s' $(seq 180))" longrel \
 && ln -s /usr/é utf8 && mkfifo fifo && mknod nulldev c 1 3 && mkdir sticky && chmod 1777 sticky \
 && cp /bin/true suid && chmod 4755 suid && cp /bin/true sgid && chmod 2711 sgid \
 && mkdir sg && chmod 2750 sg && chown 1234:4321 sg \
 && echo secret >none && chmod 0 none && chown 3000000:3000001 none \
 && truncate -s 3M sparse && echo end >>sparse && touch -d '1999-12-31 23:59:58.123456789' old \
 && touch "$(printf 'sp ace\nnl')" ümläut \
 && d=$(printf 'd%.0s' $(seq 120)) && mkdir -p $d/$d && echo long >$d/$d/$d \
 && cp /bin/true caps && python3 -c "import os; os.setxattr('/odd/caps', 'security.capability', \
    bytes.fromhex('0100000200040000000000000000000000000000'))" \
 && echo 1 >opaque/gone && echo deleted >deleted
RUN cd /odd && rm -r deleted opaque && mkdir opaque && echo new >opaque/new && chmod 700 deep
ENV QUOTED="it's \"a\"" EMPTY=""
LABEL org.opencontainers.image.title=odd weird="q\"uote <&>"
CMD ["python3", "-c", "print('ran')"]
"""

RUNTIMES_OWN = re.compile(r"\.singularity\.d(/.*)?|\.exec|\.run|\.shell|\.test|environment|singularity")
TIMES_MAY_DIFFER = {".", "dev", "etc", "etc/hosts", "etc/resolv.conf", "proc", "sys"}


@dataclass(frozen=True, kw_only=True)
class Lab:
    """The odd image, its archive, and it converted on both ways."""

    name: str
    folder: Path
    archive: Path
    layers: Path
    export: Path


def sif(*args, folder):
    return imgkit_json("sif", *args, folder=folder)


@pytest.fixture(scope="module")
def lab(standin_notorch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sif")
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid():
            parent.chmod(parent.stat().st_mode | 0o055)  # an ordinary user reads it too
    name = f"imgkit-test-sif:{secrets.token_hex(4)}"
    dockerfile = ODD.replace("{base}", standin_notorch)
    docker("build -q -t", name, "-", stdin=dockerfile)
    try:
        archive = folder / "odd.tar"
        docker("save -o", archive, name)
        archive.chmod(0o644)
        sif(archive, "-o", "layers.sif", folder=folder)
        sif(name, "-o", "export.sif", folder=folder)
        layers, export = folder / "layers.sif", folder / "export.sif"
        yield Lab(name=name, folder=folder, archive=archive, layers=layers, export=export)
    finally:
        run("docker", "image", "rm", "-f", name)


def unpacked(path, folder):
    """The root partition's files, unpacked by root."""
    root = image.read(path).require_root()
    if os.geteuid() != 0:
        pytest.skip("owners and devices are unpacked by root only")
    output("unsquashfs", "-quiet", "-no-progress", "-o", str(root.offset), "-d", folder, path)
    return folder


def tree(root):
    """Return metadata and content of every file."""
    files = {}
    for path in (root, *root.rglob("*")):
        status = path.lstat()
        kind = status.st_mode
        content = ""
        if stat.S_ISREG(kind):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(kind):
            content = str(path.readlink())
        files[path.relative_to(root).as_posix()] = {
            "mode": oct(kind),
            "owner": (status.st_uid, status.st_gid),
            "links": status.st_nlink if not stat.S_ISDIR(kind) else 0,
            "device": status.st_rdev,
            "size": status.st_size if stat.S_ISREG(kind) else 0,
            "mtime": int(status.st_mtime),
            "content": content,
            "xattrs": {
                name: os.getxattr(path, name, follow_symlinks=False)
                for name in os.listxattr(path, follow_symlinks=False)
            },
        }
    return files


def test_both_ways_same_tree(lab, tmp_path):
    """docs/reference/files.md lists what may differ; everything else, to the last xattr, must not."""
    layers = tree(unpacked(lab.layers, tmp_path / "layers"))
    export = tree(unpacked(lab.export, tmp_path / "export"))
    assert set(layers) - set(export) <= {"dev/console", "etc/hostname", "etc/mtab"}
    assert set(export) - set(layers) == set()
    differing = {}
    for name in sorted(set(layers) & set(export)):
        changed = {key for key, value in layers[name].items() if export[name][key] != value}
        if RUNTIMES_OWN.fullmatch(name) or name in TIMES_MAY_DIFFER:
            changed -= {"mtime"}
        if changed:
            differing[name] = changed
    # The engine puts empty files over these two of the image.
    assert set(differing) <= {"etc/hosts", "etc/resolv.conf"}
    assert layers["odd/caps"]["xattrs"]
    assert layers["odd/a"]["links"] == 3
    assert layers["odd/longabs"]["content"].startswith("/xxx")
    assert layers["odd/longrel"]["content"].startswith("../../yyy")
    assert "odd/opaque/gone" not in layers
    assert len(layers) > 5000


def offset(sif):
    return ("-o", str(image.read(sif).require_root().offset))


@pytest.mark.programs("unsquashfs")
def test_attributes_are_the_same_from_every_source(tmp_path):
    """Engines export capabilities alone, so no source gives more."""
    tag, pax = f"imgkit-test-{secrets.token_hex(4)}:1", "SCHILY.xattr."
    capability = bytes.fromhex("0100000200040000000000000000000000000000").decode()
    members = []
    for name in ("noted", "capable", "both"):
        headers = {} if name == "capable" else {f"{pax}user.note": "x", f"{pax}trusted.note": "y"}
        if name != "noted":
            headers[f"{pax}security.capability"] = capability
        members.append(tar_entry(name, pax_headers=headers))
    (tmp_path / "x.tar").write_bytes(archive([members], name=tag))
    oci_folder.write_layout(stored.open_image(tmp_path / "x.tar"), tmp_path / "oci", Silent())
    docker("load -i", tmp_path / "x.tar")
    try:
        engine = engines.local_image(engines.connect(), tag)
        sources = {"engine": engine, "archive": Archive(path=tmp_path / "x.tar")}
        sources["oci"] = OciFolder(path=tmp_path / "oci")
        for name, source in sources.items():
            converted = convert(source, tmp_path / f"{name}.sif", Options(test=False), Silent())
            listing = output(
                "unsquashfs", "-n", "-d", tmp_path / name, *offset(converted.path), converted.path
            )
            assert "created" in listing
            attributes = {path: os.listxattr(tmp_path / name / path) for path in ("noted", "capable", "both")}
            stored_name = ["security.capability"]
            assert attributes == {"noted": [], "capable": stored_name, "both": stored_name}, name
            value = os.getxattr(tmp_path / name / "both", "security.capability")
            assert value == capability.encode(), name
    finally:
        docker("rmi --force", tag)


def test_labels_are_those_of_the_image(lab, tmp_path):
    def labels(path):
        answer = json.loads(output("singularity", "inspect", "--labels", "--json", path))
        return answer["data"]["attributes"]["labels"]

    layers, export = labels(lab.layers), labels(lab.export)
    assert layers == export
    assert layers["weird"] == 'q"uote <&>'


def test_same_data_objects(lab):
    """``singularity inspect`` and ``run`` read these."""

    def objects(path):
        parsed = image.read(path)
        kinds = (image.DataType.DEFFILE, image.DataType.JSON)
        all_objects = [
            (descriptor.datatype, image.read_object(parsed, descriptor))
            for descriptor in parsed.descriptors
            if descriptor.datatype in kinds and descriptor.name != image.IMGKIT_OBJECT
        ]
        return [(kind, data) for kind, data in all_objects if b"build-date" not in data]

    assert objects(lab.layers) == objects(lab.export) != []


def test_export_is_taken_and_told(lab, tmp_path):
    """Nobody chooses here; a file of the other route is as good."""
    exported, streamed = image.read(lab.export).record, image.read(lab.layers).record
    assert (exported.route, streamed.route) == ("export", "stream")
    shutil.copy(lab.layers, tmp_path / "x.sif")
    assert sif(lab.name, "-o", "x.sif", folder=tmp_path)["up_to_date"]
    assert "straight into the .sif" in imgkit("sif", lab.name, "--dry-run", folder=tmp_path).stdout
    assert "merged layers of" in imgkit("sif", lab.archive, "--dry-run", folder=tmp_path).stdout


def test_machine_that_cannot_squash_takes_the_slow_route(lab, tmp_path):
    """PATH begins with programs that know no option; the runtime builds."""
    env = only("runtime", tmp_path)
    plan = imgkit("sif", lab.archive, "--dry-run", folder=tmp_path, env=env).stdout
    assert "slower" in plan
    assert "cannot read a tar" in plan


def test_export_is_reproducible(lab):
    again = sif(lab.name, "-o", "again.sif", folder=lab.folder)
    assert again["record"]["root_sha256"] == image.root_sha256(lab.export)


def test_archive_same_image(lab):
    answer = sif(lab.archive, "-o", "archive.sif", folder=lab.folder)
    record = image.read(lab.layers).record
    assert answer["record"]["image_id"] == record.image_id
    assert tuple(answer["record"]["diff_ids"]) == record.diff_ids
    assert sif(lab.archive, "-o", "archive.sif", folder=lab.folder)["up_to_date"]


def test_oci_folder_same_image(lab, tmp_path):
    oci_folder.write_layout(stored.open_image(lab.archive), tmp_path / "oci", Silent())
    answer = sif(tmp_path / "oci", "-o", "oci.sif", "--compression", "gzip", folder=lab.folder)
    superblock = image.root_superblock(image.read(lab.folder / "oci.sif"))
    assert superblock.compressor == "gzip"
    assert answer["record"]["compression"] == "gzip 6"


@pytest.mark.parametrize("way", ["layers", "export"])
def test_runs_as_root(lab, way):
    path = getattr(lab, way)
    assert output("singularity", "run", path).strip().endswith("ran")
    script = 'echo "${EMPTY-unset}$PATH"; stat -c "%a %u" /; cat /odd/deep/c'
    lines = output("singularity", "exec", "--cleanenv", path, "sh", "-c", script).splitlines()
    assert lines[0].startswith("/usr/local/sbin:")
    assert lines[1:] == ["755 0", "one"]


def parsed_list(path):
    """Id, start and end of each object as ``singularity sif list`` shows them."""
    rows = re.findall(
        r"^(\d+)\s*\|[^|]*\|[^|]*\|(\d+)-(\d+)", output("singularity", "sif", "list", path), re.M
    )
    return [(int(number), int(start), int(end)) for number, start, end in rows]


@pytest.mark.parametrize("way", ["layers", "export"])
def test_own_reader_agrees_with_runtime(lab, way, tmp_path):
    parsed: SifImage = image.read(getattr(lab, way))
    ranges = [(entry.id, entry.offset, entry.offset + entry.size_bytes) for entry in parsed.descriptors]
    assert ranges == parsed_list(parsed.path)
    argv = ["singularity", "sif", "dump", str(parsed.require_root().id), str(parsed.path)]
    dumped = subprocess.run(argv, capture_output=True, check=True).stdout
    assert hashlib.sha256(dumped).hexdigest() == image.root_sha256(parsed.path)
    header = output("singularity", "sif", "header", parsed.path)
    assert re.search(rf"Primary Architecture:\s+{parsed.arch}$", header, re.M)


@pytest.fixture
def user():
    """An ordinary user with a home, for this test."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make an ordinary user")
    with ordinary_user() as name:
        yield name


def test_ordinary_user_converts_and_runs(lab, user, public_imgkit):
    """No engine, no checkout and no root is needed."""
    home = Path(pwd.getpwnam(user).pw_dir)
    for path in (lab.archive, lab.export):
        shutil.copy(path, home)
    folders = f"{Path(shutil.which('singularity') or '').parent}:/usr/bin:/bin"
    start = ["runuser", "-u", user, "--", "env", "-i", f"PATH={folders}", f"HOME={home}", "LC_ALL=C"]
    output(*start, public_imgkit, "sif", "odd.tar", "-o", "mine.sif", folder=home)
    for path in ("mine.sif", "export.sif"):
        script = "id -un; cat /odd/opaque/new"
        assert (
            output(*start, "singularity", "exec", path, "sh", "-c", script, folder=home) == f"{user}\nnew\n"
        )
    names = {path.name for path in home.iterdir() if not path.name.startswith(".")}
    assert names == {"export.sif", "mine.sif", "odd.tar"}
    assert not list(home.glob(".imgkit-*.part"))
    assert not list(home.glob(".imgkit-sif*"))


def test_damaged_archive_leaves_the_old_sif(lab, tmp_path):
    shutil.copy(lab.layers, tmp_path / "odd.sif")
    data = bytearray(lab.archive.read_bytes())
    with tarfile.open(lab.archive) as tar:
        layer = max(tar.getmembers(), key=lambda member: member.size)
    data[layer.offset_data + layer.size // 2] ^= 1
    (tmp_path / "odd.tar").write_bytes(data)
    result = expect_failure(imgkit("sif odd.tar --force", folder=tmp_path), 1)
    assert re.search(r"layer \d of 3 is damaged", result.stderr)
    assert image.root_sha256(tmp_path / "odd.sif") == image.root_sha256(lab.layers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd.sif", "odd.tar"]


def test_unknown_image_refused(tmp_path):
    expect_failure(imgkit("sif imgkit-test-none:1", folder=tmp_path), 2)
    assert list(tmp_path.iterdir()) == []


def test_archive_that_is_not_there_refused(tmp_path):
    expect_failure(imgkit("sif mn5.tar", folder=tmp_path), 2, "imgkit save mn5")
