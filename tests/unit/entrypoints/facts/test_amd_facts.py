"""AMD GPUs and AMD images, as fake trees: no machine of the tests has them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from file_tree import write_files

from imgkit_entrypoints import facts
from imgkit_entrypoints.cli.commands import TORCHRUN
from imgkit_entrypoints.errors import EXIT_NO_PLAN, NoPlan
from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.launch import plan
from imgkit_entrypoints.launch.plan import Request
from imgkit_entrypoints.schedulers.placement import Placement
from imgkit_entrypoints.system import Node, SystemFacts

SITE = next(folder for folder in sys.path if folder.startswith("/"))


def gather_facts(root: Path, files: dict[str, str]) -> HostFacts:
    """Return the facts of a fake machine with these files."""
    return facts.gather(write_files(root, files), {})


AMD_NODE = {"dev/kfd": ""}


def fake_torch(hip: str) -> dict[str, str]:
    text = f"__version__ = '2.6.0+rocm6.4'\ncuda: Optional[str] = None\nhip: Optional[str] = {hip}\n"
    return {f"{SITE}/torch/version.py": text}


def fake_pci(kind: str, vendor: str) -> dict[str, str]:
    folder = "sys/bus/pci/devices/0000:03:00.0"
    return {f"{folder}/class": f"{kind}\n", f"{folder}/vendor": f"{vendor}\n"}


def start(host: HostFacts, device: str = "auto", system: SystemFacts | None = None) -> plan.LaunchPlan:
    placement = Placement(nnodes=1, node_rank=0, scheduler="standalone")
    return plan.decide_launch(
        Request(device=device),
        ("w",),
        torchrun=TORCHRUN,
        placement=placement,
        host=host,
        system=system,
        env={},
    )


@pytest.mark.parametrize(
    ("files", "evidence"),
    [
        (AMD_NODE, "/dev/kfd"),
        ({**AMD_NODE, **fake_pci("0x038000", "0x1002")}, "/dev/kfd; /sys/bus/pci/devices: 1 of AMD"),
        (fake_pci("0x120000", "0x1002"), "/sys/bus/pci/devices: 1 of AMD"),
        (fake_pci("0x030000", "0x1002"), ""),  # a card that drives a display
        ({"dev/dri/card0": ""}, ""),
        ({**AMD_NODE, "dev/nvidia0": ""}, ""),
        ({**AMD_NODE, **fake_pci("0x030200", "0x10de")}, ""),
    ],
)
def test_amd_gpus_count_if_they_can_compute(tmp_path, files, evidence):
    assert gather_facts(tmp_path, files).amd_gpus == evidence


@pytest.mark.parametrize(
    ("files", "evidence"),
    [
        (fake_torch("'6.4.43482'"), f"{SITE}/torch/version.py: hip = 6.4.43482"),
        (fake_torch("None"), ""),
        ({**fake_torch("None"), "opt/rocm/.info/version": "6.4"}, ""),  # the node's ROCm, another torch
        ({"opt/rocm/.info/version": "6.4"}, "/opt/rocm/.info/version"),
        ({"opt/rocm/bin/rocminfo": ""}, "/opt/rocm"),
        ({}, ""),
    ],
)
def test_image_for_amd_is_told_by_its_torch(tmp_path, files, evidence):
    assert gather_facts(tmp_path, files).rocm == evidence


@pytest.mark.parametrize("system", [None, SystemFacts(), SystemFacts(node=Node(gpus=8))])
@pytest.mark.parametrize(
    ("files", "cause", "where"),
    [
        (AMD_NODE, "this node has AMD GPUs", "/dev/kfd"),
        (fake_torch("'6.4'"), "the image is made for AMD GPUs", "hip = 6.4"),
        ({**fake_torch("'6.4'"), "dev/nvidia0": ""}, "the image is made for AMD GPUs", "hip = 6.4"),
    ],
)
def test_start_on_amd_is_refused(tmp_path, files, cause, where, system):
    host = gather_facts(tmp_path, files)
    for device in ("auto", "cuda"):
        with pytest.raises(NoPlan) as caught:
            start(host, device, system)
        assert caught.value.what == f"{cause}, and imgkit supports only work on CPUs with them"
        assert where in str(caught.value.where)
        assert "to run on CPUs: --device cpu (imgkit run --gpus 0)" in str(caught.value.hint)
        assert caught.value.exit_code == EXIT_NO_PLAN


@pytest.mark.parametrize("files", [AMD_NODE, fake_torch("'6.4'")])
def test_device_cpu_starts_on_amd(tmp_path, files):
    launch_plan = start(gather_facts(tmp_path, files), "cpu", SystemFacts(node=Node(gpus=8)))
    assert launch_plan.env["IMGKIT_DEVICE"] == "cpu"
