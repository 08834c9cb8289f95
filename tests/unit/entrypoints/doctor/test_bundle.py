"""Files that dist-doctor --bundle saves, and secrets that it leaves out."""

from __future__ import annotations

import ast
import gzip
import json
import re
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

import imgkit_entrypoints
from imgkit_entrypoints import facts
from imgkit_entrypoints.cli import main
from imgkit_entrypoints.doctor import bundle, saved_environment
from imgkit_entrypoints.doctor import node as doctor
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.facts import Reader

PACKAGE = Path(imgkit_entrypoints.__file__).parent


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Root of a node with one InfiniBand port, a link in its sysfs, and an image with secrets."""
    root = tmp_path / "root"
    device = root / "sys/devices/pci0000:16/0000:17:00.0/infiniband/mlx5_0"
    port = device / "ports/1"
    port.mkdir(parents=True)
    for name, text in (("state", "4: ACTIVE"), ("link_layer", "InfiniBand"), ("rate", "200 Gb/sec (2X NDR)")):
        (port / name).write_text(text + "\n")
    (port / "gids").mkdir()
    (root / "sys/class/infiniband").mkdir(parents=True)
    (root / "sys/class/infiniband/mlx5_0").symlink_to(
        "../../devices/pci0000:16/0000:17:00.0/infiniband/mlx5_0"
    )
    (root / "sys/class/iommu/dmar0").mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/limits").write_text("Max locked memory         65536  65536  bytes\n")
    (root / "proc/self/status").write_text("Cpus_allowed_list:\t0-7\n")
    (root / "opt/imgkit").mkdir(parents=True)
    (root / "opt/imgkit/system.json").write_text(
        json.dumps({"schema": 1, "title": "here", "env": {"NCCL_DEBUG": "WARN", "HF_TOKEN": "hunter2"}})
    )
    (root / "opt/imgkit/manifest.json").write_text(
        json.dumps({"platform": "linux/amd64", "base": {"env": {"PIP_PASSWORD": "hunter2"}}})
    )
    libraries = root / "usr/lib/x86_64-linux-gnu"
    libraries.mkdir(parents=True)
    (libraries / "libc.so.6").write_bytes(b"\x7fELF\0GLIBC_2.36\0")
    (libraries / "libibverbs.so.1.14").write_bytes(b"\x7fELF\0GLIBC_2.39\0hunter2")
    (libraries / "libibverbs.so.1").symlink_to("libibverbs.so.1.14")
    (root / "facts.json").write_text('{"arch": "x86_64"}')
    (root / "etc").mkdir()
    (root / "etc/shadow").write_text("root:hunter2")
    return root


def environment(node: Path) -> dict[str, str]:
    return {
        "IMGKIT_ROOT": str(node),
        "NCCL_IB_PKEY": "0x8001",
        "NCCL_SOCKET_IFNAME": "it's eth0",
        "WANDB_API_KEY": "hunter2",
        "SLURM_JWT": "hunter2",
        "PBS_JOBCOOKIE": "hunter2",
        "HOME": "/root",
    }


def test_bundle_gives_the_same_verdicts(
    node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = environment(node)
    assert doctor.main(["--json"], env) == 1
    expected = json.loads(capsys.readouterr().out)
    assert any("needs GLIBC_2.39" in check["evidence"] for check in expected["checks"])
    assert doctor.main(["--bundle", str(tmp_path / "node.tar.gz")], env) == 0
    copy = tmp_path / "copy"
    copy.mkdir()
    subprocess.run(["tar", "-xzf", str(tmp_path / "node.tar.gz"), "-C", str(copy)], check=True)
    capsys.readouterr()
    assert doctor.main(["--json"], {**env, "IMGKIT_ROOT": str(copy)}) == 1
    assert json.loads(capsys.readouterr().out) == expected
    assert (copy / "sys/class/infiniband/mlx5_0").is_symlink()


def test_secrets_are_left_out(node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "node.tar.gz"
    doctor.main(["--bundle", str(target)], environment(node))
    with tarfile.open(target) as archive:
        names = archive.getnames()
        texts = {
            member.name: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive
            if member.isfile()
        }
    assert not any("hunter2" in text for text in texts.values())
    assert "etc/shadow" not in names
    assert "NCCL_IB_PKEY=0x8001\n" in texts["environment"]
    assert "HOME" not in texts["environment"]
    assert "list of harmless variables: PBS_JOBCOOKIE, SLURM_JWT" in capsys.readouterr().out


UNLISTED = """
WANDB_API_KEY HF_TOKEN AWS_SECRET_ACCESS_KEY SLURM_JWT SLURM_SPANK_VAULT SLURM_PW SLURM_SITE_PIN PBS_JOBCOOKIE
PBS_PIN PMI_PW PMIX_SECURITY_BLOB PMIX_SERVER_URI PALS_NONCE OMPI_MCA_pin OMPI_PIN PRTE_PIN MPI_PIN NCCL_PIN
NCCL_OFI_PIN NCCL_MY_LOGIN TORCH_HUB_LOGIN TORCHELASTIC_PIN GLOO_PIN FI_PIN FI_EFA_PIN CUDA_PIN NVIDIA_PIN
OMP_PIN IMGKIT_PIN IMGKIT_SECRET_FILE PET_PIN RUNAI_LOGIN UCX_PIN MASTER_PIN LOCAL_PIN GH_PAT
"""
CANARIES = {
    **dict.fromkeys(UNLISTED.split(), "hunter2"),
    "https_proxy": "http://ana:hunter2@proxy:3128",
    "NCCL_NET_PLUGIN": "http://ana:hunter2@proxy/plugin",
    "NCCL_TOPO_FILE": "/t.xml?token=hunter2",
    "TORCH_LOGS_OUT": "https://hunter2hunter2hunter2@example.org/log",
}
"""Secrets in names that nobody listed, and in values of names that are on the list."""


def test_no_canary_gets_into_a_bundle(node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(CANARIES) > 30
    system = {"schema": 1, "title": "https://ana:hunter2@here/", "env": {**CANARIES, "NCCL_DEBUG": "WARN"}}
    (node / "opt/imgkit/system.json").write_text(json.dumps(system))
    (node / "etc/nccl.conf").write_text("NCCL_SOCKET_IFNAME=eth0\nMY_PASSWORD=hunter2\n")
    target = tmp_path / "node.tar.gz"
    env = {**environment(node), **CANARIES}
    assert doctor.main(["--bundle", str(target)], env) == 0
    with gzip.open(target) as archive:
        saved = archive.read()
    assert b"hunter2" not in saved
    assert b"NCCL_NET_PLUGIN=http://***********@proxy/plugin\n" in saved
    assert b"eth0" in saved
    said = capsys.readouterr().out
    assert "NCCL_OFI_PIN" in said
    assert "hunter2" not in said


def test_only_its_owner_reads_a_bundle(node: Path, tmp_path: Path) -> None:
    target = tmp_path / "node.tar.gz"
    target.touch(mode=0o644)
    bundle.save(target, environment(node))
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


VARIABLE = re.compile(r"(SLURM|PBS|PMI|PALS|OMPI|MPI|PET|IMGKIT)_[A-Z_]+")


def test_bundle_holds_what_the_launch_reads() -> None:
    """A variable that a launcher reads, and a bundle lacks, would give a replay another place."""
    read: set[str] = set()
    for room in ("schedulers", "fabric"):
        for path in (PACKAGE / room).glob("*.py"):
            tree = ast.parse(path.read_text())
            texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            names = {text for text in texts if isinstance(text, str)}
            read |= {
                name
                for name in names
                if re.fullmatch(r"(SLURM|PBS|PMI|PALS|OMPI|MPI|PET|IMGKIT)_[A-Z_]+", name)
            }
    assert len(read) > 40
    assert read - saved_environment.ALLOWED == set()


def unpacked(node: Path, tmp_path: Path) -> Path:
    bundle.save(tmp_path / "node.tar.gz", environment(node))
    copy = tmp_path / "copy"
    copy.mkdir()
    subprocess.run(["tar", "-xzf", str(tmp_path / "node.tar.gz"), "-C", str(copy)], check=True)
    return copy


def test_replay_takes_its_variables_from_the_bundle(node: Path, tmp_path: Path) -> None:
    copy = unpacked(node, tmp_path)
    mine = {"HOME": "/home/me", "NCCL_IB_HCA": "mine", "IMGKIT_NODE_RANK": "3", "IMGKIT_ROOT": str(copy)}
    assert saved_environment.replayed(mine) == {
        "HOME": "/home/me",
        "IMGKIT_NODE_RANK": "3",
        "IMGKIT_ROOT": str(copy),
        "NCCL_IB_PKEY": "0x8001",
        "NCCL_SOCKET_IFNAME": "it's eth0",
    }


def test_replay_knows_the_images_variables(node: Path, tmp_path: Path) -> None:
    manifest = node / "opt/imgkit/manifest.json"
    variables = {"PIP_PASSWORD": "hunter2", "NCCL_NET_PLUGIN": "spcx"}
    manifest.write_text(json.dumps({"platform": "linux/amd64", "base": {"env": variables}}))
    found = facts.gather(unpacked(node, tmp_path), {})
    assert found.image_env == {"PATH": "", "NCCL_NET_PLUGIN": "spcx"}


def test_replay_runs_nothing_of_its_sender(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = unpacked(node, tmp_path)
    touch = f"touch {tmp_path}/canary"
    (copy / "environment").write_text(
        f"{touch}\n$({touch})\nexport NCCL_DEBUG=$({touch})\nNCCL_NET=`{touch}`\n"
        "PATH=/evil\nLD_PRELOAD=/evil.so\nPYTHONPATH=/evil\nIMGKIT_ROOT=/\n"
        "NCCL_IB_PKEY=0x8001\n"
    )
    found = saved_environment.replayed({"IMGKIT_ROOT": str(copy), "PATH": "/bin"})
    assert (found["PATH"], found["NCCL_IB_PKEY"]) == ("/bin", "0x8001")
    assert not {"LD_PRELOAD", "PYTHONPATH", "NCCL_DEBUG"} & found.keys()
    monkeypatch.setenv("IMGKIT_ROOT", str(copy))
    monkeypatch.setenv("IMGKIT_NNODES", "2")
    monkeypatch.setenv("IMGKIT_NODE_RANK", "0")
    monkeypatch.setenv("IMGKIT_HEAD", "here")
    for words in (["dist-env"], ["dist-doctor"], ["dist-run", "x.py"], ["dist-run", "--dry-run", "x.py"]):
        with pytest.raises(SystemExit):
            main.main(words)
    assert "a replay cannot start a run" in capsys.readouterr().err
    assert not (tmp_path / "canary").exists()


def test_links_out_of_a_bundle_show_nothing(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("hunter2")
    (tmp_path / "node/proc").mkdir(parents=True)
    (tmp_path / "node/proc/hostname").symlink_to("../../own")
    (tmp_path / "node/proc/absolute").symlink_to(tmp_path / "own")
    reader = Reader(root=tmp_path / "node")
    assert reader.text("/proc/hostname") is None
    assert reader.text("/proc/absolute") is None


def test_folder_that_is_not_there_is_refused(node: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write the bundle") as caught:
        bundle.save(tmp_path / "no/node.tar.gz", environment(node))
    assert caught.value.where == str(tmp_path / "no/node.tar.gz")


def test_failed_write_leaves_nothing(node: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError):
        bundle.save(tmp_path / "taken", environment(node))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root", "taken"]
