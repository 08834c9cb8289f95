"""Files that dist-doctor --bundle saves, and secrets that it leaves out."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from imgkit_entrypoints.doctor import bundle
from imgkit_entrypoints.doctor import node as doctor
from imgkit_entrypoints.errors import UsageError


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
    assert "export NCCL_IB_PKEY=0x8001" in texts[bundle.ENVIRONMENT]
    assert "HOME" not in texts[bundle.ENVIRONMENT]
    assert "left out as secrets: PBS_JOBCOOKIE, SLURM_JWT" in capsys.readouterr().out


def test_saved_environment_is_read_by_a_shell(node: Path, tmp_path: Path) -> None:
    bundle.save(tmp_path / "node.tar.gz", environment(node))
    subprocess.run(["tar", "-xzf", "node.tar.gz", bundle.ENVIRONMENT], cwd=tmp_path, check=True)
    said = subprocess.run(
        ["sh", "-c", f'. ./{bundle.ENVIRONMENT}; echo "$NCCL_SOCKET_IFNAME"'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "it's eth0\n"


def test_folder_that_is_not_there_is_refused(node: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write the bundle") as caught:
        bundle.save(tmp_path / "no/node.tar.gz", environment(node))
    assert caught.value.where == str(tmp_path / "no/node.tar.gz")


def test_failed_write_leaves_nothing(node: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError):
        bundle.save(tmp_path / "taken", environment(node))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root", "taken"]
