from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from imgkit_builder.recipe import bases
from imgkit_builder.recipe.load import load
from imgkit_entrypoints.errors import ImgkitError
from imgkit_recipes import recipe_names

Write = Callable[..., Path]
NGC = "nvcr.io/nvidia/pytorch"
CPUS = "imgkit supports only work on CPUs with it; for CPUs: imgkit run --gpus 0, or --device cpu"


def warned(file: Path) -> list[str]:
    return [f"{problem.key}: {problem.what}; {problem.hint}" for problem in load(file).warnings]


def test_every_cell_has_a_source():
    rows = bases.load_table()
    assert [row.tag for row in rows] == sorted(row.tag for row in rows)
    assert {"24.03", "26.09"} <= {row.tag for row in rows}
    for row in rows:
        cells = [cell for _, cell in row.list_columns() if cell is not None]
        assert cells
        assert all(cell.value and len(cell.source) > 10 for cell in cells)
    assert [row.nccl for row in rows if row.tag == "24.03"] == [None]


def test_driver_follows_from_cuda():
    cells = {row.tag: dict(row.list_columns())["driver"] for row in bases.load_table()}
    assert cells["22.06"] is None, "its CUDA is not known"
    assert [getattr(cells[tag], "value", "") for tag in ("25.06", "25.08")] == ["525", "580"]


def test_list_prints_unknown_cells(call):
    _, out, _ = call("list", "--bases")
    assert out.split()[:5] == ["TAG", "PYTHON", "TORCH", "CUDA", "DRIVER"]
    assert re.search(r"^26\.06 .* unknown .* none +NCCL_NET_PLUGIN=spcx$", out, re.MULTILINE)


def test_list_as_json_has_sources(call):
    rows = {row["tag"]: row for row in json.loads(call("list", "--bases", "--json")[1])["bases"]}
    row = rows["25.10"]
    assert row["reference"] == f"{NGC}:25.10-py3"
    assert (row["driver"]["value"], row["nccl"]["value"]) == ("580", "2.27.7")
    assert "history" in row["nccl"]["source"]
    assert row["variables"] is None


@pytest.mark.parametrize(
    "damage",
    [
        '[bases."24.03"]\nnccl = ["2.20", "nowhere"]\n',
        '[bases."24.03"]\nnccl = ["2.20"]\n',
        "[bases]\nx = 1\n",
    ],
)
def test_cell_without_source_is_refused(damage, tmp_path, monkeypatch):
    file = tmp_path / "bases.toml"
    file.write_text('[sources]\nnotes = "release notes"\n' + damage)
    monkeypatch.setattr(bases, "TABLE", file)
    with pytest.raises(ImgkitError) as caught:
        bases.load_table.__wrapped__()
    assert caught.value.where == str(file)


WARNED = {
    "driver": (
        'image: {base: "NGC:26.02-py3"}\nsystem: {node: {driver: "550.54.15"}}',
        "image.base: CUDA 13.* needs driver 580 or newer, and system.node.driver is 550.54.15; "
        "choose NGC:25.06-py3 or an older one",
    ),
    "driver one branch below": (
        'image: {base: "NGC:25.08-py3"}\nsystem: {node: {driver: "579"}}',
        "image.base: CUDA 13.* needs driver 580 or newer, and system.node.driver is 579; "
        "choose NGC:25.06-py3 or an older one",
    ),
    "driver and the current base": (
        'image: {base: "a:1", current_base: "NGC:26.08-py3"}\nsystem: {node: {driver: "535.129.03"}}',
        "image.current_base: CUDA 13.* needs driver 580 or newer, and system.node.driver is 535.129.03; "
        "choose NGC:25.06-py3 or an older one",
    ),
    "driver of a workstation": (
        'image: {base: "NGC:26.02-py3"}\nsystem: {node: {driver: "550", gpu_model: NVIDIA RTX A6000}}',
        "image.base: .* needs driver 580 or newer, and system.node.driver is 550",
    ),
    "driver without forward compatibility": (
        'image: {base: "NGC:26.02-py3"}\n'
        'system: {node: {driver: "550", gpu_model: NVIDIA H100}, runtime: {cuda_compat: none}}',
        "image.base: .* needs driver 580 or newer, and system.node.driver is 550",
    ),
    "python": (
        'image: {base: "python:3.9-slim"}',
        "image.base: .* has Python 3.9: imgkit's entry points need 3.10 or newer",
    ),
    "python of Docker Hub": (
        'image: {base: "docker.io/library/python:3.8"}',
        "image.base: .* has Python 3.8: imgkit's entry points need 3.10 or newer",
    ),
    "python of a mirror": (
        'image: {base: "mirror.example.org/x/nvidia/pytorch:22.06-py3"}',
        "image.base: .* has Python 3.8: imgkit's entry points need 3.10 or newer",
    ),
    "plug-in": (
        'image: {base: "NGC:26.06-py3"}\nsystem: {fabric: {kind: slingshot}}',
        "image.base: .* has no aws-ofi-nccl: on Slingshot NCCL would use TCP",
    ),
    "AMD's name": ('image: {base: "rocm/pytorch:latest"}', f"image.base: .*{CPUS}"),
    "AMD's registry": ('image: {base: "docker.io/rocm/dev-ubuntu-22.04:6.4"}', f"image.base: .*{CPUS}"),
    "AMD's tag": (
        'image: {base: "a:1", current_base: "example.org/x/pytorch:2.6-rocm6.4"}',
        f"image.current_base: .*{CPUS}",
    ),
    "AMD's GPU": (
        'image: {base: "a:1"}\nsystem: {node: {gpus: 8, gpu_model: AMD Instinct MI250X}}',
        f"system.node: .*{CPUS}",
    ),
    "AMD's APU": (
        'image: {base: "a:1"}\nsystem: {node: {gpus: 4, gpu_model: MI300A}}',
        f"system.node: .*{CPUS}",
    ),
    "AMD's option": (
        'image: {base: "a:1"}\nsystem: {runtime: {options: [--rocm]}}',
        f"system.node: .*{CPUS}",
    ),
}
"""A recipe with a doubt, and its one warning as a pattern."""


@pytest.mark.parametrize("doubt", WARNED)
def test_base_that_may_not_run_is_a_warning(write, doubt):
    text, pattern = WARNED[doubt]
    (warning,) = warned(write(text.replace("NGC", NGC)))
    assert re.match(pattern.replace("NGC", NGC), warning)


@pytest.mark.parametrize(
    "text",
    [
        'image: {base: "NGC:26.02-py3"}\nsystem: {node: {driver: "580.95.05"}}',
        'image: {base: "NGC:26.02-py3"}',
        'image: {base: "NGC:26.12-py3"}\nsystem: {node: {driver: "470"}}',
        'image: {base: "NGC:26.02-py3"}\nsystem: {node: {driver: "550", gpu_model: NVIDIA H100}}',
        'image: {base: "NGC:22.06-py3.10"}',
        'image: {base: "other/pytorch:26.02-py3"}\nsystem: {node: {driver: "470"}}',
        'image: {base: "python:3.10-slim"}',
        'image: {base: "example.org/python:3.9"}',
        'image: {base: "python:3"}',
        'image: {base: "NGC:26.06-py3"}\nsystem: {fabric: {kind: infiniband}}',
        'image: {base: "NGC:26.02-py3"}\nsystem: {fabric: {kind: slingshot}}',
        'image: {base: "NGC:26.05-py3"}\nsystem: {fabric: {kind: slingshot}}',
        'image: {base: "NGC:26.06-py3"}\n'
        "system: {fabric: {kind: slingshot}, runtime: {host_libs: [/opt/cray/lib64]}}",
        'image: {base: "NGC:26.06-py3"}\nsystem: {fabric: {kind: slingshot, host_libs: auto}}',
        'image: {base: "NGC:26.06-py3", run: [/opt/build-aws-ofi-nccl.sh]}\n'
        "system: {fabric: {kind: slingshot}}",
        'image: {base: "macrocmd/pytorch:1"}',
        'image: {base: "a:1"}\nsystem: {node: {gpus: 8, gpu_model: NVIDIA RTX A6000}}',
        'image: {base: "a:1"}\nsystem: {env: {HSA_FORCE_FINE_GRAIN_PCIE: "1"}}',
    ],
)
def test_unknown_or_fitting_base_is_silent(write, text):
    assert warned(write(text.replace("NGC", NGC))) == []


GRACE = """
system:
  node: {{gpus: 4, gpu_model: NVIDIA GH200}}
  env: {{{env}}}
  known_issues: [{rows}]
"""


@pytest.mark.parametrize(
    ("base", "env", "rows", "ids"),
    [
        ("26.02", "", "", ["nccl-arm-hang"]),
        ("26.03", "", "", []),
        ("26.05", "", "", []),  # its NCCL is unknown
        ("26.03", "NCCL_DEBUG: TRACE", "", ["debugging-left-on"]),
        ("26.03", "NCCL_IB_DISABLE: '1', NCCL_IB_HCA: mlx5", "", []),  # who requests it shows on a node
        ("26.03", "", "{id: x, message: a fault, when: [nccl >= 2.29.7, arch == aarch64]}", ["x"]),
        ("26.03", "", "{id: x, message: a fault, when: [nccl >= 2.29.8]}", []),
        ("26.02", "", "{id: nccl-arm-hang, message: not here, effect: ignore}", []),
    ],
)
def test_known_issues_of_a_base_are_warnings(write, base, env, rows, ids):
    image = f'image: {{base: "{NGC}:{base}-py3", current_base: "{NGC}:{base}-py3"}}\n'
    warnings = warned(write(image + GRACE.format(env=env, rows=rows)))
    assert [re.findall(r"known issue ([a-z-]+)", text)[0] for text in warnings] == ids
    assert all(text.startswith("image.base: ") for text in warnings)


def test_recipe_without_a_current_base_has_no_unknown_values_of_one(write):
    rows = "{id: x, message: a fault, when: [nccl is unknown]}"
    assert warned(write(f'image: {{base: "{NGC}:25.10-py3"}}\nsystem: {{known_issues: [{rows}]}}')) == []


UNKNOWN_NCCL = """
system:
  known_issues:
    - {id: unknown, message: no source states its NCCL, when: [arch == aarch64, gpus >= 1, nccl is unknown]}
"""


@pytest.mark.parametrize("name", recipe_names())
def test_no_shipped_base_has_a_known_issue(write, name):
    """On Arm, an NCCL that is not known could be one that hangs (nccl-arm-hang)."""
    assert warned(write(f"extends: {name}{UNKNOWN_NCCL}")) == []


def test_every_shipped_recipe_names_a_current_base():
    for name in recipe_names():
        image = load(name).image
        assert image.current_base
        assert image.current_base != image.base


def test_current_base_is_the_base_if_asked_for(call):
    recipe = load("mn5")
    assert bases.select_base("current", recipe) == recipe.image.current_base
    assert bases.select_base(None, recipe) is None
    assert f"\nFROM {recipe.image.current_base}\n" in call("render", "mn5", "--base", "current")[1]
    assert f"\nFROM {recipe.image.base}\n" in call("render", "mn5")[1]


def test_current_base_changes_no_digest(write):
    plain = load(write("image: {base: 'a:1'}\n")).sha256
    assert load(write("image: {base: 'a:1', current_base: 'a:2'}\n")).sha256 == plain


def test_variables_of_the_base_tell_amd():
    reason = bases.amd_image_evidence("mine:1", ("PATH", "ROCM_PATH"))
    assert reason == "mine:1, which sets ROCM_PATH, is an image for AMD GPUs"
    assert bases.amd_image_evidence("mine:1", ("HIP_VISIBLE_DEVICES",))
    assert bases.amd_image_evidence("mine:1", ("PATH", "CHIP_X", "NCCL_VERSION")) == ""
