"""One table of everything that reads what somebody else wrote: a name, seeds, how to change them, the reader."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import io
import json
import re
import shutil
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kit"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))

import mutate
from file_tree import write_files
from sample_image import SampleImage, digest
from shared_object import shared_object
from tars import tar_of_files

from imgkit_builder.archive import compressed, oci_folder, read, sidecar, stored
from imgkit_builder.archive.tar_read import TarStream
from imgkit_builder.base import files
from imgkit_builder.base.progress import Silent
from imgkit_builder.data import hub
from imgkit_builder.image import inside
from imgkit_builder.jobs import measured, records
from imgkit_builder.jobs import quoting as job_fields
from imgkit_builder.jobs import systems as job_systems
from imgkit_builder.jobs.remote import check as far_check
from imgkit_builder.jobs.remote import gc, store
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.remote.connection import Connection
from imgkit_builder.jobs.remote.store import RemoteImage
from imgkit_builder.jobs.systems import fanout as ssh_hosts
from imgkit_builder.lock import answers
from imgkit_builder.oci import config, manifest
from imgkit_builder.oci.manifest import BaseImage, Manifest, Probe
from imgkit_builder.project import toml_file
from imgkit_builder.recipe import (
    lock_file,
    problems,
    requirements,
    rules,
    sources,
    targets,
)
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.targets import describe_as_json as recipe_json
from imgkit_builder.sif import image, runtime_build, sqsh
from imgkit_builder.sif.baked_facts import BakedFacts, Distribution
from imgkit_builder.sif.entries import Archive, peek_config
from imgkit_entrypoints import fabric, facts, json_text, known_issues, system
from imgkit_entrypoints.apps.train.options import file_arguments
from imgkit_entrypoints.doctor import node
from imgkit_entrypoints.errors import ImgkitError
from imgkit_entrypoints.facts import elf
from imgkit_entrypoints.launch import nccl, stop_protocol
from imgkit_entrypoints.rules import Unfit
from imgkit_entrypoints.run import disk
from imgkit_entrypoints.schedulers import hostlist, resolve
from imgkit_entrypoints.schedulers.placement import PlacementRequest
from imgkit_entrypoints.system import SystemFacts

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Target:
    """One reader."""

    name: str
    run: Callable[[bytes, Path], object]
    """Read the bytes; the folder is empty and its own."""
    seeds: Callable[[], list[bytes]]
    change: Callable[[bytes, mutate.Change], bytes] = mutate.in_text
    also: tuple[type[Exception], ...] = ()
    """Errors that the reader's docstring names besides ImgkitError."""

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """Errors that are an answer."""
        return (ImgkitError, *self.also)


def _file(read: Callable[[Path], object], name: str = "input") -> Callable[[bytes, Path], object]:
    """A reader of files as a reader of bytes."""

    def run(data: bytes, folder: Path) -> object:
        return read(_put(folder, data, name))

    return run


# ---- archives and layers
def layer(*, form: int = tarfile.PAX_FORMAT) -> bytes:
    """A layer with every kind of member, long names, attributes and a sparse file's map."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, kind, link, size in (
            ("etc/", tarfile.DIRTYPE, "", 0),
            ("etc/hosts", tarfile.REGTYPE, "", 700),
            ("etc/link", tarfile.SYMTYPE, "../" + "l" * 120, 0),
            ("etc/hard", tarfile.LNKTYPE, "etc/hosts", 0),
            ("dev/null", tarfile.CHRTYPE, "", 0),
            ("run/fifo", tarfile.FIFOTYPE, "", 0),
            ("etc/.wh.gone", tarfile.REGTYPE, "", 0),
            ("var/.wh..wh..opq", tarfile.REGTYPE, "", 0),
            ("d" * 90 + "/" + "f" * 120, tarfile.REGTYPE, "", 3),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size, info.devmajor = kind, link, size, 1
            if form == tarfile.PAX_FORMAT and size:
                info.pax_headers = {"SCHILY.xattr.user.a": "x", "mtime": "5.5"}
            tar.addfile(info, io.BytesIO(b"x" * size) if size else None)
        if form == tarfile.PAX_FORMAT:
            sparse = tarfile.TarInfo("sparse")
            sparse.size = 3
            sparse.pax_headers = {"GNU.sparse.map": "100,3", "GNU.sparse.size": "5000"}
            tar.addfile(sparse, io.BytesIO(b"abc"))
    return buffer.getvalue()


def _layers() -> list[bytes]:
    return [layer(), layer(form=tarfile.GNU_FORMAT)]


def archive(*, packed: bool = False, oci: bool = False) -> bytes:
    """An image of one layer, as docker 25 or BuildKit saves it."""
    sample = SampleImage(layers=[layer()], labels={"a": "b"})
    members = sample.modern_members(
        functools.partial(gzip.compress, compresslevel=1, mtime=0) if packed else bytes
    )
    if oci:
        del members["manifest.json"]
    return tar_of_files(members)


def _archives() -> list[bytes]:
    return [archive(), archive(packed=True), archive(oci=True)]


def _walk_tar(data: bytes, _: Path) -> None:
    stream = TarStream(iter([data[start : start + 1000] for start in range(0, len(data), 1000)]), name="x")
    for number, member in enumerate(stream):
        assert member.size_bytes >= 0
        for _piece in stream.content() if number % 2 else stream.body():
            pass


def _gunzip(data: bytes, _: Path) -> None:
    allowance = compressed.Allowance(len(data), "x", 8 << 20)
    for piece in compressed.unpack_chunks([data], "gzip", name="x", allowance=allowance):
        assert len(piece) <= compressed.CHUNK_BYTES + 512


def _lay_out(data: bytes, folder: Path) -> object:
    limit = 8 << 20
    with stored.open_archive(_put(folder, data), folder, unpack_limit_bytes=limit) as image:
        return oci_folder.write_layout(image, folder / "laid", Silent(), unpack_limit_bytes=limit)


def _verify_archive(path: Path) -> None:
    contents = read.digest_archive(path, compress=compressed.detect_compression(path), report=Silent())
    assert contents.size_bytes == path.stat().st_size


# ---- squashfs and .sif
SUPERBLOCK = image.SUPERBLOCK.pack(image.SQUASHFS_MAGIC, 1, 0, 4096, 0, 1, 0, 96, *(0,) * 5).ljust(200, b"\0")
"""The beginning of a squashfs: imgkit reads no more of one that another program wrote."""


def _record(**values: Any) -> image.ImgkitRecord:
    return image.ImgkitRecord(
        image_id="sha256:" + "0" * 64,
        diff_ids=(),
        root_sha256="0" * 64,
        runtime="r",
        compression="c",
        route="stream",
        imgkit="0",
        **values,
    )


def _sifs() -> list[bytes]:
    """A .sif with a record and a root partition, made from its structs."""
    facts = BakedFacts(manifest="{}", distributions=(Distribution(name="a", folder="/b"),))
    record = image.record_text(_record(facts=facts))
    squashfs = SUPERBLOCK
    rows, at = b"", 128 + 3 * 585
    bodies = ((image.DataType.PARTITION, squashfs, b"root"), (image.DataType.JSON, record, b"imgkit"))
    for number, (kind, body, name) in enumerate(bodies, 1):
        extra = image._PARTITION.pack(1, 2, b"02\0") if kind == image.DataType.PARTITION else b""
        rows += image.DESCRIPTOR.pack(
            kind, 1, number, 0xF0000001, 0, at, len(body), len(body), *(0,) * 4, name, extra
        )
        at += len(body)
    head = image.HEADER.pack(
        b"#!", image.MAGIC, b"01\0", b"02\0", bytes(16), 0, 0, 1, 3, 128, 3 * 585, 128 + 3 * 585, at
    )
    return [head + rows + bytes(585) + squashfs + record]


def _read_sif(path: Path) -> None:
    sif = image.read(path)
    image.root_superblock(sif)
    for entry in sif.descriptors:
        image.read_object(sif, entry)


def _sqshs() -> list[bytes]:
    """A .sqsh with its record."""
    tail = files.make_trailer(image.record_text(_record(arch="amd64")), sqsh.MARK)
    return [SUPERBLOCK + tail]


def _read_sqsh(path: Path) -> None:
    sqsh.check_structure(path)
    sqsh.read_record(path)
    sqsh.hash_sqsh(path)


# ---- JSON
def _text(read: Callable[[str], object]) -> Callable[[bytes, Path], object]:
    return lambda data, _: read(data.decode("utf-8", "replace"))


def _manifests() -> list[bytes]:
    base = BaseImage(name="nvcr.io/x:1", digest="sha256:" + "0" * 64, probe=_filled(Probe))
    return [manifest.to_json(_filled(Manifest, base=base)).encode()]


def _filled(kind: Any, **values: Any) -> Any:
    """Return a dataclass with these values, and something in every other field."""
    for field in dataclasses.fields(kind):
        values.setdefault(field.name, () if "tuple" in str(field.type) else "x")
    return kind(**values)


def _sidecars() -> list[bytes]:
    described = sidecar.Sidecar(
        image=sidecar.SavedImage(id="a", tag="b", platform="linux/amd64", diff_ids=("c",), labels={"d": "e"}),
        archive=sidecar.SavedArchive(name="x.tar", size_bytes=5, sha256="0" * 64, compress="none"),
        system=SystemFacts(title="x", env={"A": "1"}),
        manifest=None,
    )
    return [sidecar.to_json(described).encode()]


def _recipe_texts() -> list[bytes]:
    return [recipe_json(load(name)).encode() for name in ("mn5", "olivia")]


def _checkpoint(data: bytes, folder: Path) -> None:
    (folder / "weights.pt").write_bytes(b"x")
    (folder / disk.MANIFEST).write_bytes(data)
    with contextlib.suppress(disk.InvalidCheckpoint):
        _, _, rows = disk.read_manifest(folder)
        disk.find_damage(folder, rows, sorted(rows))


# ---- recipes and what belongs to them
def _recipes() -> list[bytes]:
    shipped = sorted((ROOT / "recipes/imgkit_recipes").glob("*.yaml"))
    extra = sorted((ROOT / "tests/golden/recipes").glob("*.yaml"))
    return [path.read_bytes() for path in (*shipped[:4], *extra)]


def _ignored(data: bytes, folder: Path) -> None:
    (folder / ".gitignore").write_bytes(data)
    (folder / ".dockerignore").write_bytes(data)
    for name in ("a", "aaaa" * 60, "data/x.tmp"):
        (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "in" / name).touch()
    patterns = tuple(data.decode("utf-8", "replace").splitlines()[:3])
    sources.list_source(folder, patterns)


# ---- what a machine and a scheduler say
TREE = {
    "proc/self/status": "Cpus_allowed_list:\t0-3,8,10-12",
    "proc/self/cgroup": "0::/a/b\n4:cpu,cpuacct:/x",
    "sys/fs/cgroup/cpu.max": "350000 100000",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    "proc/self/limits": "Max locked memory   65536  unlimited bytes\nMax processes  100 200 processes",
    "proc/sys/net/ipv4/ip_local_port_range": "32768 60999",
    "proc/sys/kernel/osrelease": "5.15.0-100-generic",
    "proc/sys/kernel/hostname": "node1",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15",
    "proc/driver/nvidia/gpus/0000:17:00.0/information": "Model:  NVIDIA H100",
    "dev/nvidia0": "",
    "dev/infiniband/uverbs0": "",
    "sys/bus/pci/devices/0000:17:00.0/current_link_width": "16",
    "sys/bus/pci/devices/0000:17:00.0/max_link_width": "16",
    "sys/bus/pci/devices/0000:17:00.0/current_link_speed": "32.0 GT/s PCIe",
    "sys/bus/pci/devices/0000:17:00.0/numa_node": "1",
    "sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0",
    "sys/class/infiniband/mlx5_0/node_type": "1: CA",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "sys/class/infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)",
    "sys/class/infiniband/mlx5_0/ports/1/gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0001",
    "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/3": "RoCE v2",
    "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/3": "eth0",
    "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error": "5",
    "sys/class/infiniband/mlx5_0/device/net/eth0": "",
    "sys/class/net/eth0/operstate": "up",
    "sys/class/net/eth0/speed": "100000",
    "sys/class/cxi/cxi0/device/numa_node": "0",
    "proc/net/route": "Iface Destination\neth0 0000000A 00000000 0001 0 0 0 00FFFFFF 0 0 0\neth0 00000000 0100000A 0003 0 0 5 00000000",
    "proc/net/fib_trie": "  |-- 10.0.0.1\n     /32 host LOCAL\n",
    "proc/net/if_inet6": "fe800000000000000000000000000001 02 40 20 80 eth0\n20010db8000000000000000000000001 02 40 00 80 eth0",
    "etc/nccl.conf": "NCCL_DEBUG=INFO\n#x",
    "etc/ld.so.conf.d/x.conf": "/usr/lib/x",
    "commands/nvidia-smi.xml": '<log><gpu id="0"><ecc_errors><volatile><dram_uncorrectable>1</dram_uncorrectable>'
    "</volatile></ecc_errors><clocks_event_reasons><clocks_event_reason_hw_slowdown>Active</clocks_event_reason_hw_slowdown>"
    "</clocks_event_reasons></gpu></log>",
    "commands/xid.txt": "NVRM: Xid (PCI:0000:17:00): 79, pid=1",
    "opt/imgkit/manifest.json": '{"platform": "linux/amd64"}',
    "opt/imgkit/system.json": '{"fabric": {"host_libs": "auto"}, "runtime": {"cuda_compat": "auto", "host_libs": ["/opt/x"]}}',
}

CXI = {"sys/class/cxi/cxi0/device/vendor": "0x17db"}
"""The same machine with Slingshot."""


def _libraries() -> list[bytes]:
    needs = {"libc.so.6": ("GLIBC_2.34", "GLIBC_2.38"), "libz.so.1": ("ZLIB_1.2",)}
    return [shared_object("libx.so.1", needs=needs, defines=("X_1.0", "X_1.1"), rpath="$ORIGIN:/a")]


def _tree(data: bytes, folder: Path) -> None:
    """Gather the facts of a saved tree, decide on its fabric, and examine it."""
    with contextlib.suppress(ValueError, RecursionError):
        files = json.loads(data)
        for path, content in files.items() if isinstance(files, dict) else ():
            if path and not {"", ".", ".."} & set(path.split("/")) and isinstance(content, str):
                with contextlib.suppress(OSError, ValueError):
                    write_files(folder, {path: content.encode("utf-8", "surrogatepass")})
    host = facts.gather(root=folder, env={})
    fabric.choose_fabric(host, None, {}, nnodes=2)
    node.examine(host, None, {}, reader=facts.Reader(root=folder))


ENVIRONMENTS = (
    "SLURM_JOB_ID=5; SLURM_NNODES=3; SLURM_NODEID=1; SLURM_JOB_NODELIST=n[1-3]; SLURM_PROCID=1; "
    "SLURM_NTASKS=3; SLURM_STEP_ID=0; SLURM_STEP_NODELIST=n[1-3]; SLURM_STEP_NUM_NODES=3; "
    "SLURM_STEP_NUM_TASKS=3; SLURM_STEP_TASKS_PER_NODE=1(x3); SLURM_LOCALID=0; "
    "SLURM_TASKS_PER_NODE=1(x3)",
    "PBS_JOBID=5.x; PBS_NODEFILE=/nodes; PBS_NODENUM=1; FILE=n1\nn2\nn2",
    "OMPI_COMM_WORLD_SIZE=2; OMPI_COMM_WORLD_RANK=1; OMPI_COMM_WORLD_LOCAL_SIZE=1; "
    "OMPI_COMM_WORLD_LOCAL_RANK=0; IMGKIT_NODES=a,b; PMIX_RANK=1",
    "PALS_RANKID=1; PALS_NODEID=1; PALS_LOCAL_RANKID=0; PALS_APID=x; IMGKIT_NODES=a b",
    "PMI_RANK=1; PMI_SIZE=2; MPI_LOCALNRANKS=1; MPI_LOCALRANKID=0; IMGKIT_NODES=a b",
    "WORLD_SIZE=2; RANK=1; MASTER_ADDR=a; MASTER_PORT=29500; KUBERNETES_SERVICE_HOST=x; PET_NNODES=2; "
    "PET_NODE_RANK=1",
    "IMGKIT_NNODES=2; IMGKIT_NODE_RANK=1; IMGKIT_HEAD=a; IMGKIT_PORT=5000; IMGKIT_NODES=a[1-2]",
)
"""What launchers set, ``NAME=VALUE``; FILE is the text of the node file."""


def _placement(data: bytes, _: Path) -> None:
    env: Mapping[str, str] = {}
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(data)
        if isinstance(document, dict):
            env = {name: value for name, value in document.items() if isinstance(value, str)}
    file = env.get("FILE")
    resolve.find_placement(
        PlacementRequest(), env, lambda path: file if path == env.get("PBS_NODEFILE") else None
    )


def _ras_report(data: bytes, _: Path) -> None:
    lines = nccl.summarize_answer(data)
    assert len(lines) <= nccl.MAX_LINES + 1
    assert all(line.isascii() and line.isprintable() for line in lines)


# ---- what a remote and its scheduler print
FAR = Remote(name="far", address="far", folder="/x")


def _store_answers() -> list[bytes]:
    """Answers of a remote without an image, and with one."""
    rows = b"home /scratch/me\nprogram there\ncode " + b"c" * 64 + b"\n"
    note = RemoteImage(
        image_id="sha256:" + "0" * 64,
        root_sha256="1" * 64,
        root_offset=4096,
        root_bytes=5,
        sif_bytes=5000,
        arch="amd64",
        diff_ids=("sha256:" + "2" * 64,),
    )
    text = note.to_json()
    image_row = b"image %d %s\n%s" % (len(text), note.name.encode(), text)
    return [rows + b"end\n", rows + image_row + b"end\n"]


def _far_check(data: bytes, _: Path) -> None:
    far = Connection(remote=FAR, socket_folder=None, unshared_reason="", ask=False)
    for target in (None, targets.load_target("mn5")):
        far_check.parse_probe(data, far, target)


def _scheduler(data: bytes, _: Path) -> None:
    text = data.decode("utf-8", "replace")
    for name in ("slurm", "pbs", "kubeflow"):
        system = job_systems.get_system(name)
        system.parse_status(text)
        job_fields.is_job_id(system.parse_job_id(text, "x").partition(";")[0])


def _lines(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


def _tomls() -> list[bytes]:
    return [
        (ROOT / "tests/golden/recipes/locked.lock").read_bytes(),
        b'a = 1\n[b.c]\nd = {e = [1.5, 2020-01-01T00:00:00Z, "x"]}\n"f.g" = true\n',
    ]


def _extended(data: bytes, folder: Path) -> None:
    _put(folder, data, "parent.yaml")
    load(_put(folder, b"extends: ./parent.yaml\n", "r.yaml"))


def _failure(data: bytes, folder: Path) -> None:
    recipe = load(_put(folder, b"image: {base: 'b:1', apt: [x], pip: [{packages: [a]}]}\n", "r.yaml"))
    error = answers.explain_failure(recipe, answers.read_failure(data.decode(errors="replace")), log="log")
    assert len(str(error)) < 100_000


TARGETS = (
    Target("tar", _walk_tar, _layers, mutate.in_tar),
    Target(
        "layer-links",
        _file(lambda path: runtime_build.refuse_links([path], where="x")),
        _layers,
        mutate.in_tar,
    ),
    Target(
        "archive",
        _lay_out,
        lambda: [*_archives(), *(gzip.compress(data, 1, mtime=0) for data in _archives()[:1])],
        mutate.in_tar,
    ),
    Target("archive-verify", _file(_verify_archive), _archives, mutate.in_tar),
    Target(
        "archive-peek",
        _file(lambda path: peek_config(Archive(path=path))),
        _archives,
        mutate.in_tar,
    ),
    Target(
        "archive-gzip",
        _file(_verify_archive),
        lambda: [gzip.compress(data, 1, mtime=0) for data in _archives()],
        mutate.in_gzip(mutate.in_tar),
    ),
    Target("gzip", _gunzip, lambda: [gzip.compress(layer(), mtime=0)], mutate.in_bytes),
    Target("sif", _file(_read_sif), _sifs, mutate.in_bytes),
    Target("sqsh", _file(_read_sqsh), _sqshs, mutate.in_record),
    Target(
        "json",
        lambda data, _: json_text.parse(data),
        _recipe_texts,
        mutate.in_json,
        also=(ValueError,),
    ),
    Target(
        "json-between-warnings",
        _text(json_text.first_object),
        _recipe_texts,
        mutate.in_json,
        also=(ValueError,),
    ),
    Target(
        "image-configuration",
        lambda data, _: config.creation_time_s(config.parse_config(data, where="x").created),
        _lines(
            '{"architecture": "amd64", "os": "linux", "created": "2024-03-20T00:00:00Z", "config": {"Labels": {"a": "b"}}, '
            '"rootfs": {"diff_ids": ["sha256:' + "0" * 64 + '"]}}'
        ),
        mutate.in_json,
    ),
    Target("manifest", _text(manifest.from_json), _manifests, mutate.in_json),
    Target(
        "system",
        _text(system.from_json),
        lambda: [system.to_json(load("mn5").system).encode()],
        mutate.in_json,
        also=(ValueError,),
    ),
    Target(
        "known-issues",
        _file(known_issues.read_issues),
        lambda: [known_issues.SHIPPED_FILE.read_bytes()],
        mutate.in_json,
    ),
    Target(
        "sidecar",
        lambda data, _: sidecar.from_json(data.decode("utf-8", "replace"), where="x"),
        _sidecars,
        mutate.in_sealed,
    ),
    Target(
        "train-config",
        _file(file_arguments, "c.json"),
        _lines('{"model": "mlp", "epochs": 3, "lr": 0.1}'),
        mutate.in_json,
        also=(ValueError,),
    ),
    Target(
        "checkpoint",
        _checkpoint,
        lambda: [
            json.dumps(
                json_text.seal(
                    {
                        "schema": 1,
                        "step": 5,
                        "files": {"weights.pt": {"size_bytes": 1, "sha256": digest(b"x")}},
                    }
                )
            ).encode()
        ],
        mutate.in_sealed,
    ),
    Target(
        "inside",
        _text(inside.parse_probe),
        lambda: [f'x\n{inside._PREFIX}{{"pip_conflicts": [], "files": {{}}}}'.encode()],
    ),
    Target(
        "python-of-an-image",
        _text(inside.parse_python_probe),
        _lines(
            'x\nIMGKIT-PYTHON {"version": "3.11.2", "path": "/p", "machine": "x86_64", "site": "/s", "torch": "2", '
            '"entry_points": "", "built": false}'
        ),
    ),
    Target("recipe", _file(load, "r.yaml"), _recipes),
    Target("extended", _extended, _recipes),
    Target("toml", _text(problems.parse_toml), _tomls),
    Target(
        "lock-apt",
        lambda data, _: answers.read_debs(data.decode(errors="replace")),
        lambda: [(ROOT / "tests/contract/lock/apt_answer.txt").read_bytes()],
        also=(answers.Unresolved, ValueError),
    ),
    Target(
        "lock-pip",
        lambda data, _: answers.read_wheels(data, 0, {"a-1-py3-none-any.whl": "0" * 64}),
        _lines(
            '[{"name": "a", "version": "1", "url": "https://u:p@x/a-1-py3-none-any.whl#y", "sha256": "'
            + "0" * 64
            + '", "direct": true}, {"name": "a", "version": "1", "url": "file:/a", "sha256": "", "direct": false}]'
        ),
        mutate.in_json,
        also=(answers.Unresolved, ValueError),
    ),
    Target(
        "lock-failure",
        _failure,
        _lines(
            "0\nCollecting a\nERROR: No matching distribution found for a",
            "apt\nE: Unable to locate package x",
        ),
        also=(ValueError,),
    ),
    Target(
        "lock",
        _file(lock_file.read_lock, "r.lock"),
        lambda: [(ROOT / "tests/golden/recipes/locked.lock").read_bytes()],
    ),
    Target(
        "hub-lock",
        _file(hub.read_lock, "hf.lock"),
        lambda: [f"# Made by imgkit run.\nhf://a/b@main {'0f' * 20}\nhf://datasets/c {'1e' * 20}\n".encode()],
    ),
    Target(
        "metrics",
        lambda data, folder: measured.last_numbers(_put(folder, data, measured.METRICS).parent),
        _lines('{"step": 1, "loss": 2.5, "time": "x"}\n{"step": 2, "loss": 1e-3, "epoch": 0.5}\n'),
    ),
    Target(
        "bench-file",
        lambda data, folder: measured.read_bandwidths(_put(folder, data, measured.BENCH).parent),
        _lines(
            '{"verdict": {"busbw": [{"collective": "gather", "size_bytes": 8, "busbw_GBps": 0.5, "algbw_GBps": 1.0}]}}\n'
        ),
    ),
    Target(
        "imgkit-toml",
        _file(toml_file.read_file, "imgkit.toml"),
        lambda: [
            b'recipe = "mn5"\nnodes = 2\nbinds = [\n  "/a:/b",\n]\nenv = ["A=1", "B"]\ncommand = ["x"]\n'
        ],
    ),
    Target(
        "image-reference",
        _text(rules.parse_reference),
        _lines("nvcr.io/nvidia/pytorch:24.03-py3", "a.b:5/c@sha256:" + "0" * 64),
        also=(Unfit,),
    ),
    Target(
        "project",
        lambda data, folder: requirements.read_dependencies((_put(folder, data, "pyproject.toml")).parent),
        _lines('[project]\ndependencies = ["a>1", "b"]\n'),
        also=(ValueError,),
    ),
    Target(
        "ignore",
        _ignored,
        _lines("*.tmp\n!a\ndata/\n**/x[a-c]?\n", "# x\n/a\\ b\n"),
    ),
    Target(
        "node-list",
        _text(hostlist.expand_nodelist),
        _lines("a[1-3,5],b[08-11]c[1-2],d", "n[1-500]"),
    ),
    Target("counts", _text(hostlist.expand_counts), _lines("4(x2),3", "1"), mutate.in_text),
    Target(
        "host-file",
        _file(lambda path: ssh_hosts.parse_hosts(str(path))),
        _lines("a slots=2\nu@b # x\nfe80::1\n"),
    ),
    Target(
        "placement",
        _placement,
        lambda: [json.dumps(dict(re.findall(r"(\w+)=([^;]*)", env))).encode() for env in ENVIRONMENTS],
        mutate.in_json,
    ),
    Target(
        "result",
        _text(stop_protocol.parse_result_code),
        _lines("4711.0 85"),
    ),
    Target(
        "nccl-ras",
        _ras_report,
        _lines(
            "\nErrors\n======\n\n#0-0 (27a079b828ff1a75) INCOMPLETE\n  The missing rank: 21\n\nWarnings\n========\n\n"
            "#0-0 (27a079b828ff1a75) MISMATCH\n  2 ranks have launched up to operation 6649\n"
            "  Rank 0 -- GPU 0 managed by process 4831 on node 10.0.0.1\n"
            "  Rank 2 -- GPU 2 (NVML 6) managed by process 4833 on node 10.0.0.1\n"
        ),
        also=(ValueError,),
    ),
    Target(
        "remote-store",
        lambda data, _: store.parse_store(data, FAR),
        _store_answers,
        mutate.in_bytes,
    ),
    Target(
        "remote-files",
        lambda data, _: gc.parse_listing(data, "far"),
        _lines(
            "clock 1700000000\nfile 17.5 200 images/a.sif\nrun 5.1 mn5-7\njob 5.1 7\nnote jobs/7:slurm;two\n"
            "note jobs/7:mn5\nnote jobs/7:images/a.sif\nend\n"
        ),
    ),
    Target(
        "remote-check",
        _far_check,
        _lines(
            "clock 1700000000\nlogin me on far, x86_64\nsbatch slurm 23.02\nhome /x\ndisk /dev/a 100 40 60 40% /\n"
            "quota /x 120G 400G 500G -\nruntime singularity 3.11\nmodules a b\npython 1 3.11 /usr/bin/python3\n"
            "pymodule python/3.12\nmksquashfs 4.5\ninternet no\nend\n",
            "owner somebody\nclosed no\nlacks tar\nbroken x\npython 0 3.6 /x\nend\n",
        ),
    ),
    Target(
        "scheduler",
        _scheduler,
        _lines(
            "notice\n4711;two\n",
            "15422[].redoak\n    Exit_status = 271\n",
            "pytorchjob.kubeflow.org/x created\n",
            "JobId=7 JobState=COMPLETED",
        ),
    ),
    Target(
        "job-record",
        _file(records._read_record, "7.json"),
        _lines(
            '{"schema": 1, "id": "7", "system": "slurm", "name": "mn5", "recipe": "mn5", "directory": "/w", "cluster": "two",'
            ' "remote": "far", "answer": null, "command": ["x"], "code": {"sha256": "a", "git": "", "uncommitted": true,'
            ' "replace": false}, "queue": "", "submitted": "", "image_id": "", "state": "", "fetched": ""}'
        ),
        mutate.in_json,
        also=records._READ_ERRORS,
    ),
    Target("shared-object", _file(elf.read), _libraries, mutate.in_bytes, also=(elf.NotShared,)),
    Target(
        "machine",
        _tree,
        _lines(json.dumps(TREE), json.dumps(TREE | CXI)),
        mutate.in_json,
    ),
)


def _put(folder: Path, data: bytes, name: str = "input") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def _circle(_: bytes, __: Path) -> None:
    while True:
        len("")


WRONG = (
    Target("wrong-fault", lambda data, _: 1 // (len(data) - 1), list, mutate.in_bytes),
    Target("wrong-memory", lambda _, __: bytes(128 << 20), list, mutate.in_bytes),
    Target("wrong-circle", _circle, list, mutate.in_bytes),
)
"""Readers by which a test sees that faults are noticed."""


def by_name(name: str) -> Target:
    """The target `name`."""
    return next(target for target in (*TARGETS, *WRONG) if target.name == name)


def empty_folder(above: Path) -> Path:
    """Return an empty folder for one input, which the next call empties again."""
    folder = above / "one"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
