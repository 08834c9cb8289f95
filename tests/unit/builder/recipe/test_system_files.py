"""Systems as files of their own: those of imgkit, a user's and a site's; refusals are in cli/refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from imgkit_builder.recipe import system_files
from imgkit_builder.recipe.load import load, load_system
from imgkit_entrypoints.errors import UsageError
from imgkit_recipes import SYSTEMS

Write = Callable[..., Path]
GOLDEN = Path(__file__).parents[3] / "golden"
IMAGE = "image: {base: 'python:3.12-slim'}\n"
HERE = "title: ours\nscheduler: slurm\nruntime: {command: sing, modules: [ours], binds: [/data]}\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site's folder that only its owner can write, with the system ``ours``."""
    folder = tmp_path / "site"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv(system_files.VARIABLE, str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (folder / "ours.yaml").write_text(HERE)
    (folder / "ours.yaml").chmod(0o644)
    return folder


# ---- two lines


def test_own_image_with_a_shipped_system(write):
    recipe = load(write(f"{IMAGE}system: mn5\n"))
    assert recipe.image.base == "python:3.12-slim"
    assert recipe.system == load("mn5").system
    assert recipe.where("system", "node", "gpus").startswith("systems/mn5.yaml:")


def test_shipped_image_with_another_system(write):
    recipe = load(write("extends: mn5\nsystem: olivia\n"))
    assert recipe.image == load("mn5").image
    assert recipe.system == load("olivia").system  # nothing of mn5's is left


def test_own_system_from_a_file_beside_the_recipe(write):
    write(HERE, "ours.yaml")
    assert load(write(f"{IMAGE}system: ./ours.yaml\n")).system.title == "ours"


def test_few_values_over_a_named_system(write):
    file = write(
        f"{IMAGE}system:\n  extends: mn5\n  queue: {{account: bsc98}}\n  runtime: {{binds: [/data]}}\n"
    )
    recipe = load(file)
    assert recipe.system.queue.account == "bsc98"
    assert recipe.system.queue.required == load("mn5").system.queue.required
    assert recipe.system.runtime.modules == ("singularity",)
    assert recipe.where("system", "queue", "account") == "mine.yaml:4"


def test_system_keys_still_merge_into_those_of_the_parent(write):
    recipe = load(write("extends: mn5\nsystem:\n  queue: {account: bsc98}\n"))
    assert (recipe.system.title, recipe.system.queue.account) == ("MareNostrum 5 ACC", "bsc98")


def test_system_without_a_known_driver_needs_a_recipe(write):
    """The refusal has the lines of a recipe, and they are one."""
    with pytest.raises(UsageError, match="leonardo is a system without a recipe") as caught:
        load("leonardo")
    lines = re.findall("`([^`]+)`", str(caught.value))
    assert lines[1] == "system: leonardo"
    assert load(write("\n".join(lines) + "\n", "leonardo.yaml")).system.title == "Leonardo Booster"


@pytest.mark.parametrize(
    ("node", "base", "platform"),
    [
        ("driver: 535.129.03", "25.06", "linux/amd64"),
        ("driver: 580.65.06, gpu_model: NVIDIA GH200 120GB", "26.09", "linux/arm64"),
        ("driver: 580.65.06, gpu_model: NVIDIA V100 32GB", "25.06", "linux/amd64"),
    ],
)
def test_system_without_a_recipe_gets_the_newest_base_of_its_nodes(site, write, node, base, platform):
    (site / "ours.yaml").write_text(f"{HERE}node: {{{node}}}\n")
    recipe = load("ours")
    assert (recipe.name, recipe.system.title) == ("ours", "ours")
    assert recipe.image.base == f"nvcr.io/nvidia/pytorch:{base}-py3"
    assert recipe.image.platforms == (platform,)
    (warning,) = recipe.warnings
    assert f"the base is {recipe.image.base}, the newest that its nodes run" in str(warning)
    extended = load(write("extends: ours\nimage: {apt: [git]}\n"))
    assert (extended.image.base, extended.image.apt) == (recipe.image.base, ("git",))


def test_files_of_the_page_are_what_it_says(write):
    page = (GOLDEN.parents[1] / "docs/guides/own-cluster.md").read_text()
    blocks = re.findall(r"^```yaml\n# (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    files = {name: write(text, name) for name, text in blocks}
    assert list(files) == ["mine.yaml", "there.yaml", "ours.yaml", "here.yaml"]
    assert load(files["mine.yaml"]).system == load("mn5").system
    assert load(files["there.yaml"]).system.title == "Leonardo Booster"
    assert load(files["ours.yaml"]).system.queue.account == "EUHPC_1"
    assert load(write(f"{IMAGE}system: ./here.yaml\n", "two.yaml")).system.title == "our cluster"


# ---- the shipped ones


@pytest.mark.parametrize("name", [path.stem for path in sorted(SYSTEMS.glob("*.yaml"))])
def test_each_value_of_a_shipped_system_has_its_source(name):
    lines = (SYSTEMS / f"{name}.yaml").read_text().partition("\nproof:\n")[0].splitlines()
    head = "\n".join(line for line in lines if line.startswith("#"))
    assert name == "cpu" or re.search(r"read 20\d\d-\d\d-\d\d", head), "when was each source read?"
    above = -1  # indentation of a comment that stands for the lines below it
    for line in lines if name != "cpu" else ():
        depth = len(line) - len(line.lstrip())
        if not line.strip() or line.startswith("#"):
            above = -1
        elif line.lstrip().startswith("#"):
            above = depth
        elif above < 0 or depth < above:
            above = -1
            is_value = not re.fullmatch(r"\s*[\w-]+:", line) and not line.startswith("extends:")
            assert not is_value or " # " in line, f"{name}.yaml: {line}"


@pytest.mark.parametrize("name", [path.stem for path in sorted(SYSTEMS.glob("*.yaml"))])
def test_proof_of_a_shipped_system_is_what_is_there(name):
    proof = load_system(name).proof
    assert proof.documented
    assert bool(proof.rendered) == bool(list((GOLDEN / "jobs").glob(f"{name}*.txt")))
    assert not (proof.run and "nobody of imgkit has used" in proof.documented)


# ---- a site's


def test_systems_of_a_site_have_names_too(site, write):
    assert list(system_files.find_systems())[-1] == "ours"
    assert load(write(f"{IMAGE}system: ours\n")).system.title == "ours"
    (site / "more.yaml").write_text("extends: ours\ntitle: more\n")
    (site / "more.yaml").chmod(0o644)
    assert load(write(f"{IMAGE}system: more\n")).system.runtime.modules == ("ours",)


def test_list_says_how_each_system_was_tested(site, call):
    _, out, _ = call("list", "--systems")
    for row in (
        r"cpu +standalone +ran there ",
        r"mn5 +slurm +simulated ",
        r"juwels-booster +slurm +simulated ",
        r"leonardo +slurm +script only ",
        rf"ours +slurm +- .*ours \({site}/ours\.yaml\)",
    ):
        assert re.search(f"^{row}", out, re.MULTILINE)
    (site / "ours.yaml").write_text(HERE + "proof: {run: Ada with 4 nodes on 2026-11-20}\n")
    _, out, _ = call("list", "--systems", "--json")
    (ours,) = (system for system in json.loads(out)["systems"] if system["site"])
    ran = "Ada with 4 nodes on 2026-11-20"
    assert ours["proof"] == {"run": ran, "simulated": "", "rendered": "", "documented": ""}
